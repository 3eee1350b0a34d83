"""Draw the pictures of results: `python -m benchmarks.plots --judged JSON --name NAME`.

* From a judged JSON (`benchmarks.judge`): totals and latencies, simulated against measured.
* From the same file, from `runs.json` (`benchmarks.validate`) and from results of
  `benchmarks.engine`: tokens over time, the cache over time, decode steps against their floor. When
  a run is in several files, the last file counts.

Plotly draws in a headless Chromium, through Playwright as in the browser tests.
"""

import argparse
import base64
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import plotly.graph_objects as go
from playwright.sync_api import sync_playwright
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from benchmarks.run_figures import plain
from zlab.sim.fidelity import GOALS, LATENCIES

MEASURED, PROFILE, ROOFLINE = "#555555", "#0072b2", "#e69f00"
FONT = {"family": "DejaVu Sans, Verdana, Arial, sans-serif", "size": 13}
TOTALS = {"makespan_s": "makespan, s", "tokens_per_s": "output tokens/s"}
NAMES = {"ttft_s": "time to first token", "tpot_s": "time per output token", "e2e_s": "end to end"}
MARKS = {
    "mean": ("circle-open", "#0072b2"),
    "p50": ("diamond-open", "#009e73"),
    "p99": ("square-open", "#d55e00"),
}
BANDS = ((GOALS["ttft_s p99"], "#f0f0f0", "p99"), (GOALS["ttft_s mean"], "#d9e8f2", "mean and p50"))
FURTHEST = 40.0  # per cent; a larger error is drawn at the edge with its number
ROW_PX, AROUND_PX = 54, 190
Runs = Sequence[Mapping[str, Any]]


def style(figure: go.Figure, title: str, below: str, height: int, width: int = 1200) -> go.Figure:
    """Give a picture the common look, with its source below the title, and return it.

    Args:
        figure: the picture.
        title: one line.
        below: what the picture was measured on.
        height: pixels.
        width: pixels.
    """
    figure.update_layout(
        template="plotly_white",
        title={
            "text": f"<b>{title}</b><br><span style='font-size:13px'>{below}</span>",
            "x": 0.01,
            "yref": "container",
            "y": 1.0,
            "yanchor": "top",
            "pad": {"t": 30},
        },
        font=FONT,
        legend={
            "orientation": "h",
            "yref": "container",
            "y": 0.01,
            "yanchor": "bottom",
            "x": 0.5,
            "xanchor": "center",
        },
        margin={"l": 20, "r": 30, "t": 110, "b": 90},
        width=width,
        height=height,
    )
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    return figure


def named(runs: Runs) -> list[str]:
    """Return the names of runs; a star marks a run that was cut."""
    return [run["run"] + ("" if run["complete"] else " *") for run in runs]


def _signed(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def totals(runs: Runs, about: str) -> go.Figure:
    """Draw makespan and tokens/s of every run: measured, by the profile, by the roofline."""
    figure = make_subplots(
        cols=2, shared_yaxes=True, horizontal_spacing=0.04, subplot_titles=list(TOTALS.values())
    )
    for place, name in enumerate(TOTALS):
        rows = [run["figures"][name] for run in runs]
        for label, key, error, color in (
            ("measured", "measured", None, MEASURED),
            ("simulated with the profile", "profile", "error", PROFILE),
            ("simulated by roofline alone", "roofline", "roofline_error", ROOFLINE),
        ):
            figure.add_bar(
                y=named(runs),
                x=[row[key] for row in rows],
                text=[_signed(row[error]) if error else f"{row[key]:,.4g}" for row in rows],
                textposition="outside",
                cliponaxis=False,
                orientation="h",
                name=label,
                legendgroup=label,
                showlegend=place == 0,
                marker_color=color,
                row=1,
                col=place + 1,
            )
        most = max(row[key] or 0.0 for row in rows for key in ("measured", "profile", "roofline"))
        figure.update_xaxes(title_text=TOTALS[name], range=[0.0, 1.15 * most], row=1, col=place + 1)
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(bargap=0.25, bargroupgap=0.0)
    below = f"{about}; percentages are errors; * cut at a fixed time: compared over as many steps"
    return style(
        figure,
        "Runs that the fit never saw: predicted against measured",
        below,
        ROW_PX * len(runs) + 190,
    )


def errors(runs: Runs, about: str) -> go.Figure:
    """Draw the errors of TTFT, TPOT and E2E (mean, p50, p99) with the profile, over their goals."""
    titles = [f"{NAMES[name]} ({name.removesuffix('_s').upper()})" for name in LATENCIES]
    figure = make_subplots(
        cols=len(LATENCIES), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=titles
    )
    for place, name in enumerate(LATENCIES):
        for mark, (symbol, color) in MARKS.items():
            known = [run for run in runs if run["figures"][f"{name} {mark}"]["error"] is not None]
            values = [100 * run["figures"][f"{name} {mark}"]["error"] for run in known]
            figure.add_scatter(
                y=named(known),
                x=[min(max(value, -FURTHEST), FURTHEST) for value in values],
                text=[f"{value:+.0f} %" if abs(value) > FURTHEST else "" for value in values],
                textposition=["middle left" if value > 0 else "middle right" for value in values],
                mode="markers+text",
                marker={"symbol": symbol, "color": color, "size": 10, "line": {"width": 2}},
                name=mark,
                legendgroup=mark,
                showlegend=place == 0,
                row=1,
                col=place + 1,
            )
        for bound, color, _ in BANDS:
            figure.add_vrect(
                -100 * bound,
                100 * bound,
                fillcolor=color,
                line_width=0,
                layer="below",
                row=1,
                col=place + 1,
            )
        figure.update_xaxes(
            title_text="error, %", zeroline=True, zerolinecolor="#888888", row=1, col=place + 1
        )
        figure.update_xaxes(range=_range(runs, name), row=1, col=place + 1)
    figure.update_yaxes(categoryorder="array", categoryarray=named(runs)[::-1])
    goals = ", ".join(f"{bound:.0%} at {marks}" for bound, _, marks in reversed(BANDS))
    below = (
        f"{about}; bands: goals of {goals}; * cut at a fixed time: of requests that ended in both"
    )
    return style(
        figure,
        "Latencies simulated with the profile: how far off",
        below,
        30 * len(runs) + AROUND_PX,
    )


def _range(runs: Runs, name: str) -> list[float]:
    """Return a range for the bands and every error up to `FURTHEST`."""
    sizes = [
        abs(100 * (run["figures"][f"{name} {mark}"]["error"] or 0.0))
        for run in runs
        for mark in MARKS
    ]
    most = 1.1 * min(max(sizes, default=0.0), FURTHEST)
    return [-max(most, 12.0), max(most, 12.0)]


WORKLOADS = ("W1", "W2", "W4")
SHOWN = {  # how a run's name ends, with its label and colour
    "full-kv": ("full-kv", "#555555"),
    "hybrid": ("hybrid, budget 2,048", "#0072b2"),
    "hybrid-1024": ("hybrid, budget 1,024", "#009e73"),
    "hybrid-swap": ("hybrid, 2,048, swaps", "#cc79a7"),
}
# Measured in one sitting on one H200, same shapes and pool; ../shared/design/peers.md
PEERS_90: Mapping[str, Mapping[str, float]] = {
    "W1": {"vLLM": 111.5, "Nano-vLLM": 130.8, "Zipage": 330.5},
    "W2": {"vLLM": 51.9, "Nano-vLLM": 62.1, "Zipage": 165.8},
}
PEER_SYMBOLS = {"vLLM": "triangle-up", "Nano-vLLM": "square", "Zipage": "x"}
NANO_DECODE_MS = {
    64: 10.88,
    128: 15.87,
    256: 28.02,
}  # mean context 2,048, CUDA graphs; ../shared/design/peers.md
GOAL_DECODE_MS = {64: 9.3, 128: 14.5, 256: 24.9}
PEER, FLOOR, OURS, GOAL = "#d55e00", "#bbbbbb", "#0072b2", "#000000"
Rows = Mapping[str, Mapping[str, Any]]  # by the run's name, as W1-hybrid-1024


def workloads_of(rows: Rows) -> list[str]:
    """Return the workloads with a run that the pictures show."""
    return [
        workload
        for workload in WORKLOADS
        if any(_has_curve(rows, f"{workload}-{suffix}") for suffix in SHOWN)
    ]


def _has_curve(rows: Rows, name: str) -> bool:
    return "tokens_asked" in rows.get(name, {})


def share_curve(row: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Return (seconds, per cent of the tokens), over time where it was kept, else by share."""
    asked = row["tokens_asked"]
    if "over_time" in row:
        return row["over_time"]["seconds"], [
            100.0 * out / asked for out in row["over_time"]["tokens_out"]
        ]
    noted = {
        float(share): second
        for share, second in row["seconds_to_share"].items()
        if second is not None
    }
    return [0.0, *noted.values()], [0.0, *(100.0 * share for share in noted)]


def shares(rows: Rows, about: str) -> go.Figure:
    """Draw the share of the tokens over time, by policy; marks show when peers reach 90 %."""
    there = workloads_of(rows)
    figure = make_subplots(
        cols=len(there), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=there
    )
    labelled: set[str] = set()
    for place, workload in enumerate(there, start=1):
        for suffix, (label, color) in SHOWN.items():
            if not _has_curve(rows, f"{workload}-{suffix}"):
                continue
            row = rows[f"{workload}-{suffix}"]
            seconds, percent = share_curve(row)
            line = {"color": color, "width": 2.5}
            how = {"name": label, "legendgroup": label, "showlegend": label not in labelled}
            mode = "lines" if "over_time" in row else "lines+markers"
            figure.add_scatter(x=seconds, y=percent, mode=mode, line=line, **how, row=1, col=place)
            labelled.add(label)
        for peer, second in PEERS_90.get(workload, {}).items():
            marker = {"symbol": PEER_SYMBOLS[peer], "size": 11, "color": PEER}
            how = {"name": f"{peer}, 90 %", "legendgroup": peer, "showlegend": peer not in labelled}
            figure.add_scatter(
                x=[second], y=[90.0], mode="markers", marker=marker, **how, row=1, col=place
            )
            labelled.add(peer)
        figure.add_hline(
            90.0, line={"color": "#999999", "width": 1, "dash": "dot"}, row=1, col=place
        )
        figure.update_xaxes(
            title_text="seconds since the start", rangemode="tozero", row=1, col=place
        )
    figure.update_yaxes(
        title_text="output tokens out, % of those asked for", range=[0, 103], row=1, col=1
    )
    below = f"{about}; peers: the same card, shapes and pool in another sitting (W1 and W2 alone)"
    return style(figure, "Share of the output tokens over time", below, 520)


def rates(row: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Return (seconds, output tokens/s) of each interval between kept moments, at its end."""
    seconds, out = row["over_time"]["seconds"], row["over_time"]["tokens_out"]
    spans = zip(seconds, seconds[1:], out, out[1:], strict=False)
    return seconds[1:], [(after - before) / (end - start) for start, end, before, after in spans]


def over_time(rows: Rows, about: str, workload: str = "W4") -> go.Figure:
    """Draw occupancy, running requests and tokens/s of one workload over time, by policy."""
    titles = ("share of the pool's blocks in use, %", "running requests", "output tokens/s")
    figure = make_subplots(rows=3, shared_xaxes=True, vertical_spacing=0.07, subplot_titles=titles)
    for suffix, (label, color) in SHOWN.items():
        row = rows.get(f"{workload}-{suffix}")
        if row is None or "over_time" not in row:
            continue
        kept = row["over_time"]
        panels = (
            (kept["seconds"], [100.0 * share for share in kept["occupancy"]]),
            (kept["seconds"], kept["running"]),
            rates(row),
        )
        for place, (seconds, values) in enumerate(panels, start=1):
            line = {"color": color, "width": 2}
            how = {"name": label, "legendgroup": label, "showlegend": place == 1}
            figure.add_scatter(
                x=seconds, y=values, mode="lines", line=line, **how, row=place, col=1
            )
    for place, unit in enumerate(("%", "requests", "tokens/s"), start=1):
        figure.update_yaxes(title_text=unit, rangemode="tozero", row=place, col=1)
    figure.update_xaxes(title_text="seconds since the start", row=3, col=1)
    return style(
        figure, f"{workload}: a cache that is compressed keeps more requests running", about, 860
    )


def decode_steps(rows: Sequence[Mapping[str, Any]], about: str) -> go.Figure:
    """Draw the decode step by batch beside its byte floor, Nano-vLLM's step, and the goal."""
    batches = [row["batch"] for row in rows]
    names = [f"batch {batch}" for batch in batches]
    floors = [row["floor_ms"] for row in rows]
    figure = go.Figure()
    for label, values, color in (
        ("byte floor", floors, FLOOR),
        ("this engine", [row["step_ms"] for row in rows], OURS),
        ("Nano-vLLM, CUDA graphs", [NANO_DECODE_MS.get(batch) for batch in batches], PEER),
    ):
        text = [_step_words(value, floor) for value, floor in zip(values, floors, strict=True)]
        figure.add_bar(
            x=names, y=values, name=label, marker_color=color, text=text, textposition="outside"
        )
    marker = {"symbol": "line-ew", "size": 46, "line": {"width": 2, "color": GOAL}}
    goals = [GOAL_DECODE_MS.get(batch) for batch in batches]
    figure.add_scatter(
        x=names,
        y=goals,
        mode="markers",
        marker=marker,
        name="goal: 1.2x the floor",
        offsetgroup="1",
    )
    most = max([*floors, *(row["step_ms"] for row in rows), *NANO_DECODE_MS.values()])
    figure.update_yaxes(title_text="milliseconds a step", range=[0.0, 1.15 * most])
    below = (
        f"{about}; mean context 2,048 tokens; floor: weights, keys and values at 4.45 TB/s; "
        f"vLLM is level with Nano"
    )
    return style(figure, "One decode step against its byte floor", below, 560, 1000)


def _step_words(value: float | None, floor: float) -> str:
    return "" if value is None else f"{value:.2f} ms<br>{value / floor:.2f}x"


RESULTS = Path(__file__).parent / "results"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FORMATS = ("svg", "png")
DRAW = "([figure, how]) => Plotly.newPlot('plot', figure).then(() => Plotly.toImage('plot', how))"


@dataclass
class Known:
    """The contents of all files."""

    judged: list[Mapping[str, Any]] = field(default_factory=list)  # runs that the fit never saw
    rows: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # of the engine, by name
    decode: list[Mapping[str, Any]] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)  # card and date, by what they are about


def gather(judged: Path | None, runs: Sequence[Path], engine: Sequence[Path]) -> Known:
    """Read all files."""
    found = Known()
    for path in engine:
        results = json.loads(path.read_text("utf-8"))
        for row in results.get("runs", []):
            found.rows[f"{row['workload']}-{plain(row['policy'])}"] = row
            found.about["runs"] = _about(results)
        if results.get("decode"):
            found.decode, found.about["decode"] = results["decode"], _about(results)
    if judged is not None:
        document = json.loads(judged.read_text("utf-8"))
        found.judged, found.about["judged"] = document["validation"], _about(document["calls"][0])
        for run in document["validation"]:
            if run["measured"]:
                found.rows[run["run"]] = run["measured"]
                found.about["runs"] = found.about["judged"]
    for path in runs:
        results = json.loads(path.read_text("utf-8"))
        for row in results["runs"]:
            if "tokens_asked" in row:
                found.rows[row["run"]] = row
                found.about["runs"] = _about(results)
    return found


def _about(results: Mapping[str, Any]) -> str:
    return f"{results['card']}, {results['date']}"


def figures(known: Known) -> dict[str, go.Figure]:
    """Return the pictures that the files allow, by the end of their file's name."""
    found: dict[str, go.Figure] = {}
    if known.judged:
        found["predicted"] = totals(known.judged, known.about["judged"])
        found["latency-errors"] = errors(known.judged, known.about["judged"])
    if workloads_of(known.rows):
        found["tokens-over-time"] = shares(known.rows, known.about["runs"])
    if any("over_time" in known.rows.get(f"W4-{suffix}", {}) for suffix in SHOWN):
        found["cache-over-time"] = over_time(known.rows, known.about["runs"])
    if known.decode:
        found["decode-steps"] = decode_steps(known.decode, known.about["decode"])
    return found


def draw(pictures: Mapping[str, go.Figure], out: Path, name: str, kind: str) -> list[Path]:
    """Write every picture as OUT/NAME-PICTURE.KIND. Raises SystemExit without a Chromium."""
    browser_path = find_browser()
    if browser_path is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is here to draw with")
    written = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page()
        page.set_content("<div id='plot'></div>")
        page.add_script_tag(content=get_plotlyjs())
        for picture, figure in pictures.items():
            how = {"format": kind, "width": figure.layout.width, "height": figure.layout.height}
            address = page.evaluate(DRAW, [json.loads(figure.to_json()), how])
            written.append(out / f"{name}-{picture}.{kind}")
            written[-1].write_bytes(bytes_of(address))
        browser.close()
    return written


def find_browser() -> str | None:
    """Return the path of a Chromium, if there is one."""
    return next((found for browser in BROWSERS if (found := shutil.which(browser))), None)


def bytes_of(address: str) -> bytes:
    """Return the content of a `data:` address."""
    head, _, data = address.partition(",")
    return base64.b64decode(data) if head.endswith(";base64") else unquote(data).encode()


def main() -> None:
    """Read, draw and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--judged", type=Path, metavar="JSON", help="of benchmarks.judge")
    parser.add_argument(
        "--runs", type=Path, nargs="+", default=[], metavar="JSON", help="runs.json, some"
    )
    parser.add_argument(
        "--engine",
        type=Path,
        nargs="+",
        default=[],
        metavar="JSON",
        help="of benchmarks.engine",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", required=True, help="how all files begin, as h200-2026-11-29")
    parser.add_argument("--format", choices=FORMATS, default="svg")
    options = parser.parse_args()
    pictures = figures(gather(options.judged, options.runs, options.engine))
    if not pictures:
        parser.error("nothing to draw: give --judged, --runs or --engine with runs or decode steps")
    options.out.mkdir(parents=True, exist_ok=True)
    for path in draw(pictures, options.out, options.name, options.format):
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

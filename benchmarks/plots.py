"""Draw the pictures under benchmarks/results: `python -m benchmarks.plots --judged JSON --engine JSON --name NAME`.

From a judged JSON (`benchmarks.judge_simulator`): totals and latencies, predicted against measured. From it, from
runs.json (`benchmarks.validate_simulator`) and from results of `benchmarks.engine_gpu`: tokens over time, the cache
over time, and decode steps against their floor; of a run that is in several files the last one counts. Plotly draws in
a headless Chromium (through Playwright, as the browser tests do).
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

from benchmarks import plot_engine, plot_trust
from benchmarks.run_figures import plain

RESULTS = Path(__file__).parent / "results"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FORMATS = ("svg", "png")
DRAW = "([figure, how]) => Plotly.newPlot('plot', figure).then(() => Plotly.toImage('plot', how))"


@dataclass
class Known:
    """What the files hold."""

    judged: list[Mapping[str, Any]] = field(default_factory=list)  # runs that the fit never saw
    rows: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # of the engine, by name
    decode: list[Mapping[str, Any]] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)  # card and date, by what they are about


def gather(judged: Path | None, runs: Sequence[Path], engine: Sequence[Path]) -> Known:
    """All files together."""
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
    """The pictures that can be drawn of it, by the end of their file's name."""
    found: dict[str, go.Figure] = {}
    if known.judged:
        found["predicted"] = plot_trust.totals(known.judged, known.about["judged"])
        found["latency-errors"] = plot_trust.errors(known.judged, known.about["judged"])
    if plot_engine.workloads_of(known.rows):
        found["tokens-over-time"] = plot_engine.shares(known.rows, known.about["runs"])
    if any("over_time" in known.rows.get(f"W4-{suffix}", {}) for suffix in plot_engine.SHOWN):
        found["cache-over-time"] = plot_engine.over_time(known.rows, known.about["runs"])
    if known.decode:
        found["decode-steps"] = plot_engine.decode(known.decode, known.about["decode"])
    return found


def draw(pictures: Mapping[str, go.Figure], out: Path, name: str, kind: str) -> list[Path]:
    """Write every picture as OUT/NAME-PICTURE.KIND. Raises SystemExit without a Chromium."""
    browser_path = find_browser()
    if browser_path is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is here to draw with")
    written = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
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
    """Where a Chromium is, if there is one."""
    return next((found for browser in BROWSERS if (found := shutil.which(browser))), None)


def bytes_of(address: str) -> bytes:
    """What a `data:` address holds."""
    head, _, data = address.partition(",")
    return base64.b64decode(data) if head.endswith(";base64") else unquote(data).encode()


def main() -> None:
    """Read, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judged", type=Path, metavar="JSON", help="of benchmarks.judge_simulator")
    parser.add_argument("--runs", type=Path, nargs="+", default=[], metavar="JSON", help="runs.json, some")
    parser.add_argument("--engine", type=Path, nargs="+", default=[], metavar="JSON", help="of benchmarks.engine_gpu")
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

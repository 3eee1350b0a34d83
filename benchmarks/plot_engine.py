"""Pictures of runs of the engine (rows of runs.json, or of `benchmarks.engine_gpu`): how they went, beside others."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.plot_trust import style

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
NANO_DECODE_MS = {64: 10.88, 128: 15.87, 256: 28.02}  # mean context 2,048, CUDA graphs; ../shared/design/peers.md
GOAL_DECODE_MS = {64: 9.3, 128: 14.5, 256: 24.9}
PEER, FLOOR, OURS, GOAL = "#d55e00", "#bbbbbb", "#0072b2", "#000000"
Rows = Mapping[str, Mapping[str, Any]]  # by the run's name, as W1-hybrid-1024


def workloads_of(rows: Rows) -> list[str]:
    """The workloads of which there is a run that the pictures show."""
    return [workload for workload in WORKLOADS if any(_has_curve(rows, f"{workload}-{suffix}") for suffix in SHOWN)]


def _has_curve(rows: Rows, name: str) -> bool:
    return "tokens_asked" in rows.get(name, {})


def share_curve(row: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """(seconds, per cent of the tokens asked for): all along where it was kept, else the shares that were noted."""
    asked = row["tokens_asked"]
    if "over_time" in row:
        return row["over_time"]["seconds"], [100.0 * out / asked for out in row["over_time"]["tokens_out"]]
    noted = {float(share): second for share, second in row["seconds_to_share"].items() if second is not None}
    return [0.0, *noted.values()], [0.0, *(100.0 * share for share in noted)]


def shares(rows: Rows, about: str) -> go.Figure:
    """What share of the tokens is out when, by policy; peers' 90 % as marks."""
    there = workloads_of(rows)
    figure = make_subplots(cols=len(there), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=there)
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
            figure.add_scatter(x=[second], y=[90.0], mode="markers", marker=marker, **how, row=1, col=place)
            labelled.add(peer)
        figure.add_hline(90.0, line={"color": "#999999", "width": 1, "dash": "dot"}, row=1, col=place)
        figure.update_xaxes(title_text="seconds since the start", rangemode="tozero", row=1, col=place)
    figure.update_yaxes(title_text="output tokens out, % of those asked for", range=[0, 103], row=1, col=1)
    below = f"{about}; peers: the same card, shapes and pool in another sitting (W1 and W2 alone)"
    return style(figure, "Share of the output tokens over time", below, 520)


def rates(row: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """(seconds, output tokens/s) between the moments that were kept, at the end of each interval."""
    seconds, out = row["over_time"]["seconds"], row["over_time"]["tokens_out"]
    spans = zip(seconds, seconds[1:], out, out[1:], strict=False)
    return seconds[1:], [(after - before) / (end - start) for start, end, before, after in spans]


def over_time(rows: Rows, about: str, workload: str = "W4") -> go.Figure:
    """Occupancy, running requests and tokens/s of one workload, by policy, one above the other."""
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
            figure.add_scatter(x=seconds, y=values, mode="lines", line=line, **how, row=place, col=1)
    for place, unit in enumerate(("%", "requests", "tokens/s"), start=1):
        figure.update_yaxes(title_text=unit, rangemode="tozero", row=place, col=1)
    figure.update_xaxes(title_text="seconds since the start", row=3, col=1)
    return style(figure, f"{workload}: a cache that is compressed keeps more requests running", about, 860)


def decode(rows: Sequence[Mapping[str, Any]], about: str) -> go.Figure:
    """A decode step by batch beside its byte floor, Nano-vLLM's step, and the goal."""
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
        figure.add_bar(x=names, y=values, name=label, marker_color=color, text=text, textposition="outside")
    marker = {"symbol": "line-ew", "size": 46, "line": {"width": 2, "color": GOAL}}
    goals = [GOAL_DECODE_MS.get(batch) for batch in batches]
    figure.add_scatter(x=names, y=goals, mode="markers", marker=marker, name="goal: 1.2x the floor", offsetgroup="1")
    most = max([*floors, *(row["step_ms"] for row in rows), *NANO_DECODE_MS.values()])
    figure.update_yaxes(title_text="milliseconds a step", range=[0.0, 1.15 * most])
    below = f"{about}; mean context 2,048 tokens; floor: weights, keys and values at 4.45 TB/s; vLLM is level with Nano"
    return style(figure, "One decode step against its byte floor", below, 560, 1000)


def _step_words(value: float | None, floor: float) -> str:
    return "" if value is None else f"{value:.2f} ms<br>{value / floor:.2f}x"

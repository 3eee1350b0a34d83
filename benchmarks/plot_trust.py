"""Pictures of a judged JSON (`benchmarks.judge_simulator`): what was predicted, and how far off it is."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sim.trust import GOALS, LATENCIES

MEASURED, PROFILE, ROOFLINE = "#555555", "#0072b2", "#e69f00"
FONT = {"family": "DejaVu Sans, Verdana, Arial, sans-serif", "size": 13}
TOTALS = {"makespan_s": "makespan, s", "tokens_per_s": "output tokens/s"}
NAMES = {"ttft_s": "time to first token", "tpot_s": "time per output token", "e2e_s": "end to end"}
MARKS = {"mean": ("circle-open", "#0072b2"), "p50": ("diamond-open", "#009e73"), "p99": ("square-open", "#d55e00")}
BANDS = ((GOALS["ttft_s p99"], "#f0f0f0", "p99"), (GOALS["ttft_s mean"], "#d9e8f2", "mean and p50"))
FURTHEST = 40.0  # per cent; what is further off stands at the edge with its number
ROW_PX, AROUND_PX = 54, 190
Runs = Sequence[Mapping[str, Any]]


def style(figure: go.Figure, title: str, below: str, height: int, width: int = 1200) -> go.Figure:
    """The same look for all pictures: a title with what it was measured on under it, and the legend at the bottom."""
    figure.update_layout(
        template="plotly_white",
        title={"text": f"<b>{title}</b><br><span style='font-size:13px'>{below}</span>", "x": 0.01, "yref": "container",
               "y": 1.0, "yanchor": "top", "pad": {"t": 30}},
        font=FONT,
        legend={"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom", "x": 0.5, "xanchor": "center"},
        margin={"l": 20, "r": 30, "t": 110, "b": 90},
        width=width,
        height=height,
    )  # fmt: skip
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    return figure


def named(runs: Runs) -> list[str]:
    """Names of runs; a star says that the run was cut."""
    return [run["run"] + ("" if run["complete"] else " *") for run in runs]


def _signed(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def totals(runs: Runs, about: str) -> go.Figure:
    """Makespan and tokens/s of every run: measured, by the profile and by the roofline."""
    figure = make_subplots(cols=2, shared_yaxes=True, horizontal_spacing=0.04, subplot_titles=list(TOTALS.values()))
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
    return style(figure, "Runs that the fit never saw: predicted against measured", below, ROW_PX * len(runs) + 190)


def errors(runs: Runs, about: str) -> go.Figure:
    """Errors of TTFT, TPOT and E2E at mean, p50 and p99 with the profile, over the bands that are their goals."""
    titles = [f"{NAMES[name]} ({name.removesuffix('_s').upper()})" for name in LATENCIES]
    figure = make_subplots(cols=len(LATENCIES), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=titles)
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
                -100 * bound, 100 * bound, fillcolor=color, line_width=0, layer="below", row=1, col=place + 1
            )
        figure.update_xaxes(title_text="error, %", zeroline=True, zerolinecolor="#888888", row=1, col=place + 1)
        figure.update_xaxes(range=_range(runs, name), row=1, col=place + 1)
    figure.update_yaxes(categoryorder="array", categoryarray=named(runs)[::-1])
    goals = ", ".join(f"{bound:.0%} at {marks}" for bound, _, marks in reversed(BANDS))
    below = f"{about}; bands: goals of {goals}; * cut at a fixed time: of requests that ended in both"
    return style(figure, "Latencies simulated with the profile: how far off", below, 30 * len(runs) + AROUND_PX)


def _range(runs: Runs, name: str) -> list[float]:
    """Wide enough for the bands and for every error up to the furthest that is shown."""
    sizes = [abs(100 * (run["figures"][f"{name} {mark}"]["error"] or 0.0)) for run in runs for mark in MARKS]
    most = 1.1 * min(max(sizes, default=0.0), FURTHEST)
    return [-max(most, 12.0), max(most, 12.0)]

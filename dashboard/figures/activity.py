"""What the steps did over time: requests at work and waiting, tokens a second, unused places inside blocks."""

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboard.figures.style import area, finish, rounded, times
from traces.holding import Holdings
from traces.occupancy import CACHED, FREE, Occupancy
from traces.palette import CYCLE, Look
from traces.series import StepSeries

NUM_BINS = 300
LINES = (  # column of the steps, words, colour, dash
    ("running", "running", "#0072b2", "solid"),
    ("waiting", "waiting", "#d55e00", "dash"),
    ("waiting_for_slot", "blocked for a query slot", "#e69f00", "dot"),
    ("waiting_for_block", "blocked for a block", "#cc79a7", "dashdot"),
    ("compressing", "compressing", "#009e73", "longdash"),
)
RATES = (
    ("output_tokens_per_s", "output tokens/s", "#0072b2", "solid"),
    ("prefill_tokens_per_s", "prefill tokens/s", "#d55e00", "dash"),
)
NUM_HOLDERS, HOLDER_BINS = 20, 150
HATCHES = ("", "/", "x", ".", "|", "\\", "-", "+")


def activity_figure(series: StepSeries, pool: tuple[int, int]) -> go.Figure:
    """Three plots on one time axis: peaks of counts, mean rates, waste. `pool`: (blocks, tokens a block)."""
    window = (float(series.edges_s[0]), float(series.edges_s[-1]))
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.05, row_heights=[0.42, 0.34, 0.24])
    x = times(series.edges_s[:-1], window)
    for column, words, colour, dash in LINES:
        figure.add_trace(_line(x, series.peaks[column].tolist(), words, colour, dash), row=1, col=1)
    for column, words, colour, dash in RATES:
        figure.add_trace(_line(x, rounded(getattr(series, column)), words, colour, dash), row=2, col=1)
    share = series.wasted_slots / (pool[0] * pool[1])
    figure.add_trace(_line(x, rounded(share * 100), "unused slots in owned blocks", "#7f6a00", "solid"), row=3, col=1)
    for row, words in enumerate(("requests", "tokens/s", "% of the pool"), 1):
        figure.update_yaxes(title_text=words, rangemode="tozero", row=row, col=1)
    figure.update_xaxes(title_text="seconds since the start", row=3, col=1)
    finish(figure, 520, dragmode="select")
    figure.update_xaxes(range=list(window))
    figure.update_layout(hovermode="x unified", legend={"y": -0.14})
    return figure


def _line(x: list[float], y: list[float | None], words: str, colour: str, dash: str) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=y,
        name=words,
        mode="lines",
        line={"color": colour, "dash": dash, "shape": "hv", "width": 1.8},
        hovertemplate="%{y:,} " + words + "<extra></extra>",
    )


def top_holders(
    occupancy: Occupancy, holdings: Holdings, window_s: tuple[float, float]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int, int], np.dtype[np.int64]]]:
    """The requests that hold most blocks in a window, most first, and their blocks [request, moment] in it."""
    moments = np.linspace(*window_s, HOLDER_BINS)
    steps = np.array([occupancy.times.step_at(float(moment)) for moment in moments], dtype=np.int64)
    numbers = holdings.alive(int(steps[0]), int(steps[-1]))
    blocks = holdings.blocks_at(numbers, steps)
    total = blocks.sum(axis=1)
    order = np.lexsort((numbers, -total))[:NUM_HOLDERS]
    order = order[total[order] > 0]
    return numbers[order], blocks[order]


def holders_figure(
    occupancy: Occupancy, holdings: Holdings, window_s: tuple[float, float], request: int | None = None
) -> go.Figure:
    """Requests stacked by the blocks they hold; those that hold most have a layer of their own, the rest share one."""
    numbers, blocks = top_holders(occupancy, holdings, window_s)
    moments = np.linspace(*window_s, HOLDER_BINS)
    at = np.maximum(np.searchsorted(occupancy.change_s, moments, side="right") - 1, 0)
    used = occupancy.num_blocks - occupancy.counts[at][:, [FREE, CACHED]].sum(axis=1)
    rest = np.maximum(used - blocks.sum(axis=0), 0)
    x = times(moments, window_s)
    figure = go.Figure(area(Look("all other requests", "#aab3bf", "", "", ""), x, rest.tolist(), "held"))
    for place in np.argsort(numbers):
        number = int(numbers[place])
        chosen = request is None or number == request
        colour = CYCLE[number % len(CYCLE)] if chosen else "#c9cfd7"
        look = Look(f"r{number}", colour, HATCHES[number // len(CYCLE) % len(HATCHES)], "", "")
        layer = area(look, x, blocks[place].tolist(), "held")
        layer.update(customdata=[number] * len(x), mode="lines+markers", marker={"size": 5, "opacity": 0})
        figure.add_trace(layer)
    figure.update_yaxes(title_text="blocks held", rangemode="tozero")
    figure.update_xaxes(title_text="seconds since the start", range=list(window_s))
    finish(figure, 420, dragmode="pan")
    figure.update_layout(hovermode="closest", legend={"y": -0.2})
    return figure

"""Figures of steps and requests over time: counts, rates, unused positions, phases as bars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from zlab.dashboard.figures.style import INK, area, finish, plain, rounded, seconds, times
from zlab.traces.occupancy import (
    CACHED,
    FREE,
    NO_REQUEST,
    SHARED,
    Occupancy,
    counts_at,
    lives_at,
)
from zlab.traces.palette import BLOCK_LOOKS, CYCLE, DASHES, PHASE_LOOKS, Look, darker
from zlab.traces.schema import PHASES, Phase
from zlab.traces.timeline import FloatArray, Int8Array, Int64Array, Phases, StepSeries

NUM_BINS = 300
LINES = (  # column of the `steps` table, legend, colour, dash
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
BLOCKS_AT_ONCE = 16_384
HATCHES = ("", "/", "x", ".", "|", "\\", "-", "+")


def activity_figure(series: StepSeries, pool: tuple[int, int]) -> go.Figure:
    """Draw peak counts, mean rates and unused positions on one time axis.

    `pool` is (number of blocks, tokens per block).
    """
    window = (float(series.edges_s[0]), float(series.edges_s[-1]))
    figure = make_subplots(
        rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.05, row_heights=[0.42, 0.34, 0.24]
    )
    x = times(series.edges_s[:-1], window)
    for column, words, colour, dash in LINES:
        figure.add_trace(_line(x, series.peaks[column].tolist(), words, colour, dash), row=1, col=1)
    for column, words, colour, dash in RATES:
        figure.add_trace(
            _line(x, rounded(getattr(series, column)), words, colour, dash), row=2, col=1
        )
    share = series.wasted_slots / (pool[0] * pool[1])
    figure.add_trace(
        _line(x, rounded(share * 100), "unused slots in owned blocks", "#7f6a00", "solid"),
        row=3,
        col=1,
    )
    words_of_rows = ("requests, peak", "tokens/s, mean", "% of pool, peak")
    for row, words in enumerate(words_of_rows, 1):
        figure.update_yaxes(
            title={"text": words, "font": {"size": 10}}, rangemode="tozero", row=row, col=1
        )
    figure.update_xaxes(ticksuffix=" s")
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


@dataclass(frozen=True)
class Line:
    """A named line: moments `x` in seconds, and a value for each, None for a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]


def lines_figure(rows: Mapping[str, Sequence[Line]], words: str) -> go.Figure:
    """Draw lines over time, a row of the figure for each title; lines of one name look alike.

    Args:
        rows: Lines by the title of their row.
        words: What the axis of time says.
    """
    figure = make_subplots(rows=len(rows), cols=1, shared_xaxes=True, vertical_spacing=0.06)
    names = list(dict.fromkeys(line.name for lines in rows.values() for line in lines))
    shown: set[str] = set()
    for row, (title, lines) in enumerate(rows.items(), 1):
        for line in lines:
            place = names.index(line.name)
            trace = _line(
                [round(moment, 3) for moment in line.x],
                rounded([np.nan if value is None else value for value in line.y]),
                plain(line.name),
                CYCLE[place % len(CYCLE)],
                DASHES[place // len(CYCLE) % len(DASHES)],
            )
            trace.update(legendgroup=line.name, showlegend=line.name not in shown)
            shown.add(line.name)
            figure.add_trace(trace, row=row, col=1)
        figure.update_yaxes(
            title={"text": title, "font": {"size": 10}}, rangemode="tozero", row=row, col=1
        )
    figure.update_xaxes(title_text=words, row=len(rows), col=1)
    finish(figure, 120 + 150 * len(rows))
    return figure.update_layout(legend={"y": 1.02, "yanchor": "bottom"})


def top_holders(occupancy: Occupancy, moments_s: FloatArray) -> tuple[Int64Array, Int64Array]:
    """Return the requests that own most blocks alone, most first, and their blocks at each moment.

    Args:
        occupancy: the pool over time.
        moments_s: moments [m] in seconds.

    Returns:
        Numbers [n] of at most NUM_HOLDERS requests, and the blocks [n, m] that each owns alone.
    """
    counted: list[tuple[Int64Array, Int64Array]] = []
    num_moments = len(moments_s)
    for low in range(0, occupancy.num_blocks, BLOCKS_AT_ONCE):  # bounds memory
        blocks = range(low, min(low + BLOCKS_AT_ONCE, occupancy.num_blocks))
        owner = occupancy.lives.owner[lives_at(occupancy, moments_s, blocks)].astype(np.int64)
        key = (owner * num_moments + np.arange(num_moments))[owner != NO_REQUEST]
        counted.append(np.unique(key, return_counts=True))
    key, count = (np.concatenate(parts) for parts in zip(*counted, strict=True))
    numbers, place = np.unique(key // num_moments, return_inverse=True)
    total = np.bincount(place, weights=count, minlength=len(numbers))
    order = np.lexsort((numbers, -total))[:NUM_HOLDERS]
    found = np.zeros((len(order), num_moments), dtype=np.int64)
    for row, index in enumerate(order):
        mine = place == index
        np.add.at(found[row], key[mine] % num_moments, count[mine])
    return numbers[order], found


def holders_figure(
    occupancy: Occupancy, window_s: tuple[float, float], request: int | None = None
) -> go.Figure:
    """Stack requests by the blocks that they own alone at HOLDER_BINS moments.

    The requests that own most have a layer each, all others share one. Blocks with several owners
    have a layer of their own, so that the stack is as high as the blocks in use.
    """
    moments = np.linspace(*window_s, HOLDER_BINS)
    numbers, blocks = top_holders(occupancy, moments)
    counts = counts_at(occupancy, moments)
    shared = counts[:, SHARED]
    used = occupancy.num_blocks - counts[:, FREE] - counts[:, CACHED]
    rest = used - shared - blocks.sum(axis=0)
    x = times(moments, window_s)
    figure = go.Figure()
    if shared.any():
        figure.add_trace(area(BLOCK_LOOKS["shared"], x, shared.tolist(), "held"))
    figure.add_trace(
        area(Look("all other requests", "#aab3bf", "", "", ""), x, rest.tolist(), "held")
    )
    for place in np.argsort(numbers):
        number = int(numbers[place])
        chosen = request is None or number == request
        colour = CYCLE[number % len(CYCLE)] if chosen else "#c9cfd7"
        look = Look(f"r{number}", colour, HATCHES[number // len(CYCLE) % len(HATCHES)], "", "")
        layer = area(look, x, blocks[place].tolist(), "held")
        layer.update(
            customdata=[number] * len(x), mode="lines+markers", marker={"size": 5, "opacity": 0}
        )
        figure.add_trace(layer)
    figure.update_yaxes(title_text="blocks held", rangemode="tozero")
    figure.update_xaxes(ticksuffix=" s", range=list(window_s))
    finish(figure, 420, dragmode="pan")
    figure.update_layout(hovermode="closest", legend={"y": -0.2})
    return figure


MAX_BARS, MAX_SIGNS = 4_400, 500
ROWS = 40  # requests in one figure
CELLS = 1200  # a row's width in cells; shorter intervals are put together by cell


def pick_rows(requests: Int64Array, first: int) -> Int64Array:
    """Return the requests of one figure from an ordered list."""
    return requests[first : first + ROWS]


@dataclass(frozen=True)
class Bars:
    """What is drawn: from `start_s[i]` for `length_s[i]`, `request[i]` was in `phase[i]`.

    A bar stands for `count[i]` intervals. The bars of a request in a phase are together as long as
    its intervals in that phase within the window.
    """

    request: Int64Array
    phase: Int8Array
    start_s: FloatArray
    length_s: FloatArray
    count: Int64Array


def bars(phases: Phases, rows: Int64Array, window_s: tuple[float, float]) -> Bars:
    """Return the bars of some requests, at most MAX_BARS.

    Intervals shorter than a cell are put together: those of one request and phase in one cell are
    one bar. The cell is 1/CELLS of the window, or larger where there would be too many bars.
    """
    mine = phases.of(rows).within(window_s)
    start, end = np.maximum(mine.start_s, window_s[0]), np.minimum(mine.end_s, window_s[1])
    cells = CELLS
    while True:
        found = _grouped(mine, start, end, (window_s[0], (window_s[1] - window_s[0]) / cells))
        if len(found.request) <= MAX_BARS or cells == 1:
            return found
        cells //= 2


def _grouped(mine: Phases, start: FloatArray, end: FloatArray, cells: tuple[float, float]) -> Bars:
    """Put intervals together that are shorter than a cell; `cells` is (first edge, width)."""
    if not len(start):
        none = np.zeros(0, dtype=np.int64)
        return Bars(none, none.astype(np.int8), start, start, none)
    cell = ((start - cells[0]) / cells[1]).astype(np.int64)
    short = end - start < cells[1]
    # A stretch is one long interval, or short ones of a request that follow each other in a cell.
    begins = np.ones(len(start), dtype=bool)
    begins[1:] = ~(
        short[1:] & short[:-1] & (mine.request[1:] == mine.request[:-1]) & (cell[1:] == cell[:-1])
    )
    stretch = np.cumsum(begins) - 1
    key, place = np.unique(stretch * len(PHASES) + mine.phase, return_inverse=True)
    length = np.bincount(place, weights=end - start).astype(np.float64)
    of_stretch = key // len(PHASES)
    first = np.flatnonzero(begins)[of_stretch]
    before = np.cumsum(length) - length
    lowest = np.searchsorted(of_stretch, of_stretch)
    return Bars(
        mine.request[first],
        (key % len(PHASES)).astype(np.int8),
        start[first] + before - before[lowest],
        length,
        np.bincount(place).astype(np.int64),
    )


def gantt(
    phases: Phases, rows: Int64Array, window_s: tuple[float, float], chosen: int | None = None
) -> go.Figure:
    """Draw one row for each request, the first on top, and bars as long as its phases.

    Preemptions too short to be seen get a mark, as many as the figure has room for.
    """
    shown = bars(phases, rows, window_s)
    names = [f"r{number}" for number in rows]
    place = {int(number): name for number, name in zip(rows, names, strict=True)}
    figure = go.Figure()
    for code, name in enumerate(PHASES):
        look, at = PHASE_LOOKS[name], np.flatnonzero(shown.phase == code)
        if not len(at):
            continue
        figure.add_trace(
            go.Bar(
                base=times(shown.start_s[at], window_s),
                x=rounded(shown.length_s[at], 6),
                y=[place[int(number)] for number in shown.request[at]],
                customdata=[
                    seconds(float(length)) + (f" in {count} intervals" if count > 1 else "")
                    for length, count in zip(shown.length_s[at], shown.count[at], strict=True)
                ],
                orientation="h",
                name=look.words,
                marker=_filled(look),
                hovertemplate="%{y}: "
                + look.words
                + "<br>from %{base} s for %{customdata}<extra></extra>",
            )
        )
    _mark_short_preemptions(figure, shown, place, window_s)
    figure.update_yaxes(
        categoryorder="array", categoryarray=names[::-1], type="category", tickfont={"size": 10}
    )
    figure.update_xaxes(ticksuffix=" s", range=list(window_s))
    finish(figure, 120 + 15 * max(len(rows), 6), dragmode="select")
    figure.update_layout(
        barmode="overlay", bargap=0.25, hovermode="closest", legend={"y": 1.02, "yanchor": "bottom"}
    )
    if chosen in place:
        figure.add_hline(y=place[int(chosen)], line={"color": INK, "dash": "dot", "width": 1})
    return figure


def _mark_short_preemptions(
    figure: go.Figure, shown: Bars, place: dict[int, str], window_s: tuple[float, float]
) -> None:
    """Add a triangle where a bar of preempted time is too short to be seen."""
    too_short = shown.length_s < 3 * (window_s[1] - window_s[0]) / CELLS
    at = np.flatnonzero((shown.phase == Phase.PREEMPTED.place) & too_short)
    if not len(at):
        return
    look = PHASE_LOOKS["preempted"]
    figure.add_trace(
        go.Scatter(
            x=times(shown.start_s[at][:MAX_SIGNS], window_s),
            y=[place[int(number)] for number in shown.request[at][:MAX_SIGNS]],
            mode="markers",
            marker={"symbol": look.symbol, "color": INK, "size": 5},
            name="preempted for a short time",
            hovertemplate="%{y}: preempted at %{x} s<extra></extra>",
        )
    )


def _filled(look: Look) -> dict[str, Any]:
    """Return a bar's colour and hatch."""
    marker: dict[str, Any] = {"color": look.colour, "line": {"width": 0}}
    if look.hatch:
        lines = {"shape": look.hatch, "fgcolor": darker(look.colour), "bgcolor": look.colour}
        marker["pattern"] = lines | {"size": 6, "solidity": 0.25}
    return marker


def phase_totals(phases: Phases, requests: Int64Array) -> npt.NDArray[np.float64]:
    """Return the seconds [phase] that these requests spent in each phase in total."""
    return np.asarray(phases.totals(requests).sum(axis=0), dtype=np.float64)


def totals_figure(phases: Phases, requests: Int64Array, title: str) -> go.Figure:
    """Draw the total time of these requests as one bar with a part for each phase."""
    totals = phase_totals(phases, requests)
    figure = go.Figure()
    for code, name in enumerate(PHASES):
        if totals[code] <= 0:
            continue
        look = PHASE_LOOKS[name]
        figure.add_trace(
            go.Bar(
                x=[float(totals[code])],
                y=[""],
                orientation="h",
                name=look.words,
                marker=_filled(look),
                hovertemplate=f"{look.words}: {seconds(float(totals[code]))} "
                f"({totals[code] / totals.sum():.1%})<extra></extra>",
            )
        )
    figure.update_xaxes(ticksuffix=" s")
    finish(figure, 250, title)
    figure.update_layout(barmode="stack", hovermode="closest", legend={"y": -0.5})
    return figure


LATENCY_BINS = 60
PERCENTILES = ((50, "solid", "#0072b2"), (90, "dash", "#e69f00"), (99, "dot", "#d55e00"))
OVER_TIME = {  # key -> words; the moment by which a request is counted; column with seconds
    "ttft": ("time to first token", "arrival_s", "ttft_s"),
    "tpot": ("time per output token", "finish_s", "tpot_s"),
    "queue": ("time in line", "arrival_s", "queued_s"),
}


def percentiles_over_time(
    moments_s: FloatArray, values: FloatArray, edges_s: FloatArray
) -> FloatArray:
    """Return the PERCENTILES [percentile, bin] of values whose moments fall into each bin.

    Values that are NaN do not count; a bin without values has NaN.
    """
    found = np.full((len(PERCENTILES), len(edges_s) - 1), np.nan)
    known = ~np.isnan(values) & ~np.isnan(moments_s)
    moments, values = moments_s[known], values[known]
    order = np.argsort(moments, kind="stable")
    bounds = np.searchsorted(moments[order], edges_s, side="left")
    bounds[-1] = np.searchsorted(moments[order], edges_s[-1], side="right")
    marks = [mark for mark, _, _ in PERCENTILES]
    for place, (low, high) in enumerate(pairwise(bounds.tolist())):
        if high > low:
            found[:, place] = np.percentile(values[order[low:high]], marks)
    return found


def hit_rate(frame: pd.DataFrame, edges_s: FloatArray) -> FloatArray:
    """Return the share [bin] of prompt tokens that were found in the prefix cache, by arrival; NaN
    for a bin in which no request arrives.
    """
    sums = [
        np.histogram(frame["arrival_s"], bins=edges_s, weights=frame[name])[0]
        for name in ("prefix_hit_tokens", "prompt_tokens")
    ]
    rate: FloatArray = np.full(len(sums[0]), np.nan)
    np.divide(sums[0], sums[1], out=rate, where=sums[1] > 0)
    return rate


def latencies_figure(
    frame: pd.DataFrame, window_s: tuple[float, float], goals_s: Mapping[str, float | None]
) -> go.Figure:
    """Draw percentiles of latencies over time with their goals, and the prefix hit rate.

    Args:
        frame: requests, as `request_frame` gives them.
        window_s: first and last moment in seconds.
        goals_s: goal in seconds by key of OVER_TIME; None without one.

    Returns:
        One row for each latency, and one for the hit rate.
    """
    edges = np.linspace(*window_s, LATENCY_BINS + 1)
    x = times((edges[1:] + edges[:-1]) / 2, window_s)
    rows = len(OVER_TIME) + 1
    figure = make_subplots(rows=rows, cols=1, shared_xaxes=True, vertical_spacing=0.04)
    for row, (key, (words, moment, column)) in enumerate(OVER_TIME.items(), 1):
        found = percentiles_over_time(
            frame[moment].to_numpy(dtype=float), frame[column].to_numpy(dtype=float), edges
        )
        for (mark, dash, colour), values in zip(PERCENTILES, found, strict=True):
            line = _line(x, rounded(values), f"p{mark}", colour, dash)
            line.update(
                mode="lines+markers",
                marker={"size": 4},
                legendgroup=f"p{mark}",
                showlegend=row == 1,
                hovertemplate=f"{words}, p{mark}: %{{y}} s<extra></extra>",
            )
            figure.add_trace(line, row=row, col=1)
        goal = goals_s.get(key)
        if goal is not None:
            line_of_goal = {"color": INK, "dash": "longdash", "width": 1.5}
            figure.add_hline(
                y=goal, row=row, col=1, line=line_of_goal, annotation_text=f"goal {seconds(goal)}"
            )
        figure.update_yaxes(
            title={"text": f"{words}, s", "font": {"size": 10}}, rangemode="tozero", row=row, col=1
        )
    rate = _line(x, rounded(100 * hit_rate(frame, edges)), "prefix hit rate, %", "#009e73", "solid")
    rate.update(mode="lines+markers", marker={"size": 4})
    figure.add_trace(rate, row=rows, col=1)
    figure.update_yaxes(
        title={"text": "prefix hits, %", "font": {"size": 10}}, range=[0, 101], row=rows, col=1
    )
    figure.update_xaxes(ticksuffix=" s", range=list(window_s))
    return finish(figure, 620, dragmode="select")


def endings(frame: pd.DataFrame) -> pd.DataFrame:
    """Return how many requests ended in which way: columns status, reason and requests."""
    counted = frame.groupby(["status", "reason"], dropna=False).size().reset_index(name="requests")
    return counted.sort_values("requests", ascending=False, kind="stable").reset_index(drop=True)

"""What every request was doing: a bar for each phase of its life, most of them at once, or a few in full."""

from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from dashboard.figures.style import INK, finish, seconds, times
from traces.moments import Int64Array
from traces.palette import PHASE_LOOKS, Look, darker
from traces.phases import PHASES, PREEMPTED, SWAPPED, Phases

MAX_BARS = 4_400
ROWS = 40  # requests in one figure
SEEN = 1 / 1200  # of the width: shorter intervals are joined to a neighbour


def pick_rows(requests: Int64Array, first: int) -> Int64Array:
    """One figure's worth of an ordered list of requests."""
    return requests[first : first + ROWS]


def visible(phases: Phases, rows: Int64Array, window_s: tuple[float, float]) -> Phases:
    """The intervals to draw for some requests, at most MAX_BARS.

    While there are more, the shortest go and leave a gap; preempted and swapped ones are the last to go.
    """
    mine = phases.of(rows).within(window_s)
    keep = np.ones(len(mine.request), dtype=bool)
    length = mine.end_s - mine.start_s
    never = (mine.phase == PREEMPTED) | (mine.phase == SWAPPED)
    if len(length) > MAX_BARS:
        rank = np.where(never, np.inf, length)
        keep[np.argsort(rank)[: len(length) - MAX_BARS]] = False
    return mine.where(keep)


def gantt(phases: Phases, rows: Int64Array, window_s: tuple[float, float], chosen: int | None = None) -> go.Figure:
    """A row a request (the first on top), a bar a phase."""
    shown = visible(phases, rows, window_s)
    names = [f"r{number}" for number in rows]
    place = {int(number): name for number, name in zip(rows, names, strict=True)}
    figure = go.Figure()
    for code, name in enumerate(PHASES):
        look, at = PHASE_LOOKS[name], np.flatnonzero(shown.phase == code)
        if not len(at):
            continue
        start = np.maximum(shown.start_s[at], window_s[0])
        end = np.minimum(shown.end_s[at], window_s[1])
        figure.add_trace(
            go.Bar(
                base=times(start, window_s),
                x=times(np.maximum(end - start, (window_s[1] - window_s[0]) * SEEN), window_s),
                y=[place[int(number)] for number in shown.request[at]],
                customdata=[seconds(float(s)) for s in (shown.end_s - shown.start_s)[at]],
                orientation="h",
                name=look.words,
                marker=_filled(look),
                hovertemplate="%{y}: " + look.words + "<br>from %{base} s for %{customdata}<extra></extra>",
            )
        )
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1], type="category", tickfont={"size": 10})
    figure.update_xaxes(title_text="seconds since the start", range=list(window_s))
    finish(figure, 120 + 15 * max(len(rows), 6), dragmode="select")
    figure.update_layout(barmode="overlay", bargap=0.25, hovermode="closest", legend={"y": 1.02, "yanchor": "bottom"})
    if chosen in place:
        figure.add_hline(y=place[int(chosen)], line={"color": INK, "dash": "dot", "width": 1})
    return figure


def _filled(look: Look) -> dict[str, Any]:
    """A bar's colour and hatch."""
    marker: dict[str, Any] = {"color": look.colour, "line": {"width": 0}}
    if look.hatch:
        lines = {"shape": look.hatch, "fgcolor": darker(look.colour), "bgcolor": look.colour}
        marker["pattern"] = lines | {"size": 6, "solidity": 0.25}
    return marker


def phase_totals(phases: Phases, requests: Int64Array) -> npt.NDArray[np.float64]:
    """Seconds [phase] that these requests spent in each phase together."""
    return np.asarray(phases.totals(requests).sum(axis=0), dtype=np.float64)


def totals_figure(phases: Phases, requests: Int64Array, title: str) -> go.Figure:
    """Where the time of these requests went: one bar, a part a phase."""
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
    figure.update_xaxes(title_text="seconds, all requests together")
    finish(figure, 190, title)
    figure.update_layout(barmode="stack", hovermode="closest", legend={"y": -0.75})
    return figure

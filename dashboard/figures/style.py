"""What all figures share: size limits, units, and colours that suit light and dark pages."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from zlab.traces.palette import BLOCK_LOOKS, Look, darker

MAX_MARKS = 5_000  # points, bars and cells in one figure
INK = "#808893"  # of lines: at least 3:1 on white and on the dark page
INKS = {"light": "#565c66", "dark": "#b9bfc9"}  # of words, by theme: at least 4.5:1
GRID = "rgba(128, 136, 147, 0.22)"
FREE_ALPHA = 56  # of 255: free blocks are a tint of INK over the page's background
FREE_FILL = f"rgba(128, 136, 147, {FREE_ALPHA / 255:.3f})"
CONFIG = {
    "displaylogo": False,
    "scrollZoom": False,
    "modeBarButtonsToRemove": ["lasso2d"],
    "toImageButtonOptions": {"scale": 2},
}

_SIZED = ("x", "y", "base", "values", "lat")


def num_marks(figure: go.Figure) -> int:
    """Return the number of points, bars and cells of a figure, layout images and lines included."""
    marks = len(figure.layout.shapes) + len(figure.layout.images) + len(figure.layout.annotations)
    for trace in figure.data:
        if trace.type == "heatmap":
            marks += int(np.size(trace.z))
        else:
            marks += max(
                (len(trace[name]) for name in _SIZED if name in trace and trace[name] is not None),
                default=0,
            )
    return marks


def num_bytes(figure: go.Figure) -> int:
    """Return the size of the figure as JSON, in bytes."""
    return len(figure.to_json().encode())


def finish(
    figure: go.Figure, height: int, title: str = "", dragmode: str | None = "zoom"
) -> go.Figure:
    """Apply the common layout. A figure with more than MAX_MARKS marks is a programming error."""
    marks = num_marks(figure)
    assert marks <= MAX_MARKS, f"{marks} marks in one figure, at most {MAX_MARKS}"
    figure.update_layout(
        height=height,
        title={"text": title, "font": {"size": 15}} if title else None,
        margin={"l": 64, "r": 16, "t": 40 if title else 24, "b": 44},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": INK, "size": 12},
        legend={"orientation": "h", "y": -0.12, "yanchor": "top", "font": {"size": 11}},
        hoverlabel={"align": "left"},
        dragmode=dragmode,
        uirevision="keep",  # a refresh keeps zoom and hidden lines
        newselection={"line": {"color": INK, "dash": "dot"}},
    )
    figure.update_xaxes(gridcolor=GRID, zerolinecolor=GRID, linecolor=GRID)
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=GRID, linecolor=GRID)
    return figure


def plain(text: object) -> str:
    """Return a name for Plotly that is shown as it is: no markup, no link, no placeholder."""
    return escape(str(text)).replace("%{", "%\u2060{").replace("$", "\u2060$")


def mark_moments(figure: go.Figure, moments: Sequence[tuple[float, str]]) -> go.Figure:
    """Draw a line through a figure over time at each moment (seconds, words at its top)."""
    for moment_s, words in moments:
        figure.add_vline(x=moment_s, line={"color": INK, "dash": "dashdot", "width": 1.5})
        figure.add_annotation(
            x=moment_s,
            y=1,
            xref="x",
            yref="paper",
            text=plain(words),
            showarrow=False,
            textangle=-90,
            xanchor="left",
            yanchor="top",
            font={"size": 10},
        )
    return figure


def mark_area(figure: go.Figure, area_s: tuple[float, float]) -> go.Figure:
    """Shade a part of the time in a figure, from and to in seconds."""
    return figure.add_vrect(
        x0=area_s[0],
        x1=area_s[1],
        fillcolor=INK,
        opacity=0.25,
        line={"color": INK, "width": 1},
        layer="above",
    )


def empty(words: str, height: int = 160) -> go.Figure:
    """Return a figure that says why there is nothing to show."""
    figure = go.Figure()
    figure.add_annotation(
        text=words, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper", font={"size": 14}
    )
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return finish(figure, height)


def area(
    look: Look, x: Sequence[float], y: Sequence[float | None], group: str, name: str = ""
) -> go.Scatter:
    """Return one layer of a stacked area, filled with the colour and hatch of `look`."""
    fill: Mapping[str, Any] = {
        "fillcolor": FREE_FILL if look is BLOCK_LOOKS["free"] else look.colour
    }
    if look.hatch:
        lines = {"shape": look.hatch, "fgcolor": darker(look.colour), "bgcolor": look.colour}
        fill = {"fillpattern": lines | {"size": 6, "solidity": 0.25}}
    return go.Scatter(
        x=x,
        y=y,
        name=name or look.words,
        mode="lines",
        line={"width": 0.5, "color": darker(look.colour), "shape": "hv"},
        stackgroup=group,
        hovertemplate="%{y:,} " + (name or look.words) + "<extra></extra>",
        **fill,
    )


def rounded(values: Any, digits: int = 4) -> list[float | None]:
    """Round numbers to `digits` significant digits; NaN becomes a gap."""
    return [
        None if np.isnan(value) else float(f"{value:.{digits}g}")
        for value in np.asarray(values, dtype=float)
    ]


def times(values: Any, window_s: tuple[float, float]) -> list[float]:
    """Round moments to a ten-thousandth of the window."""
    span = max(window_s[1] - window_s[0], 1e-9)
    digits = max(0, int(np.ceil(4 - np.log10(span))))
    return [round(float(value), digits) for value in values]


def seconds(value: float) -> str:
    """Return a duration in seconds as text with a suitable unit."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"

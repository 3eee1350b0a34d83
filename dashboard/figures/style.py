"""What all figures have in common: bounds on what is sent, units, a look that suits light and dark."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from traces.palette import BLOCK_LOOKS, Look, darker

MAX_MARKS = 5_000  # points, bars and cells that one figure may hold
INK = "#808893"  # readable on white and on black
GRID = "rgba(128, 136, 147, 0.22)"
FREE_ALPHA = 56  # of 255: free blocks are a tint of INK over whatever the page's background is
FREE_FILL = f"rgba(128, 136, 147, {FREE_ALPHA / 255:.3f})"
CONFIG = {
    "displaylogo": False,
    "scrollZoom": False,
    "modeBarButtonsToRemove": ["lasso2d"],
    "toImageButtonOptions": {"scale": 2},
}

_SIZED = ("x", "y", "base", "values", "lat")


def num_marks(figure: go.Figure) -> int:
    """Points, bars and cells of a figure, pictures and lines of the layout included."""
    marks = len(figure.layout.shapes) + len(figure.layout.images) + len(figure.layout.annotations)
    for trace in figure.data:
        if trace.type == "heatmap":
            marks += int(np.size(trace.z))
        else:
            marks += max((len(trace[name]) for name in _SIZED if name in trace and trace[name] is not None), default=0)
    return marks


def num_bytes(figure: go.Figure) -> int:
    """What the figure is on its way to the browser."""
    return len(figure.to_json().encode())


def finish(figure: go.Figure, height: int, title: str = "", dragmode: str | None = "zoom") -> go.Figure:
    """Set what is common to all figures. A figure beyond MAX_MARKS is a bug of its maker."""
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


def empty(words: str, height: int = 160) -> go.Figure:
    """A figure that says why there is nothing to see."""
    figure = go.Figure()
    figure.add_annotation(text=words, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper", font={"size": 14})
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return finish(figure, height)


def area(look: Look, x: Sequence[float], y: Sequence[float], group: str, name: str = "") -> go.Scatter:
    """One layer of a stack, filled with the colour and the hatch of what it stands for."""
    fill: Mapping[str, Any] = {"fillcolor": FREE_FILL if look is BLOCK_LOOKS["free"] else look.colour}
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
    """Numbers short enough to send, with `digits` significant digits; NaN becomes a gap."""
    return [None if np.isnan(value) else float(f"{value:.{digits}g}") for value in np.asarray(values, dtype=float)]


def times(values: Any, window_s: tuple[float, float]) -> list[float]:
    """Moments rounded to a ten-thousandth of what is shown."""
    span = max(window_s[1] - window_s[0], 1e-9)
    digits = max(0, int(np.ceil(4 - np.log10(span))))
    return [round(float(value), digits) for value in values]


def seconds(value: float) -> str:
    """A duration in words that suit its size."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"

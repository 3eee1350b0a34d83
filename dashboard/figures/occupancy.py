"""Which block is what, and when: a picture of the pool with everything on one time axis."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboard.figures.style import FREE_ALPHA, INK, area, finish, times
from traces.detail import count_marks, dominant, fullest_counts, lives_at, shares
from traces.follow import Held, blocks_of, fill_at
from traces.holding import Holdings
from traces.moments import FloatArray
from traces.occupancy import CACHED, FREE, HELD, OWNED, SHARED, STATES, TARGET, Occupancy
from traces.palette import BLOCK_LOOKS, CYCLE, MARK_LOOKS
from traces.png import data_uri, enlarge, indexed_png, textured, textured_colours

PICTURE = (1000, 400)  # pixels, at least
HOVER = (56, 48)  # columns, rows that the pointer finds
NUM_BINS = 150
STACKED = ("shared", "owned", "target", "held", "cached", "free")
DIMMED = "#aab3bf"
CHOSEN = "#d55e00"
NOBODY = 0


@dataclass(frozen=True)
class Shown:
    """What part of a recording is looked at: seconds, and blocks from (inclusive) to (exclusive)."""

    window_s: tuple[float, float]
    blocks: tuple[int, int]

    @property
    def num_blocks(self) -> int:
        """How many blocks are looked at."""
        return self.blocks[1] - self.blocks[0]


@dataclass(frozen=True)
class Marks:
    """Moments, in seconds, that no level of detail may hide."""

    preempted_s: FloatArray
    compressed_s: FloatArray


def state_cells(occupancy: Occupancy, shown: Shown) -> npt.NDArray[np.int8]:
    """State [row, column] of the picture's cells: one block a row where they fit, else what most were for most time."""
    num_rows = min(shown.num_blocks, PICTURE[1])
    return dominant(shares(occupancy, shown.window_s, shown.blocks, PICTURE[0], num_rows))


def request_cells(occupancy: Occupancy, shown: Shown) -> npt.NDArray[np.uint8]:
    """Colour number [row, column] by who holds a block in the middle of the column; one block of each row is looked at.

    0: nobody; 1: several, 2: cached; from 3 on one of the cycle's colours.
    """
    num_rows = min(shown.num_blocks, PICTURE[1])
    rows = shown.blocks[0] + np.arange(num_rows) * shown.num_blocks // num_rows
    edges = np.linspace(*shown.window_s, PICTURE[0] + 1)
    index = lives_at(occupancy, (edges[1:] + edges[:-1]) / 2)[rows]
    state, owner = occupancy.lives.state[index], occupancy.lives.owner[index]
    cells = np.where(owner >= 0, 3 + owner % len(CYCLE), NOBODY)
    return np.where(state == SHARED, 1, np.where(state == CACHED, 2, cells)).astype(np.uint8)


def picture(occupancy: Occupancy, shown: Shown, colour_by: str, request: int | None) -> str:
    """The cells as an address of a PNG; `colour_by` is "state" or "request"; one request's blocks stand out."""
    if colour_by == "request":
        cells = request_cells(occupancy, shown)
        colours = ["#ffffff", BLOCK_LOOKS["shared"].colour, BLOCK_LOOKS["cached"].colour, *CYCLE]
        hatches = ["", "/", ".", *[""] * len(CYCLE)]
    else:
        cells = state_cells(occupancy, shown).astype(np.uint8)
        colours, hatches = ([getattr(look, part) for look in BLOCK_LOOKS.values()] for part in ("colour", "hatch"))
    if request is not None:
        cells = np.where(cells == NOBODY, NOBODY, 1).astype(np.uint8)
        cells[_held_cells(blocks_of(occupancy, request), shown, cells.shape)] = 2
        colours, hatches = ["#ffffff", DIMMED, CHOSEN], ["", "", ""]
    pixels = textured(enlarge(cells, *PICTURE), hatches)
    return data_uri(indexed_png(pixels, textured_colours([INK, *colours[1:]]), clear=0, alpha=FREE_ALPHA))


def _held_cells(held: Held, shown: Shown, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Cells [row, column] in which a request holds at least one block for some time."""
    num_rows, num_columns = shape
    cells = np.zeros((num_rows, num_columns), dtype=bool)
    scale = num_columns / (shown.window_s[1] - shown.window_s[0])
    for block, start, end in zip(held.block, held.start_s, held.end_s, strict=True):
        if shown.blocks[0] <= block < shown.blocks[1] and end > shown.window_s[0] and start < shown.window_s[1]:
            first = int(max(0.0, (start - shown.window_s[0]) * scale))
            last = int(np.ceil(min(float(num_columns), (end - shown.window_s[0]) * scale)))
            cells[(block - shown.blocks[0]) * num_rows // shown.num_blocks, first : max(last, first + 1)] = True
    return cells


def hover_grid(
    occupancy: Occupancy, holdings: Holdings, shown: Shown
) -> tuple[FloatArray, FloatArray, list[list[str]]]:
    """(moments, middle of each row in blocks, words [row, column]) told to the pointer: states at the moment."""
    num_rows = min(shown.num_blocks, HOVER[1])
    edges = np.linspace(*shown.window_s, HOVER[0] + 1)
    moments = (edges[1:] + edges[:-1]) / 2
    bounds = shown.blocks[0] + np.arange(num_rows + 1) * shown.num_blocks // num_rows
    index = lives_at(occupancy, moments)
    fill = fill_at(occupancy, holdings, moments, index)
    lives, size = occupancy.lives, occupancy.block_size
    state, owner, refs = lives.state[index], lives.owner[index], lives.refs[index]
    seen, starts = slice(0, int(bounds[-1])), bounds[:-1]

    def in_rows(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        summed: npt.NDArray[np.int64] = np.add.reduceat(values[seen], starts, axis=0, dtype=np.int64)
        return summed

    counts = np.stack([in_rows(state == code) for code in range(len(STATES))])
    known = ((state == OWNED) | (state == SHARED)) & (fill >= 0)
    full = in_rows(np.where(known, fill, 0)) / np.maximum(in_rows(known), 1) / size
    words = []
    for line, (low, high) in enumerate(pairwise(bounds.tolist())):
        row = []
        for c in range(len(moments)):
            if high - low == 1:
                row.append(_one_block(low, state[low, c], owner[low, c], refs[low, c], fill[low, c], size))
            else:
                row.append(_some_blocks(low, high, counts[:, line, c], owner[low:high, c].tolist(), full[line, c]))
        words.append(row)
    return moments, (bounds[1:] + bounds[:-1] - 1) / 2, words


def _one_block(block: int, state: np.int8, owner: np.int32, refs: np.int32, fill: np.int32, size: int) -> str:
    lines = [f"block {block}: {BLOCK_LOOKS[STATES[state]].words}"]
    if owner >= 0:
        lines.append(f"held by r{owner}")
    if state in (OWNED, SHARED, TARGET, HELD):
        lines.append(f"{refs} owner{'s' if refs != 1 else ''}")
    if state != FREE:
        lines.append(f"{fill} of {size} tokens" if fill >= 0 else "being copied")
    return "<br>".join(lines)


def _some_blocks(low: int, high: int, counts: npt.NDArray[np.int64], owners: list[int], full: float) -> str:
    """`counts` of blocks by state, who holds them (-1: nobody or several), and how full the known ones are."""
    lines = [f"blocks {low} to {high - 1}"]
    lines += [f"{counts[s]} {BLOCK_LOOKS[STATES[s]].words}" for s in np.argsort(-counts) if counts[s]]
    held = Counter(owners)
    held.pop(-1, None)
    if held:
        most = ", ".join(f"r{number}" for number, _ in held.most_common(4))
        lines.append(f"held by {most}" + (" and others" if len(held) > 4 else ""))
    if full > 0:
        lines.append(f"{full:.0%} full")
    return "<br>".join(lines)


def occupancy_figure(
    occupancy: Occupancy,
    holdings: Holdings,
    marks: Marks,
    shown: Shown,
    colour_by: str = "state",
    request: int | None = None,
) -> go.Figure:
    """The picture, the marks below it, and the blocks by state on the same time axis."""
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.025, row_heights=[0.62, 0.12, 0.26])
    add_picture(figure, occupancy, holdings, shown, colour_by, request)
    add_marks(figure, occupancy, marks, shown)
    edges, counts = fullest_counts(occupancy, shown.window_s, NUM_BINS)
    x = times(edges, shown.window_s)
    for name in STACKED:
        values = counts[:, STATES.index(name)]
        figure.add_trace(area(BLOCK_LOOKS[name], x, [*values.tolist(), int(values[-1])], "blocks"), row=3, col=1)
    figure.update_yaxes(title_text="blocks", range=[0, occupancy.num_blocks], row=3, col=1)
    figure.update_xaxes(title_text="seconds since the start", row=3, col=1)
    finish(figure, 640, dragmode="select")
    figure.update_xaxes(range=list(shown.window_s))
    figure.update_layout(hovermode="closest", legend={"y": -0.11})
    return figure


def add_picture(
    figure: go.Figure, occupancy: Occupancy, holdings: Holdings, shown: Shown, colour_by: str, request: int | None
) -> None:
    """The first row: cells as an image, and an unseen grid over it that answers the pointer."""
    low, high = shown.blocks
    figure.add_layout_image(
        source=picture(occupancy, shown, colour_by, request),
        xref="x",
        yref="y",
        x=shown.window_s[0],
        y=low - 0.5,
        sizex=shown.window_s[1] - shown.window_s[0],
        sizey=high - low,
        sizing="stretch",
        layer="below",
        yanchor="top",
    )
    moments, rows, words = hover_grid(occupancy, holdings, shown)
    figure.add_trace(
        go.Heatmap(
            x=times(moments, shown.window_s),
            y=rows.tolist(),
            z=np.zeros((len(rows), len(moments)), dtype=np.int8).tolist(),
            text=words,
            hovertemplate="%{x} s<br>%{text}<extra></extra>",
            showscale=False,
            opacity=0,
            name="blocks",
        ),
        row=1,
        col=1,
    )
    figure.update_yaxes(title_text="block number", range=[high - 0.5, low - 0.5], row=1, col=1)


def add_marks(figure: go.Figure, occupancy: Occupancy, marks: Marks, shown: Shown) -> None:
    """The second row: a sign in every bin with a preemption, a compression, or a moment without an available block."""
    edges, counts = fullest_counts(occupancy, shown.window_s, NUM_BINS)
    middle = (edges[1:] + edges[:-1]) / 2
    full = (counts[:, FREE] + counts[:, CACHED] == 0).astype(int)
    rows = (
        ("preemption", 2, count_marks(marks.preempted_s, shown.window_s, NUM_BINS)),
        ("compression", 1, count_marks(marks.compressed_s, shown.window_s, NUM_BINS)),
        ("full", 0, full),
    )
    for name, place, found in rows:
        at = np.flatnonzero(found)
        look = MARK_LOOKS[name]
        colour = INK if name == "preemption" else look.colour
        words = "no block available" if name == "full" else "%{customdata} " + look.words + "s"
        figure.add_trace(
            go.Scatter(
                x=times(middle[at], shown.window_s),
                y=[place] * len(at),
                customdata=found[at].tolist(),
                mode="markers",
                name=look.words,
                marker={"symbol": look.symbol, "color": colour, "size": 6, "line": {"width": 1.5, "color": colour}},
                hovertemplate="%{x} s<br>" + words + "<extra></extra>",
            ),
            row=2,
            col=1,
        )
    labels = ["preempted", "compressed", "full"]
    figure.update_yaxes(range=[-0.7, 2.7], tickvals=[2, 1, 0], ticktext=labels, showgrid=False, row=2, col=1)

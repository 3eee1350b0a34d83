"""The picture of the pool: the state of each block over time, with events on the same axis.

Pillow writes the cells as a PNG. Plotly alone would need a trace of one value a cell, which a
browser draws slowly, and a PNG file of a plotly figure would need a Chromium.
"""

import base64
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from PIL import Image
from plotly.subplots import make_subplots

from zlab.dashboard.figures.style import FREE_ALPHA, INK, area, finish, rounded, seconds, times
from zlab.traces.occupancy import (
    CACHED,
    FREE,
    HELD,
    OWNED,
    SHARED,
    STATES,
    TARGET,
    Held,
    Occupancy,
    Overview,
    PoolCounts,
    blocks_of,
    count_marks,
    fill_at,
    full_share,
    lives_at,
    mean_counts,
    painted,
    shares,
)
from zlab.traces.palette import BLOCK_LOOKS, CYCLE, MARK_LOOKS, darker, rgb
from zlab.traces.recording import Recording
from zlab.traces.schema import EventKind
from zlab.traces.timeline import FloatArray, Holdings, Names, event_times, step_times

PICTURE = (1000, 400)  # pixels, at least
HOVER = (56, 48)  # columns and rows of the grid that shows words at the pointer
NUM_BINS = 150
STACKED = ("shared", "owned", "target", "held", "cached", "free")
DIMMED = "#aab3bf"
CHOSEN = "#d55e00"
NO_OWNER = 0


@dataclass(frozen=True)
class Shown:
    """The part of a recording that is shown: seconds, and blocks from (inclusive) to
    (exclusive).
    """

    window_s: tuple[float, float]
    blocks: tuple[int, int]

    @property
    def num_blocks(self) -> int:
        """Number of blocks shown."""
        return self.blocks[1] - self.blocks[0]


@dataclass(frozen=True)
class Marks:
    """Times in seconds that are drawn at every level of detail."""

    preempted_s: FloatArray
    compressed_s: FloatArray


def read_marks(recording: Recording) -> Marks:
    """Return the times at which requests were preempted and compressions began."""
    names = Names(recording.manifest)
    events = recording.table("events", ("step", "kind", "request"))
    moments = event_times(
        events, step_times(recording.table("steps", ("step", "start_s", "end_s"))), names
    )
    kind = names.kinds(events)
    return Marks(moments[kind == EventKind.PREEMPTED], moments[kind == EventKind.COMPRESSING])


def indexed_image(
    pixels: npt.NDArray[np.uint8], colours: Sequence[str], clear_alpha: int = 0
) -> bytes:
    """Return a PNG of `pixels` [height, width], each an index into `colours` ("#rrggbb").

    Index 0 is see-through: `clear_alpha` is 0 (entirely) to 255 (not at all).
    """
    image = Image.fromarray(pixels)
    image.putpalette([part for colour in colours for part in rgb(colour)])
    written = BytesIO()
    image.save(written, "png", transparency=bytes([clear_alpha]))
    return written.getvalue()


def enlarge(cells: npt.NDArray[np.uint8], width: int, height: int) -> npt.NDArray[np.uint8]:
    """Return each cell repeated a whole number of times, to about `width` x `height` or more."""
    rows, columns = cells.shape
    return cells.repeat(max(1, round(height / rows)), axis=0).repeat(
        max(1, round(width / columns)), axis=1
    )


def textured(pixels: npt.NDArray[np.uint8], hatches: Sequence[str]) -> npt.NDArray[np.uint8]:
    """Return 2 * value, plus 1 where the value's hatch (as in `traces.palette`) draws a line."""
    height, width = pixels.shape
    down, right = np.indices((height, width))
    drawn = {
        "/": (down + right) % 6 == 0,
        "\\": (down - right) % 6 == 0,
        "x": ((down + right) % 6 == 0) | ((down - right) % 6 == 0),
        "|": right % 4 == 0,
        "-": down % 4 == 0,
        ".": (down % 4 == 0) & (right % 4 == 0),
    }
    result = (pixels * 2).astype(np.uint8)
    for value, hatch in enumerate(hatches):
        if hatch:
            result[(pixels == value) & drawn[hatch]] += 1
    return result


def state_cells(occupancy: Occupancy, shown: Shown) -> npt.NDArray[np.int8]:
    """Return the state [row, column] of the picture's cells.

    A row is one block where the blocks fit. Painted areas are as large as the true shares.
    """
    num_rows = min(shown.num_blocks, PICTURE[1])
    parts = shares(occupancy, shown.window_s, shown.blocks, PICTURE[0], num_rows)
    return painted(parts, one_block_a_row=num_rows == shown.num_blocks)


def request_cells(occupancy: Occupancy, shown: Shown) -> npt.NDArray[np.uint8]:
    """Return a colour number [row, column] by the owner of a block in the middle of the column.

    One block of each row is looked at. 0: no owner; 1: several owners; 2: cached; from 3 on: one of
    the cycle's colours.
    """
    num_rows = min(shown.num_blocks, PICTURE[1])
    rows = shown.blocks[0] + np.arange(num_rows) * shown.num_blocks // num_rows
    edges = np.linspace(*shown.window_s, PICTURE[0] + 1)
    index = lives_at(occupancy, (edges[1:] + edges[:-1]) / 2)[rows]
    state, owner = occupancy.lives.state[index], occupancy.lives.owner[index]
    cells = np.where(owner >= 0, 3 + owner % len(CYCLE), NO_OWNER)
    return np.where(state == SHARED, 1, np.where(state == CACHED, 2, cells)).astype(np.uint8)


def picture(occupancy: Occupancy, shown: Shown, colour_by: str, request: int | None) -> str:
    """Return the cells as the data URI of a PNG. `colour_by` is "state" or "request"; blocks of
    `request` are highlighted.
    """
    if colour_by == "request":
        cells = request_cells(occupancy, shown)
        colours = ["#ffffff", BLOCK_LOOKS["shared"].colour, BLOCK_LOOKS["cached"].colour, *CYCLE]
        hatches = ["", "/", ".", *[""] * len(CYCLE)]
    else:
        cells = state_cells(occupancy, shown).astype(np.uint8)
        colours, hatches = _state_looks()
    if request is not None:
        cells = np.where(cells == NO_OWNER, NO_OWNER, 1).astype(np.uint8)
        cells[_held_cells(blocks_of(occupancy, request), shown, cells.shape)] = 2
        colours, hatches = ["#ffffff", DIMMED, CHOSEN], ["", "", ""]
    return _as_uri(cells, colours, hatches)


def overview_picture(overview: Overview) -> str:
    """Return the cells of a whole run as the data URI of a PNG, as `picture` of its occupancy."""
    parts = overview.shares((0.0, overview.last_s), PICTURE[0])
    cells = painted(parts, one_block_a_row=parts.shape[1] == overview.num_blocks)
    return _as_uri(cells.astype(np.uint8), *_state_looks())


def _state_looks() -> tuple[list[str], list[str]]:
    """Return the colour and the hatch of each state."""
    looks = BLOCK_LOOKS.values()
    return [look.colour for look in looks], [look.hatch for look in looks]


def _as_uri(cells: npt.NDArray[np.uint8], colours: list[str], hatches: list[str]) -> str:
    """Return cells [row, column], each an index into `colours`, as the data URI of a PNG."""
    pixels = textured(enlarge(cells, *PICTURE), hatches)
    shades = [shade for colour in [INK, *colours[1:]] for shade in (colour, darker(colour))]
    png = indexed_image(pixels, shades, FREE_ALPHA)
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _held_cells(held: Held, shown: Shown, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Return the cells [row, column] in which a request holds at least one block for some time."""
    num_rows, num_columns = shape
    cells = np.zeros((num_rows, num_columns), dtype=bool)
    scale = num_columns / (shown.window_s[1] - shown.window_s[0])
    for block, start, end in zip(held.block, held.start_s, held.end_s, strict=True):
        if (
            shown.blocks[0] <= block < shown.blocks[1]
            and end > shown.window_s[0]
            and start < shown.window_s[1]
        ):
            first = int(max(0.0, (start - shown.window_s[0]) * scale))
            last = int(np.ceil(min(float(num_columns), (end - shown.window_s[0]) * scale)))
            cells[
                (block - shown.blocks[0]) * num_rows // shown.num_blocks,
                first : max(last, first + 1),
            ] = True
    return cells


@dataclass(frozen=True)
class HoverGrid:
    """What the pointer finds in the picture, in rows of blocks and columns of moments.

    Attributes:
        moments_s: Moment of each column, in seconds.
        rows: Middle of each row, in blocks.
        words: What the blocks of a row are at that moment [row, column].
        holder: Request that alone owns most blocks of the row then [row, column], -1 without one.
        block: A block of the row that this request owns, the first block of the row without one.
    """

    moments_s: FloatArray
    rows: FloatArray
    words: list[list[str]]
    holder: npt.NDArray[np.int64]
    block: npt.NDArray[np.int64]


def hover_grid(occupancy: Occupancy, holdings: Holdings, shown: Shown) -> HoverGrid:
    """Return what the pointer finds at each point of a grid over the picture."""
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
        summed: npt.NDArray[np.int64] = np.add.reduceat(
            values[seen], starts, axis=0, dtype=np.int64
        )
        return summed

    counts = np.stack([in_rows(state == code) for code in range(len(STATES))])
    known = ((state == OWNED) | (state == SHARED)) & (fill >= 0)
    full = in_rows(np.where(known, fill, 0)) / np.maximum(in_rows(known), 1) / size
    words = []
    holder = np.full((num_rows, len(moments)), -1, dtype=np.int64)
    block = np.repeat(bounds[:-1, None], len(moments), axis=1)
    for line, (low, high) in enumerate(pairwise(bounds.tolist())):
        row = []
        for c in range(len(moments)):
            holder[line, c], at = _main_owner(owner[low:high, c].tolist())
            block[line, c] += at
            if high - low == 1:
                row.append(
                    _one_block(low, state[low, c], owner[low, c], refs[low, c], fill[low, c], size)
                )
            else:
                row.append(
                    _some_blocks(
                        low, high, counts[:, line, c], owner[low:high, c].tolist(), full[line, c]
                    )
                )
        words.append(row)
    return HoverGrid(moments, (bounds[1:] + bounds[:-1] - 1) / 2, words, holder, block)


def _main_owner(owners: list[int]) -> tuple[int, int]:
    """Return the request that owns most blocks and the place of its first one, (-1, 0) without."""
    counted = Counter(number for number in owners if number >= 0)
    if not counted:
        return -1, 0
    number = counted.most_common(1)[0][0]
    return number, owners.index(number)


def _one_block(
    block: int, state: np.int8, owner: np.int32, refs: np.int32, fill: np.int32, size: int
) -> str:
    lines = [f"block {block}: {BLOCK_LOOKS[STATES[state]].words}"]
    if owner >= 0:
        lines.append(f"held by r{owner}")
    if state in (OWNED, SHARED, TARGET, HELD):
        lines.append(f"{refs} owner{'s' if refs != 1 else ''}")
    if state != FREE:
        lines.append(f"{fill} of {size} tokens" if fill >= 0 else "being copied")
    return "<br>".join(lines)


def _some_blocks(
    low: int, high: int, counts: npt.NDArray[np.int64], owners: list[int], full: float
) -> str:
    """Describe several blocks: counts by state, owners (-1: none or several), mean fill of owned
    blocks.
    """
    lines = [f"blocks {low} to {high - 1}"]
    lines += [
        f"{counts[s]} {BLOCK_LOOKS[STATES[s]].words}" for s in np.argsort(-counts) if counts[s]
    ]
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
    """Draw the picture, the events below it, and the blocks by state on the same time axis."""
    figure = make_subplots(
        rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.025, row_heights=[0.62, 0.12, 0.26]
    )
    add_picture(figure, occupancy, holdings, shown, colour_by, request)
    add_marks(figure, occupancy, marks, shown)
    for layer in state_layers(occupancy, shown.window_s, NUM_BINS):
        figure.add_trace(layer, row=3, col=1)
    figure.update_yaxes(title_text="blocks, mean", range=[0, occupancy.num_blocks], row=3, col=1)
    figure.update_xaxes(ticksuffix=" s")
    finish(figure, 640, dragmode="select")
    figure.update_xaxes(range=list(shown.window_s))
    figure.update_layout(hovermode="closest", legend={"y": -0.11})
    return figure


def state_layers(
    occupancy: PoolCounts, window_s: tuple[float, float], num_bins: int
) -> list[go.Scatter]:
    """Return one stacked area for each state: the mean number of its blocks over each time bin."""
    edges, counts = mean_counts(occupancy, window_s, num_bins)
    x = times(edges, window_s)
    return [
        area(BLOCK_LOOKS[name], x, rounded([*values, values[-1]], 6), "blocks")
        for name in STACKED
        for values in [counts[:, STATES.index(name)]]
    ]


def add_picture(
    figure: go.Figure,
    occupancy: Occupancy,
    holdings: Holdings,
    shown: Shown,
    colour_by: str,
    request: int | None,
) -> None:
    """Draw the first row: cells as an image below invisible points that answer the pointer.

    Each point carries the request that owns most blocks there, -1 without one, and a block.
    """
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
    grid = hover_grid(occupancy, holdings, shown)
    moments, rows = times(grid.moments_s, shown.window_s), grid.rows.tolist()
    clear = {"marker": {"opacity": 0}}
    figure.add_trace(
        go.Scatter(
            x=moments * len(rows),
            y=[row for row in rows for _ in moments],
            text=[words for line in grid.words for words in line],
            customdata=np.stack([grid.holder.ravel(), grid.block.ravel()], axis=1).tolist(),
            mode="markers",
            marker={"size": 12, "opacity": 0},
            selected=clear,
            unselected=clear,
            hovertemplate="%{x} s<br>%{text}<extra></extra>",
            showlegend=False,
            name="blocks",
        ),
        row=1,
        col=1,
    )
    figure.update_yaxes(title_text="block number", range=[high - 0.5, low - 0.5], row=1, col=1)


def add_marks(figure: go.Figure, occupancy: Occupancy, marks: Marks, shown: Shown) -> None:
    """Draw the second row: a mark in each bin that has a preemption, a compression or a full
    pool.
    """
    edges = np.linspace(*shown.window_s, NUM_BINS + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    full_s = full_share(occupancy, shown.window_s, NUM_BINS) * np.diff(edges)
    rows = (
        ("preemption", 2, count_marks(marks.preempted_s, shown.window_s, NUM_BINS).tolist()),
        ("compression", 1, count_marks(marks.compressed_s, shown.window_s, NUM_BINS).tolist()),
        ("full", 0, [seconds(value) if value > 0 else "" for value in full_s.tolist()]),
    )
    for name, place, found in rows:
        at = np.array([index for index, value in enumerate(found) if value], dtype=np.intp)
        look = MARK_LOOKS[name]
        colour = INK if name == "preemption" else look.colour
        words = (
            f"no block available for %{{text}} of {seconds(edges[1] - edges[0])}"
            if name == "full"
            else "%{text} " + look.words + "s"
        )
        figure.add_trace(
            go.Scatter(
                x=times(middle[at], shown.window_s),
                y=[place] * len(at),
                text=[str(found[index]) for index in at],
                mode="markers",
                name=look.words,
                marker={
                    "symbol": look.symbol,
                    "color": colour,
                    "size": 6,
                    "line": {"width": 1.5, "color": colour},
                },
                hovertemplate="%{x} s<br>" + words + "<extra></extra>",
            ),
            row=2,
            col=1,
        )
    labels = ["preempted", "compressed", "full"]
    figure.update_yaxes(
        range=[-0.7, 2.7],
        tickvals=[2, 1, 0],
        ticktext=labels,
        tickfont={"size": 9},
        showgrid=False,
        row=2,
        col=1,
    )

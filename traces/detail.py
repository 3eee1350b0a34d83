"""Views of a pool over time at any level of detail.

Nothing is sampled away: a cell says how long its blocks were in each state, and counts over time are taken where the
pool was fullest in each bin.
"""

import numpy as np
import numpy.typing as npt

from traces.moments import BoolArray, FloatArray
from traces.occupancy import CACHED, FREE, STATES, Int8Array, Int32Array, Lives, Occupancy


def shares(
    occupancy: Occupancy, window_s: tuple[float, float], blocks: tuple[int, int], num_columns: int, num_rows: int
) -> npt.NDArray[np.float32]:
    """Share of each cell's (time x blocks) that was spent in each state, [state, row, column]; exact at any zoom.

    Rows divide `blocks` (from, to) and columns `window_s` evenly; a cell of one block at one moment is all one state.
    """
    assert 0 < num_rows <= blocks[1] - blocks[0]
    lives = occupancy.lives
    inside = _inside(occupancy, window_s, blocks)
    row = (lives.block[inside].astype(np.int64) - blocks[0]) * num_rows // (blocks[1] - blocks[0])
    flat = lives.state[inside].astype(np.int64) * num_rows + row
    covered = _cover(flat, lives, inside, window_s, num_columns, len(STATES) * num_rows)
    covered = covered.reshape(len(STATES), num_rows, num_columns)
    total = covered.sum(axis=0)
    result: npt.NDArray[np.float32] = (covered / np.where(total > 0, total, 1.0)).astype(np.float32)
    return result


def _inside(occupancy: Occupancy, window_s: tuple[float, float], blocks: tuple[int, int]) -> npt.NDArray[np.intp]:
    """Indices of the lives that overlap a window of time and blocks."""
    lives = occupancy.lives
    low, high = np.searchsorted(lives.block, blocks)
    overlaps = (lives.end_s[low:high] > window_s[0]) & (lives.start_s[low:high] < window_s[1])
    found: npt.NDArray[np.intp] = np.flatnonzero(overlaps) + low
    return found


def _cover(
    flat: npt.NDArray[np.int64],
    lives: Lives,
    inside: npt.NDArray[np.intp],
    window_s: tuple[float, float],
    num_columns: int,
    num_lines: int,
) -> FloatArray:
    """Columns covered by the lives of each line `flat`, [line * column]: an interval is the difference of two ramps."""
    scale = num_columns / (window_s[1] - window_s[0])
    size = num_lines * (num_columns + 1)
    levels = np.zeros(size)
    ramps = np.zeros(size)
    for edge, sign in ((lives.start_s, 1.0), (lives.end_s, -1.0)):
        position = np.clip((edge[inside] - window_s[0]) * scale, 0.0, float(num_columns))
        column = position.astype(np.int64)
        at = flat * (num_columns + 1) + column
        ramps += sign * np.bincount(at, weights=1.0 - (position - column), minlength=size)
        levels += sign * np.bincount(at, minlength=size)
    level = levels.reshape(num_lines, num_columns + 1)
    after = np.cumsum(level, axis=1) - level
    return np.asarray((after + ramps.reshape(num_lines, num_columns + 1))[:, :num_columns])


def dominant(parts: npt.NDArray[np.float32]) -> Int8Array:
    """The state with the largest share of each cell, [row, column]; of equal ones the rarer (later in STATES)."""
    chosen: Int8Array = (len(STATES) - 1 - np.argmax(parts[::-1], axis=0)).astype(np.int8)
    return chosen


def lives_at(occupancy: Occupancy, moments_s: FloatArray) -> npt.NDArray[np.intp]:
    """Index of the life each block is in at each moment, [block, moment]; changes at that very moment have happened."""
    lives = occupancy.lives
    first = np.searchsorted(lives.block, np.arange(occupancy.num_blocks + 1))
    found = np.empty((occupancy.num_blocks, len(moments_s)), dtype=np.intp)
    for block in range(occupancy.num_blocks):
        low, high = first[block], first[block + 1]
        found[block] = low + np.searchsorted(lives.start_s[low:high], moments_s, side="right") - 1
    return found


def fullest_counts(occupancy: Occupancy, window_s: tuple[float, float], num_bins: int) -> tuple[FloatArray, Int32Array]:
    """(bin edges [n + 1], counts [n, state]) at the moment of each time bin when the fewest blocks were available.

    Available is what nobody owns (free and cached): a pool that was full for one step of a bin shows as full.
    """
    edges = np.linspace(*window_s, num_bins + 1)
    last_before = np.maximum(np.searchsorted(occupancy.change_s, edges[:-1], side="right") - 1, 0)
    stop = np.maximum(np.searchsorted(occupancy.change_s, edges[1:], side="left"), last_before + 1)
    available = occupancy.counts[:, FREE] + occupancy.counts[:, CACHED]
    chosen = np.array(
        [low + int(np.argmin(available[low:high])) for low, high in zip(last_before, stop, strict=True)], dtype=np.intp
    )
    return edges, occupancy.counts[chosen]


def count_marks(moments_s: FloatArray, window_s: tuple[float, float], num_bins: int) -> npt.NDArray[np.int64]:
    """How many of some moments fall into each time bin; the window's end belongs to its last bin."""
    counted: npt.NDArray[np.int64] = np.histogram(moments_s, bins=num_bins, range=window_s)[0].astype(np.int64)
    return counted


def is_full(occupancy: Occupancy) -> BoolArray:
    """For each change, whether no block was available from then on (neither free nor cached)."""
    full: BoolArray = (occupancy.counts[:, FREE] + occupancy.counts[:, CACHED]) == 0
    return full

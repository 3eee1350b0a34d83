"""What every block was at every moment, replayed from a recording, and pictures of it at any level of detail.

Nothing is sampled away: a cell of a picture is what its blocks were for most of its time, counts over time are taken
where the pool was fullest in each bin.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces.moments import BoolArray, FloatArray, Names, StepTimes, event_times, pool_of, read_names, step_times
from traces.recording import Recording, RecordingError

Int8Array = npt.NDArray[np.int8]
Int32Array = npt.NDArray[np.int32]
FREE, OWNED, SHARED, CACHED, TARGET, HELD = range(6)
STATES = ("free", "owned", "shared", "cached", "target", "held")
STATE_WORDS = {
    "free": "free",
    "owned": "owned by one request",
    "shared": "shared prefix",
    "cached": "cached, no owner",
    "target": "compression target",
    "held": "in flight (being copied)",
}
NO_REQUEST = -1

_ONE_OWNER = ("took", "grew", "swap_in", "compressing", "compressed")
_NO_OWNER = ("freed", "cached")


@dataclass(frozen=True)
class Lives:
    """Every stretch of one block in one state, by block and then time: block `block[i]` from `start_s[i]` to
    `end_s[i]` in `state[i]` (index into STATES) with `refs[i]` owners by the doing of `request[i]` (-1: nobody's).
    """

    block: Int32Array
    start_s: FloatArray
    end_s: FloatArray
    state: Int8Array
    refs: Int32Array
    request: Int32Array


@dataclass(frozen=True)
class Occupancy:
    """A pool over time: its blocks' lives, and how many blocks were in each state from each change on.

    `counts[i, s]` blocks are in state s from `change_s[i]` to the next change; the first change is the run's start.
    """

    num_blocks: int
    block_size: int
    times: StepTimes
    lives: Lives
    change_s: FloatArray
    counts: Int32Array

    @property
    def span_s(self) -> tuple[float, float]:
        """From the start of the run (0) to the end of its last step, in seconds."""
        return 0.0, self.times.last_s


def read_occupancy(recording: Recording) -> Occupancy:
    """Replay a recording's blocks; of one still being written, as far as its tables agree. Raises RecordingError."""
    return replay_blocks(
        recording.table("blocks", ("block", "kind", "request")),
        recording.table("events", ("step", "kind", "request", "num_blocks")),
        recording.table("steps", ("step", "start_s", "end_s")),
        recording.manifest,
    )


def replay_blocks(blocks: pa.Table, events: pa.Table, steps: pa.Table, manifest: Mapping[str, Any]) -> Occupancy:
    """Replay block changes (columns block, kind, request) beside the events (step, kind, request, num_blocks) that
    made them. Raises RecordingError where a complete recording's tables contradict each other.
    """
    names, times = read_names(manifest), step_times(steps)
    num_blocks, block_size = pool_of(manifest)
    blocks, events = _agreeing(blocks, events, len(times.end_s), bool(manifest.get("complete")))
    moment = np.repeat(event_times(events, times, names), events["num_blocks"].to_numpy())
    block, kind = blocks["block"].to_numpy(), blocks["kind"].to_numpy()
    if len(block) and not 0 <= block.min() <= block.max() < num_blocks:
        raise RecordingError(f"table 'blocks': names block {block.max()} or {block.min()} of a pool of {num_blocks}")
    everything = np.arange(num_blocks, dtype=np.int32)  # each block's first life: free from the start
    block = np.concatenate((everything, block))
    kind = np.concatenate((np.full(num_blocks, names.kinds.get("freed", -1), dtype=kind.dtype), kind))
    moment = np.concatenate((np.zeros(num_blocks), moment))
    request = np.concatenate((np.full(num_blocks, NO_REQUEST), blocks["request"].to_numpy())).astype(np.int32)
    # blocks below 65,536 sort by radix, ten times as fast
    order = np.argsort(block.astype(np.uint16) if num_blocks <= 65_536 else block, kind="stable")
    refs, state = _states(kind[order], names)
    lives = _lives(block[order], moment[order], state, refs, request[order], times.last_s)
    change_s, counts = _counts(lives, order, moment, num_blocks)
    return Occupancy(num_blocks, block_size, times, lives, change_s, counts)


def _agreeing(blocks: pa.Table, events: pa.Table, num_steps: int, complete: bool) -> tuple[pa.Table, pa.Table]:
    """The rows both tables have; parts of a run that is still going on are not written at one moment."""
    named = np.cumsum(events["num_blocks"].to_numpy(), dtype=np.int64)
    total = int(named[-1]) if len(named) else 0
    if complete and total != blocks.num_rows:
        raise RecordingError(f"the events name {total} block changes, the table 'blocks' has {blocks.num_rows}")
    usable = min(total, blocks.num_rows)
    rows = int(np.searchsorted(named, usable, side="right"))
    if not complete:  # what happened after the last step that is written down has no time yet
        rows = min(rows, int(np.searchsorted(events["step"].to_numpy(), num_steps)))
    return blocks.slice(0, int(named[rows - 1]) if rows else 0), events.slice(0, rows)


def _states(kind: Int8Array, names: Names) -> tuple[Int32Array, Int8Array]:
    """(owners, state) of a block after each change; `kind` in block order, each block's first change a freeing."""
    one, none = np.isin(kind, names.kind_codes(_ONE_OWNER)), np.isin(kind, names.kind_codes(_NO_OWNER))
    delta = np.zeros(len(kind), dtype=np.int32)
    delta[kind == names.kinds.get("hit", -1)] = 1
    delta[kind == names.kinds.get("left", -1)] = -1
    steps = np.cumsum(delta, dtype=np.int64)
    index = np.arange(len(kind))
    anchor = np.maximum.accumulate(np.where(one | none, index, 0))  # the last change that says the count outright
    refs = (one[anchor] + steps - steps[anchor]).astype(np.int32)
    if len(refs) and refs.min() < 0:
        raise RecordingError("table 'blocks': a block is given up by more requests than hold it")
    state = np.where(refs > 1, SHARED, np.where(refs == 1, OWNED, FREE)).astype(np.int8)
    state[kind == names.kinds.get("cached", -1)] = CACHED
    state[kind == names.kinds.get("compressing", -1)] = TARGET
    state[np.isin(kind, names.kind_codes(("swap_out", "held")))] = HELD
    return refs, state


def _lives(
    block: Int32Array, moment: FloatArray, state: Int8Array, refs: Int32Array, request: Int32Array, last_s: float
) -> Lives:
    last = np.ones(len(block), dtype=bool)
    last[:-1] = block[1:] != block[:-1]
    end = np.empty_like(moment)
    end[:-1] = moment[1:]
    end[last] = np.maximum(last_s, moment[last])
    owner = np.where((state == FREE) | (state == CACHED), NO_REQUEST, request).astype(np.int32)
    return Lives(block.astype(np.int32), moment, end, state, refs, owner)


def _counts(
    lives: Lives, order: npt.NDArray[np.intp], moment: FloatArray, num_blocks: int
) -> tuple[FloatArray, Int32Array]:
    """Blocks in each state from each moment of change on; `moment` in the order of the recording."""
    first = np.ones(len(lives.block), dtype=bool)
    first[1:] = lives.block[1:] != lives.block[:-1]
    before = np.empty_like(lives.state)
    before[1:] = lives.state[:-1]
    before[first] = -1
    new, old = np.empty_like(lives.state), np.empty_like(before)
    new[order], old[order] = lives.state, before
    if len(moment) and (np.diff(moment) < 0).any():
        raise RecordingError("the events of the recording are not in the order of time")
    keep = np.ones(len(moment), dtype=bool)
    keep[:-1] = moment[1:] > moment[:-1]  # what holds from a moment on is what stands after its last change
    counts = np.empty((int(keep.sum()), len(STATES)), dtype=np.int32)
    for state in range(len(STATES)):
        delta = (new == state).astype(np.int8) - (old == state).astype(np.int8)
        counts[:, state] = np.cumsum(delta, dtype=np.int32)[keep]
    return moment[keep], counts


# ---- level of detail


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


def states_at(occupancy: Occupancy, time_s: float) -> Int8Array:
    """Every block's state at one moment, [block]; changes at that very moment have happened."""
    return occupancy.lives.state[lives_at(occupancy, time_s)]


def lives_at(occupancy: Occupancy, time_s: float) -> npt.NDArray[np.intp]:
    """For every block, the index of the life it is in at a moment."""
    lives = occupancy.lives
    begun = lives.start_s <= time_s
    total = np.concatenate(([0], np.cumsum(begun)))
    first = np.searchsorted(lives.block, np.arange(occupancy.num_blocks + 1))
    found: npt.NDArray[np.intp] = first[:-1] + (total[first[1:]] - total[first[:-1]]) - 1
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

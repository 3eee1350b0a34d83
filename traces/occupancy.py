"""The state of every block at every time, computed from a recording.

`read_occupancy` replays the block changes of a recording into `Lives`: intervals of one block in
one state. Other functions make views of them at any level of detail. Nothing is sampled: a cell of
a picture contains the share of time in each state, and counts over time are time-weighted means.
`life_of` follows one block, and `blocks_of` one request.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from zlab.traces.recording import Recording, RecordingError
from zlab.traces.schema import BlockEffect, BlockState, EventKind
from zlab.traces.timeline import (
    BoolArray,
    FloatArray,
    Holdings,
    Int8Array,
    Names,
    StepTimes,
    event_times,
    kinds_where,
    pool_of,
    step_times,
)

Int32Array = npt.NDArray[np.int32]
FREE, OWNED, SHARED, CACHED, TARGET, HELD = BlockState
STATES = tuple(state.label for state in BlockState)
NO_REQUEST = -1
LIVES_AT_ONCE = 1_000_000  # bounds the memory of a replay
MANY_LIVES = 1_000_000  # a run with more of them gets an overview
OVERVIEW_ROWS, OVERVIEW_COLUMNS = 400, 8_000
KEPT_COLUMNS = 1_000  # columns of the grid that is saved with a recording: a few megabytes
OVERVIEW_FILE = "overview.parquet"
Progress = Callable[[float], None]

ONE_OWNER = kinds_where(
    lambda kind: kind.effect.blocks in (BlockEffect.TAKE, BlockEffect.RESERVE, BlockEffect.REPLACE)
)
NO_OWNER = kinds_where(lambda kind: kind.effect.state in (BlockState.FREE, BlockState.CACHED))
ONE_MORE = kinds_where(lambda kind: kind.effect.blocks is BlockEffect.SHARE)
ONE_FEWER = kinds_where(
    lambda kind: (
        kind.effect.blocks is BlockEffect.GIVE_BACK and kind.effect.state is BlockState.SHARED
    )
)
# states that do not follow from the number of owners
_FIXED_STATE = np.full(len(ONE_OWNER), -1, dtype=np.int8)
for _kind in EventKind:
    if _kind.effect.state in (
        BlockState.CACHED,
        BlockState.COMPACTION_TARGET,
        BlockState.IN_TRANSIT,
    ):
        _FIXED_STATE[_kind] = _kind.effect.state


@dataclass(frozen=True)
class Lives:
    """Every interval of one block in one state, sorted by block and then time.

    The lives of block b are `first[b]` to `first[b + 1] - 1`. Life i begins at
    `moments_s[start[i]]`, ends with the next life of its block or with the run, and has state
    `state[i]` (index into STATES) with `refs[i]` owners. `owner[i]` is its only owner, -1 if it has
    none or several; `actor[i]` is the request that made the change (-1: the start of the run);
    `row[i]` is its row in the recording's table of blocks (-1: the start of the run). A life takes
    19 bytes, so that a run with 28 million of them fits into half a gigabyte.
    """

    first: npt.NDArray[np.int64]
    moments_s: FloatArray
    start: Int32Array
    state: Int8Array
    refs: npt.NDArray[np.int16]
    owner: Int32Array
    actor: Int32Array
    row: Int32Array
    last_s: float

    def __len__(self) -> int:
        """Return the number of lives."""
        return len(self.start)

    def blocks_at(self, index: npt.NDArray[np.intp]) -> Int32Array:
        """Return the block [n] of each of these lives [n]."""
        found: Int32Array = (np.searchsorted(self.first, index, side="right") - 1).astype(np.int32)
        return found

    def starts_at(self, index: npt.NDArray[np.intp]) -> FloatArray:
        """Return the start of each of these lives [n], in seconds."""
        found: FloatArray = self.moments_s[self.start[index]]
        return found

    def between(self, low: int, high: int) -> tuple[Int32Array, FloatArray, FloatArray]:
        """Return block, start and end [n] of the lives `low` to `high - 1`."""
        start = self.moments_s[self.start[low:high]]
        end = np.empty_like(start)
        end[:-1] = start[1:]
        if high < len(self.start):
            end[-1:] = self.moments_s[self.start[high]]
        last = self.first[1:][(self.first[1:] > low) & (self.first[1:] <= high)] - 1 - low
        end[last] = np.maximum(self.last_s, start[last])
        return self.blocks_at(np.arange(low, high)), start, end

    @property
    def block(self) -> Int32Array:
        """The block of each life."""
        return self.blocks_at(np.arange(len(self)))

    @property
    def start_s(self) -> FloatArray:
        """The start of each life, in seconds."""
        return self.between(0, len(self))[1]

    @property
    def end_s(self) -> FloatArray:
        """The end of each life, in seconds."""
        return self.between(0, len(self))[2]


@dataclass(frozen=True)
class PoolCounts:
    """The number of blocks of a pool in each state over time.

    `counts[i, s]` blocks are in state s from `change_s[i]` to the next change. The first change is
    the start of the run.
    """

    num_blocks: int
    block_size: int
    times: StepTimes
    change_s: FloatArray
    counts: Int32Array

    @property
    def span_s(self) -> tuple[float, float]:
        """The start of the run (0) and the end of its last step, in seconds."""
        return 0.0, self.times.last_s


@dataclass(frozen=True)
class Occupancy(PoolCounts):
    """A pool over time: the lives of its blocks, and the number of blocks in each state."""

    lives: Lives
    overview: "Overview | None" = None  # for a run with many lives


def read_occupancy(recording: Recording, progress: Progress | None = None) -> Occupancy:
    """Replay the blocks of a recording. For a run that still goes on, the replay ends where its
    tables agree. Raise RecordingError.
    """
    return _replay(
        recording.pieces("blocks", ("block", "kind", "request")),
        recording.table("events", ("step", "kind", "request", "num_blocks")),
        recording.table("steps", ("step", "start_s", "end_s")),
        recording.manifest,
        recording.table("reports"),
        progress or (lambda _share: None),
    )


def replay_blocks(
    blocks: pa.Table,
    events: pa.Table,
    steps: pa.Table,
    manifest: Mapping[str, Any],
    reports: pa.Table | None = None,
) -> Occupancy:
    """Replay the blocks of a run.

    Args:
        blocks: Changes of blocks (columns block, kind, request).
        events: The events (step, kind, request, num_blocks) that made them.
        steps: Times of the steps (step, start_s, end_s).
        manifest: The recording's manifest: names of the codes, and size of the pool.
        reports: Further changes, which no event made.

    Returns:
        The pool over time.

    Raises:
        RecordingError: Tables of a complete recording contradict each other.
    """
    return _replay([blocks], events, steps, manifest, reports, lambda _share: None)


def _replay(
    pieces: Iterable[pa.Table],
    events: pa.Table,
    steps: pa.Table,
    manifest: Mapping[str, Any],
    reports: pa.Table | None,
    progress: Progress,
) -> Occupancy:
    """Replay the table of blocks, which comes in pieces. `progress` is called with the share that
    is done, in [0, 1].
    """
    names, times = Names(manifest), step_times(steps)
    num_blocks, block_size = pool_of(manifest)
    columns = _columns(pieces, names, num_blocks)
    progress(0.2)
    num_rows = len(columns["block"]) - num_blocks
    complete = bool(manifest.get("complete"))
    num_rows, events = _agreeing(num_rows, events, len(times.end_s), complete)
    for name in columns:
        columns[name] = columns[name][: num_blocks + num_rows]
    moments = _place_in_time(columns, events, times, names, num_blocks, reports)
    block = columns["block"]
    if block.min() < 0 or block.max() >= num_blocks:
        raise RecordingError(
            f"table 'blocks': names block {block.max()} or {block.min()} of a pool of {num_blocks}"
        )
    del block
    num_lives, num_moments = len(columns["block"]), len(moments)
    first, columns = _by_block(columns, num_blocks, progress)
    kind = columns["kind"]
    lives = Lives(
        first,
        moments,
        columns["at"],
        np.empty(num_lives, dtype=np.int8),
        np.empty(num_lives, dtype=np.int16),
        np.empty(num_lives, dtype=np.int32),
        columns["actor"],
        columns["row"],
        times.last_s,
    )
    overview = None
    if num_lives > MANY_LIVES and times.last_s:
        overview = Overview.empty(num_blocks, times.last_s)
    delta = np.zeros(num_moments * len(STATES), dtype=np.int32)
    for low, high in _slices(first):
        part = slice(low, high)
        refs, lives.owner[part] = owners_after(kind[part], lives.actor[part])
        if len(refs) and refs.max() > np.iinfo(np.int16).max:
            raise RecordingError(f"table 'blocks': a block has {refs.max()} owners")
        lives.refs[part] = refs
        lives.state[part] = states_after(kind[part], refs)
        delta += _deltas(lives, low, high, num_moments)
        if overview is not None:
            overview.add(lives, low, high)
        progress(0.4 + 0.6 * high / num_lives)
    counts = np.cumsum(delta.reshape(num_moments, len(STATES)), axis=0, dtype=np.int32)
    return Occupancy(num_blocks, block_size, times, lives.moments_s, counts, lives, overview)


def _columns(pieces: Iterable[pa.Table], names: Names, num_blocks: int) -> dict[str, Any]:
    """Return block, kind and actor of each change. One change for each block precedes them, which
    frees it at the start.
    """
    found: dict[str, list[npt.NDArray[Any]]] = {
        "block": [np.arange(num_blocks, dtype=np.int32)],
        "kind": [np.full(num_blocks, EventKind.FREED, dtype=np.int8)],
        "actor": [np.full(num_blocks, NO_REQUEST, dtype=np.int32)],
    }
    for piece in pieces:
        found["block"].append(piece["block"].to_numpy().astype(np.int32))
        found["kind"].append(names.kinds(piece))
        found["actor"].append(piece["request"].to_numpy().astype(np.int32))
    return {name: np.concatenate(found.pop(name)) for name in list(found)}


def _place_in_time(
    columns: dict[str, Any],
    events: pa.Table,
    times: StepTimes,
    names: Names,
    num_blocks: int,
    reports: pa.Table | None,
) -> FloatArray:
    """Return the times at which blocks change, and add the index of its time to each change (column
    `at`).

    Reported changes are inserted between the others; `row` then gives the rows of the others in the
    table of blocks.
    """
    at, named = event_times(events, times, names), events["num_blocks"].to_numpy()
    reported = reported_changes(reports, times, at)
    if reported is not None:
        before, reported_s, freed = reported
        place = np.concatenate(([0], np.cumsum(named, dtype=np.int64)))[before] + num_blocks
        at, named = np.insert(at, before, reported_s), np.insert(named, before, 1)
        number = np.arange(-num_blocks, len(columns["block"]) - num_blocks, dtype=np.int32)
        columns["row"] = np.insert(np.maximum(number, NO_REQUEST), place, NO_REQUEST)
        for name, value in (("block", freed), ("kind", EventKind.FREED), ("actor", NO_REQUEST)):
            columns[name] = np.insert(columns[name], place, value)
    changing = named > 0
    moment = np.concatenate(([0.0], at[changing]))
    later = np.diff(moment)
    if (later < 0).any():
        raise RecordingError("the events of the recording are not in the order of time")
    index = np.concatenate(([0], np.cumsum(later > 0))).astype(np.int32)
    start = np.zeros(num_blocks, dtype=np.int32)
    columns["at"] = np.concatenate((start, np.repeat(index[1:], named[changing])))
    found: FloatArray = moment[np.concatenate(([True], later > 0))]
    return found


def _by_block(
    columns: dict[str, Any], num_blocks: int, progress: Progress
) -> tuple[npt.NDArray[np.int64], dict[str, Any]]:
    """Return where each block's changes begin, and the columns sorted by block and then time.

    Rows are sorted in portions that fit the processor's cache and are then copied to their places.
    """
    block = columns.pop("block")
    first = np.concatenate(([0], np.cumsum(np.bincount(block, minlength=num_blocks))))
    if "row" not in columns:
        number = np.arange(-num_blocks, len(block) - num_blocks, dtype=np.int32)
        columns["row"] = np.maximum(number, NO_REQUEST, out=number)
    found = {name: np.empty_like(column) for name, column in columns.items()}
    place = first[:-1].copy()
    for low in range(0, len(block), LIVES_AT_ONCE):
        part = slice(low, low + LIVES_AT_ONCE)
        here = block[part]
        # radix sort, ten times as fast for block numbers below 65,536
        order = np.argsort(here.astype(np.uint16) if num_blocks <= 65_536 else here, kind="stable")
        count = np.bincount(here, minlength=num_blocks)
        before = np.cumsum(count) - count
        target = np.repeat(place - before, count) + np.arange(len(here))
        for name, column in columns.items():
            found[name][target] = column[part][order]
        place += count
        progress(0.2 + 0.2 * low / len(block))
    return first, found


def _slices(first: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ranges of lives. Each contains all lives of some blocks and has about LIVES_AT_ONCE of
    them.
    """
    low = 0
    while low < first[-1]:
        stop = int(np.searchsorted(first, low + LIVES_AT_ONCE))
        here = int(np.searchsorted(first, low, side="right"))
        high = int(first[min(max(stop, here), len(first) - 1)])
        yield low, high
        low = high


def reported_changes(
    reports: pa.Table | None, times: StepTimes, at: FloatArray
) -> tuple[npt.NDArray[np.int64], FloatArray, npt.NDArray[Any]] | None:
    """Return (number of events before it, its time, block) of every report; None without reports.
    Only blocks that become free are reported.

    Args:
        reports: The reports table.
        times: Times of the steps.
        at: Times of the events in seconds, [event].
    """
    if reports is None or not reports.num_rows:
        return None
    step, before = reports["step"].to_numpy(), reports["event"].to_numpy()
    known = (step < len(times.end_s)) & (before <= len(at)) & (step >= 0) & (before >= 0)
    step, before = step[known], before[known]
    at_end = reports["at_end"].to_numpy()[known] != 0
    reported_s = np.where(at_end, times.end_s[step], times.start_s[step])
    # a report is not earlier than the event before it and not later than the next event
    edges = np.concatenate(([0.0], at, [np.inf]))
    reported_s = np.clip(reported_s, edges[before], edges[before + 1])
    return before, reported_s, reports["block"].to_numpy()[known]


def _agreeing(
    num_rows: int, events: pa.Table, num_steps: int, complete: bool
) -> tuple[int, pa.Table]:
    """Return the number of rows of the table of blocks, and the events, that both tables have. The
    tables of a live run are not written at the same time.
    """
    if len(events) and pc.min(events["num_blocks"]).as_py() < 0:
        raise RecordingError("table 'events': an event names fewer than 0 blocks")
    named = np.cumsum(events["num_blocks"].to_numpy(), dtype=np.int64)
    total = int(named[-1]) if len(named) else 0
    if complete and total != num_rows:
        raise RecordingError(
            f"the events name {total} block changes, the table 'blocks' has {num_rows}"
        )
    usable = min(total, num_rows)
    rows = int(np.searchsorted(named, usable, side="right"))
    if not complete:  # events after the last recorded step have no time yet
        rows = min(rows, int(np.searchsorted(events["step"].to_numpy(), num_steps)))
    return int(named[rows - 1]) if rows else 0, events.slice(0, rows)


def owners_after(kind: Int8Array, actor: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Return (number of owners, the only owner or -1) after each change, in block order. The first
    change of a block frees it.

    The sum of the owners' numbers is computed beside their count: with one owner, the sum is that
    owner.
    """
    one, none = ONE_OWNER[kind], NO_OWNER[kind]
    delta = ONE_MORE[kind].astype(np.int64) - ONE_FEWER[kind]
    anchor = np.maximum.accumulate(
        np.where(one | none, np.arange(len(kind)), 0)
    )  # the last change after which the owners are known
    count, total = np.cumsum(delta), np.cumsum(delta * actor)
    refs = (one[anchor] + count - count[anchor]).astype(np.int32)
    if len(refs) and refs.min() < 0:
        raise RecordingError("table 'blocks': a block is released by more requests than own it")
    only = np.where(one[anchor], actor[anchor], 0) + total - total[anchor]
    return refs, np.where(refs == 1, only, NO_REQUEST).astype(np.int32)


def states_after(kind: Int8Array, refs: Int32Array) -> Int8Array:
    """Return the state of a block after each change, in block order."""
    state = np.where(refs > 1, SHARED, np.where(refs == 1, OWNED, FREE)).astype(np.int8)
    fixed = _FIXED_STATE[kind]
    return np.where(fixed >= 0, fixed, state)


def _deltas(lives: Lives, low: int, high: int, num_moments: int) -> npt.NDArray[np.int64]:
    """Return by how much the lives `low` to `high - 1` change the number of blocks in each state at
    each time, [time * state]. The range must contain whole blocks.
    """
    at = lives.start[low:high].astype(np.int64) * len(STATES)
    state = lives.state[low:high]
    size = num_moments * len(STATES)
    delta = np.bincount(at + state, minlength=size)
    goes_on = np.ones(high - low, dtype=bool)
    starts = lives.first[(lives.first >= low) & (lives.first < high)]
    goes_on[starts - low] = False
    goes_on = goes_on[1:]
    delta -= np.bincount(at[1:][goes_on] + state[:-1][goes_on], minlength=size)
    return delta


@dataclass(frozen=True)
class Overview:
    """A whole run as a grid: `seconds[s, r, c]` are the block-seconds that the blocks of row r
    spent in state s during column c.

    Rows divide the blocks and columns the time evenly. A picture of the whole run, or of a large
    part of it, is made from the grid in a fraction of a second for any number of lives.
    """

    num_blocks: int
    last_s: float
    seconds: npt.NDArray[np.float32]

    @classmethod
    def empty(cls, num_blocks: int, last_s: float) -> "Overview":
        """Return a grid of zeros."""
        num_rows = min(num_blocks, OVERVIEW_ROWS)
        shape = (len(STATES), num_rows, OVERVIEW_COLUMNS)
        return cls(num_blocks, last_s, np.zeros(shape, dtype=np.float32))

    def add(self, lives: Lives, low: int, high: int) -> None:
        """Add the lives `low` to `high - 1`.

        Args:
            lives: All lives of the run.
            low: First life.
            high: Life after the last one.
        """
        num_rows, num_columns = self.seconds.shape[1:]
        block, start, end = lives.between(low, high)
        row = block.astype(np.int64) * num_rows // self.num_blocks
        top, bottom = int(row[0]), int(row[-1]) + 1
        flat = lives.state[low:high].astype(np.int64) * (bottom - top) + row - top
        covered = _cover(
            flat, start, end, (0.0, self.last_s), num_columns, len(STATES) * (bottom - top)
        )
        width = self.last_s / num_columns
        self.seconds[:, top:bottom] += covered.reshape(len(STATES), -1, num_columns) * width

    def shares(self, window_s: tuple[float, float], num_columns: int) -> npt.NDArray[np.float32]:
        """Return the share of each cell spent in each state, [state, row, column].

        The result is exact where the edges of the columns are edges of the grid, as for the whole
        run. Otherwise a cell of the grid counts in proportion to the part that is inside.
        """
        num_cells = self.seconds.shape[2]
        if window_s == (0.0, self.last_s) and num_cells % num_columns == 0:
            shape = (*self.seconds.shape[:2], num_columns, num_cells // num_columns)
            return _as_shares(self.seconds.reshape(shape).sum(axis=3))
        place = np.linspace(*window_s, num_columns + 1) * (num_cells / self.last_s)
        place = np.clip(place, 0.0, num_cells)
        cell = np.minimum(place.astype(np.int64), num_cells - 1)
        part = (place - cell).astype(np.float64)
        found = np.empty((*self.seconds.shape[:2], num_columns), dtype=np.float64)
        for state, cells in enumerate(self.seconds):
            until = np.zeros((cells.shape[0], num_cells + 1))
            np.cumsum(cells, axis=1, dtype=np.float64, out=until[:, 1:])
            found[state] = np.diff(until[:, cell] + cells[:, cell] * part, axis=1)
        return _as_shares(np.maximum(found, 0.0, out=found))

    def save(self, recording: Recording) -> bool:
        """Save the grid, with KEPT_COLUMNS columns, with a complete recording, for the next
        process. Return whether it was saved.

        The file is replaced atomically. Row groups are time ranges, columns are states.
        """
        if not recording.complete:
            return False
        num_rows = self.seconds.shape[1]
        kept = self.seconds.reshape(len(STATES), num_rows, KEPT_COLUMNS, -1).sum(axis=3)
        # the grid column by column
        cells = {state.label: kept[state].T.ravel() for state in BlockState}
        about = {
            "stamp": _stamp(recording),
            "num_blocks": str(self.num_blocks),
            "last_s": repr(self.last_s),
            "rows": str(num_rows),
        }
        table = pa.table(cells).replace_schema_metadata(about)
        path = recording.folder / OVERVIEW_FILE
        unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
        try:
            pq.write_table(table, unfinished, compression="zstd", row_group_size=num_rows * 250)
            os.replace(unfinished, path)
        except OSError:  # the folder cannot be written to, or the disk is full
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            return False
        return True

    @classmethod
    def load(cls, recording: Recording) -> "Overview | None":
        """Return the grid that was saved with a recording, None if there is none or it belongs to
        other parts.
        """
        path = recording.folder / OVERVIEW_FILE
        try:
            file = pq.ParquetFile(path)
            about = {
                key.decode(): value.decode()
                for key, value in (file.schema_arrow.metadata or {}).items()
            }
            if about.get("stamp") != _stamp(recording):
                return None
            num_rows = int(about["rows"])
            if file.metadata.num_rows != num_rows * KEPT_COLUMNS:
                return None
            if not 0 < num_rows <= OVERVIEW_ROWS:
                return None
            seconds = np.empty((len(STATES), num_rows, KEPT_COLUMNS), dtype=np.float32)
            for state in BlockState:
                column = file.read([state.label])[state.label].to_numpy()
                seconds[state] = column.reshape(KEPT_COLUMNS, num_rows).T
            return cls(int(about["num_blocks"]), float(about["last_s"]), seconds)
        except (OSError, ValueError, KeyError, pa.ArrowException):
            return None

    def answers(
        self, window_s: tuple[float, float], blocks: tuple[int, int], num_columns: int, rows: int
    ) -> bool:
        """Return whether the grid is fine enough for a picture of this part.

        Args:
            window_s: Start and end of the picture, in seconds.
            blocks: First block, and block after the last one.
            num_columns: Columns of the picture.
            rows: Rows of the picture.
        """
        num_rows, num_cells = self.seconds.shape[1:]
        cells = (window_s[1] - window_s[0]) / self.last_s * num_cells
        return blocks == (0, self.num_blocks) and rows == num_rows and cells >= 2 * num_columns


def shares(
    occupancy: Occupancy,
    window_s: tuple[float, float],
    blocks: tuple[int, int],
    num_columns: int,
    num_rows: int,
) -> npt.NDArray[np.float32]:
    """Return the share of each cell (time x blocks) spent in each state, [state, row, column]. It
    is exact at any zoom.

    Args:
        occupancy: The pool over time.
        window_s: Start and end in seconds; columns divide it evenly.
        blocks: First block, and block after the last one; rows divide them evenly.
        num_columns: Columns of the picture.
        num_rows: Rows of the picture, at most one for each block.
    """
    assert 0 < num_rows <= blocks[1] - blocks[0]
    overview = occupancy.overview
    if overview is not None and overview.answers(window_s, blocks, num_columns, num_rows):
        return overview.shares(window_s, num_columns)
    lives = occupancy.lives
    low, high = int(lives.first[blocks[0]]), int(lives.first[blocks[1]])
    block, start, end = lives.between(low, high)
    overlaps = np.flatnonzero((end > window_s[0]) & (start < window_s[1]))
    row = (block[overlaps].astype(np.int64) - blocks[0]) * num_rows // (blocks[1] - blocks[0])
    flat = lives.state[low:high][overlaps].astype(np.int64) * num_rows + row
    covered = _cover(
        flat, start[overlaps], end[overlaps], window_s, num_columns, len(STATES) * num_rows
    )
    return _as_shares(covered.reshape(len(STATES), num_rows, num_columns))


def _stamp(recording: Recording) -> str:
    """Return a text that differs between recordings, and changes when a part of one is replaced."""
    parts = [
        (part.name, part.stat().st_size, part.stat().st_mtime_ns)
        for table in ("events", "blocks", "steps", "reports")
        for part in recording.parts(table)
    ]
    identity = json.dumps(
        [recording.manifest.get("digest"), recording.manifest.get("num_blocks"), parts]
    )
    return hashlib.sha256(identity.encode()).hexdigest()


def _as_shares(seconds: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Divide the time [state, row, column] of each cell by the cell's time in all states."""
    total = seconds.sum(axis=0)
    result: npt.NDArray[np.float32] = (seconds / np.where(total > 0, total, 1.0)).astype(np.float32)
    return result


def _cover(
    flat: npt.NDArray[np.int64],
    start_s: FloatArray,
    end_s: FloatArray,
    window_s: tuple[float, float],
    num_columns: int,
    num_lines: int,
) -> FloatArray:
    """Return by how much the intervals of each line `flat` cover each column, [line * column]. An
    interval is the difference of two ramps.
    """
    scale = num_columns / (window_s[1] - window_s[0])
    size = num_lines * (num_columns + 1)
    levels = np.zeros(size)
    ramps = np.zeros(size)
    for edge, sign in ((start_s, 1.0), (end_s, -1.0)):
        position = np.clip((edge - window_s[0]) * scale, 0.0, float(num_columns))
        column = position.astype(np.int64)
        at = flat * (num_columns + 1) + column
        ramps += sign * np.bincount(at, weights=1.0 - (position - column), minlength=size)
        levels += sign * np.bincount(at, minlength=size)
    level = levels.reshape(num_lines, num_columns + 1)
    after = np.cumsum(level, axis=1) - level
    return np.asarray((after + ramps.reshape(num_lines, num_columns + 1))[:, :num_columns])


BAND = 16  # rows over which rounding errors of cells are compensated


def painted(parts: npt.NDArray[np.float32], one_block_a_row: bool) -> Int8Array:
    """Return one state for each cell, so that painted areas are as large as the true shares.

    A cell shows a state that some of its blocks had for some of its time. The choice depends on the
    errors of the cells before it (error diffusion): along time where a row is one block, otherwise
    down the rows of a band of BAND rows. A band whose blocks do not change therefore looks the same
    in each column.

    Args:
        parts: Shares [state, row, column] as `shares` returns them.
        one_block_a_row: Whether each row is a single block.

    Returns:
        States [row, column].
    """
    lines = parts.transpose(0, 2, 1) if one_block_a_row else parts
    num_lines, width = lines.shape[1:]
    chosen = np.empty((num_lines, width), dtype=np.int8)
    owed = np.zeros((len(STATES), width))
    every = np.arange(width)
    for line in range(num_lines):
        if not one_block_a_row and line % BAND == 0:
            owed[:] = 0.0
        owed += lines[:, line]
        # Rounding errors must not decide between equal claims: the rarer state (later in STATES)
        # wins.
        claims = np.where(lines[:, line] > 1e-6, np.round(owed, 4), -np.inf)
        chosen[line] = len(STATES) - 1 - np.argmax(claims[::-1], axis=0)
        owed[chosen[line], every] -= 1.0
    return chosen.T if one_block_a_row else chosen


def lives_at(
    occupancy: Occupancy, moments_s: FloatArray, blocks: range | None = None
) -> npt.NDArray[np.intp]:
    """Return the index of the life of each block at each time, [block, time]. A change at that very
    time has happened.

    Args:
        occupancy: The pool over time.
        moments_s: Times in seconds.
        blocks: The blocks; all by default.
    """
    lives, chosen = occupancy.lives, range(occupancy.num_blocks) if blocks is None else blocks
    wanted = (np.searchsorted(lives.moments_s, moments_s, side="right") - 1).astype(np.int32)
    found = np.empty((len(chosen), len(moments_s)), dtype=np.intp)
    for place, block in enumerate(chosen):
        low, high = lives.first[block], lives.first[block + 1]
        found[place] = low + np.searchsorted(lives.start[low:high], wanted, side="right") - 1
    return found


def mean_counts(
    occupancy: PoolCounts, window_s: tuple[float, float], num_bins: int
) -> tuple[FloatArray, FloatArray]:
    """Return the edges of time bins [n + 1] in seconds, and the time-weighted mean number of blocks
    in each state over each bin [n, state].

    Args:
        occupancy: The pool over time.
        window_s: Start and end in seconds.
        num_bins: Number of bins n.
    """
    edges = np.linspace(*window_s, num_bins + 1)
    return edges, _means(occupancy, edges, occupancy.counts)


def full_share(occupancy: PoolCounts, window_s: tuple[float, float], num_bins: int) -> FloatArray:
    """Return the share [n] of each time bin in which no block was available.

    Args:
        occupancy: The pool over time.
        window_s: Start and end in seconds.
        num_bins: Number of bins n.
    """
    edges = np.linspace(*window_s, num_bins + 1)
    return _means(occupancy, edges, is_full(occupancy)[:, None])[:, 0]


def _means(occupancy: PoolCounts, edges: FloatArray, values: npt.NDArray[Any]) -> FloatArray:
    """Return the means [n, value] over bins of `values` [change, value]. A value holds from its
    change to the next one.
    """
    at = np.maximum(np.searchsorted(occupancy.change_s, edges, side="right") - 1, 0)
    inside = slice(int(at[0]), int(at[-1]) + 1)
    change, held = occupancy.change_s[inside], values[inside].astype(np.float64)
    area = np.zeros_like(held)
    np.cumsum(held[:-1] * np.diff(change)[:, None], axis=0, out=area[1:])
    at -= at[0]
    until = area[at] + held[at] * (edges - change[at])[:, None]
    means: FloatArray = np.diff(until, axis=0) / np.diff(edges)[:, None]
    return np.maximum(means, 0.0)


def counts_at(occupancy: PoolCounts, moments_s: FloatArray) -> Int32Array:
    """Return the number of blocks in each state at each time, [time, state]. A change at that very
    time has happened.
    """
    at = np.searchsorted(occupancy.change_s, moments_s, side="right") - 1
    found: Int32Array = occupancy.counts[np.maximum(at, 0)]
    return found


def count_marks(
    moments_s: FloatArray, window_s: tuple[float, float], num_bins: int
) -> npt.NDArray[np.int64]:
    """Return how many times fall into each time bin, [num_bins]. The window's end belongs to the
    last bin.

    Args:
        moments_s: Times in seconds.
        window_s: Start and end in seconds.
        num_bins: Number of bins.
    """
    counted: npt.NDArray[np.int64] = np.histogram(moments_s, bins=num_bins, range=window_s)[
        0
    ].astype(np.int64)
    return counted


def is_full(occupancy: PoolCounts) -> BoolArray:
    """Return for each change whether no block (free or cached) was available from it on."""
    full: BoolArray = (occupancy.counts[:, FREE] + occupancy.counts[:, CACHED]) == 0
    return full


@dataclass(frozen=True)
class Stretch:
    """An interval of a block in one state. `owner` is the only request that owns it, `actor` the
    request that made the change.
    """

    start_s: float
    end_s: float
    state: str
    refs: int
    owner: int | None
    actor: int | None


@dataclass(frozen=True)
class Held:
    """Intervals in which one request owned blocks (alone or with others): `block[i]` from
    `start_s[i]` to `end_s[i]`.
    """

    block: Int32Array
    start_s: FloatArray
    end_s: FloatArray


def life_of(occupancy: Occupancy, block: int) -> list[Stretch]:
    """Return the states of a block from the start of the run to its end. Raise IndexError for a
    block that the pool does not have.
    """
    if not 0 <= block < occupancy.num_blocks:
        raise IndexError(f"block {block} is not in 0..{occupancy.num_blocks - 1}")
    lives = occupancy.lives
    low, high = int(lives.first[block]), int(lives.first[block + 1])
    _, start, end = lives.between(low, high)
    return [
        Stretch(
            float(start[i - low]),
            float(end[i - low]),
            STATES[lives.state[i]],
            int(lives.refs[i]),
            _number(lives.owner[i]),
            _number(lives.actor[i]),
        )
        for i in range(low, high)
        if end[i - low] > start[i - low]
    ]


def _number(request: np.int32) -> int | None:
    return int(request) if request >= 0 else None


def blocks_of(occupancy: Occupancy, request: int) -> Held:
    """Return every interval in which the request owned a block, shared ones included, sorted by
    block and then time.
    """
    lives = occupancy.lives
    rows = np.flatnonzero(lives.actor == request)
    gone = (lives.state[rows] == FREE) | (lives.state[rows] == CACHED)
    before = np.maximum(rows - 1, 0)
    block, moment = lives.blocks_at(rows), lives.starts_at(rows)
    gone |= (lives.blocks_at(before) == block) & (lives.refs[rows] < lives.refs[before])
    # A block belongs to the request until the request's next row that releases it; rows in between
    # change nothing.
    begins = ~gone
    begins[1:] &= gone[:-1] | (block[1:] != block[:-1])
    index = np.arange(len(rows))
    next_gone = np.full(len(rows) + 1, len(rows))
    next_gone[:-1] = np.where(gone, index, len(rows))
    next_gone = np.minimum.accumulate(next_gone[::-1])[::-1]
    start = np.flatnonzero(begins)
    stop = next_gone[start]
    known = np.minimum(stop, max(len(rows) - 1, 0))
    ends = (
        np.where(
            (stop < len(rows)) & (block[known] == block[start]),
            moment[known],
            occupancy.times.last_s,
        )
        if len(rows)
        else np.zeros(0)
    )
    keep = ends > moment[start]
    return Held(block[start][keep], moment[start][keep], ends[keep])


def fill_at(
    occupancy: Occupancy, holdings: Holdings, moments_s: FloatArray, index: npt.NDArray[np.intp]
) -> npt.NDArray[np.int32]:
    """Return the tokens in each block at each time, [block, time]: 0 if the block is free, -1 if a
    copy makes the number unknown.

    A request's tokens fill its table from the front: shared and cached blocks are full; then follow
    its own blocks in the order in which it got them.

    Args:
        occupancy: The pool over time.
        holdings: Tokens and blocks of each request.
        moments_s: Times in seconds, [time].
        index: Result of `lives_at` for these times.
    """
    size = occupancy.block_size
    lives = occupancy.lives
    state, owner, row = lives.state[index], lives.owner[index], lives.row[index]
    fill = np.where(
        (state == SHARED) | (state == CACHED), size, np.where(state == FREE, 0, -1)
    ).astype(np.int32)
    everyone = np.unique(owner[state == OWNED])
    ticks = occupancy.times.ticks_at(moments_s)
    all_tokens, all_blocks = (
        holdings.tokens_at(everyone, ticks),
        holdings.blocks_at(everyone, ticks),
    )
    for column in range(len(moments_s)):
        own = np.flatnonzero(state[:, column] == OWNED)
        order = own[np.lexsort((row[own, column], owner[own, column]))]
        numbers, first, count = np.unique(
            owner[order, column], return_index=True, return_counts=True
        )
        place_of = np.searchsorted(everyone, numbers)
        tokens, ahead = (
            all_tokens[place_of, column],
            all_blocks[place_of, column] - count,
        )  # shared blocks come first
        place = np.arange(len(order)) - np.repeat(first, count) + np.repeat(ahead, count)
        fill[order, column] = np.clip(np.repeat(tokens, count) - place * size, 0, size)
    return fill

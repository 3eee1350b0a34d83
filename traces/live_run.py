"""Follow a run that is still written, by reading only its new rows.

A replay of all blocks takes time in proportion to the run's length. A view of a live run needs
less: the number of blocks in each state over time, the steps, and the present phase of each
request. `LiveRun` keeps these and updates them with the rows written since the last update.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zlab.traces.occupancy import (
    FREE,
    NO_OWNER,
    ONE_FEWER,
    ONE_MORE,
    ONE_OWNER,
    STATES,
    PoolCounts,
    reported_changes,
    states_after,
)
from zlab.traces.recording import Recording, RecordingError
from zlab.traces.schema import PHASES, EventKind
from zlab.traces.timeline import (
    COLUMNS,
    NO_CHANGE,
    Int8Array,
    Int64Array,
    Names,
    StepTimes,
    event_times,
    phase_entered,
    pool_of,
    step_times,
)

EVENT_COLUMNS = ("step", "kind", "request", "value", "num_blocks")
CHANGES_AT_ONCE = 1_000_000  # changes of blocks that are replayed together; bounds the memory
_NOT_THERE = -1  # the phase of a request that has not arrived, or has ended


class LiveRun:
    """The state of a run up to its last whole step.

    Attributes:
        steps: The steps so far (`timeline.COLUMNS`).
        pool: Number of blocks by state over time; None before the first update.
        rows_read: Number of rows read from each table.
    """

    def __init__(self, recording: Recording) -> None:
        """Start before the first step. Raise RecordingError if the manifest lacks names."""
        self._names = Names(recording.manifest)
        self.num_blocks, self.block_size = pool_of(recording.manifest)
        self.rows_read = dict.fromkeys(("steps", "events", "blocks", "reports"), 0)
        self.steps: pa.Table = recording.table("steps", COLUMNS).slice(0, 0)
        self.pool: PoolCounts | None = None
        self._events = recording.table("events", EVENT_COLUMNS).slice(
            0, 0
        )  # events that are not replayed yet
        self._reports = recording.table("reports").slice(0, 0)
        self._block = np.zeros(0, dtype=np.int64)  # blocks of changes that are not replayed yet
        self._kind = np.zeros(0, dtype=np.int8)
        self._num_events = 0  # number of replayed events
        self._refs = np.zeros(self.num_blocks, dtype=np.int64)
        self._state = np.full(self.num_blocks, FREE, dtype=np.int8)
        self._change_s = [np.zeros(1)]
        first = np.zeros((1, len(STATES)), dtype=np.int32)
        first[0, FREE] = self.num_blocks
        self._counts = [first]
        self._phase = np.full(0, _NOT_THERE, dtype=np.int8)

    def update(self, recording: Recording) -> None:
        """Read the rows written since the last update. Raise RecordingError."""
        self.steps = pa.concat_tables([self.steps, *self._new(recording, "steps", COLUMNS)])
        times = step_times(self.steps)
        self._reports = pa.concat_tables([self._reports, *self._new(recording, "reports")])
        blocks = self._new(recording, "blocks", ("block", "kind"))
        for piece in self._new(recording, "events", EVENT_COLUMNS):
            self._note_phases(piece)
            self._events = pa.concat_tables([self._events, piece])
            self._replay(recording, times, blocks)
        self._replay(recording, times, blocks)
        if recording.complete and (len(self._block) or any(p.num_rows for p in blocks)):
            raise RecordingError("the table 'blocks' has more changes than the events name")
        self._change_s = [np.concatenate(self._change_s)]
        self._counts = [np.concatenate(self._counts)]
        self.pool = PoolCounts(
            self.num_blocks, self.block_size, times, self._change_s[0], self._counts[0]
        )

    def phases_now(self) -> dict[str, int]:
        """Return how many requests are in each phase after the last event."""
        current = self._phase[self._phase >= 0]
        counted = np.bincount(current, minlength=len(PHASES)).tolist()
        return dict(zip(PHASES, counted, strict=True))

    def _new(
        self, recording: Recording, table: str, columns: tuple[str, ...] | None = None
    ) -> Iterator[pa.Table]:
        """Yield the rows of a table that were not read before."""
        for piece in recording.pieces(table, columns, skip=self.rows_read[table]):
            self.rows_read[table] += piece.num_rows
            yield piece

    def _note_phases(self, events: pa.Table) -> None:
        """Store the phase that each request enters last."""
        enters = phase_entered(events, self._names)
        relevant = enters != NO_CHANGE
        number, phase = events["request"].to_numpy()[relevant], enters[relevant]
        if not len(number):
            return
        if number.min() < 0:
            raise RecordingError("table 'events': a request has a number below 0")
        missing = int(number.max()) + 1 - len(self._phase)
        if missing > 0:
            room = np.full(max(missing, len(self._phase)), _NOT_THERE, dtype=np.int8)
            self._phase = np.concatenate((self._phase, room))
        last = len(number) - 1 - np.unique(number[::-1], return_index=True)[1]
        self._phase[number[last]] = np.maximum(phase[last], _NOT_THERE)

    def _replay(self, recording: Recording, times: StepTimes, blocks: Iterator[pa.Table]) -> None:
        """Replay the events of completely recorded steps, some steps at a time."""
        while self._replay_some(recording, times, blocks):
            pass

    def _replay_some(
        self, recording: Recording, times: StepTimes, blocks: Iterator[pa.Table]
    ) -> bool:
        """Replay some whole steps; return whether more may be ready."""
        step, named = (self._events[name].to_numpy() for name in ("step", "num_blocks"))
        if not len(step):
            return False
        if named.min() < 0:
            raise RecordingError("table 'events': an event names fewer than 0 blocks")
        total = np.cumsum(named, dtype=np.int64)
        count = len(step)
        if not recording.complete:
            last = len(times.end_s)
            if "rows" not in recording.manifest:  # the tables were not written at the same time
                last = min(last, int(step[-1]))
            count = int(np.searchsorted(step, last))
        ready = count
        if count and total[count - 1] > CHANGES_AT_ONCE:
            most = int(np.searchsorted(total[:count], CHANGES_AT_ONCE, side="right"))
            one_step = int(np.searchsorted(step, step[0], side="right"))
            count = min(count, max(int(np.searchsorted(step, step[most])), one_step))
        needed = int(total[count - 1]) if count else 0
        self._read_blocks(needed, blocks)
        if needed > len(self._block):
            if recording.complete:
                raise RecordingError(
                    f"the events name {needed - len(self._block)} block changes that the table "
                    "'blocks' lacks"
                )
            count = int(np.searchsorted(total, len(self._block), side="right"))
            count = int(np.searchsorted(step, step[count])) if count < len(step) else count
            needed = int(total[count - 1]) if count else 0
        if not count:
            return False
        self._add(self._events.slice(0, count), needed, times)
        self._events = self._events.slice(count)
        self._num_events += count
        self._block, self._kind = self._block[needed:].copy(), self._kind[needed:].copy()
        return count < ready

    def _read_blocks(self, needed: int, blocks: Iterator[pa.Table]) -> None:
        """Read changes of blocks until `needed` are read, or all that are written."""
        found = [(self._block, self._kind)]
        have = len(self._block)
        while have < needed and (piece := next(blocks, None)) is not None:
            block = piece["block"].to_numpy().astype(np.int64)
            if len(block) and not 0 <= block.min() <= block.max() < self.num_blocks:
                raise RecordingError(
                    f"table 'blocks': names block {block.max()} or {block.min()} of a pool of "
                    f"{self.num_blocks}"
                )
            found.append((block, self._names.kinds(piece)))
            have += len(block)
        if len(found) > 1:
            self._block, self._kind = (np.concatenate(parts) for parts in zip(*found, strict=True))

    def _add(self, events: pa.Table, num_changes: int, times: StepTimes) -> None:
        """Replay some events of whole steps and the first `num_changes` changes of blocks."""
        at, named = event_times(events, times, self._names), events["num_blocks"].to_numpy()
        at = np.maximum(at, self._change_s[-1][-1])
        block, kind = self._block[:num_changes], self._kind[:num_changes]
        reports = self._take_reports(self._num_events + len(events), len(times.end_s))
        if reports.num_rows:
            before = np.maximum(reports["event"].to_numpy() - self._num_events, 0)
            place = reports.schema.get_field_index("event")
            local = reports.set_column(place, reports.schema.field(place), pa.array(before))
            changes = reported_changes(local, times, at)
            if changes is not None:
                before, moment_s, freed = changes
                row = np.concatenate(([0], np.cumsum(named, dtype=np.int64)))[before]
                at, named = np.insert(at, before, moment_s), np.insert(named, before, 1)
                at = np.maximum(at, self._change_s[-1][-1])
                block = np.insert(block, row, freed)
                kind = np.insert(kind, row, np.int8(EventKind.FREED))
        moment = np.repeat(at, named)
        if not len(moment):
            return
        if (np.diff(moment) < 0).any():
            raise RecordingError("the events of the recording are not in the order of time")
        later = np.concatenate(([True], np.diff(moment) > 0))
        index = np.cumsum(later) - 1
        before_state, after_state = self._change_states(block, kind)
        size = (int(index[-1]) + 1) * len(STATES)
        delta = np.bincount(index * len(STATES) + after_state, minlength=size)
        delta -= np.bincount(index * len(STATES) + before_state, minlength=size)
        counts = self._counts[-1][-1] + np.cumsum(delta.reshape(-1, len(STATES)), axis=0)
        self._change_s.append(moment[later])
        self._counts.append(counts.astype(np.int32))

    def _take_reports(self, num_events: int, num_steps: int) -> pa.Table:
        """Remove and return the reports of the first `num_steps` steps that come before this many
        events.
        """
        reports = self._reports
        ready = reports["event"].to_numpy() <= num_events
        ready &= reports["step"].to_numpy() < num_steps
        taken = self._reports.filter(pa.array(ready))
        self._reports = self._reports.filter(pa.array(~ready))
        return taken

    def _change_states(
        self, block: Int64Array, kind: Int8Array
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the states before and after each change, and store those after the last one."""
        order = np.argsort(block, kind="stable")
        rows, codes = block[order], kind[order]
        begins = np.concatenate(([True], rows[1:] != rows[:-1]))
        ends = np.concatenate((begins[1:], [True]))
        # Count owners from the last change that sets their number, or from the number before.
        delta = ONE_MORE[codes].astype(np.int64) - ONE_FEWER[codes]
        total = np.cumsum(delta)
        sets_owners = ONE_OWNER[codes] | NO_OWNER[codes]
        index = np.arange(len(rows))
        anchor = np.maximum.accumulate(np.where(sets_owners | begins, index, 0))
        carried = self._refs[rows[anchor]] + delta[anchor]
        base = np.where(sets_owners[anchor], ONE_OWNER[codes[anchor]], carried)
        refs = base + total - total[anchor]
        if refs.min() < 0:
            raise RecordingError("table 'blocks': a block is released by more requests than own it")
        after = states_after(codes, refs.astype(np.int32))
        before = np.empty_like(after)
        before[1:] = after[:-1]
        before[begins] = self._state[rows[begins]]
        self._refs[rows[ends]], self._state[rows[ends]] = refs[ends], after[ends]
        found = np.empty((2, len(rows)), dtype=np.int64)
        found[0, order], found[1, order] = before, after
        return found[0], found[1]

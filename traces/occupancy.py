"""What every block was at every moment, replayed from a recording."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces.moments import FloatArray, Names, StepTimes, event_times, pool_of, read_names, step_times
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
    """Every stretch of one block in one state, by block and then time.

    Block `block[i]` is from `start_s[i]` to `end_s[i]` in `state[i]` (index into STATES) with `refs[i]` owners.
    `owner[i]` is its one owner, -1 if it has none or several; `actor[i]` is the request that brought the change about
    (-1: the start of the run), `row[i]` its row in the recording's table of blocks (-1 likewise).
    """

    block: Int32Array
    start_s: FloatArray
    end_s: FloatArray
    state: Int8Array
    refs: Int32Array
    owner: Int32Array
    actor: Int32Array
    row: Int32Array


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
    actor = np.concatenate((np.full(num_blocks, NO_REQUEST), blocks["request"].to_numpy())).astype(np.int32)
    # blocks below 65,536 sort by radix, ten times as fast
    order = np.argsort(block.astype(np.uint16) if num_blocks <= 65_536 else block, kind="stable")
    kind, by_block = kind[order], actor[order]
    refs, owner = _owners(kind, by_block, names)
    ends = _ends(block[order], moment[order], times.last_s)
    row = (order - num_blocks).astype(np.int32)
    row[row < 0] = -1
    lives = Lives(
        block[order].astype(np.int32), moment[order], ends, _states(kind, refs, names), refs, owner, by_block, row
    )
    change_s, counts = _counts(lives, order, moment)
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


def _owners(kind: Int8Array, actor: Int32Array, names: Names) -> tuple[Int32Array, Int32Array]:
    """(number of owners, the only owner or -1) after each change, in block order; a block's first change frees it.

    The sum of the owners' numbers is kept beside their count: while there is one owner, it is that owner.
    """
    one, none = np.isin(kind, names.kind_codes(_ONE_OWNER)), np.isin(kind, names.kind_codes(_NO_OWNER))
    delta = np.zeros(len(kind), dtype=np.int64)
    delta[kind == names.kinds.get("hit", -1)] = 1
    delta[kind == names.kinds.get("left", -1)] = -1
    anchor = np.maximum.accumulate(np.where(one | none, np.arange(len(kind)), 0))  # the last change that says it all
    count, total = np.cumsum(delta), np.cumsum(delta * actor)
    refs = (one[anchor] + count - count[anchor]).astype(np.int32)
    if len(refs) and refs.min() < 0:
        raise RecordingError("table 'blocks': a block is given up by more requests than hold it")
    only = np.where(one[anchor], actor[anchor], 0) + total - total[anchor]
    return refs, np.where(refs == 1, only, NO_REQUEST).astype(np.int32)


def _states(kind: Int8Array, refs: Int32Array, names: Names) -> Int8Array:
    """A block's state after each change, in block order."""
    state = np.where(refs > 1, SHARED, np.where(refs == 1, OWNED, FREE)).astype(np.int8)
    state[kind == names.kinds.get("cached", -1)] = CACHED
    state[kind == names.kinds.get("compressing", -1)] = TARGET
    state[np.isin(kind, names.kind_codes(("swap_out", "held")))] = HELD
    return state


def _ends(block: Int32Array, moment: FloatArray, last_s: float) -> FloatArray:
    """When each life ends: at the block's next change, or with the run."""
    last = np.ones(len(block), dtype=bool)
    last[:-1] = block[1:] != block[:-1]
    end = np.empty_like(moment)
    end[:-1] = moment[1:]
    end[last] = np.maximum(last_s, moment[last])
    return end


def _counts(lives: Lives, order: npt.NDArray[np.intp], moment: FloatArray) -> tuple[FloatArray, Int32Array]:
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

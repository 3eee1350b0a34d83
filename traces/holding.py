"""What each request holds in the cache, step by step: tokens and blocks, from a recording's events.

A decoding request holds one token more with every step that decodes; events say where that begins and ends. Tokens are
counted as in the column `stored_tokens` of the steps: what a step adds is there while it runs. Added up over requests,
shared blocks counted once, they are that column.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces.moments import Int64Array, Names, read_names, settled_late, step_times
from traces.recording import Recording

_GROWS = ("first", "compressed", "resumed", "swapped_in")  # decodes from now on
_STOPS = (
    "admitted", "hit", "chunk", "stalled", "compressing", "preempted", "swap_out", "swap_in", "finished", "aborted",
    "failed",
)  # fmt: skip
_SETS_VALUE = ("hit", "swap_out", "swap_in", "swapped_in")  # tokens: the event's value
_SETS_ZERO = ("admitted", "preempted", "finished", "aborted", "failed")
_TAKES = ("hit", "took", "grew", "swap_in")
_GIVES = ("freed", "cached", "left")


@dataclass(frozen=True)
class Holdings:
    """Turning points by request and then step: from `step[i]` on, `request[i]` holds `tokens[i]` tokens in `blocks[i]`
    blocks, and one more token with every decode step where `grows[i]`.

    `decode_steps[s]` counts the steps before s that decode.
    """

    request: Int64Array
    step: Int64Array
    tokens: Int64Array
    grows: npt.NDArray[np.bool_]
    blocks: Int64Array
    decode_steps: Int64Array

    def numbers(self) -> Int64Array:
        """Every request that ever held something, ascending."""
        return np.unique(self.request)

    def alive(self, first_step: int, last_step: int) -> Int64Array:
        """Requests that may hold something in these steps, ascending: those that began before and were not over."""
        begins = np.ones(len(self.request), dtype=bool)
        begins[1:] = self.request[1:] != self.request[:-1]
        at = np.flatnonzero(begins)
        ends = np.append(at[1:], len(self.request)) - 1
        over = (self.blocks[ends] == 0) & (self.step[ends] <= first_step)
        found: Int64Array = self.request[at[(self.step[at] <= last_step) & ~over]]
        return found

    def tokens_at(self, requests: Int64Array, steps: Int64Array) -> Int64Array:
        """Tokens [request, step] that these requests hold in these steps."""
        index = self._before(requests, steps)
        passed = self.decode_steps[np.minimum(steps, len(self.decode_steps) - 1)] - self.decode_steps[self.step[index]]
        return np.where(index >= 0, self.tokens[index] + self.grows[index] * passed, 0)

    def blocks_at(self, requests: Int64Array, steps: Int64Array) -> Int64Array:
        """Blocks [request, step] that these requests hold in these steps; shared ones count for each owner."""
        index = self._before(requests, steps)
        return np.where(index >= 0, self.blocks[index], 0)

    def _before(self, requests: Int64Array, steps: Int64Array) -> npt.NDArray[np.intp]:
        """The turning point that holds for each request in each step, -1 before its first."""
        stride = len(self.decode_steps) + 1  # requests and steps as one rising key: one search for all
        keys = self.request * stride + self.step
        wanted = np.asarray(requests)[:, None] * stride + np.asarray(steps)[None, :]
        place = np.searchsorted(keys, wanted, side="right") - 1
        known = (place >= 0) & (self.request[place] == np.asarray(requests)[:, None]) if len(keys) else place >= 0
        found: npt.NDArray[np.intp] = np.where(known, place, -1)
        return found


def read_holdings(recording: Recording) -> Holdings:
    """Holdings from a recording. Raises RecordingError."""
    return holdings_of(
        recording.table("events", ("step", "kind", "request", "value", "num_blocks")),
        recording.table("steps", ("step", "start_s", "end_s", "decodes")),
        recording.manifest,
    )


def holdings_of(events: pa.Table, steps: pa.Table, manifest: Mapping[str, Any]) -> Holdings:
    """Holdings from `events` (all columns) and `steps` (step, start_s, end_s, decodes). Raises RecordingError."""
    names = read_names(manifest)
    step_times(steps)  # its checks
    num_steps = steps.num_rows
    decode_steps = np.concatenate(([0], np.cumsum(steps["decodes"].to_numpy() > 0))).astype(np.int64)
    kind = events["kind"].to_numpy()
    relevant = np.isin(kind, names.kind_codes((*_GROWS, *_STOPS, *_TAKES, *_GIVES)))
    holds_from = np.minimum(events["step"].to_numpy() + settled_late(events, names), num_steps)[relevant]
    request = events["request"].to_numpy()[relevant]
    order = np.argsort(request, kind="stable")
    columns = (
        request,
        holds_from,
        kind[relevant],
        *(events[name].to_numpy()[relevant] for name in ("value", "num_blocks")),
    )
    request, holds_from, kind, value, num_blocks = (column[order] for column in columns)
    first = np.ones(len(request), dtype=bool)
    first[1:] = request[1:] != request[:-1]
    state = _last_turn(kind, first, names)
    grows = np.isin(state, names.kind_codes(_GROWS))
    swapped = np.isin(kind, names.kind_codes(_GIVES)) & (state == names.kinds.get("swap_out", -1))
    tokens = _tokens(kind, value, first, grows, swapped, decode_steps[holds_from], names)
    blocks = _blocks(kind, num_blocks, first, names)
    last = np.ones(len(request), dtype=bool)  # of several in one step the last stands
    last[:-1] = (request[1:] != request[:-1]) | (holds_from[1:] != holds_from[:-1])
    return Holdings(request[last], holds_from[last], tokens[last], grows[last], blocks[last], decode_steps)


def _last_turn(kind: npt.NDArray[np.int8], first: npt.NDArray[np.bool_], names: Names) -> npt.NDArray[np.int8]:
    """After each event, the kind of the last one that says whether the request decodes."""
    turns = np.isin(kind, names.kind_codes((*_GROWS, *_STOPS)))
    last: npt.NDArray[np.int8] = kind[np.maximum.accumulate(np.where(turns | first, np.arange(len(kind)), 0))]
    return last


def _running_total(
    sets: npt.NDArray[np.bool_], to: Int64Array, adds: Int64Array, first: npt.NDArray[np.bool_]
) -> Int64Array:
    """A value that events set or add to, after each of them; it is 0 before a request's first."""
    sets = sets | first
    anchor = np.maximum.accumulate(np.where(sets, np.arange(len(sets)), 0))
    total = np.cumsum(adds)
    result: Int64Array = to[anchor] + total - total[anchor]
    return result


def _tokens(
    kind: npt.NDArray[np.int8],
    value: Int64Array,
    first: npt.NDArray[np.bool_],
    grows: npt.NDArray[np.bool_],
    swapped: npt.NDArray[np.bool_],
    tick: Int64Array,
    names: Names,
) -> Int64Array:
    """Tokens held after each event; `swapped`: it frees the blocks whose copy is in host memory now."""
    by_value = np.isin(kind, names.kind_codes(_SETS_VALUE))
    compressed = kind == names.kinds.get("compressed", -1)
    sets = by_value | compressed | swapped | np.isin(kind, names.kind_codes(_SETS_ZERO))
    to = np.where(by_value, value, np.where(compressed, value + 1, 0))  # the newest token has a place of its own
    adds = np.where(kind == names.kinds.get("chunk", -1), value, 0) + (kind == names.kinds.get("first", -1))
    adds[1:] += np.where(grows[:-1] & ~first[1:], tick[1:] - tick[:-1], 0)
    return _running_total(sets, to, adds, first)


def _blocks(
    kind: npt.NDArray[np.int8], num_blocks: Int64Array, first: npt.NDArray[np.bool_], names: Names
) -> Int64Array:
    """Blocks held after each event."""
    compressed = kind == names.kinds.get("compressed", -1)
    takes, gives = np.isin(kind, names.kind_codes(_TAKES)), np.isin(kind, names.kind_codes(_GIVES))
    adds = np.where(takes, num_blocks, np.where(gives, -num_blocks, 0)).astype(np.int64)
    over = np.isin(kind, names.kind_codes(("finished", "aborted", "failed")))
    sets = compressed | over
    return np.maximum(_running_total(sets, np.where(compressed, num_blocks, 0).astype(np.int64), adds, first), 0)

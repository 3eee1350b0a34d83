"""Timelines of requests, computed from a recording's events and step times.

* `event_times`: when each event took effect, in seconds. Decisions of `plan` take effect at the
  start of the step, those of `commit` at its end.
* `phases_of`: what each request did, as intervals. The phases are those of the columns `<phase>_s`
  of the `requests` table, and the lengths add up to them.
* `holdings_of`: tokens and blocks of each request in the cache. A decoding request gains a token
  with every step that decodes. A token counts from the start of the step that adds it. The sum over
  requests, with shared blocks counted once, is the column `stored_tokens` of the steps.
* `step_series`: tokens per second and maxima of counts over time bins.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zlab.traces.recording import Recording, RecordingError
from zlab.traces.schema import PHASES, BlockEffect, EventKind, Phase, Reason, TokenEffect, WrittenBy

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
Int8Array = npt.NDArray[np.int8]
BoolArray = npt.NDArray[np.bool_]

MOST_BLOCKS = 2**19  # most blocks of a pool; pictures need memory for each
MOST_BLOCK_TOKENS = 2**20
LATEST_S = 1e10  # latest time of a run

_NUM_CODES = 128  # number of codes in a column of type int8
NO_CHANGE = -2  # in place of a phase: the event does not change the phase


def kinds_where(holds: Callable[[EventKind], bool]) -> BoolArray:
    """Return a lookup table by the number of an event's kind: the result of `holds` for it.

    The number 0, an unknown kind, gives false.
    """
    table = np.zeros(max(EventKind) + 1, dtype=bool)
    for kind in EventKind:
        table[kind] = holds(kind)
    return table


class Names:
    """Translates the codes of a recording to the members of `zlab.traces.schema`, by the names in
    the recording's manifest.
    """

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        """Read the names. Raise RecordingError if the manifest lacks them or a code is out of
        range.
        """
        kinds = _codes(manifest, "kinds")
        reasons = _codes(manifest, "reasons")
        _codes(manifest, "block_states")
        self._kinds = np.zeros(_NUM_CODES, dtype=np.int8)
        for kind in EventKind:
            if kind.label in kinds:
                self._kinds[kinds[kind.label]] = kind
        self._reasons = {
            reasons[reason.label]: reason for reason in Reason if reason.label in reasons
        }

    def kinds(self, events: pa.Table) -> Int8Array:
        """Return the numbers of the event kinds [n] of a table's column `kind`.

        A kind that this version does not know is 0.
        """
        found: Int8Array = self._kinds[events["kind"].to_numpy()]
        return found

    def reason(self, value: int) -> Reason | None:
        """Return the reason for an event's value, None for an unknown one."""
        return self._reasons.get(value)

    def phases_of_reasons(self, values: Int64Array) -> Int8Array:
        """Return the phase [n] (index in PHASES) that a blocked request enters, by the value [n] of
        its event; NO_CHANGE for a reason that this version does not know.
        """
        found = np.full(len(values), NO_CHANGE, dtype=np.int8)
        for code, reason in self._reasons.items():
            if reason.phase is not None:
                found[values == code] = reason.phase.place
        return found


def _codes(manifest: Mapping[str, Any], key: str) -> dict[str, int]:
    names = manifest.get(key)
    if not isinstance(names, Mapping) or not names:
        raise RecordingError(
            f"the manifest has no names under {key!r}; the recording cannot be interpreted"
        )
    try:
        codes = {str(name): int(code) for code, name in names.items()}
    except (ValueError, TypeError) as error:
        raise RecordingError(f"manifest, {key!r}: a code is no whole number: {error}") from error
    for name, code in codes.items():
        if not 0 <= code < _NUM_CODES:
            raise RecordingError(
                f"manifest, {key!r}: code {code} of {name!r} is not in 0..{_NUM_CODES - 1}"
            )
    return codes


def pool_of(manifest: Mapping[str, Any]) -> tuple[int, int]:
    """Return (number of blocks, tokens of a block). Raise RecordingError if the manifest lacks
    them, or if they are too large for any pool.
    """
    values = [manifest.get(name) for name in ("num_blocks", "block_size")]
    if not all(type(value) is int and value > 0 for value in values):
        raise RecordingError(
            f"the manifest's num_blocks and block_size must be whole numbers above 0, not "
            f"{str(values)[:100]}"
        )
    num_blocks, block_size = int(str(values[0])), int(str(values[1]))
    for name, value, most in (
        ("num_blocks", num_blocks, MOST_BLOCKS),
        ("block_size", block_size, MOST_BLOCK_TOKENS),
    ):
        if value > most:
            raise RecordingError(
                f"the manifest's {name} is {str(value)[:20]}, at most {most:,} are shown"
            )
    return num_blocks, block_size


@dataclass(frozen=True)
class StepTimes:
    """Starts and ends of steps 0, 1, ... in seconds."""

    start_s: FloatArray
    end_s: FloatArray

    @property
    def last_s(self) -> float:
        """The end of the last step, 0 without steps."""
        return float(self.end_s[-1]) if len(self.end_s) else 0.0

    def starts(self, steps: Int64Array) -> FloatArray:
        """Return the start of each of these steps; for a step that never ran, the end of the last
        step.
        """
        return self._at(self.start_s, steps)

    def ends(self, steps: Int64Array) -> FloatArray:
        """Return the end of each of these steps; for a step that never ran, the end of the last
        step.
        """
        return self._at(self.end_s, steps)

    def _at(self, times: FloatArray, steps: Int64Array) -> FloatArray:
        if not len(times):
            return np.zeros(len(steps))
        return np.where(steps < len(times), times[np.minimum(steps, len(times) - 1)], self.last_s)

    def ticks_at(self, moments_s: FloatArray) -> Int64Array:
        """Return the tick [n] of each time [n] in seconds.

        Step s runs during tick 2 s. Tick 2 s + 1 is the gap between the end of step s and the start
        of the next step: the commit of step s has happened, and the next plan has not. Tick -1 is
        the time before the first step.
        """
        begun = np.searchsorted(self.start_s, moments_s, side="right").astype(np.int64)
        over = np.searchsorted(self.end_s, moments_s, side="right")
        return np.where(begun > over, 2 * begun - 2, 2 * begun - 1)


def step_times(steps: pa.Table) -> StepTimes:
    """Return the times of a `steps` table (columns step, start_s, end_s). Raise RecordingError if
    steps are missing.
    """
    numbers = steps["step"].to_numpy()
    if len(numbers) and (numbers[0] != 0 or (np.diff(numbers) != 1).any()):
        raise RecordingError(
            f"table 'steps': its rows are not steps 0 to {len(numbers) - 1} one after the other"
        )
    start, end = steps["start_s"].to_numpy(), steps["end_s"].to_numpy()
    if not (np.isfinite(start).all() and np.isfinite(end).all()):
        raise RecordingError("table 'steps': a time is no finite number")
    if len(start) and (start[0] < 0 or end.max() > LATEST_S):
        raise RecordingError(f"table 'steps': a time is not in 0..{LATEST_S:g} s")
    if (end < start).any() or (np.diff(start) < 0).any():
        raise RecordingError("table 'steps': time decreases")
    return StepTimes(start, end)


_BY_PLAN = kinds_where(lambda kind: kind.effect.stage is WrittenBy.PLAN)
_BY_COMMIT = kinds_where(lambda kind: kind.effect.stage is WrittenBy.COMMIT)
_BEFORE_END = kinds_where(lambda kind: kind.effect.stage is WrittenBy.BEFORE_END)


def settled_late(events: pa.Table, names: Names) -> BoolArray:
    """Return which rows [n] of an `events` table (step, kind, request) were written by commit, at
    the end of their step.
    """
    step, request = (events[name].to_numpy() for name in ("step", "request"))
    kind = names.kinds(events)
    count = len(step)
    if not count:
        return np.zeros(0, dtype=bool)
    if step[0] < 0 or (step[1:] < step[:-1]).any():
        raise RecordingError("table 'events': its rows are not in the order of steps 0, 1, ...")
    settling = _BY_COMMIT[kind]
    giving = _BEFORE_END[kind]
    # The end of a request and the releases just before it form one group.
    joins = np.zeros(count, dtype=bool)
    joins[1:] = (
        giving[:-1]
        & (giving | settling)[1:]
        & (request[1:] == request[:-1])
        & (step[1:] == step[:-1])
    )
    group = np.cumsum(~joins)
    settles = np.zeros(int(group[-1]) + 1, dtype=bool)
    settles[group[settling]] = True
    of_step = np.concatenate(([0], np.cumsum(np.diff(step) != 0)))
    index = np.arange(count)
    last_decision = np.full(int(of_step[-1]) + 1, -1)
    deciding = _BY_PLAN[kind]
    last_decision[of_step[deciding]] = index[deciding]  # ascending: the last one stays
    marks = settles[group] & (index > last_decision[of_step])
    first_mark = np.full(len(last_decision), count)
    first_mark[of_step[marks][::-1]] = index[marks][::-1]
    late: BoolArray = index >= first_mark[of_step]
    return late


def event_times(events: pa.Table, times: StepTimes, names: Names) -> FloatArray:
    """Return the seconds at which each row of `events` took effect. An abort or refusal between
    steps counts at the start of the next step.

    Args:
        events: The events table.
        times: Times of the steps.
        names: Names of the recording's codes.
    """
    step = events["step"].to_numpy()
    return np.where(settled_late(events, names), times.ends(step), times.starts(step))


_OVER = Phase.DONE.place
# The phase that an event begins, by the number of its kind.
_ENTERS = np.full(max(EventKind) + 1, NO_CHANGE, dtype=np.int8)
for _kind in EventKind:
    if _kind.effect.phase is not None:
        _ENTERS[_kind] = _kind.effect.phase.place


@dataclass(frozen=True)
class Phases:
    """Intervals sorted by request and then time: `request[i]` was in `phase[i]` (index into PHASES)
    from `start_s[i]` to `end_s[i]`; it entered the phase in step `step[i]`.

    Intervals without length are left out. The last phase of a request that has not ended lasts up
    to the end of the last step.
    """

    request: Int64Array
    phase: Int8Array
    start_s: FloatArray
    end_s: FloatArray
    step: Int64Array

    def totals(self, requests: Int64Array) -> FloatArray:
        """Return the seconds [request, phase] that these requests (by number) spent in each
        phase.
        """
        numbers = np.asarray(requests)
        order = np.argsort(numbers)
        place = np.searchsorted(numbers, self.request, sorter=order)
        place = (
            order[np.minimum(place, len(numbers) - 1)]
            if len(numbers)
            else np.zeros(len(self.request), dtype=int)
        )
        known = (
            numbers[place] == self.request
            if len(numbers)
            else np.zeros(len(self.request), dtype=bool)
        )
        flat = place[known] * len(PHASES) + self.phase[known]
        seconds = (self.end_s - self.start_s)[known]
        summed: FloatArray = np.bincount(
            flat, weights=seconds, minlength=len(numbers) * len(PHASES)
        ).astype(np.float64)
        return summed.reshape(-1, len(PHASES))

    def of(self, requests: Int64Array) -> "Phases":
        """Return the intervals of these requests."""
        return self.where(np.isin(self.request, requests))

    def within(self, window_s: tuple[float, float]) -> "Phases":
        """Return the intervals that overlap a time window, not cut to it."""
        return self.where((self.end_s > window_s[0]) & (self.start_s < window_s[1]))

    def where(self, keep: BoolArray) -> "Phases":
        """Return the intervals where `keep` is true."""
        return Phases(
            self.request[keep],
            self.phase[keep],
            self.start_s[keep],
            self.end_s[keep],
            self.step[keep],
        )


def read_phases(recording: Recording) -> Phases:
    """Return the phases of a recording. Raise RecordingError."""
    requests = recording.table("requests", ("number", "arrival_s", "finish_s"))
    return phases_of(
        recording.table("events", ("step", "kind", "request", "value")),
        recording.table("steps", ("step", "start_s", "end_s")),
        recording.manifest,
        requests,
    )


def phases_of(
    events: pa.Table, steps: pa.Table, manifest: Mapping[str, Any], requests: pa.Table | None = None
) -> Phases:
    """Return the phases of all requests.

    Args:
        events: The events table (step, kind, request, value).
        steps: The steps table (step, start_s, end_s).
        manifest: The recording's manifest.
        requests: The requests table (number, arrival_s, finish_s), for exact arrival and finish
            times. Without it, a request arrives at the start of the step before which it was
            submitted.

    Raises:
        RecordingError: The tables are inconsistent.
    """
    names, times = Names(manifest), step_times(steps)
    enters = phase_entered(events, names)
    relevant = enters != NO_CHANGE
    number = events["request"].to_numpy()[relevant]
    order = np.argsort(number, kind="stable")
    number = number[order]
    phase = enters[relevant][order]
    moment = event_times(events, times, names)[relevant][order]
    step = events["step"].to_numpy()[relevant][order]
    if requests is not None and requests.num_rows:
        moment = _exact_ends(number, phase, moment, requests)
    return _intervals(number, phase, moment, step, times)


def phases_now(events: pa.Table, manifest: Mapping[str, Any]) -> Int64Array:
    """Return how many requests are in each phase after the last event, [phase] as in PHASES.

    `events` has the columns kind, request and value. Raise RecordingError.
    """
    enters = phase_entered(events, Names(manifest))
    relevant = enters != NO_CHANGE
    number, phase = events["request"].to_numpy()[relevant], enters[relevant]
    last = len(number) - 1 - np.unique(number[::-1], return_index=True)[1]
    current = phase[last]
    counted: Int64Array = np.bincount(current[current >= 0], minlength=len(PHASES)).astype(np.int64)
    return counted


def phase_entered(events: pa.Table, names: Names) -> Int8Array:
    """Return for each event the phase that it begins (index in PHASES), _OVER or NO_CHANGE."""
    kind = names.kinds(events)
    enters: Int8Array = _ENTERS[kind]
    stalled = kind == EventKind.STALLED
    enters[stalled] = names.phases_of_reasons(events["value"].to_numpy()[stalled])
    return enters


def _exact_ends(
    number: Int64Array, phase: Int8Array, moment: FloatArray, requests: pa.Table
) -> FloatArray:
    """Replace the times of arrivals and ends by those of the `requests` table, which may lie
    between steps.
    """
    known = requests["number"].to_numpy()
    order = np.argsort(known)
    place = order[np.minimum(np.searchsorted(known, number, sorter=order), len(known) - 1)]
    found = known[place] == number
    arrival, finish = (
        requests["arrival_s"].to_numpy()[place],
        requests["finish_s"].to_numpy()[place],
    )
    if not (np.abs(arrival) <= LATEST_S).all() or (np.abs(finish) > LATEST_S).any():
        raise RecordingError(f"table 'requests': a time is not in 0..{LATEST_S:g} s")
    moment = np.where(found & (phase == Phase.QUEUED.place), arrival, moment)
    return np.where(found & (phase == _OVER) & ~np.isnan(finish), finish, moment)


def _intervals(
    number: Int64Array,
    phase: Int8Array,
    moment: FloatArray,
    step: Int64Array,
    times: StepTimes,
) -> Phases:
    end = np.empty_like(moment)
    if len(moment):
        end[:-1] = moment[1:]
        last = np.ones(len(number), dtype=bool)
        last[:-1] = number[1:] != number[:-1]
        end[last] = times.last_s
    keep = (phase >= 0) & (end > moment)
    return Phases(number[keep], phase[keep], moment[keep], end[keep], step[keep])


_IS_OF_END = kinds_where(lambda kind: kind.ends)
_DECODES_ON = kinds_where(lambda kind: kind.effect.phase is Phase.DECODE)
# events after which it is known whether the request decodes
_TURNS = kinds_where(
    lambda kind: (
        (kind.effect.phase is not None or kind is EventKind.STALLED)
        and kind not in (EventKind.ARRIVED, EventKind.REFUSED)
    )  # the request has no blocks and tokens yet
)
_COUNTS_TOKENS = kinds_where(lambda kind: kind.effect.tokens is not TokenEffect.NONE)
_TAKES = kinds_where(lambda kind: kind.effect.blocks in (BlockEffect.TAKE, BlockEffect.SHARE))
_GIVES = kinds_where(lambda kind: kind.effect.blocks is BlockEffect.GIVE_BACK)
_REPLACES = kinds_where(lambda kind: kind.effect.blocks is BlockEffect.REPLACE)


def _has_token_effect(effect: TokenEffect, kind: EventKind) -> bool:
    return kind.effect.tokens is effect


_TOKENS = {effect: kinds_where(partial(_has_token_effect, effect)) for effect in TokenEffect}


@dataclass(frozen=True)
class Holdings:
    """Changes sorted by request and then time: from tick `tick[i]` on (`StepTimes.ticks_at`),
    `request[i]` has `tokens[i]` tokens in `blocks[i]` blocks, and one more token with every decode
    step where `grows[i]`.

    `decode_steps[s]` is the number of steps before s that decode.
    """

    request: Int64Array
    tick: Int64Array
    tokens: Int64Array
    grows: BoolArray
    blocks: Int64Array
    decode_steps: Int64Array

    def numbers(self) -> Int64Array:
        """Every request that ever had blocks, ascending."""
        return np.unique(self.request)

    def tokens_at(self, requests: Int64Array, ticks: Int64Array) -> Int64Array:
        """Return the tokens [request, tick] of these requests in these ticks."""
        index = self._before(requests, ticks)
        last = len(self.decode_steps) - 1
        passed = (
            self.decode_steps[np.clip(ticks // 2, 0, last)]
            - self.decode_steps[np.minimum((self.tick[index] + 1) // 2, last)]
        )
        grown = self.grows[index] * np.maximum(passed, 0)
        return np.where(index >= 0, self.tokens[index] + grown, 0)

    def blocks_at(self, requests: Int64Array, ticks: Int64Array) -> Int64Array:
        """Return the blocks [request, tick] of these requests in these ticks. A shared block counts
        for each owner.
        """
        index = self._before(requests, ticks)
        return np.where(index >= 0, self.blocks[index], 0)

    def _before(self, requests: Int64Array, ticks: Int64Array) -> npt.NDArray[np.intp]:
        """Return the index of the change that holds for each request in each tick, -1 before its
        first.
        """
        # Requests and ticks form one ascending key, so one search serves all.
        stride = 2 * len(self.decode_steps) + 2
        keys = self.request * stride + self.tick
        wanted = np.asarray(requests)[:, None] * stride + np.asarray(ticks)[None, :]
        place = np.searchsorted(keys, wanted, side="right") - 1
        known = (
            (place >= 0) & (self.request[place] == np.asarray(requests)[:, None])
            if len(keys)
            else place >= 0
        )
        found: npt.NDArray[np.intp] = np.where(known, place, -1)
        return found


def read_holdings(recording: Recording) -> Holdings:
    """Return the holdings of a recording. Raise RecordingError."""
    return holdings_of(
        recording.table("events", ("step", "kind", "request", "value", "num_blocks")),
        recording.table("steps", ("step", "start_s", "end_s", "decodes")),
        recording.manifest,
    )


def holdings_of(events: pa.Table, steps: pa.Table, manifest: Mapping[str, Any]) -> Holdings:
    """Return the tokens and blocks of each request over time.

    Args:
        events: The events table, all columns.
        steps: The steps table (step, start_s, end_s, decodes).
        manifest: The recording's manifest.

    Raises:
        RecordingError: The tables are inconsistent.
    """
    names = Names(manifest)
    step_times(steps)  # checks the steps
    num_steps = steps.num_rows
    decode_steps = np.concatenate(([0], np.cumsum(steps["decodes"].to_numpy() > 0))).astype(
        np.int64
    )
    kind = names.kinds(events)
    relevant = (_TURNS | _TAKES | _GIVES | _COUNTS_TOKENS)[kind]
    holds_from = np.minimum(
        2 * events["step"].to_numpy() + settled_late(events, names), 2 * num_steps
    )[relevant]
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
    state = _last_turn(kind, first)
    grows = _DECODES_ON[state]
    swapped = _GIVES[kind] & (state == EventKind.SWAP_OUT)
    tokens = _tokens(kind, value, first, grows, swapped, decode_steps[(holds_from + 1) // 2])
    blocks = _blocks(kind, num_blocks, first)
    last = np.ones(len(request), dtype=bool)  # of several changes in one tick, the last one holds
    last[:-1] = (request[1:] != request[:-1]) | (holds_from[1:] != holds_from[:-1])
    return Holdings(
        request[last], holds_from[last], tokens[last], grows[last], blocks[last], decode_steps
    )


def _last_turn(kind: Int8Array, first: BoolArray) -> Int8Array:
    """Return for each event the kind of the last event that decides whether the request decodes."""
    last: Int8Array = kind[
        np.maximum.accumulate(np.where(_TURNS[kind] | first, np.arange(len(kind)), 0))
    ]
    return last


def _running_total(
    sets: BoolArray, to: Int64Array, adds: Int64Array, first: BoolArray
) -> Int64Array:
    """Return a value that events set or add to, after each event. It is 0 before a request's first
    event.
    """
    sets = sets | first
    anchor = np.maximum.accumulate(np.where(sets, np.arange(len(sets)), 0))
    total = np.cumsum(adds)
    result: Int64Array = to[anchor] + total - total[anchor]
    return result


def _tokens(
    kind: Int8Array,
    value: Int64Array,
    first: BoolArray,
    grows: BoolArray,
    swapped: BoolArray,
    tick: Int64Array,
) -> Int64Array:
    """Return the tokens of the request after each event.

    Args:
        kind: Kind of each event, by request and then time, like all that follows.
        value: Value of the event.
        first: Whether it is the first event of its request.
        grows: Whether the request decodes from the event on.
        swapped: Whether the event releases blocks whose copy is in host memory.
        tick: Number of decode steps before the step from which the event holds.
    """
    to_value, to_value_and_one, to_zero = (
        _TOKENS[effect][kind]
        for effect in (TokenEffect.SET_VALUE, TokenEffect.SET_VALUE_AND_ONE, TokenEffect.SET_ZERO)
    )
    sets = to_value | to_value_and_one | swapped | to_zero
    to = np.where(to_value, value, np.where(to_value_and_one, value + 1, 0))
    adds = np.where(_TOKENS[TokenEffect.ADD_VALUE][kind], value, 0)
    adds += _TOKENS[TokenEffect.ADD_ONE][kind]
    adds[1:] += np.where(grows[:-1] & ~first[1:], tick[1:] - tick[:-1], 0)
    return _running_total(sets, to, adds, first)


def _blocks(kind: Int8Array, num_blocks: Int64Array, first: BoolArray) -> Int64Array:
    """Return the blocks of the request after each event."""
    replaces = _REPLACES[kind]
    adds = np.where(_TAKES[kind], num_blocks, np.where(_GIVES[kind], -num_blocks, 0))
    to = np.where(replaces, num_blocks, 0).astype(np.int64)
    held = _running_total(replaces | _IS_OF_END[kind], to, adds.astype(np.int64), first)
    return np.maximum(held, 0)


COUNTS = ("running", "waiting", "waiting_for_slot", "waiting_for_block", "compressing")
COLUMNS = (
    "step",
    "start_s",
    "end_s",
    "output_tokens",
    "prefill_tokens",
    "free_blocks",
    "stored_tokens",
    *COUNTS,
)


@dataclass(frozen=True)
class StepSeries:
    """Metrics over time bins: `edges_s` [n + 1]; rates in tokens per second, maxima and wasted
    positions [n] each.
    """

    edges_s: FloatArray
    output_tokens_per_s: FloatArray
    prefill_tokens_per_s: FloatArray
    peaks: dict[str, npt.NDArray[np.int64]]
    wasted_slots: npt.NDArray[np.int64]

    @property
    def centres_s(self) -> FloatArray:
        """The middle of each bin."""
        return np.asarray((self.edges_s[1:] + self.edges_s[:-1]) / 2)


def step_series(
    steps: pa.Table,
    times: StepTimes,
    window_s: tuple[float, float],
    num_bins: int,
    pool: tuple[int, int],
) -> StepSeries:
    """Divide the steps (columns COLUMNS) into time bins. Tokens count at the end of their step; a
    count is the maximum over the steps of a bin.

    Args:
        steps: The steps table.
        times: Times of the steps.
        window_s: Start and end in seconds.
        num_bins: Number of bins.
        pool: (blocks, tokens of a block). Wasted positions are positions of owned blocks that hold
            no token.
    """
    edges = np.linspace(*window_s, num_bins + 1)
    width = (window_s[1] - window_s[0]) / num_bins
    rates = {}
    for name in ("output_tokens", "prefill_tokens"):
        tokens = steps[name].to_numpy()
        rates[name] = (
            np.histogram(times.end_s, bins=num_bins, range=window_s, weights=tokens)[0] / width
        )
    low = np.searchsorted(times.end_s, edges[:-1], side="right")
    high = np.searchsorted(times.start_s, edges[1:], side="left")
    used = pool[0] - steps["free_blocks"].to_numpy().astype(np.int64)
    wasted = used * pool[1] - steps["stored_tokens"].to_numpy()
    peaks = {name: peak(steps[name].to_numpy(), low, high) for name in COUNTS}
    return StepSeries(
        edges, rates["output_tokens"], rates["prefill_tokens"], peaks, peak(wasted, low, high)
    )


def peak(
    values: npt.NDArray[np.int64],
    low: Sequence[int] | npt.NDArray[np.intp],
    high: Sequence[int] | npt.NDArray[np.intp],
) -> npt.NDArray[np.int64]:
    """Return the maximum of values[low[i] : high[i]] for each i, 0 for an empty range.

    Args:
        values: Values [n].
        low: First indices.
        high: Indices after the last ones.
    """
    return np.array(
        [int(values[a:b].max()) if b > a else 0 for a, b in zip(low, high, strict=True)],
        dtype=np.int64,
    )

"""Explain one request in words: what it waited for, which request delayed it, and what that cost.

The reasons are those that the scheduler recorded (table `causes`). For a recording without them,
the explanation uses events alone: behind which request it waited, and for which it was preempted.

While a request waits in the queue, the head of the queue decides how long. An example with the
causes of two heads:

    0.0 s  r7 arrives                     r87, the head since 0.0 s, needs 6 blocks, 2 are free
    5.0 s  r87 is admitted                r7 is the head: all 56 query slots are taken
    5.5 s  r7 is admitted                 r7 waited 5.0 s for the blocks of r87, 0.5 s for a slot
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from zlab.traces.recording import Recording
from zlab.traces.schema import PHASES, Cause, EventKind, Phase, Reason, Verdict
from zlab.traces.timeline import (
    FloatArray,
    Holdings,
    Int64Array,
    Names,
    Phases,
    event_times,
    kinds_where,
    read_holdings,
    read_phases,
    step_times,
)

_DECODES_ON = kinds_where(lambda kind: kind.effect.phase is Phase.DECODE)
_LEAVES_QUEUE = kinds_where(
    lambda kind: kind.ends or kind in (EventKind.ADMITTED, EventKind.SWAP_IN)
)
_PHASE_WORDS = {phase.label: phase.words for phase in reversed(Phase)}
STEP_COLUMNS = (
    "step",
    "start_s",
    "end_s",
    "decodes",
    "prefills",
    "prefill_tokens",
    "running",
    "waiting",
    "free_blocks",
    "cached_blocks",
)
MOST_NAMES = 4  # most requests that a sentence names
_AMOUNTS = {
    Cause.BLOCKS: "needed {needed:,} {block}, {available:,} were free",
    Cause.WATERMARK: (
        "needed {needed:,} free {block}, with those that the policy keeps free, "
        "and {available:,} were free"
    ),
    Cause.RESERVED: (
        "needs {needed:,} {block} at its largest, and {available:,} of {total:,} were not reserved"
    ),
    Cause.SLOTS: "needed a query slot, and {total:,} of {total:,} were taken",
    Cause.SLOT_BLOCKS: (
        "needed {needed:,} {block} reserved for a query slot, and {available:,} of {total:,} were "
        "not reserved for others"
    ),
    Cause.RUNNING: "needed a place among the running requests, and all {total:,} were taken",
    Cause.STEP_TOKENS: (
        "found {available:,} of the {total:,} tokens of a step left, too few for it"
    ),
    Cause.STEP_REQUESTS: "found {total:,} of {total:,} prefills of the step taken",
    Cause.DEADLOCK: "ran with {total:,} others, and none could continue",
}


@dataclass(frozen=True)
class ExplainedEvent:
    """One event of a request, in words. `step` is the step in which it happened, -1 if it is
    unknown.
    """

    time_s: float
    words: str
    step: int = -1


class Causes:
    """The table `causes` of a recording, with times in seconds.

    `head_rows` are the rows in which the head of the queue was refused. Row `head_rows[i]` holds
    until `head_until_s[i]`: then the head leaves the queue, or gets another reason.
    """

    def __init__(
        self,
        table: pa.Table,
        manifest: Mapping[str, Any],
        times: tuple[FloatArray, FloatArray],
        leaving: tuple[Int64Array, FloatArray],
    ) -> None:
        """Read the rows.

        Args:
            table: The table `causes`.
            manifest: The recording's manifest, which names the codes.
            times: Starts and ends [s] of the steps.
            leaving: Request and time of each event by which a request leaves the queue, sorted by
                request and then time.
        """
        start, end = times
        step = table["step"].to_numpy()
        known = step < len(start)
        columns = {name: table[name].to_numpy()[known] for name in table.column_names}
        self.columns = columns
        step = columns["step"]
        self.moment: FloatArray = np.where(columns["at_end"] != 0, end[step], start[step])
        self._verdicts = _members(manifest, "verdicts", {one.label: one for one in Verdict})
        self.known = bool(self._verdicts)  # the recording is from a release that writes causes
        self._causes = _members(manifest, "causes", {one.label: one for one in Cause})
        refused = [code for code, one in self._verdicts.items() if one is Verdict.NOT_ADMITTED]
        self.head_rows = np.flatnonzero(
            np.isin(columns["verdict"], refused) & (columns["other"] == columns["request"])
        )
        self.head_until_s = self._until(leaving)

    def _until(self, leaving: tuple[Int64Array, FloatArray]) -> FloatArray:
        """Return the time until which each reason holds, [head row]."""
        request, moment = self.columns["request"][self.head_rows], self.moment[self.head_rows]
        until = np.full(len(request), np.inf)
        by_request = np.lexsort((np.arange(len(request)), request))
        same = request[by_request][1:] == request[by_request][:-1]
        until[by_request[:-1][same]] = moment[by_request[1:][same]]
        low, high = (np.searchsorted(leaving[0], request, side=side) for side in ("left", "right"))
        for row, (a, b) in enumerate(zip(low, high, strict=True)):
            at = a + np.searchsorted(leaving[1][a:b], moment[row])
            if at < b:
                until[row] = min(until[row], leaving[1][at])
        return until

    def verdict(self, row: int) -> Verdict | None:
        """Return the verdict, None for one that this version does not know."""
        found = self._verdicts.get(int(self.columns["verdict"][row]))
        return found if isinstance(found, Verdict) else None

    def cause(self, row: int) -> Cause | None:
        """Return the resource that was short, None for one that this version does not know."""
        found = self._causes.get(int(self.columns["cause"][row]))
        return found if isinstance(found, Cause) else None

    def last_of(self, request: int, verdict: Verdict, moment_s: float) -> int | None:
        """Return the last row of a request with this verdict up to a time, None without one.

        Args:
            request: Number of the request.
            verdict: The verdict.
            moment_s: Time in seconds.
        """
        rows = np.flatnonzero(
            (self.columns["request"] == request) & (self.moment <= moment_s + 1e-12)
        )
        found = [int(row) for row in rows if self.verdict(int(row)) is verdict]
        return found[-1] if found else None

    def heads_between(self, start_s: float, end_s: float) -> list[tuple[float, float, int]]:
        """Return the intervals (from, to, row) in which the head of the queue was refused for a
        reason.

        Of several refused requests, the one refused last is the head.
        """
        rows = np.flatnonzero((self.moment[self.head_rows] < end_s) & (self.head_until_s > start_s))
        found: list[tuple[float, float, int]] = []
        open_: list[int] = []
        now = start_s

        def go_to(until: float) -> float:
            at = now
            while at < until:
                while open_ and self.head_until_s[open_[-1]] <= at:
                    open_.pop()
                if not open_:
                    return until
                stop = min(until, float(self.head_until_s[open_[-1]]))
                row = int(self.head_rows[open_[-1]])
                if found and found[-1][2] == row and found[-1][1] == at:
                    found[-1] = (found[-1][0], stop, row)
                else:
                    found.append((at, stop, row))
                at = stop
            return at

        for row in rows:
            now = go_to(max(now, float(self.moment[self.head_rows[row]])))
            open_.append(int(row))
        go_to(end_s)
        return found


def _members(manifest: Mapping[str, Any], key: str, known: Mapping[str, Any]) -> dict[int, Any]:
    """Return the members for the codes of a manifest. Unknown codes are left out."""
    names = manifest.get(key)
    if not isinstance(names, Mapping):
        return {}
    return {
        int(code): known[name]
        for code, name in names.items()
        if str(code).isdecimal() and name in known
    }


class Explainer:
    """Explains requests of one recording. The events are read once."""

    def __init__(self, recording: Recording, phases: Phases | None = None) -> None:
        """Read the events. Raise RecordingError when the recording cannot be read."""
        self._recording = recording
        if phases is None:
            phases = read_phases(recording)
        events = recording.table("events")
        self._steps = steps = recording.table("steps", STEP_COLUMNS)
        times = step_times(steps)
        self._cached = steps["cached_blocks"].to_numpy()
        self._names = Names(recording.manifest)
        self._phases = phases
        self._columns = {
            name: events[name].to_numpy() for name in ("step", "request", "value", "num_blocks")
        } | {"kind": self._names.kinds(events)}
        self._moment: FloatArray = event_times(events, times, self._names)
        leaving = np.flatnonzero(_LEAVES_QUEUE[self._columns["kind"]])
        number = self._columns["request"][leaving]
        order = np.argsort(number, kind="stable")
        self._causes = Causes(
            recording.table("causes"),
            recording.manifest,
            (times.start_s, times.end_s),
            (number[order], self._moment[leaving][order]),
        )

    @cached_property
    def _holdings(self) -> Holdings:
        return read_holdings(self._recording)

    def in_short(self, request: Mapping[str, Any]) -> str:
        """Return how a request (a row of the `requests` table) spent its time, and the reason of
        its longest wait.
        """
        number = int(request["number"])
        mine = self._phases.of(np.array([number]))
        if not len(mine.request):
            return f"r{number} did not wait: {self._ending(request)}."
        length = mine.end_s - mine.start_s
        spent = np.bincount(mine.phase, weights=length, minlength=len(PHASES))
        parts = [
            f"{_span(float(spent[place]))} {_PHASE_WORDS[PHASES[place]]}"
            for place in np.argsort(-spent, kind="stable")
            if spent[place] > 0
        ]
        words = f"r{number} took {_span(float(spent.sum()))}: {', '.join(parts)}."
        waits = np.isin(mine.phase, [one.place for one in Phase if one not in _WORKS])
        if not waits.any():
            return words
        longest = int(np.argmax(np.where(waits, length, -1.0)))
        why = self._why(number, float(mine.start_s[longest]), float(mine.end_s[longest]))
        return f"{words} Its longest wait: {_span(float(length[longest]))}{why}." if why else words

    def explain(self, request: Mapping[str, Any]) -> list[ExplainedEvent]:
        """Return the events of a request (a row of the `requests` table) in order of time."""
        number = int(request["number"])
        rows = np.flatnonzero(self._columns["request"] == number)
        lines = [
            ExplainedEvent(
                float(request["arrival_s"]),
                f"arrived with {request['prompt_tokens']:,} prompt tokens",
            )
        ]
        decoding = False
        for row in rows:
            words = self._words(int(row), number, decoding)
            kind = self._columns["kind"][row]
            decoding = bool(_DECODES_ON[kind]) or (decoding and kind == EventKind.GREW)
            if words:
                step = int(self._columns["step"][row])
                lines.append(ExplainedEvent(float(self._moment[row]), words, step))
        if request["finish_s"] is not None and not np.isnan(request["finish_s"]):
            lines.append(ExplainedEvent(float(request["finish_s"]), self._ending(request)))
        elif self._phases.request.size:
            lines += self._still_waiting(number)
        return lines

    def step_in_words(self, step: int) -> list[str]:
        """Return what the scheduler decided in a step: times and load of the step, its events by
        kind, and the decisions against requests.
        """
        row = self._steps.slice(step, 1).to_pylist()[0]
        lines = [
            f"Step {step:,}, {row['start_s']:,.6f} s to {row['end_s']:,.6f} s: {row['decodes']:,} "
            f"requests decode, {row['prefill_tokens']:,} prompt tokens in {row['prefills']:,} "
            f"chunks; {row['running']:,} run, {row['waiting']:,} wait; {row['free_blocks']:,} "
            f"blocks are free, {row['cached_blocks']:,} of them cached."
        ]
        kinds = self._columns["kind"]
        low, high = np.searchsorted(self._columns["step"], [step, step + 1])
        for code in dict.fromkeys(kinds[low:high].tolist()):
            if code in (0, EventKind.DECODES):
                continue
            mine = np.flatnonzero(kinds[low:high] == code) + low
            requests = [f"r{self._columns['request'][index]}" for index in mine]
            named = _named(list(dict.fromkeys(requests)))
            kind = EventKind(code)
            blocks = int(self._columns["num_blocks"][mine].sum())
            amount = f" ({blocks:,} block{'s' if blocks != 1 else ''})" if blocks else ""
            lines.append(
                f"{kind.meaning}{amount}"
                if kind in (EventKind.POLICY, EventKind.PREFIX_LOST)
                else f"{named}: {kind.meaning}{amount}"
            )
        columns = self._causes.columns
        for index in np.flatnonzero(columns["step"] == step):
            verdict = self._causes.verdict(int(index))
            what = verdict.words if verdict is not None else "was decided against"
            other = int(columns["other"][index])
            who = (
                f"r{other}"
                if verdict is Verdict.PREEMPTED and other not in (-1, columns["request"][index])
                else "it"
            )
            lines.append(
                f"r{columns['request'][index]} {what}: {who} {self._cause_words(int(index))}"
            )
        return lines

    def _still_waiting(self, number: int) -> list[ExplainedEvent]:
        """Return why a request that has not ended waits at the end of the recording."""
        mine = self._phases.of(np.array([number]))
        if not len(mine.request) or PHASES[mine.phase[-1]] not in _QUEUED:
            return []
        start, end = float(mine.start_s[-1]), float(mine.end_s[-1])
        why = self._why(number, start, end)
        return [ExplainedEvent(end, f"still waits in the queue after {_span(end - start)}{why}")]

    def _why(self, number: int, start_s: float, end_s: float) -> str:
        """Return why a request waited from `start_s` to `end_s`; "" if the recording does not
        say.
        """
        mine = self._phases.of(np.array([number])).within((start_s, end_s))
        phase = PHASES[mine.phase[0]] if len(mine.request) else ""
        if phase in _QUEUED:
            return self._queue_words(number, start_s, end_s)
        for label, verdict in (
            (Phase.WAITS_FOR_SLOT.label, Verdict.NO_SLOT),
            (Phase.WAITS_FOR_BLOCK.label, Verdict.NO_BLOCK),
            (Phase.PAUSED.label, Verdict.PAUSED),
        ):
            row = self._causes.last_of(number, verdict, start_s) if phase == label else None
            if row is not None:
                return f": it {self._cause_words(row)}"
        return ""

    def _queue_words(self, number: int, start_s: float, end_s: float) -> str:
        """Return which heads of the queue were refused between two times, and why."""
        stretches = self._causes.heads_between(start_s, end_s)
        if not stretches:
            return ""
        columns = self._causes.columns
        spent: dict[int, float] = {}
        for low, high, row in stretches:
            spent[row] = spent.get(row, 0.0) + high - low
        longest = max(spent, key=lambda row: (spent[row], -row))
        head = int(columns["request"][longest])
        who = (
            "it was the head of the queue itself and"
            if head == number
            else f"r{head}, the head of the queue,"
        )
        words = f": for {_span(spent.pop(longest))} {who} {self._cause_words(longest)}"
        if not spent:
            return words
        heads = list(dict.fromkeys(int(columns["request"][row]) for row in spent))
        others = _named([f"r{one}" for one in heads])
        by_cause: dict[str, float] = {}
        for row, seconds in spent.items():
            cause = self._causes.cause(row)
            label = cause.words if cause is not None else "another reason"
            by_cause[label] = by_cause.get(label, 0.0) + seconds
        lacks = ", ".join(
            f"{_span(seconds)} for {label}"
            for label, seconds in sorted(by_cause.items(), key=lambda item: -item[1])
        )
        return f"{words}; {_span(sum(spent.values()))} more with {others} at the head ({lacks})"

    def _cause_words(self, row: int) -> str:
        """Return what the request of a row of `causes` lacked, and which requests had it."""
        cause, columns = self._causes.cause(row), self._causes.columns
        if cause is None:
            return "waited for a reason that this version does not know"
        amounts = {name: int(columns[name][row]) for name in ("needed", "available", "total")}
        block = "block" if amounts["needed"] == 1 else "blocks"
        words = _AMOUNTS[cause].format(block=block, **amounts)
        if cause in (Cause.BLOCKS, Cause.WATERMARK):
            return words + self._holders(int(columns["step"][row]), amounts["available"])
        if cause in (Cause.SLOTS, Cause.SLOT_BLOCKS):
            return words + self._slot_holders(float(self._causes.moment[row]))
        return words

    def _holders(self, step: int, num_free: int) -> str:
        """Return which requests own most blocks in a step, and how many of `num_free` blocks are
        cached.
        """
        numbers = self._holdings.numbers()
        blocks = self._holdings.blocks_at(numbers, np.array([2 * step]))[:, 0]
        order = np.argsort(-blocks, kind="stable")
        order = order[blocks[order] > 0]
        held = _named([f"r{numbers[index]} ({blocks[index]:,})" for index in order])
        cached = min(int(self._cached[step]) if step < len(self._cached) else 0, num_free)
        parts = [f"held by {held}"] if held else []
        if cached:
            parts.append(f"{cached:,} of the free ones cached")
        return f" ({'; '.join(parts)})" if parts else ""

    def _slot_holders(self, moment_s: float) -> str:
        """Return which requests had query slots at a time."""
        kind, request, value = (self._columns[name] for name in ("kind", "request", "value"))
        rows = np.flatnonzero(
            ((kind == EventKind.SLOT) | (kind == EventKind.SLOT_FREED)) & (self._moment <= moment_s)
        )
        last = {int(value[row]): row for row in rows}
        taken = [f"r{request[row]}" for row in last.values() if kind[row] == EventKind.SLOT]
        return f" (by {_named(taken)})" if taken else ""

    def _words(self, row: int, number: int, decoding: bool) -> str:
        kind = int(self._columns["kind"][row])
        value, count = int(self._columns["value"][row]), int(self._columns["num_blocks"][row])
        match kind:
            case EventKind.ADMITTED:
                return self._admitted(row, number, value)
            case EventKind.HIT:
                return f"found {value:,} of its tokens in {count} cached or shared blocks"
            case EventKind.FIRST:
                return (
                    "computed its prompt: first token"
                    if value <= 1
                    else f"recomputed up to token {value:,}"
                )
            case EventKind.STALLED:
                return self._stalled(row, number, value)
            case EventKind.COMPRESSING:
                return f"began to be compressed from {value:,} tokens into {count} blocks"
            case EventKind.COMPRESSED:
                return f"goes on with {value:,} kept tokens in {count} blocks"
            case EventKind.PREEMPTED:
                lost = (
                    f"discarded {value:,} computed tokens"
                    if value
                    else "its blocks go to host memory"
                )
                return f"preempted{self._preempted_for(row, number)}: {lost}"
            case EventKind.SWAP_IN:
                why = self._why_before(row, number)
                return (
                    f"waited {self._waited(row, number)} in host memory{why}; is copied back into "
                    f"{count} blocks"
                )
            case EventKind.CAPPED:
                return (
                    f"can have at most {value:,} output tokens, because the model or the pool "
                    "has no more positions"
                )
        return ""

    def _admitted(self, row: int, number: int, tokens: int) -> str:
        waited = self._waited(row, number)
        why = self._why_before(row, number)
        if why:
            return (
                f"waited {waited} in the queue{why}; then was admitted with {tokens:,} tokens to "
                f"compute"
            )
        if waited == "0 s":
            return f"was admitted at once with {tokens:,} tokens to compute"
        if self._causes.known:  # the request was not refused
            return (
                f"waited {waited} for the end of a step, then was admitted with {tokens:,} "
                f"tokens to compute"
            )
        admitted = self._columns["kind"][:row] == EventKind.ADMITTED
        before = np.flatnonzero(admitted)
        behind = f" behind r{self._columns['request'][before[-1]]}" if len(before) else ""
        then = f"then was admitted with {tokens:,} tokens to compute"
        return f"waited {waited} in the queue{behind}, {then}"

    def _stalled(self, row: int, number: int, reason: int) -> str:
        """Return what the request waits for and how long. For a query slot, the text names the last
        holder.
        """
        later = np.flatnonzero(self._columns["request"][row + 1 :] == number) + row + 1
        turns = [int(index) for index in later if self._columns["kind"][index] != EventKind.SLOT]
        until = float(self._moment[turns[0]]) if turns else None
        span = f"waited {_span(until - float(self._moment[row]))}" if until is not None else "waits"
        why = self._names.reason(reason)
        verdict = _VERDICTS.get(why) if why is not None else None
        cause = verdict and self._causes.last_of(number, verdict, float(self._moment[row]))
        if cause is not None:
            return f"{span}: it {self._cause_words(cause)}"
        if why is Reason.NO_SLOT:
            return f"{span} for a query slot{self._slot_of(row, number)}"
        if why is Reason.NO_BLOCK:
            return f"{span} for a free block{self._freed_by(row, turns)}"
        return f"{span}: a step takes no more requests"

    def _slot_of(self, row: int, number: int) -> str:
        kind, request, value = (self._columns[name] for name in ("kind", "request", "value"))
        got = np.flatnonzero((kind == EventKind.SLOT) & (request == number))
        got = got[got > row]
        if not len(got):
            return ""
        left = np.flatnonzero((kind == EventKind.SLOT_FREED) & (value == value[got[0]]))
        left = left[left < got[0]]
        return f" behind r{request[left[-1]]}" if len(left) else ""

    def _freed_by(self, row: int, turns: list[int]) -> str:
        """Return the last request that released blocks before this one resumed."""
        if not turns:
            return ""
        kinds = self._columns["kind"][row : turns[0]]
        gave = np.flatnonzero(np.isin(kinds, (EventKind.FREED, EventKind.CACHED)))
        return (
            f" until r{self._columns['request'][row + gave[-1]]} released some" if len(gave) else ""
        )

    def _preempted_for(self, row: int, number: int) -> str:
        """Return the request for which this one was preempted.

        It is the next request in the same step that takes a block or starts a compression.
        """
        cause = self._causes.last_of(number, Verdict.PREEMPTED, float(self._moment[row]))
        if cause is not None:
            other = int(self._causes.columns["other"][cause])
            who = "it" if other in (number, -1) else f"r{other}"
            lack = self._cause_words(cause)
            return f" because it {lack}" if other == -1 else f" because {who} {lack}"
        step = self._columns["step"]
        stop = int(np.searchsorted(step, step[row], side="right"))
        grows = (EventKind.GREW, EventKind.COMPRESSING, EventKind.STALLED)
        after = np.flatnonzero(np.isin(self._columns["kind"][row:stop], grows)) + row
        others = [
            int(self._columns["request"][index])
            for index in after
            if self._columns["request"][index] != number
        ]
        return f" to free blocks for r{others[0]}" if others else ""

    def _waited(self, row: int, number: int) -> str:
        """Return the duration of the phase that this event ends."""
        ended = self._phase_before(row, number)
        return "0 s" if ended is None else _span(ended[1] - ended[0])

    def _phase_before(self, row: int, number: int) -> tuple[float, float] | None:
        """Return start and end of the phase that this event ends, None if the phase had no
        length.
        """
        mine = self._phases.request == number
        ends = np.abs(self._phases.end_s[mine] - self._moment[row])
        if not len(ends) or ends.min() > 1e-9:
            return None
        index = int(np.argmin(ends))
        return float(self._phases.start_s[mine][index]), float(self._phases.end_s[mine][index])

    def _why_before(self, row: int, number: int) -> str:
        ended = self._phase_before(row, number)
        return "" if ended is None else self._queue_words(number, *ended)

    def _ending(self, request: Mapping[str, Any]) -> str:
        status, reason, message = request["status"], request["reason"], request["message"]
        why = {"stop": "the model ended its output", "length": "it reached its length limit"}.get(
            reason, reason.replace("_", " ")
        )
        words = f"{status} after {request['output_tokens']:,} output tokens"
        return words + (f": {why}" if why else "") + (f" ({message})" if message else "")


_WORKS = (Phase.PREFILL, Phase.DECODE, Phase.COMPRESSING, Phase.SWAPPING_IN, Phase.DONE)
_QUEUED = (Phase.QUEUED.label, Phase.PREEMPTED.label, Phase.SWAPPED.label)
_VERDICTS = {
    Reason.NO_SLOT: Verdict.NO_SLOT,
    Reason.NO_BLOCK: Verdict.NO_BLOCK,
    Reason.LIMIT: Verdict.PAUSED,
}


def _named(names: list[str]) -> str:
    """Return a list in words, with at most MOST_NAMES names."""
    shown, more = names[:MOST_NAMES], len(names) - MOST_NAMES
    if more > 0:
        return f"{', '.join(shown)} and {more:,} other{'s' if more > 1 else ''}"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def _span(value: float) -> str:
    if value < 1e-9:
        return "0 s"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def requests_by_number(requests: pa.Table, numbers: list[int]) -> list[dict[str, Any]]:
    """Return the rows of the `requests` table for these numbers, in that order. Unknown numbers are
    left out.
    """
    place = {int(number): index for index, number in enumerate(requests["number"].to_numpy())}
    return [
        requests.slice(place[number], 1).to_pylist()[0] for number in numbers if number in place
    ]


def request_by_name(requests: pa.Table, name: str) -> dict[str, Any] | None:
    """Return the row of the `requests` table with this id, or else with this number (17 or r17);
    None without one.
    """
    place = np.flatnonzero(requests["id"].to_numpy(zero_copy_only=False) == name)
    if not len(place):
        digits = name.removeprefix("r")
        number = int(digits) if digits.isdecimal() and len(digits) < 19 else -1
        place = np.flatnonzero(requests["number"].to_numpy() == number)
    return requests.slice(int(place[0]), 1).to_pylist()[0] if len(place) else None

"""What a lane has done lately, in the metrics that gates ask for. Belongs to the engine's thread."""

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from engine.server.job import Entry
from engine.server.lanes import Lane
from policies.core.request import Phase
from policies.measures import MARKS

NS = 1e-9
TIMES = ("ttft", "tpot", "e2e")
COUNTS = ("finished", "refused", "aborted", "failed")
RATES = ("tokens_per_s", "requests_per_s")
MEANS = ("preemptions_per_request", "compressions_per_request", "slot_wait_per_request")
WATCHED = (*(f"{mark}_{time}" for time in TIMES for mark in MARKS), *COUNTS, *RATES, *MEANS)
COUNTED_AS = {"stop": "finished", "length": "finished", "refused": "refused", "abort": "aborted", "error": "failed"}


@dataclass(frozen=True, slots=True)
class _End:
    at_s: float
    counted_as: str
    e2e_s: float
    tpot_s: float
    preemptions: int
    compressions: int
    slot_wait_s: float


@dataclass(frozen=True, slots=True)
class _Mark:
    at_s: float
    tokens: int  # given out since the beginning
    busy_s: float  # time with requests in the lane since the beginning


@dataclass
class Rolling:
    """A window of the last `window_s` seconds over one lane; times are seconds of any one steady clock.

    Only requests that came after `begin` count: what came before had another policy to thank.
    """

    window_s: float
    min_requests: int
    _began_s: float = 0.0
    _firsts: deque[tuple[float, float]] = field(default_factory=deque)  # when, time to first token
    _ends: deque[_End] = field(default_factory=deque)
    _marks: deque[_Mark] = field(default_factory=deque)
    _first_at: dict[Entry, float] = field(default_factory=dict)  # of outputs under way
    _unfirst: dict[Entry, float] = field(default_factory=dict)  # arrival of outputs that wait for their first token
    _ended_tokens: int = 0
    _busy_s: float = 0.0
    _touched_s: float | None = None  # None while the lane is empty

    def begin(self, now_s: float) -> None:
        """Forget everything: another policy decides from now on."""
        self._began_s = now_s
        for kept in (self._firsts, self._ends, self._marks, self._unfirst):
            kept.clear()

    def arrived(self, entry: Entry, now_s: float, came_s: float) -> None:
        """The lane has an output to make whose request came at `came_s`."""
        if self._touched_s is None:
            self._touched_s = now_s
        self._unfirst[entry] = came_s

    def first_token(self, entry: Entry, now_s: float) -> None:
        """Its first token is here."""
        came_s = self._unfirst.pop(entry, None)
        self._first_at[entry] = now_s
        if came_s is not None and came_s >= self._began_s:
            self._firsts.append((now_s, now_s - came_s))

    def ended(self, entry: Entry, now_s: float, came_s: float) -> None:
        """Its terminal event."""
        self._unfirst.pop(entry, None)
        first_s = self._first_at.pop(entry, None)
        sequence = entry.sequence
        assert sequence is not None
        tokens = len(sequence.output.token_ids)
        self._ended_tokens += tokens
        if came_s < self._began_s:
            return
        request = sequence.request
        self._ends.append(
            _End(
                now_s,
                COUNTED_AS[str(entry.finish_reason)],
                now_s - came_s,
                (now_s - first_s) / (tokens - 1) if first_s is not None and tokens > 1 else math.nan,
                request.preemptions,
                request.compressions,
                request.phase_ns[Phase.WAITS_FOR_SLOT] * NS,
            )
        )

    def stepped(self, lane: Lane, now_s: float) -> None:
        """A step of the lane is over."""
        if self._touched_s is not None:
            self._busy_s += now_s - self._touched_s
        self._touched_s = now_s if lane.busy else None

    def measures(self, lane: Lane, now_s: float) -> dict[str, float | None]:
        """Metric of `policies.measures.METRICS` -> value, None where fewer than `min_requests` have been seen.

        Rates are over the time in which the lane had work. A request that has waited for its first token longer than
        anybody who got one counts with its wait so far: a lane that hangs shows.
        """
        self._forget(now_s)
        given = self._ended_tokens + sum(
            len(entry.sequence.output.token_ids) for entry in lane.entries.values() if entry.sequence is not None
        )
        self._marks.append(_Mark(now_s, given, self._busy_s))
        found: dict[str, float | None] = dict.fromkeys(WATCHED)
        longest = max((wait for _, wait in self._firsts), default=0.0)
        waits = [wait for _, wait in self._firsts]
        came = [came_s for came_s in self._unfirst.values() if came_s >= self._began_s]
        waits += [now_s - came_s for came_s in came if now_s - came_s > longest]
        done = [end for end in self._ends if end.counted_as == "finished"]
        times = {
            "ttft": waits,
            "tpot": [end.tpot_s for end in done if not math.isnan(end.tpot_s)],
            "e2e": [end.e2e_s for end in done],
        }
        for name, values in times.items():
            if len(values) >= self.min_requests:
                found[f"mean_{name}"] = float(np.mean(values))
                for mark in MARKS[1:]:
                    found[f"{mark}_{name}"] = float(np.percentile(values, int(mark[1:])))
        for name in COUNTS:
            found[name] = float(sum(end.counted_as == name for end in self._ends))
        ended = [end for end in self._ends if end.counted_as != "refused"]
        if len(ended) >= self.min_requests:
            found["preemptions_per_request"] = sum(end.preemptions for end in ended) / len(ended)
            found["compressions_per_request"] = sum(end.compressions for end in ended) / len(ended)
            found["slot_wait_per_request"] = sum(end.slot_wait_s for end in ended) / len(ended)
        first, last = self._marks[0], self._marks[-1]
        busy_s = last.busy_s - first.busy_s
        if busy_s > 0 and len(ended) + len(lane.entries) >= self.min_requests:
            found["tokens_per_s"] = (last.tokens - first.tokens) / busy_s
            found["requests_per_s"] = sum(end.at_s > first.at_s for end in done) / busy_s
        return found

    def _forget(self, now_s: float) -> None:
        oldest = now_s - self.window_s
        while self._firsts and self._firsts[0][0] < oldest:
            self._firsts.popleft()
        while self._ends and self._ends[0].at_s < oldest:
            self._ends.popleft()
        while len(self._marks) > 1 and self._marks[1].at_s <= oldest:
            self._marks.popleft()

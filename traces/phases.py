"""What each request was doing, as intervals: a pure function of a recording's events and step times.

The phases are those of the columns `<phase>_s` of the `requests` table, and their lengths add up to them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces.moments import FloatArray, Int64Array, Names, StepTimes, event_times, read_names, step_times
from traces.recording import Recording

PHASES = (
    "queued",
    "prefill",
    "decode",
    "slot_wait",
    "block_wait",
    "compressing",
    "preempted",
    "swapped",
    "paused",
)
QUEUED, PREFILL, DECODE, SLOT_WAIT, BLOCK_WAIT, COMPRESSING, PREEMPTED, SWAPPED, PAUSED = range(len(PHASES))
_OVER = -1  # the request has ended

_ENTERS = {  # kind of event -> the phase that begins with it
    "arrived": QUEUED,
    "admitted": PREFILL,
    "first": DECODE,
    "resumed": DECODE,
    "compressing": COMPRESSING,
    "compressed": DECODE,
    "preempted": PREEMPTED,
    "swap_out": SWAPPED,
    "swap_in": SWAPPED,
    "swapped_in": DECODE,
    "refused": _OVER,
    "finished": _OVER,
    "aborted": _OVER,
    "failed": _OVER,
}
_WAITS_FOR = {"no_slot": SLOT_WAIT, "no_block": BLOCK_WAIT, "limit": PAUSED}  # reason of `stalled` -> phase


@dataclass(frozen=True)
class Phases:
    """Intervals by request and then time: `request[i]` was in `phase[i]` (index into PHASES) from `start_s[i]` to
    `end_s[i]`; it entered in step `step[i]`. Intervals without length are left out. A request that is still alive is
    in its last phase up to the end of the last step.
    """

    request: Int64Array
    phase: npt.NDArray[np.int8]
    start_s: FloatArray
    end_s: FloatArray
    step: Int64Array

    def totals(self, requests: Int64Array) -> FloatArray:
        """Seconds [request, phase] that these requests (by number) spent in each phase."""
        numbers = np.asarray(requests)
        order = np.argsort(numbers)
        place = np.searchsorted(numbers, self.request, sorter=order)
        place = order[np.minimum(place, len(numbers) - 1)] if len(numbers) else np.zeros(len(self.request), dtype=int)
        known = numbers[place] == self.request if len(numbers) else np.zeros(len(self.request), dtype=bool)
        flat = place[known] * len(PHASES) + self.phase[known]
        seconds = (self.end_s - self.start_s)[known]
        summed: FloatArray = np.bincount(flat, weights=seconds, minlength=len(numbers) * len(PHASES)).astype(np.float64)
        return summed.reshape(-1, len(PHASES))

    def of(self, requests: Int64Array) -> "Phases":
        """Only the intervals of these requests."""
        return self.where(np.isin(self.request, requests))

    def within(self, window_s: tuple[float, float]) -> "Phases":
        """Only the intervals that overlap a window of time, uncut."""
        return self.where((self.end_s > window_s[0]) & (self.start_s < window_s[1]))

    def where(self, keep: npt.NDArray[np.bool_]) -> "Phases":
        """Only the intervals marked true."""
        return Phases(self.request[keep], self.phase[keep], self.start_s[keep], self.end_s[keep], self.step[keep])


def read_phases(recording: Recording) -> Phases:
    """The phases of a recording. Raises RecordingError."""
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
    """Phases from `events` (step, kind, request, value) and `steps` (step, start_s, end_s).

    `requests` (number, arrival_s, finish_s) says to the nanosecond when those who have ended came and went; without it
    a request comes at the start of the step before which it was noticed. Raises RecordingError.
    """
    names, times = read_names(manifest), step_times(steps)
    enters = _phase_entered(events, names)
    relevant = enters != _SAME
    number = events["request"].to_numpy()[relevant]
    order = np.argsort(number, kind="stable")
    number = number[order]
    phase = enters[relevant][order]
    moment = event_times(events, times, names)[relevant][order]
    step = events["step"].to_numpy()[relevant][order]
    if requests is not None and requests.num_rows:
        moment = _exact_ends(number, phase, moment, requests)
    return _intervals(number, phase, moment, step, times)


_SAME = np.int8(-2)  # the event changes no phase


def _phase_entered(events: pa.Table, names: Names) -> npt.NDArray[np.int8]:
    """For each event the phase that begins with it, or _SAME."""
    kind, value = events["kind"].to_numpy(), events["value"].to_numpy()
    table = np.full(128, _SAME, dtype=np.int8)
    for name, phase in _ENTERS.items():
        if name in names.kinds:
            table[names.kinds[name]] = phase
    enters: npt.NDArray[np.int8] = table[kind]
    stalled = kind == names.kinds.get("stalled", -1)
    for reason, phase in _WAITS_FOR.items():
        if reason in names.reasons:
            enters[stalled & (value == names.reasons[reason])] = phase
    return enters


def _exact_ends(number: Int64Array, phase: npt.NDArray[np.int8], moment: FloatArray, requests: pa.Table) -> FloatArray:
    """Arrivals and ends at the times of the `requests` table, which may lie between steps."""
    known = requests["number"].to_numpy()
    order = np.argsort(known)
    place = order[np.minimum(np.searchsorted(known, number, sorter=order), len(known) - 1)]
    found = known[place] == number
    arrival, finish = requests["arrival_s"].to_numpy()[place], requests["finish_s"].to_numpy()[place]
    moment = np.where(found & (phase == QUEUED), arrival, moment)
    return np.where(found & (phase == _OVER) & ~np.isnan(finish), finish, moment)


def _intervals(
    number: Int64Array, phase: npt.NDArray[np.int8], moment: FloatArray, step: Int64Array, times: StepTimes
) -> Phases:
    end = np.empty_like(moment)
    if len(moment):
        end[:-1] = moment[1:]
        last = np.ones(len(number), dtype=bool)
        last[:-1] = number[1:] != number[:-1]
        end[last] = times.last_s
    keep = (phase >= 0) & (end > moment)
    return Phases(number[keep], phase[keep], moment[keep], end[keep], step[keep])

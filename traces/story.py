"""One request's life in words: what it waited for, behind whom, and what it cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from traces.moments import FloatArray, Names, event_times, read_names, step_times
from traces.phases import Phases
from traces.recording import Recording


@dataclass(frozen=True)
class Line:
    """One thing that happened at a moment, in words."""

    time_s: float
    words: str


class Story:
    """Tells requests of one recording; built once, told often."""

    def __init__(self, recording: Recording, phases: Phases) -> None:
        """Raise RecordingError when the recording cannot be read."""
        events = recording.table("events")
        steps = recording.table("steps", ("step", "start_s", "end_s"))
        self._names: Names = read_names(recording.manifest)
        self._phases = phases
        self._kinds = {code: name for name, code in self._names.kinds.items()}
        self._reasons = {code: name for name, code in self._names.reasons.items()}
        self._columns = {name: events[name].to_numpy() for name in ("step", "kind", "request", "value", "num_blocks")}
        self._moment: FloatArray = event_times(events, step_times(steps), self._names)

    def tell(self, request: Mapping[str, Any]) -> list[Line]:
        """The life of a request (a row of the `requests` table) in order of time."""
        number = int(request["number"])
        rows = np.flatnonzero(self._columns["request"] == number)
        lines = [Line(float(request["arrival_s"]), f"arrived with {request['prompt_tokens']:,} prompt tokens")]
        decoding = False
        for row in rows:
            words = self._words(int(row), number, decoding)
            kind = self._kinds.get(int(self._columns["kind"][row]), "")
            decoding = kind in ("first", "resumed", "compressed", "swapped_in") or (decoding and kind == "grew")
            if words:
                lines.append(Line(float(self._moment[row]), words))
        if request["finish_s"] is not None and not np.isnan(request["finish_s"]):
            lines.append(Line(float(request["finish_s"]), self._ending(request)))
        return lines

    def _words(self, row: int, number: int, decoding: bool) -> str:
        kind = self._kinds.get(int(self._columns["kind"][row]), "")
        value, count = int(self._columns["value"][row]), int(self._columns["num_blocks"][row])
        match kind:
            case "admitted":
                return self._admitted(row, number, value)
            case "hit":
                return f"found {value:,} of its tokens in {count} cached or shared blocks"
            case "first":
                return "computed its prompt: first token" if value <= 1 else f"recomputed up to token {value:,}"
            case "stalled":
                return self._stalled(row, number, value)
            case "compressing":
                return f"began to be compressed from {value:,} tokens into {count} blocks"
            case "compressed":
                return f"goes on with {value:,} kept tokens in {count} blocks"
            case "preempted":
                lost = f"threw away {value:,} computed tokens" if value else "its blocks go to host memory"
                return f"preempted{self._for_whom(row, number)}: {lost}"
            case "swap_in":
                return f"waited {self._waited(row, number)} in host memory, is brought back into {count} blocks"
            case "capped":
                return f"may give {value:,} output tokens at most: the model or the pool holds no more"
        return ""

    def _admitted(self, row: int, number: int, tokens: int) -> str:
        waited = self._waited(row, number)
        admitted = self._columns["kind"][:row] == self._names.kinds["admitted"]
        before = np.flatnonzero(admitted)
        behind = f" behind r{self._columns['request'][before[-1]]}" if len(before) and waited != "0 s" else ""
        return f"waited {waited} in line{behind}, then was admitted with {tokens:,} tokens to compute"

    def _stalled(self, row: int, number: int, reason: int) -> str:
        """What it waits for and until when; a slot has a last holder, who is named."""
        later = np.flatnonzero(self._columns["request"][row + 1 :] == number) + row + 1
        turns = [int(index) for index in later if self._kinds.get(int(self._columns["kind"][index])) != "slot"]
        until = float(self._moment[turns[0]]) if turns else None
        span = f"waited {_span(until - float(self._moment[row]))}" if until is not None else "waits"
        name = self._reasons.get(reason, "")
        if name == "no_slot":
            return f"{span} for a query slot{self._slot_of(row, number)}"
        if name == "no_block":
            return f"{span} for a free block{self._freed_by(row, turns)}"
        return f"{span}: a step takes no more requests"

    def _slot_of(self, row: int, number: int) -> str:
        kind, request, value = (self._columns[name] for name in ("kind", "request", "value"))
        got = np.flatnonzero((kind == self._names.kinds["slot"]) & (request == number))
        got = got[got > row]
        if not len(got):
            return ""
        left = np.flatnonzero((kind == self._names.kinds["slot_freed"]) & (value == value[got[0]]))
        left = left[left < got[0]]
        return f" behind r{request[left[-1]]}" if len(left) else ""

    def _freed_by(self, row: int, turns: list[int]) -> str:
        """The last request to give blocks back before it went on."""
        if not turns:
            return ""
        codes = self._names.kind_codes(("freed", "cached"))
        gave = np.flatnonzero(np.isin(self._columns["kind"][row : turns[0]], codes))
        return f" until r{self._columns['request'][row + gave[-1]]} gave some back" if len(gave) else ""

    def _for_whom(self, row: int, number: int) -> str:
        """Who got room by a preemption: the next in the same step to take a block or to start a compression."""
        step = self._columns["step"]
        stop = int(np.searchsorted(step, step[row], side="right"))
        codes = self._names.kind_codes(("grew", "compressing", "stalled"))
        after = np.flatnonzero(np.isin(self._columns["kind"][row:stop], codes)) + row
        others = [int(self._columns["request"][index]) for index in after if self._columns["request"][index] != number]
        return f" to make room for r{others[0]}" if others else ""

    def _waited(self, row: int, number: int) -> str:
        """How long the phase lasted that this event ends."""
        mine = self._phases.request == number
        ends = np.abs(self._phases.end_s[mine] - self._moment[row])
        if not len(ends) or ends.min() > 1e-9:
            return "0 s"
        index = int(np.argmin(ends))
        return _span(float(self._phases.end_s[mine][index] - self._phases.start_s[mine][index]))

    def _ending(self, request: Mapping[str, Any]) -> str:
        status, reason, message = request["status"], request["reason"], request["message"]
        why = {"stop": "it said all it had to", "length": "it reached its length"}.get(reason, reason.replace("_", " "))
        words = f"{status} after {request['output_tokens']:,} output tokens"
        return words + (f": {why}" if why else "") + (f" ({message})" if message else "")


def _span(value: float) -> str:
    if value < 1e-9:
        return "0 s"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def requests_by_number(requests: pa.Table, numbers: list[int]) -> list[dict[str, Any]]:
    """Rows of the `requests` table for these numbers, in that order; unknown ones are left out."""
    place = {int(number): index for index, number in enumerate(requests["number"].to_numpy())}
    return [requests.slice(place[number], 1).to_pylist()[0] for number in numbers if number in place]

"""When each event of a recording took effect, in seconds: a step decides at its start and settles at its end."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces.recording import RecordingError

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Only a plan writes these; what follows the last of them in a step was written when the step was settled.
DECIDING = (
    "arrived", "refused", "admitted", "hit", "took", "chunk", "grew", "resumed", "compressing", "compressed",
    "preempted", "swap_out", "swap_in", "swapped_in", "decodes", "prefix_lost", "capped", "policy",
)  # fmt: skip
SETTLING = ("first", "finished", "failed")
GIVING_BACK = ("freed", "cached", "left", "slot_freed")  # written just before the end that causes them


@dataclass(frozen=True)
class Names:
    """Codes of a recording's kinds, reasons and block states by name, as its manifest gives them."""

    kinds: Mapping[str, int]
    reasons: Mapping[str, int]
    block_states: Mapping[str, int]

    def kind_codes(self, names: Iterable[str]) -> npt.NDArray[np.int8]:
        """Codes of those kinds that the recording knows."""
        return np.array([self.kinds[name] for name in names if name in self.kinds], dtype=np.int8)


def read_names(manifest: Mapping[str, Any]) -> Names:
    """Names from a manifest. Raises RecordingError when it does not say them."""
    found = {}
    for key in ("kinds", "reasons", "block_states"):
        table = manifest.get(key)
        if not isinstance(table, Mapping) or not table:
            raise RecordingError(f"the manifest has no names under {key!r}; the recording cannot be interpreted")
        try:
            found[key] = {str(name): int(code) for code, name in table.items()}
        except ValueError as error:
            raise RecordingError(f"manifest, {key!r}: a code is no whole number: {error}") from error
    return Names(**found)


def pool_of(manifest: Mapping[str, Any]) -> tuple[int, int]:
    """(number of blocks, tokens a block). Raises RecordingError when the manifest lacks them."""
    values = [manifest.get(name) for name in ("num_blocks", "block_size")]
    if not all(isinstance(value, int) and value > 0 for value in values):
        raise RecordingError(f"the manifest's num_blocks and block_size must be whole numbers above 0, not {values}")
    return int(str(values[0])), int(str(values[1]))


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
        """When these steps start; steps that were never run: the end of the last."""
        return self._at(self.start_s, steps)

    def ends(self, steps: Int64Array) -> FloatArray:
        """When these steps end; steps that were never run: the end of the last."""
        return self._at(self.end_s, steps)

    def _at(self, times: FloatArray, steps: Int64Array) -> FloatArray:
        if not len(times):
            return np.zeros(len(steps))
        return np.where(steps < len(times), times[np.minimum(steps, len(times) - 1)], self.last_s)

    def step_at(self, time_s: float) -> int:
        """The step that runs at a time, or the next one to start (the last at or after the end)."""
        return min(int(np.searchsorted(self.end_s, time_s, side="right")), max(len(self.end_s) - 1, 0))


def step_times(steps: pa.Table) -> StepTimes:
    """Times of a `steps` table (columns step, start_s, end_s). Raises RecordingError when steps are missing."""
    numbers = steps["step"].to_numpy()
    if len(numbers) and (numbers[0] != 0 or (np.diff(numbers) != 1).any()):
        raise RecordingError(f"table 'steps': its rows are not steps 0 to {len(numbers) - 1} one after the other")
    start, end = steps["start_s"].to_numpy(), steps["end_s"].to_numpy()
    if (end < start).any() or (np.diff(start) < 0).any():
        raise RecordingError("table 'steps': time runs backwards")
    return StepTimes(start, end)


def settled_late(events: pa.Table, names: Names) -> BoolArray:
    """Which rows of an `events` table (step, kind, request) were written when their step ended."""
    step, kind, request = (events[name].to_numpy() for name in ("step", "kind", "request"))
    count = len(step)
    if not count:
        return np.zeros(0, dtype=bool)
    settling = np.isin(kind, names.kind_codes(SETTLING))
    giving = np.isin(kind, names.kind_codes(GIVING_BACK))
    # An end and the rows of the same request that give back what it held, just before it, are one group.
    joins = np.zeros(count, dtype=bool)
    joins[1:] = giving[:-1] & (giving | settling)[1:] & (request[1:] == request[:-1]) & (step[1:] == step[:-1])
    group = np.cumsum(~joins)
    settles = np.zeros(int(group[-1]) + 1, dtype=bool)
    settles[group[settling]] = True
    of_step = np.concatenate(([0], np.cumsum(np.diff(step) != 0)))
    index = np.arange(count)
    last_decision = np.full(int(of_step[-1]) + 1, -1)
    deciding = np.isin(kind, names.kind_codes(DECIDING))
    last_decision[of_step[deciding]] = index[deciding]  # ascending: the last one stays
    marks = settles[group] & (index > last_decision[of_step])
    first_mark = np.full(len(last_decision), count)
    first_mark[of_step[marks][::-1]] = index[marks][::-1]
    late: BoolArray = index >= first_mark[of_step]
    return late


def event_times(events: pa.Table, times: StepTimes, names: Names) -> FloatArray:
    """Seconds at which each row of `events` took effect; an abort or refusal between steps counts at the next start."""
    step = events["step"].to_numpy()
    return np.where(settled_late(events, names), times.ends(step), times.starts(step))

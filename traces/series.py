"""What the steps of a recording say, over time bins: tokens a second and the peaks of counts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces.moments import FloatArray, StepTimes

COUNTS = ("running", "waiting", "waiting_for_slot", "waiting_for_block", "compressing")
COLUMNS = ("step", "start_s", "end_s", "output_tokens", "prefill_tokens", "free_blocks", "stored_tokens", *COUNTS)


@dataclass(frozen=True)
class StepSeries:
    """Figures per time bin: `edges_s` [n + 1]; rates in tokens a second; peaks and wasted slots [n] each."""

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
    steps: pa.Table, times: StepTimes, window_s: tuple[float, float], num_bins: int, pool: tuple[int, int]
) -> StepSeries:
    """Bin the steps (columns COLUMNS). Tokens count when their step ends; counts show the most in any step of a bin.

    `pool` is (blocks, tokens a block). Wasted slots are token positions in owned blocks that hold no token.
    """
    edges = np.linspace(*window_s, num_bins + 1)
    width = (window_s[1] - window_s[0]) / num_bins
    rates = {}
    for name in ("output_tokens", "prefill_tokens"):
        tokens = steps[name].to_numpy()
        rates[name] = np.histogram(times.end_s, bins=num_bins, range=window_s, weights=tokens)[0] / width
    low = np.searchsorted(times.end_s, edges[:-1], side="right")
    high = np.searchsorted(times.start_s, edges[1:], side="left")
    used = pool[0] - steps["free_blocks"].to_numpy().astype(np.int64)
    wasted = used * pool[1] - steps["stored_tokens"].to_numpy()
    peaks = {name: peak(steps[name].to_numpy(), low, high) for name in COUNTS}
    return StepSeries(edges, rates["output_tokens"], rates["prefill_tokens"], peaks, peak(wasted, low, high))


def peak(
    values: npt.NDArray[np.int64], low: Sequence[int] | npt.NDArray[np.intp], high: Sequence[int] | npt.NDArray[np.intp]
) -> npt.NDArray[np.int64]:
    """The largest of values[low[i] : high[i]] for each i, 0 where there are none."""
    return np.array(
        [int(values[a:b].max()) if b > a else 0 for a, b in zip(low, high, strict=True)],
        dtype=np.int64,
    )

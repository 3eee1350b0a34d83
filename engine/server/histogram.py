"""Counts by bucket, as Prometheus wants them: added to on the engine's thread, copied for whoever asks."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

# Seconds. A factor of about 1.5 between neighbours where service goals lie, coarser beyond: a quantile read off them is
# within a fifth of the true one from a millisecond to a minute.
LATENCY_S = (
    0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.5, 2.5, 4.0, 6.0,
    10.0, 15.0, 25.0, 40.0, 60.0, 100.0, 200.0, 500.0, 1000.0, 2500.0,
)  # fmt: skip
# Between tokens and in steps: finer where decode steps are, nothing beyond ten seconds but stalls.
STEP_S = (
    0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
STEP_TOKENS = tuple(float(2**power) for power in range(15))  # 1 .. 16384


def lengths_up_to(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `most` tokens."""
    marks = [digit * 10**power for power in range(8) for digit in (1, 2, 5)]
    return tuple(float(mark) for mark in marks if mark <= most)


@dataclass
class Histogram:
    """How many values were at most each bound, and their sum. `counts` has one more than there are bounds."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add_all(self, values: npt.NDArray[np.float64]) -> None:
        """Count many values at once."""
        found = np.bincount(np.searchsorted(self.bounds, values, side="left"), minlength=len(self.counts))
        self.counts = [old + new for old, new in zip(self.counts, found.tolist(), strict=True)]
        self.total += float(values.sum())

    def copy(self) -> "Histogram":
        """The counts of now."""
        return Histogram(self.bounds, list(self.counts), self.total)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as the text format names it."""
        running = np.cumsum(self.counts).tolist()
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return [(name, float(count)) for name, count in zip(names, running, strict=True)]

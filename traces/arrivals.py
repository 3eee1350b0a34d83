"""When requests come: Poisson, gamma and on/off arrival processes, all from one generator.

Times count from the first request (which comes at 0) and are whole ticks of 100 ns, so that they are written and read
back exactly and do not depend on the last bit of a machine's logarithm.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from traces.workload import TraceError

Seconds = npt.NDArray[np.float64]
TICKS_PER_S = 10_000_000


def positive(name: str, value: float) -> None:
    """Raise `TraceError` unless the setting is a finite number above 0."""
    if not 0 < value < float("inf"):
        raise TraceError(f"{name} is {value!r}, must be a finite number above 0")


def on_ticks(seconds: Seconds) -> Seconds:
    """The times rounded to whole ticks of 100 ns."""
    return np.rint(seconds * TICKS_PER_S) / TICKS_PER_S


class Arrivals(Protocol):
    """An arrival process."""

    def times(self, rng: np.random.Generator, num_requests: int) -> Seconds:
        """The arrival times in seconds, ascending from 0."""
        ...


@dataclass(frozen=True)
class Together:
    """Everything at t = 0."""

    def times(self, rng: np.random.Generator, num_requests: int) -> Seconds:
        """Zeros."""
        return np.zeros(num_requests)


@dataclass(frozen=True)
class Gamma:
    """Independent gamma gaps with mean 1/rate and coefficient of variation `cv`: burstier than Poisson above 1."""

    rate_per_s: float
    cv: float

    def __post_init__(self) -> None:
        positive("rate_per_s", self.rate_per_s)
        positive("cv", self.cv)

    def times(self, rng: np.random.Generator, num_requests: int) -> Seconds:
        """Cumulated gaps; shape 1/cv^2, scale cv^2/rate."""
        shape = self.cv**-2
        return _from_gaps(rng.gamma(shape, 1 / (self.rate_per_s * shape), num_requests))


@dataclass(frozen=True)
class Poisson:
    """Independent exponential gaps with mean 1/rate."""

    rate_per_s: float

    def __post_init__(self) -> None:
        positive("rate_per_s", self.rate_per_s)

    def times(self, rng: np.random.Generator, num_requests: int) -> Seconds:
        """Cumulated exponential gaps."""
        return _from_gaps(rng.exponential(1 / self.rate_per_s, num_requests))


@dataclass(frozen=True)
class OnOff:
    """Poisson arrivals whose rate switches between two values, each phase exponentially long (a two-state MMPP)."""

    on_rate_per_s: float
    mean_on_s: float
    mean_off_s: float
    off_rate_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("on_rate_per_s", "mean_on_s", "mean_off_s"):
            positive(name, getattr(self, name))
        if not 0 <= self.off_rate_per_s <= self.on_rate_per_s:
            raise TraceError(
                f"off_rate_per_s is {self.off_rate_per_s!r}, must be 0..{self.on_rate_per_s} (the on rate)"
            )

    def times(self, rng: np.random.Generator, num_requests: int) -> Seconds:
        """Unit-rate arrivals mapped through the inverse of the cumulated rate; the first phase is on."""
        operational = np.cumsum(rng.exponential(1.0, num_requests))
        per_cycle = self.on_rate_per_s * self.mean_on_s + self.off_rate_per_s * self.mean_off_s
        ends_s, ends_cumulated = [np.zeros(1)], [np.zeros(1)]
        while ends_cumulated[-1][-1] <= operational[-1]:
            num_cycles = int((operational[-1] - ends_cumulated[-1][-1]) / per_cycle) + 16
            phases = rng.exponential(1.0, (num_cycles, 2)) * (self.mean_on_s, self.mean_off_s)
            ends_s.append(ends_s[-1][-1] + np.cumsum(phases))
            rates = (self.on_rate_per_s, self.off_rate_per_s)
            ends_cumulated.append(ends_cumulated[-1][-1] + np.cumsum(phases * rates))
        wall = np.interp(operational, np.concatenate(ends_cumulated), np.concatenate(ends_s))
        return on_ticks(wall - wall[0])


def _from_gaps(gaps: Seconds) -> Seconds:
    times = np.cumsum(gaps)
    return on_ticks(times - times[0])

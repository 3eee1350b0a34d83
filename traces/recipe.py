"""What every made-up workload needs: its random stream, lengths, checked settings, and metadata."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from traces.workload import TraceError, WorkloadMeta

FIRST_TOKEN_ID = 1000
END_TOKEN_ID = 150_000
"""Made-up token ids lie in this range: inside the vocabulary of Qwen3 (151,936), past most special tokens."""
Ints = npt.NDArray[np.int64]


def generator(seed: int) -> np.random.Generator:
    """The one random stream of a synthetic workload."""
    if type(seed) is not int or seed < 0:
        raise TraceError(f"seed is {seed!r}, must be a whole number >= 0")
    return np.random.Generator(np.random.PCG64(seed))


def at_least(name: str, value: int, lowest: int = 1) -> None:
    """Raise `TraceError` unless the setting is a whole number from `lowest` on."""
    if type(value) is not int or value < lowest:
        raise TraceError(f"{name} is {value!r}, must be a whole number >= {lowest}")


@dataclass(frozen=True)
class LogNormal:
    """Lengths in tokens whose logarithm is normal(mu, sigma), rounded and held to lowest..cap."""

    mu: float
    sigma: float
    cap: int
    lowest: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.sigma < 10 and -20 < self.mu < 20):
            raise TraceError(f"lognormal mu {self.mu!r}, sigma {self.sigma!r}: must lie in -20..20 and 0..10")
        at_least("lowest", self.lowest)
        at_least("cap", self.cap, self.lowest)

    def from_normal(self, normal: npt.NDArray[np.float64]) -> Ints:
        """Lengths for standard normal draws of any shape."""
        return np.clip(np.rint(np.exp(self.mu + self.sigma * normal)), self.lowest, self.cap).astype(np.int64)

    def sample(self, rng: np.random.Generator, num: int) -> Ints:
        """`num` independent lengths."""
        return self.from_normal(rng.standard_normal(num))


def made(name: str, recipe: str, seed: int, num_requests: int) -> WorkloadMeta:
    """Metadata of a synthetic workload: its recipe stands where a file's source would."""
    return WorkloadMeta(
        name=name, source=f"synthetic {recipe}, seed {seed}", rows_read=num_requests, rows_kept=num_requests
    )

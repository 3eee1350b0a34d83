"""What a workload looks like in numbers.

Percentiles interpolate linearly between the two nearest ranks (numpy's default, type 7 of Hyndman and Fan 1996); the
published figures of the Azure traces are these, rounded.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from traces.workload import CHUNK_ROWS, Workload, request_columns

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Distribution:
    """Count, mean, percentiles and extremes of a field over the requests that have it."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    min: float
    max: float

    @classmethod
    def of(cls, values: "np.ndarray[Any, np.dtype[Any]]") -> "Distribution | None":
        """The distribution of these values, None of no value."""
        if not len(values):
            return None
        p50, p90, p99 = (float(p) for p in np.percentile(values, PERCENTILES))
        return cls(len(values), float(values.mean()), p50, p90, p99, float(values.min()), float(values.max()))


@dataclass(frozen=True)
class WorkloadStatistics:
    """Sizes and times of a workload; times are None for an offline batch, lengths None where unknown."""

    num_requests: int
    span_s: float | None  # from the first arrival to the last
    rate_per_s: float | None  # requests after the first by span
    longest_gap_s: float | None
    gap_cv: float | None  # coefficient of variation of the gaps: 1 for Poisson, above for bursts
    prompt_tokens: Distribution | None
    output_tokens: Distribution | None
    total_prompt_tokens: int
    total_output_tokens: int
    num_sessions: int
    classes: dict[str, int]
    models: dict[str, int]


def describe(workload: Workload) -> WorkloadStatistics:
    """The workload's statistics."""
    numbers: dict[str, list[Any]] = {"arrival_s": [], "prompt_tokens": [], "output_tokens": []}
    names: dict[str, Counter[str]] = {"session": Counter(), "cls": Counter(), "model": Counter()}
    for start in range(0, len(workload), CHUNK_ROWS):
        for name, cells in request_columns(workload.requests, start, min(start + CHUNK_ROWS, len(workload)), _USED):
            if name in numbers:
                numbers[name].append(np.asarray([cell for cell in cells if cell is not None], dtype=np.float64))
            else:
                names[name].update(cell for cell in cells if cell is not None)
    times, prompts, outputs = (np.concatenate(parts or [np.zeros(0)]) for parts in numbers.values())
    gaps = np.diff(times)
    span = float(times[-1] - times[0]) if len(times) else None
    return WorkloadStatistics(
        num_requests=len(workload),
        span_s=span,
        rate_per_s=len(gaps) / span if span else None,
        longest_gap_s=float(gaps.max()) if len(gaps) else None,
        gap_cv=float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else None,
        prompt_tokens=Distribution.of(prompts),
        output_tokens=Distribution.of(outputs),
        total_prompt_tokens=int(prompts.sum()),
        total_output_tokens=int(outputs.sum()),
        num_sessions=len(names["session"]),
        classes=dict(sorted(names["cls"].items())),
        models=dict(sorted(names["model"].items())),
    )


_USED = ("arrival_s", "prompt_tokens", "output_tokens", "session", "cls", "model")

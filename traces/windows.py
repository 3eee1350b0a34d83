"""A run in windows of time: what came in each, how it fared, and what the engine did meanwhile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from traces.metrics import PERCENTILES, distribution

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
MARKS = ("mean", *(f"p{percentile}" for percentile in PERCENTILES))
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
FIGURES: tuple[str, ...] = (
    "tokens_per_s",
    "running_mean",
    *(f"{name} {mark}" for name in LATENCIES for mark in MARKS),
    "preemptions_per_request",
    "compressions_per_request",
    "prefix_hit_share",
)


@dataclass(frozen=True)
class Observed:
    """A run by request number and by step, as arrays. Times in seconds, NaN where the moment never came."""

    arrival_s: FloatArray
    first_s: FloatArray
    finish_s: FloatArray  # of those that finished regularly
    prompt_tokens: FloatArray
    output_tokens: FloatArray
    hit_tokens: FloatArray
    preemptions: FloatArray
    compressions: FloatArray
    step_start_s: FloatArray
    step_end_s: FloatArray
    step_output_tokens: FloatArray
    step_running: FloatArray

    @property
    def span(self) -> tuple[float, float]:
        """From the first arrival to the end of the last step."""
        start = float(self.arrival_s.min()) if len(self.arrival_s) else 0.0
        return start, float(self.step_end_s.max()) if len(self.step_end_s) else start


def figures(run: Observed, window: tuple[float, float], counted: BoolArray) -> Mapping[str, float | None]:
    """`FIGURES` of a window (start, end): rates and running requests in that time, the rest of who arrived in it.

    `counted`: by request number, whose latencies count (of two runs, those that finished in both). None: no value.
    """
    start, end = window
    length = end - start
    inside = (run.step_end_s > start) & (run.step_end_s <= end)
    seconds = np.clip(np.minimum(run.step_end_s, end) - np.maximum(run.step_start_s, start), 0.0, None)
    arrived = (run.arrival_s >= start) & (run.arrival_s < end)
    found: dict[str, float | None] = {
        "tokens_per_s": float(run.step_output_tokens[inside].sum()) / length if length > 0 else None,
        "running_mean": float((run.step_running * seconds).sum()) / length if length > 0 else None,
    }
    for name, values in _latencies(run, arrived & counted).items():
        found |= {f"{name} {mark}": value for mark, value in distribution(values).items()}
    number, prompt = int(arrived.sum()), float(run.prompt_tokens[arrived].sum())
    for name in ("preemptions", "compressions"):
        total = float(getattr(run, name)[arrived].sum())
        found[f"{name}_per_request"] = total / number if number else None
    found["prefix_hit_share"] = float(run.hit_tokens[arrived].sum()) / prompt if prompt else None
    return found


def _latencies(run: Observed, which: BoolArray) -> dict[str, FloatArray]:
    gaps = run.output_tokens[which] - 1.0
    spans = run.finish_s[which] - run.first_s[which]
    return {
        "ttft_s": run.first_s[which] - run.arrival_s[which],
        "tpot_s": np.where(gaps > 0, spans / np.maximum(gaps, 1.0), np.nan),
        "e2e_s": run.finish_s[which] - run.arrival_s[which],
    }


def cut(span: tuple[float, float], number: int) -> Sequence[tuple[float, float]]:
    """`number` windows of one length, from the span's start to its end."""
    marks = np.linspace(span[0], span[1], number + 1).tolist()
    return list(pairwise(marks))

"""Fit what a step of vLLM costs on the H200 from published times of whole runs.

`python -m benchmarks.vllm_cost` decides the workloads under the policy `vllm` with asynchronous
steps and vLLM's own limits for the GPU, fits three coefficients to the times at which shares of the
output were out (`TIMES`), prints each time beside the fit, and writes the profile.

The fit knows no single step: it is a label for the runs it was fitted to, not a calibration.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from zlab.policies.core.plan import SchedulerLimits
from zlab.sim.profiles import PROFILES, FitError, Profile, ProfileFigure, find_profile, save_profile
from zlab.sim.replay import replay
from zlab.traces.formats import read_trace

POLICY = "vllm:asynchronous=true"
LIMITS = SchedulerLimits(8192, block_size=16, max_batched_tokens=16384, max_running=1024)
FITTED = ("step_s", "layer_token_s", "kv_read_token_s")


class Point(NamedTuple):
    """A measured time: `seconds` after the start `share` of the output tokens were out."""

    workload: str
    share: float
    seconds: float


# vLLM 0.25 on one H200 with Qwen3-8B shapes in bfloat16, a pool of 131,072 tokens, temperature 1
TIMES = (
    Point("W1", 0.25, 10.9),
    Point("W1", 0.50, 42.7),
    Point("W1", 0.75, 90.0),
    Point("W1", 0.90, 110.6),
    Point("W2", 0.90, 51.9),
    Point("W4", 0.25, 33.3),
    Point("W4", 0.50, 195.6),
)


class Work(NamedTuple):
    """What a run had done when a time was taken: sums over its steps."""

    steps: int
    tokens: int
    context_tokens: int
    prefill_pairs: int


def work_until(folder: Path, points: Sequence[Point]) -> list[Work]:
    """Return the work of the simulated runs up to each point."""
    found: list[Work] = []
    columns: dict[str, dict[str, npt.NDArray[np.float64]]] = {}
    for point in points:
        if point.workload not in columns:
            run = replay(read_trace(folder / f"{point.workload}.jsonl"), POLICY, limits=LIMITS)
            names = (
                "output_tokens",
                "decodes",
                "prefill_tokens",
                "context_tokens",
                "prefill_pairs",
            )
            columns[point.workload] = {
                name: run.steps[name].to_numpy().astype(np.float64) for name in names
            }
        of = columns[point.workload]
        out = np.cumsum(of["output_tokens"])
        last = int(np.searchsorted(out, point.share * out[-1])) + 1
        sums = {name: int(values[:last].sum()) for name, values in of.items()}
        tokens = sums["decodes"] + sums["prefill_tokens"]
        found.append(Work(last, tokens, sums["context_tokens"], sums["prefill_pairs"]))
    return found


def fit(points: Sequence[Point], works: Sequence[Work], pair_s: float) -> npt.NDArray[np.float64]:
    """Return the coefficients `FITTED` with the least squared relative errors, none below 0.

    Args:
        points: The measured times.
        works: The work done at each.
        pair_s: Seconds of a (query, key) pair of a prefill, which is not fitted.
    """
    seconds = np.array([point.seconds for point in points])
    fixed = np.array([work.prefill_pairs * pair_s for work in works])
    matrix = np.array([[work.steps, work.tokens, work.context_tokens] for work in works])
    found, _ = nnls(matrix / seconds[:, None], (seconds - fixed) / seconds)
    return np.asarray(found, dtype=np.float64)


def predicted(coefficients: npt.NDArray[np.float64], work: Work, pair_s: float) -> float:
    """Return the seconds of the work."""
    done = np.array([work.steps, work.tokens, work.context_tokens])
    return float(done @ coefficients) + work.prefill_pairs * pair_s


def errors(seconds: Sequence[float], points: Sequence[Point]) -> FitError:
    """Return the relative errors of predicted seconds."""
    off = [
        abs(one - point.seconds) / point.seconds for one, point in zip(seconds, points, strict=True)
    ]
    return FitError(float(np.mean(off)), max(off), len(points))


def _figures(points: Sequence[Point]) -> dict[str, ProfileFigure]:
    """Return the measured times by name."""
    return {
        f"{point.workload}_{point.share:.0%}_s": ProfileFigure(point.seconds, "s")
        for point in points
    }


def main() -> None:
    """Fit, print, and write the profile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", type=Path, help="folder with W1.jsonl, W2.jsonl, W4.jsonl")
    parser.add_argument("--out", type=Path, default=PROFILES, help="folder of the profile")
    given = parser.parse_args()
    ours = find_profile("h200", "qwen3-8b")
    pair_s = ours.coefficients["attention_pair_s"]
    works = work_until(given.workloads, TIMES)
    found = fit(TIMES, works, pair_s)
    fitted = [predicted(found, work, pair_s) for work in works]
    held_out = []
    for left_out, work in enumerate(works):
        others = [place for place in range(len(works)) if place != left_out]
        again = fit([TIMES[place] for place in others], [works[place] for place in others], pair_s)
        held_out.append(predicted(again, work, pair_s))
    print(f"{'':14}{'measured':>10}{'fitted':>10}{'left out':>10}")
    for point, one, other in zip(TIMES, fitted, held_out, strict=True):
        name = f"{point.workload} {point.share:.0%}"
        print(f"{name:14}{point.seconds:10.1f}{one:10.1f}{other:10.1f}")
    coefficients = dict.fromkeys(ours.coefficients, 0.0)
    for name in ("compression_share", "compression_rate", "swap_launch_s", "swap_token_s"):
        coefficients[name] = ours.coefficients[name]
    coefficients |= dict(zip(FITTED, map(float, found), strict=True))
    coefficients |= {"corner": 1.0, "attention_pair_s": pair_s}
    profile = Profile(
        gpu="h200",
        model="qwen3-8b",
        shape=ours.shape,
        dtype="bfloat16",
        card=ours.card,
        date="2026-11-30",
        versions={"vllm": "0.25.0"},
        block_size=LIMITS.block_size,
        window=1,
        coefficients=coefficients,
        fit_error={"mixed": errors(fitted, TIMES)},
        held_out_error={"mixed": errors(held_out, TIMES)},
        also=_figures(TIMES),
        engine="vllm",
    )
    print(f"errors {profile.fit_error['mixed']}, left out {profile.held_out_error['mixed']}")
    print(f"wrote {save_profile(profile, given.out)}")


if __name__ == "__main__":
    main()

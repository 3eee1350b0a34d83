"""Several policies on the same workloads: figures, ratios to the first policy, and how sure one can be of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.errors import SimError
from sim.parallel import results
from sim.scenario import DEFAULTS, Scenario
from sim.sweep import flat
from traces.metrics import PERCENTILES, end_to_end, time_per_output_token, time_to_first_token
from traces.workload import Workload

FloatArray = npt.NDArray[np.float64]
LATENCIES: Mapping[str, Callable[[Any], FloatArray]] = {
    "ttft_s": time_to_first_token,
    "tpot_s": time_per_output_token,
    "e2e_s": end_to_end,
}
MOST_RESAMPLES, FEWEST_RESAMPLES, RESAMPLED_VALUES = 1000, 100, 5_000_000
CONFIDENCE = 0.95
# Student's t, 97.5 % quantile by degrees of freedom (any statistics textbook); beyond the table the normal one's.
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
T_BEYOND = 1.960


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval; without bounds where nothing says how far it would vary."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Compared:
    """One policy: its run on each workload, the figures over all of them, and their ratios to the first policy's."""

    policy: str
    summaries: tuple[Mapping[str, Any], ...]
    figures: Mapping[str, Estimate]  # by name, `ttft_s_p50` for the p50 of `ttft_s`
    ratios: Mapping[str, Estimate]  # only where the first policy's figure is not 0


@dataclass(frozen=True)
class _Task:
    scenario: Scenario
    workload: Workload
    out: str | None
    with_latencies: bool


@dataclass(frozen=True)
class _Done:
    summary: Mapping[str, Any]
    latencies: Mapping[str, FloatArray]  # by request, in order of submission


def compare(
    workloads: Sequence[Workload],
    policies: Sequence[str],
    base: Scenario = DEFAULTS,
    out: Path | None = None,
    on_done: Callable[[int], None] | None = None,
) -> list[Compared]:
    """Replay every workload under every policy.

    With several workloads (seeds of one recipe) a figure is the mean over them and its interval Student's t; a ratio is
    the geometric mean of the ratios within each workload, its interval Student's t of their logarithms. With one
    workload only latencies get an interval: its requests are drawn anew with replacement, the same ones for every
    policy. That tells how much the percentiles depend on single requests, and is too narrow for what another hour of
    the same traffic would give, because requests that queue together are not independent.

    `out` receives a recording a run: `out/POLICY`, or `out/POLICY/WORKLOAD` with several workloads, named by place.
    Runs are spread as `joblib.parallel_config` says. Raises what a scenario raises, at once where it cannot start.
    """
    if not workloads or not policies:
        raise SimError("a comparison needs at least one workload and one policy")
    if len(set(policies)) < len(policies):
        raise SimError(f"a policy is named twice: {', '.join(policies)}")
    scenarios = [replace(base, policy=policy) for policy in policies]
    for scenario in scenarios:
        scenario.set_up()
    folders = recording_folders(policies, len(workloads), out)
    tasks = [
        _Task(scenario, workload, folder, with_latencies=len(workloads) == 1)
        for scenario, row in zip(scenarios, folders, strict=True)
        for workload, folder in zip(workloads, row, strict=True)
    ]
    done: dict[int, _Done] = {}
    for index, result in results(_run, tasks):
        done[index] = result
        if on_done is not None:
            on_done(len(done))
    rows = [[done[at * len(workloads) + place] for place in range(len(workloads))] for at in range(len(policies))]
    over = _over_requests if len(workloads) == 1 else _over_workloads
    return [over(policy, row, rows[0]) for policy, row in zip(policies, rows, strict=True)]


def recording_folders(policies: Sequence[str], num_workloads: int, out: Path | None) -> list[list[str | None]]:
    """For each policy the folder of each run: named after the policy, made fit for a file system."""
    if out is None:
        return [[None] * num_workloads for _ in policies]
    names = ["".join(c if c.isalnum() or c in "-._=" else "_" for c in policy) for policy in policies]
    if len(set(names)) < len(names):
        names = [f"{at}-{name}" for at, name in enumerate(names)]
    if num_workloads == 1:
        return [[str(out / name)] for name in names]
    return [[str(out / name / str(place)) for place in range(num_workloads)] for name in names]


def _run(task: _Task) -> _Done:
    run = task.scenario.run(task.workload, task.out)
    if not task.with_latencies:
        return _Done(run.summary, {})
    order = np.argsort(run.requests["number"].to_numpy())
    return _Done(run.summary, {name: measure(run.requests)[order] for name, measure in LATENCIES.items()})


def _numbers(summary: Mapping[str, Any]) -> dict[str, float | None]:
    return {key: value for key, value in flat(summary).items() if value is None or isinstance(value, int | float)}


def _over_workloads(policy: str, runs: Sequence[_Done], first: Sequence[_Done]) -> Compared:
    """Means over workloads, and ratios within each."""
    rows, first_rows = ([_numbers(run.summary) for run in some] for some in (runs, first))
    figures, ratios = {}, {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        figures[key] = (
            _student([value for value in values if value is not None])
            if all(value is not None for value in values)
            else Estimate(None)
        )
        pairs = [(row[key], other[key]) for row, other in zip(rows, first_rows, strict=True)]
        if all(a and b and a > 0 and b > 0 for a, b in pairs):
            log = _student([float(np.log(a / b)) for a, b in pairs if a and b])
            ratios[key] = Estimate(*(None if x is None else float(np.exp(x)) for x in (log.value, log.low, log.high)))
    return Compared(policy, tuple(run.summary for run in runs), figures, ratios)


def _student(values: Sequence[float]) -> Estimate:
    """Mean and 95 % interval by Student's t."""
    mean, freedom = float(np.mean(values)), len(values) - 1
    quantile = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else T_BEYOND
    half = quantile * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return Estimate(mean, mean - half, mean + half)


def _over_requests(policy: str, runs: Sequence[_Done], first: Sequence[_Done]) -> Compared:
    """The one run's figures; intervals of latencies from its requests drawn anew."""
    (run,), (other,) = runs, first
    own, base = _numbers(run.summary), _numbers(other.summary)
    figures = {key: Estimate(value) for key, value in own.items()}
    ratios = {key: Estimate(value / under) for key, value in own.items() if value is not None and (under := base[key])}
    for name, values in run.latencies.items():
        drawn, drawn_base = (_resampled(name, some) for some in (values, other.latencies[name]))
        for key, rows in drawn.items():
            figures[key] = _between(own[key], rows)
            if key in ratios:
                ratios[key] = _between(ratios[key].value, rows / drawn_base[key])
    return Compared(policy, (run.summary,), figures, ratios)


def _resampled(name: str, values: FloatArray) -> dict[str, FloatArray]:
    """Mean and percentiles of each of many samples of the requests: the same requests whenever there are as many."""
    num = len(values)
    rng = np.random.Generator(np.random.PCG64(0))
    num_samples = min(MOST_RESAMPLES, max(FEWEST_RESAMPLES, RESAMPLED_VALUES // num))
    at_once = max(1, RESAMPLED_VALUES // num // 10)
    parts = [
        _distributions(values[rng.integers(0, num, (min(at_once, num_samples - start), num))])
        for start in range(0, num_samples, at_once)
    ]
    return {f"{name}_{mark}": np.concatenate([part[mark] for part in parts]) for mark in parts[0]}


def _distributions(rows: FloatArray) -> dict[str, FloatArray]:
    """Mean and percentiles (linear between ranks) of each row, NaN left out; NaN for a row without values."""
    ordered = np.sort(rows, axis=1)  # NaN goes last
    num = np.count_nonzero(~np.isnan(ordered), axis=1)
    empty = np.where(num > 0, 1.0, np.nan)
    found = {"mean": np.nansum(ordered, axis=1) / np.maximum(num, 1) * empty}
    lines = np.arange(len(rows))
    for percentile in PERCENTILES:
        rank = np.maximum(num - 1, 0) * (percentile / 100)
        below = np.floor(rank).astype(np.int64)
        above = np.minimum(below + 1, np.maximum(num - 1, 0))
        low, high = ordered[lines, below], ordered[lines, above]
        found[f"p{percentile}"] = low + (high - low) * (rank - below)
    return found


def _between(value: float | None, drawn: FloatArray) -> Estimate:
    """The value with the middle 95 % of what was drawn."""
    drawn = drawn[np.isfinite(drawn)]
    if value is None or not len(drawn):
        return Estimate(value)
    low, high = np.quantile(drawn, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Estimate(value, float(low), float(high))

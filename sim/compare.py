"""Compare policies on the same workloads: metrics, ratios to the first policy, confidence
intervals, break-even output lengths, and the rank correlation of two orders.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, isnan, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy  # scipy loads a submodule such as scipy.stats at its first use

from zlab.sim.replay import DEFAULTS, Scenario, replay
from zlab.sim.specs import SimError
from zlab.sim.sweep import flat, results
from zlab.traces.metrics import (
    MARKS,
    PERCENTILES,
    end_to_end,
    time_per_output_token,
    time_to_first_token,
)
from zlab.traces.workload import Workload

FloatArray = npt.NDArray[np.float64]
LATENCIES: Mapping[str, Callable[[Any], FloatArray]] = {
    "ttft_s": time_to_first_token,
    "tpot_s": time_per_output_token,
    "e2e_s": end_to_end,
}
MOST_RESAMPLES, FEWEST_RESAMPLES, RESAMPLED_VALUES = 1000, 100, 5_000_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % confidence interval. The bounds are None where the variation is
    unknown.
    """

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Compared:
    """The result of one policy: its run on each workload, the metrics over all workloads, and their
    ratios to the metrics of the first policy.
    """

    policy: str
    summaries: tuple[Mapping[str, Any], ...]
    conditions: tuple[Mapping[str, Any], ...]  # one for each run, as from `Run.conditions`
    figures: Mapping[str, Estimate]  # by name; `ttft_s_p50` is the p50 of `ttft_s`
    ratios: Mapping[str, Estimate]  # only metrics for which the first policy's value is not 0


@dataclass(frozen=True)
class _CompareTask:
    scenario: Scenario
    workload: Workload
    out: str | None
    with_latencies: bool


@dataclass(frozen=True)
class _ComparedRun:
    summary: Mapping[str, Any]
    conditions: Mapping[str, Any]
    latencies: Mapping[str, FloatArray]  # one value for each request, in order of submission


def compare(
    workloads: Sequence[Workload],
    policies: Sequence[str],
    base: Scenario = DEFAULTS,
    out: Path | None = None,
    on_done: Callable[[int], None] | None = None,
) -> list[Compared]:
    """Replay every workload under every policy.

    With several workloads (seeds of one recipe), a metric is the mean over the workloads with the
    interval of Student's t. A ratio is the geometric mean of the ratios within each workload, with
    the interval of Student's t on the logarithms.

    With one workload only latencies get an interval, by bootstrap: the requests are resampled with
    replacement, the same requests for every policy. The interval shows how much a percentile
    depends on single requests. It is narrower than the variation between two hours of the same
    traffic, because requests in one queue are not independent.

    The runs are distributed as `joblib.parallel_config` says.

    Args:
        workloads: The workloads.
        policies: The policies, as on the command line; the first one is the baseline of the ratios.
        base: The scenario without its policy.
        out: Folder for the recordings: `out/POLICY`, or `out/POLICY/INDEX` with several workloads.
        on_done: Called after each run with the number of finished runs.

    Returns:
        One result for each policy, in the order of `policies`.

    Raises:
        SimError: The arguments contradict each other, or a scenario is refused; no run has started
            then.
        PolicyError: A policy cannot be read.
        ConfigError: A policy cannot work in the pool.
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
        _CompareTask(scenario, workload, folder, with_latencies=len(workloads) == 1)
        for scenario, row in zip(scenarios, folders, strict=True)
        for workload, folder in zip(workloads, row, strict=True)
    ]
    done: dict[int, _ComparedRun] = {}
    for index, result in results(_run, tasks):
        done[index] = result
        if on_done is not None:
            on_done(len(done))
    rows = [
        [done[at * len(workloads) + place] for place in range(len(workloads))]
        for at in range(len(policies))
    ]
    over = _over_requests if len(workloads) == 1 else _over_workloads
    return [over(policy, row, rows[0]) for policy, row in zip(policies, rows, strict=True)]


MOST_LONGER = 16.0  # larger multipliers are not tried
PRECISION = 1.02  # the search ends when the ratio of its bounds is below this


@dataclass(frozen=True)
class BreakEven:
    """The length multiplier up to which a policy finishes more requests per second than another
    one.

    Attributes:
        multiplier: Multiplier of the outputs of compressed requests; 1.0 or `MOST_LONGER` at a
            bound.
        bound: "" where the multiplier was found; "below" where the policy does not finish more even
            with unchanged outputs; "above" where it still finishes more at `MOST_LONGER`.
        runs: Number of simulations of the search.
    """

    multiplier: float
    bound: str
    runs: int

    @property
    def words(self) -> str:
        """Return the text for tables: `1.57x`, `below 1x`, `above 16x`."""
        return f"{self.multiplier:.2f}x" if not self.bound else f"{self.bound} {self.multiplier:g}x"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {"multiplier": self.multiplier, "bound": self.bound or None, "runs": self.runs}


def break_even(
    workload: Workload, policy: str, requests_per_s: float, base: Scenario = DEFAULTS
) -> BreakEven | None:
    """Search the length multiplier at which a policy finishes as many requests per second as
    another.

    The search interpolates the time per finished request, which grows about linearly with the
    output lengths.

    Args:
        workload: The requests, with the output lengths that the other policy leads to.
        policy: The policy, as on the command line.
        requests_per_s: Finished requests per second under the other policy.
        base: GPU, model, pool and limits.

    Returns:
        The multiplier; None if the policy compresses nothing, so that its outputs do not change.
    """
    scenario = replace(base, policy=policy, length_multiplier=1.0, length_profile=None)
    setup = (base if scenario == base else scenario).set_up()
    if setup.policy.budget.floor(scenario.block_size) is None or requests_per_s <= 0:
        return None
    wanted, runs = 1.0 / requests_per_s, 0

    def seconds(multiplier: float) -> float:
        """Return the seconds per finished request. The model's positions are raised so that no
        output is cut.
        """
        nonlocal runs
        runs += 1
        longest = setup.limits.max_model_len * ceil(multiplier)
        run = replay(
            workload,
            setup.policy,
            setup.gpu,
            replace(setup.model, max_positions=longest),
            replace(setup.limits, max_model_len=longest),
            setup.cost,
            length_multiplier=multiplier,
            plan_ahead=scenario.cost is not None,
        )
        rate = run.summary["requests_per_s"]
        return 1.0 / rate if rate > 0 else np.inf

    low, low_s = 1.0, seconds(1.0)
    if low_s >= wanted:
        return BreakEven(1.0, "below", runs)
    high, high_s = 2.0, seconds(2.0)
    while high_s < wanted:
        if high >= MOST_LONGER:
            return BreakEven(MOST_LONGER, "above", runs)
        low, low_s, high = high, high_s, 2.0 * high
        high_s = seconds(high)
    while high > PRECISION * low:
        share = (wanted - low_s) / (high_s - low_s) if np.isfinite(high_s) else 0.5
        middle = low + min(max(share, 0.05), 0.95) * (high - low)
        middle_s = seconds(middle)
        if middle_s < wanted:
            low, low_s = middle, middle_s
        else:
            high, high_s = middle, middle_s
    return BreakEven(sqrt(low * high), "", runs)


def recording_folders(
    policies: Sequence[str], num_workloads: int, out: Path | None
) -> list[list[str | None]]:
    """Return the folder of each run.

    Args:
        policies: The policies; each gives a folder name with the characters that a file system
            allows.
        num_workloads: Runs of each policy.
        out: The parent folder; None means that nothing is recorded.

    Returns:
        Paths of shape [policies, workloads].
    """
    if out is None:
        return [[None] * num_workloads for _ in policies]
    names = [
        "".join(c if c.isalnum() or c in "-._=" else "_" for c in policy) for policy in policies
    ]
    if len(set(names)) < len(names):
        names = [f"{at}-{name}" for at, name in enumerate(names)]
    if num_workloads == 1:
        return [[str(out / name)] for name in names]
    return [[str(out / name / str(place)) for place in range(num_workloads)] for name in names]


def _run(task: _CompareTask) -> _ComparedRun:
    run = task.scenario.run(task.workload, task.out)
    if not task.with_latencies:
        return _ComparedRun(run.summary, run.conditions(), {})
    order = np.argsort(run.requests["number"].to_numpy())
    latencies = {name: measure(run.requests)[order] for name, measure in LATENCIES.items()}
    return _ComparedRun(run.summary, run.conditions(), latencies)


def _numbers(summary: Mapping[str, Any]) -> dict[str, float | None]:
    return {
        key: value
        for key, value in flat(summary).items()
        if value is None or isinstance(value, int | float)
    }


def _over_workloads(
    policy: str, runs: Sequence[_ComparedRun], first: Sequence[_ComparedRun]
) -> Compared:
    """Return the means over the workloads, and the means of the ratios within each."""
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
            ratios[key] = Estimate(
                *(None if x is None else float(np.exp(x)) for x in (log.value, log.low, log.high))
            )
    summaries, conditions = zip(*((run.summary, run.conditions) for run in runs), strict=True)
    return Compared(policy, summaries, conditions, figures, ratios)


def _student(values: Sequence[float]) -> Estimate:
    """Return the mean and its 95 % interval by Student's t."""
    mean, freedom = float(np.mean(values)), len(values) - 1
    quantile = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
    half = quantile * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return Estimate(mean, mean - half, mean + half)


def _over_requests(
    policy: str, runs: Sequence[_ComparedRun], first: Sequence[_ComparedRun]
) -> Compared:
    """Return the metrics of the one run, with bootstrap intervals of the latencies."""
    (run,), (other,) = runs, first
    own, base = _numbers(run.summary), _numbers(other.summary)
    figures = {key: Estimate(value) for key, value in own.items()}
    ratios = {
        key: Estimate(value / under)
        for key, value in own.items()
        if value is not None and (under := base[key])
    }
    for name, values in run.latencies.items():
        drawn, drawn_base = (_resampled(name, some) for some in (values, other.latencies[name]))
        for key, rows in drawn.items():
            figures[key] = _between(own[key], rows)
            if key in ratios:
                ratios[key] = _between(ratios[key].value, rows / drawn_base[key])
    return Compared(policy, (run.summary,), (run.conditions,), figures, ratios)


def _resampled(name: str, values: FloatArray) -> dict[str, FloatArray]:
    """Return the mean and percentiles of bootstrap samples of the requests.

    The random numbers depend only on the number of requests, so that all policies are compared on
    the same samples.
    """
    num = len(values)
    num_samples = min(MOST_RESAMPLES, max(FEWEST_RESAMPLES, RESAMPLED_VALUES // num))
    if num < 2:  # every sample is the one request; scipy refuses a sample of one
        drawn = np.repeat(_distributions(values[None], -1), num_samples, axis=1)
    else:
        with warnings.catch_warnings():  # samples without a value are ignored in _between
            warnings.simplefilter("ignore", scipy.stats.DegenerateDataWarning)
            drawn = scipy.stats.bootstrap(
                (values,),
                _distributions,
                n_resamples=num_samples,
                batch=max(1, RESAMPLED_VALUES // num // 10),
                method="percentile",
                rng=np.random.Generator(np.random.PCG64(0)),
            ).bootstrap_distribution
    return {f"{name}_{mark}": row for mark, row in zip(MARKS, drawn, strict=True)}


def _distributions(rows: FloatArray, axis: int) -> FloatArray:
    """Return the mean and the percentiles along the last axis, stacked. NaN is left out; without
    values the result is NaN.
    """
    assert axis in (-1, rows.ndim - 1)
    num = np.count_nonzero(~np.isnan(rows), axis=-1)
    mean = np.nansum(rows, axis=-1) / np.where(num > 0, num, np.nan)
    shares = np.array(PERCENTILES) / 100
    marks = scipy.stats.quantile(rows, shares, axis=-1, nan_policy="omit", keepdims=True)
    return np.stack([mean, *np.moveaxis(marks, -1, 0)])


def _between(value: float | None, drawn: FloatArray) -> Estimate:
    """Return the value with the middle 95 % of the samples as its interval."""
    drawn = drawn[np.isfinite(drawn)]
    if value is None or not len(drawn):
        return Estimate(value)
    low, high = np.quantile(drawn, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Estimate(value, float(low), float(high))


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return Kendall's tau-b of two rankings of the same things: 1 for the same order, -1 for the
    opposite order.

    Pairs that are tied in one ranking count for neither order (Kendall 1945). The result is None if
    all things are tied in one ranking, and for fewer than two things.
    """
    assert len(left) == len(right)
    if len(left) < 2:
        return None
    tau = float(scipy.stats.kendalltau(left, right).statistic)
    return None if isnan(tau) else tau

"""Measure a policy and its baseline over many workloads, and check the policy's runs.

`check_run` checks the invariants of docs/DESIGN.md that a finished run's tables show. The
invariants of each step are checked while the policy runs (`zlab.policies.core.invariants`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from zlab.policies.core.invariants import CheckedScheduler
from zlab.policies.core.plan import ConfigError
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.evidence import Case
from zlab.policies.gates import OK, measures_of
from zlab.sim.replay import Scenario
from zlab.sim.specs import SimError
from zlab.sim.sweep import results
from zlab.traces.recording import Run
from zlab.traces.schema import PHASES, EventKind
from zlab.traces.workload import Workload

ENDS = {kind: kind.label for kind in EventKind if kind.ends}  # the values of a request's status
CLOCK_S = 1e-6  # times are counted in ns and written in s


def check_run(run: Run, scheduler: Scheduler) -> str | None:
    """Return a description of the first invariant that the finished run breaks, None if all
    hold.
    """
    for law in (_everything_given_back, _one_end_each, _times_add_up, _tokens_add_up):
        words = law(run, scheduler)
        if words is not None:
            return words
    return None


def _everything_given_back(_: Run, scheduler: Scheduler) -> str | None:
    num_blocks, num_free = scheduler.num_usable_blocks, scheduler.stats().num_free_blocks
    alive = [request.id for request in scheduler.live()]
    if alive:
        return f"{len(alive)} requests never ended, the first {alive[0]!r}"
    if num_free != num_blocks:
        return f"{num_blocks - num_free} of {num_blocks} blocks were never released"
    return None


def _one_end_each(run: Run, _: Scheduler) -> str | None:
    kinds, numbers = run.events["kind"].to_numpy(), run.events["request"].to_numpy()
    arrived = Counter(numbers[kinds == EventKind.ARRIVED].tolist())
    ends: dict[int, list[str]] = {number: [] for number in arrived}
    for kind, number in zip(kinds.tolist(), numbers.tolist(), strict=True):
        if kind in ENDS:
            ends.setdefault(number, []).append(ENDS[EventKind(kind)])
    for row in run.requests.select(["number", "id", "status"]).to_pylist():
        if arrived.get(row["number"]) != 1 or ends.get(row["number"]) != [row["status"]]:
            seen = ", ".join(ends.get(row["number"], [])) or "no end"
            return f"request {row['id']!r} is {row['status']}, its events say {seen}"
    if len(arrived) != run.requests.num_rows:
        return f"{len(arrived)} requests arrived, {run.requests.num_rows} have a row"
    return None


def _times_add_up(run: Run, _: Scheduler) -> str | None:
    table = run.requests
    phases = sum(table[name].to_numpy() for name in [f"{label}_s" for label in PHASES])
    spans = table["finish_s"].to_numpy() - table["arrival_s"].to_numpy()
    refused = np.array([status == "refused" for status in table["status"].to_pylist()], dtype=bool)
    off = ~refused & ~(np.abs(phases - spans) <= CLOCK_S)
    if off.any():
        at = int(np.argmax(off))
        return (
            f"request {table['id'][at].as_py()!r} took {spans[at]:.6f} s, its phases add up "
            f"to {phases[at]:.6f} s"
        )
    return None


def _tokens_add_up(run: Run, _: Scheduler) -> str | None:
    of_steps = int(run.steps["output_tokens"].to_numpy().sum())
    of_requests = int(run.requests["output_tokens"].to_numpy().sum())
    if of_steps != of_requests:
        return f"steps produced {of_steps} tokens, requests have {of_requests}"
    return None


@dataclass(frozen=True)
class Load:
    """A workload with the name that its user gave it, and the seed that it was made from."""

    name: str
    seed: int | None
    workload: Workload


@dataclass(frozen=True)
class _ValidateTask:
    scenario: Scenario
    workload: Workload
    is_audited: bool


@dataclass(frozen=True)
class _ValidatedRun:
    measured: Mapping[str, float | str | None]
    digest: str | None = None
    error: str | None = None


def validate(
    loads: Sequence[Load],
    scenario: Scenario,
    baseline: Scenario | None = None,
    on_done: Callable[[int], None] | None = None,
) -> list[Case]:
    """Replay every workload in the scenario and in `baseline`, and measure both.

    The invariants are checked at every step boundary of the policy's runs and on its finished runs.
    The first one that is broken becomes the metric `laws`. An exception inside a run becomes the
    error of its case. The runs are distributed as `joblib.parallel_config` says.

    Args:
        loads: The workloads.
        scenario: The policy with GPU, model and limits.
        baseline: The scenario to compare with; None for no comparison.
        on_done: Called after each run with the number of finished runs.

    Returns:
        One case for each workload, in order.

    Raises:
        SimError: A scenario is refused; no run has started then.
        PolicyError: A policy cannot be read.
        ConfigError: A policy cannot work in the pool.
    """
    if not loads:
        raise SimError("a policy is validated on at least one workload")
    scenarios = [scenario] if baseline is None else [scenario, baseline]
    for one in scenarios:
        setup = one.set_up()
        for load in loads:
            setup.check_blocks(load.workload)
    tasks = [
        _ValidateTask(one, load.workload, one is scenario) for load in loads for one in scenarios
    ]
    done: dict[int, _ValidatedRun] = {}
    for index, result in results(_run, tasks):
        done[index] = result
        if on_done is not None:
            on_done(len(done))
    return [
        _case(load, [done[at * len(scenarios) + k] for k in range(len(scenarios))])
        for at, load in enumerate(loads)
    ]


def setup_of(scenario: Scenario, baseline: Scenario | None = None) -> dict[str, Any]:
    """Return what the scenario's names stand for, as plain JSON: GPU, model, and the limits and
    costs of policy and baseline.
    """
    found = scenario.set_up()
    described = {
        **asdict(scenario),
        "gpu": found.gpu.name,
        "model": found.model.name,
        "dtype_bytes": found.model.dtype_bytes,
        "limits": asdict(found.limits),
        "cost": found.cost.describe(),
        "baseline_limits": None,
    }
    if baseline is not None:
        described["baseline_limits"] = asdict(baseline.set_up().limits)
    return described


def _run(task: _ValidateTask) -> _ValidatedRun:
    """Make one run. An exception of any type inside it becomes its error, because a user's policy
    may raise anything. Raise ConfigError if policy and limits cannot work together.
    """
    made: list[CheckedScheduler] = []

    def watched(*args: Any, **more: Any) -> CheckedScheduler:
        made.append(CheckedScheduler(*args, **more))
        return made[0]

    try:
        if not task.is_audited:
            run = task.scenario.run(task.workload)
            return _ValidatedRun(measures_of(run.summary), run.summary["digest"])
        run = task.scenario.run(task.workload, make_scheduler=watched)
        laws = check_run(run, made[0]) or OK
        return _ValidatedRun({**measures_of(run.summary), "laws": laws}, run.summary["digest"])
    except ConfigError:
        raise  # policy and limits cannot work together, so there is nothing to judge
    except AssertionError as error:
        return _ValidatedRun(
            {"laws": str(error) or "an assertion without a message"},
            error=f"an invariant was broken: {error}",
        )
    except Exception as error:
        return _ValidatedRun({}, error=f"{type(error).__name__}: {error}")


def _case(load: Load, done: Sequence[_ValidatedRun]) -> Case:
    own, other = done[0], done[1] if len(done) > 1 else None
    errors = [own.error] if own.error else []
    if other is not None and other.error:
        errors.append(f"baseline: {other.error}")
    return Case(
        load.name,
        load.seed,
        load.workload.sha256,
        own.measured,
        other.measured if other is not None else None,
        (own.digest, other.digest if other is not None else None),
        "; ".join(errors) or None,
        load.workload.meta.rows(),
    )

"""A policy and what it is to replace over many workloads: every case measured, and the policy's own runs audited."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from policies.audited import AuditedScheduler
from policies.core.errors import ConfigError
from policies.evidence import Case
from policies.measures import OK, measures_of
from sim.errors import SimError
from sim.laws import broken_law
from sim.parallel import results
from sim.scenario import Scenario, check_blocks
from traces.workload import Workload


@dataclass(frozen=True)
class Load:
    """A workload with the name that its user gave it, and the seed it was made from."""

    name: str
    seed: int | None
    workload: Workload


@dataclass(frozen=True)
class _Task:
    scenario: Scenario
    workload: Workload
    is_audited: bool


@dataclass(frozen=True)
class _Done:
    measured: Mapping[str, float | str | None]
    digest: str | None = None
    error: str | None = None


def validate(
    loads: Sequence[Load],
    scenario: Scenario,
    baseline: str | None = None,
    on_done: Callable[[int], None] | None = None,
) -> list[Case]:
    """Replay every load under the scenario's policy and under `baseline`, and measure both.

    The policy's scheduler is audited at every step boundary, and its finished run held against the laws: what is broken
    first is the metric `laws`. Whatever a run raises is its case's error. Runs are spread as `joblib.parallel_config`
    says; `on_done` is told how many are over. Raises SimError, PolicyError or ConfigError, at once, where nothing could
    run.
    """
    if not loads:
        raise SimError("a policy is validated on at least one workload")
    for load in loads:
        check_blocks(load.workload, scenario.block_size)
    scenarios = [scenario] if baseline is None else [scenario, replace(scenario, policy=baseline)]
    for one in scenarios:
        one.set_up()
    tasks = [_Task(one, load.workload, one is scenario) for load in loads for one in scenarios]
    done: dict[int, _Done] = {}
    for index, result in results(_run, tasks):
        done[index] = result
        if on_done is not None:
            on_done(len(done))
    return [
        _case(load, [done[at * len(scenarios) + k] for k in range(len(scenarios))]) for at, load in enumerate(loads)
    ]


def setup_of(scenario: Scenario, baseline: str | None = None) -> dict[str, Any]:
    """What the scenario's names amount to, as plain JSON: card, model, limits and costs of policy and baseline."""
    found = scenario.set_up()
    described = {
        **asdict(scenario),
        "gpu": found.gpu.name,
        "model": found.model.name,
        "limits": asdict(found.limits),
        "cost": found.cost.describe(),
        "baseline_limits": None,
    }
    if baseline is not None:
        described["baseline_limits"] = asdict(replace(scenario, policy=baseline).set_up().limits)
    return described


def _run(task: _Task) -> _Done:
    """One run; whatever goes wrong in it (a user's policy may raise anything) becomes its error. Raises ConfigError."""
    made: list[AuditedScheduler] = []

    def watched(*args: Any, **more: Any) -> AuditedScheduler:
        made.append(AuditedScheduler(*args, **more))
        return made[0]

    try:
        if not task.is_audited:
            run = task.scenario.run(task.workload)
            return _Done(measures_of(run.summary), run.summary["digest"])
        run = task.scenario.run(task.workload, make_scheduler=watched)
        laws = broken_law(run, made[0]) or OK
        return _Done({**measures_of(run.summary), "laws": laws}, run.summary["digest"])
    except ConfigError:
        raise  # policy and limits cannot work together: nothing to judge
    except AssertionError as error:
        return _Done({"laws": str(error) or "an assertion without words"}, error=f"a law was broken: {error}")
    except Exception as error:
        return _Done({}, error=f"{type(error).__name__}: {error}")


def _case(load: Load, done: Sequence[_Done]) -> Case:
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
    )

"""Simulate a grid of scenarios. Each point becomes a row, also a point that fails.

`results` distributes the points over processes, Dask or Ray, as `joblib.parallel_config` says.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from typing import Any, TypeVar

from joblib import Parallel, delayed
from joblib.parallel import get_active_backend

from zlab.policies.spec import QUESTIONS, PolicyError, has_setting
from zlab.sim.replay import DEFAULTS, Scenario
from zlab.sim.specs import SimError
from zlab.traces.choices import unknown_choice
from zlab.traces.workload import Workload

Item = TypeVar("Item")
Result = TypeVar("Result")
PORTION = 2  # calls for each worker at once, where a backend returns only whole lists


def results(
    function: Callable[[Item], Result], items: Sequence[Item]
) -> Iterator[tuple[int, Result]]:
    """Call `function` with each item and yield (index of the item, result) in the order in which
    they finish.

    Function, items and results must be picklable. Without `joblib.parallel_config(backend=...,
    n_jobs=...)` the calls run in this process, one after the other. An exception of the function
    ends the iteration.
    """
    backend, num_jobs = get_active_backend()
    calls = [delayed(_numbered)(function, index, item) for index, item in enumerate(items)]
    if backend.supports_return_generator or num_jobs == 1:
        yield from Parallel(return_as="generator_unordered", batch_size=1)(calls)
        return
    size = PORTION * backend.effective_n_jobs(
        num_jobs
    )  # Ray's backend, for example, returns no result before all of a call are finished
    for start in range(0, len(calls), size):
        yield from Parallel(batch_size=1)(calls[start : start + size])


def _numbered(function: Callable[[Item], Result], index: int, item: Item) -> tuple[int, Result]:
    return index, function(item)


Value = str | int | float
SEED = "seed"
SCENARIO_KEYS = tuple(item.name.replace("_", "-") for item in fields(Scenario))
POLICY_SETTINGS = frozenset(
    item.name for kinds in QUESTIONS.values() for cls in kinds.values() for item in fields(cls)
)


@dataclass(frozen=True)
class Point:
    """One scenario of a sweep with its workload."""

    # by the keys of the grid; None: the policy does not have the setting
    parameters: Mapping[str, Value | None]
    scenario: Scenario
    workload: Workload


@dataclass(frozen=True)
class SweepRow:
    """The result of a point: its metrics, or the error."""

    parameters: Mapping[str, Value | None]
    summary: Mapping[str, Any] | None
    error: str | None = None
    policy: str = ""  # as on the command line
    rows: Mapping[str, Any] | None = None  # rows of the workload's trace, as `WorkloadMeta.rows`

    @property
    def blank(self) -> list[str]:
        """Keys of the grid that are not settings of this point's policy."""
        return [key for key, value in self.parameters.items() if value is None]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values: parameters, blank keys, error, and metrics under their contract
        names.
        """
        return {
            "parameters": dict(self.parameters),
            "blank": self.blank,
            "error": self.error,
            "rows": self.rows,
            **(self.summary or {}),
        }

    def as_cells(self) -> dict[str, Any]:
        """Return one row of a table: parameters, metrics without nesting, and the error. The run's
        full policy is `policy_spec`.
        """
        figures = flat(self.summary or {})
        spec = {"policy_spec": figures.pop("policy")} if "policy" in figures else {}
        dropped = {"rows_dropped": sum((self.rows or {}).get("dropped", {}).values())}
        return {**self.parameters, **spec, **figures, **dropped, "error": self.error}


def sweep(
    workload: Workload | Callable[[int], Workload],
    grid: Mapping[str, Sequence[Value]],
    base: Scenario = DEFAULTS,
) -> Iterator[tuple[int, SweepRow]]:
    """Simulate every combination of the grid's values and yield (index in the grid, row) as the
    points finish.

    The last key varies fastest. A policy that does not have a setting of the grid gets one point
    instead of one for each value. The points are distributed as `joblib.parallel_config` says.

    Args:
        workload: The workload, or a function from a seed to a workload.
        grid: Key -> values. A key is a setting of `Scenario` (`kv-blocks` or `kv_blocks`), a
            setting of the policy as on the command line (`budget.tokens`, `join`, `slots`), or
            `seed`, which needs a workload function.
        base: The scenario that the grid varies.

    Raises:
        SimError: No point could have a key or a value. Other errors are in the row of their point.
    """
    yield from results(run_point, points(workload, grid, base))


def points(
    workload: Workload | Callable[[int], Workload],
    grid: Mapping[str, Sequence[Value]],
    base: Scenario,
) -> list[Point]:
    """Return the grid's points in order.

    Args:
        workload: As in `sweep`.
        grid: As in `sweep`.
        base: As in `sweep`.

    Raises:
        SimError: No point could have a key or a value.
    """
    for key, values in grid.items():
        check_key(key)
        if not values:
            raise SimError(f"grid key {key!r} has no values")
    if SEED in grid and isinstance(workload, Workload):
        raise SimError(
            f"workload {workload.meta.name!r} is fixed: only a generated workload has a seed "
            "to vary"
        )
    made: dict[int | None, Workload] = {}
    found: dict[tuple[Value | None, ...], Point] = {}
    applies: set[str] = set()
    for combination in product(*grid.values()):
        parameters: dict[str, Value | None] = dict(zip(grid, combination, strict=True))
        scenario = base
        for key in sorted(grid, key=_turn):
            value = parameters[key]
            if _turn(key) == SETTING_TURN and not _has(scenario.policy, key):
                parameters[key] = None
            elif value is not None:
                applies.add(key)
                scenario = vary(scenario, key, value)
        place = tuple(parameters.values())
        if place in found:
            continue
        seed = _whole(SEED, parameters[SEED] or 0) if SEED in parameters else None
        if seed not in made:
            made[seed] = workload if isinstance(workload, Workload) else workload(seed or 0)
        found[place] = Point(parameters, scenario, made[seed])
    for key in grid:
        if key not in applies:
            policies = ", ".join(dict.fromkeys(one.scenario.policy for one in found.values()))
            raise SimError(
                f"grid key {key!r} is not a setting of any policy of the grid ({policies})"
            )
    return list(found.values())


POLICY_TURN, QUESTION_TURN, SETTING_TURN = range(3)


def _turn(key: str) -> int:
    """Return the order of a key: the policy is varied first, then its parts, then their
    settings.
    """
    if key == SEED or key.replace("-", "_") in FIELDS:
        return POLICY_TURN
    return QUESTION_TURN if key in QUESTIONS else SETTING_TURN


@cache
def _has(policy: str, key: str) -> bool:
    """Return whether the policy has the setting. A policy that cannot be read counts as having it,
    so that its point reports the error.
    """
    try:
        return has_setting(policy, key)
    except PolicyError:
        return True


def check_key(key: str) -> None:
    """Raise SimError for an unknown key. The message names the nearest known one."""
    name = key.replace("_", "-")
    question, _, setting = key.rpartition(".")
    if (
        name in SCENARIO_KEYS
        or key == SEED
        or (not question and (key in QUESTIONS or key in POLICY_SETTINGS))
    ):
        return
    if question in QUESTIONS and setting in POLICY_SETTINGS:
        return
    every = [SEED, *SCENARIO_KEYS, *QUESTIONS]
    every += [f"{name}.{s}" for name, kinds in QUESTIONS.items() for s in _settings(kinds)]
    raise SimError(unknown_choice("grid key", key, every))


def _settings(kinds: Mapping[str, type[Any]]) -> list[str]:
    return sorted({item.name for cls in kinds.values() for item in fields(cls)})


def vary(scenario: Scenario, key: str, value: Value) -> Scenario:
    """Return the scenario with one value of a grid.

    Args:
        scenario: The scenario to change.
        key: A key of the grid.
        value: The value of the key.

    Raises:
        SimError: The value is not a number where one is needed.
    """
    name = key.replace("-", "_")
    if key == SEED:
        return scenario
    if name in FIELDS:
        changed: dict[str, Any] = {name: FIELDS[name](key, value)}
        return replace(scenario, **changed)
    base, _, changes = scenario.policy.partition(":")
    if base.endswith(".py"):  # FILE.py:Class
        name, _, changes = changes.partition(":")
        base = f"{base}:{name}"
    return replace(
        scenario, policy=f"{base}:{changes},{key}={value}" if changes else f"{base}:{key}={value}"
    )


def flat(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary without nesting: `ttft_s` with its `p50` becomes `ttft_s_p50`."""
    row: dict[str, Any] = {}
    for key, value in summary.items():
        if isinstance(value, Mapping):
            row |= {f"{key}_{mark}": item for mark, item in value.items()}
        else:
            row[key] = value
    return row


def split_values(text: str) -> list[str]:
    """Split the values of a grid key at commas, except commas inside a policy's `a=b,c=d`."""
    return [part.strip() for part in re.split(r",(?![\w.]+=)", text) if part.strip()]


def _whole(key: str, value: Value) -> int:
    try:
        return int(value) if isinstance(value, str) or value == int(value) else int(str(value))
    except ValueError:
        raise SimError(f"{key} must be a whole number, not {value!r}") from None


def _number(key: str, value: Value) -> float:
    try:
        return float(value)
    except ValueError:
        raise SimError(f"{key} must be a number, not {value!r}") from None


def _text(key: str, value: Value) -> str:
    return str(value)


FIELDS: Mapping[
    str, Callable[[str, Value], Value]
] = {  # setting of `Scenario` -> function that reads its value
    item.name: _text
    if "str" in str(item.type)
    else _number
    if "float" in str(item.type)
    else _whole
    for item in fields(Scenario)
}


def run_point(point: Point) -> SweepRow:
    """Simulate one point. An exception of any type becomes the error of its row, because a user's
    policy may raise anything.
    """
    policy, rows = point.scenario.policy, point.workload.meta.rows()
    try:
        run = point.scenario.run(point.workload)
    except Exception as error:
        return SweepRow(point.parameters, None, f"{type(error).__name__}: {error}", policy, rows)
    return SweepRow(point.parameters, run.summary, None, policy, rows)

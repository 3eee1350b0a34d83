"""A grid of scenarios, simulated point by point over processes or a cluster: every point is a row, also a bad one."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import product
from typing import Any

from policies.catalogue import QUESTIONS
from sim.errors import SimError
from sim.parallel import results
from sim.scenario import DEFAULTS, Scenario
from traces.workload import Workload

Value = str | int | float
SEED = "seed"
SCENARIO_KEYS = tuple(item.name.replace("_", "-") for item in fields(Scenario))
POLICY_SETTINGS = frozenset(item.name for kinds in QUESTIONS.values() for cls in kinds.values() for item in fields(cls))


@dataclass(frozen=True)
class Point:
    """One scenario of a sweep with its workload."""

    parameters: Mapping[str, Value]  # as the grid names them
    scenario: Scenario
    workload: Workload


@dataclass(frozen=True)
class Row:
    """What became of a point: its figures, or why there are none."""

    parameters: Mapping[str, Value]
    summary: Mapping[str, Any] | None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the parameters, the error, and the figures under their contract names."""
        return {"parameters": dict(self.parameters), "error": self.error, **(self.summary or {})}

    def as_cells(self) -> dict[str, Any]:
        """For a table: parameters, figures without nesting, and the error; the run's full policy is `policy_spec`."""
        figures = flat(self.summary or {})
        spec = {"policy_spec": figures.pop("policy")} if "policy" in figures else {}
        return {**self.parameters, **spec, **figures, "error": self.error}


def sweep(
    workload: Workload | Callable[[int], Workload],
    grid: Mapping[str, Sequence[Value]],
    base: Scenario = DEFAULTS,
) -> Iterator[tuple[int, Row]]:
    """Simulate every combination of the grid's values and give back (place in the grid, row) as they finish.

    Keys are settings of `Scenario` (`kv-blocks` or `kv_blocks`), of the policy as its command-line form names them
    (`budget.tokens`, `join`, `slots`), or `seed`, which asks for a workload that is made from one. The last key varies
    fastest. With `joblib.parallel_config(backend=..., n_jobs=...)` around it the points are spread over processes or
    a cluster. Raises SimError on a key or a value that no point could have; what fails in a point is in its row.
    """
    yield from results(run_point, points(workload, grid, base))


def points(
    workload: Workload | Callable[[int], Workload], grid: Mapping[str, Sequence[Value]], base: Scenario
) -> list[Point]:
    """The grid's points in order. Raises SimError."""
    for key, values in grid.items():
        check_key(key)
        if not values:
            raise SimError(f"grid key {key!r} has no values")
    if SEED in grid and isinstance(workload, Workload):
        raise SimError(f"workload {workload.meta.name!r} is fixed: only one that is made up has a seed to vary")
    made: dict[int | None, Workload] = {}
    found = []
    for combination in product(*grid.values()):
        parameters = dict(zip(grid, combination, strict=True))
        seed = _whole(SEED, parameters[SEED]) if SEED in parameters else None
        if seed not in made:
            made[seed] = workload if isinstance(workload, Workload) else workload(seed or 0)
        scenario = base
        for key, value in sorted(
            parameters.items(), key=lambda item: item[0] != "policy"
        ):  # its settings come after it
            scenario = vary(scenario, key, value)
        found.append(Point(parameters, scenario, made[seed]))
    return found


def check_key(key: str) -> None:
    """Raise SimError, with the nearest known one, for a key that nothing answers to."""
    name = key.replace("_", "-")
    question, _, setting = key.rpartition(".")
    if name in SCENARIO_KEYS or key == SEED or (not question and (key in QUESTIONS or key in POLICY_SETTINGS)):
        return
    if question in QUESTIONS and setting in POLICY_SETTINGS:
        return
    every = [SEED, *SCENARIO_KEYS, *QUESTIONS]
    every += [f"{name}.{s}" for name, kinds in QUESTIONS.items() for s in _settings(kinds)]
    near = get_close_matches(key, every, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise SimError(f"unknown grid key {key!r}{hint} (choices: {', '.join(every)})")


def _settings(kinds: Mapping[str, type[Any]]) -> list[str]:
    return sorted({item.name for cls in kinds.values() for item in fields(cls)})


def vary(scenario: Scenario, key: str, value: Value) -> Scenario:
    """The scenario with one value of a grid. Raises SimError on a number that is none."""
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
    return replace(scenario, policy=f"{base}:{changes},{key}={value}" if changes else f"{base}:{key}={value}")


def flat(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary without nesting: `ttft_s` with its `p50` becomes `ttft_s_p50`."""
    row: dict[str, Any] = {}
    for key, value in summary.items():
        if isinstance(value, Mapping):
            row |= {f"{key}_{mark}": item for mark, item in value.items()}
        else:
            row[key] = value
    return row


def split_values(text: str) -> list[str]:
    """The values of a grid key: at commas, but not at those inside a policy's `a=b,c=d`."""
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


FIELDS: Mapping[str, Callable[[str, Value], Value]] = {  # setting of `Scenario` -> what reads its value
    item.name: _text if "str" in str(item.type) else _number if "float" in str(item.type) else _whole
    for item in fields(Scenario)
}


def run_point(point: Point) -> Row:
    """Simulate one point; whatever goes wrong in it (a user's policy may raise anything) becomes its row's error."""
    try:
        run = point.scenario.run(point.workload)
    except Exception as error:
        return Row(point.parameters, None, f"{type(error).__name__}: {error}")
    return Row(point.parameters, run.summary)

"""What must hold before a policy may serve, and while it does: gates from TOML, checked against measurements."""

import operator
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from policies.measures import METRICS, OK, SPELLINGS, Measured, Unit
from policies.spec import PolicyError

COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}
NEAR = {"=>": ">=", "=<": "<=", "=": "==", "!=": "==", "≥": ">=", "≤": "<="}
CONDITION = re.compile(r"\s*(?P<operator>[^\w\s.+-]+)\s*(?P<bound>.*?)\s*")
NUMBER = re.compile(r"(?P<number>[+-]?(?:\d[\d_]*)(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(?P<unit>.*)")
RELATIVE = "x"
EXAMPLES = {
    Unit.SECONDS: "<= 2 s",
    Unit.PER_SECOND: ">= 1000 /s or >= 1.5x",
    Unit.SHARE: "<= 95 %",
    Unit.NUMBER: "<= 2",
    Unit.WORDS: f"== {OK}",
}


class GateError(PolicyError):
    """A gates file that cannot be read; the message names file, line, value, the nearest known one and the choices."""


class State(StrEnum):
    """How a gate stands."""

    PASSED = "passed"
    FAILED = "failed"
    UNMEASURED = "unmeasured"  # there was nothing to measure it by, or nothing to hold it against


@dataclass(frozen=True)
class Gate:
    """One condition: `metric comparison bound`.

    Attributes:
        metric: one of `policies.measures.METRICS`.
        comparison: one of `COMPARISONS`.
        bound: a number in the metric's own unit (seconds, a share of 1), a factor of the baseline, or a word.
        is_relative: whether the bound is a factor of what the baseline reached.
        written: the condition as the file has it, metric included.
    """

    metric: str
    comparison: str
    bound: float | str
    is_relative: bool
    written: str

    def limit(self, baseline: Measured | None) -> float | str | None:
        """What must be reached; None where it hangs on a baseline that has no such figure."""
        if not self.is_relative:
            return self.bound
        under = baseline.get(self.metric) if baseline is not None else None
        return None if not isinstance(under, float | int) else float(self.bound) * under

    def judge(self, measured: Measured, baseline: Measured | None = None) -> "Verdict":
        """How it stands with these measurements."""
        value, limit = measured.get(self.metric), self.limit(baseline)
        if value is None or limit is None:
            return Verdict(self, value, limit, State.UNMEASURED)
        holds = COMPARISONS[self.comparison](value, limit)
        return Verdict(self, value, limit, State.PASSED if holds else State.FAILED)


@dataclass(frozen=True)
class Verdict:
    """How one gate stands: what was seen and what had to be reached, both in the metric's own unit."""

    gate: Gate
    measured: float | str | None
    limit: float | str | None
    state: State

    @property
    def passed(self) -> bool:
        """Whether it was measured and holds."""
        return self.state is State.PASSED

    @property
    def margin(self) -> float:
        """How far from its limit, relative to it; below zero where it is broken; the worst of several is the least."""
        if self.state is State.UNMEASURED:
            return -float("inf")
        if isinstance(self.measured, str) or isinstance(self.limit, str) or self.limit is None:
            return 0.0 if self.passed else -float("inf")
        if self.measured is None:
            return -float("inf")
        apart = self.measured - self.limit
        if self.gate.comparison == "==":
            apart = -abs(apart)
        elif self.gate.comparison in ("<=", "<"):
            apart = -apart
        return apart / abs(self.limit) if self.limit else apart


@dataclass(frozen=True)
class Gates:
    """All gates of a file, in its order."""

    gates: tuple[Gate, ...]

    def check(self, measured: Measured, baseline: Measured | None = None) -> list[Verdict]:
        """Every gate against measurements (metric -> value); a metric that is missing there is unmeasured."""
        return [gate.judge(measured, baseline) for gate in self.gates]

    def as_list(self) -> list[str]:
        """The conditions as they were written; `gates_from_list` reads them."""
        return [gate.written for gate in self.gates]


def worst(verdicts: Sequence[Verdict]) -> int:
    """Place of the verdict on one gate that is furthest on the wrong side, or nearest to it."""
    return min(range(len(verdicts)), key=lambda at: (verdicts[at].passed, verdicts[at].margin))


def gates_from_toml(text: str, source: str = "gates") -> Gates:
    """The gates of a TOML text: a table `[gates]` of `metric = "<= bound"`, or a list of such bounds.

    Raises GateError, naming the place as source:line.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise GateError(f"{source}: not valid TOML: {error}") from error
    for key in document:
        if key != "gates":
            raise GateError(f"{source}:{_line(text, key)}: {_unknown('table', key, ['gates'])}")
    table = document.get("gates")
    if not isinstance(table, dict) or not table:
        raise GateError(f'{source}: has no gates: write a table [gates] with lines as p99_ttft = "<= 2 s"')
    found = []
    for metric, conditions in table.items():
        place = f"{source}:{_line(text, metric)}"
        for condition in conditions if isinstance(conditions, list) and conditions else [conditions]:
            if not isinstance(condition, str):
                raise GateError(f"{place}: {metric} must be a text such as {_example(metric)!r}, not {condition!r}")
            found.append(_gate(metric, condition, place))
    return Gates(tuple(found))


def gates_from_list(conditions: Sequence[str]) -> Gates:
    """Gates from conditions as `Gates.as_list` gives them: `metric <= bound`. Raises GateError."""
    found = []
    for written in conditions:
        metric, _, condition = str(written).strip().partition(" ")
        found.append(_gate(metric, condition, "gate"))
    return Gates(tuple(found))


def _gate(metric: str, condition: str, place: str) -> Gate:
    """One condition read. Raises GateError."""
    if metric not in METRICS:
        raise GateError(f"{place}: {_unknown('metric', metric, list(METRICS))}")
    example = f"write {metric} {_example(metric)}"
    parts = CONDITION.fullmatch(condition)
    if parts is None:
        choices = ", ".join(COMPARISONS)
        raise GateError(f"{place}: {metric}: {condition!r} has no comparison (choices: {choices}); {example}")
    comparison, bound = parts["operator"], parts["bound"]
    if comparison not in COMPARISONS:
        near = NEAR.get(comparison)
        hint = f"; did you mean {near!r}?" if near else ""
        raise GateError(
            f"{place}: {metric}: unknown comparison {comparison!r}{hint} (choices: {', '.join(COMPARISONS)})"
        )
    written = f"{metric} {comparison} {bound}"
    if METRICS[metric].unit is Unit.WORDS:
        if bound != OK or comparison != "==":
            raise GateError(f"{place}: {metric} can only be asked to be {OK}, not {condition.strip()!r}; {example}")
        return Gate(metric, comparison, OK, False, written)
    number = NUMBER.fullmatch(bound)
    if number is None:
        raise GateError(f"{place}: {metric}: {bound!r} is no number; {example}")
    value, unit = float(number["number"]), number["unit"]
    if unit == RELATIVE:
        if value <= 0:
            raise GateError(f"{place}: {metric}: a factor of the baseline must be above 0, not {bound!r}")
        return Gate(metric, comparison, value, True, written)
    spellings = SPELLINGS[METRICS[metric].unit]
    if unit not in spellings:
        known = [*filter(None, spellings), f"{RELATIVE} (a factor of the baseline)"]
        what = _unknown("unit", unit, known) if unit else f"{bound!r} has no unit (choices: {', '.join(known)})"
        raise GateError(f"{place}: {metric}: {what}; {example}")
    return Gate(metric, comparison, value * spellings[unit], False, written)


def _example(metric: str) -> str:
    return EXAMPLES[METRICS[metric].unit] if metric in METRICS else "<= 2"


def _line(text: str, key: str) -> int:
    """The line on which a key stands: TOML allows each once."""
    wanted = re.compile(rf"\s*\[?\s*(gates\s*\.\s*)?[\"']?{re.escape(key)}[\"']?\s*(=|\]|\.)")
    for number, line in enumerate(text.splitlines(), start=1):
        if wanted.match(line):
            return number
    return 1


def _unknown(what: str, value: str, choices: list[str]) -> str:
    near = get_close_matches(value, choices, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {value!r}{hint} (choices: {', '.join(choices)})"

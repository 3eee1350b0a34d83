"""Gates: conditions on metrics that must hold before a policy may serve and while it serves.

Gates are read from TOML and checked against measurements. Each metric has a unit and a place among
the results of a run.
"""

import operator
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from zlab.policies.spec import PolicyError
from zlab.traces.choices import unknown_choice

Measured = Mapping[str, float | str | None]  # metric -> value; None: nothing was measured
MARKS = ("mean", "p50", "p90", "p99")
OK = "ok"


class Unit(StrEnum):
    """The unit of a metric."""

    SECONDS = "s"
    PER_SECOND = "/s"
    SHARE = "%"
    NUMBER = ""
    WORDS = "words"  # "ok", or what is wrong


# unit -> spelling -> factor to the unit of measurements (seconds, per second, a share of 1, a
# number)
SPELLINGS: Mapping[Unit, Mapping[str, float]] = {
    Unit.SECONDS: {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0},
    Unit.PER_SECOND: {"/s": 1.0, "": 1.0},
    Unit.SHARE: {"%": 1e-2, "": 1.0},
    Unit.NUMBER: {"": 1.0},
}


@dataclass(frozen=True, slots=True)
class GateMetric:
    """A metric that a gate may name."""

    unit: Unit
    about: str
    key: str = ""  # among the results of a run (docs/METRICS.md); empty: not among them
    mark: str = ""  # of a distribution
    per: str = ""  # another result that it is divided by


def _times() -> dict[str, GateMetric]:
    named = {
        "ttft": ("ttft_s", "arrival to first token"),
        "tpot": ("tpot_s", "time per output token"),
        "e2e": ("e2e_s", "arrival to end"),
    }
    return {
        f"{mark}_{name}": GateMetric(Unit.SECONDS, f"{about}, {mark}", key, mark)
        for name, (key, about) in named.items()
        for mark in MARKS
    }


ENDED = ("requests_finished", "requests_refused", "requests_aborted", "requests_failed")
METRICS: Mapping[str, GateMetric] = {
    "tokens_per_s": GateMetric(Unit.PER_SECOND, "output tokens a second", "tokens_per_s"),
    "requests_per_s": GateMetric(Unit.PER_SECOND, "finished requests a second", "requests_per_s"),
    "pass_at_1": GateMetric(Unit.SHARE, "problems solved at the first try, by `zlab evaluate`"),
    **_times(),
    "makespan": GateMetric(Unit.SECONDS, "first arrival to last step", "makespan_s"),
    "seconds_to_90pct": GateMetric(
        Unit.SECONDS, "until 90 % of the tokens were out", "seconds_to_90pct"
    ),
    "finished": GateMetric(Unit.NUMBER, "requests that finished", "requests_finished"),
    "refused": GateMetric(Unit.NUMBER, "requests refused at the door", "requests_refused"),
    "aborted": GateMetric(Unit.NUMBER, "requests aborted", "requests_aborted"),
    "failed": GateMetric(Unit.NUMBER, "requests that failed", "requests_failed"),
    "preemptions_per_request": GateMetric(
        Unit.NUMBER, "times a request gave way, mean", "preemptions", per="requests"
    ),
    "compressions_per_request": GateMetric(
        Unit.NUMBER, "compressions a request, mean", "compressions", per="requests"
    ),
    "slot_wait_per_request": GateMetric(
        Unit.SECONDS, "wait for a query slot, mean", "slot_wait_s", per="requests"
    ),
    "recomputed_share": GateMetric(
        Unit.SHARE,
        "of prefilled tokens, those computed again",
        "recomputed_tokens",
        per="prefill_tokens",
    ),
    "compression_share": GateMetric(
        Unit.SHARE, "of the time, compressions alone on the card", "compression_share"
    ),
    "mean_occupancy": GateMetric(Unit.SHARE, "blocks in use, time mean", "occupancy_mean"),
    "max_occupancy": GateMetric(Unit.SHARE, "blocks in use, most", "occupancy_max"),
    "mean_running": GateMetric(Unit.NUMBER, "running requests, time mean", "running_mean"),
    "laws": GateMetric(Unit.WORDS, "ok, or the first law of the scheduler that was broken"),
    "engine": GateMetric(Unit.WORDS, "ok, or how the engine decided otherwise or failed a request"),
}


def measures_of(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Return every metric among a run's results (`zlab.traces.metrics.summarize`), in the units of
    `SPELLINGS`.

    A mean over requests covers every request that ended and is None when none did.
    """
    counts: dict[str, float] = {"requests": sum(summary[name] for name in ENDED)}
    found: dict[str, float | None] = {}
    for name, metric in METRICS.items():
        if not metric.key:
            continue
        value = summary[metric.key][metric.mark] if metric.mark else summary[metric.key]
        if metric.per:
            under = counts.get(metric.per, summary.get(metric.per, 0))
            value = (
                value / under
                if under
                else (0.0 if not value and metric.per != "requests" else None)
            )
        found[name] = None if value is None else float(value)
    return found


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
QUALITY = "pass_at_1"
QUALITY_GATE = f"{QUALITY} >= 0.98x"  # of what full KV solves
TABLES = ("gates", "quality", "evidence")
EXAMPLES = {
    Unit.SECONDS: "<= 2 s",
    Unit.PER_SECOND: ">= 1000 /s or >= 1.5x",
    Unit.SHARE: "<= 95 %",
    Unit.NUMBER: "<= 2",
    Unit.WORDS: f"== {OK}",
}


class GateError(PolicyError):
    """A gates file cannot be read; the message names file, line, value, the nearest known value and
    the choices.
    """


class State(StrEnum):
    """The state of a gate."""

    PASSED = "passed"
    FAILED = "failed"
    UNMEASURED = "unmeasured"  # there was no measurement, or no baseline to compare with


@dataclass(frozen=True)
class Gate:
    """One condition: `metric comparison bound`.

    Attributes:
        metric: One of `zlab.policies.gates.METRICS`.
        comparison: One of `COMPARISONS`.
        bound: A number in the metric's own unit (seconds, a share of 1), a factor of the baseline,
            or a word.
        is_relative: Whether the bound is a factor of the baseline's value.
        written: The condition as the file has it, metric included.
    """

    metric: str
    comparison: str
    bound: float | str
    is_relative: bool
    written: str

    def limit(self, baseline: Measured | None) -> float | str | None:
        """Return the value to reach; None when it depends on a baseline without such a value."""
        if not self.is_relative:
            return self.bound
        under = baseline.get(self.metric) if baseline is not None else None
        return None if not isinstance(under, float | int) else float(self.bound) * under

    def judge(self, measured: Measured, baseline: Measured | None = None) -> "GateVerdict":
        """Judge the gate with these measurements."""
        value, limit = measured.get(self.metric), self.limit(baseline)
        if value is None or limit is None:
            return GateVerdict(self, value, limit, State.UNMEASURED)
        holds = COMPARISONS[self.comparison](value, limit)
        return GateVerdict(self, value, limit, State.PASSED if holds else State.FAILED)


@dataclass(frozen=True)
class GateVerdict:
    """The state of one gate: the measured value and the limit, both in the metric's own unit."""

    gate: Gate
    measured: float | str | None
    limit: float | str | None
    state: State

    @property
    def passed(self) -> bool:
        """Whether the metric was measured and the gate holds."""
        return self.state is State.PASSED

    @property
    def margin(self) -> float:
        """Distance from the limit relative to the limit, below zero when the gate is broken."""
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
class QualityRule:
    """Whether a policy that compresses must show that answers stay right.

    Attributes:
        required: by default it must, by `QUALITY_GATE` or another gate on `pass_at_1`.
        reason: why not, where it is not required.
    """

    required: bool = True
    reason: str = ""


@dataclass(frozen=True)
class EvidenceMinimum:
    """How much evidence must rest on for its policy to be promoted.

    Attributes:
        requests: over all cases.
        relative_gates: gates that are a factor of the baseline.
        reason: why less than the defaults are enough.
    """

    requests: int = 100
    relative_gates: int = 1
    reason: str = ""

    def __post_init__(self) -> None:
        """Raise GateError on values of another type or below the least that means anything."""
        for name, least in (("requests", 1), ("relative_gates", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise GateError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if not isinstance(self.reason, str):
            raise GateError(f"reason must be a text, not {self.reason!r}")
        lowered = self.requests < type(self).requests or self.relative_gates < 1
        if lowered and not self.reason.strip():
            raise GateError(
                f"requests = {self.requests} and relative_gates = {self.relative_gates} ask for "
                f"less than {type(self).requests} and 1: write the reason as reason = "
                '"..."; the evidence shows it'
            )

    def lacks(self, num_requests: int, num_relative: int) -> list[str]:
        """Return what these numbers fall short of, in words."""
        found = []
        if num_requests < self.requests:
            found.append(f"it rests on {num_requests} requests, at least {self.requests} are asked")
        if num_relative < self.relative_gates:
            found.append(
                f"it has {num_relative} gates relative to a baseline (as >= 1.2x), at least "
                f"{self.relative_gates} is asked"
            )
        return found


@dataclass(frozen=True)
class Gates:
    """All gates of a file in its order, its rule for quality, and the least extent of evidence."""

    gates: tuple[Gate, ...]
    quality: QualityRule = QualityRule()
    minimum: EvidenceMinimum = EvidenceMinimum()

    def with_quality(self) -> "Gates":
        """These gates, with `QUALITY_GATE` where none of them is on `pass_at_1`."""
        if any(gate.metric == QUALITY for gate in self.gates):
            return self
        return replace(self, gates=(*self.gates, *gates_from_list([QUALITY_GATE]).gates))

    def check(self, measured: Measured, baseline: Measured | None = None) -> list[GateVerdict]:
        """Check every gate against measurements (metric -> value). A missing metric is
        unmeasured.
        """
        return [gate.judge(measured, baseline) for gate in self.gates]

    def as_list(self) -> list[str]:
        """Return the conditions as written; `gates_from_list` reads them."""
        return [gate.written for gate in self.gates]


def worst(verdicts: Sequence[GateVerdict]) -> int:
    """Return the index of the verdict that is furthest on the wrong side, or nearest to it."""
    return min(range(len(verdicts)), key=lambda at: (verdicts[at].passed, verdicts[at].margin))


def gates_from_toml(text: str, source: str = "gates") -> Gates:
    """Read gates from TOML: a table `[gates]` of `metric = "<= bound"`, or a list of such bounds.

    A table `[evidence]` says how much a promotion asks for (`EvidenceMinimum`).
    A table `[quality]` with `required = false` and a `reason` says that answers need not be shown
    to stay right.

    Raises GateError, which names the place as source:line.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise GateError(f"{source}: not valid TOML: {error}") from error
    for key in document:
        if key not in TABLES:
            raise GateError(f"{source}:{_line(text, key)}: {unknown_choice('table', key, TABLES)}")
    table = document.get("gates")
    if not isinstance(table, dict) or not table:
        raise GateError(
            f'{source}: has no gates: write a table [gates] with lines as p99_ttft = "<= 2 s"'
        )
    found = []
    for metric, conditions in table.items():
        place = f"{source}:{_line(text, metric)}"
        for condition in (
            conditions if isinstance(conditions, list) and conditions else [conditions]
        ):
            if not isinstance(condition, str):
                raise GateError(
                    f"{place}: {metric} must be a text such as {_example(metric)!r}, not "
                    f"{condition!r}"
                )
            found.append(_gate(metric, condition, place))
    return Gates(
        tuple(found),
        _quality_rule(document.get("quality", {}), text, source),
        _minimum(document.get("evidence", {}), text, source),
    )


def _minimum(table: Any, text: str, source: str) -> EvidenceMinimum:
    """The table `[evidence]`. Raises GateError."""
    place = f"{source}:{_line(text, 'evidence')}"
    if not isinstance(table, dict):
        raise GateError(f"{place}: evidence must be a table, not {table!r}")
    names = [one.name for one in fields(EvidenceMinimum)]
    for key in table:
        if key not in names:
            known = unknown_choice("setting of evidence", key, names)
            raise GateError(f"{source}:{_line(text, key)}: {known}")
    try:
        return EvidenceMinimum(**table)
    except GateError as error:
        raise GateError(f"{place}: evidence: {error}") from error


def _quality_rule(table: Any, text: str, source: str) -> QualityRule:
    """The table `[quality]`. Raises GateError."""
    place = f"{source}:{_line(text, 'quality')}"
    if not isinstance(table, dict):
        raise GateError(f"{place}: quality must be a table, not {table!r}")
    for key in table:
        if key not in ("required", "reason"):
            known = unknown_choice("setting of quality", key, ["required", "reason"])
            raise GateError(f"{source}:{_line(text, key)}: {known}")
    required, reason = table.get("required", True), table.get("reason", "")
    if not isinstance(required, bool) or not isinstance(reason, str):
        raise GateError(
            f"{place}: quality needs required = true or false and a text as reason, not {table!r}"
        )
    if not required and not reason.strip():
        raise GateError(
            f'{place}: quality that is not required needs a reason: reason = "why answers need '
            'not be shown to stay right"; evidence and history show it'
        )
    if required and reason:
        raise GateError(f"{place}: a reason is for required = false, not {reason!r}")
    return QualityRule(required, reason.strip())


def gates_from_list(conditions: Sequence[str]) -> Gates:
    """Read gates from conditions as `Gates.as_list` gives them. Raises GateError."""
    found = []
    for written in conditions:
        metric, _, condition = str(written).strip().partition(" ")
        found.append(_gate(metric, condition, "gate"))
    return Gates(tuple(found))


def _gate(metric: str, condition: str, place: str) -> Gate:
    """Read one condition. Raises GateError."""
    if metric not in METRICS:
        raise GateError(f"{place}: {unknown_choice('metric', metric, list(METRICS))}")
    example = f"write {metric} {_example(metric)}"
    parts = CONDITION.fullmatch(condition)
    if parts is None:
        choices = ", ".join(COMPARISONS)
        raise GateError(
            f"{place}: {metric}: {condition!r} has no comparison (choices: {choices}); {example}"
        )
    comparison, bound = parts["operator"], parts["bound"]
    if comparison not in COMPARISONS:
        near = NEAR.get(comparison)
        what = unknown_choice("comparison", comparison, COMPARISONS, near=near)
        raise GateError(f"{place}: {metric}: {what}")
    written = f"{metric} {comparison} {bound}"
    if METRICS[metric].unit is Unit.WORDS:
        if bound != OK or comparison != "==":
            raise GateError(
                f"{place}: {metric} can only be asked to be {OK}, not {condition.strip()!r}; "
                f"{example}"
            )
        return Gate(metric, comparison, OK, False, written)
    number = NUMBER.fullmatch(bound)
    if number is None:
        raise GateError(f"{place}: {metric}: {bound!r} is no number; {example}")
    value, unit = float(number["number"]), number["unit"]
    if unit == RELATIVE:
        if value <= 0:
            raise GateError(
                f"{place}: {metric}: a factor of the baseline must be above 0, not {bound!r}"
            )
        return Gate(metric, comparison, value, True, written)
    spellings = SPELLINGS[METRICS[metric].unit]
    if unit not in spellings:
        known = [*filter(None, spellings), f"{RELATIVE} (a factor of the baseline)"]
        what = (
            unknown_choice("unit", unit, known)
            if unit
            else f"{bound!r} has no unit (choices: {', '.join(known)})"
        )
        raise GateError(f"{place}: {metric}: {what}; {example}")
    return Gate(metric, comparison, value * spellings[unit], False, written)


def _example(metric: str) -> str:
    return EXAMPLES[METRICS[metric].unit] if metric in METRICS else "<= 2"


def _line(text: str, key: str) -> int:
    """Return the line of a key; TOML allows each key once."""
    wanted = re.compile(rf"\s*\[?\s*(gates\s*\.\s*)?[\"']?{re.escape(key)}[\"']?\s*(=|\]|\.)")
    for number, line in enumerate(text.splitlines(), start=1):
        if wanted.match(line):
            return number
    return 1

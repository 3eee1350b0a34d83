"""Gates: what is read, what is refused and how, and what decides over several cases."""

import re

import pytest

from tests.house_source import ROOT
from zlab.policies.gates import (
    METRICS,
    SPELLINGS,
    EvidenceMinimum,
    Gate,
    GateError,
    GateVerdict,
    State,
    Unit,
    gates_from_list,
    gates_from_toml,
    measures_of,
    worst,
)

SHIPPED = ROOT / "docs" / "examples" / "gates.toml"


def one(condition: str) -> Gate:
    """The one gate of a condition."""
    (gate,) = gates_from_list([condition]).gates
    return gate


def test_the_example_that_ships() -> None:
    gates = gates_from_toml(SHIPPED.read_text("utf-8"), "gates.toml")
    assert [gate.metric for gate in gates.gates] == [
        "requests_per_s", "p99_ttft", "preemptions_per_request", "refused", "laws",
    ]  # fmt: skip
    assert [gate.metric for gate in gates.gates if gate.is_relative] == ["requests_per_s"]
    assert gates_from_list(gates.as_list()) == gates


@pytest.mark.parametrize(
    ("condition", "bound"),
    [
        ("p99_ttft <= 2 s", 2.0),
        ("p99_ttft <= 250ms", 0.25),
        ("p50_tpot < 1_500 us", 0.0015),
        ("makespan <= 1.5 min", 90.0),
        ("tokens_per_s >= 1e3", 1000.0),
        ("tokens_per_s > 900 /s", 900.0),
        ("max_occupancy <= 95 %", 0.95),
        ("max_occupancy <= 0.95", 0.95),
        ("refused == 0", 0.0),
        ("tokens_per_s >= 1.5x", 1.5),
        ("laws == ok", "ok"),
    ],
)
def test_bounds_in_the_metrics_own_unit(condition: str, bound: float | str) -> None:
    gate = one(condition)
    assert gate.bound == (pytest.approx(bound) if isinstance(bound, float) else bound)
    assert gate.is_relative == condition.endswith("x")


def test_a_metric_may_have_several_bounds() -> None:
    gates = gates_from_toml('[gates]\ntokens_per_s = [">= 1.5x", ">= 1000"]\n')
    assert gates.as_list() == ["tokens_per_s >= 1.5x", "tokens_per_s >= 1000"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            'token_per_s = ">= 1"',
            "unknown metric 'token_per_s'; did you mean 'tokens_per_s'? (choices: tokens_per_s,",
        ),
        ('p99_tfft = "<= 2 s"', "did you mean 'p99_ttft'?"),
        (
            'p99_ttft = "=< 2 s"',
            "unknown comparison '=<'; did you mean '<='? (choices: >=, <=, >, <, ==)",
        ),
        ('refused = "= 0"', "unknown comparison '='; did you mean '=='?"),
        ('refused = "!= 0"', "unknown comparison '!='"),
        ('p99_ttft = "2 s"', "'2 s' has no comparison (choices: >=,"),
        (
            'p99_ttft = "<= 2"',
            "'2' has no unit (choices: s, ms, us, min, x (a factor of the baseline))",
        ),
        ('p99_ttft = "<= 2 sec"', "unknown unit 'sec'; did you mean 's'?"),
        ('p99_ttft = "<= 5 /s"', "unknown unit '/s'"),
        ('tokens_per_s = ">= 2 s"', "unknown unit 's'; did you mean '/s'?"),
        ('refused = "<= 5 %"', "unknown unit '%'"),
        ('refused = "<= many"', "refused: 'many' is no number; write refused <= 2"),
        ('refused = "<= "', "'' is no number"),
        ('tokens_per_s = ">= 0x"', "a factor of the baseline must be above 0, not '0x'"),
        ('laws = "== fine"', "laws can only be asked to be ok, not '== fine'; write laws == ok"),
        ('laws = ">= ok"', "laws can only be asked to be ok"),
        ("refused = 0", "refused must be a text such as '<= 2', not 0"),
        ("refused = []", "refused must be a text such as '<= 2', not []"),
    ],
)
def test_what_makes_no_sense_is_named_with_its_line(line: str, words: str) -> None:
    with pytest.raises(GateError) as caught:
        gates_from_toml(f"# gates\n\n[gates]\n{line}\n", "mine.toml")
    assert str(caught.value).startswith("mine.toml:4: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gates]\n", "has no gates"),
        ("", "has no gates"),
        ("gates = 3\n", "has no gates"),
        (
            '[gates]\nrefused = "== 0"\n[gate]\n',
            "mine.toml:3: unknown table 'gate'; did you mean 'gates'?",
        ),
        ('[gates]\nrefused = "== 0"\nrefused = "== 1"\n', "not valid TOML"),
        ("[gates\n", "not valid TOML"),
    ],
)
def test_a_file_that_is_none(text: str, words: str) -> None:
    with pytest.raises(GateError, match=r"^mine\.toml") as caught:
        gates_from_toml(text, "mine.toml")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("condition", "measured", "baseline", "state"),
    [
        ("tokens_per_s >= 1.5x", 1500.0, 1000.0, State.PASSED),
        ("tokens_per_s >= 1.5x", 1499.9, 1000.0, State.FAILED),
        ("tokens_per_s >= 1.5x", 1500.0, None, State.UNMEASURED),
        ("tokens_per_s >= 1.5x", None, 1000.0, State.UNMEASURED),
        ("preemptions_per_request <= 1.1x", 0.0, 0.0, State.PASSED),
        ("preemptions_per_request <= 1.1x", 0.1, 0.0, State.FAILED),
        ("p99_ttft <= 2 s", 2.0, None, State.PASSED),
        ("p99_ttft < 2 s", 2.0, None, State.FAILED),
        ("refused == 0", 0.0, None, State.PASSED),
        ("refused == 0", 1.0, None, State.FAILED),
    ],
)
def test_how_a_gate_stands(
    condition: str, measured: float | None, baseline: float | None, state: State
) -> None:
    gate = one(condition)
    verdict = gate.judge(
        {gate.metric: measured}, None if baseline is None else {gate.metric: baseline}
    )
    assert verdict.state is state
    assert verdict.passed == (state is State.PASSED)
    assert gate.judge({}).state is State.UNMEASURED


def test_words() -> None:
    gate = one("laws == ok")
    assert gate.judge({"laws": "ok"}).passed
    assert gate.judge({"laws": "block 3 has two owners"}).state is State.FAILED
    assert gate.judge({"laws": None}).state is State.UNMEASURED


def verdicts(condition: str, *pairs: tuple[float | None, float]) -> list[GateVerdict]:
    gate = one(condition)
    return [gate.judge({gate.metric: value}, {gate.metric: under}) for value, under in pairs]


def test_the_worst_case_decides() -> None:
    assert (
        worst(verdicts("tokens_per_s >= 1.5x", (3000.0, 1000.0), (160.0, 100.0), (9000.0, 2000.0)))
        == 1
    )
    assert worst(verdicts("p99_ttft <= 2 s", (1.0, 0.0), (1.9, 0.0), (1.5, 0.0))) == 1
    assert worst(verdicts("refused == 0", (0.0, 0.0), (3.0, 0.0), (1.0, 0.0))) == 1
    assert (
        worst(verdicts("tokens_per_s >= 1.5x", (10.0, 1000.0), (None, 100.0), (9000.0, 2000.0)))
        == 1
    )
    assert worst(verdicts("refused == 0", (0.0, 0.0), (0.0, 0.0))) == 0


SUMMARY = {
    "requests_finished": 8,
    "requests_refused": 1,
    "requests_aborted": 1,
    "requests_failed": 0,
    "preemptions": 25,
    "compressions": 5,
    "slot_wait_s": 2.5,
    "recomputed_tokens": 30,
    "prefill_tokens": 120,
    "tokens_per_s": 99.5,
    "requests_per_s": 2.0,
    "makespan_s": 4.0,
    "seconds_to_90pct": None,
    "compression_share": 0.01,
    "occupancy_mean": 0.5,
    "occupancy_max": 1.0,
    "running_mean": 3.5,
    **{
        key: {"mean": 1.0, "p50": 0.5, "p90": 2.0, "p99": None}
        for key in ("ttft_s", "tpot_s", "e2e_s")
    },
}


def test_metrics_from_the_figures_of_a_run() -> None:
    found = measures_of(SUMMARY)
    assert set(found) == {name for name, metric in METRICS.items() if metric.key}
    assert found["preemptions_per_request"] == 2.5
    assert found["slot_wait_per_request"] == 0.25
    assert found["recomputed_share"] == 0.25
    assert found["refused"] == 1.0
    assert found["p50_ttft"] == 0.5
    assert found["p99_ttft"] is None
    assert found["seconds_to_90pct"] is None
    empty = measures_of(
        SUMMARY | dict.fromkeys((key for key in SUMMARY if key.startswith("requests_")), 0)
    )
    assert empty["preemptions_per_request"] is None
    assert (
        measures_of(SUMMARY | {"recomputed_tokens": 0, "prefill_tokens": 0})["recomputed_share"]
        == 0.0
    )


def test_every_unit_of_numbers_has_its_own_spelling() -> None:
    assert set(SPELLINGS) == set(Unit) - {Unit.WORDS}
    for unit, spellings in SPELLINGS.items():
        own = 1e-2 if unit is Unit.SHARE else 1.0
        assert spellings[unit.value] == own


def test_the_line_is_found_in_a_flat_file() -> None:
    with pytest.raises(GateError, match=r"^mine\.toml:2: p99_ttft: '1' has no unit"):
        gates_from_toml('gates.refused = "== 0"\ngates.p99_ttft = "<= 1"\n', "mine.toml")


def test_quality_is_required_unless_the_file_has_a_reason() -> None:
    plain = gates_from_toml('[gates]\nrefused = "== 0"\n')
    assert (plain.quality.required, plain.quality.reason) == (True, "")
    waived = gates_from_toml(
        '[gates]\nrefused = "== 0"\n[quality]\nrequired = false\nreason = " a toy "\n'
    )
    assert (waived.quality.required, waived.quality.reason) == (False, "a toy")
    assert plain.with_quality().as_list() == ["refused == 0", "pass_at_1 >= 0.98x"]
    own = gates_from_toml('[gates]\npass_at_1 = ">= 90 %"\n')
    assert own.with_quality().as_list() == ["pass_at_1 >= 90 %"]
    verdict = own.check({"pass_at_1": 0.91})[0]
    assert (verdict.passed, verdict.limit) == (True, 0.9)
    assert not own.check({"pass_at_1": 0.89})[0].passed


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("required = false", ":3: quality that is not required needs a reason"),
        ('required = false\nreason = " "', "needs a reason"),
        ('reason = "why"', "a reason is for required = false, not 'why'"),
        ('required = "no"', "quality needs required = true or false"),
        ("requierd = false", ":4: unknown setting of quality 'requierd'; did you mean 'required'?"),
    ],
)
def test_a_wrong_table_of_quality_is_named(table: str, words: str) -> None:
    text = f'[gates]\nrefused = "== 0"\n[quality]\n{table}\n'
    with pytest.raises(GateError, match=re.escape(words)):
        gates_from_toml(text, "mine.toml")


def test_the_file_says_how_much_evidence_a_promotion_asks_for() -> None:
    plain = gates_from_toml('[gates]\nrefused = "== 0"\n').minimum
    assert (plain.requests, plain.relative_gates, plain.reason) == (100, 1, "")
    own = '[gates]\nrefused = "== 0"\n[evidence]\nrequests = 8\nreason = "a story"\n'
    assert gates_from_toml(own).minimum == EvidenceMinimum(8, 1, "a story")
    assert plain.lacks(100, 1) == []
    assert len(plain.lacks(99, 0)) == 2


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("requests = 99", ":3: evidence: requests = 99 and relative_gates = 1 ask for less"),
        ('relative_gates = 0\nreason = " "', "write the reason"),
        ("requests = true", "requests must be a whole number of at least 1, not True"),
        ("requests = 0", "at least 1, not 0"),
        ("reason = 1", "reason must be a text"),
        ("request = 9", ":4: unknown setting of evidence 'request'; did you mean 'requests'?"),
    ],
)
def test_a_wrong_table_of_evidence_is_named(table: str, words: str) -> None:
    text = f'[gates]\nrefused = "== 0"\n[evidence]\n{table}\n'
    with pytest.raises(GateError, match=re.escape(words)):
        gates_from_toml(text, "mine.toml")

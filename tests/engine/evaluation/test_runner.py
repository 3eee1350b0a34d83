"""Plans, the journal, going on after an interruption; the answers come from a stand-in."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from zlab.engine.errors import EngineError
from zlab.engine.evaluation.dataset import CheckerError, Dataset, Example, read_datasets
from zlab.engine.evaluation.results import EvaluatedColumn, ModelOutput
from zlab.engine.evaluation.runner import (
    Evaluation,
    EvaluationError,
    KeptTokens,
    Plan,
    Question,
    RunError,
    with_budget,
)


class StandIn:
    """Right at full KV, right at 128 tokens for even problems; can be stopped after some."""

    def __init__(self, stop_after: int | None = None, error: BaseException | None = None) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.checked: list[str] = []
        self.seeds: dict[tuple[str, int, int], int] = {}
        self._stop_after, self._error = stop_after, error

    def describe(self) -> Mapping[str, Any]:
        return {"model": "stand-in"}

    def check(self, columns: Sequence[EvaluatedColumn], examples: Sequence[Example]) -> None:
        self.checked += [column.name for column in columns]
        for one in columns:
            if one.budget is not None and one.budget < 32:
                raise EngineError(f"{one.name}: too small")

    def answer(
        self, column: EvaluatedColumn, questions: Sequence[Question]
    ) -> Iterator[ModelOutput]:
        for question in reversed(questions):
            key = (column.name, question.problem, question.sample)
            if self._stop_after is not None and len(self.asked) == self._stop_after:
                raise self._error or KeyboardInterrupt
            self.asked.append(key)
            self.seeds[key] = question.seed
            right = column.budget is None or question.problem % 2 == 0
            text = question.example.answer if right else "no"
            yield ModelOutput(question.problem, question.sample, str(text), 100, "stop", 1)


@pytest.fixture
def data(tmp_path: Path) -> list[Dataset]:
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"prompt": f"{n}?", "answer": n}) for n in range(6)]
    path.write_text("\n".join(rows) + "\n")
    return read_datasets([str(path)], None, None)


def plan(**changes: Any) -> Plan:
    given: dict[str, Any] = {
        "baseline": "full-kv",
        "policies": ("hybrid:window=8",),
        "budgets": (KeptTokens.parse("128"),),
        "temperatures": (0.0,),
        "samples": 3,
        "top_p": 1.0,
        "seed": 0,
        "max_tokens": 200,
        "block_size": 16,
    }
    return Plan(**{**given, **changes})


def names(asked: list[tuple[str, int, int]]) -> list[str]:
    return list(dict.fromkeys(name for name, _, _ in asked))


@pytest.mark.parametrize(
    ("text", "tokens", "ratio"),
    [("512", 512, None), ("1/4", None, 0.25), ("0.5", None, 0.5), ("25%", None, 0.25)],
)
def test_budgets_are_tokens_or_shares(text: str, tokens: int | None, ratio: float | None) -> None:
    budget = KeptTokens.parse(text)
    assert budget.tokens == tokens
    assert (None if budget.ratio is None else float(budget.ratio)) == ratio


@pytest.mark.parametrize("text", ["", "none", "0", "-5", "5/4", "150%", "1/0", "1.5"])
def test_what_is_no_budget_is_refused_with_the_value(text: str) -> None:
    with pytest.raises(EvaluationError, match=re.escape(f"budget {text!r} must be")):
        KeptTokens.parse(text)


def test_a_budget_replaces_the_one_that_a_policy_names() -> None:
    assert with_budget("hybrid:tokens=64,window=8", 128) == "hybrid:window=8,budget.tokens=128"
    assert with_budget("hybrid", 128) == "hybrid:budget.tokens=128"
    assert with_budget("hybrid:blocks=4", 128) == "hybrid:budget.blocks=0,budget.tokens=128"


def test_columns_are_policies_by_budgets_by_temperatures_and_the_baseline_comes_first(
    data: list[Dataset], tmp_path: Path
) -> None:
    backend = StandIn()
    wanted = plan(
        policies=("hybrid:window=8", "constrained:window=8"),
        budgets=(KeptTokens.parse("128"), KeptTokens.parse("1/2")),
        temperatures=(0.0, 0.7),
        samples=2,
    )
    found = Evaluation(wanted, data, backend, tmp_path / "out").run()
    columns = found["columns"]
    assert [one["name"] for one in columns[:2]] == ["full-kv @ 0", "full-kv @ 0.7"]
    assert len(columns) == 2 + 2 * 2 * 2
    assert {(one["budget_tokens"], one["budget_ratio"]) for one in columns[2:]} == {
        (128, None),
        (64, 0.5),  # half of the baseline's 100 tokens, in whole blocks of 16
    }
    assert [one["outputs"] for one in columns[:2]] == [6, 12]
    sampled = next(one for one in columns[2:] if one["temperature"] == 0.7)
    assert sampled["of_baseline"]["baseline"] == "full-kv @ 0.7"
    assert sampled["pass_at_1"] == 0.5
    assert sampled["scorer"] == "attention+global+lightning"


def test_every_column_draws_with_the_same_seeds(data: list[Dataset], tmp_path: Path) -> None:
    backend = StandIn()
    Evaluation(plan(temperatures=(0.7,)), data, backend, tmp_path / "out").run()
    by_column: dict[str, dict[tuple[int, int], int]] = {}
    for (name, problem, sample), seed in backend.seeds.items():
        by_column.setdefault(name, {})[problem, sample] = seed
    first, second = by_column.values()
    assert first == second
    assert len(set(first.values())) == 18


def test_an_interrupted_run_goes_on_where_it_stopped(data: list[Dataset], tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = StandIn(stop_after=8)
    with pytest.raises(KeyboardInterrupt):
        Evaluation(plan(), data, before, out).run()
    after = StandIn()
    seen: list[int] = []
    rest = Evaluation(plan(), data, after, out, lambda done, name: seen.append(done))
    found = rest.run()
    assert not set(before.asked) & set(after.asked)
    assert len(before.asked) + len(after.asked) == 12 == rest.num_outputs == seen[-1]
    assert seen[0] == 8
    assert found["columns"][1]["pass_at_1"] == 0.5
    again = StandIn()
    assert Evaluation(plan(), data, again, out).run()["columns"] == found["columns"]
    assert again.asked == []


def test_a_line_that_a_crash_cut_off_is_evaluated_again(
    data: list[Dataset], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    Evaluation(plan(), data, StandIn(), out).run()
    journal = out / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    outputs = [line for line in lines[1:] if b'"output"' in line]
    journal.write_bytes(b"".join([lines[0], *outputs[:-1], outputs[-1][:40]]))
    after = StandIn()
    Evaluation(plan(), data, after, out).run()
    assert len(after.asked) == 1


def test_a_damaged_line_is_an_error_that_names_it(data: list[Dataset], tmp_path: Path) -> None:
    out = tmp_path / "out"
    Evaluation(plan(), data, StandIn(), out).run()
    journal = out / "journal.jsonl"
    lines = journal.read_text().splitlines()
    lines[3] = lines[3].replace('"output"', '"outptu"')
    journal.write_text("\n".join(lines) + "\n")
    with pytest.raises(EvaluationError, match=r"journal.jsonl:4: cannot be read"):
        Evaluation(plan(), data, StandIn(), out)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 5}, "seed was 0 and is 5"),
        ({"budgets": (KeptTokens.parse("256"),)}, "budgets was ['128'] and is ['256']"),
        ({"policies": ("hybrid",)}, "policies was ['hybrid:window=8'] and is ['hybrid']"),
    ],
)
def test_other_settings_are_refused(
    data: list[Dataset], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    out = tmp_path / "out"
    Evaluation(plan(), data, StandIn(), out).run()
    with pytest.raises(EvaluationError, match=re.escape(words)):
        Evaluation(plan(**changes), data, StandIn(), out)


def test_other_rows_are_refused_and_a_full_folder_is_left_alone(
    data: list[Dataset], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    Evaluation(plan(), data, StandIn(), out).run()
    fewer = read_datasets([data[0].source], None, 5)
    with pytest.raises(EvaluationError, match="data was"):
        Evaluation(plan(), fewer, StandIn(), out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(EvaluationError, match="is not empty and holds no journal"):
        Evaluation(plan(), data, StandIn(), tmp_path / "full")


def test_without_a_folder_the_settings_name_one(
    data: list[Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = Evaluation(plan(), data, StandIn())
    first.run()
    assert Evaluation(plan(), data, StandIn()).folder == first.folder
    assert Evaluation(plan(seed=1), data, StandIn()).folder != first.folder


def test_a_checker_that_raises_loses_nothing(data: list[Dataset], tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def check(output, row):\n    return int(output) == row['answer']\n")
    out = tmp_path / "out"
    checked = read_datasets([data[0].source], f"{own}:check", None)
    backend = StandIn()
    words = r"rows.jsonl:\d: checker .*own.py:check raised ValueError.*'no' \(and 2 more\).*kept in"
    with pytest.raises(CheckerError, match=words):
        Evaluation(plan(), checked, backend, out).run()
    assert len(backend.asked) == 12
    own.write_text("def check(output, row):\n    return output == str(row['answer'])\n")
    after = StandIn()
    checked = read_datasets([data[0].source], f"{own}:check", None)
    found = Evaluation(plan(), checked, after, out).run()
    assert after.asked == []
    assert found["columns"][1]["right"] == 3


def test_a_failed_request_keeps_what_was_complete(data: list[Dataset], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RunError, match="broke"):
        Evaluation(plan(), data, StandIn(9, RunError("rows.jsonl:3: broke")), out).run()
    after = StandIn()
    Evaluation(plan(), data, after, out).run()
    assert len(after.asked) == 3


def test_time_of_sessions_adds_up(data: list[Dataset], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        Evaluation(plan(), data, StandIn(stop_after=4), out).run()
    found = Evaluation(plan(), data, StandIn(), out).run()["columns"][0]
    rows = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    times = [row for row in rows if row.get("column") == "full-kv" and "wall_s" in row]
    assert [row["tokens"] for row in times] == [400, 200]
    assert found["wall_s"] == pytest.approx(sum(row["wall_s"] for row in times))
    assert found["tokens_per_s"] == pytest.approx(600 / found["wall_s"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policies": ("full-kv:name=x",)}, "unknown policy setting"),
        ({"policies": ("nano-vllm",)}, "budgets 128 need a policy with a budget of tokens"),
        ({"policies": ()}, "not full-kv"),
        ({"policies": ("hybrid", "hybrid")}, "'hybrid:budget.tokens=128' would be evaluated twice"),
        (
            {"budgets": (KeptTokens.parse("100"),)},
            "budget 100 must be a multiple of the block size 16",
        ),
        ({"budgets": (KeptTokens.parse("16"),)}, "too small"),
        ({"servers": ("http://a",)}, "budgets 128 are for policies, not for servers"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_run_is_refused_before_the_first_output(
    data: list[Dataset], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    backend = StandIn()
    with pytest.raises(ValueError, match=re.escape(words)):
        Evaluation(plan(**changes), data, backend, tmp_path / "out")
    assert backend.asked == []


def test_a_ratio_that_turns_out_too_small_keeps_the_baseline(
    data: list[Dataset], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    wanted = plan(budgets=(KeptTokens.parse("1/10"),))
    with pytest.raises(EngineError, match="too small"):
        Evaluation(wanted, data, StandIn(), out).run()
    after = StandIn()
    with pytest.raises(EngineError, match="too small"):
        Evaluation(wanted, data, after, out).run()
    assert after.asked == []

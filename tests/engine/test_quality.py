"""The quality benchmark measures what it says: full KV's losses are the model's own, and its
figures are theirs.
"""

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import quality
from benchmarks.quality import (
    QUESTIONS,
    SUBJECTS,
    Judged,
    Mean,
    Text,
    compare,
    first_places,
    judge,
    main,
    mean_over_texts,
    table_of,
)
from tests.engine.engine_cases import SMALL, prompt, save_tiny
from zlab.engine.compression import SCORERS
from zlab.engine.engine import EngineSettings
from zlab.engine.model.loader import LoadedModel, load_model
from zlab.engine.tokenizer import Tokenizer

TEXTS = [Text(prompt(n, 5 + n), prompt(n + 10, 60 - 2 * n)) for n in range(3)]
PROMPT_LENGTHS = [len(text.prompt_ids) for text in TEXTS]
ROOMY = replace(SMALL, num_blocks=100, max_model_len=200)


class ByWord(Tokenizer):
    """Chats with a start token and one token a word."""

    def chat(self, messages: Sequence[Mapping[str, Any]], **template_values: Any) -> list[int]:
        return [1, *(5 + sum(map(ord, word)) % 90 for word in messages[0]["content"].split())]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, token_ids))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tiny model that can be asked questions: its own has no tokenizer."""
    save_tiny("qwen3", tmp_path / "model", seed=3)

    def loaded(name: str, **more: Any) -> LoadedModel:
        return replace(load_model(name, **more), tokenizer=ByWord(None), eos_token_ids=(2,))

    monkeypatch.setattr(quality, "load_model", loaded)
    return str(tmp_path / "model")


def words(folder: str, **changes: Any) -> list[str]:
    """A command line of a small run on the CPU."""
    given = {
        "model": folder,
        "texts": 3,
        "length": 60,
        "budgets": 24,
        "block-size": 8,
        "window": 4,
        "device": "cpu",
    }
    return [
        word
        for name, value in (given | changes).items()
        for word in (f"--{name}", *str(value).split())
    ]


def test_losses_are_those_of_transformers(tmp_path: Path) -> None:
    oracle = save_tiny("qwen3", tmp_path, seed=3)
    loaded = load_model(str(tmp_path))
    full = judge(replace(ROOMY, policy="full-kv"), loaded, TEXTS)
    assert full.compressions == 0
    for text, losses, most in zip(TEXTS, full.losses, full.most_probable, strict=True):
        ids = torch.tensor([text.prompt_ids + text.token_ids])
        with torch.no_grad():
            logits = oracle(ids).logits[0, len(text.prompt_ids) - 1 : -1]
        wanted = torch.nn.functional.cross_entropy(
            logits, ids[0, len(text.prompt_ids) :], reduction="none"
        )
        torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(most, logits.argmax(dim=-1))
    budgets = {}
    for tokens in (24, 72):
        judged = judge(replace(ROOMY, policy=f"hybrid:tokens={tokens},window=4"), loaded, TEXTS)
        assert (judged.compressions > 0) == (tokens == 24)
        budgets[tokens] = judged
    first = first_places(PROMPT_LENGTHS, 24, SMALL.block_size)
    for text, start, one, other in zip(TEXTS, first, full.losses, budgets[24].losses, strict=True):
        assert len(text.prompt_ids) + start == 33
        torch.testing.assert_close(one[:start], other[:start], rtol=1e-4, atol=1e-4)
        assert abs(float(one[start] - other[start])) > 1e-3, (
            "from here on it reads a compressed cache"
        )
    same = compare(full, budgets[72], first)
    assert same["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert same["greedy_agreement"] == 1.0
    small = compare(full, budgets[24], first)
    assert small["greedy_agreement"] < 1.0
    assert small["places"] == sum(60 - 2 * n - start for n, start in enumerate(first))


def test_judging_gives_up_when_its_time_is_over(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path, seed=3)
    with pytest.raises(TimeoutError, match="3 texts under hybrid"):
        judge(
            replace(ROOMY, policy="hybrid:tokens=24,window=4"),
            load_model(str(tmp_path)),
            TEXTS,
            time.perf_counter(),
        )


def test_figures_of_a_case_by_hand() -> None:
    full = Judged(
        [torch.tensor([9.0, 1.0, 1.0]), torch.tensor([9.0, 2.0])],
        [torch.tensor([0, 1, 2]), torch.zeros(2)],
    )
    other = Judged(
        [torch.tensor([0.0, 2.0, 3.0]), torch.tensor([0.0, 2.0])],
        [torch.tensor([5, 1, 7]), torch.zeros(2)],
    )
    found = compare(full, other, [1, 1])  # losses 1, 1, 2 become 2, 3, 2: one more on the mean
    assert found["places"] == 3
    assert found["perplexity_full"] == pytest.approx(math.exp(4 / 3))
    assert found["perplexity"] == pytest.approx(math.exp(7 / 3))
    assert found["ratio"] == pytest.approx(math.e)
    assert found["greedy_agreement"] == pytest.approx(2 / 3)
    # Texts are off by 3 - 2 and 0 - 1 from their share of the mean: sqrt(2 / 1 * (1 + 1)) / 3.
    assert found["ratio_error"] == pytest.approx(math.e * 2 / 3)
    assert found["by_text"] == {
        "places": [2, 1],
        "loss_full": [1.0, 2.0],
        "loss": [2.5, 2.0],
        "equal": [1, 1],
    }


def test_the_error_of_texts_of_one_length_is_that_of_their_mean() -> None:
    means = torch.rand(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = mean_over_texts(means * 50, torch.full((12,), 50))
    assert found.value == pytest.approx(float(means.mean()))
    assert found.error == pytest.approx(float(means.std()) / math.sqrt(12))
    assert mean_over_texts(torch.tensor([3.0]), torch.tensor([2])) == Mean(1.5, None)


def test_every_scorer_is_asked_about_and_all_questions_differ() -> None:
    assert {scorer.name for scorer in SCORERS} < set(SUBJECTS)
    assert len(set(QUESTIONS)) == len(QUESTIONS)


def test_a_run_leaves_a_file_and_prints_its_table(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    main(words(folder, scorers="random attention recent,sink=4", out=out, budgets="24 32"))
    shown = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert [(row["budget"], row["scorer"]) for row in found["rows"]] == [
        (budget, scorer)
        for budget in (24, 32)
        for scorer in ("random", "attention", "recent,sink=4")
    ]
    assert found["left_out"] == []
    assert [len(found["texts"][name]) for name in ("prompt_tokens", "tokens_before_end")] == [3, 3]
    for row in found["rows"]:
        assert row["compressions"] > 0
        assert row["ratio"] != 1.0
    assert len({row["ratio"] for row in found["rows"]}) == 6, (
        "a setting of the scorer changes nothing"
    )
    assert list(tmp_path.glob("*.part")) == []
    main(["--table", str(out)])
    again = capsys.readouterr().out
    assert shown.endswith(again)
    lines = again.splitlines()
    assert lines[0].startswith(found["date"])
    assert len(lines) == 4 + 6
    assert {line.count("|") for line in lines[2:]} == {lines[2].count("|")}
    first, second = (found["rows"][place]["by_text"]["loss"] for place in (0, 1))
    better = sum(own < control for own, control in zip(second, first, strict=True))
    assert f"| {better} of 3 |" in lines[5]
    assert "| - |" in lines[4], "random is not compared with itself"


def test_a_run_short_of_time_leaves_what_it_has_measured(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judgings = []

    def counted(
        settings: EngineSettings, loaded: LoadedModel, texts: Sequence[Text], stop_at_s: float
    ) -> Judged:
        judgings.append(settings.policy)
        if len(judgings) > 2:
            raise TimeoutError("over")
        return judge(settings, loaded, texts, math.inf)

    monkeypatch.setattr(quality, "judge", counted)
    out = tmp_path / "found.json"
    main(words(folder, scorers="recent random attention", out=out, minutes=60))
    found = json.loads(out.read_text())
    assert [row["scorer"] for row in found["rows"]] == ["recent"]
    assert found["left_out"] == [{"budget": 24, "scorer": name} for name in ("random", "attention")]
    assert len(judgings) == 3
    assert (
        "not measured, the time was over: random at 24, attention at 24." in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scorers": "atention"}, "did you mean 'attention'"),
        ({"scorers": "recent,snk=4"}, "did you mean 'sink'"),
        ({"window": 9}, "window of 9 .* block of 8"),
        ({"budgets": 0}, "0"),
        ({"budgets": "24 64"}, "60 tokens .* too short for a budget of 64"),
        ({"dtype": "float31"}, "float31.*float32"),
        ({"device": "tpu"}, "tpu.*cpu"),
        ({"texts": 99}, "--texts 99"),
        ({"minutes": 0}, "--minutes 0"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_runs(
    folder: str,
    changes: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(quality, "write_texts", None)
    with pytest.raises(SystemExit) as error:
        main(words(folder, **changes))
    shown = f"{error.value} {capsys.readouterr().err}"
    assert re.search(said, shown), shown


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"rows": []}')
    with pytest.raises(quality.ResultError, match="no result of this benchmark"):
        table_of(other)
    with pytest.raises(SystemExit, match=r"cannot read .*missing\.json"):
        main(["--table", str(tmp_path / "missing.json")])

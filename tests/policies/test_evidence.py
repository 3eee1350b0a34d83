"""Evidence: named by its content, read back, and refused where anything in it was changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.house_source import ROOT
from tests.policies.records import HERE, record, stored
from zlab.policies.core.request import Request
from zlab.policies.evidence import (
    Case,
    Evidence,
    EvidenceError,
    Target,
    evidence_from_dict,
    make_evidence,
    passes,
    read_evidence,
    what_is_missing,
    write_evidence,
)
from zlab.policies.gates import Gates, gates_from_list
from zlab.policies.snapshot import store_policy, stored_from_dict
from zlab.policies.spec import PolicyError, load_policy, policy_digest

OWN = ROOT / "docs" / "examples" / "fewest_left.py"


def test_a_record_is_named_by_its_content(tmp_path: Path) -> None:
    first = record()
    assert first.passed
    assert first.id == record().id
    assert first.id != record(speed=2001.0).id
    path = tmp_path / "evidence.json"
    write_evidence(first, path)
    again = read_evidence(path)
    assert again == first
    assert again.id == json.loads(path.read_text("utf-8"))["id"]
    assert [path.name for path in tmp_path.iterdir()] == ["evidence.json"]


def test_the_worst_case_decides() -> None:
    assert record(speed=1500.0).passed
    slow = record(speed=1499.5)  # the second case reaches 1,500.5
    assert not slow.passed
    speed = slow.judged[0]
    assert not speed.verdict.passed
    assert speed.case.seed == 0
    assert (speed.verdict.measured, speed.verdict.limit) == (1499.5, 1500.0)


def test_a_run_that_broke_off_never_passes() -> None:
    gates = gates_from_list(["refused == 0"])
    whole = Case("w", None, "0" * 64, {"refused": 0.0})
    assert passes(gates, [whole])
    assert not passes(
        gates, [whole, Case("x", None, "0" * 64, {"refused": 0.0}, error="ValueError: no")]
    )
    assert not passes(gates, [])
    assert not passes(Gates(()), [whole])


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """A passing record's document after a change to it."""
    document: dict[str, Any] = json.loads(json.dumps(record().as_dict()))
    change(document)
    return document


TAMPERED: tuple[Callable[[dict[str, Any]], object], ...] = (
    lambda d: d["cases"][1]["measured"].update(tokens_per_s=9000.0),
    lambda d: d["cases"].pop(),
    lambda d: d["policy"].update(toml=d["policy"]["toml"].replace("2048", "1024")),
    lambda d: d["target"].update(gpu="h100"),
    lambda d: d.update(code="0" * 64),
    lambda d: d.update(gates=["refused == 0"]),
    lambda d: d.update(extra=1),
    lambda d: d.pop("setup"),
    lambda d: d.update(id="0" * 64),
)


@pytest.mark.parametrize("change", TAMPERED)
def test_whatever_is_changed_is_noticed(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(EvidenceError, match="was changed after it was made"):
        evidence_from_dict(changed(change))


def forged(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The same without its id: as somebody would leave it who can compute one."""
    document = changed(change)
    document.pop("id")
    return document


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda d: d.update(passed=False),
            "says passed = False, which its own figures do not bear out",
        ),
        (
            lambda d: d["cases"][0]["measured"].update(tokens_per_s=1.0),
            "says passed = True, which its own figures",
        ),
        (
            lambda d: d["cases"][0].update(error="ValueError"),
            "says passed = True, which its own figures",
        ),
        (lambda d: d["policy"].update(digest="0" * 64), "is not what it was"),
        (
            lambda d: d["policy"].update(toml=d["policy"]["toml"].replace("2048", "1024")),
            "is not what it was",
        ),
        (lambda d: d["policy"].update(toml="="), "not valid TOML"),
        (lambda d: d["policy"].pop("toml"), "a stored policy has texts name, toml and digest"),
        (lambda d: d.update(policy=3), "a stored policy is an object"),
        (lambda d: d.update(gates=["token_per_s >= 1"]), "did you mean 'tokens_per_s'?"),
        (lambda d: d.pop("cases"), "lacks cases"),
        (lambda d: d["cases"][0].pop("measured"), "'measured'"),
        (
            lambda d: d.update(format="zlab-evidence/9"),
            "its format is 'zlab-evidence/9', not 'zlab-evidence/1'",
        ),
    ],
)
def test_what_contradicts_itself_is_no_evidence(
    change: Callable[[dict[str, Any]], object], words: str
) -> None:
    with pytest.raises(EvidenceError) as caught:
        evidence_from_dict(forged(change), "mine.json")
    assert str(caught.value).startswith("mine.json: ")
    assert words in str(caught.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    for text, words in (
        ("[1]", "its format is None"),
        ("{", "not valid JSON"),
        (json.dumps(forged(lambda _: None)), "has no id"),
        (json.dumps(record().as_dict())[:-1] + ', "x": NaN}', "no number for"),
    ):
        path.write_text(text, "utf-8")
        with pytest.raises(EvidenceError, match=words):
            read_evidence(path)


def test_what_is_no_number_is_left_out() -> None:
    case = Case("w", None, "0" * 64, {"p99_ttft": float("nan"), "tokens_per_s": 1.0})
    made = make_evidence(
        stored(), "c", HERE, gates_from_list(["p99_ttft <= 2 s"]), [case], {"t": (1, 2)}, "now"
    )
    assert made.cases[0].measured["p99_ttft"] is None
    assert not made.passed


def test_what_is_missing_is_said_exactly() -> None:
    policy, there = stored(), Target("qwen3-8b", "h100")
    fine = record()
    assert what_is_missing([fine], policy, fine.code, HERE) == ""
    assert "there is no evidence on policy" in what_is_missing([], policy, fine.code, HERE)
    for records, code_now, target, words in (
        ([fine], fine.code, there, "it is for GPU h200, not h100"),
        ([fine], fine.code, Target("qwen3-4b", "h200"), "it is for model qwen3-8b, not qwen3-4b"),
        (
            [fine],
            "f" * 64,
            HERE,
            f"it was made with other deciding code: {fine.code[:12]} then, ffffffffffff now",
        ),
        ([record(stored("hybrid:join=blocking"))], fine.code, HERE, "it is about policy"),
        (
            [fine, record(speed=9.0)],
            fine.code,
            HERE,
            "it did not pass: tokens_per_s >= 1.5x (synth:amc23 seed 0)",
        ),
    ):
        assert words in what_is_missing(records, policy, code_now, target)
    later = record(made_at="2026-11-29T19:00:00Z")
    assert what_is_missing([fine, record(speed=9.0), later], policy, fine.code, HERE) == ""
    nearest = what_is_missing(
        [record(speed=9.0, code="e" * 64), record(code="d" * 64)], policy, fine.code, HERE
    )
    assert nearest.index("dddd") < nearest.index("eeee")


def test_an_own_policy_is_kept_with_its_source(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    shutil.copy(OWN, mine)
    policy = load_policy(f"{mine}:FewestLeft")
    kept = store_policy(policy)
    assert kept.sources == {f"{mine}:FewestLeft": OWN.read_text("utf-8")}
    assert stored_from_dict(json.loads(json.dumps(kept.as_dict()))) == kept
    mine.write_text("raise SystemExit('not this one')\n", "utf-8")
    again = kept.load()
    assert policy_digest(again) == policy_digest(policy) == kept.digest
    assert again.name == policy.name
    assert type(again.order).__name__ == "FewestLeft"
    assert again.order.own_spec == f"{mine}:FewestLeft"  # type: ignore[attr-defined]
    document = kept.as_dict()
    with pytest.raises(PolicyError, match="is not what it was"):
        stored_from_dict(
            {**document, "sources": {f"{mine}:FewestLeft": "class FewestLeft: pass\n"}}
        )
    with pytest.raises(PolicyError, match=r"the source text of .* is missing"):
        stored_from_dict({**document, "sources": {}})


def test_an_own_class_inside_an_answer_counts_too(tmp_path: Path) -> None:
    mine = tmp_path / "guess.py"
    text = "class Guess:\n    def predict(self, request, history):\n        return {0}\n"
    digests = []
    for guess in (1.0, 2.0):
        mine.write_text(text.format(guess), "utf-8")
        table = f'predictor = {{ kind = "{mine}:Guess" }}'
        shown = (ROOT / "policies" / "presets" / "full-kv.toml").read_text("utf-8")
        assert 'order = "first-come"' in shown
        toml = tmp_path / "mine.toml"
        toml.write_text(
            shown.replace('order = "first-come"', "")
            + f'\n[order]\nkind = "shortest-output"\n{table}\n',
            "utf-8",
        )
        kept = store_policy(load_policy(str(toml)))
        digests.append(kept.digest)
        assert kept.sources == {f"{mine}:Guess": text.format(guess)}
        order: Any = kept.load().order
        asked: Any = Request
        assert order.predictor.predict(asked, None) == guess
    assert digests[0] != digests[1]


def test_a_policy_that_compresses_must_show_that_answers_stay_right() -> None:
    policy = stored()
    silent = record(quality=None)
    assert silent.passed
    words = what_is_missing([silent], policy, silent.code, HERE)
    assert "hybrid compresses, and it does not show that answers stay right" in words
    claimed = record(quality={"required": True, "pass_at_1": 1.0})  # without a gate on it
    assert "answers stay right" in what_is_missing([claimed], policy, claimed.code, HERE)
    unfounded = record(quality={"required": False, "reason": " "})
    assert "answers stay right" in what_is_missing([unfounded], policy, unfounded.code, HERE)
    whole = record(stored("full-kv"), quality=None)
    assert what_is_missing([whole], stored("full-kv"), whole.code, HERE) == ""


def test_a_gate_on_answers_that_held_suffices() -> None:
    policy = stored()

    def solved(share: float) -> Evidence:
        case = Case(
            "w", None, "0" * 64, {"pass_at_1": share, "finished": 100.0}, {"pass_at_1": 0.9}
        )
        gates = gates_from_list(["pass_at_1 >= 0.98x"])
        quality = {"required": True, "pass_at_1": share}
        code, when = record().code, "2026-12-01T00:00:00Z"
        return make_evidence(policy, code, HERE, gates, [case], {}, when, quality=quality)

    good, bad = solved(0.89), solved(0.88)
    assert what_is_missing([good], policy, good.code, HERE) == ""
    assert "it did not pass: pass_at_1 >= 0.98x" in what_is_missing([bad], policy, bad.code, HERE)
    assert good.quality == {"required": True, "pass_at_1": 0.89}

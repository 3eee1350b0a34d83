"""`zlab policy`: the list is complete, what is shown can be read back, a bad file is told."""

import json
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from tests.zlab.command_line import errors, zlab
from zlab.policies.catalogue import CATALOGUE, PARTS
from zlab.policies.spec import QUESTIONS, load_policy, policy_digest, presets

OWN = '''"""A policy of one's own."""
from zlab.policies.preemption import Never


class Mine(Never):
    question = "preemption"
    base = "full-kv"
'''


def test_the_list_names_every_preset_question_choice_and_setting() -> None:
    shown = zlab("policy", "list").stdout
    for name in presets():
        assert f" {name} " in shown
    for question, kinds in QUESTIONS.items():
        assert f"{question}: {CATALOGUE[question].question}" in shown
        for kind, cls in kinds.items():
            assert f" {kind} " in shown
            for setting in fields(cls):
                assert f"{setting.name}=" in shown


def test_one_group_is_listed_with_every_setting_explained() -> None:
    for name, group in {**CATALOGUE, **PARTS}.items():
        shown = " ".join(zlab("policy", "list", name).stdout.split())
        for choice in group.choices.values():
            assert choice.text in shown
            for setting in choice.settings.values():
                assert setting.text.split(":")[0] in shown
    wrong = zlab("policy", "list", "budgte")
    assert wrong.exit_code == 2
    assert "unknown option group 'budgte'; did you mean 'budget'?" in errors(wrong)


def test_the_list_as_json_describes_choices() -> None:
    found = json.loads(zlab("policy", "list", "budget", "--json").stdout)
    assert list(found["questions"]) == list(found["descriptions"]) == ["budget"]
    fixed = found["descriptions"]["budget"]["choices"]["fixed"]
    assert set(fixed["settings"]) == {"tokens", "blocks"}


def test_the_list_as_json_gives_defaults() -> None:
    found = json.loads(zlab("policy", "list", "--json").stdout)
    assert list(found["presets"]) == list(presets())
    assert all(words for words in found["presets"].values())
    assert found["questions"]["budget"]["fixed"] == {"tokens": 2048, "blocks": 0}
    assert found["questions"]["compression"]["by-score"]["join"] == "boundary"
    assert found["questions"]["order"]["shortest-output"]["predictor"]["kind"] in (
        "oracle",
        "noisy-oracle",
        "class-mean",
    )


@pytest.mark.parametrize(
    "policy", [*presets(), "hybrid:prefix=none,join=blocking,budget.tokens=512"]
)
def test_what_is_shown_is_a_policy_file(policy: str, tmp_path: Path) -> None:
    result = zlab("policy", "show", policy)
    assert result.exit_code == 0
    path = tmp_path / "mine.toml"
    path.write_text(result.stdout)
    assert policy_digest(load_policy(str(path))) == policy_digest(load_policy(policy))
    assert json.loads(zlab("policy", "show", policy, "--json").stdout) == tomllib.loads(
        result.stdout
    )
    checked = zlab("policy", "check", str(path))
    assert checked.exit_code == 0
    assert f"policy {policy!r}" in checked.stdout


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[budget]", "[bugdet]", "unknown question 'bugdet'; did you mean 'budget'?"),
        ('kind = "fixed"', 'kind = "fixd"', "unknown budget 'fixd'; did you mean 'fixed'?"),
        (
            "window = 16",
            "redundncy_lambda = 0.2",
            "unknown setting of compression 'by-score' 'redundncy_lambda'",
        ),
        (
            "window = 16",
            "windw = 16",
            "unknown setting of compression 'by-score' 'windw'; did you mean 'window'?",
        ),
        ("tokens = 2048", 'tokens = "2048"', "budget.tokens must be a int, not '2048'"),
        ("tokens = 2048", "tokens = -1", "budget 'fixed': a budget needs at least 2 blocks"),
        (
            'join = "boundary"',
            'join = "soon"',
            "unknown compression.join 'soon' (choices: boundary, when_done,",
        ),
        ("[prefix]", "[prefix", "not valid TOML"),
    ],
)
def test_a_bad_file_ends_with_1_and_the_nearest_name(
    old: str, new: str, words: str, tmp_path: Path
) -> None:
    text = zlab("policy", "show", "hybrid").stdout
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new))
    result = zlab("policy", "check", str(path))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {path}: ")
    assert words in errors(result)
    as_json = zlab("policy", "check", str(path), "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["valid"] is False
    used = zlab("replay", "synth:amc23", "--policy", str(path))
    assert used.exit_code == 2
    assert words in errors(used)


def test_a_question_left_open_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\norder = "first-come"\n')
    result = zlab("policy", "check", str(path))
    assert result.exit_code == 1
    assert "leaves the question 'admission' open (choices: when-it-fits)" in errors(result)


def test_a_class_of_ones_own_that_is_not_there_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    for spec, words in (
        (f"{path}:Other", "no class 'Other' (it has: Mine)"),
        (str(path), "is FILE.toml or FILE.py"),
    ):
        result = zlab("policy", "check", spec)
        assert result.exit_code == 1
        assert words in errors(result)


SIX_LINES = '''from zlab import Order


class ShortestPromptFirst(Order):
    """Fewest prompt tokens first."""

    def key(self, request, stats):
        return (request.num_prompt_tokens,)
'''


def test_a_policy_of_six_lines_is_one_and_a_misspelt_member_is_none(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SIX_LINES, "utf-8")
    spec = f"{path}:ShortestPromptFirst"
    assert "fine; policy" in zlab("policy", "check", spec).stdout
    path.write_text(SIX_LINES.replace("    def", "    max_skip = 3\n\n    def"), "utf-8")
    checked, replayed = zlab("policy", "check", spec), zlab("replay", "synth:chat", "-p", spec)
    assert (checked.exit_code, replayed.exit_code) == (1, 2)
    for result in (checked, replayed):
        words = f"{spec}: unknown member of an order 'max_skip'; did you mean 'max_skips'?"
        assert words in errors(result)
        assert result.stdout == ""


def test_what_a_class_raises_in_a_run_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SIX_LINES.replace("num_prompt_tokens", "num_promt_tokens"), "utf-8")
    spec = f"{path}:ShortestPromptFirst"
    assert zlab("policy", "check", spec).exit_code == 0
    result = zlab("replay", "synth:chat?num_requests=3", "-p", spec)
    assert result.exit_code == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith(f"error: {spec}: key raised AttributeError: 'Request' object has no")
    assert line.endswith("(line 8)")

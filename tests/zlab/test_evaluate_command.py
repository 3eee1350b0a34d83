"""`zlab evaluate`: what it prints and writes, how it ends, what it refuses."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.zlab.command_line import PATIENCE_S, errors, start, wait_for_words, zlab

torch.set_num_threads(1)
SMALL = ("evaluate", "--model", "tiny-reasoner", "--device", "cpu", "--block-size", "16")
DATA = ("--data", "task:chain,machine?count=2&level=1&seed=4")
SHORT = ("--max-tokens", "60")


def test_a_table_results_and_a_plot(tmp_path: Path) -> None:
    out = tmp_path / "out"
    policies = ("-p", "hybrid:window=8", "--scorer", "recent,random", "--budget", "64, 1/2")
    result = zlab(*SMALL, *DATA, *SHORT, *policies, "--out", str(out))
    assert result.exit_code == 0, result.output
    for words in ("full-kv", "hybrid recent", "hybrid random", "pass@1 by source", "machine"):
        assert words in result.stdout
    found = json.loads((out / "results.json").read_text())
    assert found["format"] == "zlab-evaluation/1"
    budgets = [(one["scorer"], one["budget_tokens"]) for one in found["columns"]]
    assert budgets == [("", None), ("recent", 64), ("recent", 32), ("random", 64), ("random", 32)]
    assert [one["problems"] for one in found["data"]] == [2, 2]
    pytest.importorskip("plotly")
    assert "plotly" in (out / "accuracy.html").read_text()
    again = zlab(*SMALL, *DATA, *SHORT, *policies, "--out", str(out), "--json")
    assert json.loads(again.stdout)["columns"] == found["columns"]


def test_ctrl_c_keeps_what_is_complete_and_the_same_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [*SMALL, "--data", "task:chain?count=30&level=1", "--max-running", "2"]
    # Long enough for a line of progress before the end on a fast machine, too.
    command += ["--max-tokens", "150", "--out", str(out)]
    process = start(command)
    try:
        wait_for_words(process, "of 30 outputs after")
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "the same command goes on in" in said
    before = (out / "journal.jsonl").read_text().splitlines()
    assert 1 < len(before) < 32
    result = zlab(*command, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["columns"][0]["outputs"] == 30
    assert (out / "journal.jsonl").read_text().splitlines()[: len(before)] == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Missing option '--data'"),
        (("--data", "task:chian"), "unknown task 'chian'; did you mean 'chain'?"),
        (("--data", "none.jsonl"), "cannot read none.jsonl"),
        ((*DATA, "--check", "number"), "check 'number' is for files"),
        (
            (*DATA, "--budget", "64"),
            "budgets 64 need a policy with a budget of tokens",
        ),
        ((*DATA, "-p", "hybrid", "--budget", "much"), "budget 'much' must be a number of tokens"),
        ((*DATA, "--scorer", "recent"), "--scorer recent needs a --policy that compresses"),
        ((*DATA, "-p", "hybrid", "--scorer", "recnt"), "did you mean 'recent'"),
        ((*DATA, "-p", "hybird"), "unknown policy 'hybird'; did you mean 'hybrid'?"),
        ((*DATA, "--max-tokens", "9999"), "task:chain?count=2&level=1&seed=4:1: a prompt of 44"),
        ((*DATA, "--chat"), "has no chat template"),
        ((*DATA, "--timeout", "5"), "--timeout are for --engine"),
        ((*DATA, "--engine", "http://a"), "model, sizes, device of the own engine cannot be set"),
    ],
)
def test_misuse_names_the_value(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    result = zlab(*SMALL, *arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert words in errors(result)
    assert not (tmp_path / "out").exists()


def test_a_checker_that_raises_ends_with_1_and_keeps_the_outputs(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "walk : A B 1 ;", "answer": "x"}) + "\n")
    own = tmp_path / "own.py"
    own.write_text("def check(output, row):\n    raise KeyError('subject')\n")
    out = tmp_path / "out"
    command = (*SMALL, "--data", str(rows), "--check", f"{own}:check", "--max-tokens", "5")
    result = zlab(*command, "--out", str(out))
    assert result.exit_code == 1
    assert "rows.jsonl:1: checker" in errors(result)
    own.write_text("def check(output, row):\n    return len(output.split()) == 5\n")
    result = zlab(*command, "--out", str(out), "--json")
    assert json.loads(result.stdout)["columns"][0]["pass_at_1"] == 1.0


def test_a_server_cannot_be_told_a_policy() -> None:
    result = zlab("evaluate", *DATA, "--engine", "http://a", "-p", "hybrid")
    assert result.exit_code == 2
    assert "each --engine is one column" in errors(result)
    result = zlab("evaluate", *DATA, "--engine", "localhost:8000")
    assert "--engine localhost:8000: must begin with http://" in errors(result)

"""The README's commands work as written: each is run, on a small workload where it says TRACE."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
SMALL = "synth:amc23?num_problems=3&samples=2&cap=600"
ENGINE = ("generate", "bench", "parity")  # run by tests/engine, with a model


def blocks(language: str) -> list[str]:
    """Fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    """Every zlab command of the README, comments cut off."""
    lines = [line.split(" #")[0].strip() for block in blocks("") for line in block.splitlines()]
    return [line for line in lines if line.startswith("zlab ") and shlex.split(line)[1] not in ENGINE]


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zlab", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment())


def environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": "/tmp", "COLUMNS": "100"}


def test_there_are_commands_to_run() -> None:
    assert len(commands()) >= 5


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_readme_runs(command: str, tmp_path: Path) -> None:
    arguments = [SMALL if word == "TRACE" else word for word in shlex.split(command)[1:]]
    done = run(arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_policy_of_the_readme_works_as_written(tmp_path: Path) -> None:
    (source,) = blocks("python")
    (tmp_path / "mine.py").write_text(source, "utf-8")
    done = run(["replay", SMALL, "--policy", "mine.py:ShortestPromptFirst", "--kv-blocks", "64", "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"policy": "mine.py:ShortestPromptFirst"' in done.stdout


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"\bmake ([a-z]+)", README))
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"make {target} is not in the Makefile"


def test_linked_files_exist() -> None:
    for path in re.findall(r"\]\(([^)]+)\)|`(docs/[\w/.]+|tests/[\w/.]+)`", README):
        target = path[0] or path[1]
        assert (ROOT / target).exists(), f"README names {target}, which does not exist"

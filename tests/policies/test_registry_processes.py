"""Two processes at once: one wins, the other is told. A process killed anywhere: the registry is whole."""

import subprocess
import sys
from pathlib import Path

from policies.registry import Registry, Stage
from tests.house_source import ROOT
from tests.policies.records import HERE

ROUNDS = 6
NUM_KILLS = 30


def start(*arguments: str) -> "subprocess.Popen[str]":
    """A process of `registry_process`."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.policies.registry_process", *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def hear(process: "subprocess.Popen[str]") -> str:
    """The next line that it says."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go(processes: "list[subprocess.Popen[str]]") -> None:
    """Let all go on at once."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def test_of_two_at_once_one_wins_and_the_other_is_told(tmp_path: Path) -> None:
    racers = [start("race", str(tmp_path), str(ROUNDS), name) for name in ("hybrid", "full-kv")]
    for number in range(ROUNDS):
        assert [hear(racer) for racer in racers] == ["ready", "ready"], [racer.communicate() for racer in racers]
        go(racers)  # the file is made by both at once
        assert [hear(racer) for racer in racers] == ["looked", "looked"], [racer.communicate() for racer in racers]
        go(racers)
        said = [hear(racer) for racer in racers]
        assert said.count("won") == 1, said
        (loser,) = [words for words in said if words != "won"]
        winner = ("hybrid", "full-kv")[said.index("won")]
        assert f"somebody was faster: change 1, promotion of {winner} to live by {winner}" in loser
        registry = Registry(tmp_path / f"{number}.db", create=False)
        live = registry.live(HERE)
        assert live is not None
        assert live.policy.name == winner
        assert [one.stage for one in registry.standings()] == [Stage.LIVE]
    for racer in racers:
        _, errors = racer.communicate(timeout=300)
        assert racer.returncode == 0, errors


def test_a_process_killed_anywhere_leaves_a_whole_registry(tmp_path: Path) -> None:
    process = start("kills", str(tmp_path / "registry.db"), str(NUM_KILLS), "7")
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    num_changes, _ = map(int, said.split())
    assert num_changes >= NUM_KILLS, "the workers came to do something"

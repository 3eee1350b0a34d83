"""Processes that use one registry at once, and some that are killed over it; run as a module.

race FOLDER ROUNDS POLICY: in each round make or open a registry, look at it, and at the word from
stdin promote. kills FILE NUMBER SEED: fork that many workers one after the other, kill each in the
middle, and check what is left.
"""

import os
import random
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

from tests.policies.records import HERE, record, stored
from zlab.policies.registry import (
    Action,
    ChangeState,
    DeploymentStage,
    PolicyRegistry,
    RegistryError,
)

POLICIES = [stored(name) for name in ("hybrid", "full-kv", "constrained")]
MOST_STEPS, LONGEST_WAIT_S = 4, 0.02  # of a worker before it is killed, and within a step


def race(folder: Path, rounds: int, name: str) -> None:
    """Say what came of each round on a line of its own: `won`, or what the registry said."""
    policy = stored(name)
    for number in range(rounds):
        print("ready", flush=True)
        sys.stdin.readline()
        registry = PolicyRegistry(folder / f"{number}.db")
        seen = registry.newest(HERE)
        print("looked", flush=True)
        sys.stdin.readline()
        try:
            registry.promote(
                policy, DeploymentStage.LIVE, HERE, name, "a race", force=True, seen=seen
            )
        except RegistryError as error:
            print(error, flush=True)
        else:
            print("won", flush=True)


def work(path: Path, seed: int, told: int) -> None:
    """Change the registry in every way there is, for ever; each step is told by a byte on a
    pipe.
    """
    drawn = random.Random(seed)
    registry = PolicyRegistry(path)
    for number in count():
        policy = drawn.choice(POLICIES)
        stage = drawn.choice([DeploymentStage.LIVE, DeploymentStage.LIVE, DeploymentStage.CANARY])
        steps: list[Callable[[], object]] = [
            lambda policy=policy, stage=stage: registry.promote(policy, stage, HERE, "w"),  # type: ignore[misc]
            lambda stage=stage: registry.rollback(HERE, "w", stage=stage),  # type: ignore[misc]
            lambda number=number: registry.add_evidence(
                record(POLICIES[2], speed=2000.0 + seed + number), "w"
            ),  # type: ignore[misc]
            lambda policy=policy: registry.confirm(  # type: ignore[misc]
                registry.begin_promotion(
                    policy, DeploymentStage.LIVE, HERE, "w", "", "http://x"
                ).number
            ),
        ]
        try:
            registry.settle(HERE, None, "w")
            drawn.choice(steps)()
        except RegistryError:
            pass  # already there, nothing to go back to
        os.write(told, b".")


def check(path: Path) -> int:
    """What a killed process leaves is whole: what stands follows from the changes that are done.
    How many there are.
    """
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    registry = PolicyRegistry(path, create=False)
    expected: dict[str, DeploymentStage] = {}
    changes = registry.history(HERE)
    for change in changes:
        if change.state is not ChangeState.DONE:
            continue
        if change.leaves is not None:
            expected[change.leaves] = DeploymentStage.RETIRED
        if change.action is not Action.VALIDATE or change.to_stage not in (
            DeploymentStage.LIVE,
            DeploymentStage.CANARY,
        ):
            expected[change.digest] = change.to_stage
    standings = {one.policy.digest: one for one in registry.standings(HERE)}
    assert {digest: one.stage for digest, one in standings.items()} == expected
    live = [one for one in standings.values() if one.stage is DeploymentStage.LIVE]
    assert len(live) == 1, f"{len(live)} policies are live"
    assert registry.live(HERE) == live[0]
    assert live[0].policy.load() is not None
    assert sum(change.state is ChangeState.PENDING for change in changes) <= 1
    return len(changes)


def kills(path: Path, number: int, seed: int) -> None:
    """Kill workers and check; prints how many changes there were in the end and how many had been
    left pending.
    """
    registry = PolicyRegistry(path)
    for policy in POLICIES:
        registry.add_evidence(record(policy), "w")
    registry.promote(POLICIES[0], DeploymentStage.LIVE, HERE, "w")
    drawn = random.Random(seed)
    num_changes = num_pending = 0
    for life in range(number):
        heard, told = os.pipe()
        child = os.fork()
        if not child:
            work(path, seed + life, told)
        os.close(told)
        for _ in range(drawn.randint(1, MOST_STEPS)):
            assert os.read(heard, 1), "the worker ended by itself"
        time.sleep(drawn.uniform(0.0, LONGEST_WAIT_S))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(heard)
        num_changes = check(path)
        num_pending += registry.pending(HERE) is not None
    print(num_changes, num_pending)


if __name__ == "__main__":
    if sys.argv[1] == "race":
        race(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        kills(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

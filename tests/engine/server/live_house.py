"""A house with a tiny model on a small pool, and traffic for it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.server.house import House
from engine.server.lanes import Lane
from engine.server.observing import Observer
from engine.server.opening import open_house
from policies.spec import load_policy
from tests.engine.engine_cases import SMALL, mixed, tiny
from traces.workload import TraceRequest

BUSY = "hybrid:tokens=40,window=4"  # compresses, preempts and shares on the small pool


def house(observers: Sequence[Observer], policy: str = BUSY, **changes: Any) -> House:
    settings = replace(SMALL, policy=load_policy(policy), num_blocks=20, **changes)
    return open_house(settings, observers=observers, loaded=tiny())


def conversation_load(count: int = 16, seed: int = 7) -> list[TraceRequest]:
    """Prompts of which some begin alike, from three sessions."""
    return [replace(asked, session=f"user-{place % 3}") for place, asked in enumerate(mixed(count, seed, longest=60))]


class ChangesPolicy(Observer):
    """Lets another policy take over at some steps, with requests running."""

    def __init__(self, *policies: str, every: int = 25) -> None:
        self._policies = list(policies)
        self._every = every
        self._num_steps = 0

    def stepped(self, lane: Lane) -> None:
        self._num_steps += 1
        if self._policies and self._num_steps % self._every == 0:
            lane.engine.loop.replace_policy(load_policy(self._policies.pop(0)))

"""Everything that the routes of one server share."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.server.keys import Keys
from engine.server.lanes import Lane
from engine.server.limits import Door
from engine.server.prompts import Prompts
from engine.server.settings import ServerSettings
from engine.server.worker import EngineWorker

T = TypeVar("T")


@dataclass(frozen=True)
class House:
    """One server: its engine's thread, its door, its keys."""

    worker: EngineWorker
    settings: ServerSettings
    keys: Keys
    door: Door
    prompts: Prompts
    served_model: str
    max_model_len: int
    started_unix_s: float
    at_close: tuple[Callable[[], None], ...] = ()  # what is left to do when the engine's thread has ended

    def close(self, timeout_s: float | None = None) -> None:
        """End what runs and the engine's thread, then do what is left to do."""
        self.worker.stop(timeout_s)
        for last in self.at_close:
            last()

    async def ask_engine(self, function: Callable[[Sequence[Lane]], T]) -> T:
        """What `function(lanes)` returns, or raises, on the engine's thread between two steps."""
        return await asyncio.wrap_future(self.worker.call(function))

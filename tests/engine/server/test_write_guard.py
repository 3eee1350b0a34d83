"""The time limit on a write: what it ends, what it lets pass, and that many writes share one
timer.
"""

import asyncio
import selectors
from typing import Any

import pytest

from zlab.engine.server.completions import WriteGuard
from zlab.engine.server.protocol import ApiError

LONG_S, SHORT_S = 60.0, 0.02


async def never() -> None:
    await asyncio.get_running_loop().create_future()


def test_a_write_that_lasts_too_long_ends_the_answer() -> None:
    async def answer() -> None:
        with WriteGuard(SHORT_S) as guard:
            guard.begin()
            await never()

    with pytest.raises(ApiError) as caught:
        asyncio.run(answer())
    assert caught.value.status_code == 408
    assert caught.value.code == "slow_reader"


def test_waiting_between_writes_is_not_limited() -> None:
    """Three times as long as a write may last: the timer goes off, finds no write, and is set
    again.
    """

    async def answer() -> str:
        with WriteGuard(SHORT_S) as guard:
            guard.begin()
            guard.end()
            await asyncio.sleep(3 * SHORT_S)
        return "all"

    assert asyncio.run(answer()) == "all"


class Counting(asyncio.SelectorEventLoop):
    """Counts the timers that are set."""

    num_timers = 0

    def call_at(self, *given: Any, **more: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        self.num_timers += 1
        return super().call_at(*given, **more)


def test_many_writes_share_one_timer() -> None:
    async def answer() -> None:
        with WriteGuard(LONG_S) as guard:
            for _ in range(1000):
                guard.begin()
                guard.end()

    with asyncio.Runner(loop_factory=Counting) as runner:
        runner.run(answer())
        loop = runner.get_loop()
        assert isinstance(loop, Counting)
        assert loop.num_timers == 1


class Timers(selectors.SelectSelector):
    """Waits for no timer: the clock jumps to it instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(None if timeout is None else 0.0)
        if not found and timeout:
            self.now_s += timeout
        return found


class Jumping(asyncio.SelectorEventLoop):
    """An event loop whose time depends on its timers alone, however busy the machine is."""

    def __init__(self) -> None:
        self._timers = Timers()
        super().__init__(self._timers)

    def time(self) -> float:
        return self._timers.now_s


def test_a_write_has_all_of_its_time_however_late_it_begins() -> None:
    """The first look comes when the second write has just begun: it looks again when that one's
    time is over.
    """
    looks: list[float] = []

    class Watched(WriteGuard):
        def _look(self) -> None:
            looks.append(self._loop.time())
            super()._look()

    async def answer(began: list[float]) -> None:
        with Watched(0.2) as guard:
            guard.begin()
            guard.end()
            await asyncio.sleep(0.1)
            guard.begin()
            began.append(asyncio.get_running_loop().time())
            await never()

    began: list[float] = []
    with pytest.raises(ApiError), asyncio.Runner(loop_factory=Jumping) as runner:
        runner.run(answer(began))
    assert began == pytest.approx([0.1])
    assert looks == pytest.approx([0.2, 0.3])


@pytest.mark.parametrize("writes", [True, False])
def test_who_is_called_off_from_outside_stays_called_off(writes: bool) -> None:
    """By a client that left, or by the limit on the whole answer."""

    async def answer() -> None:
        with WriteGuard(LONG_S) as guard:
            if writes:
                guard.begin()
            await never()

    async def both() -> None:
        task = asyncio.create_task(answer())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(SHORT_S):
                await answer()

    asyncio.run(both())

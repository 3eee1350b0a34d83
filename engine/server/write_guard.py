"""A time limit on every single write to a client, at no cost to writes that take no time."""

import asyncio
from types import TracebackType

from starlette.types import Send

from engine.server.errors import ApiError


class WriteGuard:
    """Ends the task that enters it, by an ApiError, when one of its writes lasts longer than `timeout_s`.

    `asyncio.timeout` would set and clear a timer for every token of every stream. Here `began` says since when a write
    lasts, and one timer looks at it, no more often than every `timeout_s`.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None
        self._expired = False

    def begin(self) -> None:
        """A write begins."""
        self._began_s = self._loop.time()

    def end(self) -> None:
        """It is over."""
        self._began_s = None

    def __enter__(self) -> "WriteGuard":
        task = asyncio.current_task()
        assert task is not None
        self._task, self._num_cancels = task, task.cancelling()
        self._timer = self._loop.call_later(self._timeout_s, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise ApiError in the place of the cancellation that was this guard's own."""
        self._timer.cancel()
        own = self._expired and self._task.uncancel() <= self._num_cancels
        if own and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise ApiError(408, "the reader of this stream takes nothing", code="slow_reader") from None

    async def send(self, send: Send, body: bytes, last: bool) -> None:
        """Hand a part of an answer to the client: one write."""
        self.begin()
        await send({"type": "http.response.body", "body": body, "more_body": not last})
        self.end()

    def _look(self) -> None:
        now_s, began_s = self._loop.time(), self._began_s
        ends_s = (now_s if began_s is None else began_s) + self._timeout_s
        if ends_s <= now_s:
            self._expired = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_at(ends_s, self._look)

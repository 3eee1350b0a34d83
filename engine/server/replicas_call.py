"""A request carried to an ASGI application by other means than a socket, and its answer carried back in parts."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message

LOG = logging.getLogger("zlab.server")
GRACE_S = 5.0  # for an application to notice that its client has gone
MOST_UNREAD_BYTES = 1 << 20

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A request with its whole body; `path` is as in ASGI: decoded, without the query."""

    method: str
    path: str
    query: bytes = b""
    headers: Headers = ()
    body: bytes = b""
    client: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer: the first has status and headers, `last` says that nothing follows."""

    body: bytes
    last: bool
    status: int | None = None
    headers: Headers = ()


class BrokenAnswerError(Exception):
    """The application failed after it had begun to answer, or gave no answer at all."""


async def answer(application: ASGIApp, request: Forwarded, pace_s: Callable[[], float]) -> AsyncGenerator[Part]:
    """Run the application on a request. Closing the iterator is the client going away.

    What the application sends within `pace_s()` of the part before makes one part: the first and the last are not held
    back. Raises BrokenAnswerError.
    """
    exchange = _Exchange(request)
    task = asyncio.create_task(exchange.run(application))
    try:
        while True:
            part = await exchange.take()
            yield part
            if part.last:
                break
            await exchange.wait_for_end(pace_s())
    finally:
        exchange.leave()
        await asyncio.wait([task], timeout=GRACE_S)
        task.cancel()


class _Exchange:
    """One request and its answer between two tasks of an event loop."""

    def __init__(self, request: Forwarded) -> None:
        self._request = request
        self._asked = False
        self._gone = asyncio.Event()
        self._there = asyncio.Event()
        self._room = asyncio.Event()
        self._ended = asyncio.Event()
        self._start: tuple[int, Headers] | None = None
        self._body = bytearray()
        self._num_given = 0
        self._failure: Exception | None = None

    async def run(self, application: ASGIApp) -> None:
        request = self._request
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "http",
            "method": request.method,
            "path": request.path,
            "raw_path": request.path.encode(),
            "root_path": "",
            "query_string": request.query,
            "headers": list(request.headers),
            "client": request.client,
            "server": None,
        }
        try:
            await application(scope, self._receive, self._send)
        except Exception as error:
            if not self._gone.is_set():
                LOG.error("the application failed", exc_info=error)
            self._failure = error
        self._ended.set()
        self._there.set()

    async def take(self) -> Part:
        """What has come since the last part; waits for something."""
        while not self._ended.is_set() and not (self._start and self._body):
            self._there.clear()
            await self._there.wait()
        if self._start is None or (self._failure is not None and not self._body):
            raise BrokenAnswerError(str(self._failure or "no answer")) from self._failure
        status, headers = (None, ()) if self._num_given else self._start
        self._num_given += 1
        body = bytes(self._body)
        self._body.clear()
        self._room.set()
        return Part(body, self._ended.is_set() and self._failure is None, status, headers)

    async def wait_for_end(self, timeout_s: float) -> None:
        """Let parts gather; comes back at once when there will be no more."""
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        except TimeoutError:
            return

    def leave(self) -> None:
        """Nobody reads any more."""
        self._gone.set()
        self._room.set()

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gone.is_set():
            raise OSError("the client has gone")  # as ASGI 2.4 has it
        if message["type"] == "http.response.start":
            self._start = (message["status"], tuple((bytes(name), bytes(value)) for name, value in message["headers"]))
            return
        self._body += message.get("body", b"")
        if not message.get("more_body", False):
            self._ended.set()
        self._there.set()
        while len(self._body) > MOST_UNREAD_BYTES and not self._gone.is_set():
            self._room.clear()
            await self._room.wait()

"""At the door: how many requests are under way, how large a body may be, how long it may take to come."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.errors import ApiError, overloaded, unavailable
from engine.server.sending import send_error

CLOSE = {"Connection": "close"}  # what is left of the request is not read


class Door:
    """Counts the requests under way; belongs to the event loop's thread. `shut` lets nobody in any more."""

    def __init__(self, max_concurrent: int, retry_after_s: Callable[[], int]) -> None:
        self._max_concurrent = max_concurrent
        self._retry_after_s = retry_after_s
        self.num_inside = 0
        self.shut = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """While entered, a request is under way. Raises ApiError, 429 or 503, when none may come in."""
        if self.shut:
            raise unavailable("the server is shutting down", "shutting_down", self._retry_after_s())
        if self.num_inside >= self._max_concurrent:
            message = f"{self.num_inside} requests are under way, the limit is {self._max_concurrent}"
            raise overloaded(message, self._retry_after_s(), "too_many_requests")
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1


class BodyLimit:
    """ASGI middleware: a body that is too large, by its header or as it comes, or too slow is refused and not read."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await send_error(send, self._too_large())
            return
        num_bytes, whole = 0, False
        deadline = asyncio.get_running_loop().time() + self._timeout_s

        async def limited_receive() -> Message:
            nonlocal num_bytes, whole
            if whole:
                return await receive()  # nothing but the client's going can come
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                late = f"the body did not arrive within {self._timeout_s:g} s"
                raise ApiError(408, late, code="body_timeout", headers=CLOSE) from None
            num_bytes += len(message.get("body", b""))
            whole = message["type"] != "http.request" or not message.get("more_body", False)
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, limited_receive, send)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._max_bytes} bytes"
        return ApiError(413, message, code="body_too_large", headers=CLOSE)

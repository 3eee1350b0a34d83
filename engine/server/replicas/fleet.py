"""Replicas as HTTP servers: what the front knows of each, and how it reaches one.

    front                                       replica (a process or a Ray actor)
    ReplicaRouter -- HttpReplica -- HTTP/1.1 -- ReplicaApp -- the application of a single server
                     (httpx)    Unix socket,    GET /replica: a `Member`
                                or TCP and a token

The front spends about 0.1 ms for every part of a stream that it hands on, so a replica with many
streams sends fewer and larger parts (`ReplicaApp`).
"""

import asyncio
import json
import logging
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from hmac import compare_digest
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import httpx
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zlab.engine.server.context import ServerContext
from zlab.engine.server.lanes import Lane
from zlab.engine.server.protocol import ApiError, send_error, send_response, to_json

LOG = logging.getLogger("zlab.server")
MEMBER_PATH = "/replica"
TOKEN_HEADER = "x-zlab-replica-token"
FRONT_PARTS_PER_S = 4000  # parts of streams that the front hands on, of all replicas together
MAX_UNSENT_BYTES = 1 << 16  # of one stream, before its application waits
MEMBER_TIMEOUT_S = 8.0
ENGINE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
# Headers of one connection, and those that either side writes itself.
NOT_FORWARDED = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
    | {b"content-length", b"date", b"expect", b"host", b"server"}
)
RawHeaders = tuple[tuple[bytes, bytes], ...]
OpenReplica = Callable[[str], tuple[ServerContext, ASGIApp]]
"""From a replica's name to its parts and its application (`zlab.engine.server.launch.open_server`);
it can be pickled."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A request with its whole body; `path` is decoded and has no query."""

    method: str
    path: str
    query: bytes = b""
    headers: RawHeaders = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class BodyPart:
    """A part of an answer: the first has status and headers, the last has `last`."""

    body: bytes
    last: bool
    status: int | None = None
    headers: RawHeaders = ()


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that answers when it is asked.

    Attributes:
        id: of this process; a restarted replica has another.
        name: "0", "1", ...; a restarted replica keeps its name.
        pid: the process's id, on its machine.
        block_size: tokens per block of its cache.
        num_blocks: blocks of its cache, all lanes together.
        shares_prefixes: whether some lane's policy finds the blocks of earlier requests.
        trouble: why it should be sent no request; None if it is healthy.
    """

    id: str
    name: str
    pid: int
    block_size: int
    num_blocks: int
    shares_prefixes: bool
    trouble: str | None = None


class ReplicaLostError(Exception):
    """The replica died, or cannot be reached, before its answer was complete."""


class Fleet(Protocol):
    """The replicas, as the front sees them."""

    @property
    def num_wanted(self) -> int:
        """How many there should be."""

    async def members(self) -> Sequence[Member]:
        """Return those that answer now."""

    def forward(self, request: Forwarded, replica: str) -> AsyncGenerator[BodyPart]:
        """Yield the answer of the replica with that id; raises ReplicaLostError.

        Closing the generator disconnects from the replica, which aborts the request.
        """

    async def close(self) -> None:
        """Close the connections to the replicas."""


class HttpReplica:
    """The front's end: one replica over HTTP connections, on one event loop.

    `member_id` is the id of the replica that answered last.
    """

    def __init__(self, address: Path | str, token: str = "") -> None:
        """Prepare; the first request connects.

        Args:
            address: a Unix socket, or `host:port`.
            token: goes with every request.
        """
        is_socket = isinstance(address, Path)
        self.member_id: str | None = None
        self._url = "http://replica" if is_socket else f"http://{address}"
        self._token = ((TOKEN_HEADER.encode(), token.encode()),) if token else ()
        # A connection a request: the pool's search among idle connections is quadratic in them.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._transport = httpx.AsyncHTTPTransport(
            uds=str(address) if is_socket else None, limits=limits
        )

    async def member(self) -> Member:
        """Ask the replica for what the front has to know. Raises ReplicaLostError."""
        status, body = 0, b""
        try:
            async with asyncio.timeout(MEMBER_TIMEOUT_S):
                async for part in self.forward(Forwarded("GET", MEMBER_PATH)):
                    status, body = part.status or status, body + part.body
        except TimeoutError as error:
            raise ReplicaLostError(f"no answer within {MEMBER_TIMEOUT_S:g} s") from error
        if status != 200:
            raise ReplicaLostError(f"status {status}")
        member = Member(**json.loads(body))
        self.member_id = member.id
        return member

    async def forward(self, request: Forwarded) -> AsyncGenerator[BodyPart]:
        """Yield the replica's answer; see `Fleet.forward`."""
        query = f"?{request.query.decode('latin-1')}" if request.query else ""
        outgoing = httpx.Request(
            request.method,
            f"{self._url}{quote(request.path)}{query}",
            headers=[*_end_to_end(request.headers), *self._token],
            content=request.body,
            extensions={"timeout": {"connect": CONNECT_TIMEOUT_S}},
        )
        try:
            response = await self._transport.handle_async_request(outgoing)
            try:
                headers = _end_to_end(tuple(response.headers.raw))
                yield BodyPart(b"", False, response.status_code, headers)
                assert isinstance(response.stream, httpx.AsyncByteStream)
                async for chunk in response.stream:
                    yield BodyPart(chunk, False)
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            raise ReplicaLostError(type(error).__name__) from error
        yield BodyPart(b"", True)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.aclose()


class HttpFleet(ABC):
    """A fleet whose replicas are reached over HTTP; where they run is the subclass's part."""

    @abstractmethod
    def reached(self) -> Iterable[HttpReplica]:
        """Return the replicas that can be reached."""

    async def forward(self, request: Forwarded, replica: str) -> AsyncGenerator[BodyPart]:
        """Yield the answer of the replica with that id; see `Fleet.forward`."""
        for found in self.reached():
            if found.member_id == replica:
                async with aclosing(found.forward(request)) as parts:
                    async for part in parts:
                        yield part
                return
        raise ReplicaLostError("it is gone")

    async def close(self) -> None:
        """Close the connections; the replicas run on."""
        for found in self.reached():
            await found.close()


def _end_to_end(headers: RawHeaders) -> RawHeaders:
    return tuple(pair for pair in headers if pair[0].lower() not in NOT_FORWARDED)


class ReplicaApp:
    """The replica's end: the application of a single server, and `GET /replica`.

    Parts of a stream follow one another at least `open streams / parts_per_s` seconds apart; what
    the application sends in between makes one part. The first and the last part do not wait.
    """

    def __init__(
        self,
        app: ASGIApp,
        context: ServerContext,
        name: str,
        *,
        parts_per_s: float,
        token: str = "",
    ) -> None:
        """Wrap the application.

        Args:
            app: the application.
            context: its parts.
            name: of the replica.
            parts_per_s: the most parts a second, of all streams together.
            token: that every request must have.
        """
        self._app = app
        self._context = context
        self._name = name
        self._id = f"{name}-{secrets.token_hex(4)}"
        self._parts_per_s = parts_per_s
        self._token = token
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(TOKEN_HEADER, "")
        if not compare_digest(given.encode(), self._token.encode()):
            await send_error(send, ApiError(403, "not the front of this replica"))
        elif scope["path"] == MEMBER_PATH:
            headers = [(b"content-type", b"application/json")]
            await send_response(send, 200, headers, to_json(asdict(await self._describe())))
        else:
            pacer = _Pacer(send, lambda: self._num_open / self._parts_per_s)
            self._num_open += 1
            try:
                await self._app(scope, receive, pacer.send)
            finally:
                self._num_open -= 1
                await pacer.close()

    async def _describe(self) -> Member:
        trouble = self._context.worker.trouble()
        block_size, num_blocks, shares_prefixes = 1, 1, False
        if trouble is None:
            try:
                async with asyncio.timeout(ENGINE_TIMEOUT_S):
                    facts = await self._context.call_engine(_facts)
                block_size, num_blocks, shares_prefixes = facts
            except TimeoutError:
                trouble = f"the engine has ended no step for {ENGINE_TIMEOUT_S:g} s"
        return Member(
            self._id, self._name, os.getpid(), block_size, num_blocks, shares_prefixes, trouble
        )


def _facts(lanes: Sequence[Lane]) -> tuple[int, int, bool]:
    """Return the block size, the blocks of all lanes, and whether prefixes are shared."""
    limits = [lane.engine.limits for lane in lanes]
    shares_prefixes = any(lane.policy.prefix.enabled for lane in lanes)
    return limits[0].block_size, sum(each.num_blocks for each in limits), shares_prefixes


class _Pacer:
    """Joins the parts of one answer that follow one another too quickly."""

    def __init__(self, send: Send, pace_s: Callable[[], float]) -> None:
        self._send_now = send
        self._pace_s = pace_s
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._next_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._in_order = asyncio.Lock()

    async def send(self, message: Message) -> None:
        """Send a message of the application: its body possibly a little later."""
        if message["type"] != "http.response.body":
            await self._send_now(message)
            return
        self._unsent += message.get("body", b"")
        wait_s = self._next_s - self._loop.time()
        if not message.get("more_body", False):
            self._stop_timer()
            await self._flush(last=True)
        elif self._timer is None and wait_s > 0:
            self._timer = self._loop.call_later(wait_s, self._start_flush)
        elif self._timer is None or len(self._unsent) > MAX_UNSENT_BYTES:
            await self._flush()

    async def close(self) -> None:
        """End the answer; what is unsent is dropped, for the application has broken it off."""
        self._stop_timer()
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_flush(self) -> None:
        self._timer = None
        self._flushing = self._loop.create_task(self._flush())

    async def _flush(self, last: bool = False) -> None:
        async with self._in_order:
            body = bytes(self._unsent)
            self._unsent.clear()
            if not (body or last):
                return
            await self._send_now(
                {"type": "http.response.body", "body": body, "more_body": not last}
            )
            self._next_s = self._loop.time() + self._pace_s()

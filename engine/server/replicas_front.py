"""The front of several replicas, one server to its clients: reads a request, chooses a replica, hands its answer on.

Every replica runs the whole application, so limits on requests, their errors and their answers are those of a single
server. What concerns all replicas (`/health`, `/metrics`, `/v1/policy`, every change) is asked of all of them.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from engine.server.asking import ID_HEADER
from engine.server.errors import ApiError, unavailable
from engine.server.keys import KeyCheck, Keys
from engine.server.limits import BodyLimit, Door
from engine.server.replicas_call import BrokenAnswerError, Forwarded, Part
from engine.server.replicas_fleet import ReplicaLostError
from engine.server.replicas_prompt import Demand, demand_of
from engine.server.replicas_report import health, metrics, policies, together
from engine.server.replicas_roster import Roster
from engine.server.sending import DONE, event, send_error
from engine.server.settings import ServerSettings
from engine.server.write_guard import WriteGuard

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
MOST_ATTEMPTS = 3
REPLICA_GRACE_S = 30.0  # a replica ends a request that takes too long by itself; beyond that it is taken for dead
RETRY_AFTER_S = 2  # about what a replica takes to be missed


class CallOff:
    """Ends every request under way: what `engine.server.process.Process` knows as the worker of its tenant."""

    def __init__(self) -> None:
        self.failure: Exception | None = None  # replicas come back; the front itself has nothing that can break
        self.on_failure: Callable[[], None] | None = None
        self.called = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """End them; from any thread."""
        if self.loop is not None:
            with suppress(RuntimeError):  # closed: nothing is under way
                self.loop.call_soon_threadsafe(self.called.set)


class Front:
    """An ASGI application over the replicas of a roster."""

    def __init__(self, roster: Roster, settings: ServerSettings, keys: Keys) -> None:
        self.roster = roster
        self.settings = settings
        self.worker = CallOff()
        self.door = Door(settings.max_concurrent, lambda: RETRY_AFTER_S)
        self._homes: dict[str, tuple[str, _Answer]] = {}  # requests under way that brought an id: who has it
        limited = BodyLimit(self._serve, settings.max_body_bytes, settings.body_timeout_s)
        self._checked = KeyCheck(limited, keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request, or the server's start and end."""
        if scope["type"] == "lifespan":
            self.worker.loop = asyncio.get_running_loop()
            await _live(receive, send, self.roster.open, self.roster.close)
        elif scope["type"] == "http":
            await self._checked(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = await _read(scope, receive)
            if request is None:
                return
            if request.path in COMPLETIONS and request.method == "POST":
                with self.door.entered():
                    await self._while_there(request, receive, send)
            else:
                await self._state(request, receive, send)
        except ApiError as error:
            await send_error(send, error)

    async def _state(self, request: Forwarded, receive: Receive, send: Send) -> None:
        match request.path, request.method:
            case "/health", "GET":
                report = await health(self.roster, self.door)
            case "/metrics", "GET":
                report = metrics(self.roster, await self.roster.ask_all(request))
            case "/v1/policy", "GET":
                report = policies(await self.roster.ask_all(request))
            case _, "GET" | "HEAD" | "OPTIONS":
                await self._while_there(request, receive, send)
                return
            case _:
                report = together(*await self.roster.change_all(request))
        await send({"type": "http.response.start", "status": report.status, "headers": list(report.headers)})
        await send({"type": "http.response.body", "body": report.body})

    async def _while_there(self, request: Forwarded, receive: Receive, send: Send) -> None:
        """Answer by one replica, unless the client goes first or all is called off."""
        answer = _Answer(send, self.settings.write_timeout_s)
        answering = asyncio.create_task(self._answer(request, answer))
        leaving = asyncio.create_task(_left(receive))
        stopping = asyncio.create_task(self.worker.called.wait())
        try:
            await asyncio.wait((answering, leaving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, leaving, stopping):
                task.cancel()
            await asyncio.gather(answering, leaving, stopping, return_exceptions=True)
        if stopping.done() and not stopping.cancelled() and not answer.complete:
            await answer.fail(unavailable("the server is shutting down", "shutting_down"))

    async def _answer(self, request: Forwarded, answer: "_Answer") -> None:
        try:
            async with asyncio.timeout(self.settings.request_timeout_s + REPLICA_GRACE_S):
                await self._try_replicas(request, answer)
            return
        except ApiError as caught:
            error = caught
        except TimeoutError:
            error = ApiError(504, "the replica does not answer", code="timeout")
        except BrokenAnswerError:
            error = ApiError(500, "the replica could not answer", code="request_failed")
        await answer.fail(error)

    async def _try_replicas(self, request: Forwarded, answer: "_Answer") -> None:
        """Hand the answer of one replica on; of another, when that one is lost before it has said anything."""
        demand = self._demand(request)
        lost = unavailable("no replica is well", "no_replica", RETRY_AFTER_S)
        for _ in range(MOST_ATTEMPTS):
            replica = self._choose(demand, answer)
            if replica is None:
                break
            try:
                async with aclosing(self.roster.fleet.forward(request, replica)) as parts:
                    async for part in parts:
                        await answer.hand_on(part)
                return
            except ReplicaLostError as error:
                self.roster.lose(replica)
                lost = unavailable(f"the replica of this request was lost: {error}", "replica_lost", RETRY_AFTER_S)
                if answer.begun:
                    break
            finally:
                self._forget(demand, answer)
        raise lost

    def _choose(self, demand: Demand, answer: "_Answer") -> str | None:
        rule = self.roster.rule
        if not rule.replicas:
            return None
        id = demand.request_id
        if id is not None and id in self._homes:
            return self._homes[id][0]  # it is under way: the replica that has it says so
        replica = rule.route(answer, demand.keys, demand.num_outputs).ranked[0]
        if id is not None:
            self._homes[id] = (replica, answer)
        return replica

    def _forget(self, demand: Demand, answer: "_Answer") -> None:
        self.roster.rule.end(answer)
        id = demand.request_id
        if id is not None and id in self._homes and self._homes[id][1] is answer:
            del self._homes[id]

    def _demand(self, request: Forwarded) -> Demand:
        if request.method != "POST" or not self.roster.members:
            return Demand()
        member = next(iter(self.roster.members.values()))
        demand = demand_of(request.body, member.block_size)
        given = Headers(raw=list(request.headers)).get(ID_HEADER)
        keys = demand.keys if member.shares_prefixes else ()
        return Demand(keys, demand.num_outputs, demand.request_id or given)


class _Answer:
    """What the client has got so far."""

    def __init__(self, send: Send, write_timeout_s: float) -> None:
        self.begun = False
        self.complete = False
        self._send_now = send
        self._write_timeout_s = write_timeout_s
        self._is_stream = False

    async def hand_on(self, part: Part) -> None:
        """Send what a replica has answered. Raises ApiError when the client takes nothing for too long."""
        if part.status is not None:
            self.begun = True
            self._is_stream = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in part.headers
            )
            await self._send_now({"type": "http.response.start", "status": part.status, "headers": list(part.headers)})
        await self._send(part.body, part.last)

    async def fail(self, error: ApiError) -> None:
        """Tell the client, as far as that still goes: what has begun and is no stream can only be broken off."""
        if not self.begun:
            self.begun = self.complete = True
            await send_error(self._send_now, error)
        elif self._is_stream and error.code != "slow_reader":
            await self._send(event(error.body) + DONE, last=True)

    async def _send(self, body: bytes, last: bool) -> None:
        with WriteGuard(self._write_timeout_s) as guard:
            await guard.send(self._send_now, body, last)
        self.complete = last


async def _read(scope: Scope, receive: Receive) -> Forwarded | None:
    """The request with its whole body; None if the client left. Raises what the limit on bodies raises."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    client = scope.get("client")
    return Forwarded(
        scope["method"],
        scope["path"],
        scope["query_string"],
        tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
        bytes(body),
        None if client is None else (client[0], client[1]),
    )


async def _left(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _live(
    receive: Receive, send: Send, start: Callable[[], Awaitable[None]], stop: Callable[[], Awaitable[None]]
) -> None:
    """The server's start and end, as ASGI has them."""
    assert (await receive())["type"] == "lifespan.startup"
    try:
        await start()
    except Exception as error:
        await send({"type": "lifespan.startup.failed", "message": str(error)})
        return
    await send({"type": "lifespan.startup.complete"})
    assert (await receive())["type"] == "lifespan.shutdown"
    await stop()
    await send({"type": "lifespan.shutdown.complete"})

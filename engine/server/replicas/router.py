"""The front of several replicas, one server to its clients.

    ReplicaRouter   reads a request, chooses a replica, hands its answer on
    ReplicaSet      which replicas may be sent requests, by a look at them every second
    combine, ...    one answer from those of all replicas: health, metrics, policies, changes

    POST /v1/completions   one replica: the one that holds most of the prompt's prefix, unless it
                           is too far ahead (`zlab.policies.routing`); if it is lost before it has
                           answered, another one
    GET /health, /metrics, /v1/policy, and every change   all replicas

Every replica runs the whole application, so limits on requests, their errors and their answers are
those of a single server. A restarted replica first carries out the changes of policy that it has
missed.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override

from zlab.engine.server.app import cors
from zlab.engine.server.completions import WriteGuard, wait_for_disconnect
from zlab.engine.server.context import ServerSettings
from zlab.engine.server.launch import Process
from zlab.engine.server.middleware import BodyLimit, ConcurrencyLimit, KeyCheck, Keys
from zlab.engine.server.protocol import (
    DONE,
    ID_HEADER,
    ApiError,
    event,
    send_error,
    send_response,
    to_json,
    unavailable,
)
from zlab.engine.server.replicas.fleet import (
    BodyPart,
    Fleet,
    Forwarded,
    Member,
    RawHeaders,
    ReplicaLostError,
)
from zlab.policies.routing import LoadSlack, PrefixAffinity, prefix_keys

LOG = logging.getLogger("zlab.server")
POLICY_PATH = "/v1/policy"
COMPLETION_PATHS = ("/v1/completions", "/v1/chat/completions")
BYTES_PER_TOKEN = 4  # of English text; an error only shifts where a block counts as held
LOOK_S = 1.0
REPLY_TIMEOUT_S = 17.0  # of all replicas: a change of policy gives up after 15 s by itself
MAX_CHANGES = 64  # that a restarted replica carries out
MAX_ATTEMPTS = 3
REPLICA_GRACE_S = 30.0  # a replica ends a request that takes too long; later it counts as lost
RETRY_AFTER_S = 2  # about the time until a lost replica is noticed
REPLICA_LABEL = "replica"


def serve_fleet(
    fleet: Fleet, settings: ServerSettings, keys: Keys, address: tuple[str, int]
) -> int:
    """Serve with the replicas of a fleet until told to stop.

    Args:
        fleet: the replicas, which run.
        settings: the front's bounds.
        keys: the front's keys.
        address: host and port to listen on.

    Returns:
        The exit code, as `zlab.engine.server.launch.Process` has it.
    """
    router = ReplicaRouter(ReplicaSet(fleet), settings, keys)
    process = Process(router, router, *address)
    process.run()
    return process.exit_code


class Shutdown:
    """Ends every request under way: the worker of the front, as `Process` sees it.

    Replicas come back by themselves, so the front never fails: `ended` is never done.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.ended: Future[None] = Future()
        self.called = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self) -> None:
        """Take calls of `stop`, on the running event loop."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """End the requests, from any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: no request is under way
                self._loop.call_soon_threadsafe(self.called.set)


class ReplicaRouter:
    """An ASGI application in front of the replicas of a set."""

    def __init__(self, replica_set: "ReplicaSet", settings: ServerSettings, keys: Keys) -> None:
        self.replica_set = replica_set
        self.settings = settings
        self.worker = Shutdown()
        self.concurrency = ConcurrencyLimit(settings.max_concurrent, lambda: RETRY_AFTER_S)
        # Where the requests under way run that brought an id of their own.
        self._by_id: dict[str, tuple[str, _Answer]] = {}
        limited = BodyLimit(self._serve, settings.max_body_bytes, settings.body_timeout_s)
        self._app: ASGIApp = KeyCheck(limited, keys)
        for cls, args, kwargs in cors(settings.cors_origins):
            self._app = cls(self._app, *args, **kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the server's start and end."""
        if scope["type"] == "lifespan":
            self.worker.listen()
            await _run_lifespan(receive, send, self.replica_set.open, self.replica_set.close)
        elif scope["type"] == "http":
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = await _read(scope, receive)
            if request is None:
                return
            if request.path in COMPLETION_PATHS and request.method == "POST":
                with self.concurrency.enter():
                    await self._answer_by_one(request, receive, send)
            else:
                await self._answer_by_all(request, receive, send)
        except ApiError as error:
            await send_error(send, error)

    async def _answer_by_all(self, request: Forwarded, receive: Receive, send: Send) -> None:
        replica_set = self.replica_set
        match request.path, request.method:
            case "/health", "GET" | "HEAD":
                report = await health(replica_set, self.concurrency)
            case "/metrics", "GET":
                report = metrics(replica_set, await replica_set.ask_all(request))
            case "/v1/policy", "GET":
                report = policies(await replica_set.ask_all(request))
            case _, "GET" | "HEAD" | "OPTIONS":
                await self._answer_by_one(request, receive, send)
                return
            case path, _ if not path.startswith(POLICY_PATH):
                await self._answer_by_one(request, receive, send)
                return
            case _:
                report = combine(*await replica_set.change_all(request))
        await send_response(send, report.status, report.headers, report.body)

    async def _answer_by_one(self, request: Forwarded, receive: Receive, send: Send) -> None:
        """Answer unless the client disconnects or the server stops first."""
        answer = _Answer(send)
        answering = asyncio.create_task(self._answer(request, answer))
        leaving = asyncio.create_task(wait_for_disconnect(receive))
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
            await answer.fail(
                unavailable("the server is shutting down", "shutting_down"),
                WriteGuard(self.settings.write_timeout_s),
            )

    async def _answer(self, request: Forwarded, answer: "_Answer") -> None:
        guard = WriteGuard(self.settings.write_timeout_s)
        try:
            async with asyncio.timeout(self.settings.request_timeout_s + REPLICA_GRACE_S):
                with guard:
                    await self._try_replicas(request, answer, guard)
            return
        except ApiError as caught:
            error = caught
        except TimeoutError:
            error = ApiError(504, "the replica does not answer", code="timeout")
        await answer.fail(error, WriteGuard(self.settings.write_timeout_s))

    async def _try_replicas(self, request: Forwarded, answer: "_Answer", guard: WriteGuard) -> None:
        """Hand on the answer of one replica; of another if that one is lost before it answers."""
        key = self._routing_key(request)
        lost = unavailable("no replica is well", "no_replica", RETRY_AFTER_S)
        for _ in range(MAX_ATTEMPTS):
            replica = self._choose(key, answer)
            if replica is None:
                break
            try:
                async with aclosing(self.replica_set.fleet.forward(request, replica)) as parts:
                    async for part in parts:
                        await answer.hand_on(part, guard)
                return
            except ReplicaLostError as error:
                self.replica_set.lose(replica)
                message = f"the replica of this request was lost: {error}"
                lost = unavailable(message, "replica_lost", RETRY_AFTER_S)
                if answer.begun:
                    break
            finally:
                self._forget(key, answer)
        raise lost

    def _choose(self, key: "RoutingKey", answer: "_Answer") -> str | None:
        rule = self.replica_set.rule
        if not rule.replicas:
            return None
        if key.request_id is not None and key.request_id in self._by_id:
            # A request of this id is under way: the replica that has it answers 409.
            return self._by_id[key.request_id][0]
        replica = rule.route(answer, key.prefix, key.num_outputs).ranked[0]
        if key.request_id is not None:
            self._by_id[key.request_id] = (replica, answer)
        return replica

    def _forget(self, key: "RoutingKey", answer: "_Answer") -> None:
        self.replica_set.rule.end(answer)
        id = key.request_id
        if id is not None and id in self._by_id and self._by_id[id][1] is answer:
            del self._by_id[id]

    def _routing_key(self, request: Forwarded) -> "RoutingKey":
        members = self.replica_set.members
        if request.method != "POST" or not members:
            return RoutingKey()
        member = next(iter(members.values()))
        key = routing_key_of(request.body, member.block_size)
        header_id = Headers(raw=list(request.headers)).get(ID_HEADER)
        prefix = key.prefix if member.shares_prefixes else ()
        return RoutingKey(prefix, key.num_outputs, key.request_id or header_id)


class _Answer:
    """What the client has got so far."""

    def __init__(self, send: Send) -> None:
        self.begun = False
        self.complete = False
        self._send = send
        self._is_stream = False

    async def hand_on(self, part: BodyPart, guard: WriteGuard) -> None:
        """Send a part of a replica's answer. `guard` limits the time of the write."""
        if part.status is not None:
            self.begun = True
            self._is_stream = any(
                name == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in part.headers
            )
            start = {"status": part.status, "headers": list(part.headers)}
            await self._send({"type": "http.response.start"} | start)
        if part.body or part.last:
            await guard.send(self._send, part.body, part.last)
        self.complete = part.last

    async def fail(self, error: ApiError, guard: WriteGuard) -> None:
        """Send an error; an answer that has begun and is no stream can only be broken off."""
        if not self.begun:
            self.begun = self.complete = True
            await send_error(self._send, error)
        elif self._is_stream and error.code != "slow_reader":
            with guard:
                await guard.send(self._send, event(error.body) + DONE, last=True)
            self.complete = True


async def _read(scope: Scope, receive: Receive) -> Forwarded | None:
    """Return the request with its whole body; None if the client disconnects."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
    return Forwarded(scope["method"], scope["path"], scope["query_string"], headers, bytes(body))


async def _run_lifespan(
    receive: Receive,
    send: Send,
    start: Callable[[], Awaitable[None]],
    stop: Callable[[], Awaitable[None]],
) -> None:
    """Run `start` and `stop` at the server's start and end, as ASGI asks for them."""
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


@dataclass(frozen=True)
class RoutingKey:
    """What of a request decides its replica.

    Attributes:
        prefix: a key for each full block of its prompt.
        num_outputs: how many outputs it asks for.
        request_id: the caller's own id, or None.
    """

    prefix: tuple[int, ...] = ()
    num_outputs: int = 1
    request_id: str | None = None


def routing_key_of(body: bytes, block_size: int) -> RoutingKey:
    """Return the routing key of a body that has not been checked, without a tokenizer.

    A prompt of token ids is cut where the engine cuts it; a text or a conversation is cut into
    pieces of about as many tokens. Of several prompts the first one counts. A body that makes no
    sense has an empty key: the replica that gets it refuses it.
    """
    try:
        fields = json.loads(body)
    except ValueError:
        return RoutingKey()
    if not isinstance(fields, dict):
        return RoutingKey()
    prompts = _prompts(fields)
    n, id = fields.get("n"), fields.get("request_id")
    num_copies = n if isinstance(n, int) and n > 0 else 1
    return RoutingKey(
        _block_keys(prompts[0], block_size) if prompts else (),
        max(len(prompts), 1) * num_copies,
        id if isinstance(id, str) else None,
    )


def _prompts(fields: Mapping[str, Any]) -> list[Any]:
    """Return the prompts: texts or lists of ids. A conversation is one text."""
    messages = fields.get("messages")
    if isinstance(messages, list):
        # A template puts the tools before the messages. A conversation begins as it did a turn ago.
        texts = (json.dumps(each, ensure_ascii=False, sort_keys=True) for each in messages)
        return [json.dumps(fields.get("tools")) + "".join(texts)]
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt
    return [] if prompt is None else [prompt]


def _block_keys(prompt: Any, block_size: int) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return prefix_keys(prompt.encode("utf-8", "surrogatepass"), block_size * BYTES_PER_TOKEN)
    if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
        return prefix_keys(prompt, block_size)
    return ()


@dataclass(frozen=True)
class Reply:
    """The whole answer of one replica; status 0 and the reason as body if it gave none."""

    member: Member
    status: int
    headers: RawHeaders
    body: bytes

    @property
    def done(self) -> bool:
        """Whether the replica did what it was asked."""
        return 200 <= self.status < 300

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object; one that is none becomes a reason."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return {"reason": self.body[:500].decode(errors="replace")}
        return found if isinstance(found, dict) else {"answer": found}

    def why(self) -> str:
        """Return why the replica did not do it."""
        found = self.json()
        error = found.get("error")
        if isinstance(error, dict):
            return str(error.get("message"))
        return str(found.get("reason", self.status))


def undo_of(change: Forwarded, done: Reply) -> Forwarded:
    """Return the request that undoes a change of policy in the replica that has made it."""
    lane = json.loads(done.body)
    headers = tuple(pair for pair in change.headers if pair[0].lower() != b"content-length")
    body = to_json({"lane": lane["lane"], "digest": lane["digest"]})
    return replace(change, path=f"{POLICY_PATH}/undo", headers=headers, body=body)


class ReplicaSet:
    """The replicas as last seen, and the rule that chooses among the healthy ones.

    Attributes:
        fleet: how replicas are reached.
        rule: knows the replicas that may be sent requests.
        members: all replicas that answered at the last look, by id.
        num_lost: how often a replica was lost.
    """

    def __init__(self, fleet: Fleet, slack: LoadSlack | None = None) -> None:
        self.fleet = fleet
        self.rule = PrefixAffinity(1, slack)
        self.members: dict[str, Member] = {}
        self.num_lost = 0
        self._changes: list[Forwarded] = []  # the last ones that every replica has carried out
        self._num_changes = 0  # in all
        self._num_carried_out: dict[str, int] = {}  # by replica
        self._looking = asyncio.Lock()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Look at the replicas once, and from then on every second."""
        await self.look()
        self._task = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        """End the looks; one under way is finished."""
        self._closing.set()
        if self._task is not None:
            await self._task
        await self.fleet.close()

    async def look(self) -> None:
        """Ask which replicas are there; new ones carry out the changes before any request."""
        async with self._looking:
            present = {member.id: member for member in await self.fleet.members()}
            self._num_carried_out = {id: self._num_carried_out.get(id, 0) for id in present}
            for member in present.values():
                await self._catch_up(member)
            self._set_members(present)

    def lose(self, replica: str) -> None:
        """Send nothing to a replica that did not answer, until it is seen again."""
        if replica in self.members:
            LOG.warning("replica %s is lost", self.members[replica].name)
            self.num_lost += 1
            left = {id: member for id, member in self.members.items() if id != replica}
            self._set_members(left)

    async def ask_all(self, request: Forwarded) -> list[Reply]:
        """Send the same request to every replica at once; return the replies, by name."""
        members = sorted(self.members.values(), key=lambda member: member.name)
        return list(await asyncio.gather(*(self._ask(member, request) for member in members)))

    async def change_all(self, request: Forwarded) -> tuple[list[Reply], list[Reply]]:
        """Ask all replicas for a change; one that all make is also asked of later replicas.

        A change of policy that only some make is undone there: the second list has the replies to
        that.
        """
        async with self._looking:
            replies = await self.ask_all(request)
            done = [reply for reply in replies if reply.done]
            if done and len(done) < len(replies) and request.path == POLICY_PATH:
                undoing = (self._ask(reply.member, undo_of(request, reply)) for reply in done)
                return replies, list(await asyncio.gather(*undoing))
            if done and len(done) == len(replies):
                self._changes = [*self._changes, request][-MAX_CHANGES:]
                self._num_changes += 1
                for reply in replies:
                    self._num_carried_out[reply.member.id] = self._num_changes
        return replies, []

    async def _ask(self, member: Member, request: Forwarded) -> Reply:
        status, body = 0, b""
        headers: RawHeaders = ()
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                async for part in self.fleet.forward(request, member.id):
                    if part.status is not None:
                        status, headers = part.status, part.headers
                    body += part.body
        except TimeoutError:
            return Reply(member, 0, (), f"no answer within {REPLY_TIMEOUT_S:g} s".encode())
        except ReplicaLostError as error:
            return Reply(member, 0, (), str(error).encode())
        return Reply(member, status, headers, body)

    async def _catch_up(self, member: Member) -> None:
        missing = self._num_changes - self._num_carried_out[member.id]
        if not missing:
            return
        for change in self._changes[-missing:]:
            reply = await self._ask(member, change)
            if not reply.done:
                LOG.error("replica %s cannot catch up: %s", member.name, reply.why())
                return
        self._num_carried_out[member.id] = self._num_changes

    def _set_members(self, present: dict[str, Member]) -> None:
        self.members = present
        healthy = [
            member
            for member in present.values()
            if member.trouble is None and self._num_carried_out[member.id] == self._num_changes
        ]
        if healthy:
            self.rule.capacity_blocks = max(1, min(member.num_blocks for member in healthy))
        self.rule.set_replicas(member.id for member in healthy)

    async def _keep_looking(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._closing.wait()
                return
            try:
                await self.look()
            except Exception as error:
                LOG.error("the replicas cannot be seen: %s", error)


# one answer from those of all replicas


@dataclass(frozen=True)
class Report:
    """One answer of the front."""

    status: int
    headers: RawHeaders
    body: bytes


def _json_report(status: int, body: Mapping[str, Any]) -> Report:
    return _report(status, b"application/json", to_json(body))


def _report(status: int, content_type: bytes, body: bytes) -> Report:
    length = str(len(body)).encode()
    return Report(status, ((b"content-type", content_type), (b"content-length", length)), body)


async def health(replica_set: ReplicaSet, concurrency: ConcurrencyLimit) -> Report:
    """Report 200 while some replica takes requests, "ok" only when all do; otherwise 503.

    Each replica has a row: its own answer, its process, and the outputs sent there that are open.
    """
    replies = {
        reply.member.name: reply for reply in await replica_set.ask_all(Forwarded("GET", "/health"))
    }
    rows: dict[str, dict[str, Any]] = {}
    loads = replica_set.rule.loads
    for name in _names(replica_set):
        reply = replies.get(name)
        if reply is None:
            rows[name] = {"status": "gone"}
            continue
        member = reply.member
        rows[name] = {**reply.json(), "pid": member.pid, "sent": loads.get(member.id, 0)}
        if not reply.done:
            rows[name]["status"] = "unhealthy"
        elif member.id not in loads:
            reason = member.trouble or "not caught up yet"
            rows[name] |= {"status": "unhealthy", "reason": reason}
    num_healthy = sum(row["status"] == "ok" for row in rows.values())
    status = "ok" if num_healthy == len(rows) else "degraded" if num_healthy else "unhealthy"
    status = "draining" if concurrency.closed else status
    body = {
        "status": status,
        "under_way": concurrency.num_active,
        "replicas_wanted": replica_set.fleet.num_wanted,
        "replicas": rows,
    }
    return _json_report(200 if status in ("ok", "degraded") else 503, body)


def combine(replies: Sequence[Reply], undone: Sequence[Reply] = ()) -> Report:
    """Report the first replica's answer, with the answers of all under "replicas".

    A refusal by all replicas is handed on. `undone` are the replies of those that undid what others
    refused.

    Raises:
        ApiError: 503 without a replica. 409 where some refused what others did, and it was undone
            wherever it had been done. 502 where the replicas may disagree now.
    """
    if not replies:
        raise unavailable("no replica is there", "no_replica", 2)
    first = replies[0]
    if len({reply.status for reply in replies}) == 1 and first.status and not first.done:
        return Report(first.status, first.headers, first.body)
    if not all(reply.done for reply in replies):
        raise _disagreement(replies, undone)
    rows = {reply.member.name: reply.json() for reply in replies}
    return _json_report(first.status, {**first.json(), "replicas": rows})


def _disagreement(replies: Sequence[Reply], undone: Sequence[Reply]) -> ApiError:
    done = [reply.member.name for reply in replies if reply.done]
    failed = [reply for reply in replies if not reply.done]
    message = (
        f"not done by every replica ({_reasons(failed)}); done by: {', '.join(done) or 'none'}"
    )
    not_undone = [reply for reply in undone if not reply.done]
    if undone and not not_undone:
        message += ", and taken back there"
        if all(reply.status for reply in failed):
            return ApiError(409, f"{message}: nothing has changed", code="not_by_all")
    elif not_undone:
        message += f"; it could not be taken back everywhere ({_reasons(not_undone)})"
    return ApiError(502, message, code="replicas_disagree")


def _reasons(replies: Sequence[Reply]) -> str:
    return "; ".join(f"replica {reply.member.name}: {reply.why()}" for reply in replies)


def policies(replies: Sequence[Reply]) -> Report:
    """Report `combine` of `GET /v1/policy`; a lane whose policy differs has the digest null.

    So a client never takes one replica's policy for that of all. Raises as `combine`.
    """
    report = combine(replies)
    if report.status != 200:
        return report
    body = json.loads(report.body)
    lanes = [
        {row["lane"]: row["digest"] for row in found.get("lanes", ())}
        for found in body["replicas"].values()
    ]
    for row in body.get("lanes", ()):
        if len({digests.get(row["lane"]) for digests in lanes}) > 1:
            row |= {"policy": "not the same in every replica", "digest": None, "toml": None}
    agree = all(row["digest"] for row in body.get("lanes", ()))
    return _json_report(200, {**body, "agree": agree})


def metrics(replica_set: ReplicaSet, replies: Sequence[Reply]) -> Report:
    """Report every replica's samples with its name as a label, and what the front counts.

    A refusal is handed on.
    """
    pages = {reply.member.name: reply.body.decode() for reply in replies if reply.done}
    refused = next((reply for reply in replies if reply.status and not reply.done), None)
    if refused is not None and not pages:
        return Report(refused.status, refused.headers, refused.body)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families([*_merge(pages), *_front_families(replica_set, set(pages))]))
    return _report(200, CONTENT_TYPE_LATEST.encode(), generate_latest(registry))


class _Families(Collector):
    """Metric families that are there already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    @override
    def collect(self) -> list[Metric]:
        return self._families


def _merge(pages: Mapping[str, str]) -> list[Metric]:
    """Merge the pages of the replicas, by name, in Prometheus' text format."""
    families: dict[str, Metric] = {}
    for replica, text in pages.items():
        for found in text_string_to_metric_families(text):
            family = families.setdefault(
                found.name, Metric(found.name, found.documentation, found.type, found.unit)
            )
            for sample in found.samples:
                labels = {REPLICA_LABEL: replica, **sample.labels}
                family.add_sample(
                    sample.name, labels, sample.value, sample.timestamp, sample.exemplar
                )
    return list(families.values())


def _front_families(replica_set: ReplicaSet, answered: set[str]) -> list[Metric]:
    up = GaugeMetricFamily(
        "zlab:replica_up", "Whether the replica answered this scrape.", labels=[REPLICA_LABEL]
    )
    for name in _names(replica_set):
        up.add_metric([name], float(name in answered))
    load = GaugeMetricFamily(
        "zlab:replica_outputs_under_way",
        "Outputs sent to the replica that are open.",
        labels=[REPLICA_LABEL],
    )
    for member in sorted(replica_set.members.values(), key=lambda member: member.name):
        load.add_metric([member.name], replica_set.rule.loads.get(member.id, 0))
    counts = replica_set.rule.counts
    totals = {
        "routed_requests": ("Requests routed to a replica.", counts.num_requests),
        "routed_past_holder": (
            "Of these, routed past a replica that holds more of the prompt.",
            counts.num_passed_over,
        ),
        "routed_blocks": ("Full blocks of the prompts of these requests.", counts.num_blocks),
        "routed_matched_blocks": (
            "Of these, held by the replica as far as the front knows.",
            counts.num_matched_blocks,
        ),
        "replicas_lost": ("Replicas that were lost.", replica_set.num_lost),
    }
    counters = [
        CounterMetricFamily(f"zlab:{name}", help, value=value)
        for name, (help, value) in totals.items()
    ]
    return [up, load, *counters]


def _names(replica_set: ReplicaSet) -> list[str]:
    """Return every replica that there should be, and any other that is there."""
    wanted = {str(number) for number in range(replica_set.fleet.num_wanted)}
    return sorted(wanted | {member.name for member in replica_set.members.values()})

"""A request to a replica over HTTP: how it arrives, how its answer comes back, and what ends it."""

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.engine.server.local_fleet import HttpServer
from tests.engine.server.server_cases import open_tiny
from zlab.engine.server.replicas import fleet
from zlab.engine.server.replicas.fleet import (
    MAX_UNSENT_BYTES,
    Forwarded,
    HttpReplica,
    ReplicaApp,
    ReplicaLostError,
)

ASKED = Forwarded("POST", "/v1/x y", b"a=b%20c", ((b"x", b"y"), (b"connection", b"close")), b"body")
START: Message = {"type": "http.response.start", "status": 201, "headers": [(b"k", b"v")]}
BOUND_S = 60.0
NOT_PACED = 1e12  # parts a second
Story = Callable[[], Awaitable[None]]


def play(story: Story) -> None:
    asyncio.run(asyncio.wait_for(story(), BOUND_S))


def chunk(body: bytes, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not last}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    made = Path(tempfile.mkdtemp(prefix="zlab-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@asynccontextmanager
async def reached(app: ASGIApp, folder: Path, token: str = "") -> Any:
    """The application on a socket, and the front's end of it."""
    server, replica = HttpServer(app, folder / "s"), HttpReplica(folder / "s", token)
    await server.listen()
    try:
        yield replica
    finally:
        await replica.close()
        server.cut_off()


def replica_app(app: ASGIApp, parts_per_s: float = NOT_PACED, **more: Any) -> ReplicaApp:
    """The replica's end, whose application never looks at the server's parts."""
    return ReplicaApp(app, cast(Any, None), "0", parts_per_s=parts_per_s, **more)


def sending(bodies: list[bytes]) -> ASGIApp:
    """An application that sends these one by one, letting others run in between."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        for number, body in enumerate(bodies):
            await send(chunk(body, number == len(bodies) - 1))
            await asyncio.sleep(0.001)

    return app


def test_a_request_arrives_as_it_was_sent_and_its_answer_comes_back(folder: Path) -> None:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        assert (scope["method"], scope["path"]) == ("POST", "/v1/x y")
        assert scope["query_string"] == b"a=b%20c"
        headers = dict(scope["headers"])
        assert (headers[b"x"], headers[b"content-length"]) == (b"y", b"4")
        assert headers.get(b"connection") != b"close", "that header was about another connection"
        assert message["body"] == b"body"
        await send(START)
        await send(chunk(b"done", last=True))

    async def story() -> None:
        async with reached(echo, folder) as replica:
            first, *parts = [part async for part in replica.forward(ASKED)]
            assert (first.status, first.headers, first.last) == (201, ((b"k", b"v"),), False)
            assert b"".join(part.body for part in (first, *parts)) == b"done"
            assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]

    play(story)


async def bodies_of(app: ASGIApp, folder: Path) -> list[bytes]:
    async with reached(app, folder) as replica:
        return [part.body async for part in replica.forward(ASKED) if part.body]


def test_parts_are_joined_within_the_pace_but_the_first_and_the_last_do_not_wait(
    folder: Path,
) -> None:
    bodies = [str(number).encode() for number in range(10)]

    async def story() -> None:
        quick = await bodies_of(replica_app(sending(bodies)), folder)
        assert b"".join(quick) == b"0123456789"
        assert len(quick) > 2
        (folder / "s").unlink()
        slow = await bodies_of(replica_app(sending(bodies), parts_per_s=1e-6), folder)
        assert slow == [b"0", b"123456789"]

    play(story)


def test_paced_parts_come_in_order_and_whole(folder: Path) -> None:
    """A pace of a few milliseconds: timers, direct writes and the end meet in every order."""
    bodies = [f"{number},".encode() for number in range(300)]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        for number, body in enumerate(bodies):
            await send(chunk(body, number == len(bodies) - 1))
            await asyncio.sleep(0.002 if number % 7 == 0 else 0)

    async def story() -> None:
        parts = await bodies_of(replica_app(app, parts_per_s=500.0), folder)
        assert b"".join(parts) == b"".join(bodies)
        assert 2 < len(parts) < len(bodies)

    play(story)


@pytest.mark.parametrize("parts_per_s", [NOT_PACED, 1e-6])
def test_an_answer_that_is_not_read_waits(folder: Path, parts_per_s: float) -> None:
    piece, count = b"x" * 65536, 256
    sent = 0

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send(START)
        for number in range(count):
            await send(chunk(piece, number == count - 1))
            sent += 1

    async def story() -> None:
        async with (
            reached(replica_app(large, parts_per_s), folder) as replica,
            aclosing(replica.forward(ASKED)) as parts,
        ):
            await anext(parts)
            size = len((await anext(parts)).body)
            for _ in range(200):
                await asyncio.sleep(0.001)
            assert sent < count / 2
            async for part in parts:
                size += len(part.body)
            assert size == count * len(piece)

    assert len(piece) >= MAX_UNSENT_BYTES
    play(story)


def test_closing_is_the_client_going_away(folder: Path) -> None:
    left = asyncio.Event()

    async def patient(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        await send(chunk(b"begun"))
        assert (await receive())["type"] == "http.disconnect"
        left.set()

    async def story() -> None:
        async with reached(replica_app(patient), folder) as replica:
            async with aclosing(replica.forward(ASKED)) as parts:
                await anext(parts)
                assert (await anext(parts)).body == b"begun"
            await left.wait()

    play(story)


def test_an_answer_that_is_broken_off_is_told_apart_from_one_that_ends(folder: Path) -> None:
    async def breaks(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(chunk(b"begun"))
        raise RuntimeError("a fault")

    async def story() -> None:
        async with reached(replica_app(breaks), folder) as replica:
            parts = replica.forward(ASKED)
            assert [(await anext(parts)).body for _ in range(2)] == [b"", b"begun"]
            with pytest.raises(ReplicaLostError, match="RemoteProtocolError"):
                await anext(parts)

    play(story)


def test_a_replica_that_is_not_there_is_lost(folder: Path) -> None:
    async def story() -> None:
        replica = HttpReplica(folder / "nothing")
        with pytest.raises(ReplicaLostError, match="ConnectError"):
            await replica.member()
        await replica.close()

    play(story)


def test_only_the_front_may_ask_a_replica_that_has_a_token(folder: Path) -> None:
    async def story() -> None:
        app = replica_app(sending([b"a", b"b"]), token="secret")
        async with reached(app, folder, token="secret") as replica:
            other = HttpReplica(folder / "s", "guessed")
            assert (await anext(other.forward(ASKED))).status == 403
            await other.close()
            assert (await anext(replica.forward(ASKED))).status == 201

    play(story)


def test_a_replica_says_what_the_front_has_to_know(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = open_tiny([])

    async def story() -> None:
        app = ReplicaApp(sending([b""]), context, "7", parts_per_s=NOT_PACED)
        async with reached(app, folder) as replica:
            member = await replica.member()
            assert (member.name, member.block_size, member.num_blocks) == ("7", 8, 20)
            assert (member.shares_prefixes, member.trouble) == (True, None)
            assert replica.member_id == member.id
            release = asyncio.Event()
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(fleet, "ENGINE_TIMEOUT_S", 0.01)
            context.worker.call(
                lambda _: asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
            )
            assert "has ended no step" in ((await replica.member()).trouble or "")
            release.set()
            await asyncio.to_thread(context.close)
            assert (await replica.member()).trouble == "the engine is stopped"

    play(story)

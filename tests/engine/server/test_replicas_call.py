"""A request carried to an application in process: how its answer comes in parts, and what ends it early."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server import replicas_call
from engine.server.replicas_call import MOST_UNREAD_BYTES, BrokenAnswerError, Forwarded, Part, answer

ASKED = Forwarded("POST", "/v1/x", b"a=b", ((b"x", b"y"),), b"the body", ("127.0.0.1", 5))
START: Message = {"type": "http.response.start", "status": 201, "headers": [(b"k", b"v")]}
BOUND_S = 20.0
Story = Callable[[], Awaitable[None]]


def play(story: Story) -> None:
    asyncio.run(asyncio.wait_for(story(), BOUND_S))


def chunk(body: bytes, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not last}


def sending(bodies: list[bytes]) -> ASGIApp:
    """Sends these one by one, letting others run in between."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        for number, body in enumerate(bodies):
            await send(chunk(body, number == len(bodies) - 1))
            await asyncio.sleep(0.001)

    return app


async def parts_of(app: ASGIApp, pace_s: float = 0.0) -> list[Part]:
    return [part async for part in answer(app, ASKED, lambda: pace_s)]


def test_the_application_is_asked_as_by_a_server_and_its_answer_comes_back() -> None:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/v1/x", b"a=b")
        assert (scope["headers"], scope["client"]) == ([(b"x", b"y")], ("127.0.0.1", 5))
        assert message == {"type": "http.request", "body": b"the body", "more_body": False}
        await send(START)
        await send(chunk(b"done", last=True))

    async def story() -> None:
        assert await parts_of(echo) == [Part(b"done", True, 201, ((b"k", b"v"),))]

    play(story)


def test_what_comes_within_a_pace_is_one_part_but_first_and_last_wait_for_nothing() -> None:
    bodies = [str(number).encode() for number in range(10)]

    async def story() -> None:
        quick = await parts_of(sending(bodies), pace_s=0.0)
        assert len(quick) > 2
        slow = await parts_of(sending(bodies), pace_s=3600.0)
        assert [part.body for part in slow] == [b"0", b"123456789"]
        for parts in (quick, slow):
            assert b"".join(part.body for part in parts) == b"0123456789"
            assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
            assert [part.status for part in parts] == [201] + [None] * (len(parts) - 1)

    play(story)


def test_an_answer_that_nobody_reads_waits() -> None:
    piece, count = b"x" * 65536, 64
    sent = 0

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send(START)
        for number in range(count):
            await send(chunk(piece, number == count - 1))
            sent += 1

    async def story() -> None:
        async with aclosing(answer(large, ASKED, lambda: 0.0)) as parts:
            size = len((await anext(parts)).body)
            for _ in range(100):
                await asyncio.sleep(0)
            assert sent * len(piece) <= size + MOST_UNREAD_BYTES + len(piece)
            async for part in parts:
                size += len(part.body)
            assert size == count * len(piece)

    play(story)


def test_closing_is_the_client_going_away() -> None:
    seen: list[object] = []

    async def patient(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        await send(chunk(b"begun"))
        seen.append((await receive())["type"])
        try:
            await send(chunk(b"too late"))
        except OSError as error:
            seen.append(str(error))

    async def story() -> None:
        async with aclosing(answer(patient, ASKED, lambda: 0.0)) as parts:
            assert (await anext(parts)).body == b"begun"
        assert seen == ["http.disconnect", "the client has gone"]

    play(story)


def test_an_application_that_does_not_notice_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()

    async def deaf(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(chunk(b"begun"))
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def story() -> None:
        monkeypatch.setattr(replicas_call, "GRACE_S", 0.01)
        async with aclosing(answer(deaf, ASKED, lambda: 0.0)) as parts:
            await anext(parts)
        await ended.wait()

    play(story)


def test_an_application_that_breaks_is_told_apart_from_one_that_ends() -> None:
    async def breaks(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(chunk(b"begun"))
        raise RuntimeError("a fault")

    async def mute(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    async def story() -> None:
        async with aclosing(answer(breaks, ASKED, lambda: 0.0)) as parts:
            assert await anext(parts) == Part(b"begun", False, 201, ((b"k", b"v"),))
            with pytest.raises(BrokenAnswerError, match="a fault"):
                await anext(parts)
        with pytest.raises(BrokenAnswerError, match="no answer"):
            await parts_of(mute)

    play(story)

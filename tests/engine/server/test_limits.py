"""Every bound of the server: what is over it is told so, by status, field and numbers, and nothing
is left behind.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from tests.engine.engine_cases import SMALL
from tests.engine.server.server_cases import (
    ROOMY,
    WAIT_S,
    Served,
    assert_free,
    served,
    sse,
    wait_for,
)
from zlab.engine.errors import EngineError
from zlab.engine.server.app import create_app
from zlab.engine.server.context import ServerSettings
from zlab.engine.server.middleware import Keys, read_keys
from zlab.traces.schema import Phase

COMPLETIONS = "/v1/completions"
ASKED: dict[str, Any] = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, "prompt": "abc"}


def error_of(answer: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert code is None or error["code"] == code
    return error


# bodies


@pytest.fixture(scope="module")
def narrow() -> Iterator[Served]:
    settings = ServerSettings(max_body_bytes=2000, max_prompt_tokens=50, max_outputs=6)
    with served(settings=settings) as running:
        yield running


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_413(narrow: Served, chunked: bool) -> None:
    body = json.dumps(ASKED | {"prompt": "x" * 3000}).encode()
    content: Any = (
        (body[start : start + 500] for start in range(0, len(body), 500)) if chunked else body
    )
    with narrow.http() as client:
        answer = client.post(
            COMPLETIONS, content=content, headers={"Content-Type": "application/json"}
        )
        assert "2000 bytes" in error_of(answer, 413, "body_too_large")["message"]
        assert answer.headers["connection"] == "close", "the rest of the body is not read"
        assert client.post(COMPLETIONS, json=ASKED).status_code == 200
    narrow.assert_all_free()


def test_a_body_that_does_not_come_is_408() -> None:
    """A server of its own: on a busy machine even a whole body may take as long as this limit."""
    with served(settings=ServerSettings(body_timeout_s=0.2)) as server:
        with server.connect() as slow:
            head = (
                f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: "
                f"application/json\r\nContent-Length: 100\r\n\r\n"
            )
            slow.sendall(head.encode() + b'{"prompt": ')
            answer = b""
            while piece := slow.recv(4096):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"body_timeout" in answer
        server.assert_all_free()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"a"', b"\xff", b'{"prompt": "\\ud800"}', b'{"prompt": NaN}'],
)
def test_what_is_no_request_is_400(narrow: Served, body: bytes) -> None:
    with narrow.http() as client:
        error_of(
            client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"}),
            400,
        )
        assert (
            client.post(
                COMPLETIONS, content=b"{}", headers={"Content-Type": "text/plain"}
            ).status_code
            == 400
        )


def test_long_prompts_and_many_outputs_are_400(narrow: Served) -> None:
    error = error_of(
        narrow.post(COMPLETIONS, ASKED | {"prompt": "x" * 51}), 400, "context_length_exceeded"
    )
    assert error["param"] == "prompt"
    assert "51 tokens" in error["message"]
    assert "50" in error["message"]
    which = error_of(narrow.post(COMPLETIONS, ASKED | {"prompt": ["a", "x" * 51]}), 400)
    assert which["message"].startswith("prompt 1 has")
    drawn = ASKED | {"temperature": 1.0}
    assert error_of(narrow.post(COMPLETIONS, drawn | {"n": 7}), 400)["param"] == "n"
    assert (
        error_of(narrow.post(COMPLETIONS, drawn | {"prompt": ["a", "b", "c"], "n": 3}), 400)[
            "param"
        ]
        == "n"
    )
    assert (
        error_of(narrow.post(COMPLETIONS, ASKED | {"prompt": ["a"] * 7}), 400)["param"] == "prompt"
    )
    assert (
        narrow.post(
            COMPLETIONS, drawn | {"prompt": ["a", "b"], "n": 3, "max_tokens": 1}
        ).status_code
        == 200
    )
    narrow.assert_all_free()


def test_what_can_never_fit_is_400_with_need_and_capacity() -> None:
    with served(replace(SMALL, policy="full-kv", num_blocks=6)) as server:
        error = error_of(
            server.post(COMPLETIONS, ASKED | {"prompt": "x" * 56, "max_tokens": 20}),
            400,
            "never_fits",
        )
        assert error["param"] == "prompt"
        assert "needs 10 blocks of 8 tokens" in error["message"]
        assert "the pool has 6" in error["message"]
        error = error_of(
            server.post(COMPLETIONS, ASKED | {"prompt": "x" * 400}), 400, "context_length_exceeded"
        )
        assert "400" in error["message"]
        several = server.post(COMPLETIONS, ASKED | {"prompt": ["a", "x" * 400, "b"]})
        assert error_of(several, 400)["message"].startswith("prompt 1: ")
        server.assert_all_free()
        assert (
            server.gate.reasons[next(id for id in server.gate.reasons if id.endswith("/0"))]
            == "abort"
        )
        assert server.post(COMPLETIONS, ASKED).status_code == 200


# how many at once


def retry_after(answer: httpx.Response) -> int:
    return int(answer.headers["Retry-After"])


def test_more_at_once_than_allowed_is_429() -> None:
    with served(settings=ServerSettings(max_concurrent=2)) as server:
        server.gate.close()
        inside = [server.later(COMPLETIONS, ASKED) for _ in range(2)]
        wait_for(lambda: server.context.concurrency.num_active == 2, "two inside")
        answer = server.post(COMPLETIONS, ASKED)
        assert error_of(answer, 429, "too_many_requests")["type"] == "rate_limit_error"
        assert 1 <= retry_after(answer) <= 60
        server.gate.open()
        assert [later.answer().status_code for later in inside] == [200, 200]
        assert server.post(COMPLETIONS, ASKED).status_code == 200


def test_a_full_queue_is_429_and_a_burst_is_none() -> None:
    with served(replace(ROOMY, max_running=2), ServerSettings(max_queue=1)) as server:
        server.gate.close()
        first = [server.later(COMPLETIONS, ASKED) for _ in range(3)]
        server.sent(3)
        server.step_until(Phase.DECODE)
        server.gate.let_through(
            3
        )  # two run, one waits: a step is looked at between any two that come
        assert sorted(request.phase for request in server.requests()) == [
            Phase.QUEUED,
            Phase.DECODE,
            Phase.DECODE,
        ]
        fourth = server.later(COMPLETIONS, ASKED)
        server.sent(4)
        server.gate.let_through()
        answer = fourth.answer()
        error_of(answer, 429, "queue_full")
        assert 1 <= retry_after(answer) <= 60
        server.gate.open()
        assert [later.answer().status_code for later in first] == [200] * 3


# how long


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_takes_too_long_is_ended(streamed: bool) -> None:
    """However far it has come by then: the engine stands still, so that no answer could ever be
    whole.
    """
    with served(settings=ServerSettings(request_timeout_s=1.0)) as server:
        server.gate.close()
        answer = server.post(COMPLETIONS, ASKED | {"stream": streamed, "request_id": "slow"})
        if answer.status_code == 200:
            assert streamed
            *_, error, done = sse(answer.text)
            assert done == "[DONE]"
            assert json.loads(error)["error"]["code"] == "timeout"
        else:
            assert "within 1 s" in error_of(answer, 504, "timeout")["message"]
        server.gate.open()
        server.assert_all_free()
        assert server.gate.reasons.get("slow", "abort") == "abort"


class StuckReader:
    """Speaks ASGI with the application, and after some parts of the answer takes no more."""

    def __init__(self, num_parts: int) -> None:
        self._left = num_parts
        self.parts: list[Message] = []
        self._body = [
            json.dumps(ASKED | {"max_tokens": 200, "stream": True, "request_id": "x"}).encode()
        ]

    async def receive(self) -> Message:
        """The request, and then nothing: the connection stays."""
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Message) -> None:
        """Takes a few parts."""
        if not self._left:
            await asyncio.Event().wait()
        self._left -= 1
        self.parts.append(message)

    async def ask(self, server: Served) -> None:
        """Until the application has had enough of it."""
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": COMPLETIONS,
            "headers": headers,
            "query_string": b"",
        }
        app = create_app(server.context)
        async with asyncio.timeout(WAIT_S):
            await app(scope, self.receive, self.send)


@pytest.mark.parametrize("bound", [{"max_unread_tokens": 20}, {"write_timeout_s": 0.3}])
def test_a_reader_that_takes_nothing_holds_nothing(bound: dict[str, Any]) -> None:
    """Too much lies unread: the engine ends it; or too long: the server does. Either way the blocks
    come back.
    """
    limits: dict[str, Any] = {"request_timeout_s": 2 * WAIT_S, "write_timeout_s": 3.0} | bound
    with served(settings=ServerSettings(**limits)) as server:
        reader = StuckReader(5)
        asyncio.run(reader.ask(server))
        assert len(reader.parts) == 5
        server.assert_all_free()
        generated = server.gate.num_tokens["x"]
        assert generated < 200 or "max_unread_tokens" not in bound
        assert server.gate.reasons["x"] == "abort" or generated == 200
        assert server.post(COMPLETIONS, ASKED).status_code == 200


def test_a_fast_reader_is_not_taken_for_a_slow_one() -> None:
    with served(settings=ServerSettings(max_unread_tokens=20)) as server:
        whole = server.post(COMPLETIONS, ASKED | {"max_tokens": 100})
        assert whole.json()["usage"]["completion_tokens"] == 100, (
            "what is not streamed comes in one piece"
        )


def test_a_fault_of_the_server_itself_is_told_without_details(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served() as server:

        def fails(*_: Any) -> Any:
            raise KeyError("somebody's prompt")

        monkeypatch.setattr(server.context.prompts, "completion", fails)
        error = error_of(server.post(COMPLETIONS, ASKED), 500, "internal_error")
        assert "somebody" not in error["message"]
        monkeypatch.undo()
        assert server.post(COMPLETIONS, ASKED).status_code == 200


# who


API, ADMIN = "an-api-key", "an-admin-key"


def bearing(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys() -> None:
    with served(keys=Keys.of([API, "another-key"], [ADMIN])) as server, server.http() as client:
        assert client.get("/health").status_code == 200
        for headers in (
            {},
            bearing("wrong"),
            {"Authorization": "Bearer"},
            bearing(ADMIN),
            {"Authorization": API},
        ):
            answer = client.post(COMPLETIONS, content=b"no JSON", headers=headers)
            error_of(answer, 401, "invalid_api_key")
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert client.get("/v1/models", headers=headers).status_code == 401
        for key in (API, "another-key"):
            assert client.post(COMPLETIONS, json=ASKED, headers=bearing(key)).status_code == 200
        assert server.client(API).models.list().data[0].id == "tiny"
        for key in (API, ADMIN):
            assert client.get("/v1/policy", headers=bearing(key)).status_code == 200
        error_of(client.post("/v1/policy", json={}, headers=bearing(API)), 401, "invalid_admin_key")
        assert client.post("/v1/policy", json={}, headers=bearing(ADMIN)).status_code not in (
            401,
            403,
        )


def test_without_keys_all_may_ask_and_none_administer() -> None:
    with served() as server, server.http() as client:
        assert client.post(COMPLETIONS, json=ASKED, headers=bearing("whatever")).status_code == 200
        for headers in ({}, bearing("some-key")):
            error_of(client.post("/v1/policy", json={}, headers=headers), 403, "no_admin_key")


def test_keys_are_read_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", " from-the-environment ")
    assert read_keys("SOME_KEY", None) == ["from-the-environment"]
    assert read_keys("NO_SUCH_KEY", None) == []
    file = tmp_path / "keys"
    file.write_text("first-of-file\nsecond-of-file\n")
    assert read_keys("SOME_KEY", file) == ["first-of-file", "second-of-file"]
    file.write_text("\n")
    for missing in (file, tmp_path / "nothing"):
        with pytest.raises(EngineError, match=missing.name):
            read_keys("SOME_KEY", missing)
    with pytest.raises(EngineError, match="at least 8 characters"):
        Keys.of(["short"])
    with pytest.raises(EngineError, match="another than the API key"):
        Keys.of([API], [API])
    assert API not in repr(Keys.of([API]))


@pytest.mark.parametrize(
    "name", ["max_body_bytes", "max_concurrent", "request_timeout_s", "max_prompt_tokens"]
)
def test_a_bound_that_lets_nothing_through_is_refused(name: str) -> None:
    bound: dict[str, Any] = {name: 0}
    with pytest.raises(EngineError, match=f"{name} must be more than 0, got 0"):
        ServerSettings(**bound)


def test_no_grace_is_a_choice_and_less_is_none() -> None:
    assert ServerSettings(grace_s=0.0).grace_s == 0.0
    with pytest.raises(EngineError, match=r"grace_s must be 0 or more, got -1\.0"):
        ServerSettings(grace_s=-1.0)


# the end


def test_a_draining_server_lets_nobody_in_and_finishes_what_runs() -> None:
    with served(ends_well=False) as server, server.http() as client:
        server.gate.close()
        running = server.later(COMPLETIONS, ASKED)
        server.sent(1)
        client.get("/health")  # a connection that is kept
        server.process.drain_soon()
        wait_for(lambda: server.context.concurrency.closed, "the drain")
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        answer = client.post(COMPLETIONS, json=ASKED)
        assert "shutting down" in error_of(answer, 503, "shutting_down")["message"]
        assert retry_after(answer) >= 1
        server.gate.open()
        assert running.answer().json()["usage"]["completion_tokens"] == 30
        wait_for(lambda: server.context.worker.state == "stopped", "the end")
        assert server.process.exit_code == 0
        assert_free(list(server.gate.lanes.values()))


def test_a_drain_that_takes_too_long_cuts_off() -> None:
    with served(settings=ServerSettings(grace_s=0.2), ends_well=False) as server:
        server.gate.close()
        running = server.later(COMPLETIONS, ASKED)
        server.sent(1)
        server.process.drain_soon()
        wait_for(lambda: server.process.should_exit, "the end")
        server.gate.open()
        error_of(running.answer(), 503, "shutting_down")
        assert server.process.exit_code == 1

"""Cases B27, B28, B29, B32, B33 and B43 of shared/cases over HTTP."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.engine.engine_cases import SMALL
from tests.engine.server.server_cases import HYBRID, ROOMY, Served, served, sse, wait_for
from zlab.engine.engine import EngineSettings
from zlab.engine.server.protocol import NOT_SUPPORTED, ChatRequest, CompletionRequest
from zlab.traces.schema import Phase, Status

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
CONVERSATION: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["abc", ""], [[1, 2], []]])
def test_b27_an_empty_prompt_is_refused_and_the_others_run(server: Served, prompt: Any) -> None:
    results: list[httpx.Response] = []
    other = threading.Thread(
        target=lambda: results.append(
            server.post(COMPLETIONS, ASKED | {"prompt": "abc", "max_tokens": 20})
        )
    )
    other.start()
    answer = server.post(COMPLETIONS, ASKED | {"prompt": prompt})
    other.join()
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "prompt"
    assert "0 tokens" in error["message"] or "empty" in error["message"]
    assert results[0].json()["usage"]["completion_tokens"] == 20
    server.assert_all_free()


def test_b27_no_messages(server: Served) -> None:
    answer = server.post(CHAT, ASKED | {"messages": []})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("streamed", [False, True])
def test_b28_no_token_is_asked_for(server: Served, streamed: bool) -> None:
    body = ASKED | {
        "prompt": "a prompt that fills some blocks",
        "max_tokens": 0,
        "stream": streamed,
    }
    body |= {"stream_options": {"include_usage": True}} if streamed else {}
    answer = server.post(COMPLETIONS, body)
    assert answer.status_code == 200
    if streamed:
        *chunks, usage, done = sse(answer.text)
        assert done == "[DONE]"
        assert [json.loads(chunk)["choices"][0]["finish_reason"] for chunk in chunks] == ["length"]
        found = json.loads(usage)["usage"]
    else:
        (choice,) = answer.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "length")
        found = answer.json()["usage"]
    assert found["completion_tokens"] == 0
    again = server.post(
        COMPLETIONS, body | {"max_tokens": 1, "stream": False, "stream_options": None}
    ).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 8, "the prefix stays cached"
    server.assert_all_free()


@pytest.mark.parametrize(
    ("path", "param"), [(COMPLETIONS, "max_tokens"), (CHAT, "max_completion_tokens")]
)
def test_b28_a_negative_length_is_refused_with_its_value(
    server: Served, path: str, param: str
) -> None:
    body = {"prompt": "abc"} if path == COMPLETIONS else {"messages": CONVERSATION}
    answer = server.post(path, ASKED | body | {param: -7})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "-7" in answer.json()["error"]["message"]


def test_b29_the_same_id_twice() -> None:
    with served() as server:
        body = ASKED | {"prompt": "abc", "max_tokens": 30}
        server.gate.close()
        first = server.later(COMPLETIONS, body, headers={"X-Request-Id": "x"})
        server.step_until(Phase.DECODE)
        for streamed in (False, True):
            again = server.later(COMPLETIONS, body | {"request_id": "x", "stream": streamed})
            server.sent(2)
            server.gate.let_through()
            refused = again.answer()
            assert refused.status_code == 409
            assert refused.json()["error"]["code"] == "duplicate_request_id"
            assert "'x'" in refused.json()["error"]["message"]
        assert first.waits
        server.gate.open()
        assert first.answer().json()["usage"]["completion_tokens"] == 30
        assert server.gate.num_ended == {"x": 1}
        again_after = server.post(COMPLETIONS, body | {"request_id": "x", "max_tokens": 1})
        assert again_after.status_code == 200, "allowed after it ended"
        assert again_after.headers["X-Request-Id"] == "x"
        assert again_after.json()["id"] == "cmpl-x"
        server.gate.forget()


def test_b29_an_id_must_be_one(server: Served) -> None:
    for header in ("a/b", "a b", "x" * 129, ""):
        answer = server.post(
            COMPLETIONS, ASKED | {"prompt": "abc"}, headers={"X-Request-Id": header}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "X-Request-Id"
    both = server.post(
        COMPLETIONS, ASKED | {"prompt": "abc", "request_id": "a"}, headers={"X-Request-Id": "b"}
    )
    assert both.status_code == 400
    assert both.json()["error"]["param"] == "request_id"


@pytest.mark.parametrize("usage", [None, False, True])
@pytest.mark.parametrize(("path", "n"), [(COMPLETIONS, 1), (CHAT, 1), (CHAT, 3)])
def test_b32_the_shape_of_a_stream(server: Served, path: str, n: int, usage: bool | None) -> None:
    body = ASKED | {"stream": True, "n": n, "temperature": 1.0, "seed": 1}
    body |= {"prompt": "abc"} if path == COMPLETIONS else {"messages": CONVERSATION}
    body |= {} if usage is None else {"stream_options": {"include_usage": usage}}
    answer = server.post(path, body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *texts, done = sse(answer.text)
    assert done == "[DONE]"
    chunks = [json.loads(text) for text in texts]
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 8 * n
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks), "no empty choices but for the usage"
    for index in range(n):
        reasons = [
            c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["index"] == index
        ]
        assert reasons[:-1] == [None] * (len(reasons) - 1)
        assert reasons[-1] == "length"
    assert len({chunk["id"] for chunk in chunks}) == 1
    server.assert_all_free()


TIGHT = replace(ROOMY, num_blocks=16)
PHASES: dict[Phase, tuple[EngineSettings, int]] = {  # with how many steps until its blocks are back
    Phase.QUEUED: (TIGHT, 0),
    Phase.PREFILL: (replace(ROOMY, max_batched_tokens=6), 0),
    Phase.DECODE: (ROOMY, 0),
    Phase.COMPRESSING: (ROOMY, 1),  # the copy may still read them: the next step joins it
    Phase.WAITS_FOR_SLOT: (replace(ROOMY, policy=f"{HYBRID},num_slots=1"), 0),
    Phase.PREEMPTED: (replace(SMALL, num_blocks=16, policy="full-kv"), 0),
}
assert ROOMY.policy == HYBRID


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_b33_a_client_that_is_gone_holds_nothing(phase: Phase, streamed: bool) -> None:
    engine, more_steps = PHASES[phase]
    with served(engine) as server:
        server.gate.close()
        clients = [Leaving(server, f"r{place}", streamed) for place in range(6)]
        server.sent(6)
        victim = server.step_until(phase)
        before = server.requests()
        leaving = next(client for client in clients if client.id == victim.id)
        leaving.leave()
        wait_for(
            lambda: server.context.concurrency.num_active < len(before),
            "the server to see that it has left",
        )
        server.gate.let_through(1)
        assert victim.status is Status.ABORTED
        server.gate.let_through(more_steps)
        assert victim.id not in {request.id for request in server.requests()}
        assert victim.phase is Phase.DONE
        assert not victim.table
        for client in clients:
            client.leave()
        server.gate.open()
        server.assert_all_free()
        assert server.gate.reasons[victim.id] == "abort"


def test_b33_after_three_chunks() -> None:
    with served() as server, server.http() as client:
        body = ASKED | {"prompt": "abc", "max_tokens": 300, "stream": True, "request_id": "x"}
        with client.stream("POST", COMPLETIONS, json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert len([next(lines) for _ in range(3)]) == 3
        server.assert_all_free()
        assert server.gate.reasons == {"x": "abort"}


class Leaving:
    """A client on a thread of its own that hangs up when told to, wherever its request is."""

    def __init__(self, server: Served, id: str, streamed: bool) -> None:
        self.id = id
        body = ASKED | {
            "prompt": f"{id} asks for something long",
            "max_tokens": 90,
            "stream": streamed,
        }
        text = json.dumps(body).encode()
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nX-Request-Id: {id}\r\nContent-Type: "
            f"application/json\r\n"
        )
        self._socket = server.connect()
        self._socket.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)

    def leave(self) -> None:
        """Close the connection."""
        self._socket.close()


def warnings_of(answer: httpx.Response) -> dict[str, str]:
    return {item["param"]: item["message"] for item in answer.json().get("warnings", [])}


def test_b43_an_unknown_field_is_named_with_the_nearest(server: Served) -> None:
    body = {**ASKED, "prompt": "abc", "temprature": 0.3, "redundncy_lambda": 0.2, "zzz": {"a": 1}}
    answer = server.post(COMPLETIONS, body)
    assert answer.status_code == 200
    found = warnings_of(answer)
    assert list(found) == ["temprature", "redundncy_lambda", "zzz"]
    assert "did you mean 'temperature'?" in found["temprature"]
    assert "unknown and was ignored" in found["zzz"]
    streamed = sse(
        server.post(CHAT, ASKED | {"messages": CONVERSATION, "stream": True, "max_token": 3}).text
    )
    (warning,) = json.loads(streamed[0])["warnings"]
    assert warning["param"] == "max_token"
    assert "'max_tokens'" in warning["message"]
    nested = server.post(
        COMPLETIONS, ASKED | {"prompt": "a", "stream_options": {"include_usag": True}}
    )
    assert set(warnings_of(nested)) == {"stream_options", "stream_options.include_usag"}


def test_b43_every_field_of_the_openai_api_works_or_is_named(server: Served) -> None:
    for path, model in ((COMPLETIONS, CompletionRequest), (CHAT, ChatRequest)):
        assert not NOT_SUPPORTED & set(model.model_fields)
        prompt: dict[str, Any] = (
            {"prompt": "abc"} if path == COMPLETIONS else {"messages": CONVERSATION}
        )
        answer = server.post(path, ASKED | prompt | dict.fromkeys(NOT_SUPPORTED, 1))
        assert set(warnings_of(answer)) == NOT_SUPPORTED
        neutral = server.post(path, ASKED | prompt | dict.fromkeys(NOT_SUPPORTED))
        assert not warnings_of(neutral), "null asks for nothing"


def test_b43_a_capped_length_is_a_warning(server: Served) -> None:
    answer = server.post(COMPLETIONS, ASKED | {"prompt": "abc", "max_tokens": 5000})
    assert answer.json()["usage"]["total_tokens"] == ROOMY.max_model_len
    assert "capped at 397 of 5000" in warnings_of(answer)["max_tokens"]

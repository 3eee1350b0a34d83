"""What a stream's chunks say and when: the role with the first token, the finish reason with the
last, warnings on the first chunk, and how a stream ends that fails.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.engine_cases import poisoned
from tests.engine.server.server_cases import Served, served, sse
from zlab.engine.server.completions import ChatFormat, CompletionFormat
from zlab.engine.server.metrics import ServerMetrics

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "temperature": 0.0, "max_tokens": 12, "messages": HELLO},
    COMPLETIONS: {"model": "tiny", "temperature": 0.0, "max_tokens": 12, "prompt": "hello"},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


def chunks_of(server: Served, path: str, **more: Any) -> list[dict[str, Any]]:
    answer = server.post(path, ASKED[path] | {"stream": True} | more)
    assert answer.status_code == 200
    *events, done = sse(answer.text)
    assert done == "[DONE]"
    return [json.loads(data) for data in events]


def text_of(choice: dict[str, Any]) -> str:
    text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
    assert isinstance(text, str)
    return text


def test_the_first_chunk_comes_with_the_first_token_and_the_last_token_with_the_end() -> None:
    """Case T11: the request is accepted, and nothing is said of it until it has a token."""
    with served() as server, server.http() as client:
        server.gate.close()
        with client.stream("POST", CHAT, json=ASKED[CHAT] | {"stream": True}) as answer:
            assert answer.status_code == 200  # the headers have come
            assert server.gate.num_arrived == 1
            assert not any(request.generated for request in server.requests())
            chunks = answer.iter_text()
            server.gate.let_through()
            (first,) = (json.loads(data) for data in sse(next(chunks)))
            delta = first["choices"][0]["delta"]
            assert delta["role"] == "assistant"
            assert len(delta["content"]) == 1
            assert first["choices"][0]["finish_reason"] is None
            server.gate.open()
            rest = sse("".join(chunks))
        last = json.loads(rest[-2])["choices"][0]
        assert rest[-1] == "[DONE]"
        assert last["finish_reason"] == "length"
        assert len(last["delta"]["content"]) >= 1


@pytest.mark.parametrize("path", ASKED)
def test_every_chunk_has_a_token_and_one_of_them_the_finish_reason(
    server: Served, path: str
) -> None:
    whole = server.post(path, ASKED[path] | {"return_token_ids": True}).json()["choices"][0]
    chunks = chunks_of(server, path, return_token_ids=True, ignore_eos=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(choice["token_ids"] for choice in choices)
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "length"
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]


def test_each_output_of_a_chat_has_its_role_once(server: Served) -> None:
    chunks = chunks_of(server, CHAT, n=3, temperature=1.0, seed=4)
    roles: dict[int, list[int]] = {}
    for place, chunk in enumerate(chunks):
        (choice,) = chunk["choices"]
        if "role" in choice["delta"]:
            roles.setdefault(choice["index"], []).append(place)
    assert sorted(roles) == [0, 1, 2]
    for index, places in roles.items():
        assert len(places) == 1
        first = next(p for p, chunk in enumerate(chunks) if chunk["choices"][0]["index"] == index)
        assert places == [first]


@pytest.mark.parametrize("path", ASKED)
def test_warnings_ride_on_the_first_chunk_with_a_token(server: Served, path: str) -> None:
    more = {"no_such_field": 1, "stream_options": {"include_usage": True}}
    chunks = chunks_of(server, path, **more)
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert ["warnings" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert chunks[0]["warnings"][0]["param"] == "no_such_field"
    assert text_of(chunks[0]["choices"][0])
    assert chunks[-1]["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_not_finite_end_the_request_with_an_error(
    path: str, logprobs: bool, temperature: float
) -> None:
    """Case T12: whole, and as a stream that has begun; the next request is served as ever."""
    asked = ASKED[path] | {"temperature": temperature, "seed": 3, "ignore_eos": True}
    if logprobs:
        asked |= {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    metrics = ServerMetrics("tiny")
    with served(observers=[metrics]) as server:
        good = server.post(path, asked | {"return_token_ids": True}).json()["choices"][0]
        token = good["token_ids"][4]
        read = good["token_ids"].index(token) + 1  # tokens up to the one that is poisoned
        with poisoned(token):
            whole = server.post(path, asked)
            streamed = server.post(path, asked | {"stream": True, "return_token_ids": True})
        again = server.post(path, asked | {"return_token_ids": True}).json()["choices"][0]
        page = metrics.exposition(server.context.worker.call).decode()
    assert whole.status_code == 500
    message = whole.json()["error"]["message"]
    assert (
        message == f"the model's logits are not finite (NaN or infinite) at output token {read + 1}"
    )
    assert streamed.status_code == 200
    *events, error, done = sse(streamed.text)
    assert done == "[DONE]"
    assert json.loads(error)["error"]["message"] == message
    choices = [json.loads(data)["choices"][0] for data in events]
    given = [token for choice in choices for token in choice["token_ids"]]
    assert given == good["token_ids"][:read]
    assert not any(choice["finish_reason"] for choice in choices)
    assert again["token_ids"] == good["token_ids"]
    assert 'vllm:corrupted_requests_total{lane="live",model_name="tiny"} 2.0' in page
    assert 'finished_reason="error"' in page


@pytest.mark.parametrize("path", ASKED)
def test_a_fault_of_the_server_behind_an_opened_stream_is_an_event(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = ChatFormat if path == CHAT else CompletionFormat

    def fails(*_: Any) -> Any:
        raise ValueError("somebody's text")

    with served() as server:
        monkeypatch.setattr(kind, "_delta_choice", fails)
        answer = server.post(path, ASKED[path] | {"stream": True})
        monkeypatch.undo()
        assert server.post(path, ASKED[path]).status_code == 200
    error, done = sse(answer.text)
    assert done == "[DONE]"
    found = json.loads(error)["error"]
    assert found["code"] == "internal_error"
    assert "somebody" not in found["message"]


def test_a_client_that_leaves_an_opened_stream_is_no_fault(server: Served) -> None:
    with server.http() as client:
        asked = ASKED[CHAT] | {"stream": True, "max_tokens": 300}
        with client.stream("POST", CHAT, json=asked) as answer:
            assert isinstance(next(answer.iter_bytes()), bytes)
    server.assert_all_free()

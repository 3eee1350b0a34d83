"""Routes besides completions: the tokenizer, the model's limits, the description, other origins."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.engine.engine_cases import SMALL
from tests.engine.server.server_cases import HYBRID, LETTERS, Served, lettered, served, sse
from zlab.engine.errors import EngineError
from zlab.engine.server.context import ServerSettings
from zlab.engine.server.middleware import Keys

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TALK: list[Any] = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "We"}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
API, ADMIN = "an-api-key", "an-admin-key"
ORIGIN = "https://pages.example"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A pool of 64 tokens without compression, in two lanes, keys, and one other origin."""
    with served(
        replace(SMALL, policy="full-kv", num_blocks=8),
        ServerSettings(cors_origins=(ORIGIN,)),
        Keys.of([API], [ADMIN]),
    ) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[httpx.Client]:
    with server.http(headers={"Authorization": f"Bearer {API}"}) as found:
        yield found


# the tokenizer


def test_a_text_becomes_tokens_and_a_text_again(client: httpx.Client) -> None:
    found = client.post("/tokenize", json={"prompt": "ab c", "return_token_strs": True}).json()
    assert found["tokens"] == [LETTERS.index(letter) for letter in "ab c"]
    assert (found["count"], found["token_strs"]) == (4, list("ab c"))
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "ab c"}
    plain = client.post("/tokenize", json={"model": "tiny", "prompt": ""}).json()
    assert (plain["tokens"], plain["token_strs"]) == ([], None)


def test_a_conversation_has_the_tokens_of_its_prompt(client: httpx.Client) -> None:
    tokenizer = lettered().tokenizer
    assert tokenizer is not None
    for use, wanted in (
        ({}, "u:hello\na:We\na:"),
        ({"add_generation_prompt": False}, "u:hello\na:We\n"),
        ({"continue_final_message": True}, "u:hello\na:We"),
        ({"chat_template_kwargs": {"thinks": "x"}}, "u:hello\na:We\na:<x>"),
    ):
        tokens = client.post("/tokenize", json={"messages": TALK} | use).json()["tokens"]
        assert tokenizer.decode(tokens) == wanted
        answer = client.post(CHAT, json={"messages": TALK, "max_tokens": 1} | use).json()
        assert answer["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": TALK}, 400, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "max_tokens": 3}, 400, "max_tokens"),
        ("/tokenize", {"messages": TALK, "chat_template_kwargs": {"continues": True}}, 400,
         "chat_template_kwargs"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": "ab"}, 400, "tokens"),
        (CHAT, {"messages": TALK, "continue_final_message": True, "add_generation_prompt": True},
         400, "continue_final_message"),
    ],
)  # fmt: skip
def test_what_cannot_be_tokenized_is_named(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = client.post(
        path, content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_the_last_message_is_continued(client: httpx.Client) -> None:
    body = {"messages": TALK, "continue_final_message": True, "max_tokens": 12, **GREEDY}
    chat = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    prompt = {"prompt": "u:hello\na:We", "max_tokens": 12, **GREEDY}
    assert chat == client.post(COMPLETIONS, json=prompt).json()["choices"][0]["text"]
    begun = client.post(CHAT, json=body | {"continue_final_message": False}).json()
    assert begun["choices"][0]["message"]["content"] != chat


# limits


def test_the_limits_of_the_model_hold(client: httpx.Client) -> None:
    model = client.get("/v1/models/tiny").json()
    assert client.get("/v1/models").json()["data"] == [model]
    longest = model["max_model_len"]
    assert longest == 65, "8 blocks of 8 tokens; the last token of an output is never stored"
    assert (model["max_prompt_tokens"], model["max_output_tokens"]) == (64, 64)
    for prompt in (1, 40, 64):
        body = {"prompt": [5] * prompt, "max_tokens": longest - prompt, **GREEDY}
        answer = client.post(COMPLETIONS, json=body).json()
        assert answer["usage"]["completion_tokens"] == longest - prompt
        assert "warnings" not in answer
    refused = client.post(COMPLETIONS, json={"prompt": [5] * longest, "max_tokens": 1})
    assert refused.json()["error"]["code"] == "never_fits"


@pytest.mark.parametrize("streamed", [False, True])
def test_an_output_beyond_the_pool_is_capped_like_one_beyond_the_model(
    client: httpx.Client, streamed: bool
) -> None:
    body = {"prompt": [5] * 40, "max_tokens": 60, "stream": streamed, **GREEDY}
    answer = client.post(COMPLETIONS, json=body)
    first = json.loads(sse(answer.text)[0]) if streamed else answer.json()
    (warning,) = first["warnings"]
    assert warning["param"] == "max_tokens"
    assert warning["message"] == "output capped at 25 of 60 tokens by the pool of 8 blocks"
    if not streamed:
        assert first["usage"]["completion_tokens"] == 25
        assert first["choices"][0]["finish_reason"] == "length"


def test_usage_says_what_was_evicted(client: httpx.Client) -> None:
    whole = client.post(COMPLETIONS, json={"prompt": "a" * 40, "max_tokens": 20, **GREEDY}).json()
    none = {"compressions": 0, "evicted_tokens": 0}
    assert whole["usage"]["compression_details"] == none
    with served(replace(SMALL, policy=HYBRID)) as server:
        body = {"prompt": "a" * 60, "max_tokens": 60, **GREEDY}
        answer = server.post(COMPLETIONS, body).json()["usage"]
        found = answer["compression_details"]
        assert found["compressions"] >= 1
        # The budget is three blocks of 8 tokens; at most one block more waits for a compression.
        assert 120 - 32 <= found["evicted_tokens"] <= 120 - 16
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        *_, usage, _ = sse(server.post(COMPLETIONS, streamed).text)
        again = json.loads(usage)["usage"]["compression_details"]
        assert again == found


# the description, other origins, keys


def test_the_page_of_the_routes_needs_no_script_and_has_every_field(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "<script" not in page.text
    description = client.get("/openapi.json").json()
    for path in description["paths"]:
        assert re.search(rf"(GET|POST) {re.escape(path)}<", page.text), path
    for name in description["components"]["schemas"]["ChatRequest"]["properties"]:
        assert f"<code>{name}</code>" in page.text


@pytest.mark.parametrize(
    "path", ["/docs", "/openapi.json", "/tokenize", "/detokenize", "/v1/models", "/elsewhere"]
)
def test_all_but_health_and_metrics_needs_the_key(server: Served, path: str) -> None:
    with server.http() as anyone:
        assert anyone.get(path).status_code == 401
        assert anyone.get("/health").status_code == 200


def test_health_by_head_has_no_body(client: httpx.Client) -> None:
    answer = client.head("/health")
    assert (answer.status_code, answer.content) == (200, b"")


def test_pages_of_an_origin_may_call_and_others_may_not(
    server: Served, client: httpx.Client
) -> None:
    asking = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    with server.http() as browser:  # it asks first, without the key
        allowed = browser.options(COMPLETIONS, headers=asking)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        other = browser.options(COMPLETIONS, headers=asking | {"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
    answer = client.get("/v1/models", headers={"Origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN


@pytest.mark.parametrize("origin", ["", "pages.example", "https://a/b", "ftp://a"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(EngineError, match="an origin is"):
        ServerSettings(cors_origins=(origin,))


# policies with code of their own


@pytest.mark.parametrize(
    "source", ["a.py", "a", ":", "/:C", "../..:C", "a.py:", "a.py:1", "a\0.py:C", "x" * 300]
)
def test_a_source_without_a_class_is_400(server: Served, source: str) -> None:
    from zlab.policies.spec import load_policy, policy_digest, policy_to_toml

    policy = load_policy("full-kv")
    body = {
        "lane": "live",
        "policy": policy_to_toml(policy),
        "digest": policy_digest(policy),
        "sources": {source: "class C:\n    pass\n"},
        "who": "ada",
    }
    answer = server.post("/v1/policy", body, headers={"Authorization": f"Bearer {ADMIN}"})
    assert answer.status_code == 400
    assert "FILE.py:Class" in answer.json()["error"]["message"]


def test_a_policy_judged_in_another_setup_is_409(server: Served) -> None:
    from zlab.policies.spec import load_policy, policy_digest, policy_to_toml

    policy = load_policy("nano-vllm")
    change = {
        "lane": "live",
        "policy": policy_to_toml(policy),
        "digest": policy_digest(policy),
        "who": "ada",
    }
    with server.http(headers={"Authorization": f"Bearer {ADMIN}"}) as admin:
        own = admin.get("/v1/policy").json()["lanes"][0]["setup"]
        assert own == {
            "gpu": "cpu",
            "model": lettered().config.name,
            "dtype_bytes": 4,
            "num_blocks": [8, 8],
            "block_size": SMALL.block_size,
        }
        judged = own | {"num_blocks": 8}
        others = {
            "gpu": "h200",
            "model": "qwen3-8b",
            "dtype_bytes": 2,
            "num_blocks": 9,
            "block_size": 256,
        }
        for name, other in others.items():
            setup = judged | {name: other}
            answer = admin.post("/v1/policy", json=change | {"setup": setup})
            assert answer.status_code == 409
            message = answer.json()["error"]["message"]
            assert f"{name} is" in message
            assert f"and {other} in the evidence" in message
        assert admin.get("/v1/policy").json()["lanes"][0]["why"] == "start"
        answer = admin.post("/v1/policy", json=change | {"setup": judged})
        assert answer.status_code == 200

"""What the affinity rule is told of a body: keys that grow with the conversation, and how much is
asked for.
"""

import json
from typing import Any

import pytest

from zlab.engine.server.replicas.router import BYTES_PER_TOKEN, RoutingKey, routing_key_of
from zlab.policies.routing import prefix_keys

BLOCK_SIZE = 4
LONG = "tell me about schedulers, their queues and their clocks. " * 4


def demand(**fields: Any) -> RoutingKey:
    return routing_key_of(json.dumps(fields).encode(), BLOCK_SIZE)


def chat(*texts: str, **fields: Any) -> RoutingKey:
    roles = ("user", "assistant")
    return demand(
        messages=[{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)],
        **fields,
    )


def test_token_ids_are_cut_where_the_engine_cuts_them() -> None:
    assert demand(prompt=list(range(11))).prefix == prefix_keys(range(11), BLOCK_SIZE)
    assert len(demand(prompt=list(range(11))).prefix) == 2


def test_a_text_is_cut_in_pieces_of_about_a_block() -> None:
    keys = demand(prompt=LONG).prefix
    assert len(keys) == len(LONG) // (BLOCK_SIZE * BYTES_PER_TOKEN)
    assert demand(prompt=LONG + "and more").prefix[: len(keys)] == keys
    assert set(demand(prompt="X" + LONG).prefix).isdisjoint(keys)
    assert demand(prompt="ä" * 40).prefix == prefix_keys(
        "ä".encode() * 40, BLOCK_SIZE * BYTES_PER_TOKEN
    )
    assert (
        len(routing_key_of(b'{"prompt": "\\ud800' + b"a" * 40 + b'"}', BLOCK_SIZE).prefix) == 2
    ), "half a character"


def test_a_conversation_begins_as_it_did_a_turn_ago() -> None:
    one, two = chat(LONG), chat(LONG, "an answer", "a question")
    assert len(one.prefix) > 3
    assert two.prefix[: len(one.prefix)] == one.prefix
    assert len(two.prefix) > len(one.prefix)
    assert chat(LONG, tools=[{"name": "a"}]).prefix[0] != one.prefix[0], (
        "tools come before the messages"
    )
    assert demand(messages=[{"content": LONG, "role": "user"}]).prefix == one.prefix, (
        "whatever the order of fields"
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": [1, 2]}, 1),
        ({"prompt": "one", "n": 3}, 3),
        ({"prompt": ["one", "two"], "n": 3}, 6),
        ({"prompt": [[1], [2], [3]]}, 3),
        ({"messages": [], "n": 2}, 2),
        ({"prompt": "one", "n": 0}, 1),
        ({"prompt": "one", "n": None}, 1),
        ({"prompt": "one", "n": "5"}, 1),
        ({}, 1),
    ],
)
def test_outputs_are_counted_as_asked_for(fields: dict[str, Any], expected: int) -> None:
    assert demand(**fields).num_outputs == expected


def test_of_several_prompts_the_first_decides() -> None:
    assert demand(prompt=[[1] * 8, [2] * 8]).prefix == prefix_keys([1] * 8, BLOCK_SIZE)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"7", b"null", b'[{"prompt": 1}]', b"\xff\xfe", b'{"prompt": {"a": [1]}}']
)
def test_nonsense_has_no_keys(body: bytes) -> None:
    assert routing_key_of(body, BLOCK_SIZE) == RoutingKey()


def test_an_id_of_the_caller_is_read() -> None:
    assert demand(prompt="a", request_id="mine").request_id == "mine"
    assert demand(prompt="a", request_id=7).request_id is None
    assert demand(prompt=[1, "a", 2]).prefix == ()

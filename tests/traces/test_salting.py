"""Salted prompts: equal beginnings keep equal ids, and nothing else can be told from them."""

from hypothesis import given
from hypothesis import strategies as st

from traces.salting import OPEN, Salted
from traces.workload import TraceRequest

PROMPTS = st.lists(st.integers(0, 3), max_size=24)


def common_blocks(one: list[int], other: list[int], size: int) -> int:
    """Full blocks through which two prompts are equal."""
    blocks = min(len(one), len(other)) // size
    return next((at for at in range(blocks) if one[: (at + 1) * size] != other[: (at + 1) * size]), blocks)


@given(PROMPTS, PROMPTS, st.integers(1, 4))
def test_ids_are_equal_exactly_as_far_as_the_prompts_are(one: list[int], other: list[int], size: int) -> None:
    salted = Salted(size)
    left, right = salted.prefix_ids(one), salted.prefix_ids(other)
    assert (len(left), len(right)) == (len(one) // size, len(other) // size)
    equal = [a == b for a, b in zip(left, right, strict=False)]
    assert equal == [at < common_blocks(one, other, size) for at in range(len(equal))]
    assert not set(left[common_blocks(one, other, size) :]) & set(right)


def test_ids_fit_a_trace_and_differ_with_the_key() -> None:
    prompt = list(range(1000))
    one, other = Salted(16), Salted(16)
    assert all(0 <= block < 2**63 for block in one.prefix_ids(prompt))
    assert one.prefix_ids(prompt) == one.prefix_ids(prompt)
    assert not set(one.prefix_ids(prompt)) & set(other.prefix_ids(prompt))
    assert Salted(16, b"a" * 32).prefix_ids(prompt) == Salted(16, b"a" * 32).prefix_ids(prompt)
    assert one.name("user") != other.name("user")


def test_a_request_keeps_its_lengths_and_loses_its_text() -> None:
    asked = TraceRequest("a", 5, 2, prompt_ids=(1, 2, 3, 4, 5), output_ids=(6, 7), session="ann", cls="chat")
    hidden = Salted(2).request(asked)
    assert (hidden.prompt_tokens, hidden.output_tokens, hidden.cls) == (5, 2, "chat")
    assert hidden.prompt_ids is None
    assert hidden.output_ids is None
    assert len(hidden.prefix_ids or ()) == 2
    assert "ann" not in (hidden.session or "")
    assert OPEN.request(asked) is asked
    assert OPEN.name("ann") == "ann"

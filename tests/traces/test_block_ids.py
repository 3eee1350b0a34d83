"""Block ids: chaining, other block sizes, and reuse against a cache played by hand.

Salted prompts: equal beginnings keep equal ids, and nothing else can be told from them.
"""

from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlab.traces.block_ids import OPEN, BlockChains, PromptBlocks, Salted
from zlab.traces.workload import TraceError, TraceRequest, Workload, WorkloadMeta
from zlab.traces.workload_stats import DENSE_IDS, lru_hit_shares, prefix_reuse

META = WorkloadMeta("x", block_size=4, block_id_kind="chained", last_block="partial")
FULL = WorkloadMeta("x", block_size=4, block_id_kind="chained", last_block="full")
prompts = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=20).map(tuple), min_size=1, max_size=12
)


def by_ids(ids: Sequence[Sequence[int]], block_size: int = 4) -> Workload:
    rows = tuple(
        TraceRequest(str(i), block_size * len(found), 1, 0.0, prefix_ids=tuple(found))
        for i, found in enumerate(ids)
    )
    return Workload(
        rows,
        WorkloadMeta("x", block_size=block_size, block_id_kind="chained", last_block="partial"),
    )


def common(one: Sequence[int], two: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


@given(prompts)
def test_chained_ids_are_equal_exactly_where_prompts_are(found: list[tuple[int, ...]]) -> None:
    chains = BlockChains()
    chained = [chains.chain(prompt) for prompt in found]
    for one, ids_one in zip(found, chained, strict=True):
        for two, ids_two in zip(found, chained, strict=True):
            shared = common(one, two)
            assert common(ids_one, ids_two) == shared
            assert not set(ids_one[shared:]) & set(ids_two[shared:])


@given(found=prompts, fine=st.sampled_from([1, 2, 4]), coarse=st.sampled_from([4, 8]))
def test_coarser_blocks_equal_those_made_from_tokens(
    found: list[tuple[int, ...]], fine: int, coarse: int
) -> None:
    chains = BlockChains()
    rows = [
        TraceRequest(str(i), len(tokens), 1, prefix_ids=chains.chain_tokens(tokens, fine))
        for i, tokens in enumerate(found)
    ]
    by_blocks = PromptBlocks(WorkloadMeta("x", block_size=fine, last_block="partial"), coarse)
    by_tokens = PromptBlocks(WorkloadMeta("x"), coarse)
    for view in ("full_blocks", "all_blocks"):
        coarsened = [getattr(by_blocks, view)(row) for row in rows]
        direct = [
            getattr(by_tokens, view)(TraceRequest(row.id, row.prompt_tokens, 1, prompt_ids=tokens))
            for row, tokens in zip(rows, found, strict=True)
        ]
        assert [len(ids) for ids in coarsened] == [len(ids) for ids in direct]
        for ids_one, tokens_one in zip(coarsened, direct, strict=True):
            for ids_two, tokens_two in zip(coarsened, direct, strict=True):
                assert common(ids_one, ids_two) == common(tokens_one, tokens_two)


def test_finer_blocks_split_an_id() -> None:
    blocks = PromptBlocks(META, 2)
    whole, part = (
        TraceRequest("a", 8, 1, prefix_ids=(5, 6)),
        TraceRequest("b", 7, 1, prefix_ids=(5, 9)),
    )
    assert blocks.full_blocks(whole) == (10, 11, 12, 13)
    assert blocks.full_blocks(part) == (10, 11, 18)
    assert blocks.all_blocks(part) == (10, 11, 18, 19)


def test_a_last_block_that_the_trace_does_not_name_is_the_requests_own() -> None:
    blocks = PromptBlocks(FULL, 4)
    request = TraceRequest("a", 6, 1, prefix_ids=(3,))
    assert blocks.all_blocks(request) == (6, 1)
    assert blocks.all_blocks(request) == (6, 3)
    assert blocks.full_blocks(request) == (3,)


def test_unknown_sharing_stays_unknown_and_sizes_must_fit() -> None:
    assert PromptBlocks(META, 4).all_blocks(TraceRequest("a", 6, 1)) is None
    with pytest.raises(
        TraceError, match="blocks of 6 tokens cannot be made from a trace's blocks of 4"
    ):
        PromptBlocks(META, 6).full_blocks(TraceRequest("a", 8, 1, prefix_ids=(1, 2)))
    with pytest.raises(TraceError, match="lacks block_size"):
        PromptBlocks(WorkloadMeta("x"), 6).full_blocks(TraceRequest("a", 8, 1, prefix_ids=(1, 2)))
    with pytest.raises(TraceError, match="block size is 0"):
        PromptBlocks(META, 0)
    mixed = PromptBlocks(META, 4)
    mixed.full_blocks(TraceRequest("a", 4, 1, prefix_ids=(1,)))
    with pytest.raises(
        TraceError, match="'b': some requests have prompt_ids, others only prefix_ids"
    ):
        mixed.full_blocks(TraceRequest("b", 1, 1, prompt_ids=(1,)))


def test_reuse_by_hand() -> None:
    workload = by_ids([(0, 1, 2), (0, 1, 3), (4, 1), (0, 1, 2)])
    reuse = prefix_reuse(workload)
    # 0 of 3, 2 of 3, none behind the unknown 4, all 3.
    assert (
        reuse.num_requests,
        reuse.num_blocks,
        reuse.num_reused_blocks,
        reuse.num_wholly_cached,
    ) == (4, 11, 5, 1)
    assert reuse.share == 5 / 11


def test_least_recently_used_by_hand() -> None:
    workload = by_ids([(0, 1, 2), (3,), (0, 1, 2)])
    # Room for 3: after the first request, oldest to newest 2 1 0; block 3 pushes out 2, so 0 and 1
    # are found.
    assert lru_hit_shares(workload, [1, 3, 4]) == {1: 0.0, 3: 2 / 7, 4: 3 / 7}
    # Were blocks touched head to tail, the root would be pushed out first and nothing found with
    # room for 3.


@given(st.lists(st.lists(st.integers(0, 6), max_size=5, unique=True), min_size=1, max_size=10))
def test_a_cache_with_room_for_all_is_the_infinite_one(ids: list[list[int]]) -> None:
    workload = by_ids([found or [99] for found in ids])
    reuse = prefix_reuse(workload)
    shares = lru_hit_shares(workload, [1, 2, 1_000])
    assert shares[1_000] == pytest.approx(reuse.share)
    assert shares[1] <= shares[2] <= shares[1_000]


def test_big_ids_are_remembered_too() -> None:
    big = DENSE_IDS + 5
    workload = by_ids([(1, big), (1, big, 2), (1, 2**62), (1, 2**62)])
    assert prefix_reuse(workload).num_reused_blocks == 0 + 2 + 1 + 2


def test_reuse_needs_a_block_size() -> None:
    workload = Workload((TraceRequest("a", 2, 1, prompt_ids=(1, 2)),), WorkloadMeta("x"))
    assert prefix_reuse(workload, 1).num_blocks == 2
    with pytest.raises(TraceError, match="'x' has no block size of its own"):
        prefix_reuse(workload)
    with pytest.raises(TraceError, match="cache capacity is 0"):
        lru_hit_shares(workload, [0], 1)


PROMPTS = st.lists(st.integers(0, 3), max_size=24)


def common_blocks(one: list[int], other: list[int], size: int) -> int:
    """Full blocks through which two prompts are equal."""
    blocks = min(len(one), len(other)) // size
    return next(
        (at for at in range(blocks) if one[: (at + 1) * size] != other[: (at + 1) * size]), blocks
    )


@given(PROMPTS, PROMPTS, st.integers(1, 4))
def test_ids_are_equal_exactly_as_far_as_the_prompts_are(
    one: list[int], other: list[int], size: int
) -> None:
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
    asked = TraceRequest(
        "a", 5, 2, prompt_ids=(1, 2, 3, 4, 5), output_ids=(6, 7), session="ann", cls="chat"
    )
    hidden = Salted(2).request(asked)
    assert (hidden.prompt_tokens, hidden.output_tokens, hidden.cls) == (5, 2, "chat")
    assert hidden.prompt_ids is None
    assert hidden.output_ids is None
    assert len(hidden.prefix_ids or ()) == 2
    assert "ann" not in (hidden.session or "")
    assert OPEN.request(asked) is asked
    assert OPEN.name("ann") == "ann"

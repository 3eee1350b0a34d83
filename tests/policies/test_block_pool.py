"""The block pool and the prefix index."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zlab.policies.core.block_pool import (
    BlockHash,
    BlockPool,
    PrefixEntry,
    PrefixIndex,
    PromptContent,
    chained_hash,
)
from zlab.traces.schema import BlockState


def constant(parent: int, content: object, salt: int) -> int:
    return 7


def by_parity(parent: int, content: object, salt: int) -> int:
    return hash(content) % 2


@pytest.mark.parametrize("block_hash", [chained_hash, constant, by_parity])
@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.booleans()), max_size=12
    )
)
def test_the_index_equals_a_table_of_whole_prefixes(
    block_hash: BlockHash, steps: list[tuple[list[int], bool]]
) -> None:
    """Whatever the hash: a block is found only after exactly its history, the newest copy first."""
    index, block = PrefixIndex(block_hash), 0
    naive: dict[tuple[int, ...], int] = {}
    entries: dict[tuple[int, ...], PrefixEntry] = {}
    for contents, remove in steps:
        known = []
        for depth in range(1, len(contents) + 1):
            if tuple(contents[:depth]) not in naive:
                break
            known.append(naive[tuple(contents[:depth])])
        assert [entry.block for entry in index.match(contents)] == known
        if remove and known:
            prefix = tuple(contents[: len(known)])
            index.remove(entries.pop(prefix))
            del naive[prefix]
            continue
        parent = None
        for depth in range(1, len(contents) + 1):
            prefix = tuple(contents[:depth])
            parent, older = index.register(parent, contents[depth - 1], block)
            assert older == naive.get(prefix)
            naive[prefix], entries[prefix] = block, parent
            block += 1
        assert index.num_entries == len(naive)


def test_equal_content_after_other_content_is_another_block() -> None:
    index = PrefixIndex(constant)
    first, _ = index.register(None, "x", 1)
    index.register(first, "same", 2)
    other, _ = index.register(None, "y", 3)
    assert [entry.block for entry in index.match(["y", "same"])] == [3]
    index.register(other, "same", 4)
    assert [entry.block for entry in index.match(["x", "same"])] == [1, 2]


def test_a_freed_prefix_stays_until_it_is_reused_tail_before_head() -> None:
    pool, index = BlockPool(4), PrefixIndex()
    head, tail, other = pool.take(3)
    entry, _ = pool.register(index, None, "head", head)
    pool.register(index, entry, "tail", tail)
    pool.release(other)
    for block in (tail, head):  # last of the table first
        assert pool.release(block) is BlockState.CACHED
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert pool.take(2) == [3, other]  # what was never used, then what has no content
    assert pool.take(1) == [tail]
    assert [found.block for found in index.match(["head", "tail"])] == [head]
    pool.retain(head)
    assert (pool.num_free, pool.num_cached, pool.state(head)) == (0, 0, BlockState.OWNED)
    assert pool.release(head) is BlockState.CACHED
    assert pool.take(1) == [head]
    assert index.num_entries == 0


def test_the_line_forgets_places_of_matched_blocks() -> None:
    """A block that is matched and released again stands at the end of the line, once."""
    pool, index = BlockPool(3), PrefixIndex()
    (block,) = pool.take(1)
    pool.register(index, None, "x", block)
    pool.release(block)
    for _ in range(5):
        pool.retain(block)
        pool.release(block)
    assert pool.take(3) == [1, 2, block]
    assert pool.num_free == 0


def test_sharing_reaches_to_the_last_shared_block() -> None:
    """Twins that computed one prefix at once: the third may have one block of each."""
    pool = BlockPool(4)
    mine = pool.take(3)
    assert pool.shared(mine) == 0
    pool.retain(mine[1])
    assert pool.shared(mine) == 2
    pool.retain(mine[0])
    assert pool.shared(mine) == 2
    pool.release(mine[1])
    assert pool.shared(mine) == 1
    assert pool.num_shared_extra == 1


def test_states_of_a_block() -> None:
    pool = BlockPool(4)
    (block,) = pool.take(1)
    assert pool.state(block) is BlockState.OWNED
    pool.retain(block)
    assert pool.state(block) is BlockState.SHARED
    pool.targets.add(block)
    assert pool.state(block) is BlockState.COMPACTION_TARGET
    pool.held.add(block)
    assert pool.state(block) is BlockState.IN_TRANSIT
    assert pool.state(3) is BlockState.FREE


def test_prompt_content() -> None:
    exact = PromptContent(9, 4, range(9), None, None)
    assert (exact.num_blocks, exact[0], exact[1]) == (2, (0, 1, 2, 3), (4, 5, 6, 7))
    by_id = PromptContent(17, 4, None, (7, 8), 8)
    assert (by_id.num_blocks, [by_id[n] for n in range(4)]) == (4, [(7, 0), (7, 1), (8, 0), (8, 1)])
    assert PromptContent(40, 4, None, (7, 8), 8).num_blocks == 4  # ids for 16 of the 40 tokens
    assert PromptContent(40, 4, None, None, None).num_blocks == 0

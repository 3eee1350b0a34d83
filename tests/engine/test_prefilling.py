"""What prefill chunks read, packed on the host."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine.cache import CacheShape
from engine.prefilling import nothing_to_store, prefill_inputs
from policies.core.plan import PrefillChunk

CPU = torch.device("cpu")
SHAPE = CacheShape(
    num_layers=1, num_blocks=99, block_size=16, num_kv_heads=1, num_query_heads=1, head_dim=16, num_slots=4, window=4
)


def chunk(number: int, table: list[int], start: int, count: int, slot: int = -1) -> PrefillChunk:
    request: Any = SimpleNamespace(number=number, table=table, slot=slot)
    return PrefillChunk(cast(Any, request), start, count, last=True)


def ids(number: int, count: int) -> list[int]:
    return [1000 * number + place for place in range(count)]


def test_chunks_are_packed_behind_one_another() -> None:
    inputs = prefill_inputs([chunk(1, [7, 3], 14, 4), chunk(2, [5], 0, 3, slot=2)], ids, SHAPE, CPU)
    assert inputs.token_ids.tolist() == [1014, 1015, 1016, 1017, 2000, 2001, 2002]
    assert inputs.positions.tolist() == [14, 15, 16, 17, 0, 1, 2]
    assert inputs.slot_mapping.tolist() == [126, 127, 48, 49, 80, 81, 82]
    assert inputs.block_tables.tolist() == [[7, 3], [5, -1]]
    assert inputs.lengths.tolist() == [18, 3]
    assert inputs.query_starts.tolist() == [0, 4, 7]
    assert inputs.window_rows.tolist() == [-1] * 7


def test_queries_of_the_last_blocks_window_are_kept_where_there_is_a_slot() -> None:
    with_slot = prefill_inputs([chunk(1, [7, 3], 10, 20, slot=2)], ids, SHAPE, CPU)
    assert with_slot.window_rows.tolist() == [-1] * 18 + [8, 9]  # places 12 and 13 of the second block
    without = prefill_inputs([chunk(1, [7, 3], 10, 20)], ids, SHAPE, CPU)
    assert without.window_rows.tolist() == [-1] * 20


@pytest.mark.parametrize("num_chunks", range(1, 10))
def test_no_kernel_is_compiled_anew_for_a_number_of_chunks(num_chunks: int) -> None:
    """Triton makes another kernel of a pointer that is not aligned to 16 bytes: while serving, that takes seconds."""
    inputs = prefill_inputs([chunk(n, [n + 1] * 3, 0, n + 1) for n in range(num_chunks)], ids, SHAPE, CPU)
    for tensor in (inputs.lengths, inputs.query_starts, inputs.block_tables):
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0


def test_a_chunk_that_stores_nothing_reads_blocks_that_there_are() -> None:
    inputs = nothing_to_store(40, SHAPE.block_size, CPU)
    assert inputs.block_tables.tolist() == [[0, 0, 0]]
    assert inputs.lengths.tolist() == [40]
    assert inputs.query_starts.tolist() == [0, 40]
    assert set(inputs.slot_mapping.tolist()) == set(inputs.window_rows.tolist()) == {-1}

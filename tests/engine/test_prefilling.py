"""What a step with chunks reads, packed on the host."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine.cache import CacheShape
from engine.prefilling import MixedInputs, MixedPacking, MixedSizes, nothing_to_store, sizes_of
from policies.core.plan import PrefillChunk

CPU = torch.device("cpu")
PADDING_ROW = 99
SHAPE = CacheShape(
    num_layers=1, num_blocks=99, block_size=16, num_kv_heads=1, num_query_heads=1, head_dim=16, num_slots=4, window=4
)


def chunk(
    number: int, table: list[int], start: int, count: int, slot: int = -1, last: bool = True, target: int = 9
) -> PrefillChunk:
    request: Any = SimpleNamespace(number=number, table=table, slot=slot, target_tokens=target)
    return PrefillChunk(cast(Any, request), start, count, last)


def ids(number: int, count: int) -> list[int]:
    return [1000 * number + place for place in range(count)]


def packed(chunks: list[PrefillChunk], decode_rows: list[int], sizes: MixedSizes | None = None) -> MixedInputs:
    packing = MixedPacking(sizes or sizes_of(chunks, len(decode_rows)), SHAPE, PADDING_ROW)
    wide, narrow = packing.fill(chunks, ids, decode_rows, {number: 10 * number for number in range(20)})
    return packing.inputs(torch.from_numpy(wide), torch.from_numpy(narrow))


def test_chunks_are_packed_behind_the_decodes_and_one_another() -> None:
    inputs = packed([chunk(1, [7, 3], 14, 4), chunk(2, [5], 0, 3, slot=2)], [8, 6])
    prefill = inputs.prefill
    assert prefill.token_ids[2:].tolist() == [1014, 1015, 1016, 1017, 2000, 2001, 2002]
    assert prefill.positions[2:].tolist() == [14, 15, 16, 17, 0, 1, 2]
    assert prefill.slot_mapping.tolist() == [-1, -1, 126, 127, 48, 49, 80, 81, 82]
    assert prefill.block_tables.tolist() == [[7, 3], [5, -1]]
    assert prefill.lengths.tolist() == [18, 3]
    assert prefill.query_starts.tolist() == [2, 6, 9]
    assert prefill.window_rows.tolist() == [-1] * 9
    assert inputs.decode_rows.tolist() == [8, 6]
    assert inputs.logit_rows.tolist() == [0, 1, 5, 8]
    assert inputs.start_rows.tolist() == [PADDING_ROW, PADDING_ROW, 10, 20]


def test_only_a_chunk_that_ends_a_prompt_of_someone_who_wants_output_gives_a_token() -> None:
    inputs = packed([chunk(1, [7], 0, 4, last=False), chunk(2, [5], 0, 3, target=0), chunk(3, [6], 0, 2)], [])
    assert inputs.decode_rows.tolist() == []
    assert inputs.logit_rows.tolist() == [8]
    assert inputs.start_rows.tolist() == [30]


def test_what_a_larger_step_has_room_for_is_padding() -> None:
    chunks = [chunk(1, [7, 3], 14, 4), chunk(2, [5], 0, 3)]
    inputs = packed(chunks, [8], MixedSizes(tokens=13, decodes=3, chunks=5, blocks=4, logits=8))
    prefill = inputs.prefill
    assert inputs.decode_rows.tolist() == [8, PADDING_ROW, PADDING_ROW]
    assert prefill.slot_mapping.tolist() == [-1, 126, 127, 48, 49, 80, 81, 82, *[-1] * 5]
    assert prefill.query_starts.tolist() == [1, 5, 8, 8, 8, 8]
    assert prefill.lengths.tolist() == [18, 3, 0, 0, 0]
    assert prefill.block_tables.tolist() == [[7, 3, -1, -1], [5, -1, -1, -1], *[[-1] * 4] * 3]
    assert inputs.logit_rows.tolist() == [0, 4, 7, 0, 0, 0, 0, 0]
    assert inputs.start_rows.tolist() == [PADDING_ROW, 10, 20, *[PADDING_ROW] * 5]


def test_queries_of_the_last_blocks_window_are_kept_where_there_is_a_slot() -> None:
    with_slot = packed([chunk(1, [7, 3], 10, 20, slot=2)], []).prefill
    assert with_slot.window_rows.tolist() == [-1] * 18 + [8, 9]  # places 12 and 13 of the second block
    without = packed([chunk(1, [7, 3], 10, 20)], []).prefill
    assert without.window_rows.tolist() == [-1] * 20


@pytest.mark.parametrize("num_chunks", range(1, 10))
def test_no_kernel_is_compiled_anew_for_a_number_of_chunks(num_chunks: int) -> None:
    """Triton makes another kernel of a pointer that is not aligned to 16 bytes: while serving, that takes seconds."""
    inputs = packed([chunk(n, [n + 1] * 3, 0, n + 1) for n in range(num_chunks)], [5]).prefill
    for tensor in (inputs.lengths, inputs.query_starts, inputs.block_tables, inputs.slot_mapping, inputs.window_rows):
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0


def test_a_chunk_that_stores_nothing_reads_blocks_that_there_are() -> None:
    inputs = nothing_to_store(40, SHAPE.block_size, CPU)
    assert inputs.block_tables.tolist() == [[0, 0, 0]]
    assert inputs.lengths.tolist() == [40]
    assert inputs.query_starts.tolist() == [1, 41]
    assert inputs.slot_mapping.tolist() == inputs.window_rows.tolist() == [-1] * 41

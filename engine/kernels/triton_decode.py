"""Paged decode attention: items laid out once a step, partial results of every split, then a reduction.

The query heads of a KV head are in one program.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from engine.kernels.decode_plan import DecodePlan, DecodeWorkspace
from engine.kernels.errors import KernelInputError
from engine.kernels.triton_common import Launch, check_cache, dot_precision, padded, row_offsets

LAUNCH = Launch(tile=64, num_warps=4, num_stages=3)
LOG2_E = 1.4426950408889634
MOST_PROGRAMS = 1056  # of one launch: four for each that an H200 holds at a time, so that the tail is short


@triton.jit(do_not_specialize=["num_requests", "capacity"])
def _plan_kernel(
    lengths: tl.tensor,
    first_items: tl.tensor,
    items: tl.tensor,
    num_requests: tl.tensor,
    capacity: tl.tensor,
    SPLIT: tl.constexpr,
    REQUESTS: tl.constexpr,
) -> None:
    """One program lays out all items: whole splits first, by request, then every request's last, shorter one."""
    request = tl.arange(0, REQUESTS)
    known = request < num_requests
    length = tl.load(lengths + request, mask=known, other=0)
    splits = tl.cdiv(length, SPLIT)
    last = tl.cumsum(splits, axis=0)
    first = last - splits
    tl.store(first_items + request, first, mask=known)
    has_room = last <= capacity
    tl.store(first_items + num_requests, tl.sum(tl.where(has_room, splits, 0), axis=0))
    whole = tl.where(has_room, length // SPLIT, 0)
    rest = (has_room & (length % SPLIT > 0)).to(tl.int32)
    place = tl.cumsum(whole, axis=0) - whole
    for split in range(0, tl.max(whole, axis=0)):
        row = items + (place + split) * 4
        present = split < whole
        tl.store(row, first + split, mask=present)
        tl.store(row + 1, request, mask=present)
        tl.store(row + 2, tl.zeros_like(request) + split * SPLIT, mask=present)
        tl.store(row + 3, tl.zeros_like(request) + (split + 1) * SPLIT, mask=present)
    row = items + (tl.sum(whole, axis=0) + tl.cumsum(rest, axis=0) - rest) * 4
    present = rest > 0
    tl.store(row, first + whole, mask=present)
    tl.store(row + 1, request, mask=present)
    tl.store(row + 2, whole * SPLIT, mask=present)
    tl.store(row + 3, length, mask=present)


@triton.jit(do_not_specialize=["num_requests", "table_stride"])
def _split_kernel(
    queries: tl.tensor,
    cache_k: tl.tensor,
    cache_v: tl.tensor,
    block_tables: tl.tensor,
    first_items: tl.tensor,
    items: tl.tensor,
    partial_output: tl.tensor,
    partial_normaliser: tl.tensor,
    scale: tl.tensor,
    num_requests: tl.tensor,
    table_stride: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    k_block_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_block_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    v_head_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAD_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Every so many-th item for one KV head: `scale` is in units of log 2, as is the normaliser that is left."""
    head = tl.program_id(0)
    member = tl.arange(0, PAD_GROUP)
    dim = tl.arange(0, PAD_DIM)
    query_head = head * GROUP + member
    query_mask = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    keys_of_head = cache_k + head * k_head_stride
    values_of_head = cache_v + head * v_head_stride
    num_items = tl.load(first_items + num_requests)
    for row in range(tl.program_id(1), num_items, tl.num_programs(1)):
        item = tl.load(items + row * 4).to(tl.int64)
        request = tl.load(items + row * 4 + 1).to(tl.int64)
        begin = tl.load(items + row * 4 + 2)
        end = tl.load(items + row * 4 + 3)
        query = tl.load(
            queries + request * query_stride + query_head[:, None] * query_head_stride + dim[None, :],
            mask=query_mask,
            other=0.0,
        )
        block_table = block_tables + request * table_stride
        largest = tl.full((PAD_GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((PAD_GROUP,), tl.float32)
        result = tl.zeros((PAD_GROUP, PAD_DIM), tl.float32)
        for start in range(begin, end, TILE):
            token = start + tl.arange(0, TILE)
            inside = token < end
            mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
            k_offsets = row_offsets(block_table, start, token, inside, k_block_stride, k_slot_stride, BLOCK_SIZE, TILE)
            v_offsets = row_offsets(block_table, start, token, inside, v_block_stride, v_slot_stride, BLOCK_SIZE, TILE)
            keys = tl.load(keys_of_head + k_offsets[:, None] + dim[None, :], mask=mask, other=0.0)
            logits = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
            logits = tl.where(inside[None, :], logits, float("-inf"))
            # An item has a token, so the first tile has a visible one and `higher` is finite from then on.
            higher = tl.maximum(largest, tl.max(logits, axis=1))
            weights = tl.exp2(logits - higher[:, None])
            shrink = tl.exp2(largest - higher)
            total = total * shrink + tl.sum(weights, axis=1)
            values = tl.load(values_of_head + v_offsets[:, None] + dim[None, :], mask=mask, other=0.0)
            result = result * shrink[:, None]
            result = tl.dot(weights.to(values.dtype), values, result, input_precision=PRECISION)
            largest = higher
        place = item * (NUM_KV_HEADS * GROUP) + query_head
        tl.store(partial_output + place[:, None] * HEAD_DIM + dim[None, :], result / total[:, None], mask=query_mask)
        tl.store(partial_normaliser + place, largest + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize=["capacity"])
def _reduce_kernel(
    partial_output: tl.tensor,
    partial_normaliser: tl.tensor,
    lengths: tl.tensor,
    first_items: tl.tensor,
    output: tl.tensor,
    capacity: tl.tensor,
    output_stride: tl.tensor,
    output_head_stride: tl.tensor,
    NUM_QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Weigh the splits of one request and query head by their share of the softmax, in split order."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(lengths + request)
    num_splits = tl.cdiv(length, SPLIT)
    first_item = tl.load(first_items + request)
    dim = tl.arange(0, PAD_DIM)
    inside = dim < HEAD_DIM
    largest = float("-inf")
    total = 0.0
    result = tl.zeros((PAD_DIM,), tl.float32)
    if first_item + num_splits > capacity:
        # No room was reserved for this request's splits: an answer from some of them would look like a right one.
        result += float("nan")
        num_splits = 0
        total = 1.0
    for split in range(num_splits):
        place = (first_item + split).to(tl.int64) * NUM_QUERY_HEADS + head
        normaliser = tl.load(partial_normaliser + place)
        part = tl.load(partial_output + place * HEAD_DIM + dim, mask=inside, other=0.0)
        higher = tl.maximum(largest, normaliser)
        shrink = tl.exp2(largest - higher)
        weight = tl.exp2(normaliser - higher)
        result = result * shrink + part * weight
        total = total * shrink + weight
        largest = higher
    result = result / tl.where(total > 0.0, total, 1.0)  # a request of length 0 gets zeros
    place = output + request.to(tl.int64) * output_stride + head * output_head_stride + dim
    tl.store(place, result.to(output.dtype.element_ty), mask=inside)


def plan_decodes(lengths: torch.Tensor, workspace: DecodeWorkspace) -> DecodePlan:
    """See `Kernels.plan_decodes`."""
    num_requests, capacity = len(lengths), workspace.partial_output.shape[0]
    first_items = torch.empty(num_requests + 1, dtype=torch.int32, device=lengths.device)
    items = torch.empty(capacity, 4, dtype=torch.int32, device=lengths.device)
    _plan_kernel[(1,)](
        lengths, first_items, items, num_requests, capacity,
        SPLIT=workspace.split_tokens, REQUESTS=triton.next_power_of_2(num_requests), num_warps=4,
    )  # fmt: skip
    return DecodePlan(lengths, first_items, items)


def decode_attention(
    queries: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    block_tables: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    workspace: DecodeWorkspace,
    output: torch.Tensor,
    *,
    launch: Launch = LAUNCH,
    most_programs: int = MOST_PROGRAMS,
) -> None:
    """See `Kernels.decode_attention`; `launch` and `most_programs` override what was measured to be best."""
    check_cache(cache_k)
    check_cache(cache_v)
    if workspace.split_tokens % launch.tile:
        raise KernelInputError(f"a split of {workspace.split_tokens} tokens is no multiple of the tile {launch.tile}")
    num_requests, num_query_heads, head_dim = queries.shape
    _, block_size, num_kv_heads, _ = cache_k.shape
    group = num_query_heads // num_kv_heads
    capacity = workspace.partial_output.shape[0]
    _split_kernel[(num_kv_heads, min(capacity, max(1, most_programs // num_kv_heads)))](
        queries, cache_k, cache_v, block_tables, plan.first_items, plan.items,
        workspace.partial_output, workspace.partial_normaliser, scale * LOG2_E,
        num_requests, block_tables.stride(0), *queries.stride()[:2], *cache_k.stride()[:3], *cache_v.stride()[:3],
        NUM_KV_HEADS=num_kv_heads, GROUP=group, PAD_GROUP=padded(group),
        HEAD_DIM=head_dim, PAD_DIM=padded(head_dim), BLOCK_SIZE=block_size,
        TILE=launch.tile, PRECISION=dot_precision(cache_k),
        **launch.options(),
    )  # fmt: skip
    _reduce_kernel[(num_requests, num_query_heads)](
        workspace.partial_output, workspace.partial_normaliser, plan.lengths, plan.first_items, output,
        capacity, *output.stride()[:2],
        NUM_QUERY_HEADS=num_query_heads, HEAD_DIM=head_dim, PAD_DIM=triton.next_power_of_2(head_dim),
        SPLIT=workspace.split_tokens, num_warps=1,
    )  # fmt: skip

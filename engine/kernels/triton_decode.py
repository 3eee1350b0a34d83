"""Paged decode attention: split-KV partial results, then a reduction; the query heads of a KV head in one program."""

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from engine.kernels.decode_plan import DecodeWorkspace
from engine.kernels.errors import KernelInputError
from engine.kernels.triton_common import Launch, check_cache, dot_precision, find_request, padded, row_offsets

LAUNCH = Launch(tile=64, num_warps=4, num_stages=3)
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["num_requests", "table_stride"])
def _split_kernel(
    queries: tl.tensor,
    cache_k: tl.tensor,
    cache_v: tl.tensor,
    block_tables: tl.tensor,
    lengths: tl.tensor,
    length_starts: tl.tensor,
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
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One split of one request for one KV head: `scale` is in units of log 2, as is the normaliser that is left."""
    head = tl.program_id(0)
    item = tl.program_id(1)
    request = find_request(length_starts, item, num_requests, SPLIT)
    length = tl.load(lengths + request)
    begin = (item - tl.load(length_starts + request) // SPLIT - request) * SPLIT
    if begin < length:
        end = tl.minimum(begin + SPLIT, length)
        member = tl.arange(0, PAD_GROUP)
        dim = tl.arange(0, PAD_DIM)
        query_head = head * GROUP + member
        query_mask = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
        query = tl.load(
            queries + request.to(tl.int64) * query_stride + query_head[:, None] * query_head_stride + dim[None, :],
            mask=query_mask,
            other=0.0,
        )
        block_table = block_tables + request.to(tl.int64) * table_stride
        keys_of_head = cache_k + head * k_head_stride
        values_of_head = cache_v + head * v_head_stride
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
            # `begin < length` gives the first tile a visible token, so `higher` is finite from then on.
            higher = tl.maximum(largest, tl.max(logits, axis=1))
            weights = tl.exp2(logits - higher[:, None])
            shrink = tl.exp2(largest - higher)
            total = total * shrink + tl.sum(weights, axis=1)
            values = tl.load(values_of_head + v_offsets[:, None] + dim[None, :], mask=mask, other=0.0)
            result = result * shrink[:, None]
            result = tl.dot(weights.to(values.dtype), values, result, input_precision=PRECISION)
            largest = higher
        place = item.to(tl.int64) * (NUM_KV_HEADS * GROUP) + query_head
        tl.store(partial_output + place[:, None] * HEAD_DIM + dim[None, :], result / total[:, None], mask=query_mask)
        tl.store(partial_normaliser + place, largest + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize=["num_items"])
def _reduce_kernel(
    partial_output: tl.tensor,
    partial_normaliser: tl.tensor,
    lengths: tl.tensor,
    length_starts: tl.tensor,
    output: tl.tensor,
    num_items: tl.tensor,
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
    first_item = tl.load(length_starts + request) // SPLIT + request
    dim = tl.arange(0, PAD_DIM)
    inside = dim < HEAD_DIM
    largest = float("-inf")
    total = 0.0
    result = tl.zeros((PAD_DIM,), tl.float32)
    if first_item + num_splits > num_items:
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


def decode_attention(
    queries: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    length_starts: torch.Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    output: torch.Tensor,
    *,
    launch: Launch = LAUNCH,
) -> None:
    """See `Kernels.decode_attention`; `launch` overrides what was measured to be best."""
    check_cache(cache_k)
    check_cache(cache_v)
    if workspace.split_tokens % launch.tile:
        raise KernelInputError(f"a split of {workspace.split_tokens} tokens is no multiple of the tile {launch.tile}")
    num_requests, num_query_heads, head_dim = queries.shape
    _, block_size, num_kv_heads, _ = cache_k.shape
    group = num_query_heads // num_kv_heads
    num_items = workspace.partial_output.shape[0]
    _split_kernel[(num_kv_heads, num_items)](
        queries, cache_k, cache_v, block_tables, lengths, length_starts,
        workspace.partial_output, workspace.partial_normaliser, scale * LOG2_E,
        num_requests, block_tables.stride(0), *queries.stride()[:2], *cache_k.stride()[:3], *cache_v.stride()[:3],
        NUM_KV_HEADS=num_kv_heads, GROUP=group, PAD_GROUP=padded(group),
        HEAD_DIM=head_dim, PAD_DIM=padded(head_dim), BLOCK_SIZE=block_size,
        SPLIT=workspace.split_tokens, TILE=launch.tile, PRECISION=dot_precision(cache_k),
        **launch.options(),
    )  # fmt: skip
    _reduce_kernel[(num_requests, num_query_heads)](
        workspace.partial_output, workspace.partial_normaliser, lengths, length_starts, output,
        num_items, *output.stride()[:2],
        NUM_QUERY_HEADS=num_query_heads, HEAD_DIM=head_dim, PAD_DIM=triton.next_power_of_2(head_dim),
        SPLIT=workspace.split_tokens, num_warps=1,
    )  # fmt: skip

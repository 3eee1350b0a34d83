"""Triton kernels between a layer's matrix products: residual and norm, heads and store, gated activation.

Each does in one pass what plain torch (`engine.torch_layers`) does in several, and equals it up to rounding. Inputs
that come as `[splits, T, width]` are summed on the way in.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"

import math

import torch
import triton
import triton.language as tl

from engine.kernels.triton_common import power_of_2
from engine.layers import HeadShape, StoreDestination

MOST_HEADS = 8  # that one program takes
GATED_TILE = 1024


@triton.jit
def _add_norm_kernel(
    delta: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    split_stride: tl.tensor,
    eps: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, TILE)
    inside = column < WIDTH
    total = tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(delta + split * split_stride + row + column, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(residual.dtype.element_ty)
    tl.store(residual + row + column, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + column, (wide * scale * gain).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _row_start(slot: tl.tensor, outer_stride: tl.tensor, inner_stride: tl.tensor, EXTENT: tl.constexpr) -> tl.tensor:
    """Offset of the row `slot` = outer * EXTENT + inner of a cache or a query window, int64."""
    return (slot // EXTENT).to(tl.int64) * outer_stride + (slot % EXTENT).to(tl.int64) * inner_stride


@triton.jit
def _store_halves(
    row: tl.tensor, heads: tl.tensor, column: tl.tensor, head_stride: tl.tensor, first: tl.tensor, second: tl.tensor,
    HALF: tl.constexpr,
) -> None:  # fmt: skip
    """Write both halves of `heads [HEADS, 1]` to the heads of one row."""
    target = row + heads.to(tl.int64) * head_stride + column
    inside = (column < HALF) & (heads >= 0)
    tl.store(target, first.to(row.dtype.element_ty), mask=inside)
    tl.store(target + HALF, second.to(row.dtype.element_ty), mask=inside)


@triton.jit
def _heads_kernel(
    merged: tl.tensor,
    bias: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    queries_out: tl.tensor,
    keys_out: tl.tensor,
    values_out: tl.tensor,
    slot_mapping: tl.tensor,
    window_rows: tl.tensor,
    window_queries: tl.tensor,
    split_stride: tl.tensor,
    k_outer: tl.tensor,
    k_inner: tl.tensor,
    k_head: tl.tensor,
    v_outer: tl.tensor,
    v_inner: tl.tensor,
    v_head: tl.tensor,
    window_outer: tl.tensor,
    window_inner: tl.tensor,
    window_head: tl.tensor,
    eps: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    NUM_QUERY_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_TILE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    """`HEADS` heads, all of one kind, of one token; keys and values go to row `slot_mapping[token]`."""
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    half: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, HALF_TILE)[None, :]
    head = tl.arange(0, HEADS)[:, None]
    inside = (column < half) & (head >= 0)
    width: tl.constexpr = (NUM_QUERY_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    place = (first_head + head) * HEAD_DIM + column
    first = tl.zeros((HEADS, HALF_TILE), tl.float32)
    second = tl.zeros((HEADS, HALF_TILE), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        source = merged + split * split_stride + token * width + place
        first += tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        first += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(bias + place + half, mask=inside, other=0.0).to(tl.float32)
    is_query = first_head < NUM_QUERY_HEADS
    is_value = first_head >= NUM_QUERY_HEADS + NUM_KV_HEADS
    if not is_value:
        if HAS_NORM:
            scale = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD_DIM + eps)
            gain = query_norm if is_query else key_norm
            first *= scale[:, None] * tl.load(gain + column, mask=column < half, other=0.0).to(tl.float32)
            second *= scale[:, None] * tl.load(gain + half + column, mask=column < half, other=0.0).to(tl.float32)
        angles = table + tl.load(positions + token).to(tl.int64) * HEAD_DIM
        cosine = tl.load(angles + column, mask=column < half, other=0.0)
        sine = tl.load(angles + half + column, mask=column < half, other=0.0)
        turned = first * cosine - second * sine
        second = second * cosine + first * sine
        first = turned
    if is_query:
        query = queries_out + token * NUM_QUERY_HEADS * HEAD_DIM
        _store_halves(query, first_head + head, column, HEAD_DIM, first, second, half)
        if WINDOW > 0:
            row = tl.load(window_rows + token)
            if row >= 0:
                target = window_queries + _row_start(row, window_outer, window_inner, WINDOW)
                _store_halves(target, first_head + head, column, window_head, first, second, half)
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            if is_value:
                target = values_out + _row_start(slot, v_outer, v_inner, BLOCK_SIZE)
                heads = first_head - NUM_QUERY_HEADS - NUM_KV_HEADS + head
                _store_halves(target, heads, column, v_head, first, second, half)
            else:
                target = keys_out + _row_start(slot, k_outer, k_inner, BLOCK_SIZE)
                _store_halves(target, first_head - NUM_QUERY_HEADS + head, column, k_head, first, second, half)


@triton.jit
def _gated_kernel(
    gate_up: tl.tensor, output: tl.tensor, split_stride: tl.tensor, WIDTH: tl.constexpr, NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    gate = tl.zeros((TILE,), tl.float32)
    up = tl.zeros((TILE,), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        source = gate_up + split * split_stride + row * 2 * WIDTH + column
        gate += tl.load(source, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(output + row * WIDTH + column, value.to(output.dtype.element_ty), mask=inside)


def add_norm(delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`engine.torch_layers.add_norm`, the sum written over `residual` (contiguous)."""
    num_rows, width = residual.shape
    normed = torch.empty_like(residual)
    if num_rows == 0:
        return normed
    tile = power_of_2(width)
    _add_norm_kernel[(num_rows,)](
        delta, residual, weight, normed, _split_stride(delta), eps,
        NUM_SPLITS=_num_splits(delta), WIDTH=width, TILE=tile, num_warps=8 if tile >= 4096 else 4,
    )  # fmt: skip
    return normed


def store_heads(
    merged: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    table: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    shape: HeadShape,
    destination: StoreDestination,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Norm and rotate heads out of the merged projection; store keys, values and window queries; give the queries.

    `[T, H_q, d]` contiguous. What `engine.torch_layers.split_heads` and a store do, in one launch.
    """
    num_tokens = positions.shape[0]
    queries = torch.empty(num_tokens, shape.num_query_heads, shape.head_dim, dtype=dtype, device=merged.device)
    if num_tokens == 0:
        return queries
    place, rows, window = destination, destination.window_rows, destination.window_queries
    stores_window = rows is not None and window is not None
    heads = _heads_together(shape)
    num_programs = (shape.num_query_heads + 2 * shape.num_kv_heads) // heads
    _heads_kernel[(num_tokens, num_programs)](
        # A tensor that is absent is never read; any other stands in for its pointer.
        merged, bias if bias is not None else merged, positions, table,
        query_norm if query_norm is not None else table, key_norm if key_norm is not None else table,
        queries, place.cache_k, place.cache_v, place.slot_mapping,
        rows if rows is not None else place.slot_mapping, window if window is not None else queries,
        _split_stride(merged), *place.cache_k.stride()[:3], *place.cache_v.stride()[:3],
        *(window.stride()[:3] if window is not None else (0, 0, 0)), shape.eps,
        NUM_SPLITS=_num_splits(merged), NUM_QUERY_HEADS=shape.num_query_heads, NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim, HALF_TILE=power_of_2(shape.head_dim // 2), HEADS=heads,
        BLOCK_SIZE=place.cache_k.shape[1], WINDOW=window.shape[1] if window is not None and stores_window else 0,
        HAS_BIAS=bias is not None, HAS_NORM=query_norm is not None, num_warps=max(1, heads // 2),
    )  # fmt: skip
    return queries


def gated(gate_up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`engine.torch_layers.gated`."""
    num_rows, width = gate_up.shape[-2], gate_up.shape[-1] // 2
    output = torch.empty(num_rows, width, dtype=dtype, device=gate_up.device)
    if num_rows:
        tile = min(GATED_TILE, power_of_2(width))
        _gated_kernel[(num_rows, -(-width // tile))](
            gate_up, output, _split_stride(gate_up),
            WIDTH=width, NUM_SPLITS=_num_splits(gate_up), TILE=tile, num_warps=4,
        )  # fmt: skip
    return output


def _num_splits(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() == 3 else 1


def _split_stride(tensor: torch.Tensor) -> int:
    return tensor.stride(0) if tensor.dim() == 3 else 0


def _heads_together(shape: HeadShape) -> int:
    """The most heads (a power of two) that divide both kinds, so that a program's heads are all of one kind."""
    common = math.gcd(shape.num_query_heads, shape.num_kv_heads)
    return min(MOST_HEADS, common & -common)

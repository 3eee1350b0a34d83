"""One launch that stores new K and V rows, and the queries of the observation window, of one layer."""

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from engine.kernels.triton_common import power_of_2


@triton.jit
def _store_row(
    source: tl.tensor,
    destination: tl.tensor,
    source_stride: tl.tensor,
    destination_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Copy one token's `[NUM_HEADS, HEAD_DIM]`, `TILE` values at a time; strides are those of the heads."""
    for start in range(0, NUM_HEADS * HEAD_DIM, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < NUM_HEADS * HEAD_DIM
        head = (place // HEAD_DIM).to(tl.int64)
        column = place % HEAD_DIM
        row = tl.load(source + head * source_stride + column, mask=inside)
        tl.store(destination + head * destination_stride + column, row.to(destination.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _store_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    slot_mapping: tl.tensor,
    cache_k: tl.tensor,
    cache_v: tl.tensor,
    queries: tl.tensor,
    window_rows: tl.tensor,
    window_queries: tl.tensor,
    num_tokens: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    k_block_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_block_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    v_head_stride: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    window_slot_stride: tl.tensor,
    window_row_stride: tl.tensor,
    window_head_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        _store_row(
            keys + token * key_stride,
            cache_k + block * k_block_stride + offset * k_slot_stride,
            key_head_stride,
            k_head_stride,
            NUM_KV_HEADS,
            HEAD_DIM,
            TILE,
        )
        _store_row(
            values + token * value_stride,
            cache_v + block * v_block_stride + offset * v_slot_stride,
            value_head_stride,
            v_head_stride,
            NUM_KV_HEADS,
            HEAD_DIM,
            TILE,
        )
    if WINDOW > 0:
        window_row = tl.load(window_rows + token).to(tl.int64)
        if window_row >= 0:
            query_slot = window_row // WINDOW
            place = window_row % WINDOW
            _store_row(
                queries + token * query_stride,
                window_queries + query_slot * window_slot_stride + place * window_row_stride,
                query_head_stride,
                window_head_stride,
                NUM_QUERY_HEADS,
                HEAD_DIM,
                TILE,
            )


def store(
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    queries: torch.Tensor | None = None,
    window_rows: torch.Tensor | None = None,
    window_queries: torch.Tensor | None = None,
) -> None:
    """See `Kernels.store`."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    if num_tokens == 0:
        return
    stores_window = queries is not None and window_rows is not None and window_queries is not None
    # Without a window the pointers are never read; any tensor will do for them.
    q = queries if queries is not None and stores_window else keys
    rows = window_rows if window_rows is not None and stores_window else slot_mapping
    window = window_queries if window_queries is not None and stores_window else cache_k
    _store_kernel[(num_tokens,)](
        keys, values, slot_mapping, cache_k, cache_v, q, rows, window, num_tokens,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        *cache_k.stride()[:3], *cache_v.stride()[:3],
        q.stride(0), q.stride(1), *window.stride()[:3],
        BLOCK_SIZE=cache_k.shape[1],
        WINDOW=window.shape[1] if stores_window else 0,
        NUM_KV_HEADS=num_kv_heads,
        NUM_QUERY_HEADS=q.shape[1],
        HEAD_DIM=head_dim,
        TILE=min(1024, power_of_2(num_kv_heads * head_dim)),
        num_warps=4,
    )  # fmt: skip

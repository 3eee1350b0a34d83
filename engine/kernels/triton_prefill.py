"""Paged prefill attention: packed chunks over cached prefix and themselves, a group's query heads
together.

One launch that stores new K and V rows, and the queries of the observation window, of one layer.
"""

import torch
import triton
import triton.language as tl

from zlab.engine.errors import KernelInputError
from zlab.engine.kernels.triton_common import (
    Launch,
    check_cache,
    dot_precision,
    find_request,
    padded,
    power_of_2,
    row_offsets,
)

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"


LAUNCH = Launch(tile=128, num_warps=8, num_stages=2)
QUERY_ROWS = 128  # rows of one program: chunk tokens times query heads of a group
# Full float32 products run outside the matrix units, from registers; large tiles would not fit
# those.
FLOAT32_LAUNCH = Launch(tile=32, num_warps=8)
FLOAT32_QUERY_ROWS = 32
VALUES_PER_WARP = (
    4096  # of logits and results; with more, addresses had better not stay in registers too
)
LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    query: tl.tensor,
    keys_of_head: tl.tensor,
    values_of_head: tl.tensor,
    block_table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    last_visible: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    result: tl.tensor,
    k_block_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    v_block_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    scale: tl.tensor,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    HOLD_SPACING: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Online softmax over cache places `begin..end`; without MASKED every row sees all of them."""
    dim = tl.arange(0, PAD_DIM)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        inside = token < end
        k_offsets = row_offsets(
            block_table,
            start,
            token,
            inside,
            k_block_stride,
            k_slot_stride,
            BLOCK_SIZE,
            TILE,
            HOLD_SPACING,
        )
        v_offsets = row_offsets(
            block_table,
            start,
            token,
            inside,
            v_block_stride,
            v_slot_stride,
            BLOCK_SIZE,
            TILE,
            HOLD_SPACING,
        )
        if MASKED:
            mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
        else:
            mask = (token >= 0)[:, None] & (dim < HEAD_DIM)[None, :]
        keys = tl.load(keys_of_head + k_offsets[:, None] + dim[None, :], mask=mask, other=0.0)
        logits = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        if MASKED:
            logits = tl.where(token[None, :] <= last_visible[:, None], logits, float("-inf"))
        # The scale is positive: a maximum can be scaled in place of all its logits, whose scaling
        # then costs nothing
        # beside the subtraction.
        higher = tl.maximum(largest, tl.max(logits, axis=1) * scale)
        weights = tl.exp2(logits * scale - higher[:, None])
        shrink = tl.exp2(largest - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        values = tl.load(values_of_head + v_offsets[:, None] + dim[None, :], mask=mask, other=0.0)
        result = result * shrink[:, None]
        result = tl.dot(weights.to(values.dtype), values, result, input_precision=PRECISION)
        largest = higher
    return largest, total, result


@triton.jit(do_not_specialize=["num_requests", "table_stride"])
def _prefill_kernel(
    queries: tl.tensor,
    cache_k: tl.tensor,
    cache_v: tl.tensor,
    block_tables: tl.tensor,
    lengths: tl.tensor,
    query_starts: tl.tensor,
    output: tl.tensor,
    scale: tl.tensor,
    num_requests: tl.tensor,
    table_stride: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    output_stride: tl.tensor,
    output_head_stride: tl.tensor,
    k_block_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_block_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    v_head_stride: tl.tensor,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    HOLD_SPACING: tl.constexpr,
) -> None:
    """TOKENS chunk tokens times GROUP query heads of one KV head; row = token * GROUP + member."""
    head = tl.program_id(0)
    # Late tiles see most keys and take longest; starting with them leaves the short ones to fill
    # the card at the end.
    item = tl.num_programs(1) - 1 - tl.program_id(1) + tl.load(query_starts) // TOKENS
    request = find_request(query_starts, item, num_requests, TOKENS)
    query_start = tl.load(query_starts + request)
    num_queries = tl.load(query_starts + request + 1) - query_start
    first_query = (item - query_start // TOKENS - request) * TOKENS
    if first_query < num_queries:
        prefix = tl.load(lengths + request) - num_queries
        row = tl.arange(0, ROWS)
        dim = tl.arange(0, PAD_DIM)
        query_token = first_query + row // GROUP
        query_head = head * GROUP + row % GROUP
        inside = (row < TOKENS * GROUP) & (query_token < num_queries)
        query_mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
        place = (query_start + query_token).to(tl.int64)
        query = tl.load(
            queries
            + (place * query_stride + query_head * query_head_stride)[:, None]
            + dim[None, :],
            mask=query_mask,
            other=0.0,
        )
        # Rows without a query see what the tile's first one sees, so that their softmax is no 0 /
        # 0.
        last_visible = prefix + tl.where(inside, query_token, first_query)
        end = prefix + tl.minimum(first_query + TOKENS, num_queries)
        seen_by_all = (prefix + first_query + 1) // TILE * TILE
        block_table = block_tables + request.to(tl.int64) * table_stride
        keys_of_head = cache_k + head * k_head_stride
        values_of_head = cache_v + head * v_head_stride
        largest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        result = tl.zeros((ROWS, PAD_DIM), tl.float32)
        largest, total, result = _attend(
            query,
            keys_of_head,
            values_of_head,
            block_table,
            0,
            seen_by_all,
            last_visible,
            largest,
            total,
            result,
            k_block_stride,
            k_slot_stride,
            v_block_stride,
            v_slot_stride,
            scale,
            False,
            HEAD_DIM,
            PAD_DIM,
            BLOCK_SIZE,
            TILE,
            PRECISION,
            HOLD_SPACING,
        )
        largest, total, result = _attend(
            query,
            keys_of_head,
            values_of_head,
            block_table,
            seen_by_all,
            end,
            last_visible,
            largest,
            total,
            result,
            k_block_stride,
            k_slot_stride,
            v_block_stride,
            v_slot_stride,
            scale,
            True,
            HEAD_DIM,
            PAD_DIM,
            BLOCK_SIZE,
            TILE,
            PRECISION,
            HOLD_SPACING,
        )
        result = result / total[:, None]
        tl.store(
            output
            + (place * output_stride + query_head * output_head_stride)[:, None]
            + dim[None, :],
            result.to(output.dtype.element_ty),
            mask=query_mask,
        )


def prefill_attention(
    queries: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    output: torch.Tensor,
    *,
    launch: Launch | None = None,
    query_rows: int | None = None,
) -> None:
    """See `Kernels.prefill_attention`; `launch` and `query_rows` override what was measured to be
    best.
    """
    check_cache(cache_k)
    check_cache(cache_v)
    num_tokens, num_query_heads, head_dim = queries.shape
    _, block_size, num_kv_heads, _ = cache_k.shape
    group = num_query_heads // num_kv_heads
    full = queries.dtype == torch.float32
    launch = launch if launch is not None else (FLOAT32_LAUNCH if full else LAUNCH)
    query_rows = (
        query_rows if query_rows is not None else (FLOAT32_QUERY_ROWS if full else QUERY_ROWS)
    )
    if group > query_rows:
        raise KernelInputError(
            f"{group} query heads per KV head do not fit {query_rows} rows of a program"
        )
    num_requests = lengths.shape[0]
    tokens = query_rows // group
    _prefill_kernel[(num_kv_heads, num_tokens // tokens + num_requests)](
        queries,
        cache_k,
        cache_v,
        block_tables,
        lengths,
        query_starts,
        output,
        scale * LOG2_E,
        num_requests,
        block_tables.stride(0),
        *queries.stride()[:2],
        *output.stride()[:2],
        *cache_k.stride()[:3],
        *cache_v.stride()[:3],
        GROUP=group,
        TOKENS=tokens,
        ROWS=query_rows,
        HEAD_DIM=head_dim,
        PAD_DIM=padded(head_dim),
        BLOCK_SIZE=block_size,
        TILE=launch.tile,
        PRECISION=dot_precision(cache_k),
        HOLD_SPACING=query_rows * (launch.tile + padded(head_dim))
        <= VALUES_PER_WARP * launch.num_warps,
        **launch.options(),
    )


# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"


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
    """Copy one token's `[NUM_HEADS, HEAD_DIM]`, `TILE` values at a time; strides are those of the
    heads.
    """
    for start in range(0, NUM_HEADS * HEAD_DIM, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < NUM_HEADS * HEAD_DIM
        head = (place // HEAD_DIM).to(tl.int64)
        column = place % HEAD_DIM
        row = tl.load(source + head * source_stride + column, mask=inside)
        tl.store(
            destination + head * destination_stride + column,
            row.to(destination.dtype.element_ty),
            mask=inside,
        )


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

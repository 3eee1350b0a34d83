"""Paged prefill attention: packed chunks over cached prefix and themselves, a group's query heads together."""

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from engine.kernels.errors import KernelInputError
from engine.kernels.triton_common import Launch, check_cache, dot_precision, find_request, padded, row_offsets

LAUNCH = Launch(tile=128, num_warps=8, num_stages=2)
QUERY_ROWS = 128  # rows of one program: chunk tokens times query heads of a group
# Full float32 products run outside the matrix units, from registers; large tiles would not fit those.
FLOAT32_LAUNCH = Launch(tile=32, num_warps=8)
FLOAT32_QUERY_ROWS = 32
VALUES_PER_WARP = 4096  # of logits and results; with more, addresses had better not stay in registers too
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
            block_table, start, token, inside, k_block_stride, k_slot_stride, BLOCK_SIZE, TILE, HOLD_SPACING
        )
        v_offsets = row_offsets(
            block_table, start, token, inside, v_block_stride, v_slot_stride, BLOCK_SIZE, TILE, HOLD_SPACING
        )
        if MASKED:
            mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
        else:
            mask = (token >= 0)[:, None] & (dim < HEAD_DIM)[None, :]
        keys = tl.load(keys_of_head + k_offsets[:, None] + dim[None, :], mask=mask, other=0.0)
        logits = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        if MASKED:
            logits = tl.where(token[None, :] <= last_visible[:, None], logits, float("-inf"))
        # The scale is positive: a maximum can be scaled in place of all its logits, whose scaling then costs nothing
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
    # Late tiles see most keys and take longest; starting with them leaves the short ones to fill the card at the end.
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
            queries + (place * query_stride + query_head * query_head_stride)[:, None] + dim[None, :],
            mask=query_mask,
            other=0.0,
        )
        # Rows without a query see what the tile's first one sees, so that their softmax is no 0 / 0.
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
            query, keys_of_head, values_of_head, block_table, 0, seen_by_all, last_visible, largest, total, result,
            k_block_stride, k_slot_stride, v_block_stride, v_slot_stride, scale,
            False, HEAD_DIM, PAD_DIM, BLOCK_SIZE, TILE, PRECISION, HOLD_SPACING,
        )  # fmt: skip
        largest, total, result = _attend(
            query, keys_of_head, values_of_head, block_table, seen_by_all, end, last_visible, largest, total, result,
            k_block_stride, k_slot_stride, v_block_stride, v_slot_stride, scale,
            True, HEAD_DIM, PAD_DIM, BLOCK_SIZE, TILE, PRECISION, HOLD_SPACING,
        )  # fmt: skip
        result = result / total[:, None]
        tl.store(
            output + (place * output_stride + query_head * output_head_stride)[:, None] + dim[None, :],
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
    """See `Kernels.prefill_attention`; `launch` and `query_rows` override what was measured to be best."""
    check_cache(cache_k)
    check_cache(cache_v)
    num_tokens, num_query_heads, head_dim = queries.shape
    _, block_size, num_kv_heads, _ = cache_k.shape
    group = num_query_heads // num_kv_heads
    full = queries.dtype == torch.float32
    launch = launch if launch is not None else (FLOAT32_LAUNCH if full else LAUNCH)
    query_rows = query_rows if query_rows is not None else (FLOAT32_QUERY_ROWS if full else QUERY_ROWS)
    if group > query_rows:
        raise KernelInputError(f"{group} query heads per KV head do not fit {query_rows} rows of a program")
    num_requests = lengths.shape[0]
    tokens = query_rows // group
    _prefill_kernel[(num_kv_heads, num_tokens // tokens + num_requests)](
        queries, cache_k, cache_v, block_tables, lengths, query_starts, output, scale * LOG2_E,
        num_requests, block_tables.stride(0), *queries.stride()[:2], *output.stride()[:2],
        *cache_k.stride()[:3], *cache_v.stride()[:3],
        GROUP=group, TOKENS=tokens, ROWS=query_rows, HEAD_DIM=head_dim, PAD_DIM=padded(head_dim),
        BLOCK_SIZE=block_size, TILE=launch.tile, PRECISION=dot_precision(cache_k),
        HOLD_SPACING=query_rows * (launch.tile + padded(head_dim)) <= VALUES_PER_WARP * launch.num_warps,
        **launch.options(),
    )  # fmt: skip

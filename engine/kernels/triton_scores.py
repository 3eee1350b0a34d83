"""Window attention and global score: two passes over the keys, no `[heads, w, S]` buffer.

Pass 1 leaves the softmax's row maximum and sum per span of tokens; a small reduction turns them into one normaliser per
row; pass 2 recomputes the logits and leaves F. A program owns a span of whole blocks and takes it a tile at a time, the
next tiles' keys already on their way. Both passes work in units of log 2.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from engine.kernels.batch import CompressionBatch
from engine.kernels.errors import KernelInputError
from engine.kernels.triton_common import (
    Launch,
    check_cache,
    dot_precision,
    load_keys,
    padded,
    power_of_2,
    row_offsets,
)
from engine.kernels.triton_lightning import lightning_redundancy
from engine.kernels.workspace import Scratch, score_tile

SOFTMAX_ROWS = 64  # rows of the softmax (query heads x window) that one product covers
FIRST_PASS = Launch(tile=64, num_warps=4, num_stages=3)
SECOND_PASS = Launch(tile=64, num_warps=4, num_stages=3)
FLOAT32_LAUNCH = Launch(tile=32, num_warps=8)  # full float32 products are made in registers
LOG2_E = 1.4426950408889634
LOWEST_LOGIT = tl.constexpr(-1e30)  # instead of -inf, so that a tile that no row sees leaves no inf - inf


@triton.jit
def _load_queries(
    queries: tl.tensor,
    first_member: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    WINDOW: tl.constexpr,
    PAD_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
) -> tl.tensor:
    """Window queries `[MEMBERS * PAD_WINDOW, PAD_DIM]` of some query heads of the group; zeros in rows that pad."""
    row = tl.arange(0, MEMBERS * PAD_WINDOW)
    member = first_member + row // PAD_WINDOW
    in_window = row % PAD_WINDOW
    dim = tl.arange(0, PAD_DIM)
    inside = ((in_window < WINDOW) & (member < GROUP))[:, None] & (dim < HEAD_DIM)[None, :]
    offsets = member * head_stride + in_window * row_stride
    return tl.load(queries + offsets[:, None] + dim[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["num_requests", "max_blocks", "max_spans"])
def _first_pass(
    cache: tl.tensor,
    window_queries: tl.tensor,
    block_tables: tl.tensor,
    num_blocks: tl.tensor,
    query_slots: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    num_requests: tl.tensor,
    max_blocks: tl.tensor,
    max_spans: tl.tensor,
    layer_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    query_layer_stride: tl.tensor,
    query_slot_stride: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    WINDOW: tl.constexpr,
    PAD_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program per (KV head, span, layer and request); heads vary fastest, their rows lie side by side in memory.

    Rows of the softmax stand on the long side, so that a maximum over tokens stays within few threads.
    """
    head = tl.program_id(0)
    span = tl.program_id(1)
    layer = tl.program_id(2) // num_requests
    request = tl.program_id(2) % num_requests
    num_tokens = tl.load(num_blocks + request) * BLOCK_SIZE
    first = span * SPAN
    if first < num_tokens:
        block_table = block_tables + request * max_blocks
        keys_of_head = cache + layer.to(tl.int64) * layer_stride + head * head_stride
        of_head = (layer.to(tl.int64) * num_requests + request) * NUM_KV_HEADS + head
        slot = tl.load(query_slots + request).to(tl.int64)
        queries = window_queries + layer.to(tl.int64) * query_layer_stride + slot * query_slot_stride
        queries += head * GROUP * query_head_stride
        row = tl.arange(0, MEMBERS * PAD_WINDOW)
        in_window = row % PAD_WINDOW
        last_visible = num_tokens - WINDOW + in_window
        for first_member in tl.static_range(0, GROUP, MEMBERS):
            query = _load_queries(
                queries, first_member, query_row_stride, query_head_stride,
                GROUP, MEMBERS, WINDOW, PAD_WINDOW, HEAD_DIM, PAD_DIM,
            )  # fmt: skip
            largest = tl.full((MEMBERS * PAD_WINDOW,), LOWEST_LOGIT, tl.float32)
            total = tl.zeros((MEMBERS * PAD_WINDOW,), tl.float32)
            for start in range(0, SPAN, TILE):
                token = first + start + tl.arange(0, TILE)
                keys = load_keys(
                    keys_of_head, block_table, first + start, num_tokens, block_stride, slot_stride,
                    BLOCK_SIZE, TILE, HEAD_DIM, PAD_DIM,
                )  # fmt: skip
                logits = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
                visible = (token[None, :] <= last_visible[:, None]) & (token < num_tokens)[None, :]
                logits = tl.where(visible, logits, float("-inf"))
                higher = tl.maximum(largest, tl.max(logits, axis=1))
                total = total * tl.exp2(largest - higher) + tl.sum(tl.exp2(logits - higher[:, None]), axis=1)
                largest = higher
            member = first_member + row // PAD_WINDOW
            inside_rows = (member < GROUP) & (in_window < WINDOW)
            place = ((of_head * max_spans + span) * GROUP + member) * WINDOW + in_window
            tl.store(row_max + place, largest, mask=inside_rows)
            tl.store(row_sum + place, total, mask=inside_rows)


@triton.jit(do_not_specialize=["num_requests", "max_spans"])
def _reduce_rows(
    row_max: tl.tensor,
    row_sum: tl.tensor,
    row_normaliser: tl.tensor,
    num_blocks: tl.tensor,
    num_requests: tl.tensor,
    max_spans: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PAD_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """`log2(sum(exp2(logits)))` of every softmax row from its spans, in their order."""
    head = tl.program_id(0)
    request = tl.program_id(1) % num_requests
    of_head = tl.program_id(1).to(tl.int64) * NUM_KV_HEADS + head
    num_spans = tl.cdiv(tl.load(num_blocks + request) * BLOCK_SIZE, SPAN)
    row = tl.arange(0, PAD_ROWS)
    inside = row < ROWS
    place = of_head * max_spans * ROWS + row
    largest = tl.full((PAD_ROWS,), float("-inf"), tl.float32)
    for span in range(num_spans):
        largest = tl.maximum(largest, tl.load(row_max + place + span * ROWS, mask=inside, other=0.0))
    total = tl.zeros((PAD_ROWS,), tl.float32)
    for span in range(num_spans):
        span_max = tl.load(row_max + place + span * ROWS, mask=inside, other=0.0)
        span_sum = tl.load(row_sum + place + span * ROWS, mask=inside, other=1.0)
        total += span_sum * tl.exp2(span_max - largest)
    tl.store(row_normaliser + of_head * ROWS + row, largest + tl.log2(total), mask=inside)


@triton.jit(do_not_specialize=["num_requests", "max_blocks", "max_tokens"])
def _second_pass(
    cache: tl.tensor,
    window_queries: tl.tensor,
    history: tl.tensor,
    block_tables: tl.tensor,
    num_blocks: tl.tensor,
    query_slots: tl.tensor,
    compressed_before: tl.tensor,
    row_normaliser: tl.tensor,
    global_score: tl.tensor,
    num_requests: tl.tensor,
    max_blocks: tl.tensor,
    max_tokens: tl.tensor,
    layer_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    query_layer_stride: tl.tensor,
    query_slot_stride: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    history_layer_stride: tl.tensor,
    history_block_stride: tl.tensor,
    history_slot_stride: tl.tensor,
    history_head_stride: tl.tensor,
    scale: tl.tensor,
    decay: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    WINDOW: tl.constexpr,
    PAD_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    WITH_HISTORY: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """F of one span: softmax, maximum over the group, mean over the window, then the history of carried tokens.

    Tokens stand on the long side: the maximum over the group then stays within a thread.
    """
    head = tl.program_id(0)
    first = tl.program_id(1) * SPAN
    layer = tl.program_id(2) // num_requests
    request = tl.program_id(2) % num_requests
    num_tokens = tl.load(num_blocks + request) * BLOCK_SIZE
    if first < num_tokens:
        block_table = block_tables + request * max_blocks
        keys_of_head = cache + layer.to(tl.int64) * layer_stride + head * head_stride
        of_head = (layer.to(tl.int64) * num_requests + request) * NUM_KV_HEADS + head
        slot = tl.load(query_slots + request).to(tl.int64)
        queries = window_queries + layer.to(tl.int64) * query_layer_stride + slot * query_slot_stride
        queries += head * GROUP * query_head_stride
        row = tl.arange(0, MEMBERS * PAD_WINDOW)
        in_window = row % PAD_WINDOW
        last_visible = num_tokens - WINDOW + in_window
        # Only what an earlier compression left has a history: everything but the last block, or nothing.
        num_carried = (num_tokens - BLOCK_SIZE) * tl.load(compressed_before + request)
        if MEMBERS >= GROUP:
            query = _load_queries(
                queries, 0, query_row_stride, query_head_stride,
                GROUP, MEMBERS, WINDOW, PAD_WINDOW, HEAD_DIM, PAD_DIM,
            )  # fmt: skip
        for start in range(0, SPAN, TILE):
            token = first + start + tl.arange(0, TILE)
            inside = token < num_tokens
            keys = load_keys(
                keys_of_head, block_table, first + start, num_tokens, block_stride, slot_stride,
                BLOCK_SIZE, TILE, HEAD_DIM, PAD_DIM,
            )  # fmt: skip
            best = tl.zeros((TILE, PAD_WINDOW), tl.float32)
            for first_member in tl.static_range(0, GROUP, MEMBERS):
                if MEMBERS < GROUP:
                    query = _load_queries(
                        queries, first_member, query_row_stride, query_head_stride,
                        GROUP, MEMBERS, WINDOW, PAD_WINDOW, HEAD_DIM, PAD_DIM,
                    )  # fmt: skip
                member = first_member + row // PAD_WINDOW
                place = (of_head * GROUP + member) * WINDOW + in_window
                # Rows that only pad get weight 0: exp2(0 - inf).
                inside_rows = (member < GROUP) & (in_window < WINDOW)
                normaliser = tl.load(row_normaliser + place, mask=inside_rows, other=float("inf"))
                logits = tl.dot(keys, tl.trans(query), input_precision=PRECISION) * scale
                logits = tl.where(token[:, None] <= last_visible[None, :], logits, float("-inf"))
                weights = tl.exp2(logits - normaliser[None, :])
                best = tl.maximum(best, tl.max(tl.reshape(weights, (TILE, MEMBERS, PAD_WINDOW)), axis=1))
            score = tl.sum(best, axis=1) / WINDOW
            if WITH_HISTORY:
                carried = token < num_carried
                places = row_offsets(
                    block_table, first + start, token, inside, history_block_stride, history_slot_stride,
                    BLOCK_SIZE, TILE,
                )  # fmt: skip
                prior = tl.load(
                    history + layer.to(tl.int64) * history_layer_stride + head * history_head_stride + places,
                    mask=carried, other=0.0,
                )  # fmt: skip
                score = tl.where(carried, tl.maximum(score, decay * prior), score)
            tl.store(global_score + of_head * max_tokens + token, score, mask=inside)


def attention_score(
    cache_k: torch.Tensor,
    window_queries: torch.Tensor,
    batch: CompressionBatch,
    scratch: Scratch,
    *,
    history: torch.Tensor | None,
    decay: float,
    lightning_threshold: float | None,
) -> None:
    """See `Kernels.attention_score`."""
    check_cache(cache_k)
    if window_queries.dtype != cache_k.dtype:
        raise KernelInputError(
            f"window queries are {window_queries.dtype} but the cache is {cache_k.dtype}; they must agree"
        )
    num_layers, _, block_size, num_kv_heads, head_dim = cache_k.shape
    window, num_query_heads = window_queries.shape[2:4]
    group = num_query_heads // num_kv_heads
    span = score_tile(block_size)
    full = cache_k.dtype == torch.float32
    first, second = (FLOAT32_LAUNCH, FLOAT32_LAUNCH) if full else (FIRST_PASS, SECOND_PASS)
    max_blocks = batch.block_tables.shape[1]
    grid = (num_kv_heads, triton.cdiv(max_blocks * block_size, span), num_layers * batch.num_requests)
    scale = head_dim**-0.5 * LOG2_E
    _first_pass[grid](
        cache_k, window_queries, batch.block_tables, batch.num_blocks, batch.query_slots,
        scratch.row_max, scratch.row_sum, batch.num_requests, max_blocks, scratch.row_max.shape[3],
        *cache_k.stride()[:4], *window_queries.stride()[:4], scale,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, MEMBERS=_members(group, window), WINDOW=window,
        PAD_WINDOW=padded(window), HEAD_DIM=head_dim, PAD_DIM=padded(head_dim), BLOCK_SIZE=block_size, SPAN=span,
        TILE=min(span, first.tile), PRECISION=dot_precision(cache_k), **first.options(),
    )  # fmt: skip
    _reduce_rows[(num_kv_heads, num_layers * batch.num_requests)](
        scratch.row_max, scratch.row_sum, scratch.row_normaliser, batch.num_blocks,
        batch.num_requests, scratch.row_max.shape[3],
        NUM_KV_HEADS=num_kv_heads, ROWS=group * window, PAD_ROWS=power_of_2(group * window),
        BLOCK_SIZE=block_size, SPAN=span, num_warps=2,
    )  # fmt: skip
    prior = history if history is not None else scratch.global_score  # never read without a history
    _second_pass[grid](
        cache_k, window_queries, prior, batch.block_tables, batch.num_blocks, batch.query_slots,
        batch.compressed_before, scratch.row_normaliser, scratch.global_score,
        batch.num_requests, max_blocks, scratch.global_score.shape[3],
        *cache_k.stride()[:4], *window_queries.stride()[:4], *prior.stride(), scale, decay,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, MEMBERS=_members(group, window), WINDOW=window,
        PAD_WINDOW=padded(window), HEAD_DIM=head_dim, PAD_DIM=padded(head_dim), BLOCK_SIZE=block_size, SPAN=span,
        TILE=min(span, second.tile), WITH_HISTORY=history is not None, PRECISION=dot_precision(cache_k),
        **second.options(),
    )  # fmt: skip
    if lightning_threshold is not None:
        lightning_redundancy(cache_k, batch, scratch, threshold=lightning_threshold)


def _members(group: int, window: int) -> int:
    """Query heads multiplied at once: as many as fill `SOFTMAX_ROWS`, and at least one."""
    return min(power_of_2(group), max(1, SOFTMAX_ROWS // padded(window)))

"""Window attention and global score: two passes over the keys, no `[heads, w, S]` buffer.

Pass 1 leaves the softmax's row maximum and sum per span of tokens; a small reduction turns them
into one normaliser per row; pass 2 recomputes the logits and leaves F. A program owns a span of
whole blocks and takes it a tile at a time, the next tiles' keys already on their way. Both passes
work in units of log 2.

Redundancy inside each block: one program per (KV head, tile of whole blocks, layer and request).

A program holds its tile's keys as one side of the product and takes the columns of the similarity
matrix a few at a time, so all rows of a column are at hand at once and its last row above the
threshold is one maximum over the column.

Redundancy over all S x S pairs, the slow alternative that lightning is judged against.

The S x S matrix is never stored, so it is computed twice: once to find the last row above the
threshold in every column, once to sum the rows without those entries.
"""

import torch
import triton
import triton.language as tl

from zlab.engine.errors import KernelInputError
from zlab.engine.kernels import torch_backend
from zlab.engine.kernels.interface import AttentionOptions
from zlab.engine.kernels.triton_common import (
    Launch,
    check_cache,
    dot_precision,
    inverse_norms,
    load_keys,
    padded,
    power_of_2,
    row_offsets,
)
from zlab.engine.kernels.workspace import CompressionBatch, Scratch
from zlab.sim.memory import score_tile

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"


LAUNCH = Launch(
    tile=64, num_warps=4, num_stages=2
)  # `tile` is columns; the rows are a `score_tile`
FLOAT32_LAUNCH = Launch(tile=32, num_warps=8)
SMALLEST_SQUARE = tl.constexpr(1e-12)  # a key shorter than 1e-6 counts as that long


@triton.jit(do_not_specialize=["num_requests", "max_blocks", "max_tokens"])
def _lightning_kernel(
    cache: tl.tensor,
    block_tables: tl.tensor,
    num_blocks: tl.tensor,
    redundancy_logits: tl.tensor,
    num_requests: tl.tensor,
    max_blocks: tl.tensor,
    max_tokens: tl.tensor,
    layer_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    threshold: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Row sums of the similarity matrix of every block of a tile.

    Keys are multiplied as stored and scaled by their norms after: 16-bit products are exact, a
    rounded unit key is not. A row's own norm scales its sum once, and the threshold instead of
    every similarity.
    """
    head = tl.program_id(0)
    first = tl.program_id(1) * TILE
    layer = tl.program_id(2) // num_requests
    request = tl.program_id(2) % num_requests
    num_tokens = tl.load(num_blocks + request) * BLOCK_SIZE
    if first < num_tokens:
        block_table = block_tables + request * max_blocks
        keys_of_head = cache + layer.to(tl.int64) * layer_stride + head * head_stride
        keys = load_keys(
            keys_of_head, block_table, first, num_tokens, block_stride, slot_stride,
            BLOCK_SIZE, TILE, HEAD_DIM, PAD_DIM,
        )  # fmt: skip
        row = tl.arange(0, TILE)
        wide = keys.to(tl.float32)
        square = tl.maximum(tl.sum(wide * wide, axis=1), SMALLEST_SQUARE)
        # Through a gather, or Triton would rather lay out all keys anew and square them twice than
        # move this vector.
        square_of_row = tl.gather(square, row, axis=0)
        row_scale = tl.rsqrt(square_of_row)
        row_threshold = threshold * square_of_row * row_scale
        scale = tl.rsqrt(square)
        total = tl.zeros((TILE,), tl.float32)
        for start in range(0, TILE, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            others = load_keys(
                keys_of_head, block_table, first + start, num_tokens, block_stride, slot_stride,
                BLOCK_SIZE, COLUMNS, HEAD_DIM, PAD_DIM,
            )  # fmt: skip
            similarity = tl.dot(keys, tl.trans(others), input_precision=PRECISION)
            similarity *= tl.gather(scale, column, axis=0)[None, :]
            pair = row[:, None] != column[None, :]
            if BLOCK_SIZE < TILE:
                pair = pair & (row[:, None] // BLOCK_SIZE == column[None, :] // BLOCK_SIZE)
            similarity = tl.where(pair, similarity, 0.0)
            spared = tl.max(tl.where(similarity > row_threshold[:, None], row[:, None], -1), axis=0)
            total += tl.sum(tl.where(row[:, None] == spared[None, :], 0.0, similarity), axis=1)
        token = first + row
        of_head = (layer.to(tl.int64) * num_requests + request) * NUM_KV_HEADS + head
        tl.store(
            redundancy_logits + of_head * max_tokens + token,
            total * row_scale,
            mask=token < num_tokens,
        )


def lightning_redundancy(
    cache_k: torch.Tensor,
    batch: CompressionBatch,
    scratch: Scratch,
    *,
    threshold: float,
    launch: Launch | None = None,
) -> None:
    """See `Kernels.lightning_redundancy`; `launch` overrides what was measured to be best."""
    check_cache(cache_k)
    num_layers, _, block_size, num_kv_heads, head_dim = cache_k.shape
    launch = (
        launch
        if launch is not None
        else (FLOAT32_LAUNCH if cache_k.dtype == torch.float32 else LAUNCH)
    )
    tile = score_tile(block_size)
    max_blocks = batch.block_tables.shape[1]
    grid = (
        num_kv_heads,
        triton.cdiv(max_blocks * block_size, tile),
        num_layers * batch.num_requests,
    )
    _lightning_kernel[grid](
        cache_k,
        batch.block_tables,
        batch.num_blocks,
        scratch.redundancy_logits,
        batch.num_requests,
        max_blocks,
        scratch.redundancy_logits.shape[3],
        *cache_k.stride()[:4],
        threshold,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAD_DIM=padded(head_dim),
        BLOCK_SIZE=block_size,
        TILE=tile,
        COLUMNS=min(tile, launch.tile),
        PRECISION=dot_precision(cache_k),
        **launch.options(),
    )


# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"


SOFTMAX_ROWS = 64  # rows of the softmax (query heads x window) that one product covers
FIRST_PASS = Launch(tile=64, num_warps=4, num_stages=3)
SECOND_PASS = Launch(tile=64, num_warps=4, num_stages=3)
LOG2_E = 1.4426950408889634
POSITION_BITS = tl.constexpr(torch_backend.POSITION_BITS)
POSITION_MASK = tl.constexpr(torch_backend.POSITION_MASK)
LOWEST_LOGIT = tl.constexpr(
    -1e30
)  # instead of -inf, so that a tile that no row sees leaves no inf - inf


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
    """Window queries `[MEMBERS * PAD_WINDOW, PAD_DIM]` of some query heads of the group; zeros in
    rows that pad.
    """
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
    """One program per (KV head, span, layer and request); heads vary fastest, their rows lie side
    by side in memory.

    Rows of the softmax stand on the long side, so that a maximum over tokens stays within few
    threads.
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
        queries = (
            window_queries + layer.to(tl.int64) * query_layer_stride + slot * query_slot_stride
        )
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
                total = total * tl.exp2(largest - higher) + tl.sum(
                    tl.exp2(logits - higher[:, None]), axis=1
                )
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
        largest = tl.maximum(
            largest, tl.load(row_max + place + span * ROWS, mask=inside, other=0.0)
        )
    total = tl.zeros((PAD_ROWS,), tl.float32)
    for span in range(num_spans):
        span_max = tl.load(row_max + place + span * ROWS, mask=inside, other=0.0)
        span_sum = tl.load(row_sum + place + span * ROWS, mask=inside, other=1.0)
        total += span_sum * tl.exp2(span_max - largest)
    tl.store(row_normaliser + of_head * ROWS + row, largest + tl.log2(total), mask=inside)


@triton.jit
def _pack(position: tl.tensor, score: tl.tensor) -> tl.tensor:
    """`zlab.engine.kernels.torch_backend.pack`."""
    bits = score.to(tl.uint32, bitcast=True) + 0x8000
    word = ((bits >> 16) << POSITION_BITS) | (position.to(tl.uint32) & POSITION_MASK)
    return word.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_requests", "max_blocks", "max_tokens"])
def _second_pass(  # noqa: PLR0915 - one kernel, one loop
    cache: tl.tensor,
    window_queries: tl.tensor,
    history: tl.tensor,
    block_tables: tl.tensor,
    num_blocks: tl.tensor,
    query_slots: tl.tensor,
    carried_tokens: tl.tensor,
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
    WITH_POSITIONS: tl.constexpr,
    MEAN_HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """F of one span: softmax, maximum (or mean) over the group, mean over the window, then the
    history of carried tokens.

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
        queries = (
            window_queries + layer.to(tl.int64) * query_layer_stride + slot * query_slot_stride
        )
        queries += head * GROUP * query_head_stride
        row = tl.arange(0, MEMBERS * PAD_WINDOW)
        in_window = row % PAD_WINDOW
        last_visible = num_tokens - WINDOW + in_window
        num_carried = tl.load(carried_tokens + request)  # what an earlier compression left
        histories = history + layer.to(tl.int64) * history_layer_stride + head * history_head_stride
        if WITH_POSITIONS:
            last = tl.maximum(num_carried - 1, 0)
            last_block = tl.load(block_table + last // BLOCK_SIZE).to(tl.int64)
            last_slot = (last % BLOCK_SIZE).to(tl.int64)
            last_place = last_block * history_block_stride + last_slot * history_slot_stride
            last_word = tl.load(histories + last_place).to(tl.uint32, bitcast=True)
            latest = tl.where(num_carried > 0, (last_word & POSITION_MASK).to(tl.int32), -1)
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
                by_member = tl.reshape(weights, (TILE, MEMBERS, PAD_WINDOW))
                if MEAN_HEADS:
                    best += tl.sum(by_member, axis=1) / GROUP
                else:
                    best = tl.maximum(best, tl.max(by_member, axis=1))
            score = tl.sum(best, axis=1) / WINDOW
            if WITH_POSITIONS:
                position = latest + 1 + token - num_carried
            if WITH_HISTORY:
                carried = token < num_carried
                places = row_offsets(
                    block_table,
                    first + start,
                    token,
                    inside,
                    history_block_stride,
                    history_slot_stride,
                    BLOCK_SIZE,
                    TILE,
                )
                prior = tl.load(histories + places, mask=carried, other=0.0)
                if WITH_POSITIONS:
                    word = prior.to(tl.uint32, bitcast=True)
                    position = tl.where(carried, (word & POSITION_MASK).to(tl.int32), position)
                    prior = ((word >> POSITION_BITS) << 16).to(tl.float32, bitcast=True)
                score = tl.where(carried, tl.maximum(score, decay * prior), score)
            if WITH_POSITIONS:
                score = _pack(position, score)
            tl.store(global_score + of_head * max_tokens + token, score, mask=inside)


def attention_score(
    cache_k: torch.Tensor,
    window_queries: torch.Tensor,
    batch: CompressionBatch,
    scratch: Scratch,
    history: torch.Tensor | None,
    options: AttentionOptions,
) -> None:
    """See `KernelBackend.attention_score`."""
    check_cache(cache_k)
    if window_queries.dtype != cache_k.dtype:
        raise KernelInputError(
            f"window queries are {window_queries.dtype} but the cache is {cache_k.dtype}; they "
            f"must agree"
        )
    num_layers, _, block_size, num_kv_heads, head_dim = cache_k.shape
    window, num_query_heads = window_queries.shape[2:4]
    group = num_query_heads // num_kv_heads
    span = score_tile(block_size)
    full = cache_k.dtype == torch.float32
    first, second = (FLOAT32_LAUNCH, FLOAT32_LAUNCH) if full else (FIRST_PASS, SECOND_PASS)
    max_blocks = batch.block_tables.shape[1]
    grid = (
        num_kv_heads,
        triton.cdiv(max_blocks * block_size, span),
        num_layers * batch.num_requests,
    )
    scale = head_dim**-0.5 * LOG2_E
    _first_pass[grid](
        cache_k,
        window_queries,
        batch.block_tables,
        batch.num_blocks,
        batch.query_slots,
        scratch.row_max,
        scratch.row_sum,
        batch.num_requests,
        max_blocks,
        scratch.row_max.shape[3],
        *cache_k.stride()[:4],
        *window_queries.stride()[:4],
        scale,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        MEMBERS=_members(group, window),
        WINDOW=window,
        PAD_WINDOW=padded(window),
        HEAD_DIM=head_dim,
        PAD_DIM=padded(head_dim),
        BLOCK_SIZE=block_size,
        SPAN=span,
        TILE=min(span, first.tile),
        PRECISION=dot_precision(cache_k),
        **first.options(),
    )
    _reduce_rows[(num_kv_heads, num_layers * batch.num_requests)](
        scratch.row_max, scratch.row_sum, scratch.row_normaliser, batch.num_blocks,
        batch.num_requests, scratch.row_max.shape[3],
        NUM_KV_HEADS=num_kv_heads, ROWS=group * window, PAD_ROWS=power_of_2(group * window),
        BLOCK_SIZE=block_size, SPAN=span, num_warps=2,
    )  # fmt: skip
    prior = history if history is not None else scratch.global_score  # never read without a history
    _second_pass[grid](
        cache_k,
        window_queries,
        prior,
        batch.block_tables,
        batch.num_blocks,
        batch.query_slots,
        batch.num_carried,
        scratch.row_normaliser,
        scratch.global_score,
        batch.num_requests,
        max_blocks,
        scratch.global_score.shape[3],
        *cache_k.stride()[:4],
        *window_queries.stride()[:4],
        *prior.stride(),
        scale,
        options.decay,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        MEMBERS=_members(group, window),
        WINDOW=window,
        PAD_WINDOW=padded(window),
        HEAD_DIM=head_dim,
        PAD_DIM=padded(head_dim),
        BLOCK_SIZE=block_size,
        SPAN=span,
        TILE=min(span, second.tile),
        WITH_HISTORY=history is not None,
        WITH_POSITIONS=options.with_positions,
        MEAN_HEADS=options.mean_heads,
        PRECISION=dot_precision(cache_k),
        **second.options(),
    )
    if options.lightning_threshold is not None:
        lightning_redundancy(cache_k, batch, scratch, threshold=options.lightning_threshold)


def _members(group: int, window: int) -> int:
    """Query heads multiplied at once: as many as fill `SOFTMAX_ROWS`, and at least one."""
    return min(power_of_2(group), max(1, SOFTMAX_ROWS // padded(window)))


# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"


@triton.jit(do_not_specialize=["num_requests", "max_blocks", "max_tokens"])
def _pairs_kernel(
    cache: tl.tensor,
    block_tables: tl.tensor,
    num_blocks: tl.tensor,
    spared_rows: tl.tensor,
    redundancy_logits: tl.tensor,
    num_requests: tl.tensor,
    max_blocks: tl.tensor,
    max_tokens: tl.tensor,
    layer_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    threshold: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """`own` tokens of one tile against all `others`.

    The matrix is symmetric: without SUM_ROWS the own tokens are columns and the others the rows
    that may be spared; with it the own tokens are rows and the others columns whose spared row is
    known.
    """
    head = tl.program_id(0)
    first = tl.program_id(1) * TILE
    layer = tl.program_id(2) // num_requests
    request = tl.program_id(2) % num_requests
    num_tokens = tl.load(num_blocks + request) * BLOCK_SIZE
    if first < num_tokens:
        block_table = block_tables + request * max_blocks
        keys_of_head = cache + layer.to(tl.int64) * layer_stride + head * head_stride
        of_head = (layer.to(tl.int64) * num_requests + request) * NUM_KV_HEADS + head
        own = first + tl.arange(0, TILE)
        keys = load_keys(
            keys_of_head, block_table, first, num_tokens, block_stride, slot_stride,
            BLOCK_SIZE, TILE, HEAD_DIM, PAD_DIM,
        )  # fmt: skip
        own_scale = inverse_norms(keys)
        spared = tl.full((TILE,), -1, tl.int32)
        logits = tl.zeros((TILE,), tl.float32)
        for start in range(0, num_tokens, TILE):
            other = start + tl.arange(0, TILE)
            other_keys = load_keys(
                keys_of_head, block_table, start, num_tokens, block_stride, slot_stride,
                BLOCK_SIZE, TILE, HEAD_DIM, PAD_DIM,
            )  # fmt: skip
            similarity = tl.dot(keys, tl.trans(other_keys), input_precision=PRECISION)
            similarity *= own_scale[:, None] * inverse_norms(other_keys)[None, :]
            similarity = tl.where(own[:, None] != other[None, :], similarity, 0.0)
            if SUM_ROWS:
                spared_row = tl.load(
                    spared_rows + of_head * max_tokens + other, mask=other < num_tokens, other=-1
                )  # fmt: skip
                logits += tl.sum(
                    tl.where(own[:, None] == spared_row[None, :], 0.0, similarity), axis=1
                )
            else:
                above = similarity > threshold
                spared = tl.maximum(spared, tl.max(tl.where(above, other[None, :], -1), axis=1))
        if SUM_ROWS:
            tl.store(redundancy_logits + of_head * max_tokens + own, logits, mask=own < num_tokens)
        else:
            tl.store(spared_rows + of_head * max_tokens + own, spared, mask=own < num_tokens)


def full_redundancy(
    cache_k: torch.Tensor, batch: CompressionBatch, scratch: Scratch, *, threshold: float
) -> None:
    """See `Kernels.full_redundancy`."""
    check_cache(cache_k)
    num_layers, _, block_size, num_kv_heads, head_dim = cache_k.shape
    grid = (
        num_kv_heads,
        triton.cdiv(batch.block_tables.shape[1] * block_size, LAUNCH.tile),
        num_layers * batch.num_requests,
    )
    for sum_rows in (False, True):
        _pairs_kernel[grid](
            cache_k,
            batch.block_tables,
            batch.num_blocks,
            scratch.score.view(torch.int32),
            scratch.redundancy_logits,
            batch.num_requests,
            batch.block_tables.shape[1],
            scratch.redundancy_logits.shape[3],
            *cache_k.stride()[:4],
            threshold,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            PAD_DIM=padded(head_dim),
            BLOCK_SIZE=block_size,
            TILE=LAUNCH.tile,
            SUM_ROWS=sum_rows,
            PRECISION=dot_precision(cache_k),
            **LAUNCH.options(),
        )

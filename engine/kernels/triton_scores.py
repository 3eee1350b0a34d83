"""Window attention, global score and lightning redundancy: two passes over the keys, no `[heads, w, S]` buffer.

Pass 1 leaves the softmax's row maximum and sum per tile, and, while it has the keys at hand, the lightning logits. A
small reduction turns the former into one normaliser per row. Pass 2 recomputes the logits and leaves F.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from engine.kernels.batch import CompressionBatch
from engine.kernels.errors import KernelInputError
from engine.kernels.triton_common import Launch, check_cache, dot_precision, load_keys, padded, row_offsets
from engine.kernels.triton_redundancy import lightning_logits
from engine.kernels.workspace import Scratch, score_tile

SOFTMAX_ROWS = 64  # rows of the softmax (query heads x window) that one product covers
# `tile` is the columns of the similarity matrix held at a time; the rows, as in the second pass, are `score_tile`.
FIRST_PASS = Launch(tile=64, num_warps=8, num_stages=1, max_registers=128)
SECOND_PASS = Launch(tile=0, num_warps=8)


@triton.jit
def _window_logits(
    queries: tl.tensor,
    keys: tl.tensor,
    token: tl.tensor,
    num_tokens: tl.tensor,
    first_member: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    WINDOW: tl.constexpr,
    PAD_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Logits `[TILE, MEMBERS * PAD_WINDOW]` of some query heads of the group; -inf where a row does not see a token.

    Tokens stand on the long side, as in the similarity matrix, so that both products read the same tile of keys. Rows
    that only pad have logits 0, not -inf, so that no softmax of theirs divides by zero.
    """
    row = tl.arange(0, MEMBERS * PAD_WINDOW)
    member = first_member + row // PAD_WINDOW
    in_window = row % PAD_WINDOW
    dim = tl.arange(0, PAD_DIM)
    inside = ((in_window < WINDOW) & (member < GROUP))[:, None] & (dim < HEAD_DIM)[None, :]
    offsets = member * head_stride + in_window * row_stride
    query = tl.load(queries + offsets[:, None] + dim[None, :], mask=inside, other=0.0)
    logits = tl.dot(keys, tl.trans(query), input_precision=PRECISION) * scale
    place = num_tokens - WINDOW + in_window
    return tl.where(token[:, None] <= place[None, :], logits, float("-inf"))


@triton.jit(do_not_specialize=["num_requests", "max_blocks", "max_tokens", "max_tiles"])
def _first_pass(
    cache: tl.tensor,
    window_queries: tl.tensor,
    block_tables: tl.tensor,
    num_blocks: tl.tensor,
    query_slots: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    redundancy_logits: tl.tensor,
    num_requests: tl.tensor,
    max_blocks: tl.tensor,
    max_tokens: tl.tensor,
    max_tiles: tl.tensor,
    layer_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    query_layer_stride: tl.tensor,
    query_slot_stride: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    scale: tl.tensor,
    threshold: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    WINDOW: tl.constexpr,
    PAD_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WITH_ATTENTION: tl.constexpr,
    WITH_LIGHTNING: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program per (KV head, tile, layer and request); heads vary fastest, their rows lie side by side in memory."""
    head = tl.program_id(0)
    tile = tl.program_id(1)
    layer = tl.program_id(2) // num_requests
    request = tl.program_id(2) % num_requests
    num_tokens = tl.load(num_blocks + request) * BLOCK_SIZE
    first = tile * TILE
    if first < num_tokens:
        block_table = block_tables + request * max_blocks
        keys_of_head = cache + layer.to(tl.int64) * layer_stride + head * head_stride
        token = first + tl.arange(0, TILE)
        inside = token < num_tokens
        keys = load_keys(
            keys_of_head, block_table, first, num_tokens, block_stride, slot_stride,
            BLOCK_SIZE, TILE, HEAD_DIM, PAD_DIM,
        )  # fmt: skip
        of_head = (layer.to(tl.int64) * num_requests + request) * NUM_KV_HEADS + head
        if WITH_ATTENTION:
            slot = tl.load(query_slots + request).to(tl.int64)
            queries = window_queries + layer.to(tl.int64) * query_layer_stride + slot * query_slot_stride
            queries += head * GROUP * query_head_stride
            row = tl.arange(0, MEMBERS * PAD_WINDOW)
            for first_member in range(0, GROUP, MEMBERS):
                logits = _window_logits(
                    queries, keys, token, num_tokens, first_member, query_row_stride, query_head_stride, scale,
                    GROUP, MEMBERS, WINDOW, PAD_WINDOW, HEAD_DIM, PAD_DIM, PRECISION,
                )  # fmt: skip
                # The last tile begins at or before the last block, so every row sees a token of every tile.
                largest = tl.max(logits, axis=0)
                total = tl.sum(tl.exp(logits - largest[None, :]), axis=0)
                member = first_member + row // PAD_WINDOW
                in_window = row % PAD_WINDOW
                inside_rows = (member < GROUP) & (in_window < WINDOW)
                place = ((of_head * max_tiles + tile) * GROUP + member) * WINDOW + in_window
                tl.store(row_max + place, largest, mask=inside_rows)
                tl.store(row_sum + place, total, mask=inside_rows)
        if WITH_LIGHTNING:
            logits = lightning_logits(
                keys_of_head, block_table, keys, first, num_tokens, block_stride, slot_stride, threshold,
                BLOCK_SIZE, TILE, COLUMNS, HEAD_DIM, PAD_DIM, PRECISION,
            )  # fmt: skip
            tl.store(redundancy_logits + of_head * max_tokens + token, logits, mask=inside)


@triton.jit(do_not_specialize=["num_requests", "max_tiles"])
def _reduce_rows(
    row_max: tl.tensor,
    row_sum: tl.tensor,
    row_normaliser: tl.tensor,
    num_blocks: tl.tensor,
    num_requests: tl.tensor,
    max_tiles: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PAD_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """`log(sum(exp(logits)))` of every softmax row from its tiles, in tile order."""
    head = tl.program_id(0)
    request = tl.program_id(1) % num_requests
    of_head = tl.program_id(1).to(tl.int64) * NUM_KV_HEADS + head
    num_tiles = tl.cdiv(tl.load(num_blocks + request) * BLOCK_SIZE, TILE)
    row = tl.arange(0, PAD_ROWS)
    inside = row < ROWS
    place = of_head * max_tiles * ROWS + row
    largest = tl.full((PAD_ROWS,), float("-inf"), tl.float32)
    for tile in range(num_tiles):
        largest = tl.maximum(largest, tl.load(row_max + place + tile * ROWS, mask=inside, other=0.0))
    total = tl.zeros((PAD_ROWS,), tl.float32)
    for tile in range(num_tiles):
        tile_max = tl.load(row_max + place + tile * ROWS, mask=inside, other=0.0)
        tile_sum = tl.load(row_sum + place + tile * ROWS, mask=inside, other=1.0)
        total += tile_sum * tl.exp(tile_max - largest)
    tl.store(row_normaliser + of_head * ROWS + row, largest + tl.log(total), mask=inside)


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
    TILE: tl.constexpr,
    WITH_HISTORY: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """F of one tile: softmax, maximum over the group, mean over the window, then the history of carried tokens."""
    head = tl.program_id(0)
    first = tl.program_id(1) * TILE
    layer = tl.program_id(2) // num_requests
    request = tl.program_id(2) % num_requests
    num_tokens = tl.load(num_blocks + request) * BLOCK_SIZE
    if first < num_tokens:
        block_table = block_tables + request * max_blocks
        keys_of_head = cache + layer.to(tl.int64) * layer_stride + head * head_stride
        token = first + tl.arange(0, TILE)
        inside = token < num_tokens
        keys = load_keys(
            keys_of_head, block_table, first, num_tokens, block_stride, slot_stride,
            BLOCK_SIZE, TILE, HEAD_DIM, PAD_DIM,
        )  # fmt: skip
        of_head = (layer.to(tl.int64) * num_requests + request) * NUM_KV_HEADS + head
        slot = tl.load(query_slots + request).to(tl.int64)
        queries = window_queries + layer.to(tl.int64) * query_layer_stride + slot * query_slot_stride
        queries += head * GROUP * query_head_stride
        row = tl.arange(0, MEMBERS * PAD_WINDOW)
        best = tl.zeros((TILE, PAD_WINDOW), tl.float32)
        for first_member in range(0, GROUP, MEMBERS):
            logits = _window_logits(
                queries, keys, token, num_tokens, first_member, query_row_stride, query_head_stride, scale,
                GROUP, MEMBERS, WINDOW, PAD_WINDOW, HEAD_DIM, PAD_DIM, PRECISION,
            )  # fmt: skip
            member = first_member + row // PAD_WINDOW
            in_window = row % PAD_WINDOW
            place = (of_head * GROUP + member) * WINDOW + in_window
            # Rows that only pad get weight 0: exp(0 - inf).
            inside_rows = (member < GROUP) & (in_window < WINDOW)
            normaliser = tl.load(row_normaliser + place, mask=inside_rows, other=float("inf"))
            weights = tl.exp(logits - normaliser[None, :])
            best = tl.maximum(best, tl.max(tl.reshape(weights, (TILE, MEMBERS, PAD_WINDOW)), axis=1))
        score = tl.sum(best, axis=1) / WINDOW
        if WITH_HISTORY:
            # Only what an earlier compression left has a history: everything but the last block, or nothing.
            num_carried = (num_tokens - BLOCK_SIZE) * tl.load(compressed_before + request)
            carried = token < num_carried
            places = row_offsets(
                block_table, first, token, inside, history_block_stride, history_slot_stride, BLOCK_SIZE, TILE
            )
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
    _launch_first_pass(cache_k, window_queries, batch, scratch, with_attention=True, threshold=lightning_threshold)
    num_layers, _, block_size, num_kv_heads, head_dim = cache_k.shape
    window, num_query_heads = window_queries.shape[2:4]
    group = num_query_heads // num_kv_heads
    tile = score_tile(block_size)
    _reduce_rows[(num_kv_heads, num_layers * batch.num_requests)](
        scratch.row_max, scratch.row_sum, scratch.row_normaliser, batch.num_blocks,
        batch.num_requests, scratch.row_max.shape[3],
        NUM_KV_HEADS=num_kv_heads, ROWS=group * window, PAD_ROWS=triton.next_power_of_2(group * window),
        BLOCK_SIZE=block_size, TILE=tile, num_warps=2,
    )  # fmt: skip
    prior = history if history is not None else scratch.global_score  # never read without a history
    _second_pass[_grid(cache_k, batch)](
        cache_k, window_queries, prior, batch.block_tables, batch.num_blocks, batch.query_slots,
        batch.compressed_before, scratch.row_normaliser, scratch.global_score,
        batch.num_requests, batch.block_tables.shape[1], scratch.global_score.shape[3],
        *cache_k.stride()[:4], *window_queries.stride()[:4], *prior.stride(), head_dim**-0.5, decay,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, MEMBERS=_members(group, window), WINDOW=window,
        PAD_WINDOW=padded(window), HEAD_DIM=head_dim, PAD_DIM=padded(head_dim), BLOCK_SIZE=block_size, TILE=tile,
        WITH_HISTORY=history is not None, PRECISION=dot_precision(cache_k),
        **SECOND_PASS.options(),
    )  # fmt: skip


def lightning_redundancy(cache_k: torch.Tensor, batch: CompressionBatch, scratch: Scratch, *, threshold: float) -> None:
    """See `Kernels.lightning_redundancy`: the first pass without its attention part."""
    _launch_first_pass(cache_k, None, batch, scratch, with_attention=False, threshold=threshold)


def _launch_first_pass(
    cache_k: torch.Tensor,
    window_queries: torch.Tensor | None,
    batch: CompressionBatch,
    scratch: Scratch,
    *,
    with_attention: bool,
    threshold: float | None,
) -> None:
    check_cache(cache_k)
    _, _, block_size, num_kv_heads, head_dim = cache_k.shape
    queries = window_queries if window_queries is not None else cache_k  # never read without attention
    if queries.dtype != cache_k.dtype:
        raise KernelInputError(f"window queries are {queries.dtype} but the cache is {cache_k.dtype}; they must agree")
    group = queries.shape[3] // num_kv_heads
    window = queries.shape[2]
    tile = score_tile(block_size)
    _first_pass[_grid(cache_k, batch)](
        cache_k, queries, batch.block_tables, batch.num_blocks, batch.query_slots,
        scratch.row_max, scratch.row_sum, scratch.redundancy_logits,
        batch.num_requests, batch.block_tables.shape[1], scratch.redundancy_logits.shape[3], scratch.row_max.shape[3],
        *cache_k.stride()[:4], *queries.stride()[:4], head_dim**-0.5, threshold if threshold is not None else 0.0,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, MEMBERS=_members(group, window), WINDOW=window,
        PAD_WINDOW=padded(window), HEAD_DIM=head_dim, PAD_DIM=padded(head_dim), BLOCK_SIZE=block_size, TILE=tile,
        COLUMNS=min(tile, FIRST_PASS.tile),
        WITH_ATTENTION=with_attention, WITH_LIGHTNING=threshold is not None, PRECISION=dot_precision(cache_k),
        **FIRST_PASS.options(),
    )  # fmt: skip


def _members(group: int, window: int) -> int:
    """Query heads multiplied at once: as many as fill `SOFTMAX_ROWS`, and at least one."""
    power: int = triton.next_power_of_2(group)
    return min(power, max(1, SOFTMAX_ROWS // padded(window)))


def _grid(cache_k: torch.Tensor, batch: CompressionBatch) -> tuple[int, int, int]:
    num_layers, _, block_size, num_kv_heads, _ = cache_k.shape
    num_tiles = triton.cdiv(batch.block_tables.shape[1] * block_size, score_tile(block_size))
    return num_kv_heads, num_tiles, num_layers * batch.num_requests

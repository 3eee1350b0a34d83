"""Combined score, random score and exact selection, one program per (layer, request, KV head).

Compaction of K, V and score history in one launch over all layers, safe in place.
"""

import torch
import triton
import triton.language as tl

from zlab.engine.kernels import torch_backend as hashing
from zlab.engine.kernels.interface import Segment
from zlab.engine.kernels.triton_common import Launch, check_cache, power_of_2
from zlab.engine.kernels.workspace import CompressionBatch, Scratch

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"


COMBINE = Launch(tile=1024, num_warps=4)
# The search is over tokens in registers if they fit the larger tile; else it reads them again for
# every bit.
SELECT_SMALL = Launch(tile=1024, num_warps=4)
SELECT_LARGE = Launch(tile=4096, num_warps=8)
RANDOM = Launch(tile=1024, num_warps=4)

LAYER_STEP = tl.constexpr(hashing.LAYER_STEP)
TOKEN_STEP = tl.constexpr(hashing.TOKEN_STEP)
FIRST_MULTIPLIER = tl.constexpr(hashing.MULTIPLIERS[0])
SECOND_MULTIPLIER = tl.constexpr(hashing.MULTIPLIERS[1])
FIRST_RANK = tl.constexpr(
    0xFFFFFFFF
)  # of tokens that are always kept; above any score's, +inf's too
KEY_BITS = tl.constexpr(32)


@triton.jit(do_not_specialize=["num_requests", "max_tokens"])
def _combine_kernel(
    global_score: tl.tensor,
    redundancy_logits: tl.tensor,
    score: tl.tensor,
    num_blocks: tl.tensor,
    num_carried: tl.tensor,
    num_requests: tl.tensor,
    max_tokens: tl.tensor,
    attention_weight: tl.tensor,
    redundancy_weight: tl.tensor,
    temperature: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    REACH: tl.constexpr,
    WITH_REDUNDANCY: tl.constexpr,
    WHOLE_SEQUENCE: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    request = tl.program_id(1) % num_requests
    row = (tl.program_id(1).to(tl.int64) * NUM_KV_HEADS + head) * max_tokens
    num_tokens = tl.load(num_blocks + request) * BLOCK_SIZE
    pools = tl.load(num_carried + request) == 0
    divisor = temperature * BLOCK_SIZE
    if WHOLE_SEQUENCE:
        divisor = temperature * num_tokens
    largest = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    if WITH_REDUNDANCY:
        for start in range(0, num_tokens, TILE):
            token = start + tl.arange(0, TILE)
            logit = (
                tl.load(
                    redundancy_logits + row + token, mask=token < num_tokens, other=float("-inf")
                )
                / divisor
            )
            largest = tl.maximum(largest, logit)
        largest_of_all = tl.max(largest, axis=0)
        for start in range(0, num_tokens, TILE):
            token = start + tl.arange(0, TILE)
            logit = (
                tl.load(
                    redundancy_logits + row + token, mask=token < num_tokens, other=float("-inf")
                )
                / divisor
            )
            total += tl.exp(logit - largest_of_all)
        total_of_all = tl.sum(total, axis=0)
    for start in range(0, num_tokens, TILE):
        token = start + tl.arange(0, TILE)
        inside = token < num_tokens
        value = tl.load(global_score + row + token, mask=inside, other=0.0)
        if pools:
            for shift in range(-REACH, REACH + 1):
                neighbour = token + shift
                there = (neighbour >= 0) & (neighbour < num_tokens)
                value = tl.maximum(
                    value, tl.load(global_score + row + neighbour, mask=there, other=float("-inf"))
                )  # fmt: skip
        if WITH_REDUNDANCY:
            logit = tl.load(redundancy_logits + row + token, mask=inside, other=0.0) / divisor
            redundant = tl.exp(logit - largest_of_all) / total_of_all
            value = attention_weight * value - redundancy_weight * redundant
        tl.store(score + row + token, value, mask=inside)


@triton.jit
def _mix(state: tl.tensor) -> tl.tensor:
    """`hashing.mix` on uint32."""
    state = state ^ (state >> 16)
    state = state * tl.full(state.shape, FIRST_MULTIPLIER, tl.uint32)
    state = state ^ (state >> 15)
    state = state * tl.full(state.shape, SECOND_MULTIPLIER, tl.uint32)
    return state ^ (state >> 16)


@triton.jit(do_not_specialize=["num_requests", "max_tokens"])
def _random_kernel(
    score: tl.tensor,
    seeds: tl.tensor,
    num_requests: tl.tensor,
    max_tokens: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    layer = tl.program_id(1) // num_requests
    request = tl.program_id(1) % num_requests
    row = (tl.program_id(1).to(tl.int64) * NUM_KV_HEADS + head) * max_tokens
    token = tl.program_id(2) * TILE + tl.arange(0, TILE)
    layer_step = tl.full((TILE,), LAYER_STEP, tl.uint32)
    token_step = tl.full((TILE,), TOKEN_STEP, tl.uint32)
    head_of_all = tl.zeros((TILE,), tl.uint32) + (layer * NUM_KV_HEADS + head).to(tl.uint32)
    seed = tl.zeros((TILE,), tl.uint32) + tl.load(seeds + request).to(tl.uint32, bitcast=True)
    state = _mix(seed + _mix(head_of_all * layer_step))
    bits = _mix(state + token.to(tl.uint32) * token_step)
    value = (bits >> 8).to(tl.float32) * (1.0 / 16777216.0)
    tl.store(score + row + token, value, mask=token < max_tokens)


@triton.jit
def _ranks(
    score: tl.tensor,
    token: tl.tensor,
    num_tokens: tl.tensor,
    window: tl.tensor,
    sink: tl.tensor,
) -> tl.tensor:
    """Unsigned integers in the order of the scores: bits of a positive float ascend with it, of a
    negative descend.

    NaN counts as -inf: its bits are whatever the arithmetic unit left, above or below every number.
    """
    value = (
        tl.load(score + token, mask=token < num_tokens, other=0.0) + 0.0
    )  # -0.0 + 0.0 = 0.0: the two are equal
    value = tl.where(value == value, value, float("-inf"))  # noqa: PLR0124
    bits = value.to(tl.uint32, bitcast=True)
    sign = bits >> 31
    flipped = tl.where(sign == 1, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    always = (token >= num_tokens - window) | (token < sink)
    return tl.where(always, FIRST_RANK, flipped)


@triton.jit(do_not_specialize=["num_requests", "max_tokens", "max_keep", "window", "sink"])
def _select_kernel(
    score: tl.tensor,
    keep_index: tl.tensor,
    num_blocks: tl.tensor,
    num_targets: tl.tensor,
    num_requests: tl.tensor,
    max_tokens: tl.tensor,
    max_keep: tl.tensor,
    window: tl.tensor,
    sink: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
) -> None:
    """The k-th largest rank, bit by bit from the top; then everything above it, and of its equals
    the last ones.

    After each bit `bound` is the largest number with at least k ranks not below it, as far as its
    high bits say; after the last one it is the k-th largest rank itself. All of it counts, so the
    outcome depends on no order of threads.
    """
    head = tl.program_id(0)
    request = tl.program_id(1) % num_requests
    of_head = tl.program_id(1).to(tl.int64) * NUM_KV_HEADS + head
    score_of_head = score + of_head * max_tokens
    num_tokens = tl.load(num_blocks + request) * BLOCK_SIZE
    num_keep = tl.load(num_targets + request) * BLOCK_SIZE
    place = tl.arange(0, TILE)
    if IN_REGISTERS:
        held = _ranks(score_of_head, place, num_tokens, window, sink)
    bound = tl.zeros((1,), tl.uint32)
    bit = tl.full((1,), 0x80000000, tl.uint32)
    for _ in range(KEY_BITS):
        candidate = bound | bit
        bit = bit >> 1
        if IN_REGISTERS:
            count = tl.sum(((held >= candidate) & (place < num_tokens)).to(tl.int32), axis=0)
        else:
            found = tl.zeros((TILE,), tl.int32)
            for start in range(0, num_tokens, TILE):
                token = start + place
                rank = _ranks(score_of_head, token, num_tokens, window, sink)
                found += ((rank >= candidate) & (token < num_tokens)).to(tl.int32)
            count = tl.sum(found, axis=0)
        bound = tl.where(count >= num_keep, candidate, bound)
    num_above = tl.zeros((), tl.int32)
    num_equal = tl.zeros((), tl.int32)
    for start in range(0, num_tokens, TILE):
        token = start + place
        rank = _ranks(score_of_head, token, num_tokens, window, sink)
        num_above += tl.sum(((rank > bound) & (token < num_tokens)).to(tl.int32), axis=0)
        num_equal += tl.sum(((rank == bound) & (token < num_tokens)).to(tl.int32), axis=0)
    # Of the equals the first `num_dropped` go: later tokens win a tie.
    num_dropped = num_equal - (num_keep - num_above)
    equal_before = tl.zeros((), tl.int32)
    kept_before = tl.zeros((), tl.int32)
    for start in range(0, num_tokens, TILE):
        token = start + place
        inside = token < num_tokens
        rank = _ranks(score_of_head, token, num_tokens, window, sink)
        equal = ((rank == bound) & inside).to(tl.int32)
        order = equal_before + tl.cumsum(equal, axis=0)
        keep = ((rank > bound) & inside) | ((equal == 1) & (order > num_dropped))
        kept = keep.to(tl.int32)
        destination = kept_before + tl.cumsum(kept, axis=0) - 1
        tl.store(keep_index + of_head * max_keep + destination, token, mask=keep)
        equal_before += tl.sum(equal, axis=0)
        kept_before += tl.sum(kept, axis=0)


def combine(
    batch: CompressionBatch,
    scratch: Scratch,
    *,
    pool_size: int,
    attention_weight: float,
    temperature: float,
    segment: Segment | None,
) -> None:
    """See `Kernels.combine`."""
    num_layers, num_requests, num_kv_heads, max_tokens = scratch.score.shape
    _combine_kernel[(num_kv_heads, num_layers * num_requests)](
        scratch.global_score,
        scratch.redundancy_logits,
        scratch.score,
        batch.num_blocks,
        batch.num_carried,
        num_requests,
        max_tokens,
        attention_weight,
        1.0 - attention_weight,
        temperature,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=batch.block_size,
        TILE=COMBINE.tile,
        REACH=pool_size // 2,
        WITH_REDUNDANCY=segment is not None,
        WHOLE_SEQUENCE=segment == "sequence",
        **COMBINE.options(),
    )


def random_score(batch: CompressionBatch, scratch: Scratch) -> None:
    """See `Kernels.random_score`."""
    num_layers, num_requests, num_kv_heads, max_tokens = scratch.score.shape
    _random_kernel[(num_kv_heads, num_layers * num_requests, triton.cdiv(max_tokens, RANDOM.tile))](
        scratch.score, batch.seeds, num_requests, max_tokens,
        NUM_KV_HEADS=num_kv_heads, TILE=RANDOM.tile, **RANDOM.options(),
    )  # fmt: skip


def select(batch: CompressionBatch, scratch: Scratch, *, window: int, sink: int) -> None:
    """See `Kernels.select`."""
    num_layers, num_requests, num_kv_heads, max_tokens = scratch.score.shape
    launch = SELECT_SMALL if max_tokens <= SELECT_SMALL.tile else SELECT_LARGE
    _select_kernel[(num_kv_heads, num_layers * num_requests)](
        scratch.score, scratch.keep_index, batch.num_blocks, batch.num_targets,
        num_requests, max_tokens, scratch.keep_index.shape[3], window, sink,
        NUM_KV_HEADS=num_kv_heads, BLOCK_SIZE=batch.block_size, TILE=launch.tile,
        IN_REGISTERS=max_tokens <= launch.tile, **launch.options(),
    )  # fmt: skip


# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"


LAUNCH = Launch(tile=64, num_warps=4)  # rows of K and of V in flight per program


@triton.jit(
    do_not_specialize=["num_requests", "max_blocks", "max_targets", "max_tokens", "max_keep"]
)
def _compact_kernel(
    cache_k: tl.tensor,
    cache_v: tl.tensor,
    history: tl.tensor,
    block_tables: tl.tensor,
    target_blocks: tl.tensor,
    num_targets: tl.tensor,
    keep_index: tl.tensor,
    global_score: tl.tensor,
    num_requests: tl.tensor,
    max_blocks: tl.tensor,
    max_targets: tl.tensor,
    max_tokens: tl.tensor,
    max_keep: tl.tensor,
    k_layer_stride: tl.tensor,
    k_block_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_layer_stride: tl.tensor,
    v_block_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    v_head_stride: tl.tensor,
    history_layer_stride: tl.tensor,
    history_block_stride: tl.tensor,
    history_slot_stride: tl.tensor,
    history_head_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WITH_HISTORY: tl.constexpr,
) -> None:
    """One program moves all rows of one (layer, request, KV head), tile by tile in increasing
    order.

    Why that is safe in place: kept tokens keep their order, so row d comes from source(d) >= d, and
    source grows with d. A target block is the request's own block at the same place of its table,
    or a fresh one. So a tile writes rows [d, d + TILE), while every later tile still reads rows >=
    d + TILE only: no write destroys what is still to be read, provided that a tile has been read in
    full before its first row is written. Threads of a program run apart, so a barrier stands
    between the two. Reading ahead is harmless; a second program on the same rows would not be, and
    there is none: programs differ in layer, request or head, and no two requests share a target.
    """
    head = tl.program_id(0)
    layer = (tl.program_id(1) // num_requests).to(tl.int64)
    request = tl.program_id(1) % num_requests
    of_head = tl.program_id(1).to(tl.int64) * NUM_KV_HEADS + head
    num_keep = tl.load(num_targets + request) * BLOCK_SIZE
    sources = block_tables + request * max_blocks
    targets = target_blocks + request * max_targets
    keys = cache_k + layer * k_layer_stride + head * k_head_stride
    values = cache_v + layer * v_layer_stride + head * v_head_stride
    dim = tl.arange(0, PAD_DIM)
    for start in range(0, num_keep, TILE):
        row = start + tl.arange(0, TILE)
        inside = row < num_keep
        source = tl.load(keep_index + of_head * max_keep + row, mask=inside, other=0)
        source_block = tl.load(sources + source // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        source_slot = (source % BLOCK_SIZE).to(tl.int64)
        target_block = tl.load(targets + row // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        target_slot = (row % BLOCK_SIZE).to(tl.int64)
        # A row that stays where it is costs nothing: before the first dropped token none has to
        # move.
        moves = inside & ((source_block != target_block) | (source_slot != target_slot))
        mask = moves[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(
            keys
            + (source_block * k_block_stride + source_slot * k_slot_stride)[:, None]
            + dim[None, :],
            mask=mask,
        )
        value = tl.load(
            values
            + (source_block * v_block_stride + source_slot * v_slot_stride)[:, None]
            + dim[None, :],
            mask=mask,
        )
        tl.debug_barrier()
        tl.store(
            keys
            + (target_block * k_block_stride + target_slot * k_slot_stride)[:, None]
            + dim[None, :],
            key,
            mask=mask,
        )
        tl.store(
            values
            + (target_block * v_block_stride + target_slot * v_slot_stride)[:, None]
            + dim[None, :],
            value,
            mask=mask,
        )
        if WITH_HISTORY:
            # F comes from the workspace, not from the cache: nothing here overwrites it.
            score = tl.load(global_score + of_head * max_tokens + source, mask=inside)
            place = target_block * history_block_stride + target_slot * history_slot_stride
            tl.store(
                history + layer * history_layer_stride + head * history_head_stride + place,
                score,
                mask=inside,
            )


def compact(
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    history: torch.Tensor | None,
    batch: CompressionBatch,
    scratch: Scratch,
) -> None:
    """See `Kernels.compact`."""
    check_cache(cache_k)
    check_cache(cache_v)
    num_layers, _, block_size, num_kv_heads, head_dim = cache_k.shape
    scores = (
        history if history is not None else scratch.global_score
    )  # never written without a history
    _compact_kernel[(num_kv_heads, num_layers * batch.num_requests)](
        cache_k, cache_v, scores, batch.block_tables, batch.target_blocks, batch.num_targets,
        scratch.keep_index, scratch.global_score,
        batch.num_requests, batch.block_tables.shape[1], batch.target_blocks.shape[1],
        scratch.global_score.shape[3], scratch.keep_index.shape[3],
        *cache_k.stride()[:4], *cache_v.stride()[:4], *scores.stride(),
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PAD_DIM=power_of_2(head_dim),
        BLOCK_SIZE=block_size, TILE=LAUNCH.tile, WITH_HISTORY=history is not None,
        **LAUNCH.options(),
    )  # fmt: skip

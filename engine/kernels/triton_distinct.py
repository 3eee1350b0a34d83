"""Keys that are like the average key, their rotation undone: see `KernelBackend.distinct_score`.

One program takes all tokens of one (KV head, layer and request). A token's sum of similarities to
all tokens is the product of its unit key with the sum of all unit keys, so two loops over the keys
do what all pairs would do. Pairs are computed with the latest tokens alone: those of the last
block, which no earlier compression has seen, or a few more where blocks are small.
"""

import torch
import triton
import triton.language as tl

from zlab.engine.kernels import torch_backend
from zlab.engine.kernels.interface import DistinctWeights
from zlab.engine.kernels.triton_common import (
    SMALLEST_DOT,
    Launch,
    check_cache,
    dot_precision,
    power_of_2,
    row_offsets,
)
from zlab.engine.kernels.workspace import CompressionBatch, Scratch

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"

POSITION_BITS = tl.constexpr(torch_backend.POSITION_BITS)
POSITION_MASK = tl.constexpr(torch_backend.POSITION_MASK)
DISTINCT = Launch(tile=64, num_warps=4, num_stages=1)
DISTINCT_SCORES = 1024  # tokens of one step of the loops that read no keys
LATEST = 256  # of the latest tokens, so many are compared with all others at once
SMALLEST_CENTRED = tl.constexpr(torch_backend.SMALLEST_CENTRED)
SMALLEST_SPREAD = tl.constexpr(torch_backend.SMALLEST_SPREAD)


@triton.jit
def _unrotated_halves(
    keys: tl.tensor,
    block_table: tl.tensor,
    rotation: tl.tensor,
    words: tl.tensor,
    first: tl.tensor,
    num_tokens: tl.tensor,
    num_positions: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    PAD_HALF: tl.constexpr,
    UNDO: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Both halves `[TILE, PAD_HALF]` of the tile's keys, rotation undone, and the keys' lengths."""
    token = first + tl.arange(0, TILE)
    inside = token < num_tokens
    dim = tl.arange(0, PAD_HALF)
    mask = inside[:, None] & (dim < HALF)[None, :]
    offsets = row_offsets(
        block_table, first, token, inside, block_stride, slot_stride, BLOCK_SIZE, TILE
    )
    places = keys + offsets[:, None] + dim[None, :]
    front = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    back = tl.load(places + HALF, mask=mask, other=0.0).to(tl.float32)
    length = tl.sqrt(tl.sum(front * front + back * back, axis=1))
    if UNDO:
        word = tl.load(words + token, mask=inside, other=0.0).to(tl.uint32, bitcast=True)
        position = tl.minimum((word & POSITION_MASK).to(tl.int32), num_positions - 1)
        angles = rotation + position.to(tl.int64)[:, None] * (2 * HALF) + dim[None, :]
        cosine = tl.load(angles, mask=mask, other=0.0).to(tl.float32)
        sine = tl.load(angles + HALF, mask=mask, other=0.0).to(tl.float32)
        undone = front * cosine + back * sine
        back = back * cosine - front * sine
        front = undone
    return front, back, length


@triton.jit
def _spread(total: tl.tensor, squares: tl.tensor, count: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Mean and standard deviation out of sums `[lanes]` of values and of their squares."""
    mean = tl.sum(total, axis=0) / count
    variance = tl.sum(squares, axis=0) / count - mean * mean
    return mean, tl.sqrt(tl.maximum(variance, 0.0))


@triton.jit
def _common(
    likenesses: tl.tensor,
    value_lengths: tl.tensor,
    key_lengths: tl.tensor,
    num_tokens: tl.tensor,
    likeness_mean: tl.tensor,
    likeness_factor: tl.tensor,
    key_mean: tl.tensor,
    key_factor: tl.tensor,
    value_mean: tl.tensor,
    value_factor: tl.tensor,
    SCORES: tl.constexpr,
) -> None:
    """Overwrite `likenesses` with the weighed sum of likeness and both lengths."""
    for first in range(0, num_tokens, SCORES):
        token = first + tl.arange(0, SCORES)
        inside = token < num_tokens
        likeness = tl.load(likenesses + token, mask=inside, other=0.0)
        length = tl.load(key_lengths + token, mask=inside, other=0.0)
        value_length = tl.load(value_lengths + token, mask=inside, other=0.0)
        common = (likeness - likeness_mean) * likeness_factor
        common -= (length - key_mean) * key_factor
        common -= (value_length - value_mean) * value_factor
        tl.store(likenesses + token, common, mask=inside)


@triton.jit
def _centred(
    front: tl.tensor,
    back: tl.tensor,
    length: tl.tensor,
    front_mean: tl.tensor,
    back_mean: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves of the unit keys less their mean, of length 1 again."""
    scale = 1.0 / tl.maximum(length, 1e-6)
    front = front * scale[:, None] - front_mean[None, :]
    back = back * scale[:, None] - back_mean[None, :]
    left = tl.sqrt(tl.sum(front * front + back * back, axis=1))
    scale = 1.0 / tl.maximum(left, SMALLEST_CENTRED)
    return front * scale[:, None], back * scale[:, None]


@triton.jit
def _weigh_tokens(
    words: tl.tensor,
    commons: tl.tensor,
    copies: tl.tensor,
    score: tl.tensor,
    num_tokens: tl.tensor,
    pools: tl.tensor,
    copy_weight: tl.tensor,
    attention_weight: tl.tensor,
    redundancy_weight: tl.tensor,
    sharpness: tl.tensor,
    SCORES: tl.constexpr,
    REACH: tl.constexpr,
) -> None:
    """The score of every token, out of what the loops over the keys have left."""
    count = num_tokens.to(tl.float32)
    total = tl.zeros((SCORES,), tl.float32)
    squares = tl.zeros((SCORES,), tl.float32)
    for first in range(0, num_tokens, SCORES):
        token = first + tl.arange(0, SCORES)
        copy = tl.load(copies + token, mask=token < num_tokens, other=0.0)
        total += copy
        squares += copy * copy
    copy_mean, copy_spread = _spread(total, squares, count)
    copy_factor = copy_weight / tl.maximum(copy_spread, 1e-6)
    total = tl.zeros((SCORES,), tl.float32)
    squares = tl.zeros((SCORES,), tl.float32)
    most = tl.full((SCORES,), float("-inf"), tl.float32)
    for first in range(0, num_tokens, SCORES):
        token = first + tl.arange(0, SCORES)
        inside = token < num_tokens
        common = tl.load(commons + token, mask=inside, other=0.0)
        common += (tl.load(copies + token, mask=inside, other=0.0) - copy_mean) * copy_factor
        tl.store(commons + token, common, mask=inside)
        total += tl.where(inside, common, 0.0)
        squares += tl.where(inside, common * common, 0.0)
        most = tl.maximum(most, tl.where(inside, common, float("-inf")))
    _mean, spread = _spread(total, squares, count)
    factor = sharpness / tl.maximum(spread, 1e-6)
    highest = tl.max(most, axis=0)
    tl.debug_barrier()
    total = tl.zeros((SCORES,), tl.float32)
    for first in range(0, num_tokens, SCORES):
        token = first + tl.arange(0, SCORES)
        inside = token < num_tokens
        common = tl.load(commons + token, mask=inside, other=float("-inf"))
        total += tl.exp((common - highest) * factor)
    scale = redundancy_weight / tl.sum(total, axis=0)
    for first in range(0, num_tokens, SCORES):
        token = first + tl.arange(0, SCORES)
        inside = token < num_tokens
        word = tl.load(words + token, mask=inside, other=0.0).to(tl.uint32, bitcast=True)
        value = ((word >> POSITION_BITS) << 16).to(tl.float32, bitcast=True)
        if pools:
            for shift in range(-REACH, REACH + 1):
                neighbour = token + shift
                there = (neighbour >= 0) & (neighbour < num_tokens)
                word = tl.load(words + neighbour, mask=there, other=0.0)
                word = word.to(tl.uint32, bitcast=True)
                near = ((word >> POSITION_BITS) << 16).to(tl.float32, bitcast=True)
                value = tl.maximum(value, near)
        common = tl.load(commons + token, mask=inside, other=float("-inf"))
        redundant = tl.exp((common - highest) * factor) * scale
        tl.store(score + token, attention_weight * value - redundant, mask=inside)


@triton.jit
def _value_lengths(
    values: tl.tensor,
    block_table: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    inside: tl.tensor,
    v_block_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    PAD_HALF: tl.constexpr,
) -> tl.tensor:
    """The lengths of the values of a tile of tokens, `[TILE]`."""
    offsets = row_offsets(
        block_table, first, token, inside, v_block_stride, v_slot_stride, BLOCK_SIZE, TILE
    )
    dim = tl.arange(0, PAD_HALF)
    places = values + offsets[:, None] + dim[None, :]
    mask = inside[:, None] & (dim < HALF)[None, :]
    front = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    back = tl.load(places + HALF, mask=mask, other=0.0).to(tl.float32)
    return tl.sqrt(tl.sum(front * front + back * back, axis=1))


@triton.jit
def _find_copies(
    keys: tl.tensor,
    block_table: tl.tensor,
    rotation: tl.tensor,
    words: tl.tensor,
    copies: tl.tensor,
    front_mean: tl.tensor,
    back_mean: tl.tensor,
    num_tokens: tl.tensor,
    num_positions: tl.tensor,
    k_block_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LATEST: tl.constexpr,
    NUM_LATEST: tl.constexpr,
    HALF: tl.constexpr,
    PAD_HALF: tl.constexpr,
    UNDO: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Fill `copies` with every token's highest similarity with a later one of the latest tokens."""
    kind = keys.dtype.element_ty
    earliest = tl.maximum(num_tokens - NUM_LATEST, 0)
    for latest in range(earliest, num_tokens, LATEST):
        later = latest + tl.arange(0, LATEST)
        later_front, later_back, later_length = _unrotated_halves(
            keys, block_table, rotation, words, latest, num_tokens, num_positions,
            k_block_stride, k_slot_stride, BLOCK_SIZE, LATEST, HALF, PAD_HALF, UNDO,
        )  # fmt: skip
        later_front, later_back = _centred(
            later_front, later_back, later_length, front_mean, back_mean
        )
        all_front = tl.trans(later_front.to(kind))
        all_back = tl.trans(later_back.to(kind))
        for first in range(0, num_tokens, TILE):
            token = first + tl.arange(0, TILE)
            inside = token < num_tokens
            front, back, length = _unrotated_halves(
                keys, block_table, rotation, words, first, num_tokens, num_positions,
                k_block_stride, k_slot_stride, BLOCK_SIZE, TILE, HALF, PAD_HALF, UNDO,
            )  # fmt: skip
            front, back = _centred(front, back, length, front_mean, back_mean)
            alike = tl.dot(front.to(kind), all_front, input_precision=PRECISION)
            alike = tl.dot(back.to(kind), all_back, alike, input_precision=PRECISION)
            behind = (later[None, :] > token[:, None]) & (later < num_tokens)[None, :]
            copy = tl.max(tl.where(behind, alike, float("-inf")), axis=1)
            if latest > earliest:
                before = tl.load(copies + token, mask=inside, other=float("-inf"))
                copy = tl.maximum(copy, before)
            last = (token == num_tokens - 1) & (latest + LATEST >= num_tokens)
            tl.store(copies + token, tl.where(last, 0.0, copy), mask=inside)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["num_requests", "max_blocks", "max_tokens", "num_positions"])
def _distinct_kernel(  # noqa: PLR0915 - one kernel, three loops over the keys
    cache_k: tl.tensor,
    cache_v: tl.tensor,
    rotation: tl.tensor,
    block_tables: tl.tensor,
    num_blocks: tl.tensor,
    carried_tokens: tl.tensor,
    global_score: tl.tensor,
    redundancy_logits: tl.tensor,
    spare: tl.tensor,
    score: tl.tensor,
    num_requests: tl.tensor,
    max_blocks: tl.tensor,
    max_tokens: tl.tensor,
    num_positions: tl.tensor,
    k_layer_stride: tl.tensor,
    k_block_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_layer_stride: tl.tensor,
    v_block_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    v_head_stride: tl.tensor,
    attention_weight: tl.tensor,
    redundancy_weight: tl.tensor,
    key_weight: tl.tensor,
    value_weight: tl.tensor,
    copy_weight: tl.tensor,
    sharpness: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAD_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LATEST: tl.constexpr,
    NUM_LATEST: tl.constexpr,
    SCORES: tl.constexpr,
    REACH: tl.constexpr,
    UNDO: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """All tokens of one (KV head, layer and request): the sum of the unit keys, then each token.

    The second loop over the keys leaves likeness and lengths in the workspace, and their sums in
    registers. The third compares all tokens with the latest and leaves the highest similarity with
    a later token where the values' lengths were. The loops behind it read the
    workspace, not the cache.
    """
    head = tl.program_id(0)
    layer = (tl.program_id(1) // num_requests).to(tl.int64)
    request = tl.program_id(1) % num_requests
    row = (tl.program_id(1).to(tl.int64) * NUM_KV_HEADS + head) * max_tokens
    num_tokens = tl.load(num_blocks + request) * BLOCK_SIZE
    count = num_tokens.to(tl.float32)
    pools = tl.load(carried_tokens + request) == 0
    block_table = block_tables + request * max_blocks
    keys = cache_k + layer * k_layer_stride + head * k_head_stride
    values = cache_v + layer * v_layer_stride + head * v_head_stride
    words = global_score + row
    front_sums = tl.zeros((TILE, PAD_HALF), tl.float32)
    back_sums = tl.zeros((TILE, PAD_HALF), tl.float32)
    for first in range(0, num_tokens, TILE):
        front, back, length = _unrotated_halves(
            keys, block_table, rotation, words, first, num_tokens, num_positions,
            k_block_stride, k_slot_stride, BLOCK_SIZE, TILE, HALF, PAD_HALF, UNDO,
        )  # fmt: skip
        scale = 1.0 / tl.maximum(length, 1e-6)
        front_sums += front * scale[:, None]
        back_sums += back * scale[:, None]
    front_sum = tl.sum(front_sums, axis=0)
    back_sum = tl.sum(back_sums, axis=0)
    likeness_sum = tl.zeros((TILE,), tl.float32)
    likeness_squares = tl.zeros((TILE,), tl.float32)
    key_sum = tl.zeros((TILE,), tl.float32)
    key_squares = tl.zeros((TILE,), tl.float32)
    value_sum = tl.zeros((TILE,), tl.float32)
    value_squares = tl.zeros((TILE,), tl.float32)
    for first in range(0, num_tokens, TILE):
        token = first + tl.arange(0, TILE)
        inside = token < num_tokens
        front, back, length = _unrotated_halves(
            keys, block_table, rotation, words, first, num_tokens, num_positions,
            k_block_stride, k_slot_stride, BLOCK_SIZE, TILE, HALF, PAD_HALF, UNDO,
        )  # fmt: skip
        value_length = _value_lengths(
            values, block_table, first, token, inside,
            v_block_stride, v_slot_stride, BLOCK_SIZE, TILE, HALF, PAD_HALF,
        )  # fmt: skip
        likeness = tl.sum(front * front_sum[None, :] + back * back_sum[None, :], axis=1)
        likeness = likeness / tl.maximum(length, 1e-6)
        tl.store(redundancy_logits + row + token, likeness, mask=inside)
        tl.store(score + row + token, length, mask=inside)
        tl.store(spare + row + token, value_length, mask=inside)
        likeness_sum += likeness
        likeness_squares += likeness * likeness
        key_sum += length
        key_squares += length * length
        value_sum += value_length
        value_squares += value_length * value_length
    likeness_mean, likeness_spread = _spread(likeness_sum, likeness_squares, count)
    key_mean, key_spread = _spread(key_sum, key_squares, count)
    value_mean, value_spread = _spread(value_sum, value_squares, count)
    likeness_factor = 1.0 / tl.maximum(likeness_spread, 1e-6)
    key_spread = tl.maximum(key_spread, SMALLEST_SPREAD * key_mean)
    value_spread = tl.maximum(value_spread, SMALLEST_SPREAD * value_mean)
    key_factor = key_weight / tl.maximum(key_spread, 1e-6)
    value_factor = value_weight / tl.maximum(value_spread, 1e-6)
    tl.debug_barrier()  # a thread reads from here what another one has stored
    _common(
        redundancy_logits + row, spare + row, score + row, num_tokens,
        likeness_mean, likeness_factor, key_mean, key_factor, value_mean, value_factor, SCORES,
    )  # fmt: skip
    tl.debug_barrier()
    _find_copies(
        keys, block_table, rotation, words, spare + row, front_sum / count, back_sum / count,
        num_tokens, num_positions, k_block_stride, k_slot_stride,
        BLOCK_SIZE, TILE, LATEST, NUM_LATEST, HALF, PAD_HALF, UNDO, PRECISION,
    )  # fmt: skip
    _weigh_tokens(
        words, redundancy_logits + row, spare + row, score + row, num_tokens, pools,
        copy_weight, attention_weight, redundancy_weight, sharpness, SCORES, REACH,
    )  # fmt: skip


def distinct_score(
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    rotation: torch.Tensor | None,
    batch: CompressionBatch,
    scratch: Scratch,
    weights: DistinctWeights,
) -> None:
    """See `KernelBackend.distinct_score`."""
    check_cache(cache_k)
    check_cache(cache_v)
    num_layers, _, block_size, num_kv_heads, head_dim = cache_k.shape
    table = rotation if rotation is not None else cache_k  # never read without one
    num_latest = torch_backend.num_compared(block_size)
    _distinct_kernel[(num_kv_heads, num_layers * batch.num_requests)](
        cache_k,
        cache_v,
        table,
        batch.block_tables,
        batch.num_blocks,
        batch.num_carried,
        scratch.global_score,
        scratch.redundancy_logits,
        scratch.spare,
        scratch.score,
        batch.num_requests,
        batch.block_tables.shape[1],
        scratch.score.shape[3],
        table.shape[0],
        *cache_k.stride()[:4],
        *cache_v.stride()[:4],
        weights.attention_weight,
        1.0 - weights.attention_weight,
        weights.key_weight,
        weights.value_weight,
        weights.copy_weight,
        weights.sharpness,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        PAD_HALF=max(SMALLEST_DOT, power_of_2(head_dim // 2)),
        BLOCK_SIZE=block_size,
        TILE=DISTINCT.tile,
        LATEST=min(num_latest, LATEST),
        NUM_LATEST=num_latest,
        SCORES=DISTINCT_SCORES,
        REACH=weights.pool_size // 2,
        UNDO=rotation is not None,
        PRECISION=dot_precision(cache_k),
        **DISTINCT.options(),
    )

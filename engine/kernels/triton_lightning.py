"""Redundancy inside each block: one program per (KV head, tile of whole blocks, layer and request).

A program holds its tile's keys as one side of the product and takes the columns of the similarity matrix a few at a
time, so all rows of a column are at hand at once and its last row above the threshold is one maximum over the column.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from engine.kernels.batch import CompressionBatch
from engine.kernels.triton_common import Launch, check_cache, dot_precision, load_keys, padded
from engine.kernels.workspace import Scratch, score_tile

LAUNCH = Launch(tile=64, num_warps=4, num_stages=2)  # `tile` is columns; the rows are a `score_tile`
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

    Keys are multiplied as stored and scaled by their norms after: 16-bit products are exact, a rounded unit key is not.
    A row's own norm scales its sum once, and the threshold instead of every similarity.
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
        # Through a gather, or Triton would rather lay out all keys anew and square them twice than move this vector.
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
        tl.store(redundancy_logits + of_head * max_tokens + token, total * row_scale, mask=token < num_tokens)


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
    launch = launch if launch is not None else (FLOAT32_LAUNCH if cache_k.dtype == torch.float32 else LAUNCH)
    tile = score_tile(block_size)
    max_blocks = batch.block_tables.shape[1]
    grid = (num_kv_heads, triton.cdiv(max_blocks * block_size, tile), num_layers * batch.num_requests)
    _lightning_kernel[grid](
        cache_k, batch.block_tables, batch.num_blocks, scratch.redundancy_logits,
        batch.num_requests, max_blocks, scratch.redundancy_logits.shape[3], *cache_k.stride()[:4], threshold,
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PAD_DIM=padded(head_dim), BLOCK_SIZE=block_size, TILE=tile,
        COLUMNS=min(tile, launch.tile), PRECISION=dot_precision(cache_k), **launch.options(),
    )  # fmt: skip

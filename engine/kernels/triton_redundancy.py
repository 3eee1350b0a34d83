"""Redundancy over all S x S pairs, the slow alternative that lightning is judged against.

The S x S matrix is never stored, so it is computed twice: once to find the last row above the threshold in every
column, once to sum the rows without those entries.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from engine.kernels.batch import CompressionBatch
from engine.kernels.triton_common import Launch, check_cache, dot_precision, inverse_norms, load_keys, padded
from engine.kernels.workspace import Scratch

LAUNCH = Launch(tile=64, num_warps=4, num_stages=2)


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

    The matrix is symmetric: without SUM_ROWS the own tokens are columns and the others the rows that may be spared;
    with it the own tokens are rows and the others columns whose spared row is known.
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
                logits += tl.sum(tl.where(own[:, None] == spared_row[None, :], 0.0, similarity), axis=1)
            else:
                above = similarity > threshold
                spared = tl.maximum(spared, tl.max(tl.where(above, other[None, :], -1), axis=1))
        if SUM_ROWS:
            tl.store(redundancy_logits + of_head * max_tokens + own, logits, mask=own < num_tokens)
        else:
            tl.store(spared_rows + of_head * max_tokens + own, spared, mask=own < num_tokens)


def full_redundancy(cache_k: torch.Tensor, batch: CompressionBatch, scratch: Scratch, *, threshold: float) -> None:
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
            cache_k, batch.block_tables, batch.num_blocks, scratch.score.view(torch.int32), scratch.redundancy_logits,
            batch.num_requests, batch.block_tables.shape[1], scratch.redundancy_logits.shape[3],
            *cache_k.stride()[:4], threshold,
            NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PAD_DIM=padded(head_dim), BLOCK_SIZE=block_size,
            TILE=LAUNCH.tile, SUM_ROWS=sum_rows, PRECISION=dot_precision(cache_k),
            **LAUNCH.options(),
        )  # fmt: skip

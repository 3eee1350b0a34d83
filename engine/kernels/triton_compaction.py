"""Compaction of K, V and score history in one launch over all layers, safe in place."""

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from engine.kernels.batch import CompressionBatch
from engine.kernels.triton_common import Launch, check_cache, power_of_2
from engine.kernels.workspace import Scratch

LAUNCH = Launch(tile=64, num_warps=4)  # rows of K and of V in flight per program


@triton.jit(do_not_specialize=["num_requests", "max_blocks", "max_targets", "max_tokens", "max_keep"])
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
    """One program moves all rows of one (layer, request, KV head), tile by tile in increasing order.

    Why that is safe in place: kept tokens keep their order, so row d comes from source(d) >= d, and source grows with
    d. A target block is the request's own block at the same place of its table, or a fresh one. So a tile writes rows
    [d, d + TILE), while every later tile still reads rows >= d + TILE only: no write destroys what is still to be read,
    provided that a tile has been read in full before its first row is written. Threads of a program run apart, so a
    barrier stands between the two. Reading ahead is harmless; a second program on the same rows would not be, and there
    is none: programs differ in layer, request or head, and no two requests share a target.
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
        # A row that stays where it is costs nothing: before the first dropped token none has to move.
        moves = inside & ((source_block != target_block) | (source_slot != target_slot))
        mask = moves[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(
            keys + (source_block * k_block_stride + source_slot * k_slot_stride)[:, None] + dim[None, :], mask=mask
        )
        value = tl.load(
            values + (source_block * v_block_stride + source_slot * v_slot_stride)[:, None] + dim[None, :], mask=mask
        )
        tl.debug_barrier()
        tl.store(
            keys + (target_block * k_block_stride + target_slot * k_slot_stride)[:, None] + dim[None, :], key, mask=mask
        )
        tl.store(
            values + (target_block * v_block_stride + target_slot * v_slot_stride)[:, None] + dim[None, :],
            value,
            mask=mask,
        )
        if WITH_HISTORY:
            # F comes from the workspace, not from the cache: nothing here overwrites it.
            score = tl.load(global_score + of_head * max_tokens + source, mask=inside)
            place = target_block * history_block_stride + target_slot * history_slot_stride
            tl.store(
                history + layer * history_layer_stride + head * history_head_stride + place, score, mask=inside
            )  # fmt: skip


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
    scores = history if history is not None else scratch.global_score  # never written without a history
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

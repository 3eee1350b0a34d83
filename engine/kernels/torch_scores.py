"""Scores in plain torch, float32 whatever the cache's dtype; layers and heads at once, one request at a time."""

import torch

from engine.kernels.batch import CompressionBatch
from engine.kernels.contract import Segment
from engine.kernels.hashing import LAYER_STEP, MASK_32, MULTIPLIERS, TOKEN_STEP
from engine.kernels.workspace import Scratch

SMALLEST_NORM = 1e-6


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
    for row, request in enumerate(batch.requests):
        keys = gather_cache_order(cache_k, request.block_table).float()
        queries = window_queries[:, request.query_slot].float()
        score = window_attention(queries, keys)
        if history is not None and request.compressed_before:
            carried = score.shape[2] - batch.block_size
            prior = gather_cache_order(history, request.block_table[:-1])
            score[:, :, :carried] = torch.maximum(score[:, :, :carried], decay * prior)
        scratch.global_score[:, row, :, : score.shape[2]] = score
    if lightning_threshold is not None:
        lightning_redundancy(cache_k, batch, scratch, threshold=lightning_threshold)


def lightning_redundancy(cache_k: torch.Tensor, batch: CompressionBatch, scratch: Scratch, *, threshold: float) -> None:
    """See `Kernels.lightning_redundancy`."""
    for row, request in enumerate(batch.requests):
        unit = _unit_keys(cache_k, request.block_table)
        logits = redundancy_logits(unit.view(*unit.shape[:2], -1, batch.block_size, unit.shape[3]), threshold)
        scratch.redundancy_logits[:, row, :, : unit.shape[2]] = logits.flatten(2)


def full_redundancy(cache_k: torch.Tensor, batch: CompressionBatch, scratch: Scratch, *, threshold: float) -> None:
    """See `Kernels.full_redundancy`; one layer at a time, the S x S matrix is large."""
    for row, request in enumerate(batch.requests):
        unit = _unit_keys(cache_k, request.block_table)
        for layer in range(unit.shape[0]):
            scratch.redundancy_logits[layer, row, :, : unit.shape[2]] = redundancy_logits(unit[layer], threshold)


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
    for row, request in enumerate(batch.requests):
        num_tokens = len(request.block_table) * batch.block_size
        score = scratch.global_score[:, row, :, :num_tokens]
        if not request.compressed_before:
            score = pool(score, pool_size)
        if segment is not None:
            divisor = temperature * (batch.block_size if segment == "block" else num_tokens)
            redundant = torch.softmax(scratch.redundancy_logits[:, row, :, :num_tokens] / divisor, dim=-1)
            score = attention_weight * score - (1.0 - attention_weight) * redundant
        scratch.score[:, row, :, :num_tokens] = score


def random_score(batch: CompressionBatch, scratch: Scratch) -> None:
    """See `Kernels.random_score`."""
    num_layers, _, num_kv_heads, num_tokens = scratch.score.shape
    device = scratch.score.device
    heads = torch.arange(num_layers * num_kv_heads, device=device).view(num_layers, 1, num_kv_heads, 1)
    seeds = batch.seeds.long().view(1, -1, 1, 1)
    state = _mix(seeds + _mix(heads * LAYER_STEP))
    bits = _mix(state + torch.arange(num_tokens, device=device) * TOKEN_STEP)
    scratch.score.copy_((bits >> 8).float() * 2.0**-24)


def gather_cache_order(cache: torch.Tensor, block_table: tuple[int, ...]) -> torch.Tensor:
    """`cache [layers, blocks, b, H, ...]` -> a copy `[layers, H, S, ...]` in cache order."""
    table = torch.tensor(block_table, device=cache.device)
    return cache[:, table].flatten(1, 2).transpose(1, 2)


def window_attention(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`queries [layers, w, H_q, d]`, `keys [layers, H_kv, S, d]`, float32 -> A `[layers, H_kv, S]`."""
    window, num_query_heads, head_dim = queries.shape[1:]
    num_kv_heads, num_tokens = keys.shape[1:3]
    grouped = queries.reshape(-1, window, num_kv_heads, num_query_heads // num_kv_heads, head_dim)
    logits = torch.einsum("lihjd,lhtd->lhjit", grouped, keys) / head_dim**0.5
    place = torch.arange(num_tokens - window, num_tokens, device=keys.device)
    hidden = torch.arange(num_tokens, device=keys.device)[None, :] > place[:, None]
    weights = torch.softmax(logits.masked_fill(hidden, float("-inf")), dim=-1)
    return weights.amax(dim=2).mean(dim=2)


def pool(score: torch.Tensor, size: int) -> torch.Tensor:
    """Running maximum over the last axis, clipped at its ends; `score [layers, H_kv, S]`."""
    pooled: torch.Tensor = torch.nn.functional.max_pool1d(score, size, stride=1, padding=size // 2)
    return pooled


def redundancy_logits(unit_keys: torch.Tensor, threshold: float) -> torch.Tensor:
    """Row sums `[..., n]` of the similarities of `unit_keys [..., n, d]` after the last row per column is spared."""
    similarity = unit_keys @ unit_keys.transpose(-1, -2)
    similarity.diagonal(dim1=-2, dim2=-1).zero_()
    rows = torch.arange(similarity.shape[-1], device=similarity.device)[:, None]
    spared = torch.where(similarity > threshold, rows, -1).amax(dim=-2, keepdim=True)
    return similarity.masked_fill(rows == spared, 0.0).sum(dim=-1)


def _unit_keys(cache_k: torch.Tensor, block_table: tuple[int, ...]) -> torch.Tensor:
    keys = gather_cache_order(cache_k, block_table).float()
    norms: torch.Tensor = torch.linalg.vector_norm(keys, dim=-1, keepdim=True)
    return keys / norms.clamp(min=SMALLEST_NORM)


def _mix(state: torch.Tensor) -> torch.Tensor:
    """`hashing.mix` on int64 tensors that hold 32-bit values; products wrap in 64 bits and keep their low half."""
    state = state & MASK_32
    state = state ^ state >> 16
    state = state * MULTIPLIERS[0] & MASK_32
    state = state ^ state >> 15
    state = state * MULTIPLIERS[1] & MASK_32
    return state ^ state >> 16

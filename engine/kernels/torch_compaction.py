"""Selection and compaction in plain torch."""

import torch

from engine.kernels.batch import CompressionBatch
from engine.kernels.workspace import Scratch


def select(batch: CompressionBatch, scratch: Scratch, *, window: int, sink: int) -> None:
    """See `Kernels.select`."""
    for row, request in enumerate(batch.requests):
        num_tokens = len(request.block_table) * batch.block_size
        num_keep = len(request.target_blocks) * batch.block_size
        free_end = num_tokens - window
        score = scratch.score[:, row, :, sink:free_end]
        score = score.masked_fill(score.isnan(), float("-inf"))
        # A stable sort keeps equal scores in their order, so turning the tokens round first puts the later one ahead.
        order = score.flip(-1).argsort(dim=-1, descending=True, stable=True)
        chosen = free_end - 1 - order[:, :, : num_keep - sink - window]
        index = scratch.keep_index[:, row, :, :num_keep]
        index[:, :, :sink] = torch.arange(sink, device=index.device)
        index[:, :, sink : num_keep - window] = chosen.sort(dim=-1).values.int()
        index[:, :, num_keep - window :] = torch.arange(free_end, num_tokens, device=index.device)


def compact(
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    history: torch.Tensor | None,
    batch: CompressionBatch,
    scratch: Scratch,
) -> None:
    """See `Kernels.compact`; the gather makes a copy, so the scatter may overwrite what was read."""
    num_layers, _, block_size, num_kv_heads, _ = cache_k.shape
    device = cache_k.device
    layers = torch.arange(num_layers, device=device)[:, None, None]
    heads = torch.arange(num_kv_heads, device=device)[None, :, None]
    for row, request in enumerate(batch.requests):
        num_keep = len(request.target_blocks) * block_size
        source = scratch.keep_index[:, row, :, :num_keep].long()
        target = torch.arange(num_keep, device=device)
        source_block = torch.tensor(request.block_table, device=device)[source // block_size]
        target_block = torch.tensor(request.target_blocks, device=device)[target // block_size]
        from_place = (layers, source_block, source % block_size, heads)
        to_place = (layers, target_block, target % block_size, heads)
        for cache in (cache_k, cache_v):
            cache[to_place] = cache[from_place]
        if history is not None:
            history[to_place] = scratch.global_score[:, row].gather(-1, source)

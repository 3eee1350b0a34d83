"""A small cache with something in it, for swaps."""

import torch

from engine.cache import CacheShape, PagedCache

SHAPE = CacheShape(
    num_layers=3, num_blocks=40, block_size=4, num_kv_heads=2, num_query_heads=4, head_dim=6, num_slots=5, window=2
)


def filled(device: str, dtype: torch.dtype = torch.float32, shape: CacheShape = SHAPE) -> PagedCache:
    cache = PagedCache(shape, dtype, torch.device(device))
    generator = torch.Generator().manual_seed(1)
    for part in (cache.k, cache.v, cache.history, cache.window_queries):
        part.copy_(torch.randn(part.shape, generator=generator))
    return cache

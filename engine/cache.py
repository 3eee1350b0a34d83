"""The paged cache: keys, values, score history and the queries of observation windows."""

from dataclasses import dataclass

import torch

from engine.config import ModelConfig
from engine.errors import EngineError


@dataclass(frozen=True)
class CacheShape:
    """What fixes a cache's size. `num_slots` 0: nothing is ever compressed, no history and no queries are kept."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    num_query_heads: int
    head_dim: int
    num_slots: int
    window: int

    @staticmethod
    def of(part: ModelConfig, *, num_blocks: int, block_size: int, num_slots: int, window: int) -> "CacheShape":
        """The shape for one process's part of a model."""
        return CacheShape(
            part.num_layers,
            num_blocks,
            block_size,
            part.num_kv_heads,
            part.num_query_heads,
            part.head_dim,
            num_slots,
            window,
        )

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers: K, V and, where requests are compressed, the float32 history."""
        positions = self.num_layers * self.block_size * self.num_kv_heads
        history = 4 * positions if self.num_slots else 0
        return 2 * positions * self.head_dim * dtype.itemsize + history

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one query slot."""
        return self.num_layers * self.window * self.num_query_heads * self.head_dim * dtype.itemsize


class PagedCache:
    """All that the device keeps of requests; padding of tables is -1, block 0 is an ordinary block.

    `k`, `v [layers, blocks, b, H_kv, d]`, `history [layers, blocks, b, H_kv]` float32, `window_queries
    [layers, slots, w, H_q, d]`.
    """

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        positions = (shape.num_layers, shape.num_blocks, shape.block_size, shape.num_kv_heads)
        self.k = torch.zeros(*positions, shape.head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        slots = max(shape.num_slots, 1)
        compressed = shape.num_slots > 0
        self.history = torch.zeros(
            positions if compressed else (shape.num_layers, 1, shape.block_size, shape.num_kv_heads),
            dtype=torch.float32,
            device=device,
        )
        self.window_queries = torch.zeros(
            shape.num_layers, slots, shape.window, shape.num_query_heads, shape.head_dim, dtype=dtype, device=device
        )


def blocks_that_fit(shape: CacheShape, dtype: torch.dtype, free_bytes: int, reserved_bytes: int) -> int:
    """Number of blocks for `free_bytes` of device memory, `reserved_bytes` and the query slots set aside.

    Raises EngineError with every term when not even two blocks fit.
    """
    slots = shape.num_slots * shape.slot_bytes(dtype)
    left = free_bytes - reserved_bytes - slots
    num_blocks = left // shape.block_bytes(dtype)
    if num_blocks < 2:
        raise EngineError(
            f"no room for a cache: {free_bytes:,} bytes are free, {reserved_bytes:,} are reserved, {slots:,} go to "
            f"{shape.num_slots} query slots, and a block takes {shape.block_bytes(dtype):,}"
        )
    return int(num_blocks)

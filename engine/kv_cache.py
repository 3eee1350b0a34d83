"""The paged KV cache: keys, values, score history, and the queries of observation windows.

`Reserved` says how much of it a running engine sets aside: enough for every policy under which it
may run.
"""

from dataclasses import dataclass

import torch

from zlab.engine.errors import EngineError
from zlab.engine.model.spec import ModelConfig
from zlab.policies.core.plan import SchedulerLimits
from zlab.policies.core.policy import Policy
from zlab.sim.memory import PolicyNeeds


@dataclass(frozen=True)
class Reserved(PolicyNeeds):
    """Sizes that are fixed when an engine is built: the needs of all its policies.

    The window is the longest window of all policies, whatever the current policy needs.
    """

    def check(self, policy: Policy, limits: SchedulerLimits) -> None:
        """Check that the policy fits. Raises EngineError, with the numbers, where it needs more
        than was reserved, ConfigError where it cannot work within the limits.
        """
        need = PolicyNeeds.of((policy,), limits)
        window, there = need.window if need.compresses else 0, self.window if self.compresses else 0
        lacks = [
            f"{wanted} {what}, {there} are reserved"
            for what, wanted, there in (
                ("query slots", need.num_slots, self.num_slots),
                ("queries a slot" if need.num_slots else "tokens always kept", window, there),
                ("requests with blocks at once", need.num_rows, self.num_rows),
            )
            if wanted > there
        ]
        if need.keeps_history and not self.keeps_history:
            lacks.append("a score history, none is reserved")
        if lacks:
            raise EngineError(
                f"policy {policy.name!r} needs more than this engine set aside when it started: "
                f"{'; '.join(lacks)}; "
                "start it with this policy among may_become"
            )


@dataclass(frozen=True)
class CacheShape:
    """The sizes of a cache. Without query slots (`num_slots` 0) no window queries are kept, and a
    score history only where `keeps_history` is set.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    num_query_heads: int
    head_dim: int
    num_slots: int
    window: int
    keeps_history: bool = False

    @staticmethod
    def of(
        part: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        window: int,
        keeps_history: bool = False,
    ) -> "CacheShape":
        """Return the cache shape for one process's part of a model.

        Args:
            part: the part of the model, as `tensor_parallel.part_of` gives it.
            num_blocks: KV blocks.
            block_size: tokens of a block.
            num_slots: query slots.
            window: queries that a slot keeps.
            keeps_history: whether scores are kept even without slots.
        """
        return CacheShape(
            part.num_layers,
            num_blocks,
            block_size,
            part.num_kv_heads,
            part.num_query_heads,
            part.head_dim,
            num_slots,
            window,
            keeps_history,
        )

    @property
    def has_history(self) -> bool:
        """Whether the cache keeps a score for each token."""
        return self.num_slots > 0 or self.keeps_history

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one block over all layers: K, V and, where it is kept, the float32
        history.
        """
        positions = self.num_layers * self.block_size * self.num_kv_heads
        history = 4 * positions if self.has_history else 0
        return 2 * positions * self.head_dim * dtype.itemsize + history

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one query slot over all layers."""
        return self.num_layers * self.window * self.num_query_heads * self.head_dim * dtype.itemsize


class KVCache:
    """All device memory of the requests. Padding of block tables is -1; block 0 is an ordinary
    block.

    `k`, `v` are `[layers, blocks, b, H_kv, d]`, `history` is `[layers, blocks, b, H_kv]` float32,
    `window_queries` is `[layers, slots, w, H_q, d]`.
    """

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        positions = (shape.num_layers, shape.num_blocks, shape.block_size, shape.num_kv_heads)
        self.k = torch.zeros(*positions, shape.head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        slots = max(shape.num_slots, 1)
        self.history = torch.zeros(
            positions
            if shape.has_history
            else (shape.num_layers, 1, shape.block_size, shape.num_kv_heads),
            dtype=torch.float32,
            device=device,
        )
        self.window_queries = torch.zeros(
            shape.num_layers,
            slots,
            shape.window,
            shape.num_query_heads,
            shape.head_dim,
            dtype=dtype,
            device=device,
        )

"""Tensor parallelism: the part of a model that a process holds, and the two exchanges that combine
parts.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from zlab.engine.errors import ModelError
from zlab.engine.model.spec import ModelConfig


@dataclass(frozen=True)
class Parallel:
    """The place of a process among `size` that share a model; the default is a single process,
    which exchanges nothing.

    Attention heads, feed-forward columns and vocabulary rows are split; every process has all
    norms. KV heads are split too; where there are fewer KV heads than processes, several processes
    hold the same head.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ModelError(f"rank must lie in 0..{self.size - 1}, got {self.rank}")

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes, in place where it can be. All must call it."""
        if self.size == 1:
            return partial
        dist.all_reduce(partial, group=self.group)
        return partial

    def join_columns(self, part: torch.Tensor) -> torch.Tensor:
        """Return the parts `[rows, columns]` of all processes side by side, in rank order, on every
        process.
        """
        if self.size == 1:
            return part
        part = part.contiguous()
        num_rows, num_columns = part.shape
        parts = torch.empty(self.size * num_rows, num_columns, dtype=part.dtype, device=part.device)
        dist.all_gather_into_tensor(parts, part, group=self.group)
        return parts.view(self.size, num_rows, num_columns).transpose(0, 1).reshape(num_rows, -1)

    def vocab_rows(self, vocab_size: int) -> int:
        """Return the vocabulary rows of each process; those of the last process may be partly
        padding.
        """
        return -(-vocab_size // self.size)

    def first_kv_head(self, num_kv_heads: int) -> int:
        """Return the first KV head that this process holds."""
        return self.rank * num_kv_heads // self.size


def join(rank: int, size: int, *, address: str, device: torch.device) -> Parallel:
    """Join a process group: NCCL for CUDA, gloo for the CPU. The call blocks until all processes
    are there.

    `torch.distributed.destroy_process_group` leaves the group.

    Args:
        rank: number of this process.
        size: number of processes.
        address: `tcp://host:port` or `file:///path`.
        device: device of this process.
    """
    if size == 1:
        return Parallel()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size)
    return Parallel(rank, size, dist.group.WORLD)


def part_of(config: ModelConfig, parallel: Parallel) -> ModelConfig:
    """Return the shape of one process's part: its heads and feed-forward columns; `vocab_size`
    stays the whole.

    Raises:
        ModelError: heads or columns cannot be divided; the message has the numbers.
    """
    size = parallel.size
    if size == 1:
        return config
    if config.num_query_heads % size:
        raise ModelError(
            f"{config.num_query_heads} query heads cannot be split among {size} processes"
        )
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise ModelError(
            f"{config.num_kv_heads} KV heads can be neither split nor repeated among {size} "
            f"processes"
        )
    if config.intermediate_size % size:
        raise ModelError(
            f"{config.intermediate_size} feed-forward columns cannot be split among {size} "
            f"processes"
        )
    return replace(
        config,
        num_query_heads=config.num_query_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=config.intermediate_size // size,
    )

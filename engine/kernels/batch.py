"""What one compression is asked to do: a ragged batch of requests, checked on the host and laid out for a launch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels.errors import KernelInputError

PAD = -1  # fills block tables behind a request's last block
NUM_FLAGS = 5  # values a request has beside its two tables
SECTION_ALIGNMENT = 4  # int32 values, so that every section of the packed buffer starts on 16 bytes


@dataclass(frozen=True, slots=True)
class CompressionRequest:
    """One request to compress, all of its blocks full.

    `block_table` holds its blocks in cache order, shared ones included; they are only read. `target_blocks` are filled
    exactly, so `len(target_blocks) * block_size` tokens are kept per layer and KV head: its own first blocks, or fresh
    ones where a leading block is shared. `seed` feeds the `random` scorer only.
    """

    block_table: tuple[int, ...]
    target_blocks: tuple[int, ...]
    query_slot: int
    compressed_before: bool = False
    seed: int = 0


@dataclass(frozen=True)
class CompressionBatch:
    """Device tensors of B requests (int32, tables padded with -1) and the host's sizes for the grid.

    `block_tables [B, max_blocks]`, `target_blocks [B, max_targets]`; the rest `[B]`.
    """

    block_tables: torch.Tensor
    target_blocks: torch.Tensor
    num_blocks: torch.Tensor
    num_targets: torch.Tensor
    compressed_before: torch.Tensor
    query_slots: torch.Tensor
    seeds: torch.Tensor
    requests: tuple[CompressionRequest, ...]
    block_size: int

    @property
    def num_requests(self) -> int:
        """B."""
        return len(self.requests)

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest request."""
        return max(len(request.block_table) for request in self.requests)

    @property
    def max_targets(self) -> int:
        """Target blocks of the request that keeps most."""
        return max(len(request.target_blocks) for request in self.requests)


def check_requests(requests: Sequence[CompressionRequest], *, num_blocks: int, num_slots: int) -> None:
    """Raise `KernelInputError` where a copy would leave the cache, race, or touch what belongs to another request."""
    if not requests:
        raise KernelInputError("a compression needs at least one request, got none")
    writers: dict[int, int] = {}
    for row, request in enumerate(requests):
        _check_one(row, request, num_blocks, num_slots)
        for block in request.target_blocks:
            if block in writers:
                raise KernelInputError(f"target block {block} is given twice, to requests {writers[block]} and {row}")
            writers[block] = row
    for row, request in enumerate(requests):
        for block in request.block_table:
            if writers.get(block, row) != row:
                raise KernelInputError(
                    f"block {block} is read by request {row} but a target of request {writers[block]}"
                )


def lay_out(requests: Sequence[CompressionRequest], block_size: int, storage: torch.Tensor) -> CompressionBatch:
    """Copy checked requests into `storage` (int32, device) in one transfer and return views of it.

    Pinned host memory comes from torch's caching host allocator, which gives a buffer out again only when the copy from
    it has happened: nothing waits and nothing is overwritten early.
    """
    max_blocks = max(len(request.block_table) for request in requests)
    max_targets = max(len(request.target_blocks) for request in requests)
    sections: list[tuple[list[int], tuple[int, ...]]] = [
        (_padded([r.block_table for r in requests], max_blocks), (len(requests), max_blocks)),
        (_padded([r.target_blocks for r in requests], max_targets), (len(requests), max_targets)),
        ([len(r.block_table) for r in requests], (len(requests),)),
        ([len(r.target_blocks) for r in requests], (len(requests),)),
        ([int(r.compressed_before) for r in requests], (len(requests),)),
        ([r.query_slot for r in requests], (len(requests),)),
        ([r.seed for r in requests], (len(requests),)),
    ]
    flat: list[int] = []
    starts: list[int] = []
    for values, _ in sections:
        starts.append(len(flat))
        flat += values + [PAD] * (aligned(len(values)) - len(values))
    host = torch.tensor(flat, dtype=torch.int32)
    if storage.is_cuda:
        host = host.pin_memory()
    storage[: len(flat)].copy_(host, non_blocking=True)
    views = [
        storage[start : start + len(values)].view(shape)
        for start, (values, shape) in zip(starts, sections, strict=True)
    ]
    return CompressionBatch(
        block_tables=views[0],
        target_blocks=views[1],
        num_blocks=views[2],
        num_targets=views[3],
        compressed_before=views[4],
        query_slots=views[5],
        seeds=views[6],
        requests=tuple(requests),
        block_size=block_size,
    )


def _check_one(row: int, request: CompressionRequest, num_blocks: int, num_slots: int) -> None:
    table, targets = request.block_table, request.target_blocks
    if not 0 < len(targets) < len(table):
        raise KernelInputError(
            f"request {row} keeps {len(targets)} of {len(table)} blocks; at least one must be kept and one freed"
        )
    if len(set(table)) != len(table):
        raise KernelInputError(f"request {row} lists a block twice in its table {list(table)}")
    for block in (*table, *targets):
        if not 0 <= block < num_blocks:
            raise KernelInputError(f"request {row} names block {block}; the cache has blocks 0..{num_blocks - 1}")
    if not 0 <= request.query_slot < num_slots:
        raise KernelInputError(f"request {row} names query slot {request.query_slot}; there are 0..{num_slots - 1}")
    places = {block: place for place, block in enumerate(table)}
    for place, block in enumerate(targets):
        if places.get(block, place) != place:
            # Written at `place` while its own tokens, further on in the table, are still to be read.
            raise KernelInputError(
                f"request {row} has target {place} = block {block}, which is block {places[block]} of its own table; "
                "an own block may only be a target at its own place"
            )


def _padded(tables: list[tuple[int, ...]], width: int) -> list[int]:
    return [block for table in tables for block in (*table, *[PAD] * (width - len(table)))]


def aligned(count: int) -> int:
    """Room for so many int32 values, what comes behind them aligned: Triton compiles anew for a pointer that is not."""
    return -(-count // SECTION_ALIGNMENT) * SECTION_ALIGNMENT

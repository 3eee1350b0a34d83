"""Preemption to host memory: blocks, history and window queries of a request, out and back."""

import os
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.cache import CacheShape, PagedCache
from engine.errors import EngineError
from engine.host_rows import NUM_STAGES, CopyStreams, Hosted, HostRows, row_bytes

STAGING_BYTES = 1 << 30  # of the device, for blocks on their way; more only where pieces of one block need it
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of Linux: what a container may take


@dataclass(frozen=True)
class HostCopy:
    """What a swapped request left on the host: its blocks, the queries of its slot if it had one, its next token."""

    blocks: Hosted
    queries: Hosted | None
    token: int


class HostSwap:
    """Copies on streams of their own, to memory made at the start; later steps wait on the device, the host never.

    The host gives `host_blocks` x the bytes of a block (K, V and, where requests are compressed, history) and, there,
    query slots for as many requests, but no more at first than the cache has: further ones are made when so many are
    swapped. It is pinned where the cache is on a card. The device gives `device_bytes`. None of it without host blocks.

    The scheduler books host memory: no more than `host_blocks` are out at once, if a request that ended is dropped
    before another takes its place.
    """

    def __init__(self, cache: PagedCache, host_blocks: int, staging_bytes: int = STAGING_BYTES) -> None:
        """Raises EngineError where the host has not that much memory."""
        self._streams = CopyStreams.on(cache.k.device)
        self._copies: dict[int, HostCopy] = {}
        self._pending: list[torch.cuda.Event] = []
        self._blocks: HostRows | None = None
        self._queries: HostRows | None = None
        if not host_blocks:
            return
        shape, dtype = cache.shape, cache.k.dtype
        num_queries = min(host_blocks, shape.num_slots)
        wanted = host_blocks * shape.block_bytes(dtype) + num_queries * shape.slot_bytes(dtype)
        there = host_memory_bytes()
        taken = f"host_blocks {host_blocks:,} take {wanted:,} bytes of host memory"
        if wanted > there:
            raise EngineError(f"{taken}, and there are {there:,}")
        history = [cache.history] if shape.num_slots else []
        piece_blocks = _piece_blocks(_block_row_bytes(shape, dtype), host_blocks, staging_bytes)
        try:
            self._blocks = HostRows([cache.k, cache.v, *history], host_blocks, piece_blocks, self._streams)
            if num_queries:
                self._queries = HostRows([cache.window_queries], num_queries, 1, self._streams)
        except MemoryError as error:
            raise EngineError(f"{taken}, which cannot be had: {error}") from error
        self._warm_up(min(piece_blocks, host_blocks, shape.num_blocks))

    @staticmethod
    def device_bytes(shape: CacheShape, dtype: torch.dtype, host_blocks: int) -> int:
        """What copies on their way take of the device."""
        if not host_blocks:
            return 0
        a_block = _block_row_bytes(shape, dtype)
        of_queries = row_bytes([shape.slot_bytes(dtype)]) if shape.num_slots else 0
        return (NUM_STAGES + 1) * (_piece_blocks(a_block, host_blocks, STAGING_BYTES) * a_block + of_queries)

    def out(self, number: int, blocks: Sequence[int], slot: int, token: int) -> None:
        """Start to copy a request's blocks to the host, and the queries of its slot, if it has one.

        They stay untouched until the next step has begun, which waits for them to be read (`join`), not to arrive.
        """
        assert self._blocks is not None, "a request was swapped, and host_blocks is 0"
        begin = self._begin()
        hosted = self._blocks.out(blocks, begin)
        queries = None
        if slot >= 0:
            assert self._queries is not None, f"query slot {slot} of a cache that has none"
            if not self._queries.pool.num_free:
                self._queries.pool.add(1)
            queries = self._queries.out([slot], begin)
        self._await_later(self._streams.read)
        self._copies[number] = HostCopy(hosted, queries, token)

    def back(self, number: int, blocks: Sequence[int], slot: int) -> int:
        """Start to copy a request back into fresh blocks, and its queries into its slot, if it got one.

        Returns the token that it goes on with.
        """
        assert self._blocks is not None
        copy = self._copies.pop(number)
        begin = self._begin()
        self._blocks.back(copy.blocks, blocks, begin)
        if copy.queries is not None:
            assert self._queries is not None
            if slot >= 0:
                self._queries.back(copy.queries, [slot], begin)
            else:
                self._queries.drop(copy.queries)
        self._await_later(self._streams.back)
        return copy.token

    def join(self) -> None:
        """Let the current stream wait, on the device, until what went out has been read and what came is there."""
        for event in self._pending:
            torch.cuda.current_stream().wait_event(event)
        self._pending.clear()

    def drop(self, number: int) -> None:
        """The request has ended, perhaps in host memory; a copy of it may still be under way."""
        copy = self._copies.pop(number, None)
        if copy is None:
            return
        for rows, hosted in ((self._blocks, copy.blocks), (self._queries, copy.queries)):
            if rows is not None and hosted is not None:
                rows.drop(hosted)

    def drop_all_but(self, live: Container[int]) -> None:
        """Drop the requests that are not live any more: the scheduler may have given their host memory away."""
        for number in [number for number in self._copies if number not in live]:
            self.drop(number)

    def _begin(self) -> torch.cuda.Event | None:
        """When all that the current stream has been given so far is over."""
        return None if self._streams.read is None else torch.cuda.current_stream().record_event()

    def _await_later(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            self._pending.append(stream.record_event())

    def _warm_up(self, piece_blocks: int) -> None:
        """Blocks out and back to where they were: kernels are loaded at their first use, which waits for the device."""
        slot = 0 if self._queries is not None else -1
        for count in sorted({1, piece_blocks}):
            self.out(-1, range(count), slot, 0)
            self.back(-1, range(count), slot)
        self.join()


def host_memory_bytes() -> int:
    """What this process can have at most: the machine's memory, or the share of a container."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else ""
    return min(machine, int(limit)) if limit.isdecimal() else machine


def _block_row_bytes(shape: CacheShape, dtype: torch.dtype) -> int:
    """A block of the cache as `HostRows` holds it."""
    positions = shape.num_layers * shape.block_size * shape.num_kv_heads
    history = [4 * positions] if shape.num_slots else []
    return row_bytes([positions * shape.head_dim * dtype.itemsize] * 2 + history)


def _piece_blocks(block_row_bytes: int, host_blocks: int, staging_bytes: int) -> int:
    """Blocks of a piece, so that all stages together keep to `staging_bytes`; at least one."""
    return max(min(staging_bytes // block_row_bytes, host_blocks) // (NUM_STAGES + 1), 1)

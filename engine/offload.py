"""Swapping of requests to host memory: copies of blocks out and back that the host never waits for.

A preempted request under `Recovery.SWAP` leaves its blocks, score history and window queries in
host memory and gets them back later. A copy runs in pieces through a ring of staging buffers on the
device:

    out:   cache rows --gather--> stage (device) --copy--> pinned host places
    back:  pinned host places --copy--> stage (device) --scatter--> cache rows

Host places all have one size. They are allocated when the engine starts and reused; a place carries
the event after which it may be overwritten.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zlab.engine.errors import EngineError
from zlab.engine.input_batch import sent
from zlab.engine.kv_cache import CacheShape, KVCache
from zlab.sim.memory import NUM_STAGES, STAGING_BYTES, piece_blocks

# torch rounds pinned memory up to a power of two; chunks of a power of two waste little
CHUNK_BYTES = 1 << 30


class HostPool:
    """Host places of `place_bytes` each, pinned where a device copies to them. The caller that
    frees a place names the event of its last read.

    The places lie in chunks of at most `chunk_bytes`, or of one place where a place is larger.
    """

    def __init__(
        self, num_places: int, place_bytes: int, *, pinned: bool, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """Allocate the places. Raises MemoryError where the host lacks the memory."""
        self.place_bytes = place_bytes
        self._pinned = pinned
        self._chunk_places = max(chunk_bytes // place_bytes, 1)
        self._chunks: list[torch.Tensor] = []
        self._where: list[tuple[int, int]] = []  # for each place: its chunk and its row in it
        # longest free first: its last read has most likely finished
        self._free: deque[int] = deque()
        self._readers: dict[
            int, torch.cuda.Event
        ] = {}  # free place -> the event of its last read, if any
        self.add(num_places)

    @property
    def num_places(self) -> int:
        """Number of places."""
        return len(self._where)

    @property
    def num_free(self) -> int:
        """Number of places that `take` can give."""
        return len(self._free)

    def add(self, num_places: int) -> None:
        """Allocate more places. Raises MemoryError where the host lacks the memory."""
        while num_places:
            count = min(num_places, self._chunk_places)
            try:
                chunk = torch.empty(
                    count, self.place_bytes, dtype=torch.uint8, pin_memory=self._pinned
                )
            except RuntimeError as error:  # torch has no error class of its own for host memory
                raise MemoryError(f"no {count * self.place_bytes:,} bytes more: {error}") from error
            self._chunks.append(chunk)
            self._free.extend(range(len(self._where), len(self._where) + count))
            self._where.extend((len(self._chunks) - 1, row) for row in range(count))
            num_places -= count

    def take(self, count: int) -> tuple[list[int], list[torch.cuda.Event]]:
        """Take `count` free places. Returns them and the events after which they may be written."""
        assert count <= self.num_free, (
            f"{count} places in host memory are wanted, {self.num_free} of {self.num_places} "
            f"are free"
        )
        places = [self._free.popleft() for _ in range(count)]
        readers = {
            event: None for place in places if (event := self._readers.pop(place, None)) is not None
        }
        return places, list(readers)

    def give_back(self, places: Iterable[int], reader: torch.cuda.Event | None = None) -> None:
        """Free the places once the event `reader` has happened (None: nothing reads them)."""
        for place in places:
            self._free.append(place)
            if reader is not None:
                self._readers[place] = reader

    def runs(self, places: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the places in order, as memory `[n, place_bytes]` of neighbouring ones, each with
        the index of its first place.
        """
        first = 0
        for index in range(1, len(places) + 1):
            chunk, row = self._where[places[index - 1]]
            if index == len(places) or self._where[places[index]] != (chunk, row + 1):
                yield first, self._chunks[chunk][row + 1 - (index - first) : row + 1]
                first = index


COPY_BYTES = 16 << 20  # limit of one copy: small copies of a running step queue behind it
ALIGNMENT = 16
# integer type of each width in bytes
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class CopyStreams:
    """Streams for copies, beside the stream of the steps; None without CUDA.

    `read` gathers from the cache and `out` copies to the host, so that a step can wait for the
    gather alone. `back` copies from the host and scatters into the cache. A GPU copies in both
    directions at once.
    """

    read: torch.cuda.Stream | None
    out: torch.cuda.Stream | None
    back: torch.cuda.Stream | None

    @staticmethod
    def on(device: torch.device) -> "CopyStreams":
        """Return new streams of that device."""
        if device.type != "cuda":
            return CopyStreams(None, None, None)
        return CopyStreams(
            torch.cuda.Stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device)
        )


@dataclass(frozen=True)
class Hosted:
    """Rows in host memory: their places and the event after which all of them have arrived."""

    places: list[int]
    ready: torch.cuda.Event | None


@dataclass
class _StagingBuffer:
    """A staging buffer: bytes `[n, row_bytes]`, views of the parts of its rows, and the event of
    its last use.
    """

    rows: torch.Tensor
    parts: list[torch.Tensor]
    over: torch.cuda.Event | None = None


class HostRows:
    """Host copies of rows: what all `tensors` (each `[layers, rows, ...]`, contiguous) hold at one
    index becomes one row of bytes in host memory.

    Out: a piece is gathered into a stage and copied from there; the stage is reused when the copy
    has finished, so gathers overlap the copies of earlier pieces. Back: each piece is copied to the
    device and scattered. The device holds `NUM_STAGES` + 1 pieces of `piece_rows` rows, the host
    `num_places` rows of `row_bytes`.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        num_places: int,
        piece_rows: int,
        streams: CopyStreams,
    ) -> None:
        """Allocate places and stages. Raises MemoryError where the host lacks the memory."""
        self._parts = [_by_row(tensor) for tensor in tensors]
        self._piece_rows = piece_rows
        self._streams = streams
        self._device = tensors[0].device
        part_bytes = [part[0].numel() * part.element_size() for part in self._parts]
        num_bytes = row_bytes(part_bytes)
        self.pool = HostPool(num_places, num_bytes, pinned=self._device.type == "cuda")
        room = torch.empty(
            (NUM_STAGES + 1) * piece_rows, num_bytes, dtype=torch.uint8, device=self._device
        )
        stages = [
            _StagingBuffer(rows, self._views(rows, part_bytes)) for rows in room.split(piece_rows)
        ]
        self._stages, self._landing = stages[:-1], stages[-1]
        self._next_stage = 0

    def out(self, indices: Sequence[int], begin: torch.cuda.Event | None) -> Hosted:
        """Start to copy rows to the host after the event `begin`.

        The rows may be overwritten once `streams.read` has finished what is enqueued by now.
        """
        streams, size = self._streams, self._piece_rows
        places, readers = self.pool.take(len(indices))
        for reader in readers:
            _await(streams.out, reader)
        with torch.cuda.stream(streams.read):
            _await(streams.read, begin)
            index = sent(indices, self._device)
            for first in range(0, len(indices), size):
                self._piece_out(index[first : first + size], places[first : first + size])
        return Hosted(places, _mark(streams.out))

    def back(self, hosted: Hosted, indices: Sequence[int], begin: torch.cuda.Event | None) -> None:
        """Start to copy rows back into the cache after the event `begin`. The copy is done when
        `streams.back` has finished.
        """
        stream, size, stage = self._streams.back, self._piece_rows, self._landing
        with torch.cuda.stream(stream):
            _await(stream, hosted.ready)
            index = sent(indices, self._device)
            for first in range(0, len(indices), size):
                piece = index[first : first + size]
                for row, host in self.pool.runs(hosted.places[first : first + size]):
                    _copy(stage.rows[row : row + len(host)], host)
                _await(stream, begin)
                for part, staged in zip(self._parts, stage.parts, strict=True):
                    part.index_copy_(0, piece, staged[: len(piece)])
        self.pool.give_back(hosted.places, _mark(stream))

    def drop(self, hosted: Hosted) -> None:
        """Free the places. A later copy to the same places waits for this one."""
        self.pool.give_back(hosted.places)

    def _piece_out(self, index: torch.Tensor, places: Sequence[int]) -> None:
        """Gather one piece on `streams.read`, which is the current stream, and copy it on
        `streams.out`.
        """
        streams = self._streams
        stage = self._stages[self._next_stage]
        self._next_stage = (self._next_stage + 1) % NUM_STAGES
        _await(streams.read, stage.over)
        for part, staged in zip(self._parts, stage.parts, strict=True):
            torch.index_select(part, 0, index, out=staged[: len(index)])
        _await(streams.out, _mark(streams.read))
        with torch.cuda.stream(streams.out):
            for row, host in self.pool.runs(places):
                _copy(host, stage.rows[row : row + len(host)])
        stage.over = _mark(streams.out)

    def _views(self, rows: torch.Tensor, part_bytes: Sequence[int]) -> list[torch.Tensor]:
        """Return the parts of rows of bytes as views, `[n, layers, words]` each."""
        views, start = [], 0
        for part, num_bytes in zip(self._parts, part_bytes, strict=True):
            found = rows[:, start : start + num_bytes].view(part.dtype)
            views.append(found.unflatten(1, (part.shape[1], part.shape[2])))
            start += _aligned(num_bytes)
        return views


def row_bytes(part_bytes: Sequence[int]) -> int:
    """Return the bytes of a row whose parts have these sizes."""
    return sum(_aligned(num_bytes) for num_bytes in part_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _by_row(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view `[rows, layers, words]` of a tensor `[layers, rows, ...]`, in the widest
    integer words that fit.
    """
    flat = tensor.view(*tensor.shape[:2], -1)
    num_bytes = flat.shape[2] * flat.element_size()
    width = max(size for size in WORDS if num_bytes % size == 0)
    return flat.view(WORDS[width]).transpose(0, 1)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between host and device, both contiguous, in copies of at most `COPY_BYTES`."""
    for to, of in zip(
        target.view(-1).split(COPY_BYTES), source.view(-1).split(COPY_BYTES), strict=True
    ):
        to.copy_(of, non_blocking=True)


def _await(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)


def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Record an event on the stream."""
    return None if stream is None else stream.record_event()


CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # Linux: the memory limit of a container


@dataclass(frozen=True)
class HostCopy:
    """What a swapped request left on the host: its blocks, the queries of its slot if it had one,
    and its next token.
    """

    blocks: Hosted
    queries: Hosted | None
    token: int


class HostSwap:
    """Swaps requests between the cache and host memory on copy streams. Later steps wait on the
    device; the host never waits.

    The host holds `host_blocks` blocks (K, V and, where requests are compressed, the score
    history). It also holds query slots, at first no more than the cache has; more are allocated
    when more requests with slots are swapped. Host memory is pinned where the cache is on a GPU.
    The device holds `zlab.sim.memory.staging_bytes`. Without host blocks nothing is allocated.

    The scheduler accounts for host memory: at most `host_blocks` blocks are out at once, provided
    that an ended request is dropped before another request takes its place.
    """

    def __init__(
        self, cache: KVCache, host_blocks: int, staging_bytes: int = STAGING_BYTES
    ) -> None:
        """Allocate host memory and stages. Raises EngineError where the host lacks the memory."""
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
        history = [cache.history] if shape.has_history else []
        num_piece_blocks = piece_blocks(_block_row_bytes(shape, dtype), host_blocks, staging_bytes)
        try:
            self._blocks = HostRows(
                [cache.k, cache.v, *history], host_blocks, num_piece_blocks, self._streams
            )
            if num_queries:
                self._queries = HostRows([cache.window_queries], num_queries, 1, self._streams)
        except MemoryError as error:
            raise EngineError(f"{taken}, which cannot be had: {error}") from error
        self._warm_up(min(num_piece_blocks, host_blocks, shape.num_blocks))

    def out(self, number: int, blocks: Sequence[int], slot: int, token: int) -> None:
        """Start to copy a request's blocks to the host, and the queries of its slot if it has one.

        The blocks stay untouched until the next step begins. That step waits (`join`) until they
        have been read, not until they have arrived.

        Args:
            number: the request.
            blocks: its blocks in the cache.
            slot: its query slot, -1 for none.
            token: the token with which it continues.
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
        """Start to copy a request back into fresh blocks, and its queries into its slot if it has
        one. Returns the token with which it continues.
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
        """Let the current stream wait, on the device, until swapped-out blocks have been read and
        swapped-in blocks have arrived.
        """
        for event in self._pending:
            torch.cuda.current_stream().wait_event(event)
        self._pending.clear()

    def drop(self, number: int) -> None:
        """Free the host copy of an ended request, if there is one. It may still be in flight."""
        copy = self._copies.pop(number, None)
        if copy is None:
            return
        for rows, hosted in ((self._blocks, copy.blocks), (self._queries, copy.queries)):
            if rows is not None and hosted is not None:
                rows.drop(hosted)

    def _begin(self) -> torch.cuda.Event | None:
        """Return an event at the current end of the current stream."""
        return None if self._streams.read is None else torch.cuda.current_stream().record_event()

    def _await_later(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            self._pending.append(stream.record_event())

    def _warm_up(self, piece_blocks: int) -> None:
        """Copy blocks out and back to their own place. A kernel's first launch loads it and waits
        for the device, so this happens at the start.
        """
        slot = 0 if self._queries is not None else -1
        for count in sorted({1, piece_blocks}):
            self.out(-1, range(count), slot, 0)
            self.back(-1, range(count), slot)
        self.join()


def host_memory_bytes() -> int:
    """Return the bytes that this process can have at most: the machine's memory or the limit of its
    container.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else ""
    return min(machine, int(limit)) if limit.isdecimal() else machine


def _block_row_bytes(shape: CacheShape, dtype: torch.dtype) -> int:
    """Return the bytes of one cache block as `HostRows` stores it."""
    positions = shape.num_layers * shape.block_size * shape.num_kv_heads
    history = [4 * positions] if shape.has_history else []
    return row_bytes([positions * shape.head_dim * dtype.itemsize] * 2 + history)

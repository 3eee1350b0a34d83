"""Rows of the cache in host memory: copies out and back, in pieces, that the host never waits for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.host_pool import HostPool
from engine.transfer import sent

NUM_STAGES = 8  # pieces that can be on their way out at once
COPY_BYTES = 16 << 20  # of one copy, at most: the few bytes a step sends or fetches meanwhile queue behind that
ALIGNMENT = 16
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by their bytes


@dataclass(frozen=True)
class CopyStreams:
    """Streams beside the steps' own; None without CUDA.

    `read` gathers from the cache and `out` copies to the host, so that a step can wait for the first alone; `back`
    copies from the host and scatters into the cache: a card copies both ways at once.
    """

    read: torch.cuda.Stream | None
    out: torch.cuda.Stream | None
    back: torch.cuda.Stream | None

    @staticmethod
    def on(device: torch.device) -> "CopyStreams":
        """New streams of that device."""
        if device.type != "cuda":
            return CopyStreams(None, None, None)
        return CopyStreams(torch.cuda.Stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device))


@dataclass(frozen=True)
class Hosted:
    """Rows in host memory: the place of each, and when all of them are there."""

    places: list[int]
    ready: torch.cuda.Event | None


@dataclass
class _Stage:
    """A piece's room on the device: bytes `[n, row_bytes]`, the parts of rows in them, when the last use is over."""

    rows: torch.Tensor
    parts: list[torch.Tensor]
    over: torch.cuda.Event | None = None


class HostRows:
    """What `tensors` (each `[layers, rows, ...]`, contiguous) hold at an index, as one row of bytes in host memory.

    Out: a piece is gathered into a stage on the device and copied from there; the stage is used again when that copy is
    over, so gathers run beside the copies of the pieces before. Back: piece by piece to the device, and scattered. The
    device gives `NUM_STAGES` + 1 pieces of `piece_rows` rows; the host `num_places`, each of `row_bytes`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], num_places: int, piece_rows: int, streams: CopyStreams) -> None:
        """Raises MemoryError where the host has not that much memory."""
        self._parts = [_by_row(tensor) for tensor in tensors]
        self._piece_rows = piece_rows
        self._streams = streams
        self._device = tensors[0].device
        part_bytes = [part[0].numel() * part.element_size() for part in self._parts]
        num_bytes = row_bytes(part_bytes)
        self.pool = HostPool(num_places, num_bytes, pinned=self._device.type == "cuda")
        room = torch.empty((NUM_STAGES + 1) * piece_rows, num_bytes, dtype=torch.uint8, device=self._device)
        stages = [_Stage(rows, self._views(rows, part_bytes)) for rows in room.split(piece_rows)]
        self._stages, self._landing = stages[:-1], stages[-1]
        self._next_stage = 0

    def out(self, indices: Sequence[int], begin: torch.cuda.Event | None) -> Hosted:
        """Start to copy rows to the host when `begin` has happened.

        They have been read once `streams.read` comes to what is enqueued now.
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
        """Start to copy rows back, into the cache from `begin` on; it is done when `streams.back` comes to its end."""
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
        """Nobody wants the rows any more. A copy to the same places comes after this one in any case."""
        self.pool.give_back(hosted.places)

    def _piece_out(self, index: torch.Tensor, places: Sequence[int]) -> None:
        """Gather on `streams.read`, which is the current one, and copy on `streams.out`."""
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
        """The parts of rows of bytes, `[n, layers, words]` each."""
        views, start = [], 0
        for part, num_bytes in zip(self._parts, part_bytes, strict=True):
            found = rows[:, start : start + num_bytes].view(part.dtype)
            views.append(found.unflatten(1, (part.shape[1], part.shape[2])))
            start += _aligned(num_bytes)
        return views


def row_bytes(part_bytes: Sequence[int]) -> int:
    """Bytes of a row whose parts take so many each."""
    return sum(_aligned(num_bytes) for num_bytes in part_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _by_row(tensor: torch.Tensor) -> torch.Tensor:
    """A view `[rows, layers, words]` of `[layers, rows, ...]`, in the widest words that fit."""
    flat = tensor.view(*tensor.shape[:2], -1)
    num_bytes = flat.shape[2] * flat.element_size()
    width = max(size for size in WORDS if num_bytes % size == 0)
    return flat.view(WORDS[width]).transpose(0, 1)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Between host and device, both contiguous, in copies of `COPY_BYTES`."""
    for to, of in zip(target.view(-1).split(COPY_BYTES), source.view(-1).split(COPY_BYTES), strict=True):
        to.copy_(of, non_blocking=True)


def _await(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)


def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """An event that happens when the stream has come to here."""
    return None if stream is None else stream.record_event()

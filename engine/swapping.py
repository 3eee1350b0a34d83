"""Preemption to host memory: blocks, history and window queries of a request, out and back."""

from dataclasses import dataclass

import torch

from engine.cache import PagedCache
from engine.transfer import sent


@dataclass
class HostCopy:
    """What a swapped request left on the host; `ready` fires when the copy is complete (None without CUDA)."""

    k: torch.Tensor
    v: torch.Tensor
    history: torch.Tensor | None
    queries: torch.Tensor | None
    token: int
    position: int
    length: int
    ready: torch.cuda.Event | None


class HostSwap:
    """Copies on a stream of their own, to pinned memory; later steps wait on the device, never the host."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._stream = torch.cuda.Stream() if cache.k.is_cuda else None
        self._copies: dict[int, HostCopy] = {}
        self._pending: list[torch.cuda.Event] = []

    def out(self, number: int, blocks: list[int], slot: int, token: int, position: int, length: int) -> None:
        """Start to copy a request's blocks to the host; they stay untouched until the next step has begun."""
        cache = self._cache
        with self._beside():
            index = sent(blocks, cache.k.device)
            parts = [cache.k[:, index], cache.v[:, index]]
            compressed = cache.shape.num_slots > 0
            parts += [cache.history[:, index]] if compressed else []
            parts += [cache.window_queries[:, slot]] if slot >= 0 else []
            hosted = [self._to_host(part) for part in parts]
            event = self._record()
        self._copies[number] = HostCopy(
            hosted[0],
            hosted[1],
            hosted[2] if compressed else None,
            hosted[-1] if slot >= 0 else None,
            token,
            position,
            length,
            event,
        )

    def back(self, number: int, blocks: list[int], slot: int) -> HostCopy:
        """Start to copy a request back into fresh blocks (and its queries into its slot, if it got one)."""
        copy, cache = self._copies.pop(number), self._cache
        with self._beside():
            index = sent(blocks, cache.k.device)
            cache.k[:, index] = copy.k.to(cache.k.device, non_blocking=True)
            cache.v[:, index] = copy.v.to(cache.v.device, non_blocking=True)
            if copy.history is not None:
                cache.history[:, index] = copy.history.to(cache.history.device, non_blocking=True)
            if copy.queries is not None and slot >= 0:
                cache.window_queries[:, slot] = copy.queries.to(cache.k.device, non_blocking=True)
            self._record()
        return copy

    def join(self) -> None:
        """Let the current stream wait, on the device, for every copy under way."""
        for event in self._pending:
            torch.cuda.current_stream().wait_event(event)
        self._pending.clear()

    def drop(self, number: int) -> None:
        """The request has ended in host memory."""
        self._copies.pop(number, None)

    def _beside(self) -> torch.cuda.StreamContext:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _record(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        self._pending.append(event)
        return event

    def _to_host(self, part: torch.Tensor) -> torch.Tensor:
        if self._stream is None:
            return part.clone()
        host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        host.copy_(part, non_blocking=True)
        return host

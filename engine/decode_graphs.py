"""Decode steps as CUDA graphs: one a padded batch size, replayed instead of launched kernel by kernel."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from engine.transfer import fill

Decoded = tuple[torch.Tensor, torch.Tensor]  # most probable tokens [B] int64, logits [B, vocab]
StepFunction = Callable[[torch.Tensor], Decoded]  # from rows [B] int64


def graph_sizes(max_requests: int) -> tuple[int, ...]:
    """Batch sizes that are captured: small ones exactly, then steps of 8, 16 and 32."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, max_requests, 32), max_requests]
    return tuple(sorted({size for size in steps if size <= max_requests}))


def product_sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows up to `most`, close enough to meet every kernel that cuBLAS has for a product of so many."""
    steps = [1, *range(8, 256, 8), *range(256, 1024, 32), *range(1024, 4096, 128), *range(4096, most, 512), most]
    return tuple(sorted({size for size in steps if size <= most}))


@dataclass(frozen=True)
class Captured:
    """A graph, and what it writes whenever it is replayed."""

    graph: torch.cuda.CUDAGraph
    output: Decoded


def capture(step: Callable[[], Decoded], stream: torch.cuda.Stream, pool: Any) -> Captured:
    """A graph of `step`, its memory from `pool`; the kernels keep the priority of `stream`, wherever it is replayed."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compile and settle what a capture may not do
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        output = step()
    return Captured(graph, output)


class DecodeGraphs:
    """Graphs of `step`, captured for every size of `sizes` at once, largest first, sharing one memory pool."""

    def __init__(
        self, step: StepFunction, sizes: tuple[int, ...], padding_row: int, device: torch.device, priority: int = 0
    ) -> None:
        """Capture; `padding_row` is the row that pads a batch up to a captured size. Needs CUDA."""
        self._sizes = sorted(sizes)
        self._padding_row = padding_row
        self._rows: dict[int, torch.Tensor] = {}
        self._captured: dict[int, Captured] = {}
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(priority=priority)
        for size in reversed(self._sizes):
            self._rows[size] = torch.full((size,), padding_row, dtype=torch.int64, device=device)
            self._captured[size] = capture(partial(step, self._rows[size]), stream, pool)

    def fits(self, num_requests: int) -> bool:
        """Whether a batch of that size can be replayed."""
        return bool(self._sizes) and num_requests <= self._sizes[-1]

    def bind(self, rows: list[int]) -> int:
        """Make the smallest fitting graph work on these rows; returns its size."""
        size = next(size for size in self._sizes if size >= len(rows))
        padded = rows + [self._padding_row] * (size - len(rows))
        fill(self._rows[size], torch.tensor(padded, dtype=torch.int64))
        return size

    def replay(self, size: int) -> Decoded:
        """Run the graph; the result lives until its next replay."""
        captured = self._captured[size]
        captured.graph.replay()
        return captured.output

"""Decode steps as CUDA graphs: one a padded batch size, replayed instead of launched kernel by kernel."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

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


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    rows: torch.Tensor
    output: Decoded


class DecodeGraphs:
    """Graphs of `step`, captured for every size of `sizes` at once, largest first, sharing one memory pool."""

    def __init__(
        self, step: StepFunction, sizes: tuple[int, ...], padding_row: int, device: torch.device, priority: int = 0
    ) -> None:
        """Capture; `padding_row` is the row that pads a batch up to a captured size. Needs CUDA.

        The kernels keep the stream `priority` that they are captured with, wherever a graph is replayed.
        """
        self._sizes = sorted(sizes)
        self._padding_row = padding_row
        self._captured: dict[int, _Captured] = {}
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(priority=priority)
        for size in reversed(self._sizes):
            rows = torch.full((size,), padding_row, dtype=torch.int64, device=device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # compile and settle what a capture may not do
                    step(rows)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                output = step(rows)
            self._captured[size] = _Captured(graph, rows, output)

    def fits(self, num_requests: int) -> bool:
        """Whether a batch of that size can be replayed."""
        return bool(self._sizes) and num_requests <= self._sizes[-1]

    def bind(self, rows: list[int]) -> int:
        """Make the smallest fitting graph work on these rows; returns its size."""
        size = next(size for size in self._sizes if size >= len(rows))
        padded = rows + [self._padding_row] * (size - len(rows))
        target = self._captured[size].rows
        target.copy_(torch.tensor(padded, dtype=torch.int64).pin_memory(), non_blocking=True)
        return size

    def replay(self, size: int) -> Decoded:
        """Run the graph; the result lives until its next replay."""
        captured = self._captured[size]
        captured.graph.replay()
        return captured.output

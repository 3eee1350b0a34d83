"""What moves keys and values besides a step: compressions alone on the device, and swaps to the host and back."""

import time
from collections.abc import Callable
from typing import Any

import torch

from engine.calibrate_stage import Stage, spread
from engine.calibrate_steps import CellError
from engine.errors import EngineError
from engine.swapping import HostSwap
from policies.core.plan import CompressionTask
from policies.core.prefix import PromptContent
from policies.core.request import Request

Cell = dict[str, Any]


def compression_cell(stage: Stage, sequences: int, source_blocks: int, kept_blocks: int, repeats: int) -> Cell:
    """Sequences of full blocks compressed together while nothing else runs; the device's own time."""
    engine, size = stage.engine, stage.block_size
    if engine.compression is None:
        raise CellError("nothing is ever compressed under this policy")
    if sequences * source_blocks > engine.limits.num_blocks:
        raise CellError(f"{sequences * source_blocks} blocks are needed, the pool has {engine.limits.num_blocks}")
    if sequences > engine.scheduler.state.slots.num_slots:
        raise CellError(f"{sequences} query slots are needed, there are {engine.scheduler.state.slots.num_slots}")
    tasks = [_task(place, source_blocks, kept_blocks, size) for place in range(sequences)]
    seconds = []
    for _ in range(repeats + 2):
        before = engine.compression.work_seconds()
        failed = engine.compression.start(tasks, inline=True)
        if failed:
            raise CellError(next(iter(failed.values())))
        engine.compression.join([task.request.number for task in tasks])
        seconds.append(engine.compression.work_seconds() - before)
    return {
        "sequences": sequences,
        "source_tokens": source_blocks * size,
        "kept_tokens": kept_blocks * size,
        "seconds": spread(seconds[2:]),
    }


def _task(place: int, source_blocks: int, kept_blocks: int, block_size: int) -> CompressionTask:
    """A request that was never submitted: the scheduler knows nothing of it, and the cache is nobody's by now."""
    tokens = source_blocks * block_size
    request = Request(
        -1 - place, str(place), 0, tokens, None, None, PromptContent(tokens, block_size, None, None, None)
    )
    request.slot = place
    sources = list(range(place * source_blocks, (place + 1) * source_blocks))
    targets = [*sources[:kept_blocks], sources[-1]]
    return CompressionTask(request, sources, targets, [], tokens, kept_blocks * block_size, first=False)


def swap_cells(stage: Stage, num_blocks: int, repeats: int) -> list[Cell]:
    """One sequence out to the host and back, from the start of its copies to their end."""
    cache = stage.engine.cache
    if num_blocks > cache.shape.num_blocks:
        raise CellError(f"{num_blocks} blocks are needed, the pool has {cache.shape.num_blocks}")
    try:
        swap, blocks = HostSwap(cache, num_blocks), list(range(num_blocks))
    except EngineError as error:
        raise CellError(str(error)) from error
    seconds: dict[str, list[float]] = {"out": [], "in": []}
    tokens = num_blocks * stage.block_size
    for _ in range(repeats + 1):
        seconds["out"].append(_timed(cache.k, swap, lambda: swap.out(0, blocks, -1, 0)))
        seconds["in"].append(_timed(cache.k, swap, lambda: swap.back(0, blocks, -1)))
    # The first touches the host's memory for the first time.
    return [{"direction": way, "tokens": tokens, "seconds": spread(found[1:])} for way, found in seconds.items()]


def _timed(on: torch.Tensor, swap: HostSwap, copy: Callable[[], object]) -> float:
    if not on.is_cuda:
        began = time.perf_counter()
        copy()
        return time.perf_counter() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    copy()
    swap.join()
    torch.cuda.synchronize()
    return time.perf_counter() - began

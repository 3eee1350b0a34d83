"""Step times: decodes by batch and context, prefill by chunk and prefix, both in one step, compressions beside them."""

import time
from collections.abc import Sequence
from math import exp
from statistics import NormalDist
from typing import Any

import numpy as np

from engine.calibrate_grid import Chunks
from engine.calibrate_stage import GREEDY, Stage, Steps, spread
from engine.errors import EngineError
from engine.sampling_params import SamplingParams

SIGMA = 0.6  # of the lognormal lengths of a batch
EVEN = 0.2
WARM = 4  # steps before the first that counts: the batch has settled and its graph is bound
Cell = dict[str, Any]


class CellError(EngineError):
    """A cell that cannot be measured here, with the reason."""


def contexts(mean_blocks: int, batch: int, block_size: int, sigma: float = SIGMA) -> list[int]:
    """Tokens of each of a batch, whole blocks: the quantiles of a lognormal distribution of that mean, longest first.

    Outputs of reasoning models are spread like that, and a batch of equal contexts would be read faster than theirs.
    """
    if batch == 1:
        return [mean_blocks * block_size]
    normal = NormalDist()
    shares = [exp(sigma * normal.inv_cdf((place + 0.5) / batch)) for place in reversed(range(batch))]
    scale = batch / sum(shares)
    return [max(round(mean_blocks * scale * share), 1) * block_size for share in shares]


def check_room(stage: Stage, lengths: Sequence[int], output_tokens: int) -> None:
    """Raise CellError where requests of these prompts and outputs do not run together on this stage."""
    size, limits = stage.block_size, stage.engine.limits
    blocks = sum(-(-(length + output_tokens) // size) for length in lengths)
    if blocks > limits.num_blocks:
        raise CellError(f"{blocks:,} blocks are needed, the pool has {limits.num_blocks:,}")
    if len(lengths) > limits.max_running:
        raise CellError(f"{len(lengths)} requests are more than max_running {limits.max_running}")
    if max(lengths) + output_tokens > limits.max_model_len:
        raise CellError(f"{max(lengths) + output_tokens:,} tokens are more than max_model_len {limits.max_model_len:,}")


def start_decodes(stage: Stage, lengths: Sequence[int], output_tokens: int, params: SamplingParams = GREEDY) -> None:
    """Requests of these cached lengths, each on a line of its own, stepped until all of them decode."""
    check_room(stage, lengths, output_tokens)
    for number, length in enumerate(lengths):
        stage.submit(stage.line(number, length + 1), output_tokens, params)
    decoding = stage.engine.scheduler.state.decoding
    before = decoding.num_requests
    while decoding.num_requests < before + len(lengths):
        stage.step()
        if not stage.engine.scheduler.state.requests:
            raise CellError("some ended before all decoded")


def prefill_steps(stage: Stage, lengths: Sequence[int]) -> int:
    """Steps that these prompts may take at most; outputs must outlast them."""
    return -(-sum(lengths) // max(stage.engine.limits.max_batched_tokens - len(lengths), 1)) + len(lengths) // 8 + 4


def decode_cell(
    stage: Stage, batch: int, mean_blocks: int, repeats: int, steps: int, params: SamplingParams = GREEDY
) -> Cell:
    """A batch that only decodes; a repeat is the mean of `steps` steps in a row."""
    lengths = contexts(mean_blocks, batch, stage.block_size)
    start_decodes(stage, lengths, prefill_steps(stage, lengths) + WARM + repeats * steps + 4, params)
    stage.step(WARM + 1)
    stage.take()
    stage.step(1 + repeats * steps)
    found = stage.take()
    stage.empty()
    at = np.flatnonzero(found.where(decodes=batch, prefills=0))
    if len(at) < repeats * steps:
        raise CellError(f"only {len(at)} of {repeats * steps} steps held the whole batch")
    at = at[: repeats * steps]
    return _cell("decode", found, at, found.seconds[at].reshape(repeats, steps).mean(axis=1), 0.0)


def prefill_cell(stage: Stage, chunks: Chunks, repeats: int) -> Cell:
    """Prefill chunks alone, a step a repeat, back to back."""
    check_chunks(stage, chunks)
    _cache_prefixes(stage, chunks)
    for _ in range(repeats + 1):
        _submit(stage, _prompts(stage, chunks))
        stage.step()
    found = stage.take()
    return _chunk_cell(stage, "prefill", chunks, 0, found)


def rested_cell(stage: Stage, chunks: Chunks, repeats: int) -> Cell:
    """Prefill chunks alone, each step begun on a device at rest: from the request's submission to its token."""
    check_chunks(stage, chunks)
    _cache_prefixes(stage, chunks)
    seconds = []
    for _ in range(repeats + 1):
        stage.pause()
        prompts = _prompts(stage, chunks)
        began = time.perf_counter()
        _submit(stage, prompts)
        stage.step()
        stage.pause()
        seconds.append(time.perf_counter() - began)
    count = chunks.tokens(stage.block_size)
    found = stage.take()
    at = np.flatnonzero((found.counts["prefills"] == chunks.number) & (found.counts["decodes"] == 0))
    if len(at) != repeats + 1 or not (found.counts["prefill_tokens"] == chunks.number * count).all():
        raise CellError("no step held exactly these chunks: their prefixes were not found in the cache")
    return _cell("prefill", found, at[1:], np.array(seconds[1:]), 0.0)


def mixed_cells(stage: Stage, batch: int, mean_blocks: int, grid: Sequence[Chunks], repeats: int) -> list[Cell | str]:
    """Each of the chunks beside a decoding batch, with a step of decodes alone in between; or why it is not there."""
    lengths = contexts(mean_blocks, batch, stage.block_size)
    found: list[Cell | str] = []
    for chunks in grid:
        try:
            check_chunks(stage, chunks, batch)
            _cache_prefixes(stage, chunks)
            start_decodes(stage, lengths, prefill_steps(stage, lengths) + WARM + 2 * repeats + 6)
            stage.step(WARM)
            stage.take()
            stage.step()
            for _ in range(repeats + 1):
                _submit(stage, _prompts(stage, chunks))
                stage.step(2)
            found.append(_chunk_cell(stage, "mixed", chunks, batch, stage.take()))
        except CellError as error:
            found.append(str(error))
        stage.empty()
    return found


def check_chunks(stage: Stage, chunks: Chunks, batch: int = 0) -> None:
    """Raise CellError where the chunks do not fit a step beside that batch."""
    tokens, limits = chunks.number * chunks.tokens(stage.block_size), stage.engine.limits
    if tokens + batch > limits.max_batched_tokens:
        raise CellError(f"{tokens + batch:,} tokens are more than a step's {limits.max_batched_tokens:,}")
    if chunks.number + batch > limits.max_running:
        raise CellError(f"{chunks.number + batch} requests are more than max_running {limits.max_running}")
    check_room(stage, [chunks.prefix_blocks * stage.block_size + chunks.tokens(stage.block_size)] * chunks.number, 1)


def beside_cell(
    stage: Stage, batch: int, num_compressed: int, mean_blocks: int, budget_blocks: int, repeats: int
) -> Cell:
    """A batch decodes while others are compressed from `budget_blocks + 1` full blocks to `budget_blocks`.

    `seconds` is of two steps: the one that starts the compressions, and the next, which waits for them and in which
    all decode; `after` is a step of all of them, later.
    """
    full = (budget_blocks + 1) * stage.block_size
    lengths = contexts(mean_blocks, batch, stage.block_size, EVEN)
    both: list[float] = []
    after: list[float] = []
    with_batch = with_all = 0
    for _ in range(repeats):
        found = _compress_beside(stage, lengths, full, num_compressed)
        at = np.flatnonzero(found.where(compressions=num_compressed, decodes=batch, prefills=0))
        everyone = found.where(compressions=0, decodes=batch + num_compressed, prefills=0)
        if len(at) != 1 or len(everyone) < at[0] + WARM or not everyone[at[0] + 1 : at[0] + WARM].all():
            raise CellError(f"{num_compressed} compressions did not start together beside {batch} decodes")
        both.append(float(found.seconds[at[0]] + found.seconds[at[0] + 1]))
        after += found.seconds[at[0] + 2 : at[0] + WARM].tolist()
        with_batch = int(found.counts["context_tokens"][at[0]])
        with_all = int(found.counts["context_tokens"][at[0] + 2])
    return {
        "decodes": batch,
        "context_tokens": with_batch,
        "sequences": num_compressed,
        "source_tokens": full,
        "kept_tokens": budget_blocks * stage.block_size,
        "after_context_tokens": with_all,
        "seconds": spread(both),
        "after": spread(after),
    }


def _compress_beside(stage: Stage, lengths: Sequence[int], full: int, num_compressed: int) -> Steps:
    """Let decodes run and others fill their blocks in the same step, whichever step computed their prompts."""
    room = (stage.engine.limits.max_batched_tokens - len(lengths) - num_compressed) // full
    if room < 1:
        raise CellError(f"a step's {stage.engine.limits.max_batched_tokens:,} tokens do not hold a prompt of {full:,}")
    groups = [min(room, num_compressed - first) for first in range(0, num_compressed, room)]
    longest = prefill_steps(stage, lengths) + len(groups) + 3 * WARM + 4
    if max(lengths) + longest >= full:
        raise CellError(f"contexts of {max(lengths)} tokens would come to the budget of {full} themselves")
    if num_compressed > stage.engine.scheduler.state.slots.num_slots:
        raise CellError(f"{num_compressed} query slots are needed, not {stage.engine.scheduler.state.slots.num_slots}")
    check_room(stage, [*lengths, *[full] * num_compressed], longest)
    start_decodes(stage, lengths, longest)
    for place, count in enumerate(groups):
        for _ in range(count):
            stage.submit(stage.fresh(full - WARM - (len(groups) - 1 - place)), 3 * WARM + len(groups))
        stage.step()
    stage.step(2 * WARM + 2)
    found = stage.take()
    stage.empty()
    return found


def _cache_prefixes(stage: Stage, chunks: Chunks) -> None:
    """Let the prefixes that the chunks stand behind be in the cache."""
    if chunks.prefix_blocks:
        check_room(stage, [chunks.prefix_blocks * stage.block_size + 1] * chunks.number, 1)
        for number in range(chunks.number):
            stage.submit(stage.line(number, chunks.prefix_blocks * stage.block_size + 1), 1)
        stage.play()
        stage.take()


def _prompts(stage: Stage, chunks: Chunks) -> list[list[int]]:
    """One prompt a chunk: a cached beginning, then tokens nobody has seen."""
    prefixes = [stage.line(number, chunks.prefix_blocks * stage.block_size) for number in range(chunks.number)]
    return [prefix + stage.fresh(chunks.tokens(stage.block_size)) for prefix in prefixes]


def _submit(stage: Stage, prompts: Sequence[Sequence[int]]) -> None:
    for prompt in prompts:
        stage.submit(prompt, 1)


def _chunk_cell(stage: Stage, part: str, chunks: Chunks, batch: int, found: Steps) -> Cell:
    count = chunks.tokens(stage.block_size)
    pairs = chunks.prefix_blocks * stage.block_size * count + count * (count + 1) // 2
    wanted = {"prefill_tokens": chunks.number * count, "prefill_pairs": chunks.number * pairs}
    at = np.flatnonzero(found.where(prefills=chunks.number, decodes=batch, **wanted))
    if not len(at):
        raise CellError("no step held exactly these chunks: their prefixes were not found in the cache")
    before_s = float(np.nanmedian(found.seconds[at - 1])) if stage.plans_ahead else 0.0
    return _cell(part, found, at, found.seconds[at], before_s)


def _cell(part: str, found: Steps, at: Any, seconds: Any, before_s: float) -> Cell:
    """One row of the measurements: the counts of the middle one of these steps, and the repeats' times.

    `before_s`: what the step before took, while which a step with chunks was launched.
    """
    middle = at[len(at) // 2]
    names = ("decodes", "context_tokens", "prefills", "prefill_tokens", "prefill_pairs")
    counts = {name: int(found.counts[name][middle]) for name in names}
    return {"part": part, **counts, "before_s": before_s, "seconds": spread(seconds)}

"""Calibration: measured step times of the device at hand, from which a simulator's cost model is
fitted.

The measured cells are sizes in blocks, so one grid serves every block size:

    decode steps        by batch and mean context        compressions   alone, and beside decodes
    prefill steps       by chunk and cached prefix       swaps          to the host and back
    mixed steps         chunks beside a decoding batch   host time      of the smallest model

An engine is driven step by step (`MeasuredEngine`), so that each step has exactly the sizes of a
cell. Nothing is fitted here. The result is a JSON object of the format `zlab-measurements/1`
(docs/COST.md), from which `zlab.sim.fitting` fits a profile.
"""

import gc
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import exp
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zlab.engine.engine import Engine, EngineSettings, find_device, find_dtype
from zlab.engine.errors import EngineError
from zlab.engine.model.loader import DUMMY, LoadedModel, default_dtype, load_model
from zlab.engine.offload import HostSwap
from zlab.engine.sampling_params import SamplingParams
from zlab.policies.core.block_pool import PromptContent
from zlab.policies.core.plan import CompressionTask
from zlab.policies.core.request import Request
from zlab.policies.spec import load_policy
from zlab.traces.recording import package_versions
from zlab.traces.schema import Status
from zlab.traces.workload import TraceRequest

SIXTEENTH = 16  # chunk sizes are counted in sixteenths of a block


@dataclass(frozen=True)
class Chunks:
    """`number` prefill chunks of `sixteenths / 16` blocks each, after `prefix_blocks` cached blocks
    each.
    """

    number: int
    sixteenths: int
    prefix_blocks: int = 0

    def tokens(self, block_size: int) -> int:
        """Return the tokens of one chunk."""
        return max(self.sixteenths * block_size // SIXTEENTH, 1)


@dataclass(frozen=True)
class Grid:
    """The sizes that are measured. A cell that does not fit the pool or the limits is skipped and
    reported.

    Attributes:
        batches: numbers of decoding requests.
        contexts: blocks of mean context; contexts are uneven, as output lengths are.
        prefills: steps of prefill chunks alone, back to back.
        rested: the same, each begun on an idle device.
        mixed_batches: decoding requests beside prefill chunks.
        mixed_context: their blocks of mean context.
        mixed: the chunks beside them.
        beside: decoding requests beside compressions.
        beside_batches: requests that are compressed at once beside them.
        sources: blocks of a request that is compressed.
        compressed: requests that are compressed at once.
        swapped: blocks of a swapped request.
        sampled: rows that are sampled and do not take the most probable token.
        hosted: requests in a step of the smallest model.
        budget_blocks: blocks that a compression keeps.
        repeats: repeats of each cell.
        steps: steps of one repeat of a decode cell.
    """

    batches: tuple[int, ...] = (
        1,
        3,
        8,
        12,
        20,
        32,
        44,
        60,
        70,
        90,
        110,
        128,
        150,
        176,
        208,
        240,
        256,
    )
    contexts: tuple[int, ...] = (2, 8, 24)
    prefills: tuple[Chunks, ...] = (
        *(Chunks(1, sixteenths) for sixteenths in (1, 4, 16, 64, 128, 256, 512, 1008)),
        *(Chunks(1, sixteenths, 8) for sixteenths in (4, 16, 64, 256)),
        *(Chunks(1, sixteenths, 32) for sixteenths in (4, 16, 64, 256)),
        Chunks(2, 480),
        Chunks(4, 64),
        Chunks(4, 64, 8),
        Chunks(8, 120),
        Chunks(16, 16),
        Chunks(16, 16, 4),
        Chunks(32, 4),
    )
    rested: tuple[Chunks, ...] = (
        Chunks(1, 1),
        Chunks(1, 4),
        Chunks(1, 8),
        Chunks(1, 16),
        Chunks(1, 32),
        Chunks(2, 8),
    )
    mixed_batches: tuple[int, ...] = (12, 60, 176)
    mixed_context: int = 8
    mixed: tuple[Chunks, ...] = (
        Chunks(1, 4),
        Chunks(1, 16),
        Chunks(1, 64),
        Chunks(1, 128),
        Chunks(1, 512),
        Chunks(1, 16, 16),
        Chunks(1, 64, 32),
        Chunks(4, 16),
        Chunks(4, 64, 4),
    )
    beside: tuple[int, ...] = (8, 48, 128)
    beside_batches: tuple[int, ...] = (1, 4, 16)
    sources: tuple[int, ...] = (5, 9, 17, 33)
    compressed: tuple[int, ...] = (1, 2, 4, 16)
    swapped: tuple[int, ...] = (1, 4, 16, 48)
    sampled: tuple[int, ...] = (8, 60, 176)
    hosted: tuple[int, ...] = (1, 32, 128, 256)
    budget_blocks: int = 8
    repeats: int = 5
    steps: int = 6


FULL = Grid()
QUICK = replace(
    FULL,
    batches=(1, 4, 8, 20, 60, 128, 256),
    contexts=(2, 8),
    prefills=(
        Chunks(1, 4),
        Chunks(1, 16),
        Chunks(1, 64),
        Chunks(1, 256),
        Chunks(1, 32, 8),
        Chunks(1, 64, 16),
        Chunks(4, 16),
        Chunks(4, 16, 4),
    ),
    rested=(Chunks(1, 1), Chunks(1, 8), Chunks(1, 32)),
    mixed_batches=(4, 60),
    mixed=(Chunks(1, 4), Chunks(1, 64), Chunks(1, 128), Chunks(1, 32, 8), Chunks(4, 16)),
    beside=(4, 48),
    beside_batches=(1, 4),
    sources=(5, 9, 17),
    compressed=(1, 4),
    swapped=(1, 4, 16),
    sampled=(8,),
    hosted=(1, 32),
    budget_blocks=4,
    repeats=3,
    steps=4,
)


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
COUNTS = (
    "decodes",
    "context_tokens",
    "prefills",
    "prefill_tokens",
    "prefill_pairs",
    "compressions",
)


@dataclass(frozen=True)
class MeasuredSteps:
    """Consecutive steps. `seconds[i]` runs from the end of step i - 1 to the end of step i. It is
    NaN for a first step and for a step after a pause.
    """

    seconds: npt.NDArray[np.float64]
    counts: dict[str, npt.NDArray[np.int64]]  # by the names in COUNTS

    def where(self, **wanted: int) -> npt.NDArray[np.bool_]:
        """Return the steps that have these counts and a known time."""
        found = ~np.isnan(self.seconds)
        for name, value in wanted.items():
            found &= self.counts[name] == value
        return found


class MeasuredEngine:
    """One engine with its prompts and its steps. Every submitted request has a forced length, so
    only lengths decide what happens.

    Two prompts of one line (`line`) share their beginning, which the prefix cache then finds.
    """

    def __init__(self, settings: EngineSettings, loaded: LoadedModel, seed: int = 0) -> None:
        """Build the engine. On a CPU a step has run once it is launched, so each step is settled
        before the next is planned.
        """
        self.plans_ahead = settings.device != "cpu"
        self.engine = Engine.create(replace(settings, overlap=self.plans_ahead), loaded)
        self.block_size = self.engine.limits.block_size
        self.longest = self.engine.limits.max_model_len
        self._vocab_size = loaded.config.vocab_size
        self._seed = seed
        self._lines: dict[int, list[int]] = {}
        self._next = 0
        self._num_fresh = 0
        self._paused = True
        self._after_pause: list[int] = []  # steps whose time would include the pause before them

    def line(self, number: int, num_tokens: int) -> list[int]:
        """Return the first tokens of a line; they are the same every time."""
        known = self._lines.setdefault(number, [])
        while len(known) < num_tokens:
            generator = torch.Generator().manual_seed(self._seed + 1_000_003 * number + len(known))
            known += torch.randint(0, self._vocab_size, (8192,), generator=generator).tolist()
        return known[:num_tokens]

    def fresh(self, num_tokens: int) -> list[int]:
        """Return tokens that no earlier prompt has."""
        self._num_fresh += 1
        generator = torch.Generator().manual_seed(self._seed + 500_009 * self._num_fresh)
        found: list[int] = torch.randint(
            0, self._vocab_size, (num_tokens,), generator=generator
        ).tolist()
        return found

    def submit(
        self, prompt_ids: Sequence[int], output_tokens: int, params: SamplingParams = GREEDY
    ) -> str:
        """Submit a request for the next step and return its id. Raises EngineError where it can
        never be served.
        """
        id = str(self._next)
        self._next += 1
        asked = TraceRequest(
            id=id,
            prompt_tokens=len(prompt_ids),
            output_tokens=output_tokens,
            max_tokens=output_tokens,
            prompt_ids=tuple(prompt_ids),
        )
        request = self.engine.submit(asked, prompt_ids, params, with_text=False).request
        assert request.status is not Status.REFUSED, request.message
        return id

    def step(self, times: int = 1) -> None:
        """Run so many steps, or fewer where nothing is left to do."""
        for _ in range(times):
            if self._paused:
                self._after_pause.append(self.engine.scheduler.next_step)
                self._paused = False
            if not self.engine.step():
                self._paused = True
                return

    def empty(self, *ids: str) -> None:
        """Abort these requests (by default all live ones) and settle the steps in flight."""
        for id in ids or [request.id for request in self.engine.scheduler.live()]:
            self.engine.abort(id)
        self.pause()

    def pause(self) -> None:
        """Wait until the device is idle."""
        self.engine.drain()
        self._paused = True

    def play(self) -> None:
        """Run steps until nothing is left to do."""
        while self.engine.scheduler.stats().num_requests:
            self.step()

    def take(self) -> MeasuredSteps:
        """Wait until the device is idle and return all steps since the last call."""
        self.pause()
        self.engine.take_ended()
        columns: dict[str, Any] | None = self.engine.steps.take()
        if columns is None:
            return MeasuredSteps(
                np.empty(0), {name: np.empty(0, dtype=np.int64) for name in COUNTS}
            )
        ends = np.asarray(columns["end_s"], dtype=np.float64)
        seconds = np.diff(ends, prepend=np.nan)
        seconds[np.isin(columns["step"], self._after_pause)] = np.nan
        self._after_pause.clear()
        return MeasuredSteps(
            seconds, {name: np.asarray(columns[name], dtype=np.int64) for name in COUNTS}
        )


def spread(seconds: Sequence[float] | npt.NDArray[np.float64]) -> dict[str, float]:
    """Return repeats of one measurement as their median, their spread and their number."""
    low, median, high = np.percentile(np.asarray(seconds, dtype=np.float64), (10, 50, 90))
    return {"median": float(median), "low": float(low), "high": float(high), "count": len(seconds)}


def free_memory() -> None:
    """Free the cache of the last engine before the next is made. Its parts refer to one another, so
    a collection is needed.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Deadline:
    """A time after which no new cell begins."""

    def __init__(self, seconds: float) -> None:
        self._began = time.perf_counter()
        self._limit_s = seconds

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    @property
    def over(self) -> bool:
        """Whether the time has passed."""
        return self.seconds > self._limit_s


SIGMA = 0.6  # of the lognormal lengths of a batch
EVEN = 0.2
WARM = 4  # steps before the first that counts; by then the batch has settled and its graph is bound
Cell = dict[str, Any]


class CellError(EngineError):
    """A cell cannot be measured on this device; the message has the reason."""


def contexts(mean_blocks: int, batch: int, block_size: int, sigma: float = SIGMA) -> list[int]:
    """Return the context tokens of each request of a batch, in whole blocks and descending: the
    quantiles of a lognormal distribution with that mean.

    Outputs of reasoning models have such lengths. A batch of equal contexts would be read faster.
    """
    if batch == 1:
        return [mean_blocks * block_size]
    normal = NormalDist()
    shares = [
        exp(sigma * normal.inv_cdf((place + 0.5) / batch)) for place in reversed(range(batch))
    ]
    scale = batch / sum(shares)
    return [max(round(mean_blocks * scale * share), 1) * block_size for share in shares]


def check_room(stage: MeasuredEngine, lengths: Sequence[int], output_tokens: int) -> None:
    """Raise CellError where requests of these lengths do not run together on this stage."""
    size, limits = stage.block_size, stage.engine.limits
    blocks = sum(-(-(length + output_tokens) // size) for length in lengths)
    if blocks > limits.num_blocks:
        raise CellError(f"{blocks:,} blocks are needed, the pool has {limits.num_blocks:,}")
    if len(lengths) > limits.max_running:
        raise CellError(f"{len(lengths)} requests are more than max_running {limits.max_running}")
    if max(lengths) + output_tokens > limits.max_model_len:
        raise CellError(
            f"{max(lengths) + output_tokens:,} tokens are more than max_model_len "
            f"{limits.max_model_len:,}"
        )


def start_decodes(
    stage: MeasuredEngine,
    lengths: Sequence[int],
    output_tokens: int,
    params: SamplingParams = GREEDY,
) -> None:
    """Submit requests of these cached lengths, each on a line of its own, and step until all of
    them decode.
    """
    check_room(stage, lengths, output_tokens)
    for number, length in enumerate(lengths):
        stage.submit(stage.line(number, length + 1), output_tokens, params)
    scheduler = stage.engine.scheduler
    before = scheduler.stats().num_decoding
    while scheduler.stats().num_decoding < before + len(lengths):
        stage.step()
        if not stage.engine.scheduler.stats().num_requests:
            raise CellError("some ended before all decoded")


def prefill_steps(stage: MeasuredEngine, lengths: Sequence[int]) -> int:
    """Return the most steps that these prompts may take; outputs must be longer."""
    return (
        -(-sum(lengths) // max(stage.engine.limits.max_batched_tokens - len(lengths), 1))
        + len(lengths) // 8
        + 4
    )


def decode_cell(
    stage: MeasuredEngine,
    batch: int,
    mean_blocks: int,
    repeats: int,
    steps: int,
    params: SamplingParams = GREEDY,
) -> Cell:
    """Measure a batch that only decodes. One repeat is the mean of `steps` consecutive steps."""
    lengths = contexts(mean_blocks, batch, stage.block_size)
    start_decodes(
        stage, lengths, prefill_steps(stage, lengths) + WARM + repeats * steps + 4, params
    )
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


def prefill_cell(stage: MeasuredEngine, chunks: Chunks, repeats: int) -> Cell:
    """Measure prefill chunks alone, back to back; one step is one repeat."""
    check_chunks(stage, chunks)
    _cache_prefixes(stage, chunks)
    for _ in range(repeats + 1):
        _submit(stage, _prompts(stage, chunks))
        stage.step()
    found = stage.take()
    return _chunk_cell(stage, "prefill", chunks, 0, found)


def rested_cell(stage: MeasuredEngine, chunks: Chunks, repeats: int) -> Cell:
    """Measure prefill chunks alone, each step begun on an idle device, from the submission of the
    request to its token.
    """
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
    at = np.flatnonzero(
        (found.counts["prefills"] == chunks.number) & (found.counts["decodes"] == 0)
    )
    if (
        len(at) != repeats + 1
        or not (found.counts["prefill_tokens"] == chunks.number * count).all()
    ):
        raise CellError(
            "no step held exactly these chunks: their prefixes were not found in the cache"
        )
    return _cell("prefill", found, at[1:], np.array(seconds[1:]), 0.0)


def mixed_cells(
    stage: MeasuredEngine, batch: int, mean_blocks: int, grid: Sequence[Chunks], repeats: int
) -> list[Cell | str]:
    """Yield a cell for each of the chunks beside a decoding batch, with a decode-only step in
    between, or the reason why it is missing.
    """
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


def check_chunks(stage: MeasuredEngine, chunks: Chunks, batch: int = 0) -> None:
    """Raise CellError where the chunks do not fit into a step beside that batch."""
    tokens, limits = chunks.number * chunks.tokens(stage.block_size), stage.engine.limits
    if tokens + batch > limits.max_batched_tokens:
        raise CellError(
            f"{tokens + batch:,} tokens are more than a step's {limits.max_batched_tokens:,}"
        )
    if chunks.number + batch > limits.max_running:
        raise CellError(
            f"{chunks.number + batch} requests are more than max_running {limits.max_running}"
        )
    check_room(
        stage,
        [chunks.prefix_blocks * stage.block_size + chunks.tokens(stage.block_size)] * chunks.number,
        1,
    )


def beside_cell(
    stage: MeasuredEngine,
    batch: int,
    num_compressed: int,
    mean_blocks: int,
    budget_blocks: int,
    repeats: int,
) -> Cell:
    """Measure a batch that decodes while other requests are compressed from `budget_blocks + 1`
    full blocks to `budget_blocks`.

    `seconds` covers two steps: the one that starts the compressions, and the next, which waits for
    them and in which all requests decode. `after` is a later step in which all decode.
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
        if (
            len(at) != 1
            or len(everyone) < at[0] + WARM
            or not everyone[at[0] + 1 : at[0] + WARM].all()
        ):
            raise CellError(
                f"{num_compressed} compressions did not start together beside {batch} decodes"
            )
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


def _compress_beside(
    stage: MeasuredEngine, lengths: Sequence[int], full: int, num_compressed: int
) -> MeasuredSteps:
    """Step until the decodes run and the other requests fill their blocks in the same step,
    whenever their prompts were computed.
    """
    room = (stage.engine.limits.max_batched_tokens - len(lengths) - num_compressed) // full
    if room < 1:
        raise CellError(
            f"a step's {stage.engine.limits.max_batched_tokens:,} tokens do not hold a prompt of "
            f"{full:,}"
        )
    groups = [min(room, num_compressed - first) for first in range(0, num_compressed, room)]
    longest = prefill_steps(stage, lengths) + len(groups) + 3 * WARM + 4
    if max(lengths) + longest >= full:
        raise CellError(
            f"contexts of {max(lengths)} tokens would come to the budget of {full} themselves"
        )
    if num_compressed > stage.engine.scheduler.stats().num_slots:
        raise CellError(
            f"{num_compressed} query slots are needed, not "
            f"{stage.engine.scheduler.stats().num_slots}"
        )
    check_room(stage, [*lengths, *[full] * num_compressed], longest)
    start_decodes(stage, lengths, longest)
    for place, count in enumerate(groups):
        for _ in range(count):
            stage.submit(
                stage.fresh(full - WARM - (len(groups) - 1 - place)), 3 * WARM + len(groups)
            )
        stage.step()
    stage.step(2 * WARM + 2)
    found = stage.take()
    stage.empty()
    return found


def _cache_prefixes(stage: MeasuredEngine, chunks: Chunks) -> None:
    """Bring the prefixes of the chunks into the prefix cache."""
    if chunks.prefix_blocks:
        check_room(stage, [chunks.prefix_blocks * stage.block_size + 1] * chunks.number, 1)
        for number in range(chunks.number):
            stage.submit(stage.line(number, chunks.prefix_blocks * stage.block_size + 1), 1)
        stage.play()
        stage.take()


def _prompts(stage: MeasuredEngine, chunks: Chunks) -> list[list[int]]:
    """Return one prompt for each chunk: a cached beginning, then fresh tokens."""
    prefixes = [
        stage.line(number, chunks.prefix_blocks * stage.block_size)
        for number in range(chunks.number)
    ]
    return [prefix + stage.fresh(chunks.tokens(stage.block_size)) for prefix in prefixes]


def _submit(stage: MeasuredEngine, prompts: Sequence[Sequence[int]]) -> None:
    for prompt in prompts:
        stage.submit(prompt, 1)


def _chunk_cell(
    stage: MeasuredEngine, part: str, chunks: Chunks, batch: int, found: MeasuredSteps
) -> Cell:
    count = chunks.tokens(stage.block_size)
    pairs = chunks.prefix_blocks * stage.block_size * count + count * (count + 1) // 2
    wanted = {"prefill_tokens": chunks.number * count, "prefill_pairs": chunks.number * pairs}
    at = np.flatnonzero(found.where(prefills=chunks.number, decodes=batch, **wanted))
    if not len(at):
        raise CellError(
            "no step held exactly these chunks: their prefixes were not found in the cache"
        )
    before_s = float(np.nanmedian(found.seconds[at - 1])) if stage.plans_ahead else 0.0
    return _cell(part, found, at, found.seconds[at], before_s)


def _cell(part: str, found: MeasuredSteps, at: Any, seconds: Any, before_s: float) -> Cell:
    """Return one row of the measurements: the counts of the middle one of these steps, and the
    times of the repeats.

    `before_s` is the time of the preceding step, during which a step with chunks was launched.
    """
    middle = at[len(at) // 2]
    names = ("decodes", "context_tokens", "prefills", "prefill_tokens", "prefill_pairs")
    counts = {name: int(found.counts[name][middle]) for name in names}
    return {"part": part, **counts, "before_s": before_s, "seconds": spread(seconds)}


def compression_cell(
    stage: MeasuredEngine, sequences: int, source_blocks: int, kept_blocks: int, repeats: int
) -> Cell:
    """Measure, in device time, compressions of full blocks of several requests and nothing else."""
    engine, size = stage.engine, stage.block_size
    if engine.compression is None:
        raise CellError("nothing is ever compressed under this policy")
    if sequences * source_blocks > engine.limits.num_blocks:
        raise CellError(
            f"{sequences * source_blocks} blocks are needed, the pool has "
            f"{engine.limits.num_blocks}"
        )
    if sequences > engine.scheduler.stats().num_slots:
        raise CellError(
            f"{sequences} query slots are needed, there are {engine.scheduler.stats().num_slots}"
        )
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
    """Return a compression of a request that was never submitted. The scheduler does not know it;
    the pool must be empty.
    """
    tokens = source_blocks * block_size
    request = Request(
        -1 - place,
        str(place),
        0,
        tokens,
        None,
        None,
        PromptContent(tokens, block_size, None, None, None),
    )
    request.slot = place
    sources = list(range(place * source_blocks, (place + 1) * source_blocks))
    targets = [*sources[:kept_blocks], sources[-1]]
    return CompressionTask(
        request, sources, targets, [], tokens, kept_blocks * block_size, first=False
    )


def swap_cells(stage: MeasuredEngine, num_blocks: int, repeats: int) -> list[Cell]:
    """Measure a swap of one request to the host and back, from the start of its copies to their
    end.
    """
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
    # The first swap touches the host's memory for the first time, so it is not measured.
    return [
        {"direction": way, "tokens": tokens, "seconds": spread(found[1:])}
        for way, found in seconds.items()
    ]


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


FORMAT = "zlab-measurements/1"
LEAST_BLOCK = 16  # tokens: a sixteenth of a block must be at least one token
STEP_BLOCKS = 64  # blocks that the largest step computes
CPU_BLOCKS = 1024
SMALLEST = f"{DUMMY}tiny"
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True, seed=1)
PACKAGES = ("zipage-lab", "torch", "triton", "numpy")
Note = Callable[[str], None]


@dataclass(frozen=True)
class CalibrationSettings:
    """What is measured, where, and how long it may take.

    Attributes:
        model, device, dtype, variant: as in `zlab.engine.engine.EngineSettings`.
        block_size: tokens of a block; at least 16.
        max_running: the largest batch.
        num_blocks: blocks of the pool; by default what fits on a GPU, and a few on a CPU.
        quick: measure fewer sizes with fewer repeats.
        limit_s: cells that have not begun after this time are skipped.
    """

    model: str
    device: str = EngineSettings.device
    dtype: torch.dtype | str | None = None
    variant: str | None = None
    block_size: int = 256
    max_running: int = 256
    num_blocks: int | None = None
    quick: bool = False
    limit_s: float = 270.0

    def __post_init__(self) -> None:
        """Raise EngineError for sizes that cannot be measured."""
        if self.block_size < LEAST_BLOCK or self.block_size % LEAST_BLOCK:
            raise EngineError(
                f"block_size must be a multiple of {LEAST_BLOCK} to be calibrated, got "
                f"{self.block_size}"
            )
        if self.max_running < 1:
            raise EngineError(f"max_running must be at least 1, got {self.max_running}")


def measure(
    settings: CalibrationSettings, loaded: LoadedModel | None = None, note: Note | None = None
) -> Cell:
    """Measure every cell of the grid. A cell that does not fit is skipped and named under
    `skipped`.

    Args:
        settings: what is measured, and where.
        loaded: a loaded model; by default it is loaded.
        note: called with a line of text for each part of the work.

    Returns:
        The measurements, as plain JSON.

    Raises:
        EngineError, ModelError, PolicyError: nothing can be measured.
    """
    find_device(settings.device)
    dtype = find_dtype(settings.dtype)
    loaded = loaded or load_model(
        settings.model, device=settings.device, dtype=dtype, variant=settings.variant
    )
    run = _Calibration(
        settings, loaded, QUICK if settings.quick else FULL, note or (lambda text: None)
    )
    for part in (run.steps, run.compressions, run.host):
        part()
    return run.document()


class _Calibration:
    """One calibration: the cells so far, and what was skipped."""

    def __init__(
        self, settings: CalibrationSettings, loaded: LoadedModel, grid: Grid, note: Note
    ) -> None:
        self._settings = settings
        self._loaded = loaded
        self._grid = grid
        self._note = note
        self._deadline = Deadline(settings.limit_s)
        self._cells: dict[str, list[Cell]] = {
            part: [] for part in ("steps", "compressions", "beside", "swaps", "sampling", "host")
        }
        self._skipped: list[dict[str, str]] = []
        self._stopped = ""  # why the engine of this stage cannot go on
        self._window = load_policy("hybrid").compression.window
        self._graph_tokens = 0

    def steps(self) -> None:
        """Measure steps and swaps of an engine that compresses nothing."""
        grid = self._grid
        with self._stage("full-kv") as stage:
            self._graph_tokens = stage.engine.runner.graph_tokens
            for blocks in grid.contexts:
                for batch in self._batches(grid.batches):
                    self._add(
                        "steps",
                        f"decode {batch} x {blocks}",
                        decode_cell,
                        stage,
                        batch,
                        blocks,
                        *self._times,
                    )
            for blocks in grid.swapped:
                self._add("swaps", f"swap {blocks} blocks", swap_cells, stage, blocks, grid.repeats)
            for batch in self._batches(
                grid.mixed_batches, max(chunks.number for chunks in grid.mixed)
            ):
                self._add("steps", f"prefill beside {batch} decodes", self._mixed, stage, batch)
            for chunks in grid.prefills:
                self._add(
                    "steps", _words("prefill", chunks), prefill_cell, stage, chunks, grid.repeats
                )
            for chunks in grid.rested:
                self._add(
                    "steps", _words("rested", chunks), rested_cell, stage, chunks, grid.repeats
                )
            for batch in self._batches(grid.sampled):
                self._add("sampling", f"draw {batch}", self._drawn, stage, batch)

    def compressions(self) -> None:
        """Measure compressions beside decodes, and alone."""
        grid = self._grid
        tokens = grid.budget_blocks * self._settings.block_size
        with self._stage(f"hybrid:budget.tokens={tokens}") as stage:
            for batch in self._batches(grid.beside, max(grid.beside_batches)):
                for count in grid.beside_batches:
                    cell = (stage, batch, count, 2, grid.budget_blocks, grid.repeats)
                    self._add("beside", f"{count} compressions beside {batch}", beside_cell, *cell)
            stage.engine.cache.k.normal_()
            stage.engine.cache.v.normal_()
            for blocks in grid.sources:
                for count in grid.compressed:
                    for kept in sorted({blocks - 1, max(blocks // 2, 1)}):
                        sizes = (stage, count, blocks, kept, grid.repeats)
                        self._add(
                            "compressions", f"compress {count} x {blocks}", compression_cell, *sizes
                        )

    def host(self) -> None:
        """Measure steps of the smallest model, whose time is nearly all the host's."""
        if find_device(self._settings.device).type == "cpu":
            return self._skip("host", "without a GPU the host is the device")
        try:
            smallest = load_model(SMALLEST, device=self._settings.device)
            with self._stage(
                "full-kv", smallest, num_blocks=4 * self._settings.max_running
            ) as stage:
                for batch in self._batches(self._grid.hosted):
                    self._add("host", f"host {batch}", decode_cell, stage, batch, 1, *self._times)
        except RuntimeError as error:  # no fit needs this part
            self._skip("host", f"{SMALLEST} does not run here: {error}")
        return None

    def document(self) -> Cell:
        """Return everything as plain JSON."""
        settings, config = self._settings, self._loaded.config
        device = find_device(settings.device)
        dtype = find_dtype(settings.dtype) or default_dtype(device)
        return {
            "format": FORMAT,
            "card": torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"CPU {platform.machine()}",
            "model": config.name,
            "shape": config.profile_shape,
            "dtype": str(dtype).removeprefix("torch."),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "versions": package_versions(PACKAGES),
            "block_size": settings.block_size,
            "window": self._window,
            "graph_tokens": self._graph_tokens,
            "settings": asdict(replace(settings, dtype=None)),
            "wall_s": self._deadline.seconds,
            **self._cells,
            "skipped": self._skipped,
        }

    # Parts of the measurement.

    @property
    def _times(self) -> tuple[int, int]:
        return self._grid.repeats, self._grid.steps

    def _batches(self, wanted: Sequence[int], others: int = 0) -> list[int]:
        """Return the batches of the grid that leave room for so many other requests, and the
        largest that does.
        """
        most = max(self._settings.max_running - others, 1)
        return sorted({min(batch, most) for batch in wanted})

    @contextmanager
    def _stage(
        self, policy: str, loaded: LoadedModel | None = None, num_blocks: int | None = None
    ) -> Iterator[MeasuredEngine]:
        given = self._settings
        free_memory()  # of the stage before
        self._note(f"{policy}: engine and graphs")
        self._stopped = ""
        chosen = EngineSettings(
            model=given.model,
            policy=policy,
            num_blocks=num_blocks
            or given.num_blocks
            or (CPU_BLOCKS if given.device == "cpu" else None),
            block_size=given.block_size,
            max_batched_tokens=STEP_BLOCKS * given.block_size,
            max_running=given.max_running,
            device=given.device,
            dtype=given.dtype,
        )
        yield MeasuredEngine(chosen, loaded or self._loaded)

    def _add(
        self,
        part: str,
        what: str,
        cell: Callable[..., Cell | list[Cell]],
        stage: MeasuredEngine,
        *sizes: Any,
    ) -> None:
        """Measure one cell, or note why it is skipped."""
        if self._stopped or self._deadline.over:
            return self._skip(
                what, self._stopped or f"the {self._settings.limit_s:.0f} s were over"
            )
        self._note(what)
        try:
            found = cell(stage, *sizes)
        except CellError as error:
            stage.empty()
            stage.take()
            return self._skip(what, str(error))
        except RuntimeError as error:  # for example out of memory: the cells so far are kept
            self._stopped = f"the engine stopped at {what}: {error}"
            return self._skip(what, self._stopped)
        self._cells[part] += found if isinstance(found, list) else [found]
        return None

    def _mixed(self, stage: MeasuredEngine, batch: int) -> list[Cell]:
        """Measure prefill chunks beside a batch, as far as they fit."""
        grid, measured = self._grid, []
        cells = mixed_cells(stage, batch, grid.mixed_context, grid.mixed, grid.repeats)
        for chunks, found in zip(grid.mixed, cells, strict=True):
            if isinstance(found, str):
                self._skip(_words(f"mixed beside {batch}", chunks), found)
            else:
                measured.append(found)
        return measured

    def _drawn(self, stage: MeasuredEngine, batch: int) -> Cell:
        """Measure the same decode steps with sampled tokens and with the most probable tokens."""
        drawn = decode_cell(stage, batch, 2, *self._times, DRAWN)
        plain = decode_cell(stage, batch, 2, *self._times)
        return {
            "rows": batch,
            "how": "temperature 0.8, top_p 0.95",
            "drawn": drawn["seconds"],
            "plain": plain["seconds"],
        }

    def _skip(self, what: str, reason: str) -> None:
        self._skipped.append({"what": what, "reason": reason})


def _words(part: str, chunks: Chunks) -> str:
    return f"{part} {chunks.number} x {chunks.sixteenths}/16 blocks behind {chunks.prefix_blocks}"

"""Compressions on a stream of their own, beside the decodes of everybody else; nothing ever waits on the host."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from engine.cache import PagedCache
from engine.compression_pipeline import compress, warm_up
from engine.errors import EngineError
from engine.kernels.batch import CompressionRequest
from engine.kernels.contract import Kernels
from engine.kernels.errors import KernelInputError
from engine.kernels.workspace import CompressionWorkspace
from engine.scorers import CompressionSettings, find_scorer
from policies.core.plan import CompressionTask
from policies.core.policy import Compression

MOST_TIMED = 4096  # pairs of events that wait to be read


@dataclass
class Started:
    """Compressions that were enqueued together; `event` (None without CUDA) fires when they are done."""

    numbers: list[int]
    event: torch.cuda.Event | None

    @property
    def done(self) -> bool:
        """Whether the device has finished them; asks, does not wait."""
        return self.event is None or self.event.query()


class CompressionStream:
    """A low-priority side stream. It starts after what has been enqueued so far; a later step waits where it joins.

    The scheduler keeps every block that a compression reads or writes from everybody else until it is joined.
    """

    def __init__(
        self,
        cache: PagedCache,
        kernels: Kernels,
        settings: CompressionSettings,
        workspace: CompressionWorkspace,
    ) -> None:
        """`workspace` is for the window that the cache has room for; `settings` are those to begin with."""
        self._cache = cache
        self._kernels = kernels
        self._whole_workspace = workspace
        self._histories: set[int] = set()  # requests whose tokens have the score history of their last compression
        self.follow(settings)
        self._stream = torch.cuda.Stream(priority=0) if cache.k.is_cuda else None
        self._running: list[Started] = []
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._work_s = 0.0
        self.inject_failure: str | None = None  # tests: the next compression fails with this message

    @property
    def settings(self) -> CompressionSettings:
        """How tokens are chosen now."""
        return self._settings

    def prepare(self, settings: CompressionSettings, budget_blocks: int) -> None:
        """Check the settings, and on CUDA compile what serving may meet under them; nothing has been served yet.

        `budget_blocks`: the fewest blocks a compression leaves. Raises EngineError when they cannot hold what is always
        kept.
        """
        check_settings(settings, self._cache.shape.block_size, budget_blocks)
        if not self._cache.k.is_cuda:
            return
        followed = self._settings
        self.follow(settings)
        cache, queries = self._cache, self._queries
        parts = (cache.k, cache.v, cache.history, queries, settings, self._workspace)
        warm_up(*parts, num_target_blocks=budget_blocks - 1, kernels=self._kernels)
        self.follow(followed)

    def follow(self, settings: CompressionSettings) -> None:
        """From now on compressions are by these settings; a slot's last queries are those of the window."""
        self._settings = settings
        self._queries = self._cache.window_queries[:, :, self._cache.shape.window - settings.window :]
        self._workspace = self._whole_workspace.for_window(settings.window)

    def forget(self, number: int) -> None:
        """The request has ended."""
        self._histories.discard(number)

    def start(self, tasks: Sequence[CompressionTask], inline: bool) -> dict[int, str]:
        """Enqueue compressions; `inline`: on the current stream. Returns what failed: request number -> message.

        A failure concerns those requests alone: their blocks come back through the scheduler.
        """
        requests = [
            CompressionRequest(
                block_table=tuple(task.sources),
                target_blocks=tuple(task.targets[:-1]),
                query_slot=task.request.slot,
                compressed_before=not task.first and (task.request.number in self._histories or not self._remembers),
                seed=task.request.number,
            )
            for task in tasks
        ]
        numbers = [task.request.number for task in tasks]
        try:
            if self.inject_failure is not None:
                message, self.inject_failure = self.inject_failure, None
                raise RuntimeError(message)
            if self._stream is None:
                started = time.perf_counter()
                self._compress(requests)
                self._work_s += time.perf_counter() - started
                self._running.append(Started(numbers, None))
            elif inline:
                if self._running:  # begun under another policy, on the side stream, in the same workspace
                    torch.cuda.current_stream().wait_stream(self._stream)
                self._timed_compress(requests)
                self._running.append(Started(numbers, None))
            else:
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    event = self._timed_compress(requests)
                self._running.append(Started(numbers, event))
        except (RuntimeError, ValueError) as error:
            # Part of it may have been launched: it is over, and its blocks are free, no sooner than that.
            over = self._stream.record_event() if self._stream is not None and not inline else None
            self._running.append(Started(numbers, over))
            return dict.fromkeys(numbers, f"compression failed: {error}")
        self._histories.difference_update(numbers)
        if self._remembers:
            self._histories.update(numbers)
        return {}

    @property
    def _remembers(self) -> bool:
        """Whether the scorer of now looks at a history; what another one has left of it is none."""
        return find_scorer(self._settings.scorer).keeps_history

    def join(self, numbers: Sequence[int]) -> None:
        """Let the current stream wait, on the device, for the compressions of these requests."""
        joined = set(numbers)
        for started in self._running:
            if joined.intersection(started.numbers) and started.event is not None:
                torch.cuda.current_stream().wait_event(started.event)
            started.numbers = [number for number in started.numbers if number not in joined]
        self._running = [started for started in self._running if started.numbers]

    def join_all_but(self, compressing: Collection[int]) -> None:
        """Join those that the scheduler no longer knows as compressing: joined ones, and those of ended requests.

        The blocks of the latter are handed on from this step, too.
        """
        gone = [number for number in self.running if number not in compressing]
        if gone:
            self.join(gone)

    @property
    def running(self) -> list[int]:
        """Requests whose compression has not been joined."""
        return [number for started in self._running for number in started.numbers]

    def work_seconds(self, wait: bool = True) -> float:
        """What all compressions took so far; waits for those under way, or leaves them out."""
        num_over = 0
        for begin, end in self._timed:
            if wait:
                end.synchronize()
            elif not end.query():
                break
            self._work_s += begin.elapsed_time(end) * 1e-3
            num_over += 1
        del self._timed[:num_over]
        return self._work_s

    def finished(self) -> list[int]:
        """Requests whose compression is done but not joined yet."""
        return [number for started in self._running if started.done for number in started.numbers]

    def _timed_compress(self, requests: list[CompressionRequest]) -> torch.cuda.Event:
        """Enqueue on the current stream between two events; returns the second."""
        if len(self._timed) >= MOST_TIMED:  # the older half is long over
            finished, self._timed = self._timed[: MOST_TIMED // 2], self._timed[MOST_TIMED // 2 :]
            finished[-1][1].synchronize()
            self._work_s += sum(begin.elapsed_time(end) for begin, end in finished) * 1e-3
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self._compress(requests)
        end.record()
        self._timed.append((begin, end))
        return end

    def _compress(self, requests: list[CompressionRequest]) -> None:
        cache = self._cache
        for batch in independent(requests):
            compress(
                cache.k,
                cache.v,
                cache.history,
                self._queries,
                batch,
                fitting(self._settings, batch, cache.shape.block_size),
                self._workspace,
                kernels=self._kernels,
            )


def fitting(settings: CompressionSettings, batch: Sequence[CompressionRequest], block_size: int) -> CompressionSettings:
    """The settings with as much of the sink as the smallest of the batch can keep beside its window.

    Less than the policy's budget is kept of a request whose slot had less set aside when the policy came.
    """
    room = min(len(request.target_blocks) for request in batch) * block_size - settings.window
    return settings if settings.sink <= room else replace(settings, sink=max(room, 0))


def check_settings(settings: CompressionSettings, block_size: int, budget_blocks: int) -> None:
    """Raise EngineError unless a budget of so many blocks, the empty one included, holds what is always kept."""
    try:
        settings.check_fits(block_size, budget_blocks - 1)
    except KernelInputError as error:
        raise EngineError(str(error)) from error


def settings_for(answer: Compression, longest_window: int, seed: int) -> CompressionSettings:
    """What a policy answers, as the scorers read it. Raises EngineError for an answer that none of them knows."""
    try:
        return CompressionSettings(
            scorer=answer.scorer,
            window=min(answer.window, longest_window),
            sink=answer.sink,
            attention_weight=answer.redundancy_lambda,
            temperature=answer.temperature,
            decay=answer.decay,
            pool_size=answer.pool_size,
            threshold=answer.threshold,
            seed=seed,
        )
    except KernelInputError as error:
        raise EngineError(str(error)) from error


def independent(requests: Sequence[CompressionRequest]) -> list[list[CompressionRequest]]:
    """The requests cut, in order, where one writes what an earlier one of its batch reads or writes.

    Joined at once (`blocking`), a compression may give up blocks that the next one of the same step takes.
    """
    batches: list[list[CompressionRequest]] = []
    used: set[int] = set()
    for request in requests:
        if not batches or not used.isdisjoint(request.target_blocks):
            batches.append([])
            used = set()
        batches[-1].append(request)
        used |= {*request.block_table, *request.target_blocks}
    return batches

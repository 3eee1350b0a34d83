"""Compressions on a stream of their own, beside the decodes of everybody else; nothing ever waits
on the host.

One compression from end to end: score the tokens, choose which to keep, move them.

Which tokens a compression keeps: one scorer of `zlab.engine.scorers`; the pipeline around it does
not change.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from zlab.engine.errors import EngineError, KernelInputError
from zlab.engine.kernels.backends import find_backend
from zlab.engine.kernels.interface import KernelBackend
from zlab.engine.kernels.workspace import (
    CompressionRequest,
    CompressionWorkspace,
    check_requests,
    lay_out,
)
from zlab.engine.kv_cache import KVCache
from zlab.engine.scorers.distinct import Distinct
from zlab.engine.scorers.gkv import GKV
from zlab.engine.scorers.h2o import H2O
from zlab.engine.scorers.interface import CompressionSettings as CompressionSettings  # noqa: PLC0414
from zlab.engine.scorers.interface import Scorer, ScoringInputs, load_own
from zlab.engine.scorers.keydiff import KeyDiff
from zlab.engine.scorers.knorm import Knorm
from zlab.engine.scorers.random import Random
from zlab.engine.scorers.recent import Recent
from zlab.engine.scorers.rkv import RKV
from zlab.engine.scorers.snapkv import SnapKV
from zlab.engine.scorers.streamingllm import StreamingLLM
from zlab.engine.scorers.tova import TOVA
from zlab.engine.scorers.triattention import TriAttention
from zlab.engine.scorers.zipage import Zipage
from zlab.policies.core.plan import CompressionTask
from zlab.policies.core.policy import Compression
from zlab.policies.scorers import OwnScorer, known_scorer, scorer_traits

# One file of `zlab.engine.scorers` each.
IMPLEMENTATIONS: Mapping[str, type[Scorer]] = {
    "attention": SnapKV,
    "attention+global": GKV,
    "attention+full-redundancy": RKV,
    "attention+global+lightning": Zipage,
    "recent": Recent,
    "random": Random,
    "distinct": Distinct,
    "h2o": H2O,
    "keydiff": KeyDiff,
    "knorm": Knorm,
    "streamingllm": StreamingLLM,
    "tova": TOVA,
    "triattention": TriAttention,
}
SCORERS: tuple[Scorer, ...] = tuple(
    make(name, scorer_traits(name)) for name, make in IMPLEMENTATIONS.items()
)
_BY_NAME = {scorer.name: scorer for scorer in SCORERS}


def find_scorer(name: str) -> Scorer:
    """Return the scorer of that name; one of the user's own is loaded from the text that was read.

    Raises KernelInputError with the nearest name and the choices, or with what is wrong in the
    user's class.
    """
    try:
        known = known_scorer(name)
    except ValueError as error:
        raise KernelInputError(str(error)) from error
    return load_own(known) if isinstance(known, OwnScorer) else _BY_NAME[known]


SELECTION_STEPS = (
    1024,
    4096,
)  # tokens up to which a selection is one compiled variant; see `triton_select`


def compress(
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    history: torch.Tensor,
    window_queries: torch.Tensor,
    requests: Sequence[CompressionRequest],
    settings: CompressionSettings,
    workspace: CompressionWorkspace,
    *,
    kernels: KernelBackend | None = None,
    rotation: torch.Tensor | None = None,
) -> None:
    """Fill every request's target blocks with the tokens it keeps, of K, V and score history, in
    all layers.

    `cache_k`, `cache_v [layers, blocks, b, H_kv, d]`, `history [layers, blocks, b, H_kv]` float32
    (not looked at for a scorer that keeps none), `window_queries [layers, slots, w, H_q, d]`.
    Blocks that are no target are only read. Everything is enqueued on the current stream, nothing
    is allocated on the device and nothing is waited for; a workspace serves one stream. Triton runs
    on CUDA and torch elsewhere unless `kernels` says otherwise. `rotation [positions, d]` are the
    cosines and sines by which the model has turned its keys; without it, scorers take keys as they
    are. Raises `KernelInputError` before anything is enqueued. A scorer that is written in plain
    torch does allocate.
    """
    check_caches(cache_k, cache_v, history, window_queries, settings, workspace)
    scorer = find_scorer(settings.scorer)
    num_slots = window_queries.shape[1] if scorer.traits.needs_queries else None
    check_requests(requests, num_blocks=cache_k.shape[1], num_slots=num_slots)
    block_size = cache_k.shape[2]
    for request in requests:
        settings.check_fits(block_size, len(request.target_blocks))
    chosen = kernels if kernels is not None else find_backend(cache_k.device)
    kept = history if scorer.traits.keeps_history else None

    def latest_kept(request: CompressionRequest) -> int:
        return settings.latest_kept(len(request.target_blocks) * block_size)

    for latest, alike in groupby(requests, latest_kept):
        for launch in workspace.slices(list(alike)):
            batch = lay_out(launch, block_size, workspace.batch_storage)
            scratch = workspace.scratch(batch.num_requests, batch.max_blocks, batch.max_targets)
            inputs = ScoringInputs(
                cache_k, cache_v, window_queries, history, batch, scratch, settings, rotation
            )
            scorer.score(inputs, chosen)
            chosen.select(batch, scratch, window=latest, sink=settings.sink)
            chosen.compact(cache_k, cache_v, kept, batch, scratch)


def warm_up(
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    history: torch.Tensor,
    window_queries: torch.Tensor,
    settings: CompressionSettings,
    workspace: CompressionWorkspace,
    *,
    num_target_blocks: int,
    kernels: KernelBackend | None = None,
    rotation: torch.Tensor | None = None,
) -> None:
    """Compile every variant that serving can meet, so that none is compiled later; overwrites the
    cache's first blocks.

    Sizes that change from call to call are no compile-time constants but for one: how a selection
    holds its tokens. A request of each of the lengths it distinguishes, as far as workspace and
    cache allow such a length, covers that.
    """
    block_size = cache_k.shape[2]
    most = min(workspace.capacity_blocks, cache_k.shape[1])
    lengths = {
        num_target_blocks + 1,
        most,
        *(tokens // block_size + 1 for tokens in SELECTION_STEPS),
    }
    for num_blocks in sorted(lengths):
        if num_target_blocks < num_blocks <= most:
            blocks = tuple(range(num_blocks))
            request = CompressionRequest(
                block_table=blocks, target_blocks=blocks[:num_target_blocks], query_slot=0
            )
            compress(
                cache_k,
                cache_v,
                history,
                window_queries,
                [request],
                settings,
                workspace,
                kernels=kernels,
                rotation=rotation,
            )


def check_caches(
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    history: torch.Tensor,
    window_queries: torch.Tensor,
    settings: CompressionSettings,
    workspace: CompressionWorkspace,
) -> None:
    """Raise `KernelInputError` where the tensors, the settings and the workspace do not fit
    together.
    """
    num_layers, _, block_size, num_kv_heads, head_dim = cache_k.shape
    if cache_v.shape != cache_k.shape or cache_v.dtype != cache_k.dtype:
        raise KernelInputError(
            f"K is {tuple(cache_k.shape)} {cache_k.dtype} but V is {tuple(cache_v.shape)} "
            f"{cache_v.dtype}"
        )
    remembers = find_scorer(settings.scorer).traits.keeps_history
    if remembers and (history.shape != cache_k.shape[:4] or history.dtype != torch.float32):
        raise KernelInputError(
            f"the score history must be {tuple(cache_k.shape[:4])} float32, got "
            f"{tuple(history.shape)} {history.dtype}"
        )
    queries = window_queries.shape
    if queries[0] != num_layers or queries[4] != head_dim or queries[3] % num_kv_heads:
        raise KernelInputError(
            f"window queries {tuple(queries)} do not fit {num_layers} layers, {num_kv_heads} KV "
            f"heads of {head_dim}"
        )
    if queries[2] != settings.window:
        raise KernelInputError(
            f"window queries hold {queries[2]} rows a slot but the window is {settings.window}"
        )
    shape = workspace.shape
    expected = (num_layers, num_kv_heads, queries[3] // num_kv_heads, settings.window, block_size)
    reserved = (shape.num_layers, shape.num_kv_heads, shape.group, shape.window, shape.block_size)
    if expected != reserved:
        raise KernelInputError(
            f"the workspace is for (layers, KV heads, group, window, block size) {reserved}, the "
            f"cache has {expected}"
        )


MOST_TIMED = 4096  # pairs of events that wait to be read


@dataclass(frozen=True)
class _CompressedTokens:
    """What the last compression has left with a request's tokens, and in how many blocks."""

    kind: str
    num_blocks: int


@dataclass
class Started:
    """Compressions that were enqueued together; `event` (None without CUDA) fires when they are
    done.
    """

    numbers: list[int]
    event: torch.cuda.Event | None

    @property
    def done(self) -> bool:
        """Whether the device has finished them; asks, does not wait."""
        return self.event is None or self.event.query()


class CompressionStream:
    """A low-priority side stream. It starts after what has been enqueued so far; a later step waits
    where it joins.

    The scheduler keeps every block that a compression reads or writes from everybody else until it
    is joined.
    """

    def __init__(
        self,
        cache: KVCache,
        kernels: KernelBackend,
        settings: CompressionSettings,
        workspace: CompressionWorkspace,
        rotation: torch.Tensor | None = None,
    ) -> None:
        """`workspace` is for the window that the cache has room for; `settings` are those to begin
        with; `rotation` as `compress` takes it.
        """
        self._cache = cache
        self._rotation = rotation
        self._kernels = kernels
        self._whole_workspace = workspace
        # the last settings whose scorer needs no queries
        self._without_queries: CompressionSettings | None = None
        # of requests whose tokens have the score history of their last compression
        self._histories: dict[int, _CompressedTokens] = {}
        self.follow(settings)
        self._stream = torch.cuda.Stream(priority=0) if cache.k.is_cuda else None
        self._running: list[Started] = []
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._work_s = 0.0
        self.inject_failure: str | None = (
            None  # tests: the next compression fails with this message
        )

    @property
    def settings(self) -> CompressionSettings:
        """How tokens are chosen now."""
        return self._settings

    def prepare(self, settings: CompressionSettings, budget_blocks: int) -> None:
        """Check the settings, and on CUDA compile what serving may meet under them; nothing has
        been served yet.

        `budget_blocks`: the fewest blocks a compression leaves. Raises EngineError when they cannot
        hold what is always kept.
        """
        check_settings(settings, self._cache.shape.block_size, budget_blocks)
        if not self._cache.k.is_cuda:
            return
        cache = self._cache
        parts = (
            cache.k,
            cache.v,
            cache.history,
            self._queries(settings),
            settings,
            self._workspace(settings),
        )
        warm_up(
            *parts,
            num_target_blocks=budget_blocks - 1,
            kernels=self._kernels,
            rotation=self._rotation,
        )

    def follow(self, settings: CompressionSettings) -> None:
        """From now on compressions are by these settings; a slot's last queries are those of the
        window.

        A request without a slot was compressed by a scorer that needs no queries, and stays with
        the last such one.
        """
        self._settings = settings
        if not find_scorer(settings.scorer).traits.needs_queries:
            self._without_queries = settings

    def forget(self, number: int) -> None:
        """The request has ended. A compression of it that is not over is joined by the next
        step.
        """
        self._histories.pop(number, None)
        if number in self.finished():
            self._let_go({number})

    def start(self, tasks: Sequence[CompressionTask], inline: bool) -> dict[int, str]:
        """Enqueue compressions; `inline`: on the current stream. Returns what failed: request
        number -> message.

        A failure concerns those requests alone: their blocks come back through the scheduler.
        """
        requests = [self._request(task) for task in tasks]
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
                if (
                    self._running
                ):  # begun under another policy, on the side stream, in the same workspace
                    torch.cuda.current_stream().wait_stream(self._stream)
                self._timed_compress(requests)
                self._running.append(Started(numbers, None))
            else:
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    event = self._timed_compress(requests)
                self._running.append(Started(numbers, event))
        except (RuntimeError, ValueError) as error:
            # Part of it may have been launched: it is over, and its blocks are free, no sooner than
            # that.
            over = self._stream.record_event() if self._stream is not None and not inline else None
            self._running.append(Started(numbers, over))
            return dict.fromkeys(numbers, f"compression failed: {error}")
        for request, number in zip(requests, numbers, strict=True):
            self._histories.pop(number, None)
            scorer = find_scorer(self._settings_of(request.query_slot).scorer)
            if scorer.traits.keeps_history:
                blocks = len(request.target_blocks)
                self._histories[number] = _CompressedTokens(scorer.history_kind, blocks)
        return {}

    def _request(self, task: CompressionTask) -> CompressionRequest:
        """The task as the kernels take it. A history of another kind is none."""
        history = self._histories.get(task.request.number)
        scorer = find_scorer(self._settings_of(task.request.slot).scorer)
        if history is not None and history.kind != scorer.history_kind:
            history = None
        remembers = scorer.traits.keeps_history
        return CompressionRequest(
            block_table=tuple(task.sources),
            target_blocks=tuple(task.targets[:-1]),
            query_slot=task.request.slot,
            compressed_before=not task.first and (history is not None or not remembers),
            seed=task.request.number,
            carried_blocks=None if history is None else history.num_blocks,
        )

    def join(self, numbers: Sequence[int]) -> None:
        """Let the current stream wait, on the device, for the compressions of these requests."""
        joined = set(numbers)
        for started in self._running:
            if joined.intersection(started.numbers) and started.event is not None:
                torch.cuda.current_stream().wait_event(started.event)
        self._let_go(joined)

    def _let_go(self, numbers: Collection[int]) -> None:
        for started in self._running:
            started.numbers = [number for number in started.numbers if number not in numbers]
        self._running = [started for started in self._running if started.numbers]

    def join_all_but(self, compressing: Collection[int]) -> None:
        """Join those that the scheduler no longer knows as compressing: joined ones, and those of
        ended requests.

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
        # in order: one may take what another gives up
        for settings, alike in groupby(
            requests, lambda request: self._settings_of(request.query_slot)
        ):
            queries, workspace = self._queries(settings), self._workspace(settings)
            for batch in independent(list(alike)):
                fitted = fitting(settings, batch, cache.shape.block_size)
                compress(
                    cache.k,
                    cache.v,
                    cache.history,
                    queries,
                    batch,
                    fitted,
                    workspace,
                    kernels=self._kernels,
                    rotation=self._rotation,
                )

    def _settings_of(self, slot: int) -> CompressionSettings:
        """What a request with that query slot is compressed by."""
        if slot >= 0 or self._without_queries is None:
            return self._settings
        return self._without_queries

    def _queries(self, settings: CompressionSettings) -> torch.Tensor:
        """The last queries of every slot, as many as the window has."""
        return self._cache.window_queries[:, :, self._cache.shape.window - settings.window :]

    def _workspace(self, settings: CompressionSettings) -> CompressionWorkspace:
        return self._whole_workspace.for_window(settings.window)


def fitting(
    settings: CompressionSettings, batch: Sequence[CompressionRequest], block_size: int
) -> CompressionSettings:
    """The settings with as much of the sink as the smallest of the batch can keep beside its
    window.

    Less than the policy's budget is kept of a request whose slot had less set aside when the policy
    came.
    """
    room = min(len(request.target_blocks) for request in batch) * block_size - settings.window
    return settings if settings.sink <= room else replace(settings, sink=max(room, 0))


def check_settings(settings: CompressionSettings, block_size: int, budget_blocks: int) -> None:
    """Raise EngineError unless a budget of so many blocks, the empty one included, holds what is
    always kept.
    """
    try:
        settings.check_fits(block_size, budget_blocks - 1)
    except KernelInputError as error:
        raise EngineError(str(error)) from error


def settings_for(answer: Compression, longest_window: int, seed: int) -> CompressionSettings:
    """What a policy answers, as the scorers read it. Raises EngineError for an answer that none of
    them knows.
    """
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
            recent=answer.recent,
        )
    except KernelInputError as error:
        raise EngineError(str(error)) from error


def scoring_rotation(table: torch.Tensor | None) -> torch.Tensor | None:
    """Return a model's rotation table as `compress` takes it.

    Half precision: a scorer reads a row for every token of every layer and head.
    """
    return None if table is None else table.half()


def independent(requests: Sequence[CompressionRequest]) -> list[list[CompressionRequest]]:
    """The requests cut, in order, where one writes what an earlier one of its batch reads or
    writes.

    Joined at once (`blocking`), a compression may give up blocks that the next one of the same step
    takes.
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

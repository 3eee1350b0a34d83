"""The model runner carries out a step plan on the device.

The scheduler decides; the runner only executes. A step goes through these stages, all enqueued
without waiting for the device:

    StepPlan -> compressions started or joined -> rows of preempted requests freed -> swaps out and
    in
             -> block tables and slots of decoding requests updated -> rows of ending prefills
             started
             -> forward pass -> sampling -> StepResult (tokens are copied to pinned host memory)

A decode-only step replays one CUDA graph; there is one graph for each padded batch size. A step
with prefill chunks also replays a graph while it is small: the host needs 15 to 50 ms to launch
such a step kernel by kernel, which is the device's time for about 700 tokens. A graph has a fixed
number of token positions; its inputs say which of them are decodes and where each chunk begins.
Larger steps are launched kernel by kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from zlab.engine.compression import (
    CompressionSettings,
    CompressionStream,
    check_settings,
    settings_for,
)
from zlab.engine.input_batch import (
    LENGTH,
    POSITION,
    SLOT,
    TOKEN,
    DecodeInputs,
    DecodeState,
    MixedInputs,
    MixedSizes,
    PrefillBatch,
    PrefillInputs,
    StepAttention,
    TokenIds,
    advance,
    fill,
    gives_token,
    moved,
    nothing_to_store,
    sent,
    sizes_of,
)
from zlab.engine.kernels.interface import KernelBackend
from zlab.engine.kernels.triton_decode import reserve_decode_workspace
from zlab.engine.kv_cache import CacheShape, KVCache, Reserved
from zlab.engine.model.decoder import LanguageModel
from zlab.engine.offload import HostSwap
from zlab.engine.sampling.sampler import Logprobs, StepSampler, TokenLogprobs, row_of
from zlab.policies.core.plan import PrefillChunk, SchedulerLimits, StepPlan
from zlab.policies.core.policy import Join, Policy
from zlab.policies.core.request import Request
from zlab.policies.core.scheduler import Scheduler

Decoded = tuple[torch.Tensor, torch.Tensor]  # argmax tokens [B] int64, logits [B, vocab]
StepFunction = Callable[[torch.Tensor], Decoded]  # takes rows [B] int64


def graph_sizes(max_requests: int) -> tuple[int, ...]:
    """Return the batch sizes that are captured, ascending: small sizes exactly, then steps of 8, 16
    and 32.
    """
    steps = [
        1,
        2,
        4,
        *range(8, 64, 8),
        *range(64, 128, 16),
        *range(128, max_requests, 32),
        max_requests,
    ]
    return tuple(sorted({size for size in steps if size <= max_requests}))


def product_sizes(most: int) -> tuple[int, ...]:
    """Return row counts up to `most`, ascending and dense enough that together they reach every
    kernel that cuBLAS chooses for a product of up to `most` rows.
    """
    steps = [
        1,
        *range(8, 256, 8),
        *range(256, 1024, 32),
        *range(1024, 4096, 128),
        *range(4096, most, 512),
        most,
    ]
    return tuple(sorted({size for size in steps if size <= most}))


@dataclass(frozen=True)
class Captured:
    """A CUDA graph and the output tensors that every replay overwrites."""

    graph: torch.cuda.CUDAGraph
    output: Decoded


def capture(step: Callable[[], Decoded], stream: torch.cuda.Stream, pool: Any) -> Captured:
    """Capture `step` as a graph that allocates from `pool`. The kernels keep the priority of
    `stream` on every stream that replays them.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compile first: a capture must not compile or synchronise
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        output = step()
    return Captured(graph, output)


class DecodeGraphs:
    """Decode graphs for every batch size of `sizes`, captured at once, largest first, in one shared
    memory pool.
    """

    def __init__(
        self,
        step: StepFunction,
        sizes: tuple[int, ...],
        padding_row: int,
        device: torch.device,
        priority: int = 0,
    ) -> None:
        """Capture all graphs. This needs CUDA.

        Args:
            step: the decode step; it takes rows `[B]` int64.
            sizes: batch sizes to capture.
            padding_row: the row that pads a batch up to a captured size.
            device: a CUDA device.
            priority: priority of the capture stream.
        """
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
        """Return whether a graph exists for a batch of `num_requests`."""
        return bool(self._sizes) and num_requests <= self._sizes[-1]

    def bind(self, rows: list[int]) -> int:
        """Write `rows` into the smallest graph that holds them and return its size."""
        size = next(size for size in self._sizes if size >= len(rows))
        padded = rows + [self._padding_row] * (size - len(rows))
        fill(self._rows[size], torch.tensor(padded, dtype=torch.int64))
        return size

    def replay(self, size: int) -> Decoded:
        """Run the graph of that size. The result stays valid until the next replay of the same
        graph.
        """
        captured = self._captured[size]
        captured.graph.replay()
        return captured.output


# decodes and chunk tokens together
GRAPH_TOKENS = (64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
MOST_CHUNKS = 16  # chunks that one graph holds

Forward = Callable[
    [DecodeInputs | None, PrefillInputs, torch.Tensor, int], torch.Tensor
]  # returns logits


class MixedSteps:
    """The steps with prefill chunks: packs them and runs them. After `capture`, small steps replay
    graphs.
    """

    def __init__(
        self,
        cache: CacheShape,
        rows: DecodeState,
        forward: Forward,
        most_probable: Callable[[torch.Tensor], torch.Tensor],
        pool_tokens: int,
    ) -> None:
        """Keep what every step uses.

        Args:
            cache: shape of the paged cache.
            rows: the decode state on the device.
            forward: the forward pass; its last argument is the upper bound of `StepAttention` on
                the tokens that all decodes read together.
            most_probable: argmax over logits `[rows, vocab]`.
            pool_tokens: cache positions of the whole pool; graphs are laid out for so many.
        """
        self._cache = cache
        self._rows = rows
        self._forward = forward
        self._most_probable = most_probable
        self._pool_tokens = pool_tokens
        self._captured: dict[int, Captured] = {}
        self._packings: dict[int, PrefillBatch] = {}
        self._wide = torch.empty(0, dtype=torch.int64)
        self._narrow = torch.empty(0, dtype=torch.int32)

    @property
    def graph_tokens(self) -> int:
        """The most tokens of a step that a graph holds; 0 without graphs."""
        return max(self._captured, default=0)

    def run(
        self,
        chunks: Sequence[PrefillChunk],
        token_ids: TokenIds,
        decode_rows: Sequence[int],
        row_of: Mapping[int, int],
        most_tokens: int,
    ) -> Decoded:
        """Run one step.

        Args:
            chunks: prefill chunks of the step.
            token_ids: returns the first ids of a request.
            decode_rows: rows of the decoding requests.
            row_of: row of each request by number, for requests whose prompt ends in this step.
            most_tokens: an upper bound on the tokens that all decodes read together.

        Returns:
            Argmax tokens and logits, first of the decodes, then of the chunks that end a prompt.
            The result of a graph has padding at its end and stays valid until the next step.
        """
        sizes = sizes_of(chunks, len(decode_rows))
        size = smallest_with_room(self._packings, sizes)
        if size is not None and most_tokens <= self._pool_tokens:
            packing = self._packings[size]
            self._upload(*packing.fill(chunks, token_ids, decode_rows, row_of))
            captured = self._captured[size]
            captured.graph.replay()
            return captured.output
        packing = PrefillBatch(sizes, self._cache, self._rows.padding_row)
        wide, narrow = packing.fill(chunks, token_ids, decode_rows, row_of)
        device = self._rows.state.device
        return self.step(
            packing.inputs(
                moved(torch.from_numpy(wide), device), moved(torch.from_numpy(narrow), device)
            ),
            most_tokens,
        )

    def step(self, inputs: MixedInputs, most_tokens: int) -> Decoded:
        """Run the step; graphs capture this function. Requests continue from their argmax tokens,
        padding continues from token 0.
        """
        state, num_decodes = self._rows.state, len(inputs.decode_rows)
        decode = None
        if num_decodes:
            decode = DecodeInputs(
                state, inputs.decode_rows, self._cache.block_size, self._cache.window
            )
        logits = self._forward(decode, inputs.prefill, inputs.logit_rows, most_tokens)
        tokens = self._most_probable(logits)
        if decode is not None:
            advance(state, decode, tokens[:num_decodes])
        starts = inputs.start_rows != self._rows.padding_row
        state[inputs.start_rows, TOKEN] = torch.where(starts, tokens.clamp(min=0), 0).to(
            torch.int32
        )
        return tokens, logits

    def capture(self, max_decodes: int, max_tokens: int, priority: int) -> None:
        """Capture the graphs for steps of up to `max_tokens` tokens, on streams of that priority.
        This needs CUDA.
        """
        device = self._rows.state.device
        sizes = [size for size in GRAPH_TOKENS if size <= max_tokens]
        self._packings = {size: self.packing_of(size, max_decodes) for size in sizes}
        if not sizes:
            return
        largest = self._packings[sizes[-1]]
        self._wide = torch.empty(largest.wide_size, dtype=torch.int64, device=device)
        self._narrow = torch.empty(largest.narrow_size, dtype=torch.int32, device=device)
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(priority=priority)
        for size in reversed(sizes):
            packing = self._packings[size]
            self._upload(*packing.empty())
            step = partial(self.step, packing.inputs(self._wide, self._narrow), self._pool_tokens)
            self._captured[size] = capture(step, stream, pool)

    def packing_of(self, tokens: int, max_decodes: int) -> PrefillBatch:
        """Return the layout of a graph of `tokens` token positions."""
        decodes, chunks = min(max_decodes, tokens), min(MOST_CHUNKS, tokens)
        sizes = MixedSizes(tokens, decodes, chunks, self._rows.max_blocks, decodes + chunks)
        return PrefillBatch(sizes, self._cache, self._rows.padding_row)

    def _upload(self, wide: np.ndarray, narrow: np.ndarray) -> None:
        fill(self._wide[: len(wide)], torch.from_numpy(wide))
        fill(self._narrow[: len(narrow)], torch.from_numpy(narrow))


def smallest_with_room(packings: Mapping[int, PrefillBatch], wanted: MixedSizes) -> int | None:
    """Return the key of the first packing, in ascending order, that holds a step of these sizes;
    None where no packing does.
    """
    for size, packing in packings.items():
        room = packing.sizes
        if (
            wanted.tokens <= size
            and wanted.decodes <= room.decodes
            and wanted.chunks <= room.chunks
        ):
            return size
    return None


@dataclass
class StepResult:
    """Tokens of one step, perhaps still on their way to the host: `numbers[i]` is the request that
    got `tokens[i]`, which is `NOT_FINITE` where its logits were of no use.

    The device passes `begun` when it begins with the step and `event` when the tokens are on the
    host.
    """

    numbers: list[int]
    host: torch.Tensor | None = None
    begun: torch.cuda.Event | None = None
    event: torch.cuda.Event | None = None
    failed: dict[int, str] = field(default_factory=dict)
    host_logprobs: Logprobs | None = None  # where a request asks for them

    @property
    def done(self) -> bool:
        """Whether the device has finished the step. This does not wait."""
        return self.event is None or self.event.query()

    def device_ns(self) -> int | None:
        """Return the nanoseconds that the device needed for a finished step; None where the device
        has no timed events.
        """
        if self.event is None or self.begun is None:
            return None
        milliseconds: float = self.begun.elapsed_time(self.event)
        return round(milliseconds * 1e6)

    def tokens(self) -> list[int]:
        """Wait for the step and return its tokens, one for each of `numbers`."""
        if self.event is not None:
            self.event.synchronize()
        values: list[int] = self.host.tolist() if self.host is not None else []
        return values[: len(self.numbers)]

    def logprobs(self, row: int, num_top: int) -> TokenLogprobs | None:
        """Return the log-probabilities of the token of `numbers[row]`, after `tokens()` has waited;
        None where no request asked for them.
        """
        return None if self.host_logprobs is None else row_of(self.host_logprobs, row, num_top)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Record a timed event on the current stream; None without CUDA."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def brought_to_host(
    numbers: list[int], tokens: torch.Tensor, logprobs: Logprobs | None
) -> StepResult:
    """Start to copy the tokens of a step to the host, after everything that the step has enqueued
    on the current stream.
    """
    if not tokens.is_cuda:
        return StepResult(numbers, tokens, host_logprobs=logprobs)
    host = _pinned(tokens)
    if logprobs is not None:
        logprobs = Logprobs(
            *map(_pinned, (logprobs.chosen, logprobs.chosen_rank, logprobs.top_ids, logprobs.top))
        )
    return StepResult(numbers, host, event=mark(tokens.device), host_logprobs=logprobs)


def _pinned(values: torch.Tensor) -> torch.Tensor:
    """Start to copy to pinned host memory."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


STEP_PRIORITY = -1  # of the step stream; compression and copy streams have 0, the lowest priority
WARM_UP_TOKENS = (
    16,
    256,
    2048,
)  # prefill tokens of warm-up steps; cuBLAS has different kernels for these sizes


class ModelRunner:
    """Model, cache and streams behind one `execute`. The scheduler stays the only owner of blocks
    and slots.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: KVCache,
        kernels: KernelBackend,
        compression: CompressionStream | None,
        sampler: StepSampler,
        scheduler: Scheduler,
        reserved: Reserved,
        token_ids: TokenIds,
        *,
        use_graphs: bool,
    ) -> None:
        self._model = model
        self._cache = cache
        self._kernels = kernels
        self._compression = compression
        self._sampler = sampler
        self._scheduler = scheduler
        self._token_ids = token_ids
        self._device = cache.k.device
        limits = scheduler.limits
        self._swap = HostSwap(cache, limits.host_blocks)
        most_blocks = min(limits.num_blocks, -(-limits.max_model_len // limits.block_size) + 1)
        self._reserved = reserved
        self._rows = DecodeState(reserved.num_rows, most_blocks, self._device)
        self._row_of: dict[int, int] = {}
        self._known: dict[
            int, tuple[int, int]
        ] = {}  # request -> table length and slot that its row holds
        self._members: list[Request] = []
        self._changes = -1
        self._pool_tokens = limits.num_blocks * limits.block_size
        self._workspace = reserve_decode_workspace(
            max_length=min(limits.max_model_len, self._pool_tokens),
            max_requests=limits.max_running + 1,
            num_query_heads=cache.shape.num_query_heads,
            num_kv_heads=cache.shape.num_kv_heads,
            head_dim=cache.shape.head_dim,
            device=self._device,
        )
        self._graphs: DecodeGraphs | None = None
        self._mixed = MixedSteps(
            cache.shape, self._rows, self._forward, self._sampler.most_probable, self._pool_tokens
        )
        self._bound = 0
        self.swapped_tokens = 0  # cache positions copied to the host and back
        self._member_rows = torch.empty(0, dtype=torch.int64, device=self._device)
        # Steps have a higher priority than compressions and copies, so they go first where both
        # have work for the GPU.
        self._stream = (
            torch.cuda.Stream(priority=STEP_PRIORITY) if self._device.type == "cuda" else None
        )
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._warm_up(limits)
            if use_graphs:
                sizes = graph_sizes(limits.max_running)
                padding_row = self._rows.padding_row
                self._graphs = DecodeGraphs(
                    self._pool_wide, sizes, padding_row, self._device, STEP_PRIORITY
                )
                self._mixed.capture(limits.max_running, limits.max_batched_tokens, STEP_PRIORITY)

    def execute(self, plan: StepPlan) -> StepResult:
        """Enqueue a whole step and return without waiting for the device."""
        with torch.cuda.stream(self._stream):
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        begun = mark(self._device)
        self._swap.join()
        failed = self._run_compressions(plan)
        # Rows are freed before any is taken: a plan may preempt one request and admit another
        # at the row limit.
        for request in plan.preempted:
            self._drop_row(request.number)
        self._run_swaps(plan)
        self._update_members(plan)
        self._start_rows(plan)
        self._rows.upload()
        result = self._run(plan)
        result.begun = begun
        result.failed |= failed
        return result

    @property
    def graph_tokens(self) -> int:
        """The most tokens, decodes and chunks together, of a step with chunks that may replay a
        graph; 0 without graphs.
        """
        return self._mixed.graph_tokens

    @property
    def num_rows(self) -> int:
        """Number of requests that have a row on the device."""
        return len(self._row_of)

    def check_policy(self, policy: Policy) -> None:
        """Check that the policy can run on this engine. Raises EngineError where the policy needs
        more than was reserved, ConfigError where the limits forbid it.
        """
        limits = self._scheduler.limits
        self._reserved.check(policy, limits)
        if self._compression is None:
            return
        settings, budget = self._settings_for(policy), policy.budget.floor(limits.block_size)
        if budget is not None:
            check_settings(settings, limits.block_size, budget)

    def follow_policy(self) -> None:
        """Follow the scheduler's new policy, which has passed `check_policy`. No step may be in
        flight.

        Decode graphs do not depend on the policy: query slots keep the queries of the longest
        window that was reserved.
        """
        if self._compression is not None:
            self._compression.follow(self._settings_for(self._scheduler.policy))

    def _settings_for(self, policy: Policy) -> CompressionSettings:
        """Return how requests are compressed under the policy. A policy without a budget still
        describes requests that were compressed earlier.
        """
        assert self._compression is not None
        shape = self._cache.shape
        longest = (
            shape.window if policy.budget.floor(shape.block_size) is None else shape.block_size
        )
        return settings_for(policy.compression, longest, self._compression.settings.seed)

    def forget(self, request: Request) -> None:
        """Free the row, sampler state, compression and host copy of an ended request. Call it after
        the plan that ended the request and before the next `execute`.
        """
        if self._compression is not None:
            self._compression.forget(request.number)
        self._sampler.forget(request.number)
        self._drop_row(request.number)
        self._swap.drop(request.number)

    def finished_compressions(self) -> list[int]:
        """Return the numbers of requests whose compression is done but not joined (join
        `when_done`).
        """
        return self._compression.finished() if self._compression is not None else []

    def _warm_up(self, limits: SchedulerLimits) -> None:
        """Compile and load what steps outside the graphs launch, so that no served request waits
        for it.
        """
        padding = torch.full((1,), self._rows.padding_row, dtype=torch.int64, device=self._device)
        most = min(limits.max_batched_tokens, limits.max_model_len)
        for num_tokens in sorted({min(size, most) for size in (*WARM_UP_TOKENS, most)}):
            prefill = nothing_to_store(num_tokens, limits.block_size, self._device)
            rows = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._sampler.warm_up(self._forward(self._decode_inputs(padding), prefill, rows, 0))
        self._model.warm_up(
            product_sizes(limits.max_batched_tokens), product_sizes(limits.max_running)
        )

    # Stages of a step.

    def _run_compressions(self, plan: StepPlan) -> dict[int, str]:
        if self._compression is None:
            return {}
        failed = {}
        inline = self._scheduler.policy.compression.join is Join.BLOCKING
        if plan.compressions:
            failed = self._compression.start(plan.compressions, inline)
        self._compression.join_all_but(self._scheduler.compressing_requests())
        for task in plan.joined:
            self._set_row(task.request, self._row_of[task.request.number])
        return failed

    def _run_swaps(self, plan: StepPlan) -> None:
        for task in plan.swaps:
            request = task.request
            self.swapped_tokens += len(task.blocks) * self._cache.shape.block_size
            if task.out:
                tokens = self._token_ids(request.number, request.total_tokens)
                self._swap.out(
                    request.number, task.blocks, request.slot, tokens[request.total_tokens - 1]
                )
            else:
                token = self._swap.back(request.number, task.blocks, request.slot)
                row = self._take_row(request)
                self._rows.set(row, TOKEN, token)
                self._set_row(request, row)

    def _update_members(self, plan: StepPlan) -> None:
        """Upload changes of the decoding requests since the last step: membership, new blocks and
        new slots.
        """
        version = self._scheduler.decoding_version
        changed = version != self._changes
        if changed:
            self._changes = version
            self._members = self._scheduler.decoding_requests()
        rows = self._rows
        for request in self._members if plan.num_decodes else ():
            held, slot = self._known[request.number]
            if len(request.table) != held:
                rows.set_table(self._row_of[request.number], request.table, held)
            if request.slot != slot:
                rows.set(self._row_of[request.number], SLOT, request.slot)
            if len(request.table) != held or request.slot != slot:
                self._known[request.number] = (len(request.table), request.slot)
        if changed:
            members = [self._row_of[request.number] for request in self._members]
            if self._graphs is not None and members and self._graphs.fits(len(members)):
                self._bound = self._graphs.bind(members)
            self._member_rows = sent(members, self._device)

    def _start_rows(self, plan: StepPlan) -> None:
        """Give a row to each request whose prefill ends in this step. It decodes from the next step
        on, once the sampled token is in its row.
        """
        for chunk in plan.prefills:
            if gives_token(chunk):
                row = self._take_row(chunk.request)
                self._rows.set(row, POSITION, chunk.request.prefill_until)
                self._rows.set(row, LENGTH, chunk.request.prefill_until + 1)
                self._set_holdings(chunk.request, row)

    def _run(self, plan: StepPlan) -> StepResult:
        """Run the forward pass with argmax tokens; where a request samples, draw its token
        afterwards and overwrite it in its row.
        """
        members = self._members if plan.num_decodes else []
        ending = [chunk.request for chunk in plan.prefills if gives_token(chunk)]
        numbers = [request.number for request in (*members, *ending)]
        self._sampler.logprobs = None
        if not plan.num_decodes and not plan.prefills:
            return StepResult([])
        tokens, logits = self._run_mixed(plan) if plan.prefills else self._run_decodes(plan)
        if not self._sampler.plain(numbers):
            count = len(numbers)
            tokens = self._sampler.sample(logits[:count], numbers, tokens[:count])
            rows = (
                sent([self._row_of[number] for number in numbers], self._device)
                if ending
                else self._member_rows
            )
            self._rows.state[rows, TOKEN] = tokens.clamp(min=0).to(torch.int32)
        return brought_to_host(numbers, tokens, self._sampler.logprobs)

    def _run_mixed(self, plan: StepPlan) -> Decoded:
        """Run a step with chunks. Returns tokens and logits, first of the decodes, then of the
        chunks that end a prompt.
        """
        decode_rows = (
            [self._row_of[request.number] for request in self._members] if plan.num_decodes else []
        )
        return self._mixed.run(
            plan.prefills, self._token_ids, decode_rows, self._row_of, most_tokens(plan)
        )

    def _run_decodes(self, plan: StepPlan) -> Decoded:
        """Run a decode-only step.

        A graph is laid out for as many tokens as the pool has. Requests that share blocks may read
        more; such a step is launched without a graph.
        """
        in_graph = self._graphs is not None and self._graphs.fits(len(self._members))
        if self._graphs is not None and in_graph and most_tokens(plan) <= self._pool_tokens:
            return self._graphs.replay(self._bound)
        return self._decode(self._member_rows, most_tokens(plan))

    def _pool_wide(self, rows: torch.Tensor) -> Decoded:
        """Decode `rows` with a layout for as many tokens as the pool has. Graphs capture this
        function.
        """
        return self._decode(rows, self._pool_tokens)

    def _decode(self, rows: torch.Tensor, most_tokens: int) -> Decoded:
        """Decode `rows` once. Returns the argmax tokens and the logits."""
        inputs = self._decode_inputs(rows)
        logits = self._forward(inputs, None, None, most_tokens)
        tokens = self._sampler.most_probable(logits)
        advance(self._rows.state, inputs, tokens)
        return tokens, logits

    def _decode_inputs(self, rows: torch.Tensor) -> DecodeInputs:
        return DecodeInputs(
            self._rows.state, rows, self._cache.shape.block_size, self._cache.shape.window
        )

    def _forward(
        self,
        decode: DecodeInputs | None,
        prefill: PrefillInputs | None,
        rows: torch.Tensor | None,
        most_tokens: int,
    ) -> torch.Tensor:
        context = StepAttention(
            self._cache, self._kernels, self._workspace, decode, prefill, most_tokens
        )
        hidden = self._model.forward(context.token_ids, context.positions, context, rows)
        return self._model.logits(hidden)

    # Rows of the decode state.

    def _take_row(self, request: Request) -> int:
        row = self._row_of.get(request.number)
        if row is None:
            row = self._row_of[request.number] = self._rows.take()
        return row

    def _set_row(self, request: Request, row: int) -> None:
        self._rows.set(row, POSITION, request.total_tokens - 1)
        self._rows.set(row, LENGTH, request.cache_tokens)
        self._set_holdings(request, row)

    def _set_holdings(self, request: Request, row: int) -> None:
        self._rows.set(row, SLOT, request.slot)
        self._rows.set_table(row, request.table)
        self._known[request.number] = (len(request.table), request.slot)

    def _drop_row(self, number: int) -> None:
        row = self._row_of.pop(number, None)
        if row is not None:
            self._rows.give_back(row)
            del self._known[number]


def most_tokens(plan: StepPlan) -> int:
    """Return an upper bound on the tokens that the plan's decodes read. One more each is counted,
    so the bound holds whether or not `context_tokens` includes their new token.
    """
    return plan.context_tokens + plan.num_decodes

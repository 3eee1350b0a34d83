"""Carries out a step plan on the device: what the scheduler decided, nothing else."""

import torch

from engine.attention import PrefillInputs, StepAttention
from engine.cache import PagedCache
from engine.compressing import CompressionStream, check_settings, settings_for
from engine.decode_graphs import Decoded, DecodeGraphs, graph_sizes, product_sizes
from engine.kernels.contract import Kernels
from engine.kernels.decode_plan import reserve_decode_workspace
from engine.mixed import MixedSteps
from engine.model import LanguageModel
from engine.prefilling import TokenIds, gives_token, nothing_to_store
from engine.reserved import Reserved
from engine.rows import LENGTH, POSITION, SLOT, TOKEN, DecodeInputs, DecodeRows, advance
from engine.sampling import StepSampler
from engine.scorers import CompressionSettings
from engine.step_result import StepResult, brought_to_host, mark
from engine.swapping import HostSwap
from engine.transfer import sent
from policies.core.limits import Limits
from policies.core.plan import StepPlan
from policies.core.policy import Join, Policy
from policies.core.request import Phase, Request
from policies.core.scheduler import Scheduler

STEP_PRIORITY = -1  # of the stream that steps run on; compressions and copies have 0, the lowest there is
WARM_UP_TOKENS = (16, 256, 2048)  # prefill tokens of a step: sizes for which cuBLAS has other kernels


class Runner:
    """Model, cache and streams under one `execute`; the scheduler stays the only owner of blocks and slots."""

    def __init__(
        self,
        model: LanguageModel,
        cache: PagedCache,
        kernels: Kernels,
        compression: CompressionStream | None,
        sampler: StepSampler,
        scheduler: Scheduler,
        reserved: Reserved,
        use_graphs: bool,
    ) -> None:
        self._model = model
        self._cache = cache
        self._kernels = kernels
        self._compression = compression
        self._sampler = sampler
        self._scheduler = scheduler
        self.token_ids: TokenIds = _no_requests  # the first ids of a request; the loop puts its own here
        self._device = cache.k.device
        limits = scheduler.state.limits
        self._swap = HostSwap(cache, limits.host_blocks)
        most_blocks = min(limits.num_blocks, -(-limits.max_model_len // limits.block_size) + 1)
        self._reserved = reserved
        self._rows = DecodeRows(reserved.num_rows, most_blocks, self._device)
        self._row_of: dict[int, int] = {}
        self._known: dict[int, tuple[int, int]] = {}  # request -> table length and slot that its row holds
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
        self._mixed = MixedSteps(cache.shape, self._rows, self._forward, self._sampler.most_probable, self._pool_tokens)
        self._bound = 0
        self.swapped_tokens = 0  # cache positions copied to the host and back
        self._member_rows = torch.empty(0, dtype=torch.int64, device=self._device)
        # Steps go before compressions and copies, whose streams have no priority, wherever both have work for the card.
        self._stream = torch.cuda.Stream(priority=STEP_PRIORITY) if self._device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._warm_up(limits)
            if use_graphs:
                sizes = graph_sizes(limits.max_running)
                padding_row = self._rows.padding_row
                self._graphs = DecodeGraphs(self._pool_wide, sizes, padding_row, self._device, STEP_PRIORITY)
                self._mixed.capture(limits.max_running, limits.max_batched_tokens, STEP_PRIORITY)

    def execute(self, plan: StepPlan) -> StepResult:
        """Enqueue a whole step and return without waiting for it."""
        with torch.cuda.stream(self._stream):
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        begun = mark(self._device)
        self._swap.join()
        failed = self._run_compressions(plan)
        self._run_swaps(plan)
        for request in plan.preempted:
            self._drop_row(request.number)
        self._update_members(plan)
        self._start_rows(plan)
        self._rows.upload()
        result = self._run(plan)
        result.begun = begun
        result.failed |= failed
        return result

    @property
    def graph_tokens(self) -> int:
        """Tokens, of decodes and chunks together, up to which a step with chunks may run as a graph; 0 without."""
        return self._mixed.graph_tokens

    @property
    def num_rows(self) -> int:
        """Requests that have a row on the device."""
        return len(self._row_of)

    def check_policy(self, policy: Policy) -> None:
        """Raise EngineError where the policy needs more than was reserved, ConfigError where the limits forbid it."""
        limits = self._scheduler.state.limits
        self._reserved.check(policy, limits)
        if self._compression is None:
            return
        settings, budget = self._settings_for(policy), policy.budget.floor(limits.block_size)
        if budget is not None:
            check_settings(settings, limits.block_size, budget)

    def follow_policy(self) -> None:
        """Another policy decides from now on, one that has passed `check_policy`; nothing is under way.

        What decode graphs have captured does not depend on it: slots keep the queries of the longest window there is.
        """
        if self._compression is not None:
            self._compression.follow(self._settings_for(self._scheduler.state.policy))

    def _settings_for(self, policy: Policy) -> CompressionSettings:
        """How requests are compressed under it; without a budget, those that were compressed before."""
        assert self._compression is not None
        shape = self._cache.shape
        longest = shape.window if policy.budget.floor(shape.block_size) is None else shape.block_size
        return settings_for(policy.compression, longest, self._compression.settings.seed)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if self._compression is not None:
            self._compression.forget(request.number)
        self._sampler.forget(request.number)
        self._drop_row(request.number)
        self._swap.drop(request.number)

    def finished_compressions(self) -> list[int]:
        """Requests whose compression is done and not joined (join `when_done`)."""
        return self._compression.finished() if self._compression is not None else []

    def _warm_up(self, limits: Limits) -> None:
        """Compile and load what steps outside the graphs launch, so that serving never waits for it."""
        padding = torch.full((1,), self._rows.padding_row, dtype=torch.int64, device=self._device)
        most = min(limits.max_batched_tokens, limits.max_model_len)
        for num_tokens in sorted({min(size, most) for size in (*WARM_UP_TOKENS, most)}):
            prefill = nothing_to_store(num_tokens, limits.block_size, self._device)
            rows = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._sampler.warm_up(self._forward(self._decode_inputs(padding), prefill, rows, 0))
        self._model.warm_up(product_sizes(limits.max_batched_tokens), product_sizes(limits.max_running))

    # parts of a step

    def _run_compressions(self, plan: StepPlan) -> dict[int, str]:
        if self._compression is None:
            return {}
        failed = {}
        inline = self._scheduler.state.policy.compression.join is Join.BLOCKING
        if plan.compressions:
            failed = self._compression.start(plan.compressions, inline)
        self._compression.join_all_but({task.request.number for task in self._scheduler.state.compressing})
        for task in plan.joined:
            self._set_row(task.request, self._row_of[task.request.number])
        return failed

    def _run_swaps(self, plan: StepPlan) -> None:
        if plan.swaps:  # who ended while it was planned is forgotten later, and the room has been booked again
            self._swap.drop_all_but(self._scheduler.state.requests)
        for task in plan.swaps:
            request = task.request
            self.swapped_tokens += len(task.blocks) * self._cache.shape.block_size
            if task.out:
                tokens = self.token_ids(request.number, request.total_tokens)
                self._swap.out(request.number, task.blocks, request.slot, tokens[request.total_tokens - 1])
            else:
                token = self._swap.back(request.number, task.blocks, request.slot)
                row = self._take_row(request)
                self._rows.set(row, TOKEN, token)
                self._set_row(request, row)

    def _update_members(self, plan: StepPlan) -> None:
        """Follow the decoding set, and what its members were given since the last step."""
        decoding = self._scheduler.state.decoding
        changed = decoding.changes != self._changes
        if changed:
            self._changes = decoding.changes
            running = self._scheduler.state.running.values()
            self._members = [request for request in running if request.phase is Phase.DECODE]
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
        """Requests whose prefill ends in this step decode in the next: their rows wait for the sampled token."""
        for chunk in plan.prefills:
            if gives_token(chunk):
                row = self._take_row(chunk.request)
                self._rows.set(row, POSITION, chunk.request.prefill_until)
                self._rows.set(row, LENGTH, chunk.request.prefill_until + 1)
                self._set_holdings(chunk.request, row)

    def _run(self, plan: StepPlan) -> StepResult:
        """The step itself goes on with the most probable tokens; where others are wanted, they are drawn after it."""
        members = self._members if plan.num_decodes else []
        ending = [chunk.request for chunk in plan.prefills if gives_token(chunk)]
        numbers = [request.number for request in (*members, *ending)]
        self._sampler.logprobs = None
        if not plan.num_decodes and not plan.prefills:
            return StepResult([])
        tokens, logits = self._run_mixed(plan) if plan.prefills else self._run_decodes(plan)
        if not self._sampler.plain(numbers):
            tokens = self._sampler.sample(logits[: len(numbers)], numbers)
            rows = sent([self._row_of[number] for number in numbers], self._device) if ending else self._member_rows
            self._rows.state[rows, TOKEN] = tokens.to(torch.int32)
        return brought_to_host(numbers, tokens, self._sampler.logprobs)

    def _run_mixed(self, plan: StepPlan) -> Decoded:
        """A step with chunks: tokens and logits of the decodes, then of the chunks that end a prompt."""
        decode_rows = [self._row_of[request.number] for request in self._members] if plan.num_decodes else []
        return self._mixed.run(plan.prefills, self.token_ids, decode_rows, self._row_of, most_tokens(plan))

    def _run_decodes(self, plan: StepPlan) -> Decoded:
        """A step of decodes alone.

        Requests that share blocks may read more tokens than the pool has: too many for what a graph is laid out for.
        """
        in_graph = self._graphs is not None and self._graphs.fits(len(self._members))
        if self._graphs is not None and in_graph and most_tokens(plan) <= self._pool_tokens:
            return self._graphs.replay(self._bound)
        return self._decode(self._member_rows, most_tokens(plan))

    def _pool_wide(self, rows: torch.Tensor) -> Decoded:
        """What a graph captures: a decode step of `rows` for as many tokens as the pool has."""
        return self._decode(rows, self._pool_tokens)

    def _decode(self, rows: torch.Tensor, most_tokens: int) -> Decoded:
        """One decode step of `rows` with the most probable token each, and the logits."""
        inputs = self._decode_inputs(rows)
        logits = self._forward(inputs, None, None, most_tokens)
        tokens = self._sampler.most_probable(logits)
        advance(self._rows.state, inputs, tokens)
        return tokens, logits

    def _decode_inputs(self, rows: torch.Tensor) -> DecodeInputs:
        return DecodeInputs(self._rows.state, rows, self._cache.shape.block_size, self._cache.shape.window)

    def _forward(
        self, decode: DecodeInputs | None, prefill: PrefillInputs | None, rows: torch.Tensor | None, most_tokens: int
    ) -> torch.Tensor:
        context = StepAttention(self._cache, self._kernels, self._workspace, decode, prefill, most_tokens)
        hidden = self._model.forward(context.token_ids, context.positions, context, rows)
        return self._model.logits(hidden)

    # rows

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
    """What the plan's decodes read, and one more each: whether their own token counts does not matter then."""
    return plan.context_tokens + plan.num_decodes


def _no_requests(number: int, count: int) -> list[int]:
    raise KeyError(f"no tokens are known of request {number}")

"""The scheduler: it plans a step, receives the outcome, and plans the next.

A submitted request is validated: one that can never be served is refused with the numbers. Work
that nothing could ever start raises StuckError instead of hanging.
"""

from collections.abc import Iterator, Sequence

from zlab.policies.core.block_pool import PrefixIndex, PromptContent
from zlab.policies.core.decode import (
    abandon_compression,
    allocate_next_block,
    assign_query_slots,
    can_assign_query_slots,
    find_last_victim,
    finish_swap_in,
    finish_swap_out,
    join_compression,
    preempt,
)
from zlab.policies.core.hot_swap import refresh_reservations, replace_policy
from zlab.policies.core.journal import EventSink, Int64Array
from zlab.policies.core.plan import (
    EMPTY_OUTCOME,
    ConfigError,
    DuplicateRequestError,
    PrefillChunk,
    SchedulerLimits,
    SchedulerStats,
    StepCounts,
    StepOutcome,
    StepPlan,
    StuckError,
    UnknownRequestError,
)
from zlab.policies.core.policy import Join, Policy
from zlab.policies.core.prefill import (
    admit,
    explain_head,
    may_admit,
    plan_in_running_order,
    plan_prefill,
)
from zlab.policies.core.query_slots import QuerySlots
from zlab.policies.core.request import Request
from zlab.policies.core.state import (
    SchedulerState,
    forget_prompt,
    keep_content,
    register_prompt,
)
from zlab.traces.schema import BlockState, EventKind, Phase, Reason, Status
from zlab.traces.workload import TraceRequest


def make_request(
    asked: TraceRequest,
    number: int,
    arrival_ns: int,
    limits: SchedulerLimits,
    prefix_block_size: int | None,
    shares: bool,
) -> Request:
    """Return the scheduler's view of a request.

    Raises ConfigError when its prefix ids do not fit the block size of the pool and the policy
    shares prefixes.
    """
    prefix_ids = asked.prefix_ids
    if prefix_ids:
        size = prefix_block_size or 0
        fits = size and (size % limits.block_size == 0 or limits.block_size % size == 0)
        if not fits and not shares:
            prefix_ids = None
        elif not fits:
            raise ConfigError(
                f"a block of {limits.block_size} tokens and a prefix id of the workload, "
                f"{size}, do not "
                "divide one another"
            )
    content = PromptContent(
        asked.prompt_tokens,
        limits.block_size,
        asked.prompt_ids,
        prefix_ids,
        prefix_block_size,
    )
    return Request(
        number=number,
        id=asked.id,
        arrival_ns=arrival_ns,
        prompt_tokens=asked.prompt_tokens,
        max_tokens=asked.max_tokens,
        forced_output_tokens=asked.output_tokens,
        content=content,
        session=asked.session,
        cls=asked.cls,
        priority=asked.priority,
    )


def validate_request(
    state: SchedulerState, request: Request, asked: TraceRequest
) -> tuple[Reason, str] | None:
    """Return None if the request can be served alone in this pool, else (reason, message). Sets its
    `target_tokens`.

    A request that asks for more output than the model has positions is served up to that limit and
    ends with reason length. A request that leaves its length open gets as much as model and pool
    hold.
    """
    limits = state.limits
    if request.prompt_tokens < 1:
        return (
            Reason.EMPTY_PROMPT,
            f"the prompt has {request.prompt_tokens} tokens, at least 1 is needed",
        )
    for name, value in (("max_tokens", asked.max_tokens), ("output_tokens", asked.output_tokens)):
        if value is not None and value < 0:
            return Reason.BAD_MAX_TOKENS, f"{name} must be 0 or more, not {value}"
    room = limits.max_model_len - request.prompt_tokens
    if room < 1:
        return Reason.TOO_LONG, (
            f"the prompt has {request.prompt_tokens} tokens; with at least one of output the "
            f"model's limit is "
            f"{limits.max_model_len}"
        )
    wanted = request.wanted_tokens
    request.target_tokens = room if wanted is None else min(wanted, room)
    if state.peak_blocks(request) > limits.num_blocks and wanted is None and state.floor is None:
        request.target_tokens = max(
            1, limits.num_blocks * limits.block_size - request.prompt_tokens + 1
        )
    need = state.peak_blocks(request)
    if need > limits.num_blocks:
        return Reason.NEVER_FITS, (
            f"it needs {need} blocks of {limits.block_size} tokens at its largest "
            f"({request.prompt_tokens} prompt and "
            f"{request.target_tokens} output tokens), the pool has {limits.num_blocks}"
        )
    if wanted is None or request.target_tokens < wanted:
        state.journal.emit(EventKind.CAPPED, request.number, request.target_tokens)
        if wanted is not None:
            request.message = (
                f"output capped at {request.target_tokens} of {wanted} tokens by "
                f"the limit {limits.max_model_len}"
            )
    return None


def check_deadlock(state: SchedulerState, step: int) -> None:
    """Raise StuckError when requests wait, nothing runs and nothing is in flight."""
    if state.compressing or state.swapping or not state.requests:
        return
    waiting = [request.id for request in state.waiting][:5]
    stalled = [request.id for request in state.stalled.values()][:5]
    raise StuckError(
        f"step {step}: nothing runs and nothing is in flight, but {len(state.waiting)} "
        f"requests wait "
        f"({', '.join(waiting)}) and {len(state.stalled)} are stalled ({', '.join(stalled)}); "
        f"{state.pool.num_free} of {state.limits.num_blocks} blocks and {state.slots.num_free} "
        f"slots are free "
        f"under policy {state.policy.name!r}"
    )


class Scheduler:
    """Decides what each step does; owns requests, blocks and slots; has no clock.

    A driver calls on one thread, in this order: any number of `submit`, `abort` and
    `invalidate`, then `plan`; it carries the plan out and calls `commit`; and again. Times are
    whole nanoseconds and are only recorded. The same calls give the same plans on any machine;
    `digest` proves it.
    """

    def __init__(
        self,
        policy: Policy,
        limits: SchedulerLimits,
        sink: EventSink | None = None,
        index: PrefixIndex | None = None,
        prefix_block_size: int | None = None,
    ) -> None:
        """Create a scheduler with an empty pool.

        Args:
            policy: The policy that decides.
            limits: Pool and step limits.
            sink: Receives the journal's rows in large pieces.
            index: Used instead of a new prefix index.
            prefix_block_size: Number of prompt tokens that a prefix id of the workload represents.

        Raises:
            ConfigError: Policy and limits cannot work together.
        """
        self.state = SchedulerState(policy, limits, sink, index)
        self._limits = limits
        self._prefix_block_size = prefix_block_size
        self._ids: dict[str, Request] = {}
        self._ending: list[Request] = []
        self._next_number = 0
        self._compressed: set[int] = set()
        self.next_step = 0

    # what drivers may read

    @property
    def policy(self) -> Policy:
        """The policy that decides now."""
        return self.state.policy

    @property
    def limits(self) -> SchedulerLimits:
        """Sizes and limits; they never change."""
        return self._limits

    @property
    def num_usable_blocks(self) -> int:
        """Blocks of the pool that can be given out; the others are null blocks."""
        return self.state.limits.num_blocks

    def stats(self) -> SchedulerStats:
        """The scheduler in numbers, as it is now."""
        state = self.state
        pool, decoding = state.pool, state.decoding
        num_out = sum(task.out for task in state.swapping) if state.swapping else 0
        return SchedulerStats(
            len(state.requests),
            len(state.waiting),
            len(state.running),
            decoding.num_requests,
            len(state.stalled),
            state.num_waiting_for_slot,
            len(state.paused),
            len(state.compressing),
            num_out,
            len(state.swapping) - num_out,
            decoding.context_tokens,
            state.idle_tokens,
            pool.num_free,
            pool.num_cached,
            pool.num_shared_extra,
            state.slots.num_slots,
            state.slots.num_free,
        )

    def step_counts(self) -> StepCounts:
        """The part of `stats()` that a row of the steps table needs; it is read at every step."""
        state = self.state
        pool, decoding = state.pool, state.decoding
        return StepCounts(
            decoding.num_requests,
            decoding.context_tokens,
            len(state.compressing),
            len(state.running),
            len(state.waiting),
            state.num_waiting_for_slot,
            len(state.stalled),
            pool.num_shared_extra,
            state.idle_tokens,
            pool.num_free,
            pool.num_cached,
        )

    def blocks_by_state(self) -> dict[BlockState, int]:
        """Number of blocks in each state; they add up to the pool."""
        return self.state.pool.count_states()

    def request(self, number: int) -> Request | None:
        """The live request of that number, or None."""
        return self.state.requests.get(number)

    def num_output_tokens(self, number: int) -> int:
        """Output tokens of a live request so far; `Request.generated` lags while it decodes."""
        return self.state.decoding.tokens(self.state.requests[number])[1]

    def decode_load(self) -> tuple[int, int]:
        """(requests, cache positions) of the decode batch."""
        decoding = self.state.decoding
        return decoding.num_requests, decoding.context_tokens

    def decoding_requests(self) -> list[Request]:
        """Requests that take part in the next decode step, in running order."""
        return [r for r in self.state.running.values() if r.phase is Phase.DECODE]

    @property
    def decoding_version(self) -> int:
        """A counter that grows when a request enters or leaves the decode batch."""
        return self.state.decoding.changes

    def compressing_requests(self) -> set[int]:
        """Numbers of the requests whose compression is in flight."""
        return {task.request.number for task in self.state.compressing}

    def can_ever_run(self, num_prompt_tokens: int, max_tokens: int | None) -> bool:
        """Whether an empty pool holds such a request to its last token.

        Args:
            num_prompt_tokens: Tokens of the prompt.
            max_tokens: Output tokens asked for. None leaves the length open: then the prompt and
                one token must fit, or, where requests are compressed, the longest output.
        """
        state = self.state
        limits = state.limits
        longest = max(limits.max_model_len - num_prompt_tokens, 1)
        if max_tokens is None:
            max_tokens = 1 if state.floor is None else longest
        need = state.peak_blocks_of(num_prompt_tokens, min(max_tokens, longest))
        return need <= limits.num_blocks

    def flush_events(self) -> None:
        """Hand all events so far to `sink`."""
        self.state.journal.flush()

    @property
    def num_unflushed_events(self) -> int:
        """Events that `sink` has not received yet."""
        return self.state.journal.num_collected

    # requests arrive and end

    def submit(
        self, trace_request: TraceRequest, now_ns: int, arrival_ns: int | None = None
    ) -> Request:
        """Accept a request. One that can never be served is refused at once, with the reason in its
        `message`.

        Raises DuplicateRequestError while another request of the same id lives.
        """
        if trace_request.id in self._ids:
            raise DuplicateRequestError(f"request id {trace_request.id!r} is still alive")
        state = self._at(now_ns)
        request = make_request(
            trace_request,
            self._next_number,
            now_ns if arrival_ns is None else arrival_ns,
            state.limits,
            self._prefix_block_size,
            shares=state.index is not None,
        )
        self._next_number += 1
        request.arrival_step = self.next_step
        state.journal.emit(EventKind.ARRIVED, request.number, request.prompt_tokens)
        refusal = validate_request(state, request, trace_request)
        if refusal is not None:
            request.status, request.reason, request.message = Status.REFUSED, refusal[0], refusal[1]
            request.phase, request.finish_ns = Phase.DONE, now_ns
            state.journal.emit(EventKind.REFUSED, request.number, refusal[0])
            state.ended.append(request)
            return request
        self._ids[request.id] = request
        state.requests[request.number] = request
        state.waiting.push(request, state.policy.order.key(request, state.history))
        if state.policy.order.lookahead or state.waiting.first() is request:
            state.admission_due = True  # otherwise it waits behind one that does not fit
        return request

    def abort(self, id: str, now_ns: int) -> Request:
        """End a request. Blocks that a copy in flight uses are released when the copy has finished.

        Raises UnknownRequestError.
        """
        request = self._ids.get(id)
        if request is None:
            raise UnknownRequestError(f"no living request has the id {id!r}")
        self._at(now_ns)
        self._end(request, Status.ABORTED)
        return request

    def invalidate(self, request: Request, message: str, now_ns: int) -> None:
        """The keys and values of a request are damaged: its prompt's blocks are matched no more.

        If it is alive it ends as failed, with the message. Call it between `commit` and `plan`, as
        `abort`; it may name a request that has ended, whose terminal event stays.
        """
        state = self._at(now_ns)
        num_forgotten, freed = forget_prompt(state, request)
        state.journal.emit(EventKind.CORRUPTED, request.number, num_forgotten, freed)
        if request.number in state.requests:
            self._end(request, Status.FAILED, message)

    def replace_policy(self, policy: Policy, now_ns: int, mark: int = 0) -> None:
        """Let another policy decide from the next plan on (rules: docs/DESIGN.md). Call it between
        `commit` and `plan`.

        `mark` identifies the policy in the journal and so in the digest
        (`zlab.policies.spec.policy_mark`). Raises ConfigError, with nothing changed, when policy
        and limits cannot work together.
        """
        slots = QuerySlots(policy, self.state.limits)
        state = self._at(now_ns)
        self._return_drained()
        for request in replace_policy(state, policy, slots, mark):
            self._finish(request, EMPTY_OUTCOME)
        self._compressed.update(task.request.number for task in state.compressing)

    def live(self) -> Iterator[Request]:
        """Iterate over live requests in submission order, with token counts as of now."""
        for request in self.state.requests.values():
            self.state.decoding.settle_if_member(request)
        return iter(self.state.requests.values())

    def take_finished(self) -> list[Request]:
        """Return the requests that have ended, refused ones included, since the last call, in that
        order.
        """
        ended, self.state.ended = self.state.ended, []
        return ended

    # steps

    def plan(self, now_ns: int) -> StepPlan | None:
        """Decide the next step. None when there is nothing to do until a request arrives or a copy
        finishes.

        Raises StuckError when requests wait that nothing could ever start.
        """
        state = self._at(now_ns)
        state.journal.flush_when_large()
        plan = StepPlan(self.next_step)
        state.preempted_in_step.clear()
        state.admits = True
        if state.under_reserved:
            refresh_reservations(state)
        self._join(plan)
        self._decide(plan)
        while plan.empty and (state.draining or not state.admits):
            # all were preempted and nothing runs, or only outputs are on their way: a request that
            # fits now may start at once
            self._return_drained()
            self._decide_again(plan)
        if plan.empty:
            self._unlock(plan)
        if plan.empty:
            check_deadlock(state, self.next_step)
            return None
        state.decoding.announce(plan.num_decodes, state.journal)
        return plan

    def commit(self, plan: StepPlan, now_ns: int, outcome: StepOutcome = EMPTY_OUTCOME) -> None:
        """Apply a step that ended at `now_ns`: append tokens, end requests, release blocks."""
        state = self._at(now_ns)
        state.journal.at_end = True
        if state.draining:
            self._return_drained()
        ending: list[Request] = []
        if plan.num_decodes:
            tick = state.decoding.tick
            state.decoding.step()
            due = {request.line: request for request in state.decoding.take_due(tick)}
            ending = [due[line] for line in sorted(due, reverse=True)]
        for chunk in plan.prefills:
            if ending:
                in_order = state.policy.batching.in_running_order
                while ending and (not in_order or ending[-1].line < chunk.request.line):
                    self._complete(ending.pop(), outcome)
            self._commit_chunk(chunk, outcome)
        while ending:
            self._complete(ending.pop(), outcome)
        for number in outcome.stopped:
            if number in state.requests:
                self._finish(state.requests[number], outcome)
        for number, message in outcome.failed.items():
            if number in state.requests:
                self._end(state.requests[number], Status.FAILED, message)
        self._compressed.update(outcome.compressed)
        self.next_step += 1
        state.journal.step = self.next_step
        state.journal.at_end = False

    def finished_compressions(self, numbers: Sequence[int]) -> None:
        """Report compressions that finished while no step was running (join `when_done`); the next
        plan joins them.
        """
        self._compressed.update(numbers)

    def uneventful_steps(self) -> int:
        """Return how many of the next steps only decode, with no decision but which free block
        comes next.

        There may be more: ask again after these steps.
        """
        if self._disturbed():
            return 0
        return self.state.decoding.uneventful_steps(self.state.pool)

    def _disturbed(self) -> bool:
        """Whether something other than the calendar of the decode batch may need a decision in the
        next step.
        """
        state = self.state
        if state.prefilling or state.swapping or self._compressed or state.draining:
            return True
        if state.compressing and state.policy.compression.join is not Join.WHEN_DONE:
            return True
        if state.slots_due and can_assign_query_slots(state):
            return True
        if state.blocks_due and (state.stalled or state.paused):
            return True
        if state.paused and state.decoding.num_requests < state.limits.step_requests:
            return True
        return state.admission_due and may_admit(state)

    def fast_forward(self, num_steps: int) -> list[tuple[int, int]]:
        """Plan and commit up to `num_steps` steps (at most `uneventful_steps`) at once; return
        (free, cached) blocks in each.

        It may stop early. The result is the same, row for row, as that many calls of `plan` and
        `commit`.
        """
        state = self.state
        blocks = state.decoding.fast_forward(
            num_steps, state.pool, state.journal, self._explain if state.refusal_due else None
        )
        self.next_step = state.journal.step
        return blocks

    def _explain(self, grown: bool) -> None:
        """Write down why a step that only decodes did not admit the head of the queue.

        Where prefill comes first, the head is refused before requests grow, else after that. In the
        steps that follow, free blocks become fewer and nothing else changes, so the reason is the
        same in all of them.
        """
        if grown is not self.state.policy.batching.prefill_alone:
            explain_head(self.state)

    def take_reports(self) -> Int64Array:
        """Return what changed without a decision since this was last asked: the event sink's.

        Rows are `zlab.traces.schema.REPORT_COLUMNS`.
        """
        return self.state.journal.take_reports()

    def take_causes(self) -> Int64Array:
        """Return the reasons of decisions against requests since this was last asked: the event
        sink's.

        Rows are `zlab.traces.schema.CAUSE_COLUMNS`.
        """
        return self.state.journal.take_causes()

    def digest(self) -> str:
        """Return the SHA-256 of all decisions so far."""
        return self.state.journal.digest()

    # inside a step

    def _at(self, now_ns: int) -> SchedulerState:
        assert now_ns >= self.state.now_ns, (
            f"time ran backwards: {now_ns} after {self.state.now_ns}"
        )
        self.state.now_ns = now_ns
        return self.state

    def _decide(self, plan: StepPlan) -> None:
        state = self.state
        token_budget = state.limits.max_batched_tokens
        if state.policy.batching.in_running_order:
            admit(state, plan, self._plan_running(plan))
        elif state.policy.batching.prefill_alone:
            plan_prefill(state, plan, token_budget)
            if not plan.prefills:
                self._plan_decodes(plan)
        else:
            self._plan_decodes(plan)
            plan_prefill(state, plan, token_budget - plan.num_decodes)
            if state.chunks_take_blocks:  # a chunk may have preempted decodes
                plan.num_decodes = state.decoding.num_requests
                plan.context_tokens = state.decoding.context_tokens
        self._requeue_preempted()

    def _plan_running(self, plan: StepPlan) -> int:
        """Plan all that runs in running order; return the tokens of the budget that are left.

        The walk over the running list is only made where its order can matter.
        """
        state, decoding = self.state, self.state.decoding
        state.blocks_due = False
        if state.slots_due:
            assign_query_slots(state)
        due = decoding.take_undecided()
        budget = state.limits.max_batched_tokens
        walks = due or state.prefilling or state.stalled or state.paused
        if walks or decoding.num_requests > budget or decoding.num_growing() > state.pool.num_free:
            due += [*decoding.take_growing(), *state.stalled.values(), *state.paused.values()]
            return plan_in_running_order(state, plan, {request.number for request in due})
        decoding.grow_all(state.pool, state.journal)
        plan.num_decodes = decoding.num_requests
        plan.context_tokens = decoding.context_tokens
        return budget - plan.num_decodes

    def _unlock(self, plan: StepPlan) -> None:
        """Preempt the latest requests until one can go on, when all running requests are stalled
        and no copy is in flight.
        """
        state = self.state
        while plan.empty and not (state.compressing or state.swapping):
            victim = find_last_victim(state)
            if victim is None:
                return
            state.preempted_in_step.clear()
            preempt(state, plan, victim)
            if state.policy.batching.in_running_order:
                self._plan_running(plan)
            else:
                self._plan_decodes(plan)
                if plan.empty and state.chunks_take_blocks:
                    plan_prefill(state, plan, state.limits.max_batched_tokens)
            self._requeue_preempted()
        if plan.empty and not state.running:
            self._decide_again(plan)

    def _decide_again(self, plan: StepPlan) -> None:
        self.state.preempted_in_step.clear()
        self.state.admits = True
        self._decide(plan)

    def _join(self, plan: StepPlan) -> None:
        """Join what has finished elsewhere: swaps always, compressions as the join rule says."""
        state = self.state
        when_done = state.policy.compression.join is Join.WHEN_DONE
        for task in list(state.compressing):
            if when_done and task.request.number not in self._compressed:
                continue
            if task.request.to_abort:
                abandon_compression(state, task)
                self._end_in_flight(task.request)
            else:
                join_compression(state, plan, task)
        self._compressed.clear()  # each has been joined, or belonged to an ended request
        swaps, state.swapping = state.swapping, []
        for swap in swaps:
            request = swap.request
            (finish_swap_out if swap.out else finish_swap_in)(state, request)
            if request.to_abort:
                self._end_in_flight(request)
            elif swap.out:
                self._requeue(request)

    def _plan_decodes(self, plan: StepPlan) -> None:
        state = self.state
        decoding = state.decoding
        state.blocks_due = False
        if state.slots_due:
            assign_query_slots(state)
        due = decoding.take_undecided()
        if due or state.stalled or state.paused:
            due += decoding.take_growing()
            due += state.stalled.values()
            due += list(state.paused.values())[
                : max(state.limits.step_requests - decoding.num_requests, 0)
            ]
            due.sort(key=lambda request: request.line)
            for request in filter(_goes_on, due):
                allocate_next_block(state, plan, request)
        else:
            lacking = decoding.grow_all(state.pool, state.journal)
            while lacking:  # the first allocates, the others take of the free blocks what they need
                allocate_next_block(state, plan, lacking[0])
                lacking = decoding.grow(
                    list(filter(_goes_on, lacking[1:])), state.pool, state.journal
                )
        plan.num_decodes = decoding.num_requests
        plan.context_tokens = decoding.context_tokens

    def _commit_chunk(self, chunk: PrefillChunk, outcome: StepOutcome) -> None:
        state, request = self.state, chunk.request
        end = chunk.start + chunk.count
        request.recomputed_tokens += max(0, min(end, request.high_water) - chunk.start)
        request.computed_tokens = end
        state.book_idle(request, end)
        register_prompt(state, request, end)
        if not chunk.last:
            return
        del state.prefilling[request.line]
        if request.target_tokens > 0:
            request.generated += 1
            if request.first_token_ns < 0:
                request.first_token_ns = state.now_ns
        state.journal.emit(EventKind.FIRST, request.number, request.generated)
        if request.generated >= request.target_tokens:
            request.cache_tokens = end + 1
            self._complete(request, outcome)
        else:
            request.cache_tokens = end + 1
            state.start_decoding(request)

    def _complete(self, request: Request, outcome: StepOutcome) -> None:
        """End a request whose last token is computed, or, where steps are asynchronous, when that
        token has returned.
        """
        known = request.number in outcome.failed or request.number in outcome.stopped
        if self.state.policy.batching.is_asynchronous and not known:
            self.state.drain(request)
        else:
            self._finish(request, outcome)

    def _return_drained(self) -> None:
        """End the requests whose last token was computed in the step before."""
        for request in list(self.state.draining.values()):
            self._finish(request, EMPTY_OUTCOME)

    def _finish(self, request: Request, outcome: StepOutcome) -> None:
        """End a request that has its last token, unless the step that gave the token failed for it.

        A token that stops the request counts before the limit. In a trace, a forced length below
        the limit means that the request stopped.
        """
        self.state.decoding.settle_if_member(request)
        if request.number in outcome.failed:
            self._end(request, Status.FAILED, outcome.failed[request.number])
            return
        stopped = request.number in outcome.stopped
        assert stopped or request.generated >= request.target_tokens
        if request.forced_output_tokens == request.target_tokens:
            stopped |= (
                request.max_tokens is None or request.forced_output_tokens < request.max_tokens
            )
        self._end(request, Status.FINISHED, reason=Reason.STOP if stopped else Reason.LENGTH)

    def _end(self, request: Request, status: Status, message: str = "", reason: int = 0) -> None:
        """Emit the terminal event, now or when a copy in flight has finished. The id is free again
        at once.
        """
        if request.to_abort:
            return  # its end is decided already
        del self._ids[request.id]
        if request.in_flight:
            request.to_abort = True
            request.status, request.reason, request.message = status, reason, message
            return
        keep_content(self.state, request)
        self.state.end(request, status, reason, message)

    def _end_in_flight(self, request: Request) -> None:
        status, request.status = request.status, Status.LIVE
        keep_content(self.state, request)
        self.state.end(request, status, request.reason, request.message)

    def _requeue_preempted(self) -> None:
        for request in self.state.preempted_in_step:
            if not request.in_flight:
                self._requeue(request)

    def _requeue(self, request: Request) -> None:
        state = self.state
        state.waiting.push(request, state.policy.order.key(request, state.history))
        state.admission_due = True


def _goes_on(request: Request) -> bool:
    """Whether the request still runs, has been computed, and no copy uses its blocks."""
    return request.line >= 0 and not request.in_flight and request.phase is not Phase.PREFILL

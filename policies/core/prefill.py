"""Admission and chunked prefill: which waiting requests get blocks, and which prompt tokens a step
computes.
"""

from zlab.policies.core.decode import allocate_next_block, find_blocks
from zlab.policies.core.plan import PrefillChunk, StepPlan, SwapTask
from zlab.policies.core.policy import Findable, NeedsSlot
from zlab.policies.core.request import Request
from zlab.policies.core.state import (
    SchedulerState,
    adopt,
    match,
    match_prompt,
    register_prompt,
)
from zlab.traces.schema import Cause, EventKind, Phase, Verdict

NEXT_STEP = -1  # it would fit, but for this step's token budget
Shortage = tuple[Cause, tuple[int, int, int]]  # what is short: needed, available, total


def plan_prefill(state: SchedulerState, plan: StepPlan, token_budget: int) -> None:
    """Fill the step with prefill chunks: first of admitted requests, then of newly admitted ones.

    No request is admitted in a step with a preemption.
    """
    if state.short_prefills:
        state.note_short_prefills()
    if state.chunks_take_blocks:
        state.planned_tokens.clear()
        for request in list(state.prefilling.values()):
            if request.line >= 0:
                token_budget = _continue(state, plan, request, token_budget)
        state.planned_tokens.clear()
        _announce_chunks(state, plan)
    else:
        for request in state.prefilling.values():
            token_budget -= _cut(state, plan, request, token_budget)
    admit(state, plan, token_budget)


def admit(state: SchedulerState, plan: StepPlan, token_budget: int) -> None:
    """Admit waiting requests, unless a request was preempted in this step or none can enter."""
    if state.admits and (state.admission_due or state.refusal_due):
        _admit(state, plan, token_budget)


def plan_in_running_order(state: SchedulerState, plan: StepPlan, due: set[int]) -> int:
    """Plan decodes and prefill chunks in one walk over the running list.

    A decode takes one token of the budget and a chunk as many as it computes. A request that the
    budget does not reach sits the step out. A request that needs blocks may preempt one that the
    walk has passed: that one's tokens return to the budget.

    Args:
        state: The scheduler's state.
        plan: The step; chunks are added to it.
        due: Numbers of the requests outside the prefill that have something to decide.

    Returns:
        The tokens of the budget that are left.
    """
    budget = state.limits.max_batched_tokens
    planned, decoding = state.planned_tokens, state.decoding
    planned.clear()
    stopped = False
    for request in list(state.running.values()):
        number = request.number
        if request.line < 0 or request.in_flight or number in state.draining:
            continue
        if stopped or budget <= 0:
            if request.phase is Phase.DECODE:
                state.pause(request)
            continue
        if request.phase is Phase.PAUSED and decoding.num_requests >= state.limits.step_requests:
            continue
        num_preempted = len(state.preempted_in_step)
        if request.phase is Phase.PREFILL:
            _continue(state, plan, request, budget)
            budget -= planned.get(number, 0)
        else:
            if number in due:
                allocate_next_block(state, plan, request)
            if request.phase is Phase.DECODE:
                planned[number] = 1
                budget -= 1
        for victim in state.preempted_in_step[num_preempted:]:
            if victim is request:
                stopped = state.policy.batching.stops_at_own_preemption
            else:
                budget += planned.pop(victim.number, 0)
    planned.clear()
    _announce_chunks(state, plan)
    plan.num_decodes = decoding.num_requests
    plan.context_tokens = decoding.context_tokens
    return budget


def _continue(state: SchedulerState, plan: StepPlan, request: Request, token_budget: int) -> int:
    """Plan the next chunk of an admitted request and take the blocks it needs; return the token
    budget that is left.
    """
    count = _chunk_size(state, request.prefill_until - request.computed_tokens, token_budget)
    if count <= 0:
        return token_budget
    lacking = state.blocks_for(request.computed_tokens + count) - len(request.table)
    if lacking > 0:
        if not find_blocks(state, plan, request, lacking):
            return token_budget
        fresh = state.pool.take(lacking)
        request.table += fresh
        state.journal.emit(EventKind.TOOK, request.number, 0, fresh)
    _cut(state, plan, request, token_budget, announced=False)
    state.planned_tokens[request.number] = count
    return token_budget - count


def _announce_chunks(state: SchedulerState, plan: StepPlan) -> None:
    """Record the chunks that the walk over the running list has left in the plan."""
    for chunk in plan.prefills:
        state.journal.emit(EventKind.CHUNK, chunk.request.number, chunk.count)


def _chunk_size(state: SchedulerState, todo: int, token_budget: int) -> int:
    limit = state.policy.batching.chunk_limit
    return min(todo, token_budget, limit) if limit else min(todo, token_budget)


def may_admit(state: SchedulerState) -> bool:
    """Whether the next step may admit a request. Where the head of the queue certainly has to wait,
    that is recorded.
    """
    request = state.waiting.first()
    if request is None:
        return False
    if not _full(state) and (
        state.policy.order.lookahead or request.swapped_blocks or _may_enter(state, request)
    ):
        return True
    state.admission_due = False
    state.refusal_due = state.journal.listens and not _explained(state, request, request)
    return False


def explain_head(state: SchedulerState) -> None:
    """Write down why the head of the queue is not admitted in a step that only decodes.

    `may_admit` was false before that step, and nothing but the growth of requests has changed since
    then.
    """
    head = state.waiting.first()
    prefill_alone = state.policy.batching.prefill_alone
    num_decodes = 0 if prefill_alone else state.decoding.num_requests
    left = state.limits.max_batched_tokens - num_decodes
    if head is None:
        state.refusal_due = False
        return
    if not _full(state) and left <= 0:
        shortage = (Cause.STEP_TOKENS, (1, 0, state.limits.max_batched_tokens))
    else:
        shortage = _shortage(state, head)
        state.refusal_due = False
    state.explain(head, Verdict.NOT_ADMITTED, *shortage, other=head.number)


def _cut(
    state: SchedulerState,
    plan: StepPlan,
    request: Request,
    token_budget: int,
    announced: bool = True,
) -> int:
    """Plan the next chunk of an admitted request, whose blocks are there; return its tokens."""
    todo = request.prefill_until - request.computed_tokens
    count = _chunk_size(state, todo, token_budget)
    if count > 0:
        chunk = PrefillChunk(request, request.computed_tokens, count, last=count == todo)
        plan.prefills.append(chunk)
        if announced:
            state.journal.emit(EventKind.CHUNK, request.number, count)
        if state.policy.prefix.findable is Findable.PLANNED:
            register_prompt(state, request, request.computed_tokens + count)
    return count


def _admit(state: SchedulerState, plan: StepPlan, token_budget: int) -> None:
    """Admit from the head of the waiting queue until one does not fit; skip ahead as far as the
    order allows.
    """
    order, limits = state.policy.order, state.limits
    state.refusal_due = False
    while (request := state.waiting.first()) is not None:
        if _full(state):
            state.admission_due = False  # until a request leaves
            _refuse(state, request, request)
            return
        if token_budget <= 0:
            tokens = (1, 0, limits.max_batched_tokens)
            _refuse(state, request, request, (Cause.STEP_TOKENS, tokens))
            return
        if state.policy.batching.limit_per_step and len(plan.prefills) >= limits.max_running:
            prefills = (1, 0, limits.max_running)
            _refuse(state, request, request, (Cause.STEP_REQUESTS, prefills))
            return
        admitted = _try(state, plan, request, token_budget)
        if admitted == NEXT_STEP or admitted is None:
            _refuse_tried(state, request, request, admitted, token_budget)
        if admitted == NEXT_STEP:
            return
        if admitted is None and request.skips < order.max_skips:
            admitted = _skip_ahead(state, plan, request, token_budget)
        if admitted is None or admitted == NEXT_STEP:
            state.admission_due = admitted is not None
            return
        token_budget -= admitted


def _refuse(
    state: SchedulerState,
    request: Request,
    head: Request,
    shortage: Shortage | None = None,
    token_budget: int | None = None,
) -> None:
    """Write down that the request was not admitted while `head` was the head of the queue."""
    if not state.journal.listens:
        return
    if shortage is None:
        if _explained(state, request, head):
            return
        shortage = _shortage(state, request, token_budget)
    state.explain(request, Verdict.NOT_ADMITTED, *shortage, other=head.number)


def _explained(state: SchedulerState, request: Request, head: Request) -> bool:
    """Whether the journal certainly has the reason already, found without a look into the cache.

    It stays the same when requests grow, because then fewer blocks are free.
    """
    last = request.refused
    if last is None or last[0] is not Verdict.NOT_ADMITTED or last[2] != head.number:
        return False
    if _full(state):
        return last[1] is Cause.RUNNING
    if last[1] is not Cause.BLOCKS or request.swapped_blocks:
        return False
    held = state.blocks_for(request.total_tokens)
    fill = request.total_tokens - (held - 1) * state.limits.block_size
    return (
        held - min(request.content.num_blocks, held) > state.pool.num_free
        and _slot_allows(state, held, fill)
        and not state.policy.admission.reserves_peak
        and state.decoding.num_requests < state.limits.max_batched_tokens
    )


def _refuse_tried(
    state: SchedulerState, request: Request, head: Request, answer: int | None, token_budget: int
) -> None:
    """Write down what `_try` answered to a request that it did not admit."""
    if answer == NEXT_STEP:
        tokens = (request.total_tokens, token_budget, state.limits.max_batched_tokens)
        _refuse(state, request, head, (Cause.STEP_TOKENS, tokens))
    else:
        _refuse(state, request, head, token_budget=token_budget)


def _full(state: SchedulerState) -> bool:
    """Whether as many requests run as may.

    Where a walk in running order spends the token budget, the budget alone bounds a step.
    """
    if state.policy.batching.limit_per_step:
        return False
    return len(state.running) >= _most_running(state)


def _most_running(state: SchedulerState) -> int:
    in_order = state.policy.batching.in_running_order
    return state.limits.max_running if in_order else state.limits.step_requests


def _skip_ahead(
    state: SchedulerState, plan: StepPlan, head: Request, token_budget: int
) -> int | None:
    """Admit one of the requests behind a head that does not fit; return what `_try` returns."""
    best: int | None = None
    lookahead = state.policy.order.lookahead
    for other in state.waiting.behind_first(lookahead) if lookahead else ():
        admitted = _try(state, plan, other, token_budget)
        if admitted is not None and admitted != NEXT_STEP:
            head.skips += 1
            return admitted
        _refuse_tried(state, other, head, admitted, token_budget)
        best = NEXT_STEP if admitted == NEXT_STEP else best
    return best


def _try(state: SchedulerState, plan: StepPlan, request: Request, token_budget: int) -> int | None:
    """Admit one request if it fits; return what it takes of the token budget. None or NEXT_STEP: it
    stays in the queue.
    """
    if request.swapped_blocks:
        return _swap_in(state, plan, request)
    if not _may_enter(state, request):
        return None
    held = state.blocks_for(request.total_tokens)
    fill = request.total_tokens - (held - 1) * state.limits.block_size
    hits = match(state, request)
    admission = state.policy.admission
    new = _num_new(state, held, hits)
    hit_tokens = len(hits) * state.limits.block_size
    todo = request.total_tokens - hit_tokens
    asks = request.total_tokens if admission.counts_hits_as_new else todo
    if asks > token_budget and not state.policy.batching.cuts_any and plan.prefills:
        return NEXT_STEP
    now = held  # blocks of the table after this step
    if admission.takes_by_chunk:
        now = state.blocks_for(hit_tokens + _chunk_size(state, todo, token_budget))
        if admission.checks_chunk_only:
            new -= held - now
    if not _blocks_allow(state, request, new):
        return None
    _start_prefill(state, request, hits, now - len(hits))
    if _needs_slot_now(state, held, fill) or (
        state.slots.needed is not NeedsSlot.NEVER and _eager(state, held)
    ):
        state.take_slot(request)
    before = len(plan.prefills)
    count = _cut(state, plan, request, token_budget)
    assert len(plan.prefills) == before + 1
    if count < todo:  # cut
        return min(count + asks - todo, token_budget)
    return min(asks, token_budget)


def _num_new(state: SchedulerState, held: int, hits: list[int]) -> int:
    """Return the free blocks that a request with `held` blocks needs if it owns `hits` of them."""
    if state.policy.admission.counts_hits_as_new:
        return held
    refs = state.pool.refs
    return held - sum(1 for block in hits if refs[block])


def _shortage(state: SchedulerState, request: Request, token_budget: int | None = None) -> Shortage:
    """Return what is short for a waiting request that the step does not admit.

    `token_budget` is what is left of the step's tokens, where the first chunk is all that must fit.
    """
    limits = state.limits
    if _full(state):
        return Cause.RUNNING, (1, 0, _most_running(state))
    if request.swapped_blocks:
        held, grows, missed, pins, needs_slot = _swap_in_needs(state, request)
        can_give = state.slots.can_give_back if request.compressions else state.slots.can_give
        if needs_slot and not can_give(held + missed):
            return state.slot_cause(held + missed)
        new = held + grows
        if pins and _blocks_allow(state, request, new):
            free = limits.num_blocks - state.slots.total_peak
            return Cause.SLOT_BLOCKS, (held, free, limits.num_blocks)
    else:
        held = state.blocks_for(request.total_tokens)
        fill = request.total_tokens - (held - 1) * limits.block_size
        if not _slot_allows(state, held, fill):
            return state.slot_cause(held)
        # Blocks that only the request can match have no owner, so they are no saving.
        shareable = min(request.content.num_blocks, (request.total_tokens - 1) // limits.block_size)
        hits = match_prompt(state, request, shareable)
        new = _num_new(state, held, hits)
        if state.policy.admission.checks_chunk_only:
            hit_tokens = len(hits) * limits.block_size
            most = limits.max_batched_tokens if token_budget is None else token_budget
            chunk = _chunk_size(state, request.total_tokens - hit_tokens, most)
            new -= held - state.blocks_for(hit_tokens + chunk)
    if state.policy.admission.reserves_peak:
        peak, free = state.peak_blocks(request), limits.num_blocks - state.reserved_blocks
        if peak > free:
            return Cause.RESERVED, (peak, free, limits.num_blocks)
    watermark = state.watermark()
    free = state.pool.num_free
    cause = Cause.WATERMARK if new <= free else Cause.BLOCKS
    kept = watermark if cause is Cause.WATERMARK else 0
    return cause, (new + kept, free, limits.num_blocks)


def _may_enter(state: SchedulerState, request: Request) -> bool:
    """Whether the request could be admitted, whatever it finds in the cache.

    Blocks that only it can match are free blocks, so only its shareable blocks can be had without
    free ones.
    """
    held = state.blocks_for(request.total_tokens)
    fill = request.total_tokens - (held - 1) * state.limits.block_size
    least = held - min(request.content.num_blocks, held)
    if state.policy.admission.checks_chunk_only:
        least = min(least, 1)
    return _slot_allows(state, held, fill) and _blocks_allow(state, request, least)


def _eager(state: SchedulerState, held: int) -> bool:
    """Whether free slots that no running request could use go to the next request."""
    return state.policy.slots.nearest_first and state.slots.can_give(held)


def _needs_slot_now(state: SchedulerState, held: int, fill: int) -> bool:
    """Whether the request cannot even be prefilled without a slot: every request needs one, or its
    prompt reaches into a window.
    """
    if state.slots.needed is NeedsSlot.NEVER:
        return False
    if state.slots.needed is NeedsSlot.ALWAYS:
        return True
    assert state.floor is not None
    return held >= state.floor and fill > state.limits.block_size - state.slots.window


def _slot_allows(state: SchedulerState, held: int, fill: int) -> bool:
    return not _needs_slot_now(state, held, fill) or state.slots.can_give(held)


def _blocks_allow(state: SchedulerState, request: Request, new: int) -> bool:
    """Whether `new` blocks are free, besides those that the policy keeps free while others run."""
    limits, admission = state.limits, state.policy.admission
    if (
        admission.reserves_peak
        and state.reserved_blocks + state.peak_blocks(request) > limits.num_blocks
    ):
        return False
    return new + state.watermark() <= state.pool.num_free


def _enter_line(state: SchedulerState, request: Request) -> None:
    state.waiting.serve(request)
    request.skips = 0
    request.refused = None
    request.line = state.next_line
    state.next_line += 1
    state.running[request.line] = request
    if request.first_admitted_ns < 0:
        request.first_admitted_ns = state.now_ns
    if state.policy.admission.reserves_peak:
        request.reserved_blocks = state.peak_blocks(request)
        state.reserved_blocks += request.reserved_blocks
    state.slots_due = state.blocks_due = True


def _start_prefill(state: SchedulerState, request: Request, hits: list[int], num_new: int) -> None:
    """Give the request its table, or the part for its first chunk: matched blocks, then fresh
    ones.
    """
    _enter_line(state, request)
    if not request.preemptions:  # recomputed tokens are not charged to the session again
        state.waiting.charge(request, request.prompt_tokens)
    size = state.limits.block_size
    adopt(state, request, hits)
    fresh = state.pool.take(num_new)
    request.table += fresh
    request.computed_tokens = len(hits) * size
    request.prefill_until = request.total_tokens
    request.hit_tokens += request.computed_tokens
    state.journal.emit(EventKind.ADMITTED, request.number, request.prefill_until)
    if hits:
        state.journal.emit(EventKind.HIT, request.number, request.computed_tokens, hits)
    state.journal.emit(EventKind.TOOK, request.number, 0, fresh)
    state.book_idle(request, request.computed_tokens)
    state.prefilling[request.line] = request
    state.enter(request, Phase.PREFILL)


def _swap_in_needs(state: SchedulerState, request: Request) -> tuple[int, bool, bool, bool, bool]:
    """Return what a swapped request needs to come back: its blocks, and whether it takes one more
    block, has missed its window, has its blocks reserved without a slot, and needs a slot.
    """
    held = request.swapped_blocks
    fill = request.cache_tokens - (held - 1) * state.limits.block_size
    missed = request.window_lost_at == held
    compressed, slotless = request.compressions > 0, state.slots.slotless
    pins = compressed and request.observed_from < 0 and not slotless
    grows = (
        not pins
        and fill > state.limits.block_size
        and (state.floor is None or held < state.floor or missed)
    )
    needs_slot = not pins and ((compressed and not slotless) or _needs_slot_now(state, held, fill))
    return held, grows, missed, pins, needs_slot


def _swap_in(state: SchedulerState, plan: StepPlan, request: Request) -> int | None:
    """Bring a swapped request back if its blocks, space for its next token and, where it needs one,
    a slot are there.

    A compressed request always needs a slot: without one it could not go past its window, nor be
    preempted when host memory is full. The blocks of a request that was compressed without a slot
    are reserved at its size.
    """
    held, grows, missed, pins, needs_slot = _swap_in_needs(state, request)
    can_give = state.slots.can_give_back if request.compressions else state.slots.can_give
    if (needs_slot and not can_give(held + missed)) or not _blocks_allow(
        state, request, held + grows
    ):
        return None
    if pins and not state.slots.can_pin(held):
        return None
    _enter_line(state, request)
    request.table = state.pool.take(held)
    if needs_slot:
        state.take_slot(request)
    else:
        request.observed_from = -1  # the queries in its host copy stay there
        if pins:
            state.pin(request)
    request.in_flight = True
    task = SwapTask(request, list(request.table), out=False)
    state.swapping.append(task)
    plan.swaps.append(task)
    state.journal.emit(EventKind.SWAP_IN, request.number, request.cache_tokens, request.table)
    state.book_idle(request, request.cache_tokens)
    state.enter(request, Phase.SWAPPING_IN)
    return 0

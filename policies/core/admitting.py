"""Prefill: which waiting requests get blocks, and which prompt tokens this step computes."""

from policies.core.events import Kind
from policies.core.plan import PrefillChunk, StepPlan, SwapTask
from policies.core.policy import NeedsSlot
from policies.core.request import Phase, Request
from policies.core.sharing import adopt, match
from policies.core.state import State

NEXT_STEP = -1  # would fit, but for this step's token budget


def plan_prefill(state: State, plan: StepPlan, token_budget: int) -> None:
    """Fill the step with prefill chunks: first requests already under way, then newly admitted ones.

    Nobody is admitted in a step that preempted.
    """
    for request in state.prefilling.values():
        token_budget = _cut(state, plan, request, token_budget)
    if state.admits and state.admission_due:
        _admit(state, plan, token_budget)


def may_admit(state: State) -> bool:
    """Whether the next step may admit somebody; where it is plain that the line's head has to wait, it is noted."""
    request = state.waiting.first()
    if request is None:
        return False
    if not _full(state) and (state.policy.order.lookahead or request.swapped_blocks or _may_enter(state, request)):
        return True
    state.admission_due = False
    return False


def _cut(state: State, plan: StepPlan, request: Request, token_budget: int) -> int:
    """Plan the next chunk of an admitted request; returns the budget that is left."""
    todo = request.prefill_until - request.computed_tokens
    count = min(todo, token_budget)
    if count > 0:
        chunk = PrefillChunk(request, request.computed_tokens, count, last=count == todo)
        plan.prefills.append(chunk)
        state.journal.emit(Kind.CHUNK, request.number, count)
    return token_budget - count


def _admit(state: State, plan: StepPlan, token_budget: int) -> None:
    """Admit from the head of the waiting line until one does not fit, skipping it as far as the order allows."""
    order, batching = state.policy.order, state.policy.batching
    while (request := state.waiting.first()) is not None:
        if _full(state):
            state.admission_due = False  # until somebody leaves
            return
        if token_budget <= 0 or (batching.limit_per_step and len(plan.prefills) >= state.limits.max_running):
            return
        admitted = _try(state, plan, request, token_budget)
        if admitted == NEXT_STEP:
            return
        if admitted is None and request.skips < order.max_skips:
            admitted = _skip_ahead(state, plan, request, token_budget)
        if admitted is None or admitted == NEXT_STEP:
            state.admission_due = admitted is not None
            return
        token_budget -= admitted


def _full(state: State) -> bool:
    """As many run as may."""
    return not state.policy.batching.limit_per_step and len(state.running) >= state.limits.step_requests


def _skip_ahead(state: State, plan: StepPlan, head: Request, token_budget: int) -> int | None:
    """Admit one of those behind a head that does not fit; answers as `_try` does."""
    best: int | None = None
    lookahead = state.policy.order.lookahead
    for other in state.waiting.behind_first(lookahead) if lookahead else ():
        admitted = _try(state, plan, other, token_budget)
        if admitted is not None and admitted != NEXT_STEP:
            head.skips += 1
            return admitted
        best = NEXT_STEP if admitted == NEXT_STEP else best
    return best


def _try(state: State, plan: StepPlan, request: Request, token_budget: int) -> int | None:
    """Admit one request if it fits; returns what it takes of the token budget. None or NEXT_STEP: it stays in line."""
    if request.swapped_blocks:
        return _swap_in(state, plan, request)
    if not _may_enter(state, request):
        return None
    held = state.blocks_for(request.total_tokens)
    fill = request.total_tokens - (held - 1) * state.limits.block_size
    hits = match(state, request)
    admission = state.policy.admission
    refs = state.pool.refs
    new = held if admission.counts_hits_as_new else held - sum(1 for block in hits if refs[block])
    hit_tokens = len(hits) * state.limits.block_size
    todo = request.total_tokens - hit_tokens
    asks = request.total_tokens if admission.counts_hits_as_new else todo
    if asks > token_budget and not state.policy.batching.cuts_any and plan.prefills:
        return NEXT_STEP
    if not _blocks_allow(state, request, new):
        return None
    _start_prefill(state, request, hits, held - len(hits))
    if _needs_slot_now(state, held, fill) or (state.slots.needed is not NeedsSlot.NEVER and _eager(state, held)):
        state.take_slot(request)
    before = len(plan.prefills)
    _cut(state, plan, request, token_budget)
    assert len(plan.prefills) == before + 1
    return min(asks, token_budget)


def _may_enter(state: State, request: Request) -> bool:
    """Whether the request might be admitted, whatever it finds in the cache.

    Blocks that only it can match come out of the free ones, so no more than its shareable ones can be had for nothing.
    """
    held = state.blocks_for(request.total_tokens)
    fill = request.total_tokens - (held - 1) * state.limits.block_size
    return _slot_allows(state, held, fill) and _blocks_allow(
        state, request, held - min(request.content.num_blocks, held)
    )


def _eager(state: State, held: int) -> bool:
    """Free slots that nobody in the running line could use go to whom comes next."""
    return state.policy.slots.nearest_first and state.slots.can_give(held)


def _needs_slot_now(state: State, held: int, fill: int) -> bool:
    """It cannot even be prefilled without a slot: every request needs one, or its prompt reaches into a window."""
    if state.slots.needed is NeedsSlot.NEVER:
        return False
    if state.slots.needed is NeedsSlot.ALWAYS:
        return True
    assert state.floor is not None
    return held >= state.floor and fill > state.limits.block_size - state.policy.compression.window


def _slot_allows(state: State, held: int, fill: int) -> bool:
    return not _needs_slot_now(state, held, fill) or state.slots.can_give(held)


def _blocks_allow(state: State, request: Request, new: int) -> bool:
    """`new` blocks are free, and as many more as the policy wants to stay free while others run."""
    limits, admission = state.limits, state.policy.admission
    if admission.reserves_peak and state.reserved_blocks + state.peak_blocks(request) > limits.num_blocks:
        return False
    watermark = admission.watermark(limits.num_blocks) if state.running else 0
    return new + watermark <= state.pool.num_free


def _enter_line(state: State, request: Request) -> None:
    state.waiting.serve(request)
    request.skips = 0
    request.line = state.next_line
    state.next_line += 1
    state.running[request.line] = request
    if request.first_admitted_ns < 0:
        request.first_admitted_ns = state.now_ns
    if state.policy.admission.reserves_peak:
        request.reserved_blocks = state.peak_blocks(request)
        state.reserved_blocks += request.reserved_blocks
    state.slots_due = state.room_due = True


def _start_prefill(state: State, request: Request, hits: list[int], num_new: int) -> None:
    """Give the request its whole table: matched blocks, then fresh ones."""
    _enter_line(state, request)
    if not request.preemptions:  # what is computed again is no service to the session
        state.waiting.charge(request, request.prompt_tokens)
    size = state.limits.block_size
    adopt(state, request, hits)
    fresh = state.pool.take(num_new)
    request.table += fresh
    request.computed_tokens = len(hits) * size
    request.prefill_until = request.total_tokens
    request.hit_tokens += request.computed_tokens
    state.journal.emit(Kind.ADMITTED, request.number, request.prefill_until)
    if hits:
        state.journal.emit(Kind.HIT, request.number, request.computed_tokens, hits)
    state.journal.emit(Kind.TOOK, request.number, 0, fresh)
    state.book_idle(request, request.computed_tokens)
    state.prefilling[request.line] = request
    state.enter(request, Phase.PREFILL)


def _swap_in(state: State, plan: StepPlan, request: Request) -> int | None:
    """Bring a swapped request back if its blocks, room for its next token, and a slot where it needs one are there.

    A compressed one always needs a slot: without, it could neither go past its window nor, should host memory be full
    by then, ever give way.
    """
    held = request.swapped_blocks
    fill = request.cache_tokens - (held - 1) * state.limits.block_size
    missed = request.missed_window == held
    grows = fill > state.limits.block_size and (state.floor is None or held < state.floor or missed)
    needs_slot = request.compressions > 0 or _needs_slot_now(state, held, fill)
    can_give = state.slots.can_give_back if request.compressions else state.slots.can_give
    if (needs_slot and not can_give(held + missed)) or not _blocks_allow(state, request, held + grows):
        return None
    _enter_line(state, request)
    request.table = state.pool.take(held)
    if needs_slot:
        state.take_slot(request)
    else:
        request.observed_from = -1  # what its host copy has of them stays there
    request.in_flight = True
    task = SwapTask(request, list(request.table), out=False)
    state.swapping.append(task)
    plan.swaps.append(task)
    state.journal.emit(Kind.SWAP_IN, request.number, request.cache_tokens, request.table)
    state.book_idle(request, request.cache_tokens)
    state.enter(request, Phase.SWAPPING_IN)
    return 0

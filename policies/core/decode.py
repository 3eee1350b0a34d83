"""Decide what a request needs before it decodes its next token.

A request with `n` blocks of size `b` and a budget of N_max = 3 blocks, window w:

    tokens   0 ........ b ........ 2b ...... 3b-w .... 3b
    blocks   |    1     |    2     |    3     |        |
                                              ^        ^
             allocate a block at each b       |        the blocks are full: compress to 2 blocks,
                                              |        then go on (without slot: wait, see below)
                                              the observation window begins:
                                              a query slot must keep the next w queries

When no block is free, the policy selects a victim and the victim is preempted: its blocks are
released and recomputed later, or copied to host memory. A request that cannot go on and may not
preempt is stalled: it keeps its blocks and sits out. Free query slots are assigned to running
requests without one.
"""

from zlab.policies.core.block_pool import PrefixEntry
from zlab.policies.core.plan import CompressionTask, StepPlan, SwapTask
from zlab.policies.core.policy import Join, NeedsSlot, Recovery
from zlab.policies.core.request import Request
from zlab.policies.core.state import SchedulerState, findable_tokens, keep_own
from zlab.traces.schema import Cause, EventKind, Phase, Reason, Verdict


def find_victim(state: SchedulerState, needy: Request) -> Request | None:
    """Return the running request to preempt in favour of `needy` (perhaps itself), or None.

    The smallest rank is preferred, then the latest in running order. A request with a copy in
    flight cannot be preempted, nor can a compressed one for which host memory has no space.
    """
    preemption = state.policy.preemption
    rank_of, tokens_of, refs = preemption.rank_with_blocks, state.decoding.tokens, state.pool.refs
    least = 0 if preemption.least_is_zero else None
    best: Request | None = None
    best_rank: float = 0
    for request in reversed(state.running.values()):
        if request.in_flight or recovery_of(state, request) is None:
            continue
        rank = rank_of(
            request,
            needy,
            request.prompt_tokens + tokens_of(request)[1],
            lambda table=request.table: sum(1 for block in table if refs[block] == 1),  # type: ignore[misc]
        )
        if rank is None or (best is not None and rank >= best_rank):
            continue
        best, best_rank = request, rank
        if rank == least:
            break
    return best


def recovery_of(state: SchedulerState, request: Request) -> Recovery | None:
    """Return how the request would be recovered if it were preempted now, None if it cannot be."""
    wanted = state.policy.preemption.comes_back
    swappable = request.phase is not Phase.PREFILL and request.number not in state.draining
    if wanted is Recovery.SWAP and swappable:
        room = state.limits.host_blocks - state.host_blocks_used
        if len(request.table) <= room:
            return Recovery.SWAP
    return None if request.compressions else Recovery.RECOMPUTE


def find_last_victim(state: SchedulerState) -> Request | None:
    """Return the victim when no request can go on and the policy allows no preemption.

    It is the latest running request without a slot, or else the latest of all.
    """
    able = [
        request
        for request in state.running.values()
        if not request.in_flight and recovery_of(state, request)
    ]
    slotless = [request for request in able if request.slot < 0]
    return max(slotless or able, key=lambda request: request.line, default=None)


def preempt(
    state: SchedulerState,
    plan: StepPlan,
    request: Request,
    needy: Request | None = None,
    num_needed: int = 0,
) -> None:
    """Preempt a running request: its blocks return to the pool (one step later if swapped) and it
    waits again.

    Args:
        state: The scheduler's state.
        plan: The step.
        request: The victim.
        needy: The request that needs the blocks; None where no request could go on.
        num_needed: Blocks that it needs.
    """
    way = recovery_of(state, request)
    assert way is not None
    assert not request.in_flight
    if needy is None:
        amounts = (1, 0, len(state.running))
        state.explain(request, Verdict.PREEMPTED, Cause.DEADLOCK, amounts)
    else:
        amounts = (num_needed, state.pool.num_free, state.limits.num_blocks)
        state.explain(request, Verdict.PREEMPTED, Cause.BLOCKS, amounts, needy.number)
    if request.phase is Phase.DECODE:
        state.decoding.drop(request)
    request.preemptions += 1
    state.preempted_in_step.append(request)
    state.admits = False
    plan.preempted.append(request)
    state.charge_output(request)
    if way is Recovery.SWAP:
        _swap_out(state, plan, request)
        return
    in_prefill = request.phase is Phase.PREFILL
    computed = request.computed_tokens if in_prefill else request.total_tokens - 1
    request.high_water = max(request.high_water, computed)
    findable = _withdraw(state, plan, request)
    request.computed_tokens = 0
    request.window_lost_at = -1
    request.held_at_change = 0
    keep_own(state, request, findable)
    state.journal.emit(EventKind.PREEMPTED, request.number, computed)
    state.leave(request)
    state.enter(request, Phase.PREEMPTED)


def _withdraw(state: SchedulerState, plan: StepPlan, request: Request) -> int:
    """Take back what the step planned for a request that is preempted; return the leading tokens
    whose full blocks stay findable.

    Blocks that became findable when the chunk was planned are forgotten, because nothing computes
    them now. A policy may leave them findable, as vLLM does (`Preemption.keeps_withdrawn`).
    """
    findable = findable_tokens(state, request)
    planned = state.planned_tokens.get(request.number, 0)
    in_prefill = request.phase is Phase.PREFILL
    if in_prefill:
        plan.prefills = [chunk for chunk in plan.prefills if chunk.request is not request]
    if planned and state.policy.preemption.keeps_withdrawn:
        unknown = state.policy.batching.is_asynchronous and not in_prefill
        return min(findable + planned, request.total_tokens - unknown)
    full = findable // state.limits.block_size
    if in_prefill and full < request.num_registered:
        state.pool.forget_each(request.table[full : request.num_registered])
        request.num_registered = full
    return findable


def _swap_out(state: SchedulerState, plan: StepPlan, request: Request) -> None:
    """Start the copy to host memory. The blocks stay in transit until the next step boundary."""
    state.journal.emit(EventKind.PREEMPTED, request.number, 0)
    blocks = list(request.table)
    task = SwapTask(request, blocks, out=True)
    request.swaps += 1
    request.in_flight = True
    request.swapped_blocks = len(blocks)
    state.host_blocks_used += len(blocks)
    state.book_idle(request, request.cache_tokens)
    state.pool.held.update(blocks)
    state.journal.emit(EventKind.SWAP_OUT, request.number, request.cache_tokens, blocks)
    state.swapping.append(task)
    plan.swaps.append(task)
    for line in (state.stalled, state.paused):
        line.pop(request.line, None)
    state.enter(request, Phase.SWAPPED)


def finish_swap_out(state: SchedulerState, request: Request) -> None:
    """End the copy to host memory: the blocks are free and the request waits to be brought back."""
    state.pool.held.difference_update(request.table)
    request.in_flight = False
    state.admits = False  # the request that needed these blocks takes them before any new request
    state.leave(request)


def finish_swap_in(state: SchedulerState, request: Request) -> None:
    """End the copy from host memory: the request decodes again."""
    request.in_flight = False
    state.slots_due = True
    state.host_blocks_used -= request.swapped_blocks
    request.swapped_blocks = 0
    state.journal.emit(EventKind.SWAPPED_IN, request.number, request.cache_tokens)
    state.start_decoding(request)


def allocate_next_block(state: SchedulerState, plan: StepPlan, request: Request) -> None:
    """Let the request take part in this decode step, or record why it cannot.

    The request is a member of the decode batch or is stalled. Afterwards it is a member with space
    for one more token, or stalled, compressing or preempted.
    """
    size = state.limits.block_size
    if request.phase is Phase.DECODE:
        state.decoding.settle(request)
    held = len(request.table)
    if request.cache_tokens > held * size:
        if _must_compress(state, request, held):
            _compress(state, plan, request)
        else:
            _grow(state, plan, request)
    elif _lacks_slot(state, request, held):
        _stall(state, request, Reason.NO_SLOT)
    else:
        _go_on(state, request)


def _must_compress(state: SchedulerState, request: Request, held: int) -> bool:
    """Whether the request's blocks are full and it may not take another.

    Without the queries of its window it cannot be compressed: it grows or is preempted.
    """
    slots, slot = state.slots, request.slot
    if slots.pinned(request.number) is not None:
        return True
    if slot < 0 and not slots.slotless:
        return False
    limit = slots.limit(slot) if slot >= 0 else state.floor
    if limit is None or held < limit or request.window_lost_at == held:
        return False
    may_grow = state.policy.budget.may_grow(held, state.limits.block_size, state.view())
    return not (may_grow and (slot < 0 or slots.can_grow(slot, held + 1)))


def _lacks_slot(state: SchedulerState, request: Request, held: int) -> bool:
    """Whether the request enters its window without a slot for its queries and may not hold more
    blocks instead.
    """
    if (
        state.floor is None
        or held < state.floor
        or request.slot >= 0
        or request.window_lost_at == held
    ):
        return False
    if request.compressions:
        return False  # it was compressed without queries, and will be again
    size = state.limits.block_size
    if request.cache_tokens - (held - 1) * size <= size - state.slots.window:
        return False
    if state.policy.budget.may_grow(held, size, state.view()):
        request.window_lost_at = held
        return False
    return True


def _go_on(state: SchedulerState, request: Request) -> None:
    """Let the request decode in this step."""
    if request.phase is Phase.DECODE:
        if state.decoding.decides(len(request.table)):
            state.decoding.schedule(request)
        else:
            state.decoding.reschedule_growth(request)
        return
    state.stalled.pop(request.line, None)
    state.paused.pop(request.line, None)
    state.journal.emit(EventKind.RESUMED, request.number)
    state.start_decoding(request)


def _stall(state: SchedulerState, request: Request, reason: Reason, num_blocks: int = 0) -> None:
    """Stall the request: it keeps its blocks and sits out until what it waits for is there.

    `num_blocks` says how many blocks it needs, where it waits for blocks.
    """
    phase = Phase.WAITS_FOR_SLOT if reason is Reason.NO_SLOT else Phase.WAITS_FOR_BLOCK
    if request.phase is phase:
        return
    if request.phase is Phase.DECODE:
        state.stop_decoding(request, phase)
    else:
        state.paused.pop(request.line, None)
        state.enter(request, phase)
    state.stalled[request.line] = request
    state.journal.emit(EventKind.STALLED, request.number, reason)
    if reason is Reason.NO_SLOT:
        shortage = state.slot_cause(state.blocks_with_slot(request))
        state.explain(request, Verdict.NO_SLOT, *shortage)
    else:
        amounts = (num_blocks, state.pool.num_free, state.limits.num_blocks)
        state.explain(request, Verdict.NO_BLOCK, Cause.BLOCKS, amounts)


def find_blocks(state: SchedulerState, plan: StepPlan, request: Request, count: int) -> bool:
    """Make `count` blocks free, by preemption where the policy allows it.

    Returns False when they are not free, or when the request itself was preempted. Blocks on their
    way to host memory are free at the next step, so no request is preempted for them.
    """
    while state.pool.num_free < count:
        coming = sum(len(task.blocks) for task in state.swapping if task.out)
        victim = find_victim(state, request) if state.pool.num_free + coming < count else None
        if victim is None:
            return False
        preempt(state, plan, victim, request, count)
        if victim is request:
            return False
    return True


def _find_blocks(state: SchedulerState, plan: StepPlan, request: Request, count: int) -> bool:
    """Make `count` blocks free for a decode; the request is stalled where that is not possible."""
    found = find_blocks(state, plan, request, count)
    if not found and request.line >= 0 and not request.in_flight:
        _stall(state, request, Reason.NO_BLOCK, count)
    return found


def _grow(state: SchedulerState, plan: StepPlan, request: Request) -> None:
    """Give the request one more block.

    A compressed request without a slot can be compressed again instead, so no request is preempted
    for it.
    """
    if request.compressions and request.slot < 0 and not state.pool.num_free:
        _compress(state, plan, request)
        return
    if not _find_blocks(state, plan, request, 1):
        return
    taken = state.pool.take(1)
    request.table += taken
    if request.slot >= 0 and len(request.table) > state.slots.peak(request.slot):
        state.slots.hold(request.slot, len(request.table))
    state.journal.emit(EventKind.GREW, request.number, 0, taken)
    if _lacks_slot(state, request, len(request.table)):  # the window is as long as the block
        _stall(state, request, Reason.NO_SLOT)
    else:
        _go_on(state, request)


def _leading(state: SchedulerState, request: Request) -> tuple[int, int]:
    """Return (leading blocks with other owners, leading blocks with other owners or worth keeping
    in the cache).
    """
    shared = state.pool.shared(request.table)
    worth = shared
    if state.policy.prefix.keeps:
        entries = state.pool.entries
        while worth < len(request.table):
            if not isinstance(entries[request.table[worth]], PrefixEntry):
                break
            worth += 1
    return shared, worth


def _num_fresh(lead: int, left: int, held: int) -> int:
    """Return the number of fresh targets that replace `lead` leading blocks. The empty block at the
    end, if any, is private.
    """
    return left if lead == held else min(lead, left - 1)


def _compress(state: SchedulerState, plan: StepPlan, request: Request) -> None:
    """Start to compress the request's full blocks; fresh targets replace shared blocks and, where
    blocks are free, matchable ones.
    """
    size, held = state.limits.block_size, len(request.table)
    left = held  # its reserved blocks are fewer than today's budget, or there is no budget
    if state.floor is not None and held >= state.floor:
        left = state.policy.budget.shrink_to(held, size, state.view())
        assert state.floor <= left <= held, f"a budget answered {left} for {held} held blocks"
    while True:
        shared, lead = _leading(state, request)
        if _num_fresh(lead, left, held) > state.pool.num_free:
            lead = shared
        fresh = _num_fresh(lead, left, held)
        if fresh <= state.pool.num_free:
            break
        if not _find_blocks(state, plan, request, fresh):
            return
    if request.phase is Phase.DECODE:
        state.stop_decoding(request, Phase.COMPRESSING)
    else:
        state.stalled.pop(request.line, None)
        state.paused.pop(request.line, None)
        state.enter(request, Phase.COMPRESSING)
    task = _reduce(state, request, left, lead, state.pool.take(fresh))
    plan.compressions.append(task)
    state.compressing.append(task)
    if state.policy.compression.join is Join.BLOCKING:
        join_compression(state, plan, task)


def _reduce(
    state: SchedulerState, request: Request, left: int, lead: int, fresh: list[int]
) -> CompressionTask:
    """Return the task that copies the kept tokens into `left` blocks. Private targets lose their
    prefix entries.
    """
    size, sources = state.limits.block_size, request.table
    targets = fresh + sources[lead : lead + left - len(fresh)]
    kept = set(targets)
    lost = 0
    for block in targets[len(fresh) :]:
        lost += isinstance(state.pool.entries[block], PrefixEntry)
        state.pool.forget(block)
    if lost:
        state.journal.emit(EventKind.PREFIX_LOST, request.number, lost)
    dropped = [block for block in sources if block not in kept]
    state.pool.targets.update(targets)
    state.journal.emit(EventKind.COMPRESSING, request.number, len(sources) * size, targets)
    request.in_flight = True
    return CompressionTask(
        request,
        sources,
        targets,
        dropped,
        len(sources) * size,
        (left - 1) * size,
        first=not request.compressions,
    )


def join_compression(state: SchedulerState, plan: StepPlan, task: CompressionTask) -> None:
    """Join a finished compression: the request decodes on in its new table and the other blocks
    return to the pool.
    """
    request = task.request
    state.compressing.remove(task)
    state.blocks_due = True
    plan.joined.append(task)
    _settle_tables(state, task)
    request.compressions += 1
    request.cache_tokens = task.kept_tokens + 1
    if request.slot >= 0:
        state.slots.hold(request.slot, len(task.targets))
    elif state.slots.pinned(request.number) is not None:
        state.slots.pin(request.number, len(task.targets))
    state.slots_due = state.admission_due = True
    state.journal.emit(EventKind.COMPRESSED, request.number, task.kept_tokens, task.targets)
    state.start_decoding(request)


def _settle_tables(state: SchedulerState, task: CompressionTask) -> None:
    request = task.request
    state.pool.targets.difference_update(task.targets)
    request.in_flight = False
    request.table = list(task.targets)
    request.num_registered, request.tail, request.own = 0, None, None
    request.window_lost_at = -1
    request.observed_from = task.kept_tokens if request.slot >= 0 else -1
    request.held_at_change = min(request.held_at_change, len(task.targets))
    if task.dropped:
        state.release_each(request, task.dropped)


def abandon_compression(state: SchedulerState, task: CompressionTask) -> None:
    """Give up a finished compression whose request has ended: all its blocks become private again,
    to be freed.
    """
    state.compressing.remove(task)
    _settle_tables(state, task)


def can_assign_query_slots(state: SchedulerState) -> bool:
    """Whether there are free query slots and running requests that may need one."""
    return state.assigns_slots and state.slots.num_free > 0 and bool(state.running)


def assign_query_slots(state: SchedulerState) -> None:
    """Assign free slots to running requests without one: nearest to the window first, or in running
    order.
    """
    state.slots_due = False
    if not can_assign_query_slots(state):
        return
    nearest = state.policy.slots.nearest_first or state.slots.needed is NeedsSlot.ALWAYS
    if not nearest and next(reversed(state.running.values())).slot >= 0:
        return
    asking = [
        request
        for request in state.running.values()
        if request.slot < 0 and not request.in_flight and not request.compressions
    ]
    if nearest:
        asking = _by_distance(state, asking)
    for request in asking:
        if not state.slots.can_give(state.blocks_with_slot(request)):
            shortage = state.slot_cause(state.blocks_with_slot(request))
            state.explain(request, Verdict.NO_SLOT, *shortage)
            break
        state.take_slot(request)
        if request.phase is Phase.DECODE:
            state.decoding.settle(request)
            state.decoding.schedule(request)


def _by_distance(state: SchedulerState, asking: list[Request]) -> list[Request]:
    """Order requests by the tokens left until the next window that each could still observe ends;
    ties in running order.
    """
    size, floor, tick = state.limits.block_size, state.floor or 0, state.decoding.tick
    ranked: list[tuple[int, int, Request]] = []
    # this loop runs over all of them at every slot that becomes free: no calls inside
    for request in asking:
        held = len(request.table)
        if request.window_lost_at == held > 0:
            held += 1
        tokens = request.cache_tokens
        if request.phase is Phase.DECODE:
            tokens += tick - request.anchor
        elif request.phase is Phase.PREFILL:
            tokens = request.prefill_until
            held = max(held, -(-tokens // size))
        ranked.append(((held if held > floor else floor) * size - tokens, request.line, request))
    ranked.sort()
    return [request for _, _, request in ranked]

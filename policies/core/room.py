"""Before a request decodes its next token: does it have room for it, and a query slot where it needs one?"""

from policies.core.events import Kind, Reason
from policies.core.giving_way import find_victim, preempt
from policies.core.plan import CompressionTask, StepPlan
from policies.core.policy import Join
from policies.core.prefix import PrefixEntry
from policies.core.request import Phase, Request
from policies.core.state import State


def make_room(state: State, plan: StepPlan, request: Request) -> None:
    """Let the request take part in this decode step, or say why it cannot.

    A member of the decoding set or a stalled request comes in; it ends up in the decoding set (with room for one more
    token), stalled, compressing or preempted.
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


def _must_compress(state: State, request: Request, held: int) -> bool:
    """Its blocks are full: may it not take one more?

    Without the queries of its window it cannot be compressed: it grows, or gives way.
    """
    if request.slot < 0 or held < state.slots.limit(request.slot) or request.missed_window == held:
        return False
    may_grow = state.policy.budget.may_grow(held, state.limits.block_size, state.view())
    return not (may_grow and state.slots.can_grow(request.slot, held + 1))


def _lacks_slot(state: State, request: Request, held: int) -> bool:
    """Its window begins, it has no slot to keep the queries in, and it may not hold more blocks instead."""
    if state.floor is None or held < state.floor or request.slot >= 0 or request.missed_window == held:
        return False
    size = state.limits.block_size
    if request.cache_tokens - (held - 1) * size <= size - state.policy.compression.window:
        return False
    if state.policy.budget.may_grow(held, size, state.view()):
        request.missed_window = held
        return False
    return True


def _go_on(state: State, request: Request) -> None:
    """It decodes in this step."""
    if request.phase is Phase.DECODE:
        if state.decoding.decides(len(request.table)):
            state.decoding.schedule(request)
        else:
            state.decoding.reschedule_growth(request)
        return
    state.stalled.pop(request.line, None)
    state.paused.pop(request.line, None)
    state.journal.emit(Kind.RESUMED, request.number)
    state.start_decoding(request)


def _stall(state: State, request: Request, reason: Reason) -> None:
    """It keeps its blocks and sits out until what it waits for is there."""
    phase = Phase.WAITS_FOR_SLOT if reason is Reason.NO_SLOT else Phase.WAITS_FOR_BLOCK
    if request.phase is phase:
        return
    if request.phase is Phase.DECODE:
        state.stop_decoding(request, phase)
    else:
        state.paused.pop(request.line, None)
        state.enter(request, phase)
    state.stalled[request.line] = request
    state.journal.emit(Kind.STALLED, request.number, reason)


def _find_blocks(state: State, plan: StepPlan, request: Request, count: int) -> bool:
    """Have `count` free blocks, others giving way where the policy says so; False if there are not, or it gave way.

    Blocks that are on their way to host memory will be free at the next step: nobody else gives way for them.
    """
    while state.pool.num_free < count:
        coming = sum(len(task.blocks) for task in state.swapping if task.out)
        victim = find_victim(state, request) if state.pool.num_free + coming < count else None
        if victim is None:
            _stall(state, request, Reason.NO_BLOCK)
            return False
        preempt(state, plan, victim)
        if victim is request:
            return False
    return True


def _grow(state: State, plan: StepPlan, request: Request) -> None:
    """One more block."""
    if not _find_blocks(state, plan, request, 1):
        return
    taken = state.pool.take(1)
    request.table += taken
    if request.slot >= 0 and len(request.table) > state.slots.peak(request.slot):
        state.slots.hold(request.slot, len(request.table))
    state.journal.emit(Kind.GREW, request.number, 0, taken)
    if _lacks_slot(state, request, len(request.table)):  # the window is as long as the block
        _stall(state, request, Reason.NO_SLOT)
    else:
        _go_on(state, request)


def _leading(state: State, request: Request) -> tuple[int, int]:
    """(leading blocks that others own too, leading blocks that others own or that are worth keeping)."""
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
    """Fresh targets in place of `lead` leading blocks: the empty block at the end is an own one, if there is any."""
    return left if lead == held else min(lead, left - 1)


def _compress(state: State, plan: StepPlan, request: Request) -> None:
    """Start to reduce its full blocks; shared (and, given room, matchable) ones give place to fresh ones."""
    size, held = state.limits.block_size, len(request.table)
    left = held  # kept where less is set aside for it than the budget of now, or there is none
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


def _reduce(state: State, request: Request, left: int, lead: int, fresh: list[int]) -> CompressionTask:
    """The task that copies the kept tokens into `left` blocks; own blocks among them lose their prefix entries."""
    size, sources = state.limits.block_size, request.table
    targets = fresh + sources[lead : lead + left - len(fresh)]
    kept = set(targets)
    lost = 0
    for block in targets[len(fresh) :]:
        lost += isinstance(state.pool.entries[block], PrefixEntry)
        state.pool.forget(block)
    if lost:
        state.journal.emit(Kind.PREFIX_LOST, request.number, lost)
    dropped = [block for block in sources if block not in kept]
    state.pool.targets.update(targets)
    state.journal.emit(Kind.COMPRESSING, request.number, len(sources) * size, targets)
    request.in_flight = True
    return CompressionTask(
        request, sources, targets, dropped, len(sources) * size, (left - 1) * size, first=not request.compressions
    )


def join_compression(state: State, plan: StepPlan, task: CompressionTask) -> None:
    """The kept tokens are in place: the request decodes on in its new table, the rest goes back to the pool."""
    request = task.request
    state.compressing.remove(task)
    state.room_due = True
    plan.joined.append(task)
    _settle_tables(state, task)
    request.compressions += 1
    request.cache_tokens = task.kept_tokens + 1
    state.slots.hold(request.slot, len(task.targets))
    state.slots_due = state.admission_due = True
    state.journal.emit(Kind.COMPRESSED, request.number, task.kept_tokens, task.targets)
    state.start_decoding(request)


def _settle_tables(state: State, task: CompressionTask) -> None:
    request = task.request
    state.pool.targets.difference_update(task.targets)
    request.in_flight = False
    request.table = list(task.targets)
    request.num_registered, request.tail, request.own = 0, None, None
    request.missed_window = -1
    request.observed_from = task.kept_tokens
    request.held_at_change = min(request.held_at_change, len(task.targets))
    if task.dropped:
        state.release_each(request, task.dropped)


def abandon_compression(state: State, task: CompressionTask) -> None:
    """The copy is over, but its request has ended meanwhile: all blocks become its own again, to be freed."""
    state.compressing.remove(task)
    _settle_tables(state, task)

"""Replace the policy of a scheduler at a step boundary.

docs/DESIGN.md, "Changing the policy of a running engine", has the rules and their reasons. An
example, from full-kv to hybrid with N_max = 3 blocks:

    request   before              after
    r1        5 blocks, no slot   gets a slot when one is free; compressed to 2 blocks at its
                                  next full block
    r2        2 blocks, no slot   decodes on; needs a slot when its window begins
    r3        waiting             its place in the queue follows the new order
    back to full-kv: r1 keeps its slot and its reserved blocks, because a compressed request can
    never be recomputed; it grows again as far as the pool allows

Running requests go on. A compressed request keeps its slot under every policy. What no longer fits
together is settled so that requests with a slot can always go on.
"""

from zlab.policies.core.policy import NeedsSlot, Policy
from zlab.policies.core.query_slots import QuerySlots
from zlab.policies.core.request import Request
from zlab.policies.core.request_queue import RequestQueue
from zlab.policies.core.state import SchedulerState, register_prompt
from zlab.traces.schema import EventKind, Phase


def replace_policy(
    state: SchedulerState, policy: Policy, slots: QuerySlots, mark: int
) -> list[Request]:
    """Let `policy` decide from now on; call it between steps.

    `slots` is its new slot table. Returns the requests that already have all output tokens that are
    now possible; the caller ends them.
    """
    before = state.policy
    line = _line_up(state, policy)  # first: an own policy class that raises has changed nothing yet
    for request in state.requests.values():
        state.decoding.settle_if_member(request)
        if policy.order.fair_by_session and not before.order.fair_by_session:
            request.served_tokens = request.generated  # earlier tokens are not charged
    _share(state, policy, mark)
    state.policy = policy
    state.apply_prefix_rules()
    state.since_line = state.next_line
    _keep_slots(state, slots)
    for request in state.requests.values():
        _judge_window(state, request)
    _set_aside(state)
    state.note_short_prefills()
    complete = [request for request in state.requests.values() if _cap(state, request)]
    _follow(state)
    _reserve(state)
    state.waiting = line
    state.slots_due = state.admission_due = state.blocks_due = True
    return complete


def refresh_reservations(state: SchedulerState) -> None:
    """Raise the reserved blocks of slots to the budget where the pool now allows it."""
    lowest = _lowest(state)
    if lowest == state.floor:
        state.under_reserved = False
        for request in state.requests.values():
            state.decoding.settle_if_member(request)
        _follow(state)


def _share(state: SchedulerState, policy: Policy, mark: int) -> None:
    """Stop matching prefixes, or make the prefixes that running requests have computed findable."""
    index = state.spare_index if policy.prefix.enabled else None
    freed: list[int] = []
    if index is None and state.index is not None:
        freed = state.pool.forget_all()
        for request in state.requests.values():
            request.own, request.tail = None, None
    state.journal.emit(EventKind.POLICY, -1, mark, freed)
    if index is None or state.index is not None:
        state.index = index
        return
    state.index = index
    for request in state.running.values():
        if not request.compressions and not request.in_flight:
            request.num_registered, request.tail = 0, None
            computed = (
                request.computed_tokens
                if request.phase is Phase.PREFILL
                else request.total_tokens - 1
            )
            register_prompt(state, request, computed)


def _keep_slots(state: SchedulerState, slots: QuerySlots) -> None:
    """Keep the slots of holders, except of uncompressed ones where no request needs a slot any
    more.

    Where requests are compressed without slots, all slots are returned: a compression in flight is
    joined before the next step, which is before another request may hold its slot. A request that
    was compressed without a slot stays without one.
    """
    compressing = {task.request.number: len(task.targets) for task in state.compressing}
    before = state.slots
    for request in state.running.values():
        needs = not slots.slotless and (request.compressions or request.number in compressing)
        if slots.needed is NeedsSlot.NEVER and request.slot >= 0 and not needs:
            state.drop_slot(request)
    running = list(state.running.values())
    held = {request.slot: state.planned_blocks(request) for request in running if request.slot >= 0}
    pins = {
        request.number: compressing.get(request.number, len(request.table))
        for request in running
        if request.slot < 0
        and (request.compressions or request.number in compressing)
        and (before.slotless or before.pinned(request.number) is not None)
    }
    slots.succeed(before, held, {} if slots.slotless else pins)
    state.slots, state.floor = slots, slots.floor


def _judge_window(state: SchedulerState, request: Request) -> None:
    """Decide whether all queries of the request's window will be there when its last block is full.

    Where some are lost, the request takes one block more before it is compressed, as after any lost
    window.
    """
    held = request.held_at_change = state.planned_blocks(request) or request.swapped_blocks
    if state.slots.slotless:
        request.window_lost_at = -1
        return
    if not held or request.phase is Phase.COMPRESSING:
        return
    limits, window = state.limits, state.slots.window
    end = held * limits.block_size
    observed = request.observed_from >= 0 and end - request.observed_from >= window
    if request.slot >= 0 or request.compressions:
        if observed:
            request.window_lost_at = -1
        elif (
            request.slot >= 0
            and held >= state.slots.limit(request.slot)
            and request.window_lost_at != held
        ):
            request.window_lost_at = held
            if state.slots.can_grow(request.slot, held + 1):
                state.slots.hold(request.slot, held + 1)
            else:
                state.drop_slot(request)
    else:
        written = (
            request.prefill_until if request.phase is Phase.PREFILL else request.cache_tokens - 1
        )
        lost = (
            state.floor is not None
            and held >= state.floor
            and written > end - window
            and not observed
        )
        request.window_lost_at = held if lost else -1
    request.held_at_change += request.window_lost_at == held


def _set_aside(state: SchedulerState) -> None:
    """Reserve the new floor for each holder, in running order, as far as the pool goes."""
    for request in state.running.values():
        if request.slot >= 0:
            state.slots.hold(request.slot, state.blocks_with_slot(request))


def _lowest(state: SchedulerState) -> int | None:
    """Return the fewest blocks with which some request may have to decide; None: none ever does."""
    lowest = state.slots.lowest_limit()
    for task in state.compressing:
        lowest = len(task.targets) if lowest is None else min(lowest, len(task.targets))
    return lowest


def _follow(state: SchedulerState) -> None:
    """Apply today's budget and window to the calendar."""
    lowest = _lowest(state)
    state.under_reserved = lowest != state.floor
    members = [request for request in state.running.values() if request.phase is Phase.DECODE]
    state.decoding.retune(members, state.floor, state.slots.window, lowest)


def _reserve(state: SchedulerState) -> None:
    """Reserve the most that running requests may ever hold, or stop to reserve it."""
    state.reserved_blocks = 0
    for request in state.running.values():
        request.reserved_blocks = 0
        if state.policy.admission.reserves_peak:
            request.reserved_blocks = max(state.peak_blocks(request), len(request.table))
        state.reserved_blocks += request.reserved_blocks


def _line_up(state: SchedulerState, policy: Policy) -> RequestQueue:
    """Order the waiting requests by the new order."""
    line = RequestQueue(policy.order)
    line.succeed(state.waiting)
    for request in sorted(state.waiting, key=lambda request: request.number):
        line.push(request, policy.order.key(request, state.history))
    return line


def _cap(state: SchedulerState, request: Request) -> bool:
    """Set how many output tokens the request may have under the new policy; return whether it has
    them all.

    Without a budget it cannot outgrow the pool, nor can a request that fills the pool and has lost
    its window. The cap of an earlier policy is removed with that policy.
    """
    if request.to_abort:
        return False
    limits, wanted = state.limits, request.wanted_tokens
    room = limits.max_model_len - request.prompt_tokens
    target = room if wanted is None else min(wanted, room)
    used = _used(state, request)
    bound = state.floor is None or request.window_lost_at == limits.num_blocks
    most = request.generated + limits.num_blocks * limits.block_size - used + 1
    target = max(min(target, most), request.generated) if bound else target
    if target == request.target_tokens:
        return False
    request.target_tokens = target
    state.journal.emit(EventKind.CAPPED, request.number, target)
    request.message = ""
    if wanted is not None and target < wanted:
        limit = (
            f"limit {limits.max_model_len}"
            if target == room
            else f"pool of {limits.num_blocks} blocks"
        )
        request.message = f"output capped at {target} of {wanted} tokens by the {limit}"
    return request.generated >= target


def _used(state: SchedulerState, request: Request) -> int:
    """Return the cache positions of the request, its newest token included."""
    for task in state.compressing:
        if task.request is request:
            return task.kept_tokens + 1
    return request.cache_tokens if request.compressions else request.total_tokens

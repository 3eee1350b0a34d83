"""Another policy takes over at a step boundary: what it means for everyone who runs or waits.

The rules, with their reasons, stand in docs/DESIGN.md ("Changing the policy of a running engine"). In short: whoever
runs goes on; a compressed request keeps its slot, whatever the new policy says; what no longer fits together is
settled so that slotted requests can still always go on.
"""

from policies.core.events import Kind
from policies.core.policy import NeedsSlot, Policy
from policies.core.request import Phase, Request
from policies.core.sharing import register_prompt
from policies.core.slot_table import SlotTable
from policies.core.state import State
from policies.core.waiting import WaitingLine


def replace_policy(state: State, policy: Policy, slots: SlotTable, mark: int) -> list[Request]:
    """Let `policy`, whose fresh slot table is `slots`, decide from now on; between steps.

    Returns requests that have all the output tokens that are now possible: the caller ends them.
    """
    before = state.policy
    line = _line_up(state, policy)  # first: a policy of the user's own that raises has changed nothing yet
    for request in state.requests.values():
        state.decoding.settle_if_member(request)
        if policy.order.fair_by_session and not before.order.fair_by_session:
            request.served_tokens = request.generated  # what came before is not charged
    _share(state, policy, mark)
    state.policy = policy
    state.since_line = state.next_line
    _keep_slots(state, slots)
    for request in state.requests.values():
        _judge_window(state, request)
    _set_aside(state)
    complete = [request for request in state.requests.values() if _cap(state, request)]
    _follow(state)
    _reserve(state)
    state.waiting = line
    state.slots_due = state.admission_due = state.room_due = True
    return complete


def widen(state: State) -> None:
    """Where somebody's slot had less set aside than the budget: has that come to an end?"""
    lowest = _lowest(state)
    if lowest == state.floor:
        state.narrow = False
        for request in state.requests.values():
            state.decoding.settle_if_member(request)
        _follow(state)


def _share(state: State, policy: Policy, mark: int) -> None:
    """Prefixes: none are matched any more, or those that running requests have computed are found from now on."""
    index = state.spare_index if policy.prefix.enabled else None
    freed: list[int] = []
    if index is None and state.index is not None:
        freed = state.pool.forget_all()
        for request in state.requests.values():
            request.own, request.tail = None, None
    state.journal.emit(Kind.POLICY, -1, mark, freed)
    if index is None or state.index is not None:
        state.index = index
        return
    state.index = index
    for request in state.running.values():
        if not request.compressions and not request.in_flight:
            request.num_registered, request.tail = 0, None
            computed = request.computed_tokens if request.phase is Phase.PREFILL else request.total_tokens - 1
            register_prompt(state, request, computed)


def _keep_slots(state: State, slots: SlotTable) -> None:
    """Holders keep their slots, but for uncompressed ones where nobody needs one any more."""
    compressing = {task.request.number for task in state.compressing}
    for request in state.running.values():
        needs = request.compressions or request.number in compressing
        if slots.needed is NeedsSlot.NEVER and request.slot >= 0 and not needs:
            state.drop_slot(request)
    held = {request.slot: len(request.table) for request in state.running.values() if request.slot >= 0}
    slots.succeed(state.slots, held)
    state.slots, state.floor = slots, slots.floor


def _judge_window(state: State, request: Request) -> None:
    """Will the queries of its observation window, as long as it is now, all be there when its last block is full?

    Where some are lost, it takes one block more before it is compressed, as after any lost window.
    """
    held = request.held_at_change = len(request.table) or request.swapped_blocks
    if not held or request.phase is Phase.COMPRESSING:
        return
    limits = state.limits
    window = min(state.policy.compression.window, limits.block_size)
    end = held * limits.block_size
    observed = request.observed_from >= 0 and end - request.observed_from >= window
    if request.slot >= 0 or request.compressions:
        if observed:
            request.missed_window = -1
        elif request.slot >= 0 and held >= state.slots.limit(request.slot) and request.missed_window != held:
            request.missed_window = held
            if state.slots.can_grow(request.slot, held + 1):
                state.slots.hold(request.slot, held + 1)
            else:
                state.drop_slot(request)
    else:
        written = request.prefill_until if request.phase is Phase.PREFILL else request.cache_tokens - 1
        lost = state.floor is not None and held >= state.floor and written > end - window and not observed
        request.missed_window = held if lost else -1
    request.held_at_change += request.missed_window == held


def _set_aside(state: State) -> None:
    """For holders in line order: the new budget at its least, as far as the pool goes."""
    for request in state.running.values():
        if request.slot >= 0:
            state.slots.hold(request.slot, state.blocks_with_slot(request))


def _lowest(state: State) -> int | None:
    """Fewest blocks with which somebody may have to decide; None: nobody ever does."""
    lowest = state.slots.lowest_limit()
    for task in state.compressing:
        lowest = len(task.targets) if lowest is None else min(lowest, len(task.targets))
    return lowest


def _follow(state: State) -> None:
    """The calendar goes by the budget and the window of now."""
    lowest = _lowest(state)
    state.narrow = lowest != state.floor
    members = [request for request in state.running.values() if request.phase is Phase.DECODE]
    state.decoding.retune(members, state.floor, state.policy.compression.window, lowest)


def _reserve(state: State) -> None:
    """Room for the most that running requests may ever hold is set aside, or no longer."""
    state.reserved_blocks = 0
    for request in state.running.values():
        request.reserved_blocks = 0
        if state.policy.admission.reserves_peak:
            request.reserved_blocks = max(state.peak_blocks(request), len(request.table))
        state.reserved_blocks += request.reserved_blocks


def _line_up(state: State, policy: Policy) -> WaitingLine:
    """Whoever waits, where the new order puts it."""
    line = WaitingLine(policy.order)
    line.succeed(state.waiting)
    for request in sorted(state.waiting, key=lambda request: request.number):
        line.push(request, policy.order.key(request, state.history))
    return line


def _cap(state: State, request: Request) -> bool:
    """Set how many output tokens it may have under the new policy; whether it has them all.

    Without a budget it can't outgrow the pool; nor can a request that fills the pool and has lost its window. A cap of
    a policy that is gone goes with it.
    """
    if request.to_abort:
        return False
    limits, wanted = state.limits, request.wanted_tokens
    room = limits.max_model_len - request.prompt_tokens
    target = room if wanted is None else min(wanted, room)
    used = _used(state, request)
    bound = state.floor is None or request.missed_window == limits.num_blocks
    most = request.generated + limits.num_blocks * limits.block_size - used + 1
    target = max(min(target, most), request.generated) if bound else target
    if target == request.target_tokens:
        return False
    request.target_tokens = target
    state.journal.emit(Kind.CAPPED, request.number, target)
    request.message = ""
    if wanted is not None and target < wanted:
        limit = f"limit {limits.max_model_len}" if target == room else f"pool of {limits.num_blocks} blocks"
        request.message = f"output capped at {target} of {wanted} tokens by the {limit}"
    return request.generated >= target


def _used(state: State, request: Request) -> int:
    """Cache positions that it takes, its newest token's included."""
    for task in state.compressing:
        if task.request is request:
            return task.kept_tokens + 1
    return request.cache_tokens if request.compressions else request.total_tokens

"""Query slots along the running line: who gets a free one."""

from policies.core.policy import NeedsSlot
from policies.core.request import Phase, Request
from policies.core.state import State


def may_hand_out(state: State) -> bool:
    """Whether there are slots to hand out, and somebody may ask for one."""
    return state.hands_out and state.slots.num_free > 0 and bool(state.running)


def hand_out_slots(state: State) -> None:
    """Free slots go to running requests without one: nearest to the window first, or along the line."""
    state.slots_due = False
    if not may_hand_out(state):
        return
    nearest = state.policy.slots.nearest_first or state.slots.needed is NeedsSlot.ALWAYS
    if not nearest and next(reversed(state.running.values())).slot >= 0:
        return
    asking = [request for request in state.running.values() if request.slot < 0 and not request.in_flight]
    if nearest:
        asking = _by_distance(state, asking)
    for request in asking:
        if not state.slots.can_give(state.blocks_with_slot(request)):
            break
        state.take_slot(request)
        if request.phase is Phase.DECODE:
            state.decoding.settle(request)
            state.decoding.schedule(request)


def _by_distance(state: State, asking: list[Request]) -> list[Request]:
    """By tokens until the next observation window that each could still keep ends, ties in running order."""
    size, floor, tick = state.limits.block_size, state.floor or 0, state.decoding.tick
    ranked: list[tuple[int, int, Request]] = []
    for request in asking:  # every slot that comes free goes through all of them: no calls in here
        held = len(request.table)
        if request.missed_window == held > 0:
            held += 1
        tokens = request.cache_tokens
        if request.phase is Phase.DECODE:
            tokens += tick - request.anchor
        elif request.phase is Phase.PREFILL:
            tokens = request.prefill_until
        ranked.append(((held if held > floor else floor) * size - tokens, request.line, request))
    ranked.sort()
    return [request for _, _, request in ranked]

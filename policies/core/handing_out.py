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
        asking.sort(key=lambda request: (_to_window(state, request), request.line))
    for request in asking:
        if not state.slots.can_give(state.blocks_with_slot(request)):
            break
        state.take_slot(request)
        if request.phase is Phase.DECODE:
            state.decoding.settle(request)
            state.decoding.schedule(request)


def _to_window(state: State, request: Request) -> int:
    """Tokens until the next observation window that it could still keep begins (negative: it begins in this step)."""
    tokens = request.prefill_until if request.phase is Phase.PREFILL else state.decoding.tokens(request)[0]
    blocks = max(state.blocks_with_slot(request), state.floor or 0)
    return blocks * state.limits.block_size - state.policy.compression.window - tokens

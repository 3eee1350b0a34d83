"""The watchdog: work that nothing could ever set going is reported instead of hanging."""

from policies.core.errors import StuckError
from policies.core.state import State


def watch(state: State, step: int) -> None:
    """Nothing to carry out: fine if nothing waits or a copy is in flight; otherwise nothing ever will (StuckError)."""
    if state.compressing or state.swapping or not state.requests:
        return
    waiting = [request.id for request in state.waiting][:5]
    stalled = [request.id for request in state.stalled.values()][:5]
    raise StuckError(
        f"step {step}: nothing runs and nothing is in flight, but {len(state.waiting)} requests wait "
        f"({', '.join(waiting)}) and {len(state.stalled)} are stalled ({', '.join(stalled)}); "
        f"{state.pool.num_free} of {state.limits.num_blocks} blocks and {state.slots.num_free} slots are free "
        f"under policy {state.policy.name!r}"
    )

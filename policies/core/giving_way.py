"""Preemption: who gives way when blocks run out, and what it gives up."""

from policies.core.events import Kind
from policies.core.plan import StepPlan, SwapTask
from policies.core.policy import ComesBack
from policies.core.request import Phase, Request
from policies.core.sharing import keep_own
from policies.core.state import State


def find_victim(state: State, needy: Request) -> Request | None:
    """The running request that gives way to `needy` (perhaps itself), or None if none may.

    Smallest rank first, the latest of a rank first. Requests with a copy in flight, and compressed ones that host
    memory has no room for, can't.
    """
    rank_of = state.policy.preemption.rank
    best: Request | None = None
    best_rank = 0
    for request in reversed(state.running.values()):
        if request.in_flight or way_back(state, request) is None:
            continue
        rank = rank_of(request, needy)
        if rank is None or (best is not None and rank >= best_rank):
            continue
        best, best_rank = request, rank
        if rank == 0:
            break
    return best


def way_back(state: State, request: Request) -> ComesBack | None:
    """How the request would come back if it were preempted now; None: not at all, so it can't be."""
    wanted = state.policy.preemption.comes_back
    if wanted is ComesBack.SWAP and request.phase is not Phase.PREFILL:
        room = state.limits.host_blocks - state.host_blocks_used
        if len(request.table) <= room:
            return ComesBack.SWAP
    return None if request.compressions else ComesBack.RECOMPUTE


def give_way_at_last(state: State) -> Request | None:
    """Nobody can go on and the policy lets nobody give way: the latest without a slot, or else the latest of all."""
    able = [request for request in state.running.values() if not request.in_flight and way_back(state, request)]
    slotless = [request for request in able if request.slot < 0]
    return max(slotless or able, key=lambda request: request.line, default=None)


def preempt(state: State, plan: StepPlan, request: Request) -> None:
    """Make a running request give way: its blocks go back to the pool (a step later if swapped), it waits again."""
    way = way_back(state, request)
    assert way is not None
    assert not request.in_flight
    if request.phase is Phase.DECODE:
        state.decoding.drop(request)
    request.preemptions += 1
    state.preempted_in_step.append(request)
    state.admits = False
    plan.preempted.append(request)
    state.charge_output(request)
    if way is ComesBack.SWAP:
        _swap_out(state, plan, request)
        return
    in_prefill = request.phase is Phase.PREFILL
    computed = request.computed_tokens if in_prefill else request.total_tokens - 1
    request.high_water = max(request.high_water, computed)
    request.computed_tokens = 0
    request.missed_window = -1
    request.held_at_change = 0
    keep_own(state, request, computed)
    state.journal.emit(Kind.PREEMPTED, request.number, computed)
    state.leave(request)
    state.enter(request, Phase.PREEMPTED)


def _swap_out(state: State, plan: StepPlan, request: Request) -> None:
    """Start the copy to host memory; its blocks are held until the next step boundary."""
    state.journal.emit(Kind.PREEMPTED, request.number, 0)
    blocks = list(request.table)
    task = SwapTask(request, blocks, out=True)
    request.swaps += 1
    request.in_flight = True
    request.swapped_blocks = len(blocks)
    state.host_blocks_used += len(blocks)
    state.book_idle(request, request.cache_tokens)
    state.pool.held.update(blocks)
    state.journal.emit(Kind.SWAP_OUT, request.number, request.cache_tokens, blocks)
    state.swapping.append(task)
    plan.swaps.append(task)
    for line in (state.stalled, state.paused):
        line.pop(request.line, None)
    state.enter(request, Phase.SWAPPED)


def finish_swap_out(state: State, request: Request) -> None:
    """The copy is in host memory: the blocks are free, the request waits to be brought back."""
    state.pool.held.difference_update(request.table)
    request.in_flight = False
    state.admits = False  # whoever it gave way to has been waiting for these blocks
    state.leave(request)


def finish_swap_in(state: State, request: Request) -> None:
    """The copy is back on the device: the request decodes again."""
    request.in_flight = False
    state.slots_due = True
    state.host_blocks_used -= request.swapped_blocks
    request.swapped_blocks = 0
    state.journal.emit(Kind.SWAPPED_IN, request.number, request.cache_tokens)
    state.start_decoding(request)

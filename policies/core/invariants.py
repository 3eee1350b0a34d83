"""What must hold at every step boundary. A broken invariant raises an AssertionError that names it.

`CheckedScheduler` recounts itself at every step boundary.
"""

from collections import Counter

from zlab.policies.core.block_pool import PrefixEntry
from zlab.policies.core.plan import EMPTY_OUTCOME, StepOutcome, StepPlan
from zlab.policies.core.policy import Findable, NeedsSlot
from zlab.policies.core.request import Request
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.core.state import SchedulerState
from zlab.traces.schema import Phase, Status

WAITING = (Phase.QUEUED, Phase.PREEMPTED, Phase.SWAPPED)


def check_state(scheduler: Scheduler) -> None:
    """Recount everything that the scheduler counts. Call it between `commit` (or `fast_forward`)
    and `plan`.
    """
    state = scheduler.state
    _pool(state)
    _places(state)
    _slots(state)
    _counts(state)
    for request in state.requests.values():
        _request(state, request)


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """Check a plan between `plan` and `commit`: every request has space, and no request writes what
    another reads.
    """
    state = scheduler.state
    limits, batching = state.limits, state.policy.batching
    size, pool = limits.block_size, state.pool
    tokens = plan.num_decodes + plan.num_prefill_tokens
    assert tokens <= limits.max_batched_tokens, (
        f"{tokens} tokens in a step of at most {limits.max_batched_tokens}"
    )
    assert not (batching.prefill_alone and plan.prefills and plan.num_decodes), (
        "prefill and decode share a step"
    )
    assert plan.num_decodes <= limits.max_running, (
        f"{plan.num_decodes} decodes, at most {limits.max_running} may be"
    )
    assert plan.num_decodes in (0, state.decoding.num_requests), (
        "a step decodes all members or none"
    )
    for request in state.running.values() if plan.num_decodes else ():
        if request.phase is not Phase.DECODE:
            continue
        used = state.decoding.tokens(request)[0]
        assert used <= len(request.table) * size, (
            f"{request.id} decodes token {used} in {len(request.table)} blocks"
        )
        _writable(state, request, request.table[-1:])
        if _window_begun(state, used, len(request.table)) and not request.compressions:
            assert request.slot >= 0 or request.window_lost_at == len(request.table), (
                f"{request.id} loses a query"
            )
    written: set[int] = set()
    for chunk in plan.prefills:
        end = chunk.start + chunk.count
        assert chunk.count > 0
        blocks = chunk.request.table[chunk.start // size : -(-end // size)]
        assert written.isdisjoint(blocks), f"{chunk.request.id} writes a block of another chunk"
        written.update(blocks)
        assert end <= len(chunk.request.table) * size, (
            f"{chunk.request.id} computes token {end} without a block"
        )
        if state.policy.prefix.findable is Findable.COMPUTED:
            _writable(state, chunk.request, blocks)
    window = min(state.policy.compression.window, size)
    for task in plan.compressions:
        if task.request.slot < 0 and (
            state.slots.slotless or state.slots.pinned(task.request.number) is not None
        ):
            continue
        seen = len(task.sources) * size - task.request.observed_from
        assert task in plan.joined or task.request.observed_from >= 0, (
            f"{task.request.id} is compressed without a slot"
        )
        assert task in plan.joined or seen >= window, (
            f"{task.request.id} is compressed with {seen} of {window} queries"
        )
    reading: set[int] = set()
    writing: set[int] = set()
    for task in state.compressing:
        kept = set(task.targets) & set(task.sources)
        assert sorted(task.dropped) == sorted(set(task.sources) - kept), (
            f"{task.request.id} drops a wrong block"
        )
        assert all(pool.refs[block] == 1 for block in task.targets), (
            f"{task.request.id} compresses into a shared block"
        )
        assert all(pool.entries[block] is None for block in task.targets), (
            f"{task.request.id} overwrites a match"
        )
        assert not writing & {*task.targets, *task.sources}, "two compressions share a target"
        reading.update(task.sources)
        writing.update(task.targets)
    assert pool.targets == writing, (
        "the pool marks other blocks as targets than the compressions write"
    )


def _writable(state: SchedulerState, request: Request, blocks: list[int]) -> None:
    for block in blocks:
        assert state.pool.refs[block] == 1, (
            f"{request.id} writes block {block}, which others own too"
        )
        assert block not in state.pool.targets, (
            f"{request.id} writes block {block}, a compression's target"
        )
        assert block not in state.pool.held, (
            f"{request.id} writes block {block}, which a copy still reads"
        )


def _window_begun(state: SchedulerState, used: int, held: int) -> bool:
    size = state.limits.block_size
    return (
        state.floor is not None and held >= state.floor and used > held * size - state.slots.window
    )


def _pool(state: SchedulerState) -> None:
    pool = state.pool
    owners = Counter(block for request in state.running.values() for block in request.table)
    owners.update(
        block for task in state.compressing for block in set(task.targets) - set(task.sources)
    )
    owned = sum(1 for refs in pool.refs if refs)
    cached = sum(
        1
        for refs, entry in zip(pool.refs, pool.entries, strict=True)
        if not refs and entry is not None
    )
    assert pool.num_cached == cached, (
        f"{pool.num_cached} cached blocks are booked, there are {cached}"
    )
    assert pool.num_free == pool.num_blocks - owned, (
        f"{pool.num_free} free of {pool.num_blocks}, but {owned} owned"
    )
    for block, refs in enumerate(pool.refs):
        assert refs == owners[block], (
            f"block {block} has {refs} references, {owners[block]} tables hold it"
        )
    extra = sum(refs - 1 for refs in pool.refs if refs)
    assert pool.num_shared_extra == extra, (
        f"{pool.num_shared_extra} extra owners are booked, there are {extra}"
    )
    assert not pool.targets & pool.held, (
        "a block is both a compression's target and held for a copy"
    )
    assert all(pool.refs[block] for block in pool.targets | pool.held), (
        "a target or held block has no owner"
    )
    held = {block for task in state.swapping if task.out for block in task.blocks}
    assert pool.held == held, (
        f"held blocks {pool.held} are not those on their way to host memory {held}"
    )
    if state.index is not None:
        entries = [
            (block, entry)
            for block, entry in enumerate(pool.entries)
            if isinstance(entry, PrefixEntry)
        ]
        assert len(entries) == state.index.num_entries, "the prefix index and the blocks disagree"
        assert all(entry.names(block) for block, entry in entries), (
            "an index entry names another block"
        )


def _places(state: SchedulerState) -> None:
    """Check that every live request is in exactly one place, the one that its phase names."""
    assert list(state.running) == sorted(state.running), "the running line is out of order"
    in_line = {request.number for request in state.waiting}
    swapping = {task.request.number for task in state.swapping}
    compressing = {task.request.number for task in state.compressing}
    assert len(swapping) == len(state.swapping), "a request is copied twice at once"
    assert len(compressing) == len(state.compressing), "a request is compressed twice at once"
    for line, request in state.running.items():
        assert request.line == line, f"{request.id} thinks it has place {request.line}, not {line}"
        assert request.number in state.requests, f"{request.id} runs, but is not alive"
    for number, request in state.requests.items():
        assert number == request.number
        places = {
            "waiting": number in in_line,
            "decoding": request.phase is Phase.DECODE,
            "prefilling": state.prefilling.get(request.line) is request,
            "stalled": state.stalled.get(request.line) is request,
            "paused": state.paused.get(request.line) is request
            or (request.line >= 0 and number in state.draining),
            "swapping": number in swapping,
            "compressing": number in compressing,
        }
        found = [name for name, there in places.items() if there]
        assert len(found) == 1, (
            f"{request.id} ({request.phase.name}) stands in {found or 'no place'}"
        )
        assert places["waiting"] == (request.line < 0), (
            f"{request.id} is both waiting and in the running line"
        )
        assert request.in_flight == (places["swapping"] or places["compressing"]), (
            f"{request.id} in flight?"
        )
        expected = {
            "waiting": WAITING,
            "decoding": (Phase.DECODE,),
            "prefilling": (Phase.PREFILL,),
            "stalled": (Phase.WAITS_FOR_SLOT, Phase.WAITS_FOR_BLOCK),
            "paused": (Phase.PAUSED,),
            "swapping": (Phase.SWAPPED, Phase.SWAPPING_IN),
            "compressing": (Phase.COMPRESSING,),
        }[found[0]]
        assert request.phase in expected, (
            f"{request.id} stands in {found[0]}, but its phase is {request.phase.name}"
        )
    members = len(state.waiting) + len(state.running)
    assert members == len(state.requests), (
        f"{members} requests wait or run, {len(state.requests)} are alive"
    )
    for name in ("prefilling", "stalled", "paused"):
        for line, request in getattr(state, name).items():
            assert state.running.get(line) is request, f"{request.id} is {name}, but does not run"


def _slots(state: SchedulerState) -> None:
    slots = state.slots
    holders = [request for request in state.requests.values() if request.slot >= 0]
    taken = sorted(request.slot for request in holders)
    assert len(set(taken)) == len(taken), f"a query slot has two holders: {taken}"
    assert slots.num_free == max(slots.num_slots - len(taken), 0), (
        f"{slots.num_free} of {slots.num_slots} slots free, {taken} taken"
    )
    assert sorted((*slots.unheld, *taken)) == list(range(slots.capacity)), (
        f"{slots.unheld} slots free, {taken} taken"
    )
    assert all(request.line >= 0 for request in holders), "a request holds a slot and does not run"
    if slots.needed is NeedsSlot.ALWAYS:
        since = [request for line, request in state.running.items() if line >= state.since_line]
        assert all(request.slot >= 0 for request in since), "a request runs without its slot"
    if slots.floor is not None:
        assert slots.num_slots * slots.floor <= state.limits.num_blocks, (
            "the slots' budgets exceed the pool"
        )
    assert slots.total_peak <= state.limits.num_blocks, (
        "slotted requests may come to need more than the pool"
    )
    for request in holders:
        peak = slots.peak(request.slot)
        assert len(request.table) <= peak, (
            f"{request.id} has {len(request.table)} blocks, its slot covers {peak}"
        )
    _pins(state, holders)


def _pins(state: SchedulerState, holders: list[Request]) -> None:
    """Check that a compressed request has a slot, or needs none, or has its blocks reserved."""
    slots = state.slots
    compressing = {task.request.number: len(task.targets) for task in state.compressing}
    for request in state.running.values():
        pinned = slots.pinned(request.number)
        compressed = request.compressions > 0 or request.number in compressing
        if slots.slotless or not compressed or request.slot >= 0:
            assert pinned is None, f"{request.id} has {pinned} blocks pinned"
        else:  # before the copy, or after it
            held = {len(request.table), compressing.get(request.number, len(request.table))}
            assert pinned in held, (
                f"{request.id} is compressed and has no slot; {pinned} of {held} blocks pinned"
            )
    assert not slots.slotless or not holders, "a slot is held where no request needs one"
    peaks = [slots.peak(request.slot) for request in holders]
    pins = [slots.pinned(request.number) or 0 for request in state.running.values()]
    assert slots.total_peak == sum(peaks + pins), (
        f"{slots.total_peak} blocks are set aside, not {peaks} and {pins}"
    )


def _counts(state: SchedulerState) -> None:
    limits, decoding = state.limits, state.decoding
    members = [request for request in state.requests.values() if request.phase is Phase.DECODE]
    assert decoding.num_requests == len(members), (
        f"{decoding.num_requests} decode by the books, {len(members)} do"
    )
    context = sum(decoding.tokens(request)[0] for request in members)
    assert decoding.context_tokens == context, (
        f"{decoding.context_tokens} context tokens are booked, there are {context}"
    )
    idle = sum(request.idle_tokens for request in state.requests.values())
    assert state.idle_tokens == idle, (
        f"{state.idle_tokens} idle tokens are booked, there are {idle}"
    )
    swapped = sum(request.swapped_blocks for request in state.requests.values())
    assert state.host_blocks_used == swapped, (
        f"{state.host_blocks_used} host blocks are booked, {swapped} are used"
    )
    assert state.host_blocks_used <= limits.host_blocks, "more in host memory than fits"
    reserved = sum(request.reserved_blocks for request in state.requests.values())
    assert state.reserved_blocks == reserved, (
        f"{state.reserved_blocks} blocks are booked as reserved, {reserved} are"
    )
    if not state.policy.batching.limit_per_step:
        since = sum(1 for line in state.running if line >= state.since_line)
        assert not since or len(state.running) <= limits.max_running, (
            f"{len(state.running)} of at most {limits.max_running} run"
        )
    waits = sum(1 for request in state.stalled.values() if request.phase is Phase.WAITS_FOR_SLOT)
    assert state.num_waiting_for_slot == waits, (
        f"{state.num_waiting_for_slot} wait for a slot by the books, {waits} do"
    )


def _request(state: SchedulerState, request: Request) -> None:
    size, held = state.limits.block_size, len(request.table)
    assert request.status is Status.LIVE or request.to_abort, (
        f"{request.id} is {request.status.name} and lives"
    )
    used, generated = state.decoding.tokens(request)
    assert generated <= request.target_tokens, (
        f"{request.id} has {generated} of {request.target_tokens} output tokens"
    )
    if request.phase is Phase.DECODE:
        assert generated < request.target_tokens, f"{request.id} has all its tokens and goes on"
        assert request.idle_tokens == 0
        assert used <= held * size + 1, f"{request.id} has {used} tokens in {held} blocks"
    elif request.phase is Phase.PREFILL:
        assert request.idle_tokens == request.computed_tokens
        assert request.computed_tokens < request.prefill_until
        if not state.chunks_take_blocks:
            assert request.prefill_until <= held * size, f"{request.id} lacks blocks for its prompt"
    elif request.line >= 0:
        assert request.idle_tokens == request.cache_tokens
        assert used <= held * size + 1, f"{request.id} has {used} tokens in {held} blocks"
    else:
        assert not request.table, f"{request.id} waits and holds blocks"
        assert request.idle_tokens == 0
    if state.floor is not None and not _adapts(state) and request.phase is not Phase.PREFILL:
        most = max(state.floor, state.blocks_for(request.prefill_until), request.held_at_change)
        assert held <= most, f"{request.id} holds {held} blocks, its budget and prompt allow {most}"
    assert request.num_registered <= held


def _adapts(state: SchedulerState) -> bool:
    """Whether the budget ever lets a request exceed its floor."""
    view, floor = state.view(), state.floor
    assert floor is not None
    idle = type(view)(view.num_blocks, view.num_blocks, 0, 0)
    return state.policy.budget.may_grow(floor, state.limits.block_size, idle)


class CheckedScheduler(Scheduler):
    """Decides as `Scheduler` does, and raises an AssertionError where an invariant is first
    broken.
    """

    def plan(self, now_ns: int) -> StepPlan | None:
        """Return the plan after checking it."""
        plan = super().plan(now_ns)
        if plan is not None:
            check_plan(self, plan)
        return plan

    def commit(self, plan: StepPlan, now_ns: int, outcome: StepOutcome = EMPTY_OUTCOME) -> None:
        """Apply the step, then recount."""
        super().commit(plan, now_ns, outcome)
        check_state(self)

    def fast_forward(self, num_steps: int) -> list[tuple[int, int]]:
        """Take steps without a decision, then recount."""
        blocks = super().fast_forward(num_steps)
        check_state(self)
        return blocks

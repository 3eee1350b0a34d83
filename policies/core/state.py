"""The state of the scheduler, and the operations that change several parts of it together.

It also contains prefix sharing: which blocks of a request can be matched, by other requests or by
itself.
"""

from collections.abc import Sequence
from dataclasses import replace

from zlab.policies.core.block_pool import BlockPool, PrefixIndex, PrivatePrefix
from zlab.policies.core.decode_batch import DecodeBatch
from zlab.policies.core.journal import EventSink, Journal
from zlab.policies.core.plan import CompressionTask, ConfigError, SchedulerLimits, SwapTask
from zlab.policies.core.policy import ClassMeans, NeedsSlot, Policy, PoolView
from zlab.policies.core.query_slots import QuerySlots
from zlab.policies.core.request import Request
from zlab.policies.core.request_queue import RequestQueue
from zlab.traces.schema import BlockState, Cause, EventKind, Phase, Reason, Status, Verdict

RELEASED_AS = {
    BlockState.FREE: EventKind.FREED,
    BlockState.CACHED: EventKind.CACHED,
    BlockState.OWNED: EventKind.LEFT,
    BlockState.SHARED: EventKind.LEFT,
}
TERMINAL = {
    Status.FINISHED: EventKind.FINISHED,
    Status.ABORTED: EventKind.ABORTED,
    Status.FAILED: EventKind.FAILED,
}


class SchedulerState:
    """Requests, pool, slots, queues. A `*_due` flag says that something changed and a decision must
    be made again.
    """

    def __init__(
        self,
        policy: Policy,
        limits: SchedulerLimits,
        sink: EventSink | None,
        index: PrefixIndex | None,
    ) -> None:
        self.policy = policy
        # the blocks that can be given out; a change of policy leaves the null blocks as they are
        self.num_null = policy.admission.null_blocks
        if self.num_null >= limits.num_blocks:
            raise ConfigError(
                f"{self.num_null} null blocks leave no block of a pool of {limits.num_blocks}"
            )
        self.limits = replace(limits, num_blocks=limits.num_blocks - self.num_null)
        limits = self.limits
        self.slots = QuerySlots(policy, limits)
        # fewest blocks that a compression leaves; None: never compress
        self.floor = self.slots.floor
        self.pool = BlockPool(limits.num_blocks, self.num_null)
        self.spare_index = index or PrefixIndex()  # empty while no blocks are shared
        self.index = self.spare_index if policy.prefix.enabled else None
        self.apply_prefix_rules()
        self.journal = Journal(sink)
        self.decoding = DecodeBatch(limits.block_size, self.floor, self.slots.window)
        self.history = ClassMeans()
        self.waiting = RequestQueue(policy.order)
        self.requests: dict[int, Request] = {}  # every live request by number
        self.running: dict[
            int, Request
        ] = {}  # requests that hold blocks, by running position, in running order
        self.stalled: dict[
            int, Request
        ] = {}  # by running position: would decode, but for a slot or a block
        self.num_waiting_for_slot = 0  # of the stalled
        self.prefilling: dict[int, Request] = {}  # by running position
        self.paused: dict[
            int, Request
        ] = {}  # by running position: beyond the limit of requests in one step
        # requests whose last token is computed and has not returned, by number, in running order
        self.draining: dict[int, Request] = {}
        self.compressing: list[CompressionTask] = []
        self.swapping: list[SwapTask] = []
        self.next_line = 0
        self.host_blocks_used = 0
        self.idle_tokens = 0  # cache tokens of running requests outside the decode batch
        self.preempted_in_step: list[Request] = []
        # tokens that the step being planned has given to each request of the running list, by
        # number; only where a request that comes later in the list may take them back
        self.planned_tokens: dict[int, int] = {}
        self.admits = (
            # False in a step with a preemption: the free blocks belong to the request that needed
            # them
            True
        )
        self.admission_due = False
        # the head of the queue has to wait, and the journal does not say why yet
        self.refusal_due = False
        self.slots_due = False
        self.blocks_due = False  # a stalled request may now find what it waits for
        # requests at earlier running positions were admitted under another policy
        self.since_line = 0
        # some slot has fewer blocks reserved than the budget, or is kept without any budget
        self.under_reserved = False
        # some request in prefill lacks blocks of its prompt: an earlier policy allocated by chunk
        self.short_prefills = False
        self.reserved_blocks = (
            0  # the most that running requests may ever hold, where admission reserves it
        )
        self.now_ns = 0
        self.ended: list[Request] = []  # ended since a driver last asked

    def apply_prefix_rules(self) -> None:
        """Let the pool and the prefix index follow the rules of the policy."""
        prefix = self.policy.prefix
        self.pool.unmatchable_first = prefix.unmatchable_first
        self.spare_index.keeps_copies = prefix.keeps_copies

    def watermark(self) -> int:
        """Return the blocks that an admission must leave free now; null blocks count as blocks."""
        if not self.running:
            return 0
        return self.policy.admission.watermark(self.limits.num_blocks + self.num_null)

    def view(self) -> PoolView:
        """Return the pool in numbers."""
        return PoolView(
            self.limits.num_blocks,
            self.pool.num_free,
            len(self.running),
            len(self.waiting) + len(self.stalled),
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold `num_tokens` cache positions."""
        return -(-num_tokens // self.limits.block_size)

    def peak_blocks(self, request: Request) -> int:
        """Return the most blocks the request needs at once if it lives to its last token."""
        tokens = request.cache_tokens if request.compressions else request.total_tokens
        return self.peak_blocks_of(tokens, request.target_tokens - request.generated)

    def peak_blocks_of(self, num_tokens: int, num_more: int) -> int:
        """Return the most blocks of `num_tokens` cache positions with `num_more` outputs to come.

        The last output token is never stored.
        """
        now = self.blocks_for(num_tokens)
        whole = max(now, self.blocks_for(num_tokens + num_more - 1))
        return whole if self.floor is None else max(now, min(whole, self.floor))

    @property
    def assigns_slots(self) -> bool:
        """Whether a request may run without a slot and get one later. After a change of policy this
        holds also where all need one.
        """
        needed = self.slots.needed
        if needed is NeedsSlot.ALWAYS:
            return next(iter(self.running), self.since_line) < self.since_line
        return needed is NeedsSlot.AT_WINDOW

    def written_tokens(self, request: Request) -> int:
        """Return the cache positions of a running request that hold keys and values. Its newest
        token is not written yet.
        """
        if request.phase is Phase.PREFILL:
            return request.computed_tokens
        return self.decoding.tokens(request)[0] - 1

    def blocks_with_slot(self, request: Request) -> int:
        """Return the blocks that the request needs with a slot until it can be compressed: one more
        if this window is already lost.
        """
        held = self.planned_blocks(request)
        return held + (request.window_lost_at == held > 0)

    @property
    def chunks_take_blocks(self) -> bool:
        """Whether a chunk may have to take the blocks that it writes: the policy allocates by
        chunk, or an earlier policy did and a prefill of that time is not finished.
        """
        return self.short_prefills or self.policy.admission.takes_by_chunk

    def note_short_prefills(self) -> None:
        """Find out whether a prefill of an earlier policy lacks blocks of its prompt."""
        self.short_prefills = not self.policy.admission.takes_by_chunk and any(
            len(request.table) < self.planned_blocks(request)
            for request in self.running.values()
            if request.phase is Phase.PREFILL
        )

    def planned_blocks(self, request: Request) -> int:
        """Return the blocks of the request's table, during its prefill those that the prefill will
        have taken.
        """
        held = len(request.table)
        if request.phase is Phase.PREFILL:
            return max(held, self.blocks_for(request.prefill_until))
        return held

    def enter(self, request: Request, phase: Phase) -> None:
        """Move a request to another phase."""
        if request.phase is Phase.WAITS_FOR_SLOT:
            self.num_waiting_for_slot -= 1
        if phase is Phase.WAITS_FOR_SLOT:
            self.num_waiting_for_slot += 1
        request.enter(phase, self.now_ns if request.last_token_ns < 0 else request.last_token_ns)

    def explain(
        self,
        request: Request,
        verdict: Verdict,
        cause: Cause,
        amounts: tuple[int, int, int],
        other: int = -1,
    ) -> None:
        """Write down why a decision went against the request, unless it was the last one as well.

        Args:
            request: The request.
            verdict: What was decided.
            cause: Which resource was short.
            amounts: Needed, available and total, in the unit of the cause.
            other: Number of another request that the decision names.
        """
        reason = (verdict, cause, other)
        if self.journal.listens and request.refused != reason:
            request.refused = reason
            self.journal.explain(request.number, verdict, cause, *amounts, other)

    def slot_cause(self, num_held: int) -> tuple[Cause, tuple[int, int, int]]:
        """Return why no query slot can be given to a request with `num_held` blocks, with the
        amounts.
        """
        slots = self.slots
        if not slots.num_free:
            return Cause.SLOTS, (1, 0, slots.num_slots)
        free = self.limits.num_blocks - slots.total_peak
        return Cause.SLOT_BLOCKS, (max(self.floor or 0, num_held), free, self.limits.num_blocks)

    def book_idle(self, request: Request, tokens: int) -> None:
        """Record that a running request outside the decode batch holds `tokens` cache tokens."""
        self.idle_tokens += tokens - request.idle_tokens
        request.idle_tokens = tokens

    def start_decoding(self, request: Request) -> None:
        """Add the request to the decode batch, or pause it where a step takes no more requests."""
        if self.decoding.num_requests >= self.limits.step_requests:
            self.book_idle(request, request.cache_tokens)
            self.paused[request.line] = request
            self.journal.emit(EventKind.STALLED, request.number, Reason.LIMIT)
            most = self.limits.step_requests
            self.explain(request, Verdict.PAUSED, Cause.RUNNING, (1, 0, most))
            self.enter(request, Phase.PAUSED)
            return
        self.book_idle(request, 0)
        request.refused = None
        self.enter(request, Phase.DECODE)
        self.decoding.add(request)

    def drain(self, request: Request) -> None:
        """Let a request whose last token is computed keep its blocks until the token returns."""
        if request.phase is Phase.DECODE:
            self.decoding.drop(request)
        self.book_idle(request, request.cache_tokens)
        self.enter(request, Phase.PAUSED)
        request.last_token_ns = self.now_ns
        self.draining[request.number] = request

    def pause(self, request: Request) -> None:
        """Leave a member of the decode batch out of the step; it keeps its blocks."""
        self.stop_decoding(request, Phase.PAUSED)
        self.paused[request.line] = request
        self.journal.emit(EventKind.STALLED, request.number, Reason.LIMIT)

    def stop_decoding(self, request: Request, phase: Phase) -> None:
        """Remove a request from the decode batch; it keeps its blocks."""
        self.decoding.drop(request)
        self.book_idle(request, request.cache_tokens)
        self.enter(request, phase)

    def take_slot(self, request: Request) -> None:
        """Give the request a query slot. The caller has checked that one can be given."""
        request.slot = self.slots.give(self.blocks_with_slot(request))
        if request.observed_from < 0:  # otherwise its queries come back with it
            request.observed_from = self.written_tokens(request)
        self.under_reserved |= self.decoding.decide_from(self.slots.limit(request.slot))
        self.journal.emit(EventKind.SLOT, request.number, request.slot)
        request.refused = None

    def drop_slot(self, request: Request) -> None:
        """Take the request's query slot back, if it has one."""
        if request.slot >= 0:
            self.slots.give_back(request.slot)
            self.journal.emit(EventKind.SLOT_FREED, request.number, request.slot)
            request.slot = -1
            if not request.swapped_blocks:
                request.observed_from = -1
            self.slots_due = self.admission_due = self.blocks_due = True

    def pin(self, request: Request) -> None:
        """Keep a compressed request without a slot at its size, under a policy with slots."""
        self.slots.pin(request.number, len(request.table))
        self.under_reserved |= self.decoding.decide_from(
            self.slots.limit_of_pinned(len(request.table))
        )

    def release(self, request: Request, blocks: Sequence[int]) -> None:
        """Release `blocks` of a request (in table order), last first, so that a prefix is reused
        after its extensions.
        """
        self.admission_due = self.blocks_due = True
        indexed = min(request.num_registered, len(blocks))
        own, entries = indexed, self.pool.entries
        while own < len(blocks) and entries[blocks[own]] is not None:
            own += 1
        for kind, run in ((EventKind.FREED, blocks[own:]), (EventKind.CACHED, blocks[indexed:own])):
            if run:
                backwards = list(reversed(run))
                self.pool.release_private(backwards, matchable=kind is EventKind.CACHED)
                self.journal.emit(kind, request.number, 0, backwards)
        self.release_each(request, blocks[:indexed])

    def release_each(self, request: Request, blocks: Sequence[int]) -> None:
        """Release blocks that other requests may own or match, one by one, last first."""
        self.admission_due = self.blocks_due = True
        run: list[int] = []
        run_kind = EventKind.FREED
        for block in reversed(blocks):
            kind = RELEASED_AS[self.pool.release(block)]
            if kind is not run_kind and run:
                self.journal.emit(run_kind, request.number, 0, run)
                run = []
            run_kind = kind
            run.append(block)
        if run:
            self.journal.emit(run_kind, request.number, 0, run)

    def leave(self, request: Request) -> None:
        """Release all that the request holds and remove it from the running list."""
        self.book_idle(request, 0)
        blocks, request.table = request.table, []
        if blocks:
            self.release(request, blocks)
        request.num_registered, request.tail = 0, None
        self.drop_slot(request)
        if self.slots.unpin(request.number):
            self.slots_due = True
        del self.running[request.line]
        for line in (self.stalled, self.prefilling, self.paused):
            line.pop(request.line, None)
        self.reserved_blocks -= request.reserved_blocks
        request.reserved_blocks = 0
        request.line = -1

    def end(self, request: Request, status: Status, reason: int = 0, message: str = "") -> None:
        """Emit the request's one terminal event and release all it holds."""
        if request.phase is Phase.DECODE:
            self.decoding.drop(request)
        if request.line >= 0:
            self.leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.draining.pop(request.number, None)
        self.host_blocks_used -= request.swapped_blocks
        request.swapped_blocks = 0
        self.charge_output(request)
        request.status, request.reason, request.message = status, reason, message or request.message
        self.enter(request, Phase.DONE)
        request.finish_ns = self.now_ns if request.last_token_ns < 0 else request.last_token_ns
        self.journal.emit(TERMINAL[status], request.number, reason)
        if status is Status.FINISHED:
            self.history.add(request.cls, request.generated)
        del self.requests[request.number]
        self.ended.append(request)
        self.admission_due = self.blocks_due = True

    def charge_output(self, request: Request) -> None:
        """Charge output tokens to the request's session that were not charged yet."""
        if self.policy.order.fair_by_session:
            _, generated = self.decoding.tokens(request)
            self.waiting.charge(request, generated - request.served_tokens)
            request.served_tokens = generated


def match(state: SchedulerState, request: Request) -> list[int]:
    """Return blocks that already hold the request's leading tokens, at most all but its last token.

    First come shareable prompt blocks, found by content. If all of those are there, blocks follow
    that only the request itself can match: those that it released when it was preempted and that
    were not reused since.
    """
    if state.index is None:
        return []
    usable = (request.total_tokens - 1) // state.limits.block_size
    own = request.own
    shareable = min(request.content.num_blocks, usable)
    hits = match_prompt(state, request, shareable)
    if own is not None and len(hits) == shareable:
        entries = state.pool.entries
        for block in own.table[shareable:usable]:
            if entries[block] is not own:
                break
            hits.append(block)
    return hits


def match_prompt(state: SchedulerState, request: Request, most: int) -> list[int]:
    """Return the blocks that hold the first `most` full blocks of the prompt, as far as they are
    found by content.
    """
    if state.index is None or not most:
        return []
    content = request.content
    return [entry.block for entry in state.index.match(content[index] for index in range(most))]


def adopt(state: SchedulerState, request: Request, blocks: list[int]) -> None:
    """Make the request an owner of matched blocks, which become the head of its new table."""
    for block in blocks:
        state.pool.retain(block)
    request.table = list(blocks)
    request.num_registered = min(len(blocks), request.content.num_blocks)
    request.tail = (
        state.pool.shareable_entry(blocks[request.num_registered - 1])
        if request.num_registered
        else None
    )


def register_prompt(state: SchedulerState, request: Request, computed_tokens: int) -> None:
    """Make every computed full prompt block matchable."""
    if state.index is None:
        return
    full = min(request.content.num_blocks, computed_tokens // state.limits.block_size)
    for index in range(request.num_registered, full):
        request.tail, freed = state.pool.register(
            state.index, request.tail, request.content[index], request.table[index]
        )
        if freed is not None:
            state.journal.report(freed, BlockState.FREE)
        state.admission_due = True
    request.num_registered = max(request.num_registered, full)


def keep_own(state: SchedulerState, request: Request, computed_tokens: int) -> None:
    """Mark the request's other full blocks before they are released, so that it can find them
    again.
    """
    if state.index is None or request.compressions:
        return
    if request.own is None:
        request.own = PrivatePrefix()
    request.own.table = request.table
    entries, own = state.pool.entries, request.own
    for block in request.table[request.num_registered : computed_tokens // state.limits.block_size]:
        entries[block] = own


def keep_content(state: SchedulerState, request: Request) -> None:
    """Let the full blocks of a request that ends keep their content until they are reused, or
    forget what only the request could match.
    """
    if state.policy.prefix.unmatchable_first and request.line >= 0 and not request.in_flight:
        state.decoding.settle_if_member(request)
        returned = request.number in state.draining  # its last token makes its last block known
        keep_own(
            state,
            request,
            request.total_tokens - 1 if returned else findable_tokens(state, request),
        )
    else:
        forget_own(state, request)


def findable_tokens(state: SchedulerState, request: Request) -> int:
    """Return the leading tokens of a running request whose full blocks are findable.

    The newest token is not computed yet. With asynchronous steps a generated token is known one
    step after it was computed, and its block with it.
    """
    if request.phase is Phase.PREFILL:
        return request.computed_tokens
    computed = request.total_tokens - 1
    late = state.policy.batching.is_asynchronous and computed > request.prefill_until
    return computed - late


def forget_own(state: SchedulerState, request: Request) -> None:
    """Forget the blocks that only this request could match: it ends, or they are about to be
    overwritten.
    """
    if request.own is not None:
        entries = state.pool.entries
        for block in request.table[request.num_registered :]:
            entries[block] = None


def forget_prompt(state: SchedulerState, request: Request) -> tuple[int, list[int]]:
    """No request matches blocks of this prompt any more, those of other owners included.

    Returns how many blocks could be matched, and those without owner, which are free now.
    """
    if state.index is None:
        return 0, []
    contents = (request.content[index] for index in range(request.content.num_blocks))
    blocks = state.index.blocks_of(contents)
    return len(blocks), state.pool.forget_each(blocks)

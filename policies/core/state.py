"""Everything the scheduler knows, in one place, and the few moves that touch several parts of it."""

from collections.abc import Sequence

from policies.core.blocks import BlockPool, BlockState
from policies.core.decoding import Decoding
from policies.core.events import Journal, Kind, Reason, Sink
from policies.core.limits import Limits
from policies.core.plan import CompressionTask, SwapTask
from policies.core.policy import ClassMeans, NeedsSlot, Policy, PoolView
from policies.core.prefix import PrefixIndex
from policies.core.request import Phase, Request, Status
from policies.core.slot_table import SlotTable
from policies.core.waiting import WaitingLine

RELEASED_AS = {
    BlockState.FREE: Kind.FREED,
    BlockState.CACHED: Kind.CACHED,
    BlockState.OWNED: Kind.LEFT,
    BlockState.SHARED: Kind.LEFT,
}
TERMINAL = {Status.FINISHED: Kind.FINISHED, Status.ABORTED: Kind.ABORTED, Status.FAILED: Kind.FAILED}


class State:
    """Requests, pool, slots, lines. `*_due` flags say that something changed and a question is worth asking again."""

    def __init__(self, policy: Policy, limits: Limits, sink: Sink | None, index: PrefixIndex | None) -> None:
        self.policy = policy
        self.limits = limits
        self.slots = SlotTable(policy, limits)
        self.floor = self.slots.floor  # fewest blocks a compression leaves, None: never compress
        self.pool = BlockPool(limits.num_blocks)
        self.spare_index = index or PrefixIndex()  # empty while nothing is shared
        self.index = self.spare_index if policy.prefix.enabled else None
        self.journal = Journal(sink)
        self.decoding = Decoding(limits.block_size, self.floor, policy.compression.window)
        self.history = ClassMeans()
        self.waiting = WaitingLine(policy.order)
        self.requests: dict[int, Request] = {}  # every live request by number
        self.running: dict[int, Request] = {}  # those that hold blocks, by place in line, in line order
        self.stalled: dict[int, Request] = {}  # by place in line: would decode, but for a slot or a block
        self.num_waiting_for_slot = 0  # of the stalled
        self.prefilling: dict[int, Request] = {}  # by place in line
        self.paused: dict[int, Request] = {}  # by place in line: beyond the limit of requests in one step
        self.compressing: list[CompressionTask] = []
        self.swapping: list[SwapTask] = []
        self.next_line = 0
        self.host_blocks_used = 0
        self.idle_tokens = 0  # cache tokens of running requests outside the decoding set
        self.preempted_in_step: list[Request] = []
        self.admits = True  # no newcomer in a step in which somebody gave way: the room is for who needed it
        self.admission_due = False
        self.slots_due = False
        self.room_due = False  # a stalled request may find now what it waits for
        self.since_line = 0  # whoever runs in an earlier place came in under another policy
        self.narrow = False  # somebody's slot has less set aside than the budget, or is kept without any budget
        self.reserved_blocks = 0  # the most that running requests may ever hold, where admission reserves it
        self.now_ns = 0
        self.ended: list[Request] = []  # ended since a driver last asked

    def view(self) -> PoolView:
        """The pool in numbers."""
        return PoolView(
            self.limits.num_blocks, self.pool.num_free, len(self.running), len(self.waiting) + len(self.stalled)
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` cache positions."""
        return -(-num_tokens // self.limits.block_size)

    def peak_blocks(self, request: Request) -> int:
        """The most blocks the request needs at once if it lives to its last token."""
        tokens = request.cache_tokens if request.compressions else request.total_tokens
        now = self.blocks_for(tokens)
        whole = max(now, self.blocks_for(tokens + request.target_tokens - request.generated - 1))
        return whole if self.floor is None else max(now, min(whole, self.floor))

    @property
    def hands_out(self) -> bool:
        """Whether somebody may run without a slot and get one later: after a change also where all need one."""
        needed = self.slots.needed
        if needed is NeedsSlot.ALWAYS:
            return next(iter(self.running), self.since_line) < self.since_line
        return needed is NeedsSlot.AT_WINDOW

    def written_tokens(self, request: Request) -> int:
        """Cache positions of a running request that hold keys and values: its newest token's is still to be written."""
        if request.phase is Phase.PREFILL:
            return request.computed_tokens
        return self.decoding.tokens(request)[0] - 1

    def blocks_with_slot(self, request: Request) -> int:
        """Blocks the request needs with a slot until it can be compressed: one more if this window is lost already."""
        held = len(request.table)
        return held + (request.missed_window == held > 0)

    def enter(self, request: Request, phase: Phase) -> None:
        """Move a request to another phase."""
        if request.phase is Phase.WAITS_FOR_SLOT:
            self.num_waiting_for_slot -= 1
        if phase is Phase.WAITS_FOR_SLOT:
            self.num_waiting_for_slot += 1
        request.enter(phase, self.now_ns)

    def book_idle(self, request: Request, tokens: int) -> None:
        """A running request outside the decoding set holds `tokens` cache tokens."""
        self.idle_tokens += tokens - request.idle_tokens
        request.idle_tokens = tokens

    def start_decoding(self, request: Request) -> None:
        """The request takes part in decode steps from the next one on, or is paused where a step takes no more."""
        if self.decoding.num_requests >= self.limits.step_requests:
            self.book_idle(request, request.cache_tokens)
            self.paused[request.line] = request
            self.journal.emit(Kind.STALLED, request.number, Reason.LIMIT)
            self.enter(request, Phase.PAUSED)
            return
        self.book_idle(request, 0)
        self.enter(request, Phase.DECODE)
        self.decoding.add(request)

    def stop_decoding(self, request: Request, phase: Phase) -> None:
        """Take a request out of the decoding set; it keeps its blocks."""
        self.decoding.drop(request)
        self.book_idle(request, request.cache_tokens)
        self.enter(request, phase)

    def take_slot(self, request: Request) -> None:
        """Give the request a query slot; the caller has asked whether one can be given."""
        request.slot = self.slots.give(self.blocks_with_slot(request))
        if request.observed_from < 0:  # otherwise its queries come back with it
            request.observed_from = self.written_tokens(request)
        self.narrow |= self.decoding.decide_from(self.slots.limit(request.slot))
        self.journal.emit(Kind.SLOT, request.number, request.slot)

    def drop_slot(self, request: Request) -> None:
        """Take the request's query slot back, if it has one."""
        if request.slot >= 0:
            self.slots.give_back(request.slot)
            self.journal.emit(Kind.SLOT_FREED, request.number, request.slot)
            request.slot = -1
            if not request.swapped_blocks:
                request.observed_from = -1
            self.slots_due = self.admission_due = self.room_due = True

    def release(self, request: Request, blocks: Sequence[int]) -> None:
        """The request gives up `blocks` (in table order), last first: a prefix is reused after its extensions."""
        self.admission_due = self.room_due = True
        indexed = min(request.num_registered, len(blocks))
        own, entries = indexed, self.pool.entries
        while own < len(blocks) and entries[blocks[own]] is not None:
            own += 1
        for kind, run in ((Kind.FREED, blocks[own:]), (Kind.CACHED, blocks[indexed:own])):
            if run:
                backwards = list(reversed(run))
                self.pool.release_private(backwards, matchable=kind is Kind.CACHED)
                self.journal.emit(kind, request.number, 0, backwards)
        self.release_each(request, blocks[:indexed])

    def release_each(self, request: Request, blocks: Sequence[int]) -> None:
        """Give up blocks that others may own or match, one by one, last first."""
        self.admission_due = self.room_due = True
        run: list[int] = []
        run_kind = Kind.FREED
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
        """The request holds nothing any more and leaves the running line."""
        self.book_idle(request, 0)
        blocks, request.table = request.table, []
        if blocks:
            self.release(request, blocks)
        request.num_registered, request.tail = 0, None
        self.drop_slot(request)
        del self.running[request.line]
        for line in (self.stalled, self.prefilling, self.paused):
            line.pop(request.line, None)
        self.reserved_blocks -= request.reserved_blocks
        request.reserved_blocks = 0
        request.line = -1

    def end(self, request: Request, status: Status, reason: int = 0, message: str = "") -> None:
        """The request's one terminal event; it gives back all it holds."""
        if request.phase is Phase.DECODE:
            self.decoding.drop(request)
        if request.line >= 0:
            self.leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.host_blocks_used -= request.swapped_blocks
        request.swapped_blocks = 0
        self.charge_output(request)
        request.status, request.reason, request.message = status, reason, message or request.message
        self.enter(request, Phase.DONE)
        request.finish_ns = self.now_ns
        self.journal.emit(TERMINAL[status], request.number, reason)
        if status is Status.FINISHED:
            self.history.add(request.cls, request.generated)
        del self.requests[request.number]
        self.ended.append(request)
        self.admission_due = self.room_due = True

    def charge_output(self, request: Request) -> None:
        """Book output tokens that the request's session has not been charged for yet."""
        if self.policy.order.fair_by_session:
            _, generated = self.decoding.tokens(request)
            self.waiting.charge(request, generated - request.served_tokens)
            request.served_tokens = generated

"""A request as the scheduler sees it."""

from enum import IntEnum

from policies.core.prefix import OwnContent, PrefixEntry, PromptContent


class Phase(IntEnum):
    """Where a request is in its life; the time in each adds up to end to end."""

    QUEUED = 0  # waits for its first admission
    PREFILL = 1
    DECODE = 2
    WAITS_FOR_SLOT = 3  # keeps its blocks
    WAITS_FOR_BLOCK = 4  # keeps its blocks
    COMPRESSING = 5
    PREEMPTED = 6  # waits to be recomputed
    SWAPPED = 7  # waits, its blocks in host memory
    SWAPPING_IN = 8
    PAUSED = 9  # has room, but a step takes no more requests
    DONE = 10


class Status(IntEnum):
    """How a request stands with the outside world; the last four are terminal and final."""

    LIVE = 0
    FINISHED = 1
    REFUSED = 2
    ABORTED = 3
    FAILED = 4


NUM_PHASES = len(Phase)


class Request:
    """One submitted request.

    Token counts of a decoding request are those at `anchor`, a count of decode steps: each decode step adds one to
    both, and nobody writes that down until the request leaves the decoding set (`Decoding.settle`).
    """

    __slots__ = (
        "anchor",
        "arrival_ns",
        "arrival_step",
        "cache_tokens",
        "cls",
        "compressions",
        "computed_tokens",
        "content",
        "due_tick",
        "finish_ns",
        "first_admitted_ns",
        "first_token_ns",
        "forced_output_tokens",
        "generated",
        "grow_tick",
        "held_at_change",
        "high_water",
        "hit_tokens",
        "id",
        "idle_tokens",
        "in_flight",
        "line",
        "max_tokens",
        "message",
        "missed_window",
        "num_registered",
        "number",
        "observed_from",
        "own",
        "phase",
        "phase_ns",
        "phase_since",
        "preemptions",
        "prefill_until",
        "priority",
        "prompt_tokens",
        "reason",
        "recomputed_tokens",
        "reserved_blocks",
        "served_tokens",
        "session",
        "skips",
        "slot",
        "status",
        "swapped_blocks",
        "swaps",
        "table",
        "tail",
        "target_tokens",
        "to_abort",
    )

    def __init__(
        self,
        number: int,
        id: str,
        arrival_ns: int,
        prompt_tokens: int,
        max_tokens: int | None,
        forced_output_tokens: int | None,
        content: PromptContent,
        session: str | None = None,
        cls: str | None = None,
        priority: int = 0,
    ) -> None:
        self.number = number
        self.id = id
        self.arrival_ns = arrival_ns
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens  # None: as many as fit
        self.forced_output_tokens = forced_output_tokens  # what a replay knows; no policy but an oracle looks at it
        self.content = content
        self.session = session
        self.cls = cls
        self.priority = priority
        self.target_tokens = 0  # output tokens after which it ends
        self.arrival_step = 0
        self.status = Status.LIVE
        self.reason = 0
        self.message = ""
        # progress
        self.phase = Phase.QUEUED
        self.generated = 0  # output tokens sampled so far
        self.computed_tokens = 0  # tokens whose keys and values are in the cache, while in prefill
        self.prefill_until = 0  # tokens this prefill computes in all
        self.cache_tokens = 0  # cache positions in use, the newest token (not yet written) included
        self.high_water = 0  # most tokens ever computed, to tell recomputed ones
        self.anchor = 0
        self.idle_tokens = 0  # tokens it holds in the cache while it does not decode, as booked in `State.idle_tokens`
        self.grow_tick = -1
        self.due_tick = -1
        # what it holds
        self.table: list[int] = []
        self.num_registered = 0  # leading blocks of the table that were put into the prefix index
        self.own: OwnContent | None = None  # what it gave up when it was preempted
        self.tail: PrefixEntry | None = None  # the entry of the last of them, parent of the next
        self.slot = -1
        self.line = -1  # place in the running line
        self.skips = 0  # times it was passed over at the head of the waiting line
        self.in_flight = False  # a copy reads or writes its blocks
        self.to_abort = False
        self.missed_window = -1  # table length at which it had no slot when its window began
        self.observed_from = -1  # first cache position from which on its slot (or its host copy) has every query
        self.held_at_change = 0  # blocks it had when the policy changed: its new budget may be less
        self.swapped_blocks = 0
        self.reserved_blocks = 0
        self._open_account(arrival_ns)

    def _open_account(self, arrival_ns: int) -> None:
        self.compressions = 0
        self.preemptions = 0
        self.swaps = 0
        self.hit_tokens = 0
        self.recomputed_tokens = 0
        self.served_tokens = 0  # output tokens already charged to the session's account
        self.first_admitted_ns = -1
        self.first_token_ns = -1
        self.finish_ns = -1
        self.phase_since = arrival_ns
        self.phase_ns = [0] * NUM_PHASES

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens so far (of a decoding request: at its anchor)."""
        return self.prompt_tokens + self.generated

    @property
    def wanted_tokens(self) -> int | None:
        """Output tokens asked for, by a limit or a forced length; None: as many as fit."""
        return min((n for n in (self.max_tokens, self.forced_output_tokens) if n is not None), default=None)

    def enter(self, phase: Phase, now_ns: int) -> None:
        """Go to another phase and book the time in the old one."""
        self.phase_ns[self.phase] += now_ns - self.phase_since
        self.phase = phase
        self.phase_since = now_ns

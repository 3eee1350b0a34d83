"""A request as the scheduler sees it."""

from zlab.policies.core.block_pool import PrefixEntry, PrivatePrefix, PromptContent
from zlab.traces.schema import NUM_PHASES, Phase, Status


class Request:
    """One submitted request.

    The token counts of a decoding request are those at `anchor`, a count of decode steps. Each
    decode step adds one to both; the counts are updated when the request leaves the decode batch
    (`DecodeBatch.settle`).
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
        "last_token_ns",
        "line",
        "max_tokens",
        "message",
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
        "refused",
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
        "window_lost_at",
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
        self.forced_output_tokens = (
            forced_output_tokens  # the length that a replay knows; no policy but an oracle reads it
        )
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
        self.computed_tokens = 0  # tokens whose keys and values are in the cache, during prefill
        self.prefill_until = 0  # tokens that this prefill computes in total
        # cache positions in use, including the newest token, which is not written yet
        self.cache_tokens = 0
        self.high_water = 0  # most tokens ever computed; tells which are recomputed
        self.anchor = 0
        # tokens it holds in the cache while it does not decode, as counted in
        # `SchedulerState.idle_tokens`
        self.idle_tokens = 0
        self.grow_tick = -1
        self.due_tick = -1
        # what it holds
        self.table: list[int] = []
        self.num_registered = 0  # leading blocks of the table that were entered in the prefix index
        self.own: PrivatePrefix | None = None  # what it released when it was preempted
        # the entry of the last registered block, parent of the next
        self.tail: PrefixEntry | None = None
        self.slot = -1
        self.line = -1  # position in the running list
        self.skips = 0  # how often it was passed over at the head of the waiting queue
        self.in_flight = False  # a copy reads or writes its blocks
        self.to_abort = False
        self.window_lost_at = -1  # table length at which its window began while it had no slot
        self.observed_from = (
            -1
        )  # first cache position from which on its slot (or its host copy) has every query
        # blocks it had when the policy changed; its new budget may be smaller
        self.held_at_change = 0
        self.swapped_blocks = 0
        self.reserved_blocks = 0
        # the last decision against it, as the journal has it: (verdict, cause, other)
        self.refused: tuple[int, int, int] | None = None
        self._open_account(arrival_ns)

    def _open_account(self, arrival_ns: int) -> None:
        self.compressions = 0
        self.preemptions = 0
        self.swaps = 0
        self.hit_tokens = 0
        self.recomputed_tokens = 0
        self.served_tokens = 0  # output tokens already charged to its session
        self.first_admitted_ns = -1
        self.first_token_ns = -1
        self.finish_ns = -1
        # when its last token was computed, while the output has not returned; otherwise -1
        self.last_token_ns = -1
        self.phase_since = arrival_ns
        self.phase_ns = [0] * NUM_PHASES

    # names of the field for own policy classes; the names of release 0.1.0 stay valid

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens (`prompt_tokens`)."""
        return self.prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens sampled so far (`generated`); of a decoding request, at its
        anchor.
        """
        return self.generated

    @property
    def request_class(self) -> str | None:
        """Class of the request in its trace (`cls`)."""
        return self.cls

    @property
    def session_id(self) -> str | None:
        """Session of the request (`session`)."""
        return self.session

    @property
    def total_tokens(self) -> int:
        """Number of prompt and output tokens so far; of a decoding request, at its anchor."""
        return self.prompt_tokens + self.generated

    @property
    def wanted_tokens(self) -> int | None:
        """Output tokens asked for, by a limit or a forced length; None: as many as fit."""
        return min(
            (n for n in (self.max_tokens, self.forced_output_tokens) if n is not None), default=None
        )

    def enter(self, phase: Phase, now_ns: int) -> None:
        """Change to another phase and add the time spent in the old one."""
        self.phase_ns[self.phase] += now_ns - self.phase_since
        self.phase = phase
        self.phase_since = now_ns

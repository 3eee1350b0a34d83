"""The vocabulary of a run: events and their effects, reasons, phases, block states, table columns.

The scheduler writes events; the recording stores them; metrics, timelines, dashboards and servers
read them. All take the vocabulary from this module, which imports the standard library only. Codes
and recorded names are a contract: a recording stores codes, and its manifest stores the names.

A request with 40 prompt tokens and three output tokens, with blocks of 32 tokens. The scheduler's
plan for a step writes before the step's work, its commit after it:

    step  written by  event      value  blocks   the request: phase  its blocks  its tokens
    0     plan        arrived       40           queued              -            0
    0     plan        admitted      40           prefill             -            0
    0     plan        took           0  0 1      prefill             0 1          0
    0     plan        chunk         40           prefill             0 1         40
    0     commit      first          1           decode              0 1         41
    1     plan        decodes        1           decode              0 1         42 from here on
    2     commit      freed          0  1 0      decode              -            0
    2     commit      finished       1           done                -            0

The value of `decodes` is the number of decoding requests of step 1 and of all steps up to the next
such event; that of `finished` is Reason.STOP. Each kind below says what its value is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Self


class _Labelled(IntEnum):
    # The defaults let mypy accept the look-up of a member by its code: `Phase(2)`.

    label: str
    words: str

    def __new__(cls, code: int, label: str = "", words: str = "") -> Self:
        member = int.__new__(cls, code)
        member._value_ = code
        member.label = label
        member.words = words or label
        return member


class BlockState(_Labelled):
    """The state of a block of the pool.

    Attributes:
        label: The name in a recording's manifest.
        words: The name on screen.
    """

    FREE = 0, "free", "free"  # no owner; its content cannot be used again
    OWNED = 1, "owned", "owned by one request"
    SHARED = 2, "shared", "shared prefix"  # several owners; read only
    CACHED = 3, "cached", "cached, no owner"  # no owner; its content can still be matched
    COMPACTION_TARGET = 4, "target", "compression target"  # a running compression writes to it
    # released; an unfinished copy still reads it
    IN_TRANSIT = 5, "held", "in flight (being copied)"


class Phase(_Labelled):
    """What a request does or waits for. The durations of all phases add up to its end-to-end
    latency.

    Attributes:
        label: The name in a recording; the table of requests has the column `<label>_s`.
        words: The name on screen.
    """

    QUEUED = 0, "queued"  # waits for its first admission
    PREFILL = 1, "prefill"
    DECODE = 2, "decode"
    WAITS_FOR_SLOT = 3, "slot_wait", "blocked: waits for a query slot"  # keeps its blocks
    WAITS_FOR_BLOCK = 4, "block_wait", "blocked: waits for a block"  # keeps its blocks
    COMPRESSING = 5, "compressing"
    PREEMPTED = 6, "preempted", "preempted, to be recomputed"
    SWAPPED = 7, "swapped", "swapped to host memory"
    SWAPPING_IN = 8, "swapped", "swapped to host memory"
    PAUSED = 9, "paused", "paused: the step takes no more requests"  # keeps its blocks
    DONE = 10, "done"

    @property
    def place(self) -> int:
        """The index of its label in `PHASES`, -1 for DONE."""
        return -1 if self is Phase.DONE else PHASES.index(self.label)


NUM_PHASES = len(Phase)
PHASES = tuple(dict.fromkeys(phase.label for phase in Phase if phase is not Phase.DONE))


class Status(_Labelled):
    """The status of a request as a caller sees it. The last four are final.

    Attributes:
        label: The name in a recording's table of requests.
    """

    LIVE = 0, "unfinished"
    FINISHED = 1, "finished"
    REFUSED = 2, "refused"
    ABORTED = 3, "aborted"
    FAILED = 4, "failed"


class Reason(IntEnum):
    """Why a request ended, was refused, or waits.

    Attributes:
        phase: For a reason to wait, the phase that the request waits in; otherwise None.
    """

    phase: Phase | None

    def __new__(cls, code: int, phase: Phase | None = None) -> Self:
        """Create a member with the phase in which a request waits for this reason."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.phase = phase
        return member

    # Ends. STOP: the last token says so, even where the request also meets its limit; in the replay
    # of a trace, the output is shorter than the limit.
    STOP = 1
    LENGTH = 2
    # Refusals.
    NEVER_FITS = 3
    TOO_LONG = 4
    EMPTY_PROMPT = 5
    BAD_MAX_TOKENS = 6
    # Waits of a request that keeps its blocks. LIMIT: the step takes no more requests.
    NO_SLOT = 7, Phase.WAITS_FOR_SLOT
    NO_BLOCK = 8, Phase.WAITS_FOR_BLOCK
    LIMIT = 9, Phase.PAUSED

    @property
    def label(self) -> str:
        """The name in a recording."""
        return self.name.lower()


class Verdict(_Labelled):
    """A decision of the scheduler against a request.

    Attributes:
        label: The name in a recording's manifest.
        words: The name on screen.
    """

    NOT_ADMITTED = 1, "not_admitted", "was not admitted"
    NO_SLOT = 2, "no_slot", "got no query slot"
    NO_BLOCK = 3, "no_block", "got no block"
    PAUSED = 4, "paused", "was left out of the step"
    PREEMPTED = 5, "preempted", "was preempted"


class Cause(_Labelled):
    """The resource that was short when the scheduler decided against a request.

    Attributes:
        label: The name in a recording's manifest.
        words: The unit of `needed`, `available` and `total` in the table `causes`.
    """

    BLOCKS = 1, "blocks", "free blocks"
    # needed includes the blocks that the policy keeps free
    WATERMARK = 2, "watermark", "free blocks"
    # the blocks that every running request may grow to are reserved
    RESERVED = 3, "reserved", "unreserved blocks"
    SLOTS = 4, "slots", "query slots"
    # a slot is free, but the pool could not hold all holders at their largest
    SLOT_BLOCKS = 5, "slot_blocks", "blocks not reserved for holders of slots"
    RUNNING = 6, "running", "places among the running requests"
    STEP_TOKENS = 7, "step_tokens", "tokens of the step"
    STEP_REQUESTS = 8, "step_requests", "prefills of the step"
    # all running requests are blocked and no copy is in flight
    DEADLOCK = 9, "deadlock", "requests that can go on"


class WrittenBy(Enum):
    """The call of the scheduler that writes an event. It decides whether the event takes effect at
    the start or at the end of its step.
    """

    PLAN = "submit or plan: the start of the step"
    COMMIT = "commit: the end of the step"
    BEFORE_END = "with the COMMIT event of the same request that follows, else as PLAN"
    ANY = "as the events around it in the same step"


class BlockEffect(Enum):
    """The effect of an event on the blocks that it names."""

    NONE = "names no blocks"
    TAKE = "fresh blocks become blocks of the request, which is their only owner"
    SHARE = "the request becomes one more owner of them"
    GIVE_BACK = "the request is no longer an owner of them"
    RESERVE = "fresh blocks become targets of the request's compression, not yet part of its table"
    REPLACE = "they are the whole new table of the request"
    COPY = "an unfinished copy reads them"
    FORGET = "they have no owner, and their content can no longer be matched"


class TokenEffect(Enum):
    """The effect of an event on the number of tokens that the request has in the cache."""

    NONE = "nothing"
    ADD_VALUE = "adds the event's value"
    ADD_ONE = "adds one"
    SET_VALUE = "sets it to the event's value"
    SET_VALUE_AND_ONE = "sets it to the event's value and one: the newest token has its own place"
    SET_ZERO = "sets it to zero"


@dataclass(frozen=True, slots=True)
class Effect:
    """The effects of an event.

    Attributes:
        value: The meaning of the event's `value`; "" where it is 0.
        stage: The call of the scheduler that writes the event.
        phase: The phase that the request enters; None where it stays in its phase. A request that
            is blocked enters the phase of the event's `Reason`.
        blocks: The effect on the blocks that the event names.
        state: The state of these blocks after the event. SHARED includes OWNED: the number of
            owners decides which of the two it is.
        tokens: The effect on the request's number of tokens in the cache.
    """

    value: str = ""
    stage: WrittenBy = WrittenBy.PLAN
    phase: Phase | None = None
    blocks: BlockEffect = BlockEffect.NONE
    state: BlockState | None = None
    tokens: TokenEffect = TokenEffect.NONE


_NO_EFFECT = Effect()


class EventKind(IntEnum):
    """The kind of an event of the scheduler.

    Attributes:
        meaning: What happened to the request (for DECODES, PREFIX_LOST and POLICY: to the run).
        effect: The effects on the request and its blocks.
    """

    meaning: str
    effect: Effect

    def __new__(cls, code: int, meaning: str = "", effect: Effect = _NO_EFFECT) -> Self:
        """Create a member with its meaning and effect."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        member.effect = effect
        return member

    ARRIVED = 1, "arrived", Effect("prompt tokens", phase=Phase.QUEUED)
    REFUSED = 2, "was refused", Effect("Reason", phase=Phase.DONE)
    ADMITTED = (
        3,
        "was admitted; its prefill begins",
        Effect(
            "prompt and output tokens to compute, matched ones included",
            phase=Phase.PREFILL,
            tokens=TokenEffect.SET_ZERO,
        ),
    )
    HIT = (
        4,
        "matched a known prefix",
        Effect(
            "matched tokens",
            blocks=BlockEffect.SHARE,
            state=BlockState.SHARED,
            tokens=TokenEffect.SET_VALUE,
        ),
    )
    TOOK = (
        5,
        "took blocks for its prefill",
        Effect(blocks=BlockEffect.TAKE, state=BlockState.OWNED),
    )
    CHUNK = (
        6,
        "computes a chunk of its prompt",
        Effect("tokens of the chunk", tokens=TokenEffect.ADD_VALUE),
    )
    FIRST = (
        7,
        "has its whole prompt computed, and a next token",
        Effect(
            "output tokens so far",
            stage=WrittenBy.COMMIT,
            phase=Phase.DECODE,
            tokens=TokenEffect.ADD_ONE,
        ),
    )
    GREW = (
        8,
        "took one more block to decode on",
        Effect(blocks=BlockEffect.TAKE, state=BlockState.OWNED),
    )
    SLOT = 9, "was assigned a query slot", Effect("query slot", stage=WrittenBy.ANY)
    SLOT_FREED = 10, "gave its query slot back", Effect("query slot", stage=WrittenBy.BEFORE_END)
    STALLED = 11, "waits, and keeps its blocks", Effect("Reason", stage=WrittenBy.ANY)
    RESUMED = 12, "decodes again", Effect(phase=Phase.DECODE)
    COMPRESSING = (
        13,
        "begins to be compressed",
        Effect(
            "tokens before it",
            phase=Phase.COMPRESSING,
            blocks=BlockEffect.RESERVE,
            state=BlockState.COMPACTION_TARGET,
        ),
    )
    COMPRESSED = (
        14,
        "decodes on with what its compression kept",
        Effect(
            "tokens kept",
            phase=Phase.DECODE,
            blocks=BlockEffect.REPLACE,
            state=BlockState.OWNED,
            tokens=TokenEffect.SET_VALUE_AND_ONE,
        ),
    )
    PREEMPTED = (
        15,
        "was preempted",
        Effect(
            "tokens to recompute; 0 where its blocks are swapped out",
            phase=Phase.PREEMPTED,
            tokens=TokenEffect.SET_ZERO,
        ),
    )
    SWAP_OUT = (
        16,
        "its blocks are copied to host memory",
        Effect(
            "tokens in the cache",
            phase=Phase.SWAPPED,
            blocks=BlockEffect.COPY,
            state=BlockState.IN_TRANSIT,
            tokens=TokenEffect.SET_VALUE,
        ),
    )
    SWAP_IN = (
        17,
        "its blocks are copied back from host memory",
        Effect(
            "tokens in the cache",
            phase=Phase.SWAPPING_IN,
            blocks=BlockEffect.TAKE,
            state=BlockState.OWNED,
            tokens=TokenEffect.SET_VALUE,
        ),
    )
    SWAPPED_IN = (
        18,
        "its blocks are back, and it decodes again",
        Effect("tokens in the cache", phase=Phase.DECODE, tokens=TokenEffect.SET_VALUE),
    )
    FREED = (
        19,
        "gave blocks back; they are free",
        Effect(stage=WrittenBy.BEFORE_END, blocks=BlockEffect.GIVE_BACK, state=BlockState.FREE),
    )
    CACHED = (
        20,
        "gave blocks back; their content can still be matched",
        Effect(stage=WrittenBy.BEFORE_END, blocks=BlockEffect.GIVE_BACK, state=BlockState.CACHED),
    )
    LEFT = (
        21,
        "gave up blocks that others own, too",
        Effect(stage=WrittenBy.BEFORE_END, blocks=BlockEffect.GIVE_BACK, state=BlockState.SHARED),
    )
    HELD = (
        22,
        "gave up blocks that an unfinished copy still reads",
        Effect(stage=WrittenBy.ANY, blocks=BlockEffect.COPY, state=BlockState.IN_TRANSIT),
    )
    FINISHED = (
        23,
        "finished",
        Effect("Reason", stage=WrittenBy.COMMIT, phase=Phase.DONE, tokens=TokenEffect.SET_ZERO),
    )
    ABORTED = (
        24,
        "was aborted",
        Effect(stage=WrittenBy.ANY, phase=Phase.DONE, tokens=TokenEffect.SET_ZERO),
    )
    FAILED = (
        25,
        "failed",
        Effect(stage=WrittenBy.COMMIT, phase=Phase.DONE, tokens=TokenEffect.SET_ZERO),
    )
    DECODES = 26, "the number of decoding requests of a step changed", Effect("decodes of the step")
    PREFIX_LOST = (
        27,
        "a compression overwrote blocks whose content could be matched",
        Effect("overwritten blocks"),
    )
    CAPPED = (
        28,
        "can have fewer output tokens than it asked for",
        Effect("output tokens it can have"),
    )
    POLICY = (
        29,
        "another policy decides from this step on",
        Effect("mark of the policy", blocks=BlockEffect.FORGET, state=BlockState.FREE),
    )
    CORRUPTED = (
        30,
        "its keys and values are damaged: no request matches its prompt any more",
        Effect(
            "prompt blocks that could be matched", blocks=BlockEffect.FORGET, state=BlockState.FREE
        ),
    )

    @property
    def label(self) -> str:
        """The name in a recording."""
        return self.name.lower()

    @property
    def ends(self) -> bool:
        """Whether the event ends the request."""
        return self.effect.phase is Phase.DONE


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a recording's table: the name of its Arrow type, and its meaning."""

    type: str
    meaning: str


def _count(meaning: str) -> Column:
    return Column("int32", meaning)


def _number(meaning: str) -> Column:
    return Column("int64", meaning)


def _seconds(meaning: str) -> Column:
    return Column("double", meaning)


def _text(meaning: str) -> Column:
    return Column("string", meaning)


# The tables of a recording by name, each with its columns in order. Event times are seconds from
# the start of the run, NaN where the event did not happen.
TABLES: Mapping[str, Mapping[str, Column]] = {
    # One row for each request, in the order in which requests ended; those that have not ended come
    # last.
    "requests": {
        "number": _number("number of the request in the run, from 0 in order of arrival"),
        "id": _text("id of the request"),
        "status": _text("label of its Status"),
        "reason": _text('label of its Reason, "" without one'),
        "message": _text("details of a refusal or failure"),
        "session": _text("session that it belongs to, null without one"),
        "cls": _text("class of the request, null without one"),
        "priority": _count("priority; larger is more urgent"),
        "arrival_s": _seconds("arrival"),
        "arrival_step": _number("first step that starts after its arrival"),
        "finish_step": _number("step in which it ended, -1 while it is alive"),
        "prompt_tokens": _number("tokens of its prompt"),
        "max_tokens": _number("limit of its output tokens, null for as many as fit"),
        "output_tokens": _number("output tokens it got"),
        "asked_output_tokens": _number("output tokens that the trace says, null without a trace"),
        "first_admitted_s": _seconds("first admission"),
        "first_token_s": _seconds("first output token"),
        "finish_s": _seconds("end"),
        **{f"{label}_s": _seconds(f"duration in phase {label!r}") for label in PHASES},
        "prefix_hit_tokens": _number("tokens found in the prefix cache, over all admissions"),
        "recomputed_tokens": _number("tokens computed again after preemptions"),
        "preemptions": _count("preemptions"),
        "swaps": _count("preemptions that swapped its blocks to host memory"),
        "compressions": _count("compressions"),
    },
    # One row for each step. Counts hold while the step runs.
    "steps": {
        "step": _number("number of the step, from 0"),
        "start_s": _seconds("start"),
        "end_s": _seconds("end"),
        "output_tokens": _count("output tokens that came out of it"),
        "decodes": _count("requests that decode in it"),
        "context_tokens": _number("tokens in the cache that its decodes read"),
        "prefills": _count("prefill chunks"),
        "prefill_tokens": _count("tokens of its prefill chunks"),
        "prefill_pairs": _number("pairs of a query and a key in its prefill chunks"),
        "compressions": _count("compressions that begin in it"),
        "compressing": _count("compressions under way"),
        "swaps": _count("copies to or from host memory that begin in it"),
        "preemptions": _count("preemptions"),
        "running": _count("running requests"),
        "waiting": _count("waiting requests"),
        "waiting_for_slot": _count("requests in phase 'slot_wait'"),
        "waiting_for_block": _count("requests in phase 'block_wait' or 'paused'"),
        "free_blocks": _count("blocks without an owner, cached ones included"),
        "cached_blocks": _count("blocks without an owner whose content can be matched"),
        "shared_extra": _count("owners of shared blocks beyond the first, over all blocks"),
        "stored_tokens": _number("tokens in blocks with an owner; those of shared blocks once"),
    },
    # One row for each event of the scheduler, in order. The decision digest covers these rows.
    "events": {
        "step": _number("step in which, or before which, it happened"),
        "kind": Column("int8", "code of its EventKind"),
        "request": _number("number of the request, -1 for the run"),
        "value": _number("as its kind says"),
        "num_blocks": _count("blocks that it names"),
    },
    # One row for each block that an event names, in the order of the events.
    "blocks": {
        "step": _number("step of the event"),
        "block": _count("number of the block"),
        "state": Column("int8", "code of its BlockState from the event on"),
        "kind": Column("int8", "code of the event's EventKind"),
        "request": _number("number of the event's request"),
    },
    # One row for each block whose state changed without a decision about it. The decision digest
    # does not cover these rows. Recordings of release 0.1.0 have none.
    "reports": {
        "step": _number("step in which it happened"),
        "at_end": Column("int8", "1: at the end of the step, 0: at its start"),
        "event": _number("rows of `events` that come before it"),
        "block": _count("number of the block"),
        "state": Column("int8", "code of its BlockState from then on"),
    },
    # One row for each decision against a request when the reason changes, not for each step. The
    # decision digest does not cover these rows. Recordings of older releases have none.
    "causes": {
        "step": _number("step in which the scheduler decided"),
        "at_end": Column("int8", "1: at the end of the step, 0: at its start"),
        "request": _number("number of the request"),
        "verdict": Column("int8", "code of the Verdict"),
        "cause": Column("int8", "code of the Cause"),
        "needed": _number("what the request needed, in the unit of its cause"),
        "available": _number("how much of it there was"),
        "total": _number("how much of it the run has in all"),
        "other": _number(
            "not_admitted: the head of the queue; preempted: the request that needed the blocks; "
            "else -1"
        ),
    },
}
EVENT_COLUMNS = tuple(TABLES["events"])
REPORT_COLUMNS = tuple(TABLES["reports"])
CAUSE_COLUMNS = tuple(TABLES["causes"])


def manifest_names() -> dict[str, dict[str, str]]:
    """Return the names of the tables' codes, as a recording's manifest stores them."""
    return {
        "kinds": {str(int(kind)): kind.label for kind in EventKind},
        "reasons": {str(int(reason)): reason.label for reason in Reason},
        "block_states": {str(int(state)): state.label for state in BlockState},
        "verdicts": {str(int(verdict)): verdict.label for verdict in Verdict},
        "causes": {str(int(cause)): cause.label for cause in Cause},
    }

"""The choices for admission, batching, prefix sharing, compression and query slots."""

from dataclasses import dataclass, field, fields
from math import ceil, floor, inf

from typing_extensions import override

from zlab.policies.core.policy import (
    Admission,
    Batching,
    Compression,
    Findable,
    Join,
    NeedsSlot,
    Prefix,
    Slots,
    since,
)
from zlab.policies.scorers import known_scorer, scorer_traits


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError with the choices where a setting of words has another value."""
    if value not in choices:
        *others, last = (repr(choice) for choice in choices)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, not {value!r}")


@dataclass(frozen=True)
class WhenItFits(Admission):
    """Admit a request when its whole sequence so far fits the free blocks.

    Attributes:
        watermark_share: Share of the pool that must stay free after an admission while other
            requests run (at least one block unless 0), so that the next block that a running
            request needs does not preempt the new one.
        count_hits: Ask for room for cached blocks too, and count cached tokens against the token
            budget of the step (Zipage).
        reserve: "sequence" asks for the blocks the request needs now, "peak" for the most it may
            ever hold; with "peak" no request is ever preempted. "chunk" asks for the blocks of its
            first prefill chunk only, and implies that blocks are taken by chunk.
        allocate: "sequence" gives the request the blocks of its whole sequence at admission,
            "chunk" those of each prefill chunk when the chunk is planned.
        watermark_rounding: "up" rounds the watermark up to a whole block, "down" rounds it down.
        null_blocks: Blocks at the start of the pool that are never given out. They count for the
            watermark. A change of policy leaves them as they are.
    """

    watermark_share: float = 0.01
    count_hits: bool = False
    reserve: str = "sequence"
    allocate: str = field(default="sequence", metadata=since("0.2.0"))
    watermark_rounding: str = field(default="up", metadata=since("0.2.0"))
    null_blocks: int = field(default=0, metadata=since("0.2.0"))

    def __post_init__(self) -> None:
        """Raise ValueError on a share outside [0, 1), an unknown word, or a negative number."""
        if not 0 <= self.watermark_share < 1:
            raise ValueError(f"watermark_share must be in [0, 1), not {self.watermark_share}")
        _check_choice("reserve", self.reserve, ("sequence", "peak", "chunk"))
        _check_choice("allocate", self.allocate, ("sequence", "chunk"))
        _check_choice("watermark_rounding", self.watermark_rounding, ("up", "down"))
        if self.null_blocks < 0:
            raise ValueError(f"null_blocks must be 0 or more, not {self.null_blocks}")

    @property
    @override
    def counts_hits_as_new(self) -> bool:
        return self.count_hits

    @property
    @override
    def reserves_peak(self) -> bool:
        return self.reserve == "peak"

    @property
    @override
    def checks_chunk_only(self) -> bool:
        return self.reserve == "chunk"

    @property
    @override
    def takes_by_chunk(self) -> bool:
        return self.allocate == "chunk" or self.checks_chunk_only

    @override
    def watermark(self, num_blocks: int) -> int:
        # down: the product is exact or next to it, as in the engine whose rule this is
        share = num_blocks * self.watermark_share
        return floor(share) if self.watermark_rounding == "down" else ceil(share)


@dataclass(frozen=True)
class Chunked(Batching):
    """Settings of every batching.

    Attributes:
        max_chunk: Most prompt tokens of one request in a step; 0: the token budget alone is the
            limit. A bound keeps one long prompt from taking the whole step.
        asynchronous: A step is planned before the output of the step before it has returned, so
            two batches are in flight. A request keeps its blocks for one step after its last token
            was computed, and a generated block is matchable one step later. For simulation only.
    """

    max_chunk: int = field(default=0, metadata=since("0.2.0"), kw_only=True)
    asynchronous: bool = field(default=False, metadata=since("0.2.0"), kw_only=True)

    def __post_init__(self) -> None:
        """Raise ValueError on a negative bound."""
        if self.max_chunk < 0:
            raise ValueError(f"max_chunk must be 0 (no bound) or more tokens, not {self.max_chunk}")

    @property
    @override
    def chunk_limit(self) -> int:
        return self.max_chunk

    @property
    @override
    def is_asynchronous(self) -> bool:
        return self.asynchronous


@dataclass(frozen=True)
class Mixed(Chunked):
    """Decodes come first, then prefill chunks up to the token budget; any prompt may be cut."""


@dataclass(frozen=True)
class RunningOrder(Chunked):
    """One walk over the running list plans decodes and prefill chunks alike; admissions follow.

    A request that the token budget does not reach sits the step out and keeps its blocks.

    Attributes:
        after_own_preemption: What follows when a request that needs blocks is itself the victim:
            "stop" ends the walk, "continue" goes on with the next request.
    """

    after_own_preemption: str = "stop"

    def __post_init__(self) -> None:
        """Raise ValueError on an unknown choice or a negative bound."""
        super().__post_init__()
        _check_choice("after_own_preemption", self.after_own_preemption, ("stop", "continue"))

    @property
    @override
    def in_running_order(self) -> bool:
        return True

    @property
    @override
    def stops_at_own_preemption(self) -> bool:
        return self.after_own_preemption == "stop"


@dataclass(frozen=True)
class PrefillFirst(Chunked):
    """A step is all prefill or all decode; prefill goes first.

    Attributes:
        cut: "any" prompt, or only the "first" of a step, may be cut to the token budget.
        limit: `max_running` bounds the requests that are "running" (hold blocks), or those in one
            "step".
    """

    cut: str = "any"
    limit: str = "running"

    def __post_init__(self) -> None:
        """Raise ValueError on an unknown choice or a negative bound."""
        super().__post_init__()
        if self.cut not in ("any", "first"):
            raise ValueError(f"cut must be 'any' or 'first', not {self.cut!r}")
        if self.limit not in ("running", "step"):
            raise ValueError(f"limit must be 'running' or 'step', not {self.limit!r}")

    @property
    @override
    def prefill_alone(self) -> bool:
        return True

    @property
    @override
    def cuts_any(self) -> bool:
        return self.cut == "any"

    @property
    @override
    def limit_per_step(self) -> bool:
        return self.limit == "step"


REUSE = ("released", "unmatchable")


@dataclass(frozen=True)
class NoSharing(Prefix):
    """No blocks are shared; a preempted request recomputes all its tokens.

    Attributes:
        reuse: Which free block is reused first: the one "released" first, or ("unmatchable") the
            one released last, because no block has matchable content.
    """

    reuse: str = field(default="released", metadata=since("0.2.0"))

    def __post_init__(self) -> None:
        """Raise ValueError on an unknown choice."""
        _check_choice("reuse", self.reuse, REUSE)

    @property
    @override
    def unmatchable_first(self) -> bool:
        return self.reuse == "unmatchable"

    @property
    @override
    def enabled(self) -> bool:
        return False

    @property
    @override
    def keeps(self) -> bool:
        return False


@dataclass(frozen=True)
class FullBlocks(Prefix):
    """Requests share full blocks whose content, and all content before it, is equal.

    Attributes:
        keep: A compression copies out of shared and matchable blocks and leaves them to the cache
            while there are free blocks. Without it, the only user of a prefix overwrites it.
        findable: A full prompt block can be matched when the step that computes it is over
            ("computed"), or already when that step is "planned": equal prompts that are admitted
            together share. The keys and values of a layer are written before its attention reads.
        copies: Of blocks with equal content the "newest" stays findable, or "all" do and the one
            registered first is found.
        reuse: Which free block is reused first: the one "released" first, or ("unmatchable") one
            without content, the latest first, and then the one released first. With "unmatchable"
            the full blocks of an ended request keep their content, its output included.
    """

    keep: bool = True
    findable: Findable = field(default=Findable.COMPUTED, metadata=since("0.2.0"))
    copies: str = field(default="newest", metadata=since("0.2.0"))
    reuse: str = field(default="released", metadata=since("0.2.0"))

    def __post_init__(self) -> None:
        """Raise ValueError on an unknown choice."""
        _check_choice("copies", self.copies, ("newest", "all"))
        _check_choice("reuse", self.reuse, REUSE)

    @property
    @override
    def keeps_copies(self) -> bool:
        return self.copies == "all"

    @property
    @override
    def unmatchable_first(self) -> bool:
        return self.reuse == "unmatchable"

    @property
    @override
    def keeps(self) -> bool:
        return self.keep


SCORER_SETTINGS = ("redundancy_lambda", "temperature", "decay", "pool_size", "threshold")


@dataclass(frozen=True)
class ByScore(Compression):
    """Keep the tokens that a scorer ranks highest, and the observation window.

    Attributes:
        scorer: A name in `SCORERS`, one in `SCORER_ALIASES`, which becomes the name that it means,
            or `FILE.py:Class`, a scorer of the user's own.
        window: Number of last tokens whose queries judge the others (w); they are always kept. A
            scorer that needs no queries keeps as many, at most a block.
        join: When a compression takes effect: "boundary" (next step), "when_done" (first step after
            the copy has finished), "blocking" (same step).
        sink: Number of first cache positions that are always kept.
        redundancy_lambda: Weight of attention against redundancy, lambda in
            `lambda * P - (1 - lambda) * R`.
        temperature: Temperature of the softmax over redundancy.
        decay: Factor of the score history at every further compression.
        pool_size: Width (odd) of the neighbourhood whose highest score a token takes at a first
            compression.
        threshold: Two keys are alike when their similarity is strictly above it.
        recent: Number of latest tokens that are always kept, at most half of what a compression
            keeps. A scorer may keep more of its own accord (`ScorerTraits.recent`).
    """

    scorer: str = "attention+global+lightning"
    window: int = 16
    join: Join = Join.BOUNDARY
    sink: int = 0
    redundancy_lambda: float = 0.2
    temperature: float = 0.4
    decay: float = 0.8
    pool_size: int = 5
    threshold: float = 0.5
    recent: int = field(default=0, metadata=since("0.2.0"))

    def __post_init__(self) -> None:
        """Raise ValueError on an unknown scorer, a number outside its range, or one that the scorer
        does not read.
        """
        scorer = known_scorer(self.scorer)
        object.__setattr__(self, "scorer", scorer)
        traits = scorer_traits(scorer)
        for item in fields(self):
            unread = traits.settings is not None and item.name not in traits.settings
            value = getattr(self, item.name)
            if item.name in SCORER_SETTINGS and unread and value != item.default:
                raise ValueError(
                    f"the scorer {self.scorer!r} does not read {item.name}, which is {value} "
                    f"(it reads: {', '.join(traits.settings or ()) or 'none'})"
                )
        if self.recent < 0:
            raise ValueError(f"recent must be 0 tokens or more, not {self.recent}")
        if self.window < 1:
            raise ValueError(f"window must be 1 token or more, not {self.window}")
        if self.sink < 0:
            raise ValueError(f"sink must be 0 tokens or more, not {self.sink}")
        for name in ("redundancy_lambda", "decay", "threshold"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be in 0..1, not {getattr(self, name)}")
        if not 0.0 < self.temperature < inf:
            raise ValueError(f"temperature must be positive and finite, not {self.temperature}")
        if self.pool_size < 1 or self.pool_size % 2 == 0:
            raise ValueError(f"pool_size must be odd and positive, not {self.pool_size}")

    @property
    @override
    def needs_queries(self) -> bool:
        return scorer_traits(self.scorer).needs_queries


@dataclass(frozen=True)
class NoSlots(Slots):
    """No request holds a query slot: the whole KV cache is kept."""

    @property
    @override
    def needed(self) -> NeedsSlot:
        return NeedsSlot.NEVER

    @property
    @override
    def nearest_first(self) -> bool:
        return False

    @override
    def count(self, num_blocks: int, floor: int | None) -> int:
        return 0


@dataclass(frozen=True)
class SlotCount(Slots):
    """Number of query slots: `num_slots`, or as many as budgets fit in the pool when it is 0."""

    num_slots: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError on a negative number."""
        if self.num_slots < 0:
            raise ValueError(f"num_slots must be 0 (as many as fit) or more, not {self.num_slots}")

    @override
    def count(self, num_blocks: int, floor: int | None) -> int:
        return self.num_slots or (num_blocks // floor if floor else 0)


@dataclass(frozen=True)
class Constrained(SlotCount):
    """Every running request holds a slot, so at most as many run as there are slots."""

    @property
    @override
    def needed(self) -> NeedsSlot:
        return NeedsSlot.ALWAYS

    @property
    @override
    def nearest_first(self) -> bool:
        return False


@dataclass(frozen=True)
class Hybrid(SlotCount):
    """Requests run without a query slot and need one when they reach the observation window.

    Attributes:
        handout: Free slots go to the request "nearest" to its window, or along the running "line"
            when its last request has none.
    """

    handout: str = "nearest"

    def __post_init__(self) -> None:
        """Raise ValueError on an unknown choice."""
        super().__post_init__()
        if self.handout not in ("nearest", "line"):
            raise ValueError(f"handout must be 'nearest' or 'line', not {self.handout!r}")

    @property
    @override
    def needed(self) -> NeedsSlot:
        return NeedsSlot.AT_WINDOW

    @property
    @override
    def nearest_first(self) -> bool:
        return self.handout == "nearest"

"""What one step does: decided by the scheduler, carried out by a driver."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from policies.core.request import Request


def prefill_pairs(start: int, count: int) -> int:
    """(Query, key) pairs of `count` tokens behind `start` others: every token sees what is before it and itself."""
    return start * count + count * (count + 1) // 2


@dataclass(slots=True)
class PrefillChunk:
    """Compute the tokens at positions `start .. start + count - 1` of a request; its table already has room for them.

    `last` says that the chunk ends with the newest token, whose logits give the next one.
    """

    request: Request
    start: int
    count: int
    last: bool

    @property
    def pairs(self) -> int:
        """(Query, key) pairs of its causal attention."""
        return prefill_pairs(self.start, self.count)


@dataclass(slots=True)
class CompressionTask:
    """Reduce a request's `sources` blocks, all full, to the first `len(targets) - 1` blocks of `targets`.

    Targets may be sources; a source that is not a target is only read, and `dropped` once the copy has finished.
    """

    request: Request
    sources: list[int]
    targets: list[int]
    dropped: list[int]
    source_tokens: int
    kept_tokens: int
    first: bool  # never compressed before


@dataclass(slots=True)
class SwapTask:
    """Copy `blocks` of a request to host memory (`out`) or back."""

    request: Request
    blocks: list[int]
    out: bool


@dataclass(slots=True)
class StepPlan:
    """One step. Its decodes are the scheduler's decoding set: `num_decodes`, reading `context_tokens` positions."""

    step: int
    num_decodes: int = 0
    context_tokens: int = 0
    prefills: list[PrefillChunk] = field(default_factory=list)
    compressions: list[CompressionTask] = field(default_factory=list)  # started in this step
    joined: list[CompressionTask] = field(default_factory=list)  # their requests run again from this step on
    swaps: list[SwapTask] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens computed by the prefill chunks."""
        return sum(chunk.count for chunk in self.prefills)

    @property
    def empty(self) -> bool:
        """Nothing to carry out."""
        return not (self.num_decodes or self.prefills or self.compressions or self.swaps)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a driver found out while carrying out a step, by request number.

    Attributes:
        stopped: requests whose newest token ended them (end of sequence, stop string).
        compressed: requests whose compression has finished (needed with join `when_done` only).
        failed: requests that cannot go on, with the reason. The blocks of one that is being compressed stay held until
            the compression is over (for join `when_done`: until it is reported as finished, too).
    """

    stopped: Sequence[int] = ()
    compressed: Sequence[int] = ()
    failed: Mapping[int, str] = field(default_factory=dict)


NOTHING = Outcome()

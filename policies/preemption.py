"""Preemption: which request is preempted when blocks run out, and how it is recovered."""

from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import override

from zlab.policies.core.policy import Preemption, Recovery
from zlab.policies.core.request import Request

NUMBERS = 1 << 40  # more than a run has requests; a priority weighs more than any number


@dataclass(frozen=True)
class GivesWay(Preemption):
    """`comes_back` selects "recompute" or "swap" (copy the victim's blocks to host memory and
    back).

    Swapping needs host blocks in the limits. Where they do not suffice, an uncompressed victim is
    recomputed. A compressed victim can only be swapped.
    """

    comes_back: Recovery = Recovery.RECOMPUTE


@dataclass(frozen=True)
class Never(GivesWay):
    """No request is preempted: one that lacks a block waits.

    This needs an admission that reserves the peak, or constrained slots.
    """

    @override
    def rank(self, request: Request, needy: Request) -> float | None:
        return None


@dataclass(frozen=True)
class LatestFirst(GivesWay):
    """The request admitted last is preempted."""

    @override
    def rank(self, request: Request, needy: Request) -> float | None:
        return 0


@dataclass(frozen=True)
class SlotlessFirst(GivesWay):
    """Requests without a query slot are preempted first, the latest first; then, with `slotted`,
    the others.
    """

    slotted: bool = False

    @override
    def rank(self, request: Request, needy: Request) -> float | None:
        if request.slot < 0:
            return 0
        return 1 if self.slotted else None


@dataclass(frozen=True)
class LatestBehind(GivesWay):
    """Zipage's rule: the latest request behind the needy one that has no slot or, with prefix
    caching, is uncompressed.

    Where there is none, the needy request sits the step out.

    Attributes:
        uncompressed: A request with a slot that was never compressed may be preempted too.
    """

    uncompressed: bool = True

    @override
    def rank(self, request: Request, needy: Request) -> float | None:
        if request.line <= needy.line:
            return None
        return 0 if request.slot < 0 or (self.uncompressed and not request.compressions) else None


@dataclass(frozen=True)
class LeastUrgent(GivesWay):
    """The running request with the least urgent priority is preempted, the latest submission first.

    It may be one that the step has planned already; its share of the step is then withdrawn.

    Attributes:
        first: The priority value that is most urgent: "highest" or "lowest".
        withdrawn: Full blocks whose computation is withdrawn are "forgotten", or stay "findable"
            although nothing computes them, as in vLLM. The latter is for simulation only.
    """

    first: str = "highest"
    withdrawn: str = "forgotten"

    def __post_init__(self) -> None:
        """Raise ValueError on an unknown choice."""
        if self.first not in ("highest", "lowest"):
            raise ValueError(f"first must be 'highest' or 'lowest', not {self.first!r}")
        if self.withdrawn not in ("forgotten", "findable"):
            raise ValueError(f"withdrawn must be 'forgotten' or 'findable', not {self.withdrawn!r}")

    @property
    @override
    def least_is_zero(self) -> bool:
        return False

    @property
    @override
    def keeps_withdrawn(self) -> bool:
        return self.withdrawn == "findable"

    @override
    def rank(self, request: Request, needy: Request) -> float | None:
        urgency = -request.priority if self.first == "lowest" else request.priority
        return urgency * NUMBERS - request.number


@dataclass(frozen=True)
class CostAware(GivesWay):
    """The request that frees most blocks for each token it computes again is preempted.

    The score of a request with `B` blocks of its own, `T` tokens and `O` of at most `M` output
    tokens is `B / T * (1 - O / M)`; the highest score is preempted first. It is the rule that
    vLLM's pull request 56897 proposes.
    """

    @property
    @override
    def least_is_zero(self) -> bool:
        return False

    @override
    def rank(self, request: Request, needy: Request) -> float | None:
        return 0.0

    @override
    def rank_with_blocks(
        self, request: Request, needy: Request, num_tokens: int, num_owned: Callable[[], int]
    ) -> float | None:
        output = num_tokens - request.prompt_tokens
        left = 1 - output / max(request.target_tokens, 1)
        return -num_owned() / max(num_tokens, 1) * left

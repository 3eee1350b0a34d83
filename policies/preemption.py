"""Who gives way when blocks run out, and how does it come back?"""

from dataclasses import dataclass

from policies.core.policy import ComesBack
from policies.core.request import Request


@dataclass(frozen=True)
class GivesWay:
    """`comes_back`: "recompute" what a victim lost, or "swap" its blocks to host memory and back.

    Swapping needs host blocks in the limits; where they do not suffice, an uncompressed victim is recomputed. A
    compressed one can only be swapped.
    """

    comes_back: ComesBack = ComesBack.RECOMPUTE


@dataclass(frozen=True)
class Never(GivesWay):
    """Nobody: a request that lacks a block waits. Needs an admission that reserves the peak, or constrained slots."""

    def rank(self, request: Request, needy: Request) -> int | None:
        """Nobody gives way."""
        return None


@dataclass(frozen=True)
class LatestFirst(GivesWay):
    """The request admitted last, whoever it is."""

    def rank(self, request: Request, needy: Request) -> int | None:
        """All alike."""
        return 0


@dataclass(frozen=True)
class SlotlessFirst(GivesWay):
    """Requests without a query slot, the latest first; then, with `slotted`, the others."""

    slotted: bool = False

    def rank(self, request: Request, needy: Request) -> int | None:
        """Slotless before slotted."""
        if request.slot < 0:
            return 0
        return 1 if self.slotted else None


@dataclass(frozen=True)
class LatestBehind(GivesWay):
    """Zipage's rule: the latest behind the needy one that has no slot or (its prefix cache being on) is uncompressed.

    Where there is none, the needy one sits the step out.

    Attributes:
        uncompressed: a slotted request that was never compressed may give way too.
    """

    uncompressed: bool = True

    def rank(self, request: Request, needy: Request) -> int | None:
        """All behind the needy one that may be recomputed are alike."""
        if request.line <= needy.line:
            return None
        return 0 if request.slot < 0 or (self.uncompressed and not request.compressions) else None

"""Who holds a query slot?"""

from dataclasses import dataclass

from policies.core.policy import NeedsSlot


@dataclass(frozen=True)
class NoSlots:
    """Nobody: the whole KV cache is kept."""

    @property
    def needed(self) -> NeedsSlot:
        """Never."""
        return NeedsSlot.NEVER

    @property
    def nearest_first(self) -> bool:
        """Nothing is handed out."""
        return False

    def count(self, num_blocks: int, floor: int | None) -> int:
        """None."""
        return 0


@dataclass(frozen=True)
class SlotCount:
    """How many query slots: `num_slots`, or as many as budgets fit in the pool when it is 0."""

    num_slots: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError on a negative number."""
        if self.num_slots < 0:
            raise ValueError(f"num_slots must be 0 (as many as fit) or more, not {self.num_slots}")

    def count(self, num_blocks: int, floor: int | None) -> int:
        """Number of slots for the pool."""
        return self.num_slots or (num_blocks // floor if floor else 0)


@dataclass(frozen=True)
class Constrained(SlotCount):
    """Every running request holds one: at most as many run as there are slots."""

    @property
    def needed(self) -> NeedsSlot:
        """Always."""
        return NeedsSlot.ALWAYS

    @property
    def nearest_first(self) -> bool:
        """Slots are taken on admission."""
        return False


@dataclass(frozen=True)
class Hybrid(SlotCount):
    """A request needs one from its observation window on; until then it may run without.

    Attributes:
        handout: free slots go to the one "nearest" to its window, or along the running "line" once its last has none.
    """

    handout: str = "nearest"

    def __post_init__(self) -> None:
        """Raise ValueError on an unknown choice."""
        super().__post_init__()
        if self.handout not in ("nearest", "line"):
            raise ValueError(f"handout must be 'nearest' or 'line', not {self.handout!r}")

    @property
    def needed(self) -> NeedsSlot:
        """From the window on."""
        return NeedsSlot.AT_WINDOW

    @property
    def nearest_first(self) -> bool:
        """Whether the one nearest to its window comes first."""
        return self.handout == "nearest"

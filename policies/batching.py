"""What shares a step?"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mixed:
    """Decodes first, then prefill chunks up to the token budget; any prompt may be cut."""

    @property
    def prefill_alone(self) -> bool:
        """Prefill and decode share steps."""
        return False

    @property
    def cuts_any(self) -> bool:
        """Every prompt may be cut."""
        return True

    @property
    def limit_per_step(self) -> bool:
        """The limit is on requests that hold blocks."""
        return False


@dataclass(frozen=True)
class PrefillFirst:
    """A step is all prefill or all decode, prefill first.

    Attributes:
        cut: "any" prompt, or only the "first" of a step, may be cut to the token budget.
        limit: `max_running` bounds requests that are "running" (hold blocks) or those in one "step".
    """

    cut: str = "any"
    limit: str = "running"

    def __post_init__(self) -> None:
        """Raise ValueError on an unknown choice."""
        if self.cut not in ("any", "first"):
            raise ValueError(f"cut must be 'any' or 'first', not {self.cut!r}")
        if self.limit not in ("running", "step"):
            raise ValueError(f"limit must be 'running' or 'step', not {self.limit!r}")

    @property
    def prefill_alone(self) -> bool:
        """Prefill has steps of its own."""
        return True

    @property
    def cuts_any(self) -> bool:
        """Whether a prompt that is not the step's first may be cut."""
        return self.cut == "any"

    @property
    def limit_per_step(self) -> bool:
        """Whether the limit is on one step's requests."""
        return self.limit == "step"

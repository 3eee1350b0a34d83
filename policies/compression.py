"""How are tokens chosen, and when does a compressed request decode again?"""

from dataclasses import dataclass

from policies.core.policy import Join


@dataclass(frozen=True)
class ByScore:
    """Keep the tokens a scorer ranks highest, and the observation window.

    Attributes:
        scorer: the engine's name for it (the simulator moves no tensors and does not look at it).
        window: last tokens whose queries judge the others, `w`.
        join: "boundary" (next step), "when_done" (first step after the copy has finished), "blocking" (same step).
    """

    scorer: str = "attention+global+lightning"
    window: int = 16
    join: Join = Join.BOUNDARY

    def __post_init__(self) -> None:
        """Raise ValueError on a window without tokens."""
        if self.window < 1:
            raise ValueError(f"window must be 1 token or more, not {self.window}")

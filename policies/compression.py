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
        sink: first cache positions that are always kept.
        redundancy_lambda: weight of attention against redundancy, lambda of `lambda * P - (1 - lambda) * R`.
        temperature: of the softmax over redundancy.
        decay: of the score history at every further compression.
        pool_size: neighbours (odd) whose highest score a token takes at a first compression.
        threshold: similarity strictly above which two keys are alike.
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

    def __post_init__(self) -> None:
        """Raise ValueError on a number outside its range."""
        if self.window < 1:
            raise ValueError(f"window must be 1 token or more, not {self.window}")
        if self.sink < 0:
            raise ValueError(f"sink must be 0 tokens or more, not {self.sink}")
        for name in ("redundancy_lambda", "decay", "threshold"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be in 0..1, not {getattr(self, name)}")
        if not self.temperature > 0.0:
            raise ValueError(f"temperature must be positive, not {self.temperature}")
        if self.pool_size < 1 or self.pool_size % 2 == 0:
            raise ValueError(f"pool_size must be odd and positive, not {self.pool_size}")

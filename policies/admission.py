"""When does a waiting request get blocks?"""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class WhenItFits:
    """When its whole sequence so far fits in free blocks, cached ones that somebody holds counted as there.

    Attributes:
        watermark_share: share of the pool that must stay free after an admission while others run (at least one block
            unless 0), so that a newcomer is not thrown out by the next block somebody needs.
        count_hits: ask for room for cached blocks too, and count cached tokens against the token budget (Zipage).
        reserve: "sequence" asks for what it needs now, "peak" for the most it may ever hold; with "peak" nobody is
            ever preempted.
    """

    watermark_share: float = 0.01
    count_hits: bool = False
    reserve: str = "sequence"

    def __post_init__(self) -> None:
        """Raise ValueError on a share outside [0, 1) or an unknown reserve."""
        if not 0 <= self.watermark_share < 1:
            raise ValueError(f"watermark_share must be in [0, 1), not {self.watermark_share}")
        if self.reserve not in ("sequence", "peak"):
            raise ValueError(f"reserve must be 'sequence' or 'peak', not {self.reserve!r}")

    @property
    def counts_hits_as_new(self) -> bool:
        """Cached blocks and tokens count like new ones."""
        return self.count_hits

    @property
    def reserves_peak(self) -> bool:
        """Room for the most it may ever hold is set aside."""
        return self.reserve == "peak"

    def watermark(self, num_blocks: int) -> int:
        """Blocks that must stay free."""
        return ceil(num_blocks * self.watermark_share)

"""What is shared between requests with the same prefix?"""

from dataclasses import dataclass


@dataclass(frozen=True)
class NoSharing:
    """Nothing; a preempted request recomputes all of itself."""

    @property
    def enabled(self) -> bool:
        """No index is kept."""
        return False

    @property
    def keeps(self) -> bool:
        """There is nothing to keep."""
        return False


@dataclass(frozen=True)
class FullBlocks:
    """Full blocks with equal content after equal content, by chained hash.

    Attributes:
        keep: a compression copies out of matchable blocks and leaves them to the cache while fresh blocks can be had;
            without it, the only user of a prefix overwrites it.
    """

    keep: bool = True

    @property
    def enabled(self) -> bool:
        """Blocks are matched."""
        return True

    @property
    def keeps(self) -> bool:
        """Whether prefixes survive their only user's compression."""
        return self.keep

"""How many blocks may a request hold while it decodes (`N_max`)?"""

from dataclasses import dataclass

from policies.core.policy import PoolView


def blocks_of(blocks: int, tokens: int, block_size: int) -> int:
    """`N_max` of a budget given in blocks, or in kept tokens (rounded up to whole blocks, plus the empty one)."""
    return blocks or -(-tokens // block_size) + 1


def check(what: str, blocks: int, tokens: int) -> None:
    """Raise ValueError unless one of the two forms makes sense."""
    if blocks < 0 or tokens < 0 or blocks == 1 or not (blocks or tokens):
        raise ValueError(
            f"{what} needs at least 2 blocks, or at least 1 kept token, not blocks={blocks} tokens={tokens}"
        )


@dataclass(frozen=True)
class Unlimited:
    """As many as its tokens need."""

    def floor(self, block_size: int) -> int | None:
        """It is never compressed."""
        return None

    def may_grow(self, held: int, block_size: int, pool: PoolView) -> bool:
        """Always."""
        return True

    def shrink_to(self, held: int, block_size: int, pool: PoolView) -> int:
        """Nothing is given up."""
        return held


@dataclass(frozen=True)
class Fixed:
    """The same for all: `blocks` (`N_max`, the empty one included) or, when 0, room for `tokens` kept tokens."""

    tokens: int = 2048
    blocks: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError on a budget that keeps nothing."""
        check("a budget", self.blocks, self.tokens)

    def floor(self, block_size: int) -> int | None:
        """N_max."""
        return blocks_of(self.blocks, self.tokens, block_size)

    def may_grow(self, held: int, block_size: int, pool: PoolView) -> bool:
        """Up to N_max."""
        return held < blocks_of(self.blocks, self.tokens, block_size)

    def shrink_to(self, held: int, block_size: int, pool: PoolView) -> int:
        """N_max."""
        return blocks_of(self.blocks, self.tokens, block_size)


@dataclass(frozen=True)
class Adaptive:
    """Grows while the pool is idle, keeps its size while it is not, shrinks to the least under pressure.

    Attributes:
        tokens, blocks: the least, as in `Fixed`; query slots are counted by it.
        most_tokens: kept tokens that no request exceeds.
        grow_above: share of the pool that must be free for a request to take one more block.
        shrink_below: share of free blocks under which a compression goes down to the least.
    """

    tokens: int = 2048
    blocks: int = 0
    most_tokens: int = 8192
    grow_above: float = 0.2
    shrink_below: float = 0.05

    def __post_init__(self) -> None:
        """Raise ValueError on a budget that keeps nothing, or bounds in the wrong order."""
        check("an adaptive budget", self.blocks, self.tokens)
        if self.most_tokens < self.tokens:
            raise ValueError(f"most_tokens must be at least tokens = {self.tokens}, not {self.most_tokens}")
        if not 0 <= self.shrink_below <= self.grow_above <= 1:
            raise ValueError(
                f"0 <= shrink_below <= grow_above <= 1 must hold, not {self.shrink_below} and {self.grow_above}"
            )

    def floor(self, block_size: int) -> int | None:
        """The least."""
        return blocks_of(self.blocks, self.tokens, block_size)

    def may_grow(self, held: int, block_size: int, pool: PoolView) -> bool:
        """One more block while enough of the pool is free."""
        most = max(blocks_of(0, self.most_tokens, block_size), blocks_of(self.blocks, self.tokens, block_size))
        return held < most and pool.num_free > self.grow_above * pool.num_blocks

    def shrink_to(self, held: int, block_size: int, pool: PoolView) -> int:
        """Its size so far (one block of tokens goes), or the least under pressure."""
        least = blocks_of(self.blocks, self.tokens, block_size)
        most = max(blocks_of(0, self.most_tokens, block_size), least)
        under_pressure = pool.num_free < self.shrink_below * pool.num_blocks or pool.num_waiting
        return least if under_pressure else min(held, most)

"""KV budgets: how many blocks a request may hold while it decodes (`N_max`)."""

from dataclasses import dataclass

from typing_extensions import override

from zlab.policies.core.policy import Budget, PoolView


def blocks_of(blocks: int, tokens: int, block_size: int) -> int:
    """Return `N_max` of a budget in blocks, or in kept tokens (rounded up to whole blocks, plus the
    empty one).
    """
    return blocks or -(-tokens // block_size) + 1


def check(what: str, blocks: int, tokens: int) -> None:
    """Raise ValueError unless exactly one of the two forms is usable."""
    if blocks < 0 or tokens < 0 or blocks == 1 or not (blocks or tokens):
        raise ValueError(
            f"{what} needs at least 2 blocks, or at least 1 kept token, not blocks={blocks} "
            f"tokens={tokens}"
        )


@dataclass(frozen=True)
class Unlimited(Budget):
    """A request holds as many blocks as its tokens need."""

    @override
    def floor(self, block_size: int) -> int | None:
        return None


@dataclass(frozen=True)
class Fixed(Budget):
    """Every request has the same budget: `blocks` (`N_max`, the empty one included) or, when 0,
    blocks for `tokens` kept tokens.
    """

    tokens: int = 2048
    blocks: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError on a budget that keeps no token."""
        check("a budget", self.blocks, self.tokens)

    @override
    def floor(self, block_size: int) -> int | None:
        return blocks_of(self.blocks, self.tokens, block_size)


@dataclass(frozen=True)
class Adaptive(Budget):
    """A budget that grows while the pool has free blocks and shrinks under pressure.

    Attributes:
        tokens, blocks: The smallest budget, as in `Fixed`; it determines the number of query slots.
        most_tokens: The largest number of tokens that a request keeps.
        grow_above: Share of the pool that must be free for a request to take one more block.
        shrink_below: Share of free blocks below which a compression goes down to the smallest
            budget.
    """

    tokens: int = 2048
    blocks: int = 0
    most_tokens: int = 8192
    grow_above: float = 0.2
    shrink_below: float = 0.05

    def __post_init__(self) -> None:
        """Raise ValueError on a budget that keeps no token, or on bounds in the wrong order."""
        check("an adaptive budget", self.blocks, self.tokens)
        if not self.blocks and self.most_tokens < self.tokens:
            raise ValueError(
                f"most_tokens must be at least tokens = {self.tokens}, not {self.most_tokens}"
            )
        if not 0 <= self.shrink_below <= self.grow_above <= 1:
            raise ValueError(
                f"0 <= shrink_below <= grow_above <= 1 must hold, not {self.shrink_below} and "
                f"{self.grow_above}"
            )

    @override
    def floor(self, block_size: int) -> int | None:
        return blocks_of(self.blocks, self.tokens, block_size)

    @override
    def may_grow(self, held: int, block_size: int, pool: PoolView) -> bool:
        most = max(
            blocks_of(0, self.most_tokens, block_size),
            blocks_of(self.blocks, self.tokens, block_size),
        )
        return held < most and pool.num_free > self.grow_above * pool.num_blocks

    @override
    def shrink_to(self, held: int, block_size: int, pool: PoolView) -> int:
        least = blocks_of(self.blocks, self.tokens, block_size)
        most = max(blocks_of(0, self.most_tokens, block_size), least)
        under_pressure = pool.num_free < self.shrink_below * pool.num_blocks or pool.num_waiting
        return least if under_pressure else min(held, most)

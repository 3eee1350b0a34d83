"""What a calibration measures: sizes in blocks, so that one grid serves every block size."""

from dataclasses import dataclass, replace

SIXTEENTH = 16  # chunks are counted in sixteenths of a block


@dataclass(frozen=True)
class Chunks:
    """`number` prefill chunks of `sixteenths / 16` blocks each, behind `prefix_blocks` cached ones."""

    number: int
    sixteenths: int
    prefix_blocks: int = 0

    def tokens(self, block_size: int) -> int:
        """Tokens of one chunk."""
        return max(self.sixteenths * block_size // SIXTEENTH, 1)


@dataclass(frozen=True)
class Grid:
    """Every size that is measured. A cell that does not fit the pool or the limits is left out, and said so.

    Attributes:
        batches, contexts: decodes, and blocks of mean context each; they are uneven, as lengths of outputs are.
        prefills: steps of prefill chunks alone, back to back.
        rested: the same, each begun on a device at rest.
        mixed_batches, mixed_context, mixed: the same beside decodes.
        beside, beside_batches: decodes beside compressions, and sequences compressed at once.
        sources, compressed: blocks of a sequence that is compressed, and how many at once.
        swapped: blocks of a swapped sequence.
        sampled: rows that are drawn, and not taken by most probable token.
        hosted: requests in a step of the smallest model there is.
        budget_blocks: what a compression in the loop leaves.
        repeats: of every cell; a decode cell takes `steps` steps a repeat.
    """

    batches: tuple[int, ...] = (1, 3, 8, 12, 20, 32, 44, 60, 70, 90, 110, 128, 150, 176, 208, 240, 256)
    contexts: tuple[int, ...] = (2, 8, 24)
    prefills: tuple[Chunks, ...] = (
        *(Chunks(1, sixteenths) for sixteenths in (1, 4, 16, 64, 128, 256, 512, 1008)),
        *(Chunks(1, sixteenths, 8) for sixteenths in (4, 16, 64, 256)),
        *(Chunks(1, sixteenths, 32) for sixteenths in (4, 16, 64, 256)),
        Chunks(2, 480), Chunks(4, 64), Chunks(4, 64, 8), Chunks(8, 120), Chunks(16, 16), Chunks(16, 16, 4),
        Chunks(32, 4),
    )  # fmt: skip
    rested: tuple[Chunks, ...] = (Chunks(1, 1), Chunks(1, 4), Chunks(1, 8), Chunks(1, 16), Chunks(1, 32), Chunks(2, 8))
    mixed_batches: tuple[int, ...] = (12, 60, 176)
    mixed_context: int = 8
    mixed: tuple[Chunks, ...] = (
        Chunks(1, 4), Chunks(1, 16), Chunks(1, 64), Chunks(1, 128), Chunks(1, 512), Chunks(1, 16, 16),
        Chunks(1, 64, 32), Chunks(4, 16), Chunks(4, 64, 4),
    )  # fmt: skip
    beside: tuple[int, ...] = (8, 48, 128)
    beside_batches: tuple[int, ...] = (1, 4, 16)
    sources: tuple[int, ...] = (5, 9, 17, 33)
    compressed: tuple[int, ...] = (1, 2, 4, 16)
    swapped: tuple[int, ...] = (1, 4, 16, 48)
    sampled: tuple[int, ...] = (8, 60, 176)
    hosted: tuple[int, ...] = (1, 32, 128, 256)
    budget_blocks: int = 8
    repeats: int = 5
    steps: int = 6


FULL = Grid()
QUICK = replace(
    FULL,
    batches=(1, 4, 8, 20, 60, 128, 256),
    contexts=(2, 8),
    prefills=(
        Chunks(1, 4), Chunks(1, 16), Chunks(1, 64), Chunks(1, 256), Chunks(1, 32, 8), Chunks(1, 64, 16), Chunks(4, 16),
        Chunks(4, 16, 4),
    ),
    rested=(Chunks(1, 1), Chunks(1, 8), Chunks(1, 32)),
    mixed_batches=(4, 60),
    mixed=(Chunks(1, 4), Chunks(1, 64), Chunks(1, 128), Chunks(1, 32, 8), Chunks(4, 16)),
    beside=(4, 48),
    beside_batches=(1, 4),
    sources=(5, 9, 17),
    compressed=(1, 4),
    swapped=(1, 4, 16),
    sampled=(8,),
    hosted=(1, 32),
    budget_blocks=4,
    repeats=3,
    steps=4,
)  # fmt: skip

"""What several Triton kernels share: finding a request by bisection, rows of a paged cache, and
launch settings.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from zlab.engine.errors import KernelInputError

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"


LARGEST_BLOCK = 256
SMALLEST_DOT = (
    16  # the matrix units take no side shorter than this; shorter ones are padded with zeros
)


@dataclass(frozen=True, slots=True)
class Launch:
    """How one kernel is laid on the card; `tile` is tokens (or rows) one program takes at a time.

    `max_registers` a thread may be worth a few spills where it lets a second program onto each
    multiprocessor.
    """

    tile: int
    num_warps: int
    num_stages: int = 1
    max_registers: int | None = None

    def options(self) -> dict[str, int | None]:
        """What is passed to a Triton launch beside the kernel's own arguments."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.max_registers,
        }


@triton.jit
def find_request(
    starts: tl.tensor, item: tl.tensor, num_requests: tl.tensor, PER_ITEM: tl.constexpr
) -> tl.tensor:
    """The last request r with `starts[r] // PER_ITEM + r <= item`.

    With that numbering every request owns at least as many items as it has pieces of `PER_ITEM`, so
    a launch finds its work from the running sum alone; the few items too many find nothing to do.
    """
    low = tl.zeros((), tl.int32)
    high = low + num_requests
    while low < high:
        middle = (low + high) // 2
        first_item = tl.load(starts + middle) // PER_ITEM + middle
        if first_item <= item:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def row_offsets(
    block_table: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    inside: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HOLD_SPACING: tl.constexpr = False,
) -> tl.tensor:
    """Offset of every token of a tile in its cache, int64: a cache passes 2^31 values easily.

    `token` is `first + arange(TILE)`, `first` a multiple of TILE. When a block holds whole tiles,
    one table entry serves the tile and the rows are evenly spaced, which keeps the addresses cheap.
    HOLD_SPACING makes them a sum of what changes from tile to tile and what does not: a fifth fewer
    instructions in a loop, for many more registers.
    """
    if BLOCK_SIZE >= TILE:
        block = tl.load(block_table + first // BLOCK_SIZE).to(tl.int64)
        if HOLD_SPACING:
            within = tl.zeros((), tl.int64) + first % BLOCK_SIZE
            offset = (
                block * block_stride
                + within * slot_stride
                + tl.arange(0, TILE).to(tl.int64) * slot_stride
            )
        else:
            offset = block * block_stride + (token % BLOCK_SIZE).to(tl.int64) * slot_stride
    else:
        blocks = tl.load(block_table + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = blocks * block_stride + (token % BLOCK_SIZE).to(tl.int64) * slot_stride
    return offset


@triton.jit
def load_keys(
    keys_of_head: tl.tensor,
    block_table: tl.tensor,
    first: tl.tensor,
    num_tokens: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
) -> tl.tensor:
    """Keys `[TILE, PAD_DIM]` of the tokens from `first` on, in the cache's dtype; zero outside."""
    token = first + tl.arange(0, TILE)
    dim = tl.arange(0, PAD_DIM)
    inside = token < num_tokens
    offsets = row_offsets(
        block_table, first, token, inside, block_stride, slot_stride, BLOCK_SIZE, TILE
    )
    return tl.load(
        keys_of_head + offsets[:, None] + dim[None, :],
        mask=inside[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )


@triton.jit
def inverse_norms(keys: tl.tensor) -> tl.tensor:
    """One over the length of every key, float32; a key shorter than 1e-6 counts as that long."""
    wide = keys.to(tl.float32)
    return 1.0 / tl.maximum(tl.sqrt(tl.sum(wide * wide, axis=1)), 1e-6)


def power_of_2(extent: int) -> int:
    """The least that holds `extent`, which is at least 1. Triton's own function takes 5 us, which
    adds up in a step.
    """
    return 1 << (extent - 1).bit_length()


def padded(extent: int) -> int:
    """The power of two a dot product needs to hold `extent`."""
    return max(SMALLEST_DOT, power_of_2(extent))


def check_cache(cache: torch.Tensor) -> None:
    """Raise unless blocks are of a size the kernels are written for and a head's values lie side by
    side.
    """
    block_size = cache.shape[-3]
    if block_size & (block_size - 1) or not 0 < block_size <= LARGEST_BLOCK:
        raise KernelInputError(
            f"block size must be a power of two up to {LARGEST_BLOCK}, got {block_size}"
        )
    if cache.stride(-1) != 1:
        raise KernelInputError(
            f"a head's values must be contiguous, got strides {tuple(cache.stride())}"
        )


def dot_precision(cache: torch.Tensor) -> str:
    """Full float32 products for a float32 cache; exact products of 16-bit values need no choice."""
    return "ieee" if cache.dtype == torch.float32 else "tf32"

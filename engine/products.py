"""Matrix products with few rows, as decoding has them: streamed over the weights once, cut so that every SM has work.

cuBLAS reaches about 60 % of the memory's bandwidth at 64 rows of a Qwen3-8B; what reaches more is chosen by
measurement, shape by shape, and kept in a table (`engine.product_table`).
"""

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Tile sizes (rows, columns, depth), splits of the depth, and launch settings of `few_rows`."""

    rows: int
    columns: int
    depth: int
    splits: int
    num_warps: int
    num_stages: int

    def fits(self, columns: int, depth: int) -> bool:
        """Whether a product of that many columns and depth is cut into whole tiles."""
        return columns % self.columns == 0 and depth % (self.depth * self.splits) == 0


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    inputs: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    depth_per_split: tl.tensor,
    input_stride: tl.tensor,
    weight_stride: tl.tensor,
    split_stride: tl.tensor,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """One tile of one split; tiles of the same columns run side by side, so that the weights are read once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    start = split * depth_per_split
    depth = tl.arange(0, DEPTH)
    # Rows past the end repeat the first ones: loads need no mask, and the store leaves them out.
    left = inputs + (row % num_rows)[:, None].to(tl.int64) * input_stride + (start + depth)[None, :]
    right = weight + column[None, :].to(tl.int64) * weight_stride + (start + depth)[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if GATED:
        other = right + num_columns.to(tl.int64) * weight_stride
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for _ in range(0, depth_per_split, DEPTH):
            tile = tl.load(left)
            total = tl.dot(tile, tl.load(right, eviction_policy="evict_first"), total, input_precision=PRECISION)
            up = tl.dot(tile, tl.load(other, eviction_policy="evict_first"), up, input_precision=PRECISION)
            left += DEPTH
            right += DEPTH
            other += DEPTH
        total = total * tl.sigmoid(total) * up
    else:
        for _ in range(0, depth_per_split, DEPTH):
            tile = tl.load(left)
            total = tl.dot(tile, tl.load(right, eviction_policy="evict_first"), total, input_precision=PRECISION)
            left += DEPTH
            right += DEPTH
    target = output + split.to(tl.int64) * split_stride + row[:, None].to(tl.int64) * num_columns + column[None, :]
    tl.store(target, total.to(output.dtype.element_ty), mask=(row < num_rows)[:, None] & (column >= 0)[None, :])


def few_rows(inputs: torch.Tensor, weight: torch.Tensor, config: ProductConfig, *, gated: bool = False) -> torch.Tensor:
    """`inputs [T, depth] @ weight.T`; `weight [columns, depth]`, rows contiguous; `config` has to fit.

    One split: `[T, columns]` in the inputs' dtype. More: `[splits, T, columns]` float32, to be summed by whoever reads
    it. `gated`: the weight's first half is gate, its second up, and the output `silu(gate) * up`, in one split.
    """
    num_rows, depth = inputs.shape
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    assert config.fits(columns, depth), (config, columns, depth)
    assert not (gated and config.splits > 1), config
    sizes = (num_rows, columns) if config.splits == 1 else (config.splits, num_rows, columns)
    dtype = inputs.dtype if config.splits == 1 else torch.float32
    output = torch.empty(sizes, dtype=dtype, device=inputs.device)
    grid = (triton.cdiv(num_rows, config.rows), columns // config.columns, config.splits)
    _few_rows_kernel[grid](
        inputs, weight, output, num_rows, columns, depth // config.splits,
        inputs.stride(0), weight.stride(0), num_rows * columns,
        GATED=gated, PRECISION="ieee" if inputs.dtype == torch.float32 else "tf32",
        ROWS=config.rows, COLUMNS=config.columns, DEPTH=config.depth,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return output

"""Triton kernels of a decoder layer, and `TritonSteps`, which runs a layer with them.

A layer takes six launches beside the attention:

    add_norm -> qkv product -> store_heads -> [attention] -> output product
    add_norm -> gate_up product with silu(gate) * up -> down product

Each kernel does in one pass what plain torch (`zlab.engine.model.layers`) does in several, and
equals it up to rounding. Inputs of shape `[splits, T, width]` are summed as they are read.

Products with few rows, as in decode steps, are skinny GEMMs: they stream the weights once and are
split so that every SM has work. cuBLAS reaches about 60 % of the memory bandwidth at 64 rows of
Qwen3-8B. The tile sizes for each shape were measured; a table for each GPU is read by the GPU's
name, and without one cuBLAS computes all products.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear
from typing_extensions import override

from zlab.engine.kernels.triton_common import power_of_2
from zlab.engine.model.layers import (
    AttentionContext,
    HeadShape,
    LayerSteps,
    LayerWeights,
    StoredAttentionContext,
    StoreDestination,
)

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"


MOST_HEADS = 8  # heads of one program
GATED_TILE = 1024


@triton.jit
def _add_norm_kernel(
    delta: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    split_stride: tl.tensor,
    eps: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, TILE)
    inside = column < WIDTH
    total = tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(delta + split * split_stride + row + column, mask=inside, other=0.0).to(
            tl.float32
        )
    rounded = total.to(residual.dtype.element_ty)
    tl.store(residual + row + column, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + column, (wide * scale * gain).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _row_start(
    slot: tl.tensor, outer_stride: tl.tensor, inner_stride: tl.tensor, EXTENT: tl.constexpr
) -> tl.tensor:
    """Return the int64 offset of the row `slot` = outer * EXTENT + inner of a cache or of window
    queries.
    """
    return (slot // EXTENT).to(tl.int64) * outer_stride + (slot % EXTENT).to(
        tl.int64
    ) * inner_stride


@triton.jit
def _store_halves(
    row: tl.tensor, heads: tl.tensor, column: tl.tensor, head_stride: tl.tensor,
    first: tl.tensor, second: tl.tensor, HALF: tl.constexpr,
) -> None:  # fmt: skip
    """Write both halves of `heads [HEADS, 1]` to the heads of one row."""
    target = row + heads.to(tl.int64) * head_stride + column
    inside = (column < HALF) & (heads >= 0)
    tl.store(target, first.to(row.dtype.element_ty), mask=inside)
    tl.store(target + HALF, second.to(row.dtype.element_ty), mask=inside)


@triton.jit
def _heads_kernel(
    merged: tl.tensor,
    bias: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    queries_out: tl.tensor,
    keys_out: tl.tensor,
    values_out: tl.tensor,
    slot_mapping: tl.tensor,
    window_rows: tl.tensor,
    window_queries: tl.tensor,
    split_stride: tl.tensor,
    k_outer: tl.tensor,
    k_inner: tl.tensor,
    k_head: tl.tensor,
    v_outer: tl.tensor,
    v_inner: tl.tensor,
    v_head: tl.tensor,
    window_outer: tl.tensor,
    window_inner: tl.tensor,
    window_head: tl.tensor,
    eps: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    NUM_QUERY_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_TILE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    """Norm, rotate and store `HEADS` heads of one kind of one token. Keys and values go to row
    `slot_mapping[token]`.
    """
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    half: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, HALF_TILE)[None, :]
    head = tl.arange(0, HEADS)[:, None]
    inside = (column < half) & (head >= 0)
    width: tl.constexpr = (NUM_QUERY_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    place = (first_head + head) * HEAD_DIM + column
    first = tl.zeros((HEADS, HALF_TILE), tl.float32)
    second = tl.zeros((HEADS, HALF_TILE), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        source = merged + split * split_stride + token * width + place
        first += tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        first += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(bias + place + half, mask=inside, other=0.0).to(tl.float32)
    is_query = first_head < NUM_QUERY_HEADS
    is_value = first_head >= NUM_QUERY_HEADS + NUM_KV_HEADS
    if not is_value:
        if HAS_NORM:
            scale = tl.rsqrt(
                (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD_DIM + eps
            )
            gain = query_norm if is_query else key_norm
            first *= scale[:, None] * tl.load(gain + column, mask=column < half, other=0.0).to(
                tl.float32
            )
            second *= scale[:, None] * tl.load(
                gain + half + column, mask=column < half, other=0.0
            ).to(tl.float32)
        angles = table + tl.load(positions + token).to(tl.int64) * HEAD_DIM
        cosine = tl.load(angles + column, mask=column < half, other=0.0)
        sine = tl.load(angles + half + column, mask=column < half, other=0.0)
        turned = first * cosine - second * sine
        second = second * cosine + first * sine
        first = turned
    if is_query:
        query = queries_out + token * NUM_QUERY_HEADS * HEAD_DIM
        _store_halves(query, first_head + head, column, HEAD_DIM, first, second, half)
        if WINDOW > 0:
            row = tl.load(window_rows + token)
            if row >= 0:
                target = window_queries + _row_start(row, window_outer, window_inner, WINDOW)
                _store_halves(target, first_head + head, column, window_head, first, second, half)
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            if is_value:
                target = values_out + _row_start(slot, v_outer, v_inner, BLOCK_SIZE)
                heads = first_head - NUM_QUERY_HEADS - NUM_KV_HEADS + head
                _store_halves(target, heads, column, v_head, first, second, half)
            else:
                target = keys_out + _row_start(slot, k_outer, k_inner, BLOCK_SIZE)
                _store_halves(
                    target, first_head - NUM_QUERY_HEADS + head, column, k_head, first, second, half
                )


@triton.jit
def _gated_kernel(
    gate_up: tl.tensor, output: tl.tensor, split_stride: tl.tensor,
    WIDTH: tl.constexpr, NUM_SPLITS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    gate = tl.zeros((TILE,), tl.float32)
    up = tl.zeros((TILE,), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        source = gate_up + split * split_stride + row * 2 * WIDTH + column
        gate += tl.load(source, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(output + row * WIDTH + column, value.to(output.dtype.element_ty), mask=inside)


def add_norm(
    delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Compute `zlab.engine.model.layers.add_norm`; the sum overwrites `residual` (contiguous)."""
    num_rows, width = residual.shape
    normed = torch.empty_like(residual)
    if num_rows == 0:
        return normed
    tile = power_of_2(width)
    _add_norm_kernel[(num_rows,)](
        delta, residual, weight, normed, _split_stride(delta), eps,
        NUM_SPLITS=_num_splits(delta), WIDTH=width, TILE=tile, num_warps=8 if tile >= 4096 else 4,
    )  # fmt: skip
    return normed


def store_heads(
    merged: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    table: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    shape: HeadShape,
    destination: StoreDestination,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Norm and rotate the heads of the merged projection and store keys, values and window queries.
    Returns the queries `[T, H_q, d]`, contiguous.

    One launch does what `zlab.engine.model.layers.split_heads` and a store do.
    """
    num_tokens = positions.shape[0]
    queries = torch.empty(
        num_tokens, shape.num_query_heads, shape.head_dim, dtype=dtype, device=merged.device
    )
    if num_tokens == 0:
        return queries
    place, rows, window = destination, destination.window_rows, destination.window_queries
    stores_window = rows is not None and window is not None
    heads = _heads_together(shape)
    num_programs = (shape.num_query_heads + 2 * shape.num_kv_heads) // heads
    _heads_kernel[(num_tokens, num_programs)](
        # The kernel never reads an absent tensor, so any other tensor can take its place.
        merged, bias if bias is not None else merged, positions, table,
        query_norm if query_norm is not None else table,
        key_norm if key_norm is not None else table,
        queries, place.cache_k, place.cache_v, place.slot_mapping,
        rows if rows is not None else place.slot_mapping, window if window is not None else queries,
        _split_stride(merged), *place.cache_k.stride()[:3], *place.cache_v.stride()[:3],
        *(window.stride()[:3] if window is not None else (0, 0, 0)), shape.eps,
        NUM_SPLITS=_num_splits(merged),
        NUM_QUERY_HEADS=shape.num_query_heads, NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim, HALF_TILE=power_of_2(shape.head_dim // 2), HEADS=heads,
        BLOCK_SIZE=place.cache_k.shape[1],
        WINDOW=window.shape[1] if window is not None and stores_window else 0,
        HAS_BIAS=bias is not None, HAS_NORM=query_norm is not None, num_warps=max(1, heads // 2),
    )  # fmt: skip
    return queries


def gated(gate_up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute `zlab.engine.model.layers.gated`."""
    num_rows, width = gate_up.shape[-2], gate_up.shape[-1] // 2
    output = torch.empty(num_rows, width, dtype=dtype, device=gate_up.device)
    if num_rows:
        tile = min(GATED_TILE, power_of_2(width))
        _gated_kernel[(num_rows, -(-width // tile))](
            gate_up, output, _split_stride(gate_up),
            WIDTH=width, NUM_SPLITS=_num_splits(gate_up), TILE=tile, num_warps=4,
        )  # fmt: skip
    return output


def _num_splits(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() == 3 else 1


def _split_stride(tensor: torch.Tensor) -> int:
    return tensor.stride(0) if tensor.dim() == 3 else 0


def _heads_together(shape: HeadShape) -> int:
    """Return the most heads, a power of two, that divide both kinds, so that all heads of a program
    are of one kind.
    """
    common = math.gcd(shape.num_query_heads, shape.num_kv_heads)
    return min(MOST_HEADS, common & -common)


# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Tile sizes (rows, columns, depth), splits of the depth and launch settings of a product."""

    rows: int
    columns: int
    depth: int
    splits: int
    num_warps: int
    num_stages: int

    def fits(self, columns: int, depth: int) -> bool:
        """Return whether a product of so many columns and that depth divides into whole tiles."""
        return columns % self.columns == 0 and depth % (self.depth * self.splits) == 0


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_gemm_kernel(
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
    """Compute one tile of one split. Tiles of the same columns run side by side, so the weights are
    read once.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    start = split * depth_per_split
    depth = tl.arange(0, DEPTH)
    # Rows after the end repeat the first rows: loads need no mask, and the store leaves them out.
    left = inputs + (row % num_rows)[:, None].to(tl.int64) * input_stride + (start + depth)[None, :]
    right = weight + column[None, :].to(tl.int64) * weight_stride + (start + depth)[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if GATED:
        other = right + num_columns.to(tl.int64) * weight_stride
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for _ in range(0, depth_per_split, DEPTH):
            tile = tl.load(left)
            total = tl.dot(
                tile,
                tl.load(right, eviction_policy="evict_first"),
                total,
                input_precision=PRECISION,
            )
            up = tl.dot(
                tile, tl.load(other, eviction_policy="evict_first"), up, input_precision=PRECISION
            )
            left += DEPTH
            right += DEPTH
            other += DEPTH
        total = total * tl.sigmoid(total) * up
    else:
        for _ in range(0, depth_per_split, DEPTH):
            tile = tl.load(left)
            total = tl.dot(
                tile,
                tl.load(right, eviction_policy="evict_first"),
                total,
                input_precision=PRECISION,
            )
            left += DEPTH
            right += DEPTH
    target = (
        output
        + split.to(tl.int64) * split_stride
        + row[:, None].to(tl.int64) * num_columns
        + column[None, :]
    )
    tl.store(
        target,
        total.to(output.dtype.element_ty),
        mask=(row < num_rows)[:, None] & (column >= 0)[None, :],
    )


def skinny_gemm(
    inputs: torch.Tensor, weight: torch.Tensor, config: ProductConfig, *, gated: bool = False
) -> torch.Tensor:
    """Return `inputs @ weight.T`.

    Args:
        inputs: `[T, depth]`.
        weight: `[columns, depth]`, rows contiguous.
        config: tile sizes, which must fit.
        gated: the first half of the weight is gate and the second up; the output is
            `silu(gate) * up`, in one split.

    Returns:
        With one split `[T, columns]` in the inputs' dtype, else `[splits, T, columns]` float32,
        which the reader sums.
    """
    num_rows, depth = inputs.shape
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    assert config.fits(columns, depth), (config, columns, depth)
    assert not (gated and config.splits > 1), config
    sizes = (num_rows, columns) if config.splits == 1 else (config.splits, num_rows, columns)
    dtype = inputs.dtype if config.splits == 1 else torch.float32
    output = torch.empty(sizes, dtype=dtype, device=inputs.device)
    grid = (triton.cdiv(num_rows, config.rows), columns // config.columns, config.splits)
    _skinny_gemm_kernel[grid](
        inputs, weight, output, num_rows, columns, depth // config.splits,
        inputs.stride(0), weight.stride(0), num_rows * columns,
        GATED=gated, PRECISION="ieee" if inputs.dtype == torch.float32 else "tf32",
        ROWS=config.rows, COLUMNS=config.columns, DEPTH=config.depth,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return output


TABLES = "tuned"  # folder of this package; one JSON file for each GPU


@dataclass(frozen=True, slots=True)
class ProductShape:
    """A weight `[columns, depth]` (twice the columns when gated) and the number of rows that it
    multiplies.
    """

    columns: int
    depth: int
    gated: bool
    rows: int


class ProductTable:
    """Measured choices: a `ProductConfig`, or None where cuBLAS was faster."""

    def __init__(self, choices: Mapping[ProductShape, ProductConfig | None]) -> None:
        self._choices = dict(choices)
        self._rows: dict[tuple[int, int, bool], list[int]] = {}
        for shape in sorted(choices, key=lambda shape: shape.rows):
            self._rows.setdefault((shape.columns, shape.depth, shape.gated), []).append(shape.rows)

    def find(self, columns: int, depth: int, *, gated: bool, rows: int) -> ProductConfig | None:
        """Return the choice for the smallest measured number of rows that is no smaller; None
        beyond the largest.

        Args:
            columns: columns of the product.
            depth: depth of the product.
            gated: whether the product is gated.
            rows: rows of the inputs.
        """
        for measured in self._rows.get((columns, depth, gated), ()):
            if rows <= measured:
                return self._choices[ProductShape(columns, depth, gated, measured)]
        return None

    def __len__(self) -> int:
        return len(self._choices)


def table_from_rows(rows: Sequence[Mapping[str, Any]]) -> ProductTable:
    """Return the table of the `products` of a GPU's JSON file: columns, depth, gated, rows, config
    (an object or null).
    """
    choices: dict[ProductShape, ProductConfig | None] = {}
    for row in rows:
        shape = ProductShape(row["columns"], row["depth"], row["gated"], row["rows"])
        choices[shape] = None if row["config"] is None else ProductConfig(**row["config"])
    return ProductTable(choices)


def table_for(card: str) -> ProductTable:
    """Return the table of the GPU with that torch name ("NVIDIA H200"). It is empty, which selects
    cuBLAS, for a GPU without a table.
    """
    name = card.lower().replace(" ", "-") + ".json"
    file = files("zlab.engine") / TABLES / name
    if not file.is_file():
        return ProductTable({})
    return table_from_rows(json.loads(file.read_text(encoding="utf-8"))["products"])


class TritonSteps(LayerSteps):
    """The stages of a layer in Triton. The residual is updated in place; a delta may come in
    splits.
    """

    def __init__(
        self, shape: HeadShape, table: torch.Tensor, *, products: ProductTable | None = None
    ) -> None:
        """Take the shape and the rotation table. `products` defaults to the table of the GPU on
        which the model runs.
        """
        self._shape = shape
        self._table = table
        if products is None:
            products = (
                table_for(torch.cuda.get_device_name(table.device))
                if table.is_cuda
                else ProductTable({})
            )
        self._products = products

    @override
    def attention(
        self,
        index: int,
        layer: LayerWeights,
        delta: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = add_norm(delta, residual, layer.attention_norm, self._shape.eps)
        merged = self._product(normed, layer.qkv)
        if isinstance(context, StoredAttentionContext):
            place = context.destination(index)
        else:
            place = self._new_rows(positions, residual.dtype)
        queries = store_heads(
            merged, layer.qkv_bias, positions, self._table, layer.query_norm, layer.key_norm,
            self._shape, place, residual.dtype,
        )  # fmt: skip
        if isinstance(context, StoredAttentionContext):
            attended = context.attend_stored(index, queries)
        else:
            attended = context.attend(
                index, queries, place.cache_k.squeeze(1), place.cache_v.squeeze(1)
            )
        return attended.flatten(1), residual

    @override
    def project(self, layer: LayerWeights, attended: torch.Tensor) -> torch.Tensor:
        if layer.output_bias is not None:
            return linear(attended, layer.output, layer.output_bias)
        return self._product(attended, layer.output)

    @override
    def feed_forward(
        self, layer: LayerWeights, delta: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = add_norm(delta, residual, layer.feed_forward_norm, self._shape.eps)
        inner = self._gated(layer, normed)
        if layer.down_bias is not None:
            return linear(inner, layer.down, layer.down_bias), residual
        return self._product(inner, layer.down), residual

    @override
    def finish(
        self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return add_norm(delta.contiguous(), residual, weight, self._shape.eps)

    @override
    def head(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = self._product(hidden, weight)
        return logits if logits.dim() == 2 else logits.sum(dim=0).to(hidden.dtype)

    def _product(self, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        config = self._products.find(
            weight.shape[0], weight.shape[1], gated=False, rows=inputs.shape[0]
        )
        return linear(inputs, weight) if config is None else skinny_gemm(inputs, weight, config)

    def _gated(self, layer: LayerWeights, normed: torch.Tensor) -> torch.Tensor:
        columns, depth = layer.gate_up.shape[0] // 2, layer.gate_up.shape[1]
        if layer.gate_up_bias is None:
            config = self._products.find(columns, depth, gated=True, rows=normed.shape[0])
            if config is not None:
                return skinny_gemm(normed, layer.gate_up, config, gated=True)
        return gated(linear(normed, layer.gate_up, layer.gate_up_bias), normed.dtype)

    def _new_rows(self, positions: torch.Tensor, dtype: torch.dtype) -> StoreDestination:
        """Return fresh rows for keys and values, for a context that stores them itself."""
        num_tokens, device = positions.shape[0], positions.device
        sizes = (num_tokens, 1, self._shape.num_kv_heads, self._shape.head_dim)
        return StoreDestination(
            slot_mapping=torch.arange(num_tokens, dtype=torch.int64, device=device),
            cache_k=torch.empty(sizes, dtype=dtype, device=device),
            cache_v=torch.empty(sizes, dtype=dtype, device=device),
        )

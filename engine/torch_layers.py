"""The stages of a layer in plain torch: run as they are, or each compiled once and used for every layer."""

from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

import torch
from torch.nn.functional import linear, silu

from engine.layers import AttentionContext, HeadShape, LayerWeights

CompileMode = Literal["default", "max-autotune-no-cudagraphs"]
MOST_COMPILATIONS = 64
P = ParamSpec("P")
R = TypeVar("R")


def add_norm(
    delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMS norm of `residual + delta` times `weight`, the sum itself); in float32, rounded to the residual's dtype."""
    total = (residual.float() + delta.float()).to(residual.dtype)
    return norm(total, weight, eps), total


def norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`values / sqrt(mean(values^2) + eps) * weight` over the last axis, in float32."""
    wide = values.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(values.dtype)


def rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (i, i + d/2) of `heads [T, H, d]` by the angles of `[T, 1, d/2]`, in float32."""
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(heads.dtype)


def split_heads(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    shape: HeadShape,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys, normed where there are weights for it and rotated, and values, out of the merged projection."""
    num_kv, dim = shape.num_kv_heads, shape.head_dim
    heads = qkv.view(qkv.shape[0], shape.num_query_heads + 2 * num_kv, dim)
    queries, keys, values = torch.split(heads, [shape.num_query_heads, num_kv, num_kv], dim=1)
    if query_norm is not None and key_norm is not None:
        queries, keys = norm(queries, query_norm, shape.eps), norm(keys, key_norm, shape.eps)
    cosines, sines = table[positions].unsqueeze(1).chunk(2, dim=-1)
    return rotate(queries, cosines, sines), rotate(keys, cosines, sines), values


def attention_input(
    delta: torch.Tensor,
    residual: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    norm_weight: torch.Tensor,
    qkv: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    shape: HeadShape,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(queries, keys, values, residual) of one layer."""
    normed, residual = add_norm(delta, residual, norm_weight, shape.eps)
    merged = linear(normed, qkv, qkv_bias)
    return (*split_heads(merged, positions, table, query_norm, key_norm, shape), residual)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `[T, 2 * I]`: `[T, I]`, in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)


def feed_forward(
    delta: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(delta, residual) after the second half of a layer."""
    normed, residual = add_norm(delta, residual, norm_weight, eps)
    return linear(gated(linear(normed, gate_up, gate_up_bias)), down, down_bias), residual


class TorchSteps:
    """The stages in plain torch; with `compile_mode`, each compiled once and used for every layer.

    `dynamic` compiles for any number of tokens; without it every number of tokens is compiled for on its own, which
    takes longer and gives the faster kernels: for the few padded batch sizes of a decode graph. `backend` is
    `torch.compile`'s.
    """

    def __init__(
        self,
        shape: HeadShape,
        table: torch.Tensor,
        *,
        compile_mode: CompileMode | None = None,
        dynamic: bool = True,
        backend: str = "inductor",
    ) -> None:
        self._shape = shape
        self._table = table
        self._attention_input = _compiled(attention_input, compile_mode, dynamic, backend)
        self._linear = _compiled(_linear, compile_mode, dynamic, backend)
        self._feed_forward = _compiled(feed_forward, compile_mode, dynamic, backend)
        self._add_norm = _compiled(add_norm, compile_mode, dynamic, backend)

    def attention(
        self,
        index: int,
        layer: LayerWeights,
        delta: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerSteps.attention`."""
        queries, keys, values, residual = self._attention_input(
            delta, residual, positions, self._table,
            layer.attention_norm, layer.qkv, layer.qkv_bias, layer.query_norm, layer.key_norm, self._shape,
        )  # fmt: skip
        return context.attend(index, queries, keys, values).flatten(1), residual

    def project(self, layer: LayerWeights, attended: torch.Tensor) -> torch.Tensor:
        """See `LayerSteps.project`."""
        return self._linear(attended, layer.output, layer.output_bias)

    def feed_forward(
        self, layer: LayerWeights, delta: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerSteps.feed_forward`."""
        return self._feed_forward(
            delta, residual, layer.feed_forward_norm,
            layer.gate_up, layer.gate_up_bias, layer.down, layer.down_bias, self._shape.eps,
        )  # fmt: skip

    def finish(self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `LayerSteps.finish`."""
        return self._add_norm(delta, residual, weight, self._shape.eps)[0]

    def head(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `LayerSteps.head`."""
        return self._linear(hidden, weight, None)


def _linear(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(values, weight, bias)


def _compiled(function: Callable[P, R], mode: CompileMode | None, dynamic: bool, backend: str) -> Callable[P, R]:
    if mode is None:
        return function
    # By number of tokens: more padded batch sizes than torch expects of a function by itself.
    torch.compiler.config.recompile_limit = max(MOST_COMPILATIONS, torch.compiler.config.recompile_limit)
    compiled: Callable[P, R] = torch.compile(function, mode=mode, dynamic=dynamic, backend=backend, fullgraph=True)
    return compiled

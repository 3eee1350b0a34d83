"""The stages of a decoder layer, and their implementation in plain torch.

`LayerSteps` is the interface; `TorchSteps` runs the stages as they are or compiled, and
`zlab.engine.model.triton_layers` has Triton kernels. `AttentionContext` is what a layer needs of
the cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch
from torch.nn.functional import linear, silu
from typing_extensions import override

from zlab.engine.model.spec import ModelConfig


@dataclass(frozen=True)
class LayerWeights:
    """The tensors of one layer, matrices `[out, in]`. `qkv` holds query, key and value rows in that
    order, `gate_up` gate rows, then up rows.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    feed_forward_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True)
class StoreDestination:
    """Where one layer's new keys, values and window queries are stored; see
    `zlab.engine.kernels.interface.KernelBackend.store`.
    """

    slot_mapping: torch.Tensor
    cache_k: torch.Tensor
    cache_v: torch.Tensor
    window_rows: torch.Tensor | None = None
    window_queries: torch.Tensor | None = None


class AttentionContext(Protocol):
    """Attention of one step over the cache: which tokens belong together, where they are stored,
    and what they may see.
    """

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Store rotated `keys` and `values [T, H_kv, d]`, then attend with `queries [T, H_q, d]`.
        All may be views. Returns `[T, H_q, d]`.
        """


@runtime_checkable
class StoredAttentionContext(AttentionContext, Protocol):
    """A context whose store the layer can do itself, fused with the rotation."""

    def destination(self, layer: int) -> StoreDestination:
        """Return where this layer's rows are stored."""

    def attend_stored(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attend as `attend` does, with keys and values already in the cache. `queries [T, H_q, d]`
        are contiguous.
        """


@dataclass(frozen=True)
class HeadShape:
    """How a row of the merged projection splits into heads, and the epsilon of the norm. These are
    constants of a compiled layer.
    """

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    @staticmethod
    def of(config: ModelConfig) -> "HeadShape":
        """Return the heads of a model or of a part of it."""
        return HeadShape(
            config.num_query_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        )


class LayerSteps(Protocol):
    """The stages of a layer. The state of a token is `residual` plus a `delta`, which the next norm
    adds.

    `residual` is `[T, hidden]`. `delta` has the same shape, or is `[splits, T, hidden]` float32 and
    still to be summed. A stage may overwrite the residual that it gets, and returns the one with
    which to continue.
    """

    def attention(
        self,
        index: int,
        layer: LayerWeights,
        delta: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply norm, projections, rotation and attention.

        Args:
            index: number of the layer.
            layer: its weights.
            delta: what the norm adds to the residual.
            residual: `[T, hidden]`.
            positions: `[T]` int64.
            context: attention over the cache.

        Returns:
            Attended values `[T, H_q * d]` and the residual.
        """

    def project(self, layer: LayerWeights, attended: torch.Tensor) -> torch.Tensor:
        """Apply the output projection of the attention. Returns the next delta, of this process's
        heads only.
        """

    def feed_forward(
        self, layer: LayerWeights, delta: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply norm and gated feed-forward. Returns the delta of this process's columns only, and
        the residual.
        """

    def finish(
        self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Return the final norm of the full state, `[T, hidden]`."""

    def head(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return `hidden [rows, hidden] @ weight.T`, the logits of this process's part of the
        vocabulary.
        """


CompileMode = Literal["default", "max-autotune-no-cudagraphs"]
MOST_COMPILATIONS = 64
P = ParamSpec("P")
R = TypeVar("R")


def add_norm(
    delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMS norm of `residual + delta` times `weight`, and the sum itself. Both are
    computed in float32 and rounded to the residual's dtype.

    Args:
        delta: `[T, hidden]`, or `[splits, T, hidden]` to be summed.
        residual: `[T, hidden]`.
        weight: `[hidden]`.
        eps: epsilon of the norm.
    """
    total = (residual.float() + delta.float()).to(residual.dtype)
    return norm(total, weight, eps), total


def norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `values / sqrt(mean(values^2) + eps) * weight` over the last axis, in float32 (RMS
    norm, arXiv 1910.07467).
    """
    wide = values.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(values.dtype)


def rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + d/2) of `heads [T, H, d]` by the angles of `[T, 1, d/2]`, in float32
    (RoPE, arXiv 2104.09864).
    """
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
    """Split the merged projection into queries, keys and values `[T, H, d]`. Queries and keys are
    normed where there are weights for it, and rotated.
    """
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
    """Return queries, keys, values and residual of one layer."""
    normed, residual = add_norm(delta, residual, norm_weight, shape.eps)
    merged = linear(normed, qkv, qkv_bias)
    return (*split_heads(merged, positions, table, query_norm, key_norm, shape), residual)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` of `[T, 2 * I]` as `[T, I]`, computed in float32 (SwiGLU, arXiv
    2002.05202).
    """
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
    """Return delta and residual after the feed-forward half of a layer."""
    normed, residual = add_norm(delta, residual, norm_weight, eps)
    return linear(gated(linear(normed, gate_up, gate_up_bias)), down, down_bias), residual


class TorchSteps(LayerSteps):
    """The stages in plain torch; with `compile_mode` each is compiled once and used for every
    layer.

    Args:
        shape: heads and epsilon.
        table: the rotation table `[positions, head_dim]`.
        compile_mode: mode of `torch.compile`; None runs eagerly.
        dynamic: compile once for any number of tokens. Without it each number of tokens is compiled
            separately, which takes longer and gives faster kernels for the few batch sizes of
            graphs.
        backend: backend of `torch.compile`.
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
        queries, keys, values, residual = self._attention_input(
            delta,
            residual,
            positions,
            self._table,
            layer.attention_norm,
            layer.qkv,
            layer.qkv_bias,
            layer.query_norm,
            layer.key_norm,
            self._shape,
        )
        return context.attend(index, queries, keys, values).flatten(1), residual

    @override
    def project(self, layer: LayerWeights, attended: torch.Tensor) -> torch.Tensor:
        return self._linear(attended, layer.output, layer.output_bias)

    @override
    def feed_forward(
        self, layer: LayerWeights, delta: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._feed_forward(
            delta, residual, layer.feed_forward_norm,
            layer.gate_up, layer.gate_up_bias, layer.down, layer.down_bias, self._shape.eps,
        )  # fmt: skip

    @override
    def finish(
        self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return self._add_norm(delta, residual, weight, self._shape.eps)[0]

    @override
    def head(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._linear(hidden, weight, None)


def _linear(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(values, weight, bias)


def _compiled(
    function: Callable[P, R], mode: CompileMode | None, dynamic: bool, backend: str
) -> Callable[P, R]:
    if mode is None:
        return function
    # Without `dynamic` there is one compilation for each padded batch size, more than torch allows
    # by default.
    torch.compiler.config.recompile_limit = max(
        MOST_COMPILATIONS, torch.compiler.config.recompile_limit
    )
    compiled: Callable[P, R] = torch.compile(
        function, mode=mode, dynamic=dynamic, backend=backend, fullgraph=True
    )
    return compiled

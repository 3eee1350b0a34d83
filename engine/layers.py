"""What a decoder layer is made of: its weights, its stages, and what it asks of the cache between them."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from engine.config import ModelConfig


@dataclass(frozen=True)
class LayerWeights:
    """One layer's tensors, matrices `[out, in]`; `qkv` is query, key, value in that order, `gate_up` gate then up."""

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
    """Where one layer's new keys, values and window queries go; see `engine.kernels.contract.Kernels.store`."""

    slot_mapping: torch.Tensor
    cache_k: torch.Tensor
    cache_v: torch.Tensor
    window_rows: torch.Tensor | None = None
    window_queries: torch.Tensor | None = None


class AttentionContext(Protocol):
    """What a step knows about the cache: which tokens belong together, where they are kept, what they may see."""

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Keep `keys` (rotated) and `values [T, H_kv, d]`, answer `queries [T, H_q, d]`: `[T, H_q, d]` (views)."""


@runtime_checkable
class StoredAttentionContext(AttentionContext, Protocol):
    """A context whose store can be done by the layer itself, fused with the rotation."""

    def destination(self, layer: int) -> StoreDestination:
        """Where this layer's rows go."""

    def attend_stored(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """As `attend`, keys and values being in the cache already; `queries [T, H_q, d]` are contiguous."""


@dataclass(frozen=True)
class HeadShape:
    """How a row of the merged projection falls into heads, and the norm's epsilon; constants of a compiled layer."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    @staticmethod
    def of(config: ModelConfig) -> "HeadShape":
        """The heads of a (part of a) model."""
        return HeadShape(config.num_query_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)


class LayerSteps(Protocol):
    """The stages of a layer. A token's state is `residual` plus a `delta` not yet added: the next norm adds it.

    `residual [T, hidden]`; `delta` the same, or `[splits, T, hidden]` float32 to be summed. A call may overwrite the
    residual it was given, and returns the one to go on with.
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
        """Norm, projections, rotation and attention: (attended `[T, H_q * d]`, residual)."""

    def project(self, layer: LayerWeights, attended: torch.Tensor) -> torch.Tensor:
        """The attention's output projection: the next delta, of this process's heads only."""

    def feed_forward(
        self, layer: LayerWeights, delta: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm and gated feed-forward: (delta of this process's columns only, residual)."""

    def finish(self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The final norm of the full state, `[T, hidden]`."""

    def head(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`hidden [rows, hidden] @ weight.T`: logits of this process's part of the vocabulary."""

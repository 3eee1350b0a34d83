"""The decoder of the Llama, Qwen2 and Qwen3 families, for packed tokens.

`Decoder` owns the weights and runs the layers; attention comes from outside (`AttentionContext`),
because only the step knows the cache. Query, key and value projections are merged into one product,
and so are gate and up projections. The stages of a layer (`LayerSteps`) have several
implementations, which `find_variant` selects by name.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch.nn.functional import embedding
from typing_extensions import override

from zlab.engine.errors import ModelError
from zlab.engine.model.layers import (
    AttentionContext,
    HeadShape,
    LayerSteps,
    LayerWeights,
    TorchSteps,
)
from zlab.engine.model.spec import ModelConfig, Rope
from zlab.engine.model.tensor_parallel import Parallel, part_of
from zlab.traces.choices import unknown_choice


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return the radians per position of every pair of a head, `[head_dim / 2]` float32.

    `llama3` is the rule of Llama 3.1: pairs that turn at least `high_freq_factor` times within the
    original context stay, pairs that turn at most `low_freq_factor` times are slowed by `factor`,
    and pairs between them are interpolated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.divisors is not None:
        return plain / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_positions * plain / (2 * math.pi)
        share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        share = share.clamp(0.0, 1.0)
        return (1.0 - share) * plain / rope.factor + share * plain
    return plain


def rotation_table(
    rope: Rope, head_dim: int, num_positions: int, device: torch.device
) -> torch.Tensor:
    """Return the rotation table `[num_positions, head_dim]` float32: the cosines of all pairs, then
    their sines.

    Args:
        rope: the rule of the frequencies.
        head_dim: values of a head.
        num_positions: rows of the table.
        device: where the table is.
    """
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies(rope, head_dim).to(device)[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class LanguageModel(Protocol):
    """The interface of a model to the runner. `Decoder` and `TransformersModel` implement it."""

    config: ModelConfig  # of the whole model
    part: ModelConfig  # of this process's part, for which the cache is made
    rotation: torch.Tensor | None  # as `rotation_table` gives it; None where it is not known

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights of this process's part take."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layers. No value reaches the host, and equal shapes run equal kernels, so a
        decode step can be captured in a graph.

        Args:
            token_ids: packed tokens `[T]` int64.
            positions: their positions `[T]` int64.
            context: attention over the cache.
            rows: tokens whose states are wanted, `[K]` int64; by default all.

        Returns:
            Final hidden states `[T, hidden]` or `[K, hidden]`.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[rows, vocab]` in the model's dtype, complete on every process of a
        parallel group.
        """

    def warm_up(self, token_counts: Sequence[int], row_counts: Sequence[int]) -> None:
        """Load the kernels for steps of these token counts and for logits of these row counts, as
        far as this is cheap.

        Matrix products use different kernels for different row counts, and the first launch of a
        kernel waits for all work on the device.
        """


@dataclass(frozen=True)
class DecoderWeights:
    """All tensors of one process's part. `embedding` and `head` are `[vocab rows, hidden]`, one
    tensor when they are tied.
    """

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


class Decoder(LanguageModel):
    """A decoder: its weights, the implementation of its layers, and the part of this process."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        parallel: Parallel | None = None,
        make_steps: Callable[[HeadShape, torch.Tensor], LayerSteps] = TorchSteps,
    ) -> None:
        """Take the weights.

        Args:
            config: the whole model.
            weights: tensors of this process's part.
            parallel: the process group; by default one process.
            make_steps: makes the layer stages from the heads of this part and the rotation table.
        """
        self.parallel = parallel or Parallel()
        self.config = config
        self.part = part_of(config, self.parallel)
        self.weights = weights
        self.rotation = rotation_table(
            config.rope, config.head_dim, config.max_positions, self.device
        )
        self.steps = make_steps(HeadShape.of(self.part), self.rotation)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.weights.embedding.device

    @property
    @override
    def weight_bytes(self) -> int:
        of_layers = (
            getattr(layer, item.name) for layer in self.weights.layers for item in fields(layer)
        )
        tensors = (self.weights.embedding, self.weights.final_norm, self.weights.head, *of_layers)
        # a tied head is the embedding
        different = {id(tensor): tensor for tensor in tensors if tensor is not None}
        return sum(tensor.nbytes for tensor in different.values())

    @override
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        delta = self._embed(token_ids)
        residual = torch.zeros_like(delta)
        for index, layer in enumerate(self.weights.layers):
            attended, residual = self.steps.attention(
                index, layer, delta, residual, positions, context
            )
            delta = self._sum(self.steps.project(layer, attended))
            delta, residual = self.steps.feed_forward(layer, delta, residual)
            delta = self._sum(delta)
        if rows is not None:
            delta, residual = delta[..., rows, :], residual[rows]
        return self.steps.finish(delta, residual, self.weights.final_norm)

    @override
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        part = self.steps.head(hidden, self.weights.head)
        return self.parallel.join_columns(part)[:, : self.config.vocab_size]

    @override
    def warm_up(self, token_counts: Sequence[int], row_counts: Sequence[int]) -> None:
        layer, hidden_size, like = (
            self.weights.layers[0],
            self.config.hidden_size,
            self.weights.embedding,
        )
        for count in token_counts:
            delta = like.new_zeros(count, hidden_size)
            positions = torch.zeros(count, dtype=torch.int64, device=like.device)
            attended, residual = self.steps.attention(
                0, layer, delta, delta.clone(), positions, _Unanswered()
            )
            self.steps.feed_forward(layer, self.steps.project(layer, attended), residual)
        for count in row_counts:
            self.steps.head(like.new_zeros(count, hidden_size), self.weights.head)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.parallel.size == 1:
            return embedding(token_ids, self.weights.embedding)
        num_rows = self.weights.embedding.shape[0]
        local = token_ids - self.parallel.rank * num_rows
        held = (local >= 0) & (local < num_rows)
        found = embedding(local.clamp(0, num_rows - 1), self.weights.embedding)
        return self.parallel.sum(found.masked_fill(~held[:, None], 0.0))

    def _sum(self, delta: torch.Tensor) -> torch.Tensor:
        if self.parallel.size == 1:
            return delta
        if delta.dim() == 3:  # splits of a product; they are summed and sent in the model's dtype
            delta = delta.sum(dim=0).to(self.weights.embedding.dtype)
        return self.parallel.sum(delta)


class _Unanswered(AttentionContext):
    """An `AttentionContext` that stores nothing and returns the queries."""

    @override
    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        return queries


StepsMaker = Callable[[HeadShape, torch.Tensor], LayerSteps]


def _eager(shape: HeadShape, table: torch.Tensor) -> LayerSteps:
    return TorchSteps(shape, table)


def _compiled(shape: HeadShape, table: torch.Tensor) -> LayerSteps:
    return TorchSteps(shape, table, compile_mode="default")


def _compiled_by_size(shape: HeadShape, table: torch.Tensor) -> LayerSteps:
    return TorchSteps(shape, table, compile_mode="default", dynamic=False)


def _autotuned(shape: HeadShape, table: torch.Tensor) -> LayerSteps:
    return TorchSteps(shape, table, compile_mode="max-autotune-no-cudagraphs", dynamic=False)


VARIANTS: dict[str, StepsMaker] = {
    "eager": _eager,
    "compile": _compiled,
    "compile-by-size": _compiled_by_size,
    "autotune": _autotuned,
}
try:
    from zlab.engine.model.triton_layers import TritonSteps
except ImportError:  # Triton does not support this platform
    pass
else:
    VARIANTS["triton"] = TritonSteps


def default_variant(device: torch.device) -> str:
    """Return the variant for the device: Triton kernels on CUDA, plain torch elsewhere."""
    return "triton" if device.type == "cuda" and "triton" in VARIANTS else "eager"


def find_variant(name: str) -> StepsMaker:
    """Return the constructor of the layer stages of that variant.

    Raises:
        ModelError: there is no such variant; the message has the choices.
    """
    if name not in VARIANTS:
        raise ModelError(unknown_choice("variant", name, VARIANTS))
    return VARIANTS[name]

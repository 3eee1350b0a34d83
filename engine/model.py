"""The own decoder of the Llama, Qwen2 and Qwen3 families: merged projections, packed tokens, attention from outside."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import embedding

from engine.config import ModelConfig
from engine.layers import AttentionContext, HeadShape, LayerSteps, LayerWeights
from engine.parallel import Parallel, part_of
from engine.rope import rotation_table
from engine.torch_layers import TorchSteps


class LanguageModel(Protocol):
    """What the runner drives: the own decoder, or transformers' modules behind the same two calls."""

    config: ModelConfig  # of the whole model
    part: ModelConfig  # of this process's part: the heads that its cache is made for

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Final hidden states `[T, hidden]` of packed tokens `[T]` (int64), or of the tokens `rows` (int64) alone.

        No value reaches the host, and for given shapes the same kernels run: a decode step can be captured in a graph.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, vocab]` in the model's dtype, on every process of a parallel group."""

    def warm_up(self, token_counts: Sequence[int], row_counts: Sequence[int]) -> None:
        """Load the kernels for steps of so many tokens and for logits of so many rows, as far as can be done cheaply.

        Matrix products have other kernels for other numbers of rows, and a kernel's first launch waits until the device
        has done all that it was given.
        """


@dataclass(frozen=True)
class DecoderWeights:
    """All tensors of one process's part. `embedding`, `head [vocab rows, hidden]`: the same tensor when tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


class Decoder:
    """Weights, a way to run their layers, and this process's place among those that share the model."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        parallel: Parallel | None = None,
        make_steps: Callable[[HeadShape, torch.Tensor], LayerSteps] = TorchSteps,
    ) -> None:
        """`make_steps` is given the heads of this part and the table of `engine.rope.rotation_table`."""
        self.parallel = parallel or Parallel()
        self.config = config
        self.part = part_of(config, self.parallel)
        self.weights = weights
        table = rotation_table(config.rope, config.head_dim, config.max_positions, self.device)
        self.steps = make_steps(HeadShape.of(self.part), table)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.embedding.device

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `LanguageModel.forward`."""
        delta = self._embed(token_ids)
        residual = torch.zeros_like(delta)
        for index, layer in enumerate(self.weights.layers):
            attended, residual = self.steps.attention(index, layer, delta, residual, positions, context)
            delta = self._sum(self.steps.project(layer, attended))
            delta, residual = self.steps.feed_forward(layer, delta, residual)
            delta = self._sum(delta)
        if rows is not None:
            delta, residual = delta[..., rows, :], residual[rows]
        return self.steps.finish(delta, residual, self.weights.final_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `LanguageModel.logits`."""
        part = self.steps.head(hidden, self.weights.head)
        return self.parallel.join_columns(part)[:, : self.config.vocab_size]

    def warm_up(self, token_counts: Sequence[int], row_counts: Sequence[int]) -> None:
        """See `LanguageModel.warm_up`: all layers are of one shape, so it runs one, and the head."""
        layer, hidden_size, like = self.weights.layers[0], self.config.hidden_size, self.weights.embedding
        for count in token_counts:
            delta = like.new_zeros(count, hidden_size)
            positions = torch.zeros(count, dtype=torch.int64, device=like.device)
            attended, residual = self.steps.attention(0, layer, delta, delta.clone(), positions, _Unanswered())
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
        if delta.dim() == 3:  # splits of a product; sent as one, in the model's dtype
            delta = delta.sum(dim=0).to(self.weights.embedding.dtype)
        return self.parallel.sum(delta)


class _Unanswered:
    """An `AttentionContext` that keeps nothing and gives the queries back."""

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return queries

"""What a set of kernels answers to: `torch_kernels` and `triton_kernels` are two modules of this
one shape.

Shapes throughout: `cache_k`, `cache_v [layers, blocks, b, H_kv, d]` (any strides with the last one
1), one layer of it without the first axis, `history [layers, blocks, b, H_kv]` float32, block
tables int32 padded with -1. A padding row, slot or table entry is never read through and nothing is
written for it.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from zlab.engine.kernels.triton_decode import DecodePlan, DecodeWorkspace
from zlab.engine.kernels.workspace import CompressionBatch, Scratch

Segment = Literal[
    "block", "sequence"
]  # what redundancy logits were summed over, and are divided by


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How the attention of the window becomes a token's score.

    Attributes:
        decay: factor of the history.
        lightning_threshold: with one, `scratch.redundancy_logits` is filled, too.
        mean_heads: the mean over a group's query heads instead of the maximum.
        with_positions: history and global score hold position and score of a token in one word, as
            `zlab.engine.kernels.torch_backend.pack` writes it.
    """

    decay: float = 0.8
    lightning_threshold: float | None = None
    mean_heads: bool = False
    with_positions: bool = False


@dataclass(frozen=True, slots=True)
class DistinctWeights:
    """The numbers of `KernelBackend.distinct_score`.

    Attributes:
        pool_size: neighbours whose highest attention a token takes at a first compression, odd.
        attention_weight: share of attention.
        key_weight: of the key's length.
        value_weight: of the value's length.
        copy_weight: of the highest similarity with a later one of the latest tokens.
        sharpness: of the softmax over redundancy.
    """

    pool_size: int
    attention_weight: float
    key_weight: float
    value_weight: float
    copy_weight: float
    sharpness: float


class KernelBackend(Protocol):
    """Every stage that reads or writes the paged cache. All is enqueued on the current stream."""

    def store(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        slot_mapping: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        queries: torch.Tensor | None = None,
        window_rows: torch.Tensor | None = None,
        window_queries: torch.Tensor | None = None,
    ) -> None:
        """Write new `keys`, `values [T, H_kv, d]` of one layer to cache slot `slot_mapping[t]` =
        block * b + offset.

        With the last three given, `queries [T, H_q, d]` go to row `window_rows[t]` = query slot * w
        + place in window of this layer's `window_queries [slots, w, H_q, d]`. -1 in either mapping
        (int32 or int64) means: not stored.
        """

    def plan_decodes(
        self, lengths: torch.Tensor, workspace: DecodeWorkspace, most_tokens: int
    ) -> DecodePlan:
        """Cut a batch of `lengths [B]` (int32) into items: whole splits first, then each request's
        last, shorter one.

        Of the last ones the longest go first, by class of length; within a class the order is that
        of the batch. Plain torch takes the batch at once and lays out no items.

        `most_tokens`: no less than the lengths add up to; a launch is laid out for so many.
        Requests beyond that, or beyond the workspace, have no room. No launch of an earlier plan
        for this workspace may come behind this one.
        """

    def decode_attention(
        self,
        queries: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        block_tables: torch.Tensor,
        plan: DecodePlan,
        scale: float,
        workspace: DecodeWorkspace,
        output: torch.Tensor,
    ) -> None:
        """One query per request, `queries [B, H_q, d]`, over its `plan.lengths[r]` cached tokens,
        its own included.

        A request of length 0 (padding) gets zeros, one that the plan has no room for NaN. Splits
        depend on a request's own length only, never on who else is in the batch.
        """

    def prefill_attention(
        self,
        queries: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        block_tables: torch.Tensor,
        lengths: torch.Tensor,
        query_starts: torch.Tensor,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """Packed chunks: request r owns `queries[query_starts[r] : query_starts[r + 1]]` of `[T,
        H_q, d]`.

        What is before the first and behind the last is neither read nor written. They are the last
        tokens of its `lengths[r]` cached ones (already stored) and see those up to themselves.
        """

    def attention_score(
        self,
        cache_k: torch.Tensor,
        window_queries: torch.Tensor,
        batch: CompressionBatch,
        scratch: Scratch,
        history: torch.Tensor | None,
        options: AttentionOptions,
    ) -> None:
        """Fill `scratch.global_score` with window attention A, or with `history` the global score
        F.

        Args:
            cache_k: the keys.
            window_queries: `[layers, slots, w, H_q, d]` in the cache's dtype.
            batch: the requests.
            scratch: where the scores go.
            history: F of the last compression; None: F is A.
            options: how attention becomes a score.
        """

    def lightning_redundancy(
        self, cache_k: torch.Tensor, batch: CompressionBatch, scratch: Scratch, *, threshold: float
    ) -> None:
        """Fill `scratch.redundancy_logits` by the rule inside each block."""

    def full_redundancy(
        self, cache_k: torch.Tensor, batch: CompressionBatch, scratch: Scratch, *, threshold: float
    ) -> None:
        """Fill `scratch.redundancy_logits` by the rule over all pairs; `scratch.score` is used as
        working memory.
        """

    def combine(
        self,
        batch: CompressionBatch,
        scratch: Scratch,
        *,
        pool_size: int,
        attention_weight: float,
        temperature: float,
        segment: Segment | None,
    ) -> None:
        """`scratch.score` = P without a `segment`, else `lambda * P - (1 - lambda) * R`; P pools
        first compressions.
        """

    def distinct_score(
        self,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        rotation: torch.Tensor | None,
        batch: CompressionBatch,
        scratch: Scratch,
        weights: DistinctWeights,
    ) -> None:
        """Fill `scratch.score` from the packed `scratch.global_score`, keys and values.

        With u the keys of length 1 whose rotation is undone and z a quantity in standard
        deviations from its mean over the sequence: `R = softmax(sharpness * z(z(u . sum(u)) +
        copy_weight * z(C) - key_weight * z(|key|) - value_weight * z(|value|)))`, `score =
        attention_weight * P - (1 - attention_weight) * R`; P pools first compressions, and C is a
        token's highest cosine, of u less its mean, with a later one of the latest tokens (those of
        the last block, at least 64).

        Args:
            cache_k: the keys, rotated.
            cache_v: the values.
            rotation: `[positions, d]`, cosines and sines; None: keys are taken as they are.
            batch: the requests.
            scratch: where the scores go; `spare` and `redundancy_logits` are working memory.
            weights: the numbers of the formula.
        """

    def random_score(self, batch: CompressionBatch, scratch: Scratch) -> None:
        """`scratch.score` = uniform numbers in [0, 1) from seed, layer, KV head and place alone."""

    def select(self, batch: CompressionBatch, scratch: Scratch, *, window: int, sink: int) -> None:
        """`scratch.keep_index`: exactly k increasing cache indices per layer and KV head by
        `scratch.score`.

        The last `window` and first `sink` always; then the higher score (NaN is -inf), of equal
        scores the later token.
        """

    def compact(
        self,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        history: torch.Tensor | None,
        batch: CompressionBatch,
        scratch: Scratch,
    ) -> None:
        """Move the rows of `scratch.keep_index` into the target blocks: K, V, and F from `scratch`
        into `history`.
        """

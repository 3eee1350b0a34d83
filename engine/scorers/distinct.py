"""Distinct: attention against keys that are like the average key, with the rotation undone.

A long chain of thought is mostly filler and repeats: keys that point the same way. With the
rotation undone, the same word has the same key wherever it stands, and the sum of a key's
similarities to all others is its product with the sum of all unit keys: linear in the sequence.
Facts that were never read yet point elsewhere, and so do few-of-a-kind tokens. A token whose key,
less the mean key, is close to that of a later token is redundant too: attention that copies a text
reads its latest copy, so that copy is the one to keep. Tokens with long values and long keys are
kept sooner. Attention weighs little: that a token is read now says little about later, so it is
forgotten fast. The latest tokens are always kept (`ScorerTraits.recent`).

The weights were chosen by teacher-forced replay on two models of `benchmarks.train_reasoner`.
"""

from zlab.engine.kernels.interface import AttentionOptions, DistinctWeights, KernelBackend
from zlab.engine.scorers.interface import Scorer, ScoringInputs

ATTENTION = AttentionOptions(decay=0.5, mean_heads=True, with_positions=True)


class Distinct(Scorer):
    """See the module."""

    def score(self, inputs: ScoringInputs, kernels: KernelBackend) -> None:
        """Enqueue attention and likeness."""
        batch, scratch = inputs.batch, inputs.scratch
        kernels.attention_score(
            inputs.cache_k, inputs.window_queries, batch, scratch, inputs.history, ATTENTION
        )
        weights = DistinctWeights(
            pool_size=inputs.settings.pool_size,
            attention_weight=0.1,
            key_weight=0.3,
            value_weight=0.4,
            copy_weight=0.75,
            sharpness=0.5,
        )
        kernels.distinct_score(
            inputs.cache_k, inputs.cache_v, inputs.rotation, batch, scratch, weights
        )

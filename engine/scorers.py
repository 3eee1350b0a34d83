"""Which tokens a compression keeps: one scorer, one small class; the pipeline around it does not change."""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

import torch

from engine.kernels.batch import CompressionBatch
from engine.kernels.contract import Kernels, Segment
from engine.kernels.errors import KernelInputError
from engine.kernels.workspace import Scratch


@dataclass(frozen=True, slots=True)
class CompressionSettings:
    """The numbers of a compression; defaults as in the Zipage paper (arXiv 2603.08743)."""

    scorer: str = "attention+global+lightning"
    window: int = 16  # last tokens whose queries are stored, and which are always kept
    sink: int = 0  # first cache positions that are always kept
    attention_weight: float = 0.2  # lambda: share of the attention score against redundancy
    temperature: float = 0.4  # of the redundancy softmax
    decay: float = 0.8  # of the history at every compression
    pool_size: int = 5  # odd; neighbours whose maximum a first compression takes
    threshold: float = 0.5  # similarity strictly above it marks two keys as alike
    seed: int = 0  # of the random scorer

    def __post_init__(self) -> None:
        find_scorer(self.scorer)
        if self.window < 1:
            raise KernelInputError(f"window must be at least 1 token, got {self.window}")
        if self.sink < 0:
            raise KernelInputError(f"sink must not be negative, got {self.sink}")
        if not 0.0 <= self.attention_weight <= 1.0:
            raise KernelInputError(f"attention_weight (lambda) must be in 0..1, got {self.attention_weight}")
        if not 0.0 < self.temperature < float("inf"):
            raise KernelInputError(f"temperature must be positive, got {self.temperature}")
        if not 0.0 <= self.decay <= 1.0:
            raise KernelInputError(f"decay must be in 0..1, got {self.decay}")
        if self.pool_size < 1 or self.pool_size % 2 == 0:
            raise KernelInputError(f"pool_size must be odd and positive, got {self.pool_size}")
        if not 0.0 <= self.threshold <= 1.0:
            raise KernelInputError(f"threshold must be in 0..1, got {self.threshold}")

    def check_fits(self, block_size: int, num_target_blocks: int) -> None:
        """Raise `KernelInputError` unless window and sink fit a block and what `num_target_blocks` can keep."""
        if self.window > block_size:
            raise KernelInputError(f"window {self.window} is larger than the block size {block_size}")
        num_keep = num_target_blocks * block_size
        if self.window + self.sink > num_keep:
            raise KernelInputError(
                f"window {self.window} + sink {self.sink} tokens are always kept, but only {num_keep} "
                f"({num_target_blocks} blocks of {block_size}) can be"
            )


@dataclass(frozen=True, slots=True)
class ScoringInputs:
    """What a scorer may look at; `history` is the cache of global scores `[layers, blocks, b, H_kv]`."""

    cache_k: torch.Tensor
    window_queries: torch.Tensor
    history: torch.Tensor
    batch: CompressionBatch
    scratch: Scratch
    settings: CompressionSettings


class Scorer(Protocol):
    """Fills `scratch.score [layers, B, H_kv, S]`: the higher, the sooner a token is kept."""

    @property
    def name(self) -> str:
        """What a policy calls it."""

    @property
    def keeps_history(self) -> bool:
        """Whether it also fills `scratch.global_score`, which then travels with the kept tokens."""

    def score(self, inputs: ScoringInputs, kernels: Kernels) -> None:
        """Enqueue the scoring kernels."""


@dataclass(frozen=True, slots=True)
class AttentionScorer:
    """Attention of the window's queries, alone or with a memory, alone or against how much alike the keys are.

    Attributes:
        name: what a policy calls it.
        keeps_history: earlier compressions are remembered, decaying (in the manner of G-KV).
        redundancy: keys alike are looked for in the whole "sequence" (over all pairs: slow, the yardstick), or inside
            each "block" (in the same read of the keys as the attention); None takes attention alone.
    """

    name: str
    keeps_history: bool = False
    redundancy: Segment | None = None

    def score(self, inputs: ScoringInputs, kernels: Kernels) -> None:
        """Attention pooled at a first compression, or `lambda * it - (1 - lambda) * redundancy`."""
        settings = inputs.settings
        kernels.attention_score(
            inputs.cache_k,
            inputs.window_queries,
            inputs.batch,
            inputs.scratch,
            history=inputs.history if self.keeps_history else None,
            decay=settings.decay,
            lightning_threshold=settings.threshold if self.redundancy == "block" else None,
        )
        if self.redundancy == "sequence":  # `score` is its working memory until `combine` fills it
            kernels.full_redundancy(inputs.cache_k, inputs.batch, inputs.scratch, threshold=settings.threshold)
        kernels.combine(
            inputs.batch,
            inputs.scratch,
            pool_size=settings.pool_size,
            attention_weight=settings.attention_weight,
            temperature=settings.temperature,
            segment=self.redundancy,
        )


class RecentScorer:
    """Sink and latest tokens (StreamingLLM): equal scores, and of equals the later token is kept."""

    name = "recent"
    keeps_history = False

    def score(self, inputs: ScoringInputs, kernels: Kernels) -> None:
        """All the same."""
        inputs.scratch.score.zero_()


class RandomScorer:
    """The control: what any other scorer has to beat."""

    name = "random"
    keeps_history = False

    def score(self, inputs: ScoringInputs, kernels: Kernels) -> None:
        """Uniform, from the request's seed, the layer, the KV head and the place in cache order."""
        kernels.random_score(inputs.batch, inputs.scratch)


SCORERS: tuple[Scorer, ...] = (
    AttentionScorer("attention"),  # in the manner of SnapKV
    AttentionScorer("attention+global", keeps_history=True),  # of G-KV
    AttentionScorer("attention+full-redundancy", redundancy="sequence"),  # of R-KV
    AttentionScorer("attention+global+lightning", keeps_history=True, redundancy="block"),  # Zipage; the default
    RecentScorer(),
    RandomScorer(),
)


def find_scorer(name: str) -> Scorer:
    """The scorer of that name, else `KernelInputError` with the nearest name and the choices."""
    for scorer in SCORERS:
        if scorer.name == name:
            return scorer
    names = [scorer.name for scorer in SCORERS]
    near = get_close_matches(name, names, n=1, cutoff=0.0)[0]
    raise KernelInputError(f"no scorer is called {name!r}; did you mean {near!r}? There are {', '.join(names)}")

"""What every scorer builds on: the tokens of one request as plain tensors, or the kernels' stages.

A scorer answers one question: how much is each token worth? Its class has one of two methods.

    rate(tokens)            plain torch, some layers of one request at a time: `[layers, H_kv, S]`
    score(inputs, kernels)  the kernels' own stages over the whole batch

The base class makes the second out of the first. The tokens with the highest scores are kept, so a
scorer changes what is kept, and never when the scheduler compresses.
"""

import sys
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType

import torch

from zlab.engine.errors import KernelInputError
from zlab.engine.kernels.interface import AttentionOptions, KernelBackend
from zlab.engine.kernels.torch_backend import (
    continued,
    gather_cache_order,
    pack,
    unpack,
    unrotated,
    window_weights,
)
from zlab.engine.kernels.workspace import CompressionBatch, CompressionRequest, Scratch
from zlab.policies.scorers import OwnScorer, ScorerTraits, scorer_traits

MOST_VALUES = 1 << 24  # of the keys that `rate` is given at once: 64 MiB of float32


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
    recent: int = 0  # latest tokens that are always kept, at most half of what is kept

    def __post_init__(self) -> None:
        try:
            scorer_traits(self.scorer)
        except ValueError as error:
            raise KernelInputError(str(error)) from error
        if self.window < 1:
            raise KernelInputError(f"window must be at least 1 token, got {self.window}")
        if self.sink < 0:
            raise KernelInputError(f"sink must not be negative, got {self.sink}")
        if self.recent < 0:
            raise KernelInputError(f"recent must not be negative, got {self.recent}")
        if not 0.0 <= self.attention_weight <= 1.0:
            raise KernelInputError(
                f"attention_weight (lambda) must be in 0..1, got {self.attention_weight}"
            )
        if not 0.0 < self.temperature < float("inf"):
            raise KernelInputError(f"temperature must be positive, got {self.temperature}")
        if not 0.0 <= self.decay <= 1.0:
            raise KernelInputError(f"decay must be in 0..1, got {self.decay}")
        if self.pool_size < 1 or self.pool_size % 2 == 0:
            raise KernelInputError(f"pool_size must be odd and positive, got {self.pool_size}")
        if not 0.0 <= self.threshold <= 1.0:
            raise KernelInputError(f"threshold must be in 0..1, got {self.threshold}")

    def latest_kept(self, num_keep: int) -> int:
        """Latest tokens that are always kept where a compression keeps `num_keep`.

        The window; of `recent` at most half of what is kept, and of the scorer's own at most a
        third, so that a small budget has room for more than the latest tokens.
        """
        of_scorer = min(scorer_traits(self.scorer).recent, num_keep // 3)
        recent = max(min(self.recent, num_keep // 2), of_scorer)
        return max(self.window, min(recent, num_keep - self.sink))

    def check_fits(self, block_size: int, num_target_blocks: int) -> None:
        """Raise `KernelInputError` unless window and sink fit a block and what `num_target_blocks`
        can keep.
        """
        if self.window > block_size:
            raise KernelInputError(
                f"window {self.window} is larger than the block size {block_size}"
            )
        num_keep = num_target_blocks * block_size
        if self.window + self.sink > num_keep:
            raise KernelInputError(
                f"window {self.window} + sink {self.sink} tokens are always kept, but only "
                f"{num_keep} "
                f"({num_target_blocks} blocks of {block_size}) can be"
            )


@dataclass(frozen=True, slots=True)
class ScoringInputs:
    """What a scorer may look at.

    Attributes:
        cache_k: keys, rotated, `[layers, blocks, b, H_kv, d]`.
        cache_v: values.
        window_queries: `[layers, slots, w, H_q, d]`, rotated.
        history: what scorers keep of a token, `[layers, blocks, b, H_kv]`.
        batch: the requests.
        scratch: where the scores go.
        settings: the policy's numbers.
        rotation: cosines and sines by position, `[positions, d]`; None where a model's are unknown.
    """

    cache_k: torch.Tensor
    cache_v: torch.Tensor
    window_queries: torch.Tensor
    history: torch.Tensor
    batch: CompressionBatch
    scratch: Scratch
    settings: CompressionSettings
    rotation: torch.Tensor | None


class Tokens:
    """Some layers of one request in cache order, float32; what is not read is never gathered."""

    def __init__(self, inputs: ScoringInputs, request: CompressionRequest, layers: slice) -> None:
        self._inputs, self._request, self._layers = inputs, request, layers
        self.settings = inputs.settings
        self.num_tokens = len(request.block_table) * inputs.batch.block_size
        self.num_carried = request.num_carried(inputs.batch.block_size)
        self.first = not request.compressed_before
        self.remembered: torch.Tensor | None = None

    @cached_property
    def keys(self) -> torch.Tensor:
        """Keys as cached, rotated: `[layers, H_kv, S, d]`."""
        return self._gathered(self._inputs.cache_k).float()

    @cached_property
    def values(self) -> torch.Tensor:
        """Values: `[layers, H_kv, S, d]`."""
        return self._gathered(self._inputs.cache_v).float()

    @cached_property
    def queries(self) -> torch.Tensor:
        """Queries of the window, rotated: `[layers, w, H_q, d]`."""
        return self._inputs.window_queries[self._layers, self._request.query_slot].float()

    @cached_property
    def attention(self) -> torch.Tensor:
        """Weights of the window's queries, causal: `[layers, H_kv, G, w, S]`."""
        return window_weights(self.queries, self.keys)

    @cached_property
    def history(self) -> torch.Tensor:
        """What `remember` was given at the last compression, of the first `num_carried` tokens."""
        return self._stored[1]

    @cached_property
    def positions(self) -> torch.Tensor:
        """Positions in the text: `[layers, H_kv, S]`.

        Tokens that a scorer without positions has kept count as if they stood side by side.
        """
        return continued(self._stored[0], self.num_tokens)

    @cached_property
    def plain_keys(self) -> torch.Tensor:
        """Keys with the rotation of their positions undone: `[layers, H_kv, S, d]`."""
        return unrotated(self.keys, self.positions, self._inputs.rotation)

    @cached_property
    def plain_queries(self) -> torch.Tensor:
        """Queries of the window with their rotation undone: `[layers, w, H_q, d]`."""
        window = self.queries.shape[1]
        positions = self.positions[:, :1, -window:].transpose(1, 2)
        return unrotated(self.queries, positions, self._inputs.rotation)

    def rotation_at(self, distances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[..., d / 2]` of `distances [...]`; beyond the table, of its last."""
        table = self._inputs.rotation
        if table is None:
            shape = (*distances.shape, self.keys.shape[-1] // 2)
            return self.keys.new_ones(shape), self.keys.new_zeros(shape)
        cosines, sines = table[distances.clamp(max=len(table) - 1)].float().chunk(2, dim=-1)
        return cosines, sines

    def remember(self, scores: torch.Tensor) -> None:
        """Keep `scores [layers, H_kv, S]` with the tokens, for `history` at the next compression.

        With positions the scores must not be negative, and are kept to 8 bits.
        """
        self.remembered = scores

    @cached_property
    def _stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        words = self._gathered(self._inputs.history)[:, :, : self.num_carried]
        if scorer_traits(self.settings.scorer).keeps_positions:
            return unpack(words)
        places = torch.arange(self.num_carried, device=words.device)
        return places.expand(words.shape), words

    def _gathered(self, cache: torch.Tensor) -> torch.Tensor:
        return gather_cache_order(cache[self._layers], self._request.block_table)


class Scorer:
    """How much each token is worth; a subclass has `rate`, or `score` where kernels do the work.

    Attributes:
        name: What a policy calls it.
        traits: What `policies` knows of it.
    """

    def __init__(self, name: str, traits: ScorerTraits) -> None:
        self.name, self.traits = name, traits

    @property
    def history_kind(self) -> str:
        """Scorers of one kind can go on with each other's history."""
        return self.name

    def rate(self, tokens: Tokens) -> torch.Tensor:
        """Return the scores `[layers, H_kv, S]` of one request; the highest are kept."""
        raise NotImplementedError(f"the scorer {self.name!r} has no method rate(tokens)")

    def score(self, inputs: ScoringInputs, kernels: KernelBackend) -> None:
        """Fill `scratch.score`, and `scratch.global_score` where a history is kept."""
        scratch, num_layers = inputs.scratch, inputs.cache_k.shape[0]
        _, _, block_size, num_kv_heads, head_dim = inputs.cache_k.shape
        for row, request in enumerate(inputs.batch.requests):
            count = len(request.block_table) * block_size
            step = max(1, MOST_VALUES // (count * num_kv_heads * head_dim))
            for first in range(0, num_layers, step):
                layers = slice(first, min(first + step, num_layers))
                tokens = Tokens(inputs, request, layers)
                scratch.score[layers, row, :, :count] = self._rated(tokens)
                if self.traits.keeps_history:
                    scratch.global_score[layers, row, :, :count] = self._kept(tokens)

    def _rated(self, tokens: Tokens) -> torch.Tensor:
        """What `rate` returns; of a user's own scorer checked, which waits for the device."""
        if not isinstance(self.name, OwnScorer):
            return self.rate(tokens)
        try:
            found = self.rate(tokens)
        except Exception as problem:
            raise KernelInputError(
                f"{self.name}: rate raised {type(problem).__name__}: {problem}"
            ) from problem
        wanted = tuple(tokens.keys.shape[:3])
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != wanted:
            shown = tuple(found.shape) if isinstance(found, torch.Tensor) else repr(found)
            raise KernelInputError(
                f"{self.name}: rate must return a tensor [layers, KV heads, tokens], here "
                f"{wanted}, not {shown}"
            )
        if bool(found.isnan().any()):
            raise KernelInputError(f"{self.name}: rate returned a score that is not a number")
        return found

    def _kept(self, tokens: Tokens) -> torch.Tensor:
        """What travels with the tokens: the remembered scores, and with positions both packed."""
        scores = tokens.remembered
        if scores is None:
            scores = torch.zeros_like(tokens.positions, dtype=torch.float32)
        return pack(tokens.positions, scores) if self.traits.keeps_positions else scores


class AttentionScorer(Scorer):
    """Attention of the window in the kernels' stages, as its traits say.

    With a history earlier compressions are remembered; with a redundancy the score is
    `lambda * attention - (1 - lambda) * redundancy`.
    """

    @property
    def history_kind(self) -> str:
        """The global score, whatever it is weighed against."""
        return "attention"

    def score(self, inputs: ScoringInputs, kernels: KernelBackend) -> None:
        """Enqueue the stages."""
        settings, redundancy = inputs.settings, self.traits.redundancy
        kernels.attention_score(
            inputs.cache_k,
            inputs.window_queries,
            inputs.batch,
            inputs.scratch,
            inputs.history if self.traits.keeps_history else None,
            AttentionOptions(
                decay=settings.decay,
                lightning_threshold=settings.threshold if redundancy == "block" else None,
            ),
        )
        if redundancy == "sequence":  # `score` is its working memory until `combine` fills it
            kernels.full_redundancy(
                inputs.cache_k, inputs.batch, inputs.scratch, threshold=settings.threshold
            )
        kernels.combine(
            inputs.batch,
            inputs.scratch,
            pool_size=settings.pool_size,
            attention_weight=settings.attention_weight,
            temperature=settings.temperature,
            segment=redundancy,
        )


@lru_cache(maxsize=64)
def load_own(scorer: OwnScorer) -> Scorer:
    """Return a scorer of the user's own, made from the text that was read. This runs the text.

    Raises KernelInputError where the text does not run or the class is no scorer.
    """
    file, _, name = scorer.rpartition(":")
    module = ModuleType(f"zlab_own_scorer_{Path(file).stem}_{scorer.source_digest[:12]}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # dataclasses and `inspect` look a class's module up
    try:
        exec(compile(scorer.source, file, "exec"), vars(module))
        cls = vars(module)[name]
        if not (isinstance(cls, type) and issubclass(cls, Scorer)):
            raise TypeError(f"the class is not derived from {Scorer.__name__} of {__name__}")
        return cls(scorer, scorer.traits)
    except Exception as problem:
        raise KernelInputError(
            f"{scorer}: the file does not run: {type(problem).__name__}: {problem}"
        ) from problem

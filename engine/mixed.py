"""Steps with prefill chunks: launched kernel by kernel, or, where few tokens leave the host behind, as CUDA graphs.

Launching such a step takes the host 15 to 50 ms, the device as long for some 700 tokens. A graph has room for so many
tokens, whoever's they are: the inputs say which of them are decodes and where each chunk begins.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from engine.attention import PrefillInputs
from engine.cache import CacheShape
from engine.decode_graphs import Captured, Decoded, capture
from engine.prefilling import MixedInputs, MixedPacking, MixedSizes, TokenIds, sizes_of
from engine.rows import TOKEN, DecodeInputs, DecodeRows, advance
from engine.transfer import fill, moved
from policies.core.plan import PrefillChunk

GRAPH_TOKENS = (64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)  # decodes and chunks together
MOST_CHUNKS = 16  # of a graph

Forward = Callable[[DecodeInputs | None, PrefillInputs, torch.Tensor, int], torch.Tensor]  # to logits


class MixedSteps:
    """Packs steps with chunks and runs them; after `capture` small ones by graphs."""

    def __init__(
        self,
        cache: CacheShape,
        rows: DecodeRows,
        forward: Forward,
        most_probable: Callable[[torch.Tensor], torch.Tensor],
        pool_tokens: int,
    ) -> None:
        """`forward` is given the last argument of `StepAttention`, too: tokens that all decodes read together."""
        self._cache = cache
        self._rows = rows
        self._forward = forward
        self._most_probable = most_probable
        self._pool_tokens = pool_tokens
        self._captured: dict[int, Captured] = {}
        self._packings: dict[int, MixedPacking] = {}
        self._wide = torch.empty(0, dtype=torch.int64)
        self._narrow = torch.empty(0, dtype=torch.int32)

    @property
    def graph_tokens(self) -> int:
        """The most tokens of a step that a graph has room for; 0 without graphs."""
        return max(self._captured, default=0)

    def run(
        self,
        chunks: Sequence[PrefillChunk],
        token_ids: TokenIds,
        decode_rows: Sequence[int],
        row_of: Mapping[int, int],
        most_tokens: int,
    ) -> Decoded:
        """One step: most probable tokens and logits of the decodes, then of the chunks that end a prompt.

        The rows of all of them go on from those tokens. A graph's result has padding behind it and lives until the
        next one's. `most_tokens`: no less than what the decodes read together.
        """
        sizes = sizes_of(chunks, len(decode_rows))
        size = smallest_with_room(self._packings, sizes)
        if size is not None and most_tokens <= self._pool_tokens:
            packing = self._packings[size]
            self._upload(*packing.fill(chunks, token_ids, decode_rows, row_of))
            captured = self._captured[size]
            captured.graph.replay()
            return captured.output
        packing = MixedPacking(sizes, self._cache, self._rows.padding_row)
        wide, narrow = packing.fill(chunks, token_ids, decode_rows, row_of)
        device = self._rows.state.device
        return self.step(
            packing.inputs(moved(torch.from_numpy(wide), device), moved(torch.from_numpy(narrow), device)), most_tokens
        )

    def step(self, inputs: MixedInputs, most_tokens: int) -> Decoded:
        """What a graph captures, and what runs without one. Padding goes on from token 0."""
        state, num_decodes = self._rows.state, len(inputs.decode_rows)
        decode = None
        if num_decodes:
            decode = DecodeInputs(state, inputs.decode_rows, self._cache.block_size, self._cache.window)
        logits = self._forward(decode, inputs.prefill, inputs.logit_rows, most_tokens)
        tokens = self._most_probable(logits)
        if decode is not None:
            advance(state, decode, tokens[:num_decodes])
        starts = inputs.start_rows != self._rows.padding_row
        state[inputs.start_rows, TOKEN] = torch.where(starts, tokens, 0).to(torch.int32)
        return tokens, logits

    def capture(self, max_decodes: int, max_tokens: int, priority: int) -> None:
        """Make the graphs for steps of up to `max_tokens`, on streams of that priority. Needs CUDA."""
        device = self._rows.state.device
        sizes = [size for size in GRAPH_TOKENS if size <= max_tokens]
        self._packings = {size: self.packing_of(size, max_decodes) for size in sizes}
        if not sizes:
            return
        largest = self._packings[sizes[-1]]
        self._wide = torch.empty(largest.wide_size, dtype=torch.int64, device=device)
        self._narrow = torch.empty(largest.narrow_size, dtype=torch.int32, device=device)
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(priority=priority)
        for size in reversed(sizes):
            packing = self._packings[size]
            self._upload(*packing.empty())
            step = partial(self.step, packing.inputs(self._wide, self._narrow), self._pool_tokens)
            self._captured[size] = capture(step, stream, pool)

    def packing_of(self, tokens: int, max_decodes: int) -> MixedPacking:
        """How a step lies in a graph of so many tokens."""
        decodes, chunks = min(max_decodes, tokens), min(MOST_CHUNKS, tokens)
        sizes = MixedSizes(tokens, decodes, chunks, self._rows.max_blocks, decodes + chunks)
        return MixedPacking(sizes, self._cache, self._rows.padding_row)

    def _upload(self, wide: np.ndarray, narrow: np.ndarray) -> None:
        fill(self._wide[: len(wide)], torch.from_numpy(wide))
        fill(self._narrow[: len(narrow)], torch.from_numpy(narrow))


def smallest_with_room(packings: Mapping[int, MixedPacking], wanted: MixedSizes) -> int | None:
    """The first of the packings, in increasing order, that has room for such a step; None if none has."""
    for size, packing in packings.items():
        room = packing.sizes
        if wanted.tokens <= size and wanted.decodes <= room.decodes and wanted.chunks <= room.chunks:
            return size
    return None

"""What a step with prefill chunks reads: tokens, positions and places in the cache, packed on the host in one go."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention import PrefillInputs
from engine.cache import CacheShape
from engine.kernels.batch import aligned
from policies.core.plan import PrefillChunk

TokenIds = Callable[[int, int], Sequence[int]]  # request number, how many -> its first ids, prompt and output

NOWHERE = -1


@dataclass(frozen=True)
class MixedInputs:
    """A step with chunks, on the device: its tokens are those of the decodes, then those of the chunks.

    Int64: `decode_rows [D]` of the decoding set; `logit_rows [K]`, the tokens whose logits are wanted: the decodes',
    then the last one of every chunk that ends a prompt; `start_rows [K]`, for each of those the row of the decoding set
    that goes on from it, else the padding row.
    """

    decode_rows: torch.Tensor
    prefill: PrefillInputs
    logit_rows: torch.Tensor
    start_rows: torch.Tensor


@dataclass(frozen=True)
class MixedSizes:
    """How large the inputs of a step are; those of a graph are larger than what a step fills."""

    tokens: int
    decodes: int
    chunks: int
    blocks: int
    logits: int


class MixedPacking:
    """Where each input of a step of those sizes lies in two arrays, int64 and int32, so that two copies bring all.

    Sections are aligned (`engine.kernels.batch.aligned`): Triton makes another kernel of a pointer that is not.
    """

    def __init__(self, sizes: MixedSizes, cache: CacheShape, padding_row: int) -> None:
        self.sizes = sizes
        self._cache = cache
        self._padding_row = padding_row
        wide = (*[sizes.tokens] * 4, sizes.decodes, sizes.logits, sizes.logits)
        self._wide, self.wide_size = _sections(wide)
        self._narrow, self.narrow_size = _sections((sizes.chunks, sizes.chunks + 1, sizes.chunks * sizes.blocks))

    def empty(self) -> tuple[np.ndarray, np.ndarray]:
        """The arrays of a step without anything: padding alone."""
        wide = np.zeros(self.wide_size, dtype=np.int64)
        narrow = np.zeros(self.narrow_size, dtype=np.int32)
        _, _, slots, windows, decodes, _, starts = self._wide
        wide[slots], wide[windows] = NOWHERE, NOWHERE
        wide[decodes], wide[starts] = self._padding_row, self._padding_row
        narrow[self._narrow[2]] = NOWHERE
        return wide, narrow

    def fill(
        self,
        chunks: Sequence[PrefillChunk],
        token_ids: TokenIds,
        decode_rows: Sequence[int],
        row_of: Mapping[int, int],
    ) -> tuple[np.ndarray, np.ndarray]:
        """The arrays of a step; `row_of` has the row of every request whose prompt ends in it, by number.

        A prompt's queries are kept for a later compression where they fall into the window of its last block and it
        holds a query slot.
        """
        wide, narrow = self.empty()
        ids, positions, slots, windows, decodes, logits, starts = (wide[place] for place in self._wide)
        lengths, query_starts, tables = (narrow[place] for place in self._narrow)
        tables = tables.reshape(self.sizes.chunks, self.sizes.blocks)
        size, window, first = self._cache.block_size, self._cache.window, len(decode_rows)
        decodes[:first], logits[:first] = decode_rows, np.arange(first)
        start, num_logits = first, first
        query_starts[0] = start
        for number, chunk in enumerate(chunks):
            request, end = chunk.request, chunk.start + chunk.count
            here = slice(start, start + chunk.count)
            table = np.asarray(request.table, dtype=np.int64)
            place = np.arange(chunk.start, end, dtype=np.int64)
            ids[here] = token_ids(request.number, end)[chunk.start : end]
            positions[here] = place
            slots[here] = table[place // size] * size + place % size
            within = place % size - (size - window)
            kept = (place // size == len(table) - 1) & (within >= 0) & (request.slot >= 0)
            windows[here] = np.where(kept, request.slot * window + within, NOWHERE)
            lengths[number] = end
            tables[number, : len(table)] = table
            start += chunk.count
            query_starts[number + 1 :] = start
            if gives_token(chunk):
                logits[num_logits], starts[num_logits] = start - 1, row_of[request.number]
                num_logits += 1
        return wide, narrow

    def inputs(self, wide: torch.Tensor, narrow: torch.Tensor) -> MixedInputs:
        """Views of the arrays once they are on the device."""
        ids, positions, slots, windows, decodes, logits, starts = (wide[place] for place in self._wide)
        lengths, query_starts, tables = (narrow[place] for place in self._narrow)
        prefill = PrefillInputs(
            token_ids=ids,
            positions=positions,
            slot_mapping=slots,
            window_rows=windows,
            block_tables=tables.view(self.sizes.chunks, self.sizes.blocks),
            lengths=lengths,
            query_starts=query_starts,
        )
        return MixedInputs(decodes, prefill, logits, starts)


def gives_token(chunk: PrefillChunk) -> bool:
    """Whether its last token is a prompt's, so that its logits give the next one."""
    return chunk.last and chunk.request.target_tokens > 0


def sizes_of(chunks: Sequence[PrefillChunk], num_decodes: int) -> MixedSizes:
    """Without any padding."""
    return MixedSizes(
        tokens=num_decodes + sum(chunk.count for chunk in chunks),
        decodes=num_decodes,
        chunks=len(chunks),
        blocks=max(len(chunk.request.table) for chunk in chunks),
        logits=num_decodes + sum(map(gives_token, chunks)),
    )


def nothing_to_store(num_tokens: int, block_size: int, device: torch.device) -> PrefillInputs:
    """Behind one decode a chunk of so many tokens that leaves no trace in the cache: to warm up with."""
    nowhere = torch.full((1 + num_tokens,), NOWHERE, dtype=torch.int64, device=device)
    zeros = torch.zeros_like(nowhere)
    return PrefillInputs(
        token_ids=zeros,
        positions=zeros,
        slot_mapping=nowhere,
        window_rows=nowhere,
        block_tables=torch.zeros(1, -(-num_tokens // block_size), dtype=torch.int32, device=device),
        lengths=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        query_starts=torch.tensor([1, 1 + num_tokens], dtype=torch.int32, device=device),
    )


def _sections(sizes: Sequence[int]) -> tuple[list[slice], int]:
    """Sections of those sizes one behind the other, each aligned, and where the last one ends."""
    places = []
    start = 0
    for size in sizes:
        places.append(slice(start, start + size))
        start += aligned(size)
    return places, start

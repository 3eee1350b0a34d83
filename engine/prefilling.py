"""What prefill chunks read: tokens, positions and places in the cache, made on the host in one go."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.attention import PrefillInputs
from engine.cache import CacheShape
from engine.kernels.batch import aligned
from engine.transfer import moved
from policies.core.plan import PrefillChunk

TokenIds = Callable[[int, int], Sequence[int]]  # request number, how many -> its first ids, prompt and output


def prefill_inputs(
    chunks: Sequence[PrefillChunk], token_ids: TokenIds, shape: CacheShape, device: torch.device
) -> PrefillInputs:
    """Pack the chunks of one step.

    A prompt's queries are kept for a later compression where they fall into the window of its last block and it holds a
    query slot.
    """
    size = shape.block_size
    ids, positions, slots, windows, lengths, starts = [], [], [], [], [], [0]
    for chunk in chunks:
        request = chunk.request
        place = np.arange(chunk.start, chunk.start + chunk.count, dtype=np.int64)
        table = np.asarray(request.table, dtype=np.int64)
        end = chunk.start + chunk.count
        ids.append(np.asarray(token_ids(request.number, end)[chunk.start : end], dtype=np.int64))
        positions.append(place)
        slots.append(table[place // size] * size + place % size)
        within = place % size - (size - shape.window)
        kept = (place // size == len(table) - 1) & (within >= 0) & (request.slot >= 0)
        windows.append(np.where(kept, request.slot * shape.window + within, -1))
        lengths.append(end)
        starts.append(starts[-1] + chunk.count)
    width = max(len(chunk.request.table) for chunk in chunks)
    tables = np.full((len(chunks), width), -1, dtype=np.int64)
    for row, chunk in enumerate(chunks):
        tables[row, : len(chunk.request.table)] = chunk.request.table
    tokens = np.concatenate([np.concatenate(part) for part in (ids, positions, slots, windows)])
    counts, places = _packed([np.asarray(lengths), np.asarray(starts), tables.ravel()])
    wide = moved(torch.from_numpy(tokens), device).view(4, -1)
    narrow = moved(torch.from_numpy(counts.astype(np.int32)), device)
    lengths_on, starts_on, tables_on = (narrow[place] for place in places)
    return PrefillInputs(
        token_ids=wide[0],
        positions=wide[1],
        slot_mapping=wide[2],
        window_rows=wide[3],
        block_tables=tables_on.view(len(chunks), width),
        lengths=lengths_on,
        query_starts=starts_on,
    )


def nothing_to_store(num_tokens: int, block_size: int, device: torch.device) -> PrefillInputs:
    """A chunk of so many tokens that leaves no trace in the cache: to warm up with."""
    nowhere = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
    zeros = torch.zeros_like(nowhere)
    return PrefillInputs(
        token_ids=zeros,
        positions=zeros,
        slot_mapping=nowhere,
        window_rows=nowhere,
        block_tables=torch.zeros(1, -(-num_tokens // block_size), dtype=torch.int32, device=device),
        lengths=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
    )


def _packed(sections: Sequence[np.ndarray]) -> tuple[np.ndarray, list[slice]]:
    """The sections one behind the other, each aligned (`engine.kernels.batch.aligned`), and where each is."""
    places = []
    start = 0
    for section in sections:
        places.append(slice(start, start + len(section)))
        start += aligned(len(section))
    whole = np.zeros(start, dtype=np.int64)
    for section, place in zip(sections, places, strict=True):
        whole[place] = section
    return whole, places

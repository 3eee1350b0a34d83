"""The device inputs of a step: the decode state, packed prefill chunks, and attention over both.

The decode state has one row for each request that decodes, and one padding row at the end:

                    TOKEN  POSITION  LENGTH  SLOT | block table
    row 0 (req 7)     318        61      62     0 |  4  9 -1 -1
    row 1 (free)
    row 2 (req 3)      95        17      12    -1 |  2 -1 -1 -1    (compressed: LENGTH <= POSITION)
    padding             0         0       0    -1 | -1 -1 -1 -1    (writes nothing)

A decode step gathers its rows on the device, reads them, runs the model and writes the next token,
position and length back (`advance`). An uneventful step needs nothing from the host. The host
uploads only what a decision changed (a new block, a slot, a row taken or freed), as one list of
index and value pairs.

A step with prefill chunks packs its inputs on the host into two arrays, one int64 and one int32, so
that two copies bring everything. Its tokens are `[decodes | chunk 0 | chunk 1 | ...]`.

All copies to the device start from pinned memory. A copy from pageable memory would wait for every
step in flight.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from zlab.engine.kernels.interface import KernelBackend
from zlab.engine.kernels.triton_decode import DecodeWorkspace
from zlab.engine.kernels.workspace import aligned
from zlab.engine.kv_cache import CacheShape, KVCache
from zlab.engine.model.layers import StoreDestination
from zlab.policies.core.plan import PrefillChunk


def sent(
    values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copy the values to the device and return them as a tensor `[len(values)]`. On CUDA the copy
    is enqueued on the current stream.
    """
    return moved(torch.tensor(values, dtype=dtype), device)


def moved(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device, enqueued on the current stream."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite `target` with a host tensor of the same size, enqueued on the current stream."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)


TOKEN, POSITION, LENGTH, SLOT, TABLE = 0, 1, 2, 3, 4  # columns; the block table follows
PAD = -1


class DecodeState:
    """The decode state: `state [rows + 1, 4 + blocks]` int32 on the device. The last row is
    padding: its length is 0 and it writes nothing.
    """

    def __init__(self, max_requests: int, max_blocks: int, device: torch.device) -> None:
        self.max_requests = max_requests
        self.max_blocks = max_blocks
        self.width = TABLE + max_blocks
        self.state = torch.full(
            (max_requests + 1, self.width), PAD, dtype=torch.int32, device=device
        )
        self.state[:, :SLOT] = 0
        self.padding_row = max_requests
        self._free = list(range(max_requests - 1, -1, -1))
        self._indices: list[int] = []
        self._values: list[int] = []

    def take(self) -> int:
        """Take a free row."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """Free the row of a request."""
        self._free.append(row)

    def set(self, row: int, column: int, value: int) -> None:
        """Note one value for the next upload."""
        self._indices.append(row * self.width + column)
        self._values.append(value)

    def set_table(self, row: int, blocks: Sequence[int], start: int = 0) -> None:
        """Note a block table, from its block `start` on, for the next upload."""
        first = row * self.width + TABLE
        self._indices.extend(range(first + start, first + len(blocks)))
        self._values.extend(blocks[start:])

    def upload(self) -> None:
        """Upload all noted values on the current stream. Where a place was noted twice, the last
        value counts.
        """
        if not self._indices:
            return
        last = dict(zip(self._indices, self._values, strict=True))
        pairs = moved(
            torch.tensor([list(last), list(last.values())], dtype=torch.int64), self.state.device
        )
        self.state.view(-1).index_copy_(0, pairs[0], pairs[1].to(torch.int32))
        self._indices.clear()
        self._values.clear()


class DecodeInputs:
    """The inputs of one decode step, gathered on the device from `rows` (int64 `[B]`) of the state.

    `token_ids`, `positions [B]` are int64, `lengths [B]` and `block_tables [B, n]` int32.
    `slot_mapping` and `window_rows [B]` are int64, -1 where nothing is stored. `real [B]` is False
    for padding.
    """

    def __init__(
        self, state: torch.Tensor, rows: torch.Tensor, block_size: int, window: int
    ) -> None:
        gathered = state[rows]
        self.rows = rows
        self.token_ids = gathered[:, TOKEN].long()
        self.positions = gathered[:, POSITION].long()
        self.lengths = gathered[:, LENGTH].contiguous()
        self.block_tables = gathered[:, TABLE:].contiguous()
        self.real = self.lengths > 0
        place = (self.lengths - 1).clamp(min=0).long()
        block = self.block_tables.gather(1, (place // block_size)[:, None])[:, 0].long()
        offset = place % block_size
        nothing = torch.full_like(place, PAD)
        self.slot_mapping = torch.where(self.real, block * block_size + offset, nothing)
        slot = gathered[:, SLOT].long()
        within = offset - (block_size - window)
        self.window_rows = torch.where(
            (slot >= 0) & (within >= 0) & self.real, slot * window + within, nothing
        )


def advance(state: torch.Tensor, inputs: DecodeInputs, sampled: torch.Tensor) -> None:
    """After a decode step: the sampled tokens `[B]` are next, one position further on. Padding
    stays as it is; a row without a token (below 0) goes on from token 0, until it is ended.
    """
    real = inputs.real
    state[inputs.rows, TOKEN] = torch.where(real, sampled.clamp(min=0), 0).to(torch.int32)
    state[inputs.rows, POSITION] = torch.where(real, inputs.positions + 1, 0).to(torch.int32)
    state[inputs.rows, LENGTH] = torch.where(real, inputs.lengths + 1, 0).to(torch.int32)


@dataclass(frozen=True)
class PrefillInputs:
    """Packed prefill chunks, after the decodes of the step. Entries in the place of a decode or
    after the last chunk are not read.

    `token_ids`, `positions`, `slot_mapping`, `window_rows [T]` are int64, over all tokens of the
    step. `lengths [R]` (cached tokens including the chunk), `query_starts [R + 1]` (offsets in the
    step) and `block_tables [R, n]` are int32.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    window_rows: torch.Tensor
    block_tables: torch.Tensor
    lengths: torch.Tensor
    query_starts: torch.Tensor


class StepAttention:
    """The `AttentionContext` of one step. Tokens of `decode` come first, then those of `prefill`.

    Padding rows of `decode` may lie where `prefill` has tokens. Those positions belong to the
    chunks.
    """

    def __init__(
        self,
        cache: KVCache,
        kernels: KernelBackend,
        workspace: DecodeWorkspace,
        decode: DecodeInputs | None,
        prefill: PrefillInputs | None,
        most_tokens: int,
    ) -> None:
        """Join the inputs of both kinds and plan the decode kernel.

        Args:
            cache: the paged cache.
            kernels: the kernel backend.
            workspace: working memory of the decode kernel.
            decode: decoding rows, if any.
            prefill: prefill chunks, if any.
            most_tokens: an upper bound on the tokens that all decodes read together.
        """
        self._cache = cache
        self._kernels = kernels
        self._workspace = workspace
        self._prefill = prefill
        self._num_decodes = len(decode.rows) if decode is not None else 0
        self._decode = None
        if decode is not None:
            self._decode = (decode, kernels.plan_decodes(decode.lengths, workspace, most_tokens))
        self.token_ids = _joined(decode, prefill, "token_ids")
        self.positions = _joined(decode, prefill, "positions")
        self._slot_mapping = _joined(decode, prefill, "slot_mapping")
        self._window_rows = (
            _joined(decode, prefill, "window_rows") if cache.shape.num_slots else None
        )
        self._scale = cache.shape.head_dim**-0.5

    def destination(self, layer: int) -> StoreDestination:
        """Return where this layer's keys, values and window queries are stored."""
        queries = self._cache.window_queries[layer] if self._window_rows is not None else None
        return StoreDestination(
            self._slot_mapping,
            self._cache.k[layer],
            self._cache.v[layer],
            self._window_rows,
            queries,
        )

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Store keys `[T, H_kv, d]` and values, then attend. Returns `[T, H_q, d]`."""
        to = self.destination(layer)
        self._kernels.store(
            keys,
            values,
            to.slot_mapping,
            to.cache_k,
            to.cache_v,
            queries,
            to.window_rows,
            to.window_queries,
        )
        return self.attend_stored(layer, queries)

    def attend_stored(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attend with queries `[T, H_q, d]` to what the cache holds. Returns `[T, H_q, d]`."""
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        k, v, split = self._cache.k[layer], self._cache.v[layer], self._num_decodes
        if self._decode is not None:
            inputs, plan = self._decode
            self._kernels.decode_attention(
                queries[:split],
                k,
                v,
                inputs.block_tables,
                plan,
                self._scale,
                self._workspace,
                output[:split],
            )
        if self._prefill is not None:
            # after the decodes: padding decodes have written zeros over chunk positions
            self._kernels.prefill_attention(
                queries,
                k,
                v,
                self._prefill.block_tables,
                self._prefill.lengths,
                self._prefill.query_starts,
                self._scale,
                output,
            )
        return output


def _joined(decode: DecodeInputs | None, prefill: PrefillInputs | None, name: str) -> torch.Tensor:
    """Return the input `name` for every token of the step, `[T]`."""
    if prefill is None:
        alone: torch.Tensor = getattr(decode, name)
        return alone
    whole: torch.Tensor = getattr(prefill, name)
    if decode is None:
        return whole
    first = whole[: len(decode.rows)]
    return torch.cat([torch.where(decode.real, getattr(decode, name), first), whole[len(first) :]])


TokenIds = Callable[
    [int, int], Sequence[int]
]  # (request number, count) -> its first ids, prompt and output

NOWHERE = -1


@dataclass(frozen=True)
class MixedInputs:
    """The inputs of a step with chunks, on the device. Tokens of decodes come first, then those of
    the chunks.

    `decode_rows [D]`, `logit_rows [K]` and `start_rows [K]` are int64. `logit_rows` are the tokens
    whose logits are wanted: those of the decodes, then the last token of each chunk that ends a
    prompt. `start_rows` names for each of them the row of the decode state that continues from it;
    for decodes it is the padding row.
    """

    decode_rows: torch.Tensor
    prefill: PrefillInputs
    logit_rows: torch.Tensor
    start_rows: torch.Tensor


@dataclass(frozen=True)
class MixedSizes:
    """The sizes of a step's inputs. A graph has larger sizes than the steps that it runs."""

    tokens: int
    decodes: int
    chunks: int
    blocks: int
    logits: int


class PrefillBatch:
    """The layout of a step's inputs in two arrays, int64 and int32.

    Sections are aligned (`zlab.engine.kernels.workspace.aligned`), because Triton compiles a
    different kernel for an unaligned pointer.
    """

    def __init__(self, sizes: MixedSizes, cache: CacheShape, padding_row: int) -> None:
        self.sizes = sizes
        self._cache = cache
        self._padding_row = padding_row
        wide = (*[sizes.tokens] * 4, sizes.decodes, sizes.logits, sizes.logits)
        self._wide, self.wide_size = _sections(wide)
        self._narrow, self.narrow_size = _sections(
            (sizes.chunks, sizes.chunks + 1, sizes.chunks * sizes.blocks)
        )

    def empty(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the two arrays of an empty step, which are all padding."""
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
        """Return the two arrays of a step.

        The queries of a prompt are kept for a later compression if they lie in the window of its
        last block and the request holds a query slot.

        Args:
            chunks: prefill chunks of the step.
            token_ids: returns the first ids of a request.
            decode_rows: rows of the decoding requests.
            row_of: row of each request by number, for requests whose prompt ends in this step.
        """
        wide, narrow = self.empty()
        ids, positions, slots, windows, decodes, logits, starts = (
            wide[place] for place in self._wide
        )
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
        """Return views of the two arrays once they are on the device."""
        ids, positions, slots, windows, decodes, logits, starts = (
            wide[place] for place in self._wide
        )
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
    """Return whether the chunk ends a prompt, so that its logits give the next token."""
    return chunk.last and chunk.request.target_tokens > 0


def sizes_of(chunks: Sequence[PrefillChunk], num_decodes: int) -> MixedSizes:
    """Return the exact sizes of a step, without padding."""
    return MixedSizes(
        tokens=num_decodes + sum(chunk.count for chunk in chunks),
        decodes=num_decodes,
        chunks=len(chunks),
        blocks=max(len(chunk.request.table) for chunk in chunks),
        logits=num_decodes + sum(map(gives_token, chunks)),
    )


def nothing_to_store(num_tokens: int, block_size: int, device: torch.device) -> PrefillInputs:
    """Return one chunk of `num_tokens` after one decode, which stores nothing in the cache. It
    serves to warm up.
    """
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
    """Lay sections of these sizes one after the other, each aligned. Returns their slices and the
    total size.
    """
    places = []
    start = 0
    for size in sizes:
        places.append(slice(start, start + size))
        start += aligned(size)
    return places, start

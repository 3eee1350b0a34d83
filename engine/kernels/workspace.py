"""Memory that compression works in: reserved once inside the memory budget, never allocated in the
serving path.

What one compression is asked to do: a ragged batch of requests, checked on the host and laid out
for a launch.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch

from zlab.engine.errors import KernelInputError
from zlab.sim.memory import score_tile

PAD = -1  # fills block tables behind a request's last block
NUM_FLAGS = 5  # values a request has beside its two tables
SECTION_ALIGNMENT = 4  # int32 values, so that every section of the packed buffer starts on 16 bytes


@dataclass(frozen=True, slots=True)
class CompressionRequest:
    """One request to compress, all of its blocks full.

    `block_table` holds its blocks in cache order, shared ones included; they are only read.
    `target_blocks` are filled exactly, so `len(target_blocks) * block_size` tokens are kept per
    layer and KV head: its own first blocks, or fresh ones where a leading block is shared.
    `query_slot` may be -1 for a scorer that needs no queries; `seed` feeds the `random` scorer
    only. `carried_blocks` is how many leading blocks the last compression left, where the request
    was compressed before; by default all but the last.
    """

    block_table: tuple[int, ...]
    target_blocks: tuple[int, ...]
    query_slot: int
    compressed_before: bool = False
    seed: int = 0
    carried_blocks: int | None = None

    def num_carried(self, block_size: int) -> int:
        """Tokens whose score history a compression before has left; 0 before the first one."""
        if not self.compressed_before:
            return 0
        blocks = self.carried_blocks
        return (len(self.block_table) - 1 if blocks is None else blocks) * block_size


@dataclass(frozen=True)
class CompressionBatch:
    """Device tensors of B requests (int32, tables padded with -1) and the host's sizes for the
    grid.

    `block_tables [B, max_blocks]`, `target_blocks [B, max_targets]`; the rest `[B]`.
    """

    block_tables: torch.Tensor
    target_blocks: torch.Tensor
    num_blocks: torch.Tensor
    num_targets: torch.Tensor
    num_carried: torch.Tensor
    query_slots: torch.Tensor
    seeds: torch.Tensor
    requests: tuple[CompressionRequest, ...]
    block_size: int

    @property
    def num_requests(self) -> int:
        """B."""
        return len(self.requests)

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest request."""
        return max(len(request.block_table) for request in self.requests)

    @property
    def max_targets(self) -> int:
        """Target blocks of the request that keeps most."""
        return max(len(request.target_blocks) for request in self.requests)


def check_requests(
    requests: Sequence[CompressionRequest], *, num_blocks: int, num_slots: int | None
) -> None:
    """Raise `KernelInputError` where a copy would leave the cache, race, or touch what belongs to
    another request.

    `num_slots` None: no queries are read.
    """
    if not requests:
        raise KernelInputError("a compression needs at least one request, got none")
    writers: dict[int, int] = {}
    for row, request in enumerate(requests):
        _check_one(row, request, num_blocks, num_slots)
        for block in request.target_blocks:
            if block in writers:
                raise KernelInputError(
                    f"target block {block} is given twice, to requests {writers[block]} and {row}"
                )
            writers[block] = row
    for row, request in enumerate(requests):
        for block in request.block_table:
            if writers.get(block, row) != row:
                raise KernelInputError(
                    f"block {block} is read by request {row} but a target of request "
                    f"{writers[block]}"
                )


def lay_out(
    requests: Sequence[CompressionRequest], block_size: int, storage: torch.Tensor
) -> CompressionBatch:
    """Copy checked requests into `storage` (int32, device) in one transfer and return views of it.

    Pinned host memory comes from torch's caching host allocator, which gives a buffer out again
    only when the copy from it has happened: nothing waits and nothing is overwritten early.
    """
    max_blocks = max(len(request.block_table) for request in requests)
    max_targets = max(len(request.target_blocks) for request in requests)
    sections: list[tuple[list[int], tuple[int, ...]]] = [
        (_padded([r.block_table for r in requests], max_blocks), (len(requests), max_blocks)),
        (_padded([r.target_blocks for r in requests], max_targets), (len(requests), max_targets)),
        ([len(r.block_table) for r in requests], (len(requests),)),
        ([len(r.target_blocks) for r in requests], (len(requests),)),
        ([r.num_carried(block_size) for r in requests], (len(requests),)),
        ([r.query_slot for r in requests], (len(requests),)),
        ([r.seed for r in requests], (len(requests),)),
    ]
    flat: list[int] = []
    starts: list[int] = []
    for values, _ in sections:
        starts.append(len(flat))
        flat += values + [PAD] * (aligned(len(values)) - len(values))
    host = torch.tensor(flat, dtype=torch.int32)
    if storage.is_cuda:
        host = host.pin_memory()
    storage[: len(flat)].copy_(host, non_blocking=True)
    views = [
        storage[start : start + len(values)].view(shape)
        for start, (values, shape) in zip(starts, sections, strict=True)
    ]
    return CompressionBatch(
        block_tables=views[0],
        target_blocks=views[1],
        num_blocks=views[2],
        num_targets=views[3],
        num_carried=views[4],
        query_slots=views[5],
        seeds=views[6],
        requests=tuple(requests),
        block_size=block_size,
    )


def _check_one(
    row: int, request: CompressionRequest, num_blocks: int, num_slots: int | None
) -> None:
    table, targets = request.block_table, request.target_blocks
    if not 0 < len(targets) < len(table):
        raise KernelInputError(
            f"request {row} keeps {len(targets)} of {len(table)} blocks; at least one must be "
            f"kept and one freed"
        )
    carried = request.carried_blocks
    if carried is not None and not 0 < carried <= len(table):
        raise KernelInputError(
            f"request {row} has {carried} blocks of an earlier compression; its table has "
            f"{len(table)}"
        )
    if len(set(table)) != len(table):
        raise KernelInputError(f"request {row} lists a block twice in its table {list(table)}")
    for block in (*table, *targets):
        if not 0 <= block < num_blocks:
            raise KernelInputError(
                f"request {row} names block {block}; the cache has blocks 0..{num_blocks - 1}"
            )
    if num_slots is not None and not 0 <= request.query_slot < num_slots:
        raise KernelInputError(
            f"request {row} names query slot {request.query_slot}; there are 0..{num_slots - 1}"
        )
    places = {block: place for place, block in enumerate(table)}
    for place, block in enumerate(targets):
        if places.get(block, place) != place:
            # Written at `place` while its own tokens, further on in the table, are still to be
            # read.
            raise KernelInputError(
                f"request {row} has target {place} = block {block}, which is block "
                f"{places[block]} of its own table; "
                "an own block may only be a target at its own place"
            )


def _padded(tables: list[tuple[int, ...]], width: int) -> list[int]:
    return [block for table in tables for block in (*table, *[PAD] * (width - len(table)))]


def aligned(count: int) -> int:
    """Room for so many int32 values, what comes behind them aligned: Triton compiles anew for a
    pointer that is not.
    """
    return -(-count // SECTION_ALIGNMENT) * SECTION_ALIGNMENT


@dataclass(frozen=True)
class CompressionShape:
    """Sizes that fix how large a workspace is; `group` is query heads per KV head."""

    num_layers: int
    num_kv_heads: int
    group: int
    window: int
    block_size: int


@dataclass(frozen=True)
class Scratch:
    """Views of a workspace for one launch of B requests with at most S tokens and k kept; float32
    and int32.

    `global_score`, `redundancy_logits`, `score`: `[layers, B, H_kv, S]`; entries behind a request's
    own end are never written. `keep_index [layers, B, H_kv, k]`: cache-order index of every kept
    token, increasing. `row_max`, `row_sum [layers, B, H_kv, tiles, G, w]` and `row_normaliser
    [layers, B, H_kv, G, w]` are the softmax's. `spare` has the shape of `score` and the memory of
    `keep_index`: a scorer may use it until the selection.
    """

    global_score: torch.Tensor
    redundancy_logits: torch.Tensor
    score: torch.Tensor
    keep_index: torch.Tensor
    row_max: torch.Tensor
    row_sum: torch.Tensor
    row_normaliser: torch.Tensor
    spare: torch.Tensor


class CompressionWorkspace:
    """Buffers for launches of at most `max_requests` requests whose padded size is at most
    `capacity_blocks`.

    The padded size is requests x blocks of the longest. A batch that is larger is done in several
    launches.
    """

    def __init__(
        self,
        shape: CompressionShape,
        *,
        capacity_blocks: int,
        max_requests: int,
        device: torch.device,
    ) -> None:
        if capacity_blocks < 2 or max_requests < 1:
            raise KernelInputError(
                f"a workspace of {capacity_blocks} blocks and {max_requests} requests cannot "
                f"compress anything; "
                "2 blocks and 1 request are the least"
            )
        self.shape = shape
        self.capacity_blocks = capacity_blocks
        self.max_requests = max_requests
        floats, ints = _buffer_sizes(shape, capacity_blocks, max_requests)
        self._floats = {
            name: torch.empty(size, dtype=torch.float32, device=device)
            for name, size in floats.items()
        }
        self._ints = {
            name: torch.empty(size, dtype=torch.int32, device=device) for name, size in ints.items()
        }

    def for_window(self, window: int) -> "CompressionWorkspace":
        """The same memory for a window of at most the one that it was made for."""
        if window > self.shape.window:
            raise KernelInputError(
                f"a window of {window} does not fit a workspace for one of {self.shape.window}"
            )
        narrower = copy(self)
        narrower.shape = replace(self.shape, window=window)
        return narrower

    @property
    def num_bytes(self) -> int:
        """What this workspace holds."""
        buffers = (*self._floats.values(), *self._ints.values())
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    @property
    def batch_storage(self) -> torch.Tensor:
        """Where `lay_out` puts tables and flags."""
        return self._ints["batch"]

    def slices(self, requests: list[CompressionRequest]) -> list[list[CompressionRequest]]:
        """The batch cut, in order, into launches that fit; `KernelInputError` if a single request
        does not.
        """
        launches: list[list[CompressionRequest]] = []
        longest = 0
        for request in requests:
            num_blocks = len(request.block_table)
            if num_blocks > self.capacity_blocks:
                raise KernelInputError(
                    f"a request of {num_blocks} blocks does not fit a workspace of "
                    f"{self.capacity_blocks} blocks"
                )
            grown = max(longest, num_blocks)
            room = launches and len(launches[-1]) < self.max_requests
            if room and (len(launches[-1]) + 1) * grown <= self.capacity_blocks:
                launches[-1].append(request)
                longest = grown
            else:
                launches.append([request])
                longest = num_blocks
        return launches

    def scratch(self, num_requests: int, max_blocks: int, max_targets: int) -> Scratch:
        """Views for one launch; they alias those of every other launch of this workspace."""
        shape = self.shape
        rows = (shape.num_layers, num_requests, shape.num_kv_heads)
        tokens = (*rows, max_blocks * shape.block_size)
        kept = (*rows, max_targets * shape.block_size)
        softmax_rows = (shape.group, shape.window)
        tiles = (*rows, _num_tiles(shape, max_blocks), *softmax_rows)
        return Scratch(
            global_score=_view(self._floats["global_score"], tokens),
            redundancy_logits=_view(self._floats["redundancy_logits"], tokens),
            score=_view(self._floats["score"], tokens),
            keep_index=_view(self._ints["keep_index"], kept),
            row_max=_view(self._floats["row_max"], tiles),
            row_sum=_view(self._floats["row_sum"], tiles),
            row_normaliser=_view(self._floats["row_normaliser"], (*rows, *softmax_rows)),
            spare=_view(self._ints["keep_index"].view(torch.float32), tokens),
        )


def _num_tiles(shape: CompressionShape, num_blocks: int) -> int:
    return -(-num_blocks * shape.block_size // score_tile(shape.block_size))


def _buffer_sizes(
    shape: CompressionShape, capacity_blocks: int, max_requests: int
) -> tuple[dict[str, int], dict[str, int]]:
    heads = shape.num_layers * shape.num_kv_heads
    tokens = heads * capacity_blocks * shape.block_size
    softmax_rows = shape.group * shape.window
    # One tile more per request than the tokens fill: a request's last tile may be partly empty.
    tiles = _num_tiles(shape, capacity_blocks) + max_requests
    floats = {
        "global_score": tokens,
        "redundancy_logits": tokens,
        "score": tokens,
        "row_max": heads * tiles * softmax_rows,
        "row_sum": heads * tiles * softmax_rows,
        "row_normaliser": heads * max_requests * softmax_rows,
    }
    ints = {
        "keep_index": tokens,
        "batch": 2 * (capacity_blocks + SECTION_ALIGNMENT)
        + NUM_FLAGS * (max_requests + SECTION_ALIGNMENT),
    }
    return floats, ints


def _view(buffer: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    size = 1
    for extent in shape:
        size *= extent
    return buffer[:size].view(shape)

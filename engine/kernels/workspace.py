"""Memory that compression works in: reserved once inside the memory budget, never allocated in the serving path."""

from copy import copy
from dataclasses import dataclass, replace

import torch

from engine.kernels.batch import NUM_FLAGS, SECTION_ALIGNMENT, CompressionRequest
from engine.kernels.errors import KernelInputError

SCORE_TILE = 64  # tokens a score program takes at least: several small blocks, or one block that is larger


def score_tile(block_size: int) -> int:
    """Tokens of one score program: whole blocks, at least `SCORE_TILE` tokens."""
    return max(block_size, SCORE_TILE // block_size * block_size)


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
    """Views of a workspace for one launch of B requests with at most S tokens and k kept; float32 and int32.

    `global_score`, `redundancy_logits`, `score`: `[layers, B, H_kv, S]`; entries behind a request's own end are never
    written. `keep_index [layers, B, H_kv, k]`: cache-order index of every kept token, increasing.
    `row_max`, `row_sum [layers, B, H_kv, tiles, G, w]` and `row_normaliser [layers, B, H_kv, G, w]` are the softmax's.
    """

    global_score: torch.Tensor
    redundancy_logits: torch.Tensor
    score: torch.Tensor
    keep_index: torch.Tensor
    row_max: torch.Tensor
    row_sum: torch.Tensor
    row_normaliser: torch.Tensor


class CompressionWorkspace:
    """Buffers for launches of at most `max_requests` requests whose padded size is at most `capacity_blocks`.

    The padded size is requests x blocks of the longest. A batch that is larger is done in several launches.
    """

    def __init__(
        self, shape: CompressionShape, *, capacity_blocks: int, max_requests: int, device: torch.device
    ) -> None:
        if capacity_blocks < 2 or max_requests < 1:
            raise KernelInputError(
                f"a workspace of {capacity_blocks} blocks and {max_requests} requests cannot compress anything; "
                "2 blocks and 1 request are the least"
            )
        self.shape = shape
        self.capacity_blocks = capacity_blocks
        self.max_requests = max_requests
        floats, ints = _buffer_sizes(shape, capacity_blocks, max_requests)
        self._floats = {name: torch.empty(size, dtype=torch.float32, device=device) for name, size in floats.items()}
        self._ints = {name: torch.empty(size, dtype=torch.int32, device=device) for name, size in ints.items()}

    def for_window(self, window: int) -> "CompressionWorkspace":
        """The same memory for a window of at most the one that it was made for."""
        if window > self.shape.window:
            raise KernelInputError(f"a window of {window} does not fit a workspace for one of {self.shape.window}")
        narrower = copy(self)
        narrower.shape = replace(self.shape, window=window)
        return narrower

    @staticmethod
    def bytes_needed(shape: CompressionShape, *, capacity_blocks: int, max_requests: int) -> int:
        """What the constructor will take, so that the cache can be sized around it."""
        floats, ints = _buffer_sizes(shape, capacity_blocks, max_requests)
        return 4 * (sum(floats.values()) + sum(ints.values()))

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
        """The batch cut, in order, into launches that fit; `KernelInputError` if a single request does not."""
        launches: list[list[CompressionRequest]] = []
        longest = 0
        for request in requests:
            num_blocks = len(request.block_table)
            if num_blocks > self.capacity_blocks:
                raise KernelInputError(
                    f"a request of {num_blocks} blocks does not fit a workspace of {self.capacity_blocks} blocks"
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
        "batch": 2 * (capacity_blocks + SECTION_ALIGNMENT) + NUM_FLAGS * (max_requests + SECTION_ALIGNMENT),
    }
    return floats, ints


def _view(buffer: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    size = 1
    for extent in shape:
        size *= extent
    return buffer[:size].view(shape)

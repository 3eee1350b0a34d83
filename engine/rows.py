"""The decoding set on the device: one row a request, so that a quiet step needs nothing from the host.

A decode step reads token, position and cache length of its rows, and writes the next ones; the host only uploads what
its own decisions changed (a block, a slot, a row that came or went), as one list of numbers.
"""

from collections.abc import Sequence

import torch

from engine.transfer import moved

TOKEN, POSITION, LENGTH, SLOT, TABLE = 0, 1, 2, 3, 4  # columns; the block table fills the rest
PAD = -1


class DecodeRows:
    """`state [rows + 1, 4 + blocks]` int32 on the device; the last row is padding: length 0, writes nothing."""

    def __init__(self, max_requests: int, max_blocks: int, device: torch.device) -> None:
        self.max_requests = max_requests
        self.max_blocks = max_blocks
        self.width = TABLE + max_blocks
        self.state = torch.full((max_requests + 1, self.width), PAD, dtype=torch.int32, device=device)
        self.state[:, :SLOT] = 0
        self.padding_row = max_requests
        self._free = list(range(max_requests - 1, -1, -1))
        self._indices: list[int] = []
        self._values: list[int] = []

    def take(self) -> int:
        """A free row."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """The row's request has left."""
        self._free.append(row)

    def set(self, row: int, column: int, value: int) -> None:
        """Note a value to upload."""
        self._indices.append(row * self.width + column)
        self._values.append(value)

    def set_table(self, row: int, blocks: Sequence[int], start: int = 0) -> None:
        """Note a block table, or its blocks from `start` on."""
        first = row * self.width + TABLE
        self._indices.extend(range(first + start, first + len(blocks)))
        self._values.extend(blocks[start:])

    def upload(self) -> None:
        """Bring everything noted to the device, in the current stream's order; a place noted twice gets the last."""
        if not self._indices:
            return
        last = dict(zip(self._indices, self._values, strict=True))
        pairs = moved(torch.tensor([list(last), list(last.values())], dtype=torch.int64), self.state.device)
        self.state.view(-1).index_copy_(0, pairs[0], pairs[1].to(torch.int32))
        self._indices.clear()
        self._values.clear()


class DecodeInputs:
    """What one decode step reads, derived on the device from `rows` (int64 `[B]`) of the state.

    `token_ids`, `positions [B]` int64; `lengths [B]`, `block_tables [B, n]` int32;
    `slot_mapping`, `window_rows [B]` int64, -1 where nothing is stored.
    """

    def __init__(self, state: torch.Tensor, rows: torch.Tensor, block_size: int, window: int) -> None:
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
        self.window_rows = torch.where((slot >= 0) & (within >= 0) & self.real, slot * window + within, nothing)


def advance(state: torch.Tensor, inputs: DecodeInputs, sampled: torch.Tensor) -> None:
    """After a decode step: the sampled tokens `[B]` are next, one position further on. Padding stays as it is."""
    real = inputs.real
    state[inputs.rows, TOKEN] = torch.where(real, sampled, 0).to(torch.int32)
    state[inputs.rows, POSITION] = torch.where(real, inputs.positions + 1, 0).to(torch.int32)
    state[inputs.rows, LENGTH] = torch.where(real, inputs.lengths + 1, 0).to(torch.int32)

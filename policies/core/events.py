"""Everything that happens is one flat row, emitted here and nowhere else; their running hash is the decision digest."""

import hashlib
from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Sink = Callable[[Int64Array, Int64Array], None]

ROW = ("step", "kind", "request", "value", "num_blocks")
FLUSH_AT = 1_000_000  # list items, about 30 MB


class Kind(IntEnum):
    """What a row says; `value` and the row's blocks mean what stands behind the kind."""

    ARRIVED = 1  # value: prompt tokens
    REFUSED = 2  # value: Reason
    ADMITTED = 3  # value: prompt and generated tokens to compute, hits included
    HIT = 4  # value: tokens; blocks: matched ones, now (also) this request's
    TOOK = 5  # blocks: fresh ones for this request
    CHUNK = 6  # value: tokens computed by this prefill chunk
    FIRST = 7  # the prompt is computed; value: output tokens so far
    GREW = 8  # blocks: one fresh block
    SLOT = 9  # value: query slot granted
    SLOT_FREED = 10  # value: query slot given back
    STALLED = 11  # value: Reason it waits for
    RESUMED = 12  # runs again
    COMPRESSING = 13  # value: tokens before; blocks: targets
    COMPRESSED = 14  # value: tokens kept; blocks: the new table
    PREEMPTED = 15  # value: tokens thrown away (recompute) or 0 (swap)
    SWAP_OUT = 16  # blocks: held until the copy has finished
    SWAP_IN = 17  # blocks: fresh ones the host copy goes to
    SWAPPED_IN = 18  # the copy is back
    FREED = 19  # blocks: now free
    CACHED = 20  # blocks: now without owner, content matchable
    LEFT = 21  # blocks: this request no longer owns them, others do
    HELD = 22  # blocks: given up, but an unfinished copy still reads them
    FINISHED = 23  # value: Reason
    ABORTED = 24
    FAILED = 25
    DECODES = 26  # value: number of decodes in this and every following step until the next such row
    PREFIX_LOST = 27  # value: matchable blocks overwritten by a compression
    CAPPED = 28  # value: output tokens allowed, fewer than asked for
    POLICY = 29  # value: mark of the policy that decides from this step on; blocks: no longer matchable, now free


class Reason(IntEnum):
    """Why a request ended, was refused, or waits."""

    STOP = 1  # its last token said so, even where it also meets the limit; in a trace, it is shorter than its limit
    LENGTH = 2
    NEVER_FITS = 3
    TOO_LONG = 4
    EMPTY_PROMPT = 5
    BAD_MAX_TOKENS = 6
    NO_SLOT = 7
    NO_BLOCK = 8
    LIMIT = 9


class Journal:
    """Collects rows, hashes them, and hands them on in large pieces.

    Two streams, so that both turn into columns at once: rows of five integers (`ROW`), and the block ids they name,
    one after the other. The digest covers both; times are not part of it.
    """

    __slots__ = ("_block_hash", "_row_hash", "_sink", "blocks", "rows", "step")

    def __init__(self, sink: Sink | None = None) -> None:
        """`sink` receives (rows [n, 5], blocks [m]) now and then; without one the rows are hashed and dropped."""
        self._sink = sink
        self._row_hash = hashlib.sha256()
        self._block_hash = hashlib.sha256()
        self.rows: list[int] = []
        self.blocks: list[int] = []
        self.step = 0

    def emit(self, kind: int, request: int, value: int = 0, blocks: Sequence[int] = ()) -> None:
        """Write one row for the current step."""
        self.rows += (self.step, kind, request, value, len(blocks))
        if blocks:
            self.blocks += blocks

    def emit_each(self, kind: int, requests: list[int], blocks: list[int]) -> None:
        """Write a row with one block for each request."""
        rows = [self.step, kind, 0, 0, 1] * len(requests)
        rows[2 :: len(ROW)] = requests
        self.rows += rows
        self.blocks += blocks

    def flush(self) -> None:
        """Hash what has been collected and hand it to the sink."""
        if not self.rows:
            return
        rows = np.array(self.rows, dtype="<i8").reshape(-1, len(ROW))
        blocks = np.array(self.blocks, dtype="<i8")
        self.rows.clear()
        self.blocks.clear()
        self._row_hash.update(rows.tobytes())
        self._block_hash.update(blocks.tobytes())
        if self._sink is not None:
            self._sink(rows, blocks)

    def flush_when_large(self) -> None:
        """Flush if much has come together."""
        if len(self.rows) > FLUSH_AT:
            self.flush()

    def digest(self) -> str:
        """The decision digest so far: SHA-256 over the hashes of both streams."""
        self.flush()
        return hashlib.sha256(self._row_hash.digest() + self._block_hash.digest()).hexdigest()

"""Everything that happens is one flat row, emitted here and nowhere else; their running hash is the
decision digest.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from zlab.traces.schema import CAUSE_COLUMNS, EVENT_COLUMNS, REPORT_COLUMNS

Int64Array = npt.NDArray[np.int64]
EventSink = Callable[[Int64Array, Int64Array], None]

FLUSH_AT = 1_000_000  # list items, about 30 MB


class Journal:
    """Collects rows, hashes them, and hands them on in large pieces.

    Two streams, so that both turn into columns at once: rows of five integers (`EVENT_COLUMNS`),
    and the block ids they name, one after the other. The digest covers both; times are not part of
    it.

    Beside them stand reports: blocks whose state changed without a decision about them. The digest
    does not cover these rows, so a recording may say more than it did without another digest. The
    same holds for causes: why a request was not admitted, stalled, or was preempted.
    """

    __slots__ = (
        "_block_hash",
        "_causes",
        "_num_flushed",
        "_reports",
        "_row_hash",
        "_sink",
        "at_end",
        "blocks",
        "listens",
        "rows",
        "step",
    )

    def __init__(self, sink: EventSink | None = None) -> None:
        """`sink` receives (rows [n, 5], blocks [m]) now and then; without one the rows are hashed
        and dropped.
        """
        self._sink = sink
        self._row_hash = hashlib.sha256()
        self._block_hash = hashlib.sha256()
        self.rows: list[int] = []
        self.blocks: list[int] = []
        self.step = 0
        self.at_end = False  # the step is being committed
        self._reports: list[int] = []  # `REPORT_COLUMNS` one after the other
        self._causes: list[int] = []  # `CAUSE_COLUMNS` one after the other
        self._num_flushed = 0  # rows
        self.listens = sink is not None  # only then are causes worth finding

    def emit(self, kind: int, request: int, value: int = 0, blocks: Sequence[int] = ()) -> None:
        """Write one row for the current step."""
        self.rows += (self.step, kind, request, value, len(blocks))
        if blocks:
            self.blocks += blocks

    def report(self, block: int, state: int) -> None:
        """Say that a block is in another state from now on."""
        if self._sink is not None:
            event = self._num_flushed + self.num_collected
            self._reports += (self.step, self.at_end, event, block, state)

    def take_reports(self) -> Int64Array:
        """Return the reports [n, 5] up to now (`REPORT_COLUMNS`); meant for the sink."""
        taken = np.array(self._reports, dtype="<i8").reshape(-1, len(REPORT_COLUMNS))
        self._reports.clear()
        return taken

    def explain(self, *cause: int) -> None:
        """Write down a decision against a request: the columns `CAUSE_COLUMNS` after `at_end`."""
        self._causes += (self.step, self.at_end, *cause)

    def take_causes(self) -> Int64Array:
        """Return the causes [n, 9] up to now (`CAUSE_COLUMNS`); meant for the sink."""
        taken = np.array(self._causes, dtype="<i8").reshape(-1, len(CAUSE_COLUMNS))
        self._causes.clear()
        return taken

    def emit_each(self, kind: int, requests: list[int], blocks: list[int]) -> None:
        """Write a row with one block for each request."""
        rows = [self.step, kind, 0, 0, 1] * len(requests)
        rows[2 :: len(EVENT_COLUMNS)] = requests
        self.rows += rows
        self.blocks += blocks

    @property
    def num_collected(self) -> int:
        """Rows that have not been flushed yet."""
        return len(self.rows) // len(EVENT_COLUMNS)

    def flush(self) -> None:
        """Hash what has been collected and hand it to the sink."""
        if not self.rows:
            return
        rows = np.array(self.rows, dtype="<i8").reshape(-1, len(EVENT_COLUMNS))
        blocks = np.array(self.blocks, dtype="<i8")
        self.rows.clear()
        self.blocks.clear()
        self._row_hash.update(rows.tobytes())
        self._block_hash.update(blocks.tobytes())
        self._num_flushed += len(rows)
        if self._sink is not None:
            self._sink(rows, blocks)
        self._reports.clear()  # a sink that has no use for them has not taken them
        self._causes.clear()

    def flush_when_large(self) -> None:
        """Flush if much has come together."""
        if len(self.rows) > FLUSH_AT:
            self.flush()

    def digest(self) -> str:
        """The decision digest so far: SHA-256 over the hashes of both streams."""
        self.flush()
        return hashlib.sha256(self._row_hash.digest() + self._block_hash.digest()).hexdigest()

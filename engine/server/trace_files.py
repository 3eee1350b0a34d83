"""A live trace on disk: `llm-trace/1` files that follow one another, every line whole before the next is begun."""

import io
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from traces.formats.native import RECORDED_LIVE, meta_path, write_meta
from traces.workload import TraceRequest, WorkloadMeta, request_to_line

SECONDS_A_FILE = 3600.0
BYTES_A_FILE = 256 << 20


@dataclass(frozen=True)
class Rotation:
    """When a file is ended and the next begun: after so many seconds, or when it has so many bytes."""

    seconds: float = SECONDS_A_FILE
    num_bytes: int = BYTES_A_FILE

    def __post_init__(self) -> None:
        """Raise ValueError on a file that could hold nothing."""
        if not self.seconds > 0 or self.num_bytes < 1:
            raise ValueError(f"a trace file must last and hold something, not {self.seconds} s, {self.num_bytes} bytes")


class TraceFiles:
    """Writes requests as they end into `folder/trace-00000.jsonl`, `trace-00001.jsonl`, ..., metadata beside each.

    A line reaches the operating system before the next is taken, so that a kill at any moment tears at most the last
    one. Metadata is there from the start; counts of rows come when a file is ended. Times count from the recording's
    start through all files.
    """

    def __init__(
        self, folder: Path, meta: WorkloadMeta, rotation: Rotation, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`meta` holds for every file but for its name and counts."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._meta = replace(meta, modifications=(RECORDED_LIVE, *meta.modifications))
        self._rotation = rotation
        self._clock = clock
        self._num_files = 0
        self._file: io.FileIO | None = None
        self._dropped: Counter[str] = Counter()
        self._num_rows = self._num_bytes = 0
        self._begun = clock()
        self._begin()

    @property
    def path(self) -> Path:
        """The file that is written now."""
        return self._folder / f"trace-{self._num_files - 1:05}.jsonl"

    def write(self, request: TraceRequest) -> None:
        """Append one request; begins the next file first when this one has had its time or its size."""
        assert self._file is not None
        full = self._num_bytes >= self._rotation.num_bytes or self._clock() >= self._begun + self._rotation.seconds
        if full and self._num_rows:
            self._end()
            self._begin()
        line = memoryview(request_to_line(request).encode())
        while line:
            line = line[os.write(self._file.fileno(), line) :]
        self._num_bytes = os.fstat(self._file.fileno()).st_size
        self._num_rows += 1

    def leave_out(self, reason: str) -> None:
        """Count a request that no line can hold."""
        self._dropped[reason] += 1

    def close(self) -> None:
        """End the last file."""
        if self._file is not None:
            self._end()

    def _begin(self) -> None:
        self._num_files += 1
        self._num_rows = self._num_bytes = 0
        self._dropped.clear()
        self._begun = self._clock()
        write_meta(self.path, replace(self._meta, name=self.path.stem))
        self._file = io.FileIO(self.path, "xb")

    def _end(self) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None
        if not self._num_rows and not self._dropped:
            for path in (self.path, meta_path(self.path)):
                path.unlink()
            return
        dropped = dict(sorted(self._dropped.items()))
        counts = replace(
            self._meta,
            name=self.path.stem,
            rows_read=self._num_rows + sum(dropped.values()),
            rows_kept=self._num_rows,
            dropped=dropped,
        )
        write_meta(self.path, counts)

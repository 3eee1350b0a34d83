"""Rows of a part to come: appended while a run goes on, and whole up to the last append whatever happens to the writer.

A tail is a file in Arrow's IPC stream format beside the parts of its table, named after the part that it will become
(`_00007.tail`; who reads a folder of Parquet parts passes over names that begin so). Once that part is there the tail
no longer counts.
"""

from pathlib import Path

import pyarrow as pa

PREFIX, SUFFIX = "_", ".tail"


def tail_path(folder: Path, number: int) -> Path:
    """Where the rows of part `number` stand until it is there."""
    return folder / f"{PREFIX}{number:05}{SUFFIX}"


def find_tail(folder: Path) -> tuple[int, Path] | None:
    """The newest tail in a table's folder with the number of its part; None without one."""
    found = max(folder.glob(f"{PREFIX}*{SUFFIX}"), default=None)
    return None if found is None else (int(found.stem.removeprefix(PREFIX)), found)


class Tail:
    """Appends rows; every append is handed to the operating system before it returns, so that a kill loses none."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        self._file = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._file, schema)

    def append(self, rows: pa.Table) -> None:
        """Append rows of the schema."""
        self._stream.write_table(rows)

    def leave(self) -> None:
        """Close the file; its rows stay."""
        self._stream.close()
        self._file.close()

    def drop(self) -> None:
        """The part is there: close the file and remove it."""
        self.leave()
        self._path.unlink(missing_ok=True)


def read_tail(path: Path, schema: pa.Schema) -> pa.Table:
    """The rows of a tail up to the last whole append; what a kill left half written is not among them.

    Raises FileNotFoundError where the tail is gone (its part is there then).
    """
    data = path.read_bytes()
    batches: list[pa.RecordBatch] = []
    try:
        with pa.ipc.open_stream(pa.BufferReader(data)) as stream:
            for batch in stream:
                batches.append(batch)  # noqa: PERF402 - those before a torn one are kept
    except (pa.ArrowInvalid, OSError, EOFError):
        pass
    return pa.Table.from_batches(batches, schema)

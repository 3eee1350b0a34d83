"""Rows come in one by one, columns come out: how a reader fills a `RequestTable` in bounded memory."""

from array import array
from collections.abc import Mapping
from itertools import chain
from typing import Any

from traces.table import Column, IdLists, OptionalFloats, OptionalInts, RequestTable
from traces.workload import CHUNK_ROWS, FLOAT_FIELDS, IDS_FIELDS, INT_FIELDS, INT_MISSING, REQUEST_FIELDS

MOSTLY_DISTINCT_FIELDS = frozenset({"id", "parent"})


class _Numbers:
    def __init__(self, typecode: str) -> None:
        self.values: array[Any] = array(typecode)
        self.missing: float = float("nan") if typecode == "d" else INT_MISSING
        self.has_missing = False

    def extend(self, cells: list[Any]) -> None:
        if None in cells:
            self.has_missing = True
            cells = [self.missing if cell is None else cell for cell in cells]
        self.values.extend(cells)

    def finish(self) -> Column:
        if not self.has_missing:
            return self.values
        return OptionalFloats(self.values) if self.values.typecode == "d" else OptionalInts(self.values)


class _Strings:
    """Equal strings are held once, except where looking them up would cost more than it saves."""

    def __init__(self, share: bool) -> None:
        self.values: list[str | None] = []
        self.seen: dict[str, str] | None = {} if share else None

    def extend(self, cells: list[Any]) -> None:
        seen = self.seen
        if seen is not None:
            cells = [cell if cell is None else seen.setdefault(cell, cell) for cell in cells]
        self.values.extend(cells)

    def finish(self) -> Column:
        return self.values


class _Ids:
    """The same tuple or array met again within a chunk (samples of one prompt) is held once."""

    def __init__(self) -> None:
        self.flat, self.starts, self.ends = array("q"), array("q"), array("q")

    def extend(self, cells: list[Any]) -> None:
        spans: dict[int, tuple[int, int]] = {id(None): (0, -1)}  # by identity: the chunk keeps its cells alive
        for cell in cells:
            if id(cell) not in spans:
                start = len(self.flat)
                self.flat.extend(cell)
                spans[id(cell)] = (start, len(self.flat))
            start, end = spans[id(cell)]
            self.starts.append(start)
            self.ends.append(end)

    def finish(self) -> Column:
        return IdLists(self.flat, self.starts, self.ends)


def _growing(name: str) -> _Numbers | _Strings | _Ids:
    if name in IDS_FIELDS:
        return _Ids()
    if name in INT_FIELDS or name in FLOAT_FIELDS:
        return _Numbers("q" if name in INT_FIELDS else "d")
    return _Strings(share=name not in MOSTLY_DISTINCT_FIELDS)


class TableBuilder:
    """Collects rows (field -> value, unknown fields left out) into a `RequestTable`.

    Values must have been checked: whole numbers and ids below 2**63, ids in tuples or arrays.
    """

    def __init__(self) -> None:
        self._columns: dict[str, _Numbers | _Strings | _Ids] = {}
        self._chunk: list[Mapping[str, Any]] = []
        self._num_flushed = 0

    def __len__(self) -> int:
        return self._num_flushed + len(self._chunk)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row at the end."""
        self._chunk.append(row)
        if len(self._chunk) == CHUNK_ROWS:
            self._flush()

    def _flush(self) -> None:
        names = set(chain.from_iterable(self._chunk)) | self._columns.keys()
        for name in names:
            default = 0 if name == "priority" else None
            if name not in self._columns:  # first seen in this chunk: every earlier row lacks it
                self._columns[name] = _growing(name)
                self._columns[name].extend([default] * self._num_flushed)
            self._columns[name].extend([row.get(name, default) for row in self._chunk])
        self._num_flushed += len(self._chunk)
        self._chunk = []

    def build(self) -> RequestTable:
        """The rows so far, in the order in which they were added."""
        self._flush()
        columns = {name: self._columns[name].finish() for name in REQUEST_FIELDS if name in self._columns}
        return RequestTable(columns, self._num_flushed)

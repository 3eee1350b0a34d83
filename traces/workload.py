"""Requests and workloads: `TraceRequest` is one request, `Workload` is many with their provenance.

A `TraceRequest` object with its strings and ids takes about a kilobyte, so a million of them do not
fit beside a simulation. `RequestTable` is a `Sequence` of the same requests in flat arrays, one for
each field, with tens of bytes per row; it makes a `TraceRequest` when a row is read. `TableBuilder`
fills one in bounded memory. Columns such as `PrefixRanges` compute their values on access.
"""

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any, Protocol, overload, runtime_checkable

import numpy as np


class TraceError(ValueError):
    """A trace or workload cannot be read or is inconsistent. The message names file, line and
    value.
    """


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of the schema `llm-trace/1`.

    Lengths are in tokens, times in seconds. `None` means unknown and is never replaced by a
    default: a request without `prefix_ids` and without `prompt_ids` shares no prefix, and one
    without `output_tokens` has no forced length.
    """

    id: str
    prompt_tokens: int
    output_tokens: int | None = None
    arrival_s: float | None = (
        # from the first row on; None in an offline batch, in which all requests arrive at once
        None
    )
    max_tokens: int | None = None
    prefix_ids: tuple[int, ...] | None = (
        None  # one chained id for each `WorkloadMeta.block_size` prompt tokens
    )
    prompt_ids: tuple[int, ...] | None = None
    output_ids: tuple[int, ...] | None = None
    session: str | None = None
    turn: int | None = None
    parent: str | None = None
    think_s: float | None = None
    priority: int = 0  # larger is more urgent
    cls: str | None = None
    model: str | None = None
    reasoning_tokens: int | None = None
    source_e2e_s: float | None = None
    status: str | None = None


@dataclass(frozen=True)
class WorkloadMeta:
    """The source of a workload and its modifications. `rows_read` = `rows_kept` + all `dropped`."""

    name: str
    source: str = ""
    licence: str = ""
    sha256: str = ""  # of the source file's bytes; empty for a synthetic workload
    rows_read: int = 0
    rows_kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> rows
    arrival_resolution_s: float | None = None
    block_size: int | None = None  # prompt tokens per prefix id
    block_id_kind: str | None = (
        None  # "chained" once read; `modifications` notes what the source had
    )
    last_block: str | None = (
        None  # "partial" when the last id may cover fewer tokens than block_size
    )
    modifications: tuple[str, ...] = ()

    def rows(self) -> dict[str, Any]:
        """Return the number of rows read, kept and dropped, as plain JSON.

        `read` = `kept` + all `dropped`, which are counted by reason. Every result that uses the
        workload carries these numbers.
        """
        return {"read": self.rows_read, "kept": self.rows_kept, "dropped": dict(self.dropped)}


def dropped_rows(rows: Mapping[str, Any] | None) -> list[str]:
    """Return a line that says how many rows were dropped and why; an empty list if none was.

    `rows` is a result of `WorkloadMeta.rows`; a recording of release 0.1.0 has None.
    """
    dropped = dict((rows or {}).get("dropped", {}))
    if rows is None or not dropped:
        return []
    reasons = ", ".join(f"{count:,} x {reason}" for reason, count in dropped.items())
    total = sum(dropped.values())
    return [f"{total:,} of {rows['read']:,} rows of the trace were dropped: {reasons}"]


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, with their metadata."""

    requests: Sequence[TraceRequest]
    meta: WorkloadMeta

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 over every field of every request. Equal workloads have equal hashes on any
        machine.

        The block size is hashed first, then the fields in chunks of `CHUNK_ROWS` requests (see
        `_encoded`).
        """
        digest = hashlib.sha256(f"llm-trace/1 block_size={self.meta.block_size}\n".encode())
        for start in range(0, len(self.requests), CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, len(self.requests))
            for name, cells in request_columns(self.requests, start, stop):
                encoded = _encoded(name, cells)
                digest.update(f"{name} {stop - start} {len(encoded)}\n".encode())
                digest.update(encoded)
        return digest.hexdigest()


REQUEST_FIELDS = tuple(f.name for f in fields(TraceRequest))


INT_FIELDS = frozenset(
    {"prompt_tokens", "output_tokens", "max_tokens", "turn", "priority", "reasoning_tokens"}
)
FLOAT_FIELDS = frozenset({"arrival_s", "think_s", "source_e2e_s"})
IDS_FIELDS = frozenset({"prefix_ids", "prompt_ids", "output_ids"})
INT_MISSING = -(2**63)
CHUNK_ROWS = 4096


@runtime_checkable
class Columnar(Protocol):
    """A sequence of requests that stores its fields by column."""

    def cells(self, name: str, start: int, stop: int) -> list[Any]:
        """Return the values of a field for the requests `start` to `stop - 1`.

        Args:
            name: The field.
            start: First request.
            stop: Request after the last one.
        """


def request_columns(
    requests: Sequence[TraceRequest], start: int, stop: int, names: Sequence[str] = REQUEST_FIELDS
) -> Iterator[tuple[str, list[Any]]]:
    """Yield each named field with its values for the requests `start` to `stop - 1`.

    Args:
        requests: The requests.
        start: First request.
        stop: Request after the last one.
        names: The fields; all by default.
    """
    if isinstance(requests, Columnar):
        for name in names:
            yield name, requests.cells(name, start, stop)
        return
    chunk = requests[start:stop]
    for name in names:
        yield name, [getattr(request, name) for request in chunk]


def _encoded(name: str, cells: list[Any]) -> bytes:
    """Encode a field: eight little-endian bytes for each number, JSON for strings, ids as all
    lengths and then all ids, and `-` if all values are unknown.
    """
    if cells.count(0 if name == "priority" else None) == len(cells):
        return b"-"
    if name in INT_FIELDS:
        return _bytes(array("q", [INT_MISSING if cell is None else cell for cell in cells]))
    if name in FLOAT_FIELDS:  # adding 0.0 turns -0.0 into 0.0
        return _bytes(array("d", [float("nan") if cell is None else cell + 0.0 for cell in cells]))
    if name in IDS_FIELDS:
        lengths = array("q", [-1 if cell is None else len(cell) for cell in cells])
        return _bytes(lengths) + _bytes(
            array("q", list(chain.from_iterable(cell for cell in cells if cell)))
        )
    return json.dumps(cells).encode()


def _bytes(values: "array[Any]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def request_to_line(request: TraceRequest) -> str:
    """Return the request as a line of an `llm-trace/1` file, newline included."""
    return _encode(request_to_json(request)) + "\n"


def request_to_json(request: TraceRequest) -> dict[str, Any]:
    """Return the request as a flat JSON object in field order. Unknown values and a priority of 0
    are left out.

    `arrival_s` is always present, null for an offline batch.
    """
    row: dict[str, Any] = {}
    for name in REQUEST_FIELDS:
        value = getattr(request, name)
        if name == "arrival_s" or (value is not None and not (name == "priority" and value == 0)):
            row[name] = list(value) if isinstance(value, tuple) else value
    return row


class FieldValues(Protocol):
    """The values of one field, by row number; None where a value is unknown."""

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class OptionalInts:
    """Whole numbers, some of them unknown (stored as `INT_MISSING`)."""

    values: "array[int]"

    def __getitem__(self, index: int) -> int | None:
        value = self.values[index]
        return None if value == INT_MISSING else value


@dataclass(frozen=True)
class OptionalFloats:
    """Numbers, some of them unknown (stored as NaN)."""

    values: "array[float]"

    def __getitem__(self, index: int) -> float | None:
        value = self.values[index]
        return None if value != value else value  # noqa: PLR0124 - only NaN is unequal to itself


@dataclass(frozen=True)
class IdLists:
    """Tuples of ids in one flat array. Row i is `flat[starts[i]:ends[i]]`, unknown where the end is
    -1.
    """

    flat: "array[int]"
    starts: "array[int]"
    ends: "array[int]"

    def __getitem__(self, index: int) -> tuple[int, ...] | None:
        end = self.ends[index]
        return None if end < 0 else tuple(self.flat[self.starts[index] : end])


@dataclass(frozen=True)
class Picked:
    """The rows of another column in another order, or a part of them."""

    column: FieldValues
    order: "array[int]"

    def __getitem__(self, index: int) -> Any:
        return self.column[self.order[index]]


@dataclass(frozen=True, eq=False)
class RequestTable(Sequence[TraceRequest]):  # noqa: PLW1641 - a table of arrays is not hashable
    """Requests stored by column. Fields without a column have their default value in every row.

    `order[i]`, where given, is the row of the columns that is request i. The table is equal to any
    sequence of equal requests.
    """

    columns: Mapping[str, FieldValues]
    num_rows: int
    order: "array[int] | None" = None

    def __len__(self) -> int:
        return self.num_rows

    def _row(self, index: int) -> TraceRequest:
        return TraceRequest(**{name: column[index] for name, column in self.columns.items()})

    @overload
    def __getitem__(self, index: int) -> TraceRequest: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TraceRequest]: ...
    def __getitem__(self, index: int | slice) -> TraceRequest | Sequence[TraceRequest]:
        if isinstance(index, slice):
            return self.take(range(*index.indices(self.num_rows)))
        position = index + self.num_rows if index < 0 else index
        if not 0 <= position < self.num_rows:
            raise IndexError(f"request {index} of {self.num_rows}")
        return self._row(position if self.order is None else self.order[position])

    def __iter__(self) -> Iterator[TraceRequest]:
        rows: Iterable[int] = range(self.num_rows) if self.order is None else self.order
        return map(self._row, rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def cells(self, name: str, start: int, stop: int) -> list[Any]:
        """Return the values of a field for the requests `start` to `stop - 1`.

        Args:
            name: The field.
            start: First request.
            stop: Request after the last one.
        """
        column = self.columns.get(name)
        if column is None:
            return [0 if name == "priority" else None] * (stop - start)
        rows: Iterable[int] = range(start, stop) if self.order is None else self.order[start:stop]
        return [column[row] for row in rows]

    def take(self, positions: Iterable[int]) -> "RequestTable":
        """Return the requests at these positions, in this order. The columns are shared."""
        order = self.order
        rows = array(
            "q", positions if order is None else (order[position] for position in positions)
        )
        return replace(self, num_rows=len(rows), order=rows)

    def in_place(self) -> "RequestTable":
        """Return the same requests with row i of every column in place i. Columns that compute
        their values on access still do so.
        """
        order = self.order
        if order is None:
            return self
        columns: dict[str, FieldValues] = {}
        for name, column in self.columns.items():
            if isinstance(column, array):
                columns[name] = array(column.typecode, [column[row] for row in order])
            else:
                columns[name] = Picked(column, order)
        return RequestTable(columns, len(order))


def plain_array(values: "np.ndarray[Any, np.dtype[Any]]") -> "array[Any]":
    """Return a one-dimensional numpy array as an array of the standard library. Its items are plain
    Python numbers, and it can be pickled.
    """
    if np.issubdtype(values.dtype, np.floating):
        return array("d", values.astype(np.float64).tobytes())
    return array("q", values.astype(np.int64).tobytes())


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

    def finish(self) -> FieldValues:
        if not self.has_missing:
            return self.values
        return (
            OptionalFloats(self.values)
            if self.values.typecode == "d"
            else OptionalInts(self.values)
        )


class _Strings:
    """A growing column of strings. With `share`, equal strings are stored once; for mostly distinct
    strings the look-up would cost more than it saves.
    """

    def __init__(self, share: bool) -> None:
        self.values: list[str | None] = []
        self.seen: dict[str, str] | None = {} if share else None

    def extend(self, cells: list[Any]) -> None:
        seen = self.seen
        if seen is not None:
            cells = [cell if cell is None else seen.setdefault(cell, cell) for cell in cells]
        self.values.extend(cells)

    def finish(self) -> FieldValues:
        return self.values


class _Ids:
    """A growing column of ids. A tuple or array that occurs again within a chunk (samples of one
    prompt) is stored once.
    """

    def __init__(self) -> None:
        self.flat, self.starts, self.ends = array("q"), array("q"), array("q")

    def extend(self, cells: list[Any]) -> None:
        spans: dict[int, tuple[int, int]] = {
            id(None): (0, -1)
        }  # keyed by identity: the chunk keeps its cells alive
        for cell in cells:
            if id(cell) not in spans:
                start = len(self.flat)
                self.flat.extend(cell)
                spans[id(cell)] = (start, len(self.flat))
            start, end = spans[id(cell)]
            self.starts.append(start)
            self.ends.append(end)

    def finish(self) -> FieldValues:
        return IdLists(self.flat, self.starts, self.ends)


def _growing(name: str) -> _Numbers | _Strings | _Ids:
    if name in IDS_FIELDS:
        return _Ids()
    if name in INT_FIELDS or name in FLOAT_FIELDS:
        return _Numbers("q" if name in INT_FIELDS else "d")
    return _Strings(share=name not in MOSTLY_DISTINCT_FIELDS)


class TableBuilder:
    """Collects rows (field -> value, unknown fields left out) into a `RequestTable`.

    The caller has checked the values: whole numbers and ids are below 2**63, and ids are in tuples
    or arrays.
    """

    def __init__(self) -> None:
        self._columns: dict[str, _Numbers | _Strings | _Ids] = {}
        self._chunk: list[Mapping[str, Any]] = []
        self._num_flushed = 0

    def __len__(self) -> int:
        return self._num_flushed + len(self._chunk)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        self._chunk.append(row)
        if len(self._chunk) == CHUNK_ROWS:
            self._flush()

    def _flush(self) -> None:
        names = set(chain.from_iterable(self._chunk)) | self._columns.keys()
        for name in names:
            default = 0 if name == "priority" else None
            if name not in self._columns:  # first seen in this chunk: all earlier rows lack it
                self._columns[name] = _growing(name)
                self._columns[name].extend([default] * self._num_flushed)
            self._columns[name].extend([row.get(name, default) for row in self._chunk])
        self._num_flushed += len(self._chunk)
        self._chunk = []

    def build(self) -> RequestTable:
        """Return the rows so far, in the order in which they were added."""
        self._flush()
        columns = {
            name: self._columns[name].finish() for name in REQUEST_FIELDS if name in self._columns
        }
        return RequestTable(columns, self._num_flushed)


@dataclass(frozen=True)
class Constant:
    """The same value in every row."""

    value: object

    def __getitem__(self, index: int) -> object:
        return self.value


@dataclass(frozen=True)
class Numbered:
    """Names made from the row's number: `prefix` + number."""

    prefix: str = ""

    def __getitem__(self, index: int) -> str:
        return f"{self.prefix}{index}"


@dataclass(frozen=True)
class NamedBy:
    """Names made from another column of numbers."""

    prefix: str
    numbers: "array[int]"

    def __getitem__(self, index: int) -> str:
        return f"{self.prefix}{self.numbers[index]}"


@dataclass(frozen=True)
class TurnNames:
    """`s<session>-t<turn>` of the turn `back` turns earlier; None before the first turn (1)."""

    sessions: "array[int]"
    turns: "array[int]"
    back: int = 0

    def __getitem__(self, index: int) -> str | None:
        turn = self.turns[index] - self.back
        return f"s{self.sessions[index]}-t{turn}" if turn >= 1 else None


@dataclass(frozen=True)
class PrefixRanges:
    """Ids of consecutive blocks: first those of a shared prefix, then those of the request or of
    its session.
    """

    head_starts: "array[int]"
    head_ends: "array[int]"
    tail_starts: "array[int]"
    tail_ends: "array[int]"

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return (
            *range(self.head_starts[index], self.head_ends[index]),
            *range(self.tail_starts[index], self.tail_ends[index]),
        )

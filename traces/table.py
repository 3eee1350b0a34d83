"""Many requests in little memory: one typed column a field, rows made when they are looked at.

A `TraceRequest` object with its strings and ids costs about a kilobyte; a million of them do not fit beside a
simulation. A `RequestTable` holds the same rows in flat arrays (tens of bytes a row) and is a plain `Sequence`.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, overload

import numpy as np

from traces.workload import INT_MISSING, TraceRequest


class Column(Protocol):
    """The values of one field, by row number; None where unknown."""

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class OptionalInts:
    """Whole numbers of which some are unknown (held as `INT_MISSING`)."""

    values: "array[int]"

    def __getitem__(self, index: int) -> int | None:
        value = self.values[index]
        return None if value == INT_MISSING else value


@dataclass(frozen=True)
class OptionalFloats:
    """Numbers of which some are unknown (held as NaN)."""

    values: "array[float]"

    def __getitem__(self, index: int) -> float | None:
        value = self.values[index]
        return None if value != value else value  # noqa: PLR0124 - only NaN is unequal to itself


@dataclass(frozen=True)
class IdLists:
    """Tuples of ids laid end to end; row i is `flat[starts[i]:ends[i]]`, unknown where the end is -1."""

    flat: "array[int]"
    starts: "array[int]"
    ends: "array[int]"

    def __getitem__(self, index: int) -> tuple[int, ...] | None:
        end = self.ends[index]
        return None if end < 0 else tuple(self.flat[self.starts[index] : end])


@dataclass(frozen=True)
class Picked:
    """Another column's rows in another order, or only some of them."""

    column: Column
    order: "array[int]"

    def __getitem__(self, index: int) -> Any:
        return self.column[self.order[index]]


@dataclass(frozen=True, eq=False)
class RequestTable(Sequence[TraceRequest]):  # noqa: PLW1641 - a table of arrays is not hashable
    """Requests held by column. Fields without a column have their default in every row.

    `order[i]`, where given, is the row of the columns that comes i-th. Equal to any sequence of equal requests.
    """

    columns: Mapping[str, Column]
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
        """The field's values in requests start..stop-1."""
        column = self.columns.get(name)
        if column is None:
            return [0 if name == "priority" else None] * (stop - start)
        rows: Iterable[int] = range(start, stop) if self.order is None else self.order[start:stop]
        return [column[row] for row in rows]

    def take(self, positions: Iterable[int]) -> "RequestTable":
        """The rows at these positions, in this order, sharing the columns."""
        order = self.order
        rows = array("q", positions if order is None else (order[position] for position in positions))
        return replace(self, num_rows=len(rows), order=rows)

    def in_place(self) -> "RequestTable":
        """The same requests with row i of every column in place i; what columns work out stays to be worked out."""
        order = self.order
        if order is None:
            return self
        columns: dict[str, Column] = {}
        for name, column in self.columns.items():
            if isinstance(column, array):
                columns[name] = array(column.typecode, [column[row] for row in order])
            else:
                columns[name] = Picked(column, order)
        return RequestTable(columns, len(order))


def plain_array(values: "np.ndarray[Any, np.dtype[Any]]") -> "array[Any]":
    """A one-dimensional numpy array as the standard library's: it gives plain Python numbers by index, and pickles."""
    if np.issubdtype(values.dtype, np.floating):
        return array("d", values.astype(np.float64).tobytes())
    return array("q", values.astype(np.int64).tobytes())

"""One request as the outside world sees it, and a workload: many of them with their provenance."""

import hashlib
import json
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from typing import Any, Protocol, runtime_checkable


class TraceError(ValueError):
    """A trace or workload that cannot be read or makes no sense; the message names file, line and value."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of the schema `llm-trace/1`.

    Lengths are in tokens, times in seconds. `None` means unknown and is never replaced by a default:
    a request without `prefix_ids` and without `prompt_ids` shares nothing, one without `output_tokens`
    has no forced length.
    """

    id: str
    prompt_tokens: int
    output_tokens: int | None = None
    arrival_s: float | None = None  # from the first row; None in an offline batch (everything at once)
    max_tokens: int | None = None
    prefix_ids: tuple[int, ...] | None = None  # one chained id per `WorkloadMeta.block_size` prompt tokens
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
    """Where a workload came from and what was done to it; rows read = kept + all dropped."""

    name: str
    source: str = ""
    licence: str = ""
    sha256: str = ""  # of the source file's bytes; empty for a synthetic workload
    rows_read: int = 0
    rows_kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> rows
    arrival_resolution_s: float | None = None
    block_size: int | None = None  # prompt tokens per prefix id
    block_id_kind: str | None = None  # "chained" once read; what the source had is noted in `modifications`
    last_block: str | None = None  # "partial" when the last id may cover fewer tokens than block_size
    modifications: tuple[str, ...] = ()


@dataclass(frozen=True)
class Workload:
    """Requests in arrival order with their metadata."""

    requests: Sequence[TraceRequest]
    meta: WorkloadMeta

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 over every field of every request: equal workloads have equal hashes on any machine.

        Hashed by field in chunks of `CHUNK_ROWS` requests, see `_encoded`; the block size goes in first.
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


INT_FIELDS = frozenset({"prompt_tokens", "output_tokens", "max_tokens", "turn", "priority", "reasoning_tokens"})
FLOAT_FIELDS = frozenset({"arrival_s", "think_s", "source_e2e_s"})
IDS_FIELDS = frozenset({"prefix_ids", "prompt_ids", "output_ids"})
INT_MISSING = -(2**63)
CHUNK_ROWS = 4096


@runtime_checkable
class Columnar(Protocol):
    """A sequence of requests that holds its fields by column."""

    def cells(self, name: str, start: int, stop: int) -> list[Any]:
        """The field's values in requests start..stop-1."""


def request_columns(
    requests: Sequence[TraceRequest], start: int, stop: int, names: Sequence[str] = REQUEST_FIELDS
) -> Iterator[tuple[str, list[Any]]]:
    """Each named field with its values in requests start..stop-1."""
    if isinstance(requests, Columnar):
        for name in names:
            yield name, requests.cells(name, start, stop)
        return
    chunk = requests[start:stop]
    for name in names:
        yield name, [getattr(request, name) for request in chunk]


def _encoded(name: str, cells: list[Any]) -> bytes:
    """Eight little-endian bytes a number, JSON for strings, ids as all lengths and then all ids; `-` if all unknown."""
    if cells.count(0 if name == "priority" else None) == len(cells):
        return b"-"
    if name in INT_FIELDS:
        return _bytes(array("q", [INT_MISSING if cell is None else cell for cell in cells]))
    if name in FLOAT_FIELDS:  # adding 0.0 makes one zero of the two
        return _bytes(array("d", [float("nan") if cell is None else cell + 0.0 for cell in cells]))
    if name in IDS_FIELDS:
        lengths = array("q", [-1 if cell is None else len(cell) for cell in cells])
        return _bytes(lengths) + _bytes(array("q", list(chain.from_iterable(cell for cell in cells if cell))))
    return json.dumps(cells).encode()


def _bytes(values: "array[Any]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def request_to_line(request: TraceRequest) -> str:
    """The request as its line of an `llm-trace/1` file, newline included."""
    return _encode(request_to_json(request)) + "\n"


def request_to_json(request: TraceRequest) -> dict[str, Any]:
    """The request as a flat JSON object in field order; unknown values and a zero priority are left out.

    `arrival_s` is always present, null for an offline batch.
    """
    row: dict[str, Any] = {}
    for name in REQUEST_FIELDS:
        value = getattr(request, name)
        if name == "arrival_s" or (value is not None and not (name == "priority" and value == 0)):
            row[name] = list(value) if isinstance(value, tuple) else value
    return row

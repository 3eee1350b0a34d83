"""One request as the outside world sees it, and a workload: many of them with their provenance."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any


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
        """SHA-256 over the canonical form of every request: equal workloads have equal hashes on any machine.

        The form is a line with the block size, then the lines of the `llm-trace/1` file.
        """
        digest = hashlib.sha256(f"llm-trace/1 block_size={self.meta.block_size}\n".encode())
        for request in self.requests:
            digest.update(request_to_line(request).encode())
        return digest.hexdigest()


REQUEST_FIELDS = tuple(f.name for f in fields(TraceRequest))


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

"""What a public format must say for itself so that one driver can read them all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Record = Mapping[str, Any]
"""One row of the file by column name: strings from CSV, any JSON value from JSON Lines."""
Row = dict[str, Any]
"""One row as `TraceRequest` fields; `ticks` instead of `arrival_s` where the format has its own clock."""


class RowReader(Protocol):
    """Turns the records of one file into rows, in order; may hold what it has seen (block chains, prompts)."""

    def __call__(self, record: Record) -> Row:
        """The row. Raises `BadRowError` for one that lies, `FailedRequestError` for one that records a failure."""


@dataclass(frozen=True)
class Format:
    """A public trace format: how to tell it, how to read a row, what is known of every file in it."""

    name: str
    what: str
    layout: Literal["csv", "jsonl"]
    required: tuple[str, ...]  # columns without which it is another format
    begin: Callable[[Path], RowReader]  # a fresh reader for one file
    ticks: bool = True  # times come as `ticks` and count from the first row; else as `arrival_s`, kept as they are
    source: str = ""
    licence: str = ""
    arrival_resolution_s: float | None = None
    block_size: int | None = None
    block_id_kind: str | None = None
    last_block: str | None = None
    modifications: tuple[str, ...] = ()  # what reading it always changes

"""Read a trace file in any known format: detect the format, keep good rows in order of arrival,
count the others.
"""

import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from zlab.traces.choices import unknown_choice
from zlab.traces.formats.azure import AZURE
from zlab.traces.formats.bailian import BAILIAN, CHAINED, SERVEGEN_OFFLINE
from zlab.traces.formats.bench import BENCH
from zlab.traces.formats.burstgpt import BURSTGPT
from zlab.traces.formats.layout import (
    TICKS_PER_S,
    BadRowError,
    FailedRequestError,
    Format,
    Record,
    Row,
    file_sha256,
    json_object,
    numbered_lines,
    shown,
    split_cells,
    trace_name,
    unended_bytes,
)
from zlab.traces.formats.mooncake import MOONCAKE
from zlab.traces.formats.native import NATIVE, is_live, read_meta
from zlab.traces.recording import TornLineWarning
from zlab.traces.workload import (
    RequestTable,
    TableBuilder,
    TraceError,
    Workload,
    WorkloadMeta,
    plain_array,
)

FORMATS: dict[str, Format] = {
    f.name: f for f in (NATIVE, AZURE, BURSTGPT, MOONCAKE, BAILIAN, SERVEGEN_OFFLINE, BENCH)
}
SNIFFED_LINES = 20
"""Lines looked at to tell a JSON Lines format: the first rows may be bad ones."""


def known_formats() -> str:
    """Return the formats with the columns that identify them, for error messages."""
    return "; ".join(f"{f.name} ({', '.join(f.required)})" for f in FORMATS.values())


def named_format(name: str) -> Format:
    """Return the format of this name. An unknown name raises an error with the nearest known
    one.
    """
    if name not in FORMATS:
        raise TraceError(unknown_choice("trace format", name, FORMATS))
    return FORMATS[name]


def _column_sets(path: Path) -> tuple[Literal["csv", "jsonl"], list[str], str]:
    """Return the file's layout, the column names of its first usable row, and its first line."""
    first_line = ""
    for seen, (_, line) in enumerate(numbered_lines(path)):
        first_line = first_line or line
        if not first_line.startswith("{"):
            return "csv", [cell.strip() for cell in split_cells(line)], line
        try:
            return "jsonl", list(json_object(line)), line
        except BadRowError:
            if seen >= SNIFFED_LINES:
                break
    if not first_line:
        raise TraceError(f"{path}: has no rows")
    return "jsonl", [], first_line


def missing_columns(path: Path, fmt: Format, columns: list[str], first_line: str) -> TraceError:
    """Return the error that a file lacks columns of a format, or has no header at all.

    Args:
        path: The file.
        fmt: The format.
        columns: Columns that the file has.
        first_line: First line of the file.
    """
    missing = [name for name in fmt.required if name not in columns]
    if len(missing) == len(fmt.required):
        return TraceError(
            f"{path}: has no header line of format {fmt.name} ({', '.join(fmt.required)}); "
            f"its first line is {shown(first_line)}"
        )
    names = ", ".join(repr(name) for name in missing)
    return TraceError(
        f"{path}: column {names} of format {fmt.name} is missing; found are {', '.join(columns)}"
    )


def detect_format(path: Path) -> Format:
    """Return the format whose columns the file has. Otherwise raise an error with the missing
    columns of the nearest format.
    """
    try:
        layout, columns, first_line = _column_sets(path)
    except BadRowError as error:
        raise TraceError(f"{path}:1: {error}") from None
    candidates = [f for f in FORMATS.values() if f.layout == layout]
    fitting = [f for f in candidates if set(f.required) <= set(columns)]
    if fitting:
        return max(fitting, key=lambda f: len(f.required))
    nearest = max(candidates, key=lambda f: len(set(f.required) & set(columns)) / len(f.required))
    if set(nearest.required) & set(columns):
        missing = missing_columns(path, nearest, columns, first_line)
        raise TraceError(f"{missing} (known formats: {known_formats()})")
    lacks = "has no header line of a known format" if layout == "csv" else "is in no known format"
    raise TraceError(
        f"{path}: {lacks}, its first line is {shown(first_line)}; known formats: {known_formats()}"
    )


MIN_ROWS_A_BATCH = 2.0
"""With more rows than this a distinct time, the times are those of batches, and their spacing is
the resolution.
"""


@dataclass(frozen=True)
class BadLine:
    """One row that was not used: its line, a short reason, and the details."""

    line: int
    reason: str
    detail: str


NumberedRecord = tuple[int, Record | BadRowError]
Progress = Callable[[float], None]
"""Told every few thousand lines which share of the file has been read, 0..1."""


def _csv_records(path: Path, fmt: Format, on_progress: Progress | None) -> Iterator[NumberedRecord]:
    columns: list[str] = []
    for line_number, line in numbered_lines(path, on_progress):
        try:
            cells = split_cells(line)
        except BadRowError as error:
            if not columns:
                raise TraceError(f"{path}:{line_number}: {error}") from None
            yield line_number, error
            continue
        if columns:
            if len(cells) == len(columns):
                yield line_number, dict(zip(columns, cells, strict=True))
            else:
                detail = f"has {len(cells)} cells, must have {len(columns)}: {shown(line)}"
                yield line_number, BadRowError("wrong number of cells", detail)
            continue
        columns = [cell.strip() for cell in cells]
        if not set(fmt.required) <= set(columns):
            raise missing_columns(path, fmt, columns, line)
        repeated = [name for name, count in Counter(columns).items() if count > 1]
        if repeated:
            raise TraceError(
                f"{path}:{line_number}: column {repeated[0]!r} occurs twice in the header"
            )


def _jsonl_records(
    path: Path, fmt: Format, on_progress: Progress | None
) -> Iterator[NumberedRecord]:
    """Yield the rows of a JSON Lines file. In a trace that was recorded live, a truncated last line
    is not a bad row.
    """
    may_be_truncated = fmt.name == "native" and is_live(read_meta(path))
    held: tuple[int, BadRowError] | None = None
    for line_number, line in numbered_lines(path, on_progress):
        if held is not None:
            yield held
            held = None
        try:
            yield line_number, json_object(line)
        except BadRowError as error:
            held = line_number, error
    if held is None:
        return
    num_unended = unended_bytes(path) if may_be_truncated else 0
    if not num_unended:
        yield held
        return
    warnings.warn(TornLineWarning(path, num_unended), stacklevel=2)
    yield held[0], FailedRequestError("torn last line")


def _rows(
    path: Path, fmt: Format, on_progress: Progress | None
) -> Iterator[tuple[int, Row | BadRowError]]:
    read_row = fmt.begin(path)
    records = _csv_records if fmt.layout == "csv" else _jsonl_records
    for line_number, record in records(path, fmt, on_progress):
        if isinstance(record, BadRowError):
            yield line_number, record
            continue
        try:
            yield line_number, read_row(record)
        except BadRowError as error:
            yield line_number, error
        except KeyError as error:
            yield line_number, BadRowError(f"{error.args[0]} is missing")


@dataclass
class _ReadRows:
    """The rows of a file: kept rows as columns, their times, and dropped rows by reason."""

    builder: TableBuilder
    times: "array[float] | array[int]"  # seconds, or ticks of 100 ns; empty for an offline batch
    dropped: Counter[str]


@dataclass(frozen=True)
class _ReadRequest:
    """The arguments of one read."""

    path: Path
    format: str | None
    on_bad: Callable[[BadLine], None]  # may raise
    strict_order: bool = False
    on_progress: Progress | None = None


def _collect_rows(wanted: _ReadRequest, fmt: Format) -> _ReadRows:
    clock = "ticks" if fmt.ticks else "arrival_s"
    rows = _ReadRows(TableBuilder(), array("q" if fmt.ticks else "d"), Counter())
    line_of: dict[str, int] = {}
    for row_index, (line, found) in enumerate(_rows(wanted.path, fmt, wanted.on_progress)):
        row = found
        if not isinstance(row, BadRowError):
            identity = row.setdefault("id", str(row_index))
            first_line = line_of.setdefault(identity, line)
            if first_line != line:
                row = BadRowError(
                    "id is repeated",
                    f"id {shown(identity)} is repeated, first on line {first_line}",
                )
            elif wanted.strict_order and rows.times and row.get(clock, 0) < rows.times[-1]:
                early_s = (rows.times[-1] - row[clock]) / (TICKS_PER_S if fmt.ticks else 1)
                row = BadRowError(
                    "earlier than the row before", f"arrives {early_s:g} s before the row above it"
                )
        if isinstance(row, BadRowError):
            rows.dropped[row.reason] += 1
            if not isinstance(row, FailedRequestError):
                wanted.on_bad(BadLine(line, row.reason, str(row)))
            continue
        if clock in row:
            rows.times.append(row.pop(clock))
        rows.builder.append(row)
    return rows


def _in_arrival_order(rows: _ReadRows) -> tuple[RequestTable, list[str]]:
    """Return the rows stably sorted by time, with times from the first one on, and notes about what
    was changed.
    """
    table = rows.builder.build()
    if not rows.times:
        return table, []
    times = np.asarray(rows.times)
    # Ticks are subtracted as whole numbers, so only the division rounds.
    seconds = (times - times.min()) / TICKS_PER_S if rows.times.typecode == "q" else times
    columns = {"id": table.columns["id"], "arrival_s": plain_array(seconds), **table.columns}
    table = replace(table, columns=columns)
    num_backward = int(np.count_nonzero(np.diff(times) < 0))
    if not num_backward:
        return table, []
    order = np.argsort(times, kind="stable")
    return table.take(order.tolist()), [
        f"sorted by arrival ({num_backward} rows came earlier than the row before)"
    ]


def _resolution_s(fmt: Format, table: RequestTable) -> float | None:
    """Return the format's own resolution, or the spacing of the batches in which the times come."""
    if fmt.arrival_resolution_s is None or "arrival_s" not in table.columns:
        return None
    distinct = np.unique(np.asarray(table.columns["arrival_s"]))
    if len(distinct) < 2 or len(table) < MIN_ROWS_A_BATCH * len(distinct):
        return fmt.arrival_resolution_s
    return max(fmt.arrival_resolution_s, round(float(np.median(np.diff(distinct))), 7))


def _meta(
    path: Path, fmt: Format, rows: _ReadRows, table: RequestTable, changes: list[str]
) -> WorkloadMeta:
    known = read_meta(path) if fmt.name == "native" else None
    if known is None:
        known = WorkloadMeta(
            name=trace_name(path),
            source=fmt.source,
            licence=fmt.licence,
            sha256=file_sha256(path),
            arrival_resolution_s=_resolution_s(fmt, table),
            block_size=fmt.block_size,
            block_id_kind=fmt.block_id_kind,
            last_block=fmt.last_block,
        )
    elif known.rows_read and known.rows_kept != len(table) + sum(rows.dropped.values()):
        found = len(table) + sum(rows.dropped.values())
        changes = [
            f"edited after writing: {known.rows_kept} rows by its metadata, {found} found",
            *changes,
        ]
    if known.block_id_kind == "content":
        changes = [CHAINED, *changes]
    dropped = Counter(known.dropped) + rows.dropped
    return replace(
        known,
        dropped=dict(sorted(dropped.items())),
        rows_kept=len(table),
        rows_read=len(table) + sum(dropped.values()),
        block_id_kind=known.block_id_kind and "chained",
        modifications=(*known.modifications, *changes),
    )


def read_trace(
    path: Path | str,
    format: str | None = None,
    skip_bad: bool = False,
    strict_order: bool = False,
    on_progress: Progress | None = None,
) -> Workload:
    """Read a trace file and return the workload in order of arrival. Rows of equal time keep the
    file's order.

    A row that is out of order is moved, and `meta.modifications` notes it.

    Args:
        path: The file.
        format: Name of its format; by default the columns decide.
        skip_bad: Count bad rows by reason in `meta.dropped` instead of raising an error.
        strict_order: Treat a row that is earlier than the row before as a bad row.
        on_progress: Called now and then with the share of the file that has been read, in [0, 1].

    Raises:
        TraceError: A row is bad (with file, line and value), or the file has no good row.
    """
    path = Path(path)

    def refuse(bad: BadLine) -> None:
        if not skip_bad:
            raise TraceError(f"{path}:{bad.line}: {bad.detail}")

    return _read(_ReadRequest(path, format, refuse, strict_order, on_progress))


def _read(wanted: _ReadRequest) -> Workload:
    path = wanted.path
    fmt = detect_format(path) if wanted.format is None else named_format(wanted.format)
    rows = _collect_rows(wanted, fmt)
    if not len(rows.builder):
        reasons = ", ".join(f"{count} x {reason}" for reason, count in rows.dropped.items())
        raise EmptyTraceError(f"{path}: has no rows" + (f" left: {reasons}" if reasons else ""))
    table, changes = _in_arrival_order(rows)
    return Workload(table, _meta(path, fmt, rows, table, [*fmt.modifications, *changes]))


class EmptyTraceError(TraceError):
    """A trace without a good row."""


@dataclass(frozen=True)
class CheckReport:
    """The result of a check: the first bad rows, the number of bad rows, and the workload of the
    good ones (or None).
    """

    bad_lines: tuple[BadLine, ...]
    num_bad: int
    workload: Workload | None


def check_trace(
    path: Path | str,
    format: str | None = None,
    limit: int = 20,
    strict_order: bool = False,
    on_progress: Progress | None = None,
) -> CheckReport:
    """Read the whole file and report its bad rows.

    Args:
        path: The file.
        format: Name of its format; by default the columns decide.
        limit: Number of bad rows that are reported in full.
        strict_order: Treat a row that is earlier than the row before as a bad row.
        on_progress: Called now and then with the share of the file that has been read, in [0, 1].

    Raises:
        TraceError: The file as a whole cannot be read: unknown format, missing columns, not text,
            no row.
    """
    bad_lines: list[BadLine] = []
    num_bad = 0

    def note(bad: BadLine) -> None:
        nonlocal num_bad
        num_bad += 1
        if len(bad_lines) < limit:
            bad_lines.append(bad)

    try:
        workload: Workload | None = _read(
            _ReadRequest(Path(path), format, note, strict_order, on_progress)
        )
    except EmptyTraceError:
        if not num_bad:
            raise
        workload = None
    return CheckReport(tuple(bad_lines), num_bad, workload)

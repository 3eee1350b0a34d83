"""Reading a trace file: every row in turn, the good ones kept in order of arrival, the others accounted for."""

import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from traces.builder import TableBuilder
from traces.formats.bailian import CHAINED
from traces.formats.cells import TICKS_PER_S, BadRowError, FailedRequestError, shown
from traces.formats.detect import detect_format, missing_columns, named_format
from traces.formats.layout import Format, Record, Row
from traces.formats.native import is_live, read_meta
from traces.formats.source import file_sha256, json_object, numbered_lines, split_cells, trace_name, unended_bytes
from traces.table import RequestTable, plain_array
from traces.torn import TornLineWarning
from traces.workload import TraceError, Workload, WorkloadMeta

MIN_ROWS_A_BATCH = 2.0
"""With more rows than this a distinct time, the times are those of batches, and their spacing is the resolution."""


@dataclass(frozen=True)
class BadLine:
    """One row that was not used: where, why in short, and what it holds."""

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
            raise TraceError(f"{path}:{line_number}: column {repeated[0]!r} stands twice in the header")


def _jsonl_records(path: Path, fmt: Format, on_progress: Progress | None) -> Iterator[NumberedRecord]:
    """Rows of a JSON Lines file; a trace recorded live may end in the middle of a line, which then is no bad row."""
    may_be_torn = fmt.name == "native" and is_live(read_meta(path))
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
    num_torn = unended_bytes(path) if may_be_torn else 0
    if not num_torn:
        yield held
        return
    warnings.warn(TornLineWarning(path, num_torn), stacklevel=2)
    yield held[0], FailedRequestError("torn last line")


def _rows(path: Path, fmt: Format, on_progress: Progress | None) -> Iterator[tuple[int, Row | BadRowError]]:
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
class _Intake:
    """What came out of a file: kept rows as columns, their times, dropped rows by reason."""

    builder: TableBuilder
    times: "array[float] | array[int]"  # seconds, or ticks of 100 ns; empty for an offline batch
    dropped: Counter[str]


@dataclass(frozen=True)
class _Request:
    """What the caller of a reader wants."""

    path: Path
    format: str | None
    on_bad: Callable[[BadLine], None]  # may raise
    strict_order: bool = False
    on_progress: Progress | None = None


def _take_in(wanted: _Request, fmt: Format) -> _Intake:
    clock = "ticks" if fmt.ticks else "arrival_s"
    intake = _Intake(TableBuilder(), array("q" if fmt.ticks else "d"), Counter())
    line_of: dict[str, int] = {}
    for row_index, (line, found) in enumerate(_rows(wanted.path, fmt, wanted.on_progress)):
        row = found
        if not isinstance(row, BadRowError):
            identity = row.setdefault("id", str(row_index))
            first_line = line_of.setdefault(identity, line)
            if first_line != line:
                row = BadRowError("id is repeated", f"id {shown(identity)} is repeated, first on line {first_line}")
            elif wanted.strict_order and intake.times and row.get(clock, 0) < intake.times[-1]:
                early_s = (intake.times[-1] - row[clock]) / (TICKS_PER_S if fmt.ticks else 1)
                row = BadRowError("earlier than the row before", f"arrives {early_s:g} s before the row above it")
        if isinstance(row, BadRowError):
            intake.dropped[row.reason] += 1
            if not isinstance(row, FailedRequestError):
                wanted.on_bad(BadLine(line, row.reason, str(row)))
            continue
        if clock in row:
            intake.times.append(row.pop(clock))
        intake.builder.append(row)
    return intake


def _in_arrival_order(intake: _Intake) -> tuple[RequestTable, list[str]]:
    """The rows with their times from the first one on, stably sorted; says what was changed."""
    table = intake.builder.build()
    if not intake.times:
        return table, []
    times = np.asarray(intake.times)
    # Ticks are subtracted as whole numbers: nothing is rounded before the one division.
    seconds = (times - times.min()) / TICKS_PER_S if intake.times.typecode == "q" else times
    columns = {"id": table.columns["id"], "arrival_s": plain_array(seconds), **table.columns}
    table = replace(table, columns=columns)
    num_backward = int(np.count_nonzero(np.diff(times) < 0))
    if not num_backward:
        return table, []
    order = np.argsort(times, kind="stable")
    return table.take(order.tolist()), [f"sorted by arrival ({num_backward} rows came earlier than the row before)"]


def _resolution_s(fmt: Format, table: RequestTable) -> float | None:
    """The format's own resolution, or the spacing of the batches in which the times come."""
    if fmt.arrival_resolution_s is None or "arrival_s" not in table.columns:
        return None
    distinct = np.unique(np.asarray(table.columns["arrival_s"]))
    if len(distinct) < 2 or len(table) < MIN_ROWS_A_BATCH * len(distinct):
        return fmt.arrival_resolution_s
    return max(fmt.arrival_resolution_s, round(float(np.median(np.diff(distinct))), 7))


def _meta(path: Path, fmt: Format, intake: _Intake, table: RequestTable, changes: list[str]) -> WorkloadMeta:
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
    elif known.rows_read and known.rows_kept != len(table) + sum(intake.dropped.values()):
        found = len(table) + sum(intake.dropped.values())
        changes = [f"edited after writing: {known.rows_kept} rows by its metadata, {found} found", *changes]
    if known.block_id_kind == "content":
        changes = [CHAINED, *changes]
    dropped = Counter(known.dropped) + intake.dropped
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
    """The workload in the file, in order of arrival (rows of equal time keep the file's order).

    The format is told by the columns unless named. A bad row is a `TraceError` with file, line and value, or with
    `skip_bad` counted by reason in `meta.dropped`. Rows out of time order are sorted stably and that is noted in
    `meta.modifications`; with `strict_order` they are bad rows. A file without a good row is an error.
    """
    path = Path(path)

    def refuse(bad: BadLine) -> None:
        if not skip_bad:
            raise TraceError(f"{path}:{bad.line}: {bad.detail}")

    return _read(_Request(path, format, refuse, strict_order, on_progress))


def _read(wanted: _Request) -> Workload:
    path = wanted.path
    fmt = detect_format(path) if wanted.format is None else named_format(wanted.format)
    intake = _take_in(wanted, fmt)
    if not len(intake.builder):
        reasons = ", ".join(f"{count} x {reason}" for reason, count in intake.dropped.items())
        raise EmptyTraceError(f"{path}: has no rows" + (f" left: {reasons}" if reasons else ""))
    table, changes = _in_arrival_order(intake)
    return Workload(table, _meta(path, fmt, intake, table, [*fmt.modifications, *changes]))


class EmptyTraceError(TraceError):
    """A trace in which no row is left."""


@dataclass(frozen=True)
class CheckReport:
    """What reading a whole file found: the first bad rows, how many there are, what could be read (or None)."""

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
    """Read the whole file and report its bad rows, the first `limit` in full.

    Raises `TraceError` for what is wrong with the file as a whole: unknown format, missing columns, not text, no row.
    """
    bad_lines: list[BadLine] = []
    num_bad = 0

    def note(bad: BadLine) -> None:
        nonlocal num_bad
        num_bad += 1
        if len(bad_lines) < limit:
            bad_lines.append(bad)

    try:
        workload: Workload | None = _read(_Request(Path(path), format, note, strict_order, on_progress))
    except EmptyTraceError:
        if not num_bad:
            raise
        workload = None
    return CheckReport(tuple(bad_lines), num_bad, workload)

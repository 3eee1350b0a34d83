"""A recording: a run on disk, with its requests, steps, events, and the state of each block.

A recording is a folder (format `zlab-recording/1`):

* `manifest.json`: the source of the run (policy and its changes, limits, workload hash, seed,
  versions, cost model), its digest and summary, and `complete`: whether the run came to its end.
* `requests/`, `steps/`, `events/`, `blocks/`, `reports/`, `causes/`: Parquet parts `00000.parquet`,
  `00001.parquet`, ... Every part is a whole file, so a run that still goes on, or was killed, can
  be read up to its last part. pandas, DuckDB and Polars read the folders directly.
* `asked.jsonl`: for the engine, the submitted requests, so that the decisions can be made again.

A live run is saved about every second (`checkpoint`). Rows that do not fill a part yet are in the
*tail* of the table: a file `_00007.tail` in Arrow's IPC stream format, named after the part that it
will become. A reader of Parquet folders skips such a name. Once the part exists, the tail is not
read any more. Requests that have not ended are in the file that the manifest's `alive` names, and
its `rows` counts the rows of each table at the checkpoint. A reader sees all tables as of the last
checkpoint. A complete run has no tails and no such entries.

`zlab.traces.schema` describes the columns. This module does not know policies: kinds and states are
plain numbers here, and the manifest has their names.
"""

import io
import json
import os
import platform
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from zlab.traces import schema
from zlab.traces.metrics import summarize
from zlab.traces.workload import IDS_FIELDS, TraceError, TraceRequest, request_to_line

PREFIX, SUFFIX = "_", ".tail"


def tail_path(folder: Path, number: int) -> Path:
    """Return the path of the tail that holds the rows of part `number` until the part exists."""
    return folder / f"{PREFIX}{number:05}{SUFFIX}"


def find_tail(folder: Path) -> tuple[int, Path] | None:
    """Return the newest tail in a table's folder with the number of its part; None without one."""
    found = max(folder.glob(f"{PREFIX}*{SUFFIX}"), default=None)
    return None if found is None else (int(found.stem.removeprefix(PREFIX)), found)


class Tail:
    """A file of pending rows. Each append reaches the operating system before it returns, so that a
    killed process loses no row.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        self._file = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._file, schema)

    def append(self, rows: pa.Table) -> None:
        """Append rows of the schema."""
        self._stream.write_table(rows)

    def leave(self) -> None:
        """Close the file and keep it."""
        self._stream.close()
        self._file.close()

    def drop(self) -> None:
        """Close the file and remove it, because the part exists."""
        self.leave()
        self._path.unlink(missing_ok=True)


def read_tail(path: Path, schema: pa.Schema) -> pa.Table:
    """Return the rows of a tail up to the last whole append. A half-written append is left out.

    Raise FileNotFoundError if the tail does not exist any more, because its part exists.
    """
    data = path.read_bytes()
    batches: list[pa.RecordBatch] = []
    try:
        with pa.ipc.open_stream(pa.BufferReader(data)) as stream:
            for batch in stream:
                batches.append(batch)  # noqa: PERF402 - whole batches before a truncated one are kept
    except (pa.ArrowInvalid, OSError, EOFError):
        pass
    return pa.Table.from_batches(batches, schema)


FORMAT = "zlab-recording/1"
ALIVE_SUFFIX = ".arrows"
MOST_MANIFEST_BYTES = 100_000_000
MOST_ROWS = 200_000_000  # most rows of one table that are read
MOST_TEXT_BYTES = 1_000_000_000  # most text of one column of one part that is read
# whole numbers of the requests table that may be missing
MAY_BE_NULL = frozenset({"max_tokens", "asked_output_tokens"})
MOST_ALIVE_FILES = 2  # the newest one, and the one that a reader may be about to open
Columns = Mapping[str, npt.NDArray[Any] | Sequence[Any]]


class RecordingError(TraceError):
    """A recording cannot be read. The message names the file and the fault."""


TABLES: dict[str, pa.Schema] = {
    table: pa.schema([(name, pa.type_for_alias(column.type)) for name, column in columns.items()])
    for table, columns in schema.TABLES.items()
}


class Recorder(Protocol):
    """What a driver writes a run to, table by table, while the run goes on."""

    def write(self, table: str, columns: Columns) -> None:
        """Append rows to a table of `TABLES`. Every column must be given, all of one length."""

    def checkpoint(self, alive: Columns | None = None, **manifest: Any) -> None:
        """Make all rows so far readable, and update the manifest.

        `alive` holds the columns of the `requests` table for requests that have not ended.
        """

    def leave(self) -> None:
        """Close open files. The rows so far stay as they are."""

    def close(self, **manifest: Any) -> None:
        """End the run: write the remaining rows and the final manifest."""


def to_table(table: str, columns: Columns) -> pa.Table:
    """Return columns as an Arrow table of the table's schema. Raise RecordingError on a missing or
    unknown column.
    """
    schema = TABLES[table]
    if set(columns) != set(schema.names):
        odd = sorted(set(columns) ^ set(schema.names))
        raise RecordingError(f"table {table!r}: columns missing or unknown: {', '.join(odd)}")
    return pa.table(
        [pa.array(columns[name], type=schema.field(name).type) for name in schema.names],
        schema=schema,
    )


@dataclass
class MemoryRecorder:
    """Keeps a run in memory. `skip` names tables that are not kept (block changes can be many)."""

    manifest: dict[str, Any] = field(default_factory=dict)
    skip: frozenset[str] = frozenset()
    _parts: dict[str, list[pa.Table]] = field(default_factory=lambda: {name: [] for name in TABLES})

    def write(self, table: str, columns: Columns) -> None:
        """Append rows."""
        if table not in self.skip:
            self._parts[table].append(to_table(table, columns))

    def checkpoint(self, alive: Columns | None = None, **manifest: Any) -> None:
        """Update the manifest."""
        self.manifest |= manifest

    def leave(self) -> None:
        """Do nothing: there are no open files."""

    def close(self, **manifest: Any) -> None:
        """Update the manifest for the last time."""
        self.manifest |= {"format": FORMAT, "complete": True} | manifest

    def table(self, name: str) -> pa.Table:
        """Return one table of the run so far."""
        return pa.concat_tables([TABLES[name].empty_table(), *self._parts[name]])


class FolderRecorder:
    """Writes a run into a new folder. Parts of about `rows_per_part` rows appear while the run goes
    on.
    """

    def __init__(
        self, folder: Path, manifest: Mapping[str, Any], rows_per_part: int = 500_000
    ) -> None:
        """Create the folder with its manifest.

        Args:
            folder: Path of a folder that is empty or does not exist.
            manifest: First entries of the manifest.
            rows_per_part: Rows after which a part is written.

        Raises:
            RecordingError: The folder is not empty.
        """
        if folder.exists() and any(folder.iterdir()):
            raise RecordingError(
                f"{folder}: the folder is not empty; a recording needs one of its own"
            )
        self.folder = folder
        self.manifest: dict[str, Any] = {"format": FORMAT, "complete": False, **manifest}
        self._rows_per_part = rows_per_part
        self._pending: dict[str, list[pa.Table]] = {name: [] for name in TABLES}
        self._tails: dict[str, Tail] = {}
        # number of pending tables that are already in the tail
        self._num_in_tail = dict.fromkeys(TABLES, 0)
        self._rows = dict.fromkeys(TABLES, 0)
        self._rows_in_parts = dict.fromkeys(TABLES, 0)
        self._alive: list[int] = []  # numbers of the existing files of live requests
        self._num_parts = dict.fromkeys(TABLES, 0)
        for name in TABLES:
            (folder / name).mkdir(parents=True, exist_ok=True)
        write_manifest(folder, self.manifest)

    def write(self, table: str, columns: Columns) -> None:
        """Append rows. A part is written when enough rows are pending."""
        rows = to_table(table, columns)
        self._pending[table].append(rows)
        self._rows[table] += rows.num_rows
        if self._rows[table] >= self._rows_per_part:
            self.flush(table)

    def flush(self, table: str) -> None:
        """Write pending rows as one part. The file appears under its name only when it is whole."""
        if not self._rows[table]:
            return
        rows = pa.concat_tables(self._pending[table])
        target = self.folder / table / f"{self._num_parts[table]:05}.parquet"
        unfinished = target.with_suffix(".unfinished")
        pq.write_table(
            rows,
            unfinished,
            compression="zstd",
            compression_level=1,
            use_dictionary=table == "requests",
        )
        os.replace(unfinished, target)
        tail = self._tails.pop(table, None)
        if tail is not None:
            tail.drop()
        self._num_parts[table] += 1
        self._rows_in_parts[table] += self._rows[table]
        self._pending[table].clear()
        self._rows[table] = self._num_in_tail[table] = 0

    def checkpoint(self, alive: Columns | None = None, **manifest: Any) -> None:
        """Append pending rows to the tails. Then write the number of rows of each table to the
        manifest.
        """
        for table, pending in self._pending.items():
            for rows in pending[self._num_in_tail[table] :]:
                if table not in self._tails:
                    self._tails[table] = Tail(
                        tail_path(self.folder / table, self._num_parts[table]), TABLES[table]
                    )
                self._tails[table].append(rows)
            self._num_in_tail[table] = len(pending)
        counts = {table: self._rows_in_parts[table] + self._rows[table] for table in TABLES}
        self.manifest |= manifest | {"rows": counts}
        if alive is not None:
            self._write_alive(alive)
        write_manifest(self.folder, self.manifest)
        self._forget_alive(keep=MOST_ALIVE_FILES)

    def _write_alive(self, alive: Columns) -> None:
        """Write a new file at each checkpoint, so that a reader of an earlier manifest still finds
        the file that it names.
        """
        number = self._alive[-1] + 1 if self._alive else 0
        path = self.folder / f"alive-{number}{ALIVE_SUFFIX}"
        file = Tail(path, TABLES["requests"])
        file.append(to_table("requests", alive))
        file.leave()
        self._alive.append(number)
        self.manifest["alive"] = path.name

    def _forget_alive(self, keep: int) -> None:
        while len(self._alive) > keep:
            (self.folder / f"alive-{self._alive.pop(0)}{ALIVE_SUFFIX}").unlink(missing_ok=True)

    def leave(self) -> None:
        """Close the tails. The recording stays as of its last checkpoint."""
        for tail in self._tails.values():
            tail.leave()
        self._tails.clear()

    def close(self, **manifest: Any) -> None:
        """Write the remaining rows, then the manifest. `complete` is true unless the caller sets
        it.
        """
        for table in TABLES:
            self.flush(table)
        for name in ("rows", "alive"):
            self.manifest.pop(name, None)
        self.manifest |= {"complete": True} | manifest
        write_manifest(self.folder, self.manifest)
        self._forget_alive(keep=0)


def package_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and of the installed packages, in the form of a manifest."""

    def found(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    return {name: found(name) for name in packages} | {"python": platform.python_version()}


def run_manifest(
    *,
    source: str,
    policy: Mapping[str, str],
    gpu: str,
    model: str,
    limits: Mapping[str, int],
    cost: Mapping[str, Any],
    packages: Sequence[str],
    length_multiplier: float = 1.0,
) -> dict[str, Any]:
    """Return the manifest entries that every run has, of the simulator and of the engine.

    Args:
        source: "sim" or "engine".
        policy: The policy's entries: `policy`, `policy_toml`, `policy_digest`.
        gpu: Name of the GPU.
        model: Name of the model.
        limits: Limits of the scheduler, by field.
        cost: Source of the times.
        packages: Packages whose versions are noted.
        length_multiplier: Multiplier of the outputs of compressed requests.
    """
    return {
        "source": source,
        **policy,
        "gpu": gpu,
        "model": model,
        "limits": dict(limits),
        "num_blocks": limits["num_blocks"],
        "block_size": limits["block_size"],
        "cost": dict(cost),
        "length_multiplier": length_multiplier,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": package_versions(packages),
        **schema.manifest_names(),
    }


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the manifest atomically."""
    unfinished = folder / "manifest.unfinished"
    unfinished.write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    os.replace(unfinished, folder / "manifest.json")


class Recording:
    """A recording that is read back. Tables are read on access.

    For a run that still goes on, all tables show the state at the time of construction: up to the
    checkpoint that the manifest names, or, without checkpoints, the parts that existed.
    """

    def __init__(self, folder: Path | str) -> None:
        """Open a recording. Raise RecordingError if the folder is not a recording of a known
        version.
        """
        self.folder = Path(folder)
        path = self.folder / "manifest.json"
        if not path.is_file():
            raise RecordingError(f"{self.folder}: not a recording: it has no manifest.json")
        try:
            if path.stat().st_size > MOST_MANIFEST_BYTES:
                raise RecordingError(
                    f"{path}: has {path.stat().st_size / 1e6:,.0f} MB, at most "
                    f"{MOST_MANIFEST_BYTES / 1e6:,.0f} MB are read"
                )
            self.manifest: dict[str, Any] = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise RecordingError(f"{path}: cannot be read: {error}") from error
        except RecordingError:
            raise
        except (ValueError, RecursionError) as error:
            raise RecordingError(f"{path}: not valid JSON: {error}") from error
        version = self.manifest.get("format") if isinstance(self.manifest, dict) else None
        if version != FORMAT:
            raise RecordingError(
                f"{path}: format {version!r} is not one this version reads ({FORMAT})"
            )
        rows, alive = self.manifest.get("rows"), self.manifest.get("alive")
        if rows is not None and not (
            isinstance(rows, dict) and all(type(n) is int and n >= 0 for n in rows.values())
        ):
            raise RecordingError(f"{path}: 'rows' must give a number of rows for each table")
        if alive is not None and not re.fullmatch(r"alive-\d+\.arrows", str(alive)):
            raise RecordingError(f"{path}: 'alive' is no name of a file of a recording")
        self._parts: dict[str, list[Path]] | None = None
        if not self.complete and "rows" not in self.manifest:
            self._parts = {table: self._parts_now(table) for table in TABLES}

    @property
    def complete(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.manifest.get("complete"))

    def parts(self, table: str) -> list[Path]:
        """Return the table's parts, in order."""
        return self._parts_now(table) if self._parts is None else self._parts[table]

    def _parts_now(self, table: str) -> list[Path]:
        return sorted((self.folder / table).glob("*.parquet"))

    def table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Return one table, or some of its columns. For a run that still goes on, the rows are
        those of the last checkpoint.

        Raise RecordingError, which names the part that cannot be read.
        """
        schema = TABLES[name]
        wanted = schema.names if columns is None else columns
        empty = pa.schema([schema.field(column) for column in wanted]).empty_table()
        return pa.concat_tables([empty, *self.pieces(name, columns)])

    def pieces(
        self, name: str, columns: Sequence[str] | None = None, skip: int = 0
    ) -> Iterator[pa.Table]:
        """Yield the rows of `table` in order, part by part, so that not all are in memory at once.

        Args:
            name: Table of `TABLES`.
            columns: Columns that are read; all by default.
            skip: Rows at the beginning that are left out; parts with no other rows are not read.

        Raises:
            RecordingError: A part cannot be read, or the table has too many rows.
        """
        schema = TABLES[name]
        wanted = list(columns) if columns is not None else schema.names
        target = pa.schema([schema.field(column) for column in wanted])
        rows = self.manifest.get("rows")
        end = MOST_ROWS if rows is None else rows.get(name, 0)
        tail, parts = self._tail(name), self.parts(name)
        at = 0
        for part in parts:
            count = num_rows(part)
            if rows is None and at + count > MOST_ROWS:
                raise RecordingError(f"{part}: table {name!r} has more than {MOST_ROWS:,} rows")
            if at + count > skip and at < end:
                found = _read_part(part, wanted, target)
                yield found.slice(max(skip - at, 0), max(end - max(at, skip), 0))
            at += count
        if tail is not None and len(parts) == tail[0] and at < end:
            found = tail[1].select(wanted)
            yield found.slice(max(skip - at, 0), max(end - max(at, skip), 0))
        if rows is not None and name == "requests":
            yield self._alive().select(wanted)

    def _tail(self, name: str) -> tuple[int, pa.Table] | None:
        """Return the table's tail with the number of parts before it; None without one. The tail is
        read before the parts.
        """
        while (found := find_tail(self.folder / name)) is not None:
            try:
                return found[0], read_tail(found[1], TABLES[name])
            except FileNotFoundError:
                continue  # it has just become a part
            except OSError as error:
                raise RecordingError(f"{found[1]}: cannot be read: {error}") from error
        return None

    def _alive(self) -> pa.Table:
        """Return the requests that had not ended at the last checkpoint."""
        name, schema = self.manifest.get("alive"), TABLES["requests"]
        if name is None:
            return schema.empty_table()
        try:
            return read_tail(self.folder / name, schema)
        except FileNotFoundError:
            return schema.empty_table()  # a newer checkpoint was written in the meantime
        except OSError as error:
            raise RecordingError(f"{self.folder / name}: cannot be read: {error}") from error


def num_rows(part: Path) -> int:
    """Return the number of rows that a part's metadata gives. Raise RecordingError."""
    try:
        return int(pq.read_metadata(part).num_rows)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RecordingError(f"{part}: cannot be read: {error}") from error


def _read_part(part: Path, wanted: list[str], schema: pa.Schema) -> pa.Table:
    """Read columns of a part.

    A few bytes of Parquet can represent any number of rows and texts of any length. Rows are
    therefore counted before they are read, and texts are read as a dictionary whose total size is
    checked.
    """
    rows = num_rows(part)
    if rows > MOST_ROWS:
        raise RecordingError(f"{part}: has {rows:,} rows, at most {MOST_ROWS:,} are read")
    texts = [field.name for field in schema if pa.types.is_string(field.type)]
    try:
        found = pq.read_table(part, columns=wanted, read_dictionary=texts)
        for name in texts:
            length = sum(map(_text_bytes, found[name].chunks))
            if length > MOST_TEXT_BYTES:
                raise RecordingError(
                    f"{part}: column {name!r} has {length / 1e6:,.0f} MB of text, at most "
                    f"{MOST_TEXT_BYTES / 1e6:,.0f} MB are read"
                )
        for field in schema:
            needed = pa.types.is_integer(field.type) and field.name not in MAY_BE_NULL
            if needed and found[field.name].null_count:
                raise RecordingError(f"{part}: column {field.name!r} has a row without a number")
        return found.cast(schema)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        if isinstance(error, RecordingError):
            raise
        raise RecordingError(f"{part}: cannot be read: {error}") from error


def _text_bytes(column: pa.Array) -> int:
    """Return the bytes that the texts of a column have without a dictionary."""
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    lengths = pc.binary_length(column.dictionary)
    return int(pc.sum(pc.take(lengths, column.indices)).as_py() or 0)


@dataclass(frozen=True)
class Difference:
    """The first row in which two runs' events differ. A side that ended earlier has None."""

    index: int
    step: int
    left: dict[str, int] | None
    right: dict[str, int] | None


def first_difference(left: pa.Table, right: pa.Table) -> Difference | None:
    """Compare two tables of events row by row. Return None if they are the same."""
    shorter = min(left.num_rows, right.num_rows)
    differs = np.zeros(shorter, dtype=bool)
    for name in TABLES["events"].names:
        differs |= left[name].to_numpy()[:shorter] != right[name].to_numpy()[:shorter]
    index = int(np.argmax(differs)) if differs.any() else shorter
    if index == left.num_rows == right.num_rows:
        return None
    rows = [table.slice(index, 1).to_pylist() for table in (left, right)]
    one, other = (found[0] if found else None for found in rows)
    step = min(row["step"] for row in (one, other) if row is not None)
    return Difference(index, step, one, other)


class TornLineWarning(UserWarning):
    """The last line of a file was left out, because its writer was stopped while it wrote the
    line.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        super().__init__(
            f"{path}: its last line ends after {num_bytes} bytes, because its writer was stopped: "
            f"left out"
        )


FILE = "asked.jsonl"  # line i is request number i as it was submitted
KNOWN = frozenset(item.name for item in fields(TraceRequest))


class AskedFile:
    """Writes requests as they are submitted, one for each line."""

    def __init__(self, folder: Path) -> None:
        self._file: io.TextIOWrapper = (folder / FILE).open("w", encoding="utf-8")

    def write(self, request: TraceRequest) -> None:
        """Append one request."""
        self._file.write(request_to_line(request))

    def flush(self) -> None:
        """Hand all lines to the operating system, so that a killed process loses none."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_asked(folder: Path | str) -> Sequence[TraceRequest]:
    """Return the requests of a recording by number. Raise RecordingError if there are none or they
    cannot be read.

    A truncated last line is left out with a `TornLineWarning`.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise RecordingError(
            f"{folder}: has no {FILE}: only a recording of the engine has the submitted requests"
        )
    found = []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        warnings.warn(TornLineWarning(path, len(data) - len(whole)), stacklevel=2)
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
            unknown = row.keys() - KNOWN
            if unknown:
                raise ValueError(f"unknown field {min(unknown)!r}")
            values: dict[str, Any] = {
                name: tuple(value) if name in IDS_FIELDS and value is not None else value
                for name, value in row.items()
            }
            found.append(TraceRequest(**values))
        except (ValueError, TypeError, AttributeError) as error:
            raise RecordingError(f"{path}:{number}: {error}") from error
    return found


ALSO_IN_SUMMARY = ("digest", "wall_s", "policy", "workload_sha256")


class TableSource(Protocol):
    """The tables of a run, in memory or in a folder."""

    manifest: dict[str, Any]

    def table(self, name: str) -> pa.Table:
        """Return one table of `zlab.traces.recording.TABLES`."""


def refusals(requests: pa.Table) -> list[dict[str, Any]]:
    """Return the reasons of refused requests in a `requests` table, as `Run.refusals` does."""
    found: dict[str, dict[str, Any]] = {}
    for row in requests.select(["id", "status", "reason", "message"]).to_pylist():
        if row["status"] == "refused":
            first = {"id": row["id"], "message": row["message"]}
            entry = {"reason": row["reason"], "requests": 0, "first": first}
            found.setdefault(row["reason"], entry)["requests"] += 1
    return list(found.values())


class Run:
    """A run: `manifest`, `summary` (keys as in docs/METRICS.md) and the tables of its recording.

    Tables are Arrow tables: `run.requests.to_pandas()` converts one to pandas.
    """

    def __init__(self, source: TableSource) -> None:
        self._source = source

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The source of the run, and how it ended."""
        return self._source.manifest

    @cached_property
    def requests(self) -> pa.Table:
        """One row for each request, in the order in which they ended."""
        return self._source.table("requests")

    @cached_property
    def steps(self) -> pa.Table:
        """One row for each step."""
        return self._source.table("steps")

    @cached_property
    def events(self) -> pa.Table:
        """One row for each event of the scheduler."""
        return self._source.table("events")

    @cached_property
    def blocks(self) -> pa.Table:
        """One row for each change of a block."""
        return self._source.table("blocks")

    @cached_property
    def reports(self) -> pa.Table:
        """One row for each block whose state changed without a decision; the digest does not cover
        them.
        """
        return self._source.table("reports")

    @cached_property
    def causes(self) -> pa.Table:
        """One row for each decision against a request, with its cause; the digest does not cover
        them.
        """
        return self._source.table("causes")

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """The metrics of the run."""
        figures = summarize(self.requests, self.steps, self.manifest)
        return figures | {name: self.manifest[name] for name in ALSO_IN_SUMMARY}

    @cached_property
    def refusals(self) -> list[dict[str, Any]]:
        """Each reason for which requests were refused: `reason`, the number of `requests`, and the
        id and message of the `first` one.
        """
        return refusals(self.requests)

    def conditions(self) -> dict[str, Any]:
        """Return the settings of the run and the requests that it refused, as plain JSON."""
        names = ("gpu", "model", "limits")
        return {name: self.manifest[name] for name in names} | {"refusals": self.refusals}

    def _repr_html_(self) -> str:
        """Return the run as two HTML tables for a notebook: single metrics, and distributions with
        a column for each percentile.
        """
        manifest, summary = self.manifest, self.summary
        title = (
            f"{manifest['policy']}: {manifest['gpu']}, {manifest['model']}, "
            f"{manifest['num_blocks']:,} blocks of "
        )
        title += f"{manifest['block_size']} tokens" + (
            "" if manifest.get("complete", True) else " (incomplete)"
        )
        single = {name: value for name, value in summary.items() if not isinstance(value, Mapping)}
        spread = {name: value for name, value in summary.items() if isinstance(value, Mapping)}
        marks = list(next(iter(spread.values()), {}))
        head = "".join(f"<th>{escape(mark)}</th>" for mark in ("", *marks))
        return (
            f"<b>{escape(title)}</b><table>{''.join(_row(name, [value]) for name, value in single.items())}</table>"
            f"<table><tr>{head}</tr>"
            f"{''.join(_row(name, [value[mark] for mark in marks]) for name, value in spread.items())}</table>"
        )


def load_run(folder: Path | str) -> Run:
    """Open a recording as a run. Raise RecordingError."""
    return Run(Recording(folder))


def _row(name: str, values: Sequence[Any]) -> str:
    cells = "".join(f"<td style='text-align:right'>{escape(_show(value))}</td>" for value in values)
    return f"<tr><th style='text-align:left'>{escape(name)}</th>{cells}</tr>"


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)

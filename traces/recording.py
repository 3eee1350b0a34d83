"""A run on disk: what was asked, what every step did, what became of each request and each block.

A recording is a folder (format `zlab-recording/1`):

* `manifest.json`: where it comes from (policy and its changes, limits, workload hash, seed, versions, cost model), its
  digest and summary, and `complete`: whether the run came to its end.
* `requests/`, `steps/`, `events/`, `blocks/`: Parquet parts `00000.parquet`, `00001.parquet`, ...; every part is a
  whole file, so that a run that is still going on, or was killed, can be read up to its last part. pandas, DuckDB and
  Polars read the folders as they are.
* A live run is written down every second or so (`checkpoint`): rows for which a part is too early stand in the table's
  tail (`traces/tail.py`), requests that were alive in the file that `alive` names, and `rows` in the manifest counts
  what belongs together at that moment. Whoever reads sees all tables as they stood at the last checkpoint. A run that
  came to its end has none of these.

Columns are described in `TABLES`. This room knows nothing of policies: kinds and states are plain numbers here, their
names stand in the manifest.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from traces.tail import Tail, find_tail, read_tail, tail_path
from traces.workload import TraceError

FORMAT = "zlab-recording/1"
ALIVE_SUFFIX = ".arrows"
MOST_ALIVE_FILES = 2  # the newest, and the one that a reader may be about to open
Columns = Mapping[str, npt.NDArray[Any] | Sequence[Any]]


class RecordingError(TraceError):
    """A recording that cannot be read; the message names the file and what is wrong with it."""


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(list(columns.items()))


I64, I32, I8, F64, STR = pa.int64(), pa.int32(), pa.int8(), pa.float64(), pa.string()

TABLES: dict[str, pa.Schema] = {
    # One row a request, in the order in which they ended (those still alive last). Times in seconds from the run's
    # start, NaN where the moment never came; *_s of phases are durations and add up to finish_s - arrival_s.
    "requests": _schema(
        number=I64, id=STR, status=STR, reason=STR, message=STR, session=STR, cls=STR, priority=I32,
        arrival_s=F64, arrival_step=I64, finish_step=I64,
        prompt_tokens=I64, max_tokens=I64, output_tokens=I64, asked_output_tokens=I64,
        first_admitted_s=F64, first_token_s=F64, finish_s=F64,
        queued_s=F64, prefill_s=F64, decode_s=F64, slot_wait_s=F64, block_wait_s=F64, compressing_s=F64,
        preempted_s=F64, swapped_s=F64, paused_s=F64,
        prefix_hit_tokens=I64, recomputed_tokens=I64, preemptions=I32, swaps=I32, compressions=I32,
    ),
    # One row a step. Counts hold while the step runs; `free_blocks` includes `cached_blocks`.
    "steps": _schema(
        step=I64, start_s=F64, end_s=F64, output_tokens=I32, decodes=I32, context_tokens=I64, prefills=I32,
        prefill_tokens=I32, prefill_pairs=I64, compressions=I32, compressing=I32, swaps=I32, preemptions=I32,
        running=I32, waiting=I32,
        waiting_for_slot=I32, waiting_for_block=I32, free_blocks=I32, cached_blocks=I32, shared_extra=I32,
        stored_tokens=I64,
    ),
    # One row an event of the scheduler, in order; the digest is over these.
    "events": _schema(step=I64, kind=I8, request=I64, value=I64, num_blocks=I32),
    # One row a change of one block, in order: from `step` on it is in `state`, by the doing of `request`.
    "blocks": _schema(step=I64, block=I32, state=I8, kind=I8, request=I64),
}  # fmt: skip


class Recorder(Protocol):
    """What a driver writes a run to, table by table, as it goes."""

    def write(self, table: str, columns: Columns) -> None:
        """Append rows to a table of `TABLES`; every column must be there, all of one length."""

    def checkpoint(self, alive: Columns | None = None, **manifest: Any) -> None:
        """Make everything written so far readable, and note how far the run has come.

        `alive`: columns of the `requests` table of those that have not ended.
        """

    def leave(self) -> None:
        """Let go of open files; what was written stays as it is."""

    def close(self, **manifest: Any) -> None:
        """The run is over: write what is left and the final manifest."""


def to_table(table: str, columns: Columns) -> pa.Table:
    """Columns as an Arrow table of the table's schema. Raises RecordingError on a missing or unknown column."""
    schema = TABLES[table]
    if set(columns) != set(schema.names):
        odd = sorted(set(columns) ^ set(schema.names))
        raise RecordingError(f"table {table!r}: columns missing or unknown: {', '.join(odd)}")
    return pa.table([pa.array(columns[name], type=schema.field(name).type) for name in schema.names], schema=schema)


@dataclass
class MemoryRecorder:
    """Keeps a run in memory; `skip` names tables that are dropped (block changes can be many)."""

    manifest: dict[str, Any] = field(default_factory=dict)
    skip: frozenset[str] = frozenset()
    _parts: dict[str, list[pa.Table]] = field(default_factory=lambda: {name: [] for name in TABLES})

    def write(self, table: str, columns: Columns) -> None:
        """Append rows."""
        if table not in self.skip:
            self._parts[table].append(to_table(table, columns))

    def checkpoint(self, alive: Columns | None = None, **manifest: Any) -> None:
        """Note how far the run has come."""
        self.manifest |= manifest

    def leave(self) -> None:
        """Nothing to let go of."""

    def close(self, **manifest: Any) -> None:
        """Note the final manifest."""
        self.manifest |= {"format": FORMAT, "complete": True} | manifest

    def table(self, name: str) -> pa.Table:
        """One table of the run so far."""
        return pa.concat_tables([TABLES[name].empty_table(), *self._parts[name]])


class FolderRecorder:
    """Writes a run into a new folder; parts of about `rows_per_part` rows appear as the run goes on."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any], rows_per_part: int = 500_000) -> None:
        """Raise RecordingError when the folder already holds something."""
        if folder.exists() and any(folder.iterdir()):
            raise RecordingError(f"{folder}: the folder is not empty; a recording needs one of its own")
        self.folder = folder
        self.manifest: dict[str, Any] = {"format": FORMAT, "complete": False, **manifest}
        self._rows_per_part = rows_per_part
        self._pending: dict[str, list[pa.Table]] = {name: [] for name in TABLES}
        self._tails: dict[str, Tail] = {}
        self._num_in_tail = dict.fromkeys(TABLES, 0)  # of the pending tables
        self._rows = dict.fromkeys(TABLES, 0)
        self._rows_in_parts = dict.fromkeys(TABLES, 0)
        self._alive: list[int] = []  # numbers of the files of live requests that are there
        self._num_parts = dict.fromkeys(TABLES, 0)
        for name in TABLES:
            (folder / name).mkdir(parents=True, exist_ok=True)
        write_manifest(folder, self.manifest)

    def write(self, table: str, columns: Columns) -> None:
        """Append rows; a part is written when enough have come together."""
        rows = to_table(table, columns)
        self._pending[table].append(rows)
        self._rows[table] += rows.num_rows
        if self._rows[table] >= self._rows_per_part:
            self.flush(table)

    def flush(self, table: str) -> None:
        """Write pending rows as one part, under a name that only appears once it is whole."""
        if not self._rows[table]:
            return
        rows = pa.concat_tables(self._pending[table])
        target = self.folder / table / f"{self._num_parts[table]:05}.parquet"
        unfinished = target.with_suffix(".unfinished")
        pq.write_table(rows, unfinished, compression="zstd", compression_level=1, use_dictionary=table == "requests")
        os.replace(unfinished, target)
        tail = self._tails.pop(table, None)
        if tail is not None:
            tail.drop()
        self._num_parts[table] += 1
        self._rows_in_parts[table] += self._rows[table]
        self._pending[table].clear()
        self._rows[table] = self._num_in_tail[table] = 0

    def checkpoint(self, alive: Columns | None = None, **manifest: Any) -> None:
        """Append pending rows to the tails, then say in the manifest how many rows belong together."""
        for table, pending in self._pending.items():
            for rows in pending[self._num_in_tail[table] :]:
                if table not in self._tails:
                    self._tails[table] = Tail(tail_path(self.folder / table, self._num_parts[table]), TABLES[table])
                self._tails[table].append(rows)
            self._num_in_tail[table] = len(pending)
        counts = {table: self._rows_in_parts[table] + self._rows[table] for table in TABLES}
        self.manifest |= manifest | {"rows": counts}
        if alive is not None:
            self._write_alive(alive)
        write_manifest(self.folder, self.manifest)
        self._forget_alive(keep=MOST_ALIVE_FILES)

    def _write_alive(self, alive: Columns) -> None:
        """A file of its own for each checkpoint, so that whoever has read the manifest before finds what it names."""
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
        """Nothing more will be written: the recording stays as its last checkpoint has it."""
        for tail in self._tails.values():
            tail.leave()
        self._tails.clear()

    def close(self, **manifest: Any) -> None:
        """Write what is left, then the manifest; `complete` is true unless the caller says otherwise."""
        for table in TABLES:
            self.flush(table)
        for name in ("rows", "alive"):
            self.manifest.pop(name, None)
        self.manifest |= {"complete": True} | manifest
        write_manifest(self.folder, self.manifest)
        self._forget_alive(keep=0)


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the manifest in one move."""
    unfinished = folder / "manifest.unfinished"
    unfinished.write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    os.replace(unfinished, folder / "manifest.json")


class Recording:
    """A recording read back; tables are read when asked for."""

    def __init__(self, folder: Path | str) -> None:
        """Raise RecordingError when the folder is not a recording of a known version."""
        self.folder = Path(folder)
        path = self.folder / "manifest.json"
        if not path.is_file():
            raise RecordingError(f"{self.folder}: not a recording: it has no manifest.json")
        try:
            self.manifest: dict[str, Any] = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise RecordingError(f"{path}: not valid JSON: {error}") from error
        version = self.manifest.get("format") if isinstance(self.manifest, dict) else None
        if version != FORMAT:
            raise RecordingError(f"{path}: format {version!r} is not one this version reads ({FORMAT})")

    @property
    def complete(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.manifest.get("complete"))

    def parts(self, table: str) -> list[Path]:
        """The table's parts, in order."""
        return sorted((self.folder / table).glob("*.parquet"))

    def table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """One table, or some of its columns; of a run that is still written, as it stood at its last checkpoint.

        Raises RecordingError naming a part that cannot be read.
        """
        schema = TABLES[name]
        wanted = list(columns) if columns is not None else schema.names
        tables = [pa.schema([schema.field(column) for column in wanted]).empty_table()]
        tail = self._tail(name)
        for part in self.parts(name):
            try:
                tables.append(pq.read_table(part, columns=wanted).cast(tables[0].schema))
            except (pa.ArrowException, OSError, ValueError, KeyError) as error:
                raise RecordingError(f"{part}: cannot be read: {error}") from error
        if tail is not None and len(tables) - 1 == tail[0]:
            tables.append(tail[1].select(wanted))
        found = pa.concat_tables(tables)
        rows = self.manifest.get("rows")
        if rows is None:
            return found
        found = found.slice(0, rows[name])
        return found if name != "requests" else pa.concat_tables([found, self._alive().select(wanted)])

    def _tail(self, name: str) -> tuple[int, pa.Table] | None:
        """The table's tail with the number of parts that come before it, read before they are; None without one."""
        while (found := find_tail(self.folder / name)) is not None:
            try:
                return found[0], read_tail(found[1], TABLES[name])
            except FileNotFoundError:
                continue  # it has just become a part
            except OSError as error:
                raise RecordingError(f"{found[1]}: cannot be read: {error}") from error
        return None

    def _alive(self) -> pa.Table:
        """Requests that were alive at the last checkpoint."""
        name, schema = self.manifest.get("alive"), TABLES["requests"]
        if name is None:
            return schema.empty_table()
        try:
            return read_tail(self.folder / name, schema)
        except FileNotFoundError:
            return schema.empty_table()  # a newer checkpoint has come while this one was being read
        except OSError as error:
            raise RecordingError(f"{self.folder / name}: cannot be read: {error}") from error


@dataclass(frozen=True)
class Difference:
    """The first row in which two runs' events differ; a side that ended earlier has None."""

    index: int
    step: int
    left: dict[str, int] | None
    right: dict[str, int] | None


def first_difference(left: pa.Table, right: pa.Table) -> Difference | None:
    """Compare two tables of events row by row; None if they are the same."""
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

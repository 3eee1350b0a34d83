"""Which recordings there are, and what a view needs of one: pure reading, no page."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dashboard.figures.occupancy import Marks
from traces.moments import event_times, read_names, step_times
from traces.recording import TABLES, Recording, RecordingError

DEPTH = 4  # folders below a root in which recordings are looked for
MOST = 400  # recordings listed, the newest
Stamp = tuple[tuple[str, int, int], ...]
SWEEP_SUFFIXES = (".csv", ".parquet")
SWEEP_NEEDS = {"tokens_per_s", "makespan_s", "error"}  # columns by which a table of `zlab sweep` is known


@dataclass(frozen=True)
class Source:
    """A recording's folder, and what it is called on the page."""

    label: str
    folder: str


def find_recordings(roots: Sequence[Path]) -> list[Source]:
    """Folders with a manifest below the roots, newest first; whether they can be read shows when they are opened."""
    found: dict[str, tuple[int, Source]] = {}
    for root in roots:
        for folder in _folders(root, DEPTH):
            manifest = folder / "manifest.json"
            if manifest.is_file():
                label = folder.relative_to(root).as_posix() if folder != root else root.name
                if label in found:
                    label = folder.as_posix()
                found[label] = (_changed(manifest), Source(label, str(folder)))
    newest = sorted(found.values(), key=lambda item: (-item[0], item[1].label))
    return [source for _, source in newest[:MOST]]


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    """The folder and those below it, not into recordings."""
    if not folder.is_dir():
        return
    yield folder
    if depth and not (folder / "manifest.json").is_file():
        try:
            below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        except OSError:
            return
        for path in below:
            yield from _folders(path, depth - 1)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def stamp(folder: str) -> Stamp:
    """Changes whenever the recording does: name, size and time of each of its files."""
    found = []
    for entry in [
        Path(folder) / "manifest.json",
        *(p for table in TABLES for p in sorted((Path(folder) / table).glob("*.parquet"))),
    ]:
        try:
            status = entry.stat()
        except OSError:
            continue
        found.append((os.fspath(entry), status.st_size, status.st_mtime_ns))
    return tuple(found)


def read_marks(recording: Recording) -> Marks:
    """When requests were preempted and compressions began."""
    names = read_names(recording.manifest)
    events = recording.table("events", ("step", "kind", "request"))
    moments = event_times(events, step_times(recording.table("steps", ("step", "start_s", "end_s"))), names)
    kind = events["kind"].to_numpy()
    return Marks(moments[kind == names.kinds.get("preempted")], moments[kind == names.kinds.get("compressing")])


def request_frame(table: pa.Table) -> pd.DataFrame:
    """The `requests` table for a reader: by number, with the latencies that matter."""
    frame = table.to_pandas().sort_values("number", kind="stable").reset_index(drop=True)
    frame["ttft_s"] = frame["first_token_s"] - frame["arrival_s"]
    frame["e2e_s"] = np.where(frame["status"] == "finished", frame["finish_s"] - frame["arrival_s"], np.nan)
    frame["blocked_s"] = frame["slot_wait_s"] + frame["block_wait_s"] + frame["paused_s"]
    return frame


def find_sweeps(roots: Sequence[Path]) -> list[Path]:
    """Tables that `zlab sweep --out` wrote below the roots, newest first."""
    found = []
    for root in roots:
        for folder in _folders(root, DEPTH):
            found += [path for path in sorted(folder.glob("*")) if path.suffix in SWEEP_SUFFIXES and _is_sweep(path)]
    return sorted(found, key=lambda path: -_changed(path))[:MOST]


def _is_sweep(path: Path) -> bool:
    try:
        if path.suffix == ".parquet":
            columns = set(pq.read_schema(path).names)
        else:
            with path.open(encoding="utf-8") as file:
                columns = {cell.strip('"') for cell in file.readline(100_000).rstrip("\n").split(",")}
    except (OSError, ValueError, pa.ArrowException):
        return False
    return columns >= SWEEP_NEEDS


def read_sweep(path: Path) -> tuple[pd.DataFrame, list[str], list[str]]:
    """(rows, swept parameters, figures) of a sweep's table: parameters stand before the run's figures.

    Raises RecordingError when the table cannot be read.
    """
    try:
        rows = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise RecordingError(f"{path}: cannot be read: {error}") from error
    columns = list(rows.columns)
    first = min((columns.index(name) for name in ("policy_spec", "requests_finished") if name in columns), default=0)
    parameters = columns[:first]
    figures = [name for name in columns[first:] if pd.api.types.is_numeric_dtype(rows[name])]
    return rows, parameters, figures

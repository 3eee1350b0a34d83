"""Find, read, cache and zip recordings for the dashboard.

Sessions share what is read: an object stays in the cache for as long as the files of its recording
do not change, and only a few objects of each kind stay. No function shows a spinner, because a
spinner would shift the page at each refresh.
"""

import io
import json
import lzma
import os
import re
import shutil
import struct
import tempfile
import threading
import weakref
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import streamlit as st

from zlab.dashboard.figures.compare import LATENCY_COLUMNS, Strip, strip_of
from zlab.dashboard.figures.occupancy import Marks, read_marks
from zlab.traces.explanation import Explainer
from zlab.traces.live_run import LiveRun
from zlab.traces.occupancy import Occupancy, Overview, read_occupancy
from zlab.traces.recording import TABLES, Recording, RecordingError, num_rows
from zlab.traces.timeline import (
    COLUMNS,
    Holdings,
    Phases,
    read_holdings,
    read_phases,
)
from zlab.traces.workload import dropped_rows

DEPTH = 4  # levels of folders below a root that are searched
MOST = 400  # the newest recordings are listed
Stamp = tuple[str | tuple[str, int, int], ...]
SWEEP_SUFFIXES = (".csv", ".parquet")
MOST_SWEEP_BYTES, MOST_SWEEP_ROWS = 100_000_000, 200_000
SWEEP_NEEDS = {
    "tokens_per_s",
    "makespan_s",
    "error",
}  # columns that every table of `zlab sweep` has


@dataclass(frozen=True)
class Source:
    """A recording's folder and its name on the page."""

    label: str
    folder: str


def find_recordings(roots: Sequence[Path]) -> list[Source]:
    """Return the folders below `roots` that hold a manifest, newest first.

    The manifest is not read here: a broken recording shows its error when it is opened.
    """
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
    """Yield `folder` and the folders below it. It does not descend into recordings."""
    try:
        if not folder.is_dir():
            return
    except OSError:
        return
    yield folder
    if depth and not (folder / "manifest.json").is_file():
        try:
            below = sorted(
                path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
            )
        except OSError:
            return
        for path in below:
            yield from _folders(path, depth - 1)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


class Snapshot:
    """A recording as it is at one moment.

    All that a page draws comes from one snapshot, so that its tables belong together.

    Attributes:
        folder: where the recording is.
        recording: the recording, opened at that moment.
        stamp: equal for equal content: folder, manifest, and name, size and time of each file.
    """

    def __init__(self, folder: str) -> None:
        """Open the recording. Raises RecordingError."""
        self.folder = folder
        self.recording = Recording(folder)
        self.stamp: Stamp = (folder, json.dumps(self.recording.manifest), *self._files())

    def _files(self) -> Iterator[tuple[str, int, int]]:
        for table in TABLES:
            for part in self.recording.parts(table):
                try:
                    status = part.stat()
                except OSError:
                    continue
                yield os.fspath(part), status.st_size, status.st_mtime_ns

    @property
    def summary(self) -> dict[str, Any]:
        """The summary of the manifest, {} while the run has none."""
        found = self.recording.manifest.get("summary")
        return found if isinstance(found, dict) else {}

    @property
    def dropped(self) -> list[str]:
        """A line for the rows of its trace that the recording lacks."""
        workload = self.recording.manifest.get("workload")
        try:
            return dropped_rows(workload.get("rows") if isinstance(workload, dict) else None)
        except (AttributeError, KeyError, TypeError, ValueError):  # not the form of a trace
            return []

    @property
    def written_s(self) -> float:
        """When a file of the recording was last written, in seconds since 1970."""
        folder = self.recording.folder
        files = [folder / "manifest.json", *(p for t in TABLES for p in (folder / t).glob("*"))]
        return max(map(_changed, files)) / 1e9


def request_frame(table: pa.Table) -> pd.DataFrame:
    """Return the `requests` table as a frame, ordered by request number, with derived latencies in
    seconds.
    """
    frame = table.to_pandas().sort_values("number", kind="stable").reset_index(drop=True)
    frame["ttft_s"] = frame["first_token_s"] - frame["arrival_s"]
    frame["e2e_s"] = np.where(
        frame["status"] == "finished", frame["finish_s"] - frame["arrival_s"], np.nan
    )
    away = frame["preempted_s"] + frame["swapped_s"]
    frame["away_s"] = away
    frame["waited_s"] = (
        frame["queued_s"] + frame["slot_wait_s"] + frame["block_wait_s"] + frame["paused_s"] + away
    )
    steps_after_first = (frame["output_tokens"] - 1).where(frame["output_tokens"] > 1)
    finished = frame["status"] == "finished"
    spans = (frame["finish_s"] - frame["first_token_s"]).where(finished)
    frame["tpot_s"] = spans / steps_after_first
    frame["blocked_s"] = frame["slot_wait_s"] + frame["block_wait_s"] + frame["paused_s"]
    return frame


def find_sweeps(roots: Sequence[Path]) -> list[Path]:
    """Return the tables that `zlab sweep --out` wrote below `roots`, newest first."""
    found = []
    for root in roots:
        for folder in _folders(root, DEPTH):
            found += [
                path
                for path in sorted(folder.glob("*"))
                if path.suffix in SWEEP_SUFFIXES and _is_sweep(path)
            ]
    return sorted(found, key=lambda path: -_changed(path))[:MOST]


def _is_sweep(path: Path) -> bool:
    try:
        if path.suffix == ".parquet":
            columns = set(pq.read_schema(path).names)
        else:
            with path.open(encoding="utf-8") as file:
                columns = {
                    cell.strip('"') for cell in file.readline(100_000).rstrip("\n").split(",")
                }
    except (OSError, ValueError, pa.ArrowException):
        return False
    return columns >= SWEEP_NEEDS


def read_sweep(path: Path) -> tuple[pd.DataFrame, list[str], list[str]]:
    """Read a sweep's table as (rows, names of swept parameters, names of numeric results).

    The columns before the first result are the parameters. Raises RecordingError when the table
    cannot be read.
    """
    try:
        if path.stat().st_size > MOST_SWEEP_BYTES:
            raise RecordingError(
                f"{path}: has {path.stat().st_size / 1e6:,.0f} MB, at most "
                f"{MOST_SWEEP_BYTES / 1e6:,.0f} MB are read"
            )
        if path.suffix == ".parquet":
            if num_rows(path) > MOST_SWEEP_ROWS:
                raise RecordingError(f"{path}: has more than {MOST_SWEEP_ROWS:,} rows")
            rows = pd.read_parquet(path)
        else:
            rows = pd.read_csv(path, nrows=MOST_SWEEP_ROWS + 1)
        if len(rows) > MOST_SWEEP_ROWS:
            raise RecordingError(f"{path}: has more than {MOST_SWEEP_ROWS:,} rows")
    except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
        if isinstance(error, RecordingError):
            raise
        raise RecordingError(f"{path}: cannot be read: {error}") from error
    columns = list(rows.columns)
    first = min(
        (columns.index(name) for name in ("policy_spec", "requests_finished") if name in columns),
        default=0,
    )
    parameters = columns[:first]
    figures = [name for name in columns[first:] if pd.api.types.is_numeric_dtype(rows[name])]
    return rows, parameters, figures


FEW, SOME = 6, 16  # cache entries of large and of small objects


def occupancy(snapshot: Snapshot) -> Occupancy:
    """Return the recording's block states over time."""
    return _POOLS.get(snapshot.folder, snapshot.stamp, snapshot.recording)


def strip(snapshot: Snapshot) -> Strip:
    """Return the whole run's pool as a picture; of a large recording that was looked at before,
    without a replay.
    """
    return _strip(snapshot.stamp, snapshot)


def holdings(snapshot: Snapshot) -> Holdings:
    """Return the blocks and tokens that each request holds over time."""
    return _holdings(snapshot.stamp, snapshot.recording)


def marks(snapshot: Snapshot) -> Marks:
    """Return the times of preemptions and compressions."""
    return _marks(snapshot.stamp, snapshot.recording)


def phases(snapshot: Snapshot) -> Phases:
    """Return the phases of all requests."""
    return _phases(snapshot.stamp, snapshot.recording)


def explainer(snapshot: Snapshot) -> Explainer:
    """Return the object that explains single requests."""
    return _explainer(snapshot.stamp, snapshot.recording)


def live_run(snapshot: Snapshot) -> LiveRun:
    """Return the run up to its last whole step; only rows that were not read before are read."""
    return _LIVE.get(snapshot.folder, snapshot.recording)


def steps(snapshot: Snapshot) -> pa.Table:
    """Return the columns of the `steps` table that figures draw."""
    return _steps(snapshot.stamp, snapshot.recording)


def requests(snapshot: Snapshot) -> pd.DataFrame:
    """Return the `requests` table as a frame, ordered by number."""
    return _requests(snapshot.stamp, snapshot.recording)


def latencies(snapshot: Snapshot) -> pa.Table:
    """Return the columns of the `requests` table that latency figures need."""
    return _latencies(snapshot.stamp, snapshot.recording)


# Streamlit takes the stamp as the key; it does not look at arguments that begin with "_".
class Pools:
    """Keeps the occupancies that were read last: one of each recording, and at most `most_lives`
    lives together (19 bytes each), so that neither a run that is being written nor several large
    ones fill the memory. Threads that want the same one wait for one replay.
    """

    def __init__(self, most_lives: int) -> None:
        self._most_lives = most_lives
        self._kept: dict[str, tuple[Stamp, Occupancy]] = {}
        self._lock = threading.Lock()

    def get(self, folder: str, stamp: Stamp, recording: Recording) -> Occupancy:
        """Return the occupancy of a recording as `stamp` names it. Raises RecordingError."""
        with self._lock:
            kept = self._kept.pop(folder, None)
            if kept is not None and kept[0] == stamp:
                self._kept[folder] = kept
                return kept[1]
            del kept  # the memory of what it was before is free for what it is now
            found = _replayed(recording)
            self._kept[folder] = (stamp, found)
            while self._num_lives() > self._most_lives and len(self._kept) > 1:
                del self._kept[next(iter(self._kept))]
            return found

    def _num_lives(self) -> int:
        return sum(len(occupancy.lives) for _, occupancy in self._kept.values())


class LiveRuns:
    """Keeps the runs that are followed, at most `most`, and brings them up to date. A run that
    began anew in the same folder is read anew.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[str, tuple[tuple[object, ...], LiveRun]] = {}
        self._lock = threading.Lock()

    def get(self, folder: str, recording: Recording) -> LiveRun:
        """Return the run as far as `recording` has it, or further. Raises RecordingError."""
        try:
            inode = (recording.folder / "events").stat().st_ino
        except OSError as error:
            raise RecordingError(f"{folder}: cannot be read: {error}") from error
        identity = (inode, *(str(recording.manifest.get(name)) for name in SAME_RUN))
        with self._lock:
            kept = self._kept.pop(folder, None)  # it is not kept where an update fails
            run = kept[1] if kept is not None and kept[0] == identity else LiveRun(recording)
            run.update(recording)
            self._kept[folder] = identity, run
            while len(self._kept) > self._most:
                del self._kept[next(iter(self._kept))]
            return run


SAME_RUN = ("started", "started_unix_s", "policy_digest", "num_blocks", "block_size", "kinds")
_LIVE = LiveRuns(most=8)


def _replayed(recording: Recording) -> Occupancy:
    """Replay a recording, with a bar that shows how far it is; keep the overview of a large one."""
    if sum(num_rows(part) for part in recording.parts("blocks")) < BAR_FROM:
        return read_occupancy(recording)
    place = st.empty()
    bar = place.progress(0.0, REPLAYING)

    def show(share: float) -> None:
        bar.progress(min(share, 1.0), REPLAYING)

    found = read_occupancy(recording, show)
    place.empty()
    if found.overview is not None:
        found.overview.save(recording)
    return found


REPLAYING = "Replaying the blocks …"
BAR_FROM = 2_000_000  # changes of blocks; fewer are replayed within a second
_POOLS = Pools(most_lives=32_000_000)


@st.cache_resource(max_entries=SOME, show_spinner=False)
def _strip(stamp: Stamp, _snapshot: Snapshot) -> Strip:
    overview = Overview.load(_snapshot.recording)
    return strip_of(occupancy(_snapshot) if overview is None else overview)


@st.cache_resource(max_entries=FEW, show_spinner=False)
def _holdings(stamp: Stamp, _recording: Recording) -> Holdings:
    return read_holdings(_recording)


@st.cache_resource(max_entries=SOME, show_spinner=False)
def _marks(stamp: Stamp, _recording: Recording) -> Marks:
    return read_marks(_recording)


@st.cache_resource(max_entries=FEW, show_spinner=False)
def _phases(stamp: Stamp, _recording: Recording) -> Phases:
    return read_phases(_recording)


@st.cache_resource(max_entries=2, show_spinner=False)
def _explainer(stamp: Stamp, _recording: Recording) -> Explainer:
    return Explainer(_recording, _phases(stamp, _recording))


@st.cache_resource(max_entries=SOME, show_spinner=False)
def _steps(stamp: Stamp, _recording: Recording) -> pa.Table:
    return _recording.table("steps", COLUMNS)


@st.cache_resource(max_entries=SOME, show_spinner=False)
def _requests(stamp: Stamp, _recording: Recording) -> pd.DataFrame:
    return request_frame(_recording.table("requests"))


@st.cache_resource(max_entries=SOME, show_spinner=False)
def _latencies(stamp: Stamp, _recording: Recording) -> pa.Table:
    return _recording.table("requests", LATENCY_COLUMNS)


MOST_BYTES = 1_000_000_000  # of an unpacked recording
MOST_ROWS = 30_000_000  # of an uploaded recording
# What reading a damaged, encrypted or unusual zip file raises.
BAD_ZIP = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    OSError,
    RuntimeError,
    ValueError,
    struct.error,
)
_LEFT_BY_MACOS = re.compile(r"^__MACOSX/|(^|/)\.DS_Store$|(^|/)\._[^/]*$")
_NAME = re.compile(
    r"(?:[^/\\.][^/\\]*/)?(manifest\.json|(?:" + "|".join(TABLES) + r")/\d{5}\.parquet)"
)


class UploadFolder:
    """A temporary folder for one session's uploads.

    The folder is deleted when the object is collected, at the latest when the process ends.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="zlab-upload-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)


def pack(folder: Path) -> bytes:
    """Return the recording as a zip file. Files are stored uncompressed: Parquet is compressed
    already.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        recording = Recording(folder)
        archive.write(folder / "manifest.json", "manifest.json")
        for table in TABLES:
            for part in recording.parts(table):
                archive.write(part, f"{table}/{part.name}")
    return buffer.getvalue()


def unpack(data: bytes, folder: Path) -> Path:
    """Unpack an uploaded recording into a new folder and return that folder.

    Only file names that a recording has are accepted, and at most MOST_BYTES and MOST_ROWS in all;
    what macOS adds to zip files is skipped. Raises RecordingError with the reason; the folder is
    then removed.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except BAD_ZIP as error:
        raise RecordingError(f"the file is no zip file: {error}") from error
    try:
        with archive:
            _unpack(archive, folder)
        Recording(folder)
        _check_rows(folder)
    except RecordingError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except BAD_ZIP as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise RecordingError(f"the zip file cannot be unpacked: {error}") from error
    return folder


def _check_rows(folder: Path) -> None:
    """Refuse an upload whose tables are larger than sessions may bring."""
    rows = sum(num_rows(part) for table in TABLES for part in (folder / table).glob("*.parquet"))
    if rows > MOST_ROWS:
        raise RecordingError(f"its tables have {rows:,} rows, at most {MOST_ROWS:,}")


def _unpack(archive: zipfile.ZipFile, folder: Path) -> None:
    entries = [
        (info, _NAME.fullmatch(info.filename))
        for info in archive.infolist()
        if not info.is_dir() and not _LEFT_BY_MACOS.search(info.filename)
    ]
    odd = [info.filename for info, name in entries if name is None]
    if odd:
        raise RecordingError(
            f"{odd[0]!r} is no file of a recording (manifest.json, steps/00000.parquet, ...)"
        )
    total = sum(info.file_size for info, _ in entries)
    if total > MOST_BYTES:
        raise RecordingError(
            f"unpacked it would be {total / 1e6:,.0f} MB, at most {MOST_BYTES / 1e6:,.0f} MB"
        )
    for info, name in entries:
        assert name is not None
        target = folder / name.group(1)
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(info) as source:
            content = source.read(info.file_size + 1)
        if len(content) != info.file_size:
            raise RecordingError(f"{info.filename}: is not as long as the zip file says")
        target.write_bytes(content)

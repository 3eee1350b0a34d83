"""Records live traffic: a trace to judge the next candidate on, and each lane's run, step by step.

A server that records into a folder makes one below it for every start:

    20261129T181502Z/
        trace-00000.jsonl, trace-00000.meta.json, ...   the requests, as they ended
        live/, canary/, live-1/ ...                     each engine's recording

Neither holds text unless that is asked for: prompts are lengths and anonymised ids of their full
blocks. The engine never waits for the disk; a disk that fails ends the recording, not the server.
"""

import io
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from typing_extensions import override

from zlab.engine.recorder import EngineRecorder
from zlab.engine.server.jobs import Output
from zlab.engine.server.lanes import Lane, Observer
from zlab.policies.core.journal import EventSink
from zlab.traces.block_ids import OPEN, Hidden, Salted
from zlab.traces.formats.native import RECORDED_LIVE, meta_path, write_meta
from zlab.traces.recording import RecordingError
from zlab.traces.workload import TraceRequest, WorkloadMeta, request_to_line

LOG = logging.getLogger("zlab.server")
NS = 1e-9
SECONDS_PER_FILE = 3600.0
BYTES_PER_FILE = 256 << 20
MAX_PENDING = 50_000  # pieces of work that the disk may be behind
CLOSE_TIMEOUT_S = 60.0
Work = Callable[[], None]


@dataclass(frozen=True)
class Rotation:
    """When the next trace file begins: after so many seconds, or beyond so many bytes."""

    seconds: float = SECONDS_PER_FILE
    num_bytes: int = BYTES_PER_FILE

    def __post_init__(self) -> None:
        """Raise ValueError for a file that could hold nothing."""
        if not self.seconds > 0 or self.num_bytes < 1:
            raise ValueError(
                f"a trace file must last and hold something, not {self.seconds} s, "
                f"{self.num_bytes} bytes"
            )


@dataclass(frozen=True)
class RecordSettings:
    """What is recorded.

    Attributes:
        with_text: token ids of prompts and outputs, and sessions by name; otherwise neither.
        steps: each lane's recording, besides the trace.
        rotation: of trace files.
    """

    with_text: bool = False
    steps: bool = True
    rotation: Rotation = field(default_factory=Rotation)


class LiveRecording(Observer):
    """Records a server's traffic below a folder.

    All calls but `wait` and `close` come from the engine's thread; `folder` is the recording's own
    folder.
    """

    def __init__(
        self,
        parent: Path,
        block_size: int,
        settings: RecordSettings = RecordSettings(),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Make the folder and begin the trace.

        Args:
            parent: where the recording's folder is made.
            block_size: tokens per block of the pool.
            settings: what is recorded.
            clock: gives Unix seconds.

        Raises:
            RecordingError: when no folder can be made.
        """
        self._clock = clock
        self._started_unix_s = clock()
        self.folder = _new_folder(parent, self._started_unix_s)
        self._settings = settings
        self._hidden: Hidden = OPEN if settings.with_text else Salted(block_size)
        self._prefix_block_size = None if settings.with_text else block_size
        meta = WorkloadMeta(
            name="live",
            source="requests of zlab serve, written as they ended",
            block_size=self._prefix_block_size,
            block_id_kind=None if settings.with_text else "chained",
            last_block=None if settings.with_text else "full",
            modifications=()
            if settings.with_text
            else ("block ids salted, the salt was not kept",),
        )
        self._trace = TraceFiles(self.folder, meta, settings.rotation)
        self._num_arrived = 0
        self._numbers: dict[Output, int] = {}  # of live outputs, in order of arrival
        self._prepared: dict[str, EngineRecorder] = {}  # by lane: for an engine that is being built
        self._recorders: dict[str, EngineRecorder] = {}  # by lane: open
        self._opened: list[EngineRecorder] = []
        self._num_engines: Counter[str] = Counter()  # by lane
        self._writer = DiskWriter("recording", at_failure=self._release_files)

    @property
    def failure(self) -> Exception | None:
        """Why nothing more is written; None while all is well."""
        return self._writer.failure

    # engines

    @override
    def event_sink(self, lane_name: str) -> EventSink | None:
        if not self._settings.steps:
            return None
        recorder = self._prepared[lane_name] = EngineRecorder(self._writer, self._hidden)
        return recorder.sink

    @override
    def begin(self, lane: Lane) -> None:
        recorder = self._prepared.pop(lane.name, None)
        if recorder is None:
            return
        number = self._num_engines[lane.name]
        self._num_engines[lane.name] += 1
        folder = self.folder / (f"{lane.name}-{number}" if number else lane.name)
        origin = {
            "workload": {
                "name": "live",
                "source": "requests of zlab serve",
                "num_requests": None,
                "modifications": [],
            },
            "workload_sha256": "",
            "lane": {"name": lane.name, "share": lane.share},
            "started_unix_s": self._clock(),
        }
        recorder.open(lane.engine, folder, origin, self._prefix_block_size)
        self._recorders[lane.name] = recorder
        self._opened.append(recorder)

    @override
    def rebuilt(self, lane: Lane) -> None:
        self.begin(lane)

    @override
    def crashed(self, lane: Lane, error: BaseException) -> None:
        # The broken engine can give no more; its recording stays as the last checkpoint has it.
        recorder = self._recorders.pop(lane.name, None)
        if recorder is not None:
            recorder.abandon(type(error).__name__)

    # requests

    @override
    def arrived(self, lane: Lane, output: Output) -> None:
        self._numbers[output] = self._num_arrived
        self._num_arrived += 1
        recorder = self._recorders.get(lane.name)
        if recorder is not None:
            recorder.submitted(_trace_request(output))

    @override
    def ended(self, lane: Lane, output: Output) -> None:
        number = self._numbers.pop(output)
        if output.finish_reason == "refused":  # it never ran: it is only counted
            self._writer(partial(self._trace.drop, "refused"))
            return
        token_ids = output.engine_request.output.token_ids
        arrived_unix_s = output.job.arrived_unix_s
        row = replace(
            _trace_request(output),
            id=str(number),
            # An output that was aborted before its first token counts as one token long.
            output_tokens=max(len(token_ids), 1),
            arrival_s=max(0.0, arrived_unix_s - self._started_unix_s),
            cls=output.engine_request.request.cls,
            output_ids=tuple(token_ids) if token_ids else None,
            source_e2e_s=max(0.0, self._clock() - arrived_unix_s),
            status=output.finish_reason,
        )
        self._writer(partial(self._write_row, row))

    @override
    def stepped(self, lane: Lane) -> None:
        recorder = self._recorders.get(lane.name)
        if recorder is not None:
            recorder.collect()

    @override
    def idle(self) -> None:
        for recorder in self._recorders.values():
            recorder.collect(idle=True)

    @override
    def stopped(self) -> None:
        for recorder in self._recorders.values():
            recorder.finish("shutdown" if recorder.num_live else None)
        self._recorders.clear()
        self._writer(self._trace.close)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the operating system has all rows so far; False if that fails or is late."""
        return self._writer.wait(timeout_s)

    def close(self) -> None:
        """Wait for the last row; the engine's thread has ended."""
        if not self._writer.close(CLOSE_TIMEOUT_S):
            LOG.error(
                "the recording in %s was not written to its end within %.0f s",
                self.folder,
                CLOSE_TIMEOUT_S,
            )

    def _release_files(self) -> None:
        for recorder in self._opened:
            recorder.let_go()
        self._trace.release()

    def _write_row(self, row: TraceRequest) -> None:
        self._trace.write(self._hidden.request(row))


def _trace_request(output: Output) -> TraceRequest:
    """Return what the scheduler was asked for."""
    request, parsed = output.engine_request.request, output.job.request
    return TraceRequest(
        id=request.id,
        prompt_tokens=request.prompt_tokens,
        arrival_s=request.arrival_ns * NS,
        max_tokens=request.max_tokens,
        prompt_ids=tuple(output.engine_request.prompt_ids),
        session=parsed.session_id,
        priority=parsed.priority,
    )


def _new_folder(parent: Path, unix_s: float) -> Path:
    """Make a folder named after the time, with a number where that name is taken."""
    name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(unix_s))
    for number in range(1000):
        folder = parent / (f"{name}-{number}" if number else name)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RecordingError(f"{folder}: cannot be made ({error.strerror})") from error
        return folder
    raise RecordingError(f"{parent / name}: taken, and so are all its numbers")


class TraceFiles:
    """Writes requests into `folder/trace-00000.jsonl`, `trace-00001.jsonl`, ..., with metadata.

    The operating system has a line before the next is begun, so that a kill at any time truncates
    at most the last line. A file's metadata is there from the start; its counts of rows come at its
    end. Times count from the recording's start through all files.
    """

    def __init__(
        self,
        folder: Path,
        meta: WorkloadMeta,
        rotation: Rotation,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin the first file.

        Args:
            folder: where the files go.
            meta: the metadata of every file, but for its name and counts.
            rotation: when the next file begins.
            clock: steady seconds.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._meta = replace(meta, modifications=(RECORDED_LIVE, *meta.modifications))
        self._rotation = rotation
        self._clock = clock
        self._num_files = 0
        self._file: io.FileIO | None = None
        self._dropped: Counter[str] = Counter()  # by reason
        self._num_rows = self._num_bytes = 0
        self._began_s = clock()
        self._begin_file()

    @property
    def path(self) -> Path:
        """The present file."""
        return self._folder / f"trace-{self._num_files - 1:05}.jsonl"

    def write(self, request: TraceRequest) -> None:
        """Append one request, to the next file if the present one is full or old enough."""
        assert self._file is not None
        full = (
            self._num_bytes >= self._rotation.num_bytes
            or self._clock() >= self._began_s + self._rotation.seconds
        )
        if full and self._num_rows:
            self._end_file()
            self._begin_file()
        line = memoryview(request_to_line(request).encode())
        while line:
            line = line[os.write(self._file.fileno(), line) :]
        self._num_bytes = os.fstat(self._file.fileno()).st_size
        self._num_rows += 1

    def drop(self, reason: str) -> None:
        """Count a request that has no line."""
        self._dropped[reason] += 1

    def release(self) -> None:
        """Close the file as it is."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        """End the last file."""
        if self._file is not None:
            self._end_file()

    def _begin_file(self) -> None:
        self._num_files += 1
        self._num_rows = self._num_bytes = 0
        self._dropped.clear()
        self._began_s = self._clock()
        write_meta(self.path, replace(self._meta, name=self.path.stem))
        self._file = io.FileIO(self.path, "xb")

    def _end_file(self) -> None:
        self.release()
        if not self._num_rows and not self._dropped:
            for path in (self.path, meta_path(self.path)):
                path.unlink()
            return
        dropped = dict(sorted(self._dropped.items()))
        counts = replace(
            self._meta,
            name=self.path.stem,
            rows_read=self._num_rows + sum(dropped.values()),
            rows_kept=self._num_rows,
            dropped=dropped,
        )
        write_meta(self.path, counts)


class DiskWriter:
    """Does work on a thread of its own, in order; a call returns at once.

    Work that fails, or that is `max_pending` pieces behind, ends the writing: `failure` says why,
    and nothing more is done. What was written until then stays readable.
    """

    def __init__(self, name: str, at_failure: Work, max_pending: int = MAX_PENDING) -> None:
        """Start the thread.

        Args:
            name: of the thread, for the log.
            at_failure: done once in place of all further work, to release open files.
            max_pending: how many pieces of work may be behind.
        """
        self.failure: Exception | None = None
        self._at_failure = at_failure
        self._max_pending = max_pending
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __call__(self, work: Work) -> None:
        """Do this after everything before it; from any thread."""
        if self.failure is not None:
            return
        if self._work.qsize() >= self._max_pending:
            self._fail(OSError(f"the disk is {self._max_pending:,} pieces of work behind"))
            return
        self._work.put(work)

    @property
    def num_pending(self) -> int:
        """Pieces of work that have not begun."""
        return self._work.qsize()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all work so far is done; False if that takes longer, or writing has ended."""
        reached = threading.Event()
        self(reached.set)
        return self.failure is None and reached.wait(timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Do the work so far and end; False if that takes longer than `timeout_s`."""
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self.failure is not None:
                break
            try:
                work()
            except Exception as error:  # a full disk or a lost folder must not end the server
                self._fail(error)
        if self.failure is not None:
            with suppress(Exception):
                self._at_failure()

    def _fail(self, error: Exception) -> None:
        self.failure = error
        LOG.error("%s is given up: %s: %s", self._thread.name, type(error).__name__, error)

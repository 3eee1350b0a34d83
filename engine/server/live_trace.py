"""Live traffic written down: a trace that tomorrow's candidate is judged on, and each lane's run, step by step.

A server that records into a folder makes one below it for every start:

    20261129T181502Z/trace-00000.jsonl, trace-00000.meta.json, ...   what was asked of it, as it ended
    20261129T181502Z/live/, canary/, live-1/ ...                      each engine's recording (traces/recording.py)

Neither holds text unless that was asked for: prompts are lengths and salted ids of their full blocks.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from engine.record import EngineRecorder
from engine.server.job import Entry
from engine.server.lanes import Lane
from engine.server.observing import Observer
from engine.server.trace_files import Rotation, TraceFiles
from engine.server.writing import WritingThread
from policies.core.events import Sink
from policies.core.request import Request
from traces.recording import RecordingError
from traces.salting import OPEN, Hidden, Salted
from traces.workload import TraceRequest, WorkloadMeta

LOG = logging.getLogger("zlab.server")
CLOSE_TIMEOUT_S = 60.0
NS = 1e-9


@dataclass(frozen=True)
class RecordSettings:
    """What is written down.

    Attributes:
        with_text: token ids of prompts and outputs, and sessions by name; otherwise neither.
        steps: each lane's recording too, not only the trace.
        rotation: of trace files.
    """

    with_text: bool = False
    steps: bool = True
    rotation: Rotation = field(default_factory=Rotation)


class LiveRecording(Observer):
    """Writes a server's traffic below `parent`; all calls but `close` come from the engine's thread.

    The engine never waits for the disk, and a disk that fails ends the recording, not the server: `failure` says why.
    """

    def __init__(
        self,
        parent: Path,
        block_size: int,
        settings: RecordSettings = RecordSettings(),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raise RecordingError when no folder can be made. `block_size` is the pool's, `clock` gives Unix seconds."""
        self._clock = clock
        self._started_unix_s = clock()
        self.folder = _new_folder(parent, self._started_unix_s)
        self._settings = settings
        self._hidden: Hidden = OPEN if settings.with_text else Salted(block_size)
        self._prefix_block_size = None if settings.with_text else block_size
        self._writing = WritingThread("recording")
        meta = WorkloadMeta(
            name="live",
            source="requests of zlab serve, written as they ended",
            block_size=self._prefix_block_size,
            block_id_kind=None if settings.with_text else "chained",
            last_block=None if settings.with_text else "full",
            modifications=() if settings.with_text else ("block ids salted, the salt was not kept",),
        )
        self._trace = TraceFiles(self.folder, meta, settings.rotation)
        self._num_arrived = 0
        self._place: dict[Entry, int] = {}  # of those that have not ended, by arrival
        self._made: dict[str, EngineRecorder] = {}  # by lane: for an engine that is being built
        self._recorders: dict[str, EngineRecorder] = {}  # by lane: open
        self._num_engines: dict[str, int] = {}

    @property
    def failure(self) -> Exception | None:
        """Why nothing more is written; None while all is well."""
        return self._writing.failure

    # engines

    def sink(self, lane_name: str) -> Sink | None:
        """Where the scheduler of the lane's next engine writes its journal; None when only a trace is wanted."""
        if not self._settings.steps:
            return None
        recorder = self._made[lane_name] = EngineRecorder(self._writing, self._hidden)
        return recorder.sink

    def begin(self, lane: Lane) -> None:
        """The lane's engine is there, and has decided nothing yet."""
        recorder = self._made.pop(lane.name, None)
        if recorder is None:
            return
        number = self._num_engines.get(lane.name, 0)
        self._num_engines[lane.name] = number + 1
        folder = self.folder / (f"{lane.name}-{number}" if number else lane.name)
        origin = {
            "workload": {"name": "live", "source": "requests of zlab serve", "num_requests": None, "modifications": []},
            "workload_sha256": "",
            "lane": {"name": lane.name, "share": lane.share},
            "started_unix_s": self._clock(),
        }
        recorder.open(lane.engine, folder, origin, self._prefix_block_size)
        self._recorders[lane.name] = recorder

    def rebuilt(self, lane: Lane) -> None:
        """A new engine, a new recording."""
        self.begin(lane)

    def crashed(self, lane: Lane, error: Exception) -> None:
        """What the broken engine did stays as its last checkpoint has it: nothing more can be asked of it."""
        recorder = self._recorders.pop(lane.name, None)
        if recorder is not None:
            recorder.abandon(type(error).__name__)

    # requests

    def arrived(self, lane: Lane, entry: Entry) -> None:
        """Number the request, and note what the scheduler was told of it."""
        self._place[entry] = self._num_arrived
        self._num_arrived += 1
        recorder = self._recorders.get(lane.name)
        if recorder is not None:
            recorder.submitted(_asked(entry))

    def ended(self, lane: Lane, entry: Entry) -> None:
        """A line for the trace; a request that never ran for want of tokens or room is only counted."""
        place = self._place.pop(entry)
        if entry.finish_reason == "refused":
            self._writing(partial(self._trace.leave_out, "refused"))
            return
        assert entry.sequence is not None
        token_ids = entry.sequence.output.token_ids
        row = replace(
            _asked(entry),
            id=str(place),
            output_tokens=max(len(token_ids), 1),  # called off before its first token: as if that had been its last
            arrival_s=max(0.0, entry.job.arrived_unix_s - self._started_unix_s),
            cls=entry.sequence.request.cls,
            output_ids=tuple(token_ids) if token_ids else None,
            source_e2e_s=max(0.0, self._clock() - entry.job.arrived_unix_s),
            status=entry.finish_reason,
        )
        self._writing(partial(self._write_row, row))

    def stepped(self, lane: Lane) -> None:
        """Take in who has ended; every second or so everything becomes readable."""
        recorder = self._recorders.get(lane.name)
        if recorder is not None:
            recorder.collect()

    def idle(self) -> None:
        """Nothing runs: what is left since the last checkpoint becomes readable now."""
        for recorder in self._recorders.values():
            recorder.collect(idle=True)

    def stopped(self) -> None:
        """Write what is left; the recording of a lane whose requests have all ended is complete then."""
        for recorder in self._recorders.values():
            recorder.finish("shutdown" if recorder.num_live else None)
        self._recorders.clear()
        self._writing(self._trace.close)

    def close(self) -> None:
        """The engine's thread has ended: wait until everything is on its way to the disk."""
        if not self._writing.close(CLOSE_TIMEOUT_S):
            LOG.error("the recording in %s was not written to its end within %.0f s", self.folder, CLOSE_TIMEOUT_S)

    def _write_row(self, row: TraceRequest) -> None:
        self._trace.write(self._hidden.request(row))


def _asked(entry: Entry) -> TraceRequest:
    """What the scheduler was told."""
    request, job = _request(entry), entry.job
    return TraceRequest(
        id=request.id,
        prompt_tokens=request.prompt_tokens,
        arrival_s=request.arrival_ns * NS,
        max_tokens=job.max_tokens,
        prompt_ids=tuple(job.prompts[entry.prompt]),
        session=job.session,
        priority=job.priority,
    )


def _request(entry: Entry) -> Request:
    assert entry.sequence is not None, "only what the scheduler has is told of"
    return entry.sequence.request


def _new_folder(parent: Path, unix_s: float) -> Path:
    """A folder named after the time, with a number where that is taken."""
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

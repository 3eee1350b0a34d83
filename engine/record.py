"""An engine's run written down: the same tables as a simulation's, with measured times, and what was asked."""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from engine.build import Engine
from policies.core.events import Int64Array
from policies.core.request import Request
from policies.record import block_columns, event_columns, names, request_columns
from policies.spec import policy_digest, policy_to_toml
from traces.asked import AskedFile
from traces.recording import FolderRecorder, MemoryRecorder, Recorder
from traces.run import Run, load_run
from traces.salting import OPEN, Hidden
from traces.workload import TraceRequest

ROWS_AT_ONCE = 50_000  # ended requests
CHECKPOINT_EVERY_S = 1.0
Later = Callable[[Callable[[], None]], None]
PACKAGES = ("zipage-lab", "torch", "triton", "transformers", "numpy", "pyarrow")


def _at_once(work: Callable[[], None]) -> None:
    work()


class EngineRecorder:
    """Writes what an engine does. Made before the engine, whose scheduler needs `sink`; opened when it is there.

    In a folder everything is readable up to the last checkpoint, which comes every `CHECKPOINT_EVERY_S` while steps
    run. Nothing but the requests that are still alive stays in memory for longer than a part takes to fill.
    """

    def __init__(self, later: Later = _at_once, hidden: Hidden = OPEN) -> None:
        """`later` carries out what touches the disk, in order: at once, or on a thread of its own.

        `hidden` makes of a request what may be written down of it.
        """
        self.asked: list[TraceRequest] = []  # where no folder holds them
        self._later = later
        self._hidden = hidden
        self._recorder: Recorder | None = None
        self._memory: MemoryRecorder | None = None
        self._folder: Path | None = None
        self._file: AskedFile | None = None
        self._engine: Engine | None = None
        self._ended: list[tuple[Request, int]] = []
        self._opened = 0.0
        self._next_checkpoint = 0.0
        self._taken_in = False  # rows or steps since the last checkpoint

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return 0 if self._engine is None else len(self._engine.scheduler.state.requests)

    def sink(self, rows: Int64Array, blocks: Int64Array) -> None:
        """Receives the scheduler's journal."""
        assert self._recorder is not None, "the scheduler has decided something before the recorder was opened"
        self._taken_in = True
        self._later(partial(_write_journal, self._recorder, rows, blocks))

    def open(self, engine: Engine, out: Path | None, workload: dict[str, Any], prefix_block_size: int | None) -> None:
        """Begin: into a new or empty folder `out`, or in memory. `workload` says where the requests come from.

        Raises RecordingError when the folder holds something.
        """
        manifest = _manifest(engine) | workload | {"prefix_block_size": prefix_block_size}
        self._engine, self._folder = engine, out
        engine.steps.listeners.append(self._write_steps)
        if out is None:
            self._recorder = self._memory = MemoryRecorder(manifest)
        else:
            self._recorder = FolderRecorder(out, manifest)
            self._file = AskedFile(out)
        self._opened = time.perf_counter()

    def submitted(self, asked: TraceRequest) -> None:
        """Note a request that has just been handed to the scheduler; every one, in that order."""
        if self._file is not None:
            self._later(partial(self._write_asked, self._file, asked))
        else:
            self.asked.append(self._hidden.request(asked))

    def collect(self, idle: bool = False) -> int:
        """Take in who has ended since last time; returns how many. Call it at step boundaries.

        `idle`: nothing will happen for a while, so what has come together is written down now.
        """
        assert self._engine is not None
        loop = self._engine.loop
        ended, loop.ended = loop.ended, []
        self._ended += ended
        due = idle or time.perf_counter() >= self._next_checkpoint
        if self._folder is not None and due and self._is_behind():
            self.checkpoint()
        elif len(self._ended) > ROWS_AT_ONCE or self._engine.steps.large:
            self._write_requests()
            self._engine.steps.take()
        return len(ended)

    def _is_behind(self) -> bool:
        """Something has happened since the last checkpoint, whoever has taken it out of the engine."""
        assert self._engine is not None
        state, steps = self._engine.scheduler.state, self._engine.steps
        return bool(self._taken_in or self._ended or state.journal.rows or steps.num_ran)

    def checkpoint(self) -> None:
        """Write everything so far down, so that it can be read if this process goes no further. At step boundaries."""
        assert self._engine is not None
        assert self._recorder is not None
        self._write_requests()
        self._engine.steps.take()
        results = self._results(wait=False)  # the digest flushes the journal
        live = list(self._engine.scheduler.live())
        alive = self._request_columns([(request, -1) for request in live])
        self._later(partial(_checkpoint, self._recorder, self._file, alive, results))
        self._taken_in = False
        self._next_checkpoint = time.perf_counter() + CHECKPOINT_EVERY_S

    def finish(self, stopped_by: str | None = None) -> None:
        """The run is over (`stopped_by`: before its end, by that): write what is left."""
        engine, recorder = self._engine, self._recorder
        assert engine is not None
        assert recorder is not None
        engine.loop.drain()
        self._ended += engine.loop.ended
        engine.loop.ended = []
        engine.steps.take()
        self._ended += [(request, -1) for request in engine.scheduler.live()]
        self._write_requests()
        results = self._results(wait=True)
        if self._file is not None:
            self._later(self._file.close)
        ending = {"complete": stopped_by is None} | ({"stopped_by": stopped_by} if stopped_by else {})
        self._later(partial(recorder.close, **results, **ending))

    def abandon(self, stopped_by: str) -> None:
        """The engine broke and cannot be asked any more: what it did until its last checkpoint is what there is."""
        assert self._recorder is not None
        self._later(partial(self._recorder.checkpoint, stopped_by=stopped_by))
        self._later(self.let_go)
        self._engine = None  # its memory is wanted for the next one

    def let_go(self) -> None:
        """Close what is open without writing anything more."""
        if self._recorder is not None:
            self._recorder.leave()
        if self._file is not None:
            self._file.close()

    def close(self, stopped_by: str | None = None) -> Run:
        """`finish`, and the run; only where things are written at once."""
        self.finish(stopped_by)
        run = Run(self._memory) if self._folder is None and self._memory is not None else load_run(self._folder or "")
        if stopped_by is None and self._recorder is not None:
            self._recorder.close(summary=run.summary)
        return run

    def _results(self, wait: bool) -> dict[str, Any]:
        engine = self._engine
        assert engine is not None
        return {
            "digest": engine.scheduler.digest(),
            "num_steps": engine.scheduler.next_step,
            "policy_changes": [change.as_manifest() for change in engine.loop.policy_changes],
            "compression_work_s": engine.compression.work_seconds(wait) if engine.compression is not None else 0.0,
            "swapped_tokens": engine.runner.swapped_tokens,
            "wall_s": time.perf_counter() - self._opened,
        }

    def _write_asked(self, file: AskedFile, asked: TraceRequest) -> None:
        file.write(self._hidden.request(asked))

    def _write_requests(self) -> None:
        assert self._recorder is not None
        if self._ended:
            ended, self._ended = self._ended, []
            self._later(partial(self._write_ended, self._recorder, ended))

    def _write_ended(self, recorder: Recorder, ended: Sequence[tuple[Request, int]]) -> None:
        """Ended requests change no more; those alive are written at the very end, when nothing runs."""
        recorder.write("requests", self._request_columns(ended))

    def _request_columns(self, requests: Sequence[tuple[Request, int]]) -> dict[str, Any]:
        """With the step in which each ended, -1 for those alive."""
        columns = request_columns([request for request, _ in requests], [step for _, step in requests])
        columns["session"] = [name and self._hidden.name(name) for name in columns["session"]]
        return columns

    def _write_steps(self, columns: dict[str, Any]) -> None:
        assert self._recorder is not None
        self._taken_in = True
        self._later(partial(self._recorder.write, "steps", columns))


def _write_journal(recorder: Recorder, rows: Int64Array, blocks: Int64Array) -> None:
    recorder.write("events", event_columns(rows))
    recorder.write("blocks", block_columns(rows, blocks))


def _checkpoint(recorder: Recorder, file: AskedFile | None, alive: dict[str, Any], results: dict[str, Any]) -> None:
    if file is not None:
        file.flush()
    recorder.checkpoint(alive, **results)


def _manifest(engine: Engine) -> dict[str, Any]:
    settings, device = engine.settings, engine.cache.k.device
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"
    return {
        "source": "engine",
        "policy": engine.policy.name,
        "policy_toml": policy_to_toml(engine.policy),
        "policy_digest": policy_digest(engine.policy),
        "gpu": card,
        "model": engine.loaded.config.name,
        "limits": asdict(engine.limits),
        "num_blocks": engine.limits.num_blocks,
        "block_size": engine.limits.block_size,
        "cost": {"source": "measured"},
        "engine": {
            "model": settings.model,
            "dtype": str(engine.cache.k.dtype).removeprefix("torch."),
            "kernels": settings.kernels,
            "variant": settings.variant,
            "cuda_graphs": engine.uses_graphs,
            "overlap": engine.loop.overlaps,
            "seed": settings.seed,
        },
        "length_multiplier": 1.0,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
        **names(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

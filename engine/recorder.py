"""The recording of an engine run: the same tables as of a simulation, with measured times, and the
requests as they were submitted.
"""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zlab.engine.engine import Engine
from zlab.policies.core.journal import Int64Array
from zlab.policies.core.request import Request
from zlab.policies.snapshot import manifest_entries
from zlab.policies.step_log import (
    Columns,
    block_columns,
    cause_columns,
    event_columns,
    report_columns,
    request_columns,
)
from zlab.traces.block_ids import OPEN, Hidden
from zlab.traces.recording import (
    AskedFile,
    FolderRecorder,
    MemoryRecorder,
    Recorder,
    Run,
    load_run,
    run_manifest,
)
from zlab.traces.workload import TraceRequest

ROWS_AT_ONCE = 50_000  # ended requests that are written together
CHECKPOINT_EVERY_S = 1.0
Later = Callable[[Callable[[], None]], None]
PACKAGES = ("zipage-lab", "torch", "triton", "transformers", "numpy", "pyarrow")


def _at_once(work: Callable[[], None]) -> None:
    work()


class EngineRecorder:
    """Records what an engine does. The recorder is made before the engine, because the scheduler
    needs `sink`, and opened once the engine exists.

    A recording in a folder can be read up to its last checkpoint. A checkpoint follows every
    `CHECKPOINT_EVERY_S` while steps run. Memory holds the live requests and at most one part of
    each table.
    """

    def __init__(self, later: Later = _at_once, hidden: Hidden = OPEN) -> None:
        """Make a recorder that is not open yet. `later` runs the work that touches the disk, in
        order: at once, or on a thread of its own. `hidden` anonymises a request before it is
        written.
        """
        self.asked: list[TraceRequest] = []  # requests of a recording in memory
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
        self._taken_in = False  # whether rows or steps came since the last checkpoint

    @property
    def num_live(self) -> int:
        """Number of requests that have not ended."""
        return 0 if self._engine is None else self._engine.scheduler.stats().num_requests

    def sink(self, rows: Int64Array, blocks: Int64Array) -> None:
        """Receive events of the scheduler: rows `[n, columns]` and their block ids."""
        assert self._recorder is not None, (
            "the scheduler has decided something before the recorder was opened"
        )
        self._taken_in = True
        assert self._engine is not None
        scheduler = self._engine.scheduler
        beside = {
            "reports": report_columns(scheduler.take_reports()),
            "causes": cause_columns(scheduler.take_causes()),
        }
        self._later(partial(_write_journal, self._recorder, rows, blocks, beside))

    def open(
        self,
        engine: Engine,
        out: Path | None,
        workload: dict[str, Any],
        prefix_block_size: int | None,
    ) -> None:
        """Begin to record.

        Args:
            engine: the engine whose scheduler has `sink`.
            out: a new or empty folder, or None for memory.
            workload: manifest entries that say where the requests come from.
            prefix_block_size: block size of the prefix ids, if the workload has any.

        Raises:
            RecordingError: the folder is not empty.
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
        """Note a request right after its submission. Call it for every request, in that order."""
        if self._file is not None:
            self._later(partial(self._write_asked, self._file, asked))
        else:
            self.asked.append(self._hidden.request(asked))

    def collect(self, idle: bool = False) -> int:
        """Take the requests that ended since the last call and return how many. Call it between
        steps.

        With `idle`, no step follows soon, so collected rows are written now.
        """
        assert self._engine is not None
        ended = self._engine.take_ended()
        self._ended += ended
        due = idle or time.perf_counter() >= self._next_checkpoint
        if self._folder is not None and due and self._is_behind():
            self.checkpoint()
        elif len(self._ended) > ROWS_AT_ONCE or self._engine.steps.large:
            self._write_requests()
            self._engine.steps.take()
        return len(ended)

    def _is_behind(self) -> bool:
        """Return whether anything happened since the last checkpoint, including rows that another
        caller took out of the engine.
        """
        assert self._engine is not None
        scheduler, steps = self._engine.scheduler, self._engine.steps
        return bool(
            self._taken_in or self._ended or scheduler.num_unflushed_events or steps.num_ran
        )

    def checkpoint(self) -> None:
        """Write everything so far, so that it can be read if the process ends. Call it between
        steps.
        """
        assert self._engine is not None
        assert self._recorder is not None
        self._write_requests()
        self._engine.steps.take()
        results = self._results(wait=False)  # computing the digest flushes the events
        live = list(self._engine.scheduler.live())
        alive = self._request_columns([(request, -1) for request in live])
        self._later(partial(_checkpoint, self._recorder, self._file, alive, results))
        self._taken_in = False
        self._next_checkpoint = time.perf_counter() + CHECKPOINT_EVERY_S

    def finish(self, stopped_by: str | None = None) -> None:
        """End the recording and write the rest. `stopped_by` names what ended the run early."""
        engine, recorder = self._engine, self._recorder
        assert engine is not None
        assert recorder is not None
        engine.drain()
        self._ended += engine.take_ended()
        engine.steps.take()
        self._ended += [(request, -1) for request in engine.scheduler.live()]
        self._write_requests()
        results = self._results(wait=True)
        if self._file is not None:
            self._later(self._file.close)
        ending = {"complete": stopped_by is None} | (
            {"stopped_by": stopped_by} if stopped_by else {}
        )
        self._later(partial(recorder.close, **results, **ending))

    def abandon(self, stopped_by: str) -> None:
        """End the recording of a broken engine, which cannot be queried any more. The recording
        ends at its last checkpoint.
        """
        assert self._recorder is not None
        self._later(partial(self._recorder.checkpoint, stopped_by=stopped_by))
        self._later(self.let_go)
        self._engine = None  # releases its memory for the next engine

    def let_go(self) -> None:
        """Close open files without writing more."""
        if self._recorder is not None:
            self._recorder.leave()
        if self._file is not None:
            self._file.close()

    def close(self, stopped_by: str | None = None) -> Run:
        """Call `finish` and return the run. This needs a recorder whose `later` works at once."""
        self.finish(stopped_by)
        run = (
            Run(self._memory)
            if self._folder is None and self._memory is not None
            else load_run(self._folder or "")
        )
        if stopped_by is None and self._recorder is not None:
            self._recorder.close(summary=run.summary)
        return run

    def _results(self, wait: bool) -> dict[str, Any]:
        engine = self._engine
        assert engine is not None
        return {
            "digest": engine.scheduler.digest(),
            "num_steps": engine.scheduler.next_step,
            "policy_changes": [change.as_manifest() for change in engine.policy_changes],
            "compression_work_s": engine.compression.work_seconds(wait)
            if engine.compression is not None
            else 0.0,
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
        """Write ended requests, which change no more. Live requests are written at the end of the
        run.
        """
        recorder.write("requests", self._request_columns(ended))

    def _request_columns(self, requests: Sequence[tuple[Request, int]]) -> dict[str, Any]:
        """Return the columns of requests, each given with the step in which it ended (-1: it is
        alive).
        """
        columns = request_columns(
            [request for request, _ in requests], [step for _, step in requests]
        )
        columns["session"] = [name and self._hidden.name(name) for name in columns["session"]]
        return columns

    def _write_steps(self, columns: dict[str, Any]) -> None:
        assert self._recorder is not None
        self._taken_in = True
        self._later(partial(self._recorder.write, "steps", columns))


def _write_journal(
    recorder: Recorder, rows: Int64Array, blocks: Int64Array, beside: dict[str, Columns]
) -> None:
    recorder.write("events", event_columns(rows))
    recorder.write("blocks", block_columns(rows, blocks))
    for table, columns in beside.items():
        recorder.write(table, columns)


def _checkpoint(
    recorder: Recorder, file: AskedFile | None, alive: dict[str, Any], results: dict[str, Any]
) -> None:
    if file is not None:
        file.flush()
    recorder.checkpoint(alive, **results)


def _manifest(engine: Engine) -> dict[str, Any]:
    settings, device = engine.settings, engine.cache.k.device
    card = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"
    )
    run = run_manifest(
        source="engine",
        policy=manifest_entries(engine.policy),
        gpu=card,
        model=engine.loaded.config.name,
        limits=asdict(engine.limits),
        cost={"source": "measured"},
        packages=PACKAGES,
    )
    return run | {
        "engine": {
            "model": settings.model,
            "dtype": str(engine.cache.k.dtype).removeprefix("torch."),
            "kernels": settings.kernels,
            "variant": settings.variant,
            "cuda_graphs": engine.uses_graphs,
            "overlap": engine.overlaps,
            "seed": settings.seed,
        },
    }

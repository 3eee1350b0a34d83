"""Write a recording as a trace for Perfetto or chrome://tracing: one track for each request with
its phases, and counters of the pool.

The format is the Trace Event Format (Google, 2016), JSON object form; times are microseconds.
Events are written one after the other, so that a long recording needs no more memory than its
columns.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from zlab.traces.occupancy import read_occupancy
from zlab.traces.palette import PHASE_LOOKS
from zlab.traces.recording import Recording
from zlab.traces.schema import PHASES, BlockState, EventKind
from zlab.traces.timeline import Names, event_times, read_phases

REQUESTS, POOL = 1, 2  # process numbers of the request tracks and of the counters
US = 1e6
# Events without a duration, drawn beside the phases.
INSTANTS = (
    EventKind.PREEMPTED,
    EventKind.COMPRESSING,
    EventKind.REFUSED,
    EventKind.ABORTED,
    EventKind.FAILED,
)
PER_SECOND = ("output", "prefill")

Event = dict[str, Any]


def write_perfetto(recording: Recording, path: Path) -> int:
    """Write the trace and return the number of its events. Raise RecordingError before anything is
    written.
    """
    parts = (
        *_names(recording),
        _phases(recording),
        _instants(recording),
        _pool(recording),
        _steps(recording),
    )
    with path.open("w", encoding="utf-8") as file:
        return _write(file, parts)


def _write(file: TextIO, parts: tuple[Iterator[Event], ...]) -> int:
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    count = 0
    for part in parts:
        for event in part:
            file.write(",\n" if count else "\n")
            file.write(json.dumps(event, separators=(",", ":")))
            count += 1
    file.write("\n]}\n")
    return count


def _names(recording: Recording) -> tuple[Iterator[Event], ...]:
    """Return the names of the tracks. A request that a live run has not written yet is named by its
    number alone.
    """
    table = recording.table("requests", ("number", "id"))
    numbers, ids = table["number"].to_pylist(), table["id"].to_pylist()
    policy = str(recording.manifest.get("policy", ""))

    def processes() -> Iterator[Event]:
        for process, name in ((REQUESTS, f"requests ({policy})"), (POOL, f"pool ({policy})")):
            yield {
                "ph": "M",
                "pid": process,
                "tid": 0,
                "name": "process_name",
                "args": {"name": name},
            }

    def tracks() -> Iterator[Event]:
        for number, id in zip(numbers, ids, strict=True):
            name = f"r{number}" if str(number) == id else f"r{number} ({id})"
            yield {
                "ph": "M",
                "pid": REQUESTS,
                "tid": number + 1,
                "name": "thread_name",
                "args": {"name": name},
            }

    return processes(), tracks()


def _phases(recording: Recording) -> Iterator[Event]:
    phases = read_phases(recording)

    def events() -> Iterator[Event]:
        for request, phase, start, end, step in zip(
            phases.request.tolist(),
            phases.phase.tolist(),
            phases.start_s.tolist(),
            phases.end_s.tolist(),
            phases.step.tolist(),
            strict=True,
        ):
            look = PHASE_LOOKS[PHASES[phase]]
            yield {
                "ph": "X",
                "pid": REQUESTS,
                "tid": request + 1,
                "cat": "phase",
                "name": look.words,
                "ts": round(start * US, 3),
                "dur": round((end - start) * US, 3),
                "args": {"step": step},
            }

    return events()


def _instants(recording: Recording) -> Iterator[Event]:
    """Return the events without a duration on the tracks of the requests."""
    occupancy = read_occupancy(recording)
    names = Names(recording.manifest)
    table = recording.table("events", ("step", "kind", "request", "value"))
    moments, kind = event_times(table, occupancy.times, names), names.kinds(table)
    rows = np.flatnonzero(np.isin(kind, INSTANTS))
    request, value = table["request"].to_numpy(), table["value"].to_numpy()

    def events() -> Iterator[Event]:
        for row in rows.tolist():
            yield {
                "ph": "i", "s": "t", "pid": REQUESTS, "tid": int(request[row]) + 1, "cat": "event",
                "name": EventKind(kind[row]).label, "ts": round(float(moments[row]) * US, 3),
                "args": {"value": int(value[row])},
            }  # fmt: skip

    return events()


def _counter(name: str, time_s: float, values: dict[str, float]) -> Event:
    return {
        "ph": "C",
        "pid": POOL,
        "tid": 0,
        "name": name,
        "ts": round(time_s * US, 3),
        "args": values,
    }


def _pool(recording: Recording) -> Iterator[Event]:
    """Return the number of blocks in each state at every change."""
    occupancy = read_occupancy(recording)
    labels = [state.words for state in BlockState]

    def events() -> Iterator[Event]:
        for moment, counts in zip(
            occupancy.change_s.tolist(), occupancy.counts.tolist(), strict=True
        ):
            yield _counter("blocks by state", moment, dict(zip(labels, counts, strict=True)))

    return events()


def _steps(recording: Recording) -> Iterator[Event]:
    """Return the running and waiting requests, and tokens per second, at each step that changes
    them.
    """
    names = ("start_s", "end_s", "running", "waiting", *(f"{name}_tokens" for name in PER_SECOND))
    table = recording.table("steps", names)
    columns = [table[name].to_numpy() for name in names]
    last = float(columns[1][-1]) if len(columns[1]) else 0.0

    def events() -> Iterator[Event]:
        before: tuple[float, ...] = ()
        for row in zip(*(column.tolist() for column in columns), strict=True):
            start, end, running, waiting, *tokens = row
            if (running, waiting) != before:
                before = (running, waiting)
                yield _counter("requests", start, {"running": running, "waiting": waiting})
            length = end - start
            rates = [round(count / length, 1) if length > 0 else 0.0 for count in tokens]
            yield _counter(
                "tokens/s",
                start,
                {
                    name.removesuffix("_tokens"): r
                    for name, r in zip(PER_SECOND, rates, strict=True)
                },
            )
        if last:
            yield _counter("requests", last, {"running": 0, "waiting": 0})
            yield _counter("tokens/s", last, dict.fromkeys(PER_SECOND, 0))

    return events()

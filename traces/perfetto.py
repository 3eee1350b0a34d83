"""A recording as a trace for Perfetto or chrome://tracing: a track a request with its phases, counters for the pool.

Format: Trace Event Format (Google, 2016), JSON object form; times are microseconds. Events are written one after the
other, so that a long recording needs no more memory than its columns.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from traces.moments import event_times, read_names
from traces.occupancy import STATE_WORDS, STATES, read_occupancy
from traces.palette import PHASE_LOOKS
from traces.phases import PHASES, read_phases
from traces.recording import Recording

REQUESTS, POOL = 1, 2  # process numbers: tracks of requests, counters
US = 1e6
INSTANTS = ("preempted", "compressing", "refused", "aborted", "failed")
PER_SECOND = ("output", "prefill")

Event = dict[str, Any]


def write_perfetto(recording: Recording, path: Path) -> int:
    """Write the trace and return the number of its events. Raises RecordingError before anything is written."""
    parts = (*_names(recording), _phases(recording), _instants(recording), _pool(recording), _steps(recording))
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
    """Names of the tracks. Requests that a run still going on has not written down yet go by number alone."""
    table = recording.table("requests", ("number", "id"))
    numbers, ids = table["number"].to_pylist(), table["id"].to_pylist()
    policy = str(recording.manifest.get("policy", ""))

    def processes() -> Iterator[Event]:
        for process, name in ((REQUESTS, f"requests ({policy})"), (POOL, f"pool ({policy})")):
            yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}

    def tracks() -> Iterator[Event]:
        for number, id in zip(numbers, ids, strict=True):
            name = f"r{number}" if str(number) == id else f"r{number} ({id})"
            yield {"ph": "M", "pid": REQUESTS, "tid": number + 1, "name": "thread_name", "args": {"name": name}}

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
                "ph": "X", "pid": REQUESTS, "tid": request + 1, "cat": "phase", "name": look.words,
                "ts": round(start * US, 3), "dur": round((end - start) * US, 3), "args": {"step": step},
            }  # fmt: skip

    return events()


def _instants(recording: Recording) -> Iterator[Event]:
    """Moments on the tracks of requests that have no length of their own."""
    occupancy = read_occupancy(recording)
    names = read_names(recording.manifest)
    table = recording.table("events", ("step", "kind", "request", "value"))
    moments, kind = event_times(table, occupancy.times, names), table["kind"].to_numpy()
    rows = np.flatnonzero(np.isin(kind, names.kind_codes(INSTANTS)))
    words = {code: name for name, code in names.kinds.items()}
    request, value = table["request"].to_numpy(), table["value"].to_numpy()

    def events() -> Iterator[Event]:
        for row in rows.tolist():
            yield {
                "ph": "i", "s": "t", "pid": REQUESTS, "tid": int(request[row]) + 1, "cat": "event",
                "name": words[int(kind[row])], "ts": round(float(moments[row]) * US, 3),
                "args": {"value": int(value[row])},
            }  # fmt: skip

    return events()


def _counter(name: str, time_s: float, values: dict[str, float]) -> Event:
    return {"ph": "C", "pid": POOL, "tid": 0, "name": name, "ts": round(time_s * US, 3), "args": values}


def _pool(recording: Recording) -> Iterator[Event]:
    """Blocks by state at every change."""
    occupancy = read_occupancy(recording)
    labels = [STATE_WORDS[state] for state in STATES]

    def events() -> Iterator[Event]:
        for moment, counts in zip(occupancy.change_s.tolist(), occupancy.counts.tolist(), strict=True):
            yield _counter("blocks by state", moment, dict(zip(labels, counts, strict=True)))

    return events()


def _steps(recording: Recording) -> Iterator[Event]:
    """Running and waiting requests, and tokens a second, where a step changes them."""
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
                "tokens/s", start, {name.removesuffix("_tokens"): r for name, r in zip(PER_SECOND, rates, strict=True)}
            )
        if last:
            yield _counter("requests", last, {"running": 0, "waiting": 0})
            yield _counter("tokens/s", last, dict.fromkeys(PER_SECOND, 0))

    return events()

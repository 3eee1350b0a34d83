"""A run as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format", JSON object form; times in microseconds. One process holds the engine's steps and the
counters, one a thread for each request with its phases.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces.metrics import column
from traces.phases import PHASES, phases_of
from traces.run import Run

ENGINE, REQUESTS = 1, 2  # process ids
US_PER_S = 1e6
COUNTERS = {  # name of the track -> column of the `steps` table
    "running": "running",
    "waiting": "waiting",
    "free blocks": "free_blocks",
    "cached blocks": "cached_blocks",
    "waiting for a slot": "waiting_for_slot",
}
ABOUT = ("policy", "gpu", "model", "workload_sha256", "digest")
NOTABLE = ("prefills", "prefill_tokens", "compressions", "swaps", "preemptions")  # a step with none only decodes
Event = dict[str, Any]


def write_perfetto(run: Run, path: Path) -> None:
    """Write the trace, gzipped when the name ends in .gz. Steps that only decode the same requests are one slice."""
    with gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","otherData":')
        file.write(
            json.dumps({key: run.manifest[key] for key in ("policy", "gpu", "model", "workload_sha256", "digest")})
        )
        file.write(',"traceEvents":[\n')
        separator = ""
        for event in _events(run):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")


def _events(run: Run) -> Iterator[Event]:
    yield _name("process_name", f"engine, {run.manifest['policy']}", ENGINE)
    yield _name("process_name", "requests", REQUESTS)
    yield _name("thread_name", "steps", ENGINE, 0)
    yield from _steps(run.steps)
    yield from _counters(run.steps)
    yield from _requests(run)


def _name(kind: str, name: str, process: int, thread: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(name: str, process: int, thread: int, start_s: float, end_s: float, details: Event) -> Event:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": round(start_s * US_PER_S, 3),
        "dur": round((end_s - start_s) * US_PER_S, 3),
        "args": details,
    }


def _steps(steps: pa.Table) -> Iterator[Event]:
    if not steps.num_rows:
        return
    start, end, decodes = (column(steps, name) for name in ("start_s", "end_s", "decodes"))
    counts = {
        name: column(steps, name) for name in ("prefills", "prefill_tokens", "compressions", "swaps", "preemptions")
    }
    plain = ~np.any([values > 0 for values in counts.values()], axis=0)
    same = plain[1:] & plain[:-1] & (decodes[1:] == decodes[:-1]) & (start[1:] == end[:-1])
    firsts = np.concatenate(([0], np.flatnonzero(~same) + 1))
    lasts = np.append(firsts[1:] - 1, steps.num_rows - 1)
    number = column(steps, "step")
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        details: Event = {"step": int(number[first]), "steps": last - first + 1, "decodes": int(decodes[first])}
        details |= {name: int(values[first]) for name, values in counts.items() if values[first]}
        name = "prefill" if "prefills" in details else "decode"
        yield _slice(name, ENGINE, 0, float(start[first]), float(end[last]), details)


def _counters(steps: pa.Table) -> Iterator[Event]:
    start = column(steps, "start_s")
    for name, source in COUNTERS.items():
        values = column(steps, source)
        for place in _changes(values).tolist():
            moment = round(float(start[place]) * US_PER_S, 3)
            yield {"ph": "C", "name": name, "pid": ENGINE, "ts": moment, "args": {name: int(values[place])}}


def _changes(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Places at which a value differs from the one before, the first included."""
    if not len(values):
        return np.zeros(0, dtype=np.int64)
    return np.concatenate(([0], np.flatnonzero(np.diff(values)) + 1))


def _requests(run: Run) -> Iterator[Event]:
    for row in run.requests.select(["number", "id"]).to_pylist():
        yield _name("thread_name", f"{row['id']}", REQUESTS, row["number"])
    phases = phases_of(run.events, run.steps, run.manifest, run.requests)
    columns = (phases.request, phases.phase, phases.start_s, phases.end_s, phases.step)
    for request, phase, start_s, end_s, step in zip(*(values.tolist() for values in columns), strict=True):
        yield _slice(PHASES[phase], REQUESTS, request, start_s, end_s, {"step": step})

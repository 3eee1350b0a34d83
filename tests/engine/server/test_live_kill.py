"""Kill -9 while traffic is recorded: trace and recording can be read, belong together, and are decided again."""

import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from policies.core.events import Kind
from sim.recorded import RecordedRun
from sim.redecide import redecide
from tests.shared import REPOSITORY
from traces.asked import read_asked
from traces.formats import read_trace
from traces.recording import TABLES, Recording
from traces.run import load_run
from traces.torn import TornLineWarning

START_WITHIN_S = 120.0


@contextmanager
def recording_process(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.engine.server.live_process", str(folder)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_rows(process: subprocess.Popen[bytes], folder: Path, num_rows: int) -> Path:
    """Until the trace has so many rows; returns the recording's folder."""
    deadline = time.monotonic() + START_WITHIN_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        for trace in folder.glob("*/trace-00000.jsonl"):
            if trace.read_bytes().count(b"\n") >= num_rows and (trace.parent / "live" / "manifest.json").is_file():
                return trace.parent
        time.sleep(0.001)
    raise AssertionError(f"no {num_rows} rows within {START_WITHIN_S:.0f} s")


SOAK = [pytest.param(num_rows, marks=pytest.mark.soak) for num_rows in (1, 2, 5, 11, 17, 44, 71, 113)]


@pytest.mark.parametrize("num_rows", [30, *SOAK])
def test_a_killed_server_leaves_a_trace_and_a_recording(tmp_path: Path, num_rows: int) -> None:
    with recording_process(tmp_path) as process:
        folder = wait_for_rows(process, tmp_path, num_rows)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornLineWarning)
        workload = read_trace(folder / "trace-00000.jsonl")
        asked = read_asked(folder / "live")
        checked = RecordedRun(folder / "live")
    assert len(workload) >= num_rows
    recording = Recording(folder / "live")
    assert not recording.complete
    rows = recording.manifest["rows"]
    found = {table: recording.table(table).num_rows for table in TABLES}
    found["requests"] -= recording.table("requests")["status"].to_pylist().count("unfinished")
    assert found == rows
    assert any(folder.glob("live/*/*.tail"))
    run = load_run(folder / "live")
    assert run.summary["output_tokens"] > 0
    assert run.steps["step"].to_pylist() == list(range(run.steps.num_rows))
    arrived = (run.events["kind"].to_numpy() == Kind.ARRIVED).sum()
    assert sorted(run.requests["number"].to_pylist()) == list(range(arrived))
    assert checked.requests.num_rows == arrived
    assert redecide(run.manifest, run.requests, run.events, asked).digest == run.manifest["digest"]

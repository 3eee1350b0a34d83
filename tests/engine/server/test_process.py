"""`zlab serve` as a process: started, told to stop, asked wrongly; what its log says, and what it
never says.

Kill -9 while traffic is recorded: trace and recording can be read, belong together, and are decided
again.
"""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests.engine.server.server_cases import ROOMY, WAIT_S, lettered, served, wait_for
from tests.shared import REPOSITORY
from zlab.cli.main import app
from zlab.engine.server.app import create_app
from zlab.engine.server.context import open_context
from zlab.engine.server.launch import Process
from zlab.sim.recorded_run import RecordedRun, redecide
from zlab.traces.formats import read_trace
from zlab.traces.recording import TABLES, Recording, TornLineWarning, load_run, read_asked
from zlab.traces.schema import EventKind

API, ADMIN = "the-api-key-of-this-test", "the-admin-key-of-this-test"
PROMPT = [701, 702, 703, 704]
OPTIONS = [
    "--model",
    "dummy:tiny",
    "--device",
    "cpu",
    "--port",
    "0",
    "--kv-blocks",
    "64",
    "--block-size",
    "64",
]
GATES = ["--gates", str(REPOSITORY / "docs" / "examples" / "gates.toml")]
REGISTRY = ["--policy", "full-kv", "--registry", "r.db", "--gpu"]
TIMES = r"\d\d:\d\d:\d\d,\d{3}|\d+\.\d+"  # have any digits, and so now and then those of a token
START_S = 240.0  # a machine that is busy with other things
MANY = 1500  # tokens: enough for a signal to come in the middle


class Zlab:
    """A server of its own; `log` grows as it writes."""

    def __init__(self, *options: str) -> None:
        keys = {"ZLAB_API_KEY": API, "ZLAB_ADMIN_KEY": ADMIN}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **keys}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "zlab", "serve", *OPTIONS, *options],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.log = ""
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def url(self) -> str:
        """Where it listens, once it does."""
        while True:
            line = self._lines.get(timeout=START_S)
            assert line is not None, f"it has ended: {self.log}"
            if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
                return found.group(1)

    def client(self, url: str) -> httpx.Client:
        """With the API key."""
        return httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {API}"}, timeout=WAIT_S
        )

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit code."""
        code = self.process.wait(WAIT_S)
        self._reading.join(WAIT_S)
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log += line
            self._lines.put(line)
        self._lines.put(None)


@contextmanager
def running(*options: str) -> Iterator[Zlab]:
    server = Zlab(*options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.wait()
        assert server.process.stdout is not None
        server.process.stdout.close()


def body(**more: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPT,
        "temperature": 0.0,
        "ignore_eos": True,
        "max_tokens": MANY,
        "return_token_ids": True,
    } | more


def chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))


def test_the_first_sigterm_drains_and_the_log_tells_nothing_of_anybody(tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    with running("--record", str(folder)) as server:
        url = server.url()
        with server.client(url) as client:
            assert client.get("/health", headers={"Authorization": ""}).status_code == 200
            assert (
                client.get("/v1/models", headers={"Authorization": "Bearer nobody"}).status_code
                == 401
            )
            wrong = client.post(
                "/v1/completions", json=body(prompt="a secret wish", request_id="text")
            )
            assert wrong.status_code == 400
            other = client.get("/v1/policy", headers={"Authorization": f"Bearer {ADMIN}"}).json()[
                "lanes"
            ][0]
            assert (other["policy"], other["evidence"]) == ("hybrid", None)
            with client.stream(
                "POST", "/v1/completions", json=body(stream=True, request_id="mine")
            ) as answer:
                pieces = chunks(answer.iter_lines())
                given = [next(pieces) for _ in range(3)]
                server.signal(signal.SIGTERM)
                wait_for(lambda: "draining: 1 requests" in server.log, "the drain")
                assert client.get("/health").status_code == 503
                assert client.post("/v1/completions", json=body()).status_code == 503
                given += pieces
        assert given[-1]["choices"][0]["finish_reason"] == "length"
        tokens = [token for chunk in given for token in chunk["choices"][0]["token_ids"]]
        assert len(tokens) == MANY
        assert server.wait() == 0
    assert f"mine 200: 4 prompt and {MANY} output tokens" in server.log
    for secret in (API, ADMIN, "701", "secret wish", str(tokens[0])):
        assert re.search(rf"\b{secret}\b", re.sub(TIMES, "", server.log)) is None, (
            f"{secret} is in the log"
        )
    assert [path.name for path in folder.iterdir()] == [
        path.name for path in folder.iterdir() if path.is_dir()
    ]
    (trace,) = folder.glob("*/trace-*.jsonl")
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [row["output_tokens"] for row in rows if "output_tokens" in row] == [MANY]
    assert "701" not in re.sub(TIMES, "", trace.read_text())


def test_the_second_sigterm_stops() -> None:
    with served(ends_well=False) as server:
        server.gate.close()
        cut_off = server.later("/v1/completions", {"prompt": "abc", "max_tokens": 30})
        server.sent(1)
        server.process.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: server.context.concurrency.closed, "the drain")
        assert not server.process.should_exit
        server.process.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: server.process.should_exit, "the end")
        server.gate.open()
        assert cut_off.answer().json()["error"]["code"] == "shutting_down"
        assert server.process.exit_code == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--host", "0.0.0.0"],
            ["--host 0.0.0.0 is reached from other machines", "ZLAB_API_KEY", "--open-to-all"],
        ),
        (["--canary-share", "1.5"], ["--canary-share must be between 0 and 1, not 1.5"]),
        (["--registry", "r.db"], ["--registry needs --gpu"]),
        (["--registry", "nix.db", "--gpu", "h200"], ["no registry at nix.db", "zlab validate"]),
        ([*REGISTRY, "h200"], ["unknown model 'tiny'", "--target-model says which"]),
        (
            [*REGISTRY, "h20", "--target-model", "qwen3-8b"],
            ["unknown GPU 'h20'; did you mean 'h200'?"],
        ),
        ([*REGISTRY, "h200", "--target-model", "qwen3-9b"], ["qwen3-9b", "qwen3-8b"]),
        (["--gpu", "h200"], ["--gpu", "--registry", "there is none"]),
        (["--record-text"], ["--record-text", "there is none"]),
        (["--api-key-file", "/nothing/there"], ["no keys can be read from /nothing/there"]),
        (["--max-body-mib", "0"], ["--max-body-mib must be above 0, not 0"]),
        (["--max-body-mib", "inf"], ["--max-body-mib must be finite, not inf"]),
        (["--request-timeout", "-1"], ["error: --request-timeout must be above 0, not -1"]),
        (["--request-timeout", "nan"], ["error: --request-timeout must be above 0, not nan"]),
        (["--grace", "-0.5"], ["error: --grace must be 0 or more, not -0.5"]),
        (["--grace", "inf"], ["error: --grace must be finite, not inf"]),
        ([*GATES, "--watch-window", "0"], ["error: --watch-window must be above 0, not 0"]),
        ([*GATES, "--watch-min-requests", "0"], ["Invalid value for '--watch-min-requests'"]),
        (
            ["--watch-window", "9"],
            ["--watch-window would say how --gates are watched, and there are none"],
        ),
        (
            ["--watch-window", "9", "--watch-min-requests", "2"],
            ["--watch-window and --watch-min-requests would say how --gates are watched"],
        ),
        (
            ["--host", "192.0.2.1", "--open-to-all"],
            ["cannot listen on 192.0.2.1 port", "--port 0 takes a free port"],
        ),
        (["-p", "hybrd"], ["unknown policy 'hybrd'; did you mean 'hybrid'?"]),
        (["-m", "nosuch"], ["model 'nosuch' does not exist (choices: a Hugging Face folder"]),
    ],
)
def test_misuse_is_named(
    options: Sequence[str], said: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ZLAB_API_KEY", "ZLAB_ADMIN_KEY", "ZLAB_REGISTRY"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(app, ["serve", *OPTIONS, *options])
    assert done.exit_code == 2
    for words in said:
        assert words in " ".join(done.output.split())


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = CliRunner().invoke(app, ["serve", "--model", "no-such-model", "--port", str(port)])
        assert done.exit_code == 2
        assert (
            f"error: cannot listen on 127.0.0.1 port {port}: Address already in use" in done.output
        )
        context = open_context(ROOMY, served_model="tiny", loaded=lettered())
        try:
            late = Process(create_app(context), context, "127.0.0.1", port)
            late.run()
        finally:
            context.close(WAIT_S)
        assert late.exit_code == 1, "somebody else was faster"


@contextmanager
def recording_process(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.engine.server.live_process", str(folder)]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_rows(process: subprocess.Popen[bytes], folder: Path, num_rows: int) -> Path:
    """Until the trace has so many rows; returns the recording's folder."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        for trace in folder.glob("*/trace-00000.jsonl"):
            if (
                trace.read_bytes().count(b"\n") >= num_rows
                and (trace.parent / "live" / "manifest.json").is_file()
            ):
                return trace.parent
        time.sleep(0.001)
    raise AssertionError(f"no {num_rows} rows within {START_S:.0f} s")


SOAK = [
    pytest.param(num_rows, marks=pytest.mark.soak) for num_rows in (1, 2, 5, 11, 17, 44, 71, 113)
]


@pytest.mark.parametrize("num_rows", [30, *SOAK])
def test_a_killed_server_leaves_a_trace_and_a_recording(tmp_path: Path, num_rows: int) -> None:
    with recording_process(tmp_path) as process:
        folder = wait_for_rows(process, tmp_path, num_rows)
        process.send_signal(signal.SIGKILL)
        process.wait(START_S)
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
    arrived = (run.events["kind"].to_numpy() == EventKind.ARRIVED).sum()
    assert sorted(run.requests["number"].to_pylist()) == list(range(arrived))
    assert checked.requests.num_rows == arrived
    assert redecide(run.manifest, run.requests, run.events, asked).digest == run.manifest["digest"]

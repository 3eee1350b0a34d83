"""`zlab serve --replicas 2` as a process of its own, with two tiny replicas on the CPU.

On request the replicas run on a Ray cluster of this machine.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from tests.ports import free_port
from tests.shared import REPOSITORY
from zlab.cli.main import app
from zlab.engine.llm import LLM
from zlab.engine.sampling_params import SamplingParams
from zlab.policies.snapshot import store_policy
from zlab.policies.spec import load_policy, policy_digest

BOUND_S = 240.0  # for anything awaited; a busy machine of two cores is slow to start processes
API_KEY, ADMIN_KEY = "a-key-of-the-api", "the-key-of-the-admin"
AS_CLIENT = {"Authorization": f"Bearer {API_KEY}"}
# Ray takes 127.0.0.1 as the address of a machine with this switch only.
LOOPBACK_NODE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
MARK = "ZLAB_TEST_SERVER"  # in the environment of everything that the process starts
BLOCK_SIZE, NUM_BLOCKS = 16, 800
LONG = 12_000  # tokens; nobody waits for their end
POLICY, PROMOTED = "full-kv", "full-kv:order=shortest-prompt"
OPTIONS = {
    "--model": "dummy:tiny",
    "--device": "cpu",
    "--replicas": "2",
    "--policy": POLICY,
    "--port": "0",
    "--kv-blocks": str(NUM_BLOCKS),
    "--block-size": str(BLOCK_SIZE),
    "--max-running": "16",
    "--max-batched-tokens": "256",
}
LISTENING = re.compile(r"Uvicorn running on (http://127\.0\.0\.1:\d+)")


class Server:
    """The process, and requests to it."""

    def __init__(self, folder: Path, *options: str) -> None:
        """`folder` takes the log and the sockets."""
        self.folder = folder
        self._log = folder / "log"
        log = self._log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "zlab",
                    "serve",
                    *(word for pair in OPTIONS.items() for word in pair),
                    *options,
                ],
                cwd=REPOSITORY,
                env=os.environ
                | {"ZLAB_API_KEY": API_KEY, "ZLAB_ADMIN_KEY": ADMIN_KEY, MARK: str(log)}
                | {"TMPDIR": str(folder)}
                | LOOPBACK_NODE,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        self.url = ""

    def wait_until_ready(self) -> None:
        wait_for(
            lambda: LISTENING.search(self.log) or self.process.poll() is not None,
            "the server listens",
        )
        found = LISTENING.search(self.log)
        assert found is not None, self.log
        self.url = found[1]

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=BOUND_S).json()
        return found

    def complete(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        body = {
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "return_token_ids": True,
        } | fields
        answer = httpx.post(
            f"{self.url}/v1/completions", json=body, headers=AS_CLIENT, timeout=BOUND_S
        )
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def total(self, metric: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels, over all replicas."""
        page = httpx.get(f"{self.url}/metrics", headers=AS_CLIENT, timeout=BOUND_S)
        assert page.status_code == 200, page.text
        families = text_string_to_metric_families(page.text)
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == metric and labels.items() <= sample.labels.items()
        )

    def digests(self) -> dict[str, str]:
        """Of the policy by which each replica serves, by its name."""
        found = httpx.get(f"{self.url}/v1/policy", headers=AS_CLIENT, timeout=BOUND_S).json()
        return {name: row["lanes"][0]["digest"] for name, row in found["replicas"].items()}

    @contextlib.contextmanager
    def stream(self, prompt: list[int], max_tokens: int) -> Iterator[Iterator[str]]:
        """Events of a stream that has begun."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        with httpx.stream(
            "POST", f"{self.url}/v1/completions", json=body, headers=AS_CLIENT, timeout=BOUND_S
        ) as answer:
            assert answer.status_code == 200
            events = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
            next(events)
            yield events

    def family(self) -> dict[int, str]:
        """Every process that came from this one, by id, whoever its parent is by now: its command
        line.
        """
        return family(str(self._log))


def family(mark: str) -> dict[int, str]:
    """Every process that has this mark in its environment, by id: its command line."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (path / "environ").read_bytes()
            if f"{MARK}={mark}\0".encode() in environment:
                found[int(path.name)] = (
                    (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                )
    return found


def wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.05)


@contextlib.contextmanager
def running(*options: str) -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="zlab-", dir="/tmp"))  # short enough for sockets
    made = Server(folder, *options)
    try:
        made.wait_until_ready()
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        for pid in made.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as made:
        yield made


def prompt(first: int, num_tokens: int = 3 * BLOCK_SIZE) -> list[int]:
    return [first, *range(1, num_tokens)]


def test_both_replicas_are_well_and_nothing_listens_to_other_machines(server: Server) -> None:
    found = server.health()
    assert (found["status"], found["replicas_wanted"]) == ("ok", 2)
    assert {row["status"] for row in found["replicas"].values()} == {"ok"}
    pids = {row["pid"] for row in found["replicas"].values()}
    assert len(pids) == 2
    assert pids <= server.family().keys()
    assert server.process.pid not in pids
    assert open_ports(server.family().keys()) == {"0100007F"}, "the front's, on 127.0.0.1"
    (sockets,) = server.folder.glob("zlab-replicas-*")
    assert sockets.stat().st_mode & 0o77 == 0, "no other user reaches a replica"


def open_ports(pids: Any) -> set[str]:
    """The local addresses, in the kernel's hexadecimal, on which these processes listen."""
    addresses = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # listening
                addresses[f"socket:[{fields[9]}]"] = fields[1].partition(":")[0]
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for handle in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(addresses.get(os.readlink(handle), ""))
    return found - {""}


def test_answers_are_those_of_an_engine_without_a_server(server: Server) -> None:
    prompts = [prompt(number, 20 + number) for number in range(6)]
    params = SamplingParams(max_tokens=24, temperature=0.0)
    llm = LLM(
        "dummy:tiny", POLICY, device="cpu", num_blocks=64, block_size=BLOCK_SIZE, max_running=16
    )
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    answers = [server.complete(each, max_tokens=24) for each in prompts]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0)
    with client:
        chunks = list(
            client.completions.create(
                model="tiny", prompt=prompts[0], max_tokens=24, temperature=0.0, stream=True,
                extra_body={"return_token_ids": True}, stream_options={"include_usage": True},
            )
        )  # fmt: skip
    streamed = [
        token
        for chunk in chunks
        for choice in chunk.choices
        for token in choice.token_ids or ()  # type: ignore[attr-defined]
    ]
    assert streamed == expected[0]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_a_prefix_comes_back_to_the_blocks_that_hold_it(server: Server) -> None:
    for first in range(100, 106):
        before = server.complete(prompt(first))["usage"]["prompt_tokens_details"]["cached_tokens"]
        again = [server.complete([*prompt(first), number])["usage"] for number in range(3)]
        assert before == 0
        assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in again] == [
            3 * BLOCK_SIZE
        ] * 3


def test_new_prefixes_use_both_replicas_and_a_client_that_leaves_frees_its_own(
    server: Server,
) -> None:
    def aborted(replica: str) -> float:
        return server.total("vllm:request_success_total", finished_reason="abort", replica=replica)

    before = {replica: aborted(replica) for replica in ("0", "1")}
    with server.stream(prompt(200), LONG), server.stream(prompt(201), LONG):
        rows = server.health()["replicas"].values()
        assert [(row["under_way"], row["sent"]) for row in rows] == [(1, 1), (1, 1)]
        for replica in before:
            assert server.total("vllm:num_requests_running", replica=replica) == 1
    for replica, num in before.items():
        wait_for(
            lambda replica=replica, num=num: aborted(replica) == num + 1,  # type: ignore[misc]
            "the request is called off",
        )
        assert server.total("vllm:num_requests_running", replica=replica) == 0
        assert server.total("zlab:blocks", state="free", replica=replica) > 0
    assert server.total("zlab:replica_up") == 2
    assert server.total("zlab:replica_outputs_under_way") == 0


def test_errors_and_keys_are_those_of_a_single_server(server: Server) -> None:
    def post(body: Any, headers: dict[str, str]) -> httpx.Response:
        return httpx.post(
            f"{server.url}/v1/completions", json=body, headers=headers, timeout=BOUND_S
        )

    assert post({"prompt": [1]}, {}).json()["error"]["code"] == "invalid_api_key"
    wrong = post({"prompt": [1], "n": 0}, AS_CLIENT)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "n")
    assert post({"prompt": [1], "model": "other"}, AS_CLIENT).status_code == 404
    large = post({"prompt": [1], "user": "x" * (5 << 20)}, AS_CLIENT)
    assert large.status_code == 413


def promote(server: Server, policy: str, key: str = ADMIN_KEY) -> httpx.Response:
    stored = store_policy(load_policy(policy))
    body = {
        "lane": "live",
        "policy": stored.toml,
        "digest": stored.digest,
        "name": stored.name,
        "who": "a test",
    }
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/policy", json=body, headers=headers, timeout=BOUND_S)


def test_a_policy_takes_over_in_every_replica_or_in_none(server: Server) -> None:
    first = policy_digest(load_policy(POLICY))
    assert server.digests() == {"0": first, "1": first}
    assert promote(server, PROMOTED, key=API_KEY).status_code == 401
    impossible = promote(server, "constrained")
    assert impossible.status_code == 409, impossible.text
    assert impossible.json()["error"]["code"] == "policy_refused"
    assert server.digests() == {"0": first, "1": first}
    with server.stream(prompt(250), LONG):
        answer = promote(server, PROMOTED)
        assert answer.status_code == 200, answer.text
        promoted = policy_digest(load_policy(PROMOTED))
        assert {
            name: row["digest"] for name, row in answer.json()["replicas"].items()
        } == server.digests()
        assert server.digests() == {"0": promoted, "1": promoted}
        assert server.total("vllm:num_requests_running") == 1
        before = server.total("vllm:generation_tokens_total")
        wait_for(lambda: server.total("vllm:generation_tokens_total") > before, "what runs goes on")


def test_a_replica_that_is_killed_is_replaced_and_only_its_streams_break(server: Server) -> None:
    assert promote(server, PROMOTED).status_code == 200
    with server.stream(prompt(300), LONG) as broken:
        rows = server.health()["replicas"]
        victim = next(name for name, row in rows.items() if row["sent"])
        with server.stream(prompt(301), 400) as whole:
            answers: list[dict[str, Any]] = []
            waiting = [
                threading.Thread(
                    target=lambda first=first: answers.append(
                        server.complete(prompt(first), max_tokens=200)
                    )
                )
                for first in range(310, 314)
            ]
            for thread in waiting:
                thread.start()
            os.kill(rows[victim]["pid"], signal.SIGKILL)
            *_, lost, done = broken
            assert (json.loads(lost)["error"]["code"], done) == ("replica_lost", "[DONE]")
            *_, last, done = whole
            assert (json.loads(last)["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
            for thread in waiting:
                thread.join(BOUND_S)
            assert len(answers) == 4, "what had not begun to be answered is answered by the other"
    wait_for(lambda: server.health()["status"] == "ok", "the replica is replaced")
    assert server.health()["replicas"][victim]["pid"] != rows[victim]["pid"]
    assert set(server.digests().values()) == {policy_digest(load_policy(PROMOTED))}, (
        "the newcomer has caught up"
    )
    assert server.complete(prompt(302))["usage"]["completion_tokens"] == 8


def test_the_first_sigterm_lets_what_runs_finish_and_leaves_nothing_behind(server: Server) -> None:
    assert len(list(server.folder.glob("zlab-replicas-*"))) == 1
    with server.stream(prompt(400), 200) as events:
        server.process.send_signal(signal.SIGTERM)
        *_, last, done = events
    assert (json.loads(last)["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    assert server.process.wait(BOUND_S) == 0, server.log
    wait_for(lambda: not server.family(), "every process has ended")
    assert not list(server.folder.glob("zlab-replicas-*"))


def test_a_front_that_is_killed_leaves_no_process_behind() -> None:
    with running() as server:
        assert len(server.family()) == 3
        with server.stream(prompt(500), LONG):
            server.process.kill()
            wait_for(lambda: not server.family(), "every process has ended")


@pytest.fixture
def cluster() -> Iterator[str]:
    """A Ray cluster of this machine alone, reached from it only."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("a cluster needs Ray: pip install 'zipage-lab[replicas]'")
    port = free_port()
    folder = tempfile.mkdtemp(prefix="zr-", dir="/tmp")  # Ray's sockets take 67 characters more
    options = ["--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=3"]
    options += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    if importlib.util.find_spec("grpc") is not None:  # Ray refuses the option without its client
        options += [f"--ray-client-server-port={free_port()}"]
    options += ["--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"]
    log = Path(folder) / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("ray"), "start", "--head", "--block", *options],
            env=os.environ | LOOPBACK_NODE | {MARK: folder},
            stdout=sink,
            stderr=sink,
        )
    try:
        wait_for(lambda: connects(port) or process.poll() is not None, "the cluster")
        assert process.poll() is None, log.read_text()
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()  # SIGTERM would drain it for half a minute
        process.wait()
        for pid in family(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def connects(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_replicas_run_on_a_ray_cluster(cluster: str) -> None:
    with running("--cluster", cluster) as server:
        found = server.health()
        assert (found["status"], found["replicas_wanted"]) == ("ok", 2)
        one = server.complete(prompt(600))
        again = server.complete(prompt(600))
        assert one["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * BLOCK_SIZE
        assert promote(server, PROMOTED).status_code == 200
        victim = found["replicas"]["0"]["pid"]
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: server.health()["replicas"]["0"].get("pid") != victim, "it is missed")
        wait_for(lambda: server.health()["status"] == "ok", "the replica is replaced")
        assert set(server.digests().values()) == {policy_digest(load_policy(PROMOTED))}
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(BOUND_S) == 0, server.log
        pids = {row["pid"] for row in found["replicas"].values()}
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the actors' end")


def test_a_cluster_that_is_not_there_is_named() -> None:
    options = [*(word for pair in OPTIONS.items() for word in pair), "--cluster", "127.0.0.1:1"]
    done = subprocess.run(
        [sys.executable, "-m", "zlab", "serve", *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 2
    assert "no Ray cluster can be reached at '127.0.0.1:1'" in done.stderr


def test_a_replica_that_cannot_be_opened_is_named_with_the_reason() -> None:
    done = CliRunner().invoke(
        app, ["serve", *(word for pair in OPTIONS.items() for word in pair), "--model", "nosuch"]
    )
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert "the replicas did not start: model 'nosuch' does not exist" in said

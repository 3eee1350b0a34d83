"""The README's commands work as written: each is run, on a small workload where it says TRACE."""

import csv
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.ports import free_port
from zlab.traces.formats import write_native
from zlab.traces.synthetic import fixed

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
SMALL = "synth:amc23?num_problems=3&samples=2&cap=600"
ENGINE = ("generate", "bench", "parity", "serve")  # run by tests/engine, or in the story below


def blocks(language: str) -> list[str]:
    """Fenced blocks of a language."""
    parts = README.split("```")[1::2]  # what stands between an opening and a closing fence
    named = [part.partition("\n") for part in parts]
    return [body for name, _, body in named if name == language]


def commands() -> list[str]:
    """Every zlab command of the README, comments cut off."""
    lines = [line.split(" #")[0].strip() for block in blocks("") for line in block.splitlines()]
    return [
        line for line in lines if line.startswith("zlab ") and shlex.split(line)[1] not in ENGINE
    ]


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zlab", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=environment()
    )


def environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": "/tmp", "COLUMNS": "100"}


def test_there_are_commands_to_run() -> None:
    assert len(commands()) >= 5


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_readme_runs(command: str, tmp_path: Path) -> None:
    arguments = [SMALL if word == "TRACE" else word for word in shlex.split(command)[1:]]
    (tmp_path / "mine.py").write_text(blocks("python")[1], "utf-8")
    done = run(arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    words = " ".join((done.stdout + done.stderr).split())
    for complaint in ("error", "could not run", "Traceback"):
        assert complaint not in words, words


def test_the_sweep_of_the_readme_has_a_baseline_and_no_error(tmp_path: Path) -> None:
    (command,) = [line for line in commands() if line.startswith("zlab sweep")]
    arguments = [SMALL if word == "TRACE" else word for word in shlex.split(command)[1:]]
    assert run(arguments, tmp_path).returncode == 0
    with (tmp_path / "points.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["policy"], row["budget.tokens"]) for row in rows] == [
        ("full-kv", ""),
        ("hybrid", "1024"),
        ("hybrid", "2048"),
        ("hybrid", "4096"),
    ]
    assert not any(row["error"] for row in rows)
    assert all(int(row["requests_finished"]) == 6 for row in rows)


def steps() -> list[str]:
    """The commands of the part on serving, each on one line."""
    (block,) = blocks("sh")
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    return [re.split(r"\s{2,}#", line)[0].strip() for line in lines]


def wait_until_well(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(3000):  # five minutes: a fault would hang, a busy machine is slow
        assert server.poll() is None, log.read_text("utf-8")
        try:
            with urllib.request.urlopen(f"{url}/health"):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise AssertionError(f"the server never was well: {log.read_text('utf-8')}")


def test_from_a_recording_to_a_live_policy(tmp_path: Path) -> None:
    """The six commands in their order; only the port is another, for tests run side by side."""
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", tmp_path / "server.log"
    where = environment() | {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    servers: list[subprocess.Popen[bytes]] = []

    def stop() -> None:
        servers[-1].send_signal(signal.SIGTERM)
        assert servers[-1].wait(300) == 0, log.read_text("utf-8")

    said = []
    try:
        for command in steps():
            words = command.replace("http://127.0.0.1:8000", url)
            if words.startswith("zlab serve"):
                with log.open("ab") as written:
                    servers.append(
                        subprocess.Popen(
                            ["bash", "-c", f"exec {words} --port {port}"], cwd=tmp_path, env=where,
                            stdout=written, stderr=written,
                        )
                    )  # fmt: skip
                wait_until_well(url, servers[-1], log)
                continue
            if words.startswith("zlab validate"):
                stop()
            done = subprocess.run(
                ["bash", "-c", words],
                cwd=tmp_path,
                env=where,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, (
                f"{words}\n{done.stdout}\n{done.stderr}\n{log.read_text('utf-8')}"
            )
            said.append(done.stdout)
        with urllib.request.urlopen(f"{url}/v1/policy") as answer:
            assert b'"policy":"constrained:tokens=48,window=8"' in answer.read()
        stop()
    finally:
        for server in servers:
            if server.poll() is None:
                os.kill(server.pid, signal.SIGKILL)
                server.wait()
    traffic, validated, promoted, history = said
    assert traffic.strip() == "8 x length"
    assert "PASSED" in validated
    assert "is live for smollm2-135m on l40s" in promoted
    assert "validated -> live" in " ".join(history.split())


def test_the_replay_of_the_readme_works_as_written(tmp_path: Path) -> None:
    source, _ = blocks("python")
    write_native(fixed(8, 64, 32, 4.0, 1), tmp_path / "trace.jsonl")
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["full-kv", "hybrid:budget.tokens=1024"]
    assert all(int(line.split()[2]) == 8 and float(line.split()[1]) > 0 for line in lines)


def test_the_policy_of_the_readme_works_as_written(tmp_path: Path) -> None:
    _, source = blocks("python")
    (tmp_path / "mine.py").write_text(source, "utf-8")
    done = run(
        ["replay", SMALL, "--policy", "mine.py:ShortestPromptFirst", "--kv-blocks", "64", "--json"],
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert '"policy": "mine.py:ShortestPromptFirst"' in done.stdout
    assert len([line for line in source.splitlines() if line]) <= 6


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"\bmake ([a-z]+)", README))
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), (
            f"make {target} is not in the Makefile"
        )


def test_linked_files_exist() -> None:
    for path in re.findall(r"\]\(([^)]+)\)|`(docs/[\w/.]+|tests/[\w/.]+)`", README):
        target = path[0] or path[1]
        if target.startswith("https://"):
            continue
        assert (ROOT / target).exists(), f"README names {target}, which does not exist"

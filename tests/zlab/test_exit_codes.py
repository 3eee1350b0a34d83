"""One convention over every command that reads a trace or a recording: damaged is 1, not there is misuse and 2."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from tests.house_source import ROOT
from tests.sim.disguised import change_manifest
from tests.sim.test_trust import KEPT
from tests.zlab.command_line import SMALL, errors, zlab

ROOFLINE = ("--gpu", "h200", "--model", "smollm2-135m")
GATES = str(ROOT / "docs" / "examples" / "gates.toml")
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2024-05-10 00:00:00.000000,10,5\n"

TRACE_READERS: dict[str, tuple[str, ...]] = {  # "TRACE" and "OUT" are replaced
    "replay": ("replay", "TRACE"),
    "compare": ("compare", "TRACE", "-p", "hybrid"),
    "sweep": ("sweep", "TRACE", "--grid", "kv-blocks=40"),
    "validate": ("validate", "hybrid", "--trace", "TRACE", "--gates", GATES, "--against", "full-kv"),
    "bench": ("bench", "TRACE", "--model", "dummy:tiny"),
    "parity": ("parity", "TRACE"),
    "drift": ("drift", str(KEPT), *ROOFLINE, "--trace", "TRACE"),
    "trace info": ("trace", "info", "TRACE"),
    "trace check": ("trace", "check", "TRACE"),
    "trace convert": ("trace", "convert", "TRACE", "OUT"),
    "trace cut": ("trace", "cut", "TRACE", "OUT", "--first", "1"),
    "trace scale": ("trace", "scale", "TRACE", "OUT", "--faster", "2"),
    "trace join": ("trace", "join", SMALL, "TRACE", "--out", "OUT"),
    "trace synth servegen": ("trace", "synth", "servegen", "--rates", "TRACE", "--lengths", "TRACE", "--out", "OUT"),
}  # fmt: skip
RECORDING_READERS: dict[str, tuple[str, ...]] = {
    "trust": ("trust", "RUN", *ROOFLINE),
    "drift": ("drift", "RUN", *ROOFLINE),
    "parity": ("parity", "--recording", "RUN"),
    "report": ("report", "RUN", "--out", "OUT"),
}
BAD_TRACES: dict[str, bytes] = {
    "a bad row": (HEAD + ROW + "2024-05-10 00:00:01.000000,-1,5\n").encode(),
    "no known format": b"a,b\n1,2\n",
    "nothing": b"",
    "no row": HEAD.encode(),
    "no text": bytes(range(256)),
    "half a gzip file": gzip.compress((HEAD + ROW).encode(), mtime=0)[:40],
}
ENGINE_ONLY = {  # a report needs neither the policy nor what was asked
    "without its limits",
    "without its policy",
    "with a policy that is none",
    "without what was asked",
}
BAD_RECORDINGS: dict[str, Callable[[Path], object]] = {
    "without a manifest": lambda run: (run / "manifest.json").unlink(),
    "with half a manifest": lambda run: (run / "manifest.json").write_text("{", "utf-8"),
    "of another version": lambda run: change_manifest(run, format="zlab-recording/9"),
    "with a part that is none": lambda run: (run / "events" / "00000.parquet").write_bytes(b"PAR1 rubbish"),
    "without its limits": lambda run: _without(run, "limits"),
    "without its policy": lambda run: _without(run, "policy_toml"),
    "with a policy that is none": lambda run: change_manifest(run, policy_toml="x = 1\n"),
    "without what was asked": lambda run: (run / "asked.jsonl").write_bytes(b"\xff\xff\n"),
}


READ_AND_BAD = [
    (command, damage)
    for command in RECORDING_READERS
    for damage in BAD_RECORDINGS
    if command != "report" or damage not in ENGINE_ONLY
]


def _without(run: Path, key: str) -> None:
    path = run / "manifest.json"
    kept = {name: value for name, value in json.loads(path.read_text("utf-8")).items() if name != key}
    path.write_text(json.dumps(kept), "utf-8")


def call(command: tuple[str, ...], out: Path, place: Path) -> Result:
    words = {"TRACE": str(place), "RUN": str(place), "OUT": str(out)}
    return zlab(*(words.get(word, word) for word in command))


@pytest.mark.parametrize("damage", BAD_TRACES)
@pytest.mark.parametrize("command", TRACE_READERS)
def test_a_trace_that_cannot_be_read_ends_with_1(command: str, damage: str, tmp_path: Path) -> None:
    path = tmp_path / ("trace.csv.gz" if "gzip" in damage else "trace.csv")
    path.write_bytes(BAD_TRACES[damage])
    result = call(TRACE_READERS[command], tmp_path / "out.jsonl", path)
    assert isinstance(result.exception, SystemExit), "one line, no traceback"
    assert result.exit_code == 1
    assert str(path) in errors(result) or "GeneratedTokens" in result.stdout or "ContextTokens is -1" in result.stdout
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("command", TRACE_READERS)
def test_a_trace_that_is_not_there_is_misuse(command: str, tmp_path: Path) -> None:
    for place in (tmp_path / "nowhere.csv", tmp_path):
        result = call(TRACE_READERS[command], tmp_path / "out.jsonl", place)
        assert result.exit_code == 2
        assert "nowhere.csv" in errors(result) or tmp_path.name in errors(result)
        assert result.stdout == ""


@pytest.mark.parametrize(("command", "damage"), READ_AND_BAD)
def test_a_recording_that_cannot_be_read_ends_with_1(command: str, damage: str, tmp_path: Path) -> None:
    run = Path(shutil.copytree(KEPT, tmp_path / "run"))
    BAD_RECORDINGS[damage](run)
    result = call(RECORDING_READERS[command], tmp_path / "out.html", run)
    assert isinstance(result.exception, SystemExit), "one line, no traceback"
    assert result.exit_code == 1
    assert errors(result).startswith(f"error: {run}")
    assert result.stdout == ""
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("command", RECORDING_READERS)
def test_a_recording_that_is_not_there_is_misuse(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, words in ((tmp_path / "nowhere", "does not exist"), (tmp_path / "file", "is a file")):
        result = call(RECORDING_READERS[command], tmp_path / "out.html", place)
        assert result.exit_code == 2
        assert words in errors(result)
        assert result.stdout == ""


def test_a_recording_killed_before_its_first_checkpoint_says_so(tmp_path: Path) -> None:
    run = Path(shutil.copytree(KEPT, tmp_path / "run"))
    _without(run, "digest")
    for command in ("trust", "drift", "parity"):
        result = call(RECORDING_READERS[command], tmp_path / "out", run)
        assert result.exit_code == 1
        assert "was stopped before its first checkpoint" in errors(result)


def test_the_help_says_which_code_means_what() -> None:
    words = " ".join(zlab("--help").stdout.split())
    for said in ("exit code 0: well", "1: it went wrong or the answer is no", "2: misuse", "130: Ctrl-C"):
        assert said in words

"""Rows of a trace that were dropped while it was read are counted wherever a figure rests on the
others.
"""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.shared import SHARED, needs_shared
from tests.zlab.command_line import zlab
from zlab.dashboard import data
from zlab.policies.evidence import evidence_from_dict, read_evidence
from zlab.traces.recording import load_run

TRACE = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,40,18,58,Conversation log
6,ChatGPT,0,0,0,Conversation log
7,GPT-4,30,27,57,Conversation log
8,ChatGPT,0,0,0,Conversation log
9,ChatGPT,x,12,12,Conversation log
"""
POOL = ("--kv-blocks", "200", "--block-size", "16")
WORDS = "3 of 5 rows of the trace were dropped: 1 x Request tokens is not a whole number, 2 x"
ENGINE = ("--model", "dummy:tiny", "--device", "cpu")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """A trace of five rows, of which two are requests that failed and one is a bad row."""
    path = tmp_path / "trace.csv"
    path.write_text(TRACE, "utf-8")
    return str(path)


def shown(*arguments: str) -> str:
    result = zlab(*arguments, "--skip-bad-rows")
    assert result.exit_code == 0, result.stderr
    return " ".join(result.stdout.split())


def as_json(*arguments: str) -> Any:
    return json.loads(shown(*arguments, "--json"))


def check(rows: Any) -> None:
    assert (rows["read"], rows["kept"]) == (5, 2)
    assert sum(rows["dropped"].values()) == 3
    assert sorted(rows["dropped"].values()) == [1, 2]


def test_a_replay_says_it_in_output_json_and_manifest(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert WORDS in shown("replay", trace, *POOL, "--out", str(out))
    check(as_json("replay", trace, *POOL)["rows"])
    check(load_run(out).manifest["workload"]["rows"])
    assert [words.startswith(WORDS) for words in data.Snapshot(str(out)).dropped] == [True]


def test_a_comparison_and_a_sweep_say_it(trace: str, tmp_path: Path) -> None:
    policies = ("-p", "full-kv", "-p", "nano-vllm")
    assert WORDS in shown("compare", trace, *POOL, *policies, "--jobs", "1")
    check(as_json("compare", trace, *POOL, *policies, "--jobs", "1")["rows"])
    out = tmp_path / "points.csv"
    grid = ("--grid", "policy=full-kv,nano-vllm", "--jobs", "1")
    text = shown("sweep", trace, *POOL, *grid, "--out", str(out))
    assert text.count(WORDS) == 1
    with out.open(newline="") as file:
        assert [row["rows_dropped"] for row in csv.DictReader(file)] == ["3", "3"]
    for point in as_json("sweep", trace, *POOL, *grid)["points"]:
        check(point["rows"])


def test_evidence_holds_it(trace: str, tmp_path: Path) -> None:
    gates, out = tmp_path / "gates.toml", tmp_path / "evidence.json"
    gates.write_text('[gates]\nlaws = "== ok"\n', "utf-8")
    arguments = ("full-kv", "-t", trace, *POOL, "--gates", str(gates), "--jobs", "1")
    assert WORDS in shown("validate", *arguments, "--out", str(out))
    (case,) = read_evidence(out).cases
    check(case.rows)
    document = json.loads(out.read_text("utf-8"))
    del document["id"], document["cases"][0]["rows"]  # as release 0.1.0 wrote it
    assert evidence_from_dict(document).cases[0].rows is None


def test_runs_of_the_engine_say_it(trace: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "run"
    assert WORDS in shown("bench", trace, "-p", "full-kv", *POOL, *ENGINE, "--out", str(out))
    check(load_run(out).manifest["workload"]["rows"])
    check(as_json("bench", trace, "-p", "full-kv", *POOL, *ENGINE)["rows"])
    assert WORDS in shown("parity", trace, "-p", "full-kv", *POOL, *ENGINE)
    again = zlab("parity", "--recording", str(out), "--json")
    check(json.loads(again.stdout)["policies"][0]["rows"])
    judged = zlab("trust", str(out), "--gpu", "h200", "--model", "qwen3-8b", "--json")
    found = json.loads(judged.stdout)["runs"][0]
    check(found["workload"]["rows"])
    assert any(note.startswith(WORDS) for note in found["notes"])


def test_nothing_is_said_where_nothing_was_dropped() -> None:
    made_up = ("replay", "synth:amc23?num_problems=1&samples=2&cap=50")
    assert "dropped" not in zlab(*made_up).stdout
    rows = json.loads(zlab(*made_up, "--json").stdout)["rows"]
    assert rows == {"read": 2, "kept": 2, "dropped": {}}


@needs_shared
def test_of_the_shared_trace_17_of_400_rows() -> None:
    result = zlab("replay", str(SHARED / "traces" / "burstgpt_1_first400.csv"))
    assert "17 of 400 rows of the trace were dropped: 17 x failed request" in result.stdout

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.traces.cases import LIMITS, POLICIES, SWAPPING, conversations
from zlab.sim.replay import Run, replay
from zlab.traces.palette import PHASE_LOOKS
from zlab.traces.perfetto import POOL, REQUESTS, write_perfetto
from zlab.traces.recording import FolderRecorder, Recording, RecordingError
from zlab.traces.schema import PHASES


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("perfetto")
    run = replay(conversations(), POLICIES[3][0], limits=SWAPPING, out=folder / "run")
    count = write_perfetto(Recording(folder / "run"), folder / "trace.json")
    document = json.loads((folder / "trace.json").read_text("utf-8"))
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    assert len(document["traceEvents"]) == count
    return run, document["traceEvents"]


def test_every_event_is_valid(written: tuple[Run, list[dict[str, Any]]]) -> None:
    for event in written[1]:
        assert event["ph"] in ("M", "X", "i", "C")
        assert event["pid"] in (REQUESTS, POOL)
        assert isinstance(event["tid"], int)
        assert event["name"]
        if event["ph"] == "M":
            assert event["args"]["name"]
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] == "t"
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())


def test_tracks_carry_the_phases(written: tuple[Run, list[dict[str, Any]]]) -> None:
    run, events = written
    totals: dict[tuple[int, str], float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X":
            totals[event["tid"] - 1, event["name"]] += event["dur"] / 1e6
    for row in run.requests.to_pylist():
        for phase in PHASES:
            found = totals[row["number"], PHASE_LOOKS[phase].words]
            assert found == pytest.approx(row[f"{phase}_s"], abs=1e-6)
    names = {
        e["tid"] - 1: e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    assert set(names) == set(run.requests["number"].to_pylist())


def test_counters_carry_pool_and_steps(written: tuple[Run, list[dict[str, Any]]]) -> None:
    run, events = written
    pool = [e for e in events if e["ph"] == "C" and e["name"] == "blocks by state"]
    assert all(sum(e["args"].values()) == SWAPPING.num_blocks for e in pool)
    assert all(one["ts"] <= next_["ts"] for one, next_ in itertools.pairwise(pool))
    running = [e for e in events if e["ph"] == "C" and e["name"] == "requests"]
    assert max(e["args"]["running"] for e in running) == run.summary["running_max"]
    rates = [e for e in events if e["ph"] == "C" and e["name"] == "tokens/s"]
    seconds = run.steps["end_s"].to_numpy() - run.steps["start_s"].to_numpy()
    tokens = sum(e["args"]["output"] * s for e, s in zip(rates, seconds, strict=False))
    assert tokens == pytest.approx(run.summary["output_tokens"], rel=1e-4)
    preempted = [e for e in events if e["ph"] == "i" and e["name"] == "preempted"]
    assert len(preempted) == run.summary["preemptions"] > 0


def test_a_broken_recording_writes_nothing(tmp_path: Path) -> None:
    run = replay(conversations(5), "full-kv", limits=LIMITS)
    recorder = FolderRecorder(tmp_path / "run", dict(run.manifest) | {"kinds": {}})
    recorder.close()
    with pytest.raises(RecordingError, match="no names under 'kinds'"):
        write_perfetto(Recording(tmp_path / "run"), tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()


def test_a_recording_without_steps(tmp_path: Path) -> None:
    run = replay(conversations(5), "full-kv", limits=LIMITS)
    FolderRecorder(tmp_path / "run", dict(run.manifest) | {"complete": False})
    assert (
        write_perfetto(Recording(tmp_path / "run"), tmp_path / "trace.json") == 3
    )  # two names, an empty pool
    assert np.all(
        [e["ph"] in "MC" for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    )

"""Figures of a run on steps that one can count by hand, and which kernels were compiled when."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from benchmarks.compilations import Compilations
from benchmarks.run_figures import figures_of, over_time, rounded, seconds_to_shares, steps_by_kind
from benchmarks.server_gpu import seconds_to_share
from engine.build import EngineSettings
from engine.loading import load_model
from engine.replay import ReplaySettings, replay
from sim.recorded import KINDS
from traces.recording import TABLES
from traces.workload import TraceRequest, Workload, WorkloadMeta


def steps(**columns: list[Any]) -> pa.Table:
    """A table of steps of one second each, beginning at second 10; what is not given is 0."""
    count = len(next(iter(columns.values())))
    full: dict[str, Any] = {name: [0] * count for name in TABLES["steps"].names} | {
        "step": list(range(count)),
        "start_s": [10.0 + place for place in range(count)],
        "end_s": [11.0 + place for place in range(count)],
    }
    return pa.table(full | columns, schema=TABLES["steps"])


def test_shares_count_from_what_was_asked_for() -> None:
    table = steps(output_tokens=[0, 10, 10, 30, 25])
    whole = seconds_to_shares(table, 75)
    assert whole == {"0.1": 2.0, "0.25": 3.0, "0.5": 4.0, "0.75": 5.0, "0.9": 5.0}
    cut = seconds_to_shares(table, 100)
    assert cut == {"0.1": 2.0, "0.25": 4.0, "0.5": 4.0, "0.75": 5.0, "0.9": None}


def test_shares_from_readings_of_a_server() -> None:
    """Even growth between readings; a count that stands still was reached when it first was."""
    readings = [(0.5, 0.0), (1.5, 0.0), (2.5, 20.0), (3.5, 20.0), (4.5, 60.0), (5.5, 80.0)]
    whole = seconds_to_share(readings, 80)
    assert whole == pytest.approx({"0.1": 1.9, "0.25": 2.5, "0.5": 4.0, "0.75": 4.5, "0.9": 5.1})
    cut = seconds_to_share(readings, 200)
    assert cut == {"0.1": 2.5, "0.25": pytest.approx(4.25), "0.5": None, "0.75": None, "0.9": None}
    assert seconds_to_share([(2.0, 10.0)], 10)["0.5"] == 1.0  # before the first reading from the first request on
    assert set(seconds_to_share([(0.0, 0.0)], 10).values()) == {None}


def test_a_run_over_time() -> None:
    table = steps(output_tokens=[0, 10, 20, 30], free_blocks=[10, 5, 0, 5], running=[1, 2, 3, 2])
    found = over_time(table, num_blocks=10, count=4)
    assert found == {
        "seconds": [0.0, 1.0, 2.0, 3.0, 4.0],
        "tokens_out": [0, 0, 10, 30, 60],
        "occupancy": [0.0, 0.5, 1.0, 0.5, 0.5],
        "running": [1, 2, 3, 2, 2],
    }


def test_the_longest_steps_by_kind() -> None:
    table = steps(
        start_s=[0.0, 1.0, 2.0, 4.0, 5.0], end_s=[1.0, 2.0, 4.0, 5.0, 8.0], decodes=[0, 4, 4, 4, 4],
        prefill_tokens=[64, 0, 0, 0, 0], compressions=[0, 0, 0, 0, 2],
    )  # fmt: skip
    found = steps_by_kind(table, np.array([1, 0, 0, 0, 3]))
    assert list(found) == ["decode only", "prefill only", "with compression"]
    assert found["decode only"]["num_steps"] == 3
    assert found["decode only"]["seconds"] == pytest.approx(4.0)
    assert found["decode only"]["p50_ms"] == pytest.approx(1000.0)
    assert [each["step"] for each in found["decode only"]["longest"]] == [2, 1, 3]
    assert found["with compression"]["longest"] == [
        {"step": 4, "ms": 3000.0, "decodes": 4, "prefill_tokens": 0, "compressions": 2}
    ]


def test_figures_of_a_recording(tmp_path: Path) -> None:
    """One request is refused, for its prompt is too long. Its tokens were never going to come."""
    sizes = ((20, 70), (20, 80), (250, 900))
    requests = [
        TraceRequest(id=str(place), prompt_tokens=prompt, output_tokens=output, max_tokens=output)
        for place, (prompt, output) in enumerate(sizes)
    ]
    load = Workload(requests, WorkloadMeta(name="three", source="test"))
    settings = EngineSettings(
        "dummy:tiny", "hybrid:budget.tokens=32", num_blocks=12, block_size=16, max_model_len=200, device="cpu"
    )
    run = replay(load, settings, ReplaySettings(at_once=True), loaded=load_model("dummy:tiny"), out=tmp_path / "run")
    found = figures_of(tmp_path / "run", 1050)
    assert (found["tokens_asked"], found["tokens_out"], found["requests_refused"]) == (150, 150, 1)
    assert found["digest"] == run.run.manifest["digest"]
    assert found["compressions"] > 0
    assert found["compression_share"] == pytest.approx(run.run.manifest["compression_work_s"] / found["served_s"])
    assert found["seconds_to_share"]["0.9"] <= found["served_s"]
    assert sum(kind["num_steps"] for kind in found["steps_by_kind"].values()) == run.run.steps.num_rows
    assert set(found["steps_by_kind"]) <= set(KINDS)
    assert found["over_time"]["tokens_out"][-1] == 150
    assert (found["running_max"], max(found["over_time"]["running"])) == (2, 2)


def test_rounding_keeps_what_is_measured() -> None:
    value = {"a": [123456.789, 0.000123456789, 0.0, -2.0], "b": 753781, "c": None, "d": "x", "e": True}
    assert rounded(value) == {"a": [123460.0, 0.00012346, 0.0, -2.0], "b": 753781, "c": None, "d": "x", "e": True}


@triton.jit  # type: ignore[untyped-decorator]
def doubled(source, target, size: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, size)
    tl.store(target + places, 2 * tl.load(source + places))


def make(size: int) -> None:
    signature = {"source": "*i32", "target": "*i32", "size": "constexpr"}
    source = triton.compiler.ASTSource(doubled, signature, {"size": size})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))


def test_kernels_made_after_a_moment_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns that its default will change
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    heard: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, src, **more: heard.append(src.name))
    with Compilations() as compilations:
        make(16)
        assert len(compilations.made) == 1
        moment = time.perf_counter_ns()
        assert compilations.since(moment) == []
        make(32)
        make(32)  # from the disk this time
    make(64)
    late = compilations.since(moment)
    assert [(one.kernel, one.from_disk) for one in late] == [("doubled", False), ("doubled", True)]
    assert heard == ["doubled"] * 4

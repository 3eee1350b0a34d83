"""Pictures of results: what they show is right; that they can be drawn is seen where there is a
browser.

Figures of a run on steps that one can count by hand, and which kernels were compiled when.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pyarrow as pa
import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from benchmarks import plots
from benchmarks.engine import Compilations
from benchmarks.run_figures import figures_of, over_time, rounded, seconds_to_shares, steps_by_kind
from benchmarks.server import seconds_to_share
from zlab.engine.engine import EngineSettings
from zlab.engine.model.loader import load_model
from zlab.engine.replay import ReplaySettings, replay
from zlab.sim.fidelity import LATENCIES
from zlab.sim.recorded_run import KINDS
from zlab.traces.recording import TABLES
from zlab.traces.workload import TraceRequest, Workload, WorkloadMeta

pytest.importorskip("playwright")


KEPT = Path(plots.RESULTS) / "engine-h200-2026-11-29.json"
OVER_TIME = {
    "seconds": [0.0, 10.0, 20.0],
    "tokens_out": [0, 500, 900],
    "occupancy": [0.1, 1.0, 0.5],
    "running": [4, 16, 8],
}


def judged(name: str, error: float | None, complete: bool = True) -> dict[str, Any]:
    """A run of which everything was predicted wrong by so much, and twice as wrong by the
    roofline.
    """
    far = error or 0.0
    one = {"measured": 200.0, "profile": 200.0 * (1 + far), "error": error, "met": True}
    one |= {"roofline": 200.0 * (1 + 2 * far), "roofline_error": 2 * far}
    names = [
        *plots.TOTALS,
        *(f"{name} {mark}" for name in LATENCIES for mark in plots.MARKS),
    ]
    measured = {"tokens_asked": 1000, "over_time": OVER_TIME, "seconds_to_share": {"0.9": 20.0}}
    return {
        "run": name,
        "complete": complete,
        "figures": dict.fromkeys(names, one),
        "measured": measured,
    }


def document(*runs: dict[str, Any]) -> dict[str, Any]:
    return {"calls": [{"card": "NVIDIA H200", "date": "2026-11-30"}], "validation": list(runs)}


def traces(figure: go.Figure, name: str) -> list[Any]:
    return [trace for trace in figure.data if trace.name == name]


def test_totals_stand_beside_what_was_measured() -> None:
    figure = plots.totals(
        [judged("W1-hybrid", 0.02), judged("azure-hybrid", -0.1, complete=False)], "a card"
    )
    makespans, rates = traces(figure, "simulated with the profile")
    assert list(makespans.y) == list(rates.y) == ["W1-hybrid", "azure-hybrid *"]
    assert list(makespans.x) == pytest.approx([204.0, 180.0])
    assert list(makespans.text) == ["+2.0%", "-10.0%"]
    guesses = traces(figure, "simulated by roofline alone")[0]
    assert list(guesses.text) == ["+4.0%", "-20.0%"]
    assert list(traces(figure, "measured")[0].x) == [200.0, 200.0]
    assert figure.layout.xaxis.title.text == "makespan, s"
    assert "a card" in figure.layout.title.text


def test_errors_beyond_the_edge_keep_their_number() -> None:
    figure = plots.errors(
        [judged("W1-hybrid", 0.04), judged("azure-hybrid", 3.0), judged("none", None)], "a card"
    )
    for mark in plots.MARKS:
        for trace in traces(figure, mark):
            assert list(trace.y) == ["W1-hybrid", "azure-hybrid"]
            assert list(trace.x) == pytest.approx([4.0, plots.FURTHEST])
            assert list(trace.text) == ["", "+300 %"]
    assert {(band.x0, band.x1) for band in figure.layout.shapes} == {(-5.0, 5.0), (-10.0, 10.0)}
    assert figure.layout.xaxis.range[1] > plots.FURTHEST


def test_curves_come_from_what_was_kept_or_noted() -> None:
    kept = plots.share_curve({"tokens_asked": 1000, "over_time": OVER_TIME})
    assert kept == ([0.0, 10.0, 20.0], [0.0, 50.0, 90.0])
    noted = {"tokens_asked": 1000, "seconds_to_share": {"0.1": 3.0, "0.5": 9.0, "0.9": None}}
    assert plots.share_curve(noted) == ([0.0, 3.0, 9.0], [0.0, 10.0, 50.0])
    assert plots.rates({"over_time": OVER_TIME}) == ([10.0, 20.0], [50.0, 40.0])


def test_all_pictures_of_all_files(tmp_path: Path) -> None:
    """Of a run that is in several files the last one counts."""
    judge, runs = tmp_path / "judged.json", tmp_path / "runs.json"
    judge.write_text(json.dumps(document(judged("W1-hybrid", 0.02), judged("W4-full-kv", 0.02))))
    row = {"run": "W4-hybrid", "tokens_asked": 1000, "over_time": OVER_TIME}
    made = {
        "card": "another card",
        "date": "2026-12-01",
        "runs": [row, {"run": "W1-full-kv", "skipped": "no time"}],
    }
    runs.write_text(json.dumps(made))
    known = plots.gather(judge, [runs], [KEPT])
    assert set(known.rows) >= {
        "W1-full-kv",
        "W1-hybrid",
        "W1-hybrid-1024",
        "W2-hybrid",
        "W4-full-kv",
        "W4-hybrid",
    }
    assert "over_time" in known.rows["W1-hybrid"]
    assert "over_time" not in known.rows["W1-full-kv"]
    found = plots.figures(known)
    assert set(found) == {
        "predicted",
        "latency-errors",
        "tokens-over-time",
        "cache-over-time",
        "decode-steps",
    }
    shares = found["tokens-over-time"]
    assert [note.text for note in shares.layout.annotations] == ["W1", "W2", "W4"]
    assert sorted(trace.x[0] for trace in traces(shares, "vLLM, 90 %")) == [51.9, 111.5]
    assert len(traces(shares, "hybrid, budget 2,048")) == 3
    cache = found["cache-over-time"]
    assert [list(trace.y) for trace in traces(cache, "full-kv")] == [
        [10.0, 100.0, 50.0],
        [4, 16, 8],
        [50.0, 40.0],
    ]
    assert len(traces(cache, "hybrid, budget 2,048")) == 3
    (ours,) = traces(found["decode-steps"], "this engine")
    assert list(ours.x) == ["batch 64", "batch 128", "batch 256"]
    first = json.loads(KEPT.read_text("utf-8"))["decode"][0]
    assert ours.text[0] == f"{first['step_ms']:.2f} ms<br>{first['over_floor']:.2f}x"
    assert "another card" in shares.layout.title.text


def test_what_is_not_there_is_not_drawn(tmp_path: Path) -> None:
    runs = tmp_path / "runs.json"
    rows = [{"run": "W4-hybrid-join-blocking", "tokens_asked": 9, "over_time": OVER_TIME}]
    runs.write_text(json.dumps({"card": "x", "date": "y", "runs": rows}))
    assert plots.figures(plots.gather(None, [runs], [])) == {}


def test_nothing_to_draw_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["plots", "--name", "x"])
    with pytest.raises(SystemExit, match="2"):
        plots.main()
    assert "nothing to draw: give --judged, --runs or --engine" in capsys.readouterr().err


def test_addresses_hold_text_and_bytes() -> None:
    assert (
        plots.bytes_of("data:image/svg+xml,%3Csvg%20a%3D%22%C2%B5%22%3E") == '<svg a="µ">'.encode()
    )
    assert plots.bytes_of("data:image/png;base64,iVBORw==") == b"\x89PNG"


@pytest.mark.skipif(plots.find_browser() is None, reason="no Chromium on this machine")
def test_a_picture_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["plots", "--engine", str(KEPT), "--out", str(tmp_path), "--name", "h200"]
    monkeypatch.setattr(sys, "argv", arguments)
    plots.main()
    assert {path.name for path in tmp_path.iterdir()} == {
        "h200-decode-steps.svg",
        "h200-tokens-over-time.svg",
    }
    for path in tmp_path.iterdir():
        text = path.read_text("utf-8")
        assert text.startswith("<svg")
        assert len(text) < 150_000
    assert "28.02 ms" in (tmp_path / "h200-decode-steps.svg").read_text("utf-8")


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
    assert (
        seconds_to_share([(2.0, 10.0)], 10)["0.5"] == 1.0
    )  # before the first reading from the first request on
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
        "dummy:tiny",
        "hybrid:budget.tokens=32",
        num_blocks=12,
        block_size=16,
        max_model_len=200,
        device="cpu",
    )
    run = replay(
        load,
        settings,
        ReplaySettings(at_once=True),
        loaded=load_model("dummy:tiny"),
        out=tmp_path / "run",
    )
    found = figures_of(tmp_path / "run", 1050)
    assert (found["tokens_asked"], found["tokens_out"], found["requests_refused"]) == (150, 150, 1)
    assert found["digest"] == run.run.manifest["digest"]
    assert found["compressions"] > 0
    assert found["compression_share"] == pytest.approx(
        run.run.manifest["compression_work_s"] / found["served_s"]
    )
    assert found["seconds_to_share"]["0.9"] <= found["served_s"]
    assert (
        sum(kind["num_steps"] for kind in found["steps_by_kind"].values()) == run.run.steps.num_rows
    )
    assert set(found["steps_by_kind"]) <= set(KINDS)
    assert found["over_time"]["tokens_out"][-1] == 150
    assert (found["running_max"], max(found["over_time"]["running"])) == (2, 2)


def test_rounding_keeps_what_is_measured() -> None:
    value = {
        "a": [123456.789, 0.000123456789, 0.0, -2.0],
        "b": 753781,
        "c": None,
        "d": "x",
        "e": True,
    }
    assert rounded(value) == {
        "a": [123460.0, 0.00012346, 0.0, -2.0],
        "b": 753781,
        "c": None,
        "d": "x",
        "e": True,
    }


@triton.jit  # type: ignore[untyped-decorator]
def doubled(source, target, size: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, size)
    tl.store(target + places, 2 * tl.load(source + places))


def make(size: int) -> None:
    signature = {"source": "*i32", "target": "*i32", "size": "constexpr"}
    source = triton.compiler.ASTSource(doubled, signature, {"size": size})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))


def test_kernels_made_after_a_moment_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns that its default will change
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    heard: list[str] = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, src, **more: heard.append(src.name)
    )
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

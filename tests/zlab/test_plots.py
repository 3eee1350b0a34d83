"""Pictures of results: what they show is right; that they can be drawn is seen where there is a browser."""

import json
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

pytest.importorskip("playwright")

from benchmarks import plot_engine, plot_trust, plots
from sim.trust import LATENCIES

KEPT = Path(plots.RESULTS) / "engine-h200-2026-11-29.json"
OVER_TIME = {
    "seconds": [0.0, 10.0, 20.0],
    "tokens_out": [0, 500, 900],
    "occupancy": [0.1, 1.0, 0.5],
    "running": [4, 16, 8],
}


def judged(name: str, error: float | None, complete: bool = True) -> dict[str, Any]:
    """A run of which everything was predicted wrong by so much, and twice as wrong by the roofline."""
    far = error or 0.0
    one = {"measured": 200.0, "profile": 200.0 * (1 + far), "error": error, "met": True}
    one |= {"roofline": 200.0 * (1 + 2 * far), "roofline_error": 2 * far}
    names = [*plot_trust.TOTALS, *(f"{name} {mark}" for name in LATENCIES for mark in plot_trust.MARKS)]
    measured = {"tokens_asked": 1000, "over_time": OVER_TIME, "seconds_to_share": {"0.9": 20.0}}
    return {"run": name, "complete": complete, "figures": dict.fromkeys(names, one), "measured": measured}


def document(*runs: dict[str, Any]) -> dict[str, Any]:
    return {"calls": [{"card": "NVIDIA H200", "date": "2026-11-30"}], "validation": list(runs)}


def traces(figure: go.Figure, name: str) -> list[Any]:
    return [trace for trace in figure.data if trace.name == name]


def test_totals_stand_beside_what_was_measured() -> None:
    figure = plot_trust.totals([judged("W1-hybrid", 0.02), judged("azure-hybrid", -0.1, complete=False)], "a card")
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
    figure = plot_trust.errors([judged("W1-hybrid", 0.04), judged("azure-hybrid", 3.0), judged("none", None)], "a card")
    for mark in plot_trust.MARKS:
        for trace in traces(figure, mark):
            assert list(trace.y) == ["W1-hybrid", "azure-hybrid"]
            assert list(trace.x) == pytest.approx([4.0, plot_trust.FURTHEST])
            assert list(trace.text) == ["", "+300 %"]
    assert {(band.x0, band.x1) for band in figure.layout.shapes} == {(-5.0, 5.0), (-10.0, 10.0)}
    assert figure.layout.xaxis.range[1] > plot_trust.FURTHEST


def test_curves_come_from_what_was_kept_or_noted() -> None:
    kept = plot_engine.share_curve({"tokens_asked": 1000, "over_time": OVER_TIME})
    assert kept == ([0.0, 10.0, 20.0], [0.0, 50.0, 90.0])
    noted = {"tokens_asked": 1000, "seconds_to_share": {"0.1": 3.0, "0.5": 9.0, "0.9": None}}
    assert plot_engine.share_curve(noted) == ([0.0, 3.0, 9.0], [0.0, 10.0, 50.0])
    assert plot_engine.rates({"over_time": OVER_TIME}) == ([10.0, 20.0], [50.0, 40.0])


def test_all_pictures_of_all_files(tmp_path: Path) -> None:
    """Of a run that is in several files the last one counts."""
    judge, runs = tmp_path / "judged.json", tmp_path / "runs.json"
    judge.write_text(json.dumps(document(judged("W1-hybrid", 0.02), judged("W4-full-kv", 0.02))))
    row = {"run": "W4-hybrid", "tokens_asked": 1000, "over_time": OVER_TIME}
    made = {"card": "another card", "date": "2026-12-01", "runs": [row, {"run": "W1-full-kv", "skipped": "no time"}]}
    runs.write_text(json.dumps(made))
    known = plots.gather(judge, [runs], [KEPT])
    assert set(known.rows) >= {"W1-full-kv", "W1-hybrid", "W1-hybrid-1024", "W2-hybrid", "W4-full-kv", "W4-hybrid"}
    assert "over_time" in known.rows["W1-hybrid"]
    assert "over_time" not in known.rows["W1-full-kv"]
    found = plots.figures(known)
    assert set(found) == {"predicted", "latency-errors", "tokens-over-time", "cache-over-time", "decode-steps"}
    shares = found["tokens-over-time"]
    assert [note.text for note in shares.layout.annotations] == ["W1", "W2", "W4"]
    assert sorted(trace.x[0] for trace in traces(shares, "vLLM, 90 %")) == [51.9, 111.5]
    assert len(traces(shares, "hybrid, budget 2,048")) == 3
    cache = found["cache-over-time"]
    assert [list(trace.y) for trace in traces(cache, "full-kv")] == [[10.0, 100.0, 50.0], [4, 16, 8], [50.0, 40.0]]
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


def test_nothing_to_draw_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["plots", "--name", "x"])
    with pytest.raises(SystemExit, match="2"):
        plots.main()
    assert "nothing to draw: give --judged, --runs or --engine" in capsys.readouterr().err


def test_addresses_hold_text_and_bytes() -> None:
    assert plots.bytes_of("data:image/svg+xml,%3Csvg%20a%3D%22%C2%B5%22%3E") == '<svg a="µ">'.encode()
    assert plots.bytes_of("data:image/png;base64,iVBORw==") == b"\x89PNG"


@pytest.mark.skipif(plots.find_browser() is None, reason="no Chromium on this machine")
def test_a_picture_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["plots", "--engine", str(KEPT), "--out", str(tmp_path), "--name", "h200"]
    monkeypatch.setattr(sys, "argv", arguments)
    plots.main()
    assert {path.name for path in tmp_path.iterdir()} == {"h200-decode-steps.svg", "h200-tokens-over-time.svg"}
    for path in tmp_path.iterdir():
        text = path.read_text("utf-8")
        assert text.startswith("<svg")
        assert len(text) < 150_000
    assert "28.02 ms" in (tmp_path / "h200-decode-steps.svg").read_text("utf-8")

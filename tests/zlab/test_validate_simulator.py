"""The scripts for a GPU, on the CPU: one call measures and records, another judges what it brought back."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import judge_simulator, validate_simulator
from engine.build import EngineSettings
from engine.loading import load_model
from sim.profile import load_profile
from tests.shared import needs_shared
from tests.zlab.test_calibrate_command import FEW

torch.set_num_threads(1)
SMALL = (
    "--minutes", "5", "--model", "dummy:tiny", "--device", "cpu", "--quick", "--block-size", "16", "--kv-blocks", "100",
    "--pool-blocks", "60", "--max-running", "6", "--max-batched-tokens", "512", "--first", "2", "--grid-requests", "5",
)  # fmt: skip
GRID = {f"grid-8-{policy}" for policy in ("full-kv", "constrained-32", "hybrid-32", "hybrid-64")}
RUNS = {"W2-full-kv", "repeat-8-full-kv"} | GRID


@pytest.fixture
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.calibrate.QUICK", FEW)
    monkeypatch.setattr(validate_simulator, "CLOSED", ("W2",))
    monkeypatch.setattr(validate_simulator, "POLICIES", ("full-kv",))
    monkeypatch.setattr(validate_simulator.Size, "grid_pools", (96,))


def run(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    {"validate": validate_simulator, "judge": judge_simulator}[script].main()


@needs_shared
@pytest.mark.usefixtures("few_runs")
def test_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    run(monkeypatch, "validate", "--out", str(out), "--parts", "calibrate,closed,grid", *SMALL)
    names = {path.name for path in out.iterdir()}
    (profile,) = out.glob("cpu-*-tiny-float32.json")
    assert names == {"measurements.json", "runs.json", "recordings.tar.gz.0", profile.name}
    assert load_profile(profile).model == "tiny"
    made = json.loads((out / "runs.json").read_text())
    assert {row["run"] for row in made["runs"]} == RUNS
    assert all(row["complete"] for row in made["runs"]), made["runs"]
    judged = tmp_path / "trust.json"
    run(monkeypatch, "judge", str(out), "--out", str(judged), "--gpu", "h200", "--model", "smollm2-135m")
    found = json.loads(judged.read_text())
    everyone = [*found["validation"], *found["grid"]["runs"]]
    assert {row["run"] for row in everyone} | {"repeat-8-full-kv"} == RUNS
    for row in everyone:
        assert row["profile"]["decisions"]["equal"], row["run"]
        assert row["roofline"]["decisions"]["equal"], row["run"]
    assert set(found["grid"]["ranking"]) == {"profile", "roofline"}
    assert found["goals"]["makespan_s"]["runs"] == 1
    assert set(found["repeat"]) == {"repeat-8-full-kv"}
    assert found["profile"]["model"] == "tiny"
    assert found["about"]["card"] == "CPU"


@needs_shared
def test_a_run_is_cut_when_its_time_is_over(tmp_path: Path) -> None:
    size = validate_simulator.Size(block_size=16, first=6)
    point = next(iter(validate_simulator.points(("timed",), size)))
    assert point.name == "azure-full-kv"
    loaded = load_model("dummy:tiny")
    settings = EngineSettings("dummy:tiny", block_size=16, device="cpu", overlap=False)
    row = validate_simulator.run_point(point, settings, loaded, size, 0.5, tmp_path / "run")
    assert row["complete"] is False
    assert "error" not in row
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["stopped_by"] == "_CutError"


def test_a_point_that_fails_is_a_row(tmp_path: Path) -> None:
    size = validate_simulator.Size(block_size=16)
    grid = validate_simulator.Point("bad", lambda: validate_simulator.grid_workload(size), "hybrid", 5, True)
    settings = EngineSettings("dummy:tiny", block_size=16, device="cpu")
    row = validate_simulator.run_point(grid, settings, load_model("dummy:tiny"), size, 9.0, tmp_path)
    assert row["error"].startswith("ConfigError: ")
    assert "does not fit in a pool of 5" in row["error"]


def test_every_run_there_is() -> None:
    size = validate_simulator.Size()
    every = list(validate_simulator.points(validate_simulator.PARTS, size))
    assert len({point.name for point in every}) == len(every)
    assert sum(point.name.startswith("grid-") for point in every) == 12
    assert [point.at_once for point in every].count(False) == 6
    total = sum(request.output_tokens or 0 for request in validate_simulator.grid_workload(size))
    assert total > 2 * max(size.grid_pools) * 256 / 3  # more than fits at once


def test_pieces_fit_together_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate_simulator, "PIECE_BYTES", 100)
    recordings = tmp_path / "somewhere" / "recordings"
    (recordings / "run").mkdir(parents=True)
    (recordings / "run" / "manifest.json").write_text(json.dumps(list(range(500))))
    names = validate_simulator.pack(recordings, tmp_path)
    assert len(names) > 10
    shutil.rmtree(recordings)
    found = judge_simulator.unpack(tmp_path)
    assert json.loads((found / "run" / "manifest.json").read_text()) == list(range(500))
    with pytest.raises(SystemExit, match=r"holds neither recordings/ nor recordings\.tar\.gz\.0"):
        judge_simulator.unpack(recordings.parent)


@pytest.mark.parametrize("part", ["closd", "grid,all"])
def test_an_unknown_part_is_refused(part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "validate", "--out", str(tmp_path / "out"), "--parts", part)
    assert not (tmp_path / "out").exists()

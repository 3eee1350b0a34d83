"""The scripts for a GPU, on the CPU: one call measures and records, another judges what it brought back."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import judge_simulator, validate_simulator, validation_points
from benchmarks.validation_points import Point, Size, choose, points, read_shares, share_of
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
GRID = {f"grid-8-{policy}" for policy in ("full-kv", "constrained-16", "hybrid-16", "hybrid-32")}
RUNS = {"W2-full-kv", "repeat-8-full-kv"} | GRID


@pytest.fixture
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.calibrate.QUICK", FEW)
    monkeypatch.setattr(validation_points, "CLOSED", ("W2",))
    monkeypatch.setattr(validation_points, "POLICIES", ("full-kv",))
    monkeypatch.setattr(Size, "grid_pools", (96,))


def run(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    {"validate": validate_simulator, "judge": judge_simulator}[script].main()


@needs_shared
@pytest.mark.usefixtures("few_runs")
def test_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two calls share the work: one calibrates, the other has the grid, and a run that the first made, too."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run(monkeypatch, "validate", "--out", str(ours), "--only", "calibrate,W2-full-kv,grid-8-hybrid-32", *SMALL)
    run(monkeypatch, "validate", "--out", str(theirs), "--parts", "closed,grid", "--skip", "grid-8-hybrid-32", *SMALL)
    names = {path.name for path in ours.iterdir()}
    (profile,) = ours.glob("cpu-*-tiny-float32.json")
    assert names == {"measurements.json", "runs.json", "recordings.tar.gz.0", profile.name}
    assert {path.name for path in theirs.iterdir()} == {"runs.json", "recordings.tar.gz.0"}
    assert load_profile(profile).model == "tiny"
    made = [row for folder in (ours, theirs) for row in json.loads((folder / "runs.json").read_text())["runs"]]
    assert {row["run"] for row in made} == RUNS
    assert all(row["complete"] for row in made), made
    for row in made:
        assert row["tokens_out"] == row["tokens_asked"] > 0
        assert row["kernels_compiled_while_serving"] == 0
        assert 0.0 < row["served_s"] < row["wall_s"]
        assert (row["compression_share"] > 0.0) == (row["compressions"] > 0)
    judged = tmp_path / "trust.json"
    how = ("--out", str(judged), "--gpu", "h200", "--model", "smollm2-135m")
    run(monkeypatch, "judge", str(ours), str(theirs), *how)
    found = json.loads(judged.read_text())
    everyone = [*found["validation"], *found["grid"]]
    assert {row["run"] for row in everyone} | {"repeat-8-full-kv"} == RUNS
    for row in everyone:
        assert row["decisions"]["equal"], row["run"]
        assert row["measured"]["tokens_out"] == row["measured"]["tokens_asked"]
        span = row["figures"]["makespan_s"]
        assert span["error"] == pytest.approx(span["profile"] / span["measured"] - 1.0, abs=2e-4)
        assert sum(kind["measured_s"] for kind in row["steps"].values()) == pytest.approx(span["measured"], rel=1e-3)
    assert set(found["ranking"]["tau"]) == {"profile", "roofline"}
    assert found["ranking"]["runs"] == len(GRID)
    assert found["goals"]["makespan_s"]["runs"] == 1
    assert set(found["repeat"]) == {"repeat-8-full-kv", "W2-full-kv in theirs"}
    assert all(row["same_decisions"] for row in found["repeat"].values())
    assert found["profile"]["model"] == "tiny"
    assert [call["folder"] for call in found["calls"]] == ["ours", "theirs"]
    assert {call["card"] for call in found["calls"]} == {"CPU"}
    assert found["not_run"] == found["not_judged"] == []
    assert f"goal of tau {judge_simulator.GOAL_TAU} over 4 points" in " ".join(capsys.readouterr().out.split())


@needs_shared
def test_a_run_is_cut_when_its_time_is_over(tmp_path: Path) -> None:
    size = Size(block_size=16, first=6)
    point = next(iter(points(("timed",), size)))
    assert point.name == "azure-full-kv"
    loaded = load_model("dummy:tiny")
    settings = EngineSettings("dummy:tiny", block_size=16, device="cpu", overlap=False)
    row = validate_simulator.run_point(point, settings, loaded, 0.5, tmp_path / "run")
    assert row["complete"] is False
    assert "error" not in row
    assert row["tokens_out"] < row["tokens_asked"]
    assert row["seconds_to_share"]["0.9"] is None
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["stopped_by"] == "_CutError"


def test_a_point_that_fails_is_a_row(tmp_path: Path) -> None:
    size = Size(block_size=16)
    grid = Point("bad", lambda: validation_points.grid_workload(size), "hybrid", 5, True)
    settings = EngineSettings("dummy:tiny", block_size=16, device="cpu")
    row = validate_simulator.run_point(grid, settings, load_model("dummy:tiny"), 9.0, tmp_path)
    assert row["error"].startswith("ConfigError: ")
    assert "does not fit in a pool of 5" in row["error"]


def test_every_run_there_is() -> None:
    size = Size()
    every = list(points(validation_points.PARTS, size))
    assert len({point.name for point in every}) == len(every)
    assert sum(point.name.startswith("grid-") for point in every) == 12
    assert [point.at_once for point in every].count(False) == 6
    total = sum(request.output_tokens or 0 for request in validation_points.grid_workload(size))
    assert total > max(size.grid_pools) * 256  # more than fits at once


def test_pieces_fit_together_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate_simulator, "PIECE_BYTES", 100)
    recordings = tmp_path / "somewhere" / "recordings"
    (recordings / "run").mkdir(parents=True)
    (recordings / "run" / "manifest.json").write_text(json.dumps(list(range(500))))
    names = validate_simulator.pack(recordings, tmp_path)
    assert len(names) > 10
    shutil.rmtree(recordings)
    (found,) = judge_simulator.unpack(tmp_path)
    assert found == tmp_path / "recordings" / "run"
    assert json.loads((found / "manifest.json").read_text()) == list(range(500))
    with pytest.raises(SystemExit, match=r"holds neither recordings/ nor recordings\.tar\.gz\.0"):
        judge_simulator.unpack(recordings.parent)


@pytest.mark.parametrize("part", ["closd", "grid,all"])
def test_an_unknown_part_is_refused(
    part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "validate", "--out", str(tmp_path / "out"), "--parts", part)
    assert not (tmp_path / "out").exists()
    assert "choices are calibrate,closed,timed,grid,more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--only", "W9"), "'W9' is no run; there are calibrate, W1-full-kv, "),
        (("--skip", "W4-*,W9"), "'W9' is no run; there are calibrate, W1-full-kv, "),
        (("--parts", "closed", "--only", "grid-*"), "'grid-*' is no run; there are W1-full-kv, "),
        (("--only", "W1-hybrid", "--share", "W2-hybrid=9"), "'W2-hybrid' is no run; there are W1-hybrid"),
        (("--share", "W1-hybrid"), "'W1-hybrid': a share is NAME=SECONDS"),
        (("--share", "W1-hybrid=-3"), "'W1-hybrid=-3': a share is NAME=SECONDS"),
        (("--only", "W1-hybrid", "--skip", "W1-*"), "nothing is left"),
        ((), "--out FOLDER is needed"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "validate", *arguments)
    assert words in " ".join(capsys.readouterr().err.split())


def listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    run(monkeypatch, "validate", "--list", *arguments)
    return capsys.readouterr().out.split()


def test_names_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    every = listed(monkeypatch, capsys)
    assert every[:2] == ["calibrate", "W1-full-kv"]
    assert {f"{load}-hybrid-{how}" for load in ("W1", "W2", "W4") for how in ("1024", "swap")} <= set(every)
    chosen = listed(monkeypatch, capsys, "--only", "W4-*,calibrate", "--skip", "*-blocking")
    assert chosen == ["calibrate", "W4-full-kv", "W4-hybrid", "W4-hybrid-1024", "W4-hybrid-swap"]
    assert listed(monkeypatch, capsys, "--parts", "more", "--skip", "W[24]-*") == ["W1-hybrid-1024", "W1-hybrid-swap"]


def test_two_calls_share_all_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ours = listed(monkeypatch, capsys, "--only", "calibrate,W1-*,azure-*")
    theirs = listed(monkeypatch, capsys, "--parts", ",".join(validation_points.ALL_PARTS), "--skip", ",".join(ours))
    assert not set(ours) & set(theirs)
    assert set(ours) | set(theirs) == set(listed(monkeypatch, capsys))


def test_names_come_in_the_order_in_which_they_are_wanted() -> None:
    names = ["a1", "a2", "b1", "b2"]
    assert choose(names, ["b2", "a*", "b*"], []) == ["b2", "a1", "a2", "b1"]
    assert choose(names, [], ["a*"]) == ["b1", "b2"]
    assert read_shares(["b*=30", "b2=2.5"], names) == {"b1": 30.0, "b2": 2.5}


def test_time_is_shared_by_weight_but_for_what_is_promised() -> None:
    heavy, light, other = [
        Point(name, lambda: validation_points.grid_workload(Size()), "hybrid", 96, True, weight)
        for name, weight in (("heavy", 2.0), ("light", 1.0), ("other", 1.0))
    ]
    assert share_of(80.0, [heavy, light, other], {}) == 40.0
    assert share_of(80.0, [heavy, light, other], {"other": 20.0}) == 40.0
    assert share_of(30.0, [light, other], {"other": 20.0}) == 10.0
    assert share_of(80.0, [other], {"other": 20.0}) == 20.0
    assert share_of(15.0, [other], {"other": 20.0}) == 15.0
    assert share_of(15.0, [light, other], {"other": 20.0}) < 0.0  # left out


def test_swapping_runs_have_room_in_host_memory() -> None:
    swapping = [point for point in points(("more",), Size(host_blocks=7)) if "swap" in point.name]
    assert [point.host_blocks for point in swapping] == [7, 7, 7]
    assert {point.host_blocks for point in points(validation_points.PARTS, Size())} == {0}

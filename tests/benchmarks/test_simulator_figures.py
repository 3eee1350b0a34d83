"""The scripts for a GPU, on the CPU: one call measures and records, another judges what it brought
back.

Judging what several calls on a GPU brought back, on recordings whose truth is known.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import judge, validate
from benchmarks.judge import find_profile_of, gather
from benchmarks.run_figures import figures_of, rounded
from benchmarks.validate import Point, Size, choose, points, read_shares, share_of
from tests.shared import needs_shared
from tests.sim.cases import TRUTH, document
from tests.sim.disguised import change_manifest, disguised
from tests.sim.test_fidelity import load, rewrite
from tests.zlab.test_calibrate_command import FEW
from zlab.engine.engine import EngineSettings
from zlab.engine.model.loader import load_model
from zlab.sim.fitting import fit
from zlab.sim.profiles import Profile, from_profile, load_profile, parse_measurements, save_profile

POLICIES = (
    "full-kv",
    "hybrid:budget.tokens=64",
    "hybrid:budget.tokens=96",
    "constrained:budget.tokens=64",
)
MOST_BYTES = 300_000 // 36  # of a run: so many are made, and the file is to be kept


@cache
def fitted() -> Profile:
    """Of an H200 that does what `TRUTH` says, with blocks as small as those of these runs."""
    return replace(fit(parse_measurements(document(TRUTH, 0.0, 0))), block_size=16)


def recorded(folder: Path, name: str, policy: str = "full-kv", gap_s: float | None = None) -> Path:
    return disguised(folder / "recordings" / name, load(gap_s), policy, from_profile(fitted()))


def write_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    about = {"card": "NVIDIA H200", "versions": {}, "date": "2026-11-30", "command": {"only": "x"}}
    (folder / "runs.json").write_text(json.dumps(about | {"runs": list(rows)}))


def judge_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *folders: str) -> dict[str, Any]:
    out = tmp_path / "trust.json"
    profile = save_profile(fitted(), tmp_path)
    arguments = [
        *(str(tmp_path / folder) for folder in folders),
        "--out",
        str(out),
        "--profile",
        str(profile),
    ]
    monkeypatch.setattr(sys, "argv", ["judge", *arguments])
    judge.main()
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def slow_down(columns: dict[str, Any]) -> None:
    columns |= {name: [2.0 * value for value in columns[name]] for name in ("start_s", "end_s")}


@pytest.fixture
def two_folders(tmp_path: Path) -> tuple[str, str]:
    """Half a grid in each, and another run in the first."""
    for place, policy in enumerate(POLICIES):
        recorded(tmp_path / ("a", "b")[place % 2], f"grid-{place}", policy)
    recorded(tmp_path / "a", "W1-hybrid", POLICIES[1], 0.02)
    return "a", "b"


def test_a_grid_over_two_folders(
    tmp_path: Path,
    two_folders: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = judge_folders(monkeypatch, tmp_path, *two_folders)
    assert [row["run"] for row in found["grid"]] == [f"grid-{place}" for place in range(4)]
    assert [row["run"] for row in found["validation"]] == ["W1-hybrid"]
    assert found["ranking"]["tau"]["profile"] == 1.0
    assert found["ranking"]["swapped"] == []
    assert found["goals"]["tokens_per_s"] == {"goal": 0.03, "met": 1, "runs": 1, "worst": 0.0}
    (run,) = found["validation"]
    assert len(run["figures"]) == 14
    assert all(
        row["met"] in (True, None) and row["error"] == 0.0 for row in run["figures"].values()
    )
    assert abs(run["figures"]["makespan_s"]["roofline_error"]) > 0.01
    assert set(run["steps"]) >= {"decode only", "with compression"}
    # the fastest run of the grid is made the slowest: the profile has it wrong against every other
    rates = {row["run"]: row["figures"]["tokens_per_s"]["measured"] for row in found["grid"]}
    fastest = max(rates, key=lambda name: rates[name])
    (path,) = tmp_path.glob(f"*/recordings/{fastest}")
    rewrite(path, "steps", slow_down)
    order = judge_folders(monkeypatch, tmp_path, *two_folders)["ranking"]
    assert order["tau"]["profile"] == 0.0  # 3 of 6 pairs
    assert len(order["swapped"]) == 3
    assert all(fastest in pair[:2] for pair in order["swapped"])
    assert {name for pair in order["swapped"] for name in pair[:2]} == set(rates)
    assert "goal of tau 0.9 over 4 points: NOT MET" in " ".join(capsys.readouterr().out.split())


def test_a_cut_point_has_no_place_in_the_order(
    tmp_path: Path, two_folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change_manifest(tmp_path / "b" / "recordings" / "grid-1", complete=False)
    order = judge_folders(monkeypatch, tmp_path, *two_folders)["ranking"]
    assert (order["runs"], order["cut_and_left_out"]) == (3, 1)


def test_of_a_run_made_twice_the_whole_one_is_judged(tmp_path: Path) -> None:
    cut, whole, again = (recorded(tmp_path / folder, "W1-full-kv") for folder in "abc")
    change_manifest(cut, complete=False)
    for folder in "abc":
        write_rows(tmp_path / folder, [{"run": "W1-full-kv", "wall_s": folder}])
    found = gather([tmp_path / folder for folder in "abc"])
    assert found.first == {"W1-full-kv": whole}
    assert found.rows["W1-full-kv"]["wall_s"] == "b"
    assert found.repeats == {"W1-full-kv in c": (whole, again)}
    assert gather([tmp_path / "a"]).first == {"W1-full-kv": cut}


def test_what_cannot_be_judged_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path / "a", "W1-full-kv")
    change_manifest(recorded(tmp_path / "a", "W2-full-kv"), digest="0" * 64)
    write_rows(tmp_path / "a", [{"run": "W4-full-kv", "skipped": "1.5 s were left for it"}])
    found = judge_folders(monkeypatch, tmp_path, "a")
    assert [row["run"] for row in found["validation"]] == ["W1-full-kv"]
    (row,) = found["not_judged"]
    assert row["run"] == "W2-full-kv"
    assert "one of them was changed" in row["why"]
    assert found["not_run"] == [{"run": "W4-full-kv", "skipped": "1.5 s were left for it"}]


def test_one_profile_is_judged(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with pytest.raises(
        SystemExit, match=r"measurements\.json is in none of the folders: .* --profile FILE"
    ):
        find_profile_of(folders, None, keep=False)
    (folders[1] / "measurements.json").write_text(json.dumps(document(TRUTH, 0.0, 0)))
    profile, path = find_profile_of(folders, None, keep=False)
    assert path == folders[1] / "h200-qwen3-8b-bfloat16.json"
    assert profile.block_size == 256
    shutil.copy(folders[1] / "measurements.json", folders[0])
    with pytest.raises(
        SystemExit, match=r"measurements\.json is in .*a and .*b: one profile is judged"
    ):
        find_profile_of(folders, None, keep=False)
    assert find_profile_of(folders, path, keep=False) == (profile, path)


def test_a_folder_with_measurements_alone_brings_no_run(tmp_path: Path) -> None:
    (tmp_path / "measurements.json").write_text("{}")
    assert gather([tmp_path]).first == {}


def test_a_run_is_one_short_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recorded(tmp_path / "a", "W1-hybrid", POLICIES[1], 0.02)
    change_manifest(path, compression_work_s=0.5)
    write_rows(
        tmp_path / "a",
        [rounded({"run": "W1-hybrid", "policy": POLICIES[1]} | figures_of(path, 2000))],
    )
    (run,) = judge_folders(monkeypatch, tmp_path, "a")["validation"]
    assert run["policy"] == POLICIES[1]
    assert run["measured"]["compression_work_s"] == 0.5
    assert len(run["measured"]["over_time"]["seconds"]) > 50
    (line,) = [
        line for line in (tmp_path / "trust.json").read_text().splitlines() if '"W1-hybrid"' in line
    ]
    assert json.loads(line) == run
    assert len(line) < MOST_BYTES


torch.set_num_threads(1)
SMALL = (
    "--minutes",
    "5",
    "--model",
    "dummy:tiny",
    "--device",
    "cpu",
    "--quick",
    "--block-size",
    "16",
    "--kv-blocks",
    "100",
    "--pool-blocks",
    "60",
    "--max-running",
    "6",
    "--max-batched-tokens",
    "512",
    "--first",
    "2",
    "--grid-requests",
    "5",
)
GRID = {f"grid-8-{policy}" for policy in ("full-kv", "constrained-16", "hybrid-16", "hybrid-32")}
RUNS = {"W2-full-kv", "repeat-8-full-kv"} | GRID


@pytest.fixture
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zlab.engine.calibration.QUICK", FEW)
    monkeypatch.setattr(validate, "CLOSED", ("W2",))
    monkeypatch.setattr(validate, "POLICIES", ("full-kv",))
    monkeypatch.setattr(Size, "grid_pools", (96,))


def run(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    {"validate": validate, "judge": judge}[script].main()


@needs_shared
@pytest.mark.usefixtures("few_runs")
def test_there_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two calls share the work: one calibrates, the other has the grid, and a run that the first
    made, too.
    """
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run(
        monkeypatch,
        "validate",
        "--out",
        str(ours),
        "--only",
        "calibrate,W2-full-kv,grid-8-hybrid-32",
        *SMALL,
    )
    run(
        monkeypatch,
        "validate",
        "--out",
        str(theirs),
        "--parts",
        "closed,grid",
        "--skip",
        "grid-8-hybrid-32",
        *SMALL,
    )
    names = {path.name for path in ours.iterdir()}
    (profile,) = ours.glob("cpu-*-tiny-float32.json")
    assert names == {"measurements.json", "runs.json", "recordings.tar.gz.0", profile.name}
    assert {path.name for path in theirs.iterdir()} == {"runs.json", "recordings.tar.gz.0"}
    assert load_profile(profile).model == "tiny"
    made = [
        row
        for folder in (ours, theirs)
        for row in json.loads((folder / "runs.json").read_text())["runs"]
    ]
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
        assert sum(kind["measured_s"] for kind in row["steps"].values()) == pytest.approx(
            span["measured"], rel=1e-3
        )
    assert set(found["ranking"]["tau"]) == {"profile", "roofline"}
    assert found["ranking"]["runs"] == len(GRID)
    assert found["goals"]["makespan_s"]["runs"] == 1
    assert set(found["repeat"]) == {"repeat-8-full-kv", "W2-full-kv in theirs"}
    assert all(row["same_decisions"] for row in found["repeat"].values())
    assert found["profile"]["model"] == "tiny"
    assert [call["folder"] for call in found["calls"]] == ["ours", "theirs"]
    assert {call["card"] for call in found["calls"]} == {"CPU"}
    assert found["not_run"] == found["not_judged"] == []
    assert f"goal of tau {judge.GOAL_TAU} over 4 points" in " ".join(
        capsys.readouterr().out.split()
    )


@needs_shared
def test_a_run_is_cut_when_its_time_is_over(tmp_path: Path) -> None:
    size = Size(block_size=16, first=6)
    point = next(iter(points(("timed",), size)))
    assert point.name == "azure-full-kv"
    loaded = load_model("dummy:tiny")
    settings = EngineSettings("dummy:tiny", block_size=16, device="cpu", overlap=False)
    row = validate.run_point(point, settings, loaded, 0.5, tmp_path / "run")
    assert row["complete"] is False
    assert "error" not in row
    assert row["tokens_out"] < row["tokens_asked"]
    assert row["seconds_to_share"]["0.9"] is None
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["stopped_by"] == "_CutError"


def test_a_point_that_fails_is_a_row(tmp_path: Path) -> None:
    size = Size(block_size=16)
    grid = Point("bad", lambda: validate.grid_workload(size), "hybrid", 5, True)
    settings = EngineSettings("dummy:tiny", block_size=16, device="cpu")
    row = validate.run_point(grid, settings, load_model("dummy:tiny"), 9.0, tmp_path)
    assert row["error"].startswith("ConfigError: ")
    assert "does not fit in a pool of 5" in row["error"]


def test_every_run_there_is() -> None:
    size = Size()
    every = list(points(validate.PARTS, size))
    assert len({point.name for point in every}) == len(every)
    assert sum(point.name.startswith("grid-") for point in every) == 12
    assert [point.at_once for point in every].count(False) == 6
    total = sum(request.output_tokens or 0 for request in validate.grid_workload(size))
    assert total > max(size.grid_pools) * 256  # more than fits at once


def test_pieces_fit_together_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "PIECE_BYTES", 100)
    recordings = tmp_path / "somewhere" / "recordings"
    (recordings / "run").mkdir(parents=True)
    (recordings / "run" / "manifest.json").write_text(json.dumps(list(range(500))))
    names = validate.pack(recordings, tmp_path)
    assert len(names) > 10
    shutil.rmtree(recordings)
    (found,) = judge.unpack(tmp_path)
    assert found == tmp_path / "recordings" / "run"
    assert json.loads((found / "manifest.json").read_text()) == list(range(500))
    with pytest.raises(SystemExit, match=r"holds neither recordings/ nor recordings\.tar\.gz\.0"):
        judge.unpack(recordings.parent)


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
        (
            ("--only", "W1-hybrid", "--share", "W2-hybrid=9"),
            "'W2-hybrid' is no run; there are W1-hybrid",
        ),
        (("--share", "W1-hybrid"), "'W1-hybrid': a share is NAME=SECONDS"),
        (("--share", "W1-hybrid=-3"), "'W1-hybrid=-3': a share is NAME=SECONDS"),
        (("--only", "W1-hybrid", "--skip", "W1-*"), "nothing is left"),
        ((), "--out FOLDER is needed"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "validate", *arguments)
    assert words in " ".join(capsys.readouterr().err.split())


def listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> list[str]:
    run(monkeypatch, "validate", "--list", *arguments)
    return capsys.readouterr().out.split()


def test_names_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = listed(monkeypatch, capsys)
    assert every[:2] == ["calibrate", "W1-full-kv"]
    assert {
        f"{load}-hybrid-{how}" for load in ("W1", "W2", "W4") for how in ("1024", "swap")
    } <= set(every)
    chosen = listed(monkeypatch, capsys, "--only", "W4-*,calibrate", "--skip", "*-blocking")
    assert chosen == ["calibrate", "W4-full-kv", "W4-hybrid", "W4-hybrid-1024", "W4-hybrid-swap"]
    assert listed(monkeypatch, capsys, "--parts", "more", "--skip", "W[24]-*") == [
        "W1-hybrid-1024",
        "W1-hybrid-swap",
    ]


def test_two_calls_share_all_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = listed(monkeypatch, capsys, "--only", "calibrate,W1-*,azure-*")
    theirs = listed(
        monkeypatch,
        capsys,
        "--parts",
        ",".join(validate.ALL_PARTS),
        "--skip",
        ",".join(ours),
    )
    assert not set(ours) & set(theirs)
    assert set(ours) | set(theirs) == set(listed(monkeypatch, capsys))


def test_names_come_in_the_order_in_which_they_are_wanted() -> None:
    names = ["a1", "a2", "b1", "b2"]
    assert choose(names, ["b2", "a*", "b*"], []) == ["b2", "a1", "a2", "b1"]
    assert choose(names, [], ["a*"]) == ["b1", "b2"]
    assert read_shares(["b*=30", "b2=2.5"], names) == {"b1": 30.0, "b2": 2.5}


def test_time_is_shared_by_weight_but_for_what_is_promised() -> None:
    heavy, light, other = [
        Point(name, lambda: validate.grid_workload(Size()), "hybrid", 96, True, weight)
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
    assert {point.host_blocks for point in points(validate.PARTS, Size())} == {0}

"""Judging what several calls on a GPU brought back, on recordings whose truth is known."""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks import judge_simulator
from benchmarks.judge_simulator import find_profile_of, gather
from benchmarks.run_figures import figures_of, rounded
from sim.fitting import fit
from sim.measurements import parse_measurements
from sim.profile import Profile, from_profile, save_profile
from tests.sim.disguised import change_manifest, disguised
from tests.sim.made_up import TRUTH, document
from tests.sim.test_trust import load, rewrite

POLICIES = ("full-kv", "hybrid:budget.tokens=64", "hybrid:budget.tokens=96", "constrained:budget.tokens=64")
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


def judge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *folders: str) -> dict[str, Any]:
    out = tmp_path / "trust.json"
    profile = save_profile(fitted(), tmp_path)
    arguments = [*(str(tmp_path / folder) for folder in folders), "--out", str(out), "--profile", str(profile)]
    monkeypatch.setattr(sys, "argv", ["judge", *arguments])
    judge_simulator.main()
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
    tmp_path: Path, two_folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = judge(monkeypatch, tmp_path, *two_folders)
    assert [row["run"] for row in found["grid"]] == [f"grid-{place}" for place in range(4)]
    assert [row["run"] for row in found["validation"]] == ["W1-hybrid"]
    assert found["ranking"]["tau"]["profile"] == 1.0
    assert found["ranking"]["swapped"] == []
    assert found["goals"]["tokens_per_s"] == {"goal": 0.03, "met": 1, "runs": 1, "worst": 0.0}
    (run,) = found["validation"]
    assert len(run["figures"]) == 14
    assert all(row["met"] in (True, None) and row["error"] == 0.0 for row in run["figures"].values())
    assert abs(run["figures"]["makespan_s"]["roofline_error"]) > 0.01
    assert set(run["steps"]) >= {"decode only", "with compression"}
    # the fastest run of the grid is made the slowest: the profile has it wrong against every other
    rates = {row["run"]: row["figures"]["tokens_per_s"]["measured"] for row in found["grid"]}
    fastest = max(rates, key=lambda name: rates[name])
    (path,) = tmp_path.glob(f"*/recordings/{fastest}")
    rewrite(path, "steps", slow_down)
    order = judge(monkeypatch, tmp_path, *two_folders)["ranking"]
    assert order["tau"]["profile"] == 0.0  # 3 of 6 pairs
    assert len(order["swapped"]) == 3
    assert all(fastest in pair[:2] for pair in order["swapped"])
    assert {name for pair in order["swapped"] for name in pair[:2]} == set(rates)
    assert "goal of tau 0.9 over 4 points: NOT MET" in " ".join(capsys.readouterr().out.split())


def test_a_cut_point_has_no_place_in_the_order(
    tmp_path: Path, two_folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change_manifest(tmp_path / "b" / "recordings" / "grid-1", complete=False)
    order = judge(monkeypatch, tmp_path, *two_folders)["ranking"]
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


def test_what_cannot_be_judged_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "a", "W1-full-kv")
    change_manifest(recorded(tmp_path / "a", "W2-full-kv"), digest="0" * 64)
    write_rows(tmp_path / "a", [{"run": "W4-full-kv", "skipped": "1.5 s were left for it"}])
    found = judge(monkeypatch, tmp_path, "a")
    assert [row["run"] for row in found["validation"]] == ["W1-full-kv"]
    (row,) = found["not_judged"]
    assert row["run"] == "W2-full-kv"
    assert "one of them was changed" in row["why"]
    assert found["not_run"] == [{"run": "W4-full-kv", "skipped": "1.5 s were left for it"}]


def test_one_profile_is_judged(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with pytest.raises(SystemExit, match=r"measurements\.json is in none of the folders: .* --profile FILE"):
        find_profile_of(folders, None, keep=False)
    (folders[1] / "measurements.json").write_text(json.dumps(document(TRUTH, 0.0, 0)))
    profile, path = find_profile_of(folders, None, keep=False)
    assert path == folders[1] / "h200-qwen3-8b-bfloat16.json"
    assert profile.block_size == 256
    shutil.copy(folders[1] / "measurements.json", folders[0])
    with pytest.raises(SystemExit, match=r"measurements\.json is in .*a and .*b: one profile is judged"):
        find_profile_of(folders, None, keep=False)
    assert find_profile_of(folders, path, keep=False) == (profile, path)


def test_a_folder_with_measurements_alone_brings_no_run(tmp_path: Path) -> None:
    (tmp_path / "measurements.json").write_text("{}")
    assert gather([tmp_path]).first == {}


def test_a_run_is_one_short_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recorded(tmp_path / "a", "W1-hybrid", POLICIES[1], 0.02)
    change_manifest(path, compression_work_s=0.5)
    write_rows(tmp_path / "a", [rounded({"run": "W1-hybrid", "policy": POLICIES[1]} | figures_of(path, 2000))])
    (run,) = judge(monkeypatch, tmp_path, "a")["validation"]
    assert run["policy"] == POLICIES[1]
    assert run["measured"]["compression_work_s"] == 0.5
    assert len(run["measured"]["over_time"]["seconds"]) > 50
    (line,) = [line for line in (tmp_path / "trust.json").read_text().splitlines() if '"W1-hybrid"' in line]
    assert json.loads(line) == run
    assert len(line) < MOST_BYTES

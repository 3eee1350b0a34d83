"""`zlab trust`: what it prints and writes on the engine's kept recording and on made-up ones, and
what it refuses.
"""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.sim.cases import TRUTH, document
from tests.sim.disguised import change_manifest, disguised
from tests.sim.test_fidelity import KEPT, load, rewrite
from tests.zlab.command_line import errors, zlab
from zlab.sim.fitting import fit
from zlab.sim.profiles import Profile, from_profile, parse_measurements, save_profile

CARD = ("--gpu", "h200", "--model", "smollm2-135m")  # rows for a roofline of what has none
FIGURES = 14


@cache
def fitted() -> Profile:
    """Of an H200 that does what `TRUTH` says, with blocks as small as those of the tests' runs."""
    return replace(fit(parse_measurements(document(TRUTH, 0.0, 0))), block_size=16)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    return str(save_profile(fitted(), tmp_path))


@pytest.fixture
def tiny_profile(tmp_path: Path) -> str:
    """As if the kept recording's machine had been calibrated."""
    return str(
        save_profile(replace(fitted(), gpu="cpu-x86-64", model="tiny", dtype="float32"), tmp_path)
    )


def test_a_report_of_one_run(tiny_profile: str) -> None:
    result = zlab("trust", str(KEPT), "--profile", tiny_profile, "--roofline", *CARD)
    assert result.exit_code == 0, result.output
    assert "costs: cpu-x86-64-tiny-float32 2026-11-30" in result.stdout
    assert "note: the profile was measured with torch 2.11.0, the run with 2." in " ".join(
        result.stdout.split()
    )
    assert "decisions (free replay): equal, digest" in result.stdout
    for words in (
        "makespan, s",
        "output tokens/s",
        "TTFT, s, p99",
        "TPOT, ms, mean",
        "E2E, s, p50",
        "roofline's error",
    ):
        assert words in result.stdout
    assert "3% NOT MET" in result.stdout
    for words in (
        "decode only",
        "mixed",
        "with compression",
        "lacks of all",
        "the engine's own steps, priced:",
    ):
        assert words in result.stdout


def test_goals_are_met_where_the_model_is_right(tmp_path: Path, profile: str) -> None:
    run = disguised(tmp_path / "run", load(), "hybrid:budget.tokens=96", from_profile(fitted()))
    out = tmp_path / "trust.json"
    result = zlab(
        "trust", str(run), "--profile", profile, "--roofline", "--out", str(out), "--json"
    )
    assert result.exit_code == 0
    shown = json.loads(result.stdout)
    assert json.loads(out.read_text()) == shown
    assert shown["ranking"] is None
    (found,) = shown["runs"]
    figures = found["profile"]["figures"]
    assert len(figures) == FIGURES
    assert all(row["met"] in (True, None) and abs(row["error"]) < 1e-6 for row in figures.values())
    assert found["profile"]["decisions"]["equal"]
    guess = found["roofline"]["figures"]["makespan_s"]
    assert guess["measured"] == figures["makespan_s"]["measured"]
    assert abs(guess["error"]) > 0.01
    assert found["notes"] == []


def test_without_a_profile_the_roofline_is_judged() -> None:
    result = zlab("trust", str(KEPT), *CARD)
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    assert "unknown measured profile 'cpu-x86-64-tiny-float32'" in words
    assert "the roofline is judged instead" in words
    assert "costs: roofline" in words
    refused = zlab("trust", str(KEPT))
    assert refused.exit_code == 2
    assert "has no roofline: unknown GPU 'cpu-x86-64'" in errors(refused)
    assert "--gpu and --model name another" in errors(refused)


def test_the_order_of_policies(tmp_path: Path, profile: str) -> None:
    """The engine's order is the simulator's, then it is turned round by hand: the fastest run is
    made the slowest.
    """
    policies = (
        "full-kv",
        "hybrid:budget.tokens=64",
        "hybrid:budget.tokens=96",
        "constrained:budget.tokens=64",
    )
    cost = from_profile(fitted())
    runs = [
        disguised(tmp_path / str(place), load(), policy, cost)
        for place, policy in enumerate(policies)
    ]
    shown = json.loads(zlab("trust", *map(str, runs), "--profile", profile, "--json").stdout)
    assert shown["ranking"] == {"profile": 1.0}
    rates = [row["profile"]["figures"]["tokens_per_s"]["measured"] for row in shown["runs"]]
    assert len(set(rates)) == 4

    def slow_down(columns: dict[str, list[float]]) -> None:
        for name in ("start_s", "end_s"):
            columns[name] = [2.0 * value for value in columns[name]]

    rewrite(runs[rates.index(max(rates))], "steps", slow_down)
    result = zlab("trust", *map(str, runs), "--profile", profile)
    assert result.exit_code == 0
    assert "Kendall's tau of tokens/s, profile: 0.000" in result.stdout  # 3 of 6 pairs turned round
    assert result.stdout.count("equal") == 4


def test_a_planted_difference_is_named(tmp_path: Path) -> None:
    changed = Path(shutil.copytree(KEPT, tmp_path / "changed"))
    text = json.loads((changed / "manifest.json").read_text())["policy_toml"]
    change_manifest(changed, policy_toml=text.replace("tokens = 160", "tokens = 176"))
    result = zlab("trust", str(changed), *CARD)
    assert result.exit_code == 1
    assert "decisions (free replay): DIFFER" in result.stdout
    assert "the first that differs is in step" in result.stdout
    assert "engine compressing request" in " ".join(result.stdout.split())


def test_a_damaged_recording_ends_with_what_is_wrong(tmp_path: Path) -> None:
    changed = Path(shutil.copytree(KEPT, tmp_path / "changed"))
    change_manifest(changed, digest="0" * 64)
    result = zlab("trust", str(changed), *CARD)
    assert result.exit_code == 1
    assert "its manifest says 0000000000000000: one of them was changed" in errors(result)
    assert result.stdout == ""


def test_a_profile_of_something_else_is_refused(tmp_path: Path, profile: str) -> None:
    result = zlab("trust", str(KEPT), "--profile", profile)
    assert result.exit_code == 2
    message = errors(result)
    assert "profile h200-qwen3-8b-bfloat16 does not belong to" in message
    assert (
        "gpu h200, recorded with cpu-x86-64; model qwen3-8b, recorded with tiny; dtype bfloat16, "
        "recorded" in message
    )
    run = disguised(tmp_path / "run", load(), "hybrid:budget.tokens=96", from_profile(fitted()))
    large = save_profile(replace(fitted(), block_size=256), tmp_path)
    result = zlab("trust", str(run), "--profile", str(large))
    assert result.exit_code == 2
    assert "block size 256, recorded with 16" in errors(result)
    nowhere = zlab("trust", str(KEPT), "--profile", "cpu-tiny")
    assert nowhere.exit_code == 2
    assert "unknown measured profile 'cpu-tiny'" in errors(nowhere)

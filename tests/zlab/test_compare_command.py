"""`zlab compare`: one table, ratios to the first policy, intervals, a recording a run."""

import json
from pathlib import Path

import pytest

from tests.zlab.command_line import SMALL, SMALL_POOL, zlab
from zlab.sim.compare import recording_folders
from zlab.traces.recording import load_run

POLICIES = ("-p", "full-kv", "-p", "hybrid:budget.tokens=512")


def test_seeds_give_means_with_intervals_and_recordings(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    result = zlab(
        "compare",
        SMALL,
        *SMALL_POOL,
        *POLICIES,
        "--seeds",
        "3",
        "--json",
        "--jobs",
        "1",
        "--out",
        str(out),
    )
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    found = json.loads(result.stdout)
    assert found["seeds"] == [0, 1, 2]
    first, other = found["policies"]
    assert (first["policy"], other["policy"]) == ("full-kv", "hybrid:budget.tokens=512")
    for row in (first, other):
        speeds = [run["tokens_per_s"] for run in row["runs"]]
        shown = row["figures"]["tokens_per_s"]
        assert shown["value"] == pytest.approx(sum(speeds) / 3)
        assert shown["low"] < shown["value"] < shown["high"]
    assert first["ratios"]["tokens_per_s"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    ratio = other["ratios"]["tokens_per_s"]
    assert 0 < ratio["low"] < ratio["value"] < ratio["high"]
    folders = recording_folders(["full-kv", "hybrid:budget.tokens=512"], 3, out)
    for row, places in zip((first, other), folders, strict=True):
        for run, place in zip(row["runs"], places, strict=True):
            assert place is not None
            assert load_run(place).summary["digest"] == run["digest"]


def test_one_workload_gives_intervals_of_latencies_only() -> None:
    found = json.loads(
        zlab("compare", SMALL, *SMALL_POOL, *POLICIES, "--json", "--jobs", "1").stdout
    )
    figures = found["policies"][1]["figures"]
    assert figures["tokens_per_s"]["low"] is None
    assert (
        figures["e2e_s_p50"]["low"] < figures["e2e_s_p50"]["value"] <= figures["e2e_s_p50"]["high"]
    )
    assert found["policies"][1]["runs"][0]["e2e_s"]["p50"] == figures["e2e_s_p50"]["value"]


def test_a_seed_in_the_spec_is_where_counting_begins() -> None:
    found = json.loads(
        zlab(
            "compare",
            f"{SMALL}&seed=5",
            *SMALL_POOL,
            *POLICIES,
            "--seeds",
            "2",
            "--json",
            "-j",
            "1",
        ).stdout
    )
    assert found["seeds"] == [5, 6]
    alone = json.loads(
        zlab("replay", f"{SMALL}&seed=6", *SMALL_POOL, "-p", "full-kv", "--json").stdout
    )
    assert found["policies"][0]["runs"][1]["digest"] == alone["digest"]


def test_the_table_has_a_column_a_policy_in_as_many_parts_as_needed() -> None:
    policies = [
        word
        for tokens in (256, 512, 768, 1024, 1280)
        for word in ("-p", f"hybrid:budget.tokens={tokens}")
    ]
    shown = zlab("compare", SMALL, *SMALL_POOL, *policies, "--jobs", "1").stdout
    assert shown.count("output tokens/s") == 2
    for tokens in (256, 512, 768, 1024, 1280):
        assert f"hybrid:budget.tokens={tokens}" in shown
    assert "x: ratio to hybrid:budget.tokens=256" in shown
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 120


def test_the_headline_is_finished_requests_and_lengths_are_never_silent(tmp_path: Path) -> None:
    command = ("compare", SMALL, *SMALL_POOL, *POLICIES, "--jobs", "1")
    lines = zlab(*command).stdout.splitlines()
    first_row = next(line for line in lines if "/s " in line)
    shown = " ".join(" ".join(lines).split())
    assert first_row.startswith(" finished requests/s")
    assert "not known: no length profile was given" in shown
    assert "finishes more requests a second than full-kv until outputs get" in shown
    first, other = json.loads(zlab(*command, "--json").stdout)["policies"]
    assert (first["lengths"]["known"], other["lengths"]["known"]) == (True, False)
    assert first["break_even"] is None
    assert 1 < other["break_even"]["multiplier"] < 16
    quick = json.loads(zlab(*command, "--no-break-even", "--json").stdout)["policies"][1]
    assert quick["break_even"] is None

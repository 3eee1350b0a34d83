"""`zlab sweep`: every point a row, written as asked, over processes or a cluster, whole after
Ctrl-C.
"""

import csv
import json
import signal
from pathlib import Path
from typing import Any

import distributed
import pyarrow.parquet as pq
import pytest

from tests.zlab.command_line import (
    PATIENCE_S,
    SMALL,
    SMALL_POOL,
    errors,
    start,
    wait_for_words,
    zlab,
)

LONG = "synth:amc23?samples=1"
GRID = ("--grid", "policy=full-kv,hybrid", "--grid", "kv-blocks=4,40")


def local_cluster() -> Any:
    """A Dask cluster of two processes on this machine."""
    make: Any = distributed.LocalCluster
    return make(n_workers=2, threads_per_worker=1, dashboard_address=None)


def test_rows_come_in_the_order_of_the_grid_and_bad_points_have_their_error() -> None:
    result = zlab("sweep", SMALL, *GRID, "--json", "--jobs", "1")
    assert result.exit_code == 0
    points = json.loads(result.stdout)["points"]
    assert [(p["parameters"]["policy"], p["parameters"]["kv-blocks"]) for p in points] == [
        ("full-kv", 4), ("full-kv", 40), ("hybrid", 4), ("hybrid", 40)
    ]  # fmt: skip
    assert [p["error"] for p in points] == [
        None,
        None,
        "ConfigError: a budget of 9 blocks does not fit in a pool of 4: the pool needs at least "
        "9 blocks, or the "
        "budget may keep at most 768 tokens",
        None,
    ]
    assert points[0]["requests_refused"] > 0
    assert result.stderr == "1 of 4 points could not run; see their errors\n"
    alone = json.loads(zlab("replay", SMALL, *SMALL_POOL, "--json").stdout)
    assert points[3]["digest"] == alone["digest"]


@pytest.mark.parametrize("ending", ["csv", "json", "parquet"])
def test_rows_are_written_as_asked(ending: str, tmp_path: Path) -> None:
    out = tmp_path / f"rows.{ending}"
    result = zlab("sweep", SMALL, *GRID, "--out", str(out), "--jobs", "1")
    assert result.exit_code == 0
    assert f"4 rows in {out}" in result.stdout
    if ending == "json":
        rows = json.loads(out.read_text())
        assert rows[3]["e2e_s"]["p99"] > 0
        assert rows[3]["parameters"] == {"policy": "hybrid", "kv-blocks": 40}
        return
    if ending == "csv":
        with out.open(newline="") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = pq.read_table(out).to_pylist()
    assert [str(row["kv-blocks"]) for row in rows] == ["4", "40", "4", "40"]
    assert float(rows[3]["e2e_s_p99"]) > 0
    assert rows[3]["policy_spec"] == "hybrid"
    assert rows[2]["error"].startswith("ConfigError")
    assert not rows[2]["tokens_per_s"]


def test_settings_of_the_policy_and_seeds_are_grid_keys() -> None:
    grid = (
        "--grid",
        "budget.tokens=512,1024",
        "--grid",
        "seed=0,1",
        "--grid",
        "policy=hybrid,hybrid:prefix=none,join=blocking",
    )
    points = json.loads(zlab("sweep", SMALL, *SMALL_POOL, *grid, "--json", "--jobs", "1").stdout)[
        "points"
    ]
    assert len(points) == 8
    assert points[7]["policy"] == "hybrid:prefix=none,join=blocking,budget.tokens=1024"
    assert len({point["workload_sha256"] for point in points}) == 2
    assert points[0]["compressions"] > points[4]["compressions"]


def test_a_setting_that_a_policy_does_not_have_is_a_blank_cell(tmp_path: Path) -> None:
    grid = ("--grid", "policy=full-kv,hybrid", "--grid", "budget.tokens=512,1024", "--jobs", "1")
    rows = tmp_path / "rows"
    shown = zlab("sweep", SMALL, *SMALL_POOL, *grid, "--out", str(rows.with_suffix(".csv")))
    assert shown.exit_code == 0
    assert "full-kv has no setting budget.tokens: one row for all its values" in shown.stdout
    assert "None" not in shown.stdout
    with rows.with_suffix(".csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["budget.tokens"] for row in found] == ["", "512", "1024"]
    assert not any(row["error"] for row in found)
    zlab("sweep", SMALL, *SMALL_POOL, *grid, "--out", str(rows.with_suffix(".parquet")))
    table = pq.read_table(rows.with_suffix(".parquet"))
    assert table["budget.tokens"].to_pylist() == [None, 512, 1024]
    result = zlab("sweep", SMALL, *SMALL_POOL, *grid, "--json")
    points = json.loads(result.stdout)["points"]
    assert [point["blank"] for point in points] == [["budget.tokens"], [], []]
    assert points[0]["parameters"] == {"policy": "full-kv", "budget.tokens": None}


def test_a_setting_that_no_policy_has_is_misuse() -> None:
    result = zlab("sweep", SMALL, "-p", "full-kv", "--grid", "budget.tokens=512,1024")
    assert result.exit_code == 2
    assert "'budget.tokens' is not a setting of any policy of the grid (full-kv)" in errors(result)


def test_no_point_that_runs_ends_with_1() -> None:
    result = zlab(
        "sweep", SMALL, "--grid", "gpu=h200,h201", "--policy", "hybrid:window=300", "--jobs", "1"
    )
    assert result.exit_code == 1
    assert "1 point gpu=h201: SimError: unknown GPU 'h201'; did you mean 'h200'?" in " ".join(
        result.stdout.split()
    )
    assert "no point could run" in errors(result)


def test_the_same_over_processes_and_over_a_dask_cluster() -> None:
    alone = json.loads(zlab("sweep", SMALL, *GRID, "--json", "--jobs", "1").stdout)["points"]
    spread = zlab("sweep", SMALL, *GRID, "--json", "--jobs", "2")
    assert [point.get("digest") for point in json.loads(spread.stdout)["points"]] == [
        p.get("digest") for p in alone
    ]
    with local_cluster() as cluster:
        address = ("--backend", "dask", "--cluster", cluster.scheduler_address)
        process = start(["sweep", SMALL, *GRID, "--json", *address])
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, stderr
    points = json.loads(stdout)["points"]
    assert [point["parameters"] for point in points] == [point["parameters"] for point in alone]
    assert [point.get("digest") for point in points] == [point.get("digest") for point in alone]
    assert [point["error"] for point in points] == [point["error"] for point in alone]


def test_ctrl_c_keeps_the_rows_that_had_finished(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    seeds = ",".join(map(str, range(300)))  # a minute's work and more
    process = start(
        [
            "sweep",
            LONG,
            "--kv-blocks",
            "512",
            "--grid",
            f"seed={seeds}",
            "--out",
            str(out),
            "--jobs",
            "1",
        ]
    )
    wait_for_words(process, " of 300 points after ")  # at least one has finished
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, stderr
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert 1 <= len(rows) < 300
    assert [row["seed"] for row in rows] == [str(seed) for seed in range(len(rows))]
    assert not any(row["error"] for row in rows)
    assert f"interrupted: {len(rows)} of 300 points had finished" in stderr
    assert f"{len(rows)} rows in {out}" in stdout

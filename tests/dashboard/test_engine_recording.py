"""Every view on a recording of the engine, beside the simulator's of the same workload."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.dashboard.app import charts, opened, words
from zlab import app as commands

TRACE = "synth:amc23?num_problems=3&samples=2&cap=200"
COMMON = ["--policy", "hybrid:budget.tokens=64,window=8", "--kv-blocks", "40", "--block-size", "16"]
VIEWS = ("Occupancy", "Requests", "Compare", "Trust", "Play", "Live")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    engine = ["bench", TRACE, *COMMON, "--model", "dummy:tiny", "--at-once", "--out", str(folder / "engine")]
    simulator = ["replay", TRACE, *COMMON, "--model", "qwen3-8b", "--out", str(folder / "simulator")]
    for command in (engine, simulator):
        done = CliRunner().invoke(commands, command)
        assert done.exit_code == 0, done.output
    return folder


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_shows_it(monkeypatch: pytest.MonkeyPatch, runs: Path, view: str) -> None:
    app = opened(monkeypatch, [runs], view=view, run="engine")
    assert not app.exception
    assert not app.error
    assert view == "Play" or charts(app)


def test_trust_finds_equal_decisions(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    app = opened(monkeypatch, [runs], view="Trust", run="engine")
    assert "that both decided alike" in words(app)

"""`zlab demo`: the main job."""

import json
import re
from pathlib import Path

import pytest

from tests.zlab.command_line import SMALL, SMALL_POOL, errors, zlab
from zlab.cli.demo import ABLATIONS, SPECS, make_room
from zlab.traces.recording import Recording


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The demo's folder and output."""
    out = tmp_path_factory.mktemp("demo") / "run"
    result = zlab("demo", "--out", str(out), "--seeds", "2")
    assert result.exit_code == 0, result.stderr
    return out, result.stdout


def test_hybrid_is_worth_at_least_what_is_promised_on_every_seed(demo: tuple[Path, str]) -> None:
    figures = json.loads((demo[0] / "figures.json").read_text())
    speed = {name: row["tokens_per_s"] for name, row in figures["policies"].items()}
    ratios = figures["hybrid_over_full_kv_by_seed"]
    assert len(ratios) == 2
    assert ratios[0] == speed["hybrid"] / speed["full-kv"]
    assert min(ratios) >= 2.1
    work = figures["hybrid_over_full_kv_requests_by_seed"]
    assert work == pytest.approx(ratios)  # outputs are as long under both
    assert 2.5 < figures["break_even"]["multiplier"] < 3.2
    assert figures["lengths"]["hybrid"]["known"] is False


def test_everything_lies_where_it_says(demo: tuple[Path, str]) -> None:
    out, shown = demo
    figures = json.loads((out / "figures.json").read_text())
    assert list(figures["policies"]) == list(SPECS)
    for name in SPECS:
        recording = Recording(out / name)
        assert recording.complete
        assert recording.manifest["digest"] == figures["policies"][name]["digest"]
        assert recording.manifest["policy"] == SPECS[name]
    page = (out / "occupancy.html").read_text()
    assert "<html" in page
    for name in SPECS:
        assert name in page
    for place in (out, out / "figures.json", out / "occupancy.html"):
        assert str(place) in shown


def test_each_ablation_is_stated_as_measured_with_its_cause(demo: tuple[Path, str]) -> None:
    out, shown = demo
    figures = json.loads((out / "figures.json").read_text())["policies"]
    words = " ".join(shown.split())
    for item in ABLATIONS:
        change = figures[item.name]["requests_per_s"] / figures["hybrid"]["requests_per_s"] - 1
        stated = re.search(
            rf"{item.name} \({re.escape(item.spec)}\): ([+-][\d.]+)% requests/s\. (\w+)", words
        )
        assert stated is not None
        assert float(stated[1]) == pytest.approx(100 * change, abs=0.051)
    assert (
        f"Hybrid's {figures['hybrid']['prefix_hit_tokens']:,} hit tokens are preempted requests"
        in words
    )
    assert figures["no-prefix"]["prefix_hit_tokens"] == 0


def test_prompts_of_the_demo_cannot_share_a_block(demo: tuple[Path, str]) -> None:
    requests = Recording(demo[0] / "hybrid").table("requests")
    assert max(requests["prompt_tokens"].to_pylist()) < 256
    hits = requests.to_pylist()
    assert all(row["preemptions"] > 0 for row in hits if row["prefix_hit_tokens"])


def test_what_stands_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "hybrid").mkdir()
    (tmp_path / "hybrid" / "mine.txt").touch()
    result = zlab("demo", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "is in the way and no recording" in errors(result)
    assert (tmp_path / "hybrid" / "mine.txt").exists()


def test_what_an_earlier_demo_left_is_replaced(tmp_path: Path) -> None:
    for name in ("full-kv", "no-async", "mine"):
        assert (
            zlab("replay", SMALL, *SMALL_POOL, "--out", str(tmp_path / name), "--json").exit_code
            == 0
        )
    make_room(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]

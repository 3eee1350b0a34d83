"""Which recording is it, what runs have in common, and the table of all of them."""

import csv
import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("streamlit")

from tests.dashboard.cases import charts, made, opened, words
from tests.traces.cases import POLICIES, conversations
from zlab.dashboard.data import find_recordings
from zlab.dashboard.figures.compare import BETTER, WORSE, comparison, in_words
from zlab.dashboard.views.compare import newest_comparable
from zlab.dashboard.views.identity import identity, settings_table, unlike
from zlab.dashboard.views.page import as_code, csv_of, escaped
from zlab.dashboard.views.runs import filtered, read_tags, runs_table, write_tags
from zlab.policies.spec import load_policy
from zlab.sim.cost_model import Change
from zlab.sim.replay import replay
from zlab.traces.recording import Recording, write_manifest

VIEWS = ("Occupancy", "Requests", "Live", "Compare", "Trust")


def manifest(name: str) -> dict[str, object]:
    return dict(Recording(made() / name).manifest)


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_says_which_recording_it_shows(
    view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = opened(monkeypatch, [made()], view=view, run="hybrid", runs="hybrid", predicted="hybrid")
    assert not app.exception
    found = identity(manifest("hybrid"))
    tables = " ".join(table.value.to_csv() for table in app.dataframe)
    for name in ("Policy", "GPU", "Model", "Pool", "Workload", "Times", "Version", "Digest"):
        assert found[name] not in ("", "unknown")
        assert found[name] in words(app) + tables.replace('"', ""), name


def test_the_address_always_holds_run_and_view(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [made()])
    assert app.session_state["view"] == "Occupancy"
    newest = find_recordings([made()])[0].label
    assert app.selectbox(key="run").value == newest
    # A control whose value is its default is left out of the address: neither has a default.
    for kind, key in (("selectbox", "run"), ("button_group", "view")):
        (control,) = [found for found in app.get(kind) if found.key == key]
        assert not getattr(control.proto, "default", None)


def test_an_unknown_run_is_said_and_no_other_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for view in ("Occupancy", "Requests", "Live"):
        app = opened(monkeypatch, [made()], view=view, run="of-a-colleague")
        assert not app.exception
        assert "There is no recording `of-a-colleague`" in app.error[0].value
        assert charts(app) == []
        assert app.selectbox(key="run").value == "of-a-colleague"
    app.selectbox(key="run").set_value("hybrid").run()
    assert not app.error
    app = opened(monkeypatch, [made()], view="Nonsense", run="hybrid")
    assert "There is no view `Nonsense`" in words(app)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose policy changes in step 200."""
    root = tmp_path_factory.mktemp("changed")
    policy, limits = POLICIES[0]
    replay(
        conversations(),
        policy,
        limits=limits,
        out=root / "run",
        changes=[Change(200, load_policy("full-kv"))],
    )
    return root


@pytest.mark.parametrize(("view", "figures"), [("Occupancy", 3), ("Requests", 1), ("Live", 2)])
def test_figures_mark_the_moment_of_a_change(
    changed: Path, monkeypatch: pytest.MonkeyPatch, view: str, figures: int
) -> None:
    app = opened(monkeypatch, [changed], view=view, run="run")
    assert not app.exception
    assert "full-kv from step 200 on" in words(app)
    start = Recording(changed / "run").table("steps")["start_s"].to_numpy()[200]
    for spec in charts(app)[:figures]:
        layout = json.loads(spec)["layout"]
        assert any(shape["x0"] == shape["x1"] == start for shape in layout["shapes"])
        assert any(note["text"] == "policy: full-kv" for note in layout["annotations"])


def test_what_two_runs_differ_in() -> None:
    one, other = manifest("hybrid"), manifest("full-kv")
    table, equal = settings_table({"a": one, "b": other})
    names = set(table["setting"])
    assert "policy" in names
    assert any(name.startswith("policy.budget") for name in names)
    assert not names & {"gpu", "model", "num_blocks", "workload_sha256", "digest", "started"}
    assert equal > 20
    assert len(settings_table({"a": one, "b": one})[0]) == 0
    assert unlike({"a": one, "b": other}) == []
    assert unlike({"a": one, "b": other | {"gpu": "l40s", "num_blocks": 5}}) == ["GPU", "pool"]
    assert unlike({"a": one, "b": other | {"workload_sha256": "x"}}) == ["workload"]


def test_no_manifest_breaks_the_head_of_a_page() -> None:
    values: tuple[object, ...] = (None, [], {}, "x", 10**400, float("nan"), True, {"name": [1]})
    for odd in values:
        names = ("policy", "gpu", "model", "workload", "cost", "versions", "policy_changes")
        found = dict.fromkeys((*names, "num_blocks", "policy_toml", "digest"), odd)
        assert identity(found)["Policy"]
        settings_table({"a": found, "b": {}})


def test_runs_are_found_by_their_words_and_in_order() -> None:
    sources = find_recordings([made()])
    table = runs_table(sources, {"hybrid": "of the incident"})
    assert set(table["run"]) == {"hybrid", "swapping", "full-kv"}
    summary = manifest("hybrid")["summary"]
    assert isinstance(summary, dict)
    row = table[table["run"] == "hybrid"].iloc[0]
    assert row["requests/s"] == summary["requests_per_s"]
    assert filtered(table, "incident", "newest")["run"].tolist() == ["hybrid"]
    assert len(filtered(table, "H200 chat", "newest")) == 3
    assert filtered(table, "h200 nothing", "newest").empty
    assert filtered(table, "", "requests/s")["requests/s"].is_monotonic_decreasing
    assert filtered(table, "", "TTFT p99, s")["TTFT p99, s"].is_monotonic_increasing


def test_tags_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("hybrid", "full-kv"):
        shutil.copytree(made() / name, tmp_path / name)
    app = opened(monkeypatch, [tmp_path], view="Runs")
    app.multiselect(key="chosen").set_value(["hybrid", "full-kv"]).run()
    assert "Settings that differ" in words(app)
    app.text_input(key="tags").set_value("  of the   incident ").run()
    next(button for button in app.button if button.label == "Tag").click().run()
    assert not app.exception
    assert read_tags(tmp_path) == dict.fromkeys(("hybrid", "full-kv"), "of the incident")
    again = opened(monkeypatch, [tmp_path], view="Runs", filter="incident")
    assert len(again.dataframe[0].value) == 2
    write_tags(tmp_path, ["hybrid"], "")
    assert read_tags(tmp_path) == {"full-kv": "of the incident"}
    (tmp_path / "zlab-tags.json").write_bytes(b"\xff[")
    assert read_tags(tmp_path) == {}
    next(button for button in again.button if button.label == "Compare")


def test_chosen_runs_are_opened_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [made()], view="Runs")
    app.multiselect(key="chosen").set_value(["hybrid"]).run()
    next(button for button in app.button if button.label == "Open").click().run()
    assert (app.session_state["view"], app.session_state["run"]) == ("Occupancy", "hybrid")
    app = opened(monkeypatch, [made()], view="Runs")
    app.multiselect(key="chosen").set_value(["swapping", "hybrid"]).run()
    next(button for button in app.button if button.label == "Compare").click().run()
    assert app.multiselect(key="runs").value == ["swapping", "hybrid"]


def test_compare_warns_of_unlike_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("hybrid", "full-kv"):
        shutil.copytree(made() / name, tmp_path / name)
    app = opened(monkeypatch, [tmp_path], view="Compare", runs="hybrid,full-kv")
    assert not app.warning
    write_manifest(tmp_path / "full-kv", manifest("full-kv") | {"gpu": "l40s", "model": "other"})
    app = opened(monkeypatch, [tmp_path], view="Compare", runs=["hybrid", "full-kv"])
    assert "These runs differ in GPU, model." in app.warning[0].value
    assert not app.exception


def test_compare_says_requests_first_and_marks_better_and_worse() -> None:
    one = {"requests_per_s": 2.0, "makespan_s": 10.0, "steps": 5, "ttft_s": {"p99": 1.0}}
    other = {"requests_per_s": 3.0, "makespan_s": 12.0, "steps": 9, "ttft_s": {"p99": 1.005}}
    table = in_words(comparison({"a": one, "b": other})).set_index("figure")
    assert table.index[0] == "finished requests a second"
    marks = table["b vs a, %"]
    assert marks["finished requests a second"] == f"+50.0 {BETTER}"
    assert marks["makespan"] == f"+20.0 {WORSE}"
    assert marks["steps"] == "+80.0"
    assert marks["time to first token, p99"] == "+0.5"


def test_compare_survives_a_broken_recording(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its summary can be read, its tables cannot."""
    for name in ("hybrid", "full-kv", "swapping"):
        shutil.copytree(made() / name, tmp_path / name)
    for table in ("blocks", "requests"):
        part = tmp_path / "swapping" / table / "00000.parquet"
        part.write_bytes(part.read_bytes()[:200])
    app = opened(monkeypatch, [tmp_path], view="Compare", runs=["hybrid", "swapping", "full-kv"])
    assert not app.exception
    assert all("swapping cannot be shown" in error.value for error in app.error)
    assert app.error
    assert "finishes **" in words(app)
    assert len(charts(app)) == 5
    assert {"Table (CSV)", "Figures (HTML)"} <= {
        found.proto.label for found in app.get("download_button")
    }


def test_compare_begins_with_the_newest_comparable_runs(tmp_path: Path) -> None:
    for age, (name, gpu) in enumerate(
        (("newest", "l40s"), ("b", "h200"), ("c", "a100"), ("d", "h200"))
    ):
        shutil.copytree(made() / "hybrid", tmp_path / name)
        write_manifest(tmp_path / name, manifest("hybrid") | {"gpu": gpu})
        at = 1_700_000_000 - age
        os.utime(tmp_path / name / "manifest.json", (at, at))
    sources = find_recordings([tmp_path])
    assert [source.label for source in sources] == ["newest", "b", "c", "d"]
    assert newest_comparable(sources) == ["b", "d"]
    assert newest_comparable(sources[:1]) == ["newest"]
    assert newest_comparable([]) == []


@pytest.mark.parametrize(
    "text",
    [
        "![x](http://evil.example/a.png)",
        "[click](javascript:alert(1))",
        "$\\frac{1}{2}$",
        "<img src=http://evil.example>",
        "**bold** _em_ `code`",
        ":material/delete: :red[x]",
        "# head",
        "www.evil.example me@evil.example https://evil.example",
    ],
)
def test_text_of_files_is_no_markdown(text: str) -> None:
    from markdown_it import MarkdownIt

    reader = MarkdownIt("commonmark").enable("strikethrough")
    for shown in (escaped(text), as_code(text), as_code(f"``{text}`")):
        kinds = {
            token.type
            for block in reader.parse(shown)
            for token in (block, *(block.children or ()))
        }
        assert kinds <= {"paragraph_open", "paragraph_close", "inline", "text", "code_inline"}
    plain = escaped(text)
    for sign in ("://", "www.", ":material/", ":red[", " me@evil"):
        assert sign not in plain
    assert plain.count("$") == plain.count("\\$")


def test_cells_of_a_csv_are_no_formulas() -> None:
    table = pd.DataFrame(
        {
            "=id": ["=1+1", "+1", "-1", "@x", "\tx", "plain", None],
            "n": [-1.5, 2, np.nan, 1, 1, 1, 1],
        }
    )
    rows = list(csv.reader(io.StringIO(csv_of(table).decode())))
    assert rows[0] == ["'=id", "n"]
    assert [row[0] for row in rows[1:]] == ["'=1+1", "'+1", "'-1", "'@x", "'\tx", "plain", ""]
    assert [row[1] for row in rows[1:4]] == ["-1.5", "2.0", ""]

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from dashboard.figures.style import MAX_MARKS
from tests.dashboard.app import charts, opened, words
from tests.dashboard.recordings import NAMES, made
from traces.recording import FolderRecorder, Recording, write_manifest

VIEWS = ("Occupancy", "Requests", "Compare", "Trust", "Play", "Live")


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_draws_a_recording(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [made()], view=view, run="hybrid")
    assert not app.exception
    assert not app.error
    expected = {"Occupancy": 3, "Requests": 2, "Compare": 5, "Trust": 0, "Play": 0, "Live": 2}
    assert len(charts(app)) >= expected[view]
    assert sum(len(spec) for spec in charts(app)) < 3_000_000


def test_the_address_carries_run_view_and_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    query = {"view": "Occupancy", "run": "full-kv", "from": "0.5", "to": "1.5", "request": "17", "block": "5"}
    app = opened(monkeypatch, [made()], **query)
    assert not app.exception
    assert app.selectbox(key="run").value == "full-kv"
    text = words(app)
    assert "Showing 0.5 to 1.5 s" in text
    assert "Blocks of r17 in orange" in text
    assert "The life of block 5" in text
    assert tuple(json.loads(charts(app)[0])["layout"]["xaxis"]["range"]) == (0.5, 1.5)
    next(button for button in app.button if button.label == "Show the whole run").click().run()
    assert "Showing 0 to" in words(app)


def test_selecting_another_run_forgets_the_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [made()], view="Occupancy", run="full-kv", request="17")
    app.selectbox(key="run").set_value("hybrid").run()
    assert not app.exception
    assert "Blocks of r17" not in words(app)


def test_a_story_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [made()], view="Requests", run="hybrid", request="40")
    assert not app.exception
    assert "arrived with" in words(app)
    app.selectbox(key="order").set_value("most preemptions").run()
    first = app.dataframe[0].value
    assert first["preemptions"].is_monotonic_decreasing
    app.selectbox(key="had").set_value("preempted").run()
    assert (app.dataframe[0].value["preempted_s"] > 0).all()
    app.text_input(key="text").set_value("no such id").run()
    assert "No request is left" in words(app)
    assert not app.exception


def test_a_request_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [made()], view="Requests", run="hybrid", request="100000")
    assert "There is no ended request r100000" in words(app)
    app = opened(monkeypatch, [made()], view="Occupancy", run="hybrid", request="100000", block="100000")
    assert "never held a block" in words(app)
    assert "There is no block 100000" in words(app)
    assert not app.exception


def test_trust_says_same_digest_or_where_they_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A recording in the engine's format: the same decisions, other times."""
    shutil.copytree(made() / "hybrid", tmp_path / "simulated")
    shutil.copytree(made() / "full-kv", tmp_path / "other")
    source = Recording(made() / "hybrid")
    recorder = FolderRecorder(tmp_path / "measured", source.manifest | {"source": "engine"})
    for name in ("requests", "events", "blocks", "steps"):
        table = source.table(name)
        columns = {column: table[column] for column in table.column_names}
        if name == "steps":
            columns |= {key: columns[key].to_numpy() * 1.25 for key in ("start_s", "end_s")}
        recorder.write(name, columns)
    recorder.close()
    app = opened(monkeypatch, [tmp_path], view="Trust")
    assert not app.exception
    assert app.selectbox(key="measured").value == "measured"
    app.selectbox(key="predicted").set_value("simulated").run()
    text = words(app)
    assert "Same digest" in text
    assert "20.0% below" in text
    assert len(charts(app)) == 2
    app.selectbox(key="predicted").set_value("other").run()
    assert "The runs part in step" in words(app)
    assert "they differ in policy_digest" in words(app)
    assert not app.exception


def test_nothing_recorded_yet_brings_a_first_look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app = opened(monkeypatch, [tmp_path / "none"])
    assert not app.exception
    assert len(charts(app)) == 3
    assert (tmp_path / "none" / "first-look" / "hybrid" / "manifest.json").is_file()


def test_a_folder_that_cannot_be_written_to_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file, not a folder")
    app = opened(monkeypatch, [tmp_path / "file"])
    assert not app.exception
    assert "Make some with `zlab demo`" in words(app)


def test_one_recording_alone_cannot_be_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(made() / "hybrid", tmp_path / "only")
    assert "Two recordings of one workload" in words(opened(monkeypatch, [tmp_path], view="Trust"))
    app = opened(monkeypatch, [tmp_path], view="Compare")
    assert not app.exception
    assert "No sweep was found" in words(app)


def test_sweeps_are_maps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(made() / "hybrid", tmp_path / "only")
    head = "kv-blocks,budget.tokens,policy_spec,requests_finished,makespan_s,tokens_per_s,ttft_s_p99,error\n"
    rows = "".join(f"{b},{t},hybrid,5,{b / t},{b + t},{t / 1000},\n" for b in (64, 128) for t in (96, 128, 256))
    (tmp_path / "sweep.csv").write_text(head + rows + "1,1,,,,,,SimError: too small\n")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    app = opened(monkeypatch, [tmp_path], view="Compare")
    assert not app.exception
    assert app.selectbox(key="sweep").options == [str(tmp_path / "sweep.csv")]
    heat = json.loads(charts(app)[-2])["data"][0]
    assert heat["type"] == "heatmap"
    assert len(heat["x"]) == 3  # two sizes, and the point that failed
    app.selectbox(key="sweep_value").set_value("makespan_s").run()
    assert "makespan_s over" in json.loads(charts(app)[-2])["layout"]["title"]["text"]


@pytest.mark.parametrize("view", ["Occupancy", "Requests", "Live", "Compare", "Trust"])
def test_a_broken_recording_is_said_in_words(view: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("cut", "version", "rubbish", "nothing"):
        shutil.copytree(made() / "hybrid", tmp_path / name)
    part = tmp_path / "cut" / "events" / "00000.parquet"
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    write_manifest(tmp_path / "version", Recording(tmp_path / "version").manifest | {"format": "zlab-recording/99"})
    (tmp_path / "rubbish" / "manifest.json").write_bytes(b"\xff\xfe{]")
    (tmp_path / "nothing" / "manifest.json").write_text("[]")
    faults = {
        "cut": "cannot be read",
        "version": "zlab-recording/99",
        "rubbish": "not valid JSON",
        "nothing": "format None",
    }
    for name, says in faults.items():
        app = opened(monkeypatch, [tmp_path], view=view, run=name, runs=name, predicted=name)
        assert not app.exception, (view, name, app.exception)
        if view in ("Occupancy", "Requests", "Live"):
            assert any(says in error.value for error in app.error), (view, name)


def test_a_half_written_recording_is_shown_as_far_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = Recording(made() / "hybrid")
    FolderRecorder(tmp_path / "begun", source.manifest | {"complete": False})
    recorder = FolderRecorder(
        tmp_path / "half", source.manifest | {"complete": False, "summary": None}, rows_per_part=1
    )
    for name, share in (("events", 0.5), ("blocks", 0.45), ("steps", 0.6)):
        table = source.table(name)
        table = table.slice(0, int(table.num_rows * share))
        recorder.write(name, {column: table[column] for column in table.column_names})
    for view in VIEWS:
        for run in ("half", "begun"):
            app = opened(monkeypatch, [tmp_path], view=view, run=run)
            assert not app.exception, (view, run, app.exception)
            assert not app.error, (view, run)
    app = opened(monkeypatch, [tmp_path], view="Live", run="half")
    assert "This run is being written" in words(app)
    assert len(charts(app)) == 2
    assert "No whole part has been written yet" in words(opened(monkeypatch, [tmp_path], view="Live", run="begun"))


def test_two_sessions_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    one = opened(monkeypatch, [made()], view="Occupancy", run="hybrid", request="3")
    other = opened(monkeypatch, [made()], view="Requests", run="full-kv")
    one.run()
    assert "Blocks of r3 in orange" in words(one)
    assert other.selectbox(key="run").value == "full-kv"
    assert not one.exception
    assert not other.exception


def test_figures_of_the_page_hold_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [made()], view="Compare", runs=",".join(NAMES))
    for spec in charts(app):
        lengths = [trace["x"] for trace in json.loads(spec)["data"] if isinstance(trace.get("x"), list)]
        points = sum(len(x) for x in lengths)
        assert points <= MAX_MARKS

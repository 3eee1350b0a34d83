""""""

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard.cases import NAMES, charts, made, opened, words
from tests.traces.cases import LIMITS, POLICIES, conversations
from zlab.dashboard.figures.style import MAX_MARKS
from zlab.dashboard.views import desk as desks
from zlab.dashboard.views import jobs, play
from zlab.dashboard.views.forms import uploaded_table
from zlab.dashboard.views.jobs import PlayJob, RunRequest, new_folder
from zlab.policies.catalogue import CATALOGUE
from zlab.policies.core.policy import Policy
from zlab.policies.spec import QUESTIONS, PolicyError, load_policy, policy_digest, policy_to_toml
from zlab.sim.replay import replay
from zlab.sim.simulator import Progress
from zlab.traces.recording import FolderRecorder, Recording, Run, write_manifest

pytest.importorskip("streamlit")


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
    query = {
        "view": "Occupancy",
        "run": "full-kv",
        "from": "0.5",
        "to": "1.5",
        "request": "17",
        "block": "5",
    }
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
    assert "r40 took" in words(app)
    story = next(table.value for table in app.dataframe if "step" in table.value)
    assert story["what happened, and why"].iloc[0].startswith("arrived with")

    def figures() -> pd.DataFrame:
        found: pd.DataFrame = next(t.value for t in app.dataframe if "preemptions" in t.value)
        return found

    app.selectbox(key="order").set_value("most preemptions").run()
    assert figures()["preemptions"].is_monotonic_decreasing
    app.selectbox(key="had").set_value("preempted").run()
    assert (figures()["preempted_s"] > 0).all()
    app.text_input(key="text").set_value("no such id").run()
    assert "No request is left" in words(app)
    assert not app.exception


def test_a_request_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [made()], view="Requests", run="hybrid", request="100000")
    assert "There is no ended request r100000" in words(app)
    app = opened(
        monkeypatch, [made()], view="Occupancy", run="hybrid", request="100000", block="100000"
    )
    assert "never held a block" in words(app)
    assert "There is no block 100000" in words(app)
    assert not app.exception


def test_trust_says_same_digest_or_where_they_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
    assert "they differ in policy (" in words(app)
    assert not app.exception


def test_nothing_recorded_yet_brings_a_first_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    app = opened(monkeypatch, [tmp_path])
    assert not app.exception
    assert len(charts(app)) == 3
    assert (tmp_path / "first-look" / "hybrid" / "manifest.json").is_file()
    assert "This recording is made up" in words(app)
    assert "zlab replay TRACE --out runs/NAME" in words(app)
    own = opened(monkeypatch, [made()])
    assert "This recording is made up" not in words(own)


def test_a_mistyped_folder_is_an_error_and_not_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mistyped = tmp_path / "rnus"
    app = opened(monkeypatch, [mistyped])
    assert not app.exception
    assert f"There is no folder `{mistyped}`" in app.error[0].value
    assert charts(app) == []
    assert not mistyped.exists()
    app = opened(monkeypatch, [mistyped, made()], run="hybrid")
    assert len(app.error) == 1
    assert len(charts(app)) == 3


def test_a_folder_that_cannot_be_written_to_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(play, "replay", refuse)
    app = opened(monkeypatch, [tmp_path])
    assert not app.exception
    assert "Make some with `zlab demo`" in words(app)
    (tmp_path / "file").write_text("a file, not a folder")
    assert "There is no folder" in words(opened(monkeypatch, [tmp_path / "file"]))


def test_one_recording_alone_cannot_be_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(made() / "hybrid", tmp_path / "only")
    assert "Two recordings of one workload" in words(opened(monkeypatch, [tmp_path], view="Trust"))
    app = opened(monkeypatch, [tmp_path], view="Compare")
    assert not app.exception
    assert "No sweep was found" in words(app)


def test_sweeps_are_maps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(made() / "hybrid", tmp_path / "only")
    head = "kv-blocks,budget.tokens,policy_spec,requests_finished,makespan_s,tokens_per_s,ttft_s_p99,error\n"
    rows = "".join(
        f"{b},{t},hybrid,5,{b / t},{b + t},{t / 1000},\n" for b in (64, 128) for t in (96, 128, 256)
    )
    (tmp_path / "sweep.csv").write_text(head + rows + "1,1,,,,,,SimError: too small\n")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    app = opened(monkeypatch, [tmp_path], view="Compare")
    assert not app.exception
    assert app.selectbox(key="sweep").options == [str(tmp_path / "sweep.csv")]
    drawn = [json.loads(chart)["data"][0] for chart in charts(app)]
    (heat,) = [trace for trace in drawn if trace["type"] == "heatmap"]
    assert len(heat["x"]) == 3  # two sizes, and the point that failed
    app.selectbox(key="sweep_value").set_value("makespan_s").run()
    titles = [json.loads(chart)["layout"].get("title", {}).get("text", "") for chart in charts(app)]
    assert any("makespan_s over" in title for title in titles)


@pytest.mark.parametrize("view", ["Occupancy", "Requests", "Live", "Compare", "Trust"])
def test_a_broken_recording_is_said_in_words(
    view: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("cut", "version", "rubbish", "nothing"):
        shutil.copytree(made() / "hybrid", tmp_path / name)
    part = tmp_path / "cut" / "events" / "00000.parquet"
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    write_manifest(
        tmp_path / "version",
        Recording(tmp_path / "version").manifest | {"format": "zlab-recording/99"},
    )
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


def test_a_half_written_recording_is_shown_as_far_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
    os.utime(tmp_path / "half" / "manifest.json")  # written just now
    app = opened(monkeypatch, [tmp_path], view="Live", run="half")
    assert "This run is being written" in words(app)
    assert len(charts(app)) == 2
    assert "No whole part has been written yet" in words(
        opened(monkeypatch, [tmp_path], view="Live", run="begun")
    )


@pytest.mark.parametrize("checkpoints", [True, False])
@pytest.mark.parametrize("view", ["Occupancy", "Requests", "Live"])
def test_a_page_is_drawn_from_one_moment_of_a_run(
    view: str, checkpoints: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run goes on between any two reads of a page."""
    source = Recording(made() / "hybrid")
    recorder = FolderRecorder(
        tmp_path / "growing",
        source.manifest | {"complete": False, "summary": None},
        rows_per_part=10**9 if checkpoints else 1,
    )
    tables = {name: source.table(name) for name in ("events", "blocks", "steps", "reports")}
    shares = iter(np.linspace(0.2, 1.0, 30))
    done = 0.0

    def grow() -> None:
        nonlocal done
        until = next(shares, 1.0)
        for name, table in tables.items():
            low, high = int(table.num_rows * done), int(table.num_rows * until)
            part = table.slice(low, high - low)
            recorder.write(name, {column: part[column] for column in part.column_names})
        done = until
        if checkpoints:
            recorder.checkpoint()

    def growing(self: Recording, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        read = table_of(self, name, columns)
        grow()
        return read

    grow()
    table_of = Recording.table
    monkeypatch.setattr(Recording, "table", growing)
    app = opened(monkeypatch, [tmp_path], view=view, run="growing", request="3", block="3")
    assert not app.exception
    assert not app.error
    assert 0.2 < done < 1.0
    recorder.leave()


def tiles(app: AppTest) -> dict[str, str]:
    """The figures in large print, by their words."""
    return {tile.label: tile.value for tile in app.metric}


def test_an_ended_run_has_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tiles(opened(monkeypatch, [made()], view="Live", run="hybrid"))
    summary = Recording(made() / "hybrid").manifest["summary"]
    assert (found["Running"], found["Waiting"]) == ("0", "0")
    rate = float(found["Output tokens/s, whole run"].replace(",", ""))
    assert rate == pytest.approx(summary["tokens_per_s"], rel=0.01)


def test_an_idle_server_gives_no_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All requests have ended, and nothing was written for a while."""
    folder = tmp_path / "server"
    shutil.copytree(made() / "hybrid", folder)
    manifest = Recording(folder).manifest
    write_manifest(folder, manifest | {"complete": False, "summary": None, "source": "engine"})
    busy = tiles(opened(monkeypatch, [tmp_path], view="Live", run="server"))
    assert (busy["Running"], busy["Waiting"]) == ("0", "0")
    assert float(busy["Output tokens/s, last 10 s"].replace(",", "")) > 0
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 25, time.time() - 25))
    idle = tiles(opened(monkeypatch, [tmp_path], view="Live", run="server"))
    assert idle["Output tokens/s, last 10 s"] == "0"
    assert (idle["Running"], idle["Waiting"]) == ("0", "0")
    last = manifest["summary"]["makespan_s"]
    assert float(idle["Run time"].split()[0]) == pytest.approx(last + 25, abs=5)


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
        lengths = [
            trace["x"] for trace in json.loads(spec)["data"] if isinstance(trace.get("x"), list)
        ]
        points = sum(len(x) for x in lengths)
        assert points <= MAX_MARKS


pytest.importorskip("streamlit")


PATIENCE_S = 300
CONTROLS = ("number_input", "selectbox", "checkbox", "text_input")
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def playing(monkeypatch: pytest.MonkeyPatch, root: Path, **query: str) -> AppTest:
    """The view Play with a small workload."""
    return opened(monkeypatch, [root], view="Play", most="12", num_blocks="128", **query)


def button(app: AppTest, label: str) -> AppTest:
    """Click a button by its words."""
    return next(found for found in app.button if found.label == label).click().run()


def job_of(app: AppTest) -> PlayJob:
    """What runs for the reader of this page."""
    job = desks.desks().find(app.session_state["desk"])[1].job
    assert isinstance(job, PlayJob)
    return job


def until_stopped(*run: Any, progress: Progress, **more: Any) -> Run:
    """A simulation that goes no further than where it first says how far it has come."""

    def stay(*counts: int) -> None:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            progress(*counts)
            time.sleep(0.01)

    workload, policy, gpu, model, limits, cost, out = run
    return replay(workload, policy, gpu, model, limits, cost, out, progress=stay)


def ended(app: AppTest) -> AppTest:
    """Wait for the session's run to end and draw the page again."""
    job_of(app).wait(PATIENCE_S)
    return app.run()


def test_a_run_from_form_to_recording(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app = playing(monkeypatch, tmp_path)
    assert not app.exception
    assert not app.error
    button(app, "Run")
    ended(app)
    assert not app.exception
    assert "Done." in words(app)
    assert len(charts(app)) == 1
    (folder,) = (tmp_path / "play").iterdir()
    recording = Recording(folder)
    assert recording.complete
    assert recording.manifest["policy"] == "hybrid"
    assert recording.manifest["workload"]["num_requests"] == 12
    assert recording.manifest["num_blocks"] == 128
    assert recording.manifest["policy_digest"] == policy_digest(load_policy("hybrid"))


def test_the_last_runs_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app = playing(monkeypatch, tmp_path)
    for preset in ("hybrid", "full-kv"):
        app.selectbox(key="preset").set_value(preset).run()
        button(app, "Run")
        ended(app)
    table = app.dataframe[-1].value
    assert len(table.columns) == 5  # figure, unit, two runs, their difference
    assert "full-kv" in table.columns[2]


def test_a_run_can_be_cancelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app = opened(
        monkeypatch,
        [tmp_path],
        view="Play",
        recipe="fixed lengths",
        count="2000",
        rate="1000",
        num_blocks="64",
    )
    monkeypatch.setattr(jobs, "replay", until_stopped)  # after the first run of `opened`
    button(app, "Run")
    job: PlayJob = job_of(app)
    app.run()
    assert "Running hybrid" in words(app)
    button(app, "Cancel")
    job.wait(PATIENCE_S)
    assert job.stopped
    app.run()
    assert "Cancelled after" in words(app)
    assert not app.exception
    recording = Recording(job.folder)
    assert not recording.complete
    assert recording.manifest["stopped_by"] == "StoppedByUserError"


def test_what_cannot_be_run_is_said_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    app = opened(monkeypatch, [tmp_path], view="Play", most="12", num_blocks="4")
    assert "a budget of 9 blocks does not fit in a pool of 4" in app.error[0].value
    assert "Run" not in [found.label for found in app.button]
    assert not app.exception


def test_every_choice_of_every_question_has_a_form(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    app = playing(monkeypatch, tmp_path)
    for question, kinds in QUESTIONS.items():
        for kind, cls in kinds.items():
            app.selectbox(key=f"hybrid|{question}|kind").set_value(kind).run()
            assert not app.exception
            shown = [str(widget.key) for control in CONTROLS for widget in app.get(control)]
            for item in fields(cls):
                field = f"hybrid|{question}|{kind}|{item.name}"
                assert any(key.startswith(field) for key in shown), field
        app.selectbox(key=f"hybrid|{question}|kind").set_value(next(iter(kinds))).run()


def test_fields_are_explained_by_the_catalogue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    app = playing(monkeypatch, tmp_path)
    choice = CATALOGUE["compression"].choices["by-score"]
    window = app.number_input(key="hybrid|compression|by-score|window")
    assert window.help == choice.settings["window"].text
    scorer = app.selectbox(key="hybrid|compression|by-score|scorer")
    assert scorer.options == list(choice.settings["scorer"].choices)
    assert choice.text in [caption.value for caption in app.caption]


def test_an_uploaded_policy_fills_the_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = policy_to_toml(load_policy("hybrid:tokens=1024,window=32"))
    app = playing(monkeypatch, tmp_path)
    app.file_uploader(key="policy_file").set_value(("mine.toml", text.encode(), "text/plain")).run()
    assert not app.exception
    assert not app.error
    button(app, "Run")
    policy: Policy = job_of(app).request.policy
    ended(app)
    assert policy_digest(policy) == policy_digest(load_policy("hybrid:tokens=1024,window=32"))


@pytest.mark.parametrize("place", ["order", "prefix", "order.predictor"])
def test_code_is_never_run_from_an_upload(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trap = tmp_path / "trap.py"
    trap.write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Trap:\n    question = 'order'\n"
    )
    text = policy_to_toml(load_policy("hybrid"))
    question = place.partition(".")[0]
    before, _, after = text.partition(f"[{question}]\n")
    rest = after.partition("\n\n")[2]
    answer = (
        f'kind = "{trap}:Trap"'
        if "." not in place
        else f'kind = "shortest-output"\npredictor = "{trap}:Trap"'
    )
    evil = f"{before}[{question}]\n{answer}\n\n{rest}"
    with pytest.raises(PolicyError, match="code is never run from an upload"):
        uploaded_table(evil.encode(), "evil.toml")
    (tmp_path / "runs").mkdir()
    app = playing(monkeypatch, tmp_path / "runs")
    app.file_uploader(key="policy_file").set_value(("evil.toml", evil.encode(), "text/plain")).run()
    assert "never run from an upload" in app.error[0].value
    assert not app.exception
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff\xfe", "not valid TOML"),
        (b"name = ", "not valid TOML"),
        (b"[order]\nkind = 'nonsense'", "nonsense"),
        (b"", "open"),
    ],
)
def test_a_bad_policy_file_is_said_in_words(data: bytes, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        uploaded_table(data, "bad.toml")


def test_a_trace_with_bad_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = "".join(
        f"2024-05-10 00:00:{second:02}.000000,{100 + second},20\n" for second in range(30)
    )
    data = (TRACE + rows + "2024-05-10 00:00:31.000000,-5,20\nnonsense,1,2\n").encode()
    app = playing(monkeypatch, tmp_path, recipe="uploaded trace")
    assert "Upload a trace" in words(app)
    app.file_uploader(key="trace_file").set_value(("code.csv", data, "text/csv")).run()
    assert not app.exception
    text = words(app)
    assert "2 rows cannot be used" in text
    assert "code.csv: 30 requests" in text
    button(app, "Run")
    ended(app)
    assert "Done." in words(app)


@pytest.mark.parametrize(
    "data", [b"", b"\x00\x01\x02", b"a,b\n1,2\n", TRACE.encode(), TRACE.encode() + b"x,y,z\n"]
)
def test_a_file_that_is_no_trace(
    data: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    app = playing(monkeypatch, tmp_path, recipe="uploaded trace")
    app.file_uploader(key="trace_file").set_value(("odd.csv", data, "text/csv")).run()
    assert not app.exception
    assert "This cannot be run" in app.error[0].value
    assert "/tmp" not in app.error[0].value


def test_two_sessions_run_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, other = (playing(monkeypatch, tmp_path) for _ in range(2))
    for app in (one, other):
        button(app, "Run")
    folders = {job_of(app).folder for app in (one, other)}
    assert len(folders) == 2
    for app in (one, other):
        ended(app)
        assert "Done." in words(app)


def test_more_jobs_than_turns_wait_and_can_be_stopped(tmp_path: Path) -> None:
    order = RunRequest(conversations(), load_policy(POLICIES[0][0]), "h200", "qwen3-8b", LIMITS)
    five = [PlayJob(order, new_folder(tmp_path, "same name!")) for _ in range(5)]
    assert len({job.folder for job in five}) == 5
    for job in five:
        job.start()
    five[4].stop()
    for job in five:
        job.wait(PATIENCE_S)
    assert all(job.error is None for job in five)
    assert five[4].stopped or Recording(five[4].folder).complete
    assert all(Recording(job.folder).complete for job in five[:4])
    digests = {Recording(job.folder).manifest["digest"] for job in five[:4]}
    assert len(digests) == 1


def test_a_job_that_fails_says_why(tmp_path: Path) -> None:
    order = RunRequest(conversations(), load_policy("full-kv"), "no such card", "qwen3-8b", LIMITS)
    job = PlayJob(order, new_folder(tmp_path, "x"))
    job.start()
    job.wait(PATIENCE_S)
    assert job.error is not None
    assert "no such card" in job.error

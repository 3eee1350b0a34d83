import time
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from streamlit.testing.v1 import AppTest

from dashboard.views import jobs
from dashboard.views.jobs import Job, Order, new_folder
from dashboard.views.policy_form import attributes, uploaded_table
from policies.catalogue import QUESTIONS
from policies.core.limits import Limits
from policies.core.policy import Policy
from policies.spec import PolicyError, load_policy, policy_digest, policy_to_toml
from sim.replay import replay
from sim.simulator import Progress
from tests.dashboard.app import charts, opened, words
from tests.traces.small_runs import LIMITS, POLICIES, conversations
from traces.recording import Recording
from traces.run import Run
from traces.workload import Workload

PATIENCE_S = 300
CONTROLS = ("number_input", "selectbox", "checkbox", "text_input")
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def playing(monkeypatch: pytest.MonkeyPatch, root: Path, **query: str) -> AppTest:
    """The view Play with a small workload."""
    return opened(monkeypatch, [root], view="Play", most="12", num_blocks="128", **query)


def button(app: AppTest, label: str) -> AppTest:
    """Click a button by its words."""
    return next(found for found in app.button if found.label == label).click().run()


def until_stopped(
    workload: Workload, policy: Policy, gpu: str, model: str, limits: Limits, *, out: Path, progress: Progress
) -> Run:
    """A simulation that goes no further than where it first says how far it has come."""

    def stay(*counts: int) -> None:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            progress(*counts)
            time.sleep(0.01)

    return replay(workload, policy, gpu, model, limits, out=out, progress=stay)


def ended(app: AppTest) -> AppTest:
    """Wait for the session's run to end and draw the page again."""
    app.session_state["job"].wait(PATIENCE_S)
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
    monkeypatch.setattr(jobs, "replay", until_stopped)
    app = opened(
        monkeypatch, [tmp_path], view="Play", recipe="fixed lengths", count="2000", rate="1000", num_blocks="64"
    )
    button(app, "Run")
    job: Job = app.session_state["job"]
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


def test_what_cannot_be_run_is_said_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app = opened(monkeypatch, [tmp_path], view="Play", most="12", num_blocks="4")
    assert "a budget of 9 blocks does not fit in a pool of 4" in app.error[0].value
    assert "Run" not in [found.label for found in app.button]
    assert not app.exception


def test_every_choice_of_every_question_has_a_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_fields_are_explained_by_their_docstrings() -> None:
    assert attributes(QUESTIONS["prefix"]["full-blocks"])["keep"].startswith("a compression copies out of")
    assert set(attributes(QUESTIONS["compression"]["by-score"])) >= {"scorer", "window", "join"}


def test_an_uploaded_policy_fills_the_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = policy_to_toml(load_policy("hybrid:tokens=1024,window=32"))
    app = playing(monkeypatch, tmp_path)
    app.file_uploader(key="policy_file").set_value(("mine.toml", text.encode(), "text/plain")).run()
    assert not app.exception
    assert not app.error
    button(app, "Run")
    policy: Policy = app.session_state["job"].order.policy
    ended(app)
    assert policy_digest(policy) == policy_digest(load_policy("hybrid:tokens=1024,window=32"))


@pytest.mark.parametrize("place", ["order", "prefix", "order.predictor"])
def test_code_is_never_run_from_an_upload(place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Trap:\n    question = 'order'\n")
    text = policy_to_toml(load_policy("hybrid"))
    question = place.partition(".")[0]
    before, _, after = text.partition(f"[{question}]\n")
    rest = after.partition("\n\n")[2]
    answer = f'kind = "{trap}:Trap"' if "." not in place else f'kind = "shortest-output"\npredictor = "{trap}:Trap"'
    evil = f"{before}[{question}]\n{answer}\n\n{rest}"
    with pytest.raises(PolicyError, match="code is never run from an upload"):
        uploaded_table(evil.encode(), "evil.toml")
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
    rows = "".join(f"2024-05-10 00:00:{second:02}.000000,{100 + second},20\n" for second in range(30))
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


@pytest.mark.parametrize("data", [b"", b"\x00\x01\x02", b"a,b\n1,2\n", TRACE.encode(), TRACE.encode() + b"x,y,z\n"])
def test_a_file_that_is_no_trace(data: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app = playing(monkeypatch, tmp_path, recipe="uploaded trace")
    app.file_uploader(key="trace_file").set_value(("odd.csv", data, "text/csv")).run()
    assert not app.exception
    assert "This cannot be run" in app.error[0].value
    assert "/tmp" not in app.error[0].value


def test_two_sessions_run_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, other = (playing(monkeypatch, tmp_path) for _ in range(2))
    for app in (one, other):
        button(app, "Run")
    folders = {app.session_state["job"].folder for app in (one, other)}
    assert len(folders) == 2
    for app in (one, other):
        ended(app)
        assert "Done." in words(app)


def test_more_jobs_than_turns_wait_and_can_be_stopped(tmp_path: Path) -> None:
    order = Order(conversations(), load_policy(POLICIES[0][0]), "h200", "qwen3-8b", LIMITS)
    five = [Job(order, new_folder(tmp_path, "same name!")) for _ in range(5)]
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
    order = Order(conversations(), load_policy("full-kv"), "no such card", "qwen3-8b", LIMITS)
    job = Job(order, new_folder(tmp_path, "x"))
    job.start()
    job.wait(PATIENCE_S)
    assert job.error is not None
    assert "no such card" in job.error

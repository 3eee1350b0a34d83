"""The same requests under another policy, compared at one request."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from tests.dashboard.cases import folder, made, opened, words
from zlab.dashboard.data import Snapshot, request_frame
from zlab.dashboard.views.desk import desks
from zlab.dashboard.views.requests import request_under
from zlab.policies.core.plan import SchedulerLimits
from zlab.policies.spec import load_policy
from zlab.sim.recorded_run import recorded_workload, what_if
from zlab.sim.replay import replay
from zlab.sim.specs import SimError
from zlab.traces.recording import Recording
from zlab.traces.synthetic import make_workload
from zlab.traces.workload import TraceRequest, Workload, WorkloadMeta

LIMITS = SchedulerLimits(24, 16, 256, 8, 1024)
SPEC = "synth:fixed?num_requests=14&prompt=40&output=60&rate_per_s=200"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("runs")
    replay(make_workload(SPEC), "full-kv", "l40s", "smollm2-135m", LIMITS, out=target / "made-up")
    return target


def test_one_click_simulates_the_same_requests_and_compares_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = opened(monkeypatch, [root], view="Requests", run="made-up", request="9")
    assert not app.exception
    app.selectbox(key="what_if").set_value("nano-vllm").run()
    app.button(key="simulate-what-if").click().run()
    (place,) = [one for one in desks()._desks.values() if one.what_ifs]
    ((job,),) = place.what_ifs.values()
    job.wait(60)
    app.run()
    assert not app.exception
    assert "Under **nano-vllm**: r9 took" in words(app)
    other = Recording(job.folder)
    assert other.complete
    recorded = Recording(root / "made-up")
    for name in ("workload_sha256", "limits", "gpu", "model", "cost"):
        assert other.manifest[name] == recorded.manifest[name], name
    table = next(one.value for one in app.dataframe if "difference" in one.value)
    table = table.set_index("figure")
    frames = [request_frame(one.table("requests")).set_index("number") for one in (recorded, other)]
    for words_of_row, key in (("end to end, s", "e2e_s"), ("time to first token, s", "ttft_s")):
        here, there = (float(frame.loc[9, key]) for frame in frames)
        row = table.loc[words_of_row]
        assert row["recorded"] == pytest.approx(here, abs=1e-6)
        assert row["nano-vllm, simulated"] == pytest.approx(there, abs=1e-6)
        assert row["difference"] == pytest.approx(there - here, abs=2e-6)
    app.button(key="open-other").click().run()
    assert not app.exception
    assert app.selectbox(key="run").value == f"what-if/{job.folder.name}"
    assert "r9 took" in words(app)


def test_requests_that_cannot_be_made_again_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made() / "hybrid", tmp_path / "hybrid")  # prompts that share prefixes
    app = opened(monkeypatch, [tmp_path], view="Requests", run="hybrid", request="3")
    app.button(key="simulate-what-if").click().run()
    assert not app.exception
    assert "the requests of this run cannot be made again" in app.error[0].value
    assert not (tmp_path / "what-if").exists()


def test_a_trace_without_prefixes_is_made_again_from_the_table(tmp_path: Path) -> None:
    rows = [
        TraceRequest(f"r{i}", 20 + i, 5 + i, round(i * 0.1234567, 7), cls="chat" if i % 2 else None)
        for i in range(30)
    ]
    for name, arrival in (("apart", True), ("batch", False)):
        given = [row if arrival else TraceRequest(row.id, 20, 5) for row in rows]
        workload = Workload(given, WorkloadMeta("trace"))
        replay(workload, "full-kv", "l40s", "smollm2-135m", LIMITS, out=tmp_path / name)
        found = recorded_workload(Recording(tmp_path / name))
        assert found.sha256 == workload.sha256
        assert list(found) == given


def test_what_differs_from_the_recorded_requests_is_not_simulated(
    root: Path, tmp_path: Path
) -> None:
    """The name in the manifest alone is not trusted: the hash decides."""
    shutil.copytree(root / "made-up", tmp_path / "run")
    path = tmp_path / "run" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"workload_sha256": "0" * 64}))
    with pytest.raises(SimError, match="cannot be made again"):
        what_if(Recording(tmp_path / "run"), load_policy("nano-vllm"))
    path.write_text(json.dumps(manifest | {"gpu": "CPU x86_64"}))
    with pytest.raises(SimError, match="this run was made on 'CPU x86_64'"):
        what_if(Recording(tmp_path / "run"), load_policy("nano-vllm"))
    huge = manifest["workload"] | {"name": "synth:fixed?num_requests=99999999999"}
    path.write_text(json.dumps(manifest | {"gpu": "l40s", "workload": huge, "workload_sha256": ""}))
    with pytest.raises(SimError, match="cannot be made again"):
        what_if(Recording(tmp_path / "run"), load_policy("nano-vllm"))


def test_figures_that_are_zero_everywhere_are_left_out() -> None:
    frame = request_frame(Snapshot(folder("full-kv")).recording.table("requests"))
    one, other = frame.iloc[0].to_dict(), frame.iloc[1].to_dict()
    table = request_under({"a": one, "b": other})
    shown = set(table["figure"])
    assert "end to end, s" in shown
    assert ("compressions" in shown) == bool(one["compressions"] or other["compressions"])

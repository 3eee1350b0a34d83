"""The dashboard on what a server is still writing, or was killed while it wrote: files as they lie
at that moment.

Every view on a recording of the engine, beside the simulator's of the same workload.
"""

import io
import shutil
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.dashboard.cases import charts, folder, made, opened, words
from tests.engine.engine_cases import SMALL
from tests.engine.server.server_cases import conversation_load, open_tiny, play
from zlab.cli.main import app as commands
from zlab.dashboard import data as archive
from zlab.dashboard.figures.compare import strip_of
from zlab.engine.server.lanes import Observer
from zlab.engine.server.traffic_recorder import LiveRecording
from zlab.traces import occupancy as occupancies
from zlab.traces.recording import TABLES, Recording, RecordingError

pytest.importorskip("streamlit")


def zipped(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files.items():
            file.writestr(name, content)
    return buffer.getvalue()


def test_round_trip(tmp_path: Path) -> None:
    unpacked = Recording(archive.unpack(archive.pack(Path(folder("hybrid"))), tmp_path / "new"))
    original = Recording(folder("hybrid"))
    assert unpacked.manifest == original.manifest
    for table in TABLES:
        assert unpacked.table(table).equals(original.table(table))


@pytest.mark.parametrize(
    "name",
    [
        "../manifest.json",
        "/etc/manifest.json",
        "a/b/manifest.json",
        "steps/evil.py",
        "..\\manifest.json",
        "steps/../../00000.parquet",
    ],
)
def test_other_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="is no file of a recording"):
        archive.unpack(zipped(**{name: b"x"}), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_bomb_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MOST_BYTES", 1_000_000)
    bomb = zipped(**{"manifest.json": b"{}", "steps/00000.parquet": bytes(5_000_000)})
    assert len(bomb) < 10_000
    with pytest.raises(RecordingError, match="unpacked it would be 5 MB, at most 1 MB"):
        archive.unpack(bomb, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="no zip file"):
        archive.unpack(b"no zip at all", tmp_path / "a")
    with pytest.raises(RecordingError, match=r"no manifest\.json"):
        archive.unpack(zipped(**{"steps/00000.parquet": b"x"}), tmp_path / "b")
    with pytest.raises(RecordingError, match="format None"):
        archive.unpack(zipped(**{"manifest.json": b"{}"}), tmp_path / "c")


def test_an_uploaded_recording_is_shown_to_its_session_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = archive.pack(Path(folder("swapping")))
    app = opened(monkeypatch, [made()], view="Occupancy")
    app.file_uploader(key="recording_file").set_value(("theirs.zip", data, "application/zip")).run()
    assert not app.exception
    assert str(app.selectbox(key="run").value).startswith("uploaded-theirs")
    assert "zlab-upload" not in words(app)
    assert len(charts(app)) == 3
    other = opened(monkeypatch, [made()], view="Occupancy")
    assert not any(label.startswith("uploaded") for label in other.selectbox(key="run").options)


def test_a_hostile_upload_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [made()], view="Occupancy")
    app.file_uploader(key="recording_file").set_value(
        ("bad.zip", zipped(**{"../x": b""}), "application/zip")
    ).run()
    assert not app.exception
    assert "is no file of a recording" in app.error[0].value
    assert "bad.zip" in words(app)


class Snapshot(Observer):
    """Copies the recording's folder in the middle of a step's work, as a kill would leave it."""

    def __init__(self, recording: LiveRecording, to: Path) -> None:
        self._recording = recording
        self._to = to
        self._num_steps = 0

    def stepped(self, lane: object) -> None:
        self._num_steps += 1
        if self._num_steps == 60:
            self._recording._recorders["live"].checkpoint()
            assert self._recording.wait(300)
            shutil.copytree(self._recording.folder, self._to / "server")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, copies = tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("killed")
    recording = LiveRecording(folder, SMALL.block_size)
    served = open_tiny([recording, Snapshot(recording, copies)])
    play(served, conversation_load(14))
    served.worker.stop()
    recording.close()
    assert not served.worker.observers.failed
    return copies


def test_the_copy_is_of_a_run_that_goes_on(killed: Path) -> None:
    found = Recording(killed / "server" / "live")
    assert not found.complete
    statuses = found.table("requests")["status"].to_pylist()
    assert "unfinished" in statuses
    assert len(statuses) == 14
    assert found.table("steps").num_rows > 10


@pytest.mark.parametrize("view", ["Occupancy", "Requests", "Live"])
def test_every_view_shows_it_as_far_as_it_came(
    killed: Path, monkeypatch: pytest.MonkeyPatch, view: str
) -> None:
    app = opened(monkeypatch, [killed], view=view, run="server/live", runs="server/live")
    assert not app.exception
    assert not app.error, words(app)
    assert charts(app) or app.dataframe
    if view == "Live":
        tiles = {tile.label: tile.value for tile in app.metric}
        alive = Recording(killed / "server" / "live").table("requests")["status"].to_pylist()
        assert int(tiles["Running"]) + int(tiles["Waiting"]) == alive.count("unfinished") > 0
        assert "Available blocks" in tiles


TRACE = "synth:amc23?num_problems=3&samples=2&cap=200"
COMMON = ["--policy", "hybrid:budget.tokens=64,window=8", "--kv-blocks", "40", "--block-size", "16"]
VIEWS = ("Occupancy", "Requests", "Compare", "Trust", "Play", "Live")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    engine = [
        "bench",
        TRACE,
        *COMMON,
        "--model",
        "dummy:tiny",
        "--at-once",
        "--out",
        str(folder / "engine"),
    ]
    simulator = [
        "replay",
        TRACE,
        *COMMON,
        "--model",
        "qwen3-8b",
        "--out",
        str(folder / "simulator"),
    ]
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


def test_trust_names_unlike_machines(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    """A simulated H200 says nothing about the speed of a CPU."""
    app = opened(monkeypatch, [runs], view="Trust", run="engine")
    assert "The times are not of one machine" in words(app)
    assert "GPU (h200, cpu-" in words(app)
    assert "model (qwen3-8b, " in words(app)


def test_trust_decides_live_traffic_again(
    monkeypatch: pytest.MonkeyPatch, killed: Path, runs: Path
) -> None:
    """A simulation of other requests parts from a server's run in step 0; its own do not."""
    app = opened(monkeypatch, [killed, runs], view="Trust")
    app.selectbox(key="predicted").set_value("simulator").run()
    app.selectbox(key="measured").set_value("server/live").run()
    assert not app.exception
    text = words(app)
    assert "These runs were not asked the same" in text
    assert "The runs part in step 0" in text
    steps = Recording(killed / "server" / "live").manifest["num_steps"]
    assert f"all {steps:,} steps are the same" in text


def test_trust_finds_equal_decisions(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    app = opened(monkeypatch, [runs], view="Trust", run="engine")
    assert "that both decided alike" in words(app)


def test_one_occupancy_of_a_recording_is_kept_and_few_lives_in_all() -> None:
    pools = archive.Pools(most_lives=1)
    first, second = (Recording(folder(name)) for name in ("hybrid", "full-kv"))
    one = pools.get("a", ("1",), first)
    assert pools.get("a", ("1",), first) is one
    other = pools.get("a", ("2",), first)
    assert other is not one
    assert len(pools._kept) == 1
    pools.get("b", ("1",), second)
    assert list(pools._kept) == ["b"]


def test_a_strip_of_a_large_recording_needs_no_second_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder("hybrid"), tmp_path / "run")
    monkeypatch.setattr(occupancies, "MANY_LIVES", 10)
    monkeypatch.setattr(archive, "BAR_FROM", 10)
    snapshot = archive.Snapshot(str(tmp_path / "run"))
    replayed = strip_of(archive.occupancy(snapshot))
    monkeypatch.setattr(archive, "read_occupancy", None)
    again = archive.Snapshot(str(tmp_path / "run"))
    assert archive.strip(again) == replayed

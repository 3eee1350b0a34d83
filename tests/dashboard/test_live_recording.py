"""The dashboard on what a server is still writing, or was killed while it wrote: files as they lie at that moment."""

import shutil
from pathlib import Path

import pytest

from engine.server.live_trace import LiveRecording
from engine.server.observing import Observer
from tests.dashboard.app import charts, opened, words
from tests.engine.engine_cases import SMALL
from tests.engine.server.live_house import conversation_load, house
from tests.engine.server.live_jobs import play
from traces.recording import Recording


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
            assert self._recording.wait(30)
            shutil.copytree(self._recording.folder, self._to / "server")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, copies = tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("killed")
    recording = LiveRecording(folder, SMALL.block_size)
    served = house([recording, Snapshot(recording, copies)])
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
def test_every_view_shows_it_as_far_as_it_came(killed: Path, monkeypatch: pytest.MonkeyPatch, view: str) -> None:
    app = opened(monkeypatch, [killed], view=view, run="server/live", runs="server/live")
    assert not app.exception
    assert not app.error, words(app)
    assert charts(app) or app.dataframe
    if view == "Live":
        assert {tile.label for tile in app.metric} >= {"Running", "Waiting", "Available blocks"}

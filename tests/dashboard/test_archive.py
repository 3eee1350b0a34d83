import io
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from dashboard import archive
from tests.dashboard.app import opened, words
from tests.dashboard.recordings import folder, made
from traces.recording import TABLES, Recording, RecordingError


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


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_uploaded_recording_is_shown_to_its_session_only(monkeypatch: pytest.MonkeyPatch) -> None:
    data = archive.pack(Path(folder("swapping")))
    app = opened(monkeypatch, [made()], view="Occupancy")
    app.file_uploader(key="recording_file").set_value(("theirs.zip", data, "application/zip")).run()
    assert not app.exception
    labels = app.selectbox(key="run").options
    assert any(label.startswith("uploaded-theirs") for label in labels)
    other = opened(monkeypatch, [made()], view="Occupancy")
    assert not any(label.startswith("uploaded") for label in other.selectbox(key="run").options)


def test_a_hostile_upload_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [made()], view="Occupancy")
    app.file_uploader(key="recording_file").set_value(("bad.zip", zipped(**{"../x": b""}), "application/zip")).run()
    assert not app.exception
    assert "is no file of a recording" in app.error[0].value
    assert "bad.zip" in words(app)

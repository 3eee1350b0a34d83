"""Files that are damaged or made to do harm: said in words, and never more memory than is there."""

import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("streamlit")

from tests.dashboard.cases import charts, folder, made, opened, words
from zlab.dashboard import data as archive
from zlab.dashboard.figures.compare import latency_figure, sweep_map, tradeoff_figure
from zlab.dashboard.views import play
from zlab.dashboard.views.forms import uploaded_table
from zlab.policies.spec import PolicyError
from zlab.traces import recording as recordings
from zlab.traces.recording import Recording, RecordingError, write_manifest

VIEWS = ("Occupancy", "Requests", "Live")


@pytest.fixture(scope="module")
def packed() -> bytes:
    return archive.pack(Path(folder("hybrid")))


def copy(to: Path, **manifest: object) -> Path:
    """A whole recording with some entries of its manifest replaced."""
    shutil.copytree(made() / "hybrid", to)
    write_manifest(to, Recording(to).manifest | manifest)
    return to


def rewrite(run: Path, table: str, change: Callable[[pd.DataFrame], None]) -> None:
    """Change the rows of one table."""
    path = run / table / "00000.parquet"
    rows = pq.read_table(path)
    frame = rows.to_pandas()
    change(frame)
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), path)


def test_a_zip_with_a_bad_checksum(packed: bytes, tmp_path: Path) -> None:
    place = packed.index(b'"policy"')
    with pytest.raises(RecordingError, match="cannot be unpacked: Bad CRC"):
        archive.unpack(packed[:place] + b'"POLICY"' + packed[place + 8 :], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_encrypted_zip(packed: bytes, tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(packed)) as found:
        first = found.infolist()[0]
    data = bytearray(packed)
    data[first.header_offset + 6] |= 1  # the flag of the entry, and of its line in the directory
    data[packed.rindex(b"PK\x01\x02", 0, packed.index(b"PK\x01\x02") + 4) + 8] |= 1
    with pytest.raises(RecordingError, match=r"cannot be unpacked: .*encrypted"):
        archive.unpack(bytes(data), tmp_path / "new")


@pytest.mark.parametrize("seed", range(30))
def test_no_damaged_zip_is_a_traceback(packed: bytes, tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    data = bytearray(packed)
    edge = packed.index(b"PK\x01\x02")  # the directory is where most can go wrong
    for place in random.integers(edge, len(data), 6):
        data[place] = random.integers(256)
    try:
        archive.unpack(bytes(data), tmp_path / "new")
    except RecordingError:
        assert not (tmp_path / "new").exists()


def test_what_macos_adds_is_skipped(packed: bytes, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(packed)) as source,
        zipfile.ZipFile(buffer, "w") as target,
    ):
        for name in source.namelist():
            target.writestr(f"run/{name}", source.read(name))
            target.writestr(f"__MACOSX/run/{name.replace('/', '/._')}", b"\0\5")
        target.writestr("run/.DS_Store", b"x")
    unpacked = archive.unpack(buffer.getvalue(), tmp_path / "new")
    assert Recording(unpacked).manifest == Recording(folder("hybrid")).manifest
    assert not list(unpacked.rglob("._*"))


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        ({"num_blocks": 2_000_000_000}, "num_blocks is 2000000000, at most"),
        ({"num_blocks": 10**300}, "num_blocks is 1000000000"),
        ({"num_blocks": True}, "must be whole numbers above 0"),
        ({"block_size": 10**12}, "block_size is 1000000000000, at most"),
        ({"rows": []}, "'rows' must give a number of rows"),
        ({"rows": {"steps": -1}}, "'rows' must give a number of rows"),
        ({"alive": "../../../dev/zero"}, "'alive' is no name of a file"),
        ({"kinds": {"x": None}}, "a code is no whole number"),
    ],
)
def test_a_manifest_that_asks_for_too_much(
    manifest: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = {"None": "arrived"} if "kinds" in manifest else {}
    copy(tmp_path / "run", **(manifest if not name else {"kinds": name}))
    for view in VIEWS:
        app = opened(monkeypatch, [tmp_path], view=view, run="run")
        assert not app.exception, view
        if view == "Occupancy":
            assert says in app.error[0].value.replace("\\", "")


def test_a_manifest_that_is_nested_without_end_or_very_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy(tmp_path / "run")
    (run / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(RecordingError, match="not valid JSON"):
        Recording(run)
    monkeypatch.setattr(recordings, "MOST_MANIFEST_BYTES", 1000)
    with pytest.raises(RecordingError, match="are read"):
        Recording(made() / "hybrid")


def _nan_start(rows: pd.DataFrame) -> None:
    rows.loc[5, "start_s"] = np.nan


def _endless(rows: pd.DataFrame) -> None:
    rows.loc[len(rows) - 1, "end_s"] = 1e300


def _nan_arrival(rows: pd.DataFrame) -> None:
    rows.loc[3, "arrival_s"] = np.nan


def _no_status(rows: pd.DataFrame) -> None:
    rows["preemptions"] = rows["preemptions"].astype("Int64")
    rows.loc[3, "preemptions"] = pd.NA


def _negative(rows: pd.DataFrame) -> None:
    rows.loc[3, "num_blocks"] = -5


def _unordered(rows: pd.DataFrame) -> None:
    rows.loc[3, "step"] = 100


@pytest.mark.parametrize(
    ("table", "change", "says"),
    [
        ("steps", _nan_start, "a time is no finite number"),
        ("steps", _endless, "a time is not in 0..1e"),
        ("requests", _nan_arrival, "a time is not in 0..1e"),
        ("requests", _no_status, "has a row without a number"),
        ("events", _negative, "names fewer than 0 blocks"),
        ("events", _unordered, "not in the order of steps"),
    ],
)
def test_rows_that_cannot_be(
    table: str,
    change: Callable[[pd.DataFrame], None],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    rewrite(copy(tmp_path / "run"), table, change)
    seen = []
    for view in VIEWS:
        app = opened(monkeypatch, [tmp_path], view=view, run="run")
        assert not app.exception, (view, app.exception)
        seen += [error.value.replace("\\", "") for error in app.error]
    assert any(says in error for error in seen), seen


def test_a_part_that_stands_for_very_many_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kilobytes of Parquet: they are counted before they are read."""
    run = copy(tmp_path / "run")
    rows = pq.read_table(run / "steps" / "00000.parquet").slice(0, 1)
    many = pa.table({n: pa.array(np.repeat(rows[n].to_numpy(), 10**6)) for n in rows.column_names})
    pq.write_table(many, run / "steps" / "00000.parquet")
    assert (run / "steps" / "00000.parquet").stat().st_size < 100_000
    monkeypatch.setattr(recordings, "MOST_ROWS", 10**5)
    with pytest.raises(RecordingError, match="has more than 100,000 rows"):
        Recording(run).table("steps")
    monkeypatch.setattr(archive, "MOST_ROWS", 10**5)
    with pytest.raises(RecordingError, match=r"its tables have 1,\d+,\d+ rows"):
        archive.unpack(archive.pack(run), tmp_path / "new")


def test_a_part_whose_texts_are_one_long_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy(tmp_path / "run")
    rewrite(run, "requests", lambda rows: rows.__setitem__("session", "x" * 100_000))
    assert (run / "requests" / "00000.parquet").stat().st_size < 1_000_000
    monkeypatch.setattr(recordings, "MOST_TEXT_BYTES", 1_000_000)
    with pytest.raises(RecordingError, match="column 'session' has 9 MB of text"):
        Recording(run).table("requests")


@pytest.mark.parametrize(
    "text",
    [
        "[budget]\nkind = 'fixed'\ntokens = 1" + "0" * 400,
        "[budget]\nkind = 'fixed'\ntokens = " + "1" * 5000,
        "[budget]\nkind = 'fixed'\ntokens = inf",
        "[budget]\nkind = 'fixed'\ntokens = nan",
        "x = " + "[" * 5000,
    ],
)
def test_huge_numbers_in_a_policy(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(PolicyError):
        uploaded_table(text.encode(), "huge.toml")
    app = opened(monkeypatch, [made()], view="Play", most="12", num_blocks="128")
    upload = ("huge.toml", text.encode(), "text/plain")
    app.file_uploader(key="policy_file").set_value(upload).run()
    assert not app.exception
    assert "This cannot be run" in app.error[0].value


def test_a_root_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [made()], view="Play", most="12", num_blocks="128")

    def refuse(root: Path, name: str) -> Path:
        raise PermissionError(13, "Permission denied", str(root))

    monkeypatch.setattr(play, "new_folder", refuse)
    next(button for button in app.button if button.label == "Run").click().run()
    assert not app.exception
    assert "cannot be recorded in" in app.error[0].value
    assert "Permission denied" in app.error[0].value


IMAGE = "![x](http://evil.example/a.png) $x$ <b>"


def test_texts_of_a_manifest_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    odd: dict[str, Any] = dict.fromkeys(("policy", "gpu", "model"), IMAGE)
    odd["workload"] = {"name": IMAGE, "rows": {"read": IMAGE, "dropped": [1]}}
    copy(tmp_path / "run", **odd)
    rewrite(tmp_path / "run", "requests", lambda rows: rows.__setitem__("message", IMAGE))
    for view in ("Occupancy", "Requests", "Live", "Compare"):
        app = opened(monkeypatch, [tmp_path], view=view, run="run", request="3")
        assert not app.exception, view
        for line in words(app).splitlines():
            bare = "".join(line.split("`")[::2])  # without code spans
            assert "](" not in bare.replace("\\]", "")
            assert "<b>" not in bare.replace("\\<", "")


def test_names_are_no_markup_in_figures() -> None:
    name = "<a href='http://evil.example'>x</a>%{x}"
    requests = Recording(made() / "hybrid").table("requests")
    figures = (
        tradeoff_figure({name: (1.0, 2.0), "b": (2.0, 3.0)}, "tail", "s"),
        latency_figure({name: requests}, "e2e_s"),
        sweep_map(pd.DataFrame({"a": [name], "b": [1], "v": [2.0]}), "a", "b", "v"),
    )
    for figure in figures:
        assert "<a " not in json.dumps(figure.to_dict(), default=str)


def test_a_sweep_of_very_many_values_is_cut_before_its_table_is_made() -> None:
    count = 20_000  # 4e8 cells of pairs
    rows = pd.DataFrame({"a": np.arange(count), "b": np.arange(count), "v": 1.0})
    (heat,) = sweep_map(rows, "a", "b", "v").data
    assert (len(heat.x), len(heat.y)) == (60, 60)


def test_a_recording_of_the_largest_pool_is_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy(tmp_path / "run", num_blocks=20_000)
    app = opened(monkeypatch, [tmp_path], view="Occupancy", run="run")
    assert not app.exception
    assert len(charts(app)) == 3


def test_a_request_without_a_limit_can_be_read(tmp_path: Path) -> None:
    run = copy(tmp_path / "run")

    def unlimited(rows: pd.DataFrame) -> None:
        for name in ("max_tokens", "asked_output_tokens"):
            rows[name] = pd.array([pd.NA] * len(rows), dtype="Int64")

    rewrite(run, "requests", unlimited)
    assert Recording(run).table("requests")["max_tokens"].null_count > 0

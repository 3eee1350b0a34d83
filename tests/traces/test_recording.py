"""Files whose writer was stopped: whatever byte the kill came at, what was whole is read and the
rest is told of.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zlab.traces.formats import check_trace, read_trace
from zlab.traces.formats.native import RECORDED_LIVE, write_meta
from zlab.traces.recording import (
    FILE,
    TABLES,
    AskedFile,
    FolderRecorder,
    Recording,
    Tail,
    TornLineWarning,
    read_asked,
    read_tail,
    tail_path,
)
from zlab.traces.workload import TraceError, TraceRequest, WorkloadMeta, request_to_line

EVENTS = TABLES["events"]


def events(*steps: int) -> dict[str, Any]:
    return {
        "step": list(steps),
        **{name: [1] * len(steps) for name in ("kind", "request", "value", "num_blocks")},
    }


def test_a_tail_cut_at_any_byte_gives_its_whole_appends(tmp_path: Path) -> None:
    path = tail_path(tmp_path, 0)
    tail = Tail(path, EVENTS)
    sizes = [path.stat().st_size]
    for step in range(2):
        tail.append(pa.table(events(step, step), schema=EVENTS))
        sizes.append(path.stat().st_size)
    data = path.read_bytes()
    tail.drop()
    assert not path.exists()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        whole = max((place for place, size in enumerate(sizes) if size <= cut), default=0)
        assert read_tail(path, EVENTS)["step"].to_pylist() == [
            step for step in range(whole) for _ in "ab"
        ], cut


def test_a_recording_reads_as_it_stood_at_its_last_checkpoint(tmp_path: Path) -> None:
    recorder = FolderRecorder(tmp_path, {}, rows_per_part=4)
    recorder.write("events", events(0, 1))
    recorder.checkpoint(num_steps=2)
    recorder.write("events", events(2))
    seen = Recording(tmp_path)
    assert seen.table("events")["step"].to_pylist() == [0, 1]
    recorder.checkpoint(num_steps=3)
    recorder.write("events", events(3, 4))  # fills a part: the tail is gone
    assert [path.name for path in (tmp_path / "events").iterdir()] == ["00000.parquet"]
    assert Recording(tmp_path).table("events", ("step",))["step"].to_pylist() == [0, 1, 2]
    assert seen.table("events")["step"].to_pylist() == [0, 1], (
        "one that was opened earlier does not run ahead"
    )
    recorder.write("events", events(5))
    recorder.checkpoint(num_steps=6)
    assert Recording(tmp_path).table("events")["step"].to_pylist() == [0, 1, 2, 3, 4, 5]
    assert Recording(tmp_path).manifest["num_steps"] == 6
    recorder.close()
    whole = Recording(tmp_path)
    assert whole.complete
    assert "rows" not in whole.manifest
    assert not list(tmp_path.glob("*/*.tail"))
    assert whole.table("events")["step"].to_pylist() == [0, 1, 2, 3, 4, 5]


def test_a_tail_whose_part_is_there_counts_no_more(tmp_path: Path) -> None:
    """The writer was killed between the part's appearance and the tail's removal."""
    recorder = FolderRecorder(tmp_path, {})
    recorder.write("events", events(0, 1))
    recorder.checkpoint()
    pq.write_table(pa.table(events(0, 1), schema=EVENTS), tmp_path / "events" / "00000.parquet")
    assert Recording(tmp_path).table("events")["step"].to_pylist() == [0, 1]
    recorder.leave()


def requests(*numbers: int) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for field in TABLES["requests"]:
        value = "x" if field.type == pa.string() else 0
        columns[field.name] = [value] * len(numbers)
    return columns | {"number": list(numbers)}


def test_those_alive_at_a_checkpoint_are_read_with_those_that_ended(tmp_path: Path) -> None:
    recorder = FolderRecorder(tmp_path, {})
    recorder.write("requests", requests(1))
    recorder.checkpoint(requests(0, 2), num_steps=2)
    seen = Recording(tmp_path)
    assert seen.table("requests", ("number",))["number"].to_pylist() == [1, 0, 2]
    recorder.write("requests", requests(0))
    recorder.checkpoint(requests(2, 3), num_steps=3)
    assert Recording(tmp_path).table("requests")["number"].to_pylist() == [1, 0, 2, 3]
    assert seen.table("requests")["number"].to_pylist() == [1, 0, 2], (
        "the one before can still be read"
    )
    recorder.checkpoint(requests(), num_steps=4)
    assert len(list(tmp_path.glob("alive-*"))) == 2
    assert Recording(tmp_path).table("requests")["number"].to_pylist() == [1, 0]
    recorder.write("requests", requests(2, 3))
    recorder.close()
    assert not list(tmp_path.glob("alive-*"))
    assert Recording(tmp_path).table("requests")["number"].to_pylist() == [1, 0, 2, 3]


def test_a_folder_of_parts_is_read_as_it_is_beside_its_tail(tmp_path: Path) -> None:
    recorder = FolderRecorder(tmp_path, {}, rows_per_part=2)
    recorder.write("events", events(0, 1))
    recorder.write("events", events(2))
    recorder.checkpoint()
    assert pq.read_table(tmp_path / "events")["step"].to_pylist() == [0, 1]
    recorder.leave()


ROWS = [
    TraceRequest(f"r{place}", 20 + place, 5, arrival_s=place / 4, session="s") for place in range(3)
]


def live_trace(folder: Path, note: str = RECORDED_LIVE) -> tuple[Path, bytes, list[int]]:
    path = folder / "trace.jsonl"
    lines = [request_to_line(row).encode() for row in ROWS]
    write_meta(path, WorkloadMeta("live", modifications=(note,)))
    return path, b"".join(lines), [sum(map(len, lines[:count])) for count in range(len(lines) + 1)]


def test_a_live_trace_cut_at_any_byte_loses_at_most_its_last_line(tmp_path: Path) -> None:
    path, data, ends = live_trace(tmp_path)
    for cut in range(ends[1], len(data) + 1):
        path.write_bytes(data[:cut])
        whole = max(place for place, end in enumerate(ends) if end <= cut)
        said = cut + 1 in ends  # only the line's end is missing: nothing is lost
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            workload = read_trace(path)
        assert [row.id for row in workload] == [row.id for row in ROWS[: whole + said]], cut
        torn = cut not in ends and not said
        assert [item.category for item in caught] == [TornLineWarning] * torn, cut
        assert workload.meta.dropped == ({"torn last line": 1} if torn else {})


def test_only_the_last_line_of_a_live_trace_may_be_torn(tmp_path: Path) -> None:
    path, data, ends = live_trace(tmp_path)
    path.write_bytes(data[: ends[1]] + data[ends[1] : ends[1] + 9] + b"\n" + data[ends[2] :])
    with pytest.raises(TraceError, match=r"trace.jsonl:2: not JSON"):
        read_trace(path)
    path.write_bytes(data[:-9] + b"\n")
    with pytest.raises(TraceError, match=r"trace.jsonl:3: not JSON"):
        read_trace(path)


def test_a_torn_line_of_any_other_trace_is_a_bad_row(tmp_path: Path) -> None:
    path, data, _ = live_trace(tmp_path, note="made by hand")
    path.write_bytes(data[:-9])
    with pytest.raises(TraceError, match="not JSON"):
        read_trace(path)
    assert check_trace(path).num_bad == 1


def test_what_was_asked_survives_a_torn_line(tmp_path: Path) -> None:
    file = AskedFile(tmp_path)
    for row in ROWS:
        file.write(row)
    file.flush()
    data = (tmp_path / FILE).read_bytes()
    file.close()
    (tmp_path / FILE).write_bytes(data[:-3])
    with pytest.warns(TornLineWarning, match="left out"):
        assert list(read_asked(tmp_path)) == ROWS[:2]


def test_metadata_of_a_live_trace_is_read_back(tmp_path: Path) -> None:
    path, data, _ = live_trace(tmp_path)
    path.write_bytes(data)
    assert json.loads(path.with_name("trace.meta.json").read_text())["modifications"] == [
        RECORDED_LIVE
    ]
    assert read_trace(path).meta.modifications == (RECORDED_LIVE,)

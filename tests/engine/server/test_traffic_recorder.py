"""What a server writes down of its traffic: the trace, the recordings, and that neither holds
text.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.engine_cases import SMALL, request
from tests.engine.server.server_cases import (
    BUSY,
    Answer,
    ChangesPolicy,
    conversation_load,
    open_tiny,
    play,
)
from zlab.engine.server.traffic_recorder import (
    DiskWriter,
    LiveRecording,
    RecordSettings,
    Rotation,
    TraceFiles,
)
from zlab.sim.cost_model import roofline
from zlab.sim.fidelity import drift
from zlab.sim.recorded_run import RecordedRun, redecide
from zlab.sim.specs import find_gpu, find_model
from zlab.traces.formats import read_trace
from zlab.traces.recording import load_run, read_asked
from zlab.traces.workload import TraceRequest, Workload, WorkloadMeta
from zlab.traces.workload_stats import prefix_reuse

BLOCK = SMALL.block_size
PLAIN = RecordSettings()


def recorded(
    folder: Path, settings: RecordSettings = PLAIN, load: list[TraceRequest] | None = None
) -> tuple[Path, dict[str, Answer]]:
    """A served load, every third request called off, and one that can never be served."""
    recording = LiveRecording(folder, BLOCK, settings)
    served = open_tiny([recording])
    wanted = load or [*conversation_load(), request("huge", list(range(90)) * 5, 4)]
    answers = play(served, wanted, cancelled=lambda id: id in ("r3", "r6", "r9"))
    served.worker.stop()
    recording.close()
    assert recording.failure is None
    return recording.folder, answers


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Answer]]:
    return recorded(tmp_path_factory.mktemp("live"))


def test_the_trace_tells_what_was_asked_and_how_it_ended(
    written: tuple[Path, dict[str, Answer]],
) -> None:
    folder, answers = written
    workload = read_trace(folder / "trace-00000.jsonl")
    asked = {row.id: row for row in conversation_load()}
    assert workload.meta.dropped == {"refused": 1}
    assert workload.meta.rows_read == 17
    by_place = sorted(workload, key=lambda row: int(row.id))
    for row, (id, wanted) in zip(by_place, asked.items(), strict=True):
        assert row.prompt_tokens == wanted.prompt_tokens
        assert row.output_tokens == len(answers[id].token_ids)
        assert row.max_tokens == wanted.max_tokens
        assert row.status == answers[id].finish_reason
        assert row.arrival_s is not None
        assert row.arrival_s >= 0
    assert {row.status for row in workload} == {"length", "abort"}
    assert len({row.session for row in workload}) == 3


def test_block_ids_share_what_the_prompts_share(written: tuple[Path, dict[str, Answer]]) -> None:
    folder, _ = written
    workload = read_trace(folder / "trace-00000.jsonl")
    with_tokens = Workload(conversation_load(), WorkloadMeta("tokens"))
    order = sorted(workload, key=lambda row: int(row.id))
    found = prefix_reuse(replace(workload, requests=order), BLOCK)
    wanted = prefix_reuse(with_tokens, BLOCK)
    assert found.num_reused_blocks > 0
    full = sum(row.prompt_tokens // BLOCK for row in with_tokens)
    assert (
        found.num_reused_blocks == wanted.num_reused_blocks
    )  # no prompt repeats another's started last block
    assert sum(len(row.prefix_ids or ()) for row in workload) == full


def test_no_file_holds_a_prompt_or_a_session(written: tuple[Path, dict[str, Answer]]) -> None:
    folder, _ = written
    texts = [path.read_text() for path in sorted(folder.rglob("*.json*"))]
    assert len(texts) == 4  # trace and metadata, manifest and what was asked
    for text in texts:
        assert "prompt_ids" not in text
        assert "output_ids" not in text
        assert "user-" not in text
    assert not any(
        "user-" in str(name) for name in load_run(folder / "live").requests["session"].to_pylist()
    )


def test_two_recordings_of_the_same_prompts_have_no_block_id_in_common(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        folder, _ = recorded(tmp_path / name, RecordSettings(steps=False), conversation_load(6))
        assert sorted(path.name for path in folder.iterdir()) == [
            "trace-00000.jsonl",
            "trace-00000.meta.json",
        ]
        workload = read_trace(folder / "trace-00000.jsonl")
        found.append({block for row in workload for block in row.prefix_ids or ()})
    assert found[0]
    assert not found[0] & found[1]


def test_text_is_written_when_it_is_asked_for(tmp_path: Path) -> None:
    load = conversation_load(5)
    folder, answers = recorded(tmp_path, RecordSettings(with_text=True), load)
    rows = sorted(read_trace(folder / "trace-00000.jsonl"), key=lambda row: int(row.id))
    for row, asked in zip(rows, load, strict=True):
        assert row.prompt_ids == asked.prompt_ids
        assert row.output_ids == tuple(answers[asked.id].token_ids)
        assert row.session == asked.session
    again = redecided(folder / "live")
    assert again[0] == again[1]


def redecided(folder: Path) -> tuple[str, str]:
    run = load_run(folder)
    return run.manifest["digest"], redecide(
        run.manifest, run.requests, run.events, read_asked(folder)
    ).digest


def test_the_recording_is_decided_again_from_salted_ids(
    written: tuple[Path, dict[str, Answer]],
) -> None:
    folder, answers = written
    run = load_run(folder / "live")
    assert run.manifest["complete"]
    assert run.summary["compressions"] > 0
    assert run.summary["preemptions"] > 0
    assert run.summary["prefix_hit_tokens"] > 0
    tokens = dict(
        zip(run.requests["id"].to_pylist(), run.requests["output_tokens"].to_pylist(), strict=True)
    )
    assert tokens == {id: len(answer.token_ids) for id, answer in answers.items()}
    recorded_digest, again = redecided(folder / "live")
    assert recorded_digest == again


def test_changes_of_the_policy_are_in_the_recording_and_decided_again(tmp_path: Path) -> None:
    """With a kill after them, too: the checkpoint knows them."""
    recording = LiveRecording(tmp_path, BLOCK)
    served = open_tiny(
        [recording, ChangesPolicy("full-kv:window=4", BUSY)], may_become=("full-kv:window=4", BUSY)
    )
    play(served, conversation_load())
    for _ in range(2):  # the engine's thread has been idle in between
        served.worker.call(lambda _: None).result()
    assert not served.worker.observers.failed
    assert recording.wait(300)
    killed = shutil.copytree(recording.folder, tmp_path / "killed")
    served.worker.stop()
    recording.close()
    for folder in (recording.folder, killed):
        manifest = load_run(folder / "live").manifest
        assert [change["name"] for change in manifest["policy_changes"]] == [
            "full-kv:window=4",
            BUSY,
        ]
        one, again = redecided(folder / "live")
        assert one == again
        found = drift(
            RecordedRun(folder / "live"), roofline(find_gpu("h200"), find_model("qwen3-8b"))
        )
        assert found.num_compared == 16


def test_an_idle_server_has_everything_on_disk(tmp_path: Path) -> None:
    """Nothing is kept back until the end: whoever looks while the server waits sees all that
    happened.
    """
    recording = LiveRecording(tmp_path, BLOCK)
    served = open_tiny([recording])
    try:
        play(served, conversation_load(8))
        idle = served.worker.call(lambda lanes: lanes[0].engine.scheduler.digest())
        digest = idle.result()
        served.worker.call(lambda _: None).result()  # it has been idle in between
        assert recording.wait(300)
        run = load_run(recording.folder / "live")
        assert not run.manifest["complete"]
        assert run.manifest["digest"] == digest
        assert run.requests.num_rows == 8
        assert redecided(recording.folder / "live") == (digest, digest)
        assert len(read_trace(recording.folder / "trace-00000.jsonl")) == 8
    finally:
        served.worker.stop()
        recording.close()


def test_a_disk_that_fails_ends_the_recording_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: TraceFiles, row: TraceRequest) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TraceFiles, "write", full)
    recording = LiveRecording(tmp_path, BLOCK)
    served = open_tiny([recording])
    answers = play(served, conversation_load(6))
    more = play(served, [replace(row, id=f"more-{row.id}") for row in conversation_load(6)])
    served.worker.stop()
    recording.close()
    assert {answer.finish_reason for answer in (*answers.values(), *more.values())} == {"length"}
    assert isinstance(recording.failure, OSError)
    assert not served.worker.observers.failed


def test_a_crashed_engine_leaves_its_recording_and_the_next_has_its_own(tmp_path: Path) -> None:
    recording = LiveRecording(tmp_path, BLOCK)
    served = open_tiny([recording])
    play(served, conversation_load(6))
    served.worker.call(lambda lanes: setattr(lanes[0].engine.runner, "execute", None)).result()
    broken = play(served, [request("broken", list(range(5, 30)), 4)])
    assert broken["broken"].finish_reason == "error"
    answers = play(served, [replace(row, id=f"after-{row.id}") for row in conversation_load(6)])
    assert {answer.finish_reason for answer in answers.values()} == {"length"}
    served.worker.stop()
    recording.close()
    first, second = (load_run(recording.folder / name) for name in ("live", "live-1"))
    assert (first.manifest["complete"], first.manifest["stopped_by"]) == (False, "TypeError")
    assert second.manifest["complete"]
    assert second.requests.num_rows == 6
    rows = read_trace(recording.folder / "trace-00000.jsonl")
    assert [row.status for row in rows].count("error") == 1
    assert len(rows) == 13


def test_files_follow_one_another_by_size_and_by_time(tmp_path: Path) -> None:
    now = 0.0
    meta = WorkloadMeta("live")
    files = TraceFiles(tmp_path, meta, Rotation(seconds=100.0, num_bytes=150), clock=lambda: now)
    for place in range(4):
        files.write(TraceRequest(str(place), 10, 5, arrival_s=float(place)))
    files.drop("refused")
    now = 101.0
    files.write(TraceRequest("late", 10, 5, arrival_s=101.0))
    files.close()
    names = sorted(path.name for path in tmp_path.glob("*.jsonl"))
    found = [read_trace(tmp_path / name) for name in names]
    assert [[row.id for row in workload] for workload in found] == [
        ["0", "1", "2"],
        ["3"],
        ["late"],
    ]
    assert [workload.meta.rows_read for workload in found] == [3, 2, 1]
    assert found[1].meta.dropped == {"refused": 1}


def test_an_empty_last_file_is_not_left_behind(tmp_path: Path) -> None:
    TraceFiles(tmp_path, WorkloadMeta("live"), Rotation()).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bad", [{"seconds": 0.0}, {"num_bytes": 0}])
def test_rotation_that_holds_nothing_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must last and hold something"):
        Rotation(**bad)  # type: ignore[arg-type]


def test_writing_that_falls_behind_is_given_up() -> None:
    released: list[bool] = []
    writing = DiskWriter("slow", at_failure=lambda: released.append(True), max_pending=10)
    gate: list[str] = []

    def wait() -> None:
        while not gate:
            pass

    done: list[int] = []
    writing(wait)
    while writing.num_pending:
        pass
    for place in range(20):
        writing(lambda place=place: done.append(place))  # type: ignore[misc]
    assert isinstance(writing.failure, OSError)
    gate.append("open")
    assert writing.close(30)
    assert not done
    assert released == [True]


def test_metadata_says_that_the_trace_is_live_before_a_row_is_there(tmp_path: Path) -> None:
    files = TraceFiles(tmp_path, WorkloadMeta("live", block_size=8), Rotation())
    found = json.loads((tmp_path / "trace-00000.meta.json").read_text())
    assert found["modifications"] == ["recorded live"]
    assert found["block_size"] == 8
    files.close()

"""A run that is followed while it is written is what a replay of the whole says."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.traces.cases import POLICIES, conversations
from zlab.sim.replay import replay
from zlab.traces import live_run
from zlab.traces import recording as recording_module
from zlab.traces.live_run import LiveRun
from zlab.traces.occupancy import PoolCounts, counts_at, read_occupancy
from zlab.traces.recording import TABLES, FolderRecorder, Recording, RecordingError
from zlab.traces.schema import PHASES
from zlab.traces.timeline import phases_now


@pytest.fixture(scope="module", params=[0, 3, 5])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    policy, limits = POLICIES[request.param]
    folder = tmp_path_factory.mktemp("whole") / "run"
    replay(conversations(), policy, limits=limits, out=folder)
    return Recording(folder)


def grow(
    recorder: FolderRecorder, whole: Recording, low: float, high: float, in_step: bool = True
) -> None:
    """Write a part of a run, by share of its steps; without `in_step` each table is cut where it
    will, in the middle of steps.
    """
    tables = {name: whole.table(name) for name in ("events", "blocks", "steps", "reports")}
    steps = tables["events"]["step"].to_numpy()
    named = np.concatenate(([0], np.cumsum(tables["events"]["num_blocks"].to_numpy())))

    def row(name: str, share: float) -> int:
        last = int(tables["steps"].num_rows * share)
        if not in_step:
            return int(tables[name].num_rows * share)
        if name == "steps":
            return last
        if name == "reports":
            return int(np.searchsorted(tables[name]["step"].to_numpy(), last))
        at = len(steps) if share == 1.0 else int(np.searchsorted(steps, last))
        return at if name == "events" else int(named[at])

    for name, table in tables.items():
        first, last = row(name, low), row(name, high)
        part = table.slice(first, last - first)
        recorder.write(name, {column: part[column] for column in part.column_names})


def same(pool: PoolCounts | None, recording: Recording) -> None:
    """The pool at every change of either."""
    assert pool is not None
    replayed = read_occupancy(recording)
    moments = np.unique(np.concatenate((pool.change_s, replayed.change_s)))
    moments = moments[moments <= pool.times.last_s]
    assert np.array_equal(counts_at(pool, moments), counts_at(replayed, moments))


@pytest.mark.parametrize("rows_per_part", [1, 400, 10**9])
def test_a_growing_run_is_its_replay(
    whole: Recording, rows_per_part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_run, "CHANGES_AT_ONCE", 7)  # less than some steps change
    begun = whole.manifest | {"complete": False, "summary": None}
    recorder = FolderRecorder(tmp_path / "run", begun, rows_per_part)
    run = None
    for low, high in ((0.0, 0.1), (0.1, 0.13), (0.13, 0.13), (0.13, 0.9), (0.9, 1.0)):
        grow(recorder, whole, low, high, in_step=rows_per_part > 1)
        if rows_per_part > 1:
            recorder.checkpoint()
        now = Recording(tmp_path / "run")
        run = run or LiveRun(now)
        run.update(now)
        assert run.pool is not None
        assert run.steps.num_rows == now.table("steps", ("step",)).num_rows
        assert (run.pool.counts.sum(axis=1) == run.num_blocks).all()
        if rows_per_part > 1 and high < 1.0:
            same(run.pool, now)
    recorder.close(summary=whole.manifest["summary"])
    ended = Recording(tmp_path / "run")
    assert run is not None
    run.update(ended)
    same(run.pool, ended)
    counted = phases_now(ended.table("events"), ended.manifest).tolist()
    assert run.phases_now() == dict(zip(PHASES, counted, strict=True))
    assert run.rows_read == {name: ended.table(name).num_rows for name in run.rows_read}


def test_each_row_is_read_once(
    whole: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = whole.manifest | {"complete": False, "summary": None}
    recorder = FolderRecorder(tmp_path / "run", begun, rows_per_part=10)
    for part in range(16):
        grow(recorder, whole, part / 20, (part + 1) / 20)
    recorder.checkpoint()
    now = Recording(tmp_path / "run")
    run = LiveRun(now)
    run.update(now)
    grow(recorder, whole, 0.8, 0.85)
    recorder.checkpoint()
    opened: list[Path] = []
    read_part = recording_module._read_part

    def noted(part: Path, wanted: list[str], schema: pa.Schema) -> pa.Table:
        opened.append(part)
        return read_part(part, wanted, schema)

    monkeypatch.setattr(recording_module, "_read_part", noted)
    later = Recording(tmp_path / "run")
    run.update(later)
    assert 0 < len(opened) <= 2 * len(run.rows_read)  # not those that were read before
    assert sum(len(later.parts(name)) for name in run.rows_read) > 3 * len(opened)


def test_tables_that_contradict_each_other_are_refused(whole: Recording, tmp_path: Path) -> None:
    recorder = FolderRecorder(tmp_path / "run", whole.manifest)
    for name in TABLES:
        table = whole.table(name)
        rows = table.num_rows // 2 if name == "blocks" else table.num_rows
        part = table.slice(0, rows)
        recorder.write(name, {column: part[column] for column in part.column_names})
    recorder.close(summary=whole.manifest["summary"])
    found = Recording(tmp_path / "run")
    with pytest.raises(RecordingError, match="lacks"):
        LiveRun(found).update(found)

"""Trust in a simulation, on recordings whose truth is known, and on one of the engine's that is
kept with the tests.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.sim.cases import cost_of, request, workload
from tests.sim.disguised import LIMITS, change_manifest, disguised
from zlab.sim.cost_model import COEFFICIENT_UNITS, CostModel
from zlab.sim.fidelity import GOALS, MeasuredFigure, event_words, judge_fidelity
from zlab.sim.recorded_run import KINDS, RecordedRun
from zlab.sim.specs import SimError
from zlab.traces.recording import TABLES, RecordingError
from zlab.traces.schema import EventKind
from zlab.traces.workload import Workload

KEPT = Path(__file__).parents[1] / "data" / "engine-tiny"
NO_TIMES = ("compression_share", "compression_rate", "corner", "graph_tokens")
NOTHING = {name: 0.0 for name in COEFFICIENT_UNITS if name not in NO_TIMES}
HYBRID = "hybrid:budget.tokens=96"
H200 = replace(
    cost_of(HYBRID),
    compression_rate=0.4,
    compression_start_s=3e-4,
    launch_s=12e-3,
    mixed_launch_s=3e-3,
    corner=0.4,
    attention_wait_token_s=3e-7,
)


def flat(**seconds: float) -> CostModel:
    """Nothing costs anything but what is named."""
    values: dict[str, Any] = NOTHING | seconds
    return replace(H200, **values)


def scaled(factor: float) -> CostModel:
    values: dict[str, Any] = {name: getattr(H200, name) * factor for name in NOTHING}
    return replace(H200, **values)


def load(gap_s: float | None = None, seed: int = 1, count: int = 24) -> Workload:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(20, 180, (count, 2)).tolist()
    return workload(
        *(request(str(i), size[0], size[1], (gap_s or 0.0) * i) for i, size in enumerate(sizes))
    )


def rewrite(folder: Path, table: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a recording's rows in place."""
    for part in sorted((folder / table).glob("*.parquet")):
        columns = pq.read_table(part).to_pydict()
        change(columns)
        pq.write_table(pa.table(columns, schema=TABLES[table]), part)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The engine's own recording, to be changed."""
    return Path(shutil.copytree(KEPT, tmp_path / "kept"))


@pytest.mark.parametrize(
    "policy", ["full-kv", HYBRID, f"{HYBRID},join=blocking", f"{HYBRID},comes_back=swap"]
)
def test_the_model_that_made_a_closed_run_is_right_about_it(tmp_path: Path, policy: str) -> None:
    limits = replace(LIMITS, host_blocks=100 if "swap" in policy else 0)
    found = judge_fidelity(
        RecordedRun(disguised(tmp_path / "run", load(), policy, H200, limits)), H200
    )
    assert found.decisions.equal
    assert found.decisions.how == "free replay"
    assert found.decisions.difference is None
    assert set(GOALS) < set(found.figures)
    assert [compared.error for compared in found.figures.values()] == pytest.approx(
        [0.0] * 14, abs=1e-9
    )
    for name, error in found.steps.items():
        assert error.mean_size < 1e-6, name
    assert found.pinned_makespan.error == pytest.approx(0.0, abs=1e-6)
    assert ("with compression" in found.steps) == (policy != "full-kv")


def test_a_model_a_tenth_too_slow_is_a_tenth_off(tmp_path: Path) -> None:
    run = RecordedRun(disguised(tmp_path / "run", load(), HYBRID, H200))
    found = judge_fidelity(run, scaled(1.1))
    for name, compared in found.figures.items():
        assert compared.error == pytest.approx(
            1 / 1.1 - 1 if name == "tokens_per_s" else 0.1, abs=1e-6
        ), name
        if name.endswith("p90"):
            assert compared.met is None
        elif not name.endswith("p99"):  # there a tenth is just the goal
            assert compared.met is False
    assert sum(error.num_steps for error in found.steps.values()) == run.steps.num_rows
    for error in found.steps.values():
        assert error.error == pytest.approx(0.1, abs=1e-6)
        assert error.mean_size == pytest.approx(0.1, abs=1e-6)
    assert sum(error.lacking_share for error in found.steps.values()) == pytest.approx(
        -0.1, abs=1e-6
    )


@pytest.mark.parametrize("plan_ahead", [False, True])
@pytest.mark.parametrize("gap_s", [0.02, 0.9])
def test_timed_arrivals(tmp_path: Path, plan_ahead: bool, gap_s: float) -> None:
    """Busy and, with the wide gap, mostly idle; the free replay comes in between the same steps."""
    timed = load(gap_s, count=16)
    run = RecordedRun(disguised(tmp_path / "run", timed, HYBRID, H200, plan_ahead=plan_ahead))
    assert run.planned_ahead is plan_ahead
    found = judge_fidelity(run, H200)
    assert found.decisions.equal
    assert found.decisions.how == "told when"
    assert found.decisions.free_differs_at is None
    assert [compared.error for compared in found.figures.values()] == pytest.approx(
        [0.0] * 14, abs=1e-9
    )
    makespan = found.pinned_makespan.measured
    assert makespan is not None
    assert float(run.busy_s.sum() + run.idle_s.sum()) == pytest.approx(makespan)
    assert (found.idle_s > 0.2 * makespan) == (gap_s == 0.9)
    assert found.pinned_makespan.error == pytest.approx(0.0, abs=1e-6)


def test_the_engines_way_of_planning_ahead_is_followed(tmp_path: Path) -> None:
    """Told that the engine did not plan ahead, the free replay lets arrivals in a step too
    early.
    """
    cost = replace(H200, launch_s=0.0)  # which would wait for what the other hides
    folder = disguised(tmp_path / "run", load(0.02, count=16), HYBRID, cost, plan_ahead=True)
    right = judge_fidelity(RecordedRun(folder), cost)
    change_manifest(folder, engine={"dtype": "bfloat16", "overlap": False, "cuda_graphs": True})
    wrong = judge_fidelity(RecordedRun(folder), cost)
    assert right.figures["ttft_s mean"].error == pytest.approx(0.0, abs=1e-9)
    assert (wrong.figures["ttft_s mean"].error or 0.0) < -0.01
    assert wrong.decisions.free_differs_at is not None
    assert wrong.decisions.equal  # told when they came it decides the same


def test_a_run_that_was_cut_short(tmp_path: Path) -> None:
    folder = disguised(tmp_path / "run", load(), HYBRID, H200)
    whole = RecordedRun(folder)
    num_steps = whole.steps.num_rows // 2
    for table in ("steps", "events", "blocks"):
        rewrite(
            folder,
            table,
            lambda columns: keep(columns, [step < num_steps for step in columns["step"]]),
        )

    def unfinish(columns: dict[str, Any]) -> None:
        late = [step > num_steps for step in columns["finish_step"]]
        columns["status"] = [
            "unfinished" if cut else was for cut, was in zip(late, columns["status"], strict=True)
        ]
        columns["finish_step"] = [
            -1 if cut else was for cut, was in zip(late, columns["finish_step"], strict=True)
        ]

    rewrite(folder, "requests", unfinish)
    change_manifest(folder, complete=False, num_steps=num_steps)
    run = RecordedRun(folder)
    found = judge_fidelity(run, H200)
    assert not found.complete
    assert found.figures["makespan_s"].measured == pytest.approx(float(run.column("end_s")[-1]))
    assert 0 < np.count_nonzero(~np.isnan(run.moments().finish_s)) < 24
    assert [compared.error for compared in found.figures.values()] == pytest.approx(
        [0.0] * 14, abs=1e-9
    )
    assert found.decisions.difference is None


def keep(columns: dict[str, Any], rows: list[bool]) -> None:
    for name, values in columns.items():
        columns[name] = [value for value, kept in zip(values, rows, strict=True) if kept]


def test_the_engines_recording_by_hand() -> None:
    """A step that computes takes a millisecond, nothing else takes any: what is simulated is a
    matter of counting.
    """
    run = RecordedRun(KEPT)
    found = judge_fidelity(run, flat(step_s=1e-3))
    assert found.decisions.equal
    assert found.decisions.how == "free replay"
    num_steps, makespan = run.steps.num_rows, float(run.column("end_s")[-1])
    computing = np.cumsum((run.column("decodes") > 0) | (run.column("prefills") > 0)) * 1e-3
    assert num_steps - 20 < 1e3 * computing[-1] < num_steps  # some only start compressions
    assert found.figures["makespan_s"].measured == makespan
    assert found.figures["makespan_s"].simulated == pytest.approx(float(computing[-1]))
    assert found.figures["tokens_per_s"].simulated == pytest.approx(
        run.requests["output_tokens"].to_numpy().sum() / computing[-1]
    )
    rows = {row["number"]: row for row in run.requests.to_pylist()}
    simulated = found.figures["e2e_s mean"].simulated
    assert simulated == pytest.approx(
        np.mean([computing[row["finish_step"] - 1] for row in rows.values()])
    )
    assert sum(row["preemptions"] for row in rows.values()) > 0
    assert len(run.compression_tasks) == sum(row["compressions"] for row in rows.values()) > 0
    assert sum(error.num_steps for error in found.steps.values()) == num_steps
    assert found.pinned_makespan.measured == pytest.approx(makespan)
    assert found.outliers[0].measured_s == pytest.approx(float(run.busy_s.max()))


def test_measured_times_come_from_the_steps() -> None:
    run = RecordedRun(KEPT)
    ends, moments = run.column("end_s"), run.moments()
    for row in run.events.to_pylist():
        if row["kind"] == EventKind.FINISHED:
            assert moments.finish_s[row["request"]] == ends[row["step"]]
    assert (moments.first_s <= moments.finish_s).all()
    assert (moments.arrival_s <= moments.first_s).all()
    assert float(run.busy_s.sum()) == pytest.approx(float(ends[-1]))
    assert not run.idle_s.any()
    for kind in ("decode only", "mixed", "with compression"):
        assert np.count_nonzero(run.kinds == KINDS.index(kind)) > 3


def test_a_changed_event_is_found_out(kept: Path) -> None:
    def change(columns: dict[str, Any]) -> None:
        columns["value"][columns["kind"].index(EventKind.COMPRESSING)] += 1

    rewrite(kept, "events", change)
    with pytest.raises(
        RecordingError, match=r"its events have the digest .*, its manifest says .*was changed"
    ):
        RecordedRun(kept)


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        (
            "steps",
            lambda columns: columns["output_tokens"].__setitem__(3, 99),
            "output tokens, its requests ",
        ),
        (
            "steps",
            lambda columns: columns["end_s"].__setitem__(7, 0.0),
            "time decreases at step 7",
        ),
        (
            "steps",
            lambda columns: columns["step"].__setitem__(5, 6),
            "not numbered one after the other",
        ),
        ("steps", lambda columns: [values.clear() for values in columns.values()], "has no steps"),
        (
            "requests",
            lambda columns: [values.pop() for values in columns.values()],
            "requests are missing: 11",
        ),
    ],
)
def test_damage_is_named(
    kept: Path, table: str, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    rewrite(kept, table, change)
    with pytest.raises(RecordingError, match=message):
        RecordedRun(kept)


def test_only_the_engines_recordings_are_judged(kept: Path) -> None:
    change_manifest(kept, source="sim")
    with pytest.raises(SimError, match="source 'sim' is not the engine's"):
        RecordedRun(kept)


def test_a_planted_decision_is_named(kept: Path) -> None:
    """The manifest says that a request may hold a block more than it did: the first compression
    differs.
    """
    run = RecordedRun(kept)
    policy = run.manifest["policy_toml"]
    assert "tokens = 160" in policy
    change_manifest(kept, policy_toml=policy.replace("tokens = 160", "tokens = 176"))
    found = judge_fidelity(RecordedRun(kept), flat(step_s=1e-3))
    assert not found.decisions.equal
    difference = found.decisions.difference
    assert difference is not None
    own = run.events.slice(difference.index, 1).to_pylist()[0]
    assert difference.left == own
    assert difference.right != own
    assert difference.step == own["step"]
    assert event_words(difference.left) != event_words(difference.right)


def test_events_in_words() -> None:
    row = {"step": 3, "kind": 13, "request": 2, "value": 96, "num_blocks": 5}
    assert event_words(row) == "compressing request 2 96 5 blocks"
    assert (
        event_words({"step": 3, "kind": 26, "request": -1, "value": 4, "num_blocks": 0})
        == "decodes 4"
    )
    assert event_words(None) == "nothing"


def test_errors_and_goals() -> None:
    assert MeasuredFigure(2.0, 2.1, 0.05).error == pytest.approx(0.05)
    assert MeasuredFigure(2.0, 2.0999, 0.05).met is True
    assert MeasuredFigure(2.0, 1.8, 0.05).met is False
    assert MeasuredFigure(2.0, 1.8, None).met is None
    assert MeasuredFigure(None, 1.8, 0.05).met is None

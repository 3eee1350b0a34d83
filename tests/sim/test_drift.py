"""Prediction against live, where the truth is known: recordings simulated with costs of our
choice.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sim.cases import cost_of, request, workload
from tests.sim.disguised import LIMITS, change_manifest, disguised
from zlab.sim.cost_model import COEFFICIENT_UNITS, CostModel
from zlab.sim.fidelity import FLOORS, Drift, Gap, drift
from zlab.sim.recorded_run import RecordedRun
from zlab.traces.metrics import FIGURES, Observed, cut, figures, summarize
from zlab.traces.recording import FolderRecorder, Recording
from zlab.traces.workload import Workload

POLICY = "hybrid:budget.tokens=96"
COST = cost_of(POLICY)
TIMES = [name for name in COEFFICIENT_UNITS if name.endswith("_s")]


def slower(factor: float) -> CostModel:
    changes: dict[str, Any] = {name: getattr(COST, name) * factor for name in TIMES}
    return replace(COST, **changes)


def load(gap_s: float = 0.02, count: int = 60, seed: int = 1) -> Workload:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(20, 180, (count, 2)).tolist()
    return workload(
        *(request(str(at), size[0], size[1], gap_s * at) for at, size in enumerate(sizes))
    )


def live(folder: Path, cost: CostModel = COST, policy: str = POLICY, **more: Any) -> RecordedRun:
    return RecordedRun(disguised(folder, load(**more), policy, cost))


def gaps(found: Drift) -> dict[str, Gap]:
    return {gap.name: gap for gap in found.whole.gaps}


def test_what_goes_as_predicted_has_no_gap_at_all(tmp_path: Path) -> None:
    run = live(tmp_path / "run")
    found = drift(run, COST)
    assert [gap.name for gap in found.whole.gaps] == list(FIGURES)
    for window in (found.whole, *found.windows):
        for gap in window.gaps:
            assert gap.live == gap.predicted, (window.start_s, gap)
    assert gaps(found)["compressions_per_request"].live
    assert gaps(found)["preemptions_per_request"].live
    assert found.num_compared == 60
    assert dict(found.live_summary) == {
        **found.predicted_summary,
        "compression_share": found.live_summary["compression_share"],
    }
    assert sum(window.num_requests for window in found.windows) == found.whole.num_requests == 60


def test_a_card_that_is_slower_than_thought_shows_in_every_time(tmp_path: Path) -> None:
    run = live(tmp_path / "run", slower(1.5), gap_s=0.0)
    found = gaps(drift(run, COST))
    assert found["tokens_per_s"].relative == pytest.approx(1 / 1.5 - 1, abs=0.01)
    for name in ("ttft_s p50", "tpot_s p50", "e2e_s mean", "e2e_s p99"):
        assert found[name].relative == pytest.approx(0.5, abs=0.02), name
    assert found["preemptions_per_request"].relative == pytest.approx(0.0, abs=1e-9)


def test_a_slow_hour_shows_in_its_windows_alone(tmp_path: Path) -> None:
    """The first half of the day goes as predicted; then steps take twice as long."""
    folder = disguised(tmp_path / "day", load(gap_s=0.1), POLICY, COST)
    recording = Recording(folder)
    tables = {
        name: recording.table(name).to_pydict()
        for name in ("requests", "steps", "events", "blocks")
    }
    middle = 3.0

    def later(moment: float) -> float:
        return moment if not moment > middle else middle + 2.0 * (moment - middle)

    for table, names in (
        ("steps", ("start_s", "end_s")),
        ("requests", ("first_token_s", "finish_s", "arrival_s")),
    ):
        for name in names:
            tables[table][name] = [later(moment) for moment in tables[table][name]]
    changed = FolderRecorder(tmp_path / "changed", recording.manifest)
    for name, columns in tables.items():
        changed.write(name, columns)
    changed.close(**recording.manifest)
    (tmp_path / "changed" / "asked.jsonl").write_bytes((folder / "asked.jsonl").read_bytes())
    found = drift(RecordedRun(tmp_path / "changed"), COST, num_windows=6)
    e2e = [next(gap for gap in window.gaps if gap.name == "e2e_s p50") for window in found.windows]
    assert [gap.is_within(0.1) for gap in (e2e[0], *e2e[2:5])] == [True, False, False, False]
    assert all(gap.relative is not None and gap.relative > 0.8 for gap in e2e[3:5])
    last = found.windows[-1]  # the tail, in which nothing arrives, is part of the run
    assert last.end_s > max(tables["steps"]["end_s"]) > last.start_s


def test_a_candidate_is_predicted_on_the_same_arrivals(tmp_path: Path) -> None:
    run = live(tmp_path / "run", policy="full-kv")
    same, candidate = drift(run, COST), drift(run, COST, policy=RecordedRun(
        disguised(tmp_path / "other", load(), POLICY, COST)
    ).policy)  # fmt: skip
    assert same.policy == "full-kv"
    assert candidate.policy == POLICY
    assert gaps(same)["compressions_per_request"].predicted == 0
    assert gaps(candidate)["compressions_per_request"].predicted
    assert gaps(candidate)["tokens_per_s"].live == gaps(same)["tokens_per_s"].live
    assert gaps(candidate)["tokens_per_s"].predicted != gaps(same)["tokens_per_s"].predicted


def test_a_request_that_was_called_off_ends_where_it_did(tmp_path: Path) -> None:
    run = live(tmp_path / "run")
    numbers = run.requests["number"].to_pylist()
    columns = run.requests.to_pydict()
    for name, value in (("status", "aborted"), ("output_tokens", 7)):
        columns[name] = [
            value if at < 10 else old for at, old in zip(numbers, columns[name], strict=True)
        ]
    run.requests = run.requests.from_pydict(columns, schema=run.requests.schema)
    asked = list(run.load())
    assert [row.output_tokens for row in asked[:10]] == [7] * 10
    assert [row.output_tokens for row in asked[10:]] == [
        row.output_tokens for row in list(load())[10:]
    ]


def test_a_killed_recording_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    """Its last requests were alive: they load the engine, and no latency of theirs is compared."""
    run = live(tmp_path / "run")
    last = run.steps.num_rows * 2 // 3
    events = run.events.filter(np.asarray(run.events["step"].to_numpy() <= last))
    blocks = run.blocks.filter(np.asarray(run.blocks["step"].to_numpy() <= last))
    arrived = set(events.filter(np.asarray(events["kind"].to_numpy() == 1))["request"].to_pylist())
    rows = [row for row in run.requests.to_pylist() if row["number"] in arrived]
    for row in rows:
        if row["finish_step"] > last:
            row |= {
                "status": "unfinished",
                "finish_step": -1,
                "finish_s": float("nan"),
                "output_tokens": 3,
            }
    cut_short = FolderRecorder(tmp_path / "cut", dict(run.manifest))
    for name, table in (
        ("steps", run.steps.slice(0, last + 1)),
        ("events", events),
        ("blocks", blocks),
    ):
        cut_short.write(name, {column: table[column].to_pylist() for column in table.column_names})
    cut_short.write(
        "requests", {name: [row[name] for row in rows] for name in run.requests.column_names}
    )
    cut_short.close(**{**run.manifest, "complete": False, "num_steps": last + 1})
    (tmp_path / "cut" / "asked.jsonl").write_bytes((tmp_path / "run" / "asked.jsonl").read_bytes())
    found = drift(RecordedRun(tmp_path / "cut"), COST)
    finished = sum(row["status"] == "finished" for row in rows)
    assert 0 < found.num_compared <= finished < len(rows)
    assert gaps(found)["ttft_s p50"].is_within(0.02)


@pytest.mark.parametrize(
    ("live_value", "predicted", "tolerance", "expected"),
    [
        (1.09, 1.0, 0.1, True),
        (1.11, 1.0, 0.1, False),
        (0.89, 1.0, 0.1, False),
        (0.0, 0.0, 0.0, True),
        (FLOORS["preemptions_per_request"], 0.0, 0.1, True),
        (2 * FLOORS["preemptions_per_request"], 0.0, 0.1, False),
        (None, None, 0.1, True),
        (None, 1.0, 0.1, False),
        (1.0, None, 0.1, False),
    ],
)
def test_within(
    live_value: float | None, predicted: float | None, tolerance: float, expected: bool
) -> None:
    assert Gap("preemptions_per_request", live_value, predicted).is_within(tolerance) is expected


def test_windows_cover_the_span_and_meet() -> None:
    found = cut((1.0, 4.0), 3)
    assert list(found) == [(1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]


def test_summaries_are_those_of_the_recording(tmp_path: Path) -> None:
    run = live(tmp_path / "run")
    found = drift(run, COST)
    assert found.live_summary == summarize(run.requests, run.steps, run.manifest)
    assert LIMITS.num_blocks == run.manifest["num_blocks"]
    change_manifest(tmp_path / "run", source="sim")
    with pytest.raises(ValueError, match="is not the engine's"):
        RecordedRun(tmp_path / "run")


def test_no_more_than_all_of_a_prompt_was_found_in_the_cache() -> None:
    """A preempted request that comes back finds its own blocks again, output included."""
    twice, never, none = np.array([50.0, 0.0]), np.array([np.nan] * 2), np.zeros(0)
    run = Observed(
        arrival_s=np.array([0.0, 1.0]),
        first_s=never,
        finish_s=never,
        prompt_tokens=np.array([20.0, 20.0]),
        output_tokens=np.zeros(2),
        hit_tokens=twice,
        preemptions=np.zeros(2),
        compressions=np.zeros(2),
        step_start_s=none,
        step_end_s=none,
        step_output_tokens=none,
        step_running=none,
    )
    found = figures(run, (0.0, 2.0), np.zeros(2, dtype=bool))
    assert found["prefix_hit_share"] == 0.5

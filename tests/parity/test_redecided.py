"""Live runs (timed arrivals, stops, aborts, failures), recorded, then decided again by the
simulator.
"""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from tests.engine.engine_cases import GREEDY, Watched, mixed, tiny, watched
from tests.parity.parity_cases import WHEN_DONE, decided_again, on_engine, settings, workload
from zlab.engine.recorder import EngineRecorder
from zlab.engine.replay import Replayed, ReplaySettings, replay
from zlab.engine.sampling_params import SamplingParams
from zlab.policies.core.request import Request
from zlab.sim.recorded_run import redecide
from zlab.sim.specs import SimError
from zlab.traces.recording import Recording, RecordingError, first_difference, read_asked
from zlab.traces.schema import EventKind, Phase
from zlab.traces.workload import TraceRequest

STOPPING = SamplingParams(temperature=0.8, seed=11, stop_token_ids=[7, 19, 40])
LIVE = ReplaySettings(live=True, params=STOPPING)
HYBRID = "hybrid:tokens=40,window=4"
TIMED = [
    replace(asked, arrival_s=0.004 * place)
    for place, asked in enumerate(mixed(24, seed=9, longest=110))
]
POLICIES = (
    "full-kv:comes_back=swap",
    "constrained:tokens=24,window=4",
    HYBRID,
    f"{HYBRID},comes_back=swap,slotted=true",
    f"{HYBRID},join=blocking",
    WHEN_DONE,
    "hybrid-adaptive:tokens=40,most_tokens=80,window=4",
    "nano-vllm",
    "zipage:tokens=40,window=4",
)


def assert_decided_again(of: Replayed) -> None:
    again = decided_again(of)
    difference = first_difference(of.run.events, again.tables.table("events"))
    assert difference is None, difference
    assert again.digest == of.run.summary["digest"]
    assert again.num_steps == of.run.manifest["num_steps"]


@pytest.mark.parametrize("policy", POLICIES)
def test_timed_arrivals_and_stops_step_for_step(policy: str) -> None:
    of = on_engine(policy, TIMED, LIVE)
    rows = of.run.requests.to_pylist()
    stopped = [row for row in rows if row["reason"] == "stop"]
    assert len(stopped) > 3, "somebody must have stopped early"
    assert all(row["output_tokens"] <= row["max_tokens"] for row in rows)
    assert len({row["arrival_step"] for row in rows}) > 4, (
        "they must have come in at different steps"
    )
    assert_decided_again(of)


def test_from_the_folder_alone(tmp_path: Path) -> None:
    of = replay(workload(TIMED), settings(HYBRID), LIVE, loaded=tiny(), out=tmp_path / "run")
    found = Recording(tmp_path / "run")
    again = redecide(
        found.manifest, found.table("requests"), found.table("events"), read_asked(tmp_path / "run")
    )
    assert again.digest == of.run.summary["digest"] == found.manifest["digest"]
    assert found.manifest["source"] == "engine"


def test_a_cut_short_run_as_far_as_it_went(tmp_path: Path) -> None:
    def stop(num_ended: int, num_requests: int, now_ns: int) -> None:
        if num_ended > 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(
            workload(TIMED),
            settings(HYBRID),
            LIVE,
            loaded=tiny(),
            out=tmp_path / "run",
            progress=stop,
        )
    found = Recording(tmp_path / "run")
    assert not found.complete
    assert found.manifest["stopped_by"] == "KeyboardInterrupt"
    again = redecide(
        found.manifest, found.table("requests"), found.table("events"), read_asked(tmp_path / "run")
    )
    assert again.num_steps == found.manifest["num_steps"]
    difference = first_difference(found.table("events"), again.tables.table("events"))
    assert difference is None, difference


PHASES = (
    Phase.QUEUED,
    Phase.PREFILL,
    Phase.DECODE,
    Phase.COMPRESSING,
    Phase.PREEMPTED,
    Phase.SWAPPED,
    Phase.SWAPPING_IN,
)


@pytest.mark.parametrize("join", ["boundary", "blocking", "when_done"])
@pytest.mark.parametrize("seed", range(3))
def test_aborts_failures_and_stops_at_any_moment(join: str, seed: int) -> None:
    """Somebody is aborted in every phase that comes up, arrivals fall in between, compressions
    fail.
    """
    policy = f"{HYBRID},comes_back=swap,slotted=true,join={join}"
    recorder = EngineRecorder()
    run = watched(policy, num_blocks=16, host_blocks=100, max_batched_tokens=24)
    run.engine.scheduler.state.journal._sink = recorder.sink
    recorder.open(run.engine, None, {"workload": {}, "workload_sha256": ""}, None)
    waiting = mixed(24, seed=20 + seed, longest=110)
    wanted, num_aborted = list(PHASES), 0
    assert run.engine.compression is not None
    for step in range(5000):
        if waiting and step % 3 == 0:
            asked = replace(waiting.pop(0), output_tokens=None)
            recorder.submitted(asked)
            run.submit(asked, STOPPING)
        if step % 40 == 39:
            run.engine.compression.inject_failure = "planted"
        live = [s for s in run.sequences.values() if not s.closed and not s.request.to_abort]
        found = next((s for s in reversed(live) if s.request.phase in wanted), None)
        if found is not None and step % 4 == 1:
            wanted.remove(found.request.phase)
            run.engine.abort(found.request.id)
            num_aborted += 1
        if not run.step() and not waiting and not run.engine.scheduler.state.requests:
            break
    done = recorder.close()
    statuses = done.requests["status"].to_pylist()
    assert statuses.count("aborted") == num_aborted >= 4
    assert statuses.count("failed") > 0
    again = redecide(done.manifest, done.requests, done.events, recorder.asked)
    difference = first_difference(done.events, again.tables.table("events"))
    assert difference is None, difference
    assert again.digest == done.manifest["digest"]


def test_an_abort_while_idle_arrivals_follow() -> None:
    """The only request is aborted while its compression is in flight; another comes before the step
    count moves on.
    """
    recorder = EngineRecorder()
    run = watched(WHEN_DONE, num_blocks=20)
    run.engine.scheduler.state.journal._sink = recorder.sink
    recorder.open(run.engine, None, {"workload": {}, "workload_sha256": ""}, None)
    asked = [replace(one, output_tokens=60, max_tokens=60) for one in mixed(2, seed=4)]
    first = _hand_in(run, recorder, asked[0])
    while first.phase is not Phase.COMPRESSING:
        run.step()
    run.engine.abort(asked[0].id)
    while run.step():
        pass
    _hand_in(run, recorder, asked[1])
    run.run()
    done = recorder.close()
    assert done.requests["status"].to_pylist() == ["aborted", "finished"]
    again = redecide(done.manifest, done.requests, done.events, recorder.asked)
    assert first_difference(done.events, again.tables.table("events")) is None
    assert again.digest == done.manifest["digest"]


def _hand_in(run: Watched, recorder: EngineRecorder, asked: TraceRequest) -> Request:
    recorder.submitted(asked)
    return run.submit(asked, GREEDY).request


def test_a_changed_recording_is_found_out() -> None:
    """One stop a token later, one arrival a step later: the decisions are others."""
    of = on_engine(HYBRID, TIMED, LIVE)
    rows = of.run.requests.to_pylist()
    late = next(
        row
        for row in rows
        if row["reason"] == "stop" and row["output_tokens"] < row["max_tokens"] - 2
    )
    late["output_tokens"] += 1
    changed = pa.Table.from_pylist(rows, schema=of.run.requests.schema)
    assert (
        redecide(of.run.manifest, changed, of.run.events, of.asked).digest
        != of.run.summary["digest"]
    )
    events = of.run.events.to_pylist()
    arrival = next(row for row in events if row["kind"] == EventKind.ARRIVED and row["step"] > 2)
    arrival["step"] += 1
    moved = pa.Table.from_pylist(events, schema=of.run.events.schema)
    assert (
        redecide(of.run.manifest, of.run.requests, moved, of.asked).digest
        != of.run.summary["digest"]
    )


def test_what_is_no_recording_of_the_engine(tmp_path: Path) -> None:
    with pytest.raises(
        RecordingError, match=r"has no asked\.jsonl: only a recording of the engine"
    ):
        read_asked(tmp_path)
    (tmp_path / "asked.jsonl").write_text('{"id": "a", "prompt_tokens": 3, "colour": 1}\n', "utf-8")
    with pytest.raises(RecordingError, match=r"asked\.jsonl:1: unknown field 'colour'"):
        read_asked(tmp_path)
    of = on_engine("full-kv", TIMED[:3])
    with pytest.raises(SimError, match="3 requests, 2 were asked"):
        redecide(of.run.manifest, of.run.requests, of.run.events, of.asked[:2])

"""The simulator as a driver: quiet stretches change nothing, recordings are whole, real traces run
to their end.

Changes of the policy in simulation: the same by stretches and step by step, and what is recorded of
them.

Two streams on one card: processor sharing worked out by hand.
"""

import signal
from pathlib import Path
from typing import Any

import pytest
import simpy

from tests.shared import SHARED, needs_shared
from tests.sim.cases import request, simulate, workload
from zlab.policies.core.plan import ConfigError, SchedulerLimits
from zlab.policies.snapshot import read_changes
from zlab.policies.spec import PolicyError, load_policy
from zlab.sim.cost_model import Change, check_order, read_change
from zlab.sim.replay import Run, Scenario, load_run, replay
from zlab.sim.simulator import AtBoundary, Device
from zlab.sim.specs import SimError
from zlab.traces.formats import read_trace
from zlab.traces.occupancy import replay_blocks
from zlab.traces.recording import Recording, RecordingError, first_difference
from zlab.traces.schema import EventKind
from zlab.traces.synthetic import ReasoningShape, fixed, reasoning
from zlab.traces.workload import Workload

POLICIES = [
    "full-kv",
    "constrained:budget.blocks=5,window=8",
    "hybrid:budget.blocks=5,window=8",
    "hybrid:budget.blocks=5,window=8,join=when_done",
    "hybrid:budget.blocks=5,window=8,join=blocking",
    "hybrid-adaptive:budget.blocks=5,most_tokens=256,budget.tokens=64,window=8",
    "nano-vllm",
    "zipage:budget.blocks=5,window=8",
    "hybrid:preemption=latest-first,comes_back=swap,budget.blocks=5,window=8",
]
TIGHT = SchedulerLimits(
    num_blocks=60,
    block_size=16,
    max_batched_tokens=512,
    max_running=48,
    max_model_len=8192,
    host_blocks=40,
)

SMALL = ReasoningShape(num_problems=4, mu=4.0, sigma=0.6, samples=4)


def crowd() -> Workload:
    """Enough requests at once to run out of blocks, arriving in the middle of quiet stretches."""
    return fixed(120, 50, 90, 400.0, seed=3)


@pytest.mark.parametrize("policy", POLICIES)
def test_quiet_stretches_change_neither_decisions_nor_times(policy: str) -> None:
    quiet = simulate(crowd(), policy, TIGHT)
    plain = simulate(crowd(), policy, TIGHT, quiet=False)
    assert quiet.summary["digest"] == plain.summary["digest"]
    assert first_difference(quiet.events, plain.events) is None
    assert quiet.steps.equals(plain.steps)
    assert quiet.requests.equals(plain.requests)
    assert quiet.blocks.equals(plain.blocks)
    assert quiet.summary["requests_finished"] == 120
    if policy not in ("constrained:budget.blocks=5,window=8", "full-kv", "nano-vllm"):
        assert quiet.summary["compressions"] > 0


def test_a_recording_reads_back_as_the_run(tmp_path: Path) -> None:
    run = simulate(crowd(), "hybrid:budget.blocks=5,window=8", TIGHT, out=tmp_path / "run")
    again = load_run(tmp_path / "run")
    assert again.summary == run.summary
    assert again.requests.equals(run.requests)
    recording = Recording(tmp_path / "run")
    assert recording.complete
    assert recording.manifest["summary"]["digest"] == run.summary["digest"]
    with pytest.raises(RecordingError, match="not empty"):
        simulate(crowd(), out=tmp_path / "run")


def test_an_interrupt_leaves_a_readable_recording_marked_as_partial(tmp_path: Path) -> None:
    calls: list[int] = []

    def interrupt(ended: int, total: int, now_ns: int) -> None:
        calls.append(ended)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(
            fixed(3000, 50, 90, 400.0, seed=3),
            limits=TIGHT,
            out=tmp_path / "run",
            progress=interrupt,
        )
    run = load_run(tmp_path / "run")
    assert run.manifest["complete"] is False
    assert run.manifest["stopped_by"] == "KeyboardInterrupt"
    assert 0 < run.summary["requests_finished"] < 3000
    assert run.steps.num_rows > 0
    assert "unfinished" in run.requests["status"].to_pylist()


def test_parts_of_a_phase_add_up_to_end_to_end() -> None:
    for row in simulate(crowd(), "hybrid:budget.blocks=5,window=8", TIGHT).requests.to_pylist():
        parts = [
            value for name, value in row.items() if name.endswith("_s") and name not in MOMENTS
        ]
        assert sum(parts) == pytest.approx(row["finish_s"] - row["arrival_s"], abs=1e-9)


MOMENTS = {"arrival_s", "first_admitted_s", "first_token_s", "finish_s"}


def test_longer_outputs_where_tokens_are_evicted() -> None:
    load = workload(request("short", 10, 20), request("long", 10, 200))
    policy = "constrained:budget.blocks=5,window=8"
    rows = simulate(load, policy, length_multiplier=1.5).requests.sort_by("number").to_pylist()
    assert [row["output_tokens"] for row in rows] == [20, 300]
    full = simulate(load, "full-kv", length_multiplier=1.5).requests.sort_by("number").to_pylist()
    assert [row["output_tokens"] for row in full] == [20, 200]


def test_same_seed_same_digest() -> None:
    digests = {simulate(reasoning(SMALL, seed=5)).summary["digest"] for _ in range(2)}
    other = simulate(reasoning(SMALL, seed=6)).summary["digest"]
    assert len(digests) == 1
    assert other not in digests


TRACES: list[tuple[str, dict[str, Any]]] = [
    ("AzureLLMInferenceTrace_code.csv", {"requests_finished": 8819, "requests_refused": 0}),
    ("mooncake_synthetic_trace.jsonl", {"requests_finished": 3687, "requests_refused": 306}),
]


@needs_shared
@pytest.mark.parametrize(("name", "counts"), TRACES, ids=lambda item: str(item)[:12])
def test_real_traces_are_served_to_the_last_request(name: str, counts: dict[str, int]) -> None:
    load = read_trace(SHARED / "traces" / name)
    run = replay(load, "hybrid", "h200", "qwen3-8b")
    assert {key: run.summary[key] for key in counts} == counts
    for row in run.requests.select(["status", "prompt_tokens", "message"]).to_pylist():
        if row["status"] == "refused":
            assert row["prompt_tokens"] >= 40960
            assert "40960" in row["message"]


@needs_shared
def test_prefix_hits_come_near_the_least_recently_used_bound() -> None:
    """Leading-block hits lie near those of an LRU cache of the pool's size (traces README: .0841 at
    1,000).
    """
    load = read_trace(SHARED / "traces" / "mooncake_synthetic_trace.jsonl")
    run = replay(
        load,
        "full-kv",
        limits=SchedulerLimits(num_blocks=1000, block_size=512, max_batched_tokens=16384),
    )
    blocks = sum(-(-item.prompt_tokens // 512) for item in load)
    assert 0.04 < run.summary["prefix_hit_tokens"] / 512 / blocks < 0.12
    assert replay(load, "full-kv:prefix=none").summary["prefix_hit_tokens"] == 0


def test_an_interrupt_after_the_last_check_is_not_lost() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test worker ignores it
    try:
        with pytest.raises(KeyboardInterrupt), AtBoundary(), AtBoundary():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


LIMITS = SchedulerLimits(
    num_blocks=60,
    block_size=16,
    max_batched_tokens=256,
    max_running=24,
    max_model_len=4000,
    host_blocks=60,
)
TURNS = (
    "hybrid:tokens=64,join=when_done",
    "full-kv:prefix=none",
    "constrained:tokens=96",
    "hybrid:tokens=64,comes_back=swap",
    "full-kv",
)


def timed(gap_s: float = 0.4) -> Workload:
    shared = tuple(range(40))
    asked = [
        request(
            f"r{n}",
            40 + n % 9,
            60 + 17 * n % 150,
            n * gap_s,
            prompt_ids=(*shared, *(1000 + n,) * (n % 9)),
        )
        for n in range(24)
    ]
    return workload(*asked)


def changing(apart: int = 60, specs: tuple[str, ...] = TURNS) -> list[Change]:
    return [Change(apart * place, load_policy(spec)) for place, spec in enumerate(specs, 1)]


def run(load: Workload | None = None, changes: list[Change] | None = None, **more: Any) -> Run:
    return simulate(
        load or timed(),
        "full-kv",
        LIMITS,
        changes=changing() if changes is None else changes,
        **more,
    )


@pytest.mark.parametrize("gap_s", [0.0, 0.05, 0.4])
@pytest.mark.parametrize("apart", [1, 60, 137])
def test_stretches_end_before_a_change(gap_s: float, apart: int) -> None:
    quick, plain = (run(timed(gap_s), changing(apart), quiet=quiet) for quiet in (True, False))
    assert (
        len(quick.manifest["policy_changes"])
        == min(quick.manifest["num_steps"] // apart, len(TURNS))
        >= 2
    )
    assert quick.events.equals(plain.events)
    assert quick.requests.equals(plain.requests)
    assert quick.steps.equals(plain.steps)
    assert quick.summary["requests_finished"] == 24
    assert quick.manifest["policy_changes"] == plain.manifest["policy_changes"]


def test_everything_goes_on_in_it() -> None:
    summary = run(timed(0.0)).summary
    assert summary["compressions"] > 5
    assert summary["preemptions"] > 0
    assert summary["prefix_hit_tokens"] > 0


def test_the_manifest_says_what_took_over_and_when(tmp_path: Any) -> None:
    done = run(timed(0.0), out=tmp_path / "run")
    found = load_run(tmp_path / "run")
    changes = read_changes(found.manifest)
    assert [change.policy for change in changes] == [load_policy(spec) for spec in TURNS]
    rows = [row for row in found.events.to_pylist() if row["kind"] == EventKind.POLICY]
    assert (
        [row["step"] for row in rows]
        == [change.step for change in changes]
        == [60, 120, 180, 240, 300]
    )
    starts = dict(
        zip(found.steps["step"].to_pylist(), found.steps["start_s"].to_pylist(), strict=True)
    )
    assert [change.time_ns * 1e-9 for change in changes] == pytest.approx(
        [starts[change.step] for change in changes]
    )
    assert found.manifest["policy"] == "full-kv"
    assert done.summary["digest"] == found.manifest["digest"]


def test_a_change_after_the_end_never_comes() -> None:
    done = run(changes=[Change(10**9, load_policy("hybrid"))])
    assert done.manifest["policy_changes"] == []
    assert done.summary["digest"] == run(changes=[]).summary["digest"]


def test_a_change_before_the_first_step_is_the_policy_itself() -> None:
    load = timed(0.0)
    changed = run(load, [Change(0, load_policy("hybrid:tokens=64"))])
    own = simulate(load, "hybrid:tokens=64", LIMITS)
    assert changed.events.slice(1).equals(own.events)
    assert changed.steps.equals(own.steps)


def test_blocks_that_turn_free_show_in_the_recorded_occupancy() -> None:
    done = run(timed(0.05))
    seen = replay_blocks(done.blocks, done.events, done.steps, done.manifest)
    freed = [
        row
        for row in done.events.to_pylist()
        if row["kind"] == EventKind.POLICY and row["num_blocks"]
    ]
    assert freed, "the cache was empty when sharing ended"
    for row in freed:
        step = done.steps.slice(row["step"], 1).to_pylist()[0]
        at = seen.change_s.searchsorted(step["start_s"], side="right") - 1
        cached = int(seen.counts[at][3])
        assert cached == step["cached_blocks"] == 0


def test_what_makes_no_sense() -> None:
    assert read_change("40:hybrid:tokens=64").step == 40
    for words in ("hybrid", "x:hybrid", "-3:hybrid", "4:", ":hybrid"):
        with pytest.raises(SimError, match="must be STEP:POLICY"):
            read_change(words)
    with pytest.raises(PolicyError, match="did you mean 'hybrid'"):
        read_change("4:hybird")
    policy = load_policy("hybrid")
    with pytest.raises(SimError, match="in order of their steps: 3 after 4"):
        check_order([Change(4, policy), Change(3, policy)])
    with pytest.raises(SimError, match="length multiplier is that of one policy"):
        run(length_multiplier=1.2)
    with pytest.raises(ConfigError, match="does not fit in a pool of 60"):
        run(changes=[Change(3, load_policy("hybrid:tokens=4000"))])


def test_a_pool_that_is_given_by_the_card_has_room_for_each_of_the_policies() -> None:
    names = {"full-kv": (), "hybrid": (), "full-kv then hybrid": ("9:hybrid",)}
    blocks = {
        name: Scenario(name.split()[0], max_running=64, changes=changes).set_up().limits.num_blocks
        for name, changes in names.items()
    }
    assert blocks["hybrid"] < blocks["full-kv"]
    assert blocks["full-kv then hybrid"] == blocks["hybrid"]
    default = replay(timed(), "full-kv", changes=[Change(9, load_policy("hybrid"))])
    assert default.manifest["num_blocks"] == Scenario("hybrid").set_up().limits.num_blocks


def ends(
    share: float,
    compute: list[tuple[int, float]],
    compress: list[tuple[int, float]],
    rate: float | None = None,
) -> dict[str, list[int]]:
    """Start jobs (at, work) on both streams; returns when each ended."""
    env = simpy.Environment(initial_time=0)
    device = Device(env, share, rate)
    found: dict[str, list[int]] = {"compute": [], "compress": []}

    def start(at: int, work: float, stream: str):  # type: ignore[no-untyped-def]
        yield env.timeout(at)
        yield device.compute(work) if stream == "compute" else device.compress(work)
        found[stream].append(int(env.now))

    for stream, jobs in (("compute", compute), ("compress", compress)):
        for at, work in jobs:
            env.process(start(at, work, stream))
    env.run()
    assert not device.compressing
    return found


def test_alone_a_job_takes_its_work() -> None:
    assert ends(0.25, [(5, 100)], []) == {"compute": [105], "compress": []}
    assert ends(0.25, [], [(5, 100)]) == {"compute": [], "compress": [105]}


def test_beside_each_other_they_share() -> None:
    # compute at 3/4 of the card ends at 100 / 0.75 = 133.3 -> 134; compression then has 33.5 of 40,
    # and ends at 140.5
    assert ends(0.25, [(0, 100)], [(0, 40)]) == {"compute": [134], "compress": [141]}


def test_a_late_compression_slows_only_what_is_left() -> None:
    # 60 of 100 are done at t = 60; 40 left at rate 3/4 take 53.3 -> 54; compression then has 13.5
    # of 20, 6.5 left
    assert ends(0.25, [(0, 100)], [(60, 20)]) == {"compute": [114], "compress": [121]}


def test_each_stream_is_first_in_first_out() -> None:
    assert ends(0.5, [], [(0, 10), (0, 20)]) == {"compute": [], "compress": [10, 30]}


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_no_work_is_lost_or_made(share: float) -> None:
    found = ends(share, [(0, 50), (0, 70)], [(10, 30), (40, 25)])
    assert max(found["compute"] + found["compress"]) == pytest.approx(50 + 70 + 30 + 25, abs=4)


def test_a_compression_may_run_faster_than_what_it_takes_away() -> None:
    # at half its speed compression ends at 40 / 0.5 = 80, when compute has done 0.75 x 80 = 60 of
    # 100
    assert ends(0.25, [(0, 100)], [(0, 40)], rate=0.5) == {"compute": [120], "compress": [80]}
    # compute ends at 100 / 0.75 = 133.3 -> 134, compression then has 67 of 120, and ends at 134 +
    # 53
    assert ends(0.25, [(0, 100)], [(0, 120)], rate=0.5) == {"compute": [134], "compress": [187]}

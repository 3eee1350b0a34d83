"""The simulator as a driver: quiet stretches change nothing, recordings are whole, real traces run to their end."""

import signal
from pathlib import Path
from typing import Any

import pytest

from policies.core.limits import Limits
from sim.interrupt import AtBoundary
from sim.replay import load_run, replay
from tests.shared import SHARED, needs_shared
from tests.sim.simulate import request, simulate, workload
from traces.formats import read_trace
from traces.recording import Recording, RecordingError, first_difference
from traces.synthetic import ReasoningShape, fixed, reasoning
from traces.workload import Workload

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
TIGHT = Limits(num_blocks=60, block_size=16, max_batched_tokens=512, max_running=48, max_model_len=8192, host_blocks=40)

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
        simulate(fixed(3000, 50, 90, 400.0, seed=3), limits=TIGHT, out=tmp_path / "run", progress=interrupt)
    run = load_run(tmp_path / "run")
    assert run.manifest["complete"] is False
    assert run.manifest["stopped_by"] == "KeyboardInterrupt"
    assert 0 < run.summary["requests_finished"] < 3000
    assert run.steps.num_rows > 0
    assert "unfinished" in run.requests["status"].to_pylist()


def test_parts_of_a_phase_add_up_to_end_to_end() -> None:
    for row in simulate(crowd(), "hybrid:budget.blocks=5,window=8", TIGHT).requests.to_pylist():
        parts = [value for name, value in row.items() if name.endswith("_s") and name not in MOMENTS]
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
    """Leading-block hits lie near those of an LRU cache of the pool's size (traces README: .0841 at 1,000)."""
    load = read_trace(SHARED / "traces" / "mooncake_synthetic_trace.jsonl")
    run = replay(load, "full-kv", limits=Limits(num_blocks=1000, block_size=512, max_batched_tokens=16384))
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

"""The policy `vllm` decides as vLLM V1's own scheduler does, step for step.

The goldens were made by vLLM's classes; random workloads are compared with a second model that was
written from the text of the rules (`tests/policies/vllm_model.py`).
"""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.policies.vllm_goldens import (
    VllmRequest,
    digest_of,
    drive,
    goldens,
    limits_of,
    requests_of,
    spec_of,
    tiny_requests_of,
)
from tests.policies.vllm_model import Model
from tests.shared import SHARED, needs_shared
from tests.sim.cases import simulate
from zlab.policies.core.invariants import CheckedScheduler
from zlab.policies.core.plan import ConfigError, SchedulerLimits
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.spec import load_policy
from zlab.sim.replay import replay
from zlab.traces.formats import read_trace
from zlab.traces.schema import Reason
from zlab.traces.synthetic import fixed
from zlab.traces.workload import TraceRequest

GOLDENS = goldens()
TINY = {run["name"]: run for run in GOLDENS.get("tiny", ())}
# the others take a minute: `python -m tests.policies.vllm_goldens` compares all of them
LARGE = ("W2-8k-sync", "W2-8k-async", "W2-512-sync", "W2-8k-sync-priority4")
CONFIG: dict[str, Any] = {
    "num_blocks": 12,
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "max_model_len": 40960,
    "async_scheduling": False,
    "prefix_caching": True,
    "policy": "fcfs",
    "watermark": 0.0,
    "long_prefill_token_threshold": 0,
    "scheduler_reserve_full_isl": True,
}


@needs_shared
@pytest.mark.parametrize("name", [name for name, run in TINY.items() if not run["counts"]["stuck"]])
def test_every_step_of_a_tiny_case(name: str) -> None:
    run = TINY[name]
    scheduler = drive(tiny_requests_of(run), run["config"])
    assert digest_of(scheduler.log) == run["counts"]["digest"]
    for row, step in zip(scheduler.log, run["log"], strict=True):
        assert row[4:] == [step["free_blocks"], len(step["running"]), len(step["waiting"])]


@needs_shared
@pytest.mark.parametrize("name", LARGE)
def test_every_step_of_a_large_run(name: str) -> None:
    run = GOLDENS["runs"][name]
    scheduler = drive(requests_of(run), run["config"])
    assert digest_of(scheduler.log) == run["counts"]["digest"]


@needs_shared
@pytest.mark.parametrize("name", ["W1-8k-sync", "W2-8k-async"])
def test_the_counts_of_a_replay(name: str) -> None:
    """A replay takes uneventful steps at once and counts the same."""
    run = GOLDENS["runs"][name]
    workload = read_trace(SHARED / "workloads" / f"{run['workload']}.jsonl")
    found = simulate(workload, spec_of(run["config"]), limits_of(run["config"])).summary
    counts = run["counts"]
    assert found["steps"] == counts["steps"]
    assert found["prefill_tokens"] == counts["prefill_tokens"]
    assert found["preemptions"] == counts["preemptions"]
    assert found["running_max"] == counts["max_running"]
    assert found["steps_to_90pct"] == counts["step_90pct"]
    hits = counts["hit_tokens_first"] + counts["hit_tokens_resumed"]
    assert found["prefix_hit_tokens"] == hits


@needs_shared
@pytest.mark.parametrize("name", ["tiny3-never-fits", "tiny4-prompt-never-fits"])
def test_what_vllm_never_serves_is_refused(name: str) -> None:
    """vLLM's queue stands still for ever behind such a request; here the others are served."""
    run = TINY[name]
    scheduler = drive(tiny_requests_of(run), run["config"])
    ends = {request.id: (request.status.name, request.reason) for request in scheduler.ended}
    assert ends == {"a": ("REFUSED", Reason.NEVER_FITS), "b": ("FINISHED", Reason.STOP)}


def random_case(seed: int) -> tuple[dict[str, Any], list[VllmRequest]]:
    """Return a configuration and requests that the pool can hold one by one."""
    rng = Random(seed)
    size = rng.choice((1, 2, 4, 8))
    config = CONFIG | {
        "num_blocks": rng.randint(4, 30),
        "block_size": size,
        "max_num_batched_tokens": rng.choice((3, 5, 8, 16, 32)),
        "max_num_seqs": rng.choice((1, 2, 4, 8)),
        "max_model_len": rng.choice((40960, 30)),
        "async_scheduling": rng.random() < 0.4,
        "prefix_caching": rng.random() < 0.85,
        "policy": rng.choice(("fcfs", "priority")),
        "watermark": rng.choice((0.0, 0.05, 0.2)),
        "long_prefill_token_threshold": rng.choice((0, 0, 2, 5)),
        "scheduler_reserve_full_isl": rng.random() < 0.8,
    }
    pool = (config["num_blocks"] - 1) * size
    most = min(pool, config["max_model_len"])
    requests = []
    for number in range(rng.randint(2, 12)):
        length = rng.randint(1, max(1, min(most - 1, 6 * size)))
        family, common = rng.randint(0, 2), rng.randint(0, length)
        prompt = tuple(
            family * 1000 + place if place < common else 100_000 + number * 1000 + place
            for place in range(length)
        )
        output = rng.randint(1, max(1, min(pool - length + 1, 8 * size, 30)))
        arrival = rng.randint(1, rng.choice((1, 20)))
        requests.append(VllmRequest(str(number), prompt, output, rng.randint(0, 2), arrival))
    return config, sorted(requests, key=lambda request: request.arrival_step)


def test_random_workloads_against_a_second_model() -> None:
    num_preempted = num_hits = 0
    for seed in range(120):
        config, requests = random_case(seed)
        expected = Model(config).run(requests)
        found = drive(requests, config).log
        assert found == expected, f"seed {seed}: {config}"
        num_preempted += sum(len(row[3]) for row in expected)
        num_hits += sum(hit > 0 for row in expected for _, _, hit in row[1])
    assert num_preempted > 50
    assert num_hits > 50


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("prefix.findable", "computed"),
        ("prefix.copies", "newest"),
        ("prefix.reuse", "released"),
        ("admission.allocate", "sequence"),
        ("admission.null_blocks", "0"),
        ("admission.watermark_rounding", "up"),
        ("batching", "mixed"),
    ],
)
def test_every_rule_matters(setting: str, value: str) -> None:
    """With any one rule left out some random workload is decided differently."""
    for seed in range(300):
        config, requests = random_case(seed)
        if not config["prefix_caching"] or config["async_scheduling"]:
            continue
        spec = spec_of(config) + f",{setting}={value}"
        if setting == "batching":
            spec = spec.replace("max_chunk", "batching.max_chunk")
        if drive(requests, config, spec).log != drive(requests, config).log:
            return
    raise AssertionError(f"{setting}={value} changes nothing")


@pytest.mark.parametrize("base", ["hybrid:tokens=16,window=2", "constrained:tokens=16,window=2"])
@pytest.mark.parametrize(
    "settings",
    [
        "batching=running-order",
        "admission.allocate=chunk,batching.max_chunk=5",
        "admission.reserve=chunk,batching=running-order",
        "null_blocks=2,findable=planned,copies=all,reuse=unmatchable",
        "batching=running-order,asynchronous=true",
        "order=strict-priority,preemption=least-urgent,batching=running-order,admission.allocate=chunk",
        "preemption=cost-aware",
    ],
)
def test_each_rule_works_with_a_block_budget(base: str, settings: str) -> None:
    """The rules are choices of any policy; the invariants hold and every request ends."""
    workload = fixed(num_requests=14, prompt=21, output=40, rate_per_s=2000.0, seed=0)
    limits = SchedulerLimits(40, block_size=4, max_batched_tokens=24, max_running=8)
    policy = load_policy(f"{base},{settings}")
    run = replay(workload, policy, limits=limits, make_scheduler=CheckedScheduler)
    assert run.summary["requests_finished"] == 14
    assert run.summary["output_tokens"] == 14 * 40


def test_a_long_prompt_takes_part_of_a_step_only() -> None:
    """A bound on the chunk lets ten short prompts into the first step beside a long one."""
    prompts = [32_000, *[100] * 10]
    requests = [
        TraceRequest(id=str(number), prompt_tokens=prompt, output_tokens=4)
        for number, prompt in enumerate(prompts)
    ]
    first = {}
    for spec in ("hybrid", "hybrid:max_chunk=4096"):
        scheduler = Scheduler(load_policy(spec), SchedulerLimits(400, block_size=256))
        for request in requests:
            scheduler.submit(request, 0)
        plan = scheduler.plan(0)
        assert plan is not None
        first[spec] = [chunk.count for chunk in plan.prefills]
    assert first["hybrid"] == [8192]
    assert first["hybrid:max_chunk=4096"] == [4096, *[100] * 10]


def test_null_blocks_are_never_given_out() -> None:
    limits = SchedulerLimits(num_blocks=4, block_size=4)
    scheduler = Scheduler(load_policy("vllm"), limits)
    assert scheduler.limits == limits
    assert scheduler.num_usable_blocks == scheduler.stats().num_free_blocks == 3
    scheduler.submit(TraceRequest(id="a", prompt_tokens=12, output_tokens=1), 0)
    plan = scheduler.plan(0)
    assert plan is not None
    assert plan.prefills[0].request.table == [1, 2, 3]
    with pytest.raises(ConfigError, match="4 null blocks leave no block of a pool of 4"):
        Scheduler(load_policy("vllm:null_blocks=4"), limits)


def test_a_request_keeps_its_blocks_while_its_last_token_returns() -> None:
    """Asynchronous steps: the blocks are free one step later, the end is when the token came."""
    config = CONFIG | {"async_scheduling": True}
    requests = [VllmRequest("a", (1, 2, 3), 2), VllmRequest("b", (4, 5, 6), 5)]
    scheduler = drive(requests, config)
    assert [row[5] for row in scheduler.log] == [2, 2, 2, 1, 1, 1, 0]
    synchronous = drive(requests, CONFIG)
    assert [row[5] for row in synchronous.log] == [2, 2, 1, 1, 1, 0]
    for ours in (scheduler, synchronous):
        assert [request.finish_ns for request in ours.ended] == [1, 4]


def test_an_abort_gives_blocks_back_in_vllms_order() -> None:
    for asynchronous in (False, True):
        config = CONFIG | {"async_scheduling": asynchronous}
        requests = [
            VllmRequest(name, tuple(range(10 * row, 10 * row + 7)), 9)
            for row, name in enumerate("ab")
        ]
        ours = drive(requests, config, steps=4)
        ours.abort("a", ours.state.now_ns)
        assert ours.stats().num_running == 1
        assert ours.stats().num_free_blocks == 11 - 3
        ours.submit(TraceRequest(id="c", prompt_tokens=4, output_tokens=1), ours.state.now_ns)
        assert ours.plan(ours.state.now_ns) is not None
        assert ours.state.running[2].table == [5], "its block that was not full is reused first"


def test_an_engine_refuses_what_only_the_simulator_runs() -> None:
    for spec in ("vllm:asynchronous=true", "vllm:preemption=least-urgent,withdrawn=findable"):
        reason = load_policy(spec).simulation_only
        assert reason is not None
        assert "only the simulator runs it" in reason
    assert load_policy("vllm").simulation_only is None
    assert replace(load_policy("vllm"), name="other").simulation_only is None

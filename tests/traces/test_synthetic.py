"""Made-up workloads: the right shape, the right sharing, the same for the same seed."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from zlab.traces.synthetic import (
    REASONING_SHAPES,
    ChatShape,
    Gamma,
    LogNormal,
    OnOff,
    Poisson,
    ReasoningShape,
    SharedPrefixShape,
    bursty,
    chat,
    fixed,
    generator,
    reasoning,
    shared_prefix,
)
from zlab.traces.workload import RequestTable, TraceError, TraceRequest, Workload
from zlab.traces.workload_stats import describe, prefix_reuse

MAKERS: dict[str, Callable[[int], Workload]] = {
    "reasoning": lambda seed: reasoning("aime24", seed),
    "chat": lambda seed: chat(300, seed=seed),
    "shared-prefix": lambda seed: shared_prefix(300, seed=seed),
    "bursty": lambda seed: bursty(
        300, OnOff(20, 3, 9), LogNormal(5, 1, 900), LogNormal(4, 1, 900), seed
    ),
    "fixed": lambda seed: fixed(300, seed=seed),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_the_seed_decides(kind: str) -> None:
    make = MAKERS[kind]
    assert make(1).sha256 == make(1).sha256
    assert make(1).sha256 != make(2).sha256
    assert [*make(1)] == [*make(1)]
    assert len({request.id for request in make(1)}) == len(make(1))
    times = [request.arrival_s or 0.0 for request in make(1)]
    assert times == sorted(times)
    assert times[0] == 0.0


def test_hash_randomisation_changes_nothing() -> None:
    script = (
        "from tests.traces.test_synthetic import MAKERS; print([m(5).sha256 for m in "
        "MAKERS.values()])"
    )
    root = Path(__file__).resolve().parents[2]
    printed = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "4711")
    }
    assert printed == {f"{[make(5).sha256 for make in MAKERS.values()]}\n"}


@pytest.mark.parametrize(
    ("name", "mean"), [("aime24", 15_100), ("amc23", 9_200), ("math500", 5_400)]
)
def test_reasoning_shapes_have_their_means(name: str, mean: int) -> None:
    shape = REASONING_SHAPES[name]
    many = ReasoningShape(3_000, shape.mu, shape.sigma, samples=4)
    outputs = [request.output_tokens or 0 for request in reasoning(many)]
    assert np.mean(outputs) == pytest.approx(mean, rel=0.04)
    assert max(outputs) <= 32_768
    assert len(reasoning(name)) == shape.num_problems * 32


def test_between_problem_share_of_the_variance() -> None:
    shape = ReasoningShape(2_000, 8.0, 0.5, samples=16, cap=10**6)
    logs = np.log([request.output_tokens or 1 for request in reasoning(shape)]).reshape(2_000, 16)
    within = logs.var(axis=1, ddof=1).mean()
    between = logs.mean(axis=1).var(ddof=1) - within / 16
    assert between / (between + within) == pytest.approx(0.6, abs=0.03)
    assert between + within == pytest.approx(0.25, rel=0.05)


def test_samples_of_a_problem_share_the_prompt_and_no_others() -> None:
    workload = reasoning("amc23", seed=9)
    prompts: dict[str, set[tuple[int, ...] | None]] = {}
    for request in workload:
        prompts.setdefault(request.id.split("-")[0], set()).add(request.prompt_ids)
        assert 80 <= request.prompt_tokens <= 150
        assert request.prompt_ids is not None
        assert len(request.prompt_ids) == request.prompt_tokens
    assert {len(found) for found in prompts.values()} == {1}
    assert len({ids for found in prompts.values() for ids in found}) == 40


def test_fixed_is_the_benchmark_workload() -> None:
    workload = fixed()
    assert len(workload) == 4_000
    assert {(r.prompt_tokens, r.output_tokens, r.prefix_ids, r.prompt_ids) for r in workload} == {
        (512, 1024, None, None)
    }
    assert describe(workload).rate_per_s == pytest.approx(20, rel=0.05)


@pytest.mark.parametrize(
    ("process", "cv"), [(Poisson(5.0), 1.0), (Gamma(5.0, 3.0), 3.0), (Gamma(5.0, 0.5), 0.5)]
)
def test_arrivals_have_their_rate_and_variation(process: Poisson | Gamma, cv: float) -> None:
    gaps = np.diff(process.times(generator(1), 40_000))
    assert gaps.mean() == pytest.approx(0.2, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)


def test_on_off_is_silent_between_bursts() -> None:
    process = OnOff(on_rate_per_s=50, mean_on_s=4, mean_off_s=12)
    times = process.times(generator(2), 60_000)
    assert len(times) / times[-1] == pytest.approx(50 * 4 / 16, rel=0.1)
    gaps = np.diff(times)
    long_gaps = gaps[gaps > 1.0]
    assert long_gaps.mean() - 1.0 == pytest.approx(12, rel=0.15)
    assert np.median(gaps) < 0.03
    # With equal rates in both phases nothing but a Poisson process is left.
    even = np.diff(OnOff(5, 4, 12, off_rate_per_s=5).times(generator(2), 40_000))
    assert even.std() / even.mean() == pytest.approx(1, rel=0.05)


def test_chat_prompts_grow_within_a_session() -> None:
    shape = ChatShape(num_system_prompts=3, system_tokens=100, block_size=16)
    workload = chat(2_000, shape, seed=3)
    previous: dict[str, TraceRequest] = {}
    heads = set()
    for request in workload:
        ids = request.prefix_ids
        assert ids is not None
        assert len(ids) == request.prompt_tokens // 16
        heads.add(ids[:6])
        if request.parent is None:
            assert request.turn == 1
            assert request.think_s is None
        else:
            earlier = previous[request.parent]
            assert earlier.session == request.session
            assert earlier.prefix_ids is not None
            assert earlier.output_tokens is not None
            assert request.prompt_tokens > earlier.prompt_tokens + earlier.output_tokens
            assert ids[: len(earlier.prefix_ids)] == earlier.prefix_ids
            assert (request.arrival_s or 0) > (earlier.arrival_s or 0)
        previous[request.id] = request
    assert len(heads) == 3
    turns = [request.turn or 0 for request in workload]
    assert np.mean([turn == 1 for turn in turns]) == pytest.approx(1 / 4, abs=0.04)


def test_chat_sessions_share_only_their_system_prompt() -> None:
    owners: dict[int, set[str | None]] = {}
    for request in chat(1_500, ChatShape(system_tokens=64), seed=4):
        for block in (request.prefix_ids or ())[4:]:
            owners.setdefault(block, set()).add(request.session)
    assert {len(sessions) for sessions in owners.values()} == {1}


def test_chat_keeps_to_its_context() -> None:
    shape = ChatShape(mean_turns=50, max_context=5_000, system_tokens=10)
    assert max(r.prompt_tokens + (r.output_tokens or 0) for r in chat(1_000, shape)) <= 5_000


def test_shared_prefix_groups() -> None:
    shape = SharedPrefixShape(num_groups=4, shared_tokens=160, skew=1.0, block_size=16)
    workload = shared_prefix(4_000, shape, seed=1)
    classes = describe(workload).classes
    weights = np.array([1, 1 / 2, 1 / 3, 1 / 4])
    assert [classes[f"group-{g}"] for g in range(4)] == pytest.approx(
        list(4_000 * weights / weights.sum()), rel=0.12
    )
    # Everything but the four first users finds exactly its group's ten blocks.
    assert prefix_reuse(workload).num_reused_blocks == 10 * (4_000 - 4)


def test_a_long_chat_is_held_by_column() -> None:
    workload = chat(200_000)
    assert isinstance(workload.requests, RequestTable)
    last = workload.requests[-1]
    assert last == workload.requests[199_999]
    assert last.prefix_ids is not None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: reasoning("aime25"), "unknown reasoning shape 'aime25'; did you mean 'aime24'"),
        (lambda: ReasoningShape(0, 8, 1), "num_problems is 0"),
        (lambda: ReasoningShape(1, 8, 1, between_share=1.5), "between_share is 1.5, must be 0..1"),
        (lambda: ReasoningShape(1, 8, -1), "sigma -1"),
        (
            lambda: ReasoningShape(1, 8, 1, prompt_highest=5),
            "prompt_highest is 5, must be a whole number >= 80",
        ),
        (lambda: fixed(0), "num_requests is 0"),
        (lambda: fixed(1, rate_per_s=0), "rate_per_s is 0"),
        (lambda: fixed(1, seed=-1), "seed is -1"),
        (lambda: Gamma(1, float("nan")), "cv is nan"),
        (lambda: OnOff(1, 1, 1, off_rate_per_s=2), "off_rate_per_s is 2, must be 0..1"),
        (lambda: ChatShape(max_context=100), "max_context is 100, must hold a longest first turn"),
        (lambda: ChatShape(mean_turns=0.5), "mean_turns is 0.5"),
        (lambda: SharedPrefixShape(skew=-1), "skew is -1"),
        (lambda: LogNormal(1, 1, cap=0), "cap is 0"),
    ],
)
def test_misuse_is_named(make: Callable[[], object], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        make()

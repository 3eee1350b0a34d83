"""Simulated times and blocks against what can be worked out by hand."""

import numpy as np
import pytest

from tests.sim.cases import LIMITS, cost_of, request, simulate, workload
from zlab.policies.core.plan import SchedulerLimits
from zlab.sim.cost_model import CostModel
from zlab.traces.metrics import column
from zlab.traces.synthetic import fixed


def test_a_single_request_takes_its_prefill_and_its_decodes() -> None:
    prompt, output = 100, 50
    run = simulate(workload(request("a", prompt, output, arrival_s=2.0)))
    cost = cost_of()
    prefill = cost.step_seconds(0, 0, prompt, prompt * (prompt + 1) // 2, 1)
    decodes = sum(cost.decode_seconds(1, context) for context in range(prompt + 1, prompt + output))
    row = run.requests.to_pylist()[0]
    assert row["first_token_s"] == pytest.approx(2.0 + prefill, abs=1e-8)
    assert row["finish_s"] == pytest.approx(2.0 + prefill + decodes, abs=1e-6)
    assert row["prefill_s"] == pytest.approx(prefill, abs=1e-8)
    assert row["decode_s"] == pytest.approx(decodes, abs=1e-6)
    assert run.steps.num_rows == output
    assert run.summary["tpot_s"]["mean"] == pytest.approx(decodes / (output - 1), abs=1e-8)


def test_a_chunked_prompt_takes_one_step_a_chunk() -> None:
    limits = SchedulerLimits(
        num_blocks=512, block_size=16, max_batched_tokens=64, max_running=8, max_model_len=8192
    )
    run = simulate(workload(request("a", 200, 1)), limits=limits)
    cost = cost_of()
    starts = [0, 64, 128, 192]
    counts = [64, 64, 64, 8]
    expected = [
        cost.step_seconds(0, 0, count, start * count + count * (count + 1) // 2, 1)
        for start, count in zip(starts, counts, strict=True)
    ]
    took = column(run.steps, "end_s") - column(run.steps, "start_s")
    assert took == pytest.approx(np.array(expected), abs=1e-8)
    assert run.requests.to_pylist()[0]["first_token_s"] == pytest.approx(sum(expected), abs=1e-7)


def test_blocks_of_one_request_follow_its_length() -> None:
    prompt, output, size = 37, 100, LIMITS.block_size
    run = simulate(workload(request("a", prompt, output)))
    used = LIMITS.num_blocks - column(run.steps, "free_blocks")
    lengths = [prompt] + [prompt + done for done in range(1, output)]
    assert used.tolist() == [-(-length // size) for length in lengths]
    wasted = used * size - column(run.steps, "stored_tokens")
    assert wasted.tolist() == [-length % size for length in lengths]


def test_blocks_of_one_compressed_request_never_exceed_its_budget() -> None:
    policy, size, budget = "hybrid:budget.blocks=4,window=8", 16, 4
    run = simulate(workload(request("a", 10, 400)), policy)
    used = LIMITS.num_blocks - column(run.steps, "free_blocks")
    assert used.max() == budget
    # it is full at budget * size positions, and again after every size tokens: from then on one
    # compression a block
    assert run.summary["compressions"] == (10 + 400 - 1 - (budget - 1) * size) // size - (
        (10 + 400 - 1 - (budget - 1) * size) % size == 0
    )


def test_waiting_time_of_one_server_with_equal_services() -> None:
    """M/D/1: with arrivals at rate r and service S, the mean wait is rho * S / (2 * (1 - rho))."""
    limits = SchedulerLimits(
        num_blocks=64, block_size=16, max_batched_tokens=4096, max_running=1, max_model_len=8192
    )
    cost = cost_of()
    prompt, output = 64, 8
    service = cost.step_seconds(0, 0, prompt, prompt * (prompt + 1) // 2, 1)
    service += sum(
        cost.decode_seconds(1, context) for context in range(prompt + 1, prompt + output)
    )
    rho = 0.7
    load = fixed(15_000, prompt, output, rho / service, seed=11)
    waits = column(simulate(load, limits=limits).requests, "queued_s")
    expected = rho * service / (2 * (1 - rho))
    assert waits.mean() == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("join", ["boundary", "blocking", "when_done"])
def test_a_compression_beside_nothing_takes_what_it_takes_alone(join: str) -> None:
    """One request, alone: it is compressed between two of its decodes, whatever the join rule."""
    policy = f"hybrid:budget.blocks=4,window=8,join={join}"
    run = simulate(workload(request("a", 10, 60)), policy)
    cost: CostModel = cost_of(policy)
    alone = cost.compression_seconds(64, 48)
    row = run.requests.to_pylist()[0]
    assert row["compressions"] == 1
    decodes = [10 + done for done in range(1, 55)] + [48 + more for more in range(1, 6)]
    expected = (
        cost.step_seconds(0, 0, 10, 55, 1)
        + sum(cost.decode_seconds(1, context) for context in decodes)
        + alone
    )
    assert row["finish_s"] == pytest.approx(expected, abs=1e-6)
    assert run.summary["compression_share"] == pytest.approx(alone / expected, rel=1e-4)

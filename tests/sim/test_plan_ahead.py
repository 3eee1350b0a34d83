"""Steps planned while the one before runs: who arrives meanwhile comes a step later, and nothing
else changes.
"""

from dataclasses import replace

import pytest

from tests.sim.cases import cost_of, request, simulate, workload
from zlab.sim.cost_model import CostModel
from zlab.traces.recording import Run
from zlab.traces.workload import Workload

# Every step takes one second, whatever it does.
SECOND = replace(
    cost_of(),
    step_s=1.0,
    weight_read_s=0.0,
    layer_token_s=0.0,
    head_row_s=0.0,
    request_s=0.0,
    kv_read_token_s=0.0,
    attention_pair_s=0.0,
)


def first_tokens(run: Run) -> dict[str, float]:
    return dict(
        zip(run.requests["id"].to_pylist(), run.requests["first_token_s"].to_pylist(), strict=True)
    )


def run_of(load: Workload, plan_ahead: bool, quiet: bool = True, cost: CostModel = SECOND) -> Run:
    return simulate(load, cost=cost, plan_ahead=plan_ahead, quiet=quiet)


def test_who_arrives_while_a_step_runs_waits_for_one_more() -> None:
    load = workload(
        request("a", 10, 9),
        request("b", 10, 2, arrival_s=2.5),
        request("c", 10, 2, arrival_s=20.25),
    )
    # a runs in steps that end at 1, 2, ... 9. The step from 3 to 4 was planned at 2, when b was not
    # there yet.
    assert first_tokens(run_of(load, False)) == {"a": 1.0, "b": 4.0, "c": 21.25}
    assert first_tokens(run_of(load, True)) == {
        "a": 1.0,
        "b": 5.0,
        "c": 21.25,
    }  # c finds the engine idle


def test_who_is_there_when_the_last_step_ends_starts_at_once() -> None:
    load = workload(request("a", 10, 2), request("b", 10, 1, arrival_s=1.5))
    assert first_tokens(run_of(load, True)) == {"a": 1.0, "b": 3.0}


@pytest.mark.parametrize("seed", range(3))
def test_stretches_change_nothing(seed: int) -> None:
    load = workload(
        *(request(str(i), 20 + 7 * i, 30 + seed, arrival_s=i * (3.3 + seed)) for i in range(12))
    )
    quiet, plain = (run_of(load, True, quiet) for quiet in (True, False))
    assert quiet.manifest["digest"] == plain.manifest["digest"]
    assert quiet.steps.equals(plain.steps)
    assert first_tokens(quiet) != first_tokens(run_of(load, False))


def test_a_closed_workload_decides_the_same() -> None:
    load = workload(*(request(str(i), 30 + i, 40 + 3 * i) for i in range(20)))
    ahead, not_ahead = (run_of(load, ahead, cost=cost_of()) for ahead in (True, False))
    assert ahead.manifest["digest"] == not_ahead.manifest["digest"]
    assert ahead.steps.equals(not_ahead.steps)

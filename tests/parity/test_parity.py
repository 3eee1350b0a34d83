"""Simulator and engine decide the same: equal digests on a closed workload, for every preset."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engine.engine_cases import prompt, request
from tests.parity.parity_cases import (
    CLOSED,
    POLICIES,
    WHEN_DONE,
    decided_again,
    in_simulation,
    on_engine,
    settings,
    workload,
)
from zlab.engine.model.loader import BUNDLED_PACKAGE
from zlab.engine.replay import Replayed, ReplaySettings, replay
from zlab.policies.spec import presets
from zlab.traces.recording import first_difference
from zlab.traces.workload import TraceRequest

ROOT = Path(__file__).resolve().parents[2]


def test_every_preset_is_looked_at() -> None:
    assert {name.split(":")[0] for name in POLICIES} == set(presets())


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_decisions_on_a_closed_workload(policy: str) -> None:
    of = on_engine(policy)
    summary = of.run.summary
    for figure in POLICIES[policy]:
        assert summary[figure] > 0, f"nothing to compare: {figure} is 0"
    assert summary["requests_finished"] == len(CLOSED)
    simulated = in_simulation(policy, of)
    assert first_difference(of.run.events, simulated.events) is None
    assert of.run.blocks.equals(simulated.blocks)
    assert summary["digest"] == simulated.summary["digest"]


def test_counts_that_do_not_depend_on_time_are_the_same() -> None:
    policy = "hybrid:tokens=40,window=4,comes_back=swap,slotted=true"
    of = on_engine(policy)
    simulated = in_simulation(policy, of).summary
    timed = {
        "wall_s",
        "makespan_s",
        "tokens_per_s",
        "requests_per_s",
        "seconds_to_90pct",
        "compression_share",
    }
    timed |= {
        "ttft_s",
        "tpot_s",
        "e2e_s",
        "slot_wait_s",
        "running_mean",
        "occupancy_mean",
        "wasted_slots_mean",
    }
    assert of.run.summary.keys() == simulated.keys()
    assert {k: v for k, v in of.run.summary.items() if k not in timed} == {
        k: v for k, v in simulated.items() if k not in timed
    }


def test_steps_hold_the_same_but_for_their_times() -> None:
    of = on_engine("hybrid:tokens=40,window=4")
    simulated = in_simulation("hybrid:tokens=40,window=4", of).steps.drop(["start_s", "end_s"])
    assert of.run.steps.drop(["start_s", "end_s"]).equals(simulated)
    starts, ends = (of.run.steps[name].to_numpy() for name in ("start_s", "end_s"))
    assert (ends >= starts).all()
    assert (starts[1:] >= ends[:-1]).all()


def test_a_join_that_polls_is_told_what_the_engine_saw() -> None:
    of = on_engine(WHEN_DONE)
    assert of.run.summary["compressions"] > 0
    again = decided_again(of)
    assert first_difference(of.run.events, again.tables.table("events")) is None
    assert again.digest == of.run.summary["digest"]


def test_another_workload_has_another_digest() -> None:
    one, other = on_engine("full-kv", CLOSED[:6]), on_engine("full-kv", CLOSED[:5])
    assert one.run.summary["digest"] != other.run.summary["digest"]


@pytest.mark.skipif(
    find_spec(BUNDLED_PACKAGE) is None, reason=f"{BUNDLED_PACKAGE} is not installed"
)
def test_smollm2_decides_as_the_simulator_does() -> None:
    shared = prompt(1, 32)
    requests = [request(f"s{n}", [*shared, *prompt(n + 2, 3 + n)], 10 + 4 * n) for n in range(6)]
    policy = "hybrid:tokens=48,window=4"
    of = replay_smollm2(requests, policy)
    for figure in ("preemptions", "compressions", "prefix_hit_tokens"):
        assert of.run.summary[figure] > 0
    assert in_simulation(policy, of).summary["digest"] == of.run.summary["digest"]


def replay_smollm2(requests: list[TraceRequest], policy: str) -> Replayed:
    chosen = replace(settings(policy, num_blocks=9, block_size=16, host_blocks=0), model="smollm2")
    return replay(workload(requests), chosen, ReplaySettings(at_once=True))


def test_hash_randomisation_changes_nothing() -> None:
    """The digest of a process with another hash seed is the one that this process finds."""
    policy, seed = "hybrid:tokens=40,window=4", "12345"
    code = (
        "from tests.parity.parity_cases import on_engine, decided_again\n"
        f"of = on_engine({policy!r})\n"
        "print(of.run.summary['digest'], decided_again(of).digest)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert set(run.stdout.split()) == {on_engine(policy).run.summary["digest"]}

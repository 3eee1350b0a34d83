"""Changes of the policy in simulation: the same by stretches and step by step, and what is recorded of them."""

from typing import Any

import pytest

from policies.changes import read_changes
from policies.core.errors import ConfigError
from policies.core.events import Kind
from policies.core.limits import Limits
from policies.spec import PolicyError, load_policy
from sim.changing import Change, check_order, read_change
from sim.errors import SimError
from sim.replay import Run, load_run, replay
from sim.scenario import Scenario
from tests.sim.simulate import request, simulate, workload
from traces.occupancy import replay_blocks
from traces.workload import Workload

LIMITS = Limits(
    num_blocks=60, block_size=16, max_batched_tokens=256, max_running=24, max_model_len=4000, host_blocks=60
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
        request(f"r{n}", 40 + n % 9, 60 + 17 * n % 150, n * gap_s, prompt_ids=(*shared, *(1000 + n,) * (n % 9)))
        for n in range(24)
    ]
    return workload(*asked)


def changing(apart: int = 60, specs: tuple[str, ...] = TURNS) -> list[Change]:
    return [Change(apart * place, load_policy(spec)) for place, spec in enumerate(specs, 1)]


def run(load: Workload | None = None, changes: list[Change] | None = None, **more: Any) -> Run:
    return simulate(load or timed(), "full-kv", LIMITS, changes=changing() if changes is None else changes, **more)


@pytest.mark.parametrize("gap_s", [0.0, 0.05, 0.4])
@pytest.mark.parametrize("apart", [1, 60, 137])
def test_stretches_end_before_a_change(gap_s: float, apart: int) -> None:
    quick, plain = (run(timed(gap_s), changing(apart), quiet=quiet) for quiet in (True, False))
    assert len(quick.manifest["policy_changes"]) == min(quick.manifest["num_steps"] // apart, len(TURNS)) >= 2
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
    rows = [row for row in found.events.to_pylist() if row["kind"] == Kind.POLICY]
    assert [row["step"] for row in rows] == [change.step for change in changes] == [60, 120, 180, 240, 300]
    starts = dict(zip(found.steps["step"].to_pylist(), found.steps["start_s"].to_pylist(), strict=True))
    assert [change.time_ns * 1e-9 for change in changes] == pytest.approx([starts[change.step] for change in changes])
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
    freed = [row for row in done.events.to_pylist() if row["kind"] == Kind.POLICY and row["num_blocks"]]
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

"""The cost model over columns is the cost model step by step, and sharing in closed form is what the device does."""

from dataclasses import replace

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core.policy import Join
from sim.cost import CostModel
from sim.device import Device
from sim.step_times import run_seconds, step_seconds, together_seconds
from tests.sim.made_up import MODEL, TRUTH

COST = CostModel(gpu="h200", model=MODEL.name, source="made up", **TRUTH)
NS = 1e9


def test_columns_are_priced_like_single_steps() -> None:
    generator = np.random.default_rng(3)
    counts = generator.integers(0, 300, (200, 5))
    counts[::3, 2:] = 0  # decodes alone
    counts[::7, :2] = 0
    counts[::11] = 0
    columns = dict(
        zip(("decodes", "context_tokens", "prefills", "prefill_tokens", "prefill_pairs"), counts.T, strict=True)
    )
    columns["prefill_tokens"] = columns["prefill_tokens"] * 20
    before = generator.uniform(0.0, 0.01, 200)
    found = step_seconds(
        COST, {"before_s": before} | {name: values.astype(np.float64) for name, values in columns.items()}
    )
    for place, seconds in enumerate(found):
        decodes, context, prefills, tokens, pairs = (int(values[place]) for values in columns.values())
        expected = (
            COST.step_seconds(decodes, context, tokens, pairs, prefills, before[place]) if decodes or prefills else 0.0
        )
        assert seconds == pytest.approx(expected, rel=1e-12)
    assert (found == 0.0).sum() >= 18


@settings(max_examples=60, deadline=None)
@given(
    work=st.integers(0, 10**7),
    compression=st.integers(0, 10**7),
    share=st.floats(0.01, 0.95),
    rate=st.floats(0.01, 1.0),
)
def test_together_is_what_the_device_does(work: int, compression: int, share: float, rate: float) -> None:
    env = simpy.Environment(initial_time=0)
    device = Device(env, share, rate)
    env.run(until=simpy.AllOf(env, [device.compute(work), device.compress(compression)]))
    closed = together_seconds(np.array(work / NS), np.array(compression / NS), share, rate)
    assert float(closed) * NS == pytest.approx(env.now, abs=4)


def test_a_run_by_hand() -> None:
    """Beside a compression a step keeps 3/4 of its speed, and the compression half of its own."""
    cost = replace(COST, compression_share=0.25, compression_rate=0.5)
    work, started, swaps = [3.0, 3.0, 3.0, 3.0], [0.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 5.0]
    assert run_seconds(cost, work, started, swaps, Join.BLOCKING).tolist() == [3.0, 7.0, 3.0, 5.0]
    # step 1 ends at 3 / 0.75 = 4, when 2 of the 4 are done; the step waits for the other 2
    assert run_seconds(cost, work, started, swaps, Join.BOUNDARY).tolist() == [3.0, 6.0, 3.0, 5.0]
    # or the next step has them beside it: 2 / 0.5 = 4 s, in which it does all of its 3
    assert run_seconds(cost, work, started, swaps, Join.WHEN_DONE).tolist() == [3.0, 4.0, 4.0, 5.0]
    # a short one: 1 / 0.5 = 2 s, in which the step does 1.5; the rest at full speed
    short = run_seconds(cost, work, [0.0, 1.0, 0.0, 0.0], swaps, Join.WHEN_DONE)
    assert short.tolist() == [3.0, 3.5, 3.0, 5.0]

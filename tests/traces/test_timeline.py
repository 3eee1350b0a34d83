""""""

import numpy as np
import pytest

from tests.traces.cases import BLOCK, LIMITS, POLICIES, SWAPPING, TIGHT, conversations, watched
from zlab.policies.core.plan import SchedulerLimits
from zlab.sim.replay import replay
from zlab.traces.metrics import wasted_slots
from zlab.traces.schema import PHASES
from zlab.traces.timeline import holdings_of, phases_of

LIMITED = SchedulerLimits(
    96, BLOCK, 512, 8, 4096
)  # more run than a step may take: nano-vllm pauses some
# a step that only prefills notes no tokens of those who decode: its stored_tokens says less than
# there is
PLAIN = tuple(case for case in POLICIES if not case[0].startswith(("nano-vllm", "zipage")))
CASES = (*POLICIES, ("nano-vllm", LIMITED), (f"hybrid:{TIGHT},budget=adaptive,tokens=96", LIMITS))


@pytest.mark.parametrize(("policy", "limits"), [*POLICIES, ("nano-vllm", LIMITED)])
def test_phases_add_up_to_the_columns_of_the_requests(policy: str, limits: SchedulerLimits) -> None:
    run = replay(conversations(), policy, limits=limits)
    phases = phases_of(run.events, run.steps, run.manifest, run.requests)
    totals = phases.totals(run.requests["number"].to_numpy())
    columns = np.stack([run.requests[f"{phase}_s"].to_numpy() for phase in PHASES], axis=1)
    assert np.abs(totals - columns).max() < 1e-9
    life = run.requests["finish_s"].to_numpy() - run.requests["arrival_s"].to_numpy()
    assert np.abs(totals.sum(axis=1) - life).max() < 1e-9


def test_the_small_runs_use_every_phase() -> None:
    seen = set()
    for policy, limits in (
        (f"hybrid:{TIGHT}", LIMITS),
        (POLICIES[3][0], SWAPPING),
        ("nano-vllm", LIMITED),
    ):
        run = replay(conversations(), policy, limits=limits)
        seen |= set(phases_of(run.events, run.steps, run.manifest, run.requests).phase.tolist())
    assert {PHASES[phase] for phase in seen} >= set(PHASES) - {"slot_wait"}


def test_a_wait_for_a_slot_is_seen() -> None:
    run = replay(conversations(), f"hybrid:{TIGHT},num_slots=1", limits=LIMITS)
    phases = phases_of(run.events, run.steps, run.manifest, run.requests)
    assert phases.totals(run.requests["number"].to_numpy())[:, PHASES.index("slot_wait")].sum() > 0


def test_intervals_follow_each_other_without_gap() -> None:
    run = replay(conversations(), POLICIES[3][0], limits=SWAPPING)
    phases = phases_of(run.events, run.steps, run.manifest, run.requests)
    same = phases.request[1:] == phases.request[:-1]
    assert (phases.start_s[1:][same] == phases.end_s[:-1][same]).all()
    assert (phases.end_s > phases.start_s).all()
    assert (phases.phase[1:][same] != phases.phase[:-1][same]).any()


def test_without_the_requests_table_arrivals_are_rounded_up_to_a_step() -> None:
    run = replay(conversations(), "full-kv", limits=LIMITS)
    exact = phases_of(run.events, run.steps, run.manifest, run.requests)
    rough = phases_of(run.events, run.steps, run.manifest)
    decode = PHASES.index("decode")
    numbers = run.requests["number"].to_numpy()
    assert np.array_equal(exact.totals(numbers)[:, decode], rough.totals(numbers)[:, decode])
    queued = PHASES.index("queued")
    assert (rough.totals(numbers)[:, queued] <= exact.totals(numbers)[:, queued] + 1e-12).all()


def test_a_living_request_is_in_its_phase_until_now() -> None:
    run = replay(conversations(), "full-kv", limits=LIMITS)
    half = run.steps.num_rows // 2
    steps = run.steps.slice(0, half)
    events = run.events.filter(np.asarray(run.events["step"].to_numpy() < half))
    phases = phases_of(events, steps, run.manifest)
    now = steps["end_s"].to_numpy()[-1]
    assert (phases.end_s <= now).all()
    last = np.append(phases.request[1:] != phases.request[:-1], True)
    assert (phases.end_s[last] == now).sum() > 1


@pytest.mark.parametrize(("policy", "limits"), PLAIN)
def test_holdings_add_up_to_the_steps_table(policy: str, limits: SchedulerLimits) -> None:
    run = replay(conversations(), policy, limits=limits)
    held = holdings_of(run.events, run.steps, run.manifest)
    steps = 2 * np.arange(run.steps.num_rows)
    twice = run.steps["shared_extra"].to_numpy()
    tokens = held.tokens_at(held.numbers(), steps).sum(axis=0) - twice * limits.block_size
    assert (tokens == run.steps["stored_tokens"].to_numpy()).all()
    blocks = held.blocks_at(held.numbers(), steps).sum(axis=0)
    used = limits.num_blocks - run.steps["free_blocks"].to_numpy()
    in_flight = run.steps["compressing"].to_numpy() > 0  # fresh targets are no table's yet
    assert (blocks - twice == used)[~in_flight].all()
    waste = used * limits.block_size - tokens
    assert (waste == wasted_slots(run.steps, limits.num_blocks, limits.block_size)).all()


@pytest.mark.parametrize(("policy", "limits"), CASES)
def test_blocks_held_are_the_tables_of_the_scheduler(
    policy: str, limits: SchedulerLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, witness = watched(policy, limits)
    held = holdings_of(run.events, run.steps, run.manifest)
    numbers, steps = held.numbers(), 2 * np.arange(run.steps.num_rows)
    blocks = held.blocks_at(numbers, steps)
    for step, tables in enumerate(witness.tables):
        assert {int(n): int(b) for n, b in zip(numbers, blocks[:, step], strict=True) if b} == {
            number: len(table) for number, table in tables.items()
        }

"""The laws across changes of the policy, at random steps, among all presets and random policies."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core import replacing
from policies.core.blocks import BlockPool
from policies.core.decoding import Decoding
from policies.core.errors import StuckError
from policies.core.events import Kind
from policies.core.limits import Limits
from policies.core.policy import NeedsSlot, Policy
from policies.core.request import Phase, Request
from policies.core.scheduler import Scheduler
from policies.core.slot_table import SlotTable
from policies.core.state import State
from policies.core.waiting import WaitingLine
from policies.spec import load_policy
from tests.policies import laws
from tests.policies.cases import Draw, cases, policies, preset_policies
from tests.policies.drive import Case, drive, job
from tests.policies.test_laws import all_laws

EXAMPLES = 60
Patch = pytest.MonkeyPatch


@st.composite
def changing(draw: Draw, presets_only: bool = False, disturbed: bool = True) -> Case:
    """A case in which other policies take over, once or several times, also twice before one step."""
    case = draw(cases(presets_only, disturbed))
    others = preset_policies(case.limits)
    if not presets_only:
        others = st.one_of(others, policies(case.limits))
    steps = sorted(draw(st.lists(st.integers(0, 60), min_size=1, max_size=5)))
    return replace(case, changes=tuple((step, draw(others)) for step in steps))


@settings(max_examples=2 * EXAMPLES)
@given(changing(disturbed=False))
def test_laws_hold_across_changes_and_quiet_stretches_change_nothing(case: Case) -> None:
    run = drive(case)
    all_laws(run, disturbed=False)
    laws.same_decisions(run, drive(case, fast=True))


@settings(max_examples=EXAMPLES)
@given(changing())
def test_laws_hold_across_changes_with_aborts_failures_and_early_stops(case: Case) -> None:
    run = drive(case)
    all_laws(run, disturbed=True)
    laws.same_decisions(run, drive(case, fast=True))


@settings(max_examples=EXAMPLES)
@given(changing(presets_only=True, disturbed=False))
def test_laws_hold_across_changes_between_presets(case: Case) -> None:
    run = drive(case)
    all_laws(run, disturbed=False)
    laws.same_decisions(run, drive(case, fast=True))


# the same laws are seen to fail on faults planted into the change

LIMITS = Limits(num_blocks=16, block_size=4, max_batched_tokens=64, max_running=16, max_model_len=400, host_blocks=20)


def crowded_change(*specs: str, limits: Limits = LIMITS) -> Case:
    """Requests that share a beginning and do not fit together; every 12 steps the next policy takes over."""
    ids = tuple(range(8))
    jobs = tuple(
        job(f"r{n}", 0, 26 + 3 * n, 1500 * n, ids=(*ids[: 4 * (n % 3)], *range(50 + n, 55 + n))) for n in range(6)
    )
    named = [load_policy(spec) for spec in specs]
    changes = tuple((12 * place, policy) for place, policy in enumerate(named[1:], 1))
    return Case(named[0], limits, jobs, copy_ns=9000, changes=changes)


SMALL = "budget.tokens=8,window=2"
SCENARIOS = (
    crowded_change("full-kv", f"hybrid:{SMALL}", "full-kv", f"hybrid:{SMALL}"),
    crowded_change(f"hybrid:{SMALL}", "hybrid:budget.tokens=20,window=4", f"constrained:{SMALL}"),
    crowded_change(f"hybrid:{SMALL},join=when_done", f"hybrid:{SMALL},join=when_done,num_slots=2", "full-kv"),
    crowded_change("full-kv", "full-kv:prefix=none", f"hybrid:{SMALL}"),
    crowded_change("nano-vllm", f"hybrid:{SMALL}", limits=replace(LIMITS, max_running=2)),
)


def nobody_judges_windows(patch: Patch) -> None:
    patch.setattr(replacing, "_judge_window", lambda state, request: None)


def compressed_ones_lose_their_slots(patch: Patch) -> None:
    def keep(state: State, slots: SlotTable) -> None:
        for request in state.running.values():
            if slots.needed is NeedsSlot.NEVER and not request.in_flight:
                state.drop_slot(request)
        real(state, slots)

    real = replacing._keep_slots
    patch.setattr(replacing, "_keep_slots", keep)


def more_is_set_aside_than_there_is(patch: Patch) -> None:
    def hold(self: SlotTable, slot: int, num_held: int) -> None:
        peak = max(self.floor or 0, num_held)
        self.total_peak += peak - self._peaks[slot]
        self._peaks[slot] = peak

    patch.setattr(SlotTable, "hold", hold)


def cached_blocks_stay_booked(patch: Patch) -> None:
    def forget_all(self: BlockPool) -> list[int]:
        num_cached, freed = self.num_cached, real(self)
        self.num_cached = num_cached
        return freed

    real = BlockPool.forget_all
    patch.setattr(BlockPool, "forget_all", forget_all)


def the_calendar_goes_by_the_old_policy(patch: Patch) -> None:
    patch.setattr(Decoding, "retune", lambda self, members, floor, window, lowest: None)


def copies_in_flight_are_forgotten(patch: Patch) -> None:
    def change(self: Scheduler, policy: Policy, now_ns: int, mark: int = 0) -> None:
        real(self, policy, now_ns, mark)
        self._compressed.clear()
        self.state.compressing.clear()

    real = Scheduler.replace_policy
    patch.setattr(Scheduler, "replace_policy", change)


def the_waiting_line_is_lost(patch: Patch) -> None:
    patch.setattr(replacing, "_line_up", lambda state, policy: WaitingLine(policy.order))


def paused_ones_go_on_all_at_once(patch: Patch) -> None:
    def start(self: State, request: Request) -> None:
        self.book_idle(request, 0)
        self.enter(request, Phase.DECODE)
        self.decoding.add(request)

    def change(self: Scheduler, policy: Policy, now_ns: int, mark: int = 0) -> None:
        real(self, policy, now_ns, mark)
        for request in self.state.paused.values():
            start(self.state, request)
        self.state.paused.clear()

    real = Scheduler.replace_policy
    patch.setattr(Scheduler, "replace_policy", change)


FAULTS: dict[Callable[[Patch], None], str] = {
    nobody_judges_windows: "queries|loses a query|its budget and prompt allow",
    compressed_ones_lose_their_slots: "compressed and has no slot",
    more_is_set_aside_than_there_is: "may come to need more than the pool",
    cached_blocks_stay_booked: "cached blocks are booked",
    the_calendar_goes_by_the_old_policy: "loses a query|its budget and prompt allow|decodes token",
    copies_in_flight_are_forgotten: "stands in no place|in flight",
    the_waiting_line_is_lost: "stands in no place|are alive",
    paused_ones_go_on_all_at_once: "decodes, at most 2",
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_in_the_change_is_noticed(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    said = []
    for case in SCENARIOS:
        try:
            drive(case)
        except (AssertionError, StuckError) as complaint:
            said.append(str(complaint))
    assert any(re.search(FAULTS[plant], words) for words in said), said


@pytest.mark.parametrize("case", SCENARIOS)
def test_nothing_is_noticed_without_a_fault(case: Case) -> None:
    run = drive(case)
    all_laws(run, disturbed=False)
    assert len(run.of(Kind.POLICY)) == len(case.changes)
    assert sum(request.compressions for request in run.requests) > 2

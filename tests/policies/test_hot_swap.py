"""The laws across changes of the policy, at random steps, among all presets and random policies.

What a change means for prefixes, lines, admission and copies in flight: the rules of
docs/DESIGN.md.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies import laws
from tests.policies.cases import Draw, cases, policies, preset_policies
from tests.policies.drive import Case, drive, job
from tests.policies.stage import FULL, House, budgeted
from tests.policies.test_invariants import all_laws
from zlab.policies.core import hot_swap as replacing
from zlab.policies.core.block_pool import BlockPool
from zlab.policies.core.decode_batch import DecodeBatch
from zlab.policies.core.plan import SchedulerLimits, StuckError
from zlab.policies.core.policy import NeedsSlot, Policy
from zlab.policies.core.query_slots import QuerySlots
from zlab.policies.core.request import Request
from zlab.policies.core.request_queue import RequestQueue
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.core.state import SchedulerState
from zlab.policies.spec import load_policy, policy_mark
from zlab.traces.schema import EventKind, Phase
from zlab.traces.workload import TraceRequest

EXAMPLES = 60
Patch = pytest.MonkeyPatch


@st.composite
def changing(draw: Draw, presets_only: bool = False, disturbed: bool = True) -> Case:
    """A case in which other policies take over, once or several times, also twice before one
    step.
    """
    case = draw(cases(presets_only, disturbed))
    num_null = case.policy.admission.null_blocks  # stay null blocks under every later policy
    limits = replace(case.limits, num_blocks=case.limits.num_blocks - num_null)
    others = preset_policies(limits)
    if not presets_only:
        others = st.one_of(others, policies(limits))
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

LIMITS = SchedulerLimits(
    num_blocks=16,
    block_size=4,
    max_batched_tokens=64,
    max_running=16,
    max_model_len=400,
    host_blocks=20,
)


def crowded_change(*specs: str, limits: SchedulerLimits = LIMITS, every: int = 12) -> Case:
    """Requests that share a prefix and do not fit together; after each `every` steps the next
    policy decides.
    """
    ids = tuple(range(8))
    jobs = tuple(
        job(f"r{n}", 0, 26 + 3 * n, 1500 * n, ids=(*ids[: 4 * (n % 3)], *range(50 + n, 55 + n)))
        for n in range(6)
    )
    named = [load_policy(spec) for spec in specs]
    changes = tuple((every * place, policy) for place, policy in enumerate(named[1:], 1))
    return Case(named[0], limits, jobs, copy_ns=9000, changes=changes)


SMALL = "budget.tokens=8,window=2"
SLOTLESS = f"hybrid:{SMALL},slots=none,scorer=recent,preemption.comes_back=swap"
SCENARIOS = (
    crowded_change("full-kv", f"hybrid:{SMALL}", "full-kv", f"hybrid:{SMALL}"),
    crowded_change(f"hybrid:{SMALL}", "hybrid:budget.tokens=20,window=4", f"constrained:{SMALL}"),
    crowded_change(
        f"hybrid:{SMALL},join=when_done", f"hybrid:{SMALL},join=when_done,num_slots=2", "full-kv"
    ),
    crowded_change("full-kv", "full-kv:prefix=none", f"hybrid:{SMALL}"),
    crowded_change(
        f"hybrid:{SMALL}", SLOTLESS, "full-kv", SLOTLESS, "hybrid:budget.tokens=20,window=4"
    ),
    crowded_change(
        SLOTLESS, f"hybrid:{SMALL},preemption.comes_back=swap", SLOTLESS, f"constrained:{SMALL}"
    ),
    crowded_change("nano-vllm", f"hybrid:{SMALL}", limits=replace(LIMITS, max_running=2)),
    crowded_change(
        *("full-kv:allocate=chunk", f"hybrid:{SMALL}") * 6,
        limits=replace(LIMITS, max_batched_tokens=16),
        every=3,
    ),
)


def nobody_judges_windows(patch: Patch) -> None:
    patch.setattr(replacing, "_judge_window", lambda state, request: None)


def compressed_ones_lose_their_slots(patch: Patch) -> None:
    def keep(state: SchedulerState, slots: QuerySlots) -> None:
        for request in state.running.values():
            if slots.needed is NeedsSlot.NEVER and not request.in_flight:
                state.drop_slot(request)
        real(state, slots)

    real = replacing._keep_slots
    patch.setattr(replacing, "_keep_slots", keep)


def more_is_set_aside_than_there_is(patch: Patch) -> None:
    def hold(self: QuerySlots, slot: int, num_held: int) -> None:
        peak = max(self.floor or 0, num_held)
        self.total_peak += peak - self._peaks[slot]
        self._peaks[slot] = peak

    patch.setattr(QuerySlots, "hold", hold)


def cached_blocks_stay_booked(patch: Patch) -> None:
    def forget_all(self: BlockPool) -> list[int]:
        num_cached, freed = self.num_cached, real(self)
        self.num_cached = num_cached
        return freed

    real = BlockPool.forget_all
    patch.setattr(BlockPool, "forget_all", forget_all)


def the_calendar_goes_by_the_old_policy(patch: Patch) -> None:
    patch.setattr(DecodeBatch, "retune", lambda self, members, floor, window, lowest: None)


def copies_in_flight_are_forgotten(patch: Patch) -> None:
    def change(self: Scheduler, policy: Policy, now_ns: int, mark: int = 0) -> None:
        real(self, policy, now_ns, mark)
        self._compressed.clear()
        self.state.compressing.clear()

    real = Scheduler.replace_policy
    patch.setattr(Scheduler, "replace_policy", change)


def the_waiting_line_is_lost(patch: Patch) -> None:
    patch.setattr(replacing, "_line_up", lambda state, policy: RequestQueue(policy.order))


def paused_ones_go_on_all_at_once(patch: Patch) -> None:
    def start(self: SchedulerState, request: Request) -> None:
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


def short_prefills_are_not_noted(patch: Patch) -> None:
    patch.setattr(SchedulerState, "note_short_prefills", lambda self: None)


FAULTS: dict[Callable[[Patch], None], str] = {
    nobody_judges_windows: "queries|loses a query|its budget and prompt allow",
    compressed_ones_lose_their_slots: "compressed and has no slot",
    more_is_set_aside_than_there_is: "may come to need more than the pool",
    cached_blocks_stay_booked: "cached blocks are booked",
    the_calendar_goes_by_the_old_policy: "loses a query|its budget and prompt allow|decodes token",
    copies_in_flight_are_forgotten: "stands in no place|in flight",
    the_waiting_line_is_lost: "stands in no place|are alive",
    paused_ones_go_on_all_at_once: "decodes, at most 2",
    short_prefills_are_not_noted: "lacks blocks for its prompt",
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_in_the_change_is_noticed(
    plant: Callable[[Patch], None], monkeypatch: Patch
) -> None:
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
    assert len(run.of(EventKind.POLICY)) == len(case.changes)
    assert sum(request.compressions for request in run.requests) > 2


# everyone has a slot


def test_running_ones_without_a_slot_go_on_and_are_first_to_get_one() -> None:
    house = House(FULL)
    running = [house.submit(id, 6, 30) for id in "ABCDEF"]
    house.step()
    waits = house.submit("G", 6, 10)
    house.change(budgeted("constrained", num_slots=5))
    house.step()
    assert [one.slot for one in running] == [0, 1, 2, 3, 4, -1]
    assert all(one.phase is Phase.DECODE for one in running)
    assert waits.phase is Phase.QUEUED
    house.finish()
    assert running[5].compressions > 0
    assert sum(one.preemptions for one in running) == 0


# prefixes


def test_without_sharing_cached_blocks_turn_free_and_nothing_is_matched() -> None:
    house = House(FULL)
    ids = tuple(range(12))
    house.submit("A", ids, 3)
    house.until(lambda: not house.state.requests)
    assert house.state.pool.num_cached == 3
    house.change(load_policy("full-kv:prefix=none"))
    assert (house.state.pool.num_cached, house.state.pool.num_free) == (0, 16)
    assert house.state.index is None
    b = house.submit("B", ids, 3)
    house.finish()
    assert b.hit_tokens == 0


def test_with_sharing_what_running_requests_have_computed_is_found() -> None:
    house = House(load_policy("full-kv:prefix=none"))
    ids = tuple(range(12))
    house.submit("A", ids, 20)
    house.step()
    house.change(FULL)
    b = house.submit("B", (*ids, 99), 20)
    house.step()
    assert b.hit_tokens == 12
    assert house.requests["A"].table[:3] == b.table[:3]
    house.change(load_policy("full-kv:prefix=none"))
    house.steps(3)
    house.change(FULL)  # shared blocks are found again through either
    c = house.submit("C", ids, 4)
    house.step()
    assert c.hit_tokens == 8
    house.finish()


# blocks allocated by chunk


def test_a_prefill_that_has_blocks_for_its_chunks_only_takes_the_others_under_the_new_policy() -> (
    None
):
    limits = replace(LIMITS, max_batched_tokens=8)
    by_chunk = load_policy("full-kv:allocate=chunk,watermark_share=0.0")
    house = House(by_chunk, limits)
    long = house.submit("A", 30, 4)
    house.step()
    assert len(long.table) == 2
    house.change(FULL)
    blocks = []
    while long.phase is Phase.PREFILL:
        house.step()
        blocks.append(len(long.table))
    assert blocks == [4, 6, 8]
    house.submit("B", 30, 4)
    house.step()
    assert len(house.requests["B"].table) == 8, "later requests take all blocks when admitted"
    assert not house.state.short_prefills
    house.finish()


def test_such_a_prefill_waits_for_blocks_and_what_does_not_fit_together_is_preempted() -> None:
    limits = replace(LIMITS, num_blocks=8, max_batched_tokens=12)
    house = House(load_policy("full-kv:allocate=chunk,reserve=chunk,watermark_share=0.0"), limits)
    first = house.submit("A", 10, 9)
    house.step()
    second = house.submit("B", 28, 2)
    house.step()
    assert (len(first.table), len(second.table)) == (3, 3)
    house.change(budgeted("constrained", num_slots=1))
    plans = [house.step() for _ in range(3)]
    assert [plan.num_decodes for plan in plans] == [1, 1, 1]
    assert not any(plan.prefills for plan in plans), "2 blocks are free, the next chunk needs 3"
    house.finish()
    # The only slot goes to B, whose prompt reaches into its window; then A cannot go on beside it.
    assert (first.preemptions, second.preemptions) == (1, 0)
    assert (first.generated, second.generated) == (9, 2)


# more run than a step takes


def test_in_running_order_a_paused_request_stays_paused_while_the_batch_is_full() -> None:
    house = House(
        load_policy("full-kv:watermark_share=0.0,batching=prefill-first,limit=step"),
        replace(LIMITS, max_running=2),
    )
    for id in "ABC":
        house.submit(id, 3, 12)
    house.step()
    house.step()
    house.change(load_policy("full-kv:watermark_share=0.0,batching=running-order"))
    paused = house.requests["C"]
    house.step()
    assert paused.phase is Phase.PAUSED
    before = house.count(EventKind.RESUMED)
    while house.requests["A"].generated < 12:
        house.step()
    assert house.count(EventKind.RESUMED) == before
    house.finish()
    assert paused.generated == 12


# lines


def test_who_waits_stands_where_the_new_order_puts_it() -> None:
    house = House(
        FULL,
        SchedulerLimits(
            num_blocks=16, block_size=4, max_batched_tokens=64, max_running=1, max_model_len=200
        ),
    )
    for id, prompt in (("A", 4), ("B", 20), ("C", 12), ("D", 8)):
        house.submit(id, prompt, 4)
    house.step()
    house.change(load_policy("full-kv:order=shortest-prompt"))
    order: list[str] = []
    while house.state.requests:
        house.step()
        order += [id for id, one in house.requests.items() if one.first_token_ns == house.now]
    assert order == ["D", "C", "B"]


def shares(house: House, *sessions: str) -> list[str]:
    """Who of two that come from each of these sessions is served, in order."""
    for session in sessions:
        for number in range(2):
            id = f"{session}{number}"
            asked = TraceRequest(id, 4, 4, max_tokens=4, session=session)
            house.requests[id] = house.scheduler.submit(asked, house.now)
    order: list[str] = []
    while house.state.requests:
        house.step()
        order += [id for id, one in house.requests.items() if one.first_token_ns == house.now]
    return order


def test_fair_share_counts_from_the_change_on_and_on_between_fair_orders() -> None:
    limits = SchedulerLimits(
        num_blocks=16, block_size=4, max_batched_tokens=64, max_running=1, max_model_len=200
    )
    fair, other = (
        load_policy("full-kv:order=fair-share"),
        load_policy("hybrid:order=fair-share,budget.blocks=4,window=2"),
    )
    house = House(FULL, limits)
    assert shares(house, "s") == ["s0", "s1"]
    house.change(fair)  # s has been served, but under another order: it is not held against it
    for id in ("sx", "sy", "tx", "ty"):
        asked = TraceRequest(id, 4, 9, max_tokens=9, session=id[0])
        house.requests[id] = house.scheduler.submit(asked, house.now)
    house.until(lambda: house.requests["tx"].phase is Phase.DECODE)
    house.change(other)  # s has been given 4 + 9 tokens, t 4 and a few: that is still so
    house.scheduler.abort("tx", house.now)
    house.until(lambda: not house.state.requests)
    assert house.requests["ty"].first_token_ns < house.requests["sy"].first_token_ns
    house.change(FULL)
    house.change(fair)  # forgotten
    assert shares(house, "s", "t") == ["s0", "t0", "s1", "t1"]


def test_paused_ones_go_on_within_the_limit() -> None:
    limits = SchedulerLimits(
        num_blocks=16, block_size=4, max_batched_tokens=64, max_running=2, max_model_len=200
    )
    house = House(load_policy("nano-vllm"), limits)
    for id in "ABCD":
        house.submit(id, 4, 6)
    house.steps(2)
    assert len(house.state.paused) == 2
    house.change(FULL)
    assert house.step().num_decodes == 2
    house.finish()


def test_room_is_set_aside_where_admission_reserves_it() -> None:
    house = House(FULL)
    a, b = house.submit("A", 6, 30), house.submit("B", 6, 27)
    house.step()
    house.change(load_policy("full-kv:reserve=peak"))
    assert (a.reserved_blocks, b.reserved_blocks, house.state.reserved_blocks) == (9, 8, 17)
    c = house.submit("C", 4, 4)
    house.steps(3)
    assert c.phase.name == "QUEUED"  # more is promised than there is
    house.change(FULL)
    assert house.state.reserved_blocks == 0
    house.step()
    assert c.phase is not Phase.QUEUED
    house.finish()


# in flight


@pytest.mark.parametrize("join", ["boundary", "when_done", "blocking"])
def test_a_compression_in_flight_is_joined_at_the_next_step(join: str) -> None:
    house = House(budgeted(num_slots=2, join="when_done"))
    a = house.submit("A", 6, 40)
    house.submit("B", 6, 40)
    house.until(lambda: a.phase is Phase.COMPRESSING)
    house.change(budgeted(num_slots=2, join=join))
    house.step()
    assert (a.phase.name, a.compressions, len(a.table)) == ("DECODE", 1, 3)


def test_the_journal_says_which_policy_took_over() -> None:
    house = House(FULL)
    house.submit("A", 6, 10)
    house.steps(2)
    policy = budgeted(num_slots=2)
    house.change(policy)
    house.finish()
    house.state.journal.flush()
    (row,) = [row for row in house.rows if row[1] == EventKind.POLICY]
    assert row[:4] == (2, EventKind.POLICY, -1, policy_mark(policy))

"""Budgets that adapt, and query slots that stay within the pool."""

from dataclasses import replace

import pytest

from tests.policies import laws
from tests.policies.drive import Case, drive, job
from tests.policies.stage import Stage
from zlab.policies.budget import Adaptive, Fixed, Unlimited
from zlab.policies.core.decode import preempt
from zlab.policies.core.plan import ConfigError, SchedulerLimits, StepPlan
from zlab.policies.core.policy import PoolView
from zlab.policies.core.query_slots import QuerySlots
from zlab.policies.spec import load_policy
from zlab.traces.schema import EventKind, Phase

LIMITS = SchedulerLimits(
    num_blocks=16, block_size=4, max_batched_tokens=64, max_running=16, max_model_len=400
)
ADAPTIVE = (
    "hybrid-adaptive:budget.tokens=8,most_tokens=20,grow_above=0.25,shrink_below=0.1,window=2"
)


def view(num_free: int, num_waiting: int = 0) -> PoolView:
    return PoolView(100, num_free, 3, num_waiting)


def test_the_adaptive_budget_by_its_answers() -> None:
    budget = Adaptive(tokens=8, most_tokens=20, grow_above=0.25, shrink_below=0.1)
    assert budget.floor(4) == 3
    assert budget.may_grow(3, 4, view(26))
    assert not budget.may_grow(3, 4, view(25))
    assert not budget.may_grow(6, 4, view(99))  # 20 kept tokens are five blocks, and the empty one
    assert budget.shrink_to(5, 4, view(10)) == 5
    assert budget.shrink_to(5, 4, view(9)) == 3
    assert budget.shrink_to(5, 4, view(99, num_waiting=1)) == 3
    assert budget.shrink_to(9, 4, view(99)) == 6  # a long prompt


def test_fixed_and_unlimited() -> None:
    assert (
        Fixed(tokens=2048).floor(256),
        Fixed(tokens=2049).floor(256),
        Fixed(blocks=7).floor(256),
    ) == (9, 10, 7)
    assert Fixed(blocks=3).may_grow(2, 4, view(0))
    assert not Fixed(blocks=3).may_grow(3, 4, view(100))
    assert Unlimited().floor(4) is None
    assert Unlimited().shrink_to(12, 4, view(0)) == 12


def test_a_budget_grows_in_an_idle_pool_and_shrinks_under_pressure() -> None:
    house = Stage(load_policy(ADAPTIVE), LIMITS)
    first = house.submit("A", 4, 200)
    most = 0
    for _ in range(60):
        house.step()
        most = max(most, len(first.table))
    assert most == 6, "alone it grows to the most"
    assert first.compressions > 0
    assert len(first.table) == 6, "and is compressed within it"
    for number in range(8):
        house.submit(f"B{number}", 12, 40)
    seen = []
    for _ in range(12):
        house.step()
        seen.append(len(first.table))
    assert seen[-1] == 3, "others wait: down to the least"


def test_growth_never_sets_aside_more_than_the_pool() -> None:
    """The audit of every step: slotted requests' peaks fit in the pool, however much a budget would
    like to grow.
    """
    policy = load_policy(
        "hybrid-adaptive:budget.tokens=8,most_tokens=60,grow_above=0.0,shrink_below=0.0,window=2"
    )
    shared = tuple(range(8))
    jobs = tuple(job(f"r{n}", 0, 90, arrival_ns=700 * n, ids=(*shared, 100 + n)) for n in range(6))
    run = drive(Case(policy, replace(LIMITS, num_blocks=10), jobs))
    laws.liveness(run)
    laws.same_decisions(run, drive(run.case, fast=True))


def test_a_window_that_was_missed_is_computed_again_with_the_prompt() -> None:
    """A grows past its window without a slot; given up and recomputed, its queries are there again:
    it can compress.
    """
    house = Stage(load_policy(f"{ADAPTIVE},num_slots=1"), LIMITS)
    house.submit("X", 2, 15)
    request = house.submit("A", 4, 40)
    while request.window_lost_at < 0:
        house.step()
    assert (request.window_lost_at, len(request.table), request.slot) == (3, 3, -1)
    preempt(house.scheduler.state, StepPlan(0), request)
    house.scheduler._requeue(request)
    assert request.window_lost_at == -1
    while request.line < 0:
        house.step()
    assert request.slot >= 0, "its last tokens are in the window: it comes back with a slot"
    assert house.scheduler.state.blocks_with_slot(request) == len(request.table)


def test_a_slot_given_in_a_missed_window_covers_one_block_more() -> None:
    """Full, it cannot be compressed yet: it takes one more block first, which must be set aside."""
    house = Stage(load_policy(f"{ADAPTIVE},num_slots=1"), LIMITS)
    house.submit("X", 4, 8)
    request = house.submit("A", 4, 40)
    while request.slot < 0:
        house.step()
    assert request.window_lost_at == len(request.table) == 3
    assert house.scheduler.state.slots.peak(request.slot) == 4
    while not request.compressions:
        house.step()
    assert request.window_lost_at == -1


# slots

BUDGET_TOO_LARGE = (
    "a budget of 21 blocks does not fit in a pool of 16: the pool needs at least 21 blocks, or "
    "the budget may keep at "
    "most 60 tokens$"
)
CANNOT_WORK = (
    ("hybrid:budget=unlimited", LIMITS, "hybrid slots need a block budget"),
    ("full-kv:budget.kind=fixed", LIMITS, "a block budget needs query slots"),
    (
        "hybrid:budget.tokens=8,window=5",
        LIMITS,
        r"the observation window must be 1..block_size = 1..4 tokens, not 5",
    ),
    ("hybrid:budget.tokens=80,window=2", LIMITS, BUDGET_TOO_LARGE),
    (
        "hybrid:budget.tokens=8,window=2,num_slots=6",
        LIMITS,
        "6 query slots of 3 blocks each need 18 blocks, .* room for 5 slots",
    ),
    (
        "hybrid:budget.tokens=8,window=2,sink=7",
        LIMITS,
        "window 2 \\+ sink 7 tokens are always kept, but a budget of 3 blocks of 4 keeps 8",
    ),
    (
        "hybrid:slots=none",
        LIMITS,
        "'attention\\+global\\+lightning' reads the queries of the window",
    ),
    ("constrained:budget=unlimited", LIMITS, "at least one query slot is needed, not 0"),
)


@pytest.mark.parametrize(("spec", "limits", "message"), CANNOT_WORK)
def test_policies_that_cannot_work_in_a_pool_are_refused_at_start(
    spec: str, limits: SchedulerLimits, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Stage(load_policy(spec), limits)


def test_a_window_longer_than_a_block_is_of_no_meaning_where_no_queries_are_kept() -> None:
    Stage(load_policy("full-kv:window=16"), LIMITS)
    stage = Stage(load_policy("hybrid:budget.tokens=8,window=16,scorer=recent,slots=none"), LIMITS)
    slots = stage.scheduler.state.slots
    assert (slots.num_slots, slots.window) == (0, 0)
    with pytest.raises(ConfigError, match=r"observation window must be .* tokens, not 16"):
        Stage(load_policy("hybrid:budget.tokens=8,window=16"), LIMITS)


def test_without_slots_a_request_is_compressed_whenever_its_blocks_are_full() -> None:
    """Two requests in a pool that cannot hold both uncompressed; neither gives way, and neither
    waits.
    """
    limits = replace(LIMITS, num_blocks=7, max_batched_tokens=64)
    stage = Stage(load_policy("hybrid:budget.tokens=8,slots=none,scorer=recent"), limits)
    stage.submit("A", 12, 30)
    stage.submit("B", 11, 30)
    stage.step()
    assert stage.picture() == {
        "A": ("DECODE", [0, 1, 2], -1, 13),
        "B": ("DECODE", [3, 4, 5], -1, 12),
    }
    stage.step()
    assert stage.picture() == {
        "A": ("COMPRESSING", [0, 1, 2], -1, 13),
        "B": ("DECODE", [3, 4, 5], -1, 13),
    }
    stage.step()
    assert stage.picture() == {
        "A": ("DECODE", [0, 1, 2], -1, 10),
        "B": ("COMPRESSING", [3, 4, 5], -1, 13),
    }
    while stage.scheduler.state.requests:
        stage.step()
    assert [(r.compressions > 4, r.preemptions, r.generated) for r in stage.requests.values()] == [
        (True, 0, 30)
    ] * 2


def test_what_a_refusal_names_instead_works() -> None:
    Stage(load_policy("hybrid:budget.tokens=60,window=2"), LIMITS)
    Stage(load_policy("hybrid:budget.tokens=80,window=2"), replace(LIMITS, num_blocks=21))
    with pytest.raises(ConfigError, match=r"in a pool of 1: the pool needs at least 21 blocks$"):
        Stage(load_policy("hybrid:budget.tokens=80,window=2"), replace(LIMITS, num_blocks=1))


@pytest.mark.parametrize(
    "name", ["num_blocks", "block_size", "max_batched_tokens", "max_running", "max_model_len"]
)
def test_limits_below_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a whole number of at least 1, not 0"):
        replace(LIMITS, **{name: 0})
    with pytest.raises(
        ConfigError, match="host_blocks must be a whole number of at least 0, not -1"
    ):
        replace(LIMITS, host_blocks=-1)


def test_slots_and_what_is_set_aside_for_them() -> None:
    table = QuerySlots(load_policy("hybrid:budget.tokens=8,window=2"), LIMITS)
    assert (table.num_slots, table.floor) == (5, 3)
    assert table.give(2) == 0  # at least its budget is set aside
    assert table.give(7) == 1  # a long prompt: more
    assert (table.total_peak, table.peak(0), table.peak(1)) == (10, 3, 7)
    assert table.can_give(6)
    assert not table.can_give(7)
    assert table.can_grow(0, 9)
    assert not table.can_grow(0, 10)
    table.hold(1, 3)
    assert table.total_peak == 6
    table.give_back(0)
    assert (table.total_peak, table.num_free) == (3, 4)
    assert table.give(1) == 0  # the lowest free one


def test_a_slot_set_aside_for_a_long_prompt_is_handed_on_once_that_is_compressed() -> None:
    """The long one's slot covers 7 blocks until its first compression; only then two more budgets
    fit beside it.
    """
    house = Stage(
        load_policy("hybrid:budget.tokens=8,window=2,num_slots=3"), replace(LIMITS, num_blocks=12)
    )
    house.submit("long", 27, 90)
    house.submit("A", 2, 90)
    house.submit("B", 2, 90)
    house.step()
    assert [house.requests[id].slot for id in ("long", "A", "B")] == [0, 1, -1]
    while not house.requests["long"].compressions:
        house.step()
    house.steps(2)
    assert house.requests["B"].slot == 2


# swapping


SWAPS = (
    "hybrid:budget.tokens=8,window=2,num_slots=1,preemption=latest-first,preemption.comes_back=swap"
)


def test_a_compressed_request_comes_back_only_with_a_slot() -> None:
    """E ends and leaves room for B, which is before its window again; but A has the slot now, so B
    waits for A's end.

    Without a slot B could not pass its window; and had host memory filled up meanwhile, it could
    not give way either.
    """
    policy = load_policy(f"{SWAPS},watermark_share=0.0")
    jobs = (job("X", 2, 3), job("E", 1, 8), job("A", 2, 20), job("B", 10, 30))
    run = drive(
        Case(policy, SchedulerLimits(7, 4, 64, 16, 200, host_blocks=3), jobs)
    )  # the audit asks for the slot
    laws.liveness(run)
    laws.same_decisions(run, drive(run.case, fast=True))
    names = {request.id: request for request in run.requests}
    (out,), (back,) = run.of(EventKind.SWAP_OUT), run.of(EventKind.SWAP_IN)
    assert (out[2], out[3]) == (names["B"].number, 10), (
        "the window would begin with the 11th position"
    )
    ended = {row[2]: row[0] for row in run.of(EventKind.FINISHED)}
    assert ended[names["E"].number] < ended[names["A"].number] < back[0]


@pytest.mark.parametrize("host_blocks", [0, 2, 3, 6, 30])
def test_swapping_with_little_host_memory(host_blocks: int) -> None:
    policy = load_policy(
        "hybrid:budget.tokens=8,window=2,preemption=latest-first,preemption.comes_back=swap"
    )
    jobs = tuple(job(f"r{n}", 4 + n, 40, arrival_ns=900 * n) for n in range(6))
    run = drive(Case(policy, SchedulerLimits(9, 4, 64, 16, 200, host_blocks=host_blocks), jobs))
    for law in (laws.liveness, laws.conservation, laws.bounded_preemptions):
        law(run)
    laws.same_decisions(run, drive(run.case, fast=True))


def test_a_compressed_request_goes_out_and_comes_back_with_its_tokens() -> None:
    """X leaves its slot to B, who is nearer to its window than A; A, earlier in line, then grows at
    B's cost.

    The shadow memory compares every token read after the way to host memory and back.
    """
    policy = load_policy(f"{SWAPS},watermark_share=0.0")
    jobs = (job("X", 2, 2), job("A", 1, 20), job("B", 10, 30))
    run = drive(Case(policy, SchedulerLimits(5, 4, 64, 16, 200, host_blocks=3), jobs))
    laws.liveness(run)
    laws.bounded_preemptions(run)
    laws.same_decisions(run, drive(run.case, fast=True))
    compressed = run.of(EventKind.COMPRESSED)[0]
    (out,) = run.of(EventKind.SWAP_OUT)
    (back,) = run.of(EventKind.SWAP_IN)
    assert compressed[2] == out[2] == back[2] == 2
    assert compressed[0] < out[0] < back[0]
    assert out[4] == back[4] == 3, "never more than its budget"
    slots = [row for row in run.of(EventKind.SLOT) if row[2] == 2]
    assert slots[-1][0] == back[0], "it comes back with a slot"


def test_without_host_memory_a_compressed_request_is_left_alone() -> None:
    policy = load_policy(f"{SWAPS},watermark_share=0.0")
    jobs = (job("X", 2, 2), job("A", 1, 20), job("B", 10, 30))
    run = drive(Case(policy, SchedulerLimits(5, 4, 64, 16, 200, host_blocks=2), jobs))
    laws.liveness(run)
    names = {request.id: request for request in run.requests}
    assert (names["B"].preemptions, names["A"].preemptions) == (0, 1)


def test_a_request_that_comes_back_from_host_memory_is_asked_about_a_free_slot() -> None:
    """Prefill first: the slot is handed out in the step that brings it back, when it cannot be
    asked yet.
    """
    house = Stage(
        load_policy(f"{SWAPS},watermark_share=0.0,batching=prefill-first"),
        SchedulerLimits(4, 4, 64, 16, 99, 20),
    )
    house.submit("X", 4, 10)
    request = house.submit("A", 4, 12)
    while not request.swaps:
        house.step()
    while request.phase is not Phase.DECODE:
        house.step()
    assert request.slot >= 0

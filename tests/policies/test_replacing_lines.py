"""What a change means for prefixes, lines, admission and copies in flight: the rules of docs/DESIGN.md."""

import pytest

from policies.core.events import Kind
from policies.core.limits import Limits
from policies.core.request import Phase
from policies.spec import load_policy, policy_mark
from tests.policies.changing_stage import FULL, House, budgeted
from traces.workload import TraceRequest

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


# lines


def test_who_waits_stands_where_the_new_order_puts_it() -> None:
    house = House(FULL, Limits(num_blocks=16, block_size=4, max_batched_tokens=64, max_running=1, max_model_len=200))
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
    limits = Limits(num_blocks=16, block_size=4, max_batched_tokens=64, max_running=1, max_model_len=200)
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
    limits = Limits(num_blocks=16, block_size=4, max_batched_tokens=64, max_running=2, max_model_len=200)
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
    (row,) = [row for row in house.rows if row[1] == Kind.POLICY]
    assert row[:4] == (2, Kind.POLICY, -1, policy_mark(policy))

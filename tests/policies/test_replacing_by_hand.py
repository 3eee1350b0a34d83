"""What a change of the policy means for each request: the rules of docs/DESIGN.md, one story each.

Blocks of 4 tokens, a window of 2, a budget of 3 blocks unless said otherwise.
"""

from dataclasses import replace
from typing import Any

import pytest

from policies.core.audit import audit
from policies.core.errors import ConfigError
from policies.core.events import Kind, Reason
from policies.core.limits import Limits
from policies.core.policy import History, Key, Policy
from policies.core.request import Phase, Request, Status
from policies.core.state import State
from policies.ordering import FirstCome
from policies.prefix import FullBlocks, NoSharing
from policies.spec import load_policy, policy_mark
from tests.policies.stage import Stage
from traces.workload import TraceRequest

LIMITS = Limits(num_blocks=16, block_size=4, max_batched_tokens=64, max_running=16, max_model_len=200, host_blocks=40)
FULL = load_policy("full-kv:watermark_share=0.0")


def budgeted(slots: str = "hybrid", blocks: int = 3, num_slots: int = 0, window: int = 2, **more: Any) -> Policy:
    changes = {"budget.blocks": blocks, "budget.tokens": 0, "num_slots": num_slots, "window": window, **more}
    return load_policy(f"{slots}:watermark_share=0.0," + ",".join(f"{key}={value}" for key, value in changes.items()))


class House(Stage):
    """A stage whose policy can change."""

    def __init__(self, policy: Policy, limits: Limits = LIMITS) -> None:
        super().__init__(policy, limits)
        self.rows: list[tuple[int, ...]] = []
        self.state.journal._sink = lambda rows, blocks: self.rows.extend(tuple(row) for row in rows.tolist())

    @property
    def state(self) -> State:
        return self.scheduler.state

    def change(self, policy: Policy, mark: int | None = None) -> None:
        self.scheduler.replace_policy(policy, self.now, policy_mark(policy) if mark is None else mark)
        audit(self.scheduler)

    def count(self, kind: Kind, request: Request | None = None) -> int:
        self.state.journal.flush()
        return sum(1 for row in self.rows if row[1] == kind and (request is None or row[2] == request.number))

    def until(self, done: Any, most: int = 300) -> None:
        for _ in range(most):
            if done():
                return
            self.step()
        raise AssertionError("it never came about")

    def finish(self) -> None:
        self.until(lambda: not self.state.requests)
        assert self.state.pool.num_free == self.state.limits.num_blocks
        assert {one.status for one in self.requests.values()} == {Status.FINISHED}


# refused


def test_a_policy_that_cannot_work_with_the_limits_changes_nothing() -> None:
    house = House(FULL)
    house.submit("A", 6, 10)
    house.steps(3)
    before, policy = house.scheduler.digest(), house.state.policy
    with pytest.raises(ConfigError, match="7 query slots of 3 blocks each need 21 blocks, but the pool has 16"):
        house.change(budgeted(num_slots=7))
    with pytest.raises(ConfigError, match="17 blocks does not fit in a pool of 16"):
        house.change(budgeted(blocks=17))
    assert house.scheduler.digest() == before
    assert house.state.policy is policy
    house.finish()


def test_an_order_of_the_users_own_that_raises_changes_nothing() -> None:
    class Raises(FirstCome):
        def key(self, request: Request, history: History) -> Key:
            raise ZeroDivisionError

    house = House(replace(FULL, prefix=FullBlocks()), replace(LIMITS, max_running=1))
    house.submit("A", tuple(range(8)), 10)
    house.submit("B", 6, 10)
    house.steps(3)
    before = house.scheduler.digest()
    with pytest.raises(ZeroDivisionError):
        house.change(replace(budgeted(), order=Raises(), prefix=NoSharing()), mark=1)
    audit(house.scheduler)
    assert (house.scheduler.digest(), house.state.policy.name) == (before, FULL.name)
    house.finish()


# a budget where there was none


def test_beyond_the_new_budget_and_before_its_window_it_gets_a_slot_and_is_compressed_when_its_block_is_full() -> None:
    house = House(FULL)
    a = house.submit("A", 18, 30)  # [xxxx][xxxx][xxxx][xxxx][xxo.]
    house.step()
    house.change(budgeted())
    assert (a.slot, a.missed_window) == (-1, -1)
    house.step()
    assert a.slot == 0
    assert house.state.slots.peak(0) == 5  # all it holds is set aside
    house.until(lambda: a.phase is Phase.COMPRESSING)
    assert len(a.table) == 5
    house.step()
    assert len(a.table) == 3
    assert house.state.slots.peak(0) == 3
    house.finish()


def test_beyond_the_new_budget_with_its_window_begun_it_takes_one_block_more() -> None:
    house = House(FULL)
    a = house.submit("A", 18, 30)
    house.steps(3)  # [xxxx][xxxx][xxxx][xxxx][xxxx]: the last two are in the window, nobody kept their queries
    assert house.state.decoding.tokens(a)[0] == 21
    house.change(budgeted())
    assert a.missed_window == 5
    house.until(lambda: a.phase is Phase.COMPRESSING)
    assert len(a.table) == 6
    house.finish()


def test_without_a_free_slot_it_waits_before_its_window_and_keeps_its_blocks() -> None:
    house = House(FULL)
    a, b = house.submit("A", 10, 30), house.submit("B", 10, 30)
    house.step()
    house.change(budgeted(num_slots=1))
    house.until(lambda: b.phase is Phase.WAITS_FOR_SLOT)
    assert (a.slot, b.slot, len(b.table)) == (0, -1, 3)
    house.finish()
    assert a.compressions > 1
    assert b.compressions > 1


def test_a_prompt_half_computed_whose_window_is_in_it_has_lost_its_queries() -> None:
    house = House(FULL, Limits(num_blocks=16, block_size=4, max_batched_tokens=8, max_model_len=200))
    a = house.submit("A", 20, 20)
    house.step()
    assert a.phase.name == "PREFILL"
    house.change(budgeted())
    assert a.missed_window == 5
    house.until(lambda: a.phase is Phase.COMPRESSING)
    assert len(a.table) == 6
    house.finish()


# another budget


def compressed(policy: Policy, *ids: str, output: int = 60, limits: Limits = LIMITS) -> House:
    """All of these have been compressed once and hold three blocks."""
    house = House(policy, limits)
    for id in ids:
        house.submit(id, 6, output)
    house.until(lambda: all(one.compressions == 1 and one.phase is Phase.DECODE for one in house.requests.values()))
    return house


def test_a_larger_budget_lets_it_grow_as_far_as_the_pool_can_set_aside() -> None:
    house = compressed(budgeted(num_slots=5), *"ABCDE")
    slots = [one.slot for one in house.requests.values()]
    house.change(budgeted(blocks=6))  # two of these fit; five hold slots already: 16 blocks are 6 + 3 + 3 + ... but 1
    peaks = [house.state.slots.peak(slot) for slot in slots]
    assert peaks == [4, 3, 3, 3, 3]
    assert house.state.slots.num_slots == 2
    assert house.state.slots.num_free == 0
    house.until(lambda: all(one.compressions >= 2 for one in house.requests.values()))
    assert sorted(len(one.table) for one in house.requests.values())[:4] == [3, 3, 3, 3]
    house.finish()


def test_who_is_left_grows_to_the_whole_of_a_larger_budget() -> None:
    house = compressed(budgeted(num_slots=5), *"ABCDE")
    for id in "BCDE":
        house.scheduler.abort(id, house.now)
    house.change(budgeted(blocks=6))
    a = house.requests["A"]
    assert house.state.slots.peak(a.slot) == 6
    house.until(lambda: a.compressions == 2)
    assert len(a.table) == 6
    assert not house.state.narrow


def test_a_smaller_budget_is_kept_from_the_next_compression_on() -> None:
    house = compressed(budgeted(blocks=5, num_slots=3), *"ABC")
    house.change(budgeted(blocks=2))
    assert all(len(one.table) == 5 for one in house.requests.values())
    house.until(lambda: all(one.compressions == 2 and one.phase is Phase.DECODE for one in house.requests.values()))
    assert all(len(one.table) == 2 for one in house.requests.values())
    house.finish()


def test_fewer_slots_holders_keep_theirs_and_new_ones_come_only_below() -> None:
    house = compressed(budgeted(num_slots=5), *"ABCDE")
    house.change(budgeted(num_slots=2))
    assert sorted(one.slot for one in house.requests.values()) == [0, 1, 2, 3, 4]
    late = house.submit("F", 10, 20)  # in its window as soon as its prompt is there: it needs a slot
    for id in "ABC":
        house.steps(2)
        assert late.slot < 0
        house.scheduler.abort(id, house.now)
    house.step()
    assert late.slot < 0  # D and E hold two
    house.scheduler.abort("D", house.now)
    house.step()
    assert late.slot >= 0


def test_more_slots_are_there_at_once() -> None:
    house = compressed(budgeted(num_slots=1), "A")
    b, c = house.submit("B", 10, 30), house.submit("C", 10, 30)
    house.until(lambda: b.phase is Phase.WAITS_FOR_SLOT and c.phase is Phase.WAITS_FOR_SLOT)
    house.change(budgeted(num_slots=4))
    house.step()
    assert {b.slot, c.slot} == {1, 2}
    house.finish()


def test_a_longer_window_finds_all_queries_of_who_had_a_slot_before_it_began() -> None:
    house = compressed(budgeted(num_slots=1), "A")
    a = house.requests["A"]
    house.until(lambda: house.state.decoding.tokens(a)[0] == 12)  # its last block is full but for one position
    house.change(budgeted(num_slots=1, window=4))
    assert a.missed_window == -1
    house.until(lambda: a.compressions == 2)
    assert len(a.table) == 3


def test_a_longer_window_is_missed_by_who_got_its_slot_in_between() -> None:
    house = House(budgeted(num_slots=1))
    house.submit("A", 6, 5)
    b = house.submit("B", 10, 30)  # waits before its window, with two tokens in its last block
    house.until(lambda: b.phase is Phase.WAITS_FOR_SLOT)
    house.until(lambda: b.slot >= 0)  # A is done
    assert b.observed_from == 10
    house.change(budgeted(num_slots=1, window=3))
    assert b.missed_window == 3  # the first of three queries was computed without a slot
    house.until(lambda: b.compressions == 1)
    assert house.count(Kind.GREW, b) == 1
    house.finish()


# no budget any more


def test_compressed_ones_keep_slot_and_size_where_nobody_needs_a_slot() -> None:
    """Four of them and another fill the pool: each can still go on, and none is thrown away."""
    house = compressed(budgeted(num_slots=4), *"ABCD", output=80)
    slotless = house.submit("E", 5, 40)
    house.step()
    house.change(FULL)
    assert house.state.slots.num_slots == 0
    assert sorted(one.slot for one in house.requests.values()) == [-1, 0, 1, 2, 3]
    house.finish()
    assert slotless.preemptions > 0
    assert all(house.requests[id].preemptions == 0 for id in "ABCD")
    assert max(house.requests[id].compressions for id in "ABCD") > 2


def test_a_compressed_one_alone_grows_without_bound() -> None:
    house = compressed(budgeted(num_slots=1), "A", output=50)
    house.change(FULL)
    house.finish()
    assert house.requests["A"].compressions == 1


def test_uncompressed_holders_give_their_slots_back() -> None:
    house = House(budgeted(num_slots=2))
    a = house.submit("A", 6, 20)
    house.steps(2)
    assert a.slot == 0
    house.change(FULL)
    assert a.slot == -1
    house.finish()
    assert a.compressions == 0


def test_one_in_host_memory_comes_back_compressed_and_is_never_recomputed() -> None:
    house = House(FULL)
    house.submit("A", 5, 40)
    away = house.submit("B", 8, 40)
    house.step()
    house.change(budgeted(num_slots=1, preemption="latest-first", comes_back="swap"))  # B is nearer to its window
    house.until(lambda: away.compressions == 1 and away.phase is Phase.DECODE)
    house.change(budgeted(num_slots=1, blocks=13, preemption="latest-first", comes_back="swap"))
    house.until(lambda: away.phase is Phase.SWAPPED)
    house.change(FULL)
    house.until(lambda: away.phase is Phase.DECODE)
    assert away.slot >= 0
    house.finish()
    assert away.recomputed_tokens == 0


def test_output_that_the_pool_cannot_hold_uncompressed_is_capped_and_the_cap_goes_with_the_policy() -> None:
    house = House(budgeted(num_slots=5))
    a, b = house.submit("A", 6, 100), house.submit("B", 6, 30)
    house.steps(2)
    house.change(FULL)
    assert (a.target_tokens, b.target_tokens) == (59, 30)  # 6 + 59 - 1 = 64 = 16 blocks of 4
    assert a.message == "output capped at 59 of 100 tokens by the pool of 16 blocks"
    house.change(budgeted(num_slots=5))
    assert (a.target_tokens, a.message) == (100, "")
    house.change(FULL)
    house.finish()
    assert (a.generated, a.reason) == (59, Reason.LENGTH)


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

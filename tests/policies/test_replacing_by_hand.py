"""What a change of slots and budget means for each request: the rules of docs/DESIGN.md, one story
each.
"""

from dataclasses import replace

import pytest

from tests.policies.stage import FULL, LIMITS, House, budgeted
from zlab.policies.core.invariants import check_state
from zlab.policies.core.plan import ConfigError, SchedulerLimits
from zlab.policies.core.policy import History, Key, Policy
from zlab.policies.core.request import Request
from zlab.policies.options import FullBlocks, NoSharing
from zlab.policies.ordering import FirstCome
from zlab.traces.schema import EventKind, Phase, Reason

# refused


def test_a_policy_that_cannot_work_with_the_limits_changes_nothing() -> None:
    house = House(FULL)
    house.submit("A", 6, 10)
    house.steps(3)
    before, policy = house.scheduler.digest(), house.state.policy
    with pytest.raises(
        ConfigError, match="7 query slots of 3 blocks each need 21 blocks, but the pool has 16"
    ):
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
    check_state(house.scheduler)
    assert (house.scheduler.digest(), house.state.policy.name) == (before, FULL.name)
    house.finish()


# a budget where there was none


def test_beyond_the_new_budget_and_before_its_window_it_gets_a_slot_and_is_compressed_when_its_block_is_full() -> (
    None
):
    house = House(FULL)
    a = house.submit("A", 18, 30)  # [xxxx][xxxx][xxxx][xxxx][xxo.]
    house.step()
    house.change(budgeted())
    assert (a.slot, a.window_lost_at) == (-1, -1)
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
    house.steps(
        3
    )  # [xxxx][xxxx][xxxx][xxxx][xxxx]: the last two are in the window, nobody kept their queries
    assert house.state.decoding.tokens(a)[0] == 21
    house.change(budgeted())
    assert a.window_lost_at == 5
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
    house = House(
        FULL, SchedulerLimits(num_blocks=16, block_size=4, max_batched_tokens=8, max_model_len=200)
    )
    a = house.submit("A", 20, 20)
    house.step()
    assert a.phase.name == "PREFILL"
    house.change(budgeted())
    assert a.window_lost_at == 5
    house.until(lambda: a.phase is Phase.COMPRESSING)
    assert len(a.table) == 6
    house.finish()


# another budget


def compressed(
    policy: Policy, *ids: str, output: int = 60, limits: SchedulerLimits = LIMITS
) -> House:
    """All of these have been compressed once and hold three blocks."""
    house = House(policy, limits)
    for id in ids:
        house.submit(id, 6, output)
    house.until(
        lambda: all(
            one.compressions == 1 and one.phase is Phase.DECODE for one in house.requests.values()
        )
    )
    return house


def test_a_larger_budget_lets_it_grow_as_far_as_the_pool_can_set_aside() -> None:
    house = compressed(budgeted(num_slots=5), *"ABCDE")
    slots = [one.slot for one in house.requests.values()]
    house.change(
        budgeted(blocks=6)
    )  # two of these fit; five hold slots already: 16 blocks are 6 + 3 + 3 + ... but 1
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
    assert not house.state.under_reserved


def test_a_smaller_budget_is_kept_from_the_next_compression_on() -> None:
    house = compressed(budgeted(blocks=5, num_slots=3), *"ABC")
    house.change(budgeted(blocks=2))
    assert all(len(one.table) == 5 for one in house.requests.values())
    house.until(
        lambda: all(
            one.compressions == 2 and one.phase is Phase.DECODE for one in house.requests.values()
        )
    )
    assert all(len(one.table) == 2 for one in house.requests.values())
    house.finish()


def test_fewer_slots_holders_keep_theirs_and_new_ones_come_only_below() -> None:
    house = compressed(budgeted(num_slots=5), *"ABCDE")
    house.change(budgeted(num_slots=2))
    assert sorted(one.slot for one in house.requests.values()) == [0, 1, 2, 3, 4]
    late = house.submit(
        "F", 10, 20
    )  # in its window as soon as its prompt is there: it needs a slot
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
    house.until(
        lambda: house.state.decoding.tokens(a)[0] == 12
    )  # its last block is full but for one position
    house.change(budgeted(num_slots=1, window=4))
    assert a.window_lost_at == -1
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
    assert b.window_lost_at == 3  # the first of three queries was computed without a slot
    house.until(lambda: b.compressions == 1)
    assert house.count(EventKind.GREW, b) == 1
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
    house.change(
        budgeted(num_slots=1, preemption="latest-first", comes_back="swap")
    )  # B is nearer to its window
    house.until(lambda: away.compressions == 1 and away.phase is Phase.DECODE)
    house.change(budgeted(num_slots=1, blocks=13, preemption="latest-first", comes_back="swap"))
    house.until(lambda: away.phase is Phase.SWAPPED)
    house.change(FULL)
    house.until(lambda: away.phase is Phase.DECODE)
    assert away.slot >= 0
    house.finish()
    assert away.recomputed_tokens == 0


def test_output_that_the_pool_cannot_hold_uncompressed_is_capped_and_the_cap_goes_with_the_policy() -> (
    None
):
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

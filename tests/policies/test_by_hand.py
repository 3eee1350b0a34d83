"""Hybrid slots on a pool of 8 blocks, step by step, worked out by hand.

Blocks of b = 4 tokens, a window of w = 2, budgets of N_max = 3 blocks: a compression keeps k = 8
tokens in two blocks and leaves the third empty. Two such budgets fit (M = 8 // 3 = 2); some stories
allow one slot only.

How to read a picture: a row is a request, `[....]` a block, x a token in the cache, o the newest
token (sampled, not yet computed), w a free position of the observation window. A token's query is
needed if it falls on a window position.

    [xxxx][xxxx][xxow]      two tokens of the third block are computed, the newest falls on the
    window
"""

from tests.policies.stage import Stage
from zlab.policies.core.plan import SchedulerLimits
from zlab.policies.core.policy import Policy
from zlab.policies.spec import load_policy

LIMITS = SchedulerLimits(
    num_blocks=8, block_size=4, max_batched_tokens=64, max_running=16, max_model_len=200
)


def policy(num_slots: int, **more: str) -> Policy:
    """The preset with small numbers."""
    changes = {
        "budget.blocks": "3",
        "budget.tokens": "0",
        "window": "2",
        "num_slots": str(num_slots),
        **more,
    }
    return load_policy("hybrid:" + ",".join(f"{key}={value}" for key, value in changes.items()))


def stage(num_slots: int, **more: str) -> Stage:
    return Stage(policy(num_slots, **more), LIMITS)


def test_a_slotless_request_stops_before_its_window_and_waits_for_a_slot() -> None:
    house = stage(num_slots=1)
    house.submit("A", 4, 12)
    house.submit("B", 4, 12)

    # Step 0: both prompts. The slot goes to A, who was admitted first.
    #   A slot 0  [xxxx]o        B  [xxxx]o
    plan = house.step()
    assert [(chunk.request.id, chunk.count) for chunk in plan.prefills] == [("A", 4), ("B", 4)]
    assert house.picture() == {"A": ("DECODE", [0], 0, 5), "B": ("DECODE", [1], -1, 5)}

    # Steps 1 to 6: both take their second block in step 1 and their third in step 5.
    #   A slot 0  [xxxx][xxxx][xxow]        B  [xxxx][xxxx][xxow]
    house.steps(6)
    assert house.picture() == {
        "A": ("DECODE", [0, 2, 4], 0, 11),
        "B": ("DECODE", [1, 3, 5], -1, 11),
    }

    # Step 7: B's newest token would be the first of its window; its query would be lost. B stops
    # and keeps its blocks.
    assert house.step().num_decodes == 1
    assert house.picture() == {
        "A": ("DECODE", [0, 2, 4], 0, 12),
        "B": ("WAITS_FOR_SLOT", [1, 3, 5], -1, 11),
    }

    # Step 9: A's blocks are full and it needs room for one more token: 12 tokens are compressed to
    # 8, in place.
    #   A slot 0  [xxxx][xxxx][xxxx]o   ->   [xxxx][xxxx]o
    plan = house.steps(2)
    (task,) = plan.compressions
    assert (task.sources, task.targets, task.dropped) == ([0, 2, 4], [0, 2, 4], [])
    assert (task.source_tokens, task.kept_tokens, task.first) == (12, 8, True)
    assert plan.num_decodes == 0  # A skips the step, B still waits
    assert house.picture()["A"] == ("COMPRESSING", [0, 2, 4], 0, 13)

    # Step 10, the next boundary: A is joined and decodes in the same step, its tenth cache position
    # in use.
    plan = house.step()
    assert [joined.request.id for joined in plan.joined] == ["A"]
    assert house.picture()["A"] == ("DECODE", [0, 2, 4], 0, 10)
    assert house.picture()["B"] == ("WAITS_FOR_SLOT", [1, 3, 5], -1, 11)

    # Step 12 gives A its last token; step 13: the slot is free, B goes on where it stopped, no
    # query was lost.
    house.steps(2)
    assert house.picture() == {"B": ("WAITS_FOR_SLOT", [1, 3, 5], -1, 11)}
    house.step()
    assert house.picture() == {"B": ("DECODE", [1, 3, 5], 0, 12)}
    assert house.requests["B"].window_lost_at == -1

    # Step 15: B is compressed in its turn; step 18 ends it.
    assert [task.request.id for task in house.steps(2).compressions] == ["B"]
    house.steps(3)
    assert house.picture() == {}
    assert house.free == 8


def test_a_free_slot_goes_to_whom_is_nearest_to_its_window() -> None:
    house = stage(num_slots=1)
    house.submit("X", 4, 3)
    house.submit("P", 2, 20)
    house.submit("Q", 7, 20)

    # Step 0: X holds the slot. P stands before Q in the line, but Q is nearer to its window (10
    # tokens).
    #   X slot 0  [xxxx]o      P  [xxo.]      Q  [xxxx][xxxo]
    house.step()
    assert house.picture()["X"] == ("DECODE", [0], 0, 5)

    # Step 2 ends X; step 3 hands its slot to Q: to P 10 - 5 = 5 tokens are left, to Q 10 - 10 = 0.
    house.steps(2)
    assert house.picture() == {"P": ("DECODE", [1], -1, 5), "Q": ("DECODE", [2, 3, 5], -1, 10)}
    house.step()
    assert house.picture() == {"P": ("DECODE", [1, 6], -1, 6), "Q": ("DECODE", [2, 3, 5], 0, 11)}


def test_a_slot_in_the_very_step_in_which_the_window_begins_is_in_time() -> None:
    """X ends in step 6; Q's window begins in step 7, where it is given the slot: it must not count
    as missed.
    """
    house = stage(num_slots=1)
    house.submit("X", 4, 7)
    house.submit("Q", 4, 20)
    house.steps(7)
    #   Q  [xxxx][xxxx][xxow]
    assert house.picture() == {"Q": ("DECODE", [1, 3, 5], -1, 11)}
    house.steps(2)
    assert house.picture() == {"Q": ("DECODE", [1, 3, 5], 0, 13)}
    assert [task.request.id for task in house.step().compressions] == ["Q"]  # at 3 blocks, not at 4


def test_slotless_requests_give_way_latest_first_down_to_the_constrained_regime() -> None:
    house = stage(num_slots=2)
    for id, prompt in (("A", 4), ("B", 4), ("C", 4), ("D", 2)):
        house.submit(id, prompt, 13 if id in "AB" else 9)

    # Step 0: A and B take the two slots.
    house.step()
    assert [house.requests[id].slot for id in "ABCD"] == [0, 1, -1, -1]

    # Step 4: all eight blocks are taken.
    #   A slot 0  [xxxx][xxxx]o      C  [xxxx][xxxx]o
    #   B slot 1  [xxxx][xxxx]o      D  [xxxx][xxo.]
    house.steps(4)
    assert house.free == 0
    assert house.picture()["C"] == ("DECODE", [2, 6], -1, 9)
    assert house.picture()["D"] == ("DECODE", [3, 7], -1, 7)

    # Step 5: A, B and C need a third block. For A, D gives way (slotless, the latest): it frees 7,
    # then 3. A takes 7,
    # B takes 3. For C nobody slotless is left but C itself. Nobody is admitted in this step.
    plan = house.step()
    assert [request.id for request in plan.preempted] == ["D", "C"]
    assert plan.prefills == []
    assert house.picture()["A"] == ("DECODE", [0, 4, 7], 0, 10)
    assert house.picture()["B"] == ("DECODE", [1, 5, 3], 1, 10)
    assert house.picture()["C"] == ("PREEMPTED", [], -1, 9)
    assert house.free == 2

    # Steps 6 to 12, the constrained regime: only slotted requests run, each within its three
    # blocks. C waits: its 9
    # tokens need three blocks, two are free (and one of them is to stay so while others run). D
    # waits behind C.
    plan = house.steps(4)
    assert [task.request.id for task in plan.compressions] == ["A", "B"]
    for _ in range(3):
        assert house.step().prefills == []
        assert house.free == 2

    # Step 13 ends A and B. Step 14 admits C and D: C finds its own two full blocks untouched (8
    # tokens) and computes
    # one token; D's blocks went to A and B, its 7 tokens are computed again, the 6 it had as
    # recomputed ones.
    house.step()
    plan = house.step()
    assert [(chunk.request.id, chunk.start, chunk.count) for chunk in plan.prefills] == [
        ("C", 8, 1),
        ("D", 0, 7),
    ]
    assert house.requests["C"].table[:2] == [2, 6]
    assert (house.requests["C"].recomputed_tokens, house.requests["D"].recomputed_tokens) == (0, 6)
    assert [house.requests[id].slot for id in "CD"] == [0, 1]
    assert [house.requests[id].preemptions for id in "ABCD"] == [0, 0, 1, 1]


def test_who_lacks_a_block_waits_where_nobody_may_give_way() -> None:
    """Constrained: M = 2 requests run, the third waits outside; nobody is ever preempted."""
    house = Stage(load_policy("constrained:budget.blocks=3,budget.tokens=0,window=2"), LIMITS)
    for id in "ABC":
        house.submit(id, 4, 20)
    plan = house.step()
    assert [chunk.request.id for chunk in plan.prefills] == ["A", "B"]
    assert house.picture()["C"][0] == "QUEUED"
    while house.requests["A"].finish_ns < 0:
        house.step()
        assert house.free >= 2
        assert house.requests["C"].phase.name == "QUEUED"
    plan = house.step()
    assert [chunk.request.id for chunk in plan.prefills] == ["C"]  # as soon as a slot is free


SHARED = (1, 2, 3, 4, 5, 6, 7, 8)


def sharers(**more: str) -> Stage:
    """A computes two blocks that B then shares.

    A slot 0  [xxxx][xxxx][xxo.]      blocks 0 1 2
    B slot 1  [xxxx][xxxx][xo..]      blocks 0 1 3: the first two are A's
    """
    house = stage(2, **more)
    house.submit("A", (*SHARED, 9), 8)
    house.step()
    house.submit("B", (*SHARED, 10), 8)
    plan = house.step()
    assert [(chunk.request.id, chunk.start, chunk.count) for chunk in plan.prefills] == [
        ("B", 8, 1)
    ]
    assert house.picture() == {"A": ("DECODE", [0, 1, 2], 0, 11), "B": ("DECODE", [0, 1, 3], 1, 10)}
    assert house.free == 4
    return house


def test_a_shared_prefix_is_compressed_into_fresh_blocks() -> None:
    house = sharers()
    pool = house.scheduler.state.pool

    # Step 4: A is full. Blocks 0 and 1 are B's, too, and only read: two fresh targets, then A's own
    # block 2.
    plan = house.steps(3)
    (task,) = plan.compressions
    assert (task.request.id, task.sources, task.targets, task.dropped) == (
        "A",
        [0, 1, 2],
        [4, 5, 2],
        [0, 1],
    )
    assert [pool.refs[block] for block in (0, 1)] == [
        2,
        2,
    ]  # A reads them until the copy has finished
    assert house.free == 2

    # Step 5: A is joined and lets go of 0 and 1. Now B is full and their only user; they are worth
    # keeping and two
    # blocks are free, so B copies out of them as well.
    plan = house.step()
    assert [joined.request.id for joined in plan.joined] == ["A"]
    (task,) = plan.compressions
    assert (task.request.id, task.sources, task.targets, task.dropped) == (
        "B",
        [0, 1, 3],
        [6, 7, 3],
        [0, 1],
    )
    assert [pool.refs[block] for block in (0, 1)] == [1, 1]
    assert house.free == 0

    # Step 6: B is joined. Blocks 0 and 1 have no owner, but whoever comes with this prefix finds
    # them.
    house.step()
    assert house.picture() == {"A": ("DECODE", [4, 5, 2], 0, 11), "B": ("DECODE", [6, 7, 3], 1, 10)}
    assert (pool.num_free, pool.num_cached) == (2, 2)


def test_without_keeping_the_last_user_compresses_in_place() -> None:
    house = sharers(**{"prefix.keep": "false"})
    house.steps(3)
    (task,) = house.step().compressions
    assert (task.request.id, task.targets, task.dropped) == ("B", [0, 1, 3], [])
    house.step()
    assert house.picture() == {"A": ("DECODE", [4, 5, 2], 0, 11), "B": ("DECODE", [0, 1, 3], 1, 10)}
    assert house.scheduler.state.pool.num_cached == 0  # compacted content is never matchable


def test_a_prefix_shared_to_the_last_full_block_takes_fresh_blocks_only() -> None:
    """A's prompt is exactly three blocks, B shares all of them: no own block is left for the empty
    one at the end.
    """
    house = stage(2)
    twelve = tuple(range(12))
    house.submit("A", twelve, 8)
    house.step()  # A slot 0  [xxxx][xxxx][xxxx]o      blocks 0 1 2
    house.submit("B", (*twelve, 99), 3)
    plan = (
        house.step()
    )  # A must compress before its next token; its blocks are matchable and worth keeping
    (task,) = plan.compressions
    assert (task.sources, task.targets, task.dropped) == ([0, 1, 2], [3, 4, 5], [0, 1, 2])
    assert [(chunk.request.id, chunk.start) for chunk in plan.prefills] == [("B", 12)]
    assert house.requests["B"].table == [0, 1, 2, 6]
    house.step()
    assert house.picture()["A"] == ("DECODE", [3, 4, 5], 0, 10)


def test_blocking_and_when_done_join() -> None:
    # blocking: compressed, joined and decoded in one step
    house = stage(1, join="blocking")
    house.submit("A", 4, 12)
    plan = house.steps(10)
    assert (
        [task.request.id for task in plan.compressions]
        == [task.request.id for task in plan.joined]
        == ["A"]
    )
    assert (plan.num_decodes, house.picture()["A"]) == (1, ("DECODE", [0, 1, 2], 0, 10))

    # when_done: steps go by until the copy is reported; only then it is joined
    house = stage(2, join="when_done")
    house.submit("A", 4, 30)
    house.submit("B", 1, 30)
    house.steps(10)
    assert house.picture()["A"][0] == "COMPRESSING"
    plan = house.steps(2)
    assert (plan.num_decodes, plan.joined) == (1, [])
    house.scheduler.finished_compressions([house.requests["A"].number])
    plan = house.step()
    assert ([task.request.id for task in plan.joined], plan.num_decodes) == (
        ["A"],
        1,
    )  # B's blocks are full now


def cache_sizes(prompt: int, output: int) -> list[int]:
    """Cache positions in use after each step of one slotted request alone: a sawtooth between 10
    and 13.
    """
    used = [prompt + 1]
    made = 1
    while made < output - 1:
        if used[-1] == 13:
            used.append(13)  # the step that compresses: no token
        used.append(10 if used[-1] == 13 else used[-1] + 1)
        made += 1
    return used


def test_the_sawtooth_of_one_request_by_formula() -> None:
    house = stage(1)
    request = house.submit("A", 4, 40)
    seen: list[int] = []
    while request.finish_ns < 0:
        house.step()
        if request.finish_ns < 0:
            seen.append(house.picture()["A"][3])
    assert seen == cache_sizes(4, 40)
    assert request.compressions == -(
        -(40 - 9) // 4
    )  # once after the 9th token, then once every b, while tokens lack

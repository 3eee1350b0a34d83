"""The calendar of decode steps against a loop over all members.

Cohorts that grow together against members that are asked one by one.
"""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from zlab.policies.core.block_pool import BlockPool, PromptContent
from zlab.policies.core.decode_batch import DecodeBatch, GrowthCalendar
from zlab.policies.core.journal import Int64Array, Journal
from zlab.policies.core.request import Request
from zlab.traces.schema import EVENT_COLUMNS, EventKind, Phase

SIZE = 4


@dataclass
class Naive:
    """A member whose tokens are counted one by one."""

    request: Request
    used: int
    blocks: int
    left: int

    def decides(self, floor: int | None, window: int) -> bool:
        """Must something be decided in the next step: its end, or (from the floor on) room or a
        window?
        """
        full = self.used > self.blocks * SIZE
        if self.left == 1:
            return True
        if floor is None or self.blocks < floor:
            return (
                full and window == SIZE and self.blocks + 1 == floor
            )  # its next block is all window
        begun = self.used > self.blocks * SIZE - window
        return full or (begun and self.request.slot < 0)


def member(number: int, prompt: int, left: int, slot: int) -> Request:
    request = Request(
        number, f"r{number}", 0, prompt, left, left, PromptContent(prompt, SIZE, None, None, None)
    )
    request.phase, request.slot, request.line = Phase.DECODE, slot, number
    request.target_tokens, request.cache_tokens = left, prompt + 1
    request.table = [1000 + n for n in range(-(-prompt // SIZE))]
    return request


MEMBERS = st.lists(
    st.tuples(st.integers(1, 14), st.integers(1, 25), st.integers(-1, 0)), min_size=1, max_size=5
)


@settings(max_examples=200)
@given(MEMBERS, st.sampled_from([None, 2, 3, 5]), st.integers(1, SIZE), st.integers(0, 6))
def test_the_calendar_stops_where_a_loop_would(
    members: list[tuple[int, int, int]], floor: int | None, window: int, num_blocks: int
) -> None:
    decoding, pool, journal = DecodeBatch(SIZE, floor, window), BlockPool(num_blocks), Journal()
    naive = []
    for number, (prompt, left, slot) in enumerate(members):
        request = member(number, prompt, left, slot)
        decoding.add(request)
        naive.append(Naive(request, prompt + 1, len(request.table), left))
    steps, free = 0, num_blocks
    while not any(one.decides(floor, window) for one in naive):
        needy = [one for one in naive if one.used > one.blocks * SIZE]
        if len(needy) > free:
            break
        free -= len(needy)
        for one in needy:
            one.blocks += 1
        for one in naive:
            one.used += 1
            one.left -= 1
        steps += 1
    taken = 0
    while (due := decoding.next_due()) is not None:
        stretch = len(decoding.fast_forward(due - decoding.tick, pool, journal))
        if not stretch:
            break
        taken += stretch
    assert taken == steps
    assert [(decoding.tokens(one.request)[0], len(one.request.table)) for one in naive] == [
        (one.used, one.blocks) for one in naive
    ]
    assert decoding.context_tokens == sum(one.used for one in naive)
    assert (pool.num_free, journal.step) == (free, steps)


def test_nothing_of_the_past_is_kept() -> None:
    """A driver that plans every step never asks `next_due`; the heap must not grow all the same."""
    decoding = DecodeBatch(SIZE, 2, 1)
    request = member(0, 1, 10_000, 0)
    decoding.add(request)
    for _ in range(2000):
        for due in (*decoding.take_due(decoding.tick), *decoding.take_growing()):
            decoding.settle(due)
            if due.cache_tokens > len(due.table) * SIZE:
                due.table.append(0)
            decoding.schedule(due)
        decoding.step()
    assert decoding.tokens(request) == (2002, 2000)
    assert len(decoding._heap) + len(decoding._due) + len(decoding._growth) < 10


STEPS = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.integers(0, 9), st.integers(0, SIZE)), max_size=3
        ),  # (member, steps to its next block)
        st.lists(st.integers(0, 9), max_size=2),  # members that leave after this step's growth
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=200)
@given(STEPS, st.sampled_from([None, 2, 3, 4]))
def test_a_cohort_grows_as_its_members_would(
    steps: list[tuple[list[tuple[int, int]], list[int]]], decides_from: int | None
) -> None:
    rows: list[list[int]] = []

    def sink(found: Int64Array, blocks: Int64Array) -> None:
        rows.extend(found.tolist())

    requests = [
        Request(n, f"r{n}", 0, 1, 1, 1, PromptContent(1, SIZE, None, None, None)) for n in range(10)
    ]
    for place, request in enumerate(requests):
        request.line = (place * 7) % 10  # running order is not the order of their numbers
    growth, pool, journal = GrowthCalendar(SIZE), BlockPool(1000), Journal(sink)
    growth.decide_from(decides_from)
    due: dict[int, int] = {}  # member -> step of its next block
    expected: list[list[int]] = []
    for tick, (coming, leaving) in enumerate(steps):
        for number, wait in coming:
            if number not in due:
                requests[number].table = []
                growth.add(requests[number], tick + wait)
                due[number] = tick + wait
        growing = sorted(
            (n for n, step in due.items() if step == tick), key=lambda n: requests[n].line
        )
        assert growth.num_needed(tick) == len(growing)
        journal.step = tick
        reached = growth.grow(tick, pool, journal) if growing else []
        for number in growing:
            expected.append([tick, EventKind.GREW, number, 0, 1])
            due[number] += SIZE
        decide = [
            n
            for n in growing
            if decides_from is not None and len(requests[n].table) >= decides_from
        ]
        assert [request.number for request in reached] == decide
        for number in decide:
            del due[number]
        for number in leaving:
            if due.pop(number, None) is not None:
                growth.remove(requests[number], tick if number % 2 else tick + 1)
    assert all((request.grow_tick >= 0) == (request.number in due) for request in requests)
    journal.flush()
    assert rows == expected
    assert all(len(row) == len(EVENT_COLUMNS) for row in rows)
    growth.clear()
    assert len(growth) == 0
    assert all(request.grow_tick < 0 for request in requests)

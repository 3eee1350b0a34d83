"""Cohorts that grow together against members that are asked one by one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core.blocks import BlockPool
from policies.core.events import ROW, Int64Array, Journal, Kind
from policies.core.growth import GrowthCalendar
from policies.core.prefix import PromptContent
from policies.core.request import Request

SIZE = 4
STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, SIZE)), max_size=3),  # (member, steps to its next block)
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

    requests = [Request(n, f"r{n}", 0, 1, 1, 1, PromptContent(1, SIZE, None, None, None)) for n in range(10)]
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
        growing = sorted((n for n, step in due.items() if step == tick), key=lambda n: requests[n].line)
        assert growth.num_needed(tick) == len(growing)
        journal.step = tick
        reached = growth.grow(tick, pool, journal) if growing else []
        for number in growing:
            expected.append([tick, Kind.GREW, number, 0, 1])
            due[number] += SIZE
        decide = [n for n in growing if decides_from is not None and len(requests[n].table) >= decides_from]
        assert [request.number for request in reached] == decide
        for number in decide:
            del due[number]
        for number in leaving:
            if due.pop(number, None) is not None:
                growth.remove(requests[number], tick if number % 2 else tick + 1)
    assert all((request.grow_tick >= 0) == (request.number in due) for request in requests)
    journal.flush()
    assert rows == expected
    assert all(len(row) == len(ROW) for row in rows)
    growth.clear()
    assert len(growth) == 0
    assert all(request.grow_tick < 0 for request in requests)

"""The calendar of decode steps against a loop over all members."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core.blocks import BlockPool
from policies.core.decoding import Decoding
from policies.core.events import Journal
from policies.core.prefix import PromptContent
from policies.core.request import Phase, Request

SIZE = 4


@dataclass
class Naive:
    """A member whose tokens are counted one by one."""

    request: Request
    used: int
    blocks: int
    left: int

    def decides(self, floor: int | None, window: int) -> bool:
        """Must something be decided in the next step: its end, or (from the floor on) room or a window?"""
        full = self.used > self.blocks * SIZE
        if self.left == 1:
            return True
        if floor is None or self.blocks < floor:
            return full and window == SIZE and self.blocks + 1 == floor  # its next block is all window
        begun = self.used > self.blocks * SIZE - window
        return full or (begun and self.request.slot < 0)


def member(number: int, prompt: int, left: int, slot: int) -> Request:
    request = Request(number, f"r{number}", 0, prompt, left, left, PromptContent(prompt, SIZE, None, None, None))
    request.phase, request.slot, request.line = Phase.DECODE, slot, number
    request.target_tokens, request.cache_tokens = left, prompt + 1
    request.table = [1000 + n for n in range(-(-prompt // SIZE))]
    return request


MEMBERS = st.lists(st.tuples(st.integers(1, 14), st.integers(1, 25), st.integers(-1, 0)), min_size=1, max_size=5)


@settings(max_examples=200)
@given(MEMBERS, st.sampled_from([None, 2, 3, 5]), st.integers(1, SIZE), st.integers(0, 6))
def test_the_calendar_stops_where_a_loop_would(
    members: list[tuple[int, int, int]], floor: int | None, window: int, num_blocks: int
) -> None:
    decoding, pool, journal = Decoding(SIZE, floor, window), BlockPool(num_blocks), Journal()
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
        stretch = len(decoding.advance(due - decoding.tick, pool, journal))
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
    decoding = Decoding(SIZE, 2, 1)
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

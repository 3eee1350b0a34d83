"""The decoding set and its calendar: a step costs as much as there is to decide in it.

Every decode step adds one token to each member. Nobody counts them one by one: a member's counts are those at its
anchor plus the steps since, and the calendar says in which step a member needs a block, meets its observation window,
must be compressed, or ends. Steps in between need no decision; `advance` takes them at once.
"""

from collections.abc import Iterable
from heapq import heappop, heappush

from policies.core.blocks import BlockPool
from policies.core.events import Journal, Kind
from policies.core.growth import NEVER, GrowthCalendar
from policies.core.request import Phase, Request

DECODES = int(Kind.DECODES)
LOOK_AHEAD = 64  # decode steps: whoever times them ahead should not do so in vain


class Decoding:
    """Members decode one token a step. `tick` counts decode steps; all tick arguments are values of it."""

    __slots__ = (
        "_announced",
        "_block_size",
        "_decides_from",
        "_due",
        "_floor",
        "_growth",
        "_heap",
        "_window_start",
        "changes",
        "context_tokens",
        "num_requests",
        "tick",
    )

    def __init__(self, block_size: int, floor: int | None, window: int) -> None:
        """`floor`: table length from which growth is a decision of the budget (None: never); `window`: w, in tokens."""
        self._block_size = block_size
        self._growth = GrowthCalendar(block_size)
        self._due: dict[int, list[Request]] = {}
        self._heap: list[int] = []  # ticks that have (or had) a due list
        self.tick = 0
        self.num_requests = 0
        self.changes = 0  # times somebody came or went: a driver that keeps the set elsewhere sees when to look again
        self.context_tokens = 0  # cache positions the members read in the next decode step
        self._announced = 0  # decodes a step, as the journal has it
        self._tune(floor, window, floor)

    def _tune(self, floor: int | None, window: int, lowest: int | None) -> None:
        """`lowest`: table length from which room may be a decision for somebody (after a change less than `floor`)."""
        self._floor = floor
        self._window_start = self._block_size - window  # tokens the last block may hold without a slot
        # a window as long as a block begins with the block itself
        self._decides_from = None if lowest is None else lowest - (window == self._block_size)
        self._growth.decide_from(self._decides_from)

    def retune(self, members: Iterable[Request], floor: int | None, window: int, lowest: int | None) -> None:
        """From now on the calendar goes by another budget and window; `members` are all there are, settled."""
        self._growth.clear()
        self._due.clear()
        self._heap.clear()
        self._tune(floor, window, lowest)
        for request in members:
            self.schedule(request)

    def decide_from(self, held: int) -> bool:
        """See to it that room is a decision from `held` blocks on; whether it was not before."""
        first = held - (self._window_start == 0)
        if self._decides_from is not None and self._decides_from <= first:
            return False
        self._decides_from = first
        self._growth.decide_from(first)
        return True

    def settle(self, request: Request) -> None:
        """Write down the tokens since the anchor."""
        steps = self.tick - request.anchor
        request.cache_tokens += steps
        request.generated += steps
        request.anchor = self.tick

    def settle_if_member(self, request: Request) -> None:
        """Bring the counts of any request up to now."""
        if request.phase is Phase.DECODE:
            self.settle(request)

    def tokens(self, request: Request) -> tuple[int, int]:
        """(cache positions in use, output tokens) of a request now, member or not."""
        steps = self.tick - request.anchor if request.phase is Phase.DECODE else 0
        return request.cache_tokens + steps, request.generated + steps

    def add(self, request: Request) -> None:
        """Take in a request whose counts hold now; it is part of the next decode step."""
        request.anchor = self.tick
        self.num_requests += 1
        self.changes += 1
        self.context_tokens += request.cache_tokens
        self.schedule(request)

    def drop(self, request: Request) -> None:
        """Let a member go, its counts settled."""
        self.settle(request)
        self.num_requests -= 1
        self.changes += 1
        self.context_tokens -= request.cache_tokens
        request.due_tick = -1
        if request.grow_tick >= 0:
            self._growth.remove(request, self.tick)

    def decides(self, held: int) -> bool:
        """Whether one more block, or the next token, may need a decision for a member with `held` blocks."""
        return self._decides_from is not None and held >= self._decides_from

    def schedule(self, request: Request) -> None:
        """Enter a settled member's next events in the calendar; older entries of it no longer count."""
        size, held, tick = self._block_size, len(request.table), self.tick
        due = tick + request.target_tokens - request.generated - 1  # the step that gives its last token
        full = tick + held * size + 1 - request.cache_tokens  # the step that needs one more block
        if not self.decides(held):
            if request.grow_tick < 0 and full <= due:
                self._growth.add(request, full)
        else:
            if request.grow_tick >= 0:
                self._growth.remove(request, tick)
            due = min(due, full)
            floor = self._floor
            if request.slot < 0 and floor is not None and request.missed_window != held and held >= floor:
                due = min(due, tick + (held - 1) * size + self._window_start + 1 - request.cache_tokens)
        due = max(due, tick)
        request.due_tick = due
        entries = self._due.get(due)
        if entries is None:
            self._due[due] = [request]
            heappush(self._heap, due)
        else:
            entries.append(request)

    def reschedule_growth(self, request: Request) -> None:
        """A settled member has grown and is still free to grow: only the step of its next block has changed."""
        tick = self.tick + len(request.table) * self._block_size + 1 - request.cache_tokens
        if tick <= request.due_tick:
            self._growth.add(request, tick)

    def grow_all(self, pool: BlockPool, journal: Journal) -> list[Request]:
        """Give members that need a block in the next decode step one each, in running order, while there are any.

        Returns those that got none; for them the caller sees to it.
        """
        needed = self._growth.num_needed(self.tick)
        if needed > pool.num_free:
            return self.grow(self._growth.take(self.tick), pool, journal)
        if needed:
            self._grow_on(pool, journal)
        return []

    def grow(self, requests: list[Request], pool: BlockPool, journal: Journal) -> list[Request]:
        """The same for members that lack a block for the next decode step."""
        growing, lacking = requests[: pool.num_free], requests[pool.num_free :]
        if growing:
            self._decide_later(self._growth.take_in_grown(growing, self.tick, pool, journal))
        return lacking

    def take_growing(self) -> list[Request]:
        """Members that need a block in the next decode step; they are handed out once."""
        return self._growth.take(self.tick)

    def take_due(self, tick: int) -> list[Request]:
        """Members that end with the decode step `tick`, or have something to decide in it; handed out once."""
        while self._heap and self._heap[0] < tick:
            heappop(self._heap)
        return [request for request in self._due.pop(tick, ()) if request.due_tick == tick]

    def take_undecided(self) -> list[Request]:
        """Members with something to decide in the next decode step besides ending with it; handed out once."""
        if self._decides_from is None or self.tick not in self._due:
            return []
        due = self.take_due(self.tick)
        only_ending = [request for request in due if not self.decides(len(request.table))]
        if only_ending:
            self._due[self.tick] = only_ending
            heappush(self._heap, self.tick)
        return [request for request in due if self.decides(len(request.table))]

    def next_due(self) -> int | None:
        """The first decode step in which something must be decided, or None without members."""
        heap, due = self._heap, self._due
        while heap:
            tick = heap[0]
            if tick in due:
                if any(request.due_tick == tick for request in due[tick]):
                    return tick
                del due[tick]
            heappop(heap)
        return None

    def step(self) -> None:
        """One decode step has been carried out."""
        self.tick += 1
        self.context_tokens += self.num_requests

    def announce(self, num_decodes: int, journal: Journal) -> None:
        """Write down how many decode in the step, if that differs from the one before."""
        if num_decodes != self._announced:
            self._announced = num_decodes
            journal.emit(DECODES, -1, num_decodes)

    def quiet_steps(self, pool: BlockPool) -> int:
        """How many of the next `LOOK_AHEAD` decode steps need no decision and find the blocks they need."""
        due = self.next_due()
        if due is None:
            return 0
        steps = min(due - self.tick, LOOK_AHEAD)
        if steps <= 0 or pool.num_free >= self.num_requests * -(-steps // self._block_size):
            return steps
        return self._growth.num_steps_within(pool.num_free, self.tick, steps)

    def advance(self, num_steps: int, pool: BlockPool, journal: Journal) -> list[tuple[int, int]]:
        """Take up to `num_steps` decode steps that need no decision; returns (free, cached) blocks in each.

        Stops early before a step in which blocks would run out, or in which something new has fallen due.
        """
        blocks: list[tuple[int, int]] = []
        now_free = (pool.num_free, pool.num_cached)
        growth, start = self._growth, self.tick
        last = start + num_steps
        while self.tick < last:
            needed = growth.num_needed(self.tick)
            if needed:
                if needed > pool.num_free:
                    break
                last = min(last, self._grow_on(pool, journal))
                now_free = (pool.num_free, pool.num_cached)
            if self._announced != self.num_requests:
                self.announce(self.num_requests, journal)
            blocks.append(now_free)
            journal.step += 1
            self.tick += 1
        self.context_tokens += self.num_requests * (self.tick - start)
        return blocks

    def _grow_on(self, pool: BlockPool, journal: Journal) -> int:
        """Everyone who needs a block now gets one; returns the first step in which one of them has to decide."""
        reached = self._growth.grow(self.tick, pool, journal)
        return self._decide_later(reached) if reached else NEVER

    def _decide_later(self, reached: list[Request]) -> int:
        """Members with so many blocks that the next one is a decision; returns the first step with one."""
        for request in reached:
            self.settle(request)
            self.schedule(request)
        return min((request.due_tick for request in reached), default=NEVER)

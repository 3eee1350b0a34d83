"""The decode batch and its calendar of events, so that a step costs as much as it decides.

Every decode step adds one token to each member. No code counts them one by one: a member's counts
are those at its anchor plus the steps since, and the calendar knows the step in which a member
needs a block, enters its window, must be compressed, or ends. With blocks of 4 tokens and three
members:

    tick            0  1  2  3  4  5  6  7  8
    r1 (3 tokens)      B           B           B     B: needs a block
    r2 (4 tokens)   B           B           E        E: ends
    r3 (1 token)             B           B
    decided in         .        .        .           steps without a letter need no decision

`fast_forward` takes the steps between events at once. Members that need a block in the same step
form a cohort; the whole cohort moves on by the block size when it has grown.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from operator import attrgetter

from zlab.policies.core.block_pool import BlockPool
from zlab.policies.core.journal import Journal
from zlab.policies.core.request import Request
from zlab.traces.schema import EventKind, Phase

GREW = int(EventKind.GREW)
NEVER = 1 << 40  # beyond every step and every table
_line = attrgetter("line")


class Cohort:
    """Members that need a block in the same step, in running order.

    Attributes:
        reaches: Before this step no member holds as many blocks as call for a decision.
    """

    __slots__ = ("members", "reaches")

    def __init__(self, members: list[Request], reaches: int) -> None:
        self.members = members
        self.reaches = reaches


class GrowthCalendar:
    """Maps a decode step to the cohort that needs a block in it.

    A cohort that has grown moves on as a whole. A member belongs to one cohort; its `grow_tick` is
    the step under which it was entered, or -1 when it is no member.
    """

    __slots__ = ("_block_size", "_cohorts", "_decides_from")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._cohorts: dict[int, Cohort] = {}
        self._decides_from = NEVER

    def __len__(self) -> int:
        return len(self._cohorts)

    def clear(self) -> None:
        """Remove all members."""
        for tick in list(self._cohorts):
            self.take(tick)

    def decide_from(self, held: int | None) -> None:
        """Set the table length from which growth is a decision (None: never). A member that reaches
        it is removed.
        """
        self._decides_from = NEVER if held is None else held
        for cohort in self._cohorts.values():
            cohort.reaches = 0

    def add(self, request: Request, tick: int) -> None:
        """Add a request that needs its next block in step `tick`."""
        request.grow_tick = tick
        reaches = tick + (self._decides_from - len(request.table) - 1) * self._block_size
        cohort = self._cohorts.get(tick)
        if cohort is None:
            self._cohorts[tick] = Cohort([request], reaches)
            return
        insort(cohort.members, request, key=_line)
        cohort.reaches = min(cohort.reaches, reaches)

    def remove(self, request: Request, now: int) -> None:
        """Remove a member; `now` is the next step, or the one being planned."""
        size = self._block_size
        tick = max(request.grow_tick, now + (request.grow_tick - now) % size)
        request.grow_tick = -1
        for place in (tick, tick + size):  # it may have grown for this very step
            cohort = self._cohorts.get(place)
            if cohort is not None and request in cohort.members:
                cohort.members.remove(request)
                if not cohort.members:
                    del self._cohorts[place]
                return
        raise AssertionError(f"request {request.number} is to grow and stands in no cohort")

    def take(self, tick: int) -> list[Request]:
        """Remove and return all members that need a block in step `tick`, in running order."""
        cohort = self._cohorts.pop(tick, None)
        if cohort is None:
            return []
        for request in cohort.members:
            request.grow_tick = -1
        return cohort.members

    def num_needed(self, tick: int) -> int:
        """Return the number of blocks needed in step `tick`."""
        cohort = self._cohorts.get(tick)
        return len(cohort.members) if cohort is not None else 0

    def num_steps_within(self, num_free: int, now: int, most: int) -> int:
        """Return how many steps from `now` on, up to `most` and one block size, find the blocks
        they need.
        """
        steps = min(most, self._block_size)
        for step in range(steps):
            cohort = self._cohorts.get(now + step)
            if cohort is not None:
                num_free -= len(cohort.members)
                if num_free < 0:
                    return step
        return steps

    def grow(self, tick: int, pool: BlockPool, journal: Journal) -> list[Request]:
        """Give a block to each member that needs one in step `tick`, as far as blocks are free.

        Returns the members that must decide now.
        """
        return self._serve(self._cohorts.pop(tick), tick, pool, journal)

    def take_in_grown(
        self, requests: list[Request], tick: int, pool: BlockPool, journal: Journal
    ) -> list[Request]:
        """Like `grow`, for requests that `take` has removed, in running order: they become members
        again.
        """
        for request in requests:
            request.grow_tick = tick
        return self._serve(Cohort(requests, 0), tick, pool, journal)

    def _serve(self, cohort: Cohort, tick: int, pool: BlockPool, journal: Journal) -> list[Request]:
        members = cohort.members
        blocks = pool.take(len(members))
        for request, block in zip(members, blocks, strict=True):
            request.table.append(block)
        journal.emit_each(GREW, [request.number for request in members], blocks)
        reached = self._let_go(cohort, tick) if tick >= cohort.reaches else []
        if cohort.members:
            self._move(cohort, tick + self._block_size)
        return reached

    def _let_go(self, cohort: Cohort, tick: int) -> list[Request]:
        """Remove and return members that have just reached the number of blocks that calls for a
        decision.
        """
        decides_from = self._decides_from
        reached = [request for request in cohort.members if len(request.table) >= decides_from]
        for request in reached:
            request.grow_tick = -1
        cohort.members = [request for request in cohort.members if request.grow_tick >= 0]
        longest = max((len(request.table) for request in cohort.members), default=0)
        cohort.reaches = tick + (decides_from - longest) * self._block_size
        return reached

    def _move(self, cohort: Cohort, tick: int) -> None:
        other = self._cohorts.get(tick)
        if other is not None:
            cohort.members = sorted(other.members + cohort.members, key=_line)
            cohort.reaches = min(other.reaches, cohort.reaches)
        self._cohorts[tick] = cohort


DECODES = int(EventKind.DECODES)
LOOK_AHEAD = 64  # decode steps; a driver that computes their times ahead should not do so in vain


class DecodeBatch:
    """The requests that decode one token each step. `tick` counts decode steps; all tick arguments
    are values of it.
    """

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
        """Create an empty batch.

        Args:
            block_size: Tokens of a block.
            floor: Table length from which growth is a decision of the budget (None: never).
            window: Length w of the observation window, in tokens.
        """
        self._block_size = block_size
        self._growth = GrowthCalendar(block_size)
        self._due: dict[int, list[Request]] = {}
        self._heap: list[int] = []  # ticks that have, or had, a list of due members
        self.tick = 0
        self.num_requests = 0
        # counts members that joined or left, so that a driver with a copy of the batch knows when
        # to read it again
        self.changes = 0
        self.context_tokens = 0  # cache positions that the members read in the next decode step
        self._announced = 0  # number of decodes in a step, as the journal has it
        self._tune(floor, window, floor)

    def _tune(self, floor: int | None, window: int, lowest: int | None) -> None:
        """Set the thresholds. From `lowest` blocks on, growth may be a decision for some member
        (below `floor` after a change of policy).
        """
        self._floor = floor
        self._window_start = (
            self._block_size - window
        )  # tokens that the last block may hold without a slot
        # a window as long as a block begins with the block itself
        self._decides_from = None if lowest is None else lowest - (window == self._block_size)
        self._growth.decide_from(self._decides_from)

    def retune(
        self, members: Iterable[Request], floor: int | None, window: int, lowest: int | None
    ) -> None:
        """Apply another budget and window. `members` are all members, settled."""
        self._growth.clear()
        self._due.clear()
        self._heap.clear()
        self._tune(floor, window, lowest)
        for request in members:
            self.schedule(request)

    def decide_from(self, held: int) -> bool:
        """Make growth a decision from `held` blocks on; return whether it was not before."""
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
        """Return (cache positions in use, output tokens) of a request now, member or not."""
        steps = self.tick - request.anchor if request.phase is Phase.DECODE else 0
        return request.cache_tokens + steps, request.generated + steps

    def add(self, request: Request) -> None:
        """Add a request whose counts hold now; it is part of the next decode step."""
        request.anchor = self.tick
        self.num_requests += 1
        self.changes += 1
        self.context_tokens += request.cache_tokens
        self.schedule(request)

    def drop(self, request: Request) -> None:
        """Remove a member and settle its counts."""
        self.settle(request)
        self.num_requests -= 1
        self.changes += 1
        self.context_tokens -= request.cache_tokens
        request.due_tick = -1
        if request.grow_tick >= 0:
            self._growth.remove(request, self.tick)

    def decides(self, held: int) -> bool:
        """Whether the next block or token may need a decision for a member with `held` blocks."""
        return self._decides_from is not None and held >= self._decides_from

    def schedule(self, request: Request) -> None:
        """Enter a settled member's next events in the calendar; its older entries no longer
        count.
        """
        size, held, tick = self._block_size, len(request.table), self.tick
        due = (
            tick + request.target_tokens - request.generated - 1
        )  # the step that gives its last token
        full = tick + held * size + 1 - request.cache_tokens  # the step that needs one more block
        if not self.decides(held):
            if request.grow_tick < 0 and full <= due:
                self._growth.add(request, full)
        else:
            if request.grow_tick >= 0:
                self._growth.remove(request, tick)
            due = min(due, full)
            floor = self._floor
            if (
                request.slot < 0
                and not request.compressions  # a compressed request has a slot or needs none
                and floor is not None
                and request.window_lost_at != held
                and held >= floor
            ):
                due = min(
                    due, tick + (held - 1) * size + self._window_start + 1 - request.cache_tokens
                )
        due = max(due, tick)
        request.due_tick = due
        entries = self._due.get(due)
        if entries is None:
            self._due[due] = [request]
            heappush(self._heap, due)
        else:
            entries.append(request)

    def reschedule_growth(self, request: Request) -> None:
        """Enter the step of a settled member's next block again. The member has grown and is still
        free to grow.
        """
        tick = self.tick + len(request.table) * self._block_size + 1 - request.cache_tokens
        if tick <= request.due_tick:
            self._growth.add(request, tick)

    def grow_all(self, pool: BlockPool, journal: Journal) -> list[Request]:
        """Give one block to each member that needs one in the next decode step, in running order,
        while blocks are free.

        Returns the members that got none; the caller decides about them.
        """
        needed = self._growth.num_needed(self.tick)
        if needed > pool.num_free:
            return self.grow(self._growth.take(self.tick), pool, journal)
        if needed:
            self._grow_on(pool, journal)
        return []

    def grow(self, requests: list[Request], pool: BlockPool, journal: Journal) -> list[Request]:
        """Like `grow_all`, for members that lack a block for the next decode step."""
        growing, lacking = requests[: pool.num_free], requests[pool.num_free :]
        if growing:
            self._decide_later(self._growth.take_in_grown(growing, self.tick, pool, journal))
        return lacking

    def num_growing(self) -> int:
        """Return the number of members that need a block in the next decode step."""
        return self._growth.num_needed(self.tick)

    def take_growing(self) -> list[Request]:
        """Return the members that need a block in the next decode step. Each is returned once."""
        return self._growth.take(self.tick)

    def take_due(self, tick: int) -> list[Request]:
        """Return the members that end with decode step `tick` or have something to decide in it.
        Each is returned once.
        """
        while self._heap and self._heap[0] < tick:
            heappop(self._heap)
        return [request for request in self._due.pop(tick, ()) if request.due_tick == tick]

    def take_undecided(self) -> list[Request]:
        """Return the members that have something to decide in the next decode step other than to
        end. Each is returned once.
        """
        if self._decides_from is None or self.tick not in self._due:
            return []
        due = self.take_due(self.tick)
        only_ending = [request for request in due if not self.decides(len(request.table))]
        if only_ending:
            self._due[self.tick] = only_ending
            heappush(self._heap, self.tick)
        return [request for request in due if self.decides(len(request.table))]

    def next_due(self) -> int | None:
        """Return the first decode step with a decision, or None without members."""
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
        """Count one decode step as carried out."""
        self.tick += 1
        self.context_tokens += self.num_requests

    def announce(self, num_decodes: int, journal: Journal) -> None:
        """Write down how many requests decode in the step, if the number differs from the step
        before.
        """
        if num_decodes != self._announced:
            self._announced = num_decodes
            journal.emit(DECODES, -1, num_decodes)

    def uneventful_steps(self, pool: BlockPool) -> int:
        """Return how many of the next `LOOK_AHEAD` decode steps need no decision and find the
        blocks they need.
        """
        due = self.next_due()
        if due is None:
            return 0
        steps = min(due - self.tick, LOOK_AHEAD)
        if steps <= 0 or pool.num_free >= self.num_requests * -(-steps // self._block_size):
            return steps
        return self._growth.num_steps_within(pool.num_free, self.tick, steps)

    def fast_forward(
        self,
        num_steps: int,
        pool: BlockPool,
        journal: Journal,
        explain: Callable[[bool], None] | None = None,
    ) -> list[tuple[int, int]]:
        """Take up to `num_steps` decode steps that need no decision; return (free, cached) blocks
        in each.

        It stops before a step in which blocks would run out, or in which a new event is due.
        `explain` is called in the first step, before (False) and after (True) requests grow.
        """
        blocks: list[tuple[int, int]] = []
        now_free = (pool.num_free, pool.num_cached)
        growth, start = self._growth, self.tick
        last = start + num_steps
        while self.tick < last:
            needed = growth.num_needed(self.tick)
            if needed > pool.num_free:
                break
            if explain is not None:
                explain(False)
            if needed:
                last = min(last, self._grow_on(pool, journal))
                now_free = (pool.num_free, pool.num_cached)
            if explain is not None:
                explain(True)
                explain = None
            if self._announced != self.num_requests:
                self.announce(self.num_requests, journal)
            blocks.append(now_free)
            journal.step += 1
            self.tick += 1
        self.context_tokens += self.num_requests * (self.tick - start)
        return blocks

    def _grow_on(self, pool: BlockPool, journal: Journal) -> int:
        """Give a block to each member that needs one now; return the first step in which one of
        them must decide.
        """
        reached = self._growth.grow(self.tick, pool, journal)
        return self._decide_later(reached) if reached else NEVER

    def _decide_later(self, reached: list[Request]) -> int:
        """Enter members whose next block is a decision; return the first step that has one."""
        for request in reached:
            self.settle(request)
            self.schedule(request)
        return min((request.due_tick for request in reached), default=NEVER)

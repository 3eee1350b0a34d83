"""When members of the decoding set need one more block: cohorts that grow in the same step, every block size steps."""

from bisect import insort
from operator import attrgetter

from policies.core.blocks import BlockPool
from policies.core.events import Journal, Kind
from policies.core.request import Request

GREW = int(Kind.GREW)
NEVER = 1 << 40  # beyond every step and every table
_line = attrgetter("line")


class Cohort:
    """Members that need a block in the same step, in running order.

    Attributes:
        reaches: before this step no member comes to hold as many blocks as call for a decision.
    """

    __slots__ = ("members", "reaches")

    def __init__(self, members: list[Request], reaches: int) -> None:
        self.members = members
        self.reaches = reaches


class GrowthCalendar:
    """Decode step -> the cohort that needs a block in it. A cohort that has grown moves on as a whole.

    A member stands in one cohort. Its `grow_tick` is the step it was entered for, or -1 once it is no member.
    """

    __slots__ = ("_block_size", "_cohorts", "_decides_from")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._cohorts: dict[int, Cohort] = {}
        self._decides_from = NEVER

    def __len__(self) -> int:
        return len(self._cohorts)

    def clear(self) -> None:
        """Let all members go."""
        for tick in list(self._cohorts):
            self.take(tick)

    def decide_from(self, held: int | None) -> None:
        """Table length from which room is a decision (None: never): a member that reaches it goes."""
        self._decides_from = NEVER if held is None else held
        for cohort in self._cohorts.values():
            cohort.reaches = 0

    def add(self, request: Request, tick: int) -> None:
        """Take in a request that needs its next block in step `tick`."""
        request.grow_tick = tick
        reaches = tick + (self._decides_from - len(request.table) - 1) * self._block_size
        cohort = self._cohorts.get(tick)
        if cohort is None:
            self._cohorts[tick] = Cohort([request], reaches)
            return
        insort(cohort.members, request, key=_line)
        cohort.reaches = min(cohort.reaches, reaches)

    def remove(self, request: Request, now: int) -> None:
        """Let a member go; `now` is the step that comes next, or is being planned."""
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
        """Let all go that need a block in step `tick`; in running order."""
        cohort = self._cohorts.pop(tick, None)
        if cohort is None:
            return []
        for request in cohort.members:
            request.grow_tick = -1
        return cohort.members

    def num_needed(self, tick: int) -> int:
        """Blocks needed in step `tick`."""
        cohort = self._cohorts.get(tick)
        return len(cohort.members) if cohort is not None else 0

    def num_steps_within(self, num_free: int, now: int, most: int) -> int:
        """How many steps from `now` on, up to `most` and a block's size, find the blocks they need."""
        steps = min(most, self._block_size)
        for step in range(steps):
            cohort = self._cohorts.get(now + step)
            if cohort is not None:
                num_free -= len(cohort.members)
                if num_free < 0:
                    return step
        return steps

    def grow(self, tick: int, pool: BlockPool, journal: Journal) -> list[Request]:
        """One block for everyone who needs one in step `tick`, as many are free; returns those who must decide now."""
        return self._serve(self._cohorts.pop(tick), tick, pool, journal)

    def take_in_grown(self, requests: list[Request], tick: int, pool: BlockPool, journal: Journal) -> list[Request]:
        """As `grow`, for requests that `take` has let go, in running order: they are members again."""
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
        """Members that have just come to hold as many blocks as call for a decision."""
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

"""Query slots: a slot keeps the queries of one request's observation window until its compression.

A slot also reserves blocks, so that requests with a slot can always go on. With a pool of 10
blocks, N_max = 3 and 3 slots:

    slot      holder   blocks   reserved
    0         r1       2        3            r1 may grow to 3 blocks and is then compressed
    1         r4       3        3
    2         free     -        0            can be given: 3 + 3 + 3 <= 10
    without   r2       4        -            r2 can be preempted, so nothing is reserved for it

The sum of reserved blocks never exceeds the pool.
"""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from zlab.policies.core.plan import ConfigError, SchedulerLimits
from zlab.policies.core.policy import NeedsSlot, Policy


class QuerySlots:
    """`num_slots` slots; the lowest free one is given first.

    The blocks reserved for all holders fit the pool, so holders can go on when all other requests
    are preempted. After a change of policy there may be holders beyond `num_slots`, and holders
    with fewer reserved blocks than the new floor, because the pool has no more.

    Where the scorer needs no queries, a policy may do without slots (`slotless`): a compressed
    request then needs no further block, so nothing is reserved. Under a later policy with slots
    such a request gets none, because the queries of its tokens are gone. It is kept at its size and
    its blocks are reserved (`pin`).
    """

    __slots__ = (
        "_free",
        "_num_blocks",
        "_peaks",
        "_pins",
        "capacity",
        "floor",
        "needed",
        "num_slots",
        "total_peak",
        "window",
    )

    def __init__(self, policy: Policy, limits: SchedulerLimits) -> None:
        """Raise ConfigError when the slots and the budget cannot work in this pool."""
        self.needed = policy.slots.needed
        self.floor = policy.budget.floor(limits.block_size)
        self._num_blocks = limits.num_blocks
        self._check(policy, limits)
        # last positions of a block that a request may fill only with a slot
        self.window = 0 if self.slotless else min(policy.compression.window, limits.block_size)
        self.num_slots = (
            0
            if self.needed is NeedsSlot.NEVER
            else policy.slots.count(limits.num_blocks, self.floor)
        )
        if self.floor is not None and self.num_slots * self.floor > limits.num_blocks:
            raise ConfigError(
                f"{self.num_slots} query slots of {self.floor} blocks each need "
                f"{self.num_slots * self.floor} blocks, "
                f"but the pool has {limits.num_blocks}: room for "
                f"{limits.num_blocks // self.floor} slots"
            )
        if self.needed is not NeedsSlot.NEVER and self.num_slots < 1:
            raise ConfigError(f"at least one query slot is needed, not {self.num_slots}")
        # slots that exist; the largest number of all policies so far
        self.capacity = self.num_slots
        self._free = list(range(self.num_slots))
        heapify(self._free)
        self._peaks: dict[int, int] = {}
        # blocks of compressed requests without a slot, by number
        self._pins: dict[int, int] = {}
        self.total_peak = 0

    @property
    def slotless(self) -> bool:
        """Whether requests are compressed without a slot."""
        return self.floor is not None and self.needed is NeedsSlot.NEVER

    def succeed(self, old: "QuerySlots", held: Mapping[int, int], pins: Mapping[int, int]) -> None:
        """Take over another policy's slots.

        Args:
            old: The slots so far.
            held: Blocks of the holder of each slot that is kept.
            pins: Blocks of the compressed requests without a slot, by number.

        No holder gets more reserved blocks than before; `hold` may then raise them.
        """
        self.capacity = max(self.num_slots, old.capacity)
        self._free = [slot for slot in range(self.capacity) if slot not in held]
        self._peaks = {
            slot: max(num, min(old.peak(slot), self.floor or 0)) for slot, num in held.items()
        }
        self._pins = dict(pins)
        self.total_peak = sum(self._peaks.values()) + sum(self._pins.values())

    def _check(self, policy: Policy, limits: SchedulerLimits) -> None:
        window, size = policy.compression.window, limits.block_size
        if self.floor is None:
            if self.needed is NeedsSlot.AT_WINDOW:
                raise ConfigError(
                    "hybrid slots need a block budget: without one no window ever begins"
                )
            return
        if self.needed is NeedsSlot.NEVER and policy.compression.needs_queries:
            raise ConfigError(
                "a block budget needs query slots (constrained or hybrid), not slots = none: "
                f"the scorer {policy.compression.scorer!r} reads the queries of the window"
            )
        if not policy.compression.needs_queries:
            window = min(window, size)
        if not 1 <= window <= size:
            raise ConfigError(
                f"the observation window must be 1..block_size = 1..{size} tokens, not {window}"
            )
        if self.floor < 2:
            raise ConfigError(
                f"a budget of {self.floor} blocks keeps no token: it must be at least 2 blocks"
            )
        kept = (self.floor - 1) * size
        if window + policy.compression.sink > kept:
            raise ConfigError(
                f"window {window} + sink {policy.compression.sink} tokens are always kept, but a "
                f"budget of "
                f"{self.floor} blocks of {size} keeps {kept}"
            )
        if self.floor > limits.num_blocks:
            raise ConfigError(self._too_large(size))

    def _too_large(self, block_size: int) -> str:
        """Return the error that the budget does not fit the pool, with what would fit."""
        words = (
            f"a budget of {self.floor} blocks does not fit in a pool of {self._num_blocks}: "
            f"the pool needs at least {self.floor} blocks"
        )
        kept = (
            self._num_blocks - 1
        ) * block_size  # the last block of a budget is the one that fills up again
        return f"{words}, or the budget may keep at most {kept} tokens" if kept else words

    @property
    def unheld(self) -> list[int]:
        """Every slot without a holder, whether it may be given now or not."""
        return sorted(self._free)

    @property
    def num_free(self) -> int:
        """Number of slots without a holder that may be given."""
        return max(self.num_slots - len(self._peaks), 0)

    def can_give(self, num_held: int) -> bool:
        """Whether a slot is free and the pool holds all holders at their largest, a new one with
        `num_held` blocks included.
        """
        return self.num_slots > len(self._peaks) and self._fits(num_held)

    def can_give_back(self, num_held: int) -> bool:
        """Like `can_give`, for a compressed request that is swapped in: it needs a slot under every
        policy.
        """
        num_slots = self.num_slots or self.capacity
        return num_slots > len(self._peaks) and self._fits(num_held)

    def _fits(self, num_held: int) -> bool:
        return self.total_peak + max(self.floor or 0, num_held) <= self._num_blocks

    def give(self, num_held: int) -> int:
        """Give a slot. The caller has asked `can_give`."""
        slot = heappop(self._free)
        self._peaks[slot] = max(self.floor or 0, num_held)
        self.total_peak += self._peaks[slot]
        return slot

    def peak(self, slot: int) -> int:
        """Return the blocks reserved for the slot's holder."""
        return self._peaks[slot]

    def can_grow(self, slot: int, num_held: int) -> bool:
        """Whether the pool could hold all holders at their largest, this slot's holder with
        `num_held` blocks.
        """
        return self.total_peak + max(0, num_held - self._peaks[slot]) <= self._num_blocks

    def limit(self, slot: int) -> int:
        """Return the number of blocks from which growth is a decision for the holder: its reserved
        blocks, or the floor.
        """
        peak = self._peaks[slot]
        return peak if self.floor is None else min(peak, self.floor)

    def pin(self, number: int, num_held: int) -> None:
        """Reserve the blocks of a compressed request without a slot; it has `num_held` and gets no
        more.
        """
        self.total_peak += num_held - self._pins.get(number, 0)
        self._pins[number] = num_held

    def can_pin(self, num_held: int) -> bool:
        """Whether the pool holds all holders at their largest beside the pinned requests, a new one
        with `num_held` blocks included.
        """
        return self.total_peak + num_held <= self._num_blocks

    def pinned(self, number: int) -> int | None:
        """Return the blocks reserved for a compressed request without a slot; None: it has a slot
        or needs none.
        """
        return self._pins.get(number)

    def unpin(self, number: int) -> bool:
        """Release the blocks reserved for the request; return whether there were any."""
        num_held = self._pins.pop(number, 0)
        self.total_peak -= num_held
        return num_held > 0

    def limit_of_pinned(self, num_held: int) -> int:
        """Return the number of blocks with which a compressed request without a slot is compressed
        again.
        """
        return num_held if self.floor is None else min(num_held, self.floor)

    def lowest_limit(self) -> int | None:
        """Return the smallest limit of all, the floor included; None: no request is ever
        compressed.
        """
        lowest = min((*self._peaks.values(), *self._pins.values()), default=self.floor)
        return lowest if self.floor is None or lowest is None else min(lowest, self.floor)

    def hold(self, slot: int, num_held: int) -> None:
        """Record that the slot's holder has (or may reach) `num_held` blocks.

        The floor is reserved for it, or as much of it as the pool has.
        """
        others = self.total_peak - self._peaks[slot]
        peak = max(num_held, min(self.floor or 0, self._num_blocks - others))
        self.total_peak = others + peak
        self._peaks[slot] = peak

    def give_back(self, slot: int) -> None:
        """Take a slot back."""
        heappush(self._free, slot)
        self.total_peak -= self._peaks.pop(slot)

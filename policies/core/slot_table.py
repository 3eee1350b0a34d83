"""Query slots: where the queries of an observation window are kept until the compression that needs them."""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from policies.core.errors import ConfigError
from policies.core.limits import Limits
from policies.core.policy import NeedsSlot, Policy


class SlotTable:
    """`num_slots` slots, the lowest free one handed out first.

    The most blocks slotted requests may ever hold together is kept within the pool, so that they can always go on
    when everyone else has given way. After a change of the policy there may be holders beyond `num_slots`, and holders
    whose peak is below the new floor because the pool has no more to set aside.
    """

    __slots__ = ("_free", "_num_blocks", "_peaks", "capacity", "floor", "needed", "num_slots", "total_peak")

    def __init__(self, policy: Policy, limits: Limits) -> None:
        """Raise ConfigError when the slots and the budget cannot work in this pool."""
        self.needed = policy.slots.needed
        self.floor = policy.budget.floor(limits.block_size)
        self._num_blocks = limits.num_blocks
        self._check(policy, limits)
        self.num_slots = 0 if self.needed is NeedsSlot.NEVER else policy.slots.count(limits.num_blocks, self.floor)
        if self.floor is not None and self.num_slots * self.floor > limits.num_blocks:
            raise ConfigError(
                f"{self.num_slots} query slots of {self.floor} blocks each need {self.num_slots * self.floor} blocks, "
                f"but the pool has {limits.num_blocks}: room for {limits.num_blocks // self.floor} slots"
            )
        if self.needed is not NeedsSlot.NEVER and self.num_slots < 1:
            raise ConfigError(f"at least one query slot is needed, not {self.num_slots}")
        self.capacity = self.num_slots  # slots that there are, most of all policies so far
        self._free = list(range(self.num_slots))
        heapify(self._free)
        self._peaks: dict[int, int] = {}
        self.total_peak = 0

    def succeed(self, old: "SlotTable", held: Mapping[int, int]) -> None:
        """Take over from another policy's table: `held` says how many blocks the holder of each kept slot has.

        Nobody gets more set aside than before; `hold` may then raise it.
        """
        self.capacity = max(self.num_slots, old.capacity)
        self._free = [slot for slot in range(self.capacity) if slot not in held]
        self._peaks = {slot: max(num, min(old.peak(slot), self.floor or 0)) for slot, num in held.items()}
        self.total_peak = sum(self._peaks.values())

    def _check(self, policy: Policy, limits: Limits) -> None:
        window, size = policy.compression.window, limits.block_size
        if self.floor is None:
            if self.needed is NeedsSlot.AT_WINDOW:
                raise ConfigError("hybrid slots need a block budget: without one no window ever begins")
            return
        if self.needed is NeedsSlot.NEVER:
            raise ConfigError("a block budget needs query slots (constrained or hybrid), not slots = none")
        if not 1 <= window <= size:
            raise ConfigError(f"the observation window must be 1..block_size = 1..{size} tokens, not {window}")
        if self.floor < 2:
            raise ConfigError(f"a budget of {self.floor} blocks keeps no token: it must be at least 2 blocks")
        if self.floor > limits.num_blocks:
            raise ConfigError(self._too_large(size))

    def _too_large(self, block_size: int) -> str:
        """That the budget does not fit in the pool, and what would."""
        words = (
            f"a budget of {self.floor} blocks does not fit in a pool of {self._num_blocks}: "
            f"the pool needs at least {self.floor} blocks"
        )
        kept = (self._num_blocks - 1) * block_size  # a budget's last block is the one that fills up again
        return f"{words}, or the budget may keep at most {kept} tokens" if kept else words

    @property
    def unheld(self) -> list[int]:
        """Every slot that nobody holds, whether it may be given now or not."""
        return sorted(self._free)

    @property
    def num_free(self) -> int:
        """Slots that nobody holds and that may be given."""
        return max(self.num_slots - len(self._peaks), 0)

    def can_give(self, num_held: int) -> bool:
        """A slot is free, and the pool holds all slotted requests at their largest, this one with `num_held` blocks."""
        return self.num_slots > len(self._peaks) and self._fits(num_held)

    def can_give_back(self, num_held: int) -> bool:
        """As `can_give`, for a compressed request on its way back: it needs one whatever the policy is now."""
        num_slots = self.num_slots or self.capacity
        return num_slots > len(self._peaks) and self._fits(num_held)

    def _fits(self, num_held: int) -> bool:
        return self.total_peak + max(self.floor or 0, num_held) <= self._num_blocks

    def give(self, num_held: int) -> int:
        """Hand out a slot; the caller has asked `can_give`."""
        slot = heappop(self._free)
        self._peaks[slot] = max(self.floor or 0, num_held)
        self.total_peak += self._peaks[slot]
        return slot

    def peak(self, slot: int) -> int:
        """The most blocks the slot's holder may come to hold, as far as they are set aside."""
        return self._peaks[slot]

    def can_grow(self, slot: int, num_held: int) -> bool:
        """The pool could hold all slotted requests at their largest, this slot's holder with `num_held` blocks."""
        return self.total_peak + max(0, num_held - self._peaks[slot]) <= self._num_blocks

    def limit(self, slot: int) -> int:
        """Blocks from which on room is a decision for the slot's holder: what is set aside for it, or the floor."""
        peak = self._peaks[slot]
        return peak if self.floor is None else min(peak, self.floor)

    def lowest_limit(self) -> int | None:
        """The least limit of all, the floor included; None: nobody is ever compressed."""
        lowest = min(self._peaks.values(), default=self.floor)
        return lowest if self.floor is None or lowest is None else min(lowest, self.floor)

    def hold(self, slot: int, num_held: int) -> None:
        """The slot's holder has (or may come to) `num_held` blocks, more or fewer than before.

        The floor is set aside for it, or as much of it as there is.
        """
        others = self.total_peak - self._peaks[slot]
        peak = max(num_held, min(self.floor or 0, self._num_blocks - others))
        self.total_peak = others + peak
        self._peaks[slot] = peak

    def give_back(self, slot: int) -> None:
        """Take a slot back."""
        heappush(self._free, slot)
        self.total_peak -= self._peaks.pop(slot)

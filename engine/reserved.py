"""What a running engine has memory for: enough for every policy that it may come to run under."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import EngineError
from policies.core.limits import Limits
from policies.core.policy import Policy
from policies.core.slot_table import SlotTable


@dataclass(frozen=True)
class Reserved:
    """Sizes fixed when an engine is built. `num_slots` 0: no history is kept, nothing is ever compressed.

    Attributes:
        num_slots: query slots.
        window: last positions of a block whose queries a slot keeps, however short the window of the policy of now.
        num_rows: requests that may have blocks at once.
    """

    num_slots: int
    window: int
    num_rows: int

    @staticmethod
    def of(policies: Sequence[Policy], limits: Limits) -> "Reserved":
        """The most that any of the policies needs. Raises ConfigError where one cannot work within the limits."""
        needs = [Reserved._need(policy, limits) for policy in policies]
        return Reserved(
            max(need.num_slots for need in needs),
            max(need.window for need in needs),
            max(need.num_rows for need in needs),
        )

    @staticmethod
    def _need(policy: Policy, limits: Limits) -> "Reserved":
        # Where only a step's requests are bounded, more may hold blocks meanwhile, and each keeps its row.
        return Reserved(
            SlotTable(policy, limits).num_slots,
            min(policy.compression.window, limits.block_size),
            limits.num_blocks if policy.batching.limit_per_step else limits.max_running,
        )

    def check(self, policy: Policy, limits: Limits) -> None:
        """Raise EngineError, with the numbers, where the policy needs more; ConfigError where it cannot work at all."""
        need = self._need(policy, limits)
        lacks = [
            f"{wanted} {what}, {there} are reserved"
            for what, wanted, there in (
                ("query slots", need.num_slots, self.num_slots),
                ("queries a slot", need.window if need.num_slots else 0, self.window if self.num_slots else 0),
                ("requests with blocks at once", need.num_rows, self.num_rows),
            )
            if wanted > there
        ]
        if lacks:
            raise EngineError(
                f"policy {policy.name!r} needs more than this engine set aside when it started: {'; '.join(lacks)}; "
                "start it with this policy among may_become"
            )

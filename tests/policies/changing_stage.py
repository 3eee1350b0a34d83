"""A stage on which the policy changes: blocks of 4 tokens, a window of 2 and a budget of 3 blocks by default."""

from typing import Any

from policies.core.audit import audit
from policies.core.events import Kind
from policies.core.limits import Limits
from policies.core.policy import Policy
from policies.core.request import Request, Status
from policies.core.state import State
from policies.spec import load_policy, policy_mark
from tests.policies.stage import Stage

LIMITS = Limits(num_blocks=16, block_size=4, max_batched_tokens=64, max_running=16, max_model_len=200, host_blocks=40)
FULL = load_policy("full-kv:watermark_share=0.0")


def budgeted(slots: str = "hybrid", blocks: int = 3, num_slots: int = 0, window: int = 2, **more: Any) -> Policy:
    changes = {"budget.blocks": blocks, "budget.tokens": 0, "num_slots": num_slots, "window": window, **more}
    return load_policy(f"{slots}:watermark_share=0.0," + ",".join(f"{key}={value}" for key, value in changes.items()))


class House(Stage):
    """A stage whose policy can change."""

    def __init__(self, policy: Policy, limits: Limits = LIMITS) -> None:
        super().__init__(policy, limits)
        self.rows: list[tuple[int, ...]] = []
        self.state.journal._sink = lambda rows, blocks: self.rows.extend(tuple(row) for row in rows.tolist())

    @property
    def state(self) -> State:
        return self.scheduler.state

    def change(self, policy: Policy, mark: int | None = None) -> None:
        self.scheduler.replace_policy(policy, self.now, policy_mark(policy) if mark is None else mark)
        audit(self.scheduler)

    def count(self, kind: Kind, request: Request | None = None) -> int:
        self.state.journal.flush()
        return sum(1 for row in self.rows if row[1] == kind and (request is None or row[2] == request.number))

    def until(self, done: Any, most: int = 300) -> None:
        for _ in range(most):
            if done():
                return
            self.step()
        raise AssertionError("it never came about")

    def finish(self) -> None:
        self.until(lambda: not self.state.requests)
        assert self.state.pool.num_free == self.state.limits.num_blocks
        assert {one.status for one in self.requests.values()} == {Status.FINISHED}

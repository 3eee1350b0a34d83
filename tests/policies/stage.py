"""A stage on which the policy changes: blocks of 4 tokens, a window of 2 and a budget of 3 blocks
by default.

A scheduler driven by hand, a step at a time, that says who holds what.
"""

from typing import Any

from zlab.policies.core.invariants import check_plan, check_state
from zlab.policies.core.plan import SchedulerLimits, StepPlan
from zlab.policies.core.policy import Policy
from zlab.policies.core.request import Request
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.core.state import SchedulerState
from zlab.policies.spec import load_policy, policy_mark
from zlab.traces.schema import EventKind, Status
from zlab.traces.workload import TraceRequest


class Stage:
    """Requests by id; every step is audited and takes 1 ns."""

    def __init__(self, policy: Policy, limits: SchedulerLimits) -> None:
        self.scheduler = Scheduler(policy, limits)
        self.now = 0
        self.requests: dict[str, Request] = {}

    def submit(self, id: str, prompt: int | tuple[int, ...], output: int) -> Request:
        """A request arrives."""
        ids = prompt if isinstance(prompt, tuple) else None
        tokens = len(prompt) if isinstance(prompt, tuple) else prompt
        asked = TraceRequest(id, tokens, output, max_tokens=output, prompt_ids=ids)
        self.requests[id] = self.scheduler.submit(asked, self.now)
        return self.requests[id]

    def step(self) -> StepPlan:
        """Plan a step and carry it out."""
        plan = self.scheduler.plan(self.now)
        assert plan is not None, "there is nothing to do"
        check_plan(self.scheduler, plan)
        self.now += 1
        self.scheduler.commit(plan, self.now)
        check_state(self.scheduler)
        return plan

    def steps(self, count: int) -> StepPlan:
        """Several; returns the last."""
        return [self.step() for _ in range(count)][-1]

    def picture(self) -> dict[str, tuple[str, list[int], int, int]]:
        """For each living request: phase, blocks, slot (-1: none), cache positions in use."""
        decoding = self.scheduler.state.decoding
        return {
            request.id: (
                request.phase.name,
                list(request.table),
                request.slot,
                decoding.tokens(request)[0],
            )
            for request in self.scheduler.live()
        }

    @property
    def free(self) -> int:
        """Free blocks."""
        return self.scheduler.state.pool.num_free


LIMITS = SchedulerLimits(
    num_blocks=16,
    block_size=4,
    max_batched_tokens=64,
    max_running=16,
    max_model_len=200,
    host_blocks=40,
)
FULL = load_policy("full-kv:watermark_share=0.0")


def budgeted(
    slots: str = "hybrid", blocks: int = 3, num_slots: int = 0, window: int = 2, **more: Any
) -> Policy:
    changes = {
        "budget.blocks": blocks,
        "budget.tokens": 0,
        "num_slots": num_slots,
        "window": window,
        **more,
    }
    return load_policy(
        f"{slots}:watermark_share=0.0,"
        + ",".join(f"{key}={value}" for key, value in changes.items())
    )


class House(Stage):
    """A stage whose policy can change."""

    def __init__(self, policy: Policy, limits: SchedulerLimits = LIMITS) -> None:
        super().__init__(policy, limits)
        self.rows: list[tuple[int, ...]] = []
        self.state.journal._sink = lambda rows, blocks: self.rows.extend(
            tuple(row) for row in rows.tolist()
        )

    @property
    def state(self) -> SchedulerState:
        return self.scheduler.state

    def change(self, policy: Policy, mark: int | None = None) -> None:
        self.scheduler.replace_policy(
            policy, self.now, policy_mark(policy) if mark is None else mark
        )
        check_state(self.scheduler)

    def count(self, kind: EventKind, request: Request | None = None) -> int:
        self.state.journal.flush()
        return sum(
            1
            for row in self.rows
            if row[1] == kind and (request is None or row[2] == request.number)
        )

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

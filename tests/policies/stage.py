"""A scheduler driven by hand, a step at a time, that says who holds what."""

from policies.core.audit import audit, audit_plan
from policies.core.limits import Limits
from policies.core.plan import StepPlan
from policies.core.policy import Policy
from policies.core.request import Request
from policies.core.scheduler import Scheduler
from traces.workload import TraceRequest


class Stage:
    """Requests by id; every step is audited and takes 1 ns."""

    def __init__(self, policy: Policy, limits: Limits) -> None:
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
        audit_plan(self.scheduler, plan)
        self.now += 1
        self.scheduler.commit(plan, self.now)
        audit(self.scheduler)
        return plan

    def steps(self, count: int) -> StepPlan:
        """Several; returns the last."""
        return [self.step() for _ in range(count)][-1]

    def picture(self) -> dict[str, tuple[str, list[int], int, int]]:
        """For each living request: phase, blocks, slot (-1: none), cache positions in use."""
        decoding = self.scheduler.state.decoding
        return {
            request.id: (request.phase.name, list(request.table), request.slot, decoding.tokens(request)[0])
            for request in self.scheduler.live()
        }

    @property
    def free(self) -> int:
        """Free blocks."""
        return self.scheduler.state.pool.num_free

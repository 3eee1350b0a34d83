"""A scheduler that recounts itself at every step boundary, wherever it is put to work."""

from policies.core.audit import audit, audit_plan
from policies.core.plan import NOTHING, Outcome, StepPlan
from policies.core.scheduler import Scheduler


class AuditedScheduler(Scheduler):
    """Decides as `Scheduler` does. A broken invariant is an AssertionError that names it, where it is first seen."""

    def plan(self, now_ns: int) -> StepPlan | None:
        """The plan, checked against what a step may do."""
        plan = super().plan(now_ns)
        if plan is not None:
            audit_plan(self, plan)
        return plan

    def commit(self, plan: StepPlan, now_ns: int, outcome: Outcome = NOTHING) -> None:
        """The step is over; all counts are counted again."""
        super().commit(plan, now_ns, outcome)
        audit(self)

    def advance(self, num_steps: int) -> list[tuple[int, int]]:
        """Steps without a decision, and the count after the last of them."""
        blocks = super().advance(num_steps)
        audit(self)
        return blocks

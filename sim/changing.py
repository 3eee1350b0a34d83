"""Changes of the policy in the middle of a simulated run."""

from collections.abc import Sequence
from dataclasses import dataclass

from policies.core.policy import Policy
from policies.spec import load_policy
from sim.cost import CostModel
from sim.errors import SimError


@dataclass(frozen=True, slots=True)
class Change:
    """Before `step` is planned, and before whoever arrives then is taken in, `policy` takes over.

    `cost`: what steps and compressions cost from then on; None: what they did.
    """

    step: int
    policy: Policy
    cost: CostModel | None = None


def read_change(spec: str) -> Change:
    """The change that a command line means by `STEP:POLICY`. Raises SimError, and PolicyError for the policy."""
    step, colon, policy = spec.partition(":")
    if not colon or not step.isdecimal() or not policy:
        raise SimError(f"a change must be STEP:POLICY, as 4000:hybrid, not {spec!r}")
    return Change(int(step), load_policy(policy))


def check_order(changes: Sequence[Change]) -> None:
    """Raise SimError unless the steps are 0 or more and none comes before the one in front of it."""
    before = 0
    for change in changes:
        if change.step < before:
            raise SimError(f"changes of the policy must stand in order of their steps: {change.step} after {before}")
        before = change.step

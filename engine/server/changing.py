"""A lane's policy changed between two steps, and changed back: wholly or not at all. On the engine's thread."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import EngineError
from engine.server.errors import ApiError
from engine.server.lanes import CANARY, LIVE, Lane
from policies.core.errors import ConfigError
from policies.core.policy import Policy
from policies.spec import policy_digest


@dataclass(frozen=True)
class Order:
    """What shall decide in a lane, and for what reason.

    Attributes:
        lane: "live" or "canary".
        policy: None, for the canary alone: it has none of its own any more and follows the live lane.
        why: for whoever asks later; `evidence` is an id of the registry, or None.
    """

    lane: str
    policy: Policy | None
    why: str
    evidence: str | None = None


def find_lane(lanes: Sequence[Lane], name: str) -> Lane:
    """The lane of that name. Raises ApiError (409) where the server has none."""
    for lane in lanes:
        if lane.name == name:
            return lane
    raise ApiError(
        409, f"this server has no {name} lane: start it with --canary-share", param="lane", code="no_such_lane"
    )


def carry_out(lanes: Sequence[Lane], order: Order) -> Lane:
    """Change the policy of the lane; requests in it go on.

    A canary lane without a policy of its own follows the live one, and so does one whose policy becomes live. Raises
    ApiError (409), and then nothing has changed, where a policy cannot work in a lane.
    """
    lane = find_lane(lanes, order.lane)
    live = lanes[0]
    if order.policy is None:
        if lane is live:
            raise ApiError(400, "the live lane needs a policy", param="policy", code="no_policy")
        policy, evidence = live.policy, live.evidence
    else:
        policy, evidence = order.policy, order.evidence
    moved = [(lane, policy)]
    followers = []
    if lane is live:
        followers = [other for other in lanes[1:] if other.follows_live or _same(other.policy, policy)]
        moved += [(other, policy) for other in followers]
    stood = tuple(each.stand() for each, _ in moved)
    _replace_all(moved)
    for each in lanes:
        each.undo = stood if each is lane else ()
    _begins(lane, order.why, evidence, follows_live=order.policy is None)
    for other in followers:
        _begins(other, f"follows live: {order.why}", evidence, follows_live=True)
    return lane


def take_back(lanes: Sequence[Lane], name: str, digest: str) -> Lane:
    """As if the last change, after which the policy of this digest decides in the lane, had not been.

    Raises ApiError (409), and then nothing has changed, where that is not the last change of all.
    """
    lane = find_lane(lanes, name)
    if not lane.undo or policy_digest(lane.policy) != digest:
        message = (
            f"the last change was not that policy {digest[:16]} took over in the {name} lane: nothing to take back"
        )
        raise ApiError(409, message, param="digest", code="not_the_last_change")
    stood, lane.undo = lane.undo, ()
    _replace_all([(each.lane, each.policy) for each in stood])
    for each in stood:
        _begins(each.lane, each.why, each.evidence, follows_live=each.follows_live)
        each.lane.since_unix_s, each.lane.before = each.since_unix_s, each.before
    return lane


def roll_back(lanes: Sequence[Lane], name: str, why: str) -> Lane:
    """The policy before the one of now decides again; a canary follows the live lane again.

    Raises ApiError (409) where the lane had no other before.
    """
    lane = find_lane(lanes, name)
    if name == CANARY:
        return carry_out(lanes, Order(CANARY, None, why))
    before = lane.before
    if before is None:
        raise ApiError(409, "the live lane has had no other policy since the server started", code="nothing_before")
    policy, evidence = before
    carry_out(lanes, Order(LIVE, policy, why, evidence))
    lane.before = None  # what just failed is nothing to go back to
    return lane


def _begins(lane: Lane, why: str, evidence: str | None, *, follows_live: bool) -> None:
    lane.why, lane.evidence, lane.since_unix_s = why, evidence, time.time()
    lane.follows_live = follows_live
    lane.num_changes += 1


def _replace_all(moved: Sequence[tuple[Lane, Policy]]) -> None:
    """Every lane under its new policy, or, where one of them cannot, all under the one before."""
    done: list[tuple[Lane, Policy]] = []
    for lane, policy in moved:
        before = lane.policy
        if _same(before, policy):
            continue
        try:
            lane.engine.loop.replace_policy(policy)
        except (EngineError, ConfigError) as error:
            for other, old in reversed(done):
                other.engine.loop.replace_policy(old)
            message = f"policy {policy.name!r} cannot work in the {lane.name} lane: {error}"
            raise ApiError(409, message, param="policy", code="policy_refused") from error
        done.append((lane, before))
    for lane, old in done:
        lane.before = (old, lane.evidence)


def _same(one: Policy, other: Policy) -> bool:
    return policy_digest(one) == policy_digest(other)

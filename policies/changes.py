"""A change of the policy in the middle of a run, and what a recording's manifest says of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.core.policy import Policy
from policies.spec import PolicyError, policy_digest, policy_from_toml, policy_to_toml


@dataclass(frozen=True)
class PolicyChange:
    """From `step` on `policy` decides; `time_ns` is the scheduler's time."""

    step: int
    time_ns: int
    policy: Policy

    def as_manifest(self) -> dict[str, Any]:
        """The change as an entry of a manifest's `policy_changes`."""
        return {
            "step": self.step,
            "time_ns": self.time_ns,
            "name": self.policy.name,
            "policy": policy_to_toml(self.policy),
            "digest": policy_digest(self.policy),
        }


def read_changes(manifest: Mapping[str, Any]) -> Sequence[PolicyChange]:
    """The changes of a recorded run, in order. Raises PolicyError for one that cannot be read or is not what it was."""
    found = []
    for place, entry in enumerate(manifest.get("policy_changes", ())):
        policy = policy_from_toml(entry["policy"], f"policy change {place} of the recording")
        if policy_digest(policy) != entry["digest"]:
            raise PolicyError(
                f"policy change {place} of the recording: {entry['name']!r} now has the digest "
                f"{policy_digest(policy)[:16]}, it was {entry['digest'][:16]}"
            )
        found.append(PolicyChange(int(entry["step"]), int(entry["time_ns"]), policy))
    return found

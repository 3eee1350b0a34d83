"""Does the evidence suffice for a policy to serve? If not: what exactly is missing."""

from collections.abc import Sequence

from policies.evidence import Evidence, Target
from policies.stored import StoredPolicy

MOST_NAMED = 3
SHORT = 12  # digits of a digest in a message


def newest_for(records: Sequence[Evidence], policy: StoredPolicy, code: str, target: Target) -> Evidence | None:
    """The last record about exactly this policy, code and target; `records` are in the order in which they came."""
    exact = [one for one in records if (one.policy.digest, one.code, one.target) == (policy.digest, code, target)]
    return exact[-1] if exact else None


def shortcomings(evidence: Evidence, policy: StoredPolicy, code: str, target: Target) -> list[str]:
    """Why this record does not let this policy serve there; empty where it does."""
    found = []
    if evidence.policy.digest != policy.digest:
        found.append(
            f"it is about policy {evidence.policy.digest[:SHORT]} ({evidence.policy.name}), "
            f"not about {policy.digest[:SHORT]} ({policy.name})"
        )
    if evidence.code != code:
        found.append(f"it was made with the code {evidence.code[:SHORT]} of policies/, which is {code[:SHORT]} now")
    if evidence.target.model != target.model:
        found.append(f"it is for model {evidence.target.model}, not {target.model}")
    if evidence.target.gpu != target.gpu:
        found.append(f"it is for GPU {evidence.target.gpu}, not {target.gpu}")
    if not evidence.passed:
        broken = [one for one in evidence.judged if not one.verdict.passed]
        words = [f"{one.verdict.gate.written} ({one.case.label})" for one in broken]
        words += [f"{case.label}: {case.error}" for case in evidence.cases if case.error]
        found.append(f"it did not pass: {'; '.join(words)}")
    return found


def what_is_missing(records: Sequence[Evidence], policy: StoredPolicy, code: str, target: Target) -> str:
    """Empty where the newest record about exactly this suffices; else what records there are lack, nearest first."""
    newest = newest_for(records, policy, code, target)
    if newest is not None:
        lacks = shortcomings(newest, policy, code, target)
        return f"the newest evidence {newest.id[:SHORT]} of {newest.made_at}: {'; '.join(lacks)}" if lacks else ""
    if not records:
        return (
            f"there is no evidence on policy {policy.digest[:SHORT]} ({policy.name}) or another of that name: "
            "`zlab validate --registry` makes it"
        )
    numbered = list(enumerate(records))  # of equally near ones the newest first
    ranked = sorted(numbered, key=lambda pair: (len(shortcomings(pair[1], policy, code, target)), -pair[0]))
    lines = [
        f"evidence {one.id[:SHORT]} of {one.made_at}: {'; '.join(shortcomings(one, policy, code, target))}"
        for _, one in ranked[:MOST_NAMED]
    ]
    return " | ".join(lines)

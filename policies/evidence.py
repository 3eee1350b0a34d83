"""Evidence: what was measured of a policy before it may serve, and whether that suffices.

A record names the policy (settings and own sources), the code that decides, the workloads by hash
and seeds, GPU, model, limits and costs, the measurements of each case, and the verdict of each
gate. Its id is the SHA-256 of its canonical JSON: a changed figure makes another record, and a
record that does not agree with its id is not read.
"""

import hashlib
import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zlab.policies.gates import (
    QUALITY,
    EvidenceMinimum,
    Gates,
    GateVerdict,
    gates_from_list,
    worst,
)
from zlab.policies.snapshot import PolicySnapshot, stored_from_dict

FORMAT = "zlab-evidence/1"
ID = "id"
ENDS = ("finished", "refused", "aborted", "failed")  # metrics that count requests
NEEDED = ("format", "policy", "code", "target", "setup", "gates", "cases", "passed", "made_at")


class EvidenceError(ValueError):
    """Evidence is unreadable or insufficient; the message says which record and what is missing."""


@dataclass(frozen=True, order=True)
class Target:
    """Where a policy serves: a model on a GPU, by the names that `zlab validate` knows."""

    model: str
    gpu: str

    def __str__(self) -> str:
        return f"{self.model} on {self.gpu}"


@dataclass(frozen=True)
class Case:
    """The results of policy and baseline on one workload, or the reason why there are none.

    Attributes:
        name: The trace as it was named.
        seed: Seed of a workload that is generated.
        workload_sha256: Hash over every request.
        measured, baseline: Metric -> value, as in `zlab.policies.gates`.
        digests: Decision digests of the policy's and of the baseline's run.
        error: What ended the run.
        rows: Rows read, kept and dropped (by reason) of the trace, as
            `zlab.traces.workload.WorkloadMeta.rows` gives them; None in evidence of release 0.1.0.
    """

    name: str
    seed: int | None
    workload_sha256: str
    measured: Mapping[str, float | str | None]
    baseline: Mapping[str, float | str | None] | None = None
    digests: tuple[str | None, str | None] = (None, None)
    error: str | None = None
    rows: Mapping[str, Any] | None = None

    @property
    def label(self) -> str:
        """Trace and seed as text."""
        return self.name if self.seed is None else f"{self.name} seed {self.seed}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {
            "name": self.name,
            "seed": self.seed,
            "workload_sha256": self.workload_sha256,
            "measured": dict(self.measured),
            "baseline": None if self.baseline is None else dict(self.baseline),
            "digests": list(self.digests),
            "error": self.error,
            "rows": None if self.rows is None else dict(self.rows),
        }


@dataclass(frozen=True)
class JudgedGate:
    """One gate over all cases: the case that decides, and its verdict."""

    case: Case
    verdict: GateVerdict


@dataclass(frozen=True)
class Evidence:
    """One record.

    Attributes:
        content: The record as plain JSON, without its id.
        policy: The policy that was judged.
        code: `zlab.policies.deciding_code.code_digest` of the code that decided.
        target: Where the record holds.
        gates: The conditions.
        cases: The measurements.
    """

    content: Mapping[str, Any]
    policy: PolicySnapshot
    code: str
    target: Target
    gates: Gates
    cases: tuple[Case, ...]

    @property
    def id(self) -> str:
        """SHA-256 of the content."""
        return content_id(self.content)

    @property
    def passed(self) -> bool:
        """Whether every gate held in every case."""
        return bool(self.content["passed"])

    @property
    def made_at(self) -> str:
        """Time of the record, in UTC."""
        return str(self.content["made_at"])

    @property
    def quality(self) -> Mapping[str, Any] | None:
        """What is known of answers under the policy: figures of `zlab evaluate` on the same policy,
        or `required` = False with the `reason` of the gates file; None where nothing is.
        """
        found = self.content.get("quality")
        return found if isinstance(found, Mapping) else None

    @property
    def num_requests(self) -> int:
        """Requests that ended under the policy, over all cases."""
        return int(sum(float(case.measured.get(name) or 0) for case in self.cases for name in ENDS))

    @property
    def lacks(self) -> list[str]:
        """Return what the record falls short of for a promotion, by its own minimum, in words."""
        num_relative = sum(gate.is_relative for gate in self.gates.gates)
        return self.gates.minimum.lacks(self.num_requests, num_relative)

    @property
    def extent(self) -> str:
        """Requests, traces with their seeds, and gates in words."""
        labels = ", ".join(dict.fromkeys(case.label for case in self.cases))
        reason = self.gates.minimum.reason
        words = f"{self.num_requests} requests of {labels}, {len(self.gates.gates)} gates"
        return f"{words}; fewer are enough: {reason}" if reason else words

    @property
    def judged(self) -> list[JudgedGate]:
        """Return each gate with its worst case."""
        return judge(self.gates, self.cases)

    def as_dict(self) -> dict[str, Any]:
        """Return the record with its id, as a file holds it."""
        return {ID: self.id, **self.content}


def judge(gates: Gates, cases: Sequence[Case]) -> list[JudgedGate]:
    """Judge every gate by its worst case. There must be a case."""
    rows = [gates.check(case.measured, case.baseline) for case in cases]
    found = []
    for at in range(len(gates.gates)):
        verdicts = [row[at] for row in rows]
        place = worst(verdicts)
        found.append(JudgedGate(cases[place], verdicts[place]))
    return found


def passes(gates: Gates, cases: Sequence[Case]) -> bool:
    """Whether there are gates and cases, no run ended early, and every gate held in every case."""
    whole = bool(gates.gates) and bool(cases) and not any(case.error for case in cases)
    return whole and all(one.verdict.passed for one in judge(gates, cases))


def make_evidence(
    policy: PolicySnapshot,
    code: str,
    target: Target,
    gates: Gates,
    cases: Sequence[Case],
    setup: Mapping[str, Any],
    made_at: str,
    **more: Any,
) -> Evidence:
    """Return a record of the measurements; `setup` and `more` are plain JSON. Values that are not
    finite become None.
    """
    content = {
        "format": FORMAT,
        "policy": policy.as_dict(),
        "code": code,
        "target": {"model": target.model, "gpu": target.gpu},
        "setup": dict(setup),
        "gates": gates.as_list(),
        "minimum": asdict(gates.minimum),
        "cases": [case.as_dict() for case in cases],
        "passed": passes(gates, cases),
        "made_at": made_at,
        **more,
    }
    return evidence_from_dict(json.loads(canonical(_finite(content))))


def evidence_from_dict(document: Any, source: str = "evidence") -> Evidence:
    """Return a record from JSON, with or without its id.

    Raises EvidenceError when it was changed, contradicts itself or is no record.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        said = document.get("format") if isinstance(document, dict) else None
        raise EvidenceError(f"{source}: not evidence: its format is {said!r}, not {FORMAT!r}")
    content = {key: value for key, value in document.items() if key != ID}
    said = document.get(ID)
    try:
        found = content_id(content)
    except ValueError as error:
        raise EvidenceError(f"{source}: holds what JSON has no number for: {error}") from error
    if said is not None and said != found:
        raise EvidenceError(
            f"{source}: was changed after it was made: its content amounts to {found[:16]}, "
            f"not to the "
            f"{str(said)[:16]} that it says"
        )
    missing = [key for key in NEEDED if key not in content]
    if missing:
        raise EvidenceError(f"{source}: lacks {', '.join(missing)}")
    try:
        policy = stored_from_dict(content["policy"])
        minimum = EvidenceMinimum(**content.get("minimum", {}))  # the defaults for older records
        gates = replace(gates_from_list(content["gates"]), minimum=minimum)
        target = Target(str(content["target"]["model"]), str(content["target"]["gpu"]))
        cases = tuple(_case(row) for row in content["cases"])
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(f"{source}: {error}") from error
    if content["passed"] is not passes(gates, cases):
        raise EvidenceError(
            f"{source}: says passed = {content['passed']}, which its own figures do not bear out"
        )
    return Evidence(content, policy, str(content["code"]), target, gates, cases)


def _case(row: Mapping[str, Any]) -> Case:
    first, second = row["digests"]
    measured, baseline = row["measured"], row["baseline"]
    return Case(
        row["name"],
        row["seed"],
        row["workload_sha256"],
        measured,
        baseline,
        (first, second),
        row["error"],
        row.get("rows"),
    )


def read_evidence(path: Path) -> Evidence:
    """Read a record from a file. Raises EvidenceError; OSError when there is no such file."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise EvidenceError(f"{path}: not valid JSON: {error}") from error
    if isinstance(document, dict) and ID not in document:
        raise EvidenceError(f"{path}: not evidence: it has no id")
    return evidence_from_dict(document, str(path))


def write_evidence(evidence: Evidence, path: Path) -> None:
    """Write the file atomically."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(evidence.as_dict(), indent=1) + "\n", "utf-8")
    os.replace(unfinished, path)


def canonical(content: Any) -> str:
    """Return the canonical JSON of a content: sorted keys, no spaces."""
    return json.dumps(
        content, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True
    )


def content_id(content: Any) -> str:
    """Return the SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical(content).encode()).hexdigest()


def _finite(value: Any) -> Any:
    """Return the value with None for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# What a server must have in common with the setup that its policy was judged in.
SETUP_FACTS = ("gpu", "model", "dtype_bytes", "kv_dtype", "num_blocks", "block_size")
# Share by which pools may differ: a server reserves memory for policies that may take over.
POOL_TOLERANCE = 0.05


def setup_facts(evidence: Evidence) -> dict[str, str | int]:
    """Return those of `SETUP_FACTS` that the record has; older records lack some."""
    setup = evidence.content["setup"]
    limits = setup.get("limits") or {}
    found = {name: setup.get(name, limits.get(name)) for name in SETUP_FACTS}
    found |= {"gpu": evidence.target.gpu, "model": evidence.target.model}
    return {name: value for name, value in found.items() if value is not None}


def setup_differences(judged: Mapping[str, Any], served: Mapping[str, Any]) -> list[str]:
    """Return how a server differs from the setup that a policy was judged in.

    Args:
        judged: `setup_facts` of the evidence.
        served: the same of the server; `num_blocks` may be a list of pools, one of which fits.

    Returns:
        One text for each fact that both have and that differs.
    """
    found = []
    for name in SETUP_FACTS:
        if name not in judged or name not in served:
            continue
        pools = served[name] if isinstance(served[name], list) else [served[name]]
        tolerance = POOL_TOLERANCE if name == "num_blocks" else 0.0
        if not any(_agree(judged[name], pool, tolerance) for pool in pools):
            here = " or ".join(map(str, dict.fromkeys(pools)))
            found.append(f"{name} is {here} here and {judged[name]} in the evidence")
    return found


def _agree(judged: Any, served: Any, tolerance: float) -> bool:
    if tolerance and isinstance(judged, int) and isinstance(served, int):
        return abs(judged - served) <= tolerance * judged
    return bool(judged == served)


MOST_NAMED = 3
SHORT = 12  # digits of a digest in a message


def newest_for(
    records: Sequence[Evidence], policy: PolicySnapshot, code: str, target: Target
) -> Evidence | None:
    """Return the last record about exactly this policy, code and target; `records` are in order of
    time.
    """
    exact = [
        one
        for one in records
        if (one.policy.digest, one.code, one.target) == (policy.digest, code, target)
    ]
    return exact[-1] if exact else None


def shortcomings(
    evidence: Evidence, policy: PolicySnapshot, code: str, target: Target
) -> list[str]:
    """Return the reasons why this record does not let this policy serve there; empty when it
    does.
    """
    found = []
    if evidence.policy.digest != policy.digest:
        found.append(
            f"it is about policy {evidence.policy.digest[:SHORT]} ({evidence.policy.name}), "
            f"not about {policy.digest[:SHORT]} ({policy.name})"
        )
    if evidence.code != code:
        found.append(
            f"it was made with other deciding code: {evidence.code[:SHORT]} then, "
            f"{code[:SHORT]} now"
        )
    if evidence.target.model != target.model:
        found.append(f"it is for model {evidence.target.model}, not {target.model}")
    if evidence.target.gpu != target.gpu:
        found.append(f"it is for GPU {evidence.target.gpu}, not {target.gpu}")
    if not evidence.passed:
        broken = [one for one in evidence.judged if not one.verdict.passed]
        words = [f"{one.verdict.gate.written} ({one.case.label})" for one in broken]
        words += [f"{case.label}: {case.error}" for case in evidence.cases if case.error]
        found.append(f"it did not pass: {'; '.join(words)}")
    found += evidence.lacks
    if compresses(policy) and not _answers_are_shown(evidence):
        found.append(
            f"{policy.name} compresses, and it does not show that answers stay right: "
            "`zlab validate --quality RESULTS` takes what `zlab evaluate` found, and a gates file "
            "may say [quality] required = false with a reason"
        )
    return found


def compresses(policy: PolicySnapshot) -> bool:
    """Whether requests are compressed under a stored policy; a budget of one's own counts as one
    that does. Runs no foreign code.
    """
    answer = tomllib.loads(policy.toml).get("budget", {})
    kind = answer.get("kind") if isinstance(answer, Mapping) else answer
    return bool(kind != "unlimited")


def _answers_are_shown(evidence: Evidence) -> bool:
    """Whether a gate on pass@1 held, or the gates file had a reason not to ask."""
    if evidence.quality is None:
        return False
    if evidence.quality.get("required") is False:
        return bool(str(evidence.quality.get("reason", "")).strip())
    return any(gate.metric == QUALITY for gate in evidence.gates.gates)


def what_is_missing(
    records: Sequence[Evidence], policy: PolicySnapshot, code: str, target: Target
) -> str:
    """Return nothing when the newest matching record suffices, else what the records lack, the
    nearest record first.
    """
    newest = newest_for(records, policy, code, target)
    if newest is not None:
        lacks = shortcomings(newest, policy, code, target)
        return (
            f"the newest evidence {newest.id[:SHORT]} of {newest.made_at}: {'; '.join(lacks)}"
            if lacks
            else ""
        )
    if not records:
        return (
            f"there is no evidence on policy {policy.digest[:SHORT]} ({policy.name}) or another "
            f"of that name: "
            "`zlab validate --registry` makes it"
        )
    numbered = list(enumerate(records))  # of equally near records, the newest first
    ranked = sorted(
        numbered, key=lambda pair: (len(shortcomings(pair[1], policy, code, target)), -pair[0])
    )
    lines = [
        f"evidence {one.id[:SHORT]} of {one.made_at}: "
        f"{'; '.join(shortcomings(one, policy, code, target))}"
        for _, one in ranked[:MOST_NAMED]
    ]
    return " | ".join(lines)

"""What a policy was seen to do before it may serve: a record that is named by its own content.

A record says which policy (settings and own sources), which code of `policies`, which workloads by hash and seeds,
which card, model, limits and costs, what was measured in every case, and how the gates stand. Its id is the SHA-256 of
its canonical JSON: whoever changes a figure has another record, and one that no longer agrees with its id is not read.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.gates import Gates, Verdict, gates_from_list, worst
from policies.stored import StoredPolicy, stored_from_dict

FORMAT = "zlab-evidence/1"
ID = "id"
NEEDED = ("format", "policy", "code", "target", "setup", "gates", "cases", "passed", "made_at")


class EvidenceError(ValueError):
    """Evidence that cannot be believed or does not suffice; the message says of what, and what is missing."""


@dataclass(frozen=True, order=True)
class Target:
    """Where a policy serves: a model on a card, by the names that `zlab validate` knows."""

    model: str
    gpu: str

    def __str__(self) -> str:
        return f"{self.model} on {self.gpu}"


@dataclass(frozen=True)
class Case:
    """One workload: what policy and baseline amounted to on it, or why there are no figures.

    Attributes:
        name: the trace as it was named.
        seed: of a workload that is made from one.
        workload_sha256: over every request.
        measured, baseline: metric -> value, as in `policies.measures`.
        digests: decision digests of the policy's and of the baseline's run.
        error: what ended the run.
    """

    name: str
    seed: int | None
    workload_sha256: str
    measured: Mapping[str, float | str | None]
    baseline: Mapping[str, float | str | None] | None = None
    digests: tuple[str | None, str | None] = (None, None)
    error: str | None = None

    @property
    def label(self) -> str:
        """Trace and seed for people."""
        return self.name if self.seed is None else f"{self.name} seed {self.seed}"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "name": self.name,
            "seed": self.seed,
            "workload_sha256": self.workload_sha256,
            "measured": dict(self.measured),
            "baseline": None if self.baseline is None else dict(self.baseline),
            "digests": list(self.digests),
            "error": self.error,
        }


@dataclass(frozen=True)
class Judged:
    """One gate over all cases: the case that decides, and its verdict."""

    case: Case
    verdict: Verdict


@dataclass(frozen=True)
class Evidence:
    """One record.

    Attributes:
        content: the record as plain JSON, without its id.
        policy: what was judged.
        code: `policies.code.code_digest` of what decided.
        target: where it holds.
        gates: what was asked.
        cases: what was seen.
    """

    content: Mapping[str, Any]
    policy: StoredPolicy
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
        """When, in UTC."""
        return str(self.content["made_at"])

    @property
    def judged(self) -> list[Judged]:
        """Each gate with the case that is worst for it."""
        return judge(self.gates, self.cases)

    def as_dict(self) -> dict[str, Any]:
        """The record with its id, as a file holds it."""
        return {ID: self.id, **self.content}


def judge(gates: Gates, cases: Sequence[Case]) -> list[Judged]:
    """Every gate by its worst case; there must be a case."""
    rows = [gates.check(case.measured, case.baseline) for case in cases]
    found = []
    for at in range(len(gates.gates)):
        verdicts = [row[at] for row in rows]
        place = worst(verdicts)
        found.append(Judged(cases[place], verdicts[place]))
    return found


def passes(gates: Gates, cases: Sequence[Case]) -> bool:
    """Whether there are gates and cases, no run broke off, and every gate held in every case."""
    whole = bool(gates.gates) and bool(cases) and not any(case.error for case in cases)
    return whole and all(one.verdict.passed for one in judge(gates, cases))


def make_evidence(
    policy: StoredPolicy,
    code: str,
    target: Target,
    gates: Gates,
    cases: Sequence[Case],
    setup: Mapping[str, Any],
    made_at: str,
    **more: Any,
) -> Evidence:
    """A record of what was seen; `setup` and `more` are plain JSON. What is not a finite number is left out as None."""
    content = {
        "format": FORMAT,
        "policy": policy.as_dict(),
        "code": code,
        "target": {"model": target.model, "gpu": target.gpu},
        "setup": dict(setup),
        "gates": gates.as_list(),
        "cases": [case.as_dict() for case in cases],
        "passed": passes(gates, cases),
        "made_at": made_at,
        **more,
    }
    return evidence_from_dict(json.loads(canonical(_finite(content))))


def evidence_from_dict(document: Any, source: str = "evidence") -> Evidence:
    """A record, with or without its id. Raises EvidenceError where it was changed, contradicts itself or is none."""
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
            f"{source}: was changed after it was made: its content amounts to {found[:16]}, not to the "
            f"{str(said)[:16]} that it says"
        )
    missing = [key for key in NEEDED if key not in content]
    if missing:
        raise EvidenceError(f"{source}: lacks {', '.join(missing)}")
    try:
        policy = stored_from_dict(content["policy"])
        gates = gates_from_list(content["gates"])
        target = Target(str(content["target"]["model"]), str(content["target"]["gpu"]))
        cases = tuple(_case(row) for row in content["cases"])
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(f"{source}: {error}") from error
    if content["passed"] is not passes(gates, cases):
        raise EvidenceError(f"{source}: says passed = {content['passed']}, which its own figures do not bear out")
    return Evidence(content, policy, str(content["code"]), target, gates, cases)


def _case(row: Mapping[str, Any]) -> Case:
    first, second = row["digests"]
    measured, baseline = row["measured"], row["baseline"]
    return Case(row["name"], row["seed"], row["workload_sha256"], measured, baseline, (first, second), row["error"])


def read_evidence(path: Path) -> Evidence:
    """A record from its file. Raises EvidenceError; OSError where there is no such file."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise EvidenceError(f"{path}: not valid JSON: {error}") from error
    if isinstance(document, dict) and ID not in document:
        raise EvidenceError(f"{path}: not evidence: it has no id")
    return evidence_from_dict(document, str(path))


def write_evidence(evidence: Evidence, path: Path) -> None:
    """Write the file in one move."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(evidence.as_dict(), indent=1) + "\n", "utf-8")
    os.replace(unfinished, path)


def canonical(content: Any) -> str:
    """The one JSON text of a content: sorted keys, no spaces."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def content_id(content: Any) -> str:
    """SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical(content).encode()).hexdigest()


def _finite(value: Any) -> Any:
    """The same with None for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

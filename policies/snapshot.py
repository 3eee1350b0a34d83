"""Policy snapshots: TOML, sources of own classes and digest; and policy changes in a recording's
manifest.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zlab.policies.core.policy import Policy
from zlab.policies.own import is_own
from zlab.policies.scorers import OwnScorer
from zlab.policies.spec import (
    NESTED,
    QUESTIONS,
    PolicyError,
    own_sources,
    policy_digest,
    policy_from_table,
    policy_from_toml,
    policy_to_toml,
    table_digest,
)

SOURCE_NAME = re.compile(r"(?:[^\0]*/)?[^/\0]{1,200}\.py:[^\W\d]\w*")


def manifest_entries(policy: Policy) -> dict[str, str]:
    """Return what a recording's manifest says of the policy that a run begins with."""
    return {
        "policy": policy.name,
        "policy_toml": policy_to_toml(policy),
        "policy_digest": policy_digest(policy),
    }


@dataclass(frozen=True)
class PolicySnapshot:
    """A stored policy.

    Attributes:
        name: As a command line or a file named it.
        toml: The settings.
        digest: `zlab.policies.spec.policy_digest` of the policy.
        sources: Text of each own class's file (`FILE.py:Class` -> text); of an entry point, the
            text of its class.
    """

    name: str
    toml: str
    digest: str
    sources: Mapping[str, str]

    def check(self) -> None:
        """Raise PolicyError when TOML and sources do not agree with the digest. This runs no own
        code.
        """
        try:
            found = table_digest(tomllib.loads(self.toml), self.sources)
        except tomllib.TOMLDecodeError as error:
            raise PolicyError(f"stored policy {self.name!r}: not valid TOML: {error}") from error
        if found != self.digest:
            raise PolicyError(
                f"stored policy {self.name!r} is not what it was: its digest says "
                f"{self.digest[:16]}, "
                f"its settings and sources amount to {found[:16]}"
            )

    def load(self) -> Policy:
        """Return the policy, with own classes made from the stored text.

        This runs the stored code: call it only on what a registry or an administrator vouches for.
        Raises PolicyError, also when an installed entry point is not the stored one.
        """
        self.check()
        if not self.sources:
            return policy_from_toml(self.toml, self.name)
        table = tomllib.loads(self.toml)
        with TemporaryDirectory(prefix="zlab-policy-") as folder:
            named = {
                spec: _written(Path(folder) / str(at), spec, text)
                for at, (spec, text) in _files(self.sources)
            }
            for answer in _answers(table):
                answer["kind"] = named.get(answer["kind"], answer["kind"])
            chosen = table.get("compression", {})
            if chosen.get("scorer") in named:
                chosen["scorer"] = named[chosen["scorer"]]
            policy = policy_from_table(table)
        _rename(policy, {there: spec for spec, there in named.items()})
        if policy_digest(policy) != self.digest:
            raise PolicyError(
                f"stored policy {self.name!r}: what is installed here is not what was stored"
            )
        return policy

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {
            "name": self.name,
            "digest": self.digest,
            "toml": self.toml,
            "sources": dict(self.sources),
        }


def store_policy(policy: Policy) -> PolicySnapshot:
    """Return the snapshot of a policy."""
    return PolicySnapshot(
        policy.name, policy_to_toml(policy), policy_digest(policy), own_sources(policy)
    )


def stored_from_dict(document: Any) -> PolicySnapshot:
    """Return a snapshot from what `as_dict` gave.

    Raises PolicyError on anything else, and when the digest does not fit.
    """
    if not isinstance(document, Mapping):
        raise PolicyError(
            f"a stored policy is an object with name, digest, toml and sources, not {document!r}"
        )
    words = [document.get(name) for name in ("name", "toml", "digest")]
    sources = document.get("sources", {})
    if not all(isinstance(word, str) for word in words) or not isinstance(sources, Mapping):
        raise PolicyError("a stored policy has texts name, toml and digest, and an object sources")
    if not all(isinstance(text, str) for pair in sources.items() for text in pair):
        raise PolicyError("the sources of a stored policy are texts by how the class was named")
    for spec in sources:
        if not spec.startswith("entry:") and not SOURCE_NAME.fullmatch(spec):
            raise PolicyError(f"a source is named FILE.py:Class or entry:NAME, not {spec[:200]!r}")
    name, toml, digest = (str(word) for word in words)
    stored = PolicySnapshot(name, toml, digest, dict(sources))
    stored.check()
    return stored


def _files(sources: Mapping[str, str]) -> list[tuple[int, tuple[str, str]]]:
    """Return the sources that are files, numbered. An entry point is loaded from where it is
    installed.
    """
    return list(
        enumerate(
            sorted((spec, text) for spec, text in sources.items() if not spec.startswith("entry:"))
        )
    )


def _written(folder: Path, spec: str, text: str) -> str:
    """Write the class's file into the folder and return its name there."""
    file, _, name = spec.rpartition(":")
    folder.mkdir()
    path = folder / Path(file).name
    path.write_text(text, "utf-8")
    return f"{path}:{name}"


def _answers(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every answer of a stored policy, and those it is made with, that are own classes."""
    answers = [table[question] for question in QUESTIONS if question in table]
    answers += [
        answer[name] for answer in answers for name in NESTED if isinstance(answer.get(name), dict)
    ]
    return [answer for answer in answers if is_own(answer["kind"])]


def _rename(policy: Policy, names: Mapping[str, str]) -> None:
    """Rename own classes to the names under which they were stored."""
    for question in QUESTIONS:
        answer = getattr(policy, question)
        for part in (answer, *(getattr(answer, name) for name in NESTED if hasattr(answer, name))):
            if getattr(part, "own_spec", None) in names:
                type(part).own_spec = names[part.own_spec]
    scorer = policy.compression.scorer
    if isinstance(scorer, OwnScorer):
        object.__setattr__(policy.compression, "scorer", scorer.named(names[str(scorer)]))


@dataclass(frozen=True)
class PolicyChange:
    """`policy` decides from `step` on; `time_ns` is the scheduler's time."""

    step: int
    time_ns: int
    policy: Policy

    def as_manifest(self) -> dict[str, Any]:
        """Return the change as an entry of a manifest's `policy_changes`."""
        return {
            "step": self.step,
            "time_ns": self.time_ns,
            "name": self.policy.name,
            "policy": policy_to_toml(self.policy),
            "digest": policy_digest(self.policy),
        }


def read_changes(manifest: Mapping[str, Any]) -> Sequence[PolicyChange]:
    """Return the changes of a recorded run in order. Raises PolicyError for one that is unreadable
    or altered.
    """
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

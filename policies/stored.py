"""A policy written down so that it can be taken up again elsewhere and later: TOML, sources of own classes, digest."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from policies.catalogue import NESTED, QUESTIONS
from policies.core.policy import Policy
from policies.own import is_own
from policies.spec import (
    PolicyError,
    own_sources,
    policy_digest,
    policy_from_table,
    policy_from_toml,
    policy_to_toml,
    table_digest,
)


@dataclass(frozen=True)
class StoredPolicy:
    """What is kept of a policy.

    Attributes:
        name: as a command line or a file named it.
        toml: every setting written out.
        digest: `policies.spec.policy_digest` of it.
        sources: text of each own class's file (`FILE.py:Class` -> text); of an entry point its class's text.
    """

    name: str
    toml: str
    digest: str
    sources: Mapping[str, str]

    def check(self) -> None:
        """Raise PolicyError where TOML and sources are not those that the digest was taken of. Runs no foreign code."""
        try:
            found = table_digest(tomllib.loads(self.toml), self.sources)
        except tomllib.TOMLDecodeError as error:
            raise PolicyError(f"stored policy {self.name!r}: not valid TOML: {error}") from error
        if found != self.digest:
            raise PolicyError(
                f"stored policy {self.name!r} is not what it was: its digest says {self.digest[:16]}, "
                f"its settings and sources amount to {found[:16]}"
            )

    def load(self) -> Policy:
        """The policy, with own classes made from the stored text, whatever their files hold by now.

        This runs the stored code: call it only on what a registry or an administrator vouches for. Raises PolicyError,
        also where an installed entry point is not the one that was stored.
        """
        self.check()
        if not self.sources:
            return policy_from_toml(self.toml, self.name)
        table = tomllib.loads(self.toml)
        with TemporaryDirectory(prefix="zlab-policy-") as folder:
            named = {spec: _written(Path(folder) / str(at), spec, text) for at, (spec, text) in _files(self.sources)}
            for answer in _answers(table):
                answer["kind"] = named.get(answer["kind"], answer["kind"])
            policy = policy_from_table(table)
        _rename(policy, {there: spec for spec, there in named.items()})
        if policy_digest(policy) != self.digest:
            raise PolicyError(f"stored policy {self.name!r}: what is installed here is not what was stored")
        return policy

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"name": self.name, "digest": self.digest, "toml": self.toml, "sources": dict(self.sources)}


def store_policy(policy: Policy) -> StoredPolicy:
    """The policy written down."""
    return StoredPolicy(policy.name, policy_to_toml(policy), policy_digest(policy), own_sources(policy))


def stored_from_dict(document: Any) -> StoredPolicy:
    """What `as_dict` gave, from outside. Raises PolicyError on anything else, and where the digest does not fit."""
    if not isinstance(document, Mapping):
        raise PolicyError(f"a stored policy is an object with name, digest, toml and sources, not {document!r}")
    words = [document.get(name) for name in ("name", "toml", "digest")]
    sources = document.get("sources", {})
    if not all(isinstance(word, str) for word in words) or not isinstance(sources, Mapping):
        raise PolicyError("a stored policy has texts name, toml and digest, and an object sources")
    if not all(isinstance(text, str) for pair in sources.items() for text in pair):
        raise PolicyError("the sources of a stored policy are texts by how the class was named")
    name, toml, digest = (str(word) for word in words)
    stored = StoredPolicy(name, toml, digest, dict(sources))
    stored.check()
    return stored


def _files(sources: Mapping[str, str]) -> list[tuple[int, tuple[str, str]]]:
    """Sources that are files, numbered; an entry point is loaded from where it is installed."""
    return list(enumerate(sorted((spec, text) for spec, text in sources.items() if not spec.startswith("entry:"))))


def _written(folder: Path, spec: str, text: str) -> str:
    """The class's file written into the folder; how it is named there."""
    file, _, name = spec.rpartition(":")
    folder.mkdir()
    path = folder / Path(file).name
    path.write_text(text, "utf-8")
    return f"{path}:{name}"


def _answers(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every answer of a written-out policy, and those it is made with, that are of the user's own."""
    answers = [table[question] for question in QUESTIONS]
    answers += [answer[name] for answer in answers for name in NESTED if isinstance(answer.get(name), dict)]
    return [answer for answer in answers if is_own(answer["kind"])]


def _rename(policy: Policy, names: Mapping[str, str]) -> None:
    """Own classes go by the names under which they were stored."""
    for question in QUESTIONS:
        answer = getattr(policy, question)
        for part in (answer, *(getattr(answer, name) for name in NESTED if hasattr(answer, name))):
            if getattr(part, "own_spec", None) in names:
                type(part).own_spec = names[part.own_spec]

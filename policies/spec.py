"""A policy <-> TOML, and the short form of the command line."""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from importlib.resources import files
from pathlib import Path
from typing import Any

from policies.catalogue import NESTED, QUESTIONS
from policies.core.policy import Policy
from policies.own import is_own, load_own, source_text

Table = dict[str, Any]


class PolicyError(ValueError):
    """A policy that cannot be read; the message names the value, the nearest known one and the choices."""


def unknown(what: str, value: str, choices: list[str]) -> PolicyError:
    """The error for a name that is not among the choices."""
    near = get_close_matches(value, choices, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return PolicyError(f"unknown {what} {value!r}{hint} (choices: {', '.join(choices)})")


def presets() -> dict[str, str]:
    """Name -> TOML text of every preset that ships."""
    folder = files("policies") / "presets"
    found = {Path(item.name).stem: item.read_text("utf-8") for item in folder.iterdir() if item.name.endswith(".toml")}
    return dict(sorted(found.items()))


def load_policy(spec: str) -> Policy:
    """The policy that a command line means.

    `NAME` of a preset, `FILE.toml`, or `FILE.py:Class`, each with `:key=value,...` behind it to vary it:
    `question=kind` replaces an answer, `question.field=value` a setting (just `field=value` where only one answer has
    such a field). Raises PolicyError.
    """
    base, changes = _split(spec)
    if is_own(base):
        table = _own_table(base)
    elif base.endswith(".toml"):
        path = Path(base)
        if not path.is_file():
            raise PolicyError(f"no policy file {base!r}")
        table = _read(path.read_text("utf-8"), base)
    else:
        known = presets()
        if base not in known:
            raise unknown("policy", base, list(known))
        table = _read(known[base], base)
    for key, value in changes:
        _change(table, key, value)
    table["name"] = spec if changes else table.get("name", base)
    return policy_from_table(table)


def policy_from_toml(text: str, source: str = "policy") -> Policy:
    """A policy from TOML text: `name`, and a table (or just a kind) for each question. Raises PolicyError."""
    return policy_from_table(_read(text, source))


def policy_from_table(table: Mapping[str, Any]) -> Policy:
    """A policy from a mapping as TOML gives it; every question must be answered, nothing else may stand there."""
    answers: Table = {}
    for key in table:
        if key != "name" and key not in QUESTIONS:
            raise unknown("question", key, ["name", *QUESTIONS])
    for question, kinds in QUESTIONS.items():
        if question not in table:
            raise PolicyError(f"the policy leaves the question {question!r} open (choices: {', '.join(kinds)})")
        answers[question] = _build(question, table[question], kinds)
    return Policy(name=str(table.get("name", "unnamed")), **answers)


def policy_to_table(policy: Policy) -> Table:
    """The mapping that `policy_from_table` reads: every setting written out."""
    table: Table = {"name": policy.name}
    for question, kinds in QUESTIONS.items():
        table[question] = _describe(question, getattr(policy, question), kinds)
    return table


def policy_to_toml(policy: Policy) -> str:
    """The policy as TOML text with every setting written out."""
    table = policy_to_table(policy)
    lines = [f"name = {json.dumps(table.pop('name'))}"]
    for question, answer in table.items():
        lines += ["", f"[{question}]"] + [f"{key} = {_toml_value(value)}" for key, value in answer.items()]
    return "\n".join(lines) + "\n"


def policy_digest(policy: Policy) -> str:
    """SHA-256 over every setting but the name; a user's own class counts by its source text."""
    return table_digest(policy_to_table(policy), own_sources(policy))


def policy_mark(policy: Policy) -> int:
    """What stands for the policy in a scheduler's journal: the first 60 bits of its digest."""
    return int(policy_digest(policy)[:15], 16)


def table_digest(table: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """The digest of a policy from what was written down of it: no class is loaded.

    `table` has every setting written out, as `policy_to_table` gives it; `sources` are those of `own_sources`. Raises
    PolicyError where one is missing.
    """
    settings = json.loads(json.dumps({key: value for key, value in table.items() if key != "name"}))
    for answer in _answers(settings):
        kind = answer.get("kind", "")
        if is_own(kind):
            if kind not in sources:
                raise PolicyError(f"the source text of {kind!r} is missing")
            answer["source"] = hashlib.sha256(sources[kind].encode()).hexdigest()
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def own_sources(policy: Policy) -> dict[str, str]:
    """Source text of every class of the user's own that the policy is made of, by how it was named."""
    found = {}
    for question in QUESTIONS:
        answer = getattr(policy, question)
        for part in (answer, *(getattr(answer, name) for name in NESTED if hasattr(answer, name))):
            if hasattr(part, "own_spec"):
                found[part.own_spec] = source_text(part)
    return found


def _answers(table: Table) -> Iterator[Table]:
    """The table of every answer, and of those that an answer is itself made with."""
    for answer in [table[question] for question in QUESTIONS if question in table]:
        yield answer
        yield from (answer[name] for name in NESTED if isinstance(answer.get(name), dict))


def _split(spec: str) -> tuple[str, list[tuple[str, str]]]:
    """Base and changes of a command-line policy; the colon of FILE.py:Class or entry:NAME is not a separator."""
    base, _, rest = spec.partition(":")
    if base.endswith(".py") or base == "entry":
        name, _, rest = rest.partition(":")
        base = f"{base}:{name}"
    changes = []
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise PolicyError(f"in policy {spec!r}: {part!r} is not of the form key=value")
        changes.append((key.strip(), value.strip()))
    return base, changes


def _read(text: str, source: str) -> Table:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{source}: not valid TOML: {error}") from error


def _own_table(spec: str) -> Table:
    """A preset with one answer replaced by the user's own class."""
    own = load_own(spec, PolicyError)
    question = getattr(own, "question", None)
    if question not in QUESTIONS:
        raise PolicyError(
            f"{spec}: the class must say which question it answers: question = one of {', '.join(QUESTIONS)}"
        )
    base = getattr(own, "base", "hybrid")
    known = presets()
    if base not in known:
        raise unknown(f"base of {spec}", base, list(known))
    table = _read(known[base], base)
    table[question] = {"kind": spec}
    table["name"] = spec
    return table


def _change(table: Table, key: str, value: str) -> None:
    """Apply one `key=value` of the command line."""
    if key in QUESTIONS:
        if value not in QUESTIONS[key] and not is_own(value):
            raise unknown(key, value, list(QUESTIONS[key]))
        table[key] = {"kind": value}
        return
    question, dot, name = key.partition(".")
    if not dot:
        owners = [q for q in QUESTIONS if key in _settings(q, table[q])]
        if len(owners) != 1:
            every = sorted({name for q in QUESTIONS for name in _settings(q, table[q])})
            if owners:
                raise PolicyError(f"{key!r} is a setting of {' and '.join(owners)}: write {owners[0]}.{key}=...")
            raise unknown("policy setting", key, [*QUESTIONS, *every])
        question, name = owners[0], key
    if question not in QUESTIONS:
        raise unknown("question", question, list(QUESTIONS))
    answer = _as_table(table[question])
    answer[name] = _parse(value)
    table[question] = answer


def _settings(question: str, answer: Any) -> list[str]:
    kind = _as_table(answer).get("kind", "")
    cls = QUESTIONS[question].get(kind)
    return [item.name for item in fields(cls)] if cls is not None else []


def _as_table(answer: Any) -> Table:
    return {"kind": answer} if isinstance(answer, str) else dict(answer)


def _parse(value: str) -> Any:
    """A command-line value as TOML would read it; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def _build(question: str, answer: Any, kinds: Mapping[str, type[Any]]) -> Any:
    """The value that answers a question, from its table."""
    if not isinstance(answer, str | Mapping):
        raise PolicyError(f"{question} must be a kind or a table with a kind, not {answer!r}")
    settings = _as_table(answer)
    kind = settings.pop("kind", None)
    if kind is None:
        raise PolicyError(f"{question} has no kind (choices: {', '.join(kinds)})")
    if is_own(str(kind)):
        cls = type(load_own(str(kind), PolicyError))
    elif kind in kinds:
        cls = kinds[kind]
    else:
        raise unknown(question, str(kind), list(kinds))
    known = {item.name: item for item in fields(cls)} if is_dataclass(cls) else {}
    for name, value in settings.items():
        if name not in known:
            raise unknown(f"setting of {question} {kind!r}", name, ["kind", *known])
        settings[name] = _convert(f"{question}.{name}", value, known[name])
    try:
        return cls(**settings)
    except (TypeError, ValueError) as error:
        raise PolicyError(f"{question} {kind!r}: {error}") from error


def _convert(where: str, value: Any, item: Any) -> Any:
    """A TOML value as the field's type; an int does for a float, nothing else is bent."""
    if item.name in NESTED:
        return _build(item.name, value, NESTED[item.name])
    default = item.default if item.default is not MISSING else item.default_factory()
    if isinstance(default, Enum):
        choices = [member.value for member in type(default)]
        if value not in choices:
            raise unknown(where, str(value), choices)
        return type(default)(value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(default):
        raise PolicyError(f"{where} must be a {type(default).__name__}, not {value!r}")
    return value


def _describe(question: str, answer: Any, kinds: Mapping[str, type[Any]]) -> Table:
    """The table that `_build` reads."""
    kind = next((name for name, cls in kinds.items() if type(answer) is cls), None) or answer.own_spec
    table: Table = {"kind": kind}
    for item in fields(answer) if is_dataclass(answer) else ():
        value = getattr(answer, item.name)
        if item.name in NESTED:
            value = _describe(item.name, value, NESTED[item.name])
        table[item.name] = value.value if isinstance(value, Enum) else value
    return table


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)

"""Read and write policies: TOML, and the short form of the command line."""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from importlib.resources import files
from pathlib import Path
from typing import Any

from zlab.policies.catalogue import CATALOGUE, PARTS
from zlab.policies.core.policy import SINCE, Policy, is_later_default
from zlab.policies.own import BASES, check_own, is_own, own_class, source_text
from zlab.policies.own import PolicyError as PolicyError  # noqa: PLC0414
from zlab.policies.scorers import OwnScorer, is_own_scorer
from zlab.traces.choices import unknown_choice

QUESTIONS: dict[str, dict[str, type[Any]]] = {
    name: {kind: choice.cls for kind, choice in group.choices.items()}
    for name, group in CATALOGUE.items()
}
NESTED: dict[str, dict[str, type[Any]]] = {
    name: {kind: choice.cls for kind, choice in group.choices.items()}
    for name, group in PARTS.items()
}


Table = dict[str, Any]


def unknown(what: str, value: str, choices: list[str]) -> PolicyError:
    """Return the error for a name that is not among the choices."""
    return PolicyError(unknown_choice(what, value, choices))


def presets() -> dict[str, str]:
    """Return the TOML text of every preset that ships, by name."""
    folder = files("zlab.policies") / "presets"
    found = {
        Path(item.name).stem: item.read_text("utf-8")
        for item in folder.iterdir()
        if item.name.endswith(".toml")
    }
    return dict(sorted(found.items()))


def load_policy(spec: str) -> Policy:
    """Return the policy that a command line names.

    The form is the `NAME` of a preset, `FILE.toml`, or `FILE.py:Class`, followed by
    `:key=value,...` to vary it: `question=kind` replaces an answer, `question.field=value` a
    setting (or `field=value` where only one answer has such a field). Raises PolicyError.
    """
    return policy_from_table(_table(spec))


def has_setting(spec: str, key: str) -> bool:
    """Return whether the policy that a command line means has such a setting.

    `key` is what may stand before a `=` behind the policy's name: a question, which every policy
    has, `question.field`, or the name of a field alone, which is also true where several answers
    have it. Raises PolicyError where the policy cannot be read.
    """
    table = _table(spec)
    if key in QUESTIONS:
        return True
    question, dot, name = key.partition(".")
    if dot:
        return question in QUESTIONS and name in _settings(question, table[question])
    return any(key in _settings(question, table[question]) for question in QUESTIONS)


def _table(spec: str) -> Table:
    """Return the mapping of the policy that a command line names."""
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
    for item in fields(Policy):
        if SINCE in item.metadata and item.name not in table:
            table[item.name] = _describe(
                item.name, item.default, QUESTIONS[item.name], every_setting=True
            )
    for key, value in changes:
        _change(table, key, value)
    table["name"] = spec if changes else table.get("name", base)
    return table


def policy_from_toml(text: str, source: str = "policy") -> Policy:
    """Read a policy from TOML: `name`, and a table (or a kind) for each question. Raises
    PolicyError.
    """
    return policy_from_table(_read(text, source))


def policy_from_table(table: Mapping[str, Any]) -> Policy:
    """Read a policy from a mapping as TOML gives it.

    Every question must be answered, and the mapping has no other keys but `name`. A question that
    release 0.1.0 does not ask may be left out: its default answers it. Raises PolicyError.
    """
    answers: Table = {}
    later = {item.name for item in fields(Policy) if SINCE in item.metadata}
    for key in table:
        if key != "name" and key not in QUESTIONS:
            raise unknown("question", key, ["name", *QUESTIONS])
    for question, kinds in QUESTIONS.items():
        if question not in table and question in later:
            continue
        if question not in table:
            raise PolicyError(
                f"the policy leaves the question {question!r} open (choices: {', '.join(kinds)})"
            )
        answers[question] = _build(question, table[question], kinds)
    return Policy(name=str(table.get("name", "unnamed")), **answers)


def policy_to_table(policy: Policy) -> Table:
    """Return the mapping that `policy_from_table` reads, with every setting."""
    return _written(policy, every_setting=True)


def policy_to_toml(policy: Policy, *, every_setting: bool = False) -> str:
    """The policy as TOML text, as it is stored and recorded.

    Every setting of release 0.1.0 is written out. A later one (`zlab.policies.core.policy.since`)
    is written where it is not at its default, or, with `every_setting`, always.
    """
    table = _written(policy, every_setting)
    lines = [f"name = {json.dumps(table.pop('name'))}"]
    for question, answer in table.items():
        lines += ["", f"[{question}]"] + [
            f"{key} = {_toml_value(value)}" for key, value in answer.items()
        ]
    return "\n".join(lines) + "\n"


def policy_digest(policy: Policy) -> str:
    """Return the SHA-256 over every setting but the name; an own class counts by its source text.

    A setting that came after release 0.1.0 counts when it is not at its default
    (`zlab.policies.core.policy.since`).
    """
    return _digest(_written(policy, every_setting=False), own_sources(policy))


def policy_mark(policy: Policy) -> int:
    """Return the number that identifies the policy in a scheduler's journal: the first 60 bits of
    its digest.
    """
    return int(policy_digest(policy)[:15], 16)


def table_digest(table: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """Return the digest of a stored policy without loading any own class.

    `table` is a mapping as `policy_to_toml` writes it; `sources` are those of `own_sources`. Raises
    PolicyError when a source is missing or an answer is no table.
    """
    return _digest(_without_later_defaults(table), sources)


def _digest(table: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    settings = json.loads(json.dumps({key: value for key, value in table.items() if key != "name"}))
    for answer in _answers(settings):
        kind = answer.get("kind", "")
        if is_own(kind):
            if kind not in sources:
                raise PolicyError(f"the source text of {kind!r} is missing")
            answer["source"] = hashlib.sha256(sources[kind].encode()).hexdigest()
        scorer = str(answer.get("scorer", ""))
        if kind in QUESTIONS["compression"] and is_own_scorer(scorer):
            if scorer not in sources:
                raise PolicyError(f"the source text of {scorer!r} is missing")
            answer["scorer_source"] = hashlib.sha256(sources[scorer].encode()).hexdigest()
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def own_sources(policy: Policy) -> dict[str, str]:
    """Return the source text of every own class and scorer of the policy, by the name it was
    given.
    """
    found = {}
    for question in QUESTIONS:
        answer = getattr(policy, question)
        for part in (answer, *(getattr(answer, name) for name in NESTED if hasattr(answer, name))):
            if hasattr(part, "own_spec"):
                found[part.own_spec] = source_text(part)
    scorer = policy.compression.scorer
    if isinstance(scorer, OwnScorer):
        found[str(scorer)] = scorer.source
    return found


def answer_kinds(table: Mapping[str, Any]) -> Iterator[tuple[str, type[Any] | None]]:
    """Yield the kind of every answer of a stored policy, and of those that an answer is made with.

    The class of an own answer is the base class of its question, whose defaults it may use; the
    class of an unknown kind is None.
    """
    declared = {item.name: item for item in fields(Policy)}
    for question, kinds in QUESTIONS.items():
        if question not in table:
            yield "", type(declared[question].default)
            continue
        answer = _as_table(table[question])
        yield _kind_and_class(question, answer, kinds)
        for name, others in NESTED.items():
            if name in answer:
                yield _kind_and_class(name, _as_table(answer[name]), others)


def _kind_and_class(
    question: str, answer: Table, kinds: Mapping[str, type[Any]]
) -> tuple[str, type[Any] | None]:
    kind = str(answer.get("kind"))
    return kind, BASES[question] if is_own(kind) else kinds.get(kind)


def _answers(table: Table) -> Iterator[Table]:
    """Return the table of every answer, and of those that an answer is itself made with."""
    for answer in [table[question] for question in QUESTIONS if question in table]:
        yield answer
        yield from (answer[name] for name in NESTED if isinstance(answer.get(name), dict))


def _split(spec: str) -> tuple[str, list[tuple[str, str]]]:
    """Split a command-line policy into base and changes. The colon of FILE.py:Class or entry:NAME
    is no separator.
    """
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


def with_setting(spec: str, key: str, value: object) -> str:
    """Return the command-line policy `spec` with one more setting.

    Args:
        spec: A policy as `load_policy` reads it.
        key: `question.field`; the same setting in `spec`, short or long, is replaced.
        value: The new value.
    """
    base, changes = _split(spec)
    kept = [one for one in changes if one[0] not in (key, key.partition(".")[2])]
    written = ",".join(f"{name}={setting}" for name, setting in [*kept, (key, value)])
    return f"{base}:{written}"


def _read(text: str, source: str) -> Table:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{source}: not valid TOML: {error}") from error


def _own_table(spec: str) -> Table:
    """Return a preset with one answer replaced by an own class."""
    own = own_class(spec)
    question, base = own.question, own.base
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
                raise PolicyError(
                    f"{key!r} is a setting of {' and '.join(owners)}: write {owners[0]}.{key}=..."
                )
            raise unknown("policy setting", key, [*QUESTIONS, *every])
        question, name = owners[0], key
    if question not in QUESTIONS:
        raise unknown("question", question, list(QUESTIONS))
    answer = _as_table(table[question])
    answer[name] = _parse(value)
    table[question] = answer


def _settings(question: str, answer: Any) -> list[str]:
    kind = str(_as_table(answer).get("kind", ""))
    cls = own_class(kind, question) if is_own(kind) else QUESTIONS[question].get(kind)
    return [item.name for item in fields(cls)] if is_dataclass(cls) else []


def _as_table(answer: Any) -> Table:
    return {"kind": answer} if isinstance(answer, str) else dict(answer)


def _parse(value: str) -> Any:
    """Read a command-line value as TOML would; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def _build(question: str, answer: Any, kinds: Mapping[str, type[Any]]) -> Any:
    """Return the value that answers a question, from its table."""
    if not isinstance(answer, str | Mapping):
        raise PolicyError(f"{question} must be a kind or a table with a kind, not {answer!r}")
    settings = _as_table(answer)
    kind = settings.pop("kind", None)
    if kind is None:
        raise PolicyError(f"{question} has no kind (choices: {', '.join(kinds)})")
    if is_own(str(kind)):
        cls = own_class(str(kind), question)
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
        value = cls(**settings)
    except (TypeError, ValueError) as error:
        raise PolicyError(f"{question} {kind!r}: {error}") from error
    if is_own(str(kind)):
        check_own(value)
    return value


def _convert(where: str, value: Any, item: Any) -> Any:
    """Convert a TOML value to the field's type. An int is accepted for a float; nothing else is
    converted.
    """
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


def _written(policy: Policy, every_setting: bool) -> Table:
    """Return the policy as a mapping.

    Without `every_setting`, later settings that are at their defaults are left out.
    """
    table: Table = {"name": policy.name}
    declared = {item.name: item for item in fields(policy)}
    for question, kinds in QUESTIONS.items():
        answer = getattr(policy, question)
        if every_setting or not is_later_default(declared[question], answer):
            table[question] = _describe(question, answer, kinds, every_setting)
    return table


def _describe(
    question: str, answer: Any, kinds: Mapping[str, type[Any]], every_setting: bool
) -> Table:
    """Return the table that `_build` reads."""
    kind = (
        next((name for name, cls in kinds.items() if type(answer) is cls), None) or answer.own_spec
    )
    table: Table = {"kind": kind}
    for item in fields(answer) if is_dataclass(answer) else ():
        value = getattr(answer, item.name)
        if not every_setting and is_later_default(item, value):
            continue
        if item.name in NESTED:
            value = _describe(item.name, value, NESTED[item.name], every_setting)
        if isinstance(value, OwnScorer):
            value = str(value)
        table[item.name] = value.value if isinstance(value, Enum) else value
    return table


def _without_later_defaults(table: Mapping[str, Any]) -> Table:
    """Return a stored policy without the later settings that are at their defaults.

    An own answer is left as it is, because what its class declares is not known here. Raises
    PolicyError.
    """
    declared = {item.name: item for item in fields(Policy)}
    found: Table = {}
    for question, answer in table.items():
        if question not in QUESTIONS:
            found[question] = answer
            continue
        shorter = _shorter(question, answer, QUESTIONS[question])
        default = declared[question].default
        later = SINCE in declared[question].metadata
        if not later or shorter != _describe(
            question, default, QUESTIONS[question], every_setting=False
        ):
            found[question] = shorter
    return found


def _shorter(question: str, answer: Any, kinds: Mapping[str, type[Any]]) -> Table:
    """Return the table of one answer without later settings at their defaults."""
    if not isinstance(answer, Mapping):
        raise PolicyError(f"{question} must be a table with a kind, not {answer!r}")
    cls = kinds.get(str(answer.get("kind")))
    declared = {item.name: item for item in fields(cls)} if cls is not None else {}
    found: Table = {}
    for name, value in answer.items():
        item = declared.get(name)
        if item is not None and name in NESTED:
            found[name] = _shorter(name, value, NESTED[name])
        elif (
            item is None
            or SINCE not in item.metadata
            or not is_later_default(item, _convert(f"{question}.{name}", value, item))
        ):
            found[name] = value
    return found


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{key} = {_toml_value(item)}" for key, item in value.items()) + " }"
        )
    return json.dumps(value)

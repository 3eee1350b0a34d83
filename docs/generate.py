"""MkDocs hook: the parts of the reference that are made from the code at every build.

A page of the reference holds lines `<!-- generated: NAME -->`, and each is replaced by the text
that `GENERATED` has under the name: option groups of a policy, commands with their options, tables
and events of a recording, fields of request bodies. None of it is committed, so none can differ
from the code. A line `# include: PATH` in a block of code is replaced by that file.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from zlab.cli.main import app
from zlab.engine.server.protocol import (
    ChatRequest,
    CompletionRequest,
    PolicyChangeRequest,
    PolicyUndoRequest,
    SamplingRequest,
)
from zlab.policies.catalogue import CATALOGUE, PARTS, OptionGroup
from zlab.policies.scorers import SCORERS
from zlab.policies.spec import presets
from zlab.traces.schema import (
    TABLES,
    BlockState,
    Cause,
    EventKind,
    Phase,
    Reason,
    Status,
    Verdict,
)

ROOT = Path(__file__).resolve().parents[1]  # of this machine; it has no place in a page
MARK = re.compile(r"^<!-- generated: (.+) -->$", flags=re.MULTILINE)
INCLUDE = re.compile(r"^# include: (.+)$", flags=re.MULTILINE)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table; a `|` in a cell is escaped."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in lines
    )


# policies


def _shown(value: Any) -> str:
    """Return a default value as the command line takes it."""
    if isinstance(value, Enum):
        return str(value.value)
    for group in PARTS.values():
        for kind, choice in group.choices.items():
            if type(value) is choice.cls:
                return kind
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(default: Any, listed: tuple[str, ...]) -> str:
    """Return the values that a setting of words may have."""
    if isinstance(default, Enum):
        listed = tuple(member.value for member in type(default))
    if type(default) in {
        choice.cls for group in PARTS.values() for choice in group.choices.values()
    }:
        listed = tuple(kind for group in PARTS.values() for kind in group.choices)
    if isinstance(default, bool):
        listed = ("true", "false")
    return ", ".join(f"`{value}`" for value in listed)


def policy_groups(groups: Mapping[str, OptionGroup]) -> str:
    """Return a section for each option group, with a table of settings for each choice."""
    parts = []
    for name, group in groups.items():
        parts.append(f"## {name}\n\n*{group.question[0].upper()}{group.question[1:]}*\n")
        for kind, choice in group.choices.items():
            parts.append(f"### `{name}={kind}` {{ #{name}-{kind} }}\n\n{choice.text}\n")
            value = choice.cls()
            rows = [
                (
                    f"`{item.name}`",
                    f"`{_shown(getattr(value, item.name))}`",
                    choice.settings[item.name].text,
                    _values(getattr(value, item.name), choice.settings[item.name].choices),
                )
                for item in fields(choice.cls)
            ]
            if rows:
                parts.append(table(("setting", "default", "meaning", "values"), rows))
    return "\n".join(parts)


def preset_table() -> str:
    """Return the presets that ship, with the first comment of their files."""
    rows = [
        (f"`{name}`", text.splitlines()[0].removeprefix("#").strip())
        for name, text in presets().items()
    ]
    return table(("preset", "what it is"), rows)


def scorer_table() -> str:
    """Return the scorers, with what each asks of the scheduler."""
    rows = [
        (
            f"`{name}`",
            f"{traits.about[:1].upper()}{traits.about[1:]}.",
            "yes" if traits.needs_queries else "no",
            "yes" if traits.keeps_history else "no",
        )
        for name, traits in SCORERS.items()
    ]
    return table(("scorer", "what it keeps", "reads queries", "keeps a history"), rows)


# the command line


def commands(command: Any = None, names: tuple[str, ...] = ("zlab",)) -> Iterator[tuple[str, Any]]:
    """Yield every command that runs something, with its full name."""
    command = typer.main.get_command(app) if command is None else command
    below = getattr(command, "commands", None)
    if below is None:
        yield " ".join(names), command
        return
    for name, one in below.items():
        yield from commands(one, (*names, name))


def _usage(name: str, command: Any) -> str:
    words = [name]
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            word = parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
            words.append(word if parameter.required else f"[{word}]")
    return " ".join([*words, "[OPTIONS]"])


def _default(parameter: Any) -> str:
    if isinstance(parameter.show_default, str):
        return parameter.show_default  # words for a default that is worked out
    value = parameter.default
    if parameter.required:
        return "required"
    if value is None or callable(value) or value in ([], ()):
        return ""
    if isinstance(value, bool):
        return ("on" if value else "off") if parameter.secondary_opts else ""
    words = str(value.value if isinstance(value, Enum) else value)
    return f"`{words.removeprefix(f'{ROOT}/')}`"


def option_rows(command: Any, context: Any) -> list[tuple[str, ...]]:
    """Return a row for each argument and option of a command: name, kind, default, meaning."""
    rows: list[tuple[str, ...]] = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        if parameter.param_type_name == "argument":
            names = f"`{parameter.name.upper()}`"
        else:
            names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        flag = getattr(parameter, "is_flag", False)
        kind = "" if flag else f"`{parameter.metavar or parameter.display_type(ctx=context)}`"
        rows.append((names, kind, _default(parameter), " ".join((parameter.help or "").split())))
    return rows


def command_line() -> str:
    """Return a section for each command."""
    root = typer.main.get_command(app)
    context = root.make_context("zlab", ["demo"], resilient_parsing=True)
    parts = [_paragraphs(root.help or "")]
    for name, command in commands(root):
        parts.append(f"## {name}\n\n```text\n{_usage(name, command)}\n```\n")
        parts.append(_paragraphs(command.help or ""))
        here = type(context)(command, info_name=name, parent=context)
        rows = option_rows(command, here)
        if rows:
            parts.append(table(("argument or option", "type", "default", "meaning"), rows))
    return "\n".join(parts)


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n")) + "\n"


# recordings


def recording_tables() -> str:
    """Return the columns of every table of a recording."""
    parts = []
    for name, columns in TABLES.items():
        rows = [(f"`{key}`", column.type, column.meaning) for key, column in columns.items()]
        parts.append(
            f"### `{name}` {{ #table-{name} }}\n\n" + table(("column", "type", "meaning"), rows)
        )
    return "\n".join(parts)


def event_table() -> str:
    """Return every kind of event: its code, what it says and what follows from it."""
    rows = []
    for kind in EventKind:
        effect = kind.effect
        follows = [
            f"phase `{effect.phase.label}`" if effect.phase is not None else "",
            f"blocks: {effect.blocks.value}" if effect.state is not None else "",
            f"tokens in the cache: {effect.tokens.value}" if effect.tokens.name != "NONE" else "",
        ]
        rows.append(
            (
                str(int(kind)),
                f"`{kind.label}`",
                kind.meaning,
                effect.value,
                "; ".join(part for part in follows if part),
            )
        )
    return table(("code", "event", "meaning", "value", "effect"), rows)


def code_tables() -> str:
    """Return phases, statuses, reasons and block states by code."""
    parts = []
    for title, kind in (
        ("Block states", BlockState),
        ("Phases of a request", Phase),
        ("Statuses", Status),
        ("Reasons", Reason),
        ("Verdicts", Verdict),
        ("Causes", Cause),
    ):
        rows = [
            (str(int(member)), f"`{member.label}`", str(getattr(member, "words", "")))
            for member in kind
        ]
        parts.append(f"### {title}\n\n" + table(("code", "name", "on screen"), rows))
    return "\n".join(parts)


# the server


def _type(schema: Mapping[str, Any]) -> str:
    """Return the type of a field of a JSON schema in words, with its bounds."""
    if "anyOf" in schema:
        kinds = dict.fromkeys(_type(one) for one in schema["anyOf"])
        return " or ".join(kind for kind in kinds if kind != "null")
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"array of {_type(schema['items'])}" if "items" in schema else "array"
    bounds = [
        f"{sign} {schema[key]:g}"
        for key, sign in (
            ("exclusiveMinimum", ">"),
            ("minimum", ">="),
            ("exclusiveMaximum", "<"),
            ("maximum", "<="),
        )
        if key in schema
    ]
    return " ".join([kind, f"({', '.join(bounds)})" if bounds else ""]).strip()


def body_fields(model: type[BaseModel], without: type[BaseModel] | None = None) -> str:
    """Return the fields of a request body; those of `without` are left out."""
    schema = model.model_json_schema()
    known = set() if without is None else set(without.model_fields)
    needed = set(schema.get("required", ()))
    rows = [
        (
            f"`{name}`",
            _type(found),
            "yes" if name in needed else "",
            " ".join(str(found.get("description", "")).split()),
        )
        for name, found in schema["properties"].items()
        if name not in known
    ]
    return table(("field", "type", "required", "meaning"), rows)


GENERATED: Mapping[str, Callable[[], str]] = {
    "presets": preset_table,
    "policy groups": lambda: policy_groups(CATALOGUE),
    "scorers": scorer_table,
    "policy parts": lambda: policy_groups(PARTS),
    "command line": command_line,
    "recording tables": recording_tables,
    "events": event_table,
    "codes": code_tables,
    "fields of both": lambda: body_fields(SamplingRequest),
    "fields of a completion": lambda: body_fields(CompletionRequest, SamplingRequest),
    "fields of a chat": lambda: body_fields(ChatRequest, SamplingRequest),
    "fields of a policy change": lambda: body_fields(PolicyChangeRequest),
    "fields of a policy undo": lambda: body_fields(PolicyUndoRequest),
}


def fill(markdown: str) -> str:
    """Replace each mark of a page by the text or the file that it names."""
    included = INCLUDE.sub(lambda found: (ROOT / found[1]).read_text("utf-8").rstrip(), markdown)
    return MARK.sub(lambda found: GENERATED[found[1]](), included)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this for each page before it renders it."""
    return fill(markdown)

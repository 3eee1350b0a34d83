"""`zlab policy`: which policies there are, what one says, whether a file is one."""

import json
from dataclasses import fields
from enum import Enum
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from policies.catalogue import NESTED, QUESTIONS
from policies.own import is_own
from policies.spec import PolicyError, load_policy, policy_digest, policy_to_table, policy_to_toml, presets
from zlab.options import AsJson
from zlab.outcome import WENT_WRONG, fail
from zlab.tables import console, plain_table

app = typer.Typer(no_args_is_help=True, help="List policies, show one, check a policy file.")

ASKS = {  # what each question of a policy asks
    "order": "who is next in the waiting line?",
    "admission": "when does a waiting request get blocks?",
    "batching": "what shares a step?",
    "slots": "who holds a query slot?",
    "budget": "how many blocks may a request hold?",
    "preemption": "who gives way, and how does it come back?",
    "prefix": "what is shared?",
    "compression": "which tokens are kept, and when does the request go on?",
}


@app.command("list")
def list_policies(as_json: AsJson = False) -> None:
    """List the presets, and every question a policy answers with its choices and their settings."""
    kept = {name: _first_comment(text) for name, text in presets().items()}
    if as_json:
        questions = {
            question: {kind: {name: _plain(value) for name, value in _settings(cls)} for kind, cls in kinds.items()}
            for question, kinds in QUESTIONS.items()
        }
        typer.echo(json.dumps({"presets": kept, "questions": questions}))
        return
    to = console()
    table = plain_table("preset", "")
    table.columns[1].justify = "left"
    for name, words in kept.items():
        table.add_row(name, escape(words))
    to.print(table)
    to.print()
    for question, kinds in QUESTIONS.items():
        to.print(f"[bold]{question}[/]: {ASKS[question]}")
        table = Table.grid(padding=(0, 2))
        for kind, cls in kinds.items():
            settings = ", ".join(f"{name}={_shown(value)}" for name, value in _settings(cls))
            table.add_row("", kind, escape(settings))
        to.print(table)
    to.print()
    to.print(
        "Vary a policy on the command line: PRESET:question=choice,question.setting=value,... as "
        "hybrid:prefix=none,join=blocking,budget.tokens=1024; or write it down: zlab policy show hybrid > mine.toml"
    )


@app.command()
def show(
    policy: Annotated[str, typer.Argument(help="A preset, a variant of one, FILE.toml, or FILE.py:Class.")],
    as_json: AsJson = False,
) -> None:
    """Print a policy as TOML with every setting written out: a file that `--policy FILE.toml` reads."""
    loaded = load_policy(policy)
    typer.echo(json.dumps(policy_to_table(loaded)) if as_json else policy_to_toml(loaded), nl=as_json)


@app.command()
def check(
    file: Annotated[str, typer.Argument(help="FILE.toml or FILE.py:Class.")],
    as_json: AsJson = False,
) -> None:
    """Check a policy file; exit code 1, with the nearest known name, when it is none."""
    path = file.rpartition(":")[0] if is_own(file) else file
    try:
        if not is_own(file) and not file.endswith(".toml"):
            raise PolicyError(f"{file}: a policy file is FILE.toml or FILE.py:Class")
        loaded = load_policy(file)
    except PolicyError as error:
        words = str(error)
        message = words if words.startswith((path, "no policy file")) else f"{file}: {words}"
        if as_json:
            typer.echo(json.dumps({"valid": False, "error": message}))
        raise fail(message, WENT_WRONG) from error
    digest = policy_digest(loaded)
    if as_json:
        typer.echo(json.dumps({"valid": True, "name": loaded.name, "digest": digest}))
    else:
        typer.echo(f"{file}: fine; policy {loaded.name!r}, digest {digest[:16]}")


def _first_comment(text: str) -> str:
    first = text.splitlines()[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def _settings(cls: type[Any]) -> list[tuple[str, Any]]:
    """Settings of a choice with their defaults."""
    value = cls()
    return [(item.name, getattr(value, item.name)) for item in fields(cls)]


def _plain(value: Any) -> Any:
    """A default for JSON."""
    if isinstance(value, Enum):
        return value.value
    for kinds in NESTED.values():
        for kind, cls in kinds.items():
            if type(value) is cls:
                return {"kind": kind} | {name: _plain(item) for name, item in _settings(cls)}
    return value


def _shown(value: Any) -> str:
    """A default for people: choices of a setting, if they are few, stand in its stead."""
    if isinstance(value, Enum):
        return "|".join(member.value for member in (value, *(m for m in type(value) if m is not value)))
    plain = _plain(value)
    return str(plain["kind"]) if isinstance(plain, dict) else json.dumps(plain) if not isinstance(plain, str) else plain

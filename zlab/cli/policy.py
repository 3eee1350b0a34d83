"""`zlab policy`: list the presets and the choices, show a policy as TOML, check a policy file."""

import json
from dataclasses import fields
from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zlab.cli.console import WENT_WRONG, MisuseError, console, fail, plain_table
from zlab.cli.options import AsJson
from zlab.policies.catalogue import CATALOGUE, PARTS, OptionGroup
from zlab.policies.own import is_own
from zlab.policies.spec import (
    PolicyError,
    load_policy,
    policy_digest,
    policy_to_table,
    policy_to_toml,
    presets,
)
from zlab.sim.specs import GPUS, vllm_defaults
from zlab.traces.choices import unknown_choice

app = typer.Typer(no_args_is_help=True, help="List policies, show one, check a policy file.")

GROUPS = {**CATALOGUE, **PARTS}
VLLM = "vllm"


@app.command("list")
def list_policies(
    group: Annotated[
        str | None,
        typer.Argument(
            show_default="all of them",
            help=f"One option group with every setting: {', '.join(GROUPS)}.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the presets, and the choices of every option group with their settings and defaults."""
    if group is not None and group not in GROUPS:
        raise MisuseError(unknown_choice("option group", group, GROUPS))
    if as_json:
        typer.echo(json.dumps(_as_dict({group: GROUPS[group]} if group else GROUPS)))
        return
    to = console()
    if group is not None:
        _show_group(group, GROUPS[group], to, every_setting=True)
        return
    table = plain_table("preset", "")
    table.columns[1].justify = "left"
    for name, text in presets().items():
        table.add_row(name, escape(_first_comment(text)))
    to.print(table)
    to.print()
    for name, one in CATALOGUE.items():
        _show_group(name, one, to, every_setting=False)
    to.print()
    to.print(
        "`zlab policy list GROUP` explains every setting of a group, as in `zlab policy list "
        "budget`. Vary a policy on the command line: PRESET:group=choice,group.setting=value,... "
        "as hybrid:prefix=none,join=blocking,budget.tokens=1024; or write it to a file: zlab "
        "policy show hybrid > mine.toml"
    )


@app.command()
def show(
    policy: Annotated[
        str, typer.Argument(help="A preset, a variant of one, FILE.toml, or FILE.py:Class.")
    ],
    as_json: AsJson = False,
) -> None:
    """Print a policy as TOML with every setting; `--policy FILE.toml` reads such a file."""
    loaded = load_policy(policy)
    if as_json:
        typer.echo(json.dumps(policy_to_table(loaded)))
    else:
        typer.echo(policy_to_toml(loaded, every_setting=True), nl=False)
        if policy.partition(":")[0] == VLLM:
            typer.echo(_vllm_defaults(), nl=False)


@app.command()
def check(
    file: Annotated[str, typer.Argument(help="FILE.toml or FILE.py:Class.")],
    as_json: AsJson = False,
) -> None:
    """Check a policy file; exit code 1, with the nearest known name, when it is not a policy."""
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


def _vllm_defaults() -> str:
    """Return vLLM's own limits for each GPU as TOML comments: they are options of a replay."""
    lines = [
        "# vLLM's own defaults: --block-size 16, asynchronous = true, and by GPU",
        "# gpu        --max-batched-tokens (LLM(), server)  --max-running",
    ]
    for gpu in GPUS.values():
        own = vllm_defaults(gpu)
        tokens = f"{own.batched_tokens:,}, {own.server_batched_tokens:,}"
        lines.append(f"# {gpu.name:10} {tokens:37} {own.max_running:,}")
    return "\n".join(lines) + "\n"


def _show_group(name: str, group: OptionGroup, to: Console, *, every_setting: bool) -> None:
    """Print a group's choices with their defaults, and optionally what each setting does."""
    to.print(f"[bold]{name}[/]: {group.question}")
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column()
    for kind, choice in group.choices.items():
        defaults = _defaults(choice.cls)
        if every_setting:
            table.add_row("", f"[bold]{kind}[/]", escape(choice.text))
            for setting, value in defaults.items():
                words = escape(choice.settings[setting].text)
                shown = escape(_shown(value, choice.settings[setting].choices))
                table.add_row("", f"  {setting}", f"{words} [dim]Default: {shown}.[/]")
        else:
            table.add_row("", kind, escape(choice.text))
            if defaults:
                listed = ", ".join(f"{key}={_shown(value)}" for key, value in defaults.items())
                table.add_row("", "", f"[dim]{escape(listed)}[/]")
    to.print(table)


def _as_dict(groups: dict[str, OptionGroup]) -> dict[str, Any]:
    """Return presets, defaults (`questions`) and descriptions as one JSON object."""
    return {
        "presets": {name: _first_comment(text) for name, text in presets().items()},
        "questions": {
            name: {
                kind: {key: _plain(value) for key, value in _defaults(choice.cls).items()}
                for kind, choice in group.choices.items()
            }
            for name, group in groups.items()
            if name in CATALOGUE
        },
        "descriptions": {
            name: {
                "question": group.question,
                "choices": {
                    kind: {
                        "text": choice.text,
                        "settings": {key: one.text for key, one in choice.settings.items()},
                    }
                    for kind, choice in group.choices.items()
                },
            }
            for name, group in groups.items()
        },
    }


def _first_comment(text: str) -> str:
    first = text.splitlines()[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def _defaults(cls: type[Any]) -> dict[str, Any]:
    """Return the settings of a choice with their defaults."""
    value = cls()
    return {item.name: getattr(value, item.name) for item in fields(cls)}


def _plain(value: Any) -> Any:
    """Return a default as JSON gives it."""
    if isinstance(value, Enum):
        return value.value
    for group in PARTS.values():
        for kind, choice in group.choices.items():
            if type(value) is choice.cls:
                defaults = _defaults(choice.cls)
                return {"kind": kind} | {key: _plain(item) for key, item in defaults.items()}
    return value


def _shown(value: Any, choices: tuple[str, ...] = ()) -> str:
    """Return a default for people; of a few choices, all of them with the default first."""
    if isinstance(value, Enum):
        choices = tuple(member.value for member in type(value))
        value = value.value
    if choices:
        return "|".join((str(value), *(other for other in choices if other != value)))
    plain = _plain(value)
    if isinstance(plain, dict):
        return str(plain["kind"])
    return plain if isinstance(plain, str) else json.dumps(plain)

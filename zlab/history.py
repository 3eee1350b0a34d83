"""`zlab history`: what serves where, and every change that led there."""

import json
from typing import Annotated, Any

import typer
from rich.markup import escape

from policies.evidence import Target
from policies.registry import Action, Change, ChangeState, Stage, Standing
from sim.hardware import find_gpu, find_model
from zlab.options import AsJson
from zlab.registry_options import DEFAULT_REGISTRY, RegistryPath, registry_at
from zlab.tables import MISSING, console, plain_table

SHORT = 12


def history(
    registry: RegistryPath = DEFAULT_REGISTRY,
    gpu: Annotated[str | None, typer.Option("--gpu", help="Only this card.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Only this model.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how every policy stands, and every change with who, when, why and on what evidence."""
    card = find_gpu(gpu).name if gpu is not None else None
    named = find_model(model).name if model is not None else None
    kept = registry_at(registry)

    def asked(target: Target) -> bool:
        return card in (None, target.gpu) and named in (None, target.model)

    standings = [one for one in kept.standings() if asked(one.target)]
    changes = [one for one in kept.history() if asked(one.target)]
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "standings": [_standing_as_dict(one) for one in standings],
                    "changes": [one.as_dict() for one in changes],
                }
            )
        )
        return
    _show(standings, changes)


def _show(standings: list[Standing], changes: list[Change]) -> None:
    to = console()
    table = plain_table("policy", "stage", "for", "since", "evidence", "digest")
    for one in standings:
        stage = f"[bold]{one.stage}[/]" if one.stage in (Stage.LIVE, Stage.CANARY) else str(one.stage)
        by = one.evidence.id[:SHORT] if one.evidence else MISSING
        table.add_row(escape(one.policy.name), stage, escape(str(one.target)), one.since, by, one.policy.digest[:SHORT])
    to.print(table)
    to.print()
    table = plain_table("", "when", "who", "what", "evidence", "why")
    for column in table.columns:
        column.justify = "left"
    for change in changes:
        why = "; ".join(filter(None, (change.why, change.reason)))
        by = (change.evidence or MISSING)[:SHORT]
        table.add_row(str(change.number), change.at, escape(change.who), escape(_what(change)), by, escape(why))
    to.print(table)


def _what(change: Change) -> str:
    """The change in words."""
    arrow = f"{change.from_stage or 'new'} -> {change.to_stage}"
    back = " (rollback)" if change.action is Action.ROLLBACK else ""
    forced = ", FORCED" if change.forced else ""
    state = "" if change.state is ChangeState.DONE else f", {change.state.upper()}"
    at = f" at {change.url}" if change.url else ""
    return f"{change.name}: {arrow}{back} for {change.target}{at}{forced}{state}"


def _standing_as_dict(one: Standing) -> dict[str, Any]:
    return {
        "policy": one.policy.as_dict(),
        "stage": one.stage,
        "model": one.target.model,
        "gpu": one.target.gpu,
        "since": one.since,
        "evidence": one.evidence.id if one.evidence else None,
        "change": one.change.number,
    }

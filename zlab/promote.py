"""`zlab promote`: a policy becomes canary or live, in the registry and, if asked, at a running server."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from policies.evidence import read_evidence
from policies.registry import Change, Registry, Stage
from policies.spec import load_policy
from policies.stored import store_policy
from zlab.agreement import carry_out, compare, repeat, settle, warn_of_plain_text
from zlab.option_groups import with_groups
from zlab.options import GpuName, ModelName
from zlab.registry_options import DEFAULT_REGISTRY, ChangeOptions, RegistryPath, registry_at, signed_by, target_of


class To(StrEnum):
    """Where a policy can be promoted to."""

    canary = Stage.CANARY.value
    live = Stage.LIVE.value


@with_groups
def promote(
    policy: Annotated[str, typer.Argument(help="The policy, spelt as for `zlab validate`.")],
    *,
    to: Annotated[To, typer.Option("--to", help="live: for everybody; canary: for a share of the traffic.")] = To.live,
    gpu: GpuName = "h200",
    model: ModelName = "qwen3-8b",
    registry: RegistryPath = DEFAULT_REGISTRY,
    evidence: Annotated[
        Path | None,
        typer.Option("--evidence", exists=True, dir_okay=False, help="A record of `zlab validate --out` to go by."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Although evidence is missing; needs --why, and is written down.")
    ] = False,
    by: ChangeOptions,
) -> None:
    """Make a policy canary or live, if the newest evidence about exactly it, this code, model and card passed.

    With --live the server that runs there changes over at its next step, and the registry holds what the server
    confirms. Exit code 0: done; 1: refused (with what is missing), or the server did not; 2: misuse.
    """
    by.check_reason(force)
    target, signed, stage = target_of(model, gpu), signed_by(by.who), Stage(to.value)
    stored = store_policy(load_policy(policy))
    server = by.server()
    kept = registry_at(registry, create=evidence is not None or force)
    if evidence is not None:
        kept.add_evidence(read_evidence(evidence), signed, f"from {evidence}")
    if server is None:
        standing = kept.promote(stored, stage, target, signed, by.why, force=force, seen=kept.newest(target))
        show_change(standing.change, kept, by.as_json)
        return
    warn_of_plain_text(server)
    settle(kept, server, target, signed)
    again = repeat(kept, server, target, stage, stored)
    if again is not None:
        show_change(again, kept, by.as_json)
        return
    compare(kept, server, target)
    seen = kept.newest(target)
    change = kept.begin_promotion(stored, stage, target, signed, by.why, server.url, force=force, seen=seen)
    show_change(carry_out(kept, server, change, stored), kept, by.as_json)


def show_change(change: Change, registry: Registry, as_json: bool) -> None:
    """One line about what holds now."""
    if as_json:
        typer.echo(json.dumps(change.as_dict()))
        return
    going = registry.policy(change.leaves).name if change.leaves is not None else None
    if change.to_stage is Stage.RETIRED:
        words = f"{change.name} is no canary any more for {change.target}"
    else:
        before = f" instead of {going}" if going else ""
        words = f"{change.name} is {change.to_stage} for {change.target}{before}"
    by = f"evidence {change.evidence[:12]}" if change.evidence else "no evidence"
    at = f" at {change.url}" if change.url else ""
    typer.echo(f"{words}{at}: change {change.number} by {change.who}, {'FORCED, ' if change.forced else ''}{by}")

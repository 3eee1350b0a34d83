"""`zlab diff`: two policies side by side: answers, text, own sources, and what the evidence says of
each.

`zlab promote`: a policy becomes canary or live, in the registry and, if asked, at a running server.

`zlab rollback`: the policy before the live one is live again, or the canary ends.

`zlab history`: what serves where, and every change that led there.

A change that registry and server must both hold: written down, put to the server, then confirmed or
taken back.
"""

import json
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from zlab.cli.client import LiveError, LiveServer, RefusedByServerError, SilentError
from zlab.cli.console import MISSING, MisuseError, console, plain_table, printable
from zlab.cli.options import (
    DEFAULT_REGISTRY,
    AsJson,
    ChangeOptions,
    GpuName,
    ModelName,
    RegistryPath,
    registry_at,
    signed_by,
    target_of,
    with_groups,
)
from zlab.cli.validate import say_quality, show_value
from zlab.policies.evidence import Evidence, Target, read_evidence, setup_facts
from zlab.policies.gates import METRICS
from zlab.policies.registry import (
    Action,
    ChangeState,
    Deployment,
    DeploymentStage,
    PolicyRegistry,
    RegistryError,
    StageChange,
)
from zlab.policies.snapshot import PolicySnapshot, store_policy
from zlab.policies.spec import QUESTIONS, load_policy
from zlab.sim.specs import find_gpu, find_model

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
    _show_history(standings, changes)


def _show_history(standings: list[Deployment], changes: list[StageChange]) -> None:
    to = console()
    table = plain_table("policy", "stage", "for", "since", "evidence", "answers", "digest")
    for one in standings:
        stage = (
            f"[bold]{one.stage}[/]"
            if one.stage in (DeploymentStage.LIVE, DeploymentStage.CANARY)
            else str(one.stage)
        )
        by = one.evidence.id[:SHORT] if one.evidence else MISSING
        table.add_row(
            escape(printable(one.policy.name)),
            stage,
            escape(str(one.target)),
            one.since,
            by,
            escape(
                printable(say_quality(one.evidence.quality if one.evidence else None) or MISSING)
            ),
            one.policy.digest[:SHORT],
        )
    to.print(table)
    to.print()
    table = plain_table("", "when", "who", "what", "evidence", "why")
    for column in table.columns:
        column.justify = "left"
    for change in changes:
        why = "; ".join(filter(None, (change.why, change.reason)))
        by = (change.evidence or MISSING)[:SHORT]
        table.add_row(
            str(change.number),
            change.at,
            escape(printable(change.who)),
            escape(printable(_what(change))),
            by,
            escape(printable(why)),
        )
    to.print(table)


def _what(change: StageChange) -> str:
    """The change in words."""
    arrow = f"{change.from_stage or 'new'} -> {change.to_stage}"
    back = " (rollback)" if change.action is Action.ROLLBACK else ""
    forced = ", FORCED" if change.forced else ""
    state = "" if change.state is ChangeState.DONE else f", {change.state.upper()}"
    at = f" at {change.url}" if change.url else ""
    return f"{change.name}: {arrow}{back} for {change.target}{at}{forced}{state}"


def _standing_as_dict(one: Deployment) -> dict[str, Any]:
    return {
        "policy": one.policy.as_dict(),
        "stage": one.stage,
        "model": one.target.model,
        "gpu": one.target.gpu,
        "since": one.since,
        "evidence": one.evidence.id if one.evidence else None,
        "quality": one.evidence.quality if one.evidence else None,
        "change": one.change.number,
    }


# An answer that a stored policy does not write down, because it is at its default.
LEFT_OUT = {"kind": "(default)"}
SERVING = {"live": DeploymentStage.LIVE, "canary": DeploymentStage.CANARY}
ALWAYS = (
    "tokens_per_s",
    "p99_ttft",
    "p99_tpot",
    "p99_e2e",
    "preemptions_per_request",
    "refused",
    "max_occupancy",
)


@dataclass(frozen=True)
class Side:
    """One of the two: the policy, and the newest evidence on it for the target, if the registry has
    any.
    """

    policy: PolicySnapshot
    evidence: Evidence | None


def diff(
    one: Annotated[
        str,
        typer.Argument(metavar="POLICY", help="A policy, or `live` or `canary` of the registry."),
    ],
    other: Annotated[str, typer.Argument(metavar="POLICY", help="What it is set beside.")] = "live",
    gpu: GpuName = "h200",
    model: ModelName = "qwen3-8b",
    registry: RegistryPath = DEFAULT_REGISTRY,
    as_json: AsJson = False,
) -> None:
    """Show where two policies differ: answer by answer, as text, and in what the evidence on each
    of them says.
    """
    target = target_of(model, gpu)
    named = one in SERVING or other in SERVING
    kept = registry_at(registry) if named or registry.exists() else None
    left, right = (_side(name, kept, target) for name in (one, other))
    if as_json:
        typer.echo(json.dumps(_as_dict(left, right)))
    else:
        _show_difference(left, right)


def _side(name: str, kept: PolicyRegistry | None, target: Target) -> Side:
    """The policy of that name. Raises MisuseError where nothing is live, PolicyError where there is
    none such.
    """
    if name in SERVING and kept is not None:
        standing = (
            kept.live(target) if SERVING[name] is DeploymentStage.LIVE else kept.canary(target)
        )
        if standing is None:
            raise MisuseError(f"nothing is {name} for {target}: name two policies")
        policy = standing.policy
    else:
        policy = store_policy(load_policy(name))
    records = kept.evidence_on(policy) if kept is not None else []
    here = [one for one in records if one.policy.digest == policy.digest and one.target == target]
    return Side(policy, here[-1] if here else None)


def differing_answers(left: PolicySnapshot, right: PolicySnapshot) -> dict[str, tuple[str, str]]:
    """Question -> both answers as `kind setting=value ...`, where they differ."""
    tables = [tomllib.loads(side.toml) for side in (left, right)]
    answers = {
        question: [table.get(question, LEFT_OUT) for table in tables] for question in QUESTIONS
    }
    return {
        question: (_answer(pair[0]), _answer(pair[1]))
        for question, pair in answers.items()
        if _answer(pair[0]) != _answer(pair[1])
        or any(left.sources.get(kind) != right.sources.get(kind) for kind in _kinds(pair[0]))
    }


def _answer(table: Mapping[str, Any]) -> str:
    settings = {name: value for name, value in table.items() if name != "kind"}
    shown = (
        f"{name}={_answer(value) if isinstance(value, dict) else value}"
        for name, value in settings.items()
    )
    return " ".join([str(table["kind"]), *shown])


def _kinds(table: Mapping[str, Any]) -> Iterator[str]:
    """Kinds and texts in an answer: sources of the user's own may differ under one name."""
    yield str(table["kind"])
    for value in table.values():
        if isinstance(value, dict):
            yield from _kinds(value)
        elif isinstance(value, str):
            yield value


def text_diff(left: PolicySnapshot, right: PolicySnapshot) -> list[str]:
    """Lines of a unified diff of the TOML and of the own sources."""
    lines = [*_unified(left.toml, right.toml, left.name, right.name)]
    first, second = (
        {
            f"{Path(spec.rpartition(':')[0]).name}:{spec.rpartition(':')[2]}": text
            for spec, text in side.sources.items()
        }
        for side in (left, right)
    )
    for name in sorted({*first, *second}):
        lines += _unified(
            first.get(name, ""), second.get(name, ""), f"{left.name} {name}", f"{right.name} {name}"
        )
    return lines


def _unified(left: str, right: str, left_name: str, right_name: str) -> Iterator[str]:
    return unified_diff(
        left.splitlines(), right.splitlines(), left_name, right_name, n=1, lineterm=""
    )


def figures(left: Side, right: Side) -> dict[str, tuple[list[Any], list[Any]]]:
    """Metric -> what was measured in each case of either evidence: the usual ones and those that
    gates asked for.
    """
    asked = [
        gate.metric for side in (left, right) if side.evidence for gate in side.evidence.gates.gates
    ]
    names = dict.fromkeys([*ALWAYS, *asked])
    return {name: (_measured(left, name), _measured(right, name)) for name in names}


def _measured(side: Side, metric: str) -> list[Any]:
    return [case.measured.get(metric) for case in side.evidence.cases] if side.evidence else []


def same_workloads(left: Side, right: Side) -> bool:
    """Whether both were measured on the same workloads."""
    hashes = [
        sorted(case.workload_sha256 for case in side.evidence.cases) if side.evidence else []
        for side in (left, right)
    ]
    return hashes[0] == hashes[1]


def _show_difference(left: Side, right: Side) -> None:
    to = console()
    names = (escape(left.policy.name), escape(right.policy.name))
    answers = differing_answers(left.policy, right.policy)
    if not answers:
        to.print(f"{names[0]} and {names[1]} decide the same: digest {left.policy.digest[:SHORT]}")
    else:
        table = plain_table("question", *names)
        for column in table.columns[1:]:
            column.justify = "left"
        for question, pair in answers.items():
            table.add_row(question, *map(escape, pair))
        to.print(table)
        for line in text_diff(left.policy, right.policy):
            typer.echo(line)
    to.print()
    if left.evidence is None and right.evidence is None:
        to.print("no evidence on either")
        return
    table = plain_table("evidence, least to most over its cases", *names)
    for metric, (one, other) in figures(left, right).items():
        table.add_row(metric, escape(_range(metric, one)), escape(_range(metric, other)))
    for label, of in (
        ("gates", _gates),
        ("id", _id),
        ("made", _made),
        ("deciding code", _code),
    ):
        table.add_row(label, of(left.evidence), of(right.evidence))
    to.print(table)
    if left.evidence and right.evidence and not same_workloads(left, right):
        to.print("\nnot measured on the same workloads: figures do not compare")


def _range(metric: str, values: Sequence[Any]) -> str:
    numbers = [value for value in values if isinstance(value, float | int)]
    words = sorted({value for value in values if isinstance(value, str)})
    if words or not numbers:
        return "; ".join(words) or MISSING
    ends = dict.fromkeys(show_value(metric, value) for value in (min(numbers), max(numbers)))
    return " .. ".join(ends)


def _gates(evidence: Evidence | None) -> str:
    return MISSING if evidence is None else "passed" if evidence.passed else "FAILED"


def _id(evidence: Evidence | None) -> str:
    return MISSING if evidence is None else evidence.id[:SHORT]


def _made(evidence: Evidence | None) -> str:
    return MISSING if evidence is None else evidence.made_at


def _code(evidence: Evidence | None) -> str:
    return MISSING if evidence is None else evidence.code[:SHORT]


def _as_dict(left: Side, right: Side) -> dict[str, Any]:
    return {
        "policies": [side.policy.as_dict() for side in (left, right)],
        "answers": {
            question: list(pair)
            for question, pair in differing_answers(left.policy, right.policy).items()
        },
        "text": text_diff(left.policy, right.policy),
        "evidence": [side.evidence.id if side.evidence else None for side in (left, right)],
        "figures": {metric: list(pair) for metric, pair in figures(left, right).items()},
        "units": {metric: METRICS[metric].unit for metric in figures(left, right)},
        "same_workloads": same_workloads(left, right),
    }


ASK_AGAIN_S = (0.2, 1.0, 3.0)


def carry_out(
    registry: PolicyRegistry, server: LiveServer, change: StageChange, policy: PolicySnapshot
) -> StageChange:
    """Put a pending change to the server, with the setup in which a promoted policy was judged
    unless the promotion was forced. Returns it done.

    Where the server refuses it is taken back with the reason, and LiveError raised. Where nobody
    can tell what the server did, it is asked what it runs; if it does not say, the change stays
    pending: LiveError says how to go on.
    """
    try:
        server.carry_out(change, policy, judged_setup(registry, change))
    except RefusedByServerError as error:
        registry.undo(change.number, str(error))
        raise RefusedByServerError(
            f"{error}; nothing was changed (change {change.number} is undone)"
        ) from error
    except SilentError as error:
        if not _runs_it(server, change):
            raise SilentError(
                f"{error}. Nobody knows whether the server took change {change.number}: it stays "
                f"pending, and the next "
                f"`zlab promote` or `zlab rollback` with --live {server.url} asks the server"
            ) from error
    return registry.confirm(change.number)


def settle(registry: PolicyRegistry, server: LiveServer, target: Target, who: str) -> None:
    """Finish what a process that is gone left pending at this server, by what it runs. Raises
    LiveError.
    """
    waiting = registry.pending(target)
    if waiting is None or not waiting.is_abandoned:
        return
    if waiting.url != server.url:
        raise RegistryError(
            f"{waiting.describe()} was put to {waiting.url} and never finished: name that server "
            f"by --live, or "
            "use --force --why without it"
        )
    settled = registry.settle(target, server.running(waiting.lane), who)
    if settled is not None:
        typer.echo(
            f"{settled.describe()} was left unfinished and is {settled.state} now: "
            f"{settled.reason}",
            err=True,
        )


def compare(registry: PolicyRegistry, server: LiveServer, target: Target) -> None:
    """Say it where the server runs another policy than the registry has as live. Raises
    LiveError.
    """
    running, standing = server.running(DeploymentStage.LIVE), registry.live(target)
    if standing is not None and running != standing.policy.digest:
        typer.echo(
            f"warning: {server.url} runs policy {str(running)[:12]}, the registry has "
            f"{standing.policy.name} "
            f"({standing.policy.digest[:12]}) as live for {target}",
            err=True,
        )


def repeat(
    registry: PolicyRegistry,
    server: LiveServer,
    target: Target,
    stage: DeploymentStage,
    policy: PolicySnapshot,
) -> StageChange | None:
    """Tell a server again what the registry has already, where it runs something else. None: there
    is no need.

    For a server that was started with another policy. Raises LiveError where it does not take it.
    """
    standing = registry.live(target) if stage is DeploymentStage.LIVE else registry.canary(target)
    if (
        standing is None
        or standing.policy.digest != policy.digest
        or server.running(stage) == policy.digest
    ):
        return None
    server.carry_out(standing.change, policy, judged_setup(registry, standing.change))
    return standing.change


def judged_setup(registry: PolicyRegistry, change: StageChange) -> dict[str, str | int] | None:
    """The setup of the evidence by which a policy is promoted; None where none binds."""
    if change.action is not Action.PROMOTE or change.forced or change.evidence is None:
        return None
    return setup_facts(registry.evidence(change.evidence))


def warn_of_plain_text(server: LiveServer) -> None:
    """Say it where the key is sent over a network unencrypted."""
    if server.shows_key:
        typer.echo(
            f"warning: the admin key goes to {server.url} unencrypted: prefer https", err=True
        )


def _runs_it(server: LiveServer, change: StageChange) -> bool:
    """Whether the server says that it runs what it was asked to, asked a few times."""
    wanted = None if change.to_stage is DeploymentStage.RETIRED else change.digest
    for pause_s in ASK_AGAIN_S:
        try:
            if server.running(change.lane) == wanted:
                return True
        except LiveError:
            pass
        time.sleep(pause_s)
    return False


class To(StrEnum):
    """Where a policy can be promoted to."""

    canary = DeploymentStage.CANARY.value
    live = DeploymentStage.LIVE.value


@with_groups
def promote(
    policy: Annotated[str, typer.Argument(help="The policy, spelt as for `zlab validate`.")],
    *,
    to: Annotated[
        To, typer.Option("--to", help="live: for everybody; canary: for a share of the traffic.")
    ] = To.live,
    gpu: GpuName = "h200",
    model: ModelName = "qwen3-8b",
    registry: RegistryPath = DEFAULT_REGISTRY,
    evidence: Annotated[
        Path | None,
        typer.Option(
            "--evidence",
            exists=True,
            dir_okay=False,
            help="A record of `zlab validate --out` to go by.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Although evidence is missing; needs --why, and is written down."
        ),
    ] = False,
    by: ChangeOptions,
) -> None:
    """Make a policy canary or live, if the newest evidence about exactly it, this code, model and
    card passed.

    With --live the server that runs there changes over at its next step, and the registry holds
    what the server confirms. Exit code 0: done; 1: refused (with what is missing), or the server
    did not; 2: misuse.
    """
    by.check_reason(force)
    target, signed, stage = target_of(model, gpu), signed_by(by.who), DeploymentStage(to.value)
    stored = store_policy(load_policy(policy))
    server = by.server()
    kept = registry_at(registry, create=evidence is not None or force)
    if evidence is not None:
        kept.add_evidence(read_evidence(evidence), signed, f"from {evidence}")
    if server is None:
        standing = kept.promote(
            stored, stage, target, signed, by.why, force=force, seen=kept.newest(target)
        )
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
    change = kept.begin_promotion(
        stored, stage, target, signed, by.why, server.url, force=force, seen=seen
    )
    show_change(carry_out(kept, server, change, stored), kept, by.as_json)


def show_change(change: StageChange, registry: PolicyRegistry, as_json: bool) -> None:
    """One line about what holds now."""
    if as_json:
        typer.echo(json.dumps(change.as_dict()))
        return
    going = registry.policy(change.leaves).name if change.leaves is not None else None
    if change.to_stage is DeploymentStage.RETIRED:
        words = f"{change.name} is no canary any more for {change.target}"
    else:
        before = f" instead of {going}" if going else ""
        words = f"{change.name} is {change.to_stage} for {change.target}{before}"
    by = f"evidence {change.evidence[:12]}" if change.evidence else "no evidence"
    at = f" at {change.url}" if change.url else ""
    said = f"{words}{at}: change {change.number} by {change.who}, "
    typer.echo(printable(f"{said}{'FORCED, ' if change.forced else ''}{by}"))
    if change.action is Action.PROMOTE and change.evidence:
        typer.echo(printable(f"judged on {registry.evidence(change.evidence).extent}"))


@with_groups
def rollback(
    *,
    what: Annotated[
        To, typer.Option("--of", help="Go back from what is live, or end the canary.")
    ] = To.live,
    gpu: GpuName = "h200",
    model: ModelName = "qwen3-8b",
    registry: RegistryPath = DEFAULT_REGISTRY,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Take an unfinished change as not done; needs --why, and is written down.",
        ),
    ] = False,
    by: ChangeOptions,
) -> None:
    """Take the live policy back to the one before it, or end the canary, in one transaction.

    With --live at the server that runs there, too. Exit code 0: done; 1: there is nothing to go
    back to, or the server did not; 2: misuse.
    """
    by.check_reason(force)
    target, signed, stage = target_of(model, gpu), signed_by(by.who), DeploymentStage(what.value)
    server = by.server()
    kept = registry_at(registry)
    if server is None:
        standing = kept.rollback(
            target, signed, by.why, stage, force=force, seen=kept.newest(target)
        )
        show_change(standing.change, kept, by.as_json)
        return
    warn_of_plain_text(server)
    settle(kept, server, target, signed)
    compare(kept, server, target)
    seen = kept.newest(target)
    change = kept.begin_rollback(target, signed, by.why, server.url, stage, force=force, seen=seen)
    show_change(carry_out(kept, server, change, kept.policy(change.digest)), kept, by.as_json)

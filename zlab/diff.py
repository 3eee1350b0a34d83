"""`zlab diff`: two policies side by side: answers, text, own sources, and what the evidence says of each."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from policies.catalogue import QUESTIONS
from policies.evidence import Evidence, Target
from policies.measures import METRICS
from policies.registry import Registry, Stage
from policies.spec import load_policy
from policies.stored import StoredPolicy, store_policy
from zlab.options import AsJson, GpuName, ModelName
from zlab.outcome import MisuseError
from zlab.registry_options import DEFAULT_REGISTRY, RegistryPath, registry_at, target_of
from zlab.tables import MISSING, console, plain_table
from zlab.validate_table import show_value

SERVING = {"live": Stage.LIVE, "canary": Stage.CANARY}
ALWAYS = ("tokens_per_s", "p99_ttft", "p99_tpot", "p99_e2e", "preemptions_per_request", "refused", "max_occupancy")
SHORT = 12


@dataclass(frozen=True)
class Side:
    """One of the two: the policy, and the newest evidence on it for the target, if the registry has any."""

    policy: StoredPolicy
    evidence: Evidence | None


def diff(
    one: Annotated[str, typer.Argument(metavar="POLICY", help="A policy, or `live` or `canary` of the registry.")],
    other: Annotated[str, typer.Argument(metavar="POLICY", help="What it is set beside.")] = "live",
    gpu: GpuName = "h200",
    model: ModelName = "qwen3-8b",
    registry: RegistryPath = DEFAULT_REGISTRY,
    as_json: AsJson = False,
) -> None:
    """Show where two policies differ: answer by answer, as text, and in what the evidence on each of them says."""
    target = target_of(model, gpu)
    named = one in SERVING or other in SERVING
    kept = registry_at(registry) if named or registry.exists() else None
    left, right = (_side(name, kept, target) for name in (one, other))
    if as_json:
        typer.echo(json.dumps(_as_dict(left, right)))
    else:
        _show(left, right)


def _side(name: str, kept: Registry | None, target: Target) -> Side:
    """The policy of that name. Raises MisuseError where nothing is live, PolicyError where there is none such."""
    if name in SERVING and kept is not None:
        standing = kept.live(target) if SERVING[name] is Stage.LIVE else kept.canary(target)
        if standing is None:
            raise MisuseError(f"nothing is {name} for {target}: name two policies")
        policy = standing.policy
    else:
        policy = store_policy(load_policy(name))
    records = kept.evidence_on(policy) if kept is not None else []
    here = [one for one in records if one.policy.digest == policy.digest and one.target == target]
    return Side(policy, here[-1] if here else None)


def differing_answers(left: StoredPolicy, right: StoredPolicy) -> dict[str, tuple[str, str]]:
    """Question -> both answers as `kind setting=value ...`, where they differ."""
    tables = [tomllib.loads(side.toml) for side in (left, right)]
    answers = {question: (_answer(tables[0][question]), _answer(tables[1][question])) for question in QUESTIONS}
    return {
        question: pair
        for question, pair in answers.items()
        if pair[0] != pair[1]
        or any(left.sources.get(kind) != right.sources.get(kind) for kind in _kinds(tables[0][question]))
    }


def _answer(table: Mapping[str, Any]) -> str:
    settings = {name: value for name, value in table.items() if name != "kind"}
    shown = (f"{name}={_answer(value) if isinstance(value, dict) else value}" for name, value in settings.items())
    return " ".join([str(table["kind"]), *shown])


def _kinds(table: Mapping[str, Any]) -> Iterator[str]:
    """Kinds named in an answer: sources of the user's own may differ under one name."""
    yield str(table["kind"])
    for value in table.values():
        if isinstance(value, dict):
            yield from _kinds(value)


def text_diff(left: StoredPolicy, right: StoredPolicy) -> list[str]:
    """Lines of a unified diff of the TOML and of the own sources."""
    lines = [*_unified(left.toml, right.toml, left.name, right.name)]
    first, second = (
        {f"{Path(spec.rpartition(':')[0]).name}:{spec.rpartition(':')[2]}": text for spec, text in side.sources.items()}
        for side in (left, right)
    )
    for name in sorted({*first, *second}):
        lines += _unified(first.get(name, ""), second.get(name, ""), f"{left.name} {name}", f"{right.name} {name}")
    return lines


def _unified(left: str, right: str, left_name: str, right_name: str) -> Iterator[str]:
    return unified_diff(left.splitlines(), right.splitlines(), left_name, right_name, n=1, lineterm="")


def figures(left: Side, right: Side) -> dict[str, tuple[list[Any], list[Any]]]:
    """Metric -> what was measured in each case of either evidence: the usual ones and those that gates asked for."""
    asked = [gate.metric for side in (left, right) if side.evidence for gate in side.evidence.gates.gates]
    names = dict.fromkeys([*ALWAYS, *asked])
    return {name: (_measured(left, name), _measured(right, name)) for name in names}


def _measured(side: Side, metric: str) -> list[Any]:
    return [case.measured.get(metric) for case in side.evidence.cases] if side.evidence else []


def same_workloads(left: Side, right: Side) -> bool:
    """Whether both were measured on the same workloads."""
    hashes = [
        sorted(case.workload_sha256 for case in side.evidence.cases) if side.evidence else [] for side in (left, right)
    ]
    return hashes[0] == hashes[1]


def _show(left: Side, right: Side) -> None:
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
    for label, of in (("gates", _gates), ("id", _id), ("made", _made), ("code of policies/", _code)):
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
        "answers": {question: list(pair) for question, pair in differing_answers(left.policy, right.policy).items()},
        "text": text_diff(left.policy, right.policy),
        "evidence": [side.evidence.id if side.evidence else None for side in (left, right)],
        "figures": {metric: list(pair) for metric, pair in figures(left, right).items()},
        "units": {metric: METRICS[metric].unit for metric in figures(left, right)},
        "same_workloads": same_workloads(left, right),
    }

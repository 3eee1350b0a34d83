"""`zlab validate`: may this policy serve? Replays, gates, and a record of the evidence.

Evidence as tables for people: every case, and what decided each gate.

Does the engine decide as the simulator does under this policy, and serve everybody? A small run on
a real model.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from zlab.cli.console import (
    MISSING,
    WENT_WRONG,
    Bar,
    MisuseError,
    console,
    fail,
    figure,
    milliseconds,
    plain_table,
    say_lengths,
)
from zlab.cli.options import (
    AsJson,
    BreakEvenSearch,
    Device,
    Dtype,
    ReadingOptions,
    ScenarioOptions,
    Seeds,
    SpreadOptions,
    Who,
    Why,
    engine_room,
    engine_settings,
    registry_at,
    signed_by,
    spread,
    with_groups,
)
from zlab.cli.parity import ParityVerdict, closed, decided_by_both
from zlab.cli.replay import say_break_even
from zlab.cli.workloads import WorkloadSource
from zlab.policies.core.policy import Policy
from zlab.policies.deciding_code import code_digest
from zlab.policies.evidence import (
    Case,
    Evidence,
    Target,
    compresses,
    make_evidence,
    write_evidence,
)
from zlab.policies.gates import (
    METRICS,
    OK,
    QUALITY,
    QUALITY_GATE,
    Gate,
    Gates,
    GateVerdict,
    State,
    Unit,
    gates_from_list,
    gates_from_toml,
)
from zlab.policies.registry import PolicyRegistry, now
from zlab.policies.snapshot import store_policy
from zlab.policies.spec import load_policy, policy_digest
from zlab.sim.compare import BreakEven, break_even
from zlab.sim.length_profile import NOTHING_COMPRESSED
from zlab.sim.replay import Scenario
from zlab.sim.specs import find_model
from zlab.sim.validate import Load, setup_of
from zlab.sim.validate import validate as run_cases
from zlab.traces.synthetic import PREFIX
from zlab.traces.workload import dropped_rows

SHORT = 12  # digits of an id
EVALUATION = "zlab-evaluation/1"
MOST_WORDS = 60
SHOWN_IN_MS_BELOW_S = 0.1
SHOWN = {
    State.PASSED: "holds",
    State.FAILED: "[bold]BROKEN[/]",
    State.UNMEASURED: "[bold]not measured[/]",
}


def show_evidence(evidence: Evidence, out: Path | None, registry: Path | None) -> None:
    """What was judged on what, the cases, the gates, and where the record is."""
    to, setup = console(), evidence.content["setup"]
    limits, against = setup["limits"], evidence.content.get("against")
    beside = f" against [bold]{escape(against['name'])}[/]" if against else ""
    to.print(
        f"[bold]{escape(evidence.policy.name)}[/]{beside} on {evidence.target.gpu} with "
        f"{evidence.target.model}, "
        f"{limits['num_blocks']:,} blocks of {limits['block_size']} tokens; costs: "
        f"{setup['cost']['source']}"
    )
    to.print()
    table = plain_table("case", *(gate.metric for gate in evidence.gates.gates))
    for number, case in enumerate(evidence.cases, start=1):
        table.add_row(str(number), *(_cell(gate, case) for gate in evidence.gates.gates))
    to.print(table)
    for number, case in enumerate(evidence.cases, start=1):
        to.print(escape(f"{number}: {case.label}" + (f": {case.error}" if case.error else "")))
        for words in dropped_rows(case.rows):
            to.print(escape(f"   {words}"))
    to.print()
    table = plain_table("gate", "worst", "limit", "", "case")
    table.columns[3].justify = "left"
    for one in evidence.judged:
        verdict = one.verdict
        metric = verdict.gate.metric
        table.add_row(
            escape(verdict.gate.written),
            escape(_factor(verdict, one.case) or show_value(metric, verdict.measured)),
            f"{verdict.gate.bound:g}x"
            if verdict.gate.is_relative
            else escape(show_value(metric, verdict.limit)),
            SHOWN[verdict.state],
            str(evidence.cases.index(one.case) + 1),
        )
    to.print(table)
    to.print()
    for line in _assumed(evidence):
        to.print(escape(line))
    kept = [f"in {where}" for where in (out, registry) if where is not None]
    where = " and ".join(kept) or "kept nowhere: give --out FILE or --registry FILE"
    typer.echo(
        f"{'PASSED' if evidence.passed else 'FAILED'}: evidence {evidence.id[:SHORT]}, {where}"
    )


def _assumed(evidence: Evidence) -> list[str]:
    """What the record says of its extent, of answers and of the lengths of outputs."""
    content, found = evidence.content, [f"judged on {evidence.extent}"]
    if evidence.lacks:
        asked = "`zlab promote` will refuse it; a gates file may ask for less under [evidence]"
        found.append(f"warning: {'; '.join(evidence.lacks)}: {asked}")
    if evidence.quality is not None:
        found.append(f"answers: {say_quality(evidence.quality)}")
    lengths = content.get("lengths")
    if lengths and lengths["source"] != NOTHING_COMPRESSED:
        found.append(say_lengths(lengths))
    pays = content.get("break_even")
    if pays and content.get("against"):
        known = BreakEven(pays["multiplier"], pays["bound"] or "", pays["runs"])
        found.append(say_break_even(evidence.policy.name, content["against"]["name"], known))
    return found


def show_value(metric: str, value: float | str | None) -> str:
    """A measurement with its unit."""
    if value is None:
        return MISSING
    if isinstance(value, str):
        return value if len(value) <= MOST_WORDS else value[: MOST_WORDS - 3] + "..."
    unit = METRICS[metric].unit
    if unit is Unit.SHARE:
        return f"{value:.1%}"
    if unit is Unit.SECONDS and 0 < abs(value) < SHOWN_IN_MS_BELOW_S:
        return f"{milliseconds(value)} ms"
    text = f"{value:,.0f}" if value == int(value) and unit is Unit.NUMBER else figure(value)
    return f"{text} {unit}" if unit in (Unit.SECONDS, Unit.PER_SECOND) else text


def _cell(gate: Gate, case: Case) -> str:
    """What a case amounts to for a gate: the measurement, or its factor of the baseline's; marked
    if it won't do.
    """
    verdict = gate.judge(case.measured, case.baseline)
    text = escape(_factor(verdict, case) or show_value(gate.metric, verdict.measured))
    return text if verdict.passed else f"[bold]{text} ![/]"


def _factor(verdict: GateVerdict, case: Case) -> str | None:
    """As `2.31x (3,954 /s)`, where the gate is relative and there is something to divide by."""
    gate, value = verdict.gate, verdict.measured
    under = (case.baseline or {}).get(gate.metric)
    if (
        not gate.is_relative
        or isinstance(value, str | None)
        or isinstance(under, str | None)
        or not under
    ):
        return None
    return f"{value / under:.2f}x ({show_value(gate.metric, value)})"


# 8 requests, about 130 tokens in, 90 out
SMALL = f"{PREFIX}amc23?num_problems=4&samples=2&mu=4.5&sigma=0.4&cap=160"
SMALL_BLOCKS = 32  # about half of what they come to hold
SMALL_BUDGET_TOKENS = 96
BLOCK_SIZE = 16
DEFAULT_MODEL = "dummy:tiny"


@dataclass(frozen=True)
class EngineCheck:
    """What came of it: `ok`, or what was not; and the runs as plain JSON for a record."""

    words: str
    runs: list[Mapping[str, Any]]


@dataclass(frozen=True)
class EngineCheckOptions:
    """Whether the engine is asked, and which one."""

    engine: Annotated[
        bool,
        typer.Option(
            "--engine", help="Also run it on the engine: it must decide the same and fail nobody."
        ),
    ] = False
    engine_model: Annotated[
        str | None,
        typer.Option(
            "--engine-model",
            show_default=DEFAULT_MODEL,
            help="The model of --engine, as of `zlab bench --model`.",
        ),
    ] = None
    device: Device = None
    dtype: Dtype = None

    def check(self) -> None:
        """Raise MisuseError where an engine is described that is not asked."""
        given = {
            "--engine-model": self.engine_model,
            "--device": self.device,
            "--dtype": self.dtype,
        }
        for option, value in given.items():
            if value is not None and not self.engine:
                raise MisuseError(
                    f"{option} {value} says where --engine runs, and that is not given"
                )

    def run(self, policy: Policy) -> EngineCheck | None:
        """What came of it; None where nobody asked. Raises MisuseError as `check_engine`."""
        if not self.engine:
            return None
        return check_engine(policy, self.engine_model or DEFAULT_MODEL, self.device, self.dtype)


def check_engine(policy: Policy, model: str, device: str | None, dtype: str | None) -> EngineCheck:
    """Run a small closed workload on the engine and in the simulator: as the policy is, and so that
    it has to compress.

    Small outputs never reach a budget of thousands of tokens, so a policy with one runs a second
    time with a budget cut to the workload's lengths. Raises MisuseError where there is no such
    model or no engine.
    """
    workload = closed(WorkloadSource(SMALL).read(silent=True))
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "device": device, "dtype": dtype}
    settings = [
        {**engine_settings(model, one.name, kv_blocks=num_blocks, **sizes), "policy": one}
        for one, num_blocks in _variants(policy)
    ]
    with engine_room():
        verdicts = decided_by_both(workload, settings)
    words = next((said for said in map(_wrong, verdicts) if said), OK)
    return EngineCheck(words, [_verdict_as_dict(verdict, model) for verdict in verdicts])


def _variants(policy: Policy) -> list[tuple[Policy, int]]:
    """The policy with room for its budget, and with a budget that the workload reaches in a pool
    that is too small.
    """
    floor = policy.budget.floor(BLOCK_SIZE)
    if floor is None:
        return [(policy, SMALL_BLOCKS)]
    whole = (policy, max(SMALL_BLOCKS, 2 * floor))
    if (
        policy.budget.floor(1) is None
        or not hasattr(policy.budget, "tokens")
        or not hasattr(policy.budget, "blocks")
    ):
        return [whole]  # a budget of the user's own: nobody knows how to cut it
    budget: Any = policy.budget
    small = replace(budget, tokens=SMALL_BUDGET_TOKENS, blocks=0)
    if floor <= (small.floor(BLOCK_SIZE) or 0):
        return [whole]
    return [
        whole,
        (
            replace(policy, name=f"{policy.name} with {SMALL_BUDGET_TOKENS} tokens", budget=small),
            SMALL_BLOCKS,
        ),
    ]


def _wrong(verdict: ParityVerdict) -> str | None:
    if verdict.figures["failed"]:
        return f"{verdict.figures['failed']} requests failed under {verdict.policy}"
    if not verdict.equal:
        at = verdict.difference.step if verdict.difference else "the blocks"
        return (
            f"the engine decides otherwise under {verdict.policy}: first at step {at} (`zlab "
            f"parity` shows it)"
        )
    return None


def _verdict_as_dict(verdict: ParityVerdict, model: str) -> dict[str, Any]:
    return {
        "policy": verdict.policy,
        "model": model,
        "workload": SMALL,
        "equal": verdict.equal,
        "engine_digest": verdict.engine_digest,
        "simulator_digest": verdict.other_digest,
        **verdict.figures,
    }


ENGINE_GATE = f"engine == {OK}"


Quality = Annotated[
    Path | None,
    typer.Option(
        "--quality",
        dir_okay=False,
        help="results.json of `zlab evaluate` on this policy and model: pass@1 becomes part of the "
        f"evidence, and is asked for (`{QUALITY_GATE}` unless the gates say otherwise).",
    ),
]
TracesOption = Annotated[
    list[str],
    typer.Option("--trace", "-t", help="A trace as of `zlab replay`; repeat it for several."),
]
GatesFile = Annotated[
    Path,
    typer.Option(
        "--gates", dir_okay=False, help="A file of what must hold, as docs/examples/gates.toml."
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        "--against", help="The policy to replace: a bound as `>= 1.5x` is a factor of its figure."
    ),
]
RegistryFile = Annotated[
    Path | None,
    typer.Option(
        "--registry",
        dir_okay=False,
        envvar="ZLAB_REGISTRY",
        help="Keep the evidence in this registry.",
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", dir_okay=False, help="Write the evidence to this file.")
]


@with_groups
def validate(
    policy: Annotated[str, typer.Argument(help="The policy to judge, as of `zlab replay`.")],
    *,
    trace: TracesOption,
    gates: GatesFile,
    against: Against = None,
    quality: Quality = None,
    search: BreakEvenSearch = True,
    seeds: Seeds = 1,
    given: ScenarioOptions,
    reading: ReadingOptions,
    engine_check: EngineCheckOptions,
    spreading: SpreadOptions,
    registry: RegistryFile = None,
    out: Out = None,
    who: Who = None,
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Replay a policy and what it is to replace over traces and seeds, check gates, and keep the
    evidence.

    The worst case decides. The scheduler is audited at every step. Exit code 0: every gate held; 1:
    one did not, or the runs went wrong; 2: misuse.
    """
    engine_check.check()
    if why and registry is None:
        raise MisuseError(f"--why {why!r} goes into the history of a --registry, and there is none")
    scenario = given.scenario(policy)
    baseline = replace(scenario, policy=against) if against is not None else None
    candidate = scenario.set_up().policy
    solved = read_quality(quality, candidate, scenario.model) if quality is not None else None
    asked = _gates(gates, against, engine_check.engine, solved is not None)
    setup = setup_of(scenario, baseline)
    _check_out(out)
    signed = signed_by(who)
    kept = registry_at(registry, create=True) if registry is not None else None
    loads = _loads(trace, seeds, reading, as_json)
    num_runs = len(loads) * (2 if against else 1)
    with (
        spread(spreading.backend, spreading.jobs, spreading.cluster),
        Bar("validate", num_runs, "runs", as_json) as bar,
    ):
        cases = run_cases(loads, scenario, baseline, bar)
    checked = engine_check.run(candidate)
    if solved is not None:
        cases = [_with_quality(case, solved) for case in cases]
    shown = solved or _not_required(asked)
    pays = _pays_until(cases[0], loads[0], scenario, as_json) if search and against else None
    evidence = _evidence(
        scenario, baseline, asked, cases, checked, setup, signed, quality=shown, break_even=pays
    )
    if shown is None and compresses(evidence.policy):
        typer.echo(
            f"warning: {policy} compresses, and nothing shows that answers stay right: `zlab "
            "promote` will ask for --quality, or for [quality] required = false with a reason",
            err=True,
        )
    _keep(evidence, out, kept, signed, why)
    _report(evidence, out, registry, as_json)


def _report(evidence: Evidence, out: Path | None, registry: Path | None, as_json: bool) -> None:
    """Show it, and leave with code 1 where it did not pass."""
    if as_json:
        typer.echo(json.dumps(_as_dict(evidence)))
    else:
        show_evidence(evidence, out, registry)
    if not evidence.passed:
        broken = [one.verdict.gate.written for one in evidence.judged if not one.verdict.passed]
        raise fail(
            f"{evidence.policy.name} did not pass: {'; '.join(broken) or 'a run broke off'}",
            WENT_WRONG,
        )


def read_quality(path: Path, policy: Policy, model: str) -> dict[str, Any]:
    """What an evaluation found of exactly this policy, for evidence.

    Args:
        path: `results.json` of `zlab evaluate`.
        policy: the candidate.
        model: of the target; the evaluated one must have its shape.

    Raises:
        MisuseError: the file is no evaluation, of another model, or without this policy.
    """
    try:
        content = path.read_bytes()
        results = json.loads(content)
    except (OSError, ValueError) as error:
        raise MisuseError(f"--quality {path}: cannot be read: {error}") from error
    if not isinstance(results, dict) or results.get("format") != EVALUATION:
        raise MisuseError(f"--quality {path}: is no result of `zlab evaluate` ({EVALUATION})")
    shape, wanted = results.get("model_shape"), find_model(model)
    if not isinstance(shape, dict):
        raise MisuseError(f"--quality {path}: was made on a server, so its model is not known")
    target = {
        "num_layers": wanted.num_layers,
        "num_query_heads": wanted.num_query_heads,
        "num_kv_heads": wanted.num_kv_heads,
        "head_dim": wanted.head_dim,
        "vocab_size": wanted.vocab_size,
    }
    if shape != target:
        raise MisuseError(
            f"--quality {path}: was made with {results['model']} ({shape}), which is not the "
            f"target's {wanted.name} ({target})"
        )
    digest = policy_digest(policy)
    own = [
        one
        for one in results["columns"]
        if one["of_baseline"] is not None and policy_digest(load_policy(one["policy"])) == digest
    ]
    if not own:
        evaluated = ", ".join(one["name"] for one in results["columns"])
        raise MisuseError(f"--quality {path}: {policy.name} was not evaluated, only {evaluated}")
    worst_of = min(own, key=lambda one: float(one["of_baseline"]["ratio"] or 0.0))
    compared = worst_of["of_baseline"]
    base = next(one for one in results["columns"] if one["name"] == compared["baseline"])
    return {
        "required": True,
        "evaluation_sha256": hashlib.sha256(content).hexdigest(),
        "made_at": results["made_at"],
        "model": results["model"],
        "data": results["data"],
        "policy": worst_of["policy"],
        "temperature": worst_of["temperature"],
        "problems": worst_of["problems"],
        "pass_at_1": worst_of["pass_at_1"],
        "pass_at_1_interval": worst_of["pass_at_1_interval"],
        "baseline": base["policy"],
        "baseline_pass_at_1": base["pass_at_1"],
        "ratio": compared["ratio"],
        "ratio_interval": compared["ratio_interval"],
        "length_ratio": compared["length_ratio"],
    }


def say_quality(quality: Mapping[str, Any] | None) -> str:
    """What evidence says of answers, in words; empty where it says nothing."""
    if quality is None:
        return ""
    if quality.get("required") is False:
        return f"not required: {quality['reason']}"
    words = f"pass@1 {quality['pass_at_1']:.1%}"
    if quality["ratio"] is not None:
        low, high = quality["ratio_interval"]
        words += f", {quality['ratio']:.3f}x [{low:.3f}, {high:.3f}] of {quality['baseline']}"
    return f"{words} ({quality['problems']:,} problems, {quality['model']})"


def _with_quality(case: Case, solved: Mapping[str, Any]) -> Case:
    measured = {**case.measured, QUALITY: solved["pass_at_1"]}
    baseline = {**(case.baseline or {}), QUALITY: solved["baseline_pass_at_1"]}
    return replace(case, measured=measured, baseline=baseline)


def _not_required(asked: Gates) -> dict[str, Any] | None:
    """The rule of the gates file, where it has a reason not to ask for quality."""
    if asked.quality.required:
        return None
    return {"required": False, "reason": asked.quality.reason}


def _pays_until(case: Case, load: Load, scenario: Scenario, silent: bool) -> dict[str, Any] | None:
    """The break-even multiplier on the first case; None where the policy compresses nothing."""
    rate = (case.baseline or {}).get("requests_per_s")
    if not isinstance(rate, float | int) or case.error:
        return None
    with Bar("break-even", silent=silent):
        found = break_even(load.workload, scenario.policy, rate, scenario)
    return None if found is None else found.as_dict()


def _gates(path: Path, against: str | None, engine: bool, quality: bool) -> Gates:
    """The gates of the file, and those of --engine and --quality. Raises GateError and
    MisuseError.
    """
    if not path.exists() or path.is_dir():
        raise MisuseError(f"no gates file {str(path)!r} (an example: docs/examples/gates.toml)")
    asked = gates_from_toml(path.read_text("utf-8"), str(path))
    on_quality = any(gate.metric == QUALITY for gate in asked.gates)
    if on_quality and not quality:
        raise MisuseError(f"a gate on {QUALITY} needs --quality RESULTS of `zlab evaluate`")
    if quality:
        asked = asked.with_quality()
    relative = [gate.written for gate in asked.gates if gate.is_relative]
    if relative and against is None:
        raise MisuseError(
            f"gate {relative[0]!r} is a factor of a baseline: name it by --against POLICY"
        )
    on_engine = any(gate.metric == "engine" for gate in asked.gates)
    if on_engine and not engine:
        raise MisuseError(f"gate {ENGINE_GATE!r} needs --engine")
    return (
        replace(asked, gates=(*asked.gates, *gates_from_list([ENGINE_GATE]).gates))
        if engine and not on_engine
        else asked
    )


def _check_out(out: Path | None) -> None:
    if out is not None and not out.parent.is_dir():
        raise MisuseError(f"--out {out}: there is no folder {out.parent}")


def _loads(traces: Sequence[str], seeds: int, reading: ReadingOptions, silent: bool) -> list[Load]:
    """Every workload: a made-up one with each of its seeds, a file once."""
    has_files = any(
        not trace.startswith(PREFIX) for trace in traces
    )  # beside them, what reads files is not for others
    sources = [
        WorkloadSource(trace) if has_files and trace.startswith(PREFIX) else reading.source(trace)
        for trace in traces
    ]
    if len(set(traces)) < len(traces):
        raise MisuseError(f"a trace is named twice: {', '.join(traces)}")
    if seeds > 1 and not any(source.is_synthetic for source in sources):
        raise MisuseError(
            f"--seeds {seeds} needs a made-up workload ({PREFIX}...): {', '.join(traces)} is fixed"
        )
    return [
        Load(source.spec, seed, source.read(seed, silent))
        for source in sources
        for seed in _seeds(source, seeds)
    ]


def _seeds(source: WorkloadSource, num: int) -> list[int] | list[None]:
    return list(range(source.seed, source.seed + num)) if source.is_synthetic else [None]


def _evidence(
    scenario: Scenario,
    baseline: Scenario | None,
    gates: Gates,
    cases: Sequence[Case],
    checked: EngineCheck | None,
    setup: dict[str, Any],
    who: str,
    **more: Any,
) -> Evidence:
    """The record of it all; `more` goes into it as it is, where it is something."""
    if checked is not None:
        cases = [
            replace(case, measured={**case.measured, "engine": checked.words}) for case in cases
        ]
    policy = store_policy(scenario.set_up().policy)
    return make_evidence(
        policy,
        code_digest(policy),
        Target(setup["model"], setup["gpu"]),
        gates,
        cases,
        setup,
        now(),
        against=store_policy(baseline.set_up().policy).as_dict() if baseline is not None else None,
        engine=checked.runs if checked is not None else None,
        made_by=who,
        version=version("zipage-lab"),
        lengths=scenario.set_up().lengths.as_dict(),
        **{name: value for name, value in more.items() if value is not None},
    )


def _keep(
    evidence: Evidence, out: Path | None, registry: PolicyRegistry | None, who: str, why: str
) -> None:
    if out is not None:
        write_evidence(evidence, out)
    if registry is not None:
        registry.add_evidence(evidence, who, why)


def _as_dict(evidence: Evidence) -> dict[str, Any]:
    """The record with its id, and which case decided each gate."""
    judged = [
        {
            "gate": one.verdict.gate.written,
            "state": one.verdict.state,
            "measured": one.verdict.measured,
            "limit": one.verdict.limit,
            "case": one.case.label,
        }
        for one in evidence.judged
    ]
    return {**evidence.as_dict(), "judged": judged}

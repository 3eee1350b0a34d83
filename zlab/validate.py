"""`zlab validate`: may this policy serve? Replays, gates, and a record of the evidence."""

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from policies.code import code_digest
from policies.evidence import Case, Evidence, Target, make_evidence, write_evidence
from policies.gates import Gates, gates_from_list, gates_from_toml
from policies.measures import OK
from policies.registry import Registry
from policies.registry_changes import now
from policies.spec import load_policy
from policies.stored import store_policy
from sim.scenario import Scenario
from sim.validate import Load, setup_of
from sim.validate import validate as run_cases
from zlab.cluster import SpreadOptions, spread
from zlab.engine_check import EngineCheck, EngineCheckOptions
from zlab.option_groups import with_groups
from zlab.options import AsJson, ReadingOptions, ScenarioOptions, Seeds
from zlab.outcome import WENT_WRONG, MisuseError, fail
from zlab.progress import Bar
from zlab.registry_options import Who, Why, registry_at, signed_by
from zlab.source import PREFIX, Source
from zlab.validate_table import show_evidence

ENGINE_GATE = f"engine == {OK}"


TracesOption = Annotated[
    list[str], typer.Option("--trace", "-t", help="A trace as of `zlab replay`; repeat it for several.")
]
GatesFile = Annotated[
    Path, typer.Option("--gates", dir_okay=False, help="A file of what must hold, as docs/examples/gates.toml.")
]
Against = Annotated[
    str | None,
    typer.Option("--against", help="The policy to replace: a bound as `>= 1.5x` is a factor of its figure."),
]
RegistryFile = Annotated[
    Path | None,
    typer.Option("--registry", dir_okay=False, envvar="ZLAB_REGISTRY", help="Keep the evidence in this registry."),
]
Out = Annotated[Path | None, typer.Option("--out", dir_okay=False, help="Write the evidence to this file.")]


@with_groups
def validate(
    policy: Annotated[str, typer.Argument(help="The policy to judge, as of `zlab replay`.")],
    *,
    trace: TracesOption,
    gates: GatesFile,
    against: Against = None,
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
    """Replay a policy and what it is to replace over traces and seeds, check gates, and keep the evidence.

    The worst case decides. The scheduler is audited at every step. Exit code 0: every gate held; 1: one did not, or the
    runs went wrong; 2: misuse.
    """
    engine_check.check()
    if why and registry is None:
        raise MisuseError(f"--why {why!r} goes into the history of a --registry, and there is none")
    asked = _gates(gates, against, engine_check.engine)
    scenario = given.scenario(policy)
    setup = setup_of(scenario, against)
    _check_out(out)
    signed = signed_by(who)
    kept = registry_at(registry, create=True) if registry is not None else None
    loads = _loads(trace, seeds, reading, as_json)
    num_runs = len(loads) * (2 if against else 1)
    with (
        spread(spreading.backend, spreading.jobs, spreading.cluster),
        Bar("validate", num_runs, "runs", as_json) as bar,
    ):
        cases = run_cases(loads, scenario, against, bar)
    checked = engine_check.run(load_policy(policy))
    evidence = _evidence(scenario, against, asked, cases, checked, setup, signed)
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
        raise fail(f"{evidence.policy.name} did not pass: {'; '.join(broken) or 'a run broke off'}", WENT_WRONG)


def _gates(path: Path, against: str | None, engine: bool) -> Gates:
    """The gates of the file, and that of --engine. Raises GateError and MisuseError."""
    if not path.exists() or path.is_dir():
        raise MisuseError(f"no gates file {str(path)!r} (an example: docs/examples/gates.toml)")
    asked = gates_from_toml(path.read_text("utf-8"), str(path))
    relative = [gate.written for gate in asked.gates if gate.is_relative]
    if relative and against is None:
        raise MisuseError(f"gate {relative[0]!r} is a factor of a baseline: name it by --against POLICY")
    on_engine = any(gate.metric == "engine" for gate in asked.gates)
    if on_engine and not engine:
        raise MisuseError(f"gate {ENGINE_GATE!r} needs --engine")
    return Gates((*asked.gates, *gates_from_list([ENGINE_GATE]).gates)) if engine and not on_engine else asked


def _check_out(out: Path | None) -> None:
    if out is not None and not out.parent.is_dir():
        raise MisuseError(f"--out {out}: there is no folder {out.parent}")


def _loads(traces: Sequence[str], seeds: int, reading: ReadingOptions, silent: bool) -> list[Load]:
    """Every workload: a made-up one with each of its seeds, a file once."""
    has_files = any(not trace.startswith(PREFIX) for trace in traces)  # beside them, what reads files is not for others
    sources = [Source(trace) if has_files and trace.startswith(PREFIX) else reading.source(trace) for trace in traces]
    if len(set(traces)) < len(traces):
        raise MisuseError(f"a trace is named twice: {', '.join(traces)}")
    if seeds > 1 and not any(source.is_synthetic for source in sources):
        raise MisuseError(f"--seeds {seeds} needs a made-up workload ({PREFIX}...): {', '.join(traces)} is fixed")
    return [Load(source.spec, seed, source.read(seed, silent)) for source in sources for seed in _seeds(source, seeds)]


def _seeds(source: Source, num: int) -> list[int] | list[None]:
    return list(range(source.seed, source.seed + num)) if source.is_synthetic else [None]


def _evidence(
    scenario: Scenario,
    against: str | None,
    gates: Gates,
    cases: Sequence[Case],
    checked: EngineCheck | None,
    setup: dict[str, Any],
    who: str,
) -> Evidence:
    """The record of it all."""
    if checked is not None:
        cases = [replace(case, measured={**case.measured, "engine": checked.words}) for case in cases]
    return make_evidence(
        store_policy(load_policy(scenario.policy)),
        code_digest(),
        Target(setup["model"], setup["gpu"]),
        gates,
        cases,
        setup,
        now(),
        against=store_policy(load_policy(against)).as_dict() if against is not None else None,
        engine=checked.runs if checked is not None else None,
        made_by=who,
        version=version("zipage-lab"),
    )


def _keep(evidence: Evidence, out: Path | None, registry: Registry | None, who: str, why: str) -> None:
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

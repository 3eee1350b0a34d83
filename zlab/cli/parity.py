"""`zlab parity`: do simulator and engine decide the same?

Recordings of the engine that a command reads: looked at before anything is made of them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer
from rich.markup import escape

from zlab.cli.console import WENT_WRONG, MisuseError, console, count, plain_table
from zlab.cli.options import (
    AsJson,
    BlockSize,
    Changes,
    Device,
    Dtype,
    EngineModel,
    ReadingOptions,
    SizeOptions,
    engine_room,
    engine_settings,
    parse_changes,
    with_groups,
)
from zlab.cli.replay import say_late_changes
from zlab.policies.core.plan import ConfigError, SchedulerLimits
from zlab.policies.core.policy import Join, Policy
from zlab.policies.snapshot import read_changes
from zlab.policies.spec import PolicyError, load_policy, policy_from_toml, presets
from zlab.sim.cost_model import Change
from zlab.sim.fidelity import event_words
from zlab.sim.recorded_run import RecordedRun, redecide
from zlab.sim.replay import check_blocks
from zlab.sim.replay import replay as simulate
from zlab.sim.specs import SimError
from zlab.traces.recording import (
    Difference,
    Recording,
    RecordingError,
    first_difference,
    read_asked,
    refusals,
)
from zlab.traces.synthetic import PREFIX
from zlab.traces.workload import TraceRequest, Workload, dropped_rows

ALWAYS = ("policy", "policy_toml", "policy_digest", "limits", "gpu", "model", "engine")
FROM_FIRST_CHECKPOINT = ("digest", "num_steps")


def engine_recording(folder: Path) -> Recording:
    """A recording of the engine whose manifest says all that is needed to decide the run again.

    Raises RecordingError, naming the folder, where it is damaged, and MisuseError where it is none
    of the engine's.
    """
    found = Recording(folder)
    manifest = found.manifest
    if manifest.get("source") != "engine":
        raise MisuseError(
            f"{folder}: source {manifest.get('source')!r} is not the engine's (zlab bench --out, "
            f"zlab serve --record)"
        )
    missing = [name for name in ALWAYS if name not in manifest]
    if missing:
        raise RecordingError(f"{folder}/manifest.json: lacks {', '.join(missing)}")
    if any(name not in manifest for name in FROM_FIRST_CHECKPOINT):
        raise RecordingError(
            f"{folder}: was stopped before its first checkpoint: it does not say how far the "
            f"run came"
        )
    try:
        policy_from_toml(manifest["policy_toml"], "its policy")
        read_changes(manifest)
        SchedulerLimits(**manifest["limits"])
    except (PolicyError, ConfigError, TypeError) as error:
        raise RecordingError(f"{folder}/manifest.json: {error}") from error
    return found


def recorded_run(folder: Path) -> RecordedRun:
    """The run as the simulator sees it. Raises as `engine_recording`, and RecordingError where
    tables do not agree.
    """
    engine_recording(folder)
    return RecordedRun(folder)


# the demo's shape, a fiftieth as long
SMALL = f"{PREFIX}amc23?num_problems=6&samples=4&mu=5&sigma=0.6&cap=300"
SMALL_BLOCKS = 64
SMALL_BUDGET_TOKENS = 192
MOST_ROWS_SHOWN = 30


@dataclass(frozen=True)
class ParityVerdict:
    """One policy: both digests, what happened in the run, and the first row that differs."""

    policy: str
    engine_digest: str
    other_digest: str
    figures: Mapping[str, Any]
    difference: Difference | None
    rows: tuple[
        list[dict[str, int]], list[dict[str, int]]
    ]  # of the step that differs: engine's, simulator's
    trace_rows: Mapping[str, Any] | None = None  # as `WorkloadMeta.rows`
    conditions: Mapping[str, Any] = field(default_factory=dict)  # of the engine: `Run.conditions`

    @property
    def equal(self) -> bool:
        """Whether both decided the same."""
        return self.engine_digest == self.other_digest


@dataclass(frozen=True)
class SmallSizeOptions(SizeOptions):
    """Small blocks, so that short outputs fill several."""

    block_size: BlockSize = 16


@with_groups
def parity(
    trace: Annotated[
        str | None,
        typer.Argument(
            show_default=f"a small {PREFIX}amc23",
            help="A trace as of `zlab replay`, played all at once.",
        ),
    ] = None,
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            show_default="every preset",
            help="A policy as in `zlab replay`; repeat it.",
        ),
    ] = None,
    change: Changes = None,
    recording: Annotated[
        Path | None,
        typer.Option(
            "--recording",
            exists=True,
            file_okay=False,
            help="Instead: decide a recorded run of `zlab bench` again, step by step.",
        ),
    ] = None,
    model: EngineModel = "dummy:tiny",
    sizes: SmallSizeOptions,
    reading: ReadingOptions,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Run the same workload in the simulator and on the engine, and compare their decision digests.

    A policy whose compressions are joined `when_done` depends on time: there the engine's run is
    decided again. Exit code 0: equal; 1: not (the first step that differs is shown), or something
    went wrong; 2: misuse.
    """
    if recording is not None:
        if trace is not None or policy or change:
            raise MisuseError(
                "--recording has its own requests, policy and changes: give no TRACE, no --policy "
                "and no --change"
            )
        verdicts = [_again(recording)]
    else:
        policies = policy or [name if trace else _scaled(name) for name in presets()]
        loaded = [load_policy(name) for name in policies]
        changes = parse_changes(change)
        workload = closed(reading.source(trace or SMALL).read(silent=as_json))
        check_blocks(workload, sizes.block_size, [*loaded, *(later for _, later in changes)])
        if trace is None and sizes.kv_blocks is None:
            sizes = replace(sizes, kv_blocks=SMALL_BLOCKS)
        with engine_room():
            verdicts = decided_by_both(
                workload,
                [
                    engine_settings(model, name, device=device, dtype=dtype, **asdict(sizes))
                    for name in policies
                ],
                changes,
            )
    _show(verdicts, as_json)
    if recording is None:
        for verdict in verdicts:
            reached = {"num_steps": verdict.figures["steps"], **verdict.conditions}
            say_late_changes(change or (), reached)
    if not all(verdict.equal for verdict in verdicts):
        raise typer.Exit(WENT_WRONG)


def _scaled(name: str) -> str:
    """A preset with its budget cut to the small workload's lengths."""
    return (
        name
        if load_policy(name).budget.floor(1) is None
        else f"{name}:budget.tokens={SMALL_BUDGET_TOKENS}"
    )


def closed(workload: Workload) -> Workload:
    """The same requests, all there at once."""
    return replace(workload, requests=[replace(request, arrival_s=None) for request in workload])


def decided_by_both(
    workload: Workload,
    settings: Sequence[Mapping[str, Any]],
    changes: Sequence[tuple[int, Policy]] = (),
) -> list[ParityVerdict]:
    """Decide by the engine first (its prompts are real), then by the simulator, for each policy.

    `changes` are (step, policy) pairs: the policies that take over in every run.
    """
    from zlab.engine.engine import EngineSettings, find_dtype
    from zlab.engine.model.loader import load_model
    from zlab.engine.replay import ReplaySettings
    from zlab.engine.replay import replay as replay_on_engine

    first = EngineSettings(**settings[0])
    loaded = load_model(first.model, device=first.device, dtype=find_dtype(first.dtype))
    verdicts = []
    for each in settings:
        chosen = EngineSettings(**each)
        how = ReplaySettings(at_once=True, changes=tuple(changes))
        run = replay_on_engine(workload, chosen, how, loaded=loaded)
        asked = list(run.asked)
        verdicts.append(
            _verdict(
                run.run.manifest, run.run.requests, run.run.events, run.run.blocks, asked, workload
            )
        )
    return verdicts


def _again(folder: Path) -> ParityVerdict:
    found = engine_recording(folder)
    tables = {name: found.table(name) for name in ("requests", "events", "blocks")}
    asked = read_asked(folder)
    try:
        return _verdict(
            found.manifest, tables["requests"], tables["events"], tables["blocks"], asked, None
        )
    except SimError as error:
        raise RecordingError(f"{folder}: {error}") from error


def _verdict(
    manifest: Mapping[str, Any],
    requests: pa.Table,
    events: pa.Table,
    blocks: pa.Table,
    asked: Sequence[TraceRequest],
    told: Workload | None,
) -> ParityVerdict:
    """Set a run of the engine beside the simulator's decisions: of a closed workload, or told what
    the engine was.
    """
    policy = (
        policy_from_toml(manifest["policy_toml"], manifest["policy"]) if told is not None else None
    )
    changes = [Change(one.step, one.policy) for one in read_changes(manifest)]
    joins = [one.policy.compression.join for one in changes]
    if policy is not None:
        joins.append(policy.compression.join)
    if told is not None and policy is not None and Join.WHEN_DONE not in joins:
        limits = SchedulerLimits(**manifest["limits"])
        same = replace(told, requests=list(asked))
        other = simulate(same, policy, limits=limits, changes=changes)
        digest, other_events = other.manifest["digest"], other.events
        steps = other.manifest["num_steps"]
    else:
        again = redecide(manifest, requests, events, asked)
        digest, other_events, steps = again.digest, again.tables.table("events"), again.num_steps
    difference = first_difference(events, other_events)
    rows = tuple(_rows_of(table, difference) for table in (events, other_events))
    totals = {
        name: sum(requests[name].to_pylist())
        for name in ("preemptions", "swaps", "compressions", "prefix_hit_tokens", "output_tokens")
    }
    failed = requests["status"].to_pylist().count("failed")
    figures = {"steps": manifest["num_steps"], "simulated_steps": steps, **totals, "failed": failed}
    return ParityVerdict(
        manifest["policy"],
        manifest["digest"],
        digest,
        figures,
        difference,
        (rows[0], rows[1]),
        manifest.get("workload", {}).get("rows"),
        {name: manifest[name] for name in ("gpu", "model", "limits")}
        | {
            "refusals": refusals(requests),
            "policy_changes": [
                {"step": one["step"], "policy": one["name"]}
                for one in manifest.get("policy_changes", ())
            ],
        },
    )


def _rows_of(events: pa.Table, difference: Difference | None) -> list[dict[str, int]]:
    if difference is None:
        return []
    found: list[dict[str, int]] = [
        row for row in events.to_pylist() if row["step"] == difference.step
    ]
    return found


def _show(verdicts: Sequence[ParityVerdict], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"policies": [_as_dict(verdict) for verdict in verdicts]}))
        return
    to = console()
    table = plain_table(
        "policy", "decisions", "steps", "preemptions", "compressions", "prefix hits", "digest"
    )
    for verdict in verdicts:
        figures = verdict.figures
        table.add_row(
            escape(verdict.policy),
            "equal" if verdict.equal else "[bold]DIFFER[/]",
            *(
                count(figures[name])
                for name in ("steps", "preemptions", "compressions", "prefix_hit_tokens")
            ),
            verdict.engine_digest[:16]
            if verdict.equal
            else f"{verdict.engine_digest[:16]} {verdict.other_digest[:16]}",
        )
    to.print(table)
    for words in dict.fromkeys(line for one in verdicts for line in dropped_rows(one.trace_rows)):
        to.print(words)
    for verdict in verdicts:
        if not verdict.equal:
            _show_difference(verdict)


def _as_dict(verdict: ParityVerdict) -> dict[str, Any]:
    difference = verdict.difference
    return {
        "policy": verdict.policy,
        "equal": verdict.equal,
        "engine_digest": verdict.engine_digest,
        "simulator_digest": verdict.other_digest,
        **verdict.figures,
        **verdict.conditions,
        "rows": verdict.trace_rows,
        "first_difference": None
        if difference is None
        else {"step": difference.step, "engine": difference.left, "simulator": difference.right},
    }


def _show_difference(verdict: ParityVerdict) -> None:
    """The events of the first step that differs, side by side."""
    if verdict.difference is None:
        typer.echo(f"{verdict.policy}: the same events name other blocks")
        return
    to = console()
    to.print(f"{escape(verdict.policy)}: the first step that differs is {verdict.difference.step}")
    table = plain_table("", "engine", "simulator")
    engine, simulator = verdict.rows
    for index in range(min(max(len(engine), len(simulator)), MOST_ROWS_SHOWN)):
        cells = [
            event_words(rows[index]) if index < len(rows) else "" for rows in (engine, simulator)
        ]
        table.add_row("" if cells[0] == cells[1] else ">", *cells)
    to.print(table)

"""`zlab parity`: do simulator and engine decide the same?"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer
from rich.markup import escape

from policies.core.limits import Limits
from policies.core.policy import Join
from policies.record import names
from policies.spec import load_policy, policy_from_toml, presets
from sim.errors import SimError
from sim.redecide import redecide
from sim.replay import replay as simulate
from sim.scenario import check_blocks
from traces.asked import read_asked
from traces.recording import Difference, RecordingError, first_difference
from traces.workload import TraceRequest, Workload
from zlab.engine_options import Device, Dtype, EngineModel, engine_room, engine_settings
from zlab.option_groups import with_groups
from zlab.options import AsJson, BlockSize, ReadingOptions, SizeOptions
from zlab.outcome import WENT_WRONG, MisuseError
from zlab.recordings import engine_recording
from zlab.source import PREFIX
from zlab.tables import console, count, plain_table

SMALL = f"{PREFIX}amc23?num_problems=6&samples=4&mu=5&sigma=0.6&cap=300"  # the demo's shape, a fiftieth as long
SMALL_BLOCKS = 64
SMALL_BUDGET_TOKENS = 192
MOST_ROWS_SHOWN = 30


@dataclass(frozen=True)
class Verdict:
    """One policy: both digests, what happened in the run, and the first row that differs."""

    policy: str
    engine_digest: str
    other_digest: str
    figures: Mapping[str, Any]
    difference: Difference | None
    rows: tuple[list[dict[str, int]], list[dict[str, int]]]  # of the step that differs: engine's, simulator's

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
        typer.Argument(show_default=f"a small {PREFIX}amc23", help="A trace as of `zlab replay`, played all at once."),
    ] = None,
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", show_default="every preset", help="A policy as in `zlab replay`; repeat it."),
    ] = None,
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

    A policy whose compressions are joined `when_done` depends on time: there the engine's run is decided again.
    Exit code 0: equal; 1: not (the first step that differs is shown), or something went wrong; 2: misuse.
    """
    if recording is not None:
        if trace is not None or policy:
            raise MisuseError("--recording has its own requests and policy: give no TRACE and no --policy")
        verdicts = [_again(recording)]
    else:
        policies = policy or [name if trace else _scaled(name) for name in presets()]
        for name in policies:
            load_policy(name)
        workload = closed(reading.source(trace or SMALL).read(silent=as_json))
        check_blocks(workload, sizes.block_size)
        if trace is None and sizes.kv_blocks is None:
            sizes = replace(sizes, kv_blocks=SMALL_BLOCKS)
        with engine_room():
            verdicts = decided_by_both(
                workload,
                [engine_settings(model, name, device=device, dtype=dtype, **asdict(sizes)) for name in policies],
            )
    _show(verdicts, as_json)
    if not all(verdict.equal for verdict in verdicts):
        raise typer.Exit(WENT_WRONG)


def _scaled(name: str) -> str:
    """A preset with its budget cut to the small workload's lengths."""
    return name if load_policy(name).budget.floor(1) is None else f"{name}:budget.tokens={SMALL_BUDGET_TOKENS}"


def closed(workload: Workload) -> Workload:
    """The same requests, all there at once."""
    return replace(workload, requests=[replace(request, arrival_s=None) for request in workload])


def decided_by_both(workload: Workload, settings: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Engine first (its prompts are real), then the simulator on the same requests, policy by policy."""
    from engine.build import EngineSettings, find_dtype
    from engine.loading import load_model
    from engine.replay import ReplaySettings
    from engine.replay import replay as replay_on_engine

    first = EngineSettings(**settings[0])
    loaded = load_model(first.model, device=first.device, dtype=find_dtype(first.dtype))
    verdicts = []
    for each in settings:
        chosen = EngineSettings(**each)
        run = replay_on_engine(workload, chosen, ReplaySettings(at_once=True), loaded=loaded)
        asked = list(run.asked)
        verdicts.append(_verdict(run.run.manifest, run.run.requests, run.run.events, run.run.blocks, asked, workload))
    return verdicts


def _again(folder: Path) -> Verdict:
    found = engine_recording(folder)
    tables = {name: found.table(name) for name in ("requests", "events", "blocks")}
    asked = read_asked(folder)
    try:
        return _verdict(found.manifest, tables["requests"], tables["events"], tables["blocks"], asked, None)
    except SimError as error:
        raise RecordingError(f"{folder}: {error}") from error


def _verdict(
    manifest: Mapping[str, Any],
    requests: pa.Table,
    events: pa.Table,
    blocks: pa.Table,
    asked: Sequence[TraceRequest],
    told: Workload | None,
) -> Verdict:
    """Set a run of the engine beside the simulator's decisions: of a closed workload, or told what the engine was."""
    policy = policy_from_toml(manifest["policy_toml"], manifest["policy"]) if told is not None else None
    if told is not None and policy is not None and policy.compression.join is not Join.WHEN_DONE:
        limits = Limits(**manifest["limits"])
        other = simulate(replace(told, requests=list(asked)), policy, limits=limits)
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
    return Verdict(manifest["policy"], manifest["digest"], digest, figures, difference, (rows[0], rows[1]))


def _rows_of(events: pa.Table, difference: Difference | None) -> list[dict[str, int]]:
    if difference is None:
        return []
    found: list[dict[str, int]] = [row for row in events.to_pylist() if row["step"] == difference.step]
    return found


def _show(verdicts: Sequence[Verdict], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"policies": [_as_dict(verdict) for verdict in verdicts]}))
        return
    to = console()
    table = plain_table("policy", "decisions", "steps", "preemptions", "compressions", "prefix hits", "digest")
    for verdict in verdicts:
        figures = verdict.figures
        table.add_row(
            escape(verdict.policy),
            "equal" if verdict.equal else "[bold]DIFFER[/]",
            *(count(figures[name]) for name in ("steps", "preemptions", "compressions", "prefix_hit_tokens")),
            verdict.engine_digest[:16]
            if verdict.equal
            else f"{verdict.engine_digest[:16]} {verdict.other_digest[:16]}",
        )
    to.print(table)
    for verdict in verdicts:
        if not verdict.equal:
            _show_difference(verdict)


def _as_dict(verdict: Verdict) -> dict[str, Any]:
    difference = verdict.difference
    return {
        "policy": verdict.policy,
        "equal": verdict.equal,
        "engine_digest": verdict.engine_digest,
        "simulator_digest": verdict.other_digest,
        **verdict.figures,
        "first_difference": None
        if difference is None
        else {"step": difference.step, "engine": difference.left, "simulator": difference.right},
    }


def _show_difference(verdict: Verdict) -> None:
    """The events of the first step that differs, side by side."""
    if verdict.difference is None:
        typer.echo(f"{verdict.policy}: the same events name other blocks")
        return
    kinds = names()["kinds"]
    to = console()
    to.print(f"{escape(verdict.policy)}: the first step that differs is {verdict.difference.step}")
    table = plain_table("", "engine", "simulator")
    engine, simulator = verdict.rows
    for index in range(min(max(len(engine), len(simulator)), MOST_ROWS_SHOWN)):
        cells = [_say(rows[index], kinds) if index < len(rows) else "" for rows in (engine, simulator)]
        table.add_row("" if cells[0] == cells[1] else ">", *cells)
    to.print(table)


def _say(row: Mapping[str, int], kinds: Mapping[str, str]) -> str:
    request = f" request {row['request']}" if row["request"] >= 0 else ""
    blocks = f" {row['num_blocks']} blocks" if row["num_blocks"] else ""
    return f"{kinds[str(row['kind'])]}{request} {row['value']}{blocks}"

"""`zlab replay`: one workload under one policy."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from sim.scenario import Scenario, check_blocks
from traces.perfetto import write_perfetto
from traces.recording import Recording
from traces.run import Run
from traces.workload import Workload
from zlab.option_groups import with_groups
from zlab.options import AsJson, PerfettoFile, PolicyName, ReadingOptions, RunFolder, ScenarioOptions, Trace
from zlab.outcome import INTERRUPTED, WENT_WRONG, MisuseError, fail
from zlab.progress import Bar
from zlab.tables import console, show_run

NS_PER_S = 1e9


@with_groups
def replay(
    trace: Trace,
    *,
    policy: PolicyName = "hybrid",
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--change", metavar="STEP:POLICY", help="Before that step another policy takes over; repeat it for several."
        ),
    ] = None,
    given: ScenarioOptions,
    reading: ReadingOptions,
    out: RunFolder = None,
    perfetto: PerfettoFile = None,
    plain_steps: Annotated[
        bool, typer.Option("--plain-steps", help="Simulate every step by itself: slower, the same result.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Replay a workload in simulation under a policy and show what it amounts to.

    Exit code 0: ran; 1: the trace or the run went wrong, or no request could be served; 2: misuse; 130: interrupted
    (the recording then holds the run so far and says that it is incomplete).
    """
    scenario = replace(given.scenario(policy), changes=tuple(change or ()))
    scenario.set_up()
    check_new(out)
    check_perfetto(perfetto)
    workload = reading.source(trace).read(silent=as_json)
    check_blocks(workload, scenario.block_size)
    with TemporaryDirectory() as elsewhere:
        folder = out if perfetto is None else out or Path(elsewhere) / "run"  # the trace is made from a recording
        run = watched_run(scenario, workload, folder, quiet=not plain_steps, silent=as_json)
        if perfetto is not None and folder is not None:
            write_perfetto(Recording(folder), perfetto)
        report(run, workload, out, perfetto, as_json)
    for spec in scenario.changes[len(run.manifest["policy_changes"]) :]:
        typer.echo(f"--change {spec}: the run was over after {run.manifest['num_steps']:,} steps", err=True)
    if not run.summary["requests_finished"]:
        raise fail("no request could be served", WENT_WRONG)


def report(run: Run, workload: Workload, out: Path | None, perfetto: Path | None, as_json: bool) -> None:
    """Print what the run amounts to."""
    if as_json:
        typer.echo(json.dumps(run.summary))
    else:
        show_run(run, workload, console())
        for what, where in (("recording", out), ("trace for ui.perfetto.dev", perfetto)):
            if where is not None:
                typer.echo(f"{what} in {where}")


def check_new(out: Path | None) -> None:
    """Raise MisuseError where a recording cannot be put."""
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise MisuseError(f"--out {out}: is not empty; a recording needs a folder of its own")


def check_perfetto(path: Path | None) -> None:
    """Raise MisuseError for a file that could not be written or opened."""
    if path is None:
        return
    if path.suffix != ".json":
        raise MisuseError(f"--perfetto {path}: must end in .json")
    if not path.parent.is_dir():
        raise MisuseError(f"--perfetto {path}: there is no folder {path.parent}")


def watched_run(
    scenario: Scenario, workload: Workload, out: Path | None, quiet: bool = True, silent: bool = False
) -> Run:
    """Run with a progress bar; on Ctrl-C say how far it came and leave with code 130."""
    seen = (0, 0)
    with Bar(scenario.policy, len(workload), "requests", silent) as bar:

        def watch(num_ended: int, _: int, now_ns: int) -> None:
            nonlocal seen
            seen = num_ended, now_ns
            bar(num_ended)

        try:
            return scenario.run(workload, out, quiet, watch)
        except KeyboardInterrupt as error:
            left = f"; the recording in {out} holds it so far, marked incomplete" if out is not None else ""
            typer.echo(
                f"interrupted at {seen[1] / NS_PER_S:,.1f} simulated seconds, "
                f"{seen[0]:,} of {len(workload):,} requests done{left}",
                err=True,
            )
            raise typer.Exit(INTERRUPTED) from error

"""`zlab bench`: one workload under one policy on a real model; the twin of `zlab replay`."""

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from policies.spec import load_policy
from sim.interrupt import AtBoundary
from sim.scenario import check_blocks
from traces.perfetto import write_perfetto
from traces.recording import Recording
from traces.run import Run
from traces.workload import Workload
from zlab.engine_options import (
    DEFAULT_MODEL,
    Device,
    Dtype,
    EngineModel,
    MemoryShare,
    Seed,
    engine_room,
    engine_settings,
)
from zlab.option_groups import with_groups
from zlab.options import AsJson, PerfettoFile, PolicyName, ReadingOptions, RunFolder, SizeOptions, Trace
from zlab.outcome import INTERRUPTED, WENT_WRONG, fail
from zlab.progress import Bar
from zlab.replay import NS_PER_S, check_new, check_perfetto, report


@with_groups
def bench(
    trace: Trace,
    *,
    model: EngineModel = DEFAULT_MODEL,
    policy: PolicyName = "hybrid",
    sizes: SizeOptions,
    memory_utilisation: MemoryShare = None,
    reading: ReadingOptions,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="All requests are there at the start, whatever the trace says.")
    ] = False,
    stop_at_eos: Annotated[
        bool,
        typer.Option(
            "--stop-at-eos", help="The model may end an output; the trace's length is then the most, and not forced."
        ),
    ] = False,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the most probable token.")] = 0.0,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    out: RunFolder = None,
    perfetto: PerfettoFile = None,
    as_json: AsJson = False,
) -> None:
    """Run a workload on a real model under a policy and show what it amounts to, as `zlab replay` does.

    Requests arrive at the trace's times, and their outputs have the trace's lengths. Prompts are the trace's token ids,
    or made up where it has none. Exit codes as of `zlab replay`.
    """
    load_policy(policy)
    check_new(out)
    check_perfetto(perfetto)
    workload = reading.source(trace).read(silent=as_json)
    check_blocks(workload, sizes.block_size)
    settings = engine_settings(
        model,
        policy,
        **asdict(sizes),
        memory_share=memory_utilisation,
        device=device,
        dtype=dtype,
        seed=seed,
    )
    drawn = {"temperature": temperature, "ignore_eos": not stop_at_eos}
    how = {"at_once": at_once, "live": stop_at_eos, "seed": seed}
    _run_and_report(settings, workload, how, drawn, out, perfetto, as_json)


def _run_and_report(
    settings: dict[str, Any],
    workload: Workload,
    how: dict[str, Any],
    drawn: dict[str, Any],
    out: Path | None,
    perfetto: Path | None,
    as_json: bool,
) -> None:
    with TemporaryDirectory() as elsewhere, engine_room():
        folder = out if perfetto is None else out or Path(elsewhere) / "run"  # the trace is made from a recording
        run = watched_run(settings, workload, how, drawn, folder, as_json)
        if perfetto is not None and folder is not None:
            write_perfetto(Recording(folder), perfetto)
        report(run, workload, out, perfetto, as_json)
    if not run.summary["requests_finished"]:
        raise fail("no request could be served", WENT_WRONG)


def watched_run(
    settings: dict[str, Any],
    workload: Workload,
    how: dict[str, Any],
    drawn: dict[str, Any],
    out: Path | None,
    silent: bool,
) -> Run:
    """Run with a progress bar; on Ctrl-C say how far it came and leave with code 130."""
    from engine.build import EngineSettings
    from engine.replay import ReplaySettings
    from engine.replay import replay as replay_on_engine
    from engine.sampling_params import SamplingParams

    seen = (0, 0)
    interrupt = AtBoundary()
    played = ReplaySettings(params=SamplingParams(**drawn), **how)
    with Bar(settings["policy"], len(workload), "requests", silent) as bar, interrupt:

        def watch(num_ended: int, _: int, now_ns: int) -> None:
            nonlocal seen
            seen = num_ended, now_ns
            bar(num_ended)
            interrupt.check()

        try:
            return replay_on_engine(workload, EngineSettings(**settings), played, out=out, progress=watch).run
        except KeyboardInterrupt as error:
            left = f"; the recording in {out} holds it so far, marked incomplete" if out is not None else ""
            typer.echo(
                f"interrupted after {seen[1] / NS_PER_S:,.1f} s, {seen[0]:,} of {len(workload):,} requests done{left}",
                err=True,
            )
            raise typer.Exit(INTERRUPTED) from error

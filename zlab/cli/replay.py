"""`zlab bench`: one workload under one policy on a real model; the twin of `zlab replay`.

`zlab replay`: one workload under one policy.

`zlab generate`: a real model answers a prompt.

`zlab report`: recordings as one HTML page with the dashboard's figures, without a server.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from zlab.cli.console import INTERRUPTED, WENT_WRONG, Bar, MisuseError, console, fail, show_run
from zlab.cli.options import (
    DEFAULT_MODEL,
    AsJson,
    Changes,
    Device,
    Dtype,
    EngineModel,
    KvBlocks,
    MemoryShare,
    PerfettoFile,
    PolicyName,
    ReadingOptions,
    RunFolder,
    ScenarioOptions,
    Seed,
    SizeOptions,
    Trace,
    engine_room,
    engine_settings,
    parse_changes,
    with_groups,
)
from zlab.policies.spec import load_policy
from zlab.sim.compare import BreakEven, break_even
from zlab.sim.replay import Scenario, check_blocks
from zlab.sim.simulator import AtBoundary
from zlab.traces.perfetto import write_perfetto
from zlab.traces.recording import Recording, Run
from zlab.traces.workload import Workload

NS_PER_S = 1e9


@with_groups
def replay(
    trace: Trace,
    *,
    policy: PolicyName = "hybrid",
    change: Changes = None,
    given: ScenarioOptions,
    reading: ReadingOptions,
    out: RunFolder = None,
    perfetto: PerfettoFile = None,
    break_even_with: Annotated[
        str | None,
        typer.Option(
            "--break-even",
            metavar="POLICY",
            help="Search how much longer outputs may get before this policy finishes as many "
            "requests a second as that one, as full-kv (some further simulations).",
        ),
    ] = None,
    pretend: Annotated[
        bool,
        typer.Option(
            "--pretend",
            help="Simulate a pool of --kv-blocks that does not fit in the card's memory; result "
            "and recording say so.",
        ),
    ] = False,
    plain_steps: Annotated[
        bool,
        typer.Option(
            "--plain-steps", help="Simulate every step by itself: slower, the same result."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Replay a workload in simulation under a policy and show what it amounts to.

    Exit code 0: ran; 1: the trace or the run went wrong, or no request could be served; 2: misuse;
    130: interrupted (the recording then holds the run so far and says that it is incomplete).
    """
    scenario = replace(given.scenario(policy), changes=tuple(change or ()))
    setup = scenario.set_up(pretend)
    if pretend and setup.pretended is None:
        typer.echo("--pretend: the pool fits, nothing is pretended", err=True)
    if break_even_with is not None:
        if pretend:
            raise MisuseError("--break-even says what pays: it does not go with --pretend")
        if change:
            raise MisuseError("--break-even is about one policy: it does not go with --change")
        replace(scenario, policy=break_even_with, length_multiplier=1.0).set_up()
    check_new(out)
    check_perfetto(perfetto)
    workload = reading.source(trace).read(silent=as_json)
    setup.check_blocks(workload)
    with TemporaryDirectory() as elsewhere:
        folder = (
            out if perfetto is None else out or Path(elsewhere) / "run"
        )  # the trace is made from a recording
        run = watched_run(
            scenario, workload, folder, quiet=not plain_steps, silent=as_json, pretend=pretend
        )
        if perfetto is not None and folder is not None:
            write_perfetto(Recording(folder), perfetto)
        show_outcome(
            run,
            workload,
            out,
            perfetto,
            as_json,
            _found_break_even(scenario, workload, break_even_with),
        )
    say_late_changes(scenario.changes, run.manifest)
    if not run.summary["requests_finished"]:
        raise fail("no request could be served", WENT_WRONG)


def say_late_changes(changes: Sequence[str], manifest: Mapping[str, Any]) -> None:
    """Name on stderr each `--change` whose step the run did not reach."""
    for spec in changes[len(manifest["policy_changes"]) :]:
        typer.echo(
            f"--change {spec}: the run was over after {manifest['num_steps']:,} steps", err=True
        )


def _found_break_even(
    scenario: Scenario, workload: Workload, other: str | None
) -> tuple[str, BreakEven | None] | None:
    """The other policy and the multiplier; None where nobody asked."""
    if other is None:
        return None
    base = replace(scenario, changes=(), length_multiplier=1.0, length_profile=None)
    rate = replace(base, policy=other).run(workload).summary["requests_per_s"]
    return other, break_even(workload, scenario.policy, rate, base)


def show_outcome(
    run: Run,
    workload: Workload,
    out: Path | None,
    perfetto: Path | None,
    as_json: bool,
    found: tuple[str, BreakEven | None] | None = None,
) -> None:
    """Print what the run amounts to.

    Args:
        run: the finished run.
        workload: what arrived.
        out: where its recording is.
        perfetto: where its Chrome trace is.
        as_json: one JSON object in place of a table.
        found: the break-even multiplier, and the policy that it is about.
    """
    if as_json:
        more: dict[str, Any] = {"rows": workload.meta.rows(), **run.conditions()}
        if "lengths" in run.manifest:
            more["lengths"] = run.manifest["lengths"]
        if "pretended" in run.manifest:
            more["pretended"] = run.manifest["pretended"]
        if found is not None:
            more["break_even"] = found[1] and found[1].as_dict()
        typer.echo(json.dumps({**run.summary, **more}))
    else:
        show_run(run, workload, console())
        if "pretended" in run.manifest:
            typer.echo(f"pretended: {run.manifest['pretended']}")
        if found is not None:
            typer.echo(say_break_even(run.manifest["policy"], *found))
        for what, where in (("recording", out), ("trace for ui.perfetto.dev", perfetto)):
            if where is not None:
                typer.echo(f"{what} in {where}")


def say_break_even(policy: str, other: str, found: BreakEven | None) -> str:
    """The break-even multiplier in words."""
    if found is None:
        return f"{policy} compresses nothing, so its outputs get no longer"
    if found.bound == "below":
        return f"{policy} finishes no more requests a second than {other}, at any length"
    if found.bound == "above":
        return f"{policy} finishes more requests a second than {other} up to {found.words} longer"
    return (
        f"{policy} finishes more requests a second than {other} until outputs get "
        f"{found.words} as long"
    )


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
    scenario: Scenario,
    workload: Workload,
    out: Path | None,
    quiet: bool = True,
    silent: bool = False,
    pretend: bool = False,
) -> Run:
    """Run with a progress bar; on Ctrl-C say how far it came and leave with code 130."""
    seen = (0, 0)
    with Bar(scenario.policy, len(workload), "requests", silent) as bar:

        def watch(num_ended: int, _: int, now_ns: int) -> None:
            nonlocal seen
            seen = num_ended, now_ns
            bar(num_ended)

        try:
            return scenario.run(workload, out, quiet, watch, pretend=pretend)
        except KeyboardInterrupt as error:
            left = (
                f"; the recording in {out} holds it so far, marked incomplete"
                if out is not None
                else ""
            )
            typer.echo(
                f"interrupted at {seen[1] / NS_PER_S:,.1f} simulated seconds, "
                f"{seen[0]:,} of {len(workload):,} requests done{left}",
                err=True,
            )
            raise typer.Exit(INTERRUPTED) from error


@with_groups
def bench(
    trace: Trace,
    *,
    model: EngineModel = DEFAULT_MODEL,
    policy: PolicyName = "hybrid",
    change: Changes = None,
    sizes: SizeOptions,
    memory_utilisation: MemoryShare = None,
    reading: ReadingOptions,
    at_once: Annotated[
        bool,
        typer.Option(
            "--at-once", help="All requests are there at the start, whatever the trace says."
        ),
    ] = False,
    stop_at_eos: Annotated[
        bool,
        typer.Option(
            "--stop-at-eos",
            help="The model may end an output; the trace's length is then the most, and "
            "not forced.",
        ),
    ] = False,
    temperature: Annotated[
        float, typer.Option("--temperature", help="0 takes the most probable token.")
    ] = 0.0,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    out: RunFolder = None,
    perfetto: PerfettoFile = None,
    as_json: AsJson = False,
) -> None:
    """Run a workload on a real model under a policy and show what it amounts to, as `zlab replay`
    does.

    Requests arrive at the trace's times, and their outputs have the trace's lengths. Prompts are
    the trace's token ids, or made up where it has none. Exit codes as of `zlab replay`.
    """
    first = load_policy(policy)
    changes = parse_changes(change)
    check_new(out)
    check_perfetto(perfetto)
    workload = reading.source(trace).read(silent=as_json)
    check_blocks(workload, sizes.block_size, [first, *(one for _, one in changes)])
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
    how = {"at_once": at_once, "live": stop_at_eos, "seed": seed, "changes": changes}
    manifest = _run_and_report(settings, workload, how, drawn, out, perfetto, as_json)
    say_late_changes(change or (), manifest)


def _run_and_report(
    settings: dict[str, Any],
    workload: Workload,
    how: dict[str, Any],
    drawn: dict[str, Any],
    out: Path | None,
    perfetto: Path | None,
    as_json: bool,
) -> Mapping[str, Any]:
    """Return the manifest of the run."""
    with TemporaryDirectory() as elsewhere, engine_room():
        folder = (
            out if perfetto is None else out or Path(elsewhere) / "run"
        )  # the trace is made from a recording
        run = watched_engine_run(settings, workload, how, drawn, folder, as_json)
        if perfetto is not None and folder is not None:
            write_perfetto(Recording(folder), perfetto)
        show_outcome(run, workload, out, perfetto, as_json)
    if not run.summary["requests_finished"]:
        raise fail("no request could be served", WENT_WRONG)
    return run.manifest


def watched_engine_run(
    settings: dict[str, Any],
    workload: Workload,
    how: dict[str, Any],
    drawn: dict[str, Any],
    out: Path | None,
    silent: bool,
) -> Run:
    """Run with a progress bar; on Ctrl-C say how far it came and leave with code 130."""
    from zlab.engine.engine import EngineSettings
    from zlab.engine.replay import ReplaySettings
    from zlab.engine.replay import replay as replay_on_engine
    from zlab.engine.sampling_params import SamplingParams

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
            return replay_on_engine(
                workload, EngineSettings(**settings), played, out=out, progress=watch
            ).run
        except KeyboardInterrupt as error:
            left = (
                f"; the recording in {out} holds it so far, marked incomplete"
                if out is not None
                else ""
            )
            typer.echo(
                f"interrupted after {seen[1] / NS_PER_S:,.1f} s, {seen[0]:,} of "
                f"{len(workload):,} requests done{left}",
                err=True,
            )
            raise typer.Exit(INTERRUPTED) from error


LAPTOP_BLOCK_SIZE = 64


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads it from stdin.")],
    model: EngineModel = DEFAULT_MODEL,
    policy: PolicyName = "hybrid",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Most tokens of the answer.")
    ] = 256,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", help="How freely tokens are drawn; 0 takes the most probable."
        ),
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw from the most probable tokens of this share.")
    ] = 1.0,
    seed: Seed = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="End before this text; repeat it for several."),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            show_default="if it has one",
            help="Through the model's chat template.",
        ),
    ] = None,
    kv_blocks: KvBlocks = None,
    block_size: Annotated[
        int, typer.Option("--block-size", min=1, help="Tokens in a block.")
    ] = LAPTOP_BLOCK_SIZE,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Answer a prompt, text as it comes.

    Exit code 0: answered; 1: the answer failed on its way; 2: misuse, or a prompt that can't be
    served.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    settings = engine_settings(
        model,
        policy,
        kv_blocks=kv_blocks,
        block_size=block_size,
        device=device,
        dtype=dtype,
        seed=seed,
    )
    with engine_room():
        failed = _answer(
            text,
            chat,
            settings,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=tuple(stop or ()),
        )
    if failed:
        raise fail(failed, WENT_WRONG)


def _answer(prompt: str, chat: bool | None, settings: dict[str, Any], **asked: Any) -> str:
    """Write the answer to stdout as it comes; returns why it failed, or nothing."""
    from zlab.engine.llm import LLM
    from zlab.engine.sampling_params import SamplingParams

    params = SamplingParams(**asked)
    with LLM(**settings) as llm:
        if llm.engine.loaded.tokenizer is None:
            raise MisuseError(
                f"model {settings['model']!r} has no tokenizer, so it has no text to answer with"
            )
        template = llm.tokenizer.has_chat_template if chat is None else chat
        prompts = llm.chat_prompts([{"role": "user", "content": prompt}]) if template else [prompt]
        failed = ""
        for delta in llm.stream(prompts, params):
            typer.echo(delta.text, nl=False)
            sys.stdout.flush()
            if delta.finish_reason == "error":
                failed = delta.message
        typer.echo()
    return failed


def missing_for_report() -> list[str]:
    """Return the packages of the extra `report` that are not installed."""
    needs = {"plotly": "plotly", "pandas": "pandas", "PIL": "pillow"}
    return [package for name, package in needs.items() if find_spec(name) is None]


def report(
    runs: Annotated[
        list[Path], typer.Argument(exists=True, file_okay=False, help="Folders of recordings.")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", dir_okay=False, help="The page to write; replaced if it is there."),
    ],
) -> None:
    """Write the dashboard's figures of one or several recordings as one HTML page.

    Needs the extra `report`.
    """
    if missing := missing_for_report():
        raise MisuseError(
            f"zlab report needs {' and '.join(missing)}: pip install 'zipage-lab[report]'"
        )
    if not out.parent.is_dir():
        raise MisuseError(f"--out {out}: there is no folder {out.parent}")
    named = list(zip(names_of(runs), map(Recording, runs), strict=True))
    from zlab.dashboard.report import write_report

    write_report(named, out)
    typer.echo(f"{len(runs)} recording{'s' if len(runs) != 1 else ''} in {out}")


def names_of(runs: list[Path]) -> list[str]:
    """The folders' own names where they differ, else as much of their paths as tells them apart.

    Raises MisuseError when one folder occurs twice.
    """
    full = [run.resolve() for run in runs]
    twice = next((run for run, path in zip(runs, full, strict=True) if full.count(path) > 1), None)
    if twice is not None:
        raise MisuseError(f"{twice} occurs twice")
    length = 1
    while len({path.parts[-length:] for path in full}) < len(full):
        length += 1
    return ["/".join(path.parts[-length:]) for path in full]

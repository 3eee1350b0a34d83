"""`zlab demo`: the main job on a made-up reasoning workload, from requests to a table, recordings
and a picture.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from zlab.cli.console import (
    Bar,
    MisuseError,
    console,
    count,
    figure,
    plain_table,
    say_lengths,
    share,
)
from zlab.cli.options import LengthMultiplier, LengthProfile
from zlab.cli.replay import missing_for_report, say_break_even
from zlab.sim.compare import BreakEven, break_even
from zlab.sim.replay import Scenario
from zlab.traces.recording import FORMAT, Recording, RecordingError, Run
from zlab.traces.synthetic import REASONING_SHAPES, reasoning
from zlab.traces.workload import Workload

SHAPE = replace(REASONING_SHAPES["amc23"], samples=4)
SPEC = "synth:amc23?samples=4"
POOL = Scenario(
    kv_blocks=512, block_size=256, max_batched_tokens=16_384
)  # 131,072 tokens, as in every measured run
FIRST = "full-kv"
HYBRID = "hybrid"
REQUESTS, TOKENS = "requests_per_s", "tokens_per_s"


def _no_async(base: Run, ablated: Run, workload: Workload) -> str:
    work_s = base.summary["compression_share"] * base.summary["makespan_s"]
    return (
        f"A step waits for its compressions instead of running beside them. They are "
        f"{work_s:.0f} s of work either "
        "way, and the simulated card is shared: what runs beside a step takes its bandwidth from "
        "that step. Idle gaps "
        "of a real card, which overlap would fill, are not modelled."
    )


def _no_prefix(base: Run, ablated: Run, workload: Workload) -> str:
    longest = max(request.prompt_tokens for request in workload)
    hits = base.summary["prefix_hit_tokens"]
    return (
        f"The longest prompt has {longest} tokens and only full blocks of {POOL.block_size} are "
        f"shared, so samples of "
        f"a problem share nothing. Hybrid's {hits:,} hit tokens are preempted requests that "
        f"found their own blocks "
        "again."
    )


def _no_hybrid(base: Run, ablated: Run, workload: Workload) -> str:
    return (
        "Every running request needs a query slot from its first token on, so "
        f"{ablated.summary['running_max']} run at most and {ablated.summary['running_mean']:.1f} "
        f"on average; "
        f"hybrid lets short ones run without: {base.summary['running_max']} and "
        f"{base.summary['running_mean']:.1f}."
    )


@dataclass(frozen=True)
class Ablation:
    """Hybrid with one part taken away, and what explains the difference."""

    name: str
    spec: str
    cause: Callable[[Run, Run, Workload], str]


ABLATIONS = (
    Ablation("no-async", f"{HYBRID}:join=blocking", _no_async),
    Ablation("no-prefix", f"{HYBRID}:prefix=none", _no_prefix),
    Ablation("no-hybrid", f"{HYBRID}:slots=constrained", _no_hybrid),
)
HEAD = (
    "90 %\nout, s",
    "running",
    "blocks\nin use",
    "pre-\nempted",
    "recom-\nputed",
    "com-\npressed",
)
SPECS = {name: name for name in (FIRST, "constrained", HYBRID)} | {
    item.name: item.spec for item in ABLATIONS
}


def demo(
    out: Annotated[
        Path, typer.Option("--out", file_okay=False, help="Folder for recordings and the picture.")
    ] = Path("runs/demo"),
    seeds: Annotated[
        int,
        typer.Option("--seeds", min=1, help="Workloads over which hybrid is set against full-kv."),
    ] = 5,
    length_multiplier: LengthMultiplier = 1.0,
    length_profile: LengthProfile = None,
) -> None:
    """Replay AMC-23-like reasoning (Qwen3-8B on H200, a pool too small for it) under six policies.

    Prints a table and what each part of hybrid is worth; leaves a recording for each policy,
    figures.json and, with the extra `report`, occupancy.html in the folder. What an earlier demo
    left there is replaced. The headline is finished requests a second; how much longer outputs may
    get before hybrid stops paying is searched.
    """
    base = replace(POOL, length_multiplier=length_multiplier, length_profile=length_profile)
    for spec in SPECS.values():
        replace(base, policy=spec).set_up()
    make_room(out)
    workload = reasoning(SHAPE, seed=0)
    total = len(workload) * (len(SPECS) + 2 * (seeds - 1))
    with Bar("demo", total, "requests") as bar:
        done = 0

        def run(spec: str, requests: Workload, folder: Path | None = None) -> Run:
            nonlocal done

            def watch(num_ended: int, _: int, now_ns: int) -> None:
                bar(done + num_ended, spec)

            result = replace(base, policy=spec).run(requests, folder, progress=watch)
            done += len(requests)
            return result

        runs = {name: run(spec, workload, out / name) for name, spec in SPECS.items()}
        pairs = [(runs[HYBRID], runs[FIRST])]
        for seed in range(1, seeds):
            other = reasoning(SHAPE, seed=seed)
            pairs.append((run(HYBRID, other), run(FIRST, other)))
        rate = runs[FIRST].summary["requests_per_s"]
        found = break_even(workload, HYBRID, rate, base)
    picture = None if missing_for_report() else out / "occupancy.html"
    if picture is not None:
        from zlab.dashboard.report import write_occupancy

        write_occupancy([(name, Recording(out / name)) for name in runs], picture)
    figures = {
        "workload": workload.meta.source,
        "policies": {name: dict(run.summary) for name, run in runs.items()},
        "hybrid_over_full_kv_by_seed": [_ratio(*pair, TOKENS) for pair in pairs],
        "hybrid_over_full_kv_requests_by_seed": [_ratio(*pair) for pair in pairs],
        "lengths": {name: run.manifest["lengths"] for name, run in runs.items()},
        "break_even": found and found.as_dict(),
    }
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    show(runs, workload, [_ratio(*pair) for pair in pairs], found)
    whats_next(out, picture)


def make_room(out: Path) -> None:
    """Remove what an earlier demo left. Raises MisuseError when something else is in the way."""
    for name in SPECS:
        folder = out / name
        if folder.exists():
            try:
                recording = Recording(folder)
            except RecordingError as error:
                raise MisuseError(
                    f"--out {out}: {folder} is in the way and no recording ({FORMAT})"
                ) from error
            shutil.rmtree(recording.folder)
    out.mkdir(parents=True, exist_ok=True)


def _ratio(run: Run, first: Run, figure: str = REQUESTS) -> float:
    return float(run.summary[figure] / first.summary[figure])


def show(
    runs: Mapping[str, Run], workload: Workload, ratios: list[float], found: BreakEven | None
) -> None:
    """Print the table, the spread over seeds, and each ablation with its cause.

    Args:
        runs: by name.
        workload: of all of them.
        ratios: of finished requests a second, hybrid's over full-kv's, by seed.
        found: how much longer outputs may get.
    """
    to = console()
    first = runs[FIRST]
    limits = first.manifest["limits"]
    output = sum(request.output_tokens or 0 for request in workload)
    to.print(
        f"{len(workload)} reasoning requests like AMC 23 ({SHAPE.num_problems} problems x "
        f"{SHAPE.samples} samples, "
        f"{output / len(workload):,.0f} output tokens on average), all at once, "
        f"{first.manifest['model']} on "
        f"{first.manifest['gpu']}, a pool of {limits['num_blocks']} blocks of "
        f"{limits['block_size']} = "
        f"{limits['num_blocks'] * limits['block_size']:,} tokens; costs: "
        f"{first.manifest['cost']['source']}"
    )
    to.print()
    to.print(_table(runs))
    to.print()
    listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    which = f"seeds 0 to {len(ratios) - 1}" if len(ratios) > 1 else "seed 0"
    to.print(
        f"hybrid's finished requests/s over {FIRST}'s on workloads of this shape, {which}: {listed}"
    )
    to.print(escape(say_lengths(runs[HYBRID].manifest["lengths"])))
    to.print(say_break_even(HYBRID, FIRST, found))
    to.print()
    to.print("What each part of hybrid is worth here, when it is taken away:")
    for item in ABLATIONS:
        change = round(_ratio(runs[item.name], runs[HYBRID]) - 1, 3) + 0.0  # no minus zero
        cause = item.cause(runs[HYBRID], runs[item.name], workload)
        to.print(
            f"[bold]{item.name}[/] ({escape(item.spec)}): {change:+.1%} requests/s. {escape(cause)}"
        )


def _table(runs: Mapping[str, Run]) -> Table:
    solved = any(run.summary["solved_per_s"] is not None for run in runs.values())
    more = ("solved\n/s",) if solved else ()
    table = plain_table("", "requests\n/s", f"over\n{FIRST}", *more, "tokens\n/s", *HEAD)
    for name, run in runs.items():
        figures = run.summary
        table.add_row(
            name,
            figure(figures["requests_per_s"]),
            f"{_ratio(run, runs[FIRST]):.2f}x",
            *((figure(figures["solved_per_s"]),) if solved else ()),
            figure(figures["tokens_per_s"]),
            figure(figures["seconds_to_90pct"]),
            figure(figures["running_mean"]),
            share(figures["occupancy_mean"]),
            count(figures["preemptions"]),
            count(figures["recomputed_tokens"]),
            count(figures["compressions"]),
            end_section=name == HYBRID,
        )
    return table


def whats_next(out: Path, picture: Path | None) -> None:
    """Say where everything lies and what to run next; without a picture, how to get one."""
    seen = (
        f"{picture} (open it in a browser: every block over time, policy beside policy)"
        if picture
        else f"not written, it needs {' and '.join(missing_for_report())}: "
        "pip install 'zipage-lab[report]'"
    )
    pool = f"--kv-blocks {POOL.kv_blocks}"
    typer.echo(
        f"""
recordings    {out} (a folder each: {", ".join(SPECS)})
figures       {out / "figures.json"}
picture       {seen}

what next
  zlab compare '{SPEC}' {pool} --policy {FIRST} --policy {HYBRID} --seeds 5
  zlab sweep '{SPEC}' {pool} --policy {HYBRID} --grid budget.tokens=1024,2048,4096
  zlab policy show {HYBRID}
  make app      # the recordings in the dashboard
"""
    )

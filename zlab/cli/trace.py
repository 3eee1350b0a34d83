"""`zlab trace`: look at a workload, check it, convert it, make one up, cut, scale and join."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from zlab.cli.console import WENT_WRONG, Bar, MisuseError
from zlab.cli.options import Trace
from zlab.cli.workloads import (
    OutputFormat,
    WorkloadSource,
    asked_wrongly,
    check_as_json,
    show_check,
    show_info,
    show_json,
    synth,
    watched,
    write_workload,
)
from zlab.traces.formats import check_trace
from zlab.traces.formats.reader import FORMATS, named_format
from zlab.traces.transform import cut as cut_workload
from zlab.traces.transform import faster, longer, merge, splice, spread, thin, with_token_ids
from zlab.traces.workload_stats import describe, lru_hit_shares, prefix_reuse

app = typer.Typer(
    no_args_is_help=True,
    help="Look at workloads, check, convert, make up, cut, scale and join them.",
)
app.add_typer(synth, name="synth")

DEFAULT_CAPACITIES = (1_000, 10_000, 50_000)

File = Annotated[
    Path,
    typer.Argument(exists=True, dir_okay=False, help="A trace file in any known format; .gz too."),
]
Target = Annotated[
    Path, typer.Argument(dir_okay=False, help="Where to write; gzipped when it ends in .gz.")
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format", help=f"The source's format, if not by its columns: {', '.join(FORMATS)}."
    ),
]
SkipBad = Annotated[
    bool,
    typer.Option(
        "--skip-bad", "--skip-bad-rows", help="Leave bad rows out and count them by reason."
    ),
]
To = Annotated[OutputFormat, typer.Option("--to", help="The format to write.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def info(
    trace: Trace,
    format: Format = None,
    skip_bad: SkipBad = False,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1, show_default="the trace's own", help="Block size for the reuse figures."
        ),
    ] = None,
    lru: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            show_default="1000, 10000 and 50000",
            help="Cache capacity in blocks, repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a workload's size, lengths, times, and how much of the prompts is shared."""
    workload = WorkloadSource(trace, format, skip_bad).read(silent=as_json)
    statistics = describe(workload)
    size = block_size or workload.meta.block_size
    reuse, shares = None, {}
    if size is None and lru:
        raise MisuseError(f"{trace}: has no blocks of its own: --lru needs --block-size")
    if size is not None:
        with asked_wrongly(), Bar("prefix reuse", silent=as_json) as bar:
            reuse = prefix_reuse(watched(workload, bar), size)
        with asked_wrongly(), Bar("least recently used", silent=as_json) as bar:
            shares = lru_hit_shares(watched(workload, bar), lru or DEFAULT_CAPACITIES, size)
        if not reuse.num_requests:
            reuse, shares = None, {}
    if as_json:
        show_json(
            {
                "meta": asdict(workload.meta),
                "statistics": asdict(statistics),
                "prefix_reuse": None if reuse is None else {**asdict(reuse), "share": reuse.share},
                "lru_hit_shares": {str(capacity): share for capacity, share in shares.items()},
                "workload_sha256": workload.sha256,
            }
        )
    else:
        show_info(workload, statistics, reuse, shares)


@app.command()
def check(
    trace: File,
    format: Format = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most so many bad rows.")] = 20,
    strict_order: Annotated[
        bool,
        typer.Option(
            "--strict-order", help="A row that comes earlier than the one before is bad, too."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every row and report the bad ones; exit code 1 if there is any or the file cannot be
    read.
    """
    if format is not None:
        with asked_wrongly():
            named_format(format)
    with Bar(f"checking {trace.name}", silent=as_json) as bar:
        report = check_trace(trace, format, limit, strict_order, bar.share)
    if as_json:
        show_json(check_as_json(report))
    else:
        show_check(trace, report)
    if report.num_bad:
        raise typer.Exit(WENT_WRONG)


@app.command()
def convert(
    source: Trace,
    target: Target,
    to: To = OutputFormat.native,
    format: Format = None,
    skip_bad: SkipBad = False,
) -> None:
    """Write a trace in the project's own format (with NAME.meta.json) or Mooncake's."""
    workload = WorkloadSource(source, format, skip_bad).read()
    with asked_wrongly():
        write_workload(workload, target, to)


@app.command()
def cut(
    source: Trace,
    target: Target,
    start: Annotated[
        float | None, typer.Option(min=0, help="Keep arrivals from this time on, in seconds.")
    ] = None,
    end: Annotated[
        float | None, typer.Option(min=0, help="Keep arrivals before this time, in seconds.")
    ] = None,
    first: Annotated[int | None, typer.Option(min=1, help="Keep at most so many requests.")] = None,
    cls: Annotated[
        list[str] | None, typer.Option("--class", help="Keep this class, repeatable.")
    ] = None,
    to: To = OutputFormat.native,
    format: Format = None,
    skip_bad: SkipBad = False,
) -> None:
    """Keep a window of time, the first requests, or some classes."""
    workload = WorkloadSource(source, format, skip_bad).read()
    with asked_wrongly():
        write_workload(cut_workload(workload, start, end, first, cls), target, to)


@app.command()
def scale(
    source: Trace,
    target: Target,
    spread_how: Annotated[
        Literal["even", "uniform"] | None,
        typer.Option("--spread", help="Spread arrivals of equal time."),
    ] = None,
    spread_over: Annotated[
        float | None,
        typer.Option(
            show_default="the resolution of the trace's times", help="Seconds to spread over."
        ),
    ] = None,
    keep: Annotated[
        float | None, typer.Option("--thin", help="Keep each request with this probability.")
    ] = None,
    speed: Annotated[
        float | None, typer.Option("--faster", help="Arrivals so many times as fast.")
    ] = None,
    prompt: Annotated[float, typer.Option("--prompt", help="Multiply prompt lengths.")] = 1.0,
    output: Annotated[float, typer.Option("--output", help="Multiply output lengths.")] = 1.0,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Make token ids from block ids.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, show_default="0", help="Seed of --thin, --spread uniform, --token-ids."
        ),
    ] = None,
    to: To = OutputFormat.native,
    format: Format = None,
    skip_bad: SkipBad = False,
) -> None:
    """Spread, thin, speed up, stretch: applied in the order of the options here."""
    lengthen = (prompt, output) != (1.0, 1.0)
    if spread_how is None and keep is None and speed is None and not lengthen and not token_ids:
        raise MisuseError(
            "nothing to do: give --spread, --thin, --faster, --prompt, --output or --token-ids"
        )
    if spread_over is not None and spread_how is None:
        raise MisuseError("--spread-over needs --spread")
    if seed is not None and spread_how != "uniform" and keep is None and not token_ids:
        raise MisuseError("--seed needs --thin, --spread uniform or --token-ids")
    workload = WorkloadSource(source, format, skip_bad).read()
    with asked_wrongly():
        if spread_how is not None:
            workload = spread(workload, spread_how, seed or 0, spread_over)
        if keep is not None:
            workload = thin(workload, keep, seed or 0)
        if speed is not None:
            workload = faster(workload, speed)
        if lengthen:
            workload = longer(workload, prompt, output)
        if token_ids:
            workload = with_token_ids(workload, seed or 0)
        write_workload(workload, target, to)


@app.command()
def join(
    sources: Annotated[
        list[str], typer.Argument(help="Two or more traces, each a file or a made-up workload.")
    ],
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where to write.")],
    overlay: Annotated[
        bool, typer.Option("--overlay", help="All begin at once, not one after the other.")
    ] = False,
    gap: Annotated[
        float | None,
        typer.Option(
            min=0, show_default="0", help="Seconds between one's end and the next's start."
        ),
    ] = None,
    same_blocks: Annotated[
        bool,
        typer.Option(
            "--same-blocks",
            help="Block ids mean the same blocks in all files (parts of one trace).",
        ),
    ] = False,
    to: To = OutputFormat.native,
    skip_bad: SkipBad = False,
) -> None:
    """Join traces, one after the other or laid over each other."""
    if overlay and gap is not None:
        raise MisuseError("--gap has no meaning with --overlay")
    workloads = [WorkloadSource(source, None, skip_bad).read() for source in sources]
    with asked_wrongly():
        if overlay:
            joined = merge(*workloads, same_blocks=same_blocks)
        else:
            joined = splice(*workloads, gap_s=gap or 0.0, same_blocks=same_blocks)
        write_workload(joined, out, to)

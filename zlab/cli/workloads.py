"""`zlab trace synth KIND`: workloads made up by rule. The same options and seed write the same
file.

Where a command's workload comes from: a trace file, or a made-up one named
`synth:KIND?key=value&...`.

What `zlab trace` prints and writes: tables for people, JSON for machines, files.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, overload

import typer
from rich.console import Console
from rich.table import Table

from zlab.cli.console import Bar, MisuseError
from zlab.traces.choices import unknown_choice
from zlab.traces.formats import CheckReport, read_trace, write_mooncake, write_native
from zlab.traces.formats.reader import named_format
from zlab.traces.servegen import ServeGenSource
from zlab.traces.servegen import servegen as draw_servegen
from zlab.traces.synthetic import (
    KINDS,
    PREFIX,
    REASONING_SHAPES,
    ChatShape,
    LogNormal,
    SharedPrefixShape,
    arrivals_from,
    make_workload,
    seed_of,
)
from zlab.traces.synthetic import bursty as make_bursty
from zlab.traces.synthetic import chat as make_chat
from zlab.traces.synthetic import fixed as make_fixed
from zlab.traces.synthetic import reasoning as make_reasoning
from zlab.traces.synthetic import shared_prefix as make_shared_prefix
from zlab.traces.workload import CHUNK_ROWS, TraceError, TraceRequest, Workload
from zlab.traces.workload_stats import Distribution, PrefixReuse, WorkloadStatistics


class OutputFormat(StrEnum):
    """The formats that are written."""

    native = "native"
    mooncake = "mooncake"


@contextmanager
def asked_wrongly() -> Iterator[None]:
    """While entered, what cannot be made of workloads that were read is misuse, and no fault of a
    file.
    """
    try:
        yield
    except TraceError as error:
        raise MisuseError(str(error)) from error


@dataclass(frozen=True)
class _Watched(Sequence[TraceRequest]):
    """Requests that tell how far an iteration over them has come."""

    requests: Sequence[TraceRequest]
    on_progress: Callable[[float], None]

    def __len__(self) -> int:
        return len(self.requests)

    @overload
    def __getitem__(self, index: int) -> TraceRequest: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TraceRequest]: ...
    def __getitem__(self, index: int | slice) -> TraceRequest | Sequence[TraceRequest]:
        return self.requests[index]

    def __iter__(self) -> Iterator[TraceRequest]:
        for number, request in enumerate(self.requests):
            if number % CHUNK_ROWS == 0:
                self.on_progress(number / len(self.requests))
            yield request


def watched(workload: Workload, bar: Bar) -> Workload:
    """The workload, telling the bar how far an iteration over it has come."""
    return replace(workload, requests=_Watched(workload.requests, bar.share))


def write_workload(workload: Workload, path: Path, to: OutputFormat) -> None:
    """Write the workload and say on stderr what was written. Raises TraceError where the format
    cannot hold it.
    """
    with Bar(f"writing {path.name}") as bar:
        write = write_native if to is OutputFormat.native else write_mooncake
        write(watched(workload, bar), path)
    typer.echo(f"{path}: {len(workload):,} requests ({to})", err=True)


def show_json(value: Any) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(value))


def _figure(value: float | None, unit: str = "") -> str:
    if value is None:
        return "unknown"
    return f"{value:,.3f}{unit}".rstrip("0").rstrip(".") if not unit else f"{value:,.3f}{unit}"


def _lengths(table: Table, name: str, lengths: Distribution | None, total: int) -> None:
    if lengths is None:
        table.add_row(name, *["unknown"] * 6)
        return
    figures = (lengths.p50, lengths.p90, lengths.p99, lengths.max)
    table.add_row(
        name, f"{lengths.mean:,.2f}", *(f"{figure:,.0f}" for figure in figures), f"{total:,}"
    )


def show_info(
    workload: Workload,
    statistics: WorkloadStatistics,
    reuse: PrefixReuse | None,
    lru: dict[int, float],
) -> None:
    """Print the workload's statistics as tables."""
    console = Console()
    meta = workload.meta
    facts = Table(title=meta.name, show_header=False)
    facts.add_row("requests", f"{statistics.num_requests:,}")
    facts.add_row("rows", _rows(meta.rows_read, meta.rows_kept, meta.dropped))
    facts.add_row("span", _figure(statistics.span_s, " s"))
    facts.add_row("mean rate", _figure(statistics.rate_per_s, " requests/s"))
    facts.add_row("longest gap", _figure(statistics.longest_gap_s, " s"))
    facts.add_row("variation of gaps (1: Poisson)", _figure(statistics.gap_cv))
    facts.add_row("resolution of times", _resolution(meta.arrival_resolution_s))
    for name, counts in (("classes", statistics.classes), ("models", statistics.models)):
        if counts:
            facts.add_row(name, ", ".join(f"{key} {count:,}" for key, count in counts.items()))
    if statistics.num_sessions:
        facts.add_row("sessions", f"{statistics.num_sessions:,}")
    facts.add_row(
        "source", " · ".join(part for part in (meta.source, meta.licence) if part) or "unknown"
    )
    for change in meta.modifications:
        facts.add_row("changed", change)
    console.print(facts)
    lengths = Table("tokens", "mean", "p50", "p90", "p99", "max", "total")
    _lengths(lengths, "prompt", statistics.prompt_tokens, statistics.total_prompt_tokens)
    _lengths(lengths, "output", statistics.output_tokens, statistics.total_output_tokens)
    console.print(lengths)
    if reuse is None:
        has_tokens = any(request.prompt_ids is not None for request in workload)
        console.print(
            "prefix sharing: "
            + ("give --block-size" if has_tokens else "unknown (no block ids, no tokens)")
        )
        return
    console.print(
        f"prefix sharing in blocks of {reuse.block_size}: {reuse.num_reused_blocks:,} of "
        f"{reuse.num_blocks:,} blocks "
        f"({reuse.share:.1%}) seen before with an infinite cache; {reuse.num_wholly_cached:,} "
        f"prompts wholly"
    )
    for capacity, share in lru.items():
        console.print(
            f"  least recently used, {capacity:,} blocks: {share:.4f} of all blocks found"
        )


def _rows(rows_read: int, rows_kept: int, dropped: dict[str, int]) -> str:
    lost = "".join(f", {count:,} dropped: {reason}" for reason, count in dropped.items())
    return f"{rows_read:,} read, {rows_kept:,} kept{lost}"


def _resolution(resolution_s: float | None) -> str:
    return "unknown" if resolution_s is None else f"{resolution_s:g} s"


def show_check(path: Path, report: CheckReport) -> None:
    """Print a file's bad rows and what was read besides."""
    console = Console()
    if report.bad_lines:
        table = Table("line", "what is wrong", title=str(path))
        for bad in report.bad_lines:
            table.add_row(str(bad.line), bad.detail)
        console.print(table)
    hidden = report.num_bad - len(report.bad_lines)
    if hidden:
        console.print(f"and {hidden:,} more")
    if report.workload is None:
        console.print(f"{report.num_bad:,} bad rows, none good")
        return
    meta = report.workload.meta
    console.print(
        f"{report.num_bad:,} bad rows; {_rows(meta.rows_read, meta.rows_kept, meta.dropped)}"
    )
    for change in meta.modifications:
        console.print(f"note: {change}")


def check_as_json(report: CheckReport) -> dict[str, Any]:
    """The report as one JSON object."""
    meta = None if report.workload is None else asdict(report.workload.meta)
    return {
        "num_bad": report.num_bad,
        "bad_lines": [asdict(bad) for bad in report.bad_lines],
        "meta": meta,
    }


synth = typer.Typer(no_args_is_help=True, help="Make up a workload: one command a kind.")

Out = Annotated[
    Path, typer.Option(dir_okay=False, help="Where to write; gzipped when it ends in .gz.")
]
Seed = Annotated[int, typer.Option(min=0, help="The same seed gives the same workload.")]
Requests = Annotated[int, typer.Option("--requests", min=1, help="Number of requests.")]
BlockSize = Annotated[int, typer.Option(min=1, help="Prompt tokens per prefix id.")]
To = Annotated[OutputFormat, typer.Option("--to", help="The format to write.")]
ArrivalSpec = Annotated[
    str,
    typer.Option(
        "--arrivals",
        help="together, poisson:RATE, gamma:RATE:CV or onoff:RATE:ON_S:OFF_S[:OFF_RATE]; rates "
        "a second.",
    ),
]


@synth.command("reasoning")
def reasoning_command(
    out: Out,
    shape: Annotated[
        str, typer.Option(help=f"Lengths like those of {', '.join(REASONING_SHAPES)}.")
    ] = "amc23",
    problems: Annotated[
        int | None, typer.Option(min=1, show_default="the shape's", help="Number of problems.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, show_default="32", help="Samples a problem.")
    ] = None,
    mu: Annotated[float | None, typer.Option(help="Mean of the output length's logarithm.")] = None,
    sigma: Annotated[
        float | None, typer.Option(help="Standard deviation of the output length's logarithm.")
    ] = None,
    cap: Annotated[
        int | None, typer.Option(min=1, show_default="32768", help="Longest output.")
    ] = None,
    between_share: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            show_default="0.6",
            help="Share of the log-variance that lies between problems.",
        ),
    ] = None,
    arrivals: ArrivalSpec = "together",
    seed: Seed = 0,
    to: To = OutputFormat.native,
) -> None:
    """Problems sampled many times, long outputs, all samples of a problem with the same prompt."""
    given: dict[str, Any] = {
        "num_problems": problems,
        "samples": samples,
        "mu": mu,
        "sigma": sigma,
        "cap": cap,
        "between_share": between_share,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    with asked_wrongly():
        if shape not in REASONING_SHAPES:
            raise TraceError(unknown_choice("reasoning shape", shape, REASONING_SHAPES))
        chosen = replace(REASONING_SHAPES[shape], **changes) if changes else shape
        write_workload(make_reasoning(chosen, seed, arrivals_from(arrivals)), out, to)


@synth.command("chat")
def chat_command(
    out: Out,
    requests: Requests = 10_000,
    turns: Annotated[float, typer.Option(min=1, help="Mean number of turns a session.")] = 4.0,
    system_prompts: Annotated[
        int, typer.Option(min=1, help="Number of different system prompts.")
    ] = 16,
    system_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a system prompt.")] = 320,
    max_context: Annotated[
        int, typer.Option(min=1, help="A session ends before passing so many tokens.")
    ] = 16_384,
    think: Annotated[
        float, typer.Option(help="Mean seconds between an answer and the next message.")
    ] = 30.0,
    block_size: BlockSize = 16,
    arrivals: ArrivalSpec = "poisson:1",
    seed: Seed = 0,
    to: To = OutputFormat.native,
) -> None:
    """Sessions of several turns whose prompts grow and share their beginnings; arrivals are those
    of sessions.
    """
    with asked_wrongly():
        shape = ChatShape(
            mean_turns=turns,
            num_system_prompts=system_prompts,
            system_tokens=system_tokens,
            max_context=max_context,
            mean_think_s=think,
            block_size=block_size,
        )
        write_workload(make_chat(requests, shape, arrivals_from(arrivals), seed), out, to)


@synth.command("shared-prefix")
def shared_prefix_command(
    out: Out,
    requests: Requests = 10_000,
    groups: Annotated[int, typer.Option(min=1, help="Number of shared beginnings.")] = 8,
    shared_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a shared beginning.")] = 1024,
    skew: Annotated[
        float, typer.Option(help="Group g has weight 1/g**skew: 0 evenly, 1 Zipf.")
    ] = 1.0,
    block_size: BlockSize = 16,
    arrivals: ArrivalSpec = "poisson:1",
    seed: Seed = 0,
    to: To = OutputFormat.native,
) -> None:
    """Single requests that begin with one of a few long prompts."""
    with asked_wrongly():
        shape = SharedPrefixShape(groups, shared_tokens, skew, block_size=block_size)
        write_workload(make_shared_prefix(requests, shape, arrivals_from(arrivals), seed), out, to)


@synth.command("bursty")
def bursty_command(
    out: Out,
    requests: Requests = 10_000,
    arrivals: ArrivalSpec = "onoff:20:10:50",
    prompt_mu: Annotated[float, typer.Option(help="Mean of the prompt length's logarithm.")] = 6.0,
    prompt_sigma: Annotated[float, typer.Option(help="Its standard deviation.")] = 1.0,
    prompt_cap: Annotated[int, typer.Option(min=1, help="Longest prompt.")] = 8192,
    output_mu: Annotated[float, typer.Option(help="Mean of the output length's logarithm.")] = 5.0,
    output_sigma: Annotated[float, typer.Option(help="Its standard deviation.")] = 0.8,
    output_cap: Annotated[int, typer.Option(min=1, help="Longest output.")] = 2048,
    seed: Seed = 0,
    to: To = OutputFormat.native,
) -> None:
    """Independent requests under any arrival process, on/off bursts if not told otherwise."""
    with asked_wrongly():
        prompt = LogNormal(prompt_mu, prompt_sigma, prompt_cap)
        output = LogNormal(output_mu, output_sigma, output_cap)
        write_workload(
            make_bursty(requests, arrivals_from(arrivals), prompt, output, seed), out, to
        )


@synth.command("fixed")
def fixed_command(
    out: Out,
    requests: Requests = 4000,
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 512,
    output: Annotated[int, typer.Option(min=1, help="Output tokens.")] = 1024,
    rate: Annotated[float, typer.Option(help="Poisson arrivals a second.")] = 20.0,
    seed: Seed = 0,
    to: To = OutputFormat.native,
) -> None:
    """Requests of one shape that share nothing; as it stands, the benchmark workload FIX."""
    with asked_wrongly():
        write_workload(make_fixed(requests, prompt, output, rate, seed), out, to)


@synth.command()
def servegen(
    out: Out,
    rates: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="ServeGen's rates by window (CSV).")
    ],
    lengths: Annotated[
        Path,
        typer.Option(exists=True, dir_okay=False, help="ServeGen's length distributions (JSON)."),
    ],
    start: Annotated[
        float, typer.Option(min=0, help="Begin at this second of the source's clock.")
    ] = 0.0,
    duration: Annotated[
        float | None,
        typer.Option(min=0, show_default="all the source has", help="Seconds to draw."),
    ] = None,
    rate_factor: Annotated[float, typer.Option(help="Multiply the rates.")] = 1.0,
    seed: Seed = 0,
    to: To = OutputFormat.native,
) -> None:
    """Draw requests from ServeGen's measured rates and lengths."""
    source = ServeGenSource.read(rates, lengths)
    with asked_wrongly():
        write_workload(draw_servegen(source, seed, start, duration, rate_factor), out, to)


@dataclass(frozen=True)
class WorkloadSource:
    """A workload that can be made; a synthetic one with any seed."""

    spec: str
    format: str | None = None
    skip_bad: bool = False

    @property
    def is_synthetic(self) -> bool:
        """Whether it is made up by rule, so that another seed gives another workload of the same
        kind.
        """
        return self.spec.startswith(PREFIX)

    @property
    def seed(self) -> int:
        """The seed that the spec names, 0 where it names none."""
        with asked_wrongly():
            return seed_of(self.spec)

    def read(self, seed: int | None = None, silent: bool = False) -> Workload:
        """The workload; `seed` replaces the spec's. Raises TraceError on bad content, MisuseError
        on a bad name.
        """
        if self.is_synthetic:
            if self.format is not None or self.skip_bad:
                raise MisuseError(
                    f"{self.spec} is no file: --format and --skip-bad-rows do not apply"
                )
            with asked_wrongly():
                return make_workload(self.spec, seed)
        if seed is not None:
            raise MisuseError(
                f"{self.spec} is one fixed workload: only a {PREFIX}... spec has seeds"
            )
        if self.format is not None:
            try:
                named_format(self.format)
            except TraceError as error:
                raise MisuseError(str(error)) from error
        if not Path(self.spec).is_file():
            raise MisuseError(
                f"no trace file {self.spec!r} (made-up workloads: "
                f"{', '.join(f'{PREFIX}{k}' for k in KINDS)})"
            )
        with Bar(f"reading {Path(self.spec).name}", silent=silent) as bar:
            return read_trace(self.spec, self.format, self.skip_bad, on_progress=bar.share)

"""What `zlab trace` prints and writes: tables for people, JSON for machines, files."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, overload

import typer
from rich.console import Console
from rich.table import Table

from traces.formats import CheckReport, write_mooncake, write_native
from traces.reuse import PrefixReuse
from traces.statistics import Distribution, WorkloadStatistics
from traces.workload import CHUNK_ROWS, TraceError, TraceRequest, Workload
from zlab.outcome import MisuseError
from zlab.progress import Bar


class OutputFormat(StrEnum):
    """The formats that are written."""

    native = "native"
    mooncake = "mooncake"


@contextmanager
def asked_wrongly() -> Iterator[None]:
    """While entered, what cannot be made of workloads that were read is misuse, and no fault of a file."""
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
    """Write the workload and say on stderr what was written. Raises TraceError where the format cannot hold it."""
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
    table.add_row(name, f"{lengths.mean:,.2f}", *(f"{figure:,.0f}" for figure in figures), f"{total:,}")


def show_info(
    workload: Workload, statistics: WorkloadStatistics, reuse: PrefixReuse | None, lru: dict[int, float]
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
    facts.add_row("source", " · ".join(part for part in (meta.source, meta.licence) if part) or "unknown")
    for change in meta.modifications:
        facts.add_row("changed", change)
    console.print(facts)
    lengths = Table("tokens", "mean", "p50", "p90", "p99", "max", "total")
    _lengths(lengths, "prompt", statistics.prompt_tokens, statistics.total_prompt_tokens)
    _lengths(lengths, "output", statistics.output_tokens, statistics.total_output_tokens)
    console.print(lengths)
    if reuse is None:
        has_tokens = any(request.prompt_ids is not None for request in workload)
        console.print("prefix sharing: " + ("give --block-size" if has_tokens else "unknown (no block ids, no tokens)"))
        return
    console.print(
        f"prefix sharing in blocks of {reuse.block_size}: {reuse.num_reused_blocks:,} of {reuse.num_blocks:,} blocks "
        f"({reuse.share:.1%}) seen before with an infinite cache; {reuse.num_wholly_cached:,} prompts wholly"
    )
    for capacity, share in lru.items():
        console.print(f"  least recently used, {capacity:,} blocks: {share:.4f} of all blocks found")


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
    console.print(f"{report.num_bad:,} bad rows; {_rows(meta.rows_read, meta.rows_kept, meta.dropped)}")
    for change in meta.modifications:
        console.print(f"note: {change}")


def check_as_json(report: CheckReport) -> dict[str, Any]:
    """The report as one JSON object."""
    meta = None if report.workload is None else asdict(report.workload.meta)
    return {"num_bad": report.num_bad, "bad_lines": [asdict(bad) for bad in report.bad_lines], "meta": meta}

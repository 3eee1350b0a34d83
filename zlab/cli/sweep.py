"""`zlab sweep`: a grid of settings, one row a point.

The rows of a sweep as the bytes of a file: CSV, JSON or Parquet.
"""

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.markup import escape

from zlab.cli.console import (
    INTERRUPTED,
    WENT_WRONG,
    Bar,
    MisuseError,
    console,
    fail,
    figure,
    milliseconds,
    plain_table,
    share,
)
from zlab.cli.options import (
    AsJson,
    PolicyName,
    ReadingOptions,
    ScenarioOptions,
    SpreadOptions,
    Trace,
    spread,
    with_groups,
)
from zlab.sim.simulator import AtBoundary
from zlab.sim.sweep import SEED, Point, SweepRow, Value, points, results, run_point, split_values
from zlab.traces.workload import dropped_rows


def _columns(rows: Sequence[SweepRow]) -> dict[str, list[Any]]:
    """Every column that any row has; a parameter with values of several kinds is text."""
    cells = [row.as_cells() for row in rows]
    names = list(dict.fromkeys(name for row in cells for name in row if name != "error"))
    columns = {name: [row.get(name) for row in cells] for name in [*names, "error"]}
    for name in {name for row in rows for name in row.parameters}:
        columns[name] = _typed(columns[name])
    return columns


def _typed(values: list[Any]) -> list[Any]:
    """As they are if all are of one kind, or all numbers; otherwise as text. None stays None."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1:
        return values
    kind = float if kinds == {int, float} else str
    return [None if value is None else kind(value) for value in values]


def _as_csv(rows: Sequence[SweepRow]) -> bytes:
    columns = _columns(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue().encode()


def _as_json(rows: Sequence[SweepRow]) -> bytes:
    return (json.dumps([row.as_dict() for row in rows], indent=1) + "\n").encode()


def _as_parquet(rows: Sequence[SweepRow]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(_columns(rows)), sink)
    written: bytes = sink.getvalue().to_pybytes()
    return written


WRITERS: Mapping[str, Callable[[Sequence[SweepRow]], bytes]] = {
    ".csv": _as_csv,
    ".json": _as_json,
    ".parquet": _as_parquet,
}


def write_rows(rows: Sequence[SweepRow], path: Path) -> None:
    """Write the file in one move; its ending, one of `WRITERS`, says as what."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(WRITERS[path.suffix](rows))
    os.replace(unfinished, path)


Grid = Annotated[
    list[str],
    typer.Option(
        "--grid",
        metavar="KEY=A,B,...",
        help="Values to try: any option of `zlab replay` (policy, kv-blocks, ...), any setting "
        "of the policy "
        "(budget.tokens, join, ...), or seed. Repeat it; the last varies fastest.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        dir_okay=False,
        help="Where the rows go: .csv, .json or .parquet. A table is shown anyway.",
    ),
]
HEAD = (
    "requests/s",
    "tokens/s",
    "TTFT p50 s",
    "p99",
    "TPOT p50 ms",
    "E2E p50 s",
    "running",
    "blocks",
    "preempted",
)


@with_groups
def sweep(
    trace: Trace,
    *,
    grid: Grid,
    policy: PolicyName = "hybrid",
    given: ScenarioOptions,
    reading: ReadingOptions,
    spreading: SpreadOptions,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Replay a workload at every point of a grid, over processes or a cluster.

    A policy that does not have a setting of the grid has one row for all its values, with a blank
    cell. A point that cannot run is a row with its error. Exit code 0: at least one point ran; 1:
    none did; 2: misuse; 130: interrupted (the rows that had finished are shown and written).
    """
    base = given.scenario(policy)
    check_target(out)
    values = read_grid(grid)
    source = reading.source(trace)
    workload = source.read if SEED in values else source.read(silent=as_json)
    todo = points(workload, values, base)
    with (
        spread(spreading.backend, spreading.jobs, spreading.cluster),
        Bar("sweep", len(todo), "points", as_json) as bar,
    ):
        rows, interrupted = gather(todo, bar, spreading.in_this_process)
    ordered = [rows[index] for index in sorted(rows)]
    report(ordered, values, out, as_json)
    failed = sum(row.error is not None for row in ordered)
    if failed:
        typer.echo(f"{failed} of {len(ordered)} points could not run; see their errors", err=True)
    if interrupted:
        typer.echo(f"interrupted: {len(ordered)} of {len(todo)} points had finished", err=True)
        raise typer.Exit(INTERRUPTED)
    if failed == len(ordered):
        raise fail("no point could run", WENT_WRONG)


def gather(
    todo: Sequence[Point], on_done: Callable[[int], None], in_this_process: bool
) -> tuple[dict[int, SweepRow], bool]:
    """Rows by place, and whether Ctrl-C cut the work short.

    Where the points run in this process, it is taken between them or at a step of one: raised just
    anywhere, it could fall into code that swallows it (a finaliser, say).
    """
    rows: dict[int, SweepRow] = {}
    interrupt = AtBoundary()
    try:
        with interrupt if in_this_process else nullcontext():
            for index, row in results(run_point, todo):
                rows[index] = row
                on_done(len(rows))
                interrupt.check()
    except KeyboardInterrupt:
        return rows, True
    return rows, False


def read_grid(options: Sequence[str]) -> dict[str, list[Value]]:
    """`KEY=A,B` options as a mapping. Raises MisuseError."""
    values: dict[str, list[Value]] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals or not key.strip() or not split_values(text):
            raise MisuseError(f"--grid {option}: is not of the form KEY=A,B,...")
        if key in values:
            raise MisuseError(f"--grid {key} occurs twice: write all its values in one")
        values[key.strip()] = [_plain(value) for value in split_values(text)]
    return values


def _plain(text: str) -> Value:
    """A number where it is one."""
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def check_target(out: Path | None) -> None:
    """Raise MisuseError for a file of an unknown kind or in no folder."""
    if out is None:
        return
    if out.suffix not in WRITERS:
        raise MisuseError(f"--out {out}: must end in {', '.join(WRITERS)}")
    if not out.parent.is_dir():
        raise MisuseError(f"--out {out}: there is no folder {out.parent}")


def report(
    rows: Sequence[SweepRow], grid: Mapping[str, Sequence[Value]], out: Path | None, as_json: bool
) -> None:
    """Write the rows to their file, in one move, and show them."""
    if out is not None:
        write_rows(rows, out)
    if as_json:
        typer.echo(json.dumps({"points": [row.as_dict() for row in rows]}))
        return
    to = console()
    table = plain_table(*grid, *HEAD)
    for column in table.columns[: len(grid)]:
        column.no_wrap = True
    for row in rows:
        values = [row.parameters[key] for key in grid]
        cells = ["" if value is None else escape(str(value)) for value in values]
        if row.summary is not None:
            cells += _figures(row.summary)
        table.add_row(*cells)
    to.print(table)
    for words in dict.fromkeys(line for row in rows for line in dropped_rows(row.rows)):
        to.print(escape(words), soft_wrap=True)
    for blank, among in _blanks(rows).items():
        has = "has" if len(among) == 1 else "have"
        words = f"{', '.join(among)} {has} no setting {' and '.join(blank)}"
        to.print(escape(f"{words}: one row for all its values, the cell is blank"), soft_wrap=True)
    for error, number in Counter(row.error for row in rows if row.error is not None).items():
        first = next(row for row in rows if row.error == error)
        where = ", ".join(f"{key}={value}" for key, value in first.parameters.items())
        which = "1 point" if number == 1 else f"{number} points, the first"
        to.print(escape(f"{which} {where}: {error}"), soft_wrap=True)
    if out is not None:
        to.print(f"{len(rows)} rows in {escape(str(out))}", soft_wrap=True)


def _blanks(rows: Sequence[SweepRow]) -> dict[tuple[str, ...], list[str]]:
    """Keys that some policies have no setting for -> these policies."""
    found: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row.blank:
            policies = found.setdefault(tuple(row.blank), [])
            if row.policy not in policies:
                policies.append(row.policy)
    return found


def _figures(summary: Mapping[str, Any]) -> list[str]:
    return [
        figure(summary["requests_per_s"]),
        figure(summary["tokens_per_s"]),
        figure(summary["ttft_s"]["p50"]),
        figure(summary["ttft_s"]["p99"]),
        milliseconds(summary["tpot_s"]["p50"]),
        figure(summary["e2e_s"]["p50"]),
        figure(summary["running_mean"]),
        share(summary["occupancy_mean"]),
        f"{summary['preemptions']:,}",
    ]

"""`zlab compare`: several policies on the same workloads, one table.

The table of `zlab compare`: a row a figure, a column a policy.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from zlab.cli.console import (
    MISSING,
    WHERE_KNOWN,
    Bar,
    MisuseError,
    console,
    count,
    figure,
    milliseconds,
    plain_table,
    say_lengths,
    share,
)
from zlab.cli.options import (
    AsJson,
    BreakEvenSearch,
    PolicyNames,
    ReadingOptions,
    ScenarioOptions,
    Seeds,
    SpreadOptions,
    Trace,
    spread,
    with_groups,
)
from zlab.cli.replay import check_new, say_break_even
from zlab.sim.compare import BreakEven, Compared, Estimate, break_even, recording_folders
from zlab.sim.compare import compare as run_compare
from zlab.sim.length_profile import NOTHING_COMPRESSED, Lengths
from zlab.traces.synthetic import PREFIX
from zlab.traces.workload import Workload, dropped_rows

Show = Callable[[float | None], str]
MARKS = ("p50", "p90", "p99")
ROWS: tuple[tuple[str, str, Show], ...] = (  # label, figure, how it is shown
    ("finished requests/s", "requests_per_s", figure),
    ("solved problems/s", "solved_per_s", figure),
    ("output tokens/s", "tokens_per_s", figure),
    ("90 % of tokens out, s", "seconds_to_90pct", figure),
    *((f"time to first token, s, {mark}", f"ttft_s_{mark}", figure) for mark in MARKS),
    *((f"time per token, ms, {mark}", f"tpot_s_{mark}", milliseconds) for mark in MARKS),
    *((f"end to end, s, {mark}", f"e2e_s_{mark}", figure) for mark in MARKS),
    ("running, mean", "running_mean", figure),
    ("running, max", "running_max", figure),
    ("blocks in use, mean", "occupancy_mean", share),
    ("blocks in use, max", "occupancy_max", share),
    ("wasted slots, mean", "wasted_slots_mean", share),
    ("preemptions", "preemptions", count),
    ("recomputed tokens", "recomputed_tokens", count),
    ("swapped tokens", "swapped_tokens", count),
    ("prefix hit tokens", "prefix_hit_tokens", count),
    ("compressions", "compressions", count),
    ("their share of time", "compression_share", share),
    ("waited for a slot, s", "slot_wait_s", figure),
    ("refused", "requests_refused", count),
)
RATIO_NOT_SHOWN = {"requests_refused", "running_max", "occupancy_max", "compression_share"}
LABEL_WIDTH, COLUMN_WIDTH = 27, 25


def show_comparison(compared: Sequence[Compared], workloads: Sequence[Workload]) -> None:
    """Print the table, in parts where there are more policies than fit side by side."""
    to, workload, num_workloads = console(), workloads[0], len(workloads)
    of = (
        f"{num_workloads} workloads as {workload.meta.name}"
        if num_workloads > 1
        else workload.meta.name
    )
    to.print(f"{of}, {len(workload):,} requests; x: ratio to {escape(compared[0].policy)}")
    for words in dropped_rows(workload.meta.rows()):
        to.print(words)
    kind = (
        "Student's t over workloads"
        if num_workloads > 1
        else "latencies only, from requests drawn anew"
    )
    to.print(f"in brackets: 95 % intervals ({kind})")
    at_once = max(1, (to.width - LABEL_WIDTH) // COLUMN_WIDTH)
    for start in range(0, len(compared), at_once):
        part = compared[start : start + at_once]
        table = plain_table("", *(escape(row.policy) for row in part))
        for label, key, show in ROWS:
            if key in WHERE_KNOWN and all(row.figures[key].value is None for row in compared):
                continue
            table.add_row(label, *(_cell(row, key, show, row is compared[0]) for row in part))
        to.print()
        to.print(table)


def _cell(row: Compared, key: str, show: Show, is_first: bool) -> Text:
    """The figure with its interval, and below it the ratio with its own."""
    text = Text(_with_interval(row.figures[key], show))
    ratio = row.ratios.get(key)
    if ratio is not None and not is_first and key not in RATIO_NOT_SHOWN:
        text.append(f"\n{_with_interval(ratio, _times)}", style="dim")
    return text


def _times(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}x"


def _with_interval(estimate: Estimate, show: Show) -> str:
    if estimate.low is None or estimate.high is None or estimate.low == estimate.high:
        return show(estimate.value)
    return f"{show(estimate.value)} [{show(estimate.low)}, {show(estimate.high)}]"


@with_groups
def compare(
    trace: Trace,
    *,
    policy: PolicyNames,
    seeds: Seeds = 1,
    given: ScenarioOptions,
    reading: ReadingOptions,
    spreading: SpreadOptions,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", file_okay=False, help="New folder for one recording a policy (and seed)."
        ),
    ] = None,
    search: BreakEvenSearch = True,
    as_json: AsJson = False,
) -> None:
    """Replay the same workload under several policies and set them against the first.

    The headline is finished requests a second: where a policy makes outputs longer, tokens a second
    rise without more work being done.

    With --seeds N (a synth: workload) N workloads are made; figures are means over them with 95 %
    intervals (Student's t), ratios are taken within each workload. With one workload only latencies
    have an interval, from drawing its requests anew: it tells what single requests do to a
    percentile, not what another day would bring.
    """
    base = given.scenario()
    check_new(out)
    source = reading.source(trace)
    if not source.is_synthetic and seeds > 1:
        raise MisuseError(
            f"{trace} is one fixed workload: --seeds {seeds} needs a made-up one ({PREFIX}...); "
            f"without it latencies "
            "get their intervals from the trace's own requests"
        )
    first = source.seed if source.is_synthetic else 0
    numbers = list(range(first, first + seeds)) if source.is_synthetic else [None]
    workloads = [source.read(seed, as_json) for seed in numbers]
    total = len(policy) * len(workloads)
    with (
        spread(spreading.backend, spreading.jobs, spreading.cluster),
        Bar("compare", total, "runs", as_json) as bar,
    ):
        compared = run_compare(workloads, policy, base, out, bar)
    lengths = [replace(base, policy=one).set_up().lengths for one in policy]
    found: list[BreakEven | None] = [None] * len(policy)
    if search:
        rate = float(compared[0].summaries[0]["requests_per_s"])
        with Bar("break-even", len(policy) - 1, "policies", as_json) as bar:
            for at, one in enumerate(policy[1:], start=1):
                bar(at - 1, f"break-even of {one}")
                found[at] = break_even(workloads[0], one, rate, base)
    if as_json:
        rows = workloads[0].meta.rows()
        shown = _as_dict(trace, numbers, compared, lengths, found)
        typer.echo(json.dumps({**shown, "rows": rows}))
        return
    show_comparison(compared, workloads)
    to = console()
    to.print()
    for row, assumed, pays in zip(compared, lengths, found, strict=True):
        if assumed.source != NOTHING_COMPRESSED:
            to.print(escape(f"{row.policy}: {say_lengths(assumed.as_dict())}"))
        if pays is not None:
            to.print(escape(say_break_even(row.policy, compared[0].policy, pays)))
    if out is not None:
        for row, folders in zip(
            compared, recording_folders(policy, len(workloads), out), strict=True
        ):
            typer.echo(f"{row.policy}: {', '.join(str(folder) for folder in folders)}")


def _as_dict(
    trace: str,
    seeds: Sequence[int | None],
    compared: Sequence[Compared],
    lengths: Sequence[Lengths],
    found: Sequence[BreakEven | None],
) -> dict[str, Any]:
    return {
        "trace": trace,
        "seeds": [seed for seed in seeds if seed is not None],
        "interval": "95 % Student t over workloads"
        if len(seeds) > 1
        else "95 % bootstrap over requests (latencies only)",
        "policies": [
            {
                "policy": row.policy,
                "runs": [dict(summary) for summary in row.summaries],
                **{name: row.conditions[0][name] for name in ("gpu", "model", "limits")},
                "refusals": [one["refusals"] for one in row.conditions],  # of each run
                "figures": {name: _interval(estimate) for name, estimate in row.figures.items()},
                "ratios": {name: _interval(estimate) for name, estimate in row.ratios.items()},
                "lengths": assumed.as_dict(),
                "break_even": one and one.as_dict(),
            }
            for row, assumed, one in zip(compared, lengths, found, strict=True)
        ],
    }


def _interval(estimate: Estimate) -> dict[str, float | None]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}

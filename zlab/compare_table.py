"""The table of `zlab compare`: a row a figure, a column a policy."""

from collections.abc import Callable, Sequence

from rich.markup import escape
from rich.text import Text

from sim.compare import Compared, Estimate
from traces.workload import Workload
from zlab.tables import MISSING, console, count, figure, milliseconds, plain_table, share

Show = Callable[[float | None], str]
MARKS = ("p50", "p90", "p99")
ROWS: tuple[tuple[str, str, Show], ...] = (  # label, figure, how it is shown
    ("output tokens/s", "tokens_per_s", figure),
    ("requests/s", "requests_per_s", figure),
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


def show_comparison(compared: Sequence[Compared], workload: Workload, num_workloads: int) -> None:
    """Print the table, in parts where there are more policies than fit side by side."""
    to = console()
    of = f"{num_workloads} workloads as {workload.meta.name}" if num_workloads > 1 else workload.meta.name
    to.print(f"{of}, {len(workload):,} requests; x: ratio to {escape(compared[0].policy)}")
    kind = "Student's t over workloads" if num_workloads > 1 else "latencies only, from requests drawn anew"
    to.print(f"in brackets: 95 % intervals ({kind})")
    at_once = max(1, (to.width - LABEL_WIDTH) // COLUMN_WIDTH)
    for start in range(0, len(compared), at_once):
        part = compared[start : start + at_once]
        table = plain_table("", *(escape(row.policy) for row in part))
        for label, key, show in ROWS:
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

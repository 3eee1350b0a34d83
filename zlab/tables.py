"""Runs as tables for people."""

import sys
from collections import Counter
from typing import Any

import pyarrow.compute as pc
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from traces.reuse import lru_hit_shares, prefix_reuse
from traces.run import Run
from traces.workload import Workload

PIPED_WIDTH = 120
MISSING = "-"
MOST_REQUESTS_EXPLAINED = 100_000


def console() -> Console:
    """Stdout, wide enough not to cut figures where it is no terminal."""
    return Console(
        file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH, soft_wrap=False
    )


def plain_table(*columns: str) -> Table:
    """A table without lines but one below its head; the first column is of words, the others of figures."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1))
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", overflow="fold", no_wrap=index == 0)
    return table


def count(value: float | None) -> str:
    """A whole number."""
    return MISSING if value is None else f"{value:,.0f}"


def share(value: float | None) -> str:
    """A share of one."""
    return MISSING if value is None else f"{value:.1%}"


def figure(value: float | None) -> str:
    """A figure with about four digits."""
    if value is None:
        return MISSING
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f}"


def milliseconds(value: float | None) -> str:
    """Seconds shown in milliseconds."""
    return MISSING if value is None else figure(value * 1000)


SIMULATED = "simulated"  # what becomes "measured" in a run of the engine
SCALARS: tuple[tuple[str, str, Any], ...] = (  # label, key of the summary, how it is shown
    ("output tokens/s", "tokens_per_s", figure),
    ("requests/s", "requests_per_s", figure),
    ("requests finished", "requests_finished", count),
    ("requests refused", "requests_refused", count),
    ("output tokens", "output_tokens", count),
    (f"{SIMULATED} time, s", "makespan_s", figure),
    ("90 % of tokens out after, s", "seconds_to_90pct", figure),
    ("steps", "steps", count),
    ("preemptions", "preemptions", count),
    ("recomputed tokens", "recomputed_tokens", count),
    ("swapped tokens", "swapped_tokens", count),
    ("prefix hit tokens", "prefix_hit_tokens", count),
    ("compressions", "compressions", count),
    ("compressions' share of time", "compression_share", share),
    ("waited for a slot, request-s", "slot_wait_s", figure),
)
DISTRIBUTIONS: tuple[tuple[str, str, Any], ...] = (
    ("time to first token, s", "ttft_s", figure),
    ("time per output token, ms", "tpot_s", milliseconds),
    ("end to end, s", "e2e_s", figure),
)
LEVELS: tuple[tuple[str, str, Any], ...] = (
    ("running requests", "running", figure),
    ("blocks in use", "occupancy", share),
    ("wasted slots in blocks", "wasted_slots", share),
)
MARKS = ("mean", "p50", "p90", "p99")


def show_run(run: Run, workload: Workload, to: Console) -> None:
    """One run: what ran on what, its figures, and what is odd about it."""
    manifest, summary = run.manifest, run.summary
    limits, simulated = manifest["limits"], manifest["source"] == "sim"
    to.print(
        f"[bold]{escape(manifest['policy'])}[/] on {manifest['gpu']} with {manifest['model']}: "
        f"{len(workload):,} requests of {escape(workload.meta.name)}",
    )
    to.print(
        f"pool of {limits['num_blocks']:,} blocks of {limits['block_size']} tokens, "
        f"at most {limits['max_running']} running and {limits['max_batched_tokens']:,} tokens a step; "
        f"costs: {manifest['cost']['source']}"
    )
    for change in manifest.get("policy_changes", ()):
        to.print(f"from step {change['step']:,} on: [bold]{escape(change['name'])}[/]")
    table = plain_table("", "value or mean", *MARKS[1:], "max")
    for label, key, show in SCALARS:
        table.add_row(label if simulated else label.replace(SIMULATED, "measured"), show(summary[key]))
    for label, key, show in DISTRIBUTIONS:
        table.add_row(label, *(show(summary[key][mark]) for mark in MARKS))
    for label, key, show in LEVELS:
        table.add_row(label, show(summary[f"{key}_mean"]), "", "", "", show(summary[f"{key}_max"]))
    to.print()
    to.print(table)
    to.print()
    for line in [*remarks(run), *prefix_remarks(run, workload)]:
        to.print(escape(line))


def remarks(run: Run) -> list[str]:
    """What the figures do not say: who was refused and why, who was cut short, how long the simulation took."""
    requests = run.requests.select(["id", "status", "reason", "message"]).to_pylist()
    lines = []
    refused = [row for row in requests if row["status"] == "refused"]
    for reason, number in Counter(row["reason"] for row in refused).items():
        first = next(row for row in refused if row["reason"] == reason)
        lines.append(f"refused {number:,} ({reason}), the first {first['id']}: {first['message']}")
    capped = [row for row in requests if row["status"] == "finished" and row["message"]]
    if capped:
        lines.append(f"cut short {len(capped):,}, the first {capped[0]['id']}: {capped[0]['message']}")
    summary = run.summary
    speed = summary["output_tokens"] / summary["wall_s"] if summary["wall_s"] > 0 else 0.0
    lines.append(
        f"{'simulated' if run.manifest['source'] == 'sim' else 'run'} in {summary['wall_s']:.2f} s, "
        f"{speed:,.0f} output tokens a second; digest {summary['digest'][:16]}"
    )
    return lines


def prefix_remarks(run: Run, workload: Workload) -> list[str]:
    """What was found of the prompts, beside what they repeat at all and what a cache as large as the pool keeps."""
    block_size, num_blocks = run.manifest["block_size"], run.manifest["num_blocks"]
    if workload.meta.block_size is None:
        return []
    if len(workload) > MOST_REQUESTS_EXPLAINED:
        return [f"what the prompts repeat: zlab trace info TRACE --block-size {block_size} --lru {num_blocks}"]
    finished = run.requests.filter(pc.equal(run.requests["status"], "finished"))
    served = set(finished["id"].to_pylist())
    kept = Workload([request for request in workload if request.id in served], workload.meta)
    prompt = pc.sum(finished["prompt_tokens"]).as_py() or 1
    reuse = prefix_reuse(kept, block_size)
    lru = lru_hit_shares(kept, [num_blocks], block_size)[num_blocks]
    found = run.summary["prefix_hit_tokens"] / prompt
    return [
        f"prefix hits are {found:.1%} of the served prompts' tokens. Of their blocks "
        f"{reuse.share:.1%} repeat an earlier one's, {lru:.1%} within what a cache of all {num_blocks:,} blocks keeps "
        "(least recently used); running requests leave less room than that"
    ]

"""Runs as tables for people.

A progress bar with the time left, on stderr, for whatever takes longer than two seconds.

How every command ends; the reason is one line on stderr.

0: well. 1: it went wrong, or the answer is no: a run, a server, a gate, or what is in a trace, a
recording, evidence or a registry. 2: misuse: a command line that makes no sense, a file that is not
there, a policy, gates or a profile that are none. 130: Ctrl-C.
"""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import pyarrow.compute as pc
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from typer.core import TyperGroup

from zlab.policies.core.plan import ConfigError, SchedulerError
from zlab.policies.evidence import EvidenceError
from zlab.policies.own import OwnClassError
from zlab.policies.spec import PolicyError
from zlab.sim.length_profile import NOTHING_COMPRESSED
from zlab.sim.specs import SimError
from zlab.traces.recording import Run
from zlab.traces.workload import TraceError, Workload, dropped_rows
from zlab.traces.workload_stats import lru_hit_shares, prefix_reuse

PIPED_WIDTH = 120
MISSING = "-"
MOST_REQUESTS_EXPLAINED = 100_000


def console() -> Console:
    """Stdout, wide enough not to cut figures where it is no terminal."""
    return Console(
        file=sys.stdout,
        highlight=False,
        emoji=False,  # `:name:` in data stays as it is
        width=None if sys.stdout.isatty() else PIPED_WIDTH,
        soft_wrap=False,
    )


def printable(text: str) -> str:
    """Text from data with every character that a terminal would act on written as its escape."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def plain_table(*columns: str) -> Table:
    """A table without lines but one below its head; the first column is of words, the others of
    figures.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1))
    for index, name in enumerate(columns):
        table.add_column(
            name, justify="left" if index == 0 else "right", overflow="fold", no_wrap=index == 0
        )
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
    ("finished requests/s", "requests_per_s", figure),
    ("solved problems/s", "solved_per_s", figure),
    ("output tokens/s", "tokens_per_s", figure),
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
WHERE_KNOWN = ("solved_per_s",)  # rows that are left out where there is nothing to say


def say_lengths(lengths: Mapping[str, Any]) -> str:
    """What a simulation assumes of the lengths of outputs, in words."""
    multiplier = f"{lengths['multiplier']:.2f}x"
    if lengths["interval"] is not None:
        low, high = lengths["interval"]
        multiplier += f" [{low:.2f}, {high:.2f}]"
    return f"outputs of compressed requests {multiplier} as long as the workload's: " + str(
        lengths["source"]
    )


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
        f"at most {limits['max_running']} running and {limits['max_batched_tokens']:,} tokens "
        f"a step; "
        f"costs: {manifest['cost']['source']}"
    )
    for change in manifest.get("policy_changes", ()):
        to.print(f"from step {change['step']:,} on: [bold]{escape(change['name'])}[/]")
    table = plain_table("", "value or mean", *MARKS[1:], "max")
    for label, key, show in SCALARS:
        if key in WHERE_KNOWN and summary.get(key) is None:
            continue
        table.add_row(
            label if simulated else label.replace(SIMULATED, "measured"), show(summary[key])
        )
    for label, key, show in DISTRIBUTIONS:
        table.add_row(label, *(show(summary[key][mark]) for mark in MARKS))
    for label, key, show in LEVELS:
        table.add_row(label, show(summary[f"{key}_mean"]), "", "", "", show(summary[f"{key}_max"]))
    to.print()
    to.print(table)
    to.print()
    lengths = manifest.get("lengths")
    if lengths is not None and lengths["source"] != NOTHING_COMPRESSED:
        to.print(escape(say_lengths(lengths)))
    dropped = dropped_rows(workload.meta.rows())
    for line in [*dropped, *remarks(run), *prefix_remarks(run, workload)]:
        to.print(escape(line))


def remarks(run: Run) -> list[str]:
    """What the figures do not say: who was refused and why, who was cut short, how long the
    simulation took.
    """
    requests = run.requests.select(["id", "status", "message"]).to_pylist()
    lines = [
        f"refused {one['requests']:,} ({one['reason']}), the first {one['first']['id']}: "
        f"{one['first']['message']}"
        for one in run.refusals
    ]
    capped = [row for row in requests if row["status"] == "finished" and row["message"]]
    if capped:
        lines.append(
            f"cut short {len(capped):,}, the first {capped[0]['id']}: {capped[0]['message']}"
        )
    summary = run.summary
    speed = summary["output_tokens"] / summary["wall_s"] if summary["wall_s"] > 0 else 0.0
    lines.append(
        f"{'simulated' if run.manifest['source'] == 'sim' else 'run'} in "
        f"{summary['wall_s']:.2f} s, "
        f"{speed:,.0f} output tokens a second; digest {summary['digest'][:16]}"
    )
    return lines


def prefix_remarks(run: Run, workload: Workload) -> list[str]:
    """What was found of the prompts, beside what they repeat at all and what a cache as large as
    the pool keeps.
    """
    block_size, num_blocks = run.manifest["block_size"], run.manifest["num_blocks"]
    if workload.meta.block_size is None:
        return []
    if len(workload) > MOST_REQUESTS_EXPLAINED:
        return [
            f"what the prompts repeat: zlab trace info TRACE --block-size {block_size} --lru "
            f"{num_blocks}"
        ]
    finished = run.requests.filter(pc.equal(run.requests["status"], "finished"))
    served = set(finished["id"].to_pylist())
    kept = Workload([request for request in workload if request.id in served], workload.meta)
    prompt = pc.sum(finished["prompt_tokens"]).as_py() or 1
    reuse = prefix_reuse(kept, block_size)
    lru = lru_hit_shares(kept, [num_blocks], block_size)[num_blocks]
    found = run.summary["prefix_hit_tokens"] / prompt
    return [
        f"prefix hits are {found:.1%} of the served prompts' tokens. Of their blocks "
        f"{reuse.share:.1%} repeat an earlier one's, {lru:.1%} within what a cache of all "
        f"{num_blocks:,} blocks keeps "
        "(least recently used); running requests leave less room than that"
    ]


SHOW_AFTER_S = 2.0
LINE_EVERY_S = 10.0  # where stderr is no terminal


class Bar:
    """Shown once its job has taken `SHOW_AFTER_S`: a bar on a terminal, a line now and then
    elsewhere.

    `silent` shows nothing where stderr is no terminal: a program reads what the command prints.
    """

    def __init__(self, what: str, total: int = 100, unit: str = "%", silent: bool = False) -> None:
        self._what, self._total, self._unit, self._silent = what, total, unit, silent
        console = Console(file=sys.stderr)
        self._terminal = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task(what, total=total)
        self._begun = time.monotonic()
        self._shown_at: float | None = None

    def __enter__(self) -> "Bar":
        return self

    def __call__(self, done: int, what: str | None = None) -> None:
        """Say how much is done, and of what if that changes."""
        self._what = what or self._what
        elapsed = time.monotonic() - self._begun
        if self._terminal:
            self._progress.update(self._task, completed=done, description=self._what)
            if self._shown_at is None and elapsed >= SHOW_AFTER_S:
                self._progress.start()
                self._shown_at = elapsed
        elif not self._silent and elapsed >= (
            SHOW_AFTER_S if self._shown_at is None else self._shown_at + LINE_EVERY_S
        ):
            self._shown_at = elapsed
            print(self._line(done, elapsed), file=sys.stderr, flush=True)

    def share(self, done: float) -> None:
        """Say which share of the job is done, 0..1."""
        self(round(done * self._total))

    def _line(self, done: int, elapsed: float) -> str:
        left = f", about {elapsed / done * (self._total - done):.0f} s left" if done else ""
        return f"{self._what}: {done:,} of {self._total:,} {self._unit} after {elapsed:.0f} s{left}"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._terminal and self._shown_at is not None:
            self._progress.stop()


WENT_WRONG = 1
MISUSE = 2
INTERRUPTED = 130


class MisuseError(ValueError):
    """A command line that makes no sense; the message names the value and the choices."""


def fail(message: str, code: int) -> typer.Exit:
    """Say what is wrong on stderr; the caller raises what is returned."""
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(code)


def _name_value(error: typer.BadParameter) -> None:
    """Add the value that was refused, where typer's message has only the option and what it should
    be.

    It then comes of pydantic, whose ValidationError is the cause and knows the value.
    """
    details = getattr(error.__cause__, "errors", None)
    if details is None:
        return
    value = repr(details()[0]["input"])
    if value not in error.message:
        error.message = f"{error.message}, got {value}"


class Command(TyperGroup):
    """The `zlab` command: what a subcommand raises becomes one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            _name_value(error)
            raise
        except OwnClassError as error:  # in the middle of a run
            raise fail(str(error), WENT_WRONG) from error
        except (MisuseError, PolicyError, SimError, ConfigError) as error:
            raise fail(str(error), MISUSE) from error
        except BrokenPipeError:
            raise  # whoever read the output has had enough: no error of ours
        except (TraceError, SchedulerError, EvidenceError, OSError) as error:
            raise fail(str(error), WENT_WRONG) from error
        except KeyboardInterrupt as error:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from error

"""What `zlab trust` prints."""

from rich.console import Console
from rich.markup import escape

from sim.trust import Compared, Trust, event_words
from zlab.judged import Judged
from zlab.tables import MISSING, count, figure, milliseconds, plain_table, share

LABELS = {"makespan_s": "makespan, s", "tokens_per_s": "output tokens/s"}
WORDS = {"ttft_s": "TTFT, s,", "tpot_s": "TPOT, ms,", "e2e_s": "E2E, s,"}
ROW_FIGURES = {  # how the error of a figure is headed where every run has a line
    "tokens_per_s": "tok/s",
    "makespan_s": "makespan",
    "ttft_s p50": "TTFT p50",
    "ttft_s p99": "p99",
    "tpot_s p50": "TPOT p50",
    "e2e_s p50": "E2E p50",
    "e2e_s p99": "p99",
}


def _signed(value: float | None) -> str:
    return MISSING if value is None else f"{value:+.1%}"


def _goal(compared: Compared) -> str:
    if compared.met is None:
        return "" if compared.goal is None else MISSING
    return f"{compared.goal:.0%} {'met' if compared.met else 'NOT MET'}"


def _show_decisions(found: Trust, to: Console) -> None:
    decisions = found.decisions
    same = "equal" if decisions.equal else "[bold]DIFFER[/]"
    to.print(f"decisions ({decisions.how}): {same}, digest {decisions.engine_digest[:16]}")
    if not decisions.equal:
        if decisions.difference is None:
            to.print("the same events name other blocks")
        else:
            to.print(
                f"the first that differs is in step {decisions.difference.step}: engine "
                f"{escape(event_words(decisions.difference.left))}, simulator "
                f"{escape(event_words(decisions.difference.right))}"
            )
    if decisions.free_differs_at is not None:
        to.print(f"on its own clock the simulator first decides otherwise in step {decisions.free_differs_at:,}")


def show_one(judged: Judged, to: Console) -> None:
    """One recording: decisions, figures with their goals, and where the time goes that the model lacks."""
    found, guess = judged.chief, judged.with_roofline if judged.with_profile is not None else None
    manifest = judged.run.manifest
    to.print(
        f"[bold]{escape(manifest['policy'])}[/] on {escape(str(manifest['gpu']))} with {manifest['model']}: "
        f"{judged.run.requests.num_rows:,} requests, {judged.run.steps.num_rows:,} steps"
        + ("" if judged.run.complete else ", cut short: compared over as many steps")
    )
    to.print(f"costs: {escape(found.source)}")
    for note in judged.notes:
        to.print(f"note: {escape(note)}")
    _show_decisions(found, to)
    to.print()
    columns = ("", "measured", "simulated", "error", "goal", *(["roofline's error"] if guess is not None else []))
    table = plain_table(*columns)
    for name, compared in found.figures.items():
        show = milliseconds if name.startswith("tpot") else figure
        which, _, mark = name.partition(" ")
        label = LABELS.get(which) or f"{WORDS[which]} {mark}"
        extra = [_signed(guess.figures[name].error)] if guess is not None else []
        cells = (show(compared.measured), show(compared.simulated), _signed(compared.error), _goal(compared))
        table.add_row(label, *cells, *extra)
    to.print(table)
    to.print()
    _show_steps(found, guess, to)


def _show_steps(found: Trust, guess: Trust | None, to: Console) -> None:
    """Where the time goes that the model lacks."""
    extra = ["roofline's error"] if guess is not None else []
    table = plain_table("steps", "number", "measured, s", "between, s", "error", "mean size", "lacks of all", *extra)
    for kind, error in found.steps.items():
        table.add_row(
            kind,
            count(error.num_steps),
            figure(error.measured_s),
            figure(error.between_s),
            _signed(error.error),
            share(error.mean_size),
            _signed(error.lacking_share),
            *([_signed(guess.steps[kind].error)] if guess is not None else []),
        )
    to.print(table)
    pinned = found.pinned_makespan
    to.print(
        f"the engine's own steps, priced: {figure(pinned.simulated)} s of {figure(pinned.measured)} s "
        f"({_signed(pinned.error)}), {figure(found.idle_s)} s of them idle"
    )
    for outlier in found.outliers:
        to.print(
            f"step {outlier.step:,} ({outlier.kind}) took {milliseconds(outlier.measured_s)} ms, "
            f"predicted {milliseconds(outlier.predicted_s)}"
        )


def show_many(judged: list[Judged], ranking: dict[str, float | None] | None, to: Console) -> None:
    """A line a recording: tokens/s and errors; and how alike the two rankings are."""
    table = plain_table("run", "decisions", "measured", "simulated", *ROW_FIGURES.values())
    for each in judged:
        found = each.chief
        rate = found.figures["tokens_per_s"]
        table.add_row(
            escape(each.folder.name),
            "equal" if found.decisions.equal else "[bold]DIFFER[/]",
            figure(rate.measured),
            figure(rate.simulated),
            *(_signed(found.figures[name].error) for name in ROW_FIGURES),
        )
    to.print(table)
    for name, tau in (ranking or {}).items():
        to.print(f"Kendall's tau of tokens/s, {name}: {MISSING if tau is None else f'{tau:.3f}'}")
    for each in judged:
        if not each.chief.decisions.equal:
            to.print(escape(str(each.folder)))
            _show_decisions(each.chief, to)
    for note in sorted({note for each in judged for note in each.notes}):
        to.print(f"note: {escape(note)}")

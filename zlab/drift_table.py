"""What `zlab drift` prints."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape

from policies.gates import Verdict
from sim.drift import Drift, Gap, Window
from sim.recorded import RecordedRun
from traces.load_distance import LoadDifference
from zlab.tables import MISSING, count, figure, milliseconds, plain_table, share

Show = Callable[[float | None], str]
LABELS: dict[str, tuple[str, Show]] = {
    "tokens_per_s": ("output tokens/s", figure),
    "running_mean": ("running requests", figure),
    "ttft_s": ("TTFT, s,", figure),
    "tpot_s": ("TPOT, ms,", milliseconds),
    "e2e_s": ("E2E, s,", figure),
    "preemptions_per_request": ("preemptions a request", figure),
    "compressions_per_request": ("compressions a request", figure),
    "prefix_hit_share": ("prefix hits, of prompts", share),
}
IN_WINDOWS = ("tokens_per_s", "running_mean", "ttft_s p90", "tpot_s p50", "e2e_s p90")


def show_drift(run: RecordedRun, found: Drift, tolerance: float, notes: Sequence[str], to: Console) -> None:
    """Live beside the prediction: the whole recording, then its windows."""
    served = run.manifest["policy"]
    predicted = "as it was served" if found.policy == served else f"under {escape(found.policy)}"
    to.print(
        f"[bold]{escape(str(served))}[/] on {escape(str(run.manifest['gpu']))} with {run.manifest['model']}: "
        f"{run.requests.num_rows:,} requests, {found.num_compared:,} finished live and in the prediction {predicted}"
        + ("" if run.complete else "; the recording was cut short")
    )
    to.print(f"costs: {escape(found.cost_source)}")
    for note in notes:
        to.print(f"note: {escape(note)}")
    to.print()
    table = plain_table("", "live", "predicted", "live is", f"within {tolerance:.0%}")
    for gap in found.whole.gaps:
        label, show = _label(gap.name)
        verdict = "yes" if gap.is_within(tolerance) else "[bold]NO[/]"
        table.add_row(label, show(gap.live), show(gap.predicted), _signed(gap), verdict)
    to.print(table)
    to.print()
    _show_windows(found.windows, tolerance, to)


def _show_windows(windows: Sequence[Window], tolerance: float, to: Console) -> None:
    columns = [f"{_label(name)[0]}" for name in IN_WINDOWS]
    table = plain_table("window, s", "requests", *columns)
    for window in windows:
        gaps = {gap.name: gap for gap in window.gaps}
        cells = []
        for name in IN_WINDOWS:
            gap = gaps[name]
            text = f"{_label(name)[1](gap.live)} ({_signed(gap)})"
            cells.append(text if gap.is_within(tolerance) else f"[bold]{text}[/]")
        table.add_row(f"{window.start_s:,.1f} .. {window.end_s:,.1f}", count(window.num_requests), *cells)
    to.print(table)
    to.print("of requests that came in the window; in brackets what live is above or below the prediction")


def show_loads(loads: Sequence[tuple[str, Sequence[LoadDifference]]], to: Console) -> None:
    """How the load differs from those that the policy was judged on, in words."""
    for trace, differences in loads:
        to.print()
        to.print(f"the load, beside {escape(trace)}:")
        for each in differences:
            to.print(f"  {escape(each.words)}" if each.is_alike else f"  [bold]{escape(each.words)}[/]")


def show_verdicts(verdicts: Sequence[Verdict], to: Console) -> None:
    """How the gates stand on live."""
    if not verdicts:
        return
    to.print()
    table = plain_table("gate", "live", "limit", "")
    for each in verdicts:
        values = [value if isinstance(value, str) else figure(value) for value in (each.measured, each.limit)]
        state = each.state.value if each.passed else f"[bold]{each.state.value.upper()}[/]"
        table.add_row(escape(each.gate.written), *values, state)
    to.print(table)


def _label(name: str) -> tuple[str, Show]:
    which, _, mark = name.partition(" ")
    label, show = LABELS[which]
    return f"{label} {mark}".strip(), show


def _signed(gap: Gap) -> str:
    return MISSING if gap.relative is None else f"{gap.relative:+.1%}"

"""`zlab drift`: does what was served still go as the simulator says, under the load it was judged
on?

What `zlab drift` prints.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from zlab.cli.console import (
    MISSING,
    WENT_WRONG,
    MisuseError,
    console,
    count,
    figure,
    milliseconds,
    plain_table,
    share,
)
from zlab.cli.options import AsJson, with_groups
from zlab.cli.parity import recorded_run
from zlab.cli.trust import check_profile, own_profile, roofline_of
from zlab.cli.workloads import WorkloadSource
from zlab.policies.gates import Gates, GateVerdict, State, gates_from_toml, measures_of
from zlab.policies.spec import load_policy
from zlab.sim.cost_model import CostModel
from zlab.sim.fidelity import Drift, Gap, Window
from zlab.sim.fidelity import drift as compare
from zlab.sim.profiles import from_profile, open_profile
from zlab.sim.recorded_run import RecordedRun
from zlab.sim.specs import gpu_of_card
from zlab.traces.workload import Workload, dropped_rows
from zlab.traces.workload_stats import LoadDifference, compare_loads

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


def show_drift(
    run: RecordedRun, found: Drift, tolerance: float, notes: Sequence[str], to: Console
) -> None:
    """Live beside the prediction: the whole recording, then its windows."""
    served = run.manifest["policy"]
    predicted = "as it was served" if found.policy == served else f"under {escape(found.policy)}"
    to.print(
        f"[bold]{escape(str(served))}[/] on {escape(str(run.manifest['gpu']))} with "
        f"{run.manifest['model']}: "
        f"{run.requests.num_rows:,} requests, {found.num_compared:,} finished live and in the "
        f"prediction {predicted}" + ("" if run.complete else "; the recording was cut short")
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
        table.add_row(
            f"{window.start_s:,.1f} .. {window.end_s:,.1f}", count(window.num_requests), *cells
        )
    to.print(table)
    to.print(
        "of requests that came in the window; in brackets what live is above or below the "
        "prediction"
    )


def show_loads(loads: Sequence["Loads"], to: Console) -> None:
    """How the load differs from those that the policy was judged on, in words."""
    for load in loads:
        to.print()
        to.print(f"the load, beside {escape(load.trace)}:")
        for words in dropped_rows(load.rows):
            to.print(f"  {words}")
        for each in load.differences:
            to.print(
                f"  {escape(each.words)}" if each.is_alike else f"  [bold]{escape(each.words)}[/]"
            )


def show_verdicts(verdicts: Sequence[GateVerdict], to: Console) -> None:
    """How the gates stand on live."""
    if not verdicts:
        return
    to.print()
    table = plain_table("gate", "live", "limit", "")
    for each in verdicts:
        values = [
            value if isinstance(value, str) else figure(value)
            for value in (each.measured, each.limit)
        ]
        state = each.state.value if each.passed else f"[bold]{each.state.value.upper()}[/]"
        table.add_row(escape(each.gate.written), *values, state)
    to.print(table)


def _label(name: str) -> tuple[str, Show]:
    which, _, mark = name.partition(" ")
    label, show = LABELS[which]
    return f"{label} {mark}".strip(), show


def _signed(gap: Gap) -> str:
    return MISSING if gap.relative is None else f"{gap.relative:+.1%}"


PERCENT = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>%?)\s*")


@dataclass(frozen=True)
class Loads:
    """How the served load differs from one that the policy was judged on."""

    trace: str
    differences: tuple[LoadDifference, ...]
    rows: Mapping[str, Any]

    def beyond(self, distance: float | None) -> bool:
        """Whether a distribution is further away than asked."""
        return distance is not None and any(
            not each.is_alike and each.distance is not None and each.distance.value > distance
            for each in self.differences
        )


@dataclass(frozen=True)
class Bounds:
    """How far live may be from what was expected of it."""

    within: Annotated[
        str,
        typer.Option("--within", help="How far live may be from the prediction, as 10% or 0.1."),
    ] = "10%"
    each_window: Annotated[
        bool,
        typer.Option("--each-window", help="The throughput of every window must keep within, too."),
    ] = False
    load_within: Annotated[
        float | None,
        typer.Option(
            "--load-within",
            min=0.0,
            max=1.0,
            help="How far a distribution may be from that of --trace.",
        ),
    ] = None
    gates: Annotated[
        Path | None,
        typer.Option(
            "--gates",
            dir_okay=False,
            help="Gates that live must keep; factors (1.5x) are of the prediction.",
        ),
    ] = None

    @property
    def tolerance(self) -> float:
        """`within` as a share of one. Raises MisuseError."""
        found = PERCENT.fullmatch(self.within)
        if found is None:
            raise MisuseError(f"--within must be a share, as 10% or 0.1, not {self.within!r}")
        number = float(found["number"])
        return number / 100.0 if found["unit"] else number

    def read_gates(self) -> Gates:
        """The gates, none where no file is named. Raises GateError, and MisuseError for a file that
        is not there.
        """
        if self.gates is None:
            return Gates(())
        try:
            return gates_from_toml(self.gates.read_text("utf-8"), str(self.gates))
        except (OSError, UnicodeDecodeError) as error:
            raise MisuseError(f"--gates {self.gates}: cannot be read ({error})") from error


@dataclass(frozen=True)
class Costs:
    """What a step costs in the prediction."""

    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            "--cost",
            show_default="that of the recording's card",
            help="Its name or FILE.json.",
        ),
    ] = None
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Row for a roofline instead, as h200.")
    ] = None
    model: Annotated[
        str | None, typer.Option("--model", help="Row or config.json for that roofline.")
    ] = None

    def of(self, run: RecordedRun) -> tuple[CostModel, list[str]]:
        """The profile that is named, or the roofline of a card that is; else the profile of the
        recording's own card.

        With what to say about it. Raises MisuseError, SimError and ProfileError where it does not
        fit the recording.
        """
        card = gpu_of_card(str(run.manifest["gpu"]))
        if self.gpu is not None or self.model is not None:
            if self.profile is not None:
                raise MisuseError(
                    "--profile has measured costs: --gpu and --model name a roofline instead"
                )
            return roofline_of(run, self.gpu or card, self.model), []
        if self.profile is not None:
            named = open_profile(self.profile)
            return from_profile(named), check_profile(named, run)
        own, notes = own_profile(run, "costs are the roofline's")
        return (roofline_of(run, card, None) if own is None else from_profile(own)), notes


@with_groups
def drift(
    run: Annotated[
        Path,
        typer.Argument(
            exists=True,
            file_okay=False,
            help="A lane's recording of `zlab serve --record` (or of `zlab bench --out`).",
        ),
    ],
    *,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy", "-p", help="Predict this candidate instead of the policy that served."
        ),
    ] = None,
    trace: Annotated[
        list[str] | None,
        typer.Option(
            "--trace",
            "-t",
            help="What the policy was validated on: how far is the load from it? Repeat it.",
        ),
    ] = None,
    windows: Annotated[
        int, typer.Option("--windows", min=1, help="Windows of time to look at one by one.")
    ] = 6,
    bounds: Bounds,
    costs: Costs,
    as_json: AsJson = False,
) -> None:
    """Predict a live recording in simulation and set prediction and live side by side.

    The same arrivals with the lengths that came out are simulated under the recording's own policy,
    changes of it included, or under a candidate. Compared are throughput, latencies, preemptions,
    compressions, prefix hits and running requests, over all of it and in windows of time. Latencies
    are of requests that finished in both.

    Exit code 0: live is within; 1: it is not, a gate is broken, or the recording is damaged; 2:
    misuse.
    """
    tolerance, checked = bounds.tolerance, bounds.read_gates()
    if bounds.load_within is not None and not trace:
        raise MisuseError("--load-within needs --trace: a load to measure the distance from")
    candidate = None if policy is None else load_policy(policy)
    sources = [WorkloadSource(each) for each in trace or ()]
    recorded = recorded_run(run)
    cost, notes = costs.of(recorded)
    found = compare(recorded, cost, candidate, windows)
    loads = [_loads_of(source.spec, source.read(silent=as_json), recorded) for source in sources]
    notes = [*notes, *dropped_rows(recorded.manifest.get("workload", {}).get("rows"))]
    verdicts = checked.check(measures_of(found.live_summary), measures_of(found.predicted_summary))
    apart = [gap.name for gap in found.whole.beyond(tolerance)]
    late = [
        each
        for each in found.windows
        if any(gap.name == "tokens_per_s" for gap in each.beyond(tolerance))
    ]
    if as_json:
        typer.echo(json.dumps(_document(found, loads, verdicts, tolerance, apart, notes)))
    else:
        to = console()
        show_drift(recorded, found, tolerance, notes, to)
        show_loads(loads, to)
        show_verdicts(verdicts, to)
    broken = any(each.state is State.FAILED for each in verdicts)
    if (
        apart
        or broken
        or any(each.beyond(bounds.load_within) for each in loads)
        or (bounds.each_window and late)
    ):
        raise typer.Exit(WENT_WRONG)


def _loads_of(trace: str, judged_on: Workload, recorded: RecordedRun) -> Loads:
    differences = tuple(compare_loads(judged_on, recorded.load()))
    return Loads(trace, differences, judged_on.meta.rows())


def _document(
    found: Drift,
    loads: Sequence[Loads],
    verdicts: Sequence[GateVerdict],
    tolerance: float,
    apart: Sequence[str],
    notes: Sequence[str],
) -> dict[str, Any]:
    def window(of: Window) -> dict[str, Any]:
        gaps = {
            gap.name: {"live": gap.live, "predicted": gap.predicted, "relative": gap.relative}
            for gap in of.gaps
        }
        return {
            "start_s": of.start_s,
            "end_s": of.end_s,
            "num_requests": of.num_requests,
            "figures": gaps,
        }

    return {
        "policy": found.policy,
        "cost": found.cost_source,
        "within": tolerance,
        "beyond": list(apart),
        "num_compared": found.num_compared,
        "whole": window(found.whole),
        "windows": [window(each) for each in found.windows],
        "loads": [
            {
                "trace": each.trace,
                "rows": each.rows,
                "differences": [asdict(difference) for difference in each.differences],
            }
            for each in loads
        ],
        "gates": [
            {
                "gate": each.gate.written,
                "state": each.state.value,
                "measured": each.measured,
                "limit": each.limit,
            }
            for each in verdicts
        ],
        "notes": list(notes),
    }

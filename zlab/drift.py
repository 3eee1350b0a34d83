"""`zlab drift`: does what was served still go as the simulator says, under the load it was judged on?"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from policies.gates import Gates, State, Verdict, gates_from_toml
from policies.measures import measures_of
from policies.spec import load_policy
from sim.cost import CostModel
from sim.drift import Drift, Window
from sim.drift import drift as compare
from sim.hardware import gpu_of_card
from sim.profile import from_profile, open_profile
from sim.recorded import RecordedRun
from traces.load_distance import LoadDifference, compare_loads
from zlab.drift_table import show_drift, show_loads, show_verdicts
from zlab.judged import check_profile, own_profile, roofline_of
from zlab.option_groups import with_groups
from zlab.options import AsJson
from zlab.outcome import WENT_WRONG, MisuseError
from zlab.recordings import recorded_run
from zlab.source import Source
from zlab.tables import console

PERCENT = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>%?)\s*")


@dataclass(frozen=True)
class Loads:
    """How the served load differs from one that the policy was judged on."""

    trace: str
    differences: tuple[LoadDifference, ...]

    def beyond(self, distance: float | None) -> bool:
        """Whether a distribution is further away than asked."""
        return distance is not None and any(
            not each.is_alike and each.distance is not None and each.distance.value > distance
            for each in self.differences
        )


@dataclass(frozen=True)
class Bounds:
    """How far live may be from what was expected of it."""

    within: Annotated[str, typer.Option("--within", help="How far live may be from the prediction, as 10% or 0.1.")] = (
        "10%"
    )
    each_window: Annotated[
        bool, typer.Option("--each-window", help="The throughput of every window must keep within, too.")
    ] = False
    load_within: Annotated[
        float | None,
        typer.Option("--load-within", min=0.0, max=1.0, help="How far a distribution may be from that of --trace."),
    ] = None
    gates: Annotated[
        Path | None,
        typer.Option(
            "--gates", dir_okay=False, help="Gates that live must keep; factors (1.5x) are of the prediction."
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
        """The gates, none where no file is named. Raises GateError, and MisuseError for a file that is not there."""
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
        typer.Option("--profile", "--cost", show_default="that of the recording's card", help="Its name or FILE.json."),
    ] = None
    gpu: Annotated[str | None, typer.Option("--gpu", help="Row for a roofline instead, as h200.")] = None
    model: Annotated[str | None, typer.Option("--model", help="Row or config.json for that roofline.")] = None

    def of(self, run: RecordedRun) -> tuple[CostModel, list[str]]:
        """The profile that is named, or the roofline of a card that is; else the profile of the recording's own card.

        With what to say about it. Raises MisuseError, SimError and ProfileError where it does not fit the recording.
        """
        card = gpu_of_card(str(run.manifest["gpu"]))
        if self.gpu is not None or self.model is not None:
            if self.profile is not None:
                raise MisuseError("--profile has measured costs: --gpu and --model name a roofline instead")
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
        typer.Option("--policy", "-p", help="Predict this candidate instead of the policy that served."),
    ] = None,
    trace: Annotated[
        list[str] | None,
        typer.Option("--trace", "-t", help="What the policy was validated on: how far is the load from it? Repeat it."),
    ] = None,
    windows: Annotated[int, typer.Option("--windows", min=1, help="Windows of time to look at one by one.")] = 6,
    bounds: Bounds,
    costs: Costs,
    as_json: AsJson = False,
) -> None:
    """Predict a live recording in simulation and set prediction and live side by side.

    The same arrivals with the lengths that came out are simulated under the recording's own policy, changes of it
    included, or under a candidate. Compared are throughput, latencies, preemptions, compressions, prefix hits and
    running requests, over all of it and in windows of time. Latencies are of requests that finished in both.

    Exit code 0: live is within; 1: it is not, a gate is broken, or the recording is damaged; 2: misuse.
    """
    tolerance, checked = bounds.tolerance, bounds.read_gates()
    if bounds.load_within is not None and not trace:
        raise MisuseError("--load-within needs --trace: a load to measure the distance from")
    candidate = None if policy is None else load_policy(policy)
    sources = [Source(each) for each in trace or ()]
    recorded = recorded_run(run)
    cost, notes = costs.of(recorded)
    found = compare(recorded, cost, candidate, windows)
    loads = [
        Loads(source.spec, tuple(compare_loads(source.read(silent=as_json), recorded.load()))) for source in sources
    ]
    verdicts = checked.check(measures_of(found.live_summary), measures_of(found.predicted_summary))
    apart = [gap.name for gap in found.whole.beyond(tolerance)]
    late = [each for each in found.windows if any(gap.name == "tokens_per_s" for gap in each.beyond(tolerance))]
    if as_json:
        typer.echo(json.dumps(_document(found, loads, verdicts, tolerance, apart, notes)))
    else:
        to = console()
        show_drift(recorded, found, tolerance, notes, to)
        show_loads([(each.trace, each.differences) for each in loads], to)
        show_verdicts(verdicts, to)
    broken = any(each.state is State.FAILED for each in verdicts)
    if apart or broken or any(each.beyond(bounds.load_within) for each in loads) or (bounds.each_window and late):
        raise typer.Exit(WENT_WRONG)


def _document(
    found: Drift,
    loads: Sequence[Loads],
    verdicts: Sequence[Verdict],
    tolerance: float,
    apart: Sequence[str],
    notes: Sequence[str],
) -> dict[str, Any]:
    def window(of: Window) -> dict[str, Any]:
        gaps = {gap.name: {"live": gap.live, "predicted": gap.predicted, "relative": gap.relative} for gap in of.gaps}
        return {"start_s": of.start_s, "end_s": of.end_s, "num_requests": of.num_requests, "figures": gaps}

    return {
        "policy": found.policy,
        "cost": found.cost_source,
        "within": tolerance,
        "beyond": list(apart),
        "num_compared": found.num_compared,
        "whole": window(found.whole),
        "windows": [window(each) for each in found.windows],
        "loads": [
            {"trace": each.trace, "differences": [asdict(difference) for difference in each.differences]}
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

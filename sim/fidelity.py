"""Compare the simulator with a recording of the engine.

`judge_fidelity` answers three questions about a recorded run:

1. Does the simulator's scheduler decide the same? The digests are compared.
2. Does a step take as long as the cost model says? Every recorded step is priced.
3. What would the simulation have predicted? The requests are replayed on the simulator's own clock
   with the same arrivals, limits and policy (the free replay).

`drift` compares a recording of served traffic, window by window, with a simulation of the same
arrivals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from zlab.policies.core.policy import Policy
from zlab.policies.snapshot import read_changes
from zlab.sim.cost_model import Change, CostModel, FloatArray
from zlab.sim.recorded_run import KINDS, Moments, RecordedRun, moments, redecide
from zlab.sim.replay import seldom_collecting
from zlab.sim.simulator import Simulation
from zlab.traces.metrics import (
    FIGURES,
    MARKS,
    PERCENTILES,
    BoolArray,
    Observed,
    cut,
    distribution,
    figures,
    summarize,
)
from zlab.traces.recording import Difference, MemoryRecorder, first_difference
from zlab.traces.schema import EventKind

THROUGHPUT_GOAL, LATENCY_GOAL, TAIL_GOAL = 0.03, 0.05, 0.10
ERROR_MARKS = ("mean", *(f"p{percentile}" for percentile in PERCENTILES))
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
GOALS: Mapping[str, float] = {
    "makespan_s": THROUGHPUT_GOAL,
    "tokens_per_s": THROUGHPUT_GOAL,
    **{f"{name} {mark}": LATENCY_GOAL for name in LATENCIES for mark in ("mean", "p50")},
    **{f"{name} p99": TAIL_GOAL for name in LATENCIES},
}
MOST_OUTLIERS = 5
LEAST_S = 1e-9


@dataclass(frozen=True)
class Decisions:
    """Whether the simulator's scheduler decides the same as the engine's did.

    Attributes:
        how: "free replay", or "told when" (arrivals, stops, aborts and finished copies happen at
            the engine's steps).
        difference: The first event that differs; None where all are the same, or differ only in
            their block ids.
        free_differs_at: For a run that depends on time, the first step in which the free replay
            decides differently.
    """

    how: str
    engine_digest: str
    simulator_digest: str
    difference: Difference | None
    free_differs_at: int | None

    @property
    def equal(self) -> bool:
        """Whether the digests are equal."""
        return self.engine_digest == self.simulator_digest


@dataclass(frozen=True)
class MeasuredFigure:
    """One metric of the run, measured and simulated."""

    measured: float | None
    simulated: float | None
    goal: float | None  # upper bound of the absolute error

    @property
    def error(self) -> float | None:
        """(simulated - measured) / measured. None where it is not defined."""
        if self.measured is None or self.simulated is None or self.measured == 0.0:
            return None
        return self.simulated / self.measured - 1.0

    @property
    def met(self) -> bool | None:
        """Whether the absolute error is within its goal; None without a goal."""
        return None if self.goal is None or self.error is None else abs(self.error) <= self.goal


@dataclass(frozen=True)
class StepError:
    """Measured and predicted time of the steps of one kind.

    Attributes:
        num_steps: Number of steps.
        measured_s: Measured seconds.
        predicted_s: Seconds that the cost model gives for the same steps.
        between_s: The part of `measured_s` in which no step ran.
        mean_size: Sum of |predicted - measured| over the sum of measured.
        lacking_share: (measured - predicted) as a share of the makespan; negative where the model
            gives too much.
    """

    num_steps: int
    measured_s: float
    predicted_s: float
    between_s: float
    mean_size: float
    lacking_share: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured, of the sums."""
        return self.predicted_s / self.measured_s - 1.0 if self.measured_s > 0.0 else 0.0


@dataclass(frozen=True)
class Outlier:
    """A step with a large prediction error."""

    step: int
    kind: str
    measured_s: float
    predicted_s: float


@dataclass(frozen=True)
class Trust:
    """The accuracy of one cost model on one recording.

    `figures` are metrics by name ("ttft_s p50"); `steps` are step errors by kind. `pinned_makespan`
    prices the engine's own steps, so its error comes from the cost model alone and not from the
    decisions of the free replay.
    """

    source: str
    decisions: Decisions
    complete: bool
    figures: Mapping[str, MeasuredFigure]
    steps: Mapping[str, StepError]
    pinned_makespan: MeasuredFigure
    idle_s: float
    outliers: tuple[Outlier, ...]


@dataclass(frozen=True)
class _Free:
    """The free replay, cut to the part that can be compared with the engine's run."""

    ends: FloatArray
    output_tokens: FloatArray  # one value for each step
    moments: Moments
    difference: Difference | None
    digest: str


def judge_fidelity(run: RecordedRun, cost: CostModel) -> Trust:
    """Simulate a recorded run with a cost model and compare the two."""
    free = _replayed(run, cost)
    predicted = run.priced(cost)
    makespan, idle = _makespan(run, run.column("end_s")), float(run.idle_s.sum())
    return Trust(
        source=cost.source,
        decisions=_decisions(run, free),
        complete=run.complete,
        figures=_figures(run, free),
        steps=_step_errors(run, predicted),
        pinned_makespan=MeasuredFigure(
            makespan, float(predicted.sum()) + idle, GOALS["makespan_s"]
        ),
        idle_s=idle,
        outliers=_outliers(run, predicted),
    )


def _makespan(run: RecordedRun, ends: FloatArray) -> float:
    return float(ends[-1]) - float(run.arrival_s.min())


def _replayed(run: RecordedRun, cost: CostModel) -> _Free:
    """Replay the recorded requests, with their arrival times and output lengths, on the simulator's
    own clock.
    """
    tables = MemoryRecorder(skip=frozenset({"blocks"}))
    load = run.load(unfinished_end=False)
    simulation = Simulation(
        load,
        run.policy,
        run.limits,
        cost,
        tables,
        plan_ahead=run.planned_ahead,
        changes=run.changes,
    )
    with seldom_collecting():
        simulation.run()
    steps, events = tables.table("steps"), tables.table("events")
    if not run.complete:
        steps = steps.slice(0, run.steps.num_rows)
        events = events.filter(np.asarray(events["step"].to_numpy() < run.steps.num_rows))
    seen = run.events.filter(np.asarray(run.events["step"].to_numpy() < run.steps.num_rows))
    return _Free(
        ends=np.asarray(steps["end_s"].to_numpy(), dtype=np.float64),
        output_tokens=np.asarray(steps["output_tokens"].to_numpy(), dtype=np.float64),
        moments=moments(tables.table("requests"), steps, events),
        difference=first_difference(run.events if run.complete else seen, events),
        digest=simulation.scheduler.digest(),
    )


def _decisions(run: RecordedRun, free: _Free) -> Decisions:
    if run.closed:
        return Decisions("free replay", run.manifest["digest"], free.digest, free.difference, None)
    again = redecide(run.manifest, run.requests, run.events, run.asked)
    difference = first_difference(run.events, again.tables.table("events"))
    apart = free.difference.step if free.difference is not None else None
    return Decisions("told when", run.manifest["digest"], again.digest, difference, apart)


def _figures(run: RecordedRun, free: _Free) -> dict[str, MeasuredFigure]:
    """Return totals and latencies. For an incomplete recording they cover the recorded steps and
    the requests that ended in both runs.
    """
    own = run.moments()
    ends, tokens = run.column("end_s"), run.column("output_tokens")
    measured_s, simulated_s = _makespan(run, ends), _makespan(run, free.ends)
    rates = float(tokens.sum()) / measured_s, float(free.output_tokens.sum()) / simulated_s
    found = {
        "makespan_s": MeasuredFigure(measured_s, simulated_s, GOALS["makespan_s"]),
        "tokens_per_s": MeasuredFigure(rates[0], rates[1], GOALS["tokens_per_s"]),
    }
    both = ~np.isnan(own.finish_s) & ~np.isnan(free.moments.finish_s)
    sides = [_latencies(each, both) for each in (own, free.moments)]
    for name in LATENCIES:
        measured, simulated = (distribution(side[name]) for side in sides)
        for mark in ERROR_MARKS:
            key = f"{name} {mark}"
            found[key] = MeasuredFigure(measured[mark], simulated[mark], GOALS.get(key))
    return found


def _latencies(
    of: Moments, which: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> dict[str, FloatArray]:
    gaps = (of.output_tokens - 1.0)[which]
    spans = (of.finish_s - of.first_s)[which]
    return {
        "ttft_s": (of.first_s - of.arrival_s)[which],
        "tpot_s": np.where(gaps > 0, spans / np.maximum(gaps, 1.0), np.nan),
        "e2e_s": (of.finish_s - of.arrival_s)[which],
    }


def _step_errors(run: RecordedRun, predicted: FloatArray) -> dict[str, StepError]:
    """Return the errors of the recorded steps, by kind."""
    measured = run.busy_s
    makespan = _makespan(run, run.column("end_s"))
    found = {}
    for place, name in enumerate(KINDS):
        at = run.kinds == place
        if at.any():
            found[name] = StepError(
                num_steps=int(at.sum()),
                measured_s=float(measured[at].sum()),
                predicted_s=float(predicted[at].sum()),
                between_s=float(run.between_s[at].sum()),
                mean_size=float(
                    np.abs(predicted - measured)[at].sum() / max(measured[at].sum(), LEAST_S)
                ),
                lacking_share=float((measured - predicted)[at].sum()) / max(makespan, LEAST_S),
            )
    return found


def _outliers(run: RecordedRun, predicted: FloatArray) -> tuple[Outlier, ...]:
    """Return the steps with the largest absolute error in seconds, the largest first."""
    measured = run.busy_s
    worst = np.argsort(-np.abs(predicted - measured), kind="stable")[:MOST_OUTLIERS]
    return tuple(
        Outlier(int(at), KINDS[run.kinds[at]], float(measured[at]), float(predicted[at]))
        for at in worst
    )


def event_words(row: Mapping[str, int] | None) -> str:
    """Return one event as text; "nothing" for the missing event of a run that ended earlier."""
    if row is None:
        return "nothing"
    whose = f" request {row['request']}" if row["request"] >= 0 else ""
    blocks = f" {row['num_blocks']} blocks" if row["num_blocks"] else ""
    return f"{EventKind(row['kind']).label}{whose} {row['value']}{blocks}"


# A difference smaller than this, in the metric's unit, is not reported, even if it is large
# relative to the value.
FLOORS: Mapping[str, float] = {
    "running_mean": 0.1,
    "preemptions_per_request": 0.05,
    "compressions_per_request": 0.05,
    "prefix_hit_share": 0.02,
    **{f"ttft_s {mark}": 2e-3 for mark in MARKS},
    **{f"tpot_s {mark}": 2e-4 for mark in MARKS},
    **{f"e2e_s {mark}": 5e-3 for mark in MARKS},
}


@dataclass(frozen=True)
class Gap:
    """One metric, live and predicted."""

    name: str
    live: float | None
    predicted: float | None

    @property
    def relative(self) -> float | None:
        """(live - predicted) / predicted. None where one side is missing or the prediction is 0."""
        if self.live is None or self.predicted is None or self.predicted == 0.0:
            return None
        return self.live / self.predicted - 1.0

    def is_within(self, tolerance: float) -> bool:
        """Return whether the live value is within `tolerance` (relative) of the prediction, or
        within the metric's bound in `FLOORS`. A metric that only one side has is not.
        """
        if self.live is None or self.predicted is None:
            return self.live is self.predicted
        apart = abs(self.live - self.predicted)
        return apart <= max(tolerance * abs(self.predicted), FLOORS.get(self.name, 0.0))


@dataclass(frozen=True)
class Window:
    """A time window (seconds of the recording), the number of requests that arrived in it, and its
    metrics.
    """

    start_s: float
    end_s: float
    num_requests: int
    gaps: tuple[Gap, ...]

    def beyond(self, tolerance: float) -> tuple[Gap, ...]:
        """Return the metrics whose difference is larger than `tolerance`."""
        return tuple(gap for gap in self.gaps if not gap.is_within(tolerance))


@dataclass(frozen=True)
class Drift:
    """The metrics of the whole recording and of its windows, live and predicted.

    `num_compared` requests finished in both runs. `live_summary` and `predicted_summary` have the
    keys of `zlab.traces.metrics.summarize`.
    """

    policy: str
    cost_source: str
    whole: Window
    windows: tuple[Window, ...]
    num_compared: int
    live_summary: Mapping[str, Any]
    predicted_summary: Mapping[str, Any]


def drift(
    run: RecordedRun, cost: CostModel, policy: Policy | None = None, num_windows: int = 6
) -> Drift:
    """Predict a recording by simulation, and compare.

    Args:
        run: The recording.
        cost: What a step costs.
        policy: The policy to predict; None selects the recording's own policy with its changes.
        num_windows: Number of time windows of equal length, from the first arrival to the last
            step.

    Returns:
        Live and predicted metrics.
    """
    changes = (
        [Change(each.step, each.policy) for each in read_changes(run.manifest)]
        if policy is None
        else []
    )
    tables = MemoryRecorder(skip=frozenset({"blocks"}))
    simulation = Simulation(
        run.load(),
        policy or run.policy,
        run.limits,
        cost,
        tables,
        plan_ahead=run.planned_ahead,
        changes=changes,
    )
    with seldom_collecting():
        simulation.run()
    requests, steps, events = (tables.table(name) for name in ("requests", "steps", "events"))
    live, predicted = (
        _observed(run.requests, run.steps, run.events),
        _observed(requests, steps, events),
    )
    counted: BoolArray = ~np.isnan(live.finish_s) & ~np.isnan(predicted.finish_s)
    pool = {"num_blocks": run.limits.num_blocks, "block_size": run.limits.block_size}
    work = {
        "compression_work_s": simulation.compression_ns * 1e-9,
        "swapped_tokens": simulation.swapped_tokens,
    }
    return Drift(
        policy=(policy or run.policy).name,
        cost_source=cost.source,
        whole=_window(live, predicted, (live.span, predicted.span), counted),
        windows=tuple(
            _window(live, predicted, (each, each), counted)
            for each in cut(_whole_time(live), max(num_windows, 1))
        ),
        num_compared=int(counted.sum()),
        live_summary=summarize(run.requests, run.steps, {**run.manifest, **pool}),
        predicted_summary=summarize(requests, steps, {**work, **pool}),
    )


def _whole_time(run: Observed) -> tuple[float, float]:
    """Return the time span from the first arrival to the end of the last step, which it contains.

    The tail behind the last arrival belongs to it: what finishes late is late there.
    """
    start, end = run.span
    return min(start, float(run.arrival_s.min())), float(np.nextafter(end, np.inf))


def _window(
    live: Observed, predicted: Observed, spans: Sequence[tuple[float, float]], counted: BoolArray
) -> Window:
    sides = [
        figures(side, span, counted) for side, span in zip((live, predicted), spans, strict=True)
    ]
    start, end = spans[0]
    arrived = int(((live.arrival_s >= start) & (live.arrival_s < end)).sum())
    gaps = tuple(Gap(name, sides[0][name], sides[1][name]) for name in FIGURES)
    return Window(start, end, arrived, gaps)


def _observed(requests: pa.Table, steps: pa.Table, events: pa.Table) -> Observed:
    order = np.argsort(requests["number"].to_numpy())
    when = moments(requests, steps, events)

    def of(table: pa.Table, name: str) -> FloatArray:
        return np.asarray(table[name].to_numpy(), dtype=np.float64)

    return Observed(
        arrival_s=when.arrival_s,
        first_s=when.first_s,
        finish_s=when.finish_s,
        prompt_tokens=of(requests, "prompt_tokens")[order],
        output_tokens=when.output_tokens.astype(np.float64),
        hit_tokens=of(requests, "prefix_hit_tokens")[order],
        preemptions=of(requests, "preemptions")[order],
        compressions=of(requests, "compressions")[order],
        step_start_s=of(steps, "start_s"),
        step_end_s=of(steps, "end_s"),
        step_output_tokens=of(steps, "output_tokens"),
        step_running=of(steps, "running"),
    )

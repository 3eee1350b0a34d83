"""What a simulation is worth: a recording of the engine, simulated again and set beside what really happened.

Three questions, each with its own way: does the scheduler decide the same (digest), does a step take what the cost
model says (every recorded step priced as it was), and what would the simulation have said of the run (a free replay:
same requests, arrivals, limits and policy, its own clock).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from policies.core.events import Kind
from sim.cost import CostModel
from sim.recorded import KINDS, Moments, RecordedRun, moments
from sim.redecide import redecide
from sim.replay import seldom_collecting
from sim.simulator import Simulation
from sim.step_times import FloatArray
from traces.metrics import PERCENTILES, distribution
from traces.recording import Difference, MemoryRecorder, first_difference

THROUGHPUT_GOAL, LATENCY_GOAL, TAIL_GOAL = 0.03, 0.05, 0.10
MARKS = ("mean", *(f"p{percentile}" for percentile in PERCENTILES))
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
    """Whether the simulator's scheduler decides what the engine's did.

    Attributes:
        how: "free replay", or "told when" (arrivals, stops, aborts and finished copies at the engine's own steps).
        difference: the first event that differs; None where all are the same, or only name other blocks.
        free_differs_at: of a run that depends on time, the first step in which the free replay decides otherwise.
    """

    how: str
    engine_digest: str
    simulator_digest: str
    difference: Difference | None
    free_differs_at: int | None

    @property
    def equal(self) -> bool:
        """Whether the digests are."""
        return self.engine_digest == self.simulator_digest


@dataclass(frozen=True)
class Compared:
    """One figure of the run, measured and simulated."""

    measured: float | None
    simulated: float | None
    goal: float | None  # of the size of the error

    @property
    def error(self) -> float | None:
        """(simulated - measured) / measured."""
        if self.measured is None or self.simulated is None or self.measured == 0.0:
            return None
        return self.simulated / self.measured - 1.0

    @property
    def met(self) -> bool | None:
        """Whether the error keeps to its goal; None without one."""
        return None if self.goal is None or self.error is None else abs(self.error) <= self.goal


@dataclass(frozen=True)
class StepError:
    """Steps of one kind: what they took, what the model says of these very steps, and how far off it is.

    `mean_size` is the sum of |predicted - measured| over that of measured; `between_s` the part of `measured_s` in
    which no step ran; `lacking_share` what the model lacks (negative: has too much), as a share of the makespan.
    """

    num_steps: int
    measured_s: float
    predicted_s: float
    between_s: float
    mean_size: float
    lacking_share: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured, of their sums."""
        return self.predicted_s / self.measured_s - 1.0 if self.measured_s > 0.0 else 0.0


@dataclass(frozen=True)
class Outlier:
    """A step that the model misses by much."""

    step: int
    kind: str
    measured_s: float
    predicted_s: float


@dataclass(frozen=True)
class Trust:
    """What one cost model is worth on one recording.

    `figures` by name, as "ttft_s p50"; `steps` by kind. `pinned_makespan` prices the engine's own steps: an error that
    is left there is the model's, whatever the free replay decided.
    """

    source: str
    decisions: Decisions
    complete: bool
    figures: Mapping[str, Compared]
    steps: Mapping[str, StepError]
    pinned_makespan: Compared
    idle_s: float
    outliers: tuple[Outlier, ...]


@dataclass(frozen=True)
class _Free:
    """A free replay, up to where it can be set beside the engine's run."""

    ends: FloatArray
    output_tokens: FloatArray  # of each step
    moments: Moments
    difference: Difference | None
    digest: str


def trust(run: RecordedRun, cost: CostModel) -> Trust:
    """Simulate a recorded run again with a cost model and compare."""
    free = _replayed(run, cost)
    predicted = run.priced(cost)
    makespan, idle = _makespan(run, run.column("end_s")), float(run.idle_s.sum())
    return Trust(
        source=cost.source,
        decisions=_decisions(run, free),
        complete=run.complete,
        figures=_figures(run, free),
        steps=_step_errors(run, predicted),
        pinned_makespan=Compared(makespan, float(predicted.sum()) + idle, GOALS["makespan_s"]),
        idle_s=idle,
        outliers=_outliers(run, predicted),
    )


def _makespan(run: RecordedRun, ends: FloatArray) -> float:
    return float(ends[-1]) - float(run.arrival_s.min())


def _replayed(run: RecordedRun, cost: CostModel) -> _Free:
    """The same requests at the same times with the lengths that came out, decided and timed by the simulator alone."""
    tables = MemoryRecorder(skip=frozenset({"blocks"}))
    load = run.load(unfinished_end=False)
    simulation = Simulation(
        load, run.policy, run.limits, cost, tables, plan_ahead=run.planned_ahead, changes=run.changes
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


def _figures(run: RecordedRun, free: _Free) -> dict[str, Compared]:
    """Totals and latencies. Of a run that was cut short: over as many steps, of requests that ended in both."""
    own = run.moments()
    ends, tokens = run.column("end_s"), run.column("output_tokens")
    measured_s, simulated_s = _makespan(run, ends), _makespan(run, free.ends)
    rates = float(tokens.sum()) / measured_s, float(free.output_tokens.sum()) / simulated_s
    found = {
        "makespan_s": Compared(measured_s, simulated_s, GOALS["makespan_s"]),
        "tokens_per_s": Compared(rates[0], rates[1], GOALS["tokens_per_s"]),
    }
    both = ~np.isnan(own.finish_s) & ~np.isnan(free.moments.finish_s)
    sides = [_latencies(each, both) for each in (own, free.moments)]
    for name in LATENCIES:
        measured, simulated = (distribution(side[name]) for side in sides)
        for mark in MARKS:
            key = f"{name} {mark}"
            found[key] = Compared(measured[mark], simulated[mark], GOALS.get(key))
    return found


def _latencies(of: Moments, which: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> dict[str, FloatArray]:
    gaps = (of.output_tokens - 1.0)[which]
    spans = (of.finish_s - of.first_s)[which]
    return {
        "ttft_s": (of.first_s - of.arrival_s)[which],
        "tpot_s": np.where(gaps > 0, spans / np.maximum(gaps, 1.0), np.nan),
        "e2e_s": (of.finish_s - of.arrival_s)[which],
    }


def _step_errors(run: RecordedRun, predicted: FloatArray) -> dict[str, StepError]:
    """The recorded steps beside what the model says of each, by kind."""
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
                mean_size=float(np.abs(predicted - measured)[at].sum() / max(measured[at].sum(), LEAST_S)),
                lacking_share=float((measured - predicted)[at].sum()) / max(makespan, LEAST_S),
            )
    return found


def _outliers(run: RecordedRun, predicted: FloatArray) -> tuple[Outlier, ...]:
    """The steps that the model misses by most seconds, the worst first."""
    measured = run.busy_s
    worst = np.argsort(-np.abs(predicted - measured), kind="stable")[:MOST_OUTLIERS]
    return tuple(Outlier(int(at), KINDS[run.kinds[at]], float(measured[at]), float(predicted[at])) for at in worst)


def event_words(row: Mapping[str, int] | None) -> str:
    """One event in words; what a run that ended earlier has is nothing."""
    if row is None:
        return "nothing"
    whose = f" request {row['request']}" if row["request"] >= 0 else ""
    blocks = f" {row['num_blocks']} blocks" if row["num_blocks"] else ""
    return f"{Kind(row['kind']).name.lower()}{whose} {row['value']}{blocks}"

"""Live against prediction: a recording of served traffic and what the simulator makes of the same arrivals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from policies.changes import read_changes
from policies.core.policy import Policy
from sim.changing import Change
from sim.cost import CostModel
from sim.recorded import RecordedRun, moments
from sim.replay import seldom_collecting
from sim.simulator import Simulation
from traces.metrics import summarize
from traces.recording import MemoryRecorder
from traces.windows import FIGURES, MARKS, BoolArray, FloatArray, Observed, cut, figures

# A difference smaller than this, in the figure's own unit, is none, however large it is relatively.
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
    """One figure, live and predicted."""

    name: str
    live: float | None
    predicted: float | None

    @property
    def relative(self) -> float | None:
        """(live - predicted) / predicted; None where one side lacks it or nothing was predicted."""
        if self.live is None or self.predicted is None or self.predicted == 0.0:
            return None
        return self.live / self.predicted - 1.0

    def is_within(self, tolerance: float) -> bool:
        """Whether live is as near to the prediction as asked; a figure that only one side has is not.

        With nothing predicted, nothing may have happened, but for what is too small to count.
        """
        if self.live is None or self.predicted is None:
            return self.live is self.predicted
        apart = abs(self.live - self.predicted)
        return apart <= max(tolerance * abs(self.predicted), FLOORS.get(self.name, 0.0))


@dataclass(frozen=True)
class Window:
    """A stretch of time (seconds of the recording), how many requests came in it, and the figures of it."""

    start_s: float
    end_s: float
    num_requests: int
    gaps: tuple[Gap, ...]

    def beyond(self, tolerance: float) -> tuple[Gap, ...]:
        """The figures that are further off than asked."""
        return tuple(gap for gap in self.gaps if not gap.is_within(tolerance))


@dataclass(frozen=True)
class Drift:
    """The whole recording and its windows, live and predicted; `num_compared` requests finished in both.

    `live_summary` and `predicted_summary` have the keys of `traces.metrics.summarize`.
    """

    policy: str
    cost_source: str
    whole: Window
    windows: tuple[Window, ...]
    num_compared: int
    live_summary: Mapping[str, Any]
    predicted_summary: Mapping[str, Any]


def drift(run: RecordedRun, cost: CostModel, policy: Policy | None = None, num_windows: int = 6) -> Drift:
    """Predict a recording under its own policy, changes of it included, or under a candidate; compare."""
    changes = [Change(each.step, each.policy) for each in read_changes(run.manifest)] if policy is None else []
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
    live, predicted = _observed(run.requests, run.steps, run.events), _observed(requests, steps, events)
    counted: BoolArray = ~np.isnan(live.finish_s) & ~np.isnan(predicted.finish_s)
    pool = {"num_blocks": run.limits.num_blocks, "block_size": run.limits.block_size}
    work = {"compression_work_s": simulation.compression_ns * 1e-9, "swapped_tokens": simulation.swapped_tokens}
    return Drift(
        policy=(policy or run.policy).name,
        cost_source=cost.source,
        whole=_window(live, predicted, (live.span, predicted.span), counted),
        windows=tuple(
            _window(live, predicted, (each, each), counted) for each in cut(_arrivals(live), max(num_windows, 1))
        ),
        num_compared=int(counted.sum()),
        live_summary=summarize(run.requests, run.steps, {**run.manifest, **pool}),
        predicted_summary=summarize(requests, steps, {**work, **pool}),
    )


def _arrivals(run: Observed) -> tuple[float, float]:
    """The time in which requests came, and the last one's end where they all came at once."""
    start, end = float(run.arrival_s.min()), float(run.arrival_s.max())
    return (start, float(np.nextafter(end, np.inf))) if end > start else run.span


def _window(live: Observed, predicted: Observed, spans: Sequence[tuple[float, float]], counted: BoolArray) -> Window:
    sides = [figures(side, span, counted) for side, span in zip((live, predicted), spans, strict=True)]
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

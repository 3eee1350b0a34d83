"""`/metrics`: figures of every lane and of the server, in Prometheus' text format.

The engine's thread counts (engine/server/tally.py) and, when asked, copies its counts: that message is all a scrape
costs it. What is exposed is one moment of all lanes together, so that sums over metrics hold exactly.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TookTooLong
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from engine.server.histogram import Histogram
from engine.server.job import Entry
from engine.server.lane_samples import Samples, Value, lane_samples
from engine.server.lanes import Lane
from engine.server.metric_table import COMMON_LABELS, FAMILIES, SERVER_FAMILIES, Family
from engine.server.observing import Observer
from engine.server.tally import Tally
from policies.core.events import Int64Array, Sink

COUNT_EVERY_S = 1.0
ASK_TIMEOUT_S = 2.0
AskEngine = Callable[[Callable[[Sequence[Lane]], "Snapshot"]], "Future[Snapshot]"]
AnyFamily = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily


@dataclass(frozen=True)
class Snapshot:
    """The samples of every lane at one moment."""

    taken_s: float  # monotonic clock
    lanes: Mapping[str, Samples]


class Recording(Protocol):
    """What is shown of a recording."""

    @property
    def failure(self) -> Exception | None:
        """Why nothing more is written; None while all is well."""


class ServerMetrics(Observer):
    """Counts on the engine's thread; answers scrapes on any other."""

    def __init__(self, model_name: str = "") -> None:
        """`model_name` is what clients call the model; it may be set until the first scrape."""
        self.model_name = model_name
        self.recording: Recording | None = None  # whose failure is shown
        self._lanes: dict[str, Lane] = {}
        self._tallies: dict[str, Tally] = {}
        self._next_count_s = 0.0
        self._responses: Counter[tuple[str, int]] = Counter()  # only the server's event loop adds to it
        self._latest = Snapshot(time.monotonic(), {})

    # the engine's thread

    def sink(self, lane_name: str) -> Sink | None:
        """The journal of the lane's next engine is counted."""
        return partial(self._count, lane_name)

    def begin(self, lane: Lane) -> None:
        """Listen to the lane's engine."""
        self._lanes[lane.name] = lane
        tally = self._tallies.get(lane.name)
        if tally is None:
            tally = self._tallies[lane.name] = Tally(lane.engine.limits.max_model_len)
        tally.looks_up = lane.policy.prefix.enabled
        lane.engine.steps.listeners.append(tally.take_steps)
        lane.engine.loop.on_tokens = tally.gaps.step

    def crashed(self, lane: Lane, error: Exception) -> None:
        """What the broken engine's scheduler did until then counts."""
        _count_all(lane)

    def rebuilt(self, lane: Lane) -> None:
        """Counts go on with the new engine."""
        self._tallies[lane.name].new_engine()
        self.begin(lane)

    def first_token(self, lane: Lane, entry: Entry) -> None:
        """Time to first token."""
        if entry.sequence is not None:
            arrival_ns = entry.sequence.request.arrival_ns
            self._tallies[lane.name].first_token(arrival_ns, lane.engine.loop.clock_ns())

    def ended(self, lane: Lane, entry: Entry) -> None:
        """Everything that is known at an output's end."""
        if entry.sequence is not None and entry.finish_reason is not None:
            self._tallies[lane.name].end(entry.sequence.request, entry.finish_reason)

    def stepped(self, lane: Lane) -> None:
        """Count what has come together, now and then, so that no scrape finds much to do."""
        now = time.monotonic()
        if now >= self._next_count_s:
            self._next_count_s = now + COUNT_EVERY_S
            for each in self._lanes.values():
                _count_all(each)

    def snapshot(self, lanes: Sequence[Lane]) -> Snapshot:
        """Copy the counts of now; what a scrape asks of the engine's thread."""
        for lane in lanes:
            _count_all(lane)
        taken = {lane.name: lane_samples(lane, self._tallies[lane.name]) for lane in lanes}
        return Snapshot(time.monotonic(), taken)

    def _count(self, lane_name: str, rows: Int64Array, blocks: Int64Array) -> None:
        tally = self._tallies[lane_name]
        tally.rows(rows, blocks)
        tally.looks_up = self._lanes[lane_name].policy.prefix.enabled

    # any other thread

    def answered(self, route: str, status: int) -> None:
        """The server has sent a response; `route` is a path of the application, not what a client asked for."""
        self._responses[route, status] += 1

    def exposition(self, ask_engine: AskEngine, timeout_s: float = ASK_TIMEOUT_S) -> bytes:
        """The text of `/metrics`; an engine that does not answer in time leaves the figures of the last time."""
        asked = ask_engine(self.snapshot)
        try:
            self._latest = asked.result(timeout_s)
        except TookTooLong:
            asked.cancel()
            return self._text(time.monotonic() - self._latest.taken_s)
        return self._text(0.0)

    def _text(self, age_s: float) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Page(self.model_name, self._latest, self._of_server(age_s)))
        return generate_latest(registry)

    def _of_server(self, age_s: float) -> Samples:
        return {
            "zlab:http_responses": [
                ((route, str(status)), float(count)) for (route, status), count in sorted(self._responses.items())
            ],
            "zlab:snapshot_age_seconds": [((), age_s)],
            "zlab:recording_failed": [((), float(self.recording is not None and self.recording.failure is not None))],
        }


def _count_all(lane: Lane) -> None:
    """Hand on what the scheduler and the loop have noted since last time."""
    lane.engine.scheduler.state.journal.flush()
    lane.engine.steps.take()


class _Page(Collector):
    """A snapshot as metric families."""

    def __init__(self, model_name: str, snapshot: Snapshot, server: Samples) -> None:
        self._model_name = model_name
        self._snapshot = snapshot
        self._server = server

    def collect(self) -> Iterator[AnyFamily]:
        """Every family of the tables that has samples."""
        for family in FAMILIES:
            found = _family(family, (*COMMON_LABELS, *family.labels))
            for lane, samples in self._snapshot.lanes.items():
                for labels, value in samples[family.name]:
                    _add(found, [self._model_name, lane, *labels], value)
            yield found
        for family in SERVER_FAMILIES:
            found = _family(family, (COMMON_LABELS[0], *family.labels))
            for labels, value in self._server[family.name]:
                _add(found, [self._model_name, *labels], value)
            yield found


def _family(family: Family, labels: Sequence[str]) -> AnyFamily:
    kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
    found: AnyFamily = kinds[family.kind](family.name, family.help, labels=labels)
    return found


def _add(family: AnyFamily, labels: Sequence[str], value: Value) -> None:
    if isinstance(value, Histogram):
        assert isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, buckets=value.buckets(), sum_value=value.total)
    else:
        assert not isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, value)

"""`/metrics`: figures of every lane and of the server in Prometheus' text format.

    engine thread: LaneCounters add up events and steps in bulk, about once a second
    a scrape:      one message copies the figures (`ServerMetrics.snapshot`); text is made elsewhere

Every metric is one `Metric` below: its name, its meaning, and how it is read. The prefix `vllm:` is
for metrics with vLLM's own meaning (V1 engine), so that boards and autoscalers made for vLLM work
unchanged; `zlab:` is for everything else. Every sample has the labels `model_name` (as vLLM) and
`lane`. docs/SERVE_METRICS.md has the same tables for readers.

prometheus_client writes the text; counting is done here, because its metrics take a lock for every
value, and a step gives 256 outputs a token each. All lanes are copied in one moment, so that sums
over metrics hold exactly.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from typing_extensions import override

from zlab.engine.server.jobs import Output
from zlab.engine.server.lanes import Lane, Observer
from zlab.policies.core.journal import EventSink, Int64Array
from zlab.policies.core.plan import SchedulerStats
from zlab.policies.core.policy import Policy
from zlab.policies.core.request import Request
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.spec import policy_digest
from zlab.traces.schema import EventKind, Phase, Reason, Status

NS = 1e-9
S = TypeVar("S")
T = TypeVar("T")


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


# Seconds. Neighbours differ by a factor of about 1.5 where service goals lie and by more beyond, so
# that a quantile is within a fifth of the true one from a millisecond to a minute.
LATENCY_S = _numbers(
    "0.001 0.002 0.004 0.006 0.01 0.015 0.025 0.04 0.06 0.1 0.15 0.25 0.4 0.6 1 1.5 2.5 4 6 10 15"
    " 25 40 60 100 200 500 1000 2500"
)
# Between tokens and for steps: finer where decode steps are, and only stalls are beyond 10 s.
STEP_S = _numbers(
    "0.001 0.002 0.003 0.004 0.006 0.008 0.01 0.0125 0.015 0.02 0.025 0.03 0.04 0.05 0.075 0.1"
    " 0.15 0.2 0.3 0.5 0.75 1 2 5 10 30"
)
STEP_TOKENS = tuple(float(2**power) for power in range(15))  # 1 .. 16384


def lengths_up_to(longest: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `longest` tokens."""
    marks = [digit * 10**power for power in range(8) for digit in (1, 2, 5)]
    return tuple(float(mark) for mark in marks if mark <= longest)


@dataclass
class Histogram:
    """How many values are at most each bound, and their sum.

    `counts` is not cumulative and has one entry more than there are bounds.
    """

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add_all(self, values: npt.NDArray[np.float64]) -> None:
        """Count many values at once."""
        found = np.bincount(
            np.searchsorted(self.bounds, values, side="left"), minlength=len(self.counts)
        )
        self.counts = [old + new for old, new in zip(self.counts, found.tolist(), strict=True)]
        self.total += float(values.sum())

    def copy(self) -> "Histogram":
        """Return a copy of the present counts."""
        return Histogram(self.bounds, list(self.counts), self.total)

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, as the text format names it."""
        running = np.cumsum(self.counts).tolist()
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return [(name, float(count)) for name, count in zip(names, running, strict=True)]


# counting, on the engine's thread

ENDS = (EventKind.FINISHED, EventKind.ABORTED, EventKind.FAILED, EventKind.REFUSED)
# Kinds that come a few times in a request's life; their rows are looked at one by one.
_SINGLE = np.zeros(len(EventKind) + 2, dtype=bool)
_SINGLE[
    [
        EventKind.ADMITTED,
        EventKind.HIT,
        EventKind.FIRST,
        EventKind.PREEMPTED,
        EventKind.SWAP_IN,
        EventKind.ARRIVED,
        EventKind.COMPRESSING,
        EventKind.COMPRESSED,
        *ENDS,
    ]
] = True
PHASES = tuple(phase for phase in Phase if phase is not Phase.DONE)


class TokenGaps:
    """Counts the time between consecutive tokens of each output.

    A step whose outputs are those of the step before costs one comparison of two lists.
    """

    def __init__(self, histogram: Histogram) -> None:
        self.histogram = histogram
        self._numbers: list[int] = []
        self._end_ns = 0
        self._last_ns: dict[int, int] = {}  # of live requests without a token in the newest step
        self._gone: set[int] = set()  # ended since the newest step

    def step(self, numbers: list[int], end_ns: int) -> None:
        """Count a step that gave each of these requests a token."""
        if not numbers:
            return
        if numbers == self._numbers:
            self.histogram.add((end_ns - self._end_ns) * NS, len(numbers))
        else:
            self._mixed_step(numbers, end_ns)
        self._numbers, self._end_ns = numbers, end_ns

    def _mixed_step(self, numbers: list[int], end_ns: int) -> None:
        former, now = set(self._numbers), set(numbers)
        last = self._last_ns
        last.update(dict.fromkeys(former - now - self._gone, self._end_ns))
        self._gone.clear()
        joined = now - former
        self.histogram.add((end_ns - self._end_ns) * NS, len(now) - len(joined))
        for number in joined:
            before_ns = last.pop(number, None)
            if before_ns is not None:  # otherwise its first token
                self.histogram.add((end_ns - before_ns) * NS)

    def forget(self, number: int) -> None:
        """Drop a request that has ended."""
        self._last_ns.pop(number, None)
        self._gone.add(number)


class LaneCounters:
    """Counts of one lane, through all engines that it has had."""

    def __init__(self, max_model_len: int) -> None:
        self.events = np.zeros(len(EventKind) + 2, dtype=np.int64)  # by kind
        self.refused: Counter[str] = Counter()  # by reason
        self.ended: Counter[str] = Counter()  # by finish reason
        self.prompt_tokens = self.generation_tokens = 0
        self.prefix_queries = self.prefix_hits = 0
        self.compression_source_tokens = self.compression_kept_tokens = 0
        self.prefix_blocks_lost = 0
        self.recomputed_tokens = 0
        self.steps = 0
        self.prefix_enabled = True
        self.time_to_first_token = Histogram(LATENCY_S)
        self.e2e_latency = Histogram(LATENCY_S)
        self.queue_time = Histogram(LATENCY_S)
        self.prefill_time = Histogram(LATENCY_S)
        self.decode_time = Histogram(LATENCY_S)
        self.inference_time = Histogram(LATENCY_S)
        self.time_per_output_token = Histogram(STEP_S)
        self.phases = {phase: Histogram(LATENCY_S) for phase in PHASES}
        self.step_tokens = Histogram(STEP_TOKENS)
        self.step_seconds = Histogram(STEP_S)
        lengths = lengths_up_to(max_model_len)
        self.prompt_lengths = Histogram(lengths)
        self.output_lengths = Histogram(lengths)
        self.length_limits = Histogram(lengths)
        self.gaps = TokenGaps(Histogram(STEP_S))
        # Live requests of the present engine, by number.
        self.preempted: set[int] = set()  # wait to come back
        self._admitted: set[int] = set()  # have been admitted before
        self._prompt_tokens: dict[int, int] = {}  # of prompts that are not computed yet
        self._source_tokens: dict[int, int] = {}  # of compressions in flight
        self._policy: Policy | None = None
        self._policy_digest = ""

    def new_engine(self) -> None:
        """Drop the old engine's requests; request numbers begin anew."""
        for kept in (self._prompt_tokens, self._source_tokens, self._admitted, self.preempted):
            kept.clear()
        self.gaps = TokenGaps(self.gaps.histogram)

    def digest(self, policy: Policy) -> str:
        """Return the policy's digest, computed once a policy."""
        if self._policy is not policy:
            self._policy, self._policy_digest = policy, policy_digest(policy)
        return self._policy_digest

    def count_events(self, rows: Int64Array) -> None:
        """Count rows of the event log, `[n, 5]`, in order."""
        kinds = rows[:, 1]
        self.events += np.bincount(kinds, minlength=len(self.events))
        self.prefix_blocks_lost += int(rows[kinds == EventKind.PREFIX_LOST, 3].sum())
        for kind, number, value in rows[_SINGLE[kinds]][:, 1:4].tolist():
            self._count_event(kind, number, value)

    def _count_event(self, kind: int, number: int, value: int) -> None:
        if kind == EventKind.ARRIVED:
            self._prompt_tokens[number] = value
        elif kind == EventKind.ADMITTED:
            self.preempted.discard(number)
            if self.prefix_enabled and number not in self._admitted:
                self.prefix_queries += value
        elif kind == EventKind.HIT:
            if number not in self._admitted:
                self.prefix_hits += value
        elif kind == EventKind.FIRST:
            self._admitted.add(number)
            self.prompt_tokens += self._prompt_tokens.pop(number, 0)
        elif kind == EventKind.PREEMPTED:
            self.preempted.add(number)
            self._admitted.add(number)
        elif kind == EventKind.SWAP_IN:
            self.preempted.discard(number)
        elif kind == EventKind.COMPRESSING:
            self._source_tokens[number] = value
        elif kind == EventKind.COMPRESSED:
            self.compression_source_tokens += self._source_tokens.pop(number, 0)
            self.compression_kept_tokens += value
        else:
            self._count_end(kind, number, value)

    def _count_end(self, kind: int, number: int, value: int) -> None:
        if kind == EventKind.REFUSED:
            self.refused[Reason(value).label] += 1
        for kept in (self._prompt_tokens, self._source_tokens):
            kept.pop(number, None)
        self._admitted.discard(number)
        self.preempted.discard(number)

    def count_steps(self, columns: dict[str, Any]) -> None:
        """Count steps that have run, as columns of a recording's `steps` table."""
        output = columns["output_tokens"]
        self.steps += len(output)
        self.generation_tokens += int(output.sum())
        self.step_tokens.add_all((output + columns["prefill_tokens"]).astype(np.float64))
        self.step_seconds.add_all(columns["end_s"] - columns["start_s"])

    def count_first_token(self, arrival_ns: int, now_ns: int) -> None:
        """Count a first token that has come to the host."""
        self.time_to_first_token.add((now_ns - arrival_ns) * NS)

    def count_output(self, request: Request, finish_reason: str) -> None:
        """Count an output that has ended."""
        self.gaps.forget(request.number)
        if finish_reason == "refused":
            return
        self.ended[finish_reason] += 1
        self.recomputed_tokens += request.recomputed_tokens
        if (
            request.phase is Phase.DONE
        ):  # otherwise its engine broke, and its times are not complete
            for phase, histogram in self.phases.items():
                histogram.add(request.phase_ns[phase] * NS)
        if request.status is Status.FINISHED and finish_reason != "error":
            self._count_finished(request)

    def _count_finished(self, request: Request) -> None:
        arrival, admitted, finish = request.arrival_ns, request.first_admitted_ns, request.finish_ns
        self.e2e_latency.add((finish - arrival) * NS)
        self.queue_time.add((admitted - arrival) * NS)
        self.inference_time.add((finish - admitted) * NS)
        first = request.first_token_ns
        if first >= 0:
            self.prefill_time.add((first - admitted) * NS)
            self.decode_time.add((finish - first) * NS)
        if request.generated > 1:
            self.time_per_output_token.add((finish - first) * NS / (request.generated - 1))
        self.prompt_lengths.add(request.prompt_tokens)
        self.output_lengths.add(request.generated)
        self.length_limits.add(
            request.target_tokens if request.max_tokens is None else request.max_tokens
        )


# the metrics

Value = float | Histogram
Samples = list[tuple[tuple[str, ...], Value]]  # values of the metric's own labels, value
MetricKind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Metric(Generic[S]):
    """One metric of `/metrics`.

    Attributes:
        name: its name; a counter's samples end in `_total`, which the name leaves out.
        kind: "gauge", "counter" or "histogram".
        help: its meaning.
        read: its present value, or the values by the values of its labels.
        labels: its own labels, besides those that all metrics have.
        vllm: for a `zlab:` metric, vLLM's nearest one and how it differs; empty if there is none.
    """

    name: str
    kind: MetricKind
    help: str
    read: Callable[[S], Value | Mapping[Any, Value]]
    labels: tuple[str, ...] = ()
    vllm: str = ""

    def sample(self, source: S) -> Samples:
        """Copy the present values."""
        found = self.read(source)
        if not isinstance(found, Mapping):
            found = {(): found}
        return [
            (
                labels if isinstance(labels, tuple) else (labels,),
                value.copy() if isinstance(value, Histogram) else float(value),
            )
            for labels, value in found.items()
        ]

    def family(self, labels: Iterable[str]) -> Family:
        """Return the metric for prometheus_client, without samples."""
        kinds = {
            "gauge": GaugeMetricFamily,
            "counter": CounterMetricFamily,
            "histogram": HistogramMetricFamily,
        }
        found: Family = kinds[self.kind](self.name, self.help, labels=[*labels, *self.labels])
        return found


def gauge(
    name: str, help: str, read: Callable[[S], Any], *labels: str, vllm: str = ""
) -> Metric[S]:
    """Declare a value that goes up and down; the arguments are those of `Metric`."""
    return Metric(name, "gauge", help, read, labels, vllm)


def counter(
    name: str, help: str, read: Callable[[S], Any], *labels: str, vllm: str = ""
) -> Metric[S]:
    """Declare a value that only grows; the arguments are those of `Metric`."""
    return Metric(name, "counter", help, read, labels, vllm)


def histogram(
    name: str, help: str, read: Callable[[S], Any], *labels: str, vllm: str = ""
) -> Metric[S]:
    """Declare a distribution; the arguments are those of `Metric`."""
    return Metric(name, "histogram", help, read, labels, vllm)


@dataclass(frozen=True)
class LaneReading:
    """What the metrics of a lane are read from, on the engine's thread."""

    lane: Lane
    counters: LaneCounters

    @property
    def scheduler(self) -> Scheduler:
        """The lane's scheduler."""
        return self.lane.engine.scheduler

    @cached_property
    def stats(self) -> SchedulerStats:
        """The scheduler's counts."""
        return self.scheduler.stats()

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests own."""
        return self.scheduler.limits.num_blocks - self.stats.num_free_blocks

    @property
    def swaps(self) -> int:
        """Preemptions whose blocks went to host memory."""
        return int(self.counters.events[EventKind.SWAP_OUT])

    @property
    def preemptions(self) -> int:
        """All preemptions."""
        return int(self.counters.events[EventKind.PREEMPTED])

    def waiting(self) -> dict[str, int]:
        """Return how many requests wait, by what they wait for."""
        stats = self.stats
        # A request whose copy to host memory is in flight is preempted and not yet in the queue.
        readmission = len(self.counters.preempted) - stats.num_swapping_out
        return {
            "admission": stats.num_waiting - readmission,
            "readmission": readmission,
            "slot": stats.num_waiting_for_slot,
            "block": stats.num_stalled - stats.num_waiting_for_slot,
            "step": stats.num_paused,
            "copy": stats.num_compressing + stats.num_swapping_out + stats.num_swapping_in,
        }

    def cache_info(self) -> tuple[str, str, str]:
        """Return the labels of `vllm:cache_config_info`."""
        limits, prefix = self.scheduler.limits, self.scheduler.policy.prefix.enabled
        return str(limits.block_size), str(limits.num_blocks), str(prefix)


FINISH_REASONS = ("stop", "length", "abort", "error")
REFUSALS = ("never_fits", "too_long", "empty_prompt", "bad_max_tokens")
LANE_LABELS = ("model_name", "lane")
LANE_METRICS: tuple[Metric[LaneReading], ...] = (
    gauge(
        "vllm:num_requests_running", "Requests that hold blocks", lambda at: at.stats.num_running
    ),
    gauge(
        "vllm:num_requests_waiting",
        "Requests in the scheduler's waiting queue, preempted ones included",
        lambda at: at.stats.num_waiting,
    ),
    gauge(
        "vllm:kv_cache_usage_perc",
        "Share of blocks that requests own, 0..1; cached ones count as free",
        lambda at: at.num_used_blocks / at.scheduler.limits.num_blocks,
    ),
    gauge(
        "vllm:cache_config_info",
        "Always 1; the cache's sizes as labels",
        lambda at: {at.cache_info(): 1},
        "block_size",
        "num_gpu_blocks",
        "enable_prefix_caching",
    ),
    counter(
        "vllm:prompt_tokens",
        "Prompt tokens of requests whose prompt is computed, cached ones included",
        lambda at: at.counters.prompt_tokens,
    ),
    counter("vllm:generation_tokens", "Output tokens", lambda at: at.counters.generation_tokens),
    counter(
        "vllm:prefix_cache_queries",
        "Tokens looked up in the prefix cache, at a request's admission",
        lambda at: at.counters.prefix_queries,
    ),
    counter(
        "vllm:prefix_cache_hits",
        "Tokens found in the prefix cache, at a request's admission",
        lambda at: at.counters.prefix_hits,
    ),
    counter("vllm:num_preemptions", "Preemptions of running requests", lambda at: at.preemptions),
    counter(
        "vllm:request_success",
        "Outputs that ended, by reason: stop, length, abort, error",
        lambda at: {reason: at.counters.ended[reason] for reason in FINISH_REASONS},
        "finished_reason",
    ),
    counter(
        "vllm:corrupted_requests",
        "Outputs that failed because the model gave logits that are NaN or infinite",
        lambda at: int(at.counters.events[EventKind.CORRUPTED]),
    ),
    histogram(
        "vllm:iteration_tokens_total",
        "Tokens of a step: prompt tokens computed and output tokens",
        lambda at: at.counters.step_tokens,
    ),
    histogram(
        "vllm:time_to_first_token_seconds",
        "From arrival to the first token on the host",
        lambda at: at.counters.time_to_first_token,
    ),
    histogram(
        "vllm:inter_token_latency_seconds",
        "Between two tokens of one output, on the host",
        lambda at: at.counters.gaps.histogram,
    ),
    histogram(
        "vllm:request_time_per_output_token_seconds",
        "Mean of those over one finished output",
        lambda at: at.counters.time_per_output_token,
    ),
    histogram(
        "vllm:e2e_request_latency_seconds",
        "From arrival to the end of a finished output",
        lambda at: at.counters.e2e_latency,
    ),
    histogram(
        "vllm:request_queue_time_seconds",
        "From arrival to the first admission",
        lambda at: at.counters.queue_time,
    ),
    histogram(
        "vllm:request_prefill_time_seconds",
        "From the first admission to the first token",
        lambda at: at.counters.prefill_time,
    ),
    histogram(
        "vllm:request_decode_time_seconds",
        "From the first token to the last",
        lambda at: at.counters.decode_time,
    ),
    histogram(
        "vllm:request_inference_time_seconds",
        "From the first admission to the last token",
        lambda at: at.counters.inference_time,
    ),
    histogram(
        "vllm:request_prompt_tokens",
        "Prompt tokens of a finished output",
        lambda at: at.counters.prompt_lengths,
    ),
    histogram(
        "vllm:request_generation_tokens",
        "Tokens of a finished output",
        lambda at: at.counters.output_lengths,
    ),
    histogram(
        "vllm:request_params_max_tokens",
        "The length limit of a finished output",
        lambda at: at.counters.length_limits,
    ),
    gauge(
        "zlab:blocks",
        "Blocks of the pool by state",
        lambda at: {state.label: count for state, count in at.scheduler.blocks_by_state().items()},
        "state",
    ),
    gauge(
        "zlab:query_slots_used",
        "Query slots that requests hold",
        lambda at: at.stats.num_slots - at.stats.num_free_slots,
    ),
    gauge("zlab:query_slots", "Query slots of the pool", lambda at: at.stats.num_slots),
    gauge(
        "zlab:requests_waiting",
        "Requests that wait for: admission (new), readmission (preempted), slot, block, step "
        "(takes no more requests), copy (a compression or swap in flight)",
        lambda at: at.waiting(),
        "reason",
        vllm="vllm:num_requests_waiting_by_reason splits the waiting queue alone, into capacity "
        "and deferred",
    ),
    counter(
        "zlab:preemptions",
        "Preemptions of running requests, by recovery",
        lambda at: {"recompute": at.preemptions - at.swaps, "swap": at.swaps},
        "kind",
        vllm="vllm:num_preemptions is the sum; vLLM knows recompute only",
    ),
    counter(
        "zlab:compressions",
        "Compressions that were joined",
        lambda at: at.counters.events[EventKind.COMPRESSED],
    ),
    counter(
        "zlab:compression_source_tokens",
        "Tokens of the requests that these compressions began with",
        lambda at: at.counters.compression_source_tokens,
    ),
    counter(
        "zlab:compression_kept_tokens",
        "Tokens that they kept",
        lambda at: at.counters.compression_kept_tokens,
    ),
    counter(
        "zlab:prefix_blocks_lost",
        "Matchable blocks overwritten by a compression",
        lambda at: at.counters.prefix_blocks_lost,
    ),
    histogram(
        "zlab:request_phase_seconds",
        "What an output that ended spent in each phase; waits_for_slot is the time waited for a "
        "query slot",
        lambda at: {phase.name.lower(): spent for phase, spent in at.counters.phases.items()},
        "phase",
        vllm="the queue, prefill and decode times of vLLM run on through stalls and preemptions",
    ),
    counter(
        "zlab:requests_refused",
        "Requests that can never be served, by reason",
        lambda at: {reason: at.counters.refused[reason] for reason in REFUSALS},
        "reason",
        vllm="vLLM answers 400 and counts nothing",
    ),
    counter(
        "zlab:recomputed_tokens",
        "Tokens computed again after a preemption, of outputs that ended",
        lambda at: at.counters.recomputed_tokens,
    ),
    counter("zlab:steps", "Steps", lambda at: at.counters.steps),
    histogram("zlab:step_seconds", "How long a step took", lambda at: at.counters.step_seconds),
    gauge(
        "zlab:policy_info",
        "Always 1; the policy that decides",
        lambda at: {(at.lane.policy.name, at.counters.digest(at.lane.policy)): 1},
        "policy",
        "digest",
    ),
    gauge(
        "zlab:policy_since_seconds",
        "Unix time at which the policy was deployed",
        lambda at: at.lane.deployed.since_unix_s,
    ),
    counter(
        "zlab:policy_changes",
        "Changes of the lane's policy",
        lambda at: at.counters.events[EventKind.POLICY],
    ),
    gauge(
        "zlab:lane_share", "Share of requests that fall to the lane, 0..1", lambda at: at.lane.share
    ),
    counter(
        "zlab:engines_rebuilt",
        "Engines that were replaced after a step that failed",
        lambda at: at.lane.num_rebuilt,
    ),
)


@dataclass(frozen=True)
class ServerReading:
    """What the metrics of the server as a whole are read from."""

    responses: Counter[tuple[str, str]]  # by route and status
    snapshot_age_s: float
    recording_failed: bool


SERVER_METRICS: tuple[Metric[ServerReading], ...] = (
    counter(
        "zlab:http_responses",
        "Responses by route and status; 429, 413, 400 are refused requests",
        lambda at: dict(sorted(at.responses.items())),
        "route",
        "status",
    ),
    gauge(
        "zlab:snapshot_age_seconds",
        "Age of the lanes' figures; 0 unless the engine hangs",
        lambda at: at.snapshot_age_s,
    ),
    gauge(
        "zlab:recording_failed",
        "1 if the recording was given up: the disk failed or was too slow",
        lambda at: at.recording_failed,
    ),
)
"""Metrics of the server as a whole; of the common labels they have `model_name` only."""


COUNT_EVERY_S = 1.0
SCRAPE_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class ServerSnapshot:
    """The samples of every lane at one moment of the monotonic clock, by metric name."""

    taken_s: float
    lanes: Mapping[str, Mapping[str, Samples]]


class RecordingFigures(Protocol):
    """A recording, as far as the metrics show it."""

    @property
    def failure(self) -> Exception | None:
        """Why nothing more is written; None while all is well."""


AskEngine = Callable[[Callable[[Sequence[Lane]], ServerSnapshot]], "Future[ServerSnapshot]"]


class ServerMetrics(Observer):
    """Counts on the engine's thread, and answers scrapes on any other."""

    def __init__(
        self, served_model: str | None = None, recording: RecordingFigures | None = None
    ) -> None:
        """Prepare the counts.

        Args:
            served_model: the model's name for clients; its own name if None.
            recording: whose failure is shown.
        """
        self._model_name = served_model
        self._recording = recording
        self._lanes: dict[str, Lane] = {}
        self._counters: dict[str, LaneCounters] = {}
        self._next_count_s = 0.0
        self._responses: Counter[tuple[str, str]] = Counter()  # written by the event loop only
        self._latest = ServerSnapshot(time.monotonic(), {})

    # the engine's thread

    @override
    def event_sink(self, lane_name: str) -> EventSink | None:
        return partial(self._count_events, lane_name)

    @override
    def begin(self, lane: Lane) -> None:
        self._model_name = self._model_name or lane.engine.loaded.config.name
        self._lanes[lane.name] = lane
        counters = self._counters.get(lane.name)
        if counters is None:
            counters = LaneCounters(lane.engine.limits.max_model_len)
            self._counters[lane.name] = counters
        counters.prefix_enabled = lane.policy.prefix.enabled
        lane.engine.steps.listeners.append(counters.count_steps)
        lane.engine.token_listeners.append(counters.gaps.step)

    @override
    def crashed(self, lane: Lane, error: BaseException) -> None:
        _flush(lane)

    @override
    def rebuilt(self, lane: Lane) -> None:
        self._counters[lane.name].new_engine()
        self.begin(lane)

    @override
    def first_token(self, lane: Lane, output: Output) -> None:
        arrival_ns = output.engine_request.request.arrival_ns
        now_ns = lane.engine.clock_ns()
        self._counters[lane.name].count_first_token(arrival_ns, now_ns)

    @override
    def ended(self, lane: Lane, output: Output) -> None:
        if output.finish_reason is not None:
            request = output.engine_request.request
            self._counters[lane.name].count_output(request, output.finish_reason)

    @override
    def stepped(self, lane: Lane) -> None:
        # Now and then, so that a scrape finds little that is not counted yet.
        now = time.monotonic()
        if now >= self._next_count_s:
            self._next_count_s = now + COUNT_EVERY_S
            for each in self._lanes.values():
                _flush(each)

    def snapshot(self, lanes: Sequence[Lane]) -> ServerSnapshot:
        """Copy the present figures of the lanes."""
        for lane in lanes:
            _flush(lane)
        readings = [LaneReading(lane, self._counters[lane.name]) for lane in lanes]
        taken = {reading.lane.name: _sample(LANE_METRICS, reading) for reading in readings}
        return ServerSnapshot(time.monotonic(), taken)

    def _count_events(self, lane_name: str, rows: Int64Array, blocks: Int64Array) -> None:
        counters = self._counters[lane_name]
        counters.count_events(rows)
        counters.prefix_enabled = self._lanes[lane_name].policy.prefix.enabled

    # any other thread

    def count_response(self, route: str, status: int) -> None:
        """Count a response; `route` is a path of the application, not what a client asked for."""
        self._responses[route, str(status)] += 1

    def exposition(self, ask_engine: AskEngine, timeout_s: float = SCRAPE_TIMEOUT_S) -> bytes:
        """Return the text of `/metrics`.

        `ask_engine` is `AsyncEngine.call`. An engine that does not answer in time leaves the
        figures of the last scrape, and their age is shown.
        """
        asked = ask_engine(self.snapshot)
        age_s = 0.0
        try:
            self._latest = asked.result(timeout_s)
        except FutureTimeoutError:
            asked.cancel()
            age_s = time.monotonic() - self._latest.taken_s
        failed = self._recording is not None and self._recording.failure is not None
        server = _sample(SERVER_METRICS, ServerReading(self._responses, age_s, failed))
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Page(self._model_name or "", self._latest, server))
        return generate_latest(registry)


def _sample(metrics: Sequence[Metric[T]], source: T) -> dict[str, Samples]:
    return {metric.name: metric.sample(source) for metric in metrics}


def _flush(lane: Lane) -> None:
    """Let the scheduler and the loop hand on what they have noted since the last time."""
    lane.engine.scheduler.flush_events()
    lane.engine.steps.take()


class _Page(Collector):
    """A snapshot as metric families."""

    def __init__(
        self, model_name: str, snapshot: ServerSnapshot, server: Mapping[str, Samples]
    ) -> None:
        self._model_name = model_name
        self._snapshot = snapshot
        self._server = server

    @override
    def collect(self) -> Iterator[Family]:
        for metric in LANE_METRICS:
            family = metric.family(LANE_LABELS)
            for lane, samples in self._snapshot.lanes.items():
                _add(family, (self._model_name, lane), samples[metric.name])
            yield family
        for shared in SERVER_METRICS:
            family = shared.family(LANE_LABELS[:1])
            _add(family, (self._model_name,), self._server[shared.name])
            yield family


def _add(family: Family, common: Sequence[str], samples: Samples) -> None:
    for labels, value in samples:
        values = [*common, *labels]
        if isinstance(value, Histogram):
            assert isinstance(family, HistogramMetricFamily)
            family.add_metric(values, buckets=value.buckets(), sum_value=value.total)
        else:
            assert isinstance(family, GaugeMetricFamily | CounterMetricFamily)
            family.add_metric(values, value)

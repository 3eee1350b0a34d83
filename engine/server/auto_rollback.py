"""Holds every lane's policy to gates while it serves, and rolls a policy back that breaks one.

    requests of a lane --SlidingWindow--> metrics of the last 60 s --gates--> broken?
                                                                      |
         another policy is deployed: judge anew             roll back between two steps,
                                                            and note it in the registry

A gate whose bound is a factor is relative: in the canary lane to what the live lane does meanwhile,
rates by the share of the traffic; in the live lane to what it did before the change. A policy that
has none before it is judged, too, but only the log says so.
"""

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import override

from zlab.engine.errors import EngineError
from zlab.engine.server.jobs import Output
from zlab.engine.server.lanes import CANARY, LIVE, CallEngine, Lane, Observer, find_lane, roll_back
from zlab.engine.server.protocol import ApiError
from zlab.policies.core.policy import Policy
from zlab.policies.evidence import EvidenceError
from zlab.policies.gates import MARKS, Gates, GateVerdict, Measured, State
from zlab.policies.registry import DeploymentStage, PolicyRegistry, Target
from zlab.policies.spec import PolicyError, policy_digest
from zlab.traces.schema import Phase

LOG = logging.getLogger("zlab.server")
NS = 1e-9
SIGNED_AS = "watch"  # in the registry
MAX_ROLLBACKS = 100  # that /v1/policy/watch lists
RETRY_S, TRIES = 1.0, 60  # for the registry, in which an operator's change may be under way

TIMES = ("ttft", "tpot", "e2e")
COUNTS = ("finished", "refused", "aborted", "failed")
RATES = ("tokens_per_s", "requests_per_s")
MEANS = ("preemptions_per_request", "compressions_per_request", "slot_wait_per_request")
WATCHED = (*(f"{mark}_{time}" for time in TIMES for mark in MARKS), *COUNTS, *RATES, *MEANS)
"""The metrics of gates that a running server shows."""
COUNTED_AS = {
    "stop": "finished",
    "length": "finished",
    "refused": "refused",
    "abort": "aborted",
    "error": "failed",
}


@dataclass(frozen=True)
class WatchSettings:
    """How a lane is judged.

    Attributes:
        window_s: how far the metrics look back.
        min_requests: times and rates of fewer requests are not judged; counts always are.
        every_s: how often the gates are checked.
    """

    window_s: float = 60.0
    min_requests: int = 20
    every_s: float = 0.5

    def __post_init__(self) -> None:
        """Raise EngineError for settings that can never judge anything."""
        for name in ("window_s", "min_requests", "every_s"):
            value = getattr(self, name)
            if not value > 0:
                raise EngineError(f"{name} of the watch must be more than 0, got {value!r}")


class GateMonitor(Observer):
    """Judges each lane's policy from its deployment to the next, by requests that came since.

    Attributes:
        settings: how a lane is judged.
        gates: the gates that are watched.
        unwatched: the other gates, as written: a running server does not show their metrics.
        rollbacks: what was rolled back, as JSON rows.
    """

    def __init__(
        self,
        gates: Gates,
        settings: WatchSettings | None = None,
        registry: PolicyRegistry | None = None,
        target: Target | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare the monitor.

        Args:
            gates: what every lane is held to.
            settings: the defaults if None.
            registry: where rollbacks are noted; with `target`.
            target: the model and GPU that the server is in the registry.
            clock: counts seconds as `time.perf_counter`, by which a job's arrival is noted.

        Raises:
            EngineError: when none of the gates can be watched.
        """
        self.settings = settings or WatchSettings()
        self.gates = Gates(tuple(gate for gate in gates.gates if gate.metric in WATCHED))
        self.unwatched = [gate.written for gate in gates.gates if gate.metric not in WATCHED]
        if not self.gates.gates:
            raise EngineError(
                f"none of the gates ({'; '.join(self.unwatched)}) can be watched while a "
                f"server runs (it shows {', '.join(WATCHED)})"
            )
        self.rollbacks: list[dict[str, Any]] = []
        self._clock = clock
        self._stats: dict[str, _LaneStats] = {}
        self._lanes: dict[str, Lane] = {}
        self._call: CallEngine | None = None
        self._checked_s = -math.inf
        self._registry_writer = (
            _RegistryWriter(registry, target)
            if registry is not None and target is not None
            else None
        )

    # events of the lanes

    @override
    def start(self, call: CallEngine) -> None:
        self._call = call

    @override
    def begin(self, lane: Lane) -> None:
        self._lanes[lane.name] = lane
        self._stats[lane.name] = _LaneStats(self.settings)

    @override
    def arrived(self, lane: Lane, output: Output) -> None:
        self._stats_of(lane).window.arrived(output, self._clock(), output.job.arrived_ns * NS)

    @override
    def first_token(self, lane: Lane, output: Output) -> None:
        self._stats_of(lane).window.first_token(output, self._clock())

    @override
    def ended(self, lane: Lane, output: Output) -> None:
        self._stats_of(lane).window.ended(output, self._clock(), output.job.arrived_ns * NS)

    @override
    def stepped(self, lane: Lane) -> None:
        self._stats_of(lane).window.stepped(lane, self._clock())
        self._check_lanes()

    @override
    def idle(self) -> None:
        self._check_lanes()

    @override
    def put_back(self, lane: Lane, guilty: Policy, why: str) -> None:
        self._note(lane, guilty, why)

    @override
    def stopped(self) -> None:
        if self._registry_writer is not None:
            self._registry_writer.close()

    # judging

    def state(self) -> dict[str, Any]:
        """Return the JSON of /v1/policy/watch; on the engine's thread."""
        return {
            "gates": self.gates.as_list(),
            "unwatched": self.unwatched,
            "window_s": self.settings.window_s,
            "min_requests": self.settings.min_requests,
            "measured": {name: stats.measured for name, stats in self._stats.items()},
            "rollbacks": list(self.rollbacks),
        }

    def _stats_of(self, lane: Lane) -> "_LaneStats":
        """Return the lane's statistics, begun anew after a change of its policy."""
        stats = self._stats[lane.name]
        if stats.num_changes != lane.num_changes:
            if lane.name == LIVE:
                stats.baseline = dict(stats.measured)
            stats.num_changes, stats.is_broken, stats.measured = lane.num_changes, False, {}
            stats.window.begin(self._clock())
        return stats

    def _check_lanes(self) -> None:
        """Judge every lane, at most every `every_s` seconds."""
        now_s = self._clock()
        if now_s - self._checked_s < self.settings.every_s:
            return
        self._checked_s = now_s
        for lane in self._lanes.values():
            stats = self._stats_of(lane)
            stats.measured = stats.window.measures(lane, now_s)
        for lane in self._lanes.values():
            stats = self._stats[lane.name]
            if stats.is_broken or lane.deployed.follows_live:
                continue
            verdicts = self.gates.check(stats.measured, self._baseline(lane))
            broken = [verdict for verdict in verdicts if verdict.state is State.FAILED]
            if broken:
                stats.is_broken = True
                self._on_broken(lane, broken)

    def _baseline(self, lane: Lane) -> Measured:
        """Return what the bounds of relative gates are factors of."""
        if lane.name != CANARY:
            return self._stats[lane.name].baseline
        scale = lane.share / self._lanes[LIVE].share
        return {
            name: value * scale if name in RATES and isinstance(value, float) else value
            for name, value in self._stats[LIVE].measured.items()
        }

    def _on_broken(self, lane: Lane, broken: Sequence[GateVerdict]) -> None:
        why = "; ".join(map(_in_words, broken))
        if lane.name == LIVE and lane.deployed.before is None:
            LOG.warning(
                "lane live, policy %s: %s; it is the only policy there is", lane.policy.name, why
            )
            return
        LOG.warning("lane %s, policy %s: %s; rolling back", lane.name, lane.policy.name, why)
        assert self._call is not None, "the engine's thread has not started"
        self._call(partial(self._roll_back, name=lane.name, num_changes=lane.num_changes, why=why))

    def _roll_back(self, lanes: Sequence[Lane], name: str, num_changes: int, why: str) -> None:
        """Roll back between two steps, unless the policy was changed meanwhile."""
        lane = find_lane(lanes, name)
        if lane.num_changes != num_changes:
            return
        broken = lane.policy
        try:
            roll_back(lanes, name, f"rolled back by the watch: {why}")
        except ApiError as error:
            LOG.error("lane %s could not be rolled back: %s", name, error.message)
            return
        LOG.warning("lane %s: policy %s decides again", name, lane.policy.name)
        self._note(lane, broken, why)

    def _note(self, lane: Lane, broken: Policy, why: str) -> None:
        """List a rollback, and let the registry know of it."""
        self.rollbacks.append(
            {
                "lane": lane.name,
                "from": broken.name,
                "to": lane.policy.name,
                "why": why,
                "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
        )
        del self.rollbacks[:-MAX_ROLLBACKS]
        if self._registry_writer is not None:
            self._registry_writer.write(_rollback_of(lane, broken, why))


class CrashNotes(Observer):
    """Notes in the registry which policy a crash took out, for servers without gates: a restart
    must not bring that policy back.
    """

    def __init__(self, registry: PolicyRegistry, target: Target) -> None:
        self._writer = _RegistryWriter(registry, target)

    @override
    def put_back(self, lane: Lane, guilty: Policy, why: str) -> None:
        self._writer.write(_rollback_of(lane, guilty, why))

    @override
    def stopped(self) -> None:
        self._writer.close()


def _in_words(verdict: GateVerdict) -> str:
    """Describe a broken gate."""
    value, limit = verdict.measured, verdict.limit
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    bound = f" (here {limit:.4g})" if verdict.gate.is_relative and isinstance(limit, float) else ""
    return f"{verdict.gate.written}{bound} is broken: {shown}"


class _LaneStats:
    """What the monitor knows of one lane."""

    def __init__(self, settings: WatchSettings) -> None:
        self.window = SlidingWindow(settings.window_s, settings.min_requests)
        self.num_changes = 0  # of the lane, when the window began
        self.is_broken = False  # the policy has broken a gate and is not judged again
        self.measured: Measured = {}
        self.baseline: Measured = {}  # what the lane did under the policy before


@dataclass(frozen=True, slots=True)
class _End:
    """An output that has ended."""

    at_s: float
    counted_as: str
    e2e_s: float
    tpot_s: float  # NaN for fewer than two tokens
    preemptions: int
    compressions: int
    slot_wait_s: float


@dataclass(frozen=True, slots=True)
class _Mark:
    """Sums since the beginning, at one time."""

    at_s: float
    tokens: int  # output tokens
    busy_s: float  # time with requests in the lane


class SlidingWindow:
    """The metrics of one lane over the last `window_s` seconds, on any steady clock.

    Only requests that came after `begin` count: earlier ones ran under another policy, too.
    """

    def __init__(self, window_s: float, min_requests: int) -> None:
        self._window_s = window_s
        self._min_requests = min_requests
        self._began_s = 0.0
        self._firsts: deque[tuple[float, float]] = deque()  # when, and the time to first token
        self._ends: deque[_End] = deque()
        self._marks: deque[_Mark] = deque()
        self._first_at: dict[Output, float] = {}  # of live outputs
        self._arrivals: dict[Output, float] = {}  # of outputs that wait for their first token
        self._ended_tokens = 0
        self._busy_s = 0.0
        self._last_step_s: float | None = None  # None while the lane is empty

    def begin(self, now_s: float) -> None:
        """Forget everything: another policy decides from now on."""
        self._began_s = now_s
        for kept in (self._firsts, self._ends, self._marks, self._arrivals):
            kept.clear()

    def arrived(self, output: Output, now_s: float, arrival_s: float) -> None:
        """Take note of an output.

        Args:
            output: the output.
            now_s: when the lane got it.
            arrival_s: when its request arrived at the server.
        """
        if self._last_step_s is None:
            self._last_step_s = now_s
        self._arrivals[output] = arrival_s

    def first_token(self, output: Output, now_s: float) -> None:
        """Take note of an output's first token."""
        arrival_s = self._arrivals.pop(output, None)
        self._first_at[output] = now_s
        if arrival_s is not None and arrival_s >= self._began_s:
            self._firsts.append((now_s, now_s - arrival_s))

    def ended(self, output: Output, now_s: float, arrival_s: float) -> None:
        """Take note of an output's end; the arguments are those of `arrived`."""
        self._arrivals.pop(output, None)
        first_s = self._first_at.pop(output, None)
        tokens = len(output.engine_request.output.token_ids)
        self._ended_tokens += tokens
        if arrival_s < self._began_s:
            return
        request = output.engine_request.request
        tpot_s = math.nan
        if first_s is not None and tokens > 1:
            tpot_s = (now_s - first_s) / (tokens - 1)
        self._ends.append(
            _End(
                at_s=now_s,
                counted_as=COUNTED_AS[str(output.finish_reason)],
                e2e_s=now_s - arrival_s,
                tpot_s=tpot_s,
                preemptions=request.preemptions,
                compressions=request.compressions,
                slot_wait_s=request.phase_ns[Phase.WAITS_FOR_SLOT] * NS,
            )
        )

    def stepped(self, lane: Lane, now_s: float) -> None:
        """Take note of a step of the lane."""
        if self._last_step_s is not None:
            self._busy_s += now_s - self._last_step_s
        self._last_step_s = now_s if lane.busy else None

    def measures(self, lane: Lane, now_s: float) -> dict[str, float | None]:
        """Return each of the `WATCHED` metrics; None where too few requests have been seen.

        Rates are over the time in which the lane had work. A request that has waited for its first
        token longer than every request that got one counts with its wait so far, so that a lane
        that hangs breaks its gates.
        """
        self._forget(now_s)
        live_tokens = sum(
            len(output.engine_request.output.token_ids) for output in lane.outputs.values()
        )
        self._marks.append(_Mark(now_s, self._ended_tokens + live_tokens, self._busy_s))
        found: dict[str, float | None] = dict.fromkeys(WATCHED)
        found |= self._times(now_s)
        for name in COUNTS:
            found[name] = float(sum(end.counted_as == name for end in self._ends))
        ended = [end for end in self._ends if end.counted_as != "refused"]
        if len(ended) >= self._min_requests:
            found["preemptions_per_request"] = sum(end.preemptions for end in ended) / len(ended)
            found["compressions_per_request"] = sum(end.compressions for end in ended) / len(ended)
            found["slot_wait_per_request"] = sum(end.slot_wait_s for end in ended) / len(ended)
        first, last = self._marks[0], self._marks[-1]
        busy_s = last.busy_s - first.busy_s
        if busy_s > 0 and len(ended) + len(lane.outputs) >= self._min_requests:
            finished = sum(
                end.at_s > first.at_s for end in self._ends if end.counted_as == "finished"
            )
            found["tokens_per_s"] = (last.tokens - first.tokens) / busy_s
            found["requests_per_s"] = finished / busy_s
        return found

    def _times(self, now_s: float) -> dict[str, float]:
        """Return means and percentiles of the times of which there are enough."""
        waits = [wait for _, wait in self._firsts]
        longest = max(waits, default=0.0)
        arrivals = [arrival for arrival in self._arrivals.values() if arrival >= self._began_s]
        waits += [now_s - arrival for arrival in arrivals if now_s - arrival > longest]
        finished = [end for end in self._ends if end.counted_as == "finished"]
        times = {
            "ttft": waits,
            "tpot": [end.tpot_s for end in finished if not math.isnan(end.tpot_s)],
            "e2e": [end.e2e_s for end in finished],
        }
        found = {}
        for name, values in times.items():
            if len(values) >= self._min_requests:
                found[f"mean_{name}"] = float(np.mean(values))
                for mark in MARKS[1:]:
                    found[f"{mark}_{name}"] = float(np.percentile(values, int(mark[1:])))
        return found

    def _forget(self, now_s: float) -> None:
        """Drop what happened before the window; the oldest mark stays as the window's start."""
        oldest = now_s - self._window_s
        while self._firsts and self._firsts[0][0] < oldest:
            self._firsts.popleft()
        while self._ends and self._ends[0].at_s < oldest:
            self._ends.popleft()
        while len(self._marks) > 1 and self._marks[1].at_s <= oldest:
            self._marks.popleft()


@dataclass(frozen=True, slots=True)
class _Rollback:
    """The policy of that digest was rolled back where it was deployed as `stage`."""

    stage: DeploymentStage
    digest: str
    why: str


def _rollback_of(lane: Lane, broken: Policy, why: str) -> _Rollback:
    stage = DeploymentStage.CANARY if lane.name == CANARY else DeploymentStage.LIVE
    return _Rollback(stage, policy_digest(broken), why)


class _RegistryWriter:
    """Notes rollbacks in the registry, on a thread of its own: the engine does not wait for it."""

    def __init__(self, registry: PolicyRegistry, target: Target) -> None:
        self._registry = registry
        self._target = target
        self._rollbacks: queue.SimpleQueue[_Rollback | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch-registry", daemon=True)
        self._thread.start()

    def write(self, rollback: _Rollback) -> None:
        """Note a rollback soon."""
        self._rollbacks.put(rollback)

    def close(self) -> None:
        """Write what is left, one try for each rollback, and end."""
        self._closing.set()
        self._rollbacks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (rollback := self._rollbacks.get()) is not None:
            for _ in range(TRIES):
                obstacle = self._try(rollback)
                if obstacle is None or self._closing.wait(RETRY_S):
                    break
            if obstacle is not None:
                LOG.error("the registry has no note of a rollback (%s): %s", rollback.why, obstacle)

    def _try(self, rollback: _Rollback) -> str | None:
        """Note the rollback; return what prevents it, or None when nothing is left to do."""
        try:
            pending = self._registry.pending(self._target)
            if pending is not None:  # a promotion, possibly of this policy, is being confirmed
                return f"{pending.describe()} is under way"
            find = (
                self._registry.canary
                if rollback.stage is DeploymentStage.CANARY
                else self._registry.live
            )
            deployed = find(self._target)
            if deployed is None or deployed.policy.digest != rollback.digest:
                LOG.warning(
                    "the registry does not have policy %s as %s: nothing to note",
                    rollback.digest,
                    rollback.stage,
                )
                return None
            self._registry.rollback(
                self._target, who=SIGNED_AS, why=rollback.why, stage=rollback.stage
            )
        except (EvidenceError, PolicyError) as error:
            return str(error)
        return None

"""Watches every lane's policy against gates, and puts the one before back by itself when a gate breaks."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError
from engine.server.changing import find_lane, roll_back
from engine.server.errors import ApiError
from engine.server.job import Entry
from engine.server.lanes import CANARY, LIVE, Lane
from engine.server.observing import Observer
from engine.server.rolling import RATES, WATCHED, Rolling
from engine.server.worker import EngineWorker
from policies.evidence import EvidenceError
from policies.gates import Gates, State, Verdict
from policies.measures import Measured
from policies.registry import Registry, Stage, Target
from policies.spec import PolicyError, policy_digest

LOG = logging.getLogger("zlab.server")
NS = 1e-9
WHO = "watch"
MOST_KEPT = 100  # rollbacks that /v1/policy tells of
RETRY_S, TRIES = 1.0, 60  # an operator's change may be under way in the registry


@dataclass(frozen=True)
class WatchSettings:
    """How a lane is judged.

    Attributes:
        window_s: what happened longer ago does not count.
        min_requests: fewer are no ground for a judgement of times and rates; a count needs none.
        every_s: how often the gates are looked at.
    """

    window_s: float = 60.0
    min_requests: int = 20
    every_s: float = 0.5

    def __post_init__(self) -> None:
        """Raise EngineError for what can never judge anything."""
        for name in ("window_s", "min_requests", "every_s"):
            if not getattr(self, name) > 0:
                raise EngineError(f"{name} of the watch must be more than 0, got {getattr(self, name)!r}")


class Watch(Observer):
    """Judges a policy from the moment it takes over, by requests that came since, until another one does.

    A broken gate puts the policy before back at the next step boundary, and writes that into the registry with the
    reason. What a gate is held against where its bound is a factor: in the canary lane what the live lane does
    meanwhile, rates by share of the traffic; in the live lane what it did before the change. A policy that has nothing
    before it is judged, too, but only the log tells.
    """

    def __init__(
        self,
        gates: Gates,
        settings: WatchSettings | None = None,
        registry: Registry | None = None,
        target: Target | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` must count as `time.perf_counter`, by which a job's arrival is noted.

        Raises EngineError when none of the gates is about what a running server shows.
        """
        self.settings = settings or WatchSettings()
        self.gates = Gates(tuple(gate for gate in gates.gates if gate.metric in WATCHED))
        self.unwatched = [gate.written for gate in gates.gates if gate.metric not in WATCHED]
        if not self.gates.gates:
            raise EngineError(
                f"none of the gates ({'; '.join(self.unwatched)}) can be watched while a server runs "
                f"(it shows {', '.join(WATCHED)})"
            )
        self.rollbacks: list[dict[str, Any]] = []
        self._clock = clock
        self._books: dict[str, _Book] = {}
        self._lanes: dict[str, Lane] = {}
        self._worker: EngineWorker | None = None
        self._looked_s = -float("inf")
        self._clerk = _Clerk(registry, target) if registry is not None and target is not None else None

    def bind(self, worker: EngineWorker) -> None:
        """The worker whose lanes are watched; before that nothing is rolled back."""
        self._worker = worker

    # what the engine's thread tells

    def begin(self, lane: Lane) -> None:
        """As in `Observer`."""
        self._lanes[lane.name] = lane
        self._books[lane.name] = _Book(self.settings)

    def arrived(self, lane: Lane, entry: Entry) -> None:
        """As in `Observer`."""
        self._follow(lane).rolling.arrived(entry, self._clock(), entry.job.arrived_ns * NS)

    def first_token(self, lane: Lane, entry: Entry) -> None:
        """As in `Observer`."""
        self._follow(lane).rolling.first_token(entry, self._clock())

    def ended(self, lane: Lane, entry: Entry) -> None:
        """As in `Observer`."""
        self._follow(lane).rolling.ended(entry, self._clock(), entry.job.arrived_ns * NS)

    def stepped(self, lane: Lane) -> None:
        """As in `Observer`."""
        self._follow(lane).rolling.stepped(lane, self._clock())
        self._look()

    def idle(self) -> None:
        """As in `Observer`."""
        self._look()

    def stopped(self) -> None:
        """As in `Observer`."""
        if self._clerk is not None:
            self._clerk.close()

    # judging

    def state(self) -> dict[str, Any]:
        """For /v1/policy; on the engine's thread."""
        return {
            "gates": self.gates.as_list(),
            "unwatched": self.unwatched,
            "window_s": self.settings.window_s,
            "min_requests": self.settings.min_requests,
            "measured": {name: book.measured for name, book in self._books.items()},
            "rollbacks": list(self.rollbacks),
        }

    def _follow(self, lane: Lane) -> "_Book":
        """The lane's book, begun anew where another policy has taken over since."""
        book = self._books[lane.name]
        if book.num_changes != lane.num_changes:
            if lane.name == LIVE:
                book.baseline = dict(book.measured)
            book.num_changes, book.broken, book.measured = lane.num_changes, False, {}
            book.rolling.begin(self._clock())
        return book

    def _look(self) -> None:
        """Judge every lane, at most every so often."""
        now_s = self._clock()
        if now_s - self._looked_s < self.settings.every_s:
            return
        self._looked_s = now_s
        for lane in self._lanes.values():
            book = self._follow(lane)
            book.measured = book.rolling.measures(lane, now_s)
        for lane in self._lanes.values():
            book = self._books[lane.name]
            if book.broken or lane.follows_live:
                continue
            broken = [v for v in self.gates.check(book.measured, self._baseline(lane)) if v.state is State.FAILED]
            if broken:
                book.broken = True
                self._breach(lane, broken)

    def _baseline(self, lane: Lane) -> Measured:
        """What a relative bound is a factor of."""
        if lane.name != CANARY:
            return self._books[lane.name].baseline
        live = self._lanes[LIVE]
        scale = lane.share / live.share
        measured = self._books[LIVE].measured
        return {
            name: value * scale if name in RATES and isinstance(value, float) else value
            for name, value in measured.items()
        }

    def _breach(self, lane: Lane, broken: Sequence[Verdict]) -> None:
        why = "; ".join(describe(verdict) for verdict in broken)
        if lane.name == LIVE and lane.before is None:
            LOG.warning("lane live, policy %s: %s; it is the only policy there is", lane.policy.name, why)
            return
        LOG.warning("lane %s, policy %s: %s; rolling back", lane.name, lane.policy.name, why)
        assert self._worker is not None, "a watch must be bound to its worker"
        name, num_changes = lane.name, lane.num_changes
        self._worker.call(lambda lanes: self._roll_back(lanes, name, num_changes, why))

    def _roll_back(self, lanes: Sequence[Lane], name: str, num_changes: int, why: str) -> None:
        """Between two steps: unless somebody has changed the policy meanwhile."""
        lane = find_lane(lanes, name)
        if lane.num_changes != num_changes:
            return
        broke = lane.policy
        try:
            roll_back(lanes, name, f"rolled back by the watch: {why}")
        except ApiError as error:
            LOG.error("lane %s could not be rolled back: %s", name, error.message)
            return
        LOG.warning("lane %s: policy %s decides again", name, lane.policy.name)
        self.rollbacks.append(
            {
                "lane": name,
                "from": broke.name,
                "to": lane.policy.name,
                "why": why,
                "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
        )
        del self.rollbacks[:-MOST_KEPT]
        if self._clerk is not None:
            self._clerk.note(Stage.CANARY if name == CANARY else Stage.LIVE, policy_digest(broke), why)


class _Book:
    """What the watch knows of one lane."""

    def __init__(self, settings: WatchSettings) -> None:
        self.rolling = Rolling(settings.window_s, settings.min_requests)
        self.num_changes = 0
        self.broken = False  # judged already; the next policy is judged anew
        self.measured: Measured = {}
        self.baseline: Measured = {}  # what the lane did under the policy before


class _Clerk:
    """Writes rollbacks into the registry from a thread of its own: the engine does not wait for a file."""

    def __init__(self, registry: Registry, target: Target) -> None:
        self._registry = registry
        self._target = target
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="watch-registry", daemon=True)
        self._thread.start()

    def note(self, stage: Stage, digest: str, why: str) -> None:
        """The policy of that digest was put out of that place."""
        self._orders.put(_Order(stage, digest, why))

    def close(self) -> None:
        """Write what is left, without waiting for anybody, and end."""
        self._closing.set()
        self._orders.put(None)
        self._thread.join()

    def _write(self) -> None:
        while (order := self._orders.get()) is not None:
            for _ in range(TRIES):
                trouble = self._try(order)
                if trouble is None or self._closing.wait(RETRY_S):
                    break
            if trouble is not None:
                LOG.error("the registry has no note of a rollback (%s): %s", order.why, trouble)

    def _try(self, order: "_Order") -> str | None:
        """Write it down; what is in the way, if anything is."""
        try:
            waiting = self._registry.pending(self._target)
            if waiting is not None:  # somebody's promotion is about to be confirmed, or this very one
                return f"{waiting.describe()} is under way"
            of = self._registry.canary if order.stage is Stage.CANARY else self._registry.live
            standing = of(self._target)
            if standing is None or standing.policy.digest != order.digest:
                LOG.warning("the registry does not have policy %s as %s: nothing to note", order.digest, order.stage)
                return None
            self._registry.rollback(self._target, who=WHO, why=order.why, stage=order.stage)
        except (EvidenceError, PolicyError) as error:
            return str(error)
        return None


@dataclass(frozen=True, slots=True)
class _Order:
    stage: Stage
    digest: str
    why: str


def describe(verdict: Verdict) -> str:
    """A broken gate in words."""
    value, limit = verdict.measured, verdict.limit
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    bound = f" (here {limit:.4g})" if verdict.gate.is_relative and isinstance(limit, float) else ""
    return f"{verdict.gate.written}{bound} is broken: {shown}"

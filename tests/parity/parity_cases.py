"""One closed workload that forces everything, and live runs, on the engine; what the simulator
makes of them.
"""

from dataclasses import replace
from typing import Any

from tests.engine.engine_cases import SMALL, mixed, tiny
from zlab.engine.engine import EngineSettings
from zlab.engine.model.loader import LoadedModel
from zlab.engine.replay import Replayed, ReplaySettings, replay
from zlab.policies.core.plan import SchedulerLimits
from zlab.sim.recorded_run import Redecided, redecide
from zlab.sim.replay import replay as simulate
from zlab.traces.recording import Run
from zlab.traces.workload import TraceRequest, Workload, WorkloadMeta

CLOSED = mixed(20, seed=7, longest=110)
POLICIES = {  # what must have happened for the run to count
    "full-kv:window=4": ("preemptions", "prefix_hit_tokens"),
    "full-kv:comes_back=swap,window=4": ("preemptions", "swaps", "prefix_hit_tokens"),
    "constrained:tokens=24,window=4": ("compressions", "prefix_hit_tokens"),
    "hybrid:tokens=40,window=4": ("preemptions", "compressions", "prefix_hit_tokens"),
    "hybrid:tokens=40,window=4,join=blocking": ("preemptions", "compressions", "prefix_hit_tokens"),
    "hybrid:tokens=40,window=4,comes_back=swap,slotted=true": (
        "swaps",
        "compressions",
        "prefix_hit_tokens",
    ),
    "hybrid-adaptive:tokens=40,most_tokens=80,window=4": (
        "preemptions",
        "compressions",
        "prefix_hit_tokens",
    ),
    "hybrid:tokens=40,window=4,slots=none,scorer=recent": (
        "preemptions",
        "compressions",
        "prefix_hit_tokens",
    ),
    "hybrid:tokens=24,slots=none,scorer=random,comes_back=swap": (
        "swaps",
        "compressions",
        "prefix_hit_tokens",
    ),
    "vllm:window=4": ("preemptions", "prefix_hit_tokens"),
    "vllm:window=4,order=strict-priority,preemption=least-urgent,max_chunk=6": (
        "preemptions",
        "prefix_hit_tokens",
    ),
    "nano-vllm:window=4": ("preemptions", "prefix_hit_tokens"),
    "zipage:tokens=40,window=4": ("preemptions", "compressions", "prefix_hit_tokens"),
}
WHEN_DONE = "hybrid:tokens=40,window=4,join=when_done"


def settings(policy: str, **changes: Any) -> EngineSettings:
    given = {"num_blocks": 16 if "slotted" in policy else 20, "host_blocks": 100} | changes
    return replace(SMALL, policy=policy, **given)


def workload(requests: list[TraceRequest]) -> Workload:
    return Workload(requests, WorkloadMeta(name="parity"))


class CountingClock:
    """A millisecond later whenever it is asked: arrivals fall between the same steps on any
    machine.
    """

    def __init__(self) -> None:
        self._now_ns = 0

    def __call__(self) -> int:
        self._now_ns += 1_000_000
        return self._now_ns


def on_engine(
    policy: str,
    requests: list[TraceRequest] = CLOSED,
    how: ReplaySettings | None = None,
    loaded: LoadedModel | None = None,
    **changes: Any,
) -> Replayed:
    chosen = settings(policy, **changes)
    settled = how or ReplaySettings(at_once=True)
    return replay(
        workload(requests), chosen, settled, loaded=loaded or tiny(), clock=CountingClock()
    )


def in_simulation(policy: str, of: Replayed) -> Run:
    return simulate(
        workload(list(of.asked)), policy, limits=SchedulerLimits(**of.run.manifest["limits"])
    )


def decided_again(of: Replayed) -> Redecided:
    return redecide(of.run.manifest, of.run.requests, of.run.events, of.asked)

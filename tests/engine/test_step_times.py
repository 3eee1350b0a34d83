"""When steps ended, as the engine's loop notes it: by the device's clock where nobody was looking."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine import replay as replaying
from engine.build import build_engine
from engine.runner import Runner
from engine.step_result import StepResult
from engine.submitting import submit
from policies.core.plan import StepPlan
from tests.engine.engine_cases import GREEDY, SMALL, prompt, request, tiny
from traces.recording import to_table
from traces.workload import Workload, WorkloadMeta

MILLISECOND_NS = 1_000_000
STEP_MS = 4
META = WorkloadMeta(name="arrivals", source="here")


@dataclass
class Device:
    """Works on what is enqueued, each step for 4 ms; the host's clock moves when it waits or is late."""

    now_ns: int = 0
    free_ns: int = 0
    late_ms: list[int] = field(default_factory=list)  # how long the host is busy otherwise after each step it enqueues

    def clock(self) -> int:
        return self.now_ns

    def enqueue(self, result: StepResult, took_ms: int = STEP_MS) -> StepResult:
        """The step's result, as if the device had been given its work."""
        begins_ns = max(self.free_ns, self.now_ns)
        self.free_ns = begins_ns + took_ms * MILLISECOND_NS
        self.now_ns += (self.late_ms.pop(0) if self.late_ms else 0) * MILLISECOND_NS
        result.begun, result.event = cast(Any, Passed(self, begins_ns)), cast(Any, Passed(self, self.free_ns))
        return result


@dataclass
class Passed:
    """The event at one end of a step."""

    device: Device
    at_ns: int

    def query(self) -> bool:
        return self.device.now_ns >= self.at_ns

    def synchronize(self) -> None:
        self.device.now_ns = max(self.device.now_ns, self.at_ns)

    def elapsed_time(self, other: "Passed") -> float:
        return (other.at_ns - self.at_ns) / MILLISECOND_NS


@pytest.mark.parametrize(
    "late_ms",
    [[0] * 12, [0, 0, 0, 11, 0, 0, 0, 7, 0, 0, 0, 0], [0, 30, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [9] + [0] * 11],
    ids=["in time", "twice late", "late behind the first", "late with the first"],
)
def test_a_late_host_does_not_change_what_steps_take(late_ms: list[int]) -> None:
    """While the host is away two steps end: it then sees both at once, which by its clock would be a long and a short
    one."""
    device = Device(late_ms=list(late_ms))
    engine = build_engine(replace(SMALL, policy="full-kv"), tiny(), clock=device.clock)
    execute = engine.runner.execute

    def timed(plan: StepPlan) -> StepResult:
        return device.enqueue(execute(plan))

    engine.runner.execute = timed  # type: ignore[method-assign]
    submit(engine, request("a", prompt(1, 9), 12), prompt(1, 9), GREEDY)
    while engine.loop.step():
        pass
    columns = engine.steps.take()
    assert columns is not None
    steps = to_table("steps", columns)
    took = (steps["end_s"].to_numpy() - steps["start_s"].to_numpy()) * 1e3
    assert took == pytest.approx(STEP_MS)


def test_nobody_is_handed_in_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long step the scheduler is told of a time that lies ahead; requests come by the clock all the same."""
    device = Device()
    execute = Runner.execute
    handed: list[tuple[int, int]] = []

    def timed(self: Runner, plan: StepPlan) -> StepResult:
        return device.enqueue(execute(self, plan), 40 if plan.prefills else STEP_MS)

    def noted(*arguments: Any, arrival_ns: int, **more: Any) -> Any:
        handed.append((device.now_ns, arrival_ns))
        return submit(*arguments, arrival_ns=arrival_ns, **more)

    def nap(seconds: float) -> None:
        device.now_ns += round(seconds * 1e9)

    monkeypatch.setattr(Runner, "execute", timed)
    monkeypatch.setattr(replaying, "submit", noted)
    monkeypatch.setattr(replaying, "time", SimpleNamespace(sleep=nap))
    arrivals = [0.0, *(0.041 + 0.003 * place for place in range(12))]
    asked = [request(str(place), prompt(place, 9), 12, arrival_s=arrival_s) for place, arrival_s in enumerate(arrivals)]
    replayed = replaying.replay(
        Workload(asked, META), replace(SMALL, policy="full-kv"), loaded=tiny(), clock=device.clock
    )
    assert len(replayed.token_ids) == len(asked)
    assert [arrival_ns for _, arrival_ns in handed] == [round(arrival_s * 1e9) for arrival_s in arrivals]
    assert all(now_ns >= arrival_ns for now_ns, arrival_ns in handed)

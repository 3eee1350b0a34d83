"""What the watch measures, by a clock of the test's own and requests that are made up."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.server.job import Entry
from engine.server.lanes import Lane
from engine.server.rolling import WATCHED, Rolling
from policies.core.request import NUM_PHASES, Phase
from policies.measures import METRICS


def entry(tokens: int = 0, preemptions: int = 0, slot_wait_s: float = 0.0) -> Any:
    phase_ns = [0] * NUM_PHASES
    phase_ns[Phase.WAITS_FOR_SLOT] = int(slot_wait_s * 1e9)
    request = SimpleNamespace(preemptions=preemptions, compressions=2 * preemptions, phase_ns=phase_ns)
    sequence = SimpleNamespace(output=SimpleNamespace(token_ids=[0] * tokens), request=request)
    made = Entry(cast(Any, None), 0, 0, 0)
    made.sequence = cast(Any, sequence)
    return made


@dataclass
class FakeLane:
    entries: dict[int, Any] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        return bool(self.entries)


def lane_with(*entries: Any) -> Lane:
    return cast(Lane, FakeLane(dict(enumerate(entries))))


def run(rolling: Rolling, came_s: float, first_s: float, end_s: float, finish: str = "length", **more: Any) -> None:
    made = entry(**more)
    rolling.arrived(made, came_s, came_s)
    rolling.first_token(made, first_s)
    made.finish_reason = finish
    rolling.ended(made, end_s, came_s)


def test_every_watched_metric_is_one_that_gates_know() -> None:
    assert set(WATCHED) <= set(METRICS)
    assert set(Rolling(10.0, 1).measures(lane_with(), 0.0)) == set(WATCHED)


def test_times_by_hand() -> None:
    rolling = Rolling(100.0, 2)
    run(rolling, 1.0, 1.5, 3.5, tokens=5, preemptions=1, slot_wait_s=0.5)
    found = rolling.measures(lane_with(), 4.0)
    assert found["p50_ttft"] is None  # one is too few
    assert found["finished"] == 1.0  # a count is not
    run(rolling, 2.0, 3.5, 4.5, tokens=11, finish="stop")
    found = rolling.measures(lane_with(), 5.0)
    assert found["mean_ttft"] == pytest.approx(1.0)
    assert found["p50_ttft"] == pytest.approx(1.0)
    assert found["p99_ttft"] == pytest.approx(0.5 + 0.99 * 1.0)
    assert found["mean_tpot"] == pytest.approx((0.5 + 0.1) / 2)
    assert found["mean_e2e"] == pytest.approx(2.5)
    assert found["preemptions_per_request"] == 0.5
    assert found["compressions_per_request"] == 1.0
    assert found["slot_wait_per_request"] == 0.25


def test_what_ended_badly_is_counted_and_not_timed() -> None:
    rolling = Rolling(100.0, 1)
    for finish in ("error", "abort", "abort", "refused"):
        run(rolling, 1.0, 1.5, 2.0, finish, tokens=3)
    found = rolling.measures(lane_with(), 2.0)
    assert [found[name] for name in ("failed", "aborted", "refused", "finished")] == [1.0, 2.0, 1.0, 0.0]
    assert found["mean_e2e"] is None


def test_the_window_moves_on() -> None:
    rolling = Rolling(10.0, 1)
    run(rolling, 0.0, 5.0, 6.0, "error")
    run(rolling, 9.0, 10.0, 12.0)
    assert rolling.measures(lane_with(), 14.0)["failed"] == 1.0
    found = rolling.measures(lane_with(), 16.5)
    assert found["failed"] == 0.0
    assert found["mean_ttft"] == pytest.approx(1.0)


def test_what_came_before_the_policy_does_not_count() -> None:
    rolling = Rolling(100.0, 1)
    old = entry(tokens=4)
    rolling.arrived(old, 1.0, 1.0)
    rolling.begin(5.0)
    rolling.first_token(old, 6.0)
    old.finish_reason = "error"
    rolling.ended(old, 7.0, 1.0)
    found = rolling.measures(lane_with(), 8.0)
    assert found["failed"] == 0.0
    assert found["mean_ttft"] is None


def test_a_lane_that_hangs_shows() -> None:
    rolling = Rolling(100.0, 2)
    run(rolling, 0.0, 0.1, 0.2)
    waiting = entry()
    rolling.arrived(waiting, 1.0, 1.0)
    assert rolling.measures(lane_with(waiting), 1.05)["p99_ttft"] is None  # it may still be quick
    assert rolling.measures(lane_with(waiting), 31.0)["p99_ttft"] == pytest.approx(0.1 + 0.99 * 29.9)


def test_rates_are_of_the_time_with_work() -> None:
    rolling = Rolling(100.0, 1)
    lane = lane_with()
    rolling.measures(lane, 0.0)
    first = entry()
    lane.entries[0] = first
    rolling.arrived(first, 10.0, 10.0)
    rolling.stepped(lane, 11.0)
    assert first.sequence is not None
    first.sequence.output.token_ids.extend([0] * 30)
    rolling.stepped(lane, 12.0)
    found = rolling.measures(lane, 12.0)
    assert found["tokens_per_s"] == pytest.approx(15.0)
    assert found["requests_per_s"] == 0.0
    del lane.entries[0]
    first.finish_reason = "length"
    rolling.ended(first, 12.5, 10.0)
    rolling.stepped(lane, 13.0)
    found = rolling.measures(lane, 60.0)  # idle since: no slower for that
    assert found["tokens_per_s"] == pytest.approx(10.0)
    assert found["requests_per_s"] == pytest.approx(1 / 3)

"""Another policy in a running server, and the watch that puts the one before back.

What the watch measures, by a clock of the test's own and requests that are made up.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.types import ASGIApp

from tests.engine.server.server_cases import HYBRID, ROOMY, Served, served, wait_for
from zlab.engine.errors import EngineError
from zlab.engine.server.app import create_app
from zlab.engine.server.auto_rollback import WATCHED, GateMonitor, SlidingWindow, WatchSettings
from zlab.engine.server.jobs import Output
from zlab.engine.server.lanes import Lane
from zlab.engine.server.middleware import Keys
from zlab.engine.server.replicas.fleet import Forwarded, Member
from zlab.engine.server.replicas.router import Reply, undo_of
from zlab.policies.gates import METRICS, gates_from_list
from zlab.policies.registry import ChangeState, DeploymentStage, PolicyRegistry, Target
from zlab.policies.snapshot import store_policy
from zlab.policies.spec import load_policy, policy_digest
from zlab.traces.schema import NUM_PHASES, Phase

KEY = "an admin's key"
ADMIN = {"Authorization": f"Bearer {KEY}"}
HERE = Target("tiny", "cpu")
PLAIN = "full-kv"
CONSTRAINED = "constrained:tokens=24,window=4"
GENEROUS = "hybrid:tokens=200,window=4"
EVERY = (PLAIN, CONSTRAINED, HYBRID)
QUICK = WatchSettings(window_s=60.0, min_requests=2, every_s=0.001)


def order(policy: str | None, lane: str = "live", **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"lane": lane, "policy": None, "who": "ada", "why": "to see"}
    if policy is not None:
        stored = store_policy(load_policy(policy))
        found |= {
            "name": stored.name,
            "policy": stored.toml,
            "digest": stored.digest,
            "sources": dict(stored.sources),
        }
    return found | more


@contextmanager
def running(
    watch: GateMonitor | None = None, may_become: tuple[str, ...] = EVERY, **more: Any
) -> Iterator[Served]:
    engine = replace(ROOMY, policy=PLAIN, may_become=may_become, num_blocks=60)
    keys = Keys.of(admin=[KEY])
    with served(engine, keys=keys, monitor=watch, **more) as found:
        yield found


def lanes(server: Served) -> dict[str, Any]:
    with server.http() as client:
        return {lane["lane"]: lane for lane in client.get("/v1/policy").json()["lanes"]}


def complete(server: Served, prompt: str = "hello there, how", **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "temperature": 0.0, "max_tokens": 8} | more
    answer = server.post("/v1/completions", body)
    found: dict[str, Any] = answer.json()
    return found


def test_running_requests_go_on_under_the_new_policy() -> None:
    with running() as quiet:
        wanted = [complete(quiet, max_tokens=60)["choices"][0]["text"] for _ in range(2)]
    with running() as server, server.client() as client:
        stream = client.completions.create(
            model="tiny", prompt="hello there, how", temperature=0.0, max_tokens=60, stream=True
        )
        text = next(stream).choices[0].text
        # A budget that the request will not come up to: its tokens stay what they were.
        answer = server.post("/v1/policy", order(GENEROUS), headers=ADMIN)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert (found["lane"], found["policy"], found["before"]) == ("live", GENEROUS, "full-kv")
        assert found["why"] == "ada: to see"
        answer = server.post("/v1/policy", order(PLAIN), headers=ADMIN)
        assert answer.json()["policy"] == "full-kv"
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == wanted[0]
        assert complete(server, max_tokens=60)["choices"][0]["text"] == wanted[1]


def test_what_is_refused_changes_nothing() -> None:
    with running() as server:
        before = lanes(server)
        wrong: list[tuple[dict[str, Any], int, str]] = [
            (order("hybrid", lane="canary"), 409, "no canary lane"),
            (order(None), 400, "needs a policy"),
            (order(HYBRID, digest="0" * 64), 400, "is not what it was"),
            (order(HYBRID) | {"digest": None}, 400, "digest"),
            (order(HYBRID, lane="cannary"), 400, "lane"),
            (order(HYBRID, who=""), 400, "who"),
            (order(HYBRID, wy="typing"), 400, "wy"),
            (order(HYBRID) | {"policy": "= no toml"}, 400, "TOML"),
            (order("hybrid:tokens=2048"), 409, "cannot work in the live lane"),
            (order("nano-vllm"), 409, "60 requests with blocks at once, 16 are reserved"),
        ]
        for body, status, says in wrong:
            answer = server.post("/v1/policy", body, headers=ADMIN)
            assert answer.status_code == status, answer.text
            assert says in answer.text
        assert server.post("/v1/policy", order(HYBRID)).status_code == 401
        assert lanes(server) == before
        with server.http() as client:
            assert client.get("/v1/policy/watch").status_code == 404


def test_a_canary_has_a_policy_of_its_own_until_it_ends_or_becomes_live() -> None:
    with running(canary_share=0.4) as server:

        def now() -> list[tuple[str, bool]]:
            return [(lane["policy"], lane["follows_live"]) for lane in lanes(server).values()]

        def send(body: dict[str, Any]) -> None:
            answer = server.post("/v1/policy", body, headers=ADMIN)
            assert answer.status_code == 200, answer.text

        assert now() == [("full-kv", False), ("full-kv", True)]
        send(order(HYBRID, lane="canary"))
        assert now() == [("full-kv", False), (HYBRID, False)]
        names = [complete(server)["id"] for _ in range(12)]
        assert len(set(names)) == 12
        assert all(lane["decision_digest"] for lane in lanes(server).values())
        send(order(None, lane="canary"))
        assert now() == [("full-kv", False), ("full-kv", True)]
        send(order(HYBRID, lane="canary"))
        send(order(CONSTRAINED))  # another live policy leaves the canary alone
        assert now() == [(CONSTRAINED, False), (HYBRID, False)]
        send(order(HYBRID))
        assert now() == [(HYBRID, False), (HYBRID, True)]
        send(order(PLAIN))  # and one that follows comes along
        assert now() == [("full-kv", False), ("full-kv", True)]


def test_a_change_is_taken_back_as_if_it_had_not_been() -> None:
    def undo(server: Served, lane: str, policy: str) -> Any:
        body = {"lane": lane, "digest": policy_digest(load_policy(policy))}
        return server.post("/v1/policy/undo", body, headers=ADMIN)

    def now(server: Served) -> dict[str, Any]:
        return {
            name: row | {"decision_digest": ""} for name, row in lanes(server).items()
        }  # the journal has them all

    with running(canary_share=0.4) as server:
        for body in (order(CONSTRAINED, evidence="e" * 64), order(HYBRID, lane="canary")):
            assert server.post("/v1/policy", body, headers=ADMIN).status_code == 200
        before = now(server)
        assert before["live"]["before"] == "full-kv"
        # What is live now had been canary: undone, the canary has its own policy again, as well.
        assert server.post("/v1/policy", order(HYBRID), headers=ADMIN).status_code == 200
        assert now(server)["canary"]["follows_live"]
        wrong = [("live", CONSTRAINED), ("canary", HYBRID), ("canary", PLAIN)]
        for lane, policy in wrong:
            refused = undo(server, lane, policy)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                409,
                "not_the_last_change",
            )
        assert server.post("/v1/policy/undo", {"lane": "live", "digest": "0"}).status_code == 401
        answer = undo(server, "live", HYBRID)
        assert (answer.status_code, answer.json()["policy"]) == (200, CONSTRAINED)
        assert now(server) == before
        assert undo(server, "live", CONSTRAINED).status_code == 409, "one change, once"
        assert complete(server)["choices"][0]["finish_reason"] == "length"
        assert (
            server.post("/v1/policy", order(None, lane="canary"), headers=ADMIN).status_code == 200
        )
        assert undo(server, "canary", CONSTRAINED).json()["policy"] == HYBRID
        assert now(server)["canary"] == before["canary"]


def test_a_replica_understands_what_the_front_sends_to_take_a_change_back() -> None:
    async def ask(app: ASGIApp, request: Forwarded) -> Reply:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            answer = await client.request(
                request.method, request.path, content=request.body, headers=list(request.headers)
            )
        return Reply(Member("0-0", "0", 0, 4, 60, True), answer.status_code, (), answer.content)

    with running() as server:
        app = create_app(server.context)
        body = json.dumps(order(HYBRID)).encode()
        names = {
            b"authorization": ADMIN["Authorization"].encode(),
            b"content-type": b"application/json",
        }
        headers = (*names.items(), (b"Content-Length", str(len(body)).encode()))
        change = Forwarded("POST", "/v1/policy", b"", headers, body)
        done = asyncio.run(ask(app, change))
        assert (done.status, lanes(server)["live"]["policy"]) == (200, HYBRID)
        undone = asyncio.run(ask(app, undo_of(change, done)))
        assert (undone.status, lanes(server)["live"]["policy"]) == (200, "full-kv"), undone.body


def test_a_policy_that_one_lane_cannot_hold_changes_neither() -> None:
    small = ("hybrid:tokens=8,window=4",)
    with running(
        may_become=small, canary_share=0.05
    ) as server:  # three blocks: a budget of four does not fit
        answer = server.post("/v1/policy", order(HYBRID), headers=ADMIN)
        assert answer.status_code == 409
        assert "in the canary lane" in answer.json()["error"]["message"]
        assert [lane["policy"] for lane in lanes(server).values()] == ["full-kv", "full-kv"]
        assert complete(server)["choices"][0]["finish_reason"] in ("length", "stop")


def rolled_back(server: Served) -> dict[str, Any]:
    def seen() -> list[Any]:
        with server.http() as client:
            return list(client.get("/v1/policy/watch").json()["rollbacks"])

    wait_for(seen, "a rollback")
    found: dict[str, Any] = seen()[0]
    return found


def test_a_broken_gate_rolls_back_and_the_registry_says_why(tmp_path: Path) -> None:
    registry = PolicyRegistry(tmp_path / "registry.db")
    for name in (PLAIN, HYBRID):
        registry.promote(
            load_policy(name), DeploymentStage.LIVE, HERE, "ada", "to begin with", force=True
        )
    watch = GateMonitor(gates_from_list(["p50_ttft <= 1 us", "laws == ok"]), QUICK, registry, HERE)
    assert watch.unwatched == ["laws == ok"]
    with running(watch) as server:
        for _ in range(4):
            complete(server)  # slower than that; but it has no policy to go back to
        assert lanes(server)["live"]["policy"] == "full-kv"
        assert server.post("/v1/policy", order(HYBRID), headers=ADMIN).json()["policy"] == HYBRID
        complete(server)
        complete(server)
        found = rolled_back(server)
        assert (found["lane"], found["from"], found["to"]) == ("live", HYBRID, "full-kv")
        assert found["why"].startswith("p50_ttft <= 1 us is broken: ")
        assert lanes(server)["live"]["policy"] == "full-kv"
        assert lanes(server)["live"]["why"].startswith("rolled back by the watch: p50_ttft")
        for _ in range(4):
            complete(server)  # full-kv breaks it as well, and stays: it is what there is
        assert lanes(server)["live"]["policy"] == "full-kv"
        with server.http() as client:
            assert len(client.get("/v1/policy/watch").json()["rollbacks"]) == 1
    last = registry.history(HERE)[-1]
    assert (last.who, last.action, last.state) == ("watch", "rollback", ChangeState.DONE)
    assert last.why.startswith("p50_ttft <= 1 us is broken: ")
    live = registry.live(HERE)
    assert live is not None
    assert live.policy.digest == policy_digest(load_policy(PLAIN))


def test_a_canary_is_held_against_the_live_lane(tmp_path: Path) -> None:
    registry = PolicyRegistry(tmp_path / "registry.db")
    registry.promote(
        load_policy(PLAIN), DeploymentStage.LIVE, HERE, "ada", "to begin with", force=True
    )
    registry.promote(load_policy(HYBRID), DeploymentStage.CANARY, HERE, "ada", "to try", force=True)
    watch = GateMonitor(gates_from_list(["mean_ttft <= 0.001x"]), QUICK, registry, HERE)
    with running(watch, canary_share=0.5) as server:
        server.post("/v1/policy", order(HYBRID, lane="canary"), headers=ADMIN)
        for _ in range(200):
            complete(server, max_tokens=2)
            if watch.rollbacks:
                break
        found = rolled_back(server)
        assert (found["lane"], found["from"], found["to"]) == ("canary", HYBRID, "full-kv")
        assert "(here " in found["why"]
        assert lanes(server)["canary"]["follows_live"]
    assert registry.canary(HERE) is None
    assert registry.live(HERE) is not None


def test_a_crash_under_a_new_policy_brings_the_old_one_back() -> None:
    watch = GateMonitor(gates_from_list(["failed == 0"]), QUICK)
    with running(watch) as server:
        complete(server)
        server.post("/v1/policy", order(HYBRID), headers=ADMIN)
        server.gate.fault = RuntimeError("a kernel went wrong")
        assert "error" in complete(server)
        found = rolled_back(server)
        assert (found["from"], found["to"]) == (HYBRID, "full-kv")
        assert found["why"] == "failed == 0 is broken: 1"
        assert lanes(server)["live"]["policy"] == "full-kv"
        assert complete(server)["choices"][0]["finish_reason"] in ("length", "stop")


def test_a_rollback_of_the_operators_own_comes_first() -> None:
    """Between the breach and the step boundary somebody else has changed the policy: the watch
    stands back.
    """
    watch = GateMonitor(gates_from_list(["failed == 0"]), QUICK)
    with running(watch) as server:
        server.post("/v1/policy", order(HYBRID), headers=ADMIN)
        num_changes = server.context.worker.call(lambda lanes: lanes[0].num_changes).result()
        server.post("/v1/policy", order(CONSTRAINED), headers=ADMIN)
        server.context.worker.call(
            lambda lanes: watch._roll_back(lanes, "live", num_changes, "late")
        ).result()
        assert lanes(server)["live"]["policy"] == CONSTRAINED
        assert not watch.rollbacks


def test_gates_that_no_server_can_show_are_refused() -> None:
    with pytest.raises(EngineError, match=r"none of the gates \(laws == ok\) can be watched"):
        GateMonitor(gates_from_list(["laws == ok"]))
    with pytest.raises(EngineError, match="min_requests of the watch must be more than 0, got 0"):
        WatchSettings(min_requests=0)


def made_output(tokens: int = 0, preemptions: int = 0, slot_wait_s: float = 0.0) -> Any:
    phase_ns = [0] * NUM_PHASES
    phase_ns[Phase.WAITS_FOR_SLOT] = int(slot_wait_s * 1e9)
    request = SimpleNamespace(
        preemptions=preemptions, compressions=2 * preemptions, phase_ns=phase_ns
    )
    engine_request = SimpleNamespace(
        output=SimpleNamespace(token_ids=[0] * tokens), request=request
    )
    return Output(cast(Any, None), 0, cast(Any, engine_request))


@dataclass
class FakeLane:
    outputs: dict[int, Any] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        return bool(self.outputs)


def lane_with(*outputs: Any) -> Lane:
    return cast(Lane, FakeLane(dict(enumerate(outputs))))


def run(
    window: SlidingWindow,
    came_s: float,
    first_s: float,
    end_s: float,
    finish: str = "length",
    **more: Any,
) -> None:
    made = made_output(**more)
    window.arrived(made, came_s, came_s)
    window.first_token(made, first_s)
    made.finish_reason = finish
    window.ended(made, end_s, came_s)


def test_every_watched_metric_is_one_that_gates_know() -> None:
    assert set(WATCHED) <= set(METRICS)
    assert set(SlidingWindow(10.0, 1).measures(lane_with(), 0.0)) == set(WATCHED)


def test_times_by_hand() -> None:
    window = SlidingWindow(100.0, 2)
    run(window, 1.0, 1.5, 3.5, tokens=5, preemptions=1, slot_wait_s=0.5)
    found = window.measures(lane_with(), 4.0)
    assert found["p50_ttft"] is None  # one is too few
    assert found["finished"] == 1.0  # a count is not
    run(window, 2.0, 3.5, 4.5, tokens=11, finish="stop")
    found = window.measures(lane_with(), 5.0)
    assert found["mean_ttft"] == pytest.approx(1.0)
    assert found["p50_ttft"] == pytest.approx(1.0)
    assert found["p99_ttft"] == pytest.approx(0.5 + 0.99 * 1.0)
    assert found["mean_tpot"] == pytest.approx((0.5 + 0.1) / 2)
    assert found["mean_e2e"] == pytest.approx(2.5)
    assert found["preemptions_per_request"] == 0.5
    assert found["compressions_per_request"] == 1.0
    assert found["slot_wait_per_request"] == 0.25


def test_what_ended_badly_is_counted_and_not_timed() -> None:
    window = SlidingWindow(100.0, 1)
    for finish in ("error", "abort", "abort", "refused"):
        run(window, 1.0, 1.5, 2.0, finish, tokens=3)
    found = window.measures(lane_with(), 2.0)
    assert [found[name] for name in ("failed", "aborted", "refused", "finished")] == [
        1.0,
        2.0,
        1.0,
        0.0,
    ]
    assert found["mean_e2e"] is None


def test_the_window_moves_on() -> None:
    window = SlidingWindow(10.0, 1)
    run(window, 0.0, 5.0, 6.0, "error")
    run(window, 9.0, 10.0, 12.0)
    assert window.measures(lane_with(), 14.0)["failed"] == 1.0
    found = window.measures(lane_with(), 16.5)
    assert found["failed"] == 0.0
    assert found["mean_ttft"] == pytest.approx(1.0)


def test_what_came_before_the_policy_does_not_count() -> None:
    window = SlidingWindow(100.0, 1)
    old = made_output(tokens=4)
    window.arrived(old, 1.0, 1.0)
    window.begin(5.0)
    window.first_token(old, 6.0)
    old.finish_reason = "error"
    window.ended(old, 7.0, 1.0)
    found = window.measures(lane_with(), 8.0)
    assert found["failed"] == 0.0
    assert found["mean_ttft"] is None


def test_a_lane_that_hangs_shows() -> None:
    window = SlidingWindow(100.0, 2)
    run(window, 0.0, 0.1, 0.2)
    waiting = made_output()
    window.arrived(waiting, 1.0, 1.0)
    assert window.measures(lane_with(waiting), 1.05)["p99_ttft"] is None  # it may still be quick
    assert window.measures(lane_with(waiting), 31.0)["p99_ttft"] == pytest.approx(0.1 + 0.99 * 29.9)


def test_rates_are_of_the_time_with_work() -> None:
    window = SlidingWindow(100.0, 1)
    lane = lane_with()
    window.measures(lane, 0.0)
    first = made_output()
    lane.outputs[0] = first
    window.arrived(first, 10.0, 10.0)
    window.stepped(lane, 11.0)
    first.engine_request.output.token_ids.extend([0] * 30)
    window.stepped(lane, 12.0)
    found = window.measures(lane, 12.0)
    assert found["tokens_per_s"] == pytest.approx(15.0)
    assert found["requests_per_s"] == 0.0
    del lane.outputs[0]
    first.finish_reason = "length"
    window.ended(first, 12.5, 10.0)
    window.stepped(lane, 13.0)
    found = window.measures(lane, 60.0)  # idle since: no slower for that
    assert found["tokens_per_s"] == pytest.approx(10.0)
    assert found["requests_per_s"] == pytest.approx(1 / 3)

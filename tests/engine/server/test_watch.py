"""Another policy in a running server, and the watch that puts the one before back."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from engine.errors import EngineError
from engine.server.app import create_app
from engine.server.keys import Keys
from engine.server.replicas_call import Forwarded, answer
from engine.server.replicas_fleet import Member
from engine.server.replicas_roster import Reply, undo_of
from engine.server.routes_admin import admin_routes
from engine.server.watch import Watch, WatchSettings
from policies.gates import gates_from_list
from policies.registry import ChangeState, Registry, Stage, Target
from policies.spec import load_policy, policy_digest
from policies.stored import store_policy
from tests.engine.server_cases import HYBRID, ROOMY, Served, served, wait_for

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
        found |= {"name": stored.name, "policy": stored.toml, "digest": stored.digest, "sources": dict(stored.sources)}
    return found | more


@contextmanager
def running(watch: Watch | None = None, may_become: tuple[str, ...] = EVERY, **more: Any) -> Iterator[Served]:
    engine = replace(ROOMY, policy=PLAIN, may_become=may_become, num_blocks=60)
    observers = [watch] if watch is not None else []
    keys = Keys.of(admin=[KEY])
    with served(engine, keys=keys, observers=observers, more_routes=[admin_routes(watch)], **more) as found:
        if watch is not None:
            watch.bind(found.house.worker)
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
        return {name: row | {"decision_digest": ""} for name, row in lanes(server).items()}  # the journal has them all

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
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_the_last_change")
        assert server.post("/v1/policy/undo", {"lane": "live", "digest": "0"}).status_code == 401
        answer = undo(server, "live", HYBRID)
        assert (answer.status_code, answer.json()["policy"]) == (200, CONSTRAINED)
        assert now(server) == before
        assert undo(server, "live", CONSTRAINED).status_code == 409, "one change, once"
        assert complete(server)["choices"][0]["finish_reason"] == "length"
        assert server.post("/v1/policy", order(None, lane="canary"), headers=ADMIN).status_code == 200
        assert undo(server, "canary", CONSTRAINED).json()["policy"] == HYBRID
        assert now(server)["canary"] == before["canary"]


def test_a_replica_understands_what_the_front_sends_to_take_a_change_back() -> None:
    async def ask(app: ASGIApp, request: Forwarded) -> Reply:
        parts = [part async for part in answer(app, request, lambda: 0.0)]
        assert parts[0].status is not None
        return Reply(Member("0-0", "0", 0, 4, 60, True), parts[0].status, (), b"".join(part.body for part in parts))

    with running() as server:
        app = create_app(server.house, [admin_routes(None)])
        body = json.dumps(order(HYBRID)).encode()
        names = {b"authorization": ADMIN["Authorization"].encode(), b"content-type": b"application/json"}
        headers = (*names.items(), (b"Content-Length", str(len(body)).encode()))
        change = Forwarded("POST", "/v1/policy", b"", headers, body)
        done = asyncio.run(ask(app, change))
        assert (done.status, lanes(server)["live"]["policy"]) == (200, HYBRID)
        undone = asyncio.run(ask(app, undo_of(change, done)))
        assert (undone.status, lanes(server)["live"]["policy"]) == (200, "full-kv"), undone.body


def test_a_policy_that_one_lane_cannot_hold_changes_neither() -> None:
    small = ("hybrid:tokens=8,window=4",)
    with running(may_become=small, canary_share=0.05) as server:  # three blocks: a budget of four does not fit
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
    registry = Registry(tmp_path / "registry.db")
    for name in (PLAIN, HYBRID):
        registry.promote(load_policy(name), Stage.LIVE, HERE, "ada", "to begin with", force=True)
    watch = Watch(gates_from_list(["p50_ttft <= 1 us", "laws == ok"]), QUICK, registry, HERE)
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
    registry = Registry(tmp_path / "registry.db")
    registry.promote(load_policy(PLAIN), Stage.LIVE, HERE, "ada", "to begin with", force=True)
    registry.promote(load_policy(HYBRID), Stage.CANARY, HERE, "ada", "to try", force=True)
    watch = Watch(gates_from_list(["mean_ttft <= 0.001x"]), QUICK, registry, HERE)
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
    watch = Watch(gates_from_list(["failed == 0"]), QUICK)
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
    """Between the breach and the step boundary somebody else has changed the policy: the watch stands back."""
    watch = Watch(gates_from_list(["failed == 0"]), QUICK)
    with running(watch) as server:
        server.post("/v1/policy", order(HYBRID), headers=ADMIN)
        num_changes = server.house.worker.call(lambda lanes: lanes[0].num_changes).result()
        server.post("/v1/policy", order(CONSTRAINED), headers=ADMIN)
        server.house.worker.call(lambda lanes: watch._roll_back(lanes, "live", num_changes, "late")).result()
        assert lanes(server)["live"]["policy"] == CONSTRAINED
        assert not watch.rollbacks


def test_gates_that_no_server_can_show_are_refused() -> None:
    with pytest.raises(EngineError, match=r"none of the gates \(laws == ok\) can be watched"):
        Watch(gates_from_list(["laws == ok"]))
    with pytest.raises(EngineError, match="min_requests of the watch must be more than 0, got 0"):
        WatchSettings(min_requests=0)

"""Lanes that share a model, whose blocks and requests are divided; and a server that takes what the
registry has.
"""

import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engine_cases import SMALL
from tests.engine.server.server_cases import HYBRID, ROOMY, lettered, served
from zlab.engine.errors import EngineError
from zlab.engine.server.lanes import CANARY, LIVE, build_lanes
from zlab.engine.server.launch import ServerPlan, open_server
from zlab.policies.evidence import Target
from zlab.policies.registry import DeploymentStage, PolicyRegistry
from zlab.policies.spec import load_policy, policy_digest

COMPLETIONS = "/v1/completions"
ASKED: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "prompt": "abc"}
SHARE = 0.3
TARGET = Target("qwen3-8b", "h200")
DUMMY = replace(SMALL, model="dummy:tiny", max_model_len=64, max_running=4)


def test_lanes_share_the_model_and_divide_the_blocks() -> None:
    live, canary = build_lanes(ROOMY, lettered(), canary_share=SHARE)
    assert live.engine.loaded is canary.engine.loaded
    assert (live.engine.limits.num_blocks, canary.engine.limits.num_blocks) == (28, 12)
    assert live.engine.cache.k.data_ptr() != canary.engine.cache.k.data_ptr()
    assert canary.deployed.follows_live
    (alone,) = build_lanes(ROOMY, lettered())
    assert alone.engine.limits.num_blocks == 40
    for share in (0.0, 1.0, -0.1):
        with pytest.raises(EngineError, match=r"canary_share must be in \(0, 1\)"):
            build_lanes(ROOMY, lettered(), canary_share=share)
    with pytest.raises(EngineError, match="leaves a lane without any"):
        build_lanes(ROOMY, lettered(), canary_share=0.001)


def test_a_request_goes_by_its_id_and_the_same_id_the_same_way() -> None:
    lane_of: dict[str, str] = {}
    with served(canary_share=SHARE) as server, server.http() as client:
        lanes = server.gate.lanes
        for number in [*range(24), *range(24)]:
            id = f"request-{number}"
            steps = {name: lane.engine.scheduler.next_step for name, lane in lanes.items()}
            assert (
                client.post(
                    COMPLETIONS, json=ASKED | {"request_id": id, "max_tokens": 1}
                ).status_code
                == 200
            )
            (went,) = [
                name
                for name, lane in lanes.items()
                if lane.engine.scheduler.next_step > steps[name]
            ]
            assert lane_of.setdefault(id, went) == went
        assert set(server.gate.num_ended.values()) == {2}
        server.gate.forget()
    counted = Counter(lane_of.values())
    assert 3 <= counted[CANARY] <= 12, "some 7 of 24 by a share of 0.3"
    assert counted[LIVE] + counted[CANARY] == 24


def test_a_canary_turns_nobody_away_that_the_live_lane_can_hold() -> None:
    engine = replace(ROOMY, policy="full-kv")
    with served(engine, canary_share=SHARE) as server:
        big = ASKED | {
            "prompt": "x" * 150,
            "max_tokens": 20,
            "ignore_eos": True,
        }  # 22 blocks: not in the canary's 12
        answers = [
            server.post(
                COMPLETIONS, big | {"request_id": uuid.uuid5(uuid.NAMESPACE_OID, str(n)).hex}
            )
            for n in range(12)
        ]
        assert {answer.status_code for answer in answers} == {200}
        assert server.gate.lanes[CANARY].engine.scheduler.next_step == 0
        assert server.post(COMPLETIONS, big | {"prompt": "x" * 300}).status_code == 400, (
            "too much for either"
        )


def test_both_lanes_give_the_same() -> None:
    with served(canary_share=0.5) as server:
        texts = {
            server.post(COMPLETIONS, ASKED | {"max_tokens": 40, "request_id": f"r{n}"}).json()[
                "choices"
            ][0]["text"]
            for n in range(8)
        }
        assert len(texts) == 1
        assert all(lane.engine.scheduler.next_step for lane in server.gate.lanes.values())


def registry_with(
    path: Path, policy: str, stage: DeploymentStage = DeploymentStage.LIVE
) -> PolicyRegistry:
    registry = PolicyRegistry(path)
    registry.promote(load_policy(policy), stage, TARGET, "somebody", "for a test", force=True)
    return registry


def opened(plan: ServerPlan) -> list[dict[str, Any]]:
    """What the lanes of a server by that plan run."""
    context, _ = open_server(plan)
    try:
        return context.worker.call(
            lambda lanes: [
                {
                    "lane": lane.name,
                    "digest": policy_digest(lane.policy),
                    "why": lane.deployed.why,
                    "may_become": [
                        policy_digest(one)
                        for one in lane.engine.settings.may_become
                        if not isinstance(one, str)
                    ],
                }
                for lane in lanes
            ]
        ).result()
    finally:
        context.close()


def test_a_server_begins_with_what_is_live(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    registry_with(path, "full-kv:order=shortest-prompt")
    plan = ServerPlan(DUMMY, registry=path, target=TARGET)
    (lane,) = opened(plan)
    assert lane["digest"] == policy_digest(load_policy("full-kv:order=shortest-prompt"))
    assert "live in the registry since" in lane["why"]
    assert (
        opened(replace(plan, policy="full-kv:order=shortest-prompt"))[0]["digest"] == lane["digest"]
    )
    with pytest.raises(EngineError, match="is not the one that is live for qwen3-8b on h200"):
        open_server(replace(plan, policy="full-kv"))
    with pytest.raises(EngineError, match="a registry needs a target"):
        open_server(replace(plan, target=None))


def test_a_canary_goes_on_in_its_lane(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    registry_with(path, "full-kv")
    registry_with(path, HYBRID, DeploymentStage.CANARY)
    live, canary = opened(ServerPlan(DUMMY, registry=path, target=TARGET, canary_share=0.5))
    full, hybrid = (policy_digest(load_policy(name)) for name in ("full-kv", HYBRID))
    assert (live["digest"], canary["digest"]) == (full, hybrid)
    assert hybrid in live["may_become"], "memory is set aside for what may be promoted"
    (alone,) = opened(ServerPlan(DUMMY, registry=path, target=TARGET))
    assert alone["digest"] == full


def test_a_canary_that_cannot_work_is_said_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    registry_with(path, "full-kv")
    registry_with(path, "hybrid:tokens=128,num_slots=1", DeploymentStage.CANARY)
    with pytest.raises(EngineError, match="canary lane"):
        open_server(ServerPlan(DUMMY, registry=path, target=TARGET, canary_share=0.2))


def test_an_empty_registry_serves_what_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = ServerPlan(DUMMY, policy=HYBRID, registry=tmp_path / "registry.db", target=TARGET)
    (lane,) = opened(plan)
    assert lane["digest"] == policy_digest(load_policy(HYBRID))
    assert "nothing is live for qwen3-8b on h200" in caplog.text

"""`/health` and `/v1/policy`: how the server stands, and what it serves by."""

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from engine.server.described import ANSWERS, HEALTH
from engine.server.errors import unavailable
from engine.server.house import House
from engine.server.lanes import Lane
from engine.server.sending import Json
from policies.spec import policy_digest, policy_to_toml


def health_routes(house: House) -> APIRouter:
    """Open to all: they say nothing about anybody's request."""
    router = APIRouter()

    @router.get("/health", response_class=Response, responses=HEALTH)
    async def health() -> Response:
        """200 only while requests are taken and the engine's thread lives and gets on; otherwise 503 and why."""
        trouble = house.worker.trouble()
        if house.door.shut:
            return Json({"status": "draining", "under_way": house.door.num_inside}, 503)
        if trouble is not None:
            return Json({"status": "unhealthy", "reason": trouble}, 503)
        left_out = house.worker.observers.failed
        return Json({"status": "ok", "under_way": house.door.num_inside, "observers_failed": left_out})

    return router


def policy_routes(house: House) -> APIRouter:
    """What runs; to be asked with an API key."""
    router = APIRouter(prefix="/v1")

    @router.get("/policy", response_class=Response, responses=ANSWERS)
    async def policy() -> Response:
        """Every lane's policy, since when, why and on what evidence."""
        if house.worker.trouble() is not None:
            raise unavailable("the engine cannot be asked now", "engine_unavailable")
        return Json({"lanes": await house.ask_engine(describe_lanes)})

    return router


def describe_lanes(lanes: Sequence[Lane]) -> list[dict[str, Any]]:
    """The lanes as JSON; on the engine's thread."""
    return [
        {
            "lane": lane.name,
            "share": lane.share,
            "policy": lane.policy.name,
            "digest": policy_digest(lane.policy),
            "toml": policy_to_toml(lane.policy),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(lane.since_unix_s)),
            "why": lane.why,
            "evidence": lane.evidence,
            "num_blocks": lane.engine.limits.num_blocks,
            "decision_digest": lane.engine.scheduler.digest(),
            "follows_live": lane.follows_live,
            "before": None if lane.before is None else lane.before[0].name,
            "rebuilt": lane.num_rebuilt,
        }
        for lane in lanes
    ]

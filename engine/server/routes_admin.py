"""`POST /v1/policy`: from the next step on another policy decides in a lane; `/v1/policy/undo`: as if it never had.

`GET /v1/policy/watch`: how it does there.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from engine.server.changing import Order, carry_out, take_back
from engine.server.described import ANSWERS
from engine.server.errors import ApiError, invalid, unavailable
from engine.server.house import House
from engine.server.lanes import Lane
from engine.server.protocol import PolicyChangeRequest, PolicyUndoRequest
from engine.server.routes_state import describe_lanes
from engine.server.sending import Json
from engine.server.watch import Watch
from policies.core.policy import Policy
from policies.spec import PolicyError
from policies.stored import stored_from_dict

TAKES_S = 15.0  # `zlab promote` waits 20 s for the answer


def admin_routes(watch: Watch | None) -> Callable[[House], APIRouter]:
    """Routes for `create_app`; the admin key is asked for before a request comes here (`engine.server.keys`)."""

    def routes(house: House) -> APIRouter:
        router = APIRouter(prefix="/v1")

        @router.post("/policy", response_class=Response, responses=ANSWERS)
        async def change(asked: PolicyChangeRequest) -> Response:
            """200 once the policy decides; any other status says that nothing has changed, and why."""
            policy = await asyncio.to_thread(_load, asked)
            why = f"{asked.who}: {asked.why}" if asked.why else asked.who
            return await _between_steps(house, partial(carry_out, order=Order(asked.lane, policy, why, asked.evidence)))

        @router.post("/policy/undo", response_class=Response, responses=ANSWERS)
        async def undo(asked: PolicyUndoRequest) -> Response:
            """200 once all is as before the last change; any other status says that nothing has changed, and why."""
            return await _between_steps(house, partial(take_back, name=asked.lane, digest=asked.digest))

        @router.get("/policy/watch", response_class=Response, responses=ANSWERS)
        async def watched() -> Response:
            """What is watched, what was measured lately, and what was rolled back."""
            if watch is None:
                raise ApiError(404, "this server was started without --gates", code="no_watch")
            return Json(await house.ask_engine(lambda _: watch.state()))

        return router

    return routes


async def _between_steps(house: House, change: Callable[[Sequence[Lane]], Lane]) -> Response:
    """Make a change of a lane at the next step boundary, and describe the lane. Raises ApiError."""

    def made(lanes: Sequence[Lane]) -> dict[str, Any]:
        lane = change(lanes)
        return next(found for found in describe_lanes(lanes) if found["lane"] == lane.name)

    future = house.worker.call(made)
    changed = asyncio.wrap_future(future)
    done, _ = await asyncio.wait([changed], timeout=TAKES_S)
    if not done and future.cancel():
        raise unavailable(f"the engine was busy for {TAKES_S:.0f} s; nothing was changed", "engine_busy", 5)
    return Json(await changed)


def _load(asked: PolicyChangeRequest) -> Policy | None:
    """The policy that was sent. Raises ApiError naming the field that is wrong."""
    if asked.policy is None:
        if asked.lane == "live":
            raise invalid("policy", "the live lane needs a policy", "no_policy")
        return None
    if asked.digest is None:
        raise invalid("digest", "a policy comes with its digest", "no_digest")
    stored = {"name": asked.name, "toml": asked.policy, "digest": asked.digest, "sources": asked.sources}
    try:
        return stored_from_dict(stored).load()
    except PolicyError as error:
        raise invalid("policy", str(error), "bad_policy") from error

"""One replica: the whole application with its own engine, in a process that Ray Serve started."""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import engine.server.replicas_environment  # noqa: F401  # before Ray

# isort: split
import torch
from ray import serve
from ray._common.tls_utils import add_port_to_grpc_server
from ray.serve._private import replica as replica_process
from starlette.types import ASGIApp

from engine.server.house import House
from engine.server.lanes import Lane
from engine.server.replicas_call import Forwarded, Part, answer
from engine.server.replicas_fleet import Member
from policies.spec import policy_digest

MOST_PARTS_PER_S = 1000  # that one replica sends to the front; with more streams at once, each waits longer
DESCRIBE_TIMEOUT_S = 5.0
SWITCH_S = 0.0005  # the engine's thread gets the interpreter back this soon from the one that sends parts

OpenReplica = Callable[[str], tuple[House, ASGIApp]]
"""From a replica's name to its house and its application, as `engine.server.server.open_server`; picklable."""


class Replica:
    """The deployment. Its methods run on one event loop; the engine has its own thread."""

    def __init__(self, open_replica: OpenReplica, num_threads: int | None) -> None:
        """`num_threads`: of torch, for replicas that share a CPU."""
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        self._name = str(context.rank.rank)
        self._num_streams = 0
        _listen_here_only()
        sys.setswitchinterval(SWITCH_S)
        logging.basicConfig(level=logging.INFO, format=f"replica {self._name}: %(levelname)s %(message)s", force=True)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._house, self._app = open_replica(self._name)

    async def describe(self) -> Member:
        """What the front has to know."""
        trouble = self._house.worker.trouble()
        facts = _Facts(1, 1, False, ())
        if trouble is None:
            try:
                async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                    facts = await self._house.ask_engine(_facts)
            except TimeoutError:
                trouble = f"the engine has not come to the end of a step for {DESCRIBE_TIMEOUT_S:g} s"
        return Member(
            self._id,
            self._name,
            os.getpid(),
            facts.block_size,
            facts.num_blocks,
            facts.shares_prefixes,
            facts.digests,
            trouble,
        )

    async def forward(self, replica: str, request: Forwarded) -> AsyncGenerator[Part | None]:
        """The answer to a request for the replica with that id; None alone if that is another one."""
        if replica != self._id:
            yield None
            return
        self._num_streams += 1
        try:
            async for part in answer(self._app, request, self._pace_s):
                yield part
        finally:
            self._num_streams -= 1

    def check_health(self) -> None:
        """Asked by Ray Serve now and then: whoever raises is ended and started anew."""
        if self._house.worker.state in ("failed", "stopped"):
            raise RuntimeError(self._house.worker.trouble())

    async def __del__(self) -> None:
        """Called by Ray Serve before the process ends, also of a replica that could not be opened."""
        if hasattr(self, "_house"):
            await asyncio.to_thread(self._house.close)

    def _pace_s(self) -> float:
        return self._num_streams / MOST_PARTS_PER_S


def _listen_here_only() -> None:
    """Keep the port that Ray Serve opens after this on the loopback interface; calls over it are not used here."""

    def add_port(server: Any, address: str) -> int:
        return int(add_port_to_grpc_server(server, address.replace("[::]", "127.0.0.1")))

    replica_process.add_port_to_grpc_server = add_port  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Facts:
    block_size: int
    num_blocks: int
    shares_prefixes: bool
    digests: tuple[tuple[str, str], ...]


def _facts(lanes: Sequence[Lane]) -> _Facts:
    """Of all lanes; on the engine's thread."""
    limits = [lane.engine.limits for lane in lanes]
    return _Facts(
        limits[0].block_size,
        sum(each.num_blocks for each in limits),
        any(lane.policy.prefix.enabled for lane in lanes),
        tuple((lane.name, policy_digest(lane.policy)) for lane in lanes),
    )

"""`zlab serve --replicas N --cluster ADDRESS`: Ray places the replicas on several machines.

    front                                   a machine of the cluster
    ray.init(ADDRESS)                       an actor a replica, restarted by Ray when it dies
    RayFleet.members(), every second -----> `address`: where its server listens
    HttpReplica -------- TCP, token ------> ReplicaApp, the whole application

Only Ray's public interface is used, and Ray carries no request: streams go over HTTP, as between
processes of one machine. Each machine of the cluster has this package and the model.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from typing_extensions import override

from zlab.engine.errors import EngineError
from zlab.engine.server.context import ServerSettings
from zlab.engine.server.launch import Process
from zlab.engine.server.middleware import Keys
from zlab.engine.server.replicas.fleet import (
    FRONT_PARTS_PER_S,
    HttpFleet,
    HttpReplica,
    Member,
    OpenReplica,
    ReplicaApp,
    ReplicaLostError,
)
from zlab.engine.server.replicas.processes import LAST_WORDS_S, ReplicaSettings
from zlab.engine.server.replicas.router import serve_fleet

LOG = logging.getLogger("zlab.server")
ADDRESS_TIMEOUT_S = CONNECT_TIMEOUT_S = 5.0


def serve_cluster(
    cluster: str,
    open_replica: OpenReplica,
    replicas: ReplicaSettings,
    settings: ServerSettings,
    keys: Keys,
    address: tuple[str, int],
) -> int:
    """Start the replicas on a running Ray cluster and serve until told to stop.

    Args:
        cluster: `host:port` of a running cluster's head, or "auto".
        open_replica: opens the server of one replica; it must be possible to pickle it.
        replicas: how many, and whether each needs a GPU.
        settings: the front's bounds.
        keys: the front's keys.
        address: host and port to listen on.

    Returns:
        The exit code, as `zlab.engine.server.launch.Process` has it.

    Raises:
        EngineError: when the replicas do not start.
    """
    with cluster_replicas(cluster, open_replica, replicas) as fleet:
        return serve_fleet(fleet, settings, keys, address)


@contextlib.contextmanager
def cluster_replicas(
    cluster: str, open_replica: OpenReplica, settings: ReplicaSettings
) -> Iterator["RayFleet"]:
    """Start the replicas and wait until all listen; end them on leaving.

    Args:
        cluster: `host:port` of a running cluster's head, or "auto".
        open_replica: opens the server of one replica.
        settings: how many, and whether each needs a GPU.

    Raises:
        EngineError: when there is no such cluster, or a replica cannot be opened.
    """
    try:
        if cluster != "auto":  # Ray itself would try for minutes
            host, _, port = cluster.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(address=cluster, configure_logging=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise EngineError(
            f"no Ray cluster can be reached at {cluster!r} (give host:port, or auto): {error}"
        ) from error
    try:
        fleet = RayFleet(open_replica, settings)
        try:
            fleet.wait_until_open()
            yield fleet
        finally:
            fleet.stop()
    finally:
        ray.shutdown()


class ReplicaActor:
    """One replica in a Ray actor: its server listens on a free port of its machine."""

    def __init__(
        self,
        open_replica: OpenReplica,
        name: str,
        token: str,
        parts_per_s: float,
        num_threads: int | None,
    ) -> None:
        """Open the server.

        Args:
            open_replica: opens it.
            name: of the replica.
            token: that every request must have.
            parts_per_s: see `ReplicaApp`.
            num_threads: of torch, for replicas that share a CPU.
        """
        logging.basicConfig(
            level=logging.INFO, format=f"replica {name}: %(levelname)s %(message)s", force=True
        )
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._context, app = open_replica(name)
        app = ReplicaApp(app, self._context, name, parts_per_s=parts_per_s, token=token)
        listening = socket.create_server((ray.util.get_node_ip_address(), 0))
        host, port = listening.getsockname()[:2]
        self._address = f"{host}:{port}"
        self._process = Process(app, self._context)
        self._thread = threading.Thread(target=self._serve, args=(listening,), daemon=True)
        self._thread.start()

    def address(self) -> str:
        """Return where the server listens."""
        return self._address

    def stop(self) -> None:
        """End the server; Ray then ends the actor."""
        self._process.stop_soon()
        self._context.close(LAST_WORDS_S)

    def _serve(self, listening: socket.socket) -> None:
        asyncio.run(self._process.serve([listening]))
        if self._context.worker.failure is not None:
            os._exit(1)  # Ray starts the actor again


class RayFleet(HttpFleet):
    """The replicas of a cluster."""

    def __init__(self, open_replica: OpenReplica, settings: ReplicaSettings) -> None:
        """Start the actors; `wait_until_open` waits for them."""
        token = secrets.token_hex(32)
        count = settings.num_replicas
        remote: Any = ray.remote(ReplicaActor).options(
            num_cpus=1,
            num_gpus=int(settings.on_gpu),
            max_restarts=-1,
            scheduling_strategy="SPREAD",
        )
        num_threads = None if settings.on_gpu else 1
        self._actors = [
            remote.remote(open_replica, str(name), token, FRONT_PARTS_PER_S / count, num_threads)
            for name in range(count)
        ]
        self._token = token
        # By number: the address of the actor's present server, and its connections.
        self._reached: dict[int, tuple[str, HttpReplica]] = {}

    @property
    def num_wanted(self) -> int:
        """How many there should be."""
        return len(self._actors)

    def wait_until_open(self) -> None:
        """Wait until all replicas listen. Raises EngineError with the reason of one that fails."""
        try:
            ray.get([actor.address.remote() for actor in self._actors])
        except RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise EngineError(f"the replicas did not start: {reason}") from error

    def stop(self) -> None:
        """End the replicas and their actors."""
        ended = [actor.stop.remote() for actor in self._actors]
        ray.wait(ended, num_returns=len(ended), timeout=LAST_WORDS_S)
        for actor in self._actors:
            ray.kill(actor)

    async def members(self) -> Sequence[Member]:
        """Return the replicas that answer now."""
        found = await asyncio.gather(*map(self._member, range(self.num_wanted)))
        return [member for member in found if member is not None]

    @override
    def reached(self) -> list[HttpReplica]:
        return [replica for _, replica in self._reached.values()]

    async def _member(self, number: int) -> Member | None:
        """Ask an actor for its address, and its server for the rest."""
        try:
            async with asyncio.timeout(ADDRESS_TIMEOUT_S):
                address = await self._actors[number].address.remote()
            known = self._reached.get(number)
            if known is None or known[0] != address:  # the actor is new
                self._reached[number] = known = (address, HttpReplica(address, self._token))
            return await known[1].member()
        except (RayError, ReplicaLostError, TimeoutError) as error:
            LOG.warning("replica %d does not answer: %s", number, type(error).__name__)
            return None

"""N replicas under Ray Serve on this machine: started, reached, and ended without anything left behind."""

import contextlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

from engine.server.replicas_environment import TOO_LATE  # before Ray

# isort: split
import ray
import torch
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from engine.errors import EngineError
from engine.server.replicas_actor import OpenReplica, Replica
from engine.server.replicas_call import Forwarded, Part
from engine.server.replicas_fleet import Member, ReplicaLostError

LOG = logging.getLogger("zlab.server")
APP, DEPLOYMENT = "zlab", "Replica"
ROUTER = "engine.server.replicas_router:ChosenReplicaRouter"
OBJECT_STORE_BYTES = 128 << 20  # for what is larger than 100 kB on its way: bodies of requests
MEMBERS_TIMEOUT_S = 8.0
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 60.0
LAST_WORDS_S = 5.0
LONGEST_FOLDER = 20
RAISED = re.compile(r"[\w.]+Error: (.+)")
QUIET = {"log_level": "WARNING", "enable_access_log": False}


@dataclass(frozen=True)
class ClusterSettings:
    """How the replicas are run.

    Attributes:
        num_replicas: how many.
        device: "cuda", each then has a GPU of its own, or "cpu", whose cores they share.
        max_concurrent: requests that may be under way at once, all replicas together.
        show_logs: what the replicas log also goes to this process's stderr.
    """

    num_replicas: int
    device: str
    max_concurrent: int = 1024
    show_logs: bool = True

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise EngineError(f"num_replicas must be at least 1, got {self.num_replicas}")
        if self.device not in ("cuda", "cpu"):
            raise EngineError(f"replicas run on 'cuda', a GPU each, or on 'cpu', not on {self.device!r}")

    @property
    def on_gpu(self) -> bool:
        """Whether each has a GPU."""
        return self.device == "cuda"


class RayFleet:
    """The replicas of a running cluster."""

    def __init__(self, handle: "DeploymentHandle[Replica]", num_wanted: int) -> None:
        self._handle = handle
        self._streams = handle.options(stream=True)
        self.num_wanted = num_wanted

    async def members(self) -> Sequence[Member]:
        """Those that answer now."""
        try:
            found = await self._handle.broadcast("describe").results_async(
                timeout_s=MEMBERS_TIMEOUT_S, return_exceptions=True
            )
        except (RayError, RayServeException, TimeoutError) as error:
            LOG.error("the replicas do not answer: %s", type(error).__name__)
            return []
        return [member for member in found if isinstance(member, Member)]

    async def forward(self, request: Forwarded, replica: str) -> AsyncGenerator[Part]:
        """The answer of the replica with that id. Raises ReplicaLostError, BrokenAnswerError."""
        response = self._streams.forward.remote(replica, request)
        assert isinstance(response, DeploymentResponseGenerator)
        complete = False
        try:
            async for part in response:
                if part is None:
                    raise ReplicaLostError("it is gone")
                complete = part.last
                yield part
        except RayError as error:
            raise ReplicaLostError(type(error).__name__) from error
        finally:
            if not complete:
                response.cancel()


@contextlib.contextmanager
def cluster(open_replica: OpenReplica, settings: ClusterSettings) -> Iterator[RayFleet]:
    """Start the replicas and wait until all are ready; end them on leaving. On the main thread.

    Raises EngineError when they cannot be started: what a replica raised, or too few GPUs.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    folder = tempfile.mkdtemp(prefix="zlab-ray-", dir=_short_folder())
    try:
        _start_ray(settings, folder)
        handle = _deploy(open_replica, settings)
        try:
            yield RayFleet(handle, settings.num_replicas)
        finally:
            handle.shutdown()
            serve.delete(APP)  # waits for the replicas; the rest has nothing to save
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _short_folder() -> str | None:
    """Where Ray's sockets can lie: of the 107 characters that a socket's path may have, Ray takes 67."""
    return None if len(tempfile.gettempdir()) <= LONGEST_FOLDER else "/tmp"


def _start_ray(settings: ClusterSettings, folder: str) -> None:
    if TOO_LATE or ray.is_initialized():
        raise EngineError("Ray is in use in this process already: replicas need a process of their own")
    num_gpus = torch.cuda.device_count()
    if settings.on_gpu and num_gpus < settings.num_replicas:
        raise EngineError(f"{settings.num_replicas} replicas need a GPU each, there are {num_gpus}")
    ray.init(
        address="local",  # never somebody else's cluster
        num_cpus=settings.num_replicas + 1,  # what a replica is counted as, not what it uses
        num_gpus=None if settings.on_gpu else 0,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=settings.show_logs,
        _temp_dir=folder,
    )


def _deploy(open_replica: OpenReplica, settings: ClusterSettings) -> "DeploymentHandle[Replica]":
    serve.start(proxy_location="Disabled", logging_config=QUIET)  # our own front is the only door
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=settings.num_replicas,
        ray_actor_options={"num_cpus": 1, "num_gpus": int(settings.on_gpu)},
        max_ongoing_requests=2 * settings.max_concurrent + 64,  # the front's limit is met first
        request_router_config={"request_router_class": ROUTER},
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=LAST_WORDS_S,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=1,
        logging_config=QUIET,
    )(Replica)
    num_threads = None if settings.on_gpu else max(1, (os.cpu_count() or 1) // settings.num_replicas)
    try:
        return serve.run(deployment.bind(open_replica, num_threads), name=APP, route_prefix=None)
    except RuntimeError as error:
        raise EngineError(f"the replicas did not start: {_reason() or error}") from error


def _reason() -> str | None:
    """What a replica raised: the message in the last line of its traceback that names an error."""
    app = serve.status().applications[APP]
    lines = [line.strip() for found in app.deployments.values() for line in found.message.splitlines()]
    return next((found[1] for line in reversed(lines) if (found := RAISED.match(line))), None)

"""A whole server from one plan, and the process that serves it.

ServerPlan --open_server--> ServerContext, application
    policy: the plan's, else what the registry has live, else `hybrid`
    observers: metrics, and on request the traffic recorder and the gate monitor
Process(application, context, host, port).run()
    first SIGTERM or SIGINT: drain; second: stop; the engine gives up: stop
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from zlab.engine.engine import EngineSettings
from zlab.engine.errors import EngineError
from zlab.engine.server.app import ResponseCount, create_app
from zlab.engine.server.auto_rollback import CrashNotes, GateMonitor, WatchSettings
from zlab.engine.server.context import ServerContext, ServerSettings, open_context
from zlab.engine.server.lanes import (
    CANARY,
    Lane,
    Observer,
    PreviousPolicy,
    change_policy,
    serving_setup,
)
from zlab.engine.server.metrics import ServerMetrics
from zlab.engine.server.middleware import ConcurrencyLimit, Keys
from zlab.engine.server.protocol import ApiError
from zlab.engine.server.traffic_recorder import LiveRecording, RecordSettings
from zlab.policies.core.plan import ConfigError, SchedulerLimits
from zlab.policies.core.policy import Policy
from zlab.policies.core.query_slots import QuerySlots
from zlab.policies.evidence import setup_differences, setup_facts
from zlab.policies.gates import Gates
from zlab.policies.registry import Deployment, DeploymentStage, PolicyRegistry, Target
from zlab.policies.spec import PolicyError, load_policy, policy_digest

LOG = logging.getLogger("zlab.server")
SIGNED_AS = "serve"  # in the registry
DEFAULT_POLICY = "hybrid"
MANY_BLOCKS = 1 << 16  # of a pool whose size is not known yet
MAY_GO_LIVE = (DeploymentStage.VALIDATED, DeploymentStage.CANARY, DeploymentStage.LIVE)


@dataclass(frozen=True)
class ServerPlan:
    """Everything that makes one server; another process that gets it can open the same server.

    Attributes:
        engine: how to build the engines; `policy` here replaces its policy.
        policy: the policy to serve by; None: what the registry has live, else `DEFAULT_POLICY`.
        settings: the server's bounds.
        keys: the API and admin keys.
        served_model: the model's name for clients; its own name if None.
        canary_share: see `zlab.engine.server.lanes.build_lanes`.
        registry: where policies are kept. It needs a target.
        target: the model and GPU that this server is in the registry.
        record: a folder for recordings of the traffic; None records nothing.
        record_settings: what a recording holds.
        gates: what each lane's policy is held to; a broken gate rolls it back.
        watch_settings: how the gates are watched.
    """

    engine: EngineSettings
    policy: str | None = None
    settings: ServerSettings = field(default_factory=ServerSettings)
    keys: Keys = field(default_factory=Keys)
    served_model: str | None = None
    canary_share: float | None = None
    registry: Path | None = None
    target: Target | None = None
    record: Path | None = None
    record_settings: RecordSettings = field(default_factory=RecordSettings)
    gates: Gates | None = None
    watch_settings: WatchSettings = field(default_factory=WatchSettings)


def open_server(plan: ServerPlan, name: str = "") -> tuple[ServerContext, ASGIApp]:
    """Open a server: its engine runs when this returns, and `ServerContext.close` ends it.

    Args:
        plan: what to open.
        name: of a replica; its recordings go below a folder of that name.

    Returns:
        The server's parts and its application.

    Raises:
        EngineError, PolicyError, ConfigError, RegistryError, RecordingError: what does not fit
            together.
    """
    origin = _origin(plan)
    recording = None
    if plan.record is not None:
        folder = plan.record / f"replica-{name}" if name else plan.record
        recording = LiveRecording(folder, plan.engine.block_size, plan.record_settings)
    metrics = ServerMetrics(plan.served_model, recording)
    monitor = None
    if plan.gates is not None:
        registry = PolicyRegistry(plan.registry) if plan.registry is not None else None
        monitor = GateMonitor(plan.gates, plan.watch_settings, registry, plan.target)
    observers: list[Observer] = [metrics]
    if monitor is None and plan.registry is not None and plan.target is not None:
        observers.append(CrashNotes(PolicyRegistry(plan.registry), plan.target))
    observers += [observer for observer in (recording, monitor) if observer is not None]
    context = open_context(
        replace(plan.engine, policy=origin.policy, may_become=origin.may_become),
        plan.settings,
        plan.keys,
        served_model=plan.served_model,
        canary_share=plan.canary_share,
        observers=observers,
        target=plan.target,
        at_close=() if recording is None else (recording.close,),
    )
    try:
        context.worker.call(partial(_adopt, origin=origin, target=plan.target)).result()
    except ApiError as error:
        context.close()
        raise EngineError(error.message) from error
    return context, ResponseCount(create_app(context, metrics, monitor), metrics)


@dataclass(frozen=True)
class _Origin:
    """What a server starts with.

    Attributes:
        policy: the policy of its lanes.
        may_become: policies for which memory is reserved.
        live, canary: what the registry has deployed.
        before: what was live before, with its evidence: a rollback deploys it.
    """

    policy: Policy | str
    may_become: tuple[Policy | str, ...]
    live: Deployment | None = None
    canary: Deployment | None = None
    before: PreviousPolicy | None = None


def _origin(plan: ServerPlan) -> _Origin:
    """Read the registry, if there is one. Raises EngineError where it contradicts the plan."""
    if plan.registry is None or plan.target is None:
        if plan.registry is not None or plan.target is not None:
            raise EngineError("a registry needs a target, and a target a registry")
        return _Origin(plan.policy or DEFAULT_POLICY, plan.engine.may_become)
    registry = PolicyRegistry(plan.registry)
    registry.settle(plan.target, None, SIGNED_AS)
    live = registry.live(plan.target)
    where = f"{plan.target.model} on {plan.target.gpu}"
    asked = load_policy(plan.policy) if plan.policy is not None else None
    before = None
    if live is None:
        LOG.warning("nothing is live for %s in %s", where, plan.registry)
        policy = asked or load_policy(DEFAULT_POLICY)
    else:
        policy = live.policy.load()
        if asked is not None and policy_digest(asked) != live.policy.digest:
            raise EngineError(
                f"policy {plan.policy!r} is not the one that is live for {where}: "
                f"{live.policy.name!r} "
                f"({live.policy.digest[:16]}); leave the policy out, or promote it"
            )
        before = _before(registry, live)
    others = _promotable(registry, plan, except_for=policy_digest(policy))
    others += [before[0]] if before is not None else []
    may_become = (*plan.engine.may_become, *others)
    return _Origin(policy, may_become, live, registry.canary(plan.target), before)


def _before(registry: PolicyRegistry, live: Deployment) -> PreviousPolicy | None:
    """Return what a rollback of the live policy deploys; None if nothing was live before it."""
    below = registry.before_live(live.target)
    if below is None:
        return None
    try:
        return registry.policy(below.digest).load(), below.evidence
    except PolicyError as error:
        LOG.warning("policy %r, which was live before, cannot come back: %s", below.name, error)
        return None


def _promotable(registry: PolicyRegistry, plan: ServerPlan, except_for: str) -> list[Policy]:
    """Return the policies that may be promoted, or rolled back to, while this server runs."""
    share = 1.0 if plan.canary_share is None else min(plan.canary_share, 1.0 - plan.canary_share)
    # The limits of the smallest lane, as far as they are known before the model is loaded.
    num_blocks = max(int((plan.engine.num_blocks or MANY_BLOCKS) * share), 1)
    limits = SchedulerLimits(num_blocks, plan.engine.block_size)
    found = []
    for standing in registry.standings(plan.target):
        if standing.stage in MAY_GO_LIVE and standing.policy.digest != except_for:
            try:
                policy = standing.policy.load()
                QuerySlots(policy, limits)
                if policy.simulation_only is not None:
                    raise ConfigError(policy.simulation_only)
                found.append(policy)
            except (PolicyError, ConfigError) as error:
                LOG.warning("no memory is set aside for policy %r: %s", standing.policy.name, error)
    return found


def _adopt(lanes: Sequence[Lane], origin: _Origin, target: Target | None) -> None:
    """Say on what evidence the lanes run, and deploy the canary where there is a lane for it."""
    if origin.live is not None:
        why, evidence = _grounds(origin.live)
        if origin.live.evidence is not None:
            judged = setup_facts(origin.live.evidence)
            for difference in setup_differences(judged, serving_setup(lanes, lanes[0], target)):
                LOG.warning("the live policy was judged elsewhere: %s", difference)
        for lane in lanes:
            lane.note_origin(why, evidence, origin.before if lane is lanes[0] else None)
    if origin.canary is not None:
        if len(lanes) > 1:
            change_policy(lanes, CANARY, origin.canary.policy.load(), *_grounds(origin.canary))
        else:
            LOG.warning(
                "policy %r is canary, but this server has no canary lane", origin.canary.policy.name
            )


def _grounds(deployment: Deployment) -> tuple[str, str | None]:
    why = f"{deployment.stage} in the registry since {deployment.since}"
    return why, deployment.evidence.id if deployment.evidence is not None else None


SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.05  # between two looks at whether all requests have ended
KEEP_ALIVE_S = 30
ABORTED_GRACE_S = 5  # for the answers of requests that were aborted
SWITCH_S = 0.0005  # how soon the engine's thread gets the interpreter back from the event loop


class Worker(Protocol):
    """What computes the answers, as a process sees it."""

    @property
    def failure(self) -> Exception | None:
        """Why it has given up; None while it works."""

    @property
    def ended(self) -> "Future[None]":
        """Done when it has ended."""

    def stop(self) -> None:
        """End what runs."""


class ServedApp(Protocol):
    """What a process needs to know of the application that it serves."""

    @property
    def worker(self) -> Worker:
        """Computes the answers."""

    @property
    def concurrency(self) -> ConcurrencyLimit:
        """Counts the requests under way."""

    @property
    def settings(self) -> ServerSettings:
        """Says how long to wait for them."""


class Process(uvicorn.Server):
    """Serves an application until it is told to stop, or its worker gives up.

    `exit_code` is 0 when every request that had entered was served, otherwise 1.
    """

    def __init__(
        self, app: ASGIApp, served: ServedApp, host: str = "", port: int = 0, **config: Any
    ) -> None:
        """Prepare the process.

        Args:
            app: the application.
            served: its worker, its concurrency limit and its settings.
            host: the address to listen on.
            port: the port; 0 takes a free one.
            config: further options of `uvicorn.Config`.
        """
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=ABORTED_GRACE_S,
                **config,
            )
        )
        self.exit_code = 0
        self._served = served
        self._num_signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    @override
    def run(self, sockets: list[socket.socket] | None = None) -> None:
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            super().run(sockets)
        except SystemExit:  # it cannot listen: the log says why
            self.exit_code = 1
        finally:
            sys.setswitchinterval(interval_s)

    @override
    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._served.worker.ended.add_done_callback(self._on_worker_end)
        await super().serve(sockets)
        if self._draining is not None:
            self._draining.cancel()

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain and stop on signals; unlike uvicorn, do not raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self.drain_soon()
        else:
            self.stop_soon()

    def stop_soon(self) -> None:
        """Stop, from any thread."""
        self._call_soon(self.stop)

    def drain_soon(self) -> None:
        """Drain, from any thread."""
        self._call_soon(self.drain)

    def _call_soon(self, call: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process has ended
                self._loop.call_soon_threadsafe(call)

    def drain(self) -> None:
        """Take no further request, and stop when all have ended or `grace_s` is over."""
        if self._draining is None:
            concurrency = self._served.concurrency
            concurrency.close()
            LOG.warning("draining: %d requests under way", concurrency.num_active)
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    def stop(self) -> None:
        """Stop now; on the event loop."""
        concurrency = self._served.concurrency
        concurrency.close()
        if concurrency.num_active:
            LOG.warning("stopping: %d requests are cut off", concurrency.num_active)
            self.exit_code = 1
        # The worker may be in the middle of a step; the event loop does not wait for it.
        threading.Thread(target=self._served.worker.stop, daemon=True).start()
        self.should_exit = True

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._served.settings.grace_s):
                while self._served.concurrency.num_active:
                    await asyncio.sleep(POLL_S)
        self.stop()

    def _on_worker_end(self, _: "Future[None]") -> None:
        """Stop after a failure, once the clients have their answers."""
        if self._served.worker.failure is not None:
            self.exit_code = 1
            self.stop_soon()

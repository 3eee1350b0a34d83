"""A whole server from one plan: the policy that the registry has live, who looks on, every route."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from starlette.types import ASGIApp

from engine.build import EngineSettings
from engine.errors import EngineError
from engine.server.app import Routes, create_app
from engine.server.changing import Order, carry_out
from engine.server.errors import ApiError
from engine.server.house import House
from engine.server.keys import Keys
from engine.server.lanes import CANARY, Before, Lane
from engine.server.live_trace import LiveRecording, RecordSettings
from engine.server.metrics import ServerMetrics
from engine.server.observing import Observer
from engine.server.opening import open_house
from engine.server.routes_admin import admin_routes
from engine.server.routes_metrics import ResponseCount, metrics_routes
from engine.server.settings import ServerSettings
from engine.server.watch import Watch, WatchSettings
from policies.core.errors import ConfigError
from policies.core.limits import Limits
from policies.core.policy import Policy
from policies.core.slot_table import SlotTable
from policies.gates import Gates
from policies.registry import Registry, Stage, Standing, Target
from policies.spec import PolicyError, load_policy, policy_digest

LOG = logging.getLogger("zlab.server")
SIGNED_AS = "serve"
DEFAULT_POLICY = "hybrid"
ENOUGH_BLOCKS = 1 << 16
MAY_GO_LIVE = (Stage.VALIDATED, Stage.CANARY, Stage.LIVE)


@dataclass(frozen=True)
class ServerPlan:
    """Everything that makes one server; it can be sent to another process, which then opens its own.

    Attributes:
        engine: its policy is not looked at, `policy` is.
        policy: what to serve by; None: what the registry has live, or `DEFAULT_POLICY`.
        registry, target: where policies are kept, and for which model and card this server stands; both or neither.
        record: a folder for live recordings; `record_settings` says what goes there.
        gates: what every lane is held to while it runs; a broken one puts the policy before back.
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


def open_server(plan: ServerPlan, name: str = "") -> tuple[House, ASGIApp]:
    """The house, its engine running, and the application; `House.close` ends both. `name` is a replica's.

    Raises EngineError, PolicyError, ConfigError, RegistryError or RecordingError with what does not fit together.
    """
    engine, standings, before = _by_registry(plan)
    metrics = ServerMetrics()
    observers: list[Observer] = [metrics]
    routes: list[Routes] = [metrics_routes(metrics)]
    at_close: list[Callable[[], None]] = []
    if plan.record is not None:
        folder = plan.record / f"replica-{name}" if name else plan.record
        recording = LiveRecording(folder, engine.block_size, plan.record_settings)
        observers.append(recording)
        metrics.recording = recording
        at_close.append(recording.close)
    watch = None
    if plan.gates is not None:
        registry = Registry(plan.registry) if plan.registry is not None else None
        watch = Watch(plan.gates, plan.watch_settings, registry, plan.target)
        observers.append(watch)
    routes.append(admin_routes(watch))
    house = open_house(engine, plan.settings, plan.keys, plan.served_model, plan.canary_share, observers)
    house = replace(house, at_close=tuple(at_close))
    if watch is not None:
        watch.bind(house.worker)
    try:
        house.worker.call(lambda lanes: _take_stands(lanes, standings, before)).result()
    except ApiError as error:  # as a client would be told that changes a policy
        house.close()
        raise EngineError(error.message) from error
    metrics.model_name = house.served_model
    return house, ResponseCount(create_app(house, routes), metrics)


def _by_registry(plan: ServerPlan) -> tuple[EngineSettings, list[Standing], Before | None]:
    """The engine's settings with its first policy and room for those that may take over; what the registry says.

    The last is what was live before, with its evidence: a rollback goes there.
    """
    if plan.registry is None or plan.target is None:
        if plan.registry is not None or plan.target is not None:
            raise EngineError("a registry needs a target, and a target a registry")
        return replace(plan.engine, policy=plan.policy or DEFAULT_POLICY), [], None
    registry = Registry(plan.registry)
    registry.settle(plan.target, None, SIGNED_AS)
    live = registry.live(plan.target)
    where = f"{plan.target.model} on {plan.target.gpu}"
    asked = load_policy(plan.policy) if plan.policy is not None else None
    if live is None:
        LOG.warning("nothing is live for %s in %s", where, plan.registry)
        policy = asked or load_policy(DEFAULT_POLICY)
    else:
        policy = live.policy.load()
        if asked is not None and policy_digest(asked) != live.policy.digest:
            raise EngineError(
                f"policy {plan.policy!r} is not the one that is live for {where}: {live.policy.name!r} "
                f"({live.policy.digest[:16]}); leave the policy out, or promote it"
            )
    before = None if live is None else _before(registry, live)
    others = _may_take_over(registry, plan, except_for=policy_digest(policy))
    others += [before[0]] if before is not None else []
    engine = replace(plan.engine, policy=policy, may_become=(*plan.engine.may_become, *others))
    standings = [standing for standing in (live, registry.canary(plan.target)) if standing is not None]
    return engine, standings, before


def _before(registry: Registry, live: Standing) -> Before | None:
    """What a rollback of the live policy brings back; None if nothing was live before it."""
    below = next((one for one in registry.history(live.target) if one.number == live.change.below), None)
    if below is None:
        return None
    try:
        return registry.policy(below.digest).load(), below.evidence
    except PolicyError as error:
        LOG.warning("policy %r, which was live before, cannot come back: %s", below.name, error)
        return None


def _may_take_over(registry: Registry, plan: ServerPlan, except_for: str) -> list[Policy]:
    """Policies that can be promoted on evidence, or be gone back to, while this server runs."""
    share = 1.0 if plan.canary_share is None else min(plan.canary_share, 1.0 - plan.canary_share)
    num_blocks = max(int((plan.engine.num_blocks or ENOUGH_BLOCKS) * share), 1)
    limits = Limits(num_blocks, plan.engine.block_size)  # of the smallest lane, as far as they are known yet
    found = []
    for standing in registry.standings(plan.target):
        if standing.stage in MAY_GO_LIVE and standing.policy.digest != except_for:
            try:
                policy = standing.policy.load()
                SlotTable(policy, limits)
                found.append(policy)
            except (PolicyError, ConfigError) as error:
                LOG.warning("no memory is set aside for policy %r: %s", standing.policy.name, error)
    return found


def _take_stands(lanes: Sequence[Lane], standings: Sequence[Standing], before: Before | None) -> None:
    """Say on what evidence the lanes run; a canary goes on in its lane where there is one."""
    lanes[0].before = before
    for standing in standings:
        evidence = standing.evidence.id if standing.evidence is not None else None
        why = f"{standing.stage} in the registry since {standing.since}"
        if standing.stage is Stage.LIVE:
            for lane in lanes:
                lane.evidence, lane.why = evidence, why
        elif len(lanes) > 1:
            carry_out(lanes, Order(CANARY, standing.policy.load(), why, evidence))
        else:
            LOG.warning("policy %r is canary, but this server has no canary lane", standing.policy.name)

"""Lanes: engines on one loaded model, each with a policy, a scheduler and blocks of its own.

    requests by a hash of their ids:   0 ........................ 0.9 ..... 1
    lanes (--canary-share 0.1):        | live                      | canary |
    blocks of the pool:                | nine tenths               | a tenth|

A server has the lane `live`; with a canary share it also has the lane `canary`, for a candidate.
Until a candidate is deployed there, the canary lane follows the live one. A policy is changed
between two steps, and a change can be undone: in all lanes that it concerns or in none.

Everything here belongs to the engine's thread. `Observer` is how metrics, recordings and the gate
monitor learn what happens in the lanes.
"""

import gc
import hashlib
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Concatenate, ParamSpec

import torch

from zlab.engine.engine import Engine, EngineSettings, find_device, find_dtype, pool_blocks
from zlab.engine.errors import EngineError
from zlab.engine.model.loader import LoadedModel, load_model
from zlab.engine.server.jobs import Job, Output
from zlab.engine.server.protocol import ApiError
from zlab.policies.core.journal import EventSink, Int64Array
from zlab.policies.core.plan import ConfigError
from zlab.policies.core.policy import Policy
from zlab.policies.evidence import Target, setup_differences
from zlab.policies.spec import policy_digest
from zlab.sim.specs import SimError, find_model, gpu_of_card

LOG = logging.getLogger("zlab.server")
LIVE, CANARY = "live", "canary"
P = ParamSpec("P")
PreviousPolicy = tuple[Policy, str | None]  # with the id of its evidence
MakeEventSink = Callable[[str], EventSink | None]
"""From a lane's name to the event log of its next engine; called for every engine that is built."""


@dataclass(frozen=True)
class LaneSnapshot:
    """What is deployed in a lane: the policy, since when, and on what grounds.

    Attributes:
        policy: the policy that decides.
        since_unix_s: when it was deployed.
        why: the reason, for operators.
        evidence: the id of its evidence in the registry, or None.
        before: the policy before it, for a rollback; None where there is none.
        follows_live: the lane is a canary lane without a candidate, and runs what the live lane
            runs.
    """

    policy: Policy
    since_unix_s: float
    why: str = "start"
    evidence: str | None = None
    before: PreviousPolicy | None = None
    follows_live: bool = False


class Lane:
    """One engine behind the server; only the engine's thread touches it.

    Attributes:
        name: "live" or "canary".
        share: the share of requests, 0..1, that fall to the lane by their ids.
        engine: the engine, replaced by `rebuild`.
        deployed: what was deployed last; `policy` is what the scheduler decides by.
        num_changes: how many policies were deployed since the start.
        undo: what the last change replaced in each lane that it concerned; empty where there is
            nothing to undo.
        outputs: the lane's live outputs, by request number.
        num_rebuilt: how many engines were replaced after a step that failed.
    """

    def __init__(
        self,
        name: str,
        share: float,
        engine: Engine,
        make_event_sink: MakeEventSink,
        *,
        follows_live: bool = False,
    ) -> None:
        self.name = name
        self.share = share
        self.engine = engine
        self.deployed = LaneSnapshot(
            engine.scheduler.policy, time.time(), follows_live=follows_live
        )
        self.num_changes = 0
        self.undo: tuple[tuple[Lane, LaneSnapshot], ...] = ()
        self.outputs: dict[int, Output] = {}
        self.num_rebuilt = 0
        self._make_event_sink = make_event_sink

    @property
    def policy(self) -> Policy:
        """The policy that its scheduler decides by."""
        return self.engine.scheduler.policy

    @property
    def busy(self) -> bool:
        """Whether an output is in the engine."""
        return bool(self.outputs)

    @property
    def num_waiting(self) -> int:
        """How many requests are in the waiting queue."""
        return self.engine.scheduler.stats().num_waiting

    def snapshot(self) -> LaneSnapshot:
        """Return what is deployed now."""
        return replace(self.deployed, policy=self.policy)

    def note_origin(self, why: str, evidence: str | None, before: PreviousPolicy | None) -> None:
        """Say on what grounds the lane runs the policy that it started with."""
        self.deployed = replace(self.deployed, why=why, evidence=evidence, before=before)

    def deploy(self, deployed: LaneSnapshot) -> None:
        """Note what is deployed, once the scheduler has the policy."""
        self.deployed = deployed
        self.num_changes += 1

    def rebuild(self, policy: Policy | None = None) -> None:
        """Replace the engine by a new one of the same size.

        The memory of the old engine goes first. Its requests are gone, too; the caller has ended
        them. Raises what `Engine.create` raises.

        Args:
            policy: decides from now on; by default the policy that is deployed.
        """
        old = self.engine
        policy = policy or self.policy
        first = (old.settings.policy,) if old.settings.policy != policy else ()
        settings = replace(
            old.settings,
            policy=policy,
            # A rollback may go back to the policy of the start.
            may_become=(*old.settings.may_become, *first),
            num_blocks=old.limits.num_blocks,
        )
        loaded, device = old.loaded, old.cache.k.device
        self.outputs.clear()
        del self.engine, old
        gc.unfreeze()  # the old engine has been there since the start
        gc.collect()  # an engine is full of reference cycles
        if device.type == "cuda":
            # A fault of the device shows here, not in the next request.
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        self.engine = Engine.create(settings, loaded, self._make_event_sink(self.name))
        self.num_rebuilt += 1


def no_event_sink(_: str) -> EventSink | None:
    """Return None: the scheduler's events are not recorded."""
    return None


def build_lanes(
    settings: EngineSettings,
    loaded: LoadedModel | None = None,
    canary_share: float | None = None,
    make_event_sink: MakeEventSink = no_event_sink,
) -> list[Lane]:
    """Build the live lane and, with a canary share, the canary lane.

    Args:
        settings: of all lanes together. Both lanes start under its policy.
        loaded: the model, loaded by these settings if None. The lanes share it.
        canary_share: the canary lane's share of blocks and requests, in (0, 1).
        make_event_sink: gives each lane's scheduler its event log.

    Raises:
        EngineError: for a share that leaves a lane without blocks; and what `Engine.create` raises.
    """
    if canary_share is None:
        return [
            Lane(LIVE, 1.0, Engine.create(settings, loaded, make_event_sink(LIVE)), make_event_sink)
        ]
    if not 0.0 < canary_share < 1.0:
        raise EngineError(f"canary_share must be in (0, 1), got {canary_share}")
    if loaded is None:
        loaded = load_model(
            settings.model,
            device=find_device(settings.device),
            dtype=find_dtype(settings.dtype),
            variant=settings.variant,
        )
    num_blocks = pool_blocks(settings, loaded, num_engines=2)
    num_canary = round(num_blocks * canary_share)
    if not 0 < num_canary < num_blocks:
        raise EngineError(
            f"canary_share {canary_share} of {num_blocks} blocks leaves a lane without any"
        )

    def build(name: str, share: float, size: int) -> Lane:
        sized = replace(settings, num_blocks=size)
        engine = Engine.create(sized, loaded, make_event_sink(name))
        return Lane(name, share, engine, make_event_sink, follows_live=name == CANARY)

    return [
        build(LIVE, 1.0 - canary_share, num_blocks - num_canary),
        build(CANARY, canary_share, num_canary),
    ]


def lane_for(lanes: Sequence[Lane], job: Job) -> Lane:
    """Return the lane of a job, by a hash of its id: the same id always goes the same way.

    A job that this lane can never hold goes to the first lane that can, so that a canary lane,
    whose pool is small, refuses no request that the live lane would serve.
    """
    place = int.from_bytes(hashlib.sha256(job.id.encode()).digest()[:8]) / 2**64
    chosen, upper = lanes[0], 1.0
    for lane in reversed(lanes):  # the canary has the top of the range
        upper -= lane.share
        if place >= upper:
            chosen = lane
            break
    if len(lanes) == 1 or can_hold(chosen, job):
        return chosen
    return next((lane for lane in lanes if can_hold(lane, job)), chosen)


def can_hold(lane: Lane, job: Job) -> bool:
    """Return whether the lane's pool is large enough for each of the job's outputs alone."""
    scheduler, max_tokens = lane.engine.scheduler, job.request.max_tokens
    return all(scheduler.can_ever_run(len(prompt), max_tokens) for prompt in job.prompts)


@dataclass(frozen=True)
class RequestLengths:
    """The longest requests that some lane serves, in tokens.

    Attributes:
        total: prompt and output together, however they are divided.
        prompt: the longest prompt, with one token of output.
        output: the longest output of a prompt of one token.
    """

    total: int
    prompt: int
    output: int


def longest_requests(lanes: Sequence[Lane]) -> RequestLengths:
    """Return the longest requests of the lane that serves the longest."""
    return max(map(_longest_requests, lanes), key=lambda found: found.total)


def _longest_requests(lane: Lane) -> RequestLengths:
    scheduler, limit = lane.engine.scheduler, lane.engine.limits.max_model_len
    prompt = longest_where(lambda size: scheduler.can_ever_run(size, 1), limit - 1)
    output = longest_where(lambda size: scheduler.can_ever_run(1, size), limit - 1)
    return RequestLengths(min(prompt, output) + 1, prompt, output)


def longest_where(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 0 to `most` that fits, where all smaller ones fit, too."""
    return bisect_left(range(1, most + 1), True, key=lambda size: not fits(size))


# changes of policy


def find_lane(lanes: Sequence[Lane], name: str) -> Lane:
    """Return the lane of that name. Raises ApiError (409) where the server has none."""
    for lane in lanes:
        if lane.name == name:
            return lane
    raise ApiError(
        409,
        f"this server has no {name} lane: start it with --canary-share",
        param="lane",
        code="no_such_lane",
    )


def change_policy(
    lanes: Sequence[Lane], name: str, policy: Policy | None, why: str, evidence: str | None = None
) -> Lane:
    """Deploy a policy in a lane; the requests in it go on.

    A canary lane without a candidate follows the live lane, and so does a canary lane whose policy
    becomes live.

    Args:
        lanes: all lanes of the server.
        name: the lane to change, "live" or "canary".
        policy: None ends a canary: its lane follows the live one.
        why: the reason, for operators.
        evidence: the id of the policy's evidence in the registry.

    Returns:
        The lane.

    Raises:
        ApiError: 409 where the policy cannot work in a lane, 400 for a live lane without a policy;
            nothing has changed then.
    """
    lane, live = find_lane(lanes, name), lanes[0]
    follows_live = policy is None
    if policy is None:
        if lane is live:
            raise ApiError(400, "the live lane needs a policy", param="policy", code="no_policy")
        policy, evidence = live.policy, live.deployed.evidence
    followers = []
    if lane is live:
        followers = [
            other
            for other in lanes[1:]
            if other.deployed.follows_live or _is_same(other.policy, policy)
        ]
    now = time.time()
    changes = []
    for each in (lane, *followers):
        is_new = not _is_same(each.policy, policy)
        before = (each.policy, each.deployed.evidence) if is_new else each.deployed.before
        reason = why if each is lane else f"follows live: {why}"
        follows = follows_live if each is lane else True
        changes.append((each, LaneSnapshot(policy, now, reason, evidence, before, follows)))
    undo = tuple((each, each.snapshot()) for each, _ in changes)
    _deploy(changes)
    for each in lanes:
        each.undo = undo if each is lane else ()
    return lane


def serving_setup(lanes: Sequence[Lane], lane: Lane, target: Target | None) -> dict[str, Any]:
    """Return the server's own of `zlab.policies.evidence.SETUP_FACTS`; on the engine's thread.

    The GPU is the one in the machine; on a CPU the one that the server stands for in a registry.
    `num_blocks` lists the lane's pool and that of all lanes together.

    Args:
        lanes: all lanes of the server.
        lane: one of them.
        target: the model and GPU that the server is in a registry.
    """
    engine = lane.engine
    device, model = engine.cache.k.device, engine.loaded.config.name
    if device.type == "cuda":
        gpu = gpu_of_card(torch.cuda.get_device_name(device))
    else:
        gpu = target.gpu if target is not None else "cpu"
    return {
        "gpu": gpu,
        "model": target.model if target is not None else known_model(model),
        "dtype_bytes": engine.cache.k.dtype.itemsize,
        "num_blocks": [
            engine.limits.num_blocks,
            sum(each.engine.limits.num_blocks for each in lanes),
        ],
        "block_size": engine.limits.block_size,
    }


def known_model(name: str) -> str:
    """Return the name by which `zlab validate` knows a model; the name itself for others."""
    try:
        return find_model(name).name
    except SimError:
        return name


def check_setup(
    lanes: Sequence[Lane], name: str, target: Target | None, judged: Mapping[str, Any]
) -> None:
    """Raise ApiError (409) where a lane differs from the setup that a policy was judged in."""
    served = serving_setup(lanes, find_lane(lanes, name), target)
    differences = setup_differences(judged, served)
    if differences:
        raise ApiError(
            409,
            f"the policy was judged in another setup than this server's: {'; '.join(differences)}",
            param="setup",
            code="other_setup",
        )


def undo_change(lanes: Sequence[Lane], name: str, digest: str) -> Lane:
    """Undo the last change of the lane: policies, reasons and evidence are as before it.

    Args:
        lanes: all lanes of the server.
        name: the lane that was changed.
        digest: of the policy that the change deployed.

    Returns:
        The lane.

    Raises:
        ApiError: 409 where that is not the last change of all; nothing has changed then.
    """
    lane = find_lane(lanes, name)
    if not lane.undo or policy_digest(lane.policy) != digest:
        message = (
            f"the last change was not that policy {digest[:16]} took over in the {name} "
            f"lane: nothing to take back"
        )
        raise ApiError(409, message, param="digest", code="not_the_last_change")
    _deploy(lane.undo)
    lane.undo = ()
    return lane


def roll_back(lanes: Sequence[Lane], name: str, why: str) -> Lane:
    """Deploy the policy before the present one; a canary lane follows the live lane again.

    Args:
        lanes: all lanes of the server.
        name: the lane.
        why: the reason, for operators.

    Returns:
        The lane.

    Raises:
        ApiError: 409 where the lane had no other policy before.
    """
    lane = find_lane(lanes, name)
    if name == CANARY:
        return change_policy(lanes, CANARY, None, why)
    if lane.deployed.before is None:
        raise ApiError(
            409,
            "the live lane has had no other policy since the server started",
            code="nothing_before",
        )
    policy, evidence = lane.deployed.before
    change_policy(lanes, LIVE, policy, why, evidence)
    # The policy that has just failed is none to go back to.
    lane.note_origin(why, evidence, before=None)
    return lane


def lane_to_put_back(lanes: Sequence[Lane], crashed: Lane) -> Lane | None:
    """Return the lane whose newest change a crash speaks against; None where there is no policy to
    go back to.

    A candidate in the canary lane is its own suspect; a lane that follows the live one crashed
    under the live policy.
    """
    live = lanes[0]
    if crashed is not live and not crashed.deployed.follows_live:
        return crashed
    return None if live.deployed.before is None else live


def put_back(lanes: Sequence[Lane], crashed: Lane, why: str) -> Lane | None:
    """Rebuild a lane that crashed under the policy before the present one.

    The newest change is the likeliest cause of a crash. The canary lane returns to the live policy;
    where the crashed policy is the live one, every lane that follows it returns, too.

    Args:
        lanes: all lanes of the server.
        crashed: the lane whose engine failed; its requests have ended.
        why: the reason, for operators.

    Returns:
        The lane whose change was taken back; None where there is no policy to go back to, and
        nothing was done.
    """
    live, now = lanes[0], time.time()
    changed = lane_to_put_back(lanes, crashed)
    if changed is None:
        return None
    if changed is not live:
        crashed.rebuild(live.policy)
        evidence = live.deployed.evidence
        before = crashed.deployed.before
        crashed.deploy(LaneSnapshot(live.policy, now, why, evidence, before, follows_live=True))
        return crashed
    assert live.deployed.before is not None
    policy, evidence = live.deployed.before
    for lane in lanes:
        follows = lane is not live
        if follows and not lane.deployed.follows_live:
            continue
        if lane is crashed:
            lane.rebuild(policy)
        else:
            lane.engine.replace_policy(policy)
        reason = f"follows live: {why}" if follows else why
        # The policy that has just failed is none to go back to.
        lane.deploy(LaneSnapshot(policy, now, reason, evidence, None, follows))
        lane.undo = ()
    return live


def _deploy(changes: Sequence[tuple[Lane, LaneSnapshot]]) -> None:
    """Put every lane under its new policy or, where one of them cannot take it, none."""
    done: list[tuple[Lane, Policy]] = []
    for lane, deployed in changes:
        old, policy = lane.policy, deployed.policy
        if _is_same(old, policy):
            continue
        try:
            lane.engine.replace_policy(policy)
        except (EngineError, ConfigError) as error:
            for changed, former in reversed(done):
                changed.engine.replace_policy(former)
            message = f"policy {policy.name!r} cannot work in the {lane.name} lane: {error}"
            raise ApiError(409, message, param="policy", code="policy_refused") from error
        done.append((lane, old))
    for lane, deployed in changes:
        lane.deploy(deployed)


def _is_same(one: Policy, other: Policy) -> bool:
    return policy_digest(one) == policy_digest(other)


# observers

CallEngine = Callable[[Callable[[Sequence[Lane]], Any]], "Future[Any]"]
"""Runs a function of the lanes on the engine's thread between two steps (`AsyncEngine.call`)."""


class Observer:
    """What happens in the lanes. Override what you want to know; the methods here do nothing.

    All calls come from the engine's thread, which waits for them: they must return quickly.
    """

    def event_sink(self, lane_name: str) -> EventSink | None:
        """Return a further event log for the scheduler of the lane's next engine, or None."""
        return None

    def start(self, call: CallEngine) -> None:
        """Take note that the engine's thread starts; `call` reaches it from then on."""

    def begin(self, lane: Lane) -> None:
        """Take note of a lane, before its first request."""

    def arrived(self, lane: Lane, output: Output) -> None:
        """Take note that the scheduler has an output; one that it refuses ends at once."""

    def first_token(self, lane: Lane, output: Output) -> None:
        """Take note that the first token of an output has come to the host."""

    def ended(self, lane: Lane, output: Output) -> None:
        """Take note of an output's only end; `output.finish_reason` says how it ended."""

    def stepped(self, lane: Lane) -> None:
        """Take note of a step; `lane.engine.take_ended` gives the requests that ended in it."""

    def idle(self) -> None:
        """Take note that no work is left: the thread is about to wait for a message."""

    def crashed(self, lane: Lane, error: BaseException) -> None:
        """Take note of a step that failed; the lane's requests are about to end."""

    def rebuilt(self, lane: Lane) -> None:
        """Take note that `lane.engine` is a new one."""

    def put_back(self, lane: Lane, guilty: Policy, why: str) -> None:
        """Take note that the policy before `guilty` decides again after a crash of the lane."""

    def stopped(self) -> None:
        """Take note that the engine's thread ends; this is the last call."""


class Observers:
    """Several observers as one. An observer that raises is reported and left out from then on."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)
        self.failed: list[str] = []  # the observers that were left out, each with its error

    def event_sink(self, lane_name: str) -> EventSink | None:
        """Return one event log for all observers that want one; None if none does."""
        sinks = [
            (observer, sink)
            for observer in self._observers
            if (sink := observer.event_sink(lane_name)) is not None
        ]
        if not sinks:
            return None

        def write(rows: Int64Array, blocks: Int64Array) -> None:
            for observer, sink in sinks:
                if observer in self._observers:
                    self._guard(observer, partial(sink, rows, blocks))

        return write

    def notify(
        self, event: Callable[Concatenate[Any, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call one method of every observer, as in `notify(Observer.ended, lane, output)`."""
        for observer in list(self._observers):
            self._guard(observer, partial(getattr(observer, event.__name__), *args, **kwargs))

    def _guard(self, observer: Observer, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # an observer must not end the engine
            self._observers.remove(observer)
            self.failed.append(f"{type(observer).__name__}: {type(error).__name__}")
            LOG.exception("observer %s failed and is left out from now on", type(observer).__name__)

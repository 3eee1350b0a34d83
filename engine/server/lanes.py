"""Lanes: engines with policy and blocks of their own on one loaded model; traffic is divided among them by id."""

import gc
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from engine.build import Engine, EngineSettings, build_engine, find_device, find_dtype, pool_blocks
from engine.errors import EngineError
from engine.loading import LoadedModel, load_model
from engine.server.job import Entry, Job
from engine.submitting import plain_request
from policies.core.events import Sink
from policies.core.intake import make_request
from policies.core.policy import Policy

LIVE, CANARY = "live", "canary"
Before = tuple[Policy, str | None]  # a policy and the id of its evidence
MakeSink = Callable[[str], Sink | None]  # from a lane's name, once for every engine that is built


@dataclass(frozen=True)
class Stand:
    """What decided in a lane before a change, and what was said of it: enough to go back as if nothing had been."""

    lane: "Lane"
    policy: Policy
    since_unix_s: float
    evidence: str | None
    why: str
    before: Before | None
    follows_live: bool


@dataclass(eq=False)
class Lane:
    """One engine behind the server; only the engine's thread touches it.

    Attributes:
        share: of the requests, 0..1, those whose id falls to this lane.
        since_unix_s: when its policy took over, `why`, and on what `evidence` (an id of the registry, or None).
        before: the policy that decided before, with its evidence; None where there is nothing to go back to.
        follows_live: it is a canary lane without a policy of its own, and runs what the live lane runs.
        num_changes: policies that took over since the start.
        undo: how all lanes that its last change moved stood before; empty where there is nothing to take back.
        entries: its live outputs by request number.
        num_rebuilt: engines that were thrown away after a step that failed.
    """

    name: str
    share: float
    engine: Engine
    make_sink: MakeSink
    since_unix_s: float = field(default_factory=time.time)
    evidence: str | None = None
    why: str = "start"
    before: Before | None = None
    follows_live: bool = False
    num_changes: int = 0
    undo: tuple[Stand, ...] = field(default=(), repr=False)
    entries: dict[int, Entry] = field(default_factory=dict)
    num_rebuilt: int = 0

    @property
    def policy(self) -> Policy:
        """What its scheduler decides by now."""
        return self.engine.scheduler.state.policy

    @property
    def busy(self) -> bool:
        """Whether an output is under way in its engine."""
        return bool(self.entries)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks and would like to."""
        return len(self.engine.scheduler.state.waiting)

    def stand(self) -> Stand:
        """How it stands now."""
        return Stand(self, self.policy, self.since_unix_s, self.evidence, self.why, self.before, self.follows_live)

    def rebuild(self) -> None:
        """A fresh engine under the policy of now, as large as the old one, whose memory goes first.

        The old engine's requests are gone with it; the caller has told them. Raises what `build_engine` raises.
        """
        old = self.engine
        began_with = (old.settings.policy,) if old.settings.policy != self.policy else ()  # it may be gone back to
        may_become = (*old.settings.may_become, *began_with)
        settings = replace(old.settings, policy=self.policy, may_become=may_become, num_blocks=old.limits.num_blocks)
        loaded, device = old.loaded, old.cache.k.device
        self.entries.clear()
        del self.engine, old
        gc.unfreeze()  # the old engine has been there since the start
        gc.collect()  # an engine is full of circles
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a fault of the device shows here, not in the next request
            torch.cuda.empty_cache()
        self.engine = build_engine(settings, loaded, self.make_sink(self.name))
        self.num_rebuilt += 1


def no_sink(_: str) -> Sink | None:
    """Nobody records what a lane's scheduler does."""
    return None


def build_lanes(
    settings: EngineSettings,
    loaded: LoadedModel | None = None,
    canary_share: float | None = None,
    make_sink: MakeSink = no_sink,
) -> list[Lane]:
    """The live lane; with `canary_share` also a canary lane that has that share of blocks and requests.

    Both begin under the policy of `settings` and share the loaded model. Raises EngineError and what `build_engine`
    raises.
    """
    if canary_share is None:
        return [Lane(LIVE, 1.0, build_engine(settings, loaded, make_sink(LIVE)), make_sink)]
    if not 0.0 < canary_share < 1.0:
        raise EngineError(f"canary_share must be in (0, 1), got {canary_share}")
    if loaded is None:
        device = find_device(settings.device)
        loaded = load_model(settings.model, device=device, dtype=find_dtype(settings.dtype), variant=settings.variant)
    num_blocks = pool_blocks(settings, loaded, num_engines=2)
    num_canary = round(num_blocks * canary_share)
    if not 0 < num_canary < num_blocks:
        raise EngineError(f"canary_share {canary_share} of {num_blocks} blocks leaves a lane without any")
    sizes = {LIVE: (1.0 - canary_share, num_blocks - num_canary), CANARY: (canary_share, num_canary)}
    lanes = [
        Lane(name, share, build_engine(replace(settings, num_blocks=size), loaded, make_sink(name)), make_sink)
        for name, (share, size) in sizes.items()
    ]
    lanes[1].follows_live = True
    return lanes


def lane_of(lanes: Sequence[Lane], job: Job) -> Lane:
    """The lane of a job: by a hash of its id, so that the same id always goes the same way.

    One that its lane can never hold goes to the first that can: a canary's slice turns nobody away.
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
    """Whether the lane's pool is large enough for each of the job's outputs alone."""
    state = lane.engine.scheduler.state
    for prompt in job.prompts:
        asked = plain_request(job.id, prompt, job.params)
        request = make_request(asked, -1, 0, state.limits, None)
        room = max(state.limits.max_model_len - len(prompt), 1)
        # A length left open is cut to what the pool holds; the prompt and one token must fit.
        open_length = 1 if state.floor is None else room
        request.target_tokens = open_length if job.max_tokens is None else min(job.max_tokens, room)
        if state.peak_blocks(request) > state.limits.num_blocks:
            return False
    return True

"""Replay a workload in simulation.

`replay` takes a workload, a policy, a GPU and a model and returns a run with all its tables.
`Scenario` holds the same choices as plain values, as a command line gives them and a sweep varies
them.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from zlab.policies.core.plan import ConfigError, SchedulerLimits
from zlab.policies.core.policy import Policy
from zlab.policies.core.query_slots import QuerySlots
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.snapshot import manifest_entries
from zlab.policies.spec import load_policy
from zlab.sim.cost_model import Change, CostModel, check_order, read_change, roofline
from zlab.sim.length_profile import Lengths, assumed_lengths
from zlab.sim.memory import MemoryPlanError, MemorySettings, plan_memory, plan_pool
from zlab.sim.profiles import check_shape, from_profile, open_profile
from zlab.sim.simulator import AtBoundary, Progress, Simulation
from zlab.sim.specs import Gpu, ModelSpec, SimError, find_gpu, find_model
from zlab.traces.recording import (
    FolderRecorder,
    MemoryRecorder,
    Recorder,
    Run,
    load_run,
    run_manifest,
)
from zlab.traces.workload import TraceRequest, Workload

PACKAGES = ("zipage-lab", "numpy", "simpy", "pyarrow")
COLLECT_EVERY = 100_000  # allocated containers between two collections
__all__ = ["Run", "default_limits", "lengthen", "load_run", "replay"]


def default_limits(
    gpu: Gpu,
    model: ModelSpec,
    policy: Policy,
    block_size: int = 256,
    utilisation: float | None = None,
    may_become: Sequence[Policy] = (),
    **changes: int | None,
) -> SchedulerLimits:
    """Return the limits for a whole GPU: blocks from its memory, positions from the model.

    Args:
        gpu: The GPU.
        model: Shape of the model.
        policy: The policy at the start.
        block_size: Tokens of a block.
        utilisation: Share of the GPU's memory that may be used; by default that of
            `MemorySettings`.
        may_become: Policies that may take over later; the plan reserves the memory that they need.
        **changes: Fields of `SchedulerLimits` that replace the default where they are not None.
            With `num_blocks` the pool is not planned.

    Returns:
        The limits.

    Raises:
        MemoryPlanError: No block fits beside the model.
        SimError: `max_model_len` is beyond the model's positions.
        ConfigError: A policy cannot work in the pool.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    base = SchedulerLimits(num_blocks=1, block_size=block_size, max_model_len=model.max_positions)
    limits = replace(base, **given)
    if limits.max_model_len > model.max_positions:
        raise SimError(
            f"max_model_len {limits.max_model_len} is beyond the {model.max_positions} positions "
            f"of model {model.name}"
        )
    if "num_blocks" in given:
        return limits
    plan = plan_pool(gpu, model, (policy, *may_become), limits, utilisation=utilisation)
    return replace(limits, num_blocks=plan.num_blocks)


def lengthen(workload: Workload, multiplier: float, more_than: int) -> Workload:
    """Return the workload with longer outputs, as a model may produce when tokens are evicted.

    A published example for sparse attention: outputs of 15.1k tokens became 19.8k to 30.0k tokens
    at a budget of 2k (see traces/README).

    Args:
        workload: The requests.
        multiplier: New output length over old output length.
        more_than: Only requests with more than so many tokens (prompt and output) get longer.
    """

    def one(request: TraceRequest) -> TraceRequest:
        output = request.output_tokens
        if output is None or request.prompt_tokens + output <= more_than:
            return request
        longer = round(output * multiplier)
        capped = request.max_tokens if request.max_tokens not in (None, output) else None
        return replace(request, output_tokens=longer, max_tokens=capped)

    note = f"outputs beyond {more_than} tokens x {multiplier}"
    meta = replace(workload.meta, modifications=(*workload.meta.modifications, note))
    return Workload([one(request) for request in workload], meta)


def replay(
    workload: Workload,
    policy: Policy | str = "hybrid",
    gpu: Gpu | str = "h200",
    model: ModelSpec | str = "qwen3-8b",
    limits: SchedulerLimits | None = None,
    cost: CostModel | None = None,
    out: Path | str | None = None,
    length_multiplier: float = 1.0,
    quiet: bool = True,
    progress: Progress | None = None,
    make_scheduler: Callable[..., Scheduler] = Scheduler,
    plan_ahead: bool = False,
    changes: Sequence[Change] = (),
    lengths: Lengths | None = None,
    pretended: str | None = None,
) -> Run:
    """Simulate a workload and return the run. With `out`, the run is also written there as a
    recording.

    The first Ctrl-C takes effect at a step boundary: the recording is readable and marked as
    incomplete, and KeyboardInterrupt is raised. A second one interrupts at once.

    Args:
        workload: The requests, with their arrivals.
        policy: A policy, or its name as on the command line.
        gpu: A row of `zlab.sim.specs.GPUS`, or its name.
        model: A row of `zlab.sim.specs.MODELS`, its name, or the path of a Hugging Face
            config.json.
        limits: Bounds of the pool and of a step; by default those of the whole GPU.
        cost: What a step costs; by default the roofline of the GPU.
        out: An empty or new folder for the recording.
        length_multiplier: Output tokens of requests that get compressed, relative to the workload.
        quiet: Take uneventful steps at once; decisions and times are the same without it.
        progress: Called now and then with (requests ended, requests in all, simulated ns).
        make_scheduler: What creates the scheduler; it takes the arguments of `Scheduler`.
        plan_ahead: Whether a step is planned when the step before it begins
            (`zlab.sim.simulator.Simulation`).
        changes: Policies that take over during the run, in order of their steps. If the run ends
            before a change, the change is not made; `policy_changes` of the manifest lists those
            that were made.
        lengths: Where `length_multiplier` comes from, for the manifest. By default the manifest
            says that it was given, or that nothing is known.
        pretended: Why no such machine can exist (`memory_excess`), for the manifest.

    Returns:
        The run: tables, manifest and summary.

    Raises:
        SimError: The arguments contradict each other.
        PolicyError: The policy cannot be read.
        ConfigError: The policy cannot work in the pool.
    """
    policy = load_policy(policy) if isinstance(policy, str) else policy
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    model = find_model(model) if isinstance(model, str) else model
    check_order(changes)
    plan_ahead = plan_ahead or policy.batching.is_asynchronous
    limits = limits or default_limits(
        gpu, model, policy, may_become=[change.policy for change in changes]
    )
    if length_multiplier != 1.0 and changes:
        raise SimError(
            "a length multiplier is that of one policy: it cannot be given together with "
            "changes of it"
        )
    floor = policy.budget.floor(limits.block_size)
    if length_multiplier != 1.0 and floor is not None:
        workload = lengthen(workload, length_multiplier, floor * limits.block_size)
    cost = cost or roofline(
        gpu, model, window=policy.window(limits.block_size), block_size=limits.block_size
    )
    lengths = lengths or assumed_lengths(policy, limits.block_size, length_multiplier, None)
    manifest = _manifest(workload, policy, gpu, model, limits, cost, length_multiplier) | {
        "plan_ahead": plan_ahead,
        "lengths": lengths.as_dict(),
    }
    if pretended is not None:
        manifest["pretended"] = pretended
    memory = MemoryRecorder(manifest)
    recorder: Recorder = FolderRecorder(Path(out), manifest) if out is not None else memory
    interrupt = AtBoundary()

    def at_boundary(num_ended: int, num_requests: int, now_ns: int) -> None:
        if progress is not None:
            progress(num_ended, num_requests, now_ns)
        interrupt.check()

    simulation = Simulation(
        workload,
        policy,
        limits,
        cost,
        recorder,
        quiet,
        at_boundary,
        make_scheduler,
        plan_ahead,
        changes,
    )
    started = time.perf_counter()
    try:
        with interrupt, seldom_collecting():
            simulation.run()
            interrupt.check()
    except BaseException as error:
        recorder.close(
            complete=False, stopped_by=type(error).__name__, **_results(simulation, started)
        )
        raise
    recorder.close(**_results(simulation, started))
    run = load_run(out) if out is not None else Run(memory)
    recorder.close(summary=run.summary)
    return run


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Let the garbage collector search for reference cycles less often. A run creates few cycles
    but millions of rows that the collector would search.
    """
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _results(simulation: Simulation, started: float) -> dict[str, Any]:
    """Return the manifest entries that are known after the simulation has stopped and has written
    its rows.
    """
    return {
        "digest": simulation.scheduler.digest(),
        "num_steps": simulation.scheduler.next_step,
        "compression_work_s": simulation.compression_ns * 1e-9,
        "swapped_tokens": simulation.swapped_tokens,
        "policy_changes": [change.as_manifest() for change in simulation.policy_changes],
        "wall_s": time.perf_counter() - started,
    }


def _manifest(
    workload: Workload,
    policy: Policy,
    gpu: Gpu,
    model: ModelSpec,
    limits: SchedulerLimits,
    cost: CostModel,
    length_multiplier: float,
) -> dict[str, Any]:
    meta = workload.meta
    run = run_manifest(
        source="sim",
        policy=manifest_entries(policy),
        gpu=gpu.name,
        model=model.name,
        limits=asdict(limits),
        cost=cost.describe(),
        packages=PACKAGES,
        length_multiplier=length_multiplier,
    )
    return run | {
        "workload": {
            "name": meta.name,
            "source": meta.source,  # for a synthetic workload: its recipe and seed
            "num_requests": len(workload),
            "rows": meta.rows(),
            "modifications": list(meta.modifications),
        },
        "workload_sha256": workload.sha256,
    }


DEFAULT_BLOCK_SIZE = 256


@dataclass(frozen=True, slots=True)
class Setup:
    """The objects that a scenario's names stand for."""

    policy: Policy
    gpu: Gpu
    model: ModelSpec
    limits: SchedulerLimits
    cost: CostModel
    changes: tuple[Change, ...]
    lengths: Lengths
    # why no such machine can exist, where one is simulated all the same
    pretended: str | None = None

    def check_blocks(self, workload: Workload) -> None:
        """Raise SimError if the pool's block size and the workload's prefix block size do not fit
        together.
        """
        policies = (self.policy, *(change.policy for change in self.changes))
        check_blocks(workload, self.limits.block_size, policies)


@dataclass(frozen=True)
class Scenario:
    """The choices of one replay, as plain values. None leaves a size to the GPU, to the model, or
    to the default of `SchedulerLimits`.

    The names are looked up once for each object (`set_up`). A copy in another process looks them
    up again.
    """

    policy: str = "hybrid"
    gpu: str = "h200"
    model: str = "qwen3-8b"
    kv_blocks: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE  # tokens
    max_batched_tokens: int | None = None
    max_running: int | None = None
    max_model_len: int | None = None
    host_blocks: int | None = None
    memory_utilisation: float | None = (
        None  # share of the GPU's memory; only where the GPU's memory sets the number of blocks
    )
    length_multiplier: float = 1.0
    length_profile: str | None = None  # path of a profile that `zlab evaluate` wrote
    cost: str | None = None  # name or path of a measured profile; None: the GPU's roofline
    changes: tuple[str, ...] = ()  # each STEP:POLICY, a policy that takes over during the run

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: a class of the user's own may not be picklable."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def set_up(self, pretend: bool = False) -> Setup:
        """Look up all names and check the sizes.

        Args:
            pretend: Whether the pool may be larger than the GPU's memory.

        Raises:
            PolicyError: A policy cannot be read.
            SimError: A name is unknown, or two choices contradict each other.
            ConfigError: A policy cannot work in the pool.
        """
        setup = self._setup
        if setup.pretended is not None and not pretend:
            raise SimError(f"{setup.pretended}; `zlab replay --pretend` simulates it all the same")
        return setup

    @cached_property
    def _setup(self) -> Setup:
        if self.memory_utilisation is not None and self.kv_blocks is not None:
            raise SimError(
                "memory-utilisation decides how many blocks fit: it cannot be given together "
                "with kv-blocks"
            )
        if not 0 < self.length_multiplier < float("inf"):
            raise SimError(
                f"length-multiplier must be a finite number above 0, got {self.length_multiplier!r}"
            )
        policy, gpu, model = load_policy(self.policy), find_gpu(self.gpu), find_model(self.model)
        changes = [read_change(spec) for spec in self.changes]
        check_order(changes)
        limits = default_limits(
            gpu,
            model,
            policy,
            self.block_size,
            self.memory_utilisation,
            [change.policy for change in changes],
            num_blocks=self.kv_blocks,
            max_batched_tokens=self.max_batched_tokens,
            max_running=self.max_running,
            max_model_len=self.max_model_len,
            host_blocks=self.host_blocks,
        )
        for change in changes:
            QuerySlots(change.policy, limits)
        policies = (policy, *(change.policy for change in changes))
        excess = memory_excess(gpu, model, policies, limits) if self.kv_blocks is not None else None
        costed = (replace(change, cost=self._cost(change.policy, gpu, model)) for change in changes)
        if self.length_profile is not None and changes:
            raise SimError(
                f"length-profile {self.length_profile} is looked up for one policy: it cannot be "
                "given together with changes of it"
            )
        multiplier, profile = self.length_multiplier, self.length_profile
        lengths = assumed_lengths(policy, limits.block_size, multiplier, profile)
        cost = self._cost(policy, gpu, model)
        return Setup(policy, gpu, model, limits, cost, tuple(costed), lengths, excess)

    def run(
        self,
        workload: Workload,
        out: Path | str | None = None,
        quiet: bool = True,
        progress: Progress | None = None,
        make_scheduler: Callable[..., Scheduler] = Scheduler,
        pretend: bool = False,
    ) -> Run:
        """Replay the workload, as `zlab.sim.replay.replay` does.

        Args:
            workload: The requests, with their arrivals.
            out: An empty or new folder for the recording.
            quiet: Take uneventful steps at once; decisions and times are the same without it.
            progress: Called now and then with (requests ended, requests in all, simulated ns).
            make_scheduler: What creates the scheduler; it takes the arguments of `Scheduler`.
            pretend: Allow a pool that is larger than the GPU's memory.

        Returns:
            The run.

        Raises:
            PolicyError: A policy cannot be read.
            SimError: A name is unknown, choices contradict each other, or block sizes do not fit.
            ConfigError: A policy cannot work in the pool.
        """
        setup = self.set_up(pretend)
        setup.check_blocks(workload)
        return replay(
            workload,
            setup.policy,
            setup.gpu,
            setup.model,
            setup.limits,
            setup.cost,
            out,
            setup.lengths.multiplier,
            quiet,
            progress,
            make_scheduler,
            # a measured profile was fitted to the engine's loop, which plans ahead
            plan_ahead=self.cost is not None,
            changes=setup.changes,
            lengths=setup.lengths,
            pretended=setup.pretended,
        )

    def _cost(self, policy: Policy, gpu: Gpu, model: ModelSpec) -> CostModel:
        return find_cost(self.cost, policy, gpu, model, self.block_size)


def find_cost(
    name: str | None, policy: Policy, gpu: Gpu, model: ModelSpec, block_size: int
) -> CostModel:
    """Return what steps cost under a policy.

    Args:
        name: Name or path of a measured profile; None selects the roofline of the GPU.
        policy: The policy; its window and budget decide what a compression costs.
        gpu: The GPU.
        model: Shape of the model.
        block_size: Tokens of a block.

    Returns:
        The cost model.

    Raises:
        SimError: The profile does not exist or was measured for another GPU, model, block size or
            window.
    """
    window = policy.window(block_size)
    if name is None:
        return roofline(gpu, model, window=window, block_size=block_size)
    profile = open_profile(name)
    if (profile.gpu, profile.model) != (gpu.name, model.name):
        raise SimError(
            f"profile {name} was measured on {profile.gpu} with {profile.model}, "
            f"not on {gpu.name} with {model.name}"
        )
    check_shape(profile, model)
    measured, wanted = (profile.block_size, profile.window), (block_size, window)
    if policy.budget.floor(block_size) is not None and measured != wanted:
        raise SimError(
            f"profile {name} holds for compressions with blocks of {measured[0]} and a "
            f"window of {measured[1]}"
            f", not for blocks of {wanted[0]} and a window of {wanted[1]}"
        )
    return from_profile(profile)


def memory_excess(
    gpu: Gpu, model: ModelSpec, policies: Sequence[Policy], limits: SchedulerLimits
) -> str | None:
    """Return why a pool does not fit on a GPU even if all of the GPU's memory may be used.

    Args:
        gpu: The GPU.
        model: Shape of the model.
        policies: The policy at the start and all that may take over.
        limits: The pool and the bounds of a step.

    Returns:
        The reason, None if the pool fits.
    """
    try:
        room = plan_pool(gpu, model, policies, limits, utilisation=1.0).num_blocks
    except MemoryPlanError:
        room = 0
    # the policies need more than the pool that fits; the scheduler names the policy later
    except ConfigError:
        settings = MemorySettings(limits.block_size, 1.0, max_model_len=limits.max_model_len)
        room = plan_memory(gpu, model, settings).num_blocks
    if limits.num_blocks <= room:
        return None
    return (
        f"{limits.num_blocks:,} blocks of {limits.block_size} tokens do not fit on one {gpu.name} "
        f"beside {model.name}: {room:,} blocks fit"
    )


DEFAULTS = Scenario()


def check_blocks(workload: Workload, block_size: int, policies: Iterable[Policy]) -> None:
    """Raise SimError if neither of the two block sizes is a multiple of the other.

    The sizes are not checked if no policy of the run shares prefixes.

    Args:
        workload: The requests; `meta.block_size` is the number of tokens that one prefix id covers.
        block_size: Tokens of a block of the pool.
        policies: All policies of the run.
    """
    traced = workload.meta.block_size
    if traced is None or traced % block_size == 0 or block_size % traced == 0:
        return
    if not any(policy.prefix.enabled for policy in policies):
        return
    choices = [str(size) for size in range(traced, 0, -1) if traced % size == 0]
    raise SimError(
        f"blocks of {block_size} tokens and the {traced} prompt tokens that a prefix id of "
        f"{workload.meta.name!r} "
        f"stands for do not divide one another (choices: {', '.join(choices)}, or a multiple of "
        f"{traced})"
    )

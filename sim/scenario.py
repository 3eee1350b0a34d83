"""Everything a run needs besides its workload, as plain values: what a command line names and a sweep varies."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from policies.core.limits import Limits
from policies.core.policy import Policy
from policies.core.scheduler import Scheduler
from policies.core.slot_table import SlotTable
from policies.spec import load_policy
from sim.changing import Change, check_order, read_change
from sim.cost import CostModel, roofline
from sim.errors import SimError
from sim.hardware import Gpu, Model, find_gpu, find_model
from sim.profile import check_shape, from_profile, open_profile
from sim.replay import default_limits, replay
from sim.simulator import Progress
from traces.run import Run
from traces.workload import Workload

DEFAULT_BLOCK_SIZE = 256


@dataclass(frozen=True, slots=True)
class Setup:
    """A scenario's names looked up."""

    policy: Policy
    gpu: Gpu
    model: Model
    limits: Limits
    cost: CostModel
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One point of a sweep. None leaves a size to the card, the model, or the default of `Limits`."""

    policy: str = "hybrid"
    gpu: str = "h200"
    model: str = "qwen3-8b"
    kv_blocks: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE  # tokens
    max_batched_tokens: int | None = None
    max_running: int | None = None
    max_model_len: int | None = None
    host_blocks: int | None = None
    memory_utilisation: float | None = None  # share of the card's memory; only where the card gives the blocks
    length_multiplier: float = 1.0
    cost: str | None = None  # name or path of a measured profile; None: the card's roofline
    changes: tuple[str, ...] = ()  # STEP:POLICY each: policies that take over in the middle

    def set_up(self) -> Setup:
        """Look every name up and check the sizes. Raises PolicyError, SimError, ConfigError."""
        if self.memory_utilisation is not None and self.kv_blocks is not None:
            raise SimError("memory-utilisation decides how many blocks fit: it cannot be given together with kv-blocks")
        if not 0 < self.length_multiplier < float("inf"):
            raise SimError(f"length-multiplier must be a finite number above 0, got {self.length_multiplier!r}")
        policy, gpu, model = load_policy(self.policy), find_gpu(self.gpu), find_model(self.model)
        changes = [read_change(spec) for spec in self.changes]
        check_order(changes)
        limits = min(
            (self._limits(one, gpu, model) for one in (policy, *(change.policy for change in changes))),
            key=lambda one: one.num_blocks,
        )
        for change in changes:
            SlotTable(change.policy, limits)
        costed = (replace(change, cost=self._cost(change.policy, gpu, model)) for change in changes)
        return Setup(policy, gpu, model, limits, self._cost(policy, gpu, model), tuple(costed))

    def _limits(self, policy: Policy, gpu: Gpu, model: Model) -> Limits:
        return default_limits(
            gpu,
            model,
            policy,
            self.block_size,
            self.memory_utilisation,
            num_blocks=self.kv_blocks,
            max_batched_tokens=self.max_batched_tokens,
            max_running=self.max_running,
            max_model_len=self.max_model_len,
            host_blocks=self.host_blocks,
        )

    def run(
        self,
        workload: Workload,
        out: Path | str | None = None,
        quiet: bool = True,
        progress: Progress | None = None,
        make_scheduler: Callable[..., Scheduler] = Scheduler,
    ) -> Run:
        """Replay the workload, as `sim.replay.replay` does. Raises what `set_up` and `check_blocks` raise."""
        setup = self.set_up()
        check_blocks(workload, self.block_size)
        return replay(
            workload,
            setup.policy,
            setup.gpu,
            setup.model,
            setup.limits,
            setup.cost,
            out,
            self.length_multiplier,
            quiet,
            progress,
            make_scheduler,
            plan_ahead=self.cost is not None,  # as the loop that was measured does
            changes=setup.changes,
        )

    def _cost(self, policy: Policy, gpu: Gpu, model: Model) -> CostModel:
        window = policy.compression.window
        if self.cost is None:
            return roofline(gpu, model, window=window, block_size=self.block_size)
        profile = open_profile(self.cost)
        if (profile.gpu, profile.model) != (gpu.name, model.name):
            raise SimError(
                f"profile {self.cost} was measured on {profile.gpu} with {profile.model}, "
                f"not on {gpu.name} with {model.name}"
            )
        check_shape(profile, model)
        measured, wanted = (profile.block_size, profile.window), (self.block_size, window)
        if policy.budget.floor(self.block_size) is not None and measured != wanted:
            raise SimError(
                f"profile {self.cost} holds for compressions with blocks of {measured[0]} and a window of {measured[1]}"
                f", not for blocks of {wanted[0]} and a window of {wanted[1]}"
            )
        return from_profile(profile)


DEFAULTS = Scenario()


def check_blocks(workload: Workload, block_size: int) -> None:
    """Raise SimError when neither the pool's blocks nor those of the workload's prefix ids divide the other."""
    traced = workload.meta.block_size
    if traced is None or traced % block_size == 0 or block_size % traced == 0:
        return
    choices = [str(size) for size in range(traced, 0, -1) if traced % size == 0]
    raise SimError(
        f"blocks of {block_size} tokens and the {traced} prompt tokens that a prefix id of {workload.meta.name!r} "
        f"stands for do not divide one another (choices: {', '.join(choices)}, or a multiple of {traced})"
    )

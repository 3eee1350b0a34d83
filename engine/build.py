"""From settings to an engine that runs: model, cache, scheduler, runner and loop put together."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from engine.cache import CacheShape, PagedCache, blocks_that_fit
from engine.compressing import CompressionStream, settings_for
from engine.errors import EngineError, nearest
from engine.kernels.choice import find_kernels
from engine.kernels.contract import Kernels
from engine.kernels.decode_plan import decode_workspace_bytes
from engine.kernels.workspace import CompressionShape, CompressionWorkspace
from engine.loading import LoadedModel, default_dtype, load_model
from engine.loop import EngineLoop
from engine.reserved import Reserved
from engine.runner import Runner
from engine.sampling import StepSampler
from engine.swapping import HostSwap
from policies.core.events import Sink
from policies.core.limits import Limits
from policies.core.policy import Policy
from policies.core.scheduler import Scheduler
from policies.spec import load_policy
from policies.steplog import StepLog

MEMORY_SHARE = 0.9
GRAPH_RESERVE_BYTES = 2 << 30
HOST_CACHE_BYTES = 1 << 30  # for keys and values where the model runs on the CPU
MOST_COMPRESSED_AT_ONCE = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class EngineSettings:
    """How an engine is set up; what is None is chosen for the device.

    Attributes:
        model: as `engine.loading.load_model` names it.
        policy: a policy, or how a command line names one.
        may_become: policies that may take over while the engine runs (`EngineLoop.replace_policy`): memory that they
            need is set aside at the start.
        num_blocks: blocks of the cache; by default all that `memory_share` of the device's memory holds (if None,
            `MEMORY_SHARE`), on the CPU, where there is no such share, what `HOST_CACHE_BYTES` hold.
        device, dtype, variant: where and how the model runs.
        host_blocks: blocks of host memory for swapped requests, all of it taken (on CUDA pinned) at the start.
        kernels: "torch" or "triton"; by default Triton on CUDA.
        use_graphs: decode steps as CUDA graphs; by default on CUDA.
        overlap: plan a step while the one before still runs, where that is safe; by default on CUDA: elsewhere a step
            has run when it has been enqueued, and would only be seen to end late.
        seed: of requests that bring none.
    """

    model: str = "smollm2"
    policy: Policy | str = "hybrid"
    may_become: tuple[Policy | str, ...] = ()
    num_blocks: int | None = None
    block_size: int = 256
    max_batched_tokens: int = 8192
    max_running: int = 256
    max_model_len: int | None = None
    host_blocks: int = 0
    memory_share: float | None = None
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: torch.dtype | str | None = None
    variant: str | None = None
    kernels: str | None = None
    use_graphs: bool | None = None
    overlap: bool | None = None
    seed: int = 0


@dataclass
class Engine:
    """All parts of a running engine."""

    settings: EngineSettings
    loaded: LoadedModel
    limits: Limits
    cache: PagedCache
    scheduler: Scheduler
    sampler: StepSampler
    compression: CompressionStream | None
    runner: Runner
    uses_graphs: bool
    loop: EngineLoop
    steps: StepLog

    @property
    def policy(self) -> Policy:
        """The policy that decides now."""
        return self.scheduler.state.policy


def build_engine(
    settings: EngineSettings,
    loaded: LoadedModel | None = None,
    sink: Sink | None = None,
    prefix_block_size: int | None = None,
    clock: Callable[[], int] = time.perf_counter_ns,
    make_sampler: Callable[..., StepSampler] = StepSampler,
) -> Engine:
    """Load the model (unless it is given), reserve the cache, warm everything up.

    `clock` counts nanoseconds; `make_sampler` takes what `StepSampler` takes.

    Raises EngineError, ModelError, PolicyError or ConfigError with what does not fit together.
    """
    policies = _policies(settings)
    device = find_device(settings.device)
    dtype = find_dtype(settings.dtype) or default_dtype(device)
    loaded = loaded or load_model(settings.model, device=device, dtype=dtype, variant=settings.variant)
    limits = _limits(settings, loaded, policies, dtype, device)
    scheduler = Scheduler(policies[0], limits, sink, prefix_block_size=prefix_block_size)
    reserved = Reserved.of(policies, limits)
    cache = PagedCache(_shape(loaded, policies, limits, reserved.num_slots), dtype, device)
    kernels = find_kernels(device, settings.kernels)
    compression = _compression(cache, kernels, policies, limits, settings.seed)
    decoding = scheduler.state.decoding
    sampler = make_sampler(
        loaded.config.vocab_size,
        device,
        lambda number: decoding.tokens(scheduler.state.requests[number])[1],
        max_penalised=limits.max_running,
        engine_seed=settings.seed,
    )
    graphs = device.type == "cuda" if settings.use_graphs is None else settings.use_graphs
    if graphs and device.type != "cuda":
        raise EngineError(f"CUDA graphs need a CUDA device, not {settings.device!r}")
    runner = Runner(loaded.model, cache, kernels, compression, sampler, scheduler, reserved, graphs)
    steps = StepLog(scheduler)
    overlaps = device.type == "cuda" if settings.overlap is None else settings.overlap
    loop = EngineLoop(scheduler, runner, sampler, steps, overlap=overlaps, clock=clock)
    return Engine(settings, loaded, limits, cache, scheduler, sampler, compression, runner, graphs, loop, steps)


def pool_blocks(settings: EngineSettings, loaded: LoadedModel, num_engines: int = 1) -> int:
    """Blocks there are for `num_engines` engines on one loaded model together; each needs its own working memory."""
    device = find_device(settings.device)
    dtype = find_dtype(settings.dtype) or default_dtype(device)
    return _limits(settings, loaded, _policies(settings), dtype, device, num_engines).num_blocks


def _policies(settings: EngineSettings) -> list[Policy]:
    """The policy to begin with, then those that it may become."""
    named = (settings.policy, *settings.may_become)
    return [load_policy(policy) if isinstance(policy, str) else policy for policy in named]


def _compression(
    cache: PagedCache, kernels: Kernels, policies: Sequence[Policy], limits: Limits, seed: int
) -> CompressionStream | None:
    """What compresses under any of the policies, following the first; None where none of them ever does."""
    size = limits.block_size
    floor = _largest_budget(policies, size)
    if floor is None:
        return None
    workspace = _workspace(cache.shape, limits, floor, cache.k.device)
    stream = CompressionStream(cache, kernels, settings_for(policies[0].compression, size, seed), workspace)
    for policy in policies:
        budget = policy.budget.floor(size)
        if budget is not None:
            stream.prepare(settings_for(policy.compression, size, seed), budget)
    return stream


def _largest_budget(policies: Sequence[Policy], block_size: int) -> int | None:
    """The largest of the least budgets, in blocks; None where no policy has one."""
    floors = (policy.budget.floor(block_size) for policy in policies)
    return max((floor for floor in floors if floor is not None), default=None)


def find_dtype(name: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype of that name. Raises EngineError with the choices."""
    if name is None or isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise EngineError(f"unknown dtype {name!r}{nearest(name, DTYPES)} (choices: {', '.join(DTYPES)})")
    return DTYPES[name]


def find_device(name: str) -> torch.device:
    """The device of that name, if it is there. Raises EngineError with the choices."""
    there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if name not in (*there, "cuda") or (name == "cuda" and len(there) == 1):
        raise EngineError(f"no device {name!r} here (choices: {', '.join(there)})")
    return torch.device(name)


def _limits(
    settings: EngineSettings,
    loaded: LoadedModel,
    policies: Sequence[Policy],
    dtype: torch.dtype,
    device: torch.device,
    num_engines: int = 1,
) -> Limits:
    most = loaded.config.max_positions
    length = settings.max_model_len or most
    if length > most:
        raise EngineError(f"max_model_len {length} is more than the {most} positions of {loaded.config.name}")
    limits = Limits(
        num_blocks=2 if settings.num_blocks is None else settings.num_blocks,
        block_size=settings.block_size,
        max_batched_tokens=settings.max_batched_tokens,
        max_running=settings.max_running,
        max_model_len=length,
        host_blocks=settings.host_blocks,
    )
    if settings.num_blocks is not None:
        return limits
    floor = _largest_budget(policies, limits.block_size)
    shape = _shape(loaded, policies, limits, 0 if floor is None else 1)
    if device.type != "cuda":
        if settings.memory_share is not None:
            raise EngineError(
                f"a share of memory ({settings.memory_share:g}) is taken of a GPU's, and this is {device}"
            )
        return replace(limits, num_blocks=blocks_that_fit(replace(shape, num_slots=0), dtype, HOST_CACHE_BYTES, 0))
    free, total = torch.cuda.mem_get_info(device)
    share = MEMORY_SHARE if settings.memory_share is None else settings.memory_share
    usable = free - int(total * (1.0 - share))
    width = loaded.config.hidden_size + loaded.config.intermediate_size
    activations = 8 * limits.max_batched_tokens * width * dtype.itemsize
    logits = 8 * limits.max_running * loaded.config.vocab_size
    workspace = _workspace_bytes(shape, limits, floor) if floor is not None else 0
    swapping = HostSwap.device_bytes(shape, dtype, limits.host_blocks)
    splits = decode_workspace_bytes(length, limits.max_running + 1, shape.num_query_heads, shape.head_dim)
    reserved = num_engines * (GRAPH_RESERVE_BYTES + activations + logits + workspace + swapping + splits)
    largest = replace(limits, num_blocks=blocks_that_fit(shape, dtype, usable, reserved))
    slots = Reserved.of(policies, largest).num_slots  # the pool without them is larger, and has no fewer
    return replace(limits, num_blocks=blocks_that_fit(replace(shape, num_slots=slots), dtype, usable, reserved))


def _shape(loaded: LoadedModel, policies: Sequence[Policy], limits: Limits, slots: int) -> CacheShape:
    window = min(max(policy.compression.window for policy in policies), limits.block_size)
    return CacheShape.of(
        loaded.model.part, num_blocks=limits.num_blocks, block_size=limits.block_size, num_slots=slots, window=window
    )


def _capacity(limits: Limits, floor: int) -> int:
    """Blocks that compressions need at once: the longest request there can be, or several at their budget."""
    longest = min(limits.num_blocks, -(-limits.max_model_len // limits.block_size) + 1)
    return max(longest, min(MOST_COMPRESSED_AT_ONCE * (floor + 1), limits.num_blocks))


def _compression_shape(shape: CacheShape) -> CompressionShape:
    group = shape.num_query_heads // shape.num_kv_heads
    return CompressionShape(shape.num_layers, shape.num_kv_heads, group, shape.window, shape.block_size)


def _workspace_bytes(shape: CacheShape, limits: Limits, floor: int) -> int:
    """What a workspace takes at most, however many blocks there come to be."""
    unbounded = replace(limits, num_blocks=sys.maxsize)
    return CompressionWorkspace.bytes_needed(
        _compression_shape(shape), capacity_blocks=_capacity(unbounded, floor), max_requests=MOST_COMPRESSED_AT_ONCE
    )


def _workspace(shape: CacheShape, limits: Limits, floor: int, device: torch.device) -> CompressionWorkspace:
    return CompressionWorkspace(
        _compression_shape(shape),
        capacity_blocks=_capacity(limits, floor),
        max_requests=MOST_COMPRESSED_AT_ONCE,
        device=device,
    )


def synthetic_prompt(seed: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Token ids for a request of which only the length is known."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()

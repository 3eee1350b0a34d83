"""Replay a workload in simulation: one call from workload, policy, GPU and model to a run that can be looked at."""

import gc
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from policies.core.limits import Limits
from policies.core.policy import Policy
from policies.core.scheduler import Scheduler
from policies.record import names
from policies.spec import load_policy, policy_digest, policy_to_toml
from sim.changing import Change, check_order
from sim.cost import CostModel, roofline
from sim.errors import SimError
from sim.hardware import Gpu, Model, find_gpu, find_model
from sim.interrupt import AtBoundary
from sim.memory import MemorySettings, plan_memory
from sim.simulator import Progress, Simulation
from traces.recording import FolderRecorder, MemoryRecorder, Recorder
from traces.run import Run, load_run
from traces.workload import TraceRequest, Workload

COLLECT_EVERY = 100_000  # new containers
__all__ = ["Run", "default_limits", "lengthen", "load_run", "replay"]


def default_limits(
    gpu: Gpu,
    model: Model,
    policy: Policy,
    block_size: int = 256,
    utilisation: float | None = None,
    **changes: int | None,
) -> Limits:
    """Limits of a whole card: blocks from its memory, positions from the model; `changes` other than None replace them.

    `utilisation` is the share of the card's memory that counts, by default that of `MemorySettings`. Raises
    MemoryPlanError when the model leaves no room for a block, SimError beyond the model's positions.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    base = Limits(num_blocks=1, block_size=block_size, max_model_len=model.max_positions)
    limits = replace(base, **{name: value for name, value in given.items() if name != "num_blocks"})
    if limits.max_model_len > model.max_positions:
        raise SimError(
            f"max_model_len {limits.max_model_len} is beyond the {model.max_positions} positions of model {model.name}"
        )
    if "num_blocks" not in given:
        floor = policy.budget.floor(block_size)
        settings = MemorySettings(
            block_size=block_size,
            max_batched_tokens=limits.max_batched_tokens,
            max_running=limits.max_running,
            max_model_len=limits.max_model_len,
        )
        if utilisation is not None:
            settings = replace(settings, utilisation=utilisation)
        if floor is not None:
            slots = getattr(policy.slots, "num_slots", 0) or limits.max_running
            settings = replace(settings, num_slots=slots, window=policy.compression.window, budget_blocks=floor)
        given["num_blocks"] = plan_memory(gpu, model, settings).num_blocks
    return replace(limits, num_blocks=given["num_blocks"])


def lengthen(workload: Workload, multiplier: float, more_than: int) -> Workload:
    """Outputs of requests with more than `more_than` tokens in all, longer by a factor: what lossy KV may cost.

    Published for sparse attention: outputs of 15.1k tokens became 19.8k to 30.0k at a 2k budget (traces README).
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
    model: Model | str = "qwen3-8b",
    limits: Limits | None = None,
    cost: CostModel | None = None,
    out: Path | str | None = None,
    length_multiplier: float = 1.0,
    quiet: bool = True,
    progress: Progress | None = None,
    make_scheduler: Callable[..., Scheduler] = Scheduler,
    plan_ahead: bool = False,
    changes: Sequence[Change] = (),
) -> Run:
    """Simulate a workload and return the run; with `out` it is also written there as a recording.

    Args:
        workload: what arrives when.
        policy: a policy, or how a command line names one.
        gpu: row of `sim.hardware.GPUS`, or its name.
        model: row of `sim.hardware.MODELS`, its name, or the path of a Hugging Face config.json.
        limits: pool and step bounds; by default those of the whole card.
        cost: what a step costs; by default the roofline of the card.
        out: an empty or new folder.
        length_multiplier: output of requests that get compressed, relative to what the workload says.
        quiet: take stretches without a decision at once (the decisions and times are the same without).
        progress: called now and then with (requests ended, requests in all, simulated ns).
        make_scheduler: takes what `Scheduler` takes; another one may look on while it decides.
        plan_ahead: a step is planned when the one before begins (`sim.simulator.Simulation`).
        changes: policies that take over in the middle, in order of their steps; the manifest's `policy_changes` says
            which did (a run may end before).

    Ctrl-C is taken at a step boundary, leaves a readable recording marked as incomplete and is raised; a second one
    does not wait.
    """
    policy = load_policy(policy) if isinstance(policy, str) else policy
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    model = find_model(model) if isinstance(model, str) else model
    check_order(changes)
    limits = limits or min(
        (default_limits(gpu, model, one) for one in (policy, *(change.policy for change in changes))),
        key=lambda one: one.num_blocks,
    )
    if length_multiplier != 1.0 and changes:
        raise SimError("a length multiplier is that of one policy: it cannot be given together with changes of it")
    floor = policy.budget.floor(limits.block_size)
    if length_multiplier != 1.0 and floor is not None:
        workload = lengthen(workload, length_multiplier, floor * limits.block_size)
    cost = cost or roofline(gpu, model, window=policy.compression.window, block_size=limits.block_size)
    manifest = _manifest(workload, policy, gpu, model, limits, cost, length_multiplier) | {"plan_ahead": plan_ahead}
    memory = MemoryRecorder(manifest)
    recorder: Recorder = FolderRecorder(Path(out), manifest) if out is not None else memory
    interrupt = AtBoundary()

    def at_boundary(num_ended: int, num_requests: int, now_ns: int) -> None:
        if progress is not None:
            progress(num_ended, num_requests, now_ns)
        interrupt.check()

    simulation = Simulation(
        workload, policy, limits, cost, recorder, quiet, at_boundary, make_scheduler, plan_ahead, changes
    )
    started = time.perf_counter()
    try:
        with interrupt, seldom_collecting():
            simulation.run()
            interrupt.check()
    except BaseException as error:
        recorder.close(complete=False, stopped_by=type(error).__name__, **_results(simulation, started))
        raise
    recorder.close(**_results(simulation, started))
    run = load_run(out) if out is not None else Run(memory)
    recorder.close(summary=run.summary)
    return run


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Look for reference cycles less often: a run makes few, and rows by the million to search through."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _results(simulation: Simulation, started: float) -> dict[str, Any]:
    """What is known once the simulation has stopped (and has flushed what it had)."""
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
    model: Model,
    limits: Limits,
    cost: CostModel,
    length_multiplier: float,
) -> dict[str, Any]:
    meta = workload.meta
    return {
        "source": "sim",
        "policy": policy.name,
        "policy_toml": policy_to_toml(policy),
        "policy_digest": policy_digest(policy),
        "workload": {
            "name": meta.name,
            "source": meta.source,  # of a synthetic workload its recipe and seed
            "num_requests": len(workload),
            "modifications": list(meta.modifications),
        },
        "workload_sha256": workload.sha256,
        "gpu": gpu.name,
        "model": model.name,
        "limits": asdict(limits),
        "num_blocks": limits.num_blocks,
        "block_size": limits.block_size,
        "cost": cost.describe(),
        "length_multiplier": length_multiplier,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {name: _version(name) for name in ("zipage-lab", "numpy", "simpy", "pyarrow")}
        | {"python": platform.python_version()},
        **names(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

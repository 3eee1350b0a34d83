"""Measure on a GPU what the simulator is to be judged by: `python -m benchmarks.validate_simulator --out FOLDER`.

One call, one process, as many minutes as it is given: calibrate (`engine.calibrate`), then run workloads that the fit
never sees, and record them: W1, W2, W4 (all at once), ten minutes of Azure's conversations and of Mooncake's (at their
times), each under full-kv, hybrid and one without asynchronous compression; a grid of (policy, budget, pool) on one
small workload for the ranking; one point of it twice, to see how far the engine repeats itself. A run that takes longer
than its share of the time is cut, and its recording says so: the simulator is then compared over as many steps.

FOLDER receives five files or a few more: `measurements.json`, the profile (fitted there; numpy is enough), `runs.json`,
and the recordings as `recordings.tar.gz.0`, `.1`, ... of at most 15 MiB. `python -m benchmarks.judge_simulator FOLDER`
judges them elsewhere.

The shared workloads and traces are looked for beside the checkout, and in `.carry/shared` inside it.
"""

import argparse
import io
import json
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.engine_gpu import header, shared
from engine.build import EngineSettings
from engine.calibrate import CalibrationSettings, measure
from engine.calibrate_stage import free_memory
from engine.loading import LoadedModel, load_model
from engine.replay import ReplaySettings, replay
from sim.fitting import fit
from sim.measurements import MeasurementError, parse_measurements
from sim.profile import save_profile
from traces.formats import read_trace
from traces.reshape import cut, faster, longer
from traces.workload import TraceRequest, Workload, WorkloadMeta

PARTS = ("calibrate", "closed", "timed", "grid")
CLOSED = ("W1", "W2", "W4")
POLICIES = ("full-kv", "hybrid", "hybrid:join=blocking")
SLICE_S = 600.0
PACKING_S = 15.0  # and for a run that is cut a little late
PIECE_BYTES = 15 << 20
LEAST_S = 2.0  # less time than this and a run is left out
CALIBRATION_SHARE = 0.42  # of the time, at most


@dataclass(frozen=True)
class Size:
    """How large everything is; the defaults are for Qwen3-8B on one H200."""

    block_size: int = 256
    pool_blocks: int = 512
    max_running: int = 256
    max_batched_tokens: int = 16384
    first: int | None = None  # only so many requests of each workload
    grid_requests: int = 64
    grid_pools: tuple[int, ...] = (96, 144, 224)
    grid_budgets: tuple[int, ...] = (512, 1024)


@dataclass(frozen=True)
class Point:
    """One run to make."""

    name: str
    workload: Callable[[], Workload]
    policy: str
    pool_blocks: int
    at_once: bool
    weight: float = 1.0


class _CutError(Exception):
    """The run has had its share of the time."""


def small(workload: Workload, size: Size) -> Workload:
    """For machines without a GPU: outputs in proportion to the blocks, and only the first requests."""
    if size.block_size < 256 and all(request.output_ids is None for request in workload):
        workload = longer(workload, output=size.block_size / 256)
    return cut(workload, first=size.first) if size.first is not None else workload


def grid_workload(size: Size) -> Workload:
    """Requests whose outputs are lognormal around 2.3 blocks, all at once: enough to want two pools."""
    generator = np.random.default_rng(6)
    outputs = generator.lognormal(np.log(2.0 * size.block_size), 0.6, size.grid_requests)
    requests = [
        TraceRequest(
            id=str(place),
            prompt_tokens=size.block_size // 2,
            output_tokens=max(int(tokens), 2),
            max_tokens=max(int(tokens), 2),
        )
        for place, tokens in enumerate(outputs)
    ]
    return Workload(requests, WorkloadMeta(name="grid", source="benchmarks.validate_simulator, seed 6"))


def points(parts: tuple[str, ...], size: Size) -> Iterator[Point]:
    """Every run, the most wanted first."""
    if "closed" in parts:
        for name in CLOSED:
            for policy in POLICIES:

                def closed(name: str = name) -> Workload:
                    return small(read_trace(shared("workloads", f"{name}.jsonl")), size)

                yield Point(f"{name}-{_plain(policy)}", closed, policy, size.pool_blocks, True, 2.0)
    if "timed" in parts:
        for name, file, speed in (
            ("azure", "AzureLLMInferenceTrace_conv.csv", 1.0),
            ("mooncake", "mooncake_conversation_trace.jsonl", 0.25),  # as it is, one card cannot keep up with it
        ):
            for policy in POLICIES:

                def timed(file: str = file, speed: float = speed) -> Workload:
                    slice_ = cut(read_trace(shared("traces", file)), 0.0, SLICE_S * speed)
                    return small(slice_ if speed == 1.0 else faster(slice_, speed), size)

                yield Point(f"{name}-{_plain(policy)}", timed, policy, size.pool_blocks, False, 2.0)
    if "grid" in parts:
        policies = ["full-kv", f"constrained:budget.tokens={size.grid_budgets[0]}"]
        policies += [f"hybrid:budget.tokens={budget}" for budget in size.grid_budgets]
        for pool in size.grid_pools:
            for policy in policies:
                yield Point(f"grid-{pool}-{_plain(policy)}", lambda: grid_workload(size), policy, pool, True)
        again = (lambda: grid_workload(size), policies[0], size.grid_pools[0], True)
        yield Point(f"repeat-{size.grid_pools[0]}-{_plain(policies[0])}", *again)


def _plain(policy: str) -> str:
    return policy.replace(":", "-").replace("=", "-").replace("budget.tokens-", "")


def run_point(
    point: Point, settings: EngineSettings, loaded: LoadedModel, size: Size, seconds: float, folder: Path
) -> dict[str, Any]:
    """Make one run, cut once `seconds` are over, set-up included."""
    began = time.perf_counter()
    chosen = replace(settings, policy=point.policy, num_blocks=point.pool_blocks)

    def watch(num_ended: int, num_requests: int, now_ns: int) -> None:
        if time.perf_counter() - began > seconds:
            raise _CutError

    row = {"run": point.name, "policy": point.policy, "pool_blocks": point.pool_blocks, "complete": True}
    how = ReplaySettings(at_once=point.at_once)
    try:
        replay(point.workload(), chosen, how, loaded=loaded, out=folder, progress=watch)
    except _CutError:
        row["complete"] = False
    except (RuntimeError, ValueError) as error:  # out of memory, a policy that does not fit: the others go on
        row |= {"complete": False, "error": f"{type(error).__name__}: {error}"}
    free_memory()
    row["wall_s"] = round(time.perf_counter() - began, 2)
    print(row, flush=True)
    return row


def calibration(options: argparse.Namespace, loaded: LoadedModel, size: Size, seconds: float) -> None:
    """Measure, keep what was measured, and fit it."""
    settings = CalibrationSettings(
        model=options.model,
        device=options.device,
        block_size=size.block_size,
        max_running=size.max_running,
        num_blocks=options.kv_blocks,
        quick=options.quick,
        limit_s=seconds,
    )
    document = measure(settings, loaded)
    (options.out / "measurements.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    print({"calibrated_s": round(document["wall_s"], 1), "skipped": document["skipped"]}, flush=True)
    try:
        profile = fit(parse_measurements(document))
    except MeasurementError as error:  # the recordings are worth having all the same
        print({"not fitted": str(error)}, flush=True)
        return
    save_profile(profile, options.out)
    print({part: round(error.mean_relative, 4) for part, error in profile.held_out_error.items()}, flush=True)


def pack(folder: Path, out: Path) -> list[str]:
    """The recordings as one compressed archive in pieces; their names."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder, arcname="recordings")
    data = buffer.getvalue()
    names = []
    for number, start in enumerate(range(0, len(data), PIECE_BYTES)):
        names.append(f"recordings.tar.gz.{number}")
        (out / names[-1]).write_bytes(data[start : start + PIECE_BYTES])
    return names


def main() -> None:
    """Measure and write."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="an empty or new folder")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything, loading and packing included")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--model", default="dummy:qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a smaller calibration")
    parser.add_argument("--kv-blocks", type=int, help="of the calibration's pool")
    for name in ("block_size", "pool_blocks", "max_running", "max_batched_tokens", "first", "grid_requests"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Size, name))
    options = parser.parse_args()
    parts = tuple(options.parts.split(","))
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}: choices are {','.join(PARTS)}")
    scale = options.block_size / 256
    size = Size(
        **{name: getattr(options, name) for name in ("block_size", "pool_blocks", "max_running", "first")},
        max_batched_tokens=options.max_batched_tokens,
        grid_requests=options.grid_requests,
        grid_budgets=tuple(round(budget * scale) for budget in Size.grid_budgets),
        grid_pools=tuple(max(pool * options.grid_requests // Size.grid_requests, 8) for pool in Size.grid_pools),
    )
    deadline = began + 60.0 * options.minutes - PACKING_S
    options.out.mkdir(parents=True, exist_ok=True)
    if any(options.out.iterdir()):
        parser.error(f"--out {options.out}: is not empty")
    with TemporaryDirectory() as elsewhere:  # a folder that comes back whole may hold few files
        measure_all(options, parts, size, deadline, Path(elsewhere) / "recordings")


def measure_all(
    options: argparse.Namespace, parts: tuple[str, ...], size: Size, deadline: float, recordings: Path
) -> None:
    """Everything that was asked for, each run with its share of the time that is left."""
    out: Path = options.out
    recordings.mkdir()
    loaded = load_model(options.model, device=options.device)
    settings = EngineSettings(
        model=options.model,
        device=options.device,
        block_size=size.block_size,
        max_batched_tokens=size.max_batched_tokens,
        max_running=size.max_running,
        overlap=options.device != "cpu",
    )
    if "calibrate" in parts:
        share = CALIBRATION_SHARE if len(parts) > 1 else 1.0
        calibration(options, loaded, size, share * (deadline - time.perf_counter()))
        free_memory()
    wanted = list(points(parts, size))
    rows: list[dict[str, Any]] = []
    for place, point in enumerate(wanted):
        left = deadline - time.perf_counter()
        share = left * point.weight / sum(other.weight for other in wanted[place:])
        if share < LEAST_S:
            rows.append({"run": point.name, "skipped": f"{share:.1f} s were left for it"})
            continue
        rows.append(run_point(point, settings, loaded, size, share, recordings / point.name))
    about = header() | {"command": {name: str(value) for name, value in vars(options).items()}, "size": asdict(size)}
    (out / "runs.json").write_text(json.dumps(about | {"runs": rows}, indent=1) + "\n", "utf-8")
    print(pack(recordings, out), flush=True)


if __name__ == "__main__":
    main()

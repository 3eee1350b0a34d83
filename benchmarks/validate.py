"""Make recordings on a GPU to judge the simulator by: `python -m benchmarks.validate --out FOLDER`.

One call, one process, as many minutes as `--minutes` gives:

* calibrate (`zlab.engine.calibration`), unless `--skip calibrate`;
* run workloads that the fit never sees and record them: W1, W2, W4 (all requests at once), ten
  minutes of Azure's conversations and of Mooncake's (at their times), each under full-kv, hybrid
  and hybrid without asynchronous compression;
* run a grid of (policy, budget, pool) on one small workload for the ranking, and one point of it
  twice, to see how far the engine repeats itself;
* part `more`, only on request: W1, W2 and W4 at a budget of 1,024 and with swapping.

A run that takes longer than its share of the time is cut and its recording says so. The simulator
is then compared over as many steps. `--only` and `--skip` choose among the runs (`--list` names
them), so several calls, or processes with a GPU each, can share the work, each into its own folder.

FOLDER receives `measurements.json` and the profile where it calibrated, `runs.json`, and the
recordings as `recordings.tar.gz.0`, `.1`, ... of at most 15 MiB. `python -m benchmarks.judge
FOLDER...` judges them on any machine.
"""

import argparse
import io
import json
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.engine import Compilations, header
from benchmarks.run_figures import figures_of, plain, rounded, shared
from zlab.engine.calibration import CalibrationSettings, free_memory, measure
from zlab.engine.engine import EngineSettings
from zlab.engine.model.loader import LoadedModel, load_model
from zlab.engine.replay import ReplaySettings, replay
from zlab.sim.fitting import fit
from zlab.sim.profiles import MeasurementError, parse_measurements, save_profile
from zlab.sim.specs import SimError
from zlab.traces.formats import read_trace
from zlab.traces.recording import RecordingError
from zlab.traces.transform import cut, faster, longer
from zlab.traces.workload import TraceRequest, Workload, WorkloadMeta

CALIBRATE = "calibrate"  # it is chosen by name, as a run
PARTS = (CALIBRATE, "closed", "timed", "grid")  # by default
ALL_PARTS = (*PARTS, "more")
CLOSED = ("W1", "W2", "W4")
POLICIES = ("full-kv", "hybrid", "hybrid:join=blocking")
SWAP = "hybrid:comes_back=swap"
SLICE_S = 600.0


@dataclass(frozen=True)
class Size:
    """The sizes of the runs; the defaults are for Qwen3-8B on one H200."""

    block_size: int = 256
    pool_blocks: int = 512
    host_blocks: int = 256  # of the runs that swap
    max_running: int = 256
    max_batched_tokens: int = 16384
    first: int | None = None  # only so many requests of each workload
    small_budget: int = 1024
    grid_requests: int = 64
    grid_pools: tuple[int, ...] = (48, 72, 112)
    grid_budgets: tuple[int, ...] = (256, 512)


@dataclass(frozen=True)
class Point:
    """One run to make."""

    name: str
    workload: Callable[[], Workload]
    policy: str
    pool_blocks: int
    at_once: bool
    weight: float = 1.0
    host_blocks: int = 0


def small(workload: Workload, size: Size) -> Workload:
    """Shrink a workload for a machine without a GPU: outputs in proportion to the block size."""
    if size.block_size < 256 and all(request.output_ids is None for request in workload):
        workload = longer(workload, output=size.block_size / 256)
    return cut(workload, first=size.first) if size.first is not None else workload


def grid_workload(size: Size) -> Workload:
    """Return requests with lognormal outputs around 2.5 blocks, all at once.

    With these pools and budgets no two points of the grid are closer than 3 % of tokens/s in
    simulation, so their order is not a matter of chance. The engine needs two minutes for all.
    """
    generator = np.random.default_rng(6)
    outputs = generator.lognormal(np.log(2.5 * size.block_size), 0.4, size.grid_requests)
    requests = [
        TraceRequest(
            id=str(place),
            prompt_tokens=size.block_size // 2,
            output_tokens=max(int(tokens), 2),
            max_tokens=max(int(tokens), 2),
        )
        for place, tokens in enumerate(outputs)
    ]
    return Workload(requests, WorkloadMeta(name="grid", source="benchmarks.validate, seed 6"))


def points(parts: Sequence[str], size: Size) -> Iterator[Point]:
    """Yield every run of the parts, the most important first."""
    if "closed" in parts:
        for name in CLOSED:
            for policy in POLICIES:
                yield _closed(name, policy, size)
    if "more" in parts:
        for name in CLOSED:
            yield _closed(name, f"hybrid:budget.tokens={size.small_budget}", size)
            yield _closed(name, SWAP, size, size.host_blocks)
    if "timed" in parts:
        for name, file, speed in (
            ("azure", "AzureLLMInferenceTrace_conv.csv", 1.0),
            # one GPU cannot keep up with Mooncake's own rate
            ("mooncake", "mooncake_conversation_trace.jsonl", 0.25),
        ):
            for policy in POLICIES:
                yield _timed(name, file, speed, policy, size)
    if "grid" in parts:
        policies = ["full-kv", f"constrained:budget.tokens={size.grid_budgets[0]}"]
        policies += [f"hybrid:budget.tokens={budget}" for budget in size.grid_budgets]
        for pool in size.grid_pools:
            for policy in policies:
                yield Point(
                    f"grid-{pool}-{plain(policy)}", lambda: grid_workload(size), policy, pool, True
                )
        again = (lambda: grid_workload(size), policies[0], size.grid_pools[0], True)
        yield Point(f"repeat-{size.grid_pools[0]}-{plain(policies[0])}", *again)


def _closed(name: str, policy: str, size: Size, host_blocks: int = 0) -> Point:
    def workload() -> Workload:
        return small(read_trace(shared("workloads", f"{name}.jsonl")), size)

    return Point(
        f"{name}-{plain(policy)}", workload, policy, size.pool_blocks, True, 2.0, host_blocks
    )


def _timed(name: str, file: str, speed: float, policy: str, size: Size) -> Point:
    def workload() -> Workload:
        slice_ = cut(read_trace(shared("traces", file)), 0.0, SLICE_S * speed)
        return small(slice_ if speed == 1.0 else faster(slice_, speed), size)

    return Point(f"{name}-{plain(policy)}", workload, policy, size.pool_blocks, False, 2.0)


def choose(names: Sequence[str], only: Sequence[str], skip: Sequence[str]) -> list[str]:
    """Return the names that match `only` (all if empty), in that order, without those of `skip`.

    Args:
        names: all runs.
        only: names or patterns such as "W4-*".
        skip: names or patterns.

    Raises:
        ValueError: a pattern matches no name, or nothing is left.
    """
    for pattern in (*only, *skip):
        matches(pattern, names)
    kept = [name for pattern in only or ("*",) for name in names if fnmatchcase(name, pattern)]
    left = [
        name
        for name in dict.fromkeys(kept)
        if not any(fnmatchcase(name, pattern) for pattern in skip)
    ]
    if not left:
        raise ValueError("every run that --only names is also in --skip: nothing is left")
    return left


def read_shares(written: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """Return seconds by name from items such as "W4-full-kv=500". Raises ValueError."""
    found: dict[str, float] = {}
    for item in written:
        pattern, equals, seconds = item.partition("=")
        try:
            value = float(seconds)
        except ValueError:
            value = 0.0
        if not equals or not value > 0.0:
            raise ValueError(f"{item!r}: a share is NAME=SECONDS, as W4-full-kv=500")
        found |= dict.fromkeys(matches(pattern, names), value)
    return found


def matches(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that match a pattern. Raises ValueError with the choices if none does."""
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise ValueError(f"{pattern!r} is no run; there are {', '.join(names)}")
    return found


def share_of(left_s: float, wanted: Sequence[Point], pinned: Mapping[str, float]) -> float:
    """Return the seconds for the first of the remaining runs.

    A pinned run gets its pinned seconds. The others share the rest by their weights.

    Args:
        left_s: seconds left for all remaining runs.
        wanted: the remaining runs, the next one first.
        pinned: seconds by name, from `--share`.
    """
    first = wanted[0]
    if first.name in pinned:
        return min(pinned[first.name], left_s)
    free_s = left_s - sum(pinned.get(point.name, 0.0) for point in wanted)
    return free_s * first.weight / sum(point.weight for point in wanted if point.name not in pinned)


PACKING_S = 15.0  # reserved, also for a run that is cut a little late
PIECE_BYTES = 15 << 20
LEAST_S = 2.0  # a run with less time than this is left out
CALIBRATION_SHARE = 0.42  # of the time, at most
MOST_KERNELS_NAMED = 10
NUMBERS = (
    "block_size",
    "pool_blocks",
    "host_blocks",
    "max_running",
    "max_batched_tokens",
    "first",
    "grid_requests",
)
PRINTED = (
    "run",
    "complete",
    "error",
    "wall_s",
    "served_s",
    "tokens_out",
    "tokens_per_s",
    "seconds_to_share",
    "compression_share",
    "preemptions",
    "kernels_compiled_while_serving",
    "figures_error",
)


@dataclass(frozen=True)
class Chosen:
    """The runs of one call."""

    calibrates: bool
    points: tuple[Point, ...]
    seconds: dict[str, float]  # by name, from --share


class _CutError(Exception):
    """The run has used its share of the time."""


class _Watch:
    """Cuts a run once its time is over, and notes when the first request was served."""

    def __init__(self, seconds: float) -> None:
        self.began = time.perf_counter()
        self.serving_since_ns: int | None = None
        self._until = self.began + seconds

    def __call__(self, num_ended: int, num_requests: int, now_ns: int) -> None:
        if self.serving_since_ns is None:
            self.serving_since_ns = time.perf_counter_ns() - now_ns
        if time.perf_counter() > self._until:
            raise _CutError


def run_point(
    point: Point, settings: EngineSettings, loaded: LoadedModel, seconds: float, folder: Path
) -> dict[str, Any]:
    """Make one run and return its row.

    Args:
        point: the run.
        settings: the engine's settings; policy and pool come from `point`.
        loaded: the model.
        seconds: the run is cut after this time, set-up included.
        folder: new folder for the recording.
    """
    watch, compilations, load = _Watch(seconds), Compilations(), point.workload()
    chosen = replace(
        settings, policy=point.policy, num_blocks=point.pool_blocks, host_blocks=point.host_blocks
    )
    row: dict[str, Any] = {
        "run": point.name,
        "policy": point.policy,
        "pool_blocks": point.pool_blocks,
    }
    row |= {"host_blocks": point.host_blocks, "complete": True}
    try:
        with compilations:
            replay(
                load,
                chosen,
                ReplaySettings(at_once=point.at_once),
                loaded=loaded,
                out=folder,
                progress=watch,
            )
    except _CutError:
        row["complete"] = False
    except (RuntimeError, ValueError) as error:
        # out of memory, or a policy that does not fit: the other runs go on
        row |= {"complete": False, "error": f"{type(error).__name__}: {error}"}
    free_memory()
    row["wall_s"] = time.perf_counter() - watch.began
    if watch.serving_since_ns is not None:
        row |= compiled(compilations, watch.serving_since_ns) | served(folder, load)
    row = rounded(row)
    print({name: row[name] for name in PRINTED if name in row}, flush=True)
    return row


def compiled(compilations: Compilations, since_ns: int) -> dict[str, Any]:
    """Count the kernels compiled while requests were served; a complete warm-up leaves none."""
    late = compilations.since(since_ns)
    return {
        "kernels_compiled_while_serving": len(late),
        "kernels_compiled_before": len(compilations.made) - len(late),
        "first_compiled_while_serving": [
            {
                "kernel": one.kernel,
                "second": (one.ready_ns - since_ns) * 1e-9,
                "from_disk": one.from_disk,
            }
            for one in late[:MOST_KERNELS_NAMED]
        ],
    }


def served(folder: Path, load: Workload) -> dict[str, Any]:
    """Return the figures of a recording, or the error, so that the next run goes on."""
    try:
        return figures_of(folder, sum(request.output_tokens or 0 for request in load))
    except (RecordingError, SimError) as error:
        return {"figures_error": f"{type(error).__name__}: {error}"}


def calibration(
    options: argparse.Namespace, loaded: LoadedModel, size: Size, seconds: float
) -> None:
    """Measure, write the measurements, and fit a profile to them."""
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
    print(
        {"calibrated_s": round(document["wall_s"], 1), "skipped": document["skipped"]}, flush=True
    )
    try:
        profile = fit(parse_measurements(document))
    except MeasurementError as error:  # the recordings are still useful
        print({"not fitted": str(error)}, flush=True)
        return
    save_profile(profile, options.out)
    print(
        {part: round(error.mean_relative, 4) for part, error in profile.held_out_error.items()},
        flush=True,
    )


def pack(folder: Path, out: Path) -> list[str]:
    """Pack the recordings as one compressed archive in pieces; returns their names."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder, arcname="recordings")
    data = buffer.getvalue()
    names = []
    for number, start in enumerate(range(0, len(data), PIECE_BYTES)):
        names.append(f"recordings.tar.gz.{number}")
        (out / names[-1]).write_bytes(data[start : start + PIECE_BYTES])
    return names


def options_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="an empty or new folder")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="for everything, loading and packing included"
    )
    parser.add_argument(
        "--parts", help=f"some of {','.join(ALL_PARTS)}; {','.join(PARTS)} where nothing is said"
    )
    parser.add_argument(
        "--only", default="", metavar="NAME,...", help="these, in this order; W4-* works, too"
    )
    parser.add_argument("--skip", default="", metavar="NAME,...", help="all but these")
    parser.add_argument(
        "--share", default="", metavar="NAME=SECONDS,...", help="so long for these, set-up included"
    )
    parser.add_argument("--list", action="store_true", help="print the names and do nothing")
    parser.add_argument("--model", default="dummy:qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a smaller calibration")
    parser.add_argument("--kv-blocks", type=int, help="of the calibration's pool")
    for name in NUMBERS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Size, name))
    return parser


def size_of(options: argparse.Namespace) -> Size:
    """Budgets are in proportion to the blocks, pools of the grid to its requests."""
    scale = options.block_size / Size.block_size
    return Size(
        **{name: getattr(options, name) for name in NUMBERS},
        small_budget=round(Size.small_budget * scale),
        grid_budgets=tuple(round(budget * scale) for budget in Size.grid_budgets),
        grid_pools=tuple(
            max(pool * options.grid_requests // Size.grid_requests, 8) for pool in Size.grid_pools
        ),
    )


def chosen_of(options: argparse.Namespace, size: Size) -> Chosen:
    """What parts, `--only`, `--skip` and `--share` amount to. Raises ValueError with the
    choices.
    """
    only, skip, shares = (_items(getattr(options, name)) for name in ("only", "skip", "share"))
    parts = (
        _items(options.parts) if options.parts else (ALL_PARTS if only or options.list else PARTS)
    )
    if unknown := sorted(set(parts) - set(ALL_PARTS)):
        raise ValueError(f"--parts {','.join(unknown)}: choices are {','.join(ALL_PARTS)}")
    found = {point.name: point for point in points(parts, size)}
    names = [*([CALIBRATE] if CALIBRATE in parts else []), *found]
    kept = choose(names, only, skip)
    runs = tuple(found[name] for name in kept if name != CALIBRATE)
    return Chosen(CALIBRATE in kept, runs, read_shares(shares, kept))


def _items(written: str) -> list[str]:
    return [item for item in written.split(",") if item]


def main() -> None:
    """Measure and write."""
    began = time.perf_counter()
    parser = options_of()
    options = parser.parse_args()
    size = size_of(options)
    try:
        chosen = chosen_of(options, size)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        print(
            "\n".join(
                [
                    *([CALIBRATE] if chosen.calibrates else []),
                    *(point.name for point in chosen.points),
                ]
            )
        )
        return
    if options.out is None:
        parser.error("--out FOLDER is needed")
    deadline = began + 60.0 * options.minutes - PACKING_S
    options.out.mkdir(parents=True, exist_ok=True)
    if any(options.out.iterdir()):
        parser.error(f"--out {options.out}: is not empty")
    with TemporaryDirectory() as elsewhere:  # a folder that comes back whole may hold few files
        measure_all(options, chosen, size, deadline, Path(elsewhere) / "recordings")


def measure_all(
    options: argparse.Namespace, chosen: Chosen, size: Size, deadline: float, recordings: Path
) -> None:
    """Everything that was asked for, each run with its share of the time that is left."""
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
    if chosen.calibrates:
        left = deadline - time.perf_counter()
        most = left * CALIBRATION_SHARE if chosen.points else left
        calibration(options, loaded, size, min(chosen.seconds.get(CALIBRATE, most), left))
        free_memory()
    rows: list[dict[str, Any]] = []
    try:
        for place, point in enumerate(chosen.points):
            share = share_of(deadline - time.perf_counter(), chosen.points[place:], chosen.seconds)
            if share < LEAST_S:
                rows.append({"run": point.name, "skipped": f"{share:.1f} s were left for it"})
            else:
                rows.append(run_point(point, settings, loaded, share, recordings / point.name))
            write_rows(options, size, rows)
    finally:  # whatever goes wrong, what was recorded is worth having
        write_rows(options, size, rows)
        print(pack(recordings, options.out), flush=True)


def write_rows(options: argparse.Namespace, size: Size, rows: list[dict[str, Any]]) -> None:
    """`runs.json` as far as it is: a run a line."""
    command = {name: str(value) for name, value in vars(options).items()}
    about = json.dumps(
        header() | {"command": command, "size": asdict(size)}, indent=1
    ).removesuffix("\n}")
    lines = ",\n".join(json.dumps(row) for row in rows)
    (options.out / "runs.json").write_text(f'{about},\n "runs": [\n{lines}\n]}}\n', "utf-8")


if __name__ == "__main__":
    main()

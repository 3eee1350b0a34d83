"""Measure on a GPU what the simulator is to be judged by: `python -m benchmarks.validate_simulator --out FOLDER`.

One call, one process, as many minutes as it is given: calibrate (`engine.calibrate`), then run workloads that the fit
never sees, and record them: W1, W2, W4 (all at once), ten minutes of Azure's conversations and of Mooncake's (at their
times), each under full-kv, hybrid and one without asynchronous compression; a grid of (policy, budget, pool) on one
small workload for the ranking; one point of it twice, to see how far the engine repeats itself. Part `more`, which only
runs when asked for, has W1, W2 and W4 at a budget of 1,024 and with swapping. A run that takes longer than its share of
the time is cut, and its recording says so: the simulator is then compared over as many steps.

`--only` and `--skip` choose among the runs (`--list` names them), so that several calls, or processes with a card each,
can share the work, each into a folder of its own. `--only` alone chooses among all parts.

FOLDER receives a few files: `measurements.json` and the profile (fitted there; numpy is enough) where it calibrated,
`runs.json`, and the recordings as `recordings.tar.gz.0`, `.1`, ... of at most 15 MiB.
`python -m benchmarks.judge_simulator FOLDER...` judges them elsewhere.

The shared workloads and traces are looked for beside the checkout, and in `.carry/shared` inside it.
"""

import argparse
import io
import json
import tarfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.compilations import Compilations
from benchmarks.engine_gpu import header
from benchmarks.run_figures import figures_of, rounded
from benchmarks.validation_points import ALL_PARTS, CALIBRATE, PARTS, Point, Size, choose, points, read_shares, share_of
from engine.build import EngineSettings
from engine.calibrate import CalibrationSettings, measure
from engine.calibrate_stage import free_memory
from engine.loading import LoadedModel, load_model
from engine.replay import ReplaySettings, replay
from sim.errors import SimError
from sim.fitting import fit
from sim.measurements import MeasurementError, parse_measurements
from sim.profile import save_profile
from traces.recording import RecordingError
from traces.workload import Workload

PACKING_S = 15.0  # and for a run that is cut a little late
PIECE_BYTES = 15 << 20
LEAST_S = 2.0  # less time than this and a run is left out
CALIBRATION_SHARE = 0.42  # of the time, at most
MOST_KERNELS_NAMED = 10
NUMBERS = ("block_size", "pool_blocks", "host_blocks", "max_running", "max_batched_tokens", "first", "grid_requests")
PRINTED = (
    "run", "complete", "error", "wall_s", "served_s", "tokens_out", "tokens_per_s", "seconds_to_share",
    "compression_share", "preemptions", "kernels_compiled_while_serving", "figures_error",
)  # fmt: skip


@dataclass(frozen=True)
class Chosen:
    """What a call is to do."""

    calibrates: bool
    points: tuple[Point, ...]
    seconds: dict[str, float]  # promised, by name


class _CutError(Exception):
    """The run has had its share of the time."""


class _Watch:
    """Cuts a run once its time is over; knows since when requests are served."""

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
    """Make one run, cut once `seconds` are over, set-up included; what it amounts to."""
    watch, compilations, load = _Watch(seconds), Compilations(), point.workload()
    chosen = replace(settings, policy=point.policy, num_blocks=point.pool_blocks, host_blocks=point.host_blocks)
    row: dict[str, Any] = {"run": point.name, "policy": point.policy, "pool_blocks": point.pool_blocks}
    row |= {"host_blocks": point.host_blocks, "complete": True}
    try:
        with compilations:
            replay(load, chosen, ReplaySettings(at_once=point.at_once), loaded=loaded, out=folder, progress=watch)
    except _CutError:
        row["complete"] = False
    except (RuntimeError, ValueError) as error:  # out of memory, a policy that does not fit: the others go on
        row |= {"complete": False, "error": f"{type(error).__name__}: {error}"}
    free_memory()
    row["wall_s"] = time.perf_counter() - watch.began
    if watch.serving_since_ns is not None:
        row |= compiled(compilations, watch.serving_since_ns) | served(folder, load)
    row = rounded(row)
    print({name: row[name] for name in PRINTED if name in row}, flush=True)
    return row


def compiled(compilations: Compilations, since_ns: int) -> dict[str, Any]:
    """What Triton made ready while requests were served: nothing, where the warm-up is complete."""
    late = compilations.since(since_ns)
    return {
        "kernels_compiled_while_serving": len(late),
        "kernels_compiled_before": len(compilations.made) - len(late),
        "first_compiled_while_serving": [
            {"kernel": one.kernel, "second": (one.ready_ns - since_ns) * 1e-9, "from_disk": one.from_disk}
            for one in late[:MOST_KERNELS_NAMED]
        ],
    }


def served(folder: Path, load: Workload) -> dict[str, Any]:
    """The figures of a recording, or why there are none: the next run goes on all the same."""
    try:
        return figures_of(folder, sum(request.output_tokens or 0 for request in load))
    except (RecordingError, SimError) as error:
        return {"figures_error": f"{type(error).__name__}: {error}"}


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


def options_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="an empty or new folder")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything, loading and packing included")
    parser.add_argument("--parts", help=f"some of {','.join(ALL_PARTS)}; {','.join(PARTS)} where nothing is said")
    parser.add_argument("--only", default="", metavar="NAME,...", help="these, in this order; W4-* works, too")
    parser.add_argument("--skip", default="", metavar="NAME,...", help="all but these")
    parser.add_argument("--share", default="", metavar="NAME=SECONDS,...", help="so long for these, set-up included")
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
        grid_pools=tuple(max(pool * options.grid_requests // Size.grid_requests, 8) for pool in Size.grid_pools),
    )


def chosen_of(options: argparse.Namespace, size: Size) -> Chosen:
    """What parts, `--only`, `--skip` and `--share` amount to. Raises ValueError with the choices."""
    only, skip, shares = (_items(getattr(options, name)) for name in ("only", "skip", "share"))
    parts = _items(options.parts) if options.parts else (ALL_PARTS if only or options.list else PARTS)
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
        print("\n".join([*([CALIBRATE] if chosen.calibrates else []), *(point.name for point in chosen.points)]))
        return
    if options.out is None:
        parser.error("--out FOLDER is needed")
    deadline = began + 60.0 * options.minutes - PACKING_S
    options.out.mkdir(parents=True, exist_ok=True)
    if any(options.out.iterdir()):
        parser.error(f"--out {options.out}: is not empty")
    with TemporaryDirectory() as elsewhere:  # a folder that comes back whole may hold few files
        measure_all(options, chosen, size, deadline, Path(elsewhere) / "recordings")


def measure_all(options: argparse.Namespace, chosen: Chosen, size: Size, deadline: float, recordings: Path) -> None:
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
    about = json.dumps(header() | {"command": command, "size": asdict(size)}, indent=1).removesuffix("\n}")
    lines = ",\n".join(json.dumps(row) for row in rows)
    (options.out / "runs.json").write_text(f'{about},\n "runs": [\n{lines}\n]}}\n', "utf-8")


if __name__ == "__main__":
    main()

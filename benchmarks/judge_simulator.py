"""Judge what `benchmarks.validate_simulator` brought back: `python -m benchmarks.judge_simulator FOLDER... --out JSON`.

Unpacks the recordings of every FOLDER into FOLDER/recordings, fits the one `measurements.json` that is among them (or
takes `--profile`), replays every recording in simulation, with the profile and with the card's roofline alone, and
writes one JSON file: errors of every run with their goals, step-time errors by kind, Kendall's tau over all points of
the grid, and how far the engine repeats itself. A run that is in several folders is judged once, from the first that
has the whole of it; another whole one counts as its repetition. `--keep-profile` also puts the profile where
`zlab replay --profile` finds it.
"""

import argparse
import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from joblib import parallel_config
from rich.console import Console

from benchmarks.judged_document import goals, ranking, repeatability, run_document, written
from sim.errors import SimError
from sim.fitting import fit
from sim.measurements import read_measurements
from sim.parallel import results
from sim.profile import PROFILES, Profile, load_profile, save_profile
from sim.recorded import RecordedRun
from traces.recording import Recording, RecordingError
from zlab.judged import Judged, judge_run
from zlab.tables import console
from zlab.trust_table import show_many

GOAL_TAU = 0.9
GRID, REPEAT = "grid-", "repeat-"
MEASUREMENTS = "measurements.json"
ABOUT = ("card", "versions", "date", "command")


@dataclass
class Gathered:
    """What lies in the folders: recordings to judge and those that repeat one of them, by name; rows of runs.json."""

    first: dict[str, Path] = field(default_factory=dict)
    repeats: dict[str, tuple[Path, Path]] = field(default_factory=dict)  # (the first, again)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)  # of `first`
    not_run: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)


def unpack(folder: Path) -> list[Path]:
    """The recordings of a folder, unpacked from the archive's pieces if they are not there yet."""
    recordings = folder / "recordings"
    if not recordings.is_dir():
        pieces = sorted(folder.glob("recordings.tar.gz.*"), key=lambda path: int(path.suffix[1:]))
        if not pieces:
            if (folder / MEASUREMENTS).is_file():
                return []
            raise SystemExit(f"{folder} holds neither recordings/ nor recordings.tar.gz.0 nor {MEASUREMENTS}")
        with tarfile.open(fileobj=io.BytesIO(b"".join(piece.read_bytes() for piece in pieces)), mode="r:gz") as archive:
            archive.extractall(folder, filter="data")
    return sorted(path for path in recordings.iterdir() if (path / "manifest.json").is_file())


def gather(folders: Sequence[Path]) -> Gathered:
    """All folders together."""
    found = Gathered()
    everywhere: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for folder in folders:
        about = read_runs(folder)
        found.calls.append({"folder": folder.name} | {name: about.get(name) for name in ABOUT})
        rows = {row["run"]: row for row in about.get("runs", [])}
        for path in unpack(folder):
            everywhere.setdefault(path.name, []).append((path, rows.get(path.name, {})))
        found.not_run += [row for row in rows.values() if "skipped" in row or "error" in row]
    for name, places in everywhere.items():
        whole = [place for place in places if Recording(place[0]).complete]
        chosen = whole[0] if whole else places[0]
        found.first[name], found.rows[name] = chosen
        found.repeats |= {f"{name} in {path.parts[-3]}": (chosen[0], path) for path, _ in whole[1:]}
    for name in [name for name in found.first if name.startswith(REPEAT)]:
        path = found.first.pop(name)
        again = found.first.get(GRID + name.removeprefix(REPEAT))
        if again is not None:
            found.repeats[name] = (again, path)
    return found


def read_runs(folder: Path) -> dict[str, Any]:
    """What validate_simulator says of its runs; nothing where it did not come to say it."""
    path = folder / "runs.json"
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return found


def find_profile_of(folders: Sequence[Path], given: Path | None, keep: bool) -> tuple[Profile, Path]:
    """The one profile to judge, and where it lies: the given one, or that of the measurements in the folders."""
    if given is not None:
        return load_profile(given), given
    having = [folder for folder in folders if (folder / MEASUREMENTS).is_file()]
    if len(having) != 1:
        where = " and ".join(map(str, having)) or "none of the folders"
        raise SystemExit(f"{MEASUREMENTS} is in {where}: one profile is judged; name it by --profile FILE")
    profile = fit(read_measurements(having[0] / MEASUREMENTS))
    return profile, save_profile(profile, PROFILES if keep else having[0])


def judge_one(profile: Path, gpu: str | None, model: str | None, recording: Path) -> Judged | str:
    """A recording judged, or why it cannot be."""
    try:
        return judge_run(recording, str(profile), True, gpu, model)
    except (RecordingError, SimError) as error:
        return f"{type(error).__name__}: {error}"


def judge_all(recordings: Sequence[Path], profile: Path, options: argparse.Namespace) -> dict[str, Judged | str]:
    """Every recording judged, by name, in the order given."""
    found: dict[int, Judged | str] = {}
    with parallel_config(backend="loky", n_jobs=options.jobs):
        for place, judged in results(partial(judge_one, profile, options.gpu, options.model), recordings):
            found[place] = judged
            print(f"{len(found)} of {len(recordings)}: {recordings[place].name}", flush=True)
    return {path.name: found[place] for place, path in enumerate(recordings)}


def document_of(gathered: Gathered, judged: dict[str, Judged | str], profile: Path) -> dict[str, Any]:
    """Everything that is written."""
    fine = {name: each for name, each in sorted(judged.items()) if isinstance(each, Judged)}
    grid = [each for name, each in fine.items() if name.startswith(GRID)]
    others = [each for name, each in fine.items() if not name.startswith(GRID)]
    twice = {
        name: (RecordedRun(first), RecordedRun(again)) for name, (first, again) in sorted(gathered.repeats.items())
    }
    return {
        "calls": gathered.calls,
        "profile": json.loads(profile.read_text("utf-8")),
        "goals": goals(others),
        "ranking": ranking(grid) | {"goal": GOAL_TAU},
        "repeat": repeatability(twice),
        "validation": [run_document(each, gathered.rows[each.folder.name]) for each in others],
        "grid": [run_document(each, gathered.rows[each.folder.name], with_time=False) for each in grid],
        "not_run": gathered.not_run,
        "not_judged": [{"run": name, "why": each} for name, each in judged.items() if isinstance(each, str)],
    }


def main() -> None:
    """Judge, show and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="what validate_simulator wrote")
    parser.add_argument("--out", type=Path, required=True, help="JSON file, as benchmarks/results/trust-h200-DATE.json")
    parser.add_argument("--profile", type=Path, help="a profile's file, instead of fitting measurements")
    parser.add_argument("--keep-profile", action="store_true", help=f"write the profile to {PROFILES.name}/, too")
    parser.add_argument("--gpu", help="row for the roofline, where the card has none")
    parser.add_argument("--model", help="row for the roofline, where the model has none")
    parser.add_argument("--jobs", type=int, default=1, help="recordings judged at once")
    options = parser.parse_args()
    profile, path = find_profile_of(options.folders, options.profile, options.keep_profile)
    gathered = gather(options.folders)
    judged = judge_all(list(gathered.first.values()), path, options)
    document = document_of(gathered, judged, path)
    options.out.write_text(written(document), "utf-8")
    show(profile, judged, document, console())
    print(f"written to {options.out}")


def show(profile: Profile, judged: dict[str, Judged | str], document: dict[str, Any], to: Console) -> None:
    """The tables, the goals and the order of policies."""
    to.print({part: f"{error.mean_relative:.1%}" for part, error in profile.held_out_error.items()})
    fine = [each for _, each in sorted(judged.items()) if isinstance(each, Judged)]
    order = document["ranking"]
    for is_grid in (False, True):
        group = [each for each in fine if each.folder.name.startswith(GRID) == is_grid]
        if group:
            to.print("grid" if is_grid else "validation")
            show_many(group, order["tau"] if is_grid else None, to)
    to.print({name: f"{row['met']} of {row['runs']}" for name, row in document["goals"].items()})
    tau = order["tau"].get("profile")
    if tau is not None:
        met = "met" if tau >= GOAL_TAU else "NOT MET"
        to.print(f"goal of tau {GOAL_TAU} over {order['runs']} points: {met}; in another order: {order['swapped']}")
    to.print(document["repeat"])
    for row in (*document["not_run"], *document["not_judged"]):
        to.print({name: row[name] for name in ("run", "skipped", "error", "why") if name in row})


if __name__ == "__main__":
    main()

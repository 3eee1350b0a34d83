"""What `benchmarks.validate_simulator` brought back, judged: `python -m benchmarks.judge_simulator FOLDER --out JSON`.

Unpacks the recordings into FOLDER/recordings, fits the measurements, replays every recording in simulation, with the
profile and with the card's roofline alone, and writes one JSON file: errors of every run with their goals, step-time
errors by kind, Kendall's tau over the grid, and how far the engine repeats itself. `--keep-profile` also puts the
profile where `--profile` finds it.
"""

import argparse
import io
import json
import tarfile
from pathlib import Path
from typing import Any

from rich.console import Console

from sim.fitting import fit
from sim.measurements import read_measurements
from sim.profile import PROFILES, Profile, save_profile
from zlab.judged import Judged, as_document, judge_run
from zlab.tables import console
from zlab.trust_table import show_many

GOAL_TAU = 0.9


def unpack(folder: Path) -> Path:
    """The folder of recordings, unpacked from the archive's pieces if it is not there yet."""
    recordings = folder / "recordings"
    if not recordings.is_dir():
        pieces = sorted(folder.glob("recordings.tar.gz.*"), key=lambda path: int(path.suffix[1:]))
        if not pieces:
            raise SystemExit(f"{folder} holds neither recordings/ nor recordings.tar.gz.0")
        with tarfile.open(fileobj=io.BytesIO(b"".join(piece.read_bytes() for piece in pieces)), mode="r:gz") as archive:
            archive.extractall(folder, filter="data")
    return recordings


def judge_folder(folder: Path, profile_path: Path, gpu: str | None, model: str | None) -> dict[str, list[Judged]]:
    """Every recording judged, those of the grid apart."""
    found: dict[str, list[Judged]] = {"validation": [], "grid": [], "repeat": []}
    for recording in sorted(path for path in unpack(folder).iterdir() if (path / "manifest.json").is_file()):
        group = recording.name.split("-")[0]
        judged = judge_run(recording, str(profile_path), True, gpu, model)
        found[group if group in found else "validation"].append(judged)
    return found


def goals(judged: list[Judged]) -> dict[str, dict[str, int]]:
    """By figure: in how many runs its goal was met, and in how many there is one."""
    found: dict[str, dict[str, int]] = {}
    for each in judged:
        for name, compared in each.chief.figures.items():
            if compared.met is not None:
                row = found.setdefault(name, {"met": 0, "runs": 0})
                row["runs"] += 1
                row["met"] += compared.met
    return found


def repeatability(found: dict[str, list[Judged]]) -> dict[str, float]:
    """Of a grid point that was run twice: by what share its makespan changed."""
    first = {each.folder.name.partition("-")[2]: each for each in found["grid"]}
    changes = {}
    for again in found["repeat"]:
        other = first.get(again.folder.name.partition("-")[2])
        if other is not None:
            spans = [float(each.run.column("end_s")[-1]) for each in (other, again)]
            changes[again.folder.name] = spans[1] / spans[0] - 1.0
    return changes


def fitted(folder: Path, keep: bool) -> tuple[Profile, Path]:
    """The profile of the folder's measurements, and where it was written."""
    profile = fit(read_measurements(folder / "measurements.json"))
    return profile, save_profile(profile, PROFILES if keep else folder)


def main() -> None:
    """Judge, show and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what validate_simulator wrote")
    parser.add_argument("--out", type=Path, required=True, help="JSON file, as benchmarks/results/trust-h200-DATE.json")
    parser.add_argument("--keep-profile", action="store_true", help=f"write the profile to {PROFILES.name}/, too")
    parser.add_argument("--gpu", help="row for the roofline, where the card has none")
    parser.add_argument("--model", help="row for the roofline, where the model has none")
    options = parser.parse_args()
    profile, path = fitted(options.folder, options.keep_profile)
    found = judge_folder(options.folder, path, options.gpu, options.model)
    runs = json.loads((options.folder / "runs.json").read_text("utf-8"))
    document: dict[str, Any] = {
        "about": {name: runs[name] for name in ("card", "versions", "date", "command")},
        "profile": json.loads(path.read_text("utf-8")),
        "validation": as_document(found["validation"])["runs"],
        "goals": goals(found["validation"]),
        "grid": as_document(found["grid"]),
        "repeat": repeatability(found),
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    show(profile, found, document, console())
    print(f"written to {options.out}")


def show(profile: Profile, found: dict[str, list[Judged]], document: dict[str, Any], to: Console) -> None:
    """The tables, the goals and the order of policies."""
    to.print({part: f"{error.mean_relative:.1%}" for part, error in profile.held_out_error.items()})
    for group in ("validation", "grid"):
        if found[group]:
            to.print(group)
            show_many(found[group], document["grid"]["ranking"] if group == "grid" else None, to)
    to.print({name: f"{row['met']} of {row['runs']}" for name, row in document["goals"].items()})
    tau = (document["grid"]["ranking"] or {}).get("profile")
    if tau is not None:
        to.print(f"goal of tau {GOAL_TAU}: {'met' if tau >= GOAL_TAU else 'NOT MET'}")
    to.print(document["repeat"])


if __name__ == "__main__":
    main()

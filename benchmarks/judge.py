"""Judge the recordings of `benchmarks.validate`: `python -m benchmarks.judge FOLDER... --out JSON`.

Unpacks the recordings of every FOLDER into FOLDER/recordings, fits the one `measurements.json`
among the folders (or takes `--profile`), and replays every recording in simulation, with the
profile and with the GPU's roofline alone. It writes one JSON file with a run a line: errors of
every run with their goals, step-time errors by kind, Kendall's tau over all points of the grid, and
how far the engine repeats itself. Floats have five significant digits; an error is (simulated -
measured) / measured.

A run that is in several folders is judged once, from the first complete recording; further complete
ones count as repetitions. `--keep-profile` also writes the profile where `zlab replay --profile`
finds it. The judging needs no torch.
"""

import argparse
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from joblib import parallel_config
from rich.console import Console

from benchmarks.run_figures import rounded
from zlab.cli.console import console
from zlab.cli.trust import JudgedRecording, as_document, judge_run, show_many
from zlab.sim.fidelity import GOALS, Trust, event_words
from zlab.sim.fitting import fit
from zlab.sim.profiles import PROFILES, Profile, load_profile, read_measurements, save_profile
from zlab.sim.recorded_run import RecordedRun
from zlab.sim.specs import SimError
from zlab.sim.sweep import results
from zlab.traces.recording import Recording, RecordingError

ROWS = ("validation", "grid", "not_run", "not_judged", "calls")
IN_FIGURES = (
    "run",
    "policy",
    "complete",
    "pool_blocks",
    "host_blocks",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "digest",
)
SHORT = 16  # of a digest


def run_document(
    judged: JudgedRecording, measured: Mapping[str, Any] | None, with_time: bool = True
) -> dict[str, Any]:
    """Return one run of the document.

    `error`, `lacking_share` and the outliers are those of the profile; `roofline_error` is that of
    the GPU's roofline alone.

    Args:
        judged: the recording, judged.
        measured: its row in runs.json.
        with_time: whether the row's figures over time are included.
    """
    profile, roofline, run = judged.with_profile, judged.with_roofline, judged.run
    assert profile is not None
    assert roofline is not None
    left_out = IN_FIGURES if with_time else (*IN_FIGURES, "over_time")
    return {
        "run": judged.folder.name,
        "policy": (measured or {}).get("policy", run.manifest["policy"]),
        "policy_digest": run.manifest["policy_digest"][:SHORT],
        "num_blocks": run.limits.num_blocks,
        "host_blocks": run.limits.host_blocks,
        "num_requests": run.requests.num_rows,
        "complete": run.complete,
        "planned_ahead": run.planned_ahead,
        "decisions": _decisions(profile),
        "figures": _figures(profile, roofline),
        "steps": _steps(profile, roofline),
        "pinned_makespan": {
            "error": profile.pinned_makespan.error,
            "roofline_error": roofline.pinned_makespan.error,
            "idle_s": profile.idle_s,
        },
        "outliers": [asdict(outlier) for outlier in profile.outliers],
        "notes": list(judged.notes),
        "measured": {
            name: value for name, value in (measured or {}).items() if name not in left_out
        },
    }


def _decisions(found: Trust) -> dict[str, Any]:
    decisions, difference = found.decisions, found.decisions.difference
    words = (
        None
        if difference is None
        else f"{event_words(difference.left)} | {event_words(difference.right)}"
    )
    return {
        "how": decisions.how,
        "equal": decisions.equal,
        "digest": decisions.engine_digest[:SHORT],
        "difference": words
        and f"step {difference.step if difference else -1}: engine | simulator: {words}",
        "free_differs_at": decisions.free_differs_at,
    }


def _figures(profile: Trust, roofline: Trust) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "measured": compared.measured,
            "profile": compared.simulated,
            "error": compared.error,
            "met": compared.met,
            "roofline": roofline.figures[name].simulated,
            "roofline_error": roofline.figures[name].error,
        }
        for name, compared in profile.figures.items()
    }


def _steps(profile: Trust, roofline: Trust) -> dict[str, dict[str, Any]]:
    return {
        kind: {**asdict(error), "error": error.error, "roofline_error": roofline.steps[kind].error}
        for kind, error in profile.steps.items()
    }


def goals(judged: Sequence[JudgedRecording]) -> dict[str, dict[str, Any]]:
    """Return by figure its goal, how many runs meet it, how many have it, and the worst error."""
    found: dict[str, dict[str, Any]] = {}
    for name, goal in GOALS.items():
        compared = [each.chief.figures[name] for each in judged]
        errors = [one.error for one in compared if one.error is not None]
        found[name] = {
            "goal": goal,
            "met": sum(bool(one.met) for one in compared),
            "runs": len(errors),
            "worst": max(errors, key=abs, default=None),
        }
    return found


def ranking(judged: Sequence[JudgedRecording]) -> dict[str, Any]:
    """Return Kendall's tau of tokens/s over complete runs, and the pairs in another order.

    A pair has both names and by what share the first was faster on the GPU.
    """
    whole = [each for each in judged if each.run.complete]
    swapped = []
    for one, other in combinations(whole, 2):
        measured, simulated = (
            first / second for first, second in zip(_rates(one), _rates(other), strict=True)
        )
        if (measured - 1.0) * (simulated - 1.0) < 0.0:
            swapped.append([one.folder.name, other.folder.name, measured - 1.0])
    tau = as_document(whole)["ranking"] or {}
    return {
        "runs": len(whole),
        "cut_and_left_out": len(judged) - len(whole),
        "tau": tau,
        "swapped": swapped,
    }


def _rates(judged: JudgedRecording) -> tuple[float, float]:
    """Return tokens/s of a complete run, measured and simulated."""
    rate = judged.chief.figures["tokens_per_s"]
    assert rate.measured is not None
    assert rate.simulated is not None
    return rate.measured, rate.simulated


def repeatability(
    pairs: Mapping[str, tuple[RecordedRun, RecordedRun]],
) -> dict[str, dict[str, Any]]:
    """Return of each run made twice the change of its makespan and whether decisions are equal."""
    found = {}
    for name, (first, again) in pairs.items():
        spans = [float(each.column("end_s")[-1]) for each in (first, again)]
        same = first.manifest["digest"] == again.manifest["digest"]
        found[name] = {"makespan_change": spans[1] / spans[0] - 1.0, "same_decisions": same}
    return found


def written(document: Mapping[str, Any]) -> str:
    """Return the document as JSON text, a run a line."""
    parts = []
    for name, value in document.items():
        if name in ROWS:
            lines = ",\n".join(f"  {json.dumps(rounded(row))}" for row in value)
            parts.append(f' "{name}": [\n{lines}\n ]' if value else f' "{name}": []')
        else:
            parts.append(f' "{name}": {json.dumps(value if name == "profile" else rounded(value))}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


GOAL_TAU = 0.9
GRID, REPEAT = "grid-", "repeat-"
MEASUREMENTS = "measurements.json"
ABOUT = ("card", "versions", "date", "command")


@dataclass
class Gathered:
    """The contents of all folders: recordings to judge, repetitions, and rows of runs.json."""

    first: dict[str, Path] = field(default_factory=dict)
    repeats: dict[str, tuple[Path, Path]] = field(default_factory=dict)  # (the first, again)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)  # of `first`
    not_run: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)


def unpack(folder: Path) -> list[Path]:
    """Return the recordings of a folder, unpacking the archive's pieces first if need be."""
    recordings = folder / "recordings"
    if not recordings.is_dir():
        pieces = sorted(folder.glob("recordings.tar.gz.*"), key=lambda path: int(path.suffix[1:]))
        if not pieces:
            if (folder / MEASUREMENTS).is_file():
                return []
            raise SystemExit(
                f"{folder} holds neither recordings/ nor recordings.tar.gz.0 nor {MEASUREMENTS}"
            )
        with tarfile.open(
            fileobj=io.BytesIO(b"".join(piece.read_bytes() for piece in pieces)), mode="r:gz"
        ) as archive:
            archive.extractall(folder, filter="data")
    return sorted(path for path in recordings.iterdir() if (path / "manifest.json").is_file())


def gather(folders: Sequence[Path]) -> Gathered:
    """Read all folders."""
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
    """Return runs.json of a folder, or an empty document when the call ended before writing it."""
    path = folder / "runs.json"
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return found


def find_profile_of(
    folders: Sequence[Path], given: Path | None, keep: bool
) -> tuple[Profile, Path]:
    """Return the profile to judge and its file: the given one, or the fit of the measurements."""
    if given is not None:
        return load_profile(given), given
    having = [folder for folder in folders if (folder / MEASUREMENTS).is_file()]
    if len(having) != 1:
        where = " and ".join(map(str, having)) or "none of the folders"
        raise SystemExit(
            f"{MEASUREMENTS} is in {where}: one profile is judged; name it by --profile FILE"
        )
    profile = fit(read_measurements(having[0] / MEASUREMENTS))
    return profile, save_profile(profile, PROFILES if keep else having[0])


def judge_one(
    profile: Path, gpu: str | None, model: str | None, recording: Path
) -> JudgedRecording | str:
    """Judge a recording; returns the error as text when it cannot be judged."""
    try:
        return judge_run(recording, str(profile), True, gpu, model)
    except (RecordingError, SimError) as error:
        return f"{type(error).__name__}: {error}"


def judge_all(
    recordings: Sequence[Path], profile: Path, options: argparse.Namespace
) -> dict[str, JudgedRecording | str]:
    """Judge every recording; returns them by name in the order given."""
    found: dict[int, JudgedRecording | str] = {}
    with parallel_config(backend="loky", n_jobs=options.jobs):
        for place, judged in results(
            partial(judge_one, profile, options.gpu, options.model), recordings
        ):
            found[place] = judged
            print(f"{len(found)} of {len(recordings)}: {recordings[place].name}", flush=True)
    return {path.name: found[place] for place, path in enumerate(recordings)}


def document_of(
    gathered: Gathered, judged: dict[str, JudgedRecording | str], profile: Path
) -> dict[str, Any]:
    """Return the whole document."""
    fine = {
        name: each for name, each in sorted(judged.items()) if isinstance(each, JudgedRecording)
    }
    grid = [each for name, each in fine.items() if name.startswith(GRID)]
    others = [each for name, each in fine.items() if not name.startswith(GRID)]
    twice = {
        name: (RecordedRun(first), RecordedRun(again))
        for name, (first, again) in sorted(gathered.repeats.items())
    }
    return {
        "calls": gathered.calls,
        "profile": json.loads(profile.read_text("utf-8")),
        "goals": goals(others),
        "ranking": ranking(grid) | {"goal": GOAL_TAU},
        "repeat": repeatability(twice),
        "validation": [run_document(each, gathered.rows[each.folder.name]) for each in others],
        "grid": [
            run_document(each, gathered.rows[each.folder.name], with_time=False) for each in grid
        ],
        "not_run": gathered.not_run,
        "not_judged": [
            {"run": name, "why": each} for name, each in judged.items() if isinstance(each, str)
        ],
    }


def main() -> None:
    """Judge, show and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="FOLDER", help="a folder of benchmarks.validate"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="JSON file, as benchmarks/results/trust-h200-DATE.json",
    )
    parser.add_argument(
        "--profile", type=Path, help="a profile's file, instead of fitting measurements"
    )
    parser.add_argument(
        "--keep-profile", action="store_true", help=f"write the profile to {PROFILES.name}/, too"
    )
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


def show(
    profile: Profile,
    judged: dict[str, JudgedRecording | str],
    document: dict[str, Any],
    to: Console,
) -> None:
    """The tables, the goals and the order of policies."""
    to.print({part: f"{error.mean_relative:.1%}" for part, error in profile.held_out_error.items()})
    fine = [each for _, each in sorted(judged.items()) if isinstance(each, JudgedRecording)]
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
        to.print(
            f"goal of tau {GOAL_TAU} over {order['runs']} points: {met}; in another order: "
            f"{order['swapped']}"
        )
    to.print(document["repeat"])
    for row in (*document["not_run"], *document["not_judged"]):
        to.print({name: row[name] for name in ("run", "skipped", "error", "why") if name in row})


if __name__ == "__main__":
    main()

"""Recordings of the engine and what cost models are worth on them: what `zlab trust` shows, and its JSON."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sim.cost import CostModel, roofline
from sim.errors import SimError
from sim.hardware import find_gpu, find_model, gpu_of_card
from sim.profile import Profile, find_profile, from_profile, open_profile
from sim.ranking import kendall_tau
from sim.recorded import RecordedRun
from sim.trust import Trust, trust
from zlab.outcome import MisuseError
from zlab.recordings import recorded_run

COMPARED_VERSIONS = ("torch", "triton", "zipage-lab")


@dataclass(frozen=True)
class Judged:
    """One recording with what the cost model and, where asked for, the card's roofline are worth on it."""

    folder: Path
    run: RecordedRun
    with_profile: Trust | None
    with_roofline: Trust | None
    notes: tuple[str, ...]

    @property
    def chief(self) -> Trust:
        """By the profile where there is one."""
        found = self.with_profile or self.with_roofline
        assert found is not None
        return found


def judge_run(
    folder: Path, name: str | None, with_roofline: bool, gpu: str | None = None, model: str | None = None
) -> Judged:
    """Judge a profile (by default that of the recording's card) on a recording, and the roofline where there is none.

    `gpu` and `model` name other rows for the roofline. Raises RecordingError, SimError, ProfileError or MisuseError.
    """
    run = recorded_run(folder)
    found: Profile | None
    if name is not None:
        found = open_profile(name)
        notes = check_profile(found, run)
    else:
        found, notes = own_profile(run, "the roofline is judged instead")
    card = gpu_of_card(str(run.manifest["gpu"]))
    guess = roofline_of(run, gpu or card, model) if with_roofline or found is None else None
    return Judged(
        folder=folder,
        run=run,
        with_profile=None if found is None else trust(run, from_profile(found)),
        with_roofline=None if guess is None else trust(run, guess),
        notes=tuple(notes),
    )


def own_profile(run: RecordedRun, otherwise: str) -> tuple[Profile | None, list[str]]:
    """The profile of a recording's own card, model and dtype, with what to say about it.

    None where nobody has measured that, or with other blocks or another window; why, and what happens `otherwise`.
    """
    card, manifest = gpu_of_card(str(run.manifest["gpu"])), run.manifest
    try:
        found = find_profile(card, str(manifest["model"]), str(manifest["engine"]["dtype"]))
        return found, check_profile(found, run)
    except SimError as error:
        return None, [f"{error}; {otherwise}"]


def check_profile(profile: Profile, run: RecordedRun) -> list[str]:
    """What differs between profile and recording and may matter. Raises SimError where they do not belong together."""
    dtype = run.manifest["engine"]["dtype"]
    wanted = {
        "gpu": (profile.gpu, gpu_of_card(str(run.manifest["gpu"]))),
        "model": (profile.model, run.manifest["model"]),
        "dtype": (profile.dtype, dtype),
    }
    if run.compression_tasks:
        wanted["block size"] = (str(profile.block_size), str(run.limits.block_size))
        wanted["window"] = (str(profile.window), str(run.policy.compression.window))
    differ = [f"{name} {ours}, recorded with {theirs}" for name, (ours, theirs) in wanted.items() if ours != theirs]
    if differ:
        raise SimError(f"profile {profile.name} does not belong to {run.folder}: {'; '.join(differ)}")
    versions = run.manifest.get("versions", {})
    return [
        f"the profile was measured with {name} {profile.versions[name]}, the run with {versions[name]}"
        for name in COMPARED_VERSIONS
        if name in profile.versions and name in versions and profile.versions[name] != versions[name]
    ]


def roofline_of(run: RecordedRun, gpu: str, model: str | None) -> CostModel:
    """The roofline of a card for a recording's policy and blocks. Raises MisuseError where there is no such row."""
    try:
        row, shape = find_gpu(gpu), find_model(model or str(run.manifest["model"]))
    except SimError as error:
        raise MisuseError(
            f"{run.folder} has no roofline: {error} (--gpu and --model name another, --profile measured costs)"
        ) from error
    return roofline(row, shape, window=run.policy.compression.window, block_size=run.limits.block_size)


def as_document(judged: list[Judged]) -> dict[str, Any]:
    """Everything as plain JSON."""
    return {"runs": [_run_document(each) for each in judged], "ranking": _ranking(judged)}


def _run_document(judged: Judged) -> dict[str, Any]:
    manifest = judged.run.manifest
    return {
        "run": judged.folder.name,
        "policy": manifest["policy"],
        "policy_digest": manifest["policy_digest"],
        "workload": manifest.get("workload"),
        "workload_sha256": manifest.get("workload_sha256"),
        "limits": manifest["limits"],
        "card": manifest["gpu"],
        "model": manifest["model"],
        "complete": judged.run.complete,
        "planned_ahead": judged.run.planned_ahead,
        "notes": list(judged.notes),
        "profile": None if judged.with_profile is None else _trust_document(judged.with_profile),
        "roofline": None if judged.with_roofline is None else _trust_document(judged.with_roofline),
    }


def _trust_document(found: Trust) -> dict[str, Any]:
    document = asdict(found)
    document["decisions"]["equal"] = found.decisions.equal
    for name, compared in found.figures.items():
        document["figures"][name] |= {"error": compared.error, "met": compared.met}
    document["pinned_makespan"]["error"] = found.pinned_makespan.error
    for kind, error in found.steps.items():
        document["steps"][kind]["error"] = error.error
    return document


def _ranking(judged: list[Judged]) -> dict[str, float | None] | None:
    """Kendall's tau of tokens/s; None for a single run."""
    if len(judged) < 2:
        return None
    found: dict[str, float | None] = {}
    for name in ("with_profile", "with_roofline"):
        sides = [getattr(each, name) for each in judged]
        if all(side is not None for side in sides):
            rates = [side.figures["tokens_per_s"] for side in sides]
            found[name.removeprefix("with_")] = kendall_tau(
                [rate.measured for rate in rates], [rate.simulated for rate in rates]
            )
    return found

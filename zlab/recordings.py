"""Recordings of the engine that a command reads: looked at before anything is made of them."""

from pathlib import Path

from policies.changes import read_changes
from policies.core.errors import ConfigError
from policies.core.limits import Limits
from policies.spec import PolicyError, policy_from_toml
from sim.recorded import RecordedRun
from traces.recording import Recording, RecordingError
from zlab.outcome import MisuseError

ALWAYS = ("policy", "policy_toml", "policy_digest", "limits", "gpu", "model", "engine")
FROM_FIRST_CHECKPOINT = ("digest", "num_steps")


def engine_recording(folder: Path) -> Recording:
    """A recording of the engine whose manifest says all that is needed to decide the run again.

    Raises RecordingError, naming the folder, where it is damaged, and MisuseError where it is none of the engine's.
    """
    found = Recording(folder)
    manifest = found.manifest
    if manifest.get("source") != "engine":
        raise MisuseError(
            f"{folder}: source {manifest.get('source')!r} is not the engine's (zlab bench --out, zlab serve --record)"
        )
    missing = [name for name in ALWAYS if name not in manifest]
    if missing:
        raise RecordingError(f"{folder}/manifest.json: lacks {', '.join(missing)}")
    if any(name not in manifest for name in FROM_FIRST_CHECKPOINT):
        raise RecordingError(f"{folder}: was stopped before its first checkpoint: it does not say how far the run came")
    try:
        policy_from_toml(manifest["policy_toml"], "its policy")
        read_changes(manifest)
        Limits(**manifest["limits"])
    except (PolicyError, ConfigError, TypeError) as error:
        raise RecordingError(f"{folder}/manifest.json: {error}") from error
    return found


def recorded_run(folder: Path) -> RecordedRun:
    """The run as the simulator sees it. Raises as `engine_recording`, and RecordingError where tables do not agree."""
    engine_recording(folder)
    return RecordedRun(folder)

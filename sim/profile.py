"""Measured coefficients on disk: what a calibration writes and a simulation reads instead of the roofline.

The format `zlab-profile/3` is described in docs/COST.md; a file is named `<gpu>-<model>-<dtype>.json`.
"""

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

from sim.cost import COEFFICIENT_UNITS, CostModel
from sim.errors import SimError
from sim.model_config import DTYPE_BYTES
from sim.model_shape import Model

FORMAT = "zlab-profile/3"
OLD_FORMATS = ("zlab-profile/1", "zlab-profile/2")  # without coefficients that there are now
PROFILES = Path(__file__).parent / "profiles"
FIT_PARTS = ("decode", "prefill", "mixed", "compression", "overlap", "swap")
SHAPE = ("num_layers", "hidden", "intermediate", "num_query_heads", "num_kv_heads", "head_dim", "vocab")


class ProfileError(SimError):
    """A profile that cannot be read or does not say what it must; the message names the file and the key."""


@dataclass(frozen=True, slots=True)
class FitError:
    """How far a fitted model is from timings, as |predicted - measured| / measured."""

    mean_relative: float
    max_relative: float
    num_points: int


@dataclass(frozen=True, slots=True)
class Figure:
    """Something else that was measured; no simulation uses it."""

    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Profile:
    """The coefficients of one card with one model, and how they came about."""

    gpu: str  # as in `sim.hardware.GPUS`
    model: str
    shape: Mapping[str, int]  # of that model, by the names of SHAPE
    dtype: str
    card: str  # as the driver names it
    date: str  # of the measurement, YYYY-MM-DD
    versions: Mapping[str, str]  # of what was measured: torch, triton, driver, zipage-lab ...
    block_size: int  # tokens; the compression coefficients hold for this block size and window
    window: int
    coefficients: Mapping[str, float]  # in the units of `sim.cost.COEFFICIENT_UNITS`, every one of them
    fit_error: Mapping[str, FitError]  # by part of the model, see FIT_PARTS: on the timings it was fitted to
    held_out_error: Mapping[str, FitError]  # the same of fits that each left the judged timings out
    also: Mapping[str, Figure]

    @property
    def name(self) -> str:
        """The file's name without `.json`."""
        return f"{self.gpu}-{self.model}-{self.dtype}"


def from_profile(profile: Profile) -> CostModel:
    """The cost model with exactly the measured coefficients; its `source` is the profile's name and date."""
    return CostModel(
        gpu=profile.gpu, model=profile.model, source=f"{profile.name} {profile.date}", **profile.coefficients
    )


def open_profile(name: str, folder: Path = PROFILES) -> Profile:
    """The profile of that name in `folder`, or at that path where it ends in .json.

    Raises:
        ProfileError: there is none; the message names the nearest and all that are there.
    """
    if name.endswith(".json"):
        return load_profile(Path(name))
    names = profile_names(folder)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" nearest: {near[0]};" if near else ""
        raise ProfileError(f"no measured profile {name!r};{hint} there are: {', '.join(names) or 'none'}")
    return load_profile(folder / f"{name}.json")


def check_shape(profile: Profile, model: Model) -> None:
    """Raise ProfileError where the profile's model had another shape or size of value, naming all that differs."""
    sizes = DTYPE_BYTES[profile.dtype], model.dtype_bytes
    differ = [f"{sizes[0]} bytes a value there, {sizes[1]} here"] if sizes[0] != sizes[1] else []
    differ += [
        f"{name} {profile.shape[name]} there, {getattr(model, name)} here"
        for name in SHAPE
        if profile.shape[name] != getattr(model, name)
    ]
    if differ:
        raise ProfileError(
            f"profile {profile.name} is stale: model {model.name} has another shape ({'; '.join(differ)})"
        )


def profile_names(folder: Path = PROFILES) -> tuple[str, ...]:
    """The names of the profiles in a folder, sorted; empty when it does not exist."""
    return tuple(sorted(path.stem for path in folder.glob("*.json")))


def find_profile(gpu: str, model: str, dtype: str = "bfloat16", folder: Path = PROFILES) -> Profile:
    """The profile measured for that card, model and dtype.

    Raises:
        ProfileError: nobody has measured it; the message names the nearest and all that are there.
    """
    return open_profile(f"{gpu}-{model}-{dtype}", folder)


def load_profile(path: Path) -> Profile:
    """Read one profile, strictly: every key known, none missing, units as expected, named after its content.

    Raises:
        ProfileError: unreadable or not of the format; the message names the file, the key and the nearest known one.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"cannot read profile {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ProfileError(f"{path}: not JSON: {error}") from error
    keys = [item.name for item in fields(Profile)]
    body = _object(document, ["format", *keys], str(path))
    if body["format"] != FORMAT:
        again = "; fit its measurements again (zlab calibrate --from FILE)" if body["format"] in OLD_FORMATS else ""
        raise ProfileError(f"{path}: format is {body['format']!r}, this version reads {FORMAT!r}{again}")
    profile = Profile(
        **{key: _text(body[key], f"{path}: {key}") for key in ("gpu", "model", "card")},
        shape=_shape(body["shape"], f"{path}: shape"),
        dtype=_dtype(body["dtype"], f"{path}: dtype"),
        date=_date(body["date"], f"{path}: date"),
        versions=_versions(body["versions"], f"{path}: versions"),
        block_size=_whole(body["block_size"], f"{path}: block_size"),
        window=_whole(body["window"], f"{path}: window"),
        coefficients=_coefficients(body["coefficients"], f"{path}: coefficients"),
        fit_error=_fit_errors(body["fit_error"], f"{path}: fit_error"),
        held_out_error=_fit_errors(body["held_out_error"], f"{path}: held_out_error"),
        also=_figures(body["also"], f"{path}: also"),
    )
    if path.stem != profile.name:
        raise ProfileError(f"{path}: holds {profile.name!r} and must be named {profile.name}.json")
    try:
        from_profile(profile)  # the model's own limits, at the door
    except SimError as error:
        raise ProfileError(f"{path}: {error}") from error
    return profile


def save_profile(profile: Profile, folder: Path = PROFILES) -> Path:
    """Write `<folder>/<name>.json` and return its path; what was there is replaced."""
    document = {"format": FORMAT, **asdict(profile)}
    document["coefficients"] = {
        name: {"value": profile.coefficients[name], "unit": unit} for name, unit in COEFFICIENT_UNITS.items()
    }
    path = folder / f"{profile.name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return path


def _object(value: object, keys: Iterable[str], where: str) -> dict[str, Any]:
    """`value` as an object with exactly these keys."""
    known = list(keys)
    body = _known_only(value, known, where)
    missing = [key for key in known if key not in body]
    if missing:
        raise ProfileError(f"{where}: missing {', '.join(repr(key) for key in missing)}")
    return body


def _known_only(value: object, known: list[str], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProfileError(f"{where}: must be an object, got {value!r}")
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ProfileError(f"{where}: unknown key {key!r}; {hint}choices: {', '.join(known)}")
    return value


def _coefficients(value: object, where: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, entry in _object(value, COEFFICIENT_UNITS, where).items():
        body = _object(entry, ("value", "unit"), f"{where}.{name}")
        if body["unit"] != COEFFICIENT_UNITS[name]:
            raise ProfileError(f"{where}.{name}: unit is {body['unit']!r}, expected {COEFFICIENT_UNITS[name]!r}")
        found[name] = _number(body["value"], f"{where}.{name}.value")
    return found


def _shape(value: object, where: str) -> dict[str, int]:
    return {name: _whole(entry, f"{where}.{name}") for name, entry in _object(value, SHAPE, where).items()}


def _figures(value: object, where: str) -> dict[str, Figure]:
    if not isinstance(value, dict):
        raise ProfileError(f"{where}: must be an object, got {value!r}")
    found: dict[str, Figure] = {}
    for name, entry in value.items():
        body = _object(entry, ("value", "unit"), f"{where}.{name}")
        found[name] = Figure(
            _number(body["value"], f"{where}.{name}.value"), _text(body["unit"], f"{where}.{name}.unit")
        )
    return found


def _fit_errors(value: object, where: str) -> dict[str, FitError]:
    parts = _known_only(value, list(FIT_PARTS), where)
    if not parts:
        raise ProfileError(f"{where}: must state at least one of {', '.join(FIT_PARTS)}")
    found: dict[str, FitError] = {}
    for part, entry in parts.items():
        here = f"{where}.{part}"
        body = _object(entry, (item.name for item in fields(FitError)), here)
        mean, largest = (_number(body[key], f"{here}.{key}") for key in ("mean_relative", "max_relative"))
        if mean > largest:
            raise ProfileError(f"{here}: mean_relative {mean} is above max_relative {largest}")
        found[part] = FitError(mean, largest, _whole(body["num_points"], f"{here}.num_points"))
    return found


def _versions(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not value:
        raise ProfileError(f"{where}: must be an object of name: version, got {value!r}")
    return {name: _text(version, f"{where}.{name}") for name, version in value.items()}


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ProfileError(f"{where}: must be a text that is not empty, got {value!r}")
    return value


def _dtype(value: object, where: str) -> str:
    if not isinstance(value, str) or value not in DTYPE_BYTES:
        raise ProfileError(f"{where}: {value!r} is unknown; choices: {', '.join(DTYPE_BYTES)}")
    return value


def _date(value: object, where: str) -> str:
    try:
        return date.fromisoformat(_text(value, where)).isoformat()
    except ValueError as error:
        raise ProfileError(f"{where}: must be YYYY-MM-DD, got {value!r}") from error


def _whole(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ProfileError(f"{where}: must be a positive whole number, got {value!r}")
    return value


def _number(value: object, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ProfileError(f"{where}: must be a finite number of at least 0, got {value!r}")
    return float(value)

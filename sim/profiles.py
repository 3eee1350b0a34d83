"""Measured profiles and measurements on disk.

A profile holds the coefficients that a calibration found; a simulation reads it instead of the
roofline. Its format is `zlab-profile/3`, and its file is `<gpu>-<model>-<dtype>.json`. Measurements
are the input of the calibration's fit, in the format `zlab-measurements/1`. Both formats are
described in docs/COST.md.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zlab.sim.cost_model import COEFFICIENT_UNITS, CostModel
from zlab.sim.specs import DTYPE_BYTES, PROFILE_SHAPE, ModelSpec, SimError
from zlab.traces.choices import unknown_choice

FORMAT = "zlab-profile/3"
OLD_FORMATS = ("zlab-profile/1", "zlab-profile/2")  # they lack coefficients of the present format
PROFILES = Path(__file__).parent / "measured"
FIT_PARTS = ("decode", "prefill", "mixed", "compression", "overlap", "swap")


class ProfileError(SimError):
    """A profile cannot be read or has a wrong value. The message names the file and the key."""


@dataclass(frozen=True, slots=True)
class FitError:
    """Errors of a fitted model against timings: |predicted - measured| / measured."""

    mean_relative: float
    max_relative: float
    num_points: int


@dataclass(frozen=True, slots=True)
class ProfileFigure:
    """A further measured value that no simulation uses."""

    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Profile:
    """The coefficients of one GPU with one model, and how they were measured."""

    gpu: str  # as in `zlab.sim.specs.GPUS`
    model: str
    shape: Mapping[str, int]  # shape of the model, by the keys of PROFILE_SHAPE
    dtype: str
    card: str  # the GPU's name as its driver gives it
    date: str  # date of the measurement, YYYY-MM-DD
    versions: Mapping[str, str]  # versions of torch, triton, driver, zipage-lab ...
    block_size: int  # tokens; the compression coefficients hold for this block size and window
    window: int
    coefficients: Mapping[
        str, float
    ]  # all of `zlab.sim.cost_model.COEFFICIENT_UNITS`, in those units
    fit_error: Mapping[
        str, FitError
    ]  # by part of the model, see FIT_PARTS: errors on the timings of the fit
    held_out_error: Mapping[str, FitError]  # errors of fits that each left the judged timings out
    also: Mapping[str, ProfileFigure]
    # name of the engine that was measured, where it is another one; optional in a file
    engine: str = ""

    @property
    def name(self) -> str:
        """Name of the file without `.json`."""
        measured = f"{self.gpu}-{self.model}-{self.dtype}"
        return f"{self.engine}-{measured}" if self.engine else measured


def from_profile(profile: Profile) -> CostModel:
    """Return the cost model with the measured coefficients. Its `source` is the profile's name and
    date.
    """
    return CostModel(
        gpu=profile.gpu,
        model=profile.model,
        source=f"{profile.name} {profile.date}",
        **profile.coefficients,
    )


def open_profile(name: str, folder: Path = PROFILES) -> Profile:
    """Return the profile of that name in `folder`, or at that path if the name ends in .json.

    Raises:
        ProfileError: The profile does not exist; the message names the nearest one and all that
            exist.
    """
    if name.endswith(".json"):
        return load_profile(Path(name))
    names = profile_names(folder)
    if name not in names:
        raise ProfileError(unknown_choice("measured profile", name, names, "or FILE.json"))
    return load_profile(folder / f"{name}.json")


def check_shape(profile: Profile, model: ModelSpec) -> None:
    """Raise ProfileError if the profile was measured for another model shape or dtype. The message
    names all differences.
    """
    sizes = DTYPE_BYTES[profile.dtype], model.dtype_bytes
    differ = [f"{sizes[0]} bytes a value there, {sizes[1]} here"] if sizes[0] != sizes[1] else []
    differ += [
        f"{key} {profile.shape[key]} there, {size} here"
        for key, size in model.profile_shape.items()
        if profile.shape[key] != size
    ]
    if differ:
        raise ProfileError(
            f"profile {profile.name} is stale: model {model.name} has another shape "
            f"({'; '.join(differ)})"
        )


def profile_names(folder: Path = PROFILES) -> tuple[str, ...]:
    """Return the names of the profiles in a folder, sorted. The result is empty if the folder does
    not exist.
    """
    return tuple(sorted(path.stem for path in folder.glob("*.json")))


def find_profile(gpu: str, model: str, dtype: str = "bfloat16", folder: Path = PROFILES) -> Profile:
    """Return the profile measured for a GPU, model and dtype.

    Args:
        gpu: Name as in `zlab.sim.specs.GPUS`.
        model: Name of the model.
        dtype: Dtype of weights and cache.
        folder: Folder with the profiles.

    Raises:
        ProfileError: There is no such profile; the message names the nearest one and all that
            exist.
    """
    return open_profile(f"{gpu}-{model}-{dtype}", folder)


def load_profile(path: Path) -> Profile:
    """Read a profile strictly: every key is known, none is missing, units are as expected, and the
    file is named after its content.

    Raises:
        ProfileError: The file cannot be read or breaks the format; the message names the file, the
            key and the nearest known key.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"cannot read profile {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ProfileError(f"{path}: not JSON: {error}") from error
    keys = [item.name for item in fields(Profile) if item.name != "engine"]
    engine = ""
    if isinstance(document, dict) and "engine" in document:
        engine = _text(document.pop("engine"), f"{path}: engine")
    body = _object(document, ["format", *keys], str(path))
    if body["format"] != FORMAT:
        again = (
            "; fit its measurements again (zlab calibrate --from FILE)"
            if body["format"] in OLD_FORMATS
            else ""
        )
        raise ProfileError(
            f"{path}: format is {body['format']!r}, this version reads {FORMAT!r}{again}"
        )
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
        engine=engine,
    )
    if path.stem != profile.name:
        raise ProfileError(f"{path}: holds {profile.name!r} and must be named {profile.name}.json")
    try:
        from_profile(profile)  # raises where a coefficient is out of the model's bounds
    except SimError as error:
        raise ProfileError(f"{path}: {error}") from error
    return profile


def save_profile(profile: Profile, folder: Path = PROFILES) -> Path:
    """Write `<folder>/<name>.json` and return its path. An existing file is replaced."""
    document = {"format": FORMAT, **asdict(profile)}
    if not profile.engine:
        del document["engine"]
    document["coefficients"] = {
        name: {"value": profile.coefficients[name], "unit": unit}
        for name, unit in COEFFICIENT_UNITS.items()
    }
    path = folder / f"{profile.name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return path


def _object(value: object, keys: Iterable[str], where: str) -> dict[str, Any]:
    """Return `value` as an object with exactly these keys."""
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
            raise ProfileError(f"{where}: {unknown_choice('key', key, known)}")
    return value


def _coefficients(value: object, where: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, entry in _object(value, COEFFICIENT_UNITS, where).items():
        body = _object(entry, ("value", "unit"), f"{where}.{name}")
        if body["unit"] != COEFFICIENT_UNITS[name]:
            raise ProfileError(
                f"{where}.{name}: unit is {body['unit']!r}, expected {COEFFICIENT_UNITS[name]!r}"
            )
        found[name] = _number(body["value"], f"{where}.{name}.value")
    return found


def _shape(value: object, where: str) -> dict[str, int]:
    return {
        name: _whole(entry, f"{where}.{name}")
        for name, entry in _object(value, PROFILE_SHAPE, where).items()
    }


def _figures(value: object, where: str) -> dict[str, ProfileFigure]:
    if not isinstance(value, dict):
        raise ProfileError(f"{where}: must be an object, got {value!r}")
    found: dict[str, ProfileFigure] = {}
    for name, entry in value.items():
        body = _object(entry, ("value", "unit"), f"{where}.{name}")
        found[name] = ProfileFigure(
            _number(body["value"], f"{where}.{name}.value"),
            _text(body["unit"], f"{where}.{name}.unit"),
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
        mean, largest = (
            _number(body[key], f"{here}.{key}") for key in ("mean_relative", "max_relative")
        )
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
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value < 0
    ):
        raise ProfileError(f"{where}: must be a finite number of at least 0, got {value!r}")
    return float(value)


MEASUREMENTS_FORMAT = "zlab-measurements/1"
STEP_COUNTS = ("decodes", "context_tokens", "prefills", "prefill_tokens", "prefill_pairs")
COUNTS: Mapping[str, tuple[str, ...]] = {  # whole-number columns of each table
    "steps": STEP_COUNTS,
    "compressions": ("sequences", "source_tokens", "kept_tokens"),
    "beside": (
        "decodes",
        "context_tokens",
        "sequences",
        "source_tokens",
        "kept_tokens",
        "after_context_tokens",
    ),
    "swaps": ("tokens",),
    "sampling": ("rows",),
    "host": STEP_COUNTS,
}
TIMES: Mapping[str, tuple[str, ...]] = {
    "steps": ("seconds",),
    "compressions": ("seconds",),
    "beside": ("seconds", "after"),
    "swaps": ("seconds",),
    "sampling": ("drawn", "plain"),
    "host": ("seconds",),
}
NUMBERS: Mapping[str, tuple[str, ...]] = {
    "steps": ("before_s",),
    "host": ("before_s",),
}  # seconds, 0 allowed
PARTS = ("decode", "prefill", "mixed")


class MeasurementError(SimError):
    """Measurements that cannot be read or fitted. The message names the place."""


@dataclass(frozen=True)
class Table:
    """One table of measured rows, by column: whole numbers, and seconds as the median of the
    repeats.
    """

    columns: Mapping[str, npt.NDArray[np.float64]]
    spread: (
        float | None
    )  # median over the rows of (p90 - p10) / median of the repeats; None without rows
    parts: tuple[str, ...] = ()  # for `steps`: the part that each row belongs to

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> npt.NDArray[np.float64]:
        return self.columns[name]


@dataclass(frozen=True)
class Measurements:
    """The measurements of one calibration: the machine, the model, and the tables by the names of
    `COUNTS`.
    """

    card: str
    model: str
    shape: Mapping[str, int]
    dtype: str
    date: str
    versions: Mapping[str, str]
    block_size: int
    window: int
    # Steps with chunks of up to this many tokens (decodes included) run as a CUDA graph; 0 in older
    # files.
    graph_tokens: int
    tables: Mapping[str, Table]


def read_measurements(path: Path) -> Measurements:
    """Read a file of measurements. Raise MeasurementError, which names the file and the place."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MeasurementError(
            f"cannot read measurements {path}: {error.strerror or error}"
        ) from error
    except ValueError as error:
        raise MeasurementError(f"{path}: not JSON: {error}") from error
    return parse_measurements(document, str(path))


def parse_measurements(document: Any, where: str = "measurements") -> Measurements:
    """Return the measurements in a JSON object. Raise MeasurementError, which names the place."""
    if not isinstance(document, dict) or document.get("format") != MEASUREMENTS_FORMAT:
        found = document.get("format") if isinstance(document, dict) else document
        raise MeasurementError(
            f"{where}: format is {found!r}, this version reads {MEASUREMENTS_FORMAT!r}"
        )
    shape, versions = (_measured_object(document, name, where) for name in ("shape", "versions"))
    return Measurements(
        card=_measured_text(document, "card", where),
        model=_measured_text(document, "model", where),
        dtype=_measured_text(document, "dtype", where),
        date=_measured_text(document, "date", where),
        block_size=_measured_whole(document, "block_size", where, least=1),
        window=_measured_whole(document, "window", where, least=1),
        graph_tokens=_measured_whole({"graph_tokens": 0} | document, "graph_tokens", where),
        shape={
            name: _measured_whole(shape, name, f"{where}: shape", least=1) for name in PROFILE_SHAPE
        },
        versions={str(name): str(value) for name, value in versions.items()},
        tables={name: _table(document, name, where) for name in COUNTS},
    )


def _table(document: Mapping[str, Any], name: str, where: str) -> Table:
    rows = document.get(name)
    if not isinstance(rows, list):
        raise MeasurementError(f"{where}: {name} must be a list, got {rows!r}")
    numbers = NUMBERS.get(name, ())
    columns: dict[str, list[float]] = {key: [] for key in (*COUNTS[name], *TIMES[name], *numbers)}
    widths: list[float] = []
    for index, row in enumerate(rows):
        here = f"{where}: {name}[{index}]"
        if not isinstance(row, dict):
            raise MeasurementError(f"{here}: must be an object, got {row!r}")
        for key in COUNTS[name]:
            columns[key].append(_measured_whole(row, key, here))
        for key in numbers:
            columns[key].append(_seconds(row, key, here, least=0.0))
        for key in TIMES[name]:
            spread = _measured_object(row, key, here)
            median, low, high = (
                _seconds(spread, mark, f"{here}.{key}") for mark in ("median", "low", "high")
            )
            columns[key].append(median)
            widths.append((high - low) / median)
    parts = (
        tuple(_part(row, f"{where}: {name}[{index}]") for index, row in enumerate(rows))
        if name == "steps"
        else ()
    )
    arrays = {key: np.array(values, dtype=np.float64) for key, values in columns.items()}
    return Table(arrays, float(np.median(widths)) if widths else None, parts)


def _part(row: Mapping[str, Any], where: str) -> str:
    part = row.get("part")
    if part not in PARTS:
        raise MeasurementError(f"{where}: part is {part!r}; choices: {', '.join(PARTS)}")
    return str(part)


def _measured_object(row: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = row.get(key)
    if not isinstance(value, dict):
        raise MeasurementError(f"{where}: {key} must be an object, got {value!r}")
    return value


def _measured_text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise MeasurementError(f"{where}: {key} must be a text that is not empty, got {value!r}")
    return value


def _measured_whole(row: Mapping[str, Any], key: str, where: str, least: int = 0) -> int:
    value = row.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise MeasurementError(
            f"{where}: {key} must be a whole number of at least {least}, got {value!r}"
        )
    return value


def _seconds(row: Mapping[str, Any], key: str, where: str, least: float = 1e-12) -> float:
    value = row.get(key)
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value < least
    ):
        above = "of at least 0" if least == 0.0 else "above 0"
        raise MeasurementError(
            f"{where}.{key}: must be a finite number of seconds {above}, got {value!r}"
        )
    return float(value)

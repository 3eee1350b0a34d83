"""What a calibration measured, read strictly: format `zlab-measurements/1`, described in docs/COST.md."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.errors import SimError
from sim.profile import SHAPE

FORMAT = "zlab-measurements/1"
STEP_COUNTS = ("decodes", "context_tokens", "prefills", "prefill_tokens", "prefill_pairs")
COUNTS: Mapping[str, tuple[str, ...]] = {  # whole numbers of a row of each table
    "steps": STEP_COUNTS,
    "compressions": ("sequences", "source_tokens", "kept_tokens"),
    "beside": (
        "decodes", "context_tokens", "sequences", "source_tokens", "kept_tokens", "after_context_tokens",
    ),
    "swaps": ("tokens",),
    "sampling": ("rows",),
    "host": STEP_COUNTS,
}  # fmt: skip
TIMES: Mapping[str, tuple[str, ...]] = {
    "steps": ("seconds",), "compressions": ("seconds",), "beside": ("seconds", "after"), "swaps": ("seconds",),
    "sampling": ("drawn", "plain"), "host": ("seconds",),
}  # fmt: skip
NUMBERS: Mapping[str, tuple[str, ...]] = {"steps": ("before_s",), "host": ("before_s",)}  # seconds, perhaps none
PARTS = ("decode", "prefill", "mixed")


class MeasurementError(SimError):
    """Measurements that cannot be read or fitted; the message names the place."""


@dataclass(frozen=True)
class Table:
    """Rows of one kind of cell, by column: whole numbers, and the median seconds of the repeats."""

    columns: Mapping[str, npt.NDArray[np.float64]]
    spread: float | None  # median over the rows of (p90 - p10) / median of a cell's repeats; None without rows
    parts: tuple[str, ...] = ()  # of `steps`: which part each row belongs to

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> npt.NDArray[np.float64]:
        return self.columns[name]


@dataclass(frozen=True)
class Measurements:
    """One calibration: what on, what of, and its tables by the names of `COUNTS`."""

    card: str
    model: str
    shape: Mapping[str, int]
    dtype: str
    date: str
    versions: Mapping[str, str]
    block_size: int
    window: int
    graph_tokens: int  # decodes and chunks together, up to which a step with chunks is a graph; 0 in older files
    tables: Mapping[str, Table]


def read_measurements(path: Path) -> Measurements:
    """Read a file of measurements. Raises MeasurementError naming the file and the place."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MeasurementError(f"cannot read measurements {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise MeasurementError(f"{path}: not JSON: {error}") from error
    return parse_measurements(document, str(path))


def parse_measurements(document: Any, where: str = "measurements") -> Measurements:
    """The measurements in a JSON object. Raises MeasurementError naming the place."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else document
        raise MeasurementError(f"{where}: format is {found!r}, this version reads {FORMAT!r}")
    shape, versions = (_object(document, name, where) for name in ("shape", "versions"))
    return Measurements(
        card=_text(document, "card", where),
        model=_text(document, "model", where),
        dtype=_text(document, "dtype", where),
        date=_text(document, "date", where),
        block_size=_whole(document, "block_size", where, least=1),
        window=_whole(document, "window", where, least=1),
        graph_tokens=_whole({"graph_tokens": 0} | document, "graph_tokens", where),
        shape={name: _whole(shape, name, f"{where}: shape", least=1) for name in SHAPE},
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
            columns[key].append(_whole(row, key, here))
        for key in numbers:
            columns[key].append(_seconds(row, key, here, least=0.0))
        for key in TIMES[name]:
            spread = _object(row, key, here)
            median, low, high = (_seconds(spread, mark, f"{here}.{key}") for mark in ("median", "low", "high"))
            columns[key].append(median)
            widths.append((high - low) / median)
    parts = tuple(_part(row, f"{where}: {name}[{index}]") for index, row in enumerate(rows)) if name == "steps" else ()
    arrays = {key: np.array(values, dtype=np.float64) for key, values in columns.items()}
    return Table(arrays, float(np.median(widths)) if widths else None, parts)


def _part(row: Mapping[str, Any], where: str) -> str:
    part = row.get("part")
    if part not in PARTS:
        raise MeasurementError(f"{where}: part is {part!r}; choices: {', '.join(PARTS)}")
    return str(part)


def _object(row: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = row.get(key)
    if not isinstance(value, dict):
        raise MeasurementError(f"{where}: {key} must be an object, got {value!r}")
    return value


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise MeasurementError(f"{where}: {key} must be a text that is not empty, got {value!r}")
    return value


def _whole(row: Mapping[str, Any], key: str, where: str, least: int = 0) -> int:
    value = row.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise MeasurementError(f"{where}: {key} must be a whole number of at least {least}, got {value!r}")
    return value


def _seconds(row: Mapping[str, Any], key: str, where: str, least: float = 1e-12) -> float:
    value = row.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < least:
        above = "of at least 0" if least == 0.0 else "above 0"
        raise MeasurementError(f"{where}.{key}: must be a finite number of seconds {above}, got {value!r}")
    return float(value)

"""ServeGen's own files of rates and length distributions, as windows of time (`traces.servegen` draws from them)."""

import ast
import csv
import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.formats.cells import BadRowError, number, shown
from traces.formats.source import numbered_lines
from traces.workload import TraceError

Floats = npt.NDArray[np.float64]
RATE_HEADER = ("window_start_s", "rate_req_per_s", "rate_weighted_client_iat_cv")
LENGTH_FIELDS = ("input_tokens", "output_tokens", "reason_ratio")
DEFAULT_WINDOW_S = 600.0
"""Length of a file's only window; otherwise the last one is as long as the one before."""


@dataclass(frozen=True)
class RateWindow:
    """Requests of one stretch of time: their rate, and the kind of gaps between them."""

    start_s: float
    end_s: float
    rate_per_s: float
    family: str = "Gamma"  # of the gaps: Gamma or Weibull
    shape: float = 1.0  # the family's shape parameter; the scale follows from the rate

    def gaps(self, rng: np.random.Generator, num: int) -> Floats:
        """Independent gaps of mean 1/rate, in seconds."""
        if self.family == "Weibull":
            return rng.weibull(self.shape, num) / (math.gamma(1 + 1 / self.shape) * self.rate_per_s)
        return rng.gamma(self.shape, 1 / (self.shape * self.rate_per_s), num)


@dataclass(frozen=True)
class Marginal:
    """One field's distribution: points of its quantile function, joined by straight lines or, for a mass, by steps."""

    levels: Floats  # ascending, 0..1
    values: Floats
    steps: bool

    def draw(self, rng: np.random.Generator, num: int) -> Floats:
        """`num` independent values."""
        uniform = rng.random(num)
        if self.steps:
            return self.values[np.searchsorted(self.levels[:-1], uniform, side="right")]
        return np.interp(uniform, self.levels, self.values)


@dataclass(frozen=True)
class LengthWindow:
    """The marginals from one time on; a field without requests in that time is missing."""

    start_s: float
    marginals: dict[str, Marginal]


def read_rates(path: Path) -> tuple[RateWindow, ...]:
    """Rates by window, from either kind of file. Raises `TraceError` with file, line and value."""
    rows: list[tuple[float, float, str, float]] = []
    with_header = False
    for line_number, line in numbered_lines(path):
        cells = next(csv.reader([line]))
        if not rows and tuple(cells[:3]) == RATE_HEADER:
            with_header = True
            continue
        try:
            row = _summed_row(cells) if with_header else _client_row(cells)
            if rows and row[0] <= rows[-1][0]:
                raise BadRowError(
                    "windows out of order", f"window start {row[0]:g} does not come after {rows[-1][0]:g}"
                )
        except BadRowError as error:
            raise TraceError(f"{path}:{line_number}: {error}") from None
        rows.append(row)
    if not rows:
        raise TraceError(f"{path}: has no rows")
    starts = [row[0] for row in rows]
    last = starts[-1] - starts[-2] if len(starts) > 1 else DEFAULT_WINDOW_S
    bounds = pairwise([*starts, starts[-1] + last])
    return tuple(
        RateWindow(a, b, rate, family, shape) for (a, b), (_, rate, family, shape) in zip(bounds, rows, strict=True)
    )


def _above_zero(name: str, value: str) -> float:
    found = number(name, value)
    if found == 0:
        raise BadRowError(f"{name} is 0", f"{name} is 0, must be above 0")
    return found


def _summed_row(cells: list[str]) -> tuple[float, float, str, float]:
    if len(cells) < 3:
        raise BadRowError("wrong number of cells", f"has {len(cells)} cells, must have at least 3")
    start, rate = number(RATE_HEADER[0], cells[0]), number(RATE_HEADER[1], cells[1])
    return start, rate, "Gamma", _above_zero(RATE_HEADER[2], cells[2]) ** -2 if rate else 1.0


def _client_row(cells: list[str]) -> tuple[float, float, str, float]:
    if len(cells) != 6:
        raise BadRowError(
            "wrong number of cells",
            f"has {len(cells)} cells, must have 6 (start, rate, cv, family, two parameters) or the header "
            + ",".join(RATE_HEADER),
        )
    start, rate, family = number("window start", cells[0]), number("rate", cells[1]), cells[3].strip()
    if not rate:
        return start, 0.0, "Gamma", 1.0
    if family not in {"Gamma", "Weibull"}:
        raise BadRowError("unknown family", f"gap family is {shown(family)}, must be one of Gamma, Weibull")
    return start, rate, family, _above_zero("shape parameter", cells[4])


def read_lengths(path: Path) -> tuple[LengthWindow, ...]:
    """Length marginals by window, from a dataset file or from quantiles (one window for all time)."""
    try:
        content = json.loads("".join(line for _, line in numbered_lines(path)))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict) or not content or not all(isinstance(v, dict) for v in content.values()):
        raise TraceError(f"{path}: must hold an object of windows or of one model's marginals")
    if any(isinstance(field, dict) for entry in content.values() for field in entry.values()):
        if len(content) != 1:
            raise TraceError(f"{path}: holds {len(content)} models ({', '.join(content)}), must hold one")
        (entry,) = content.values()
        return (LengthWindow(0.0, {name: _quantiles(path, name, entry.get(name)) for name in LENGTH_FIELDS}),)
    windows = []
    for start, entry in content.items():
        try:
            start_s = number("window start", start)
        except BadRowError as error:
            raise TraceError(f"{path}: {error}") from None
        found = {name: _mass(path, start, name, entry.get(name)) for name in LENGTH_FIELDS}
        windows.append(LengthWindow(start_s, {name: m for name, m in found.items() if m is not None}))
    return tuple(sorted(windows, key=lambda window: window.start_s))


def _quantiles(path: Path, name: str, value: Any) -> Marginal:
    points = value.get("quantiles_200") if isinstance(value, dict) else None
    if not isinstance(points, list) or len(points) < 2 or not _numbers(points) or points != sorted(points):
        raise TraceError(f"{path}: {name} has no ascending quantiles_200, found {shown(value)}")
    return Marginal(np.linspace(0, 1, len(points)), np.asarray(points, dtype=np.float64), steps=False)


def _numbers(values: list[Any]) -> bool:
    return all(type(v) in {int, float} and 0 <= v < math.inf for v in values)


def _mass(path: Path, start: str, name: str, value: Any) -> Marginal | None:
    """The probability mass in a cell: text that holds a Python dict, read as a literal and never run."""
    place = f"{path}: window {start}, {name}"
    try:
        mass = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise TraceError(f"{place}: is {shown(value)}, must be the text of a dict ({type(error).__name__})") from None
    if not isinstance(mass, dict) or not _numbers([*mass, *mass.values()]):
        raise TraceError(f"{place}: is {shown(value)}, must map numbers >= 0 to probabilities")
    if not mass:
        return None
    values = sorted(mass)
    weights = np.cumsum([mass[v] for v in values])
    if weights[-1] <= 0:
        raise TraceError(f"{place}: all probabilities are 0")
    return Marginal(weights / weights[-1], np.asarray(values, dtype=np.float64), steps=True)

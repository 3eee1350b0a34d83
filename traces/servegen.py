"""Workloads drawn from ServeGen's published rates and length distributions.

Rates are one client's `chunk-N-trace.csv` (no header: window start, rate, cv, gap family and its
two parameters) or the sum over clients (`window_start_s,rate_req_per_s,...`). Lengths are
`chunk-N-dataset.json` (by window, strings that hold a Python dict of value -> probability) or the
marginals' quantiles. Either kind of rates goes with either kind of lengths. Fields are drawn
independently of each other, because the source publishes marginals only.
"""

import ast
import csv
import json
import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zlab.traces.formats.layout import BadRowError, number, numbered_lines, shown
from zlab.traces.synthetic import TICKS_PER_S, generator, made, positive
from zlab.traces.workload import (
    FieldValues,
    Numbered,
    RequestTable,
    TraceError,
    Workload,
    plain_array,
)

Floats = npt.NDArray[np.float64]
RATE_HEADER = ("window_start_s", "rate_req_per_s", "rate_weighted_client_iat_cv")
LENGTH_FIELDS = ("input_tokens", "output_tokens", "reason_ratio")
DEFAULT_WINDOW_S = 600.0
"""Length of a file's only window; otherwise the last one is as long as the one before."""


@dataclass(frozen=True)
class RateWindow:
    """One time window: the request rate, and the distribution of the gaps between requests."""

    start_s: float
    end_s: float
    rate_per_s: float
    family: str = "Gamma"  # family of the gap distribution: Gamma or Weibull
    shape: float = 1.0  # shape parameter of the family; the scale follows from the rate

    def gaps(self, rng: np.random.Generator, num: int) -> Floats:
        """Return `num` independent gaps of mean 1/rate, in seconds."""
        if self.family == "Weibull":
            return rng.weibull(self.shape, num) / (math.gamma(1 + 1 / self.shape) * self.rate_per_s)
        return rng.gamma(self.shape, 1 / (self.shape * self.rate_per_s), num)


@dataclass(frozen=True)
class Marginal:
    """The distribution of one field: points of its quantile function, joined by straight lines or,
    for a probability mass, by steps.
    """

    levels: Floats  # ascending, in [0, 1]
    values: Floats
    steps: bool

    def draw(self, rng: np.random.Generator, num: int) -> Floats:
        """Return `num` independent values."""
        uniform = rng.random(num)
        if self.steps:
            return self.values[np.searchsorted(self.levels[:-1], uniform, side="right")]
        return np.interp(uniform, self.levels, self.values)


@dataclass(frozen=True)
class LengthWindow:
    """The marginals from a start time on. A field without requests in that window is missing."""

    start_s: float
    marginals: dict[str, Marginal]


def read_rates(path: Path) -> tuple[RateWindow, ...]:
    """Read rates by window, from either kind of file. Raise `TraceError` with file, line and
    value.
    """
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
                    "windows out of order",
                    f"window start {row[0]:g} does not come after {rows[-1][0]:g}",
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
        RateWindow(a, b, rate, family, shape)
        for (a, b), (_, rate, family, shape) in zip(bounds, rows, strict=True)
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
            f"has {len(cells)} cells, must have 6 (start, rate, cv, family, two parameters) or "
            f"the header " + ",".join(RATE_HEADER),
        )
    start, rate, family = (
        number("window start", cells[0]),
        number("rate", cells[1]),
        cells[3].strip(),
    )
    if not rate:
        return start, 0.0, "Gamma", 1.0
    if family not in {"Gamma", "Weibull"}:
        raise BadRowError(
            "unknown family", f"gap family is {shown(family)}, must be one of Gamma, Weibull"
        )
    return start, rate, family, _above_zero("shape parameter", cells[4])


def read_lengths(path: Path) -> tuple[LengthWindow, ...]:
    """Read length marginals by window, from a dataset file or from quantiles (one window for all
    time).
    """
    try:
        content = json.loads("".join(line for _, line in numbered_lines(path)))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not JSON ({error})") from None
    if (
        not isinstance(content, dict)
        or not content
        or not all(isinstance(v, dict) for v in content.values())
    ):
        raise TraceError(f"{path}: must hold an object of windows or of one model's marginals")
    if any(isinstance(field, dict) for entry in content.values() for field in entry.values()):
        if len(content) != 1:
            raise TraceError(
                f"{path}: holds {len(content)} models ({', '.join(content)}), must hold one"
            )
        (entry,) = content.values()
        return (
            LengthWindow(
                0.0, {name: _quantiles(path, name, entry.get(name)) for name in LENGTH_FIELDS}
            ),
        )
    windows = []
    for start, entry in content.items():
        try:
            start_s = number("window start", start)
        except BadRowError as error:
            raise TraceError(f"{path}: {error}") from None
        found = {name: _mass(path, start, name, entry.get(name)) for name in LENGTH_FIELDS}
        windows.append(
            LengthWindow(start_s, {name: m for name, m in found.items() if m is not None})
        )
    return tuple(sorted(windows, key=lambda window: window.start_s))


def _quantiles(path: Path, name: str, value: Any) -> Marginal:
    points = value.get("quantiles_200") if isinstance(value, dict) else None
    if (
        not isinstance(points, list)
        or len(points) < 2
        or not _numbers(points)
        or points != sorted(points)
    ):
        raise TraceError(f"{path}: {name} has no ascending quantiles_200, found {shown(value)}")
    return Marginal(
        np.linspace(0, 1, len(points)), np.asarray(points, dtype=np.float64), steps=False
    )


def _numbers(values: list[Any]) -> bool:
    return all(type(v) in {int, float} and 0 <= v < math.inf for v in values)


def _mass(path: Path, start: str, name: str, value: Any) -> Marginal | None:
    """Read the probability mass in a cell: text that holds a Python dict. The text is parsed as a
    literal and never executed.
    """
    place = f"{path}: window {start}, {name}"
    try:
        mass = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise TraceError(
            f"{place}: is {shown(value)}, must be the text of a dict ({type(error).__name__})"
        ) from None
    if not isinstance(mass, dict) or not _numbers([*mass, *mass.values()]):
        raise TraceError(f"{place}: is {shown(value)}, must map numbers >= 0 to probabilities")
    if not mass:
        return None
    values = sorted(mass)
    weights = np.cumsum([mass[v] for v in values])
    if weights[-1] <= 0:
        raise TraceError(f"{place}: all probabilities are 0")
    return Marginal(weights / weights[-1], np.asarray(values, dtype=np.float64), steps=True)


LICENCE = "Apache-2.0"  # licence of github.com/alibaba/ServeGen, which publishes the distributions


@dataclass(frozen=True)
class ServeGenSource:
    """The load of a production service, as distributions by time window."""

    name: str
    rates: tuple[RateWindow, ...]
    lengths: tuple[LengthWindow, ...]

    @classmethod
    def read(cls, rates: Path | str, lengths: Path | str) -> "ServeGenSource":
        """Read a file of rates and one of lengths. Raise `TraceError` with file, place and
        value.
        """
        return cls(
            Path(rates).stem.removeprefix("servegen_"),
            read_rates(Path(rates)),
            read_lengths(Path(lengths)),
        )


def servegen(
    source: ServeGenSource,
    seed: int = 0,
    start_s: float = 0.0,
    duration_s: float | None = None,
    rate_factor: float = 1.0,
) -> Workload:
    """Draw requests for the time from `start_s` to `start_s + duration_s` of the source's clock.

    Gaps start again with each window of rates. Lengths are rounded to whole tokens, at least 1;
    `reasoning_tokens` is the output length times its drawn share of reasoning.

    Args:
        source: Rates and lengths.
        seed: Seed of the random numbers.
        start_s: Start on the source's clock, in seconds.
        duration_s: Length in seconds; by default up to the end of the source.
        rate_factor: Factor of all rates.
    """
    positive("rate_factor", rate_factor)
    end_s = math.inf if duration_s is None else start_s + duration_s
    rng = generator(seed)
    parts: list[tuple[Floats, ...]] = []
    for window in source.rates:
        begin, end = max(window.start_s, start_s), min(window.end_s, end_s)
        if end <= begin or window.rate_per_s == 0:
            continue
        times = begin + _arrivals(
            rng, replace(window, rate_per_s=window.rate_per_s * rate_factor), end - begin
        )
        parts.append((times, *_lengths(rng, source, window.start_s, len(times))))
    num_requests = sum(len(part[0]) for part in parts)
    if not num_requests:
        raise TraceError(f"{source.name}: no request between {start_s:g} s and {end_s:g} s")
    times, prompts, outputs, ratios = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    ticks = np.rint(times * TICKS_PER_S).astype(np.int64)
    outputs = np.maximum(np.rint(outputs), 1)
    columns: dict[str, FieldValues] = {
        "id": Numbered(),
        "prompt_tokens": plain_array(np.maximum(np.rint(prompts), 1).astype(np.int64)),
        "output_tokens": plain_array(outputs.astype(np.int64)),
        "arrival_s": plain_array((ticks - ticks[0]) / TICKS_PER_S),
        "reasoning_tokens": plain_array(np.rint(outputs * ratios).astype(np.int64)),
    }
    recipe = f"servegen({source.name}, {start_s:g}..{end_s:g} s, rate x {rate_factor:g})"
    meta = replace(made(f"servegen-{source.name}", recipe, seed, num_requests), licence=LICENCE)
    return Workload(RequestTable(columns, num_requests), meta)


def _arrivals(rng: np.random.Generator, window: RateWindow, duration_s: float) -> Floats:
    """Return the arrival times within the window, in seconds from its start."""
    times = np.zeros(0)
    reached = 0.0
    while reached < duration_s:
        more = reached + np.cumsum(
            window.gaps(rng, int(window.rate_per_s * (duration_s - reached) * 1.1) + 16)
        )
        times = np.concatenate([times, more])
        reached = float(more[-1])
    return times[times < duration_s]


def _lengths(
    rng: np.random.Generator, source: ServeGenSource, time_s: float, num: int
) -> list[Floats]:
    index = bisect_right([window.start_s for window in source.lengths], time_s) - 1
    if index < 0:
        raise TraceError(f"{source.name}: no lengths for the time {time_s:g} s")
    window = source.lengths[index]
    for name in LENGTH_FIELDS:
        if name not in window.marginals:
            raise TraceError(
                f"{source.name}: {name} is empty in the lengths from {window.start_s:g} s on, "
                f"needed there"
            )
    return [window.marginals[name].draw(rng, num) for name in LENGTH_FIELDS]

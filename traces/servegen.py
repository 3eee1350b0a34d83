"""Workloads drawn from ServeGen's measured rates and length distributions.

Rates are one client's `chunk-N-trace.csv` (no header: window start, rate, cv, gap family and its two parameters) or the
sum over clients (`window_start_s,rate_req_per_s,...`); lengths are `chunk-N-dataset.json` (by window, strings that hold
a Python dict of value -> probability) or the marginals' quantiles. Either rates go with either lengths. Fields are
drawn independently of each other: the source publishes marginals only.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from traces.arrivals import TICKS_PER_S, positive
from traces.columns import Numbered
from traces.formats.servegen import LENGTH_FIELDS, LengthWindow, RateWindow, read_lengths, read_rates
from traces.recipe import generator, made
from traces.table import Column, RequestTable, plain_array
from traces.workload import TraceError, Workload

Floats = npt.NDArray[np.float64]
LICENCE = "Apache-2.0"  # of github.com/alibaba/ServeGen, whose figures the draws follow


@dataclass(frozen=True)
class ServeGenSource:
    """What a production service was asked, as distributions by window of time."""

    name: str
    rates: tuple[RateWindow, ...]
    lengths: tuple[LengthWindow, ...]

    @classmethod
    def read(cls, rates: Path | str, lengths: Path | str) -> "ServeGenSource":
        """Read a file of rates and one of lengths. Raises `TraceError` with file, place and value."""
        return cls(Path(rates).stem.removeprefix("servegen_"), read_rates(Path(rates)), read_lengths(Path(lengths)))


def servegen(
    source: ServeGenSource,
    seed: int = 0,
    start_s: float = 0.0,
    duration_s: float | None = None,
    rate_factor: float = 1.0,
) -> Workload:
    """Requests as the service may have got them between `start_s` and `start_s + duration_s` of the source's clock.

    Gaps begin anew with each window of rates; `rate_factor` makes them shorter. Lengths are rounded to whole tokens,
    at least 1; `reasoning_tokens` is the output times its drawn share of reasoning.
    """
    positive("rate_factor", rate_factor)
    end_s = math.inf if duration_s is None else start_s + duration_s
    rng = generator(seed)
    parts: list[tuple[Floats, ...]] = []
    for window in source.rates:
        begin, end = max(window.start_s, start_s), min(window.end_s, end_s)
        if end <= begin or window.rate_per_s == 0:
            continue
        times = begin + _arrivals(rng, replace(window, rate_per_s=window.rate_per_s * rate_factor), end - begin)
        parts.append((times, *_lengths(rng, source, window.start_s, len(times))))
    num_requests = sum(len(part[0]) for part in parts)
    if not num_requests:
        raise TraceError(f"{source.name}: no request between {start_s:g} s and {end_s:g} s")
    times, prompts, outputs, ratios = (np.concatenate(column) for column in zip(*parts, strict=True))
    ticks = np.rint(times * TICKS_PER_S).astype(np.int64)
    outputs = np.maximum(np.rint(outputs), 1)
    columns: dict[str, Column] = {
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
    """Arrival times within the window, from its beginning."""
    times = np.zeros(0)
    reached = 0.0
    while reached < duration_s:
        more = reached + np.cumsum(window.gaps(rng, int(window.rate_per_s * (duration_s - reached) * 1.1) + 16))
        times = np.concatenate([times, more])
        reached = float(more[-1])
    return times[times < duration_s]


def _lengths(rng: np.random.Generator, source: ServeGenSource, time_s: float, num: int) -> list[Floats]:
    index = bisect_right([window.start_s for window in source.lengths], time_s) - 1
    if index < 0:
        raise TraceError(f"{source.name}: no lengths for the time {time_s:g} s")
    window = source.lengths[index]
    for name in LENGTH_FIELDS:
        if name not in window.marginals:
            raise TraceError(
                f"{source.name}: {name} is empty in the lengths from {window.start_s:g} s on, needed there"
            )
    return [window.marginals[name].draw(rng, num) for name in LENGTH_FIELDS]

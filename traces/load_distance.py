"""How far one workload is from another: lengths, arrivals, shared prefixes, each with a distance and in words."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from traces.reuse import prefix_reuse
from traces.workload import TraceError, Workload

FloatArray = npt.NDArray[np.float64]
NEARLY_ALIKE, ANOTHER = 0.1, 0.25  # distances below which two distributions are alike, from which they are another's
SURE = 0.01  # a distance that chance gives more often than this is none
MOST_TERMS = 100
ALIKE_RATIO = 1.1


@dataclass(frozen=True)
class Distance:
    """Kolmogorov and Smirnov's: the largest difference of two distribution functions, 0 (the same) to 1.

    `chance`: how often two samples of these sizes from one distribution are at least so far apart.
    """

    value: float
    chance: float

    @property
    def is_alike(self) -> bool:
        """Too small to matter, or no more than chance gives."""
        return self.value < NEARLY_ALIKE or self.chance > SURE


def ks_distance(one: FloatArray, other: FloatArray) -> Distance:
    """The two-sample distance; its chance by the asymptotic series with Stephens' correction for small samples (1970).

    Ties make the true chance smaller. Raises TraceError on an empty sample.
    """
    if not len(one) or not len(other):
        raise TraceError("a distance needs values on both sides")
    values = np.concatenate([one, other])
    shares = [np.searchsorted(np.sort(side), values, side="right") / len(side) for side in (one, other)]
    distance = float(np.abs(shares[0] - shares[1]).max())
    effective = (len(one) * len(other) / (len(one) + len(other))) ** 0.5
    scaled = (effective + 0.12 + 0.11 / effective) * distance
    if scaled < 0.2:  # the series needs ever more terms, and its sum is 1 to nine digits
        return Distance(distance, 1.0)
    terms = np.arange(1, MOST_TERMS + 1)
    chance = 2.0 * float(((-1.0) ** (terms - 1) * np.exp(-2.0 * (terms * scaled) ** 2)).sum())
    return Distance(distance, min(max(chance, 0.0), 1.0))


@dataclass(frozen=True)
class LoadDifference:
    """One property of two loads: its typical value in each, how far they are apart, and that in words.

    `distance` is None where there is a single number on each side; `is_alike` then goes by their ratio.
    """

    name: str
    before: float | None
    now: float | None
    distance: Distance | None
    is_alike: bool
    words: str


def compare_loads(before: Workload, now: Workload) -> list[LoadDifference]:
    """Every property that both have: lengths, gaps between arrivals, rate, share of prompts that repeat."""
    found = [
        _lengths("prompt tokens", [row.prompt_tokens for row in before], [row.prompt_tokens for row in now]),
        _lengths("output tokens", [row.output_tokens for row in before], [row.output_tokens for row in now]),
    ]
    gaps = [_gaps(workload) for workload in (before, now)]
    if all(map(len, gaps)):
        found.append(_distribution("gap between arrivals, s", gaps[0], gaps[1], ("wider", "narrower"), 3))
        rates = [1.0 / float(each.mean()) if each.mean() > 0 else None for each in gaps]
        found.append(_single("arrivals a second", rates[0], rates[1], ("faster", "slower")))
    reuse = _reuse(before, now)
    if reuse is not None:
        found.append(_share("prompt blocks that repeat", *reuse))
    return found


def _lengths(name: str, before: list[int | None], now: list[int | None]) -> LoadDifference:
    sides = [np.array([value for value in side if value is not None], dtype=np.float64) for side in (before, now)]
    return _distribution(name, sides[0], sides[1], ("longer", "shorter"), 0)


def _gaps(workload: Workload) -> FloatArray:
    times = [row.arrival_s for row in workload if row.arrival_s is not None]
    return np.diff(np.sort(np.array(times, dtype=np.float64)))


def _distribution(
    name: str, before: FloatArray, now: FloatArray, directions: tuple[str, str], digits: int
) -> LoadDifference:
    medians = [float(np.median(side)) if len(side) else None for side in (before, now)]
    if not len(before) or not len(now):
        return LoadDifference(name, medians[0], medians[1], None, True, f"{name}: not known on both sides")
    distance = ks_distance(before, now)
    shown = f"distance {distance.value:.2f}"
    if distance.is_alike:
        return LoadDifference(name, medians[0], medians[1], distance, True, f"{name}: alike ({shown})")
    middle = [float(np.median(side)) for side in (before, now)]
    if middle[0] == middle[1]:
        middle = [float(side.mean()) for side in (before, now)]
    direction = directions[0] if middle[1] > middle[0] else directions[1]
    how = "another distribution, " if distance.value >= ANOTHER else ""
    words = f"{name}: {how}{direction}, half above {middle[1]:,.{digits}f} instead of {middle[0]:,.{digits}f} ({shown})"
    return LoadDifference(name, medians[0], medians[1], distance, False, words)


def _single(name: str, before: float | None, now: float | None, directions: tuple[str, str]) -> LoadDifference:
    if not before or not now:
        return LoadDifference(name, before, now, None, True, f"{name}: not known on both sides")
    ratio = now / before
    if 1.0 / ALIKE_RATIO <= ratio <= ALIKE_RATIO:
        return LoadDifference(name, before, now, None, True, f"{name}: alike ({now:,.3g} and {before:,.3g})")
    direction = directions[0] if ratio > 1.0 else directions[1]
    return LoadDifference(
        name, before, now, None, False, f"{name}: {direction}, {now:,.3g} instead of {before:,.3g} ({ratio:.2f} times)"
    )


def _share(name: str, before: float, now: float) -> LoadDifference:
    alike = abs(now - before) < NEARLY_ALIKE
    words = f"alike ({now:.0%} and {before:.0%})" if alike else f"{now:.0%} instead of {before:.0%}"
    return LoadDifference(name, before, now, None, alike, f"{name}: {words}")


def _reuse(before: Workload, now: Workload) -> tuple[float, float] | None:
    """Leading blocks that repeat in each, in blocks of a size that both can be cut into; None where it is unknown."""
    sizes = [workload.meta.block_size for workload in (before, now)]
    known = [size for size in sizes if size is not None]
    if not known:
        return None
    try:
        found = [prefix_reuse(workload, max(known)) for workload in (before, now)]
    except TraceError:
        return None  # their blocks do not divide one another
    if not all(each.num_requests for each in found):
        return None
    return found[0].share, found[1].share

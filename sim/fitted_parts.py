"""The parts of the cost model that are fitted one by one: which rows, which terms, how far off."""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sim.cost import CostModel
from sim.measurements import Table
from sim.profile import FitError
from sim.robust import robust_linear
from sim.step_times import step_seconds, together_seconds

FloatArray = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Values = Mapping[str, float]
COMPRESSION_TERMS = (
    "compression_start_s", "compression_launch_s", "compression_source_token_s", "compression_kept_token_s",
)  # fmt: skip


class Part(Protocol):
    """Rows that some coefficients are fitted to."""

    @property
    def measured(self) -> FloatArray:
        """Seconds of every row."""

    @property
    def groups(self) -> Mapping[str, Mask]:
        """Rows by the name under which their error is stated."""

    def fit(self, kept: Mask) -> dict[str, float]:
        """Coefficients from the rows of the mask."""

    def predicted(self, coefficients: Values) -> FloatArray:
        """Seconds of every row by these."""


def cost_of(coefficients: Values) -> CostModel:
    """A cost model of these coefficients, all of them."""
    return CostModel(gpu="", model="", source="", **coefficients)


def errors(part: Part, coefficients: Values) -> dict[str, FitError]:
    """How far these coefficients are off, by group."""
    off = relative(part, coefficients)
    return stated({name: off[mask] for name, mask in part.groups.items()})


def relative(part: Part, coefficients: Values) -> FloatArray:
    """|predicted - measured| / measured of every row."""
    return np.asarray(np.abs(part.predicted(coefficients) - part.measured) / part.measured)


def stated(errors: Mapping[str, FloatArray]) -> dict[str, FitError]:
    """Mean, largest and number of the errors under each name that has some."""
    return {name: FitError(float(off.mean()), float(off.max()), len(off)) for name, off in errors.items() if len(off)}


class Compressions:
    """Compressions alone: a step's start, a sequence's launch, tokens read, tokens kept."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.measured = table["seconds"]

    @property
    def groups(self) -> Mapping[str, Mask]:
        """See `Part`."""
        return {"compression": np.ones(len(self.table), dtype=bool)}

    def _terms(self) -> FloatArray:
        count = self.table["sequences"]
        source, kept = count * self.table["source_tokens"], count * self.table["kept_tokens"]
        return np.stack([np.ones(len(self.table)), count, source, kept], axis=1)

    def predicted(self, coefficients: Values) -> FloatArray:
        """See `Part`."""
        return np.asarray(self._terms() @ np.array([coefficients[name] for name in COMPRESSION_TERMS]))

    def fit(self, kept: Mask) -> dict[str, float]:
        """See `Part`."""
        return _linear(self._terms(), self.measured, COMPRESSION_TERMS, kept)


class Swaps:
    """Swaps, both ways alike."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.measured = table["seconds"]

    @property
    def groups(self) -> Mapping[str, Mask]:
        """See `Part`."""
        return {"swap": np.ones(len(self.table), dtype=bool)}

    def _terms(self) -> FloatArray:
        return np.stack([np.ones(len(self.table)), self.table["tokens"]], axis=1)

    def predicted(self, coefficients: Values) -> FloatArray:
        """See `Part`."""
        return np.asarray(self._terms() @ np.array([coefficients["swap_launch_s"], coefficients["swap_token_s"]]))

    def fit(self, kept: Mask) -> dict[str, float]:
        """See `Part`."""
        return _linear(self._terms(), self.measured, ("swap_launch_s", "swap_token_s"), kept)


class Beside:
    """Two steps, the first of which starts compressions: what each takes from the other's speed.

    A step of everybody was measured a little later (`after`); one of those that are not compressed is that less what
    the model says of the difference.
    """

    def __init__(self, table: Table, cost: CostModel) -> None:
        self.table = table
        self.measured = table["seconds"]
        count = table["sequences"]
        alone = {"prefills": np.zeros(len(table)), "prefill_tokens": np.zeros(len(table))}
        alone["prefill_pairs"] = alone["prefills"]
        few = {**alone, "decodes": table["decodes"], "context_tokens": table["context_tokens"]}
        everyone = {
            **alone, "decodes": table["decodes"] + count, "context_tokens": table["after_context_tokens"],
        }  # fmt: skip
        self._after = table["after"]
        self._work = np.maximum(table["after"] - step_seconds(cost, everyone) + step_seconds(cost, few), 0.0)
        tokens = cost.compression_source_token_s * table["source_tokens"]
        tokens = tokens + cost.compression_kept_token_s * table["kept_tokens"]
        self._compression = cost.compression_start_s + count * (cost.compression_launch_s + tokens)

    @property
    def groups(self) -> Mapping[str, Mask]:
        """See `Part`."""
        return {"overlap": np.ones(len(self.table), dtype=bool)}

    def predicted(self, coefficients: Values) -> FloatArray:
        """See `Part`."""
        share, rate = coefficients["compression_share"], coefficients["compression_rate"]
        return self._after + together_seconds(self._work, self._compression, share, rate)

    def fit(self, kept: Mask) -> dict[str, float]:
        """See `Part`."""

        def error(share: float, rate: float) -> float:
            predicted = self.predicted({"compression_share": share, "compression_rate": rate})
            return float((((predicted - self.measured) / self.measured)[kept] ** 2).sum())

        share, rate = _least(error)
        return {"compression_share": share, "compression_rate": rate}


def _least(error: Callable[[float, float], float]) -> tuple[float, float]:
    """Share and rate of the least error, by a grid that gets finer; of equals the largest rate."""
    low, high = np.array([0.001, 0.01]), np.array([0.95, 1.0])
    share, rate = 0.5, 0.5
    for _ in range(4):
        points = [
            (error(float(x), float(y)), -float(y), float(x))
            for x in np.geomspace(low[0], high[0], 25)
            for y in np.geomspace(low[1], high[1], 25)
        ]
        _, minus_rate, share = min(points)
        rate = -minus_rate
        width = (high / low) ** 0.12
        low = np.maximum(np.array([share, rate]) / width, (0.001, 0.01))
        high = np.minimum(np.array([share, rate]) * width, (0.95, 1.0))
    return share, rate


def _linear(terms: FloatArray, measured: FloatArray, names: tuple[str, ...], kept: Mask) -> dict[str, float]:
    found = robust_linear(terms[kept], measured[kept])
    return {name: float(value) for name, value in zip(names, found, strict=True)}

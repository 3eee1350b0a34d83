"""The parts of the cost model that are fitted one by one: which rows, which terms, how far off."""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sim.cost import CostModel
from sim.measurements import PARTS, Table
from sim.model_shape import Model
from sim.nnls import nonnegative_least_squares
from sim.profile import FitError
from sim.step_times import step_seconds, together_seconds

FloatArray = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Values = Mapping[str, float]
MOST_ROUNDS = 6
STEP_TERMS = (
    "step_s", "weight_read_s", "product_flop_s", "request_s", "kv_read_token_s", "attention_pair_s", "prefill_step_s",
    "launch_s",
)  # fmt: skip
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


class Steps:
    """Steps: linear but for the two places where one thing hides another.

    Which rows wait for the weights and which for the arithmetic of the products, and which wait for their launches, is
    searched for: rows are cut by their number of operations, steps with prefill by the time since they were planned.
    """

    def __init__(self, table: Table, model: Model) -> None:
        self.table = table
        self.measured = table["seconds"]
        self._model = model
        rows = table["decodes"] + table["prefill_tokens"]
        heads = table["decodes"] + table["prefills"]
        self._flops = model.layer_flops_per_token * rows + model.head_flops_per_row * heads
        self._chunked = table["prefills"] > 0
        self._launching = self.measured + table["before_s"]  # from when a step could be launched to its end

    @property
    def groups(self) -> Mapping[str, Mask]:
        """See `Part`."""
        parts = np.array(self.table.parts)
        return {name: parts == name for name in PARTS}

    def predicted(self, coefficients: Values) -> FloatArray:
        """See `Part`."""
        others = dict.fromkeys((*COMPRESSION_TERMS, "swap_launch_s", "swap_token_s"), 0.0)
        shares = {"compression_share": 0.5, "compression_rate": 0.5}
        steps = {name: value for name, value in coefficients.items() if name not in (*others, *shares)}
        return step_seconds(cost_of({**steps, **others, **shares}), self.table.columns)

    def fit(self, kept: Mask) -> dict[str, float]:
        """See `Part`."""
        flops = np.unique(self._flops[kept])
        cuts = np.concatenate([(flops[1:] + flops[:-1]) / 2, [np.inf]])  # above it the arithmetic counts
        times = np.unique(self._launching[kept & self._chunked])
        waits = np.concatenate([[0.0], times])  # up to it a step with prefill waits for its launches
        best, found = np.inf, {}
        cut, wait = np.inf, 0.0
        for _ in range(MOST_ROUNDS):
            before = best
            for candidate in cuts:
                error, values = self._fit_cut(kept, float(candidate), wait)
                if error < best:
                    best, found, cut = error, values, float(candidate)
            for candidate in waits:
                error, values = self._fit_cut(kept, cut, float(candidate))
                if error < best:
                    best, found, wait = error, values, float(candidate)
            if best >= before:
                break
        return found

    def _fit_cut(self, kept: Mask, cut: float, wait: float) -> tuple[float, dict[str, float]]:
        """Least squares with the rows so divided, and the error that the undivided model then has."""
        table = self.table
        arithmetic, launches = self._flops > cut, self._chunked & (self._launching <= wait)
        works = ~launches
        terms = np.stack(
            [
                works,
                works & ~arithmetic,
                self._flops * (works & arithmetic),
                (table["decodes"] + table["prefills"]) * works,
                table["context_tokens"] * works,
                table["prefill_pairs"] * works,
                self._chunked,
                launches,
            ],
            axis=1,
        ).astype(np.float64)
        weighted = (terms / self.measured[:, None])[kept]
        known = table["before_s"] * launches  # of the launch, that much was over when the step began
        aim = (1.0 + known / self.measured)[kept]
        values = dict(zip(STEP_TERMS, nonnegative_least_squares(weighted, aim), strict=True))
        flop_s = float(values.pop("product_flop_s"))
        found = {name: float(value) for name, value in values.items()}
        found |= {
            "layer_token_s": flop_s * self._model.layer_flops_per_token,
            "head_row_s": flop_s * self._model.head_flops_per_row,
        }
        off = (self.predicted(found) / self.measured - 1.0)[kept]
        return float((off**2).sum()), found


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
    found = nonnegative_least_squares((terms / measured[:, None])[kept], np.ones(int(kept.sum())))
    return {name: float(value) for name, value in zip(names, found, strict=True)}

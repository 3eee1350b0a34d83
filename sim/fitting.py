"""Fit the cost model to measurements: robust least squares of relative errors, part by part.

`fit` makes a profile from the measurements of a calibration. The parts are steps (`FittedSteps`),
compressions, swaps, and compressions beside a step (`Beside`); each fits its own coefficients.
docs/COST.md explains which rows each part uses and why the parts are fitted in this order.

The solvers are a non-negative least squares (`nonnegative_least_squares`) and two robust fits on
top of it (`robust_linear`, `robust_nonlinear`), which are iteratively reweighted so that a few
disturbed measurements do not move the result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import scipy  # scipy loads a submodule such as scipy.optimize at its first use

from zlab.sim.cost_model import CostModel, Efficiencies, step_seconds, together_seconds
from zlab.sim.profiles import (
    PARTS,
    FitError,
    MeasurementError,
    Measurements,
    Profile,
    ProfileFigure,
    Table,
)
from zlab.sim.specs import PROFILE_SHAPE, ModelSpec, gpu_of_card

FloatArray = npt.NDArray[np.float64]


def nonnegative_least_squares(matrix: FloatArray, values: FloatArray) -> FloatArray:
    """Return the x >= 0 that minimises |matrix @ x - values|.

    `matrix [n, k]`, `values [n]`, result `[k]`. The columns are scaled to length one for the
    search, so that units do not matter; a column of zeros gets the coefficient 0.
    """
    lengths = np.sqrt((matrix**2).sum(axis=0))
    lengths = np.where(lengths > 0.0, lengths, 1.0)
    found: FloatArray = scipy.optimize.nnls(matrix / lengths, values)[0]
    return found / lengths


MAD_TO_SIGMA = 1.4826  # standard deviation of a normal distribution / median of its absolute values
LEAST_SCALE = 0.01  # a relative spread below this counts as this
# in units of the spread; the usual constants, with 95 % efficiency on normal errors
HUBER, BISQUARE = 1.3, 4.7
HUBER_ROUNDS, MOST_ROUNDS = 8, 60
SETTLED = 1e-9  # relative change of the parameters that ends the rounds
DIFFERENCE = 1e-4  # step of the numerical derivative, as a share of the parameter's size
LEAST_STEP = 2.0**-8


@dataclass(frozen=True)
class Solution:
    """The result of a robust fit: the parameters `[k]`, the weight of each row `[n]`, and the mean
    absolute error as `mean_loss` counts it.
    """

    values: FloatArray
    weights: FloatArray
    loss: float


def weights_of(errors: FloatArray, settled: bool) -> FloatArray:
    """Return a weight in [0, 1] for each error: Huber's weights (1964) at first, Tukey's bisquare
    once the fit has `settled`.
    """
    spread = max(MAD_TO_SIGMA * float(np.median(np.abs(errors))), LEAST_SCALE)
    if not settled:
        return np.asarray(1.0 / np.maximum(np.abs(errors) / (HUBER * spread), 1.0))
    return np.asarray(np.maximum(1.0 - (errors / (BISQUARE * spread)) ** 2, 0.0) ** 2)


def robust_linear(terms: FloatArray, measured: FloatArray) -> FloatArray:
    """Return the x >= 0 for which `terms @ x` is nearest to most of `measured`, by relative error.
    Shapes: `terms [n, k]`, `measured [n]`, result `[k]`.
    """
    relative = terms / measured[:, None]
    weights = np.ones(len(measured))
    found = np.zeros(terms.shape[1])
    for number in range(MOST_ROUNDS):
        root = np.sqrt(weights)
        before, found = found, nonnegative_least_squares(relative * root[:, None], root)
        if number > HUBER_ROUNDS and np.allclose(before, found, rtol=SETTLED, atol=0.0):
            break
        weights = weights_of(relative @ found - 1.0, number >= HUBER_ROUNDS)
    return found


def robust_nonlinear(
    predicted: Callable[[FloatArray], FloatArray],
    measured: FloatArray,
    start: FloatArray,
    most: FloatArray,
) -> Solution:
    """Find parameters in [0, `most`] whose prediction is nearest to most of `measured`, by relative
    error.

    The method is Gauss-Newton. Each step solves a non-negative least squares of the linearised
    model and is halved until it reduces the weighted error.

    Args:
        predicted: Prediction for parameters `[k]`; returns `[n]`.
        measured: Measured values, `[n]`.
        start: First parameters, all above 0, `[k]`. They also set the scale of each parameter.
        most: Upper bounds, `[k]`.

    Returns:
        Parameters, weights and loss.
    """
    # scipy's least_squares takes 2 to 3 times as long on the measurements of the H200, and its
    # result for launch_s is 3 % away from this one.
    sizes, values = start, start.copy()
    weights = np.ones(len(measured))

    def errors(at: FloatArray) -> FloatArray:
        return np.asarray(predicted(at) / measured - 1.0)

    for number in range(MOST_ROUNDS):
        off = errors(values)
        weights = weights_of(off, number >= HUBER_ROUNDS)
        slopes = np.empty((len(measured), len(values)))
        for place, size in enumerate(sizes):
            moved, change = values.copy(), DIFFERENCE * float(size)
            if moved[place] + change > most[place]:
                change = -change
            moved[place] += change
            slopes[:, place] = (errors(moved) - off) / change
        root = np.sqrt(weights)
        aim = np.minimum(
            nonnegative_least_squares(slopes * root[:, None], (slopes @ values - off) * root), most
        )
        before, share = float((weights * off**2).sum()), 1.0
        while (
            share >= LEAST_STEP
            and float((weights * errors(values + share * (aim - values)) ** 2).sum()) > before
        ):
            share /= 2.0
        moved = values + share * (aim - values) if share >= LEAST_STEP else values
        settled = np.all(np.abs(moved - values) <= SETTLED * sizes)
        values = moved
        if settled and number > HUBER_ROUNDS:
            break
    return Solution(values, weights, mean_loss(errors(values)))


def mean_loss(errors: FloatArray) -> float:
    """Return the mean absolute error, with errors above 0.1 counted as 0.1. It ranks solutions by
    how well they fit most rows.
    """
    return float(np.minimum(np.abs(errors), 0.1).mean())


Mask = npt.NDArray[np.bool_]
Values = Mapping[str, float]
COMPRESSION_TERMS = (
    "compression_start_s",
    "compression_launch_s",
    "compression_source_token_s",
    "compression_kept_token_s",
)


class FittedPart(Protocol):
    """Measured rows and the coefficients that are fitted to them."""

    @property
    def measured(self) -> FloatArray:
        """Measured seconds of each row, `[n]`."""

    @property
    def groups(self) -> Mapping[str, Mask]:
        """Masks over the rows, by the name under which their error is reported."""

    def fit(self, kept: Mask) -> dict[str, float]:
        """Return coefficients fitted to the rows of the mask."""

    def predicted(self, coefficients: Values) -> FloatArray:
        """Return the predicted seconds of each row for these coefficients, `[n]`."""


def cost_of(coefficients: Values) -> CostModel:
    """Return a cost model with these coefficients; all of them must be given."""
    return CostModel(gpu="", model="", source="", **coefficients)


def errors(part: FittedPart, coefficients: Values) -> dict[str, FitError]:
    """Return the prediction errors for these coefficients, by group."""
    off = relative(part, coefficients)
    return stated({name: off[mask] for name, mask in part.groups.items()})


def relative(part: FittedPart, coefficients: Values) -> FloatArray:
    """Return |predicted - measured| / measured of each row."""
    return np.asarray(np.abs(part.predicted(coefficients) - part.measured) / part.measured)


def stated(errors: Mapping[str, FloatArray]) -> dict[str, FitError]:
    """Return mean, maximum and number of the errors under each name. Names without errors are left
    out.
    """
    return {
        name: FitError(float(off.mean()), float(off.max()), len(off))
        for name, off in errors.items()
        if len(off)
    }


class Compressions:
    """Compressions on an otherwise idle GPU: cost per step, per sequence, per source token and per
    kept token.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.measured = table["seconds"]

    @property
    def groups(self) -> Mapping[str, Mask]:
        """See `FittedPart`."""
        return {"compression": np.ones(len(self.table), dtype=bool)}

    def _terms(self) -> FloatArray:
        count = self.table["sequences"]
        source, kept = count * self.table["source_tokens"], count * self.table["kept_tokens"]
        return np.stack([np.ones(len(self.table)), count, source, kept], axis=1)

    def predicted(self, coefficients: Values) -> FloatArray:
        """See `FittedPart`."""
        return np.asarray(
            self._terms() @ np.array([coefficients[name] for name in COMPRESSION_TERMS])
        )

    def fit(self, kept: Mask) -> dict[str, float]:
        """See `FittedPart`."""
        return _linear(self._terms(), self.measured, COMPRESSION_TERMS, kept)


class Swaps:
    """Swaps. Both directions use the same coefficients."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.measured = table["seconds"]

    @property
    def groups(self) -> Mapping[str, Mask]:
        """See `FittedPart`."""
        return {"swap": np.ones(len(self.table), dtype=bool)}

    def _terms(self) -> FloatArray:
        return np.stack([np.ones(len(self.table)), self.table["tokens"]], axis=1)

    def predicted(self, coefficients: Values) -> FloatArray:
        """See `FittedPart`."""
        return np.asarray(
            self._terms() @ np.array([coefficients["swap_launch_s"], coefficients["swap_token_s"]])
        )

    def fit(self, kept: Mask) -> dict[str, float]:
        """See `FittedPart`."""
        return _linear(self._terms(), self.measured, ("swap_launch_s", "swap_token_s"), kept)


class Beside:
    """Two consecutive steps of which the first starts compressions: how much each stream slows the
    other.

    `after` measures a later step of all requests. A step of only the requests that are not
    compressed takes that time minus the difference that the cost model gives.
    """

    def __init__(self, table: Table, cost: CostModel) -> None:
        self.table = table
        self.measured = table["seconds"]
        count = table["sequences"]
        alone = {"prefills": np.zeros(len(table)), "prefill_tokens": np.zeros(len(table))}
        alone["prefill_pairs"] = alone["prefills"]
        few = {**alone, "decodes": table["decodes"], "context_tokens": table["context_tokens"]}
        everyone = {
            **alone,
            "decodes": table["decodes"] + count,
            "context_tokens": table["after_context_tokens"],
        }
        self._after = table["after"]
        self._work = np.maximum(
            table["after"] - step_seconds(cost, everyone) + step_seconds(cost, few), 0.0
        )
        tokens = cost.compression_source_token_s * table["source_tokens"]
        tokens = tokens + cost.compression_kept_token_s * table["kept_tokens"]
        self._compression = cost.compression_start_s + count * (cost.compression_launch_s + tokens)

    @property
    def groups(self) -> Mapping[str, Mask]:
        """See `FittedPart`."""
        return {"overlap": np.ones(len(self.table), dtype=bool)}

    def predicted(self, coefficients: Values) -> FloatArray:
        """See `FittedPart`."""
        share, rate = coefficients["compression_share"], coefficients["compression_rate"]
        return self._after + together_seconds(self._work, self._compression, share, rate)

    def fit(self, kept: Mask) -> dict[str, float]:
        """See `FittedPart`."""

        def error(share: float, rate: float) -> float:
            predicted = self.predicted({"compression_share": share, "compression_rate": rate})
            return float((((predicted - self.measured) / self.measured)[kept] ** 2).sum())

        share, rate = _least(error)
        return {"compression_share": share, "compression_rate": rate}


def _least(error: Callable[[float, float], float]) -> tuple[float, float]:
    """Return (share, rate) with the smallest error, by a grid search that gets finer. Among equal
    errors the largest rate wins.
    """
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


def _linear(
    terms: FloatArray, measured: FloatArray, names: tuple[str, ...], kept: Mask
) -> dict[str, float]:
    found = robust_linear(terms[kept], measured[kept])
    return {name: float(value) for name, value in zip(names, found, strict=True)}


STEP_TERMS = (
    "step_s",
    "weight_read_s",
    "product_flop_s",
    "request_s",
    "kv_read_token_s",
    "attention_wait_token_s",
    "attention_pair_s",
    "launch_s",
    "mixed_launch_s",
    "corner",
)
OTHERS = (
    "compression_start_s",
    "compression_launch_s",
    "compression_source_token_s",
    "compression_kept_token_s",
    "swap_launch_s",
    "swap_token_s",
)
START_CORNERS = (0.1, 0.5)
START_LAUNCHES = (
    0.0,
    0.2,
    0.5,
)  # share of the steps with chunks whose launch is assumed to be the bottleneck at the start
# Start value of a term that the linear fit sets to less: its largest amount takes this share of a
# step.
SMALL = 0.05


class FittedSteps:
    """Steps with and without prefill chunks. One rate, `product_flop_s`, sets both `head_row_s` and
    `layer_token_s`.

    For a step that has chunks only, no part of the launch is hidden: the step starts on an idle
    GPU, or after a step of the same kind. For a step that also decodes, the step before it only
    decodes, and the launch overlaps with it for `before_s`.
    """

    def __init__(self, table: Table, model: ModelSpec, graph_tokens: int) -> None:
        """Prepare the rows.

        Args:
            table: The measured steps.
            model: Shape of the model.
            graph_tokens: As in `Measurements`.
        """
        self.table = table
        self._graph_tokens = graph_tokens
        self.measured = table["seconds"]
        self._model = model
        self._before_s = np.where(table["decodes"] > 0, table["before_s"], 0.0)
        self._columns = {**table.columns, "before_s": self._before_s}

    @property
    def groups(self) -> Mapping[str, Mask]:
        """See `FittedPart`."""
        parts = np.array(self.table.parts)
        return {name: parts == name for name in PARTS}

    def predicted(self, coefficients: Values) -> FloatArray:
        """See `FittedPart`."""
        return step_seconds(self._cost(coefficients), self._columns)

    def _cost(self, coefficients: Values) -> CostModel:
        shares = {"compression_share": 0.5, "compression_rate": 0.5}
        return cost_of({**coefficients, **dict.fromkeys(OTHERS, 0.0), **shares})

    def fit(self, kept: Mask) -> dict[str, float]:
        """Return fitted coefficients, as in `FittedPart`. The best of several starts is taken,
        because the maximum of work and launch has several local minima.
        """
        columns = {name: values[kept] for name, values in self._columns.items()}
        measured = self.measured[kept]
        most = np.array([1.0 if name == "corner" else np.inf for name in STEP_TERMS])

        def predicted(values: FloatArray) -> FloatArray:
            return step_seconds(self._cost(self._coefficients(values)), columns)

        found = [robust_nonlinear(predicted, measured, start, most) for start in self._starts(kept)]
        return self._coefficients(min(found, key=lambda each: each.loss).values)

    def _starts(self, kept: Mask) -> list[FloatArray]:
        """Return start values: linear fits that assume that nothing overlaps, except for the steps
        with chunks whose launch is the bottleneck.
        """
        table, measured = self.table, self.measured[kept]
        rows = table["decodes"] + table["prefill_tokens"]
        heads = table["decodes"] + table["prefills"]
        flops = self._model.layer_flops_per_token * rows + self._model.head_flops_per_row * heads
        amounts = (
            np.ones(len(table)),
            flops,
            heads,
            table["context_tokens"],
            table["decodes"] > 0,
            table["prefill_pairs"],
        )
        work = np.stack(amounts, axis=1).astype(np.float64)[kept]
        launched = (table["prefills"] > 0) & (
            table["decodes"] + table["prefill_tokens"] > self._graph_tokens
        )
        chunked = launched[kept]
        # from the time at which a step could be launched to its end
        launching = measured + self._before_s[kept]
        starts = []
        for share in START_LAUNCHES:
            launch_s = (
                float(np.quantile(launching[chunked], share)) if chunked.any() and share else 0.0
            )
            working = ~chunked | (launching > launch_s)
            found = robust_linear(work[working], measured[working])
            typical = SMALL * np.median(measured) / np.maximum(work.max(axis=0), 1.0)
            fixed_s, flop_s, request_s, kv_s, _, pair_s = np.maximum(found, typical)
            mixed_s = max(launch_s / 4, float(typical[0]))
            wait_s = fixed_s / 10_000.0
            starts += [
                np.array(
                    [
                        fixed_s / 4,
                        fixed_s,
                        flop_s,
                        request_s,
                        kv_s,
                        wait_s,
                        pair_s,
                        max(launch_s, typical[0]),
                        mixed_s,
                        corner,
                    ]
                )
                for corner in START_CORNERS
            ]
        return starts

    def _coefficients(self, values: FloatArray) -> dict[str, float]:
        found = {name: float(value) for name, value in zip(STEP_TERMS, values, strict=True)}
        flop_s = found.pop("product_flop_s")
        return found | {
            "graph_tokens": float(self._graph_tokens),
            "layer_token_s": flop_s * self._model.layer_flops_per_token,
            "head_row_s": flop_s * self._model.head_flops_per_row,
        }


NUM_FOLDS = 4
NEEDED = ("steps", "compressions", "swaps")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def fit(measured: Measurements) -> Profile:
    """Return the profile of the GPU, model and dtype that were measured. Raise MeasurementError if
    a table that is needed has no rows.
    """
    for name in NEEDED:
        if not len(measured.tables[name]):
            raise MeasurementError(f"no rows of {name} were measured, so nothing can be fitted")
    shape: dict[str, Any] = {PROFILE_SHAPE[key]: size for key, size in measured.shape.items()}
    model = ModelSpec(measured.model, tied_embeddings=False, max_positions=1, **shape)
    parts: list[FittedPart] = [
        FittedSteps(measured.tables["steps"], model, measured.graph_tokens),
        Compressions(measured.tables["compressions"]),
        Swaps(measured.tables["swaps"]),
    ]
    # without a measurement, running both at once gains no time
    unknown = Efficiencies().compression_share
    coefficients = {"compression_share": unknown, "compression_rate": unknown}
    for part in parts:
        coefficients |= part.fit(_all(part))
    if len(measured.tables["beside"]):
        parts.append(Beside(measured.tables["beside"], cost_of(coefficients)))
        coefficients |= parts[-1].fit(_all(parts[-1]))
    fit_error: dict[str, FitError] = {}
    held_out: dict[str, FitError] = {}
    for part in parts:
        fit_error |= errors(part, coefficients)
        held_out |= _held_out(part, coefficients)
    return Profile(
        gpu=gpu_of_card(measured.card),
        model=measured.model,
        shape=measured.shape,
        dtype=measured.dtype,
        card=measured.card,
        date=measured.date,
        versions=measured.versions,
        block_size=measured.block_size,
        window=measured.window,
        coefficients=coefficients,
        fit_error=fit_error,
        held_out_error=held_out,
        also=_also(measured, model, coefficients) | _median_errors(parts, coefficients),
    )


def _all(part: FittedPart) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.ones(len(part.measured), dtype=bool)


def _held_out(part: FittedPart, coefficients: Values) -> dict[str, FitError]:
    """Return the errors of each row under a fit to other rows. There are `NUM_FOLDS` fits; each
    leaves out every `NUM_FOLDS`-th row of each group.
    """
    fold = np.zeros(len(part.measured), dtype=int)
    for mask in part.groups.values():
        fold[mask] = np.arange(int(mask.sum())) % NUM_FOLDS
    off = np.full(len(part.measured), np.nan)
    for number in range(NUM_FOLDS):
        rows = fold == number
        if rows.any() and not rows.all():
            off[rows] = relative(part, {**coefficients, **part.fit(~rows)})[rows]
    return stated({name: off[mask & ~np.isnan(off)] for name, mask in part.groups.items()})


def _median_errors(parts: Sequence[FittedPart], coefficients: Values) -> dict[str, ProfileFigure]:
    """Return the median error of each part. Unlike the mean, it does not depend on a few disturbed
    measurements.
    """
    unit = "fraction of the measured time, median of the cells"
    found = {}
    for part in parts:
        off = relative(part, coefficients)
        for name, mask in part.groups.items():
            if mask.any():
                found[f"{name}_median_error"] = ProfileFigure(float(np.median(off[mask])), unit)
    return found


def _also(
    measured: Measurements, model: ModelSpec, coefficients: Values
) -> dict[str, ProfileFigure]:
    """Return further results of the measurements: rates to compare with a datasheet, and values
    that no simulation uses.
    """
    tables = measured.tables
    sized = replace(model, dtype_bytes=DTYPE_BYTES.get(measured.dtype, 2))
    figures = {
        f"{name}_spread": ProfileFigure(
            table.spread, "p90 - p10 of repeats / median, median of the cells"
        )
        for name, table in tables.items()
        if table.spread is not None
    }
    for name, amount, unit, coefficient in (
        ("kv_read_bytes_per_s", sized.kv_bytes_per_token, "B per s", "kv_read_token_s"),
        ("weight_read_bytes_per_s", sized.step_weight_bytes, "B per s", "weight_read_s"),
        ("product_flop_per_s", sized.layer_flops_per_token, "operations per s", "layer_token_s"),
        (
            "attention_flop_per_s",
            sized.attention_flops_per_pair,
            "operations per s",
            "attention_pair_s",
        ),
        ("swap_bytes_per_s", sized.kv_bytes_per_token, "B per s", "swap_token_s"),
    ):
        if coefficients[coefficient] > 0.0:
            figures[name] = ProfileFigure(amount / coefficients[coefficient], unit)
    for name, table, counts, seconds in (
        ("host", tables["host"], "decodes", "seconds"),
        ("drawing", tables["sampling"], "rows", "drawn"),
    ):
        if len(table):
            more = (
                table[seconds]
                if name == "host"
                else np.maximum(table["drawn"] - table["plain"], 0.0)
            )
            terms = np.stack([np.ones(len(table)), table[counts]], axis=1)
            step_s, row_s = nonnegative_least_squares(terms, more)
            figures |= {
                f"{name}_step_s": ProfileFigure(float(step_s), "s per step"),
                f"{name}_row_s": ProfileFigure(float(row_s), "s per request in the step"),
            }
    return figures

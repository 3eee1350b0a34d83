"""From measurements to a profile: the cost model's coefficients by robust least squares of relative errors.

What is fitted to what, and why in this order, stands in docs/COST.md.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sim.cost import Efficiencies
from sim.fitted_parts import Beside, Compressions, Part, Swaps, Values, cost_of, errors, relative, stated
from sim.fitted_steps import Steps
from sim.hardware import gpu_of_card
from sim.measurements import MeasurementError, Measurements
from sim.model_shape import Model
from sim.nnls import nonnegative_least_squares
from sim.profile import Figure, FitError, Profile

NUM_FOLDS = 4
NEEDED = ("steps", "compressions", "swaps")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def fit(measured: Measurements) -> Profile:
    """The profile of the card, model and dtype that were measured.

    Raises MeasurementError where a table that is needed has no rows.
    """
    for name in NEEDED:
        if not len(measured.tables[name]):
            raise MeasurementError(f"nothing was measured of {name}: there is nothing to fit")
    shape: dict[str, Any] = dict(measured.shape)
    model = Model(measured.model, tied_embeddings=False, max_positions=1, **shape)
    parts: list[Part] = [
        Steps(measured.tables["steps"], model, measured.graph_tokens),
        Compressions(measured.tables["compressions"]),
        Swaps(measured.tables["swaps"]),
    ]
    unknown = Efficiencies().compression_share  # without a measurement of it overlap gains nothing
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


def _all(part: Part) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.ones(len(part.measured), dtype=bool)


def _held_out(part: Part, coefficients: Values) -> dict[str, FitError]:
    """Errors of every row under a fit to others: `NUM_FOLDS` fits, each without every so manieth row of a group."""
    fold = np.zeros(len(part.measured), dtype=int)
    for mask in part.groups.values():
        fold[mask] = np.arange(int(mask.sum())) % NUM_FOLDS
    off = np.full(len(part.measured), np.nan)
    for number in range(NUM_FOLDS):
        rows = fold == number
        if rows.any() and not rows.all():
            off[rows] = relative(part, {**coefficients, **part.fit(~rows)})[rows]
    return stated({name: off[mask & ~np.isnan(off)] for name, mask in part.groups.items()})


def _median_errors(parts: Sequence[Part], coefficients: Values) -> dict[str, Figure]:
    """The middle error of every part: unlike the mean it says nothing of cells that were disturbed."""
    unit = "fraction of the measured time, median of the cells"
    found = {}
    for part in parts:
        off = relative(part, coefficients)
        for name, mask in part.groups.items():
            if mask.any():
                found[f"{name}_median_error"] = Figure(float(np.median(off[mask])), unit)
    return found


def _also(measured: Measurements, model: Model, coefficients: Values) -> dict[str, Figure]:
    """What else the measurements say: rates that can be set beside a datasheet, and what no simulation uses."""
    tables = measured.tables
    sized = replace(model, dtype_bytes=DTYPE_BYTES.get(measured.dtype, 2))
    figures = {
        f"{name}_spread": Figure(table.spread, "p90 - p10 of repeats / median, median of the cells")
        for name, table in tables.items()
        if table.spread is not None
    }
    for name, amount, unit, coefficient in (
        ("kv_read_bytes_per_s", sized.kv_bytes_per_token, "B per s", "kv_read_token_s"),
        ("weight_read_bytes_per_s", sized.step_weight_bytes, "B per s", "weight_read_s"),
        ("product_flop_per_s", sized.layer_flops_per_token, "operations per s", "layer_token_s"),
        ("attention_flop_per_s", sized.attention_flops_per_pair, "operations per s", "attention_pair_s"),
        ("swap_bytes_per_s", sized.kv_bytes_per_token, "B per s", "swap_token_s"),
    ):
        if coefficients[coefficient] > 0.0:
            figures[name] = Figure(amount / coefficients[coefficient], unit)
    for name, table, counts, seconds in (
        ("host", tables["host"], "decodes", "seconds"),
        ("drawing", tables["sampling"], "rows", "drawn"),
    ):
        if len(table):
            more = table[seconds] if name == "host" else np.maximum(table["drawn"] - table["plain"], 0.0)
            terms = np.stack([np.ones(len(table)), table[counts]], axis=1)
            step_s, row_s = nonnegative_least_squares(terms, more)
            figures |= {
                f"{name}_step_s": Figure(float(step_s), "s per step"),
                f"{name}_row_s": Figure(float(row_s), "s per request in the step"),
            }
    return figures

"""The time of a step, fitted: what weights, arithmetic, attention and launches take, and how they hide one another."""

from collections.abc import Mapping

import numpy as np

from sim.cost import CostModel
from sim.fitted_parts import Mask, Values, cost_of
from sim.measurements import PARTS, Table
from sim.model_shape import Model
from sim.robust import FloatArray, robust_linear, robust_nonlinear
from sim.step_times import step_seconds

STEP_TERMS = (
    "step_s", "weight_read_s", "product_flop_s", "request_s", "kv_read_token_s", "attention_wait_token_s",
    "attention_pair_s", "launch_s", "mixed_launch_s", "corner",
)  # fmt: skip
OTHERS = (
    "compression_start_s", "compression_launch_s", "compression_source_token_s", "compression_kept_token_s",
    "swap_launch_s", "swap_token_s",
)  # fmt: skip
START_CORNERS = (0.1, 0.5)
START_LAUNCHES = (0.0, 0.2, 0.5)  # shares of the steps with chunks that wait for their launch at first
SMALL = 0.05  # of a step: what the largest amount of a term takes at first, where the linear fit finds less


class Steps:
    """Steps with and without prefill chunks. `product_flop_s` ties `head_row_s` to `layer_token_s`: one rate for both.

    A step of chunks alone was begun at rest or follows one like it, for which the host was busy until its end or the
    device longer than any launch: either way nothing of its launch was over. One beside decodes follows decodes alone.
    """

    def __init__(self, table: Table, model: Model, graph_tokens: int) -> None:
        """`graph_tokens` as in `Measurements`."""
        self.table = table
        self._graph_tokens = graph_tokens
        self.measured = table["seconds"]
        self._model = model
        self._before_s = np.where(table["decodes"] > 0, table["before_s"], 0.0)
        self._columns = {**table.columns, "before_s": self._before_s}

    @property
    def groups(self) -> Mapping[str, Mask]:
        """See `Part`."""
        parts = np.array(self.table.parts)
        return {name: parts == name for name in PARTS}

    def predicted(self, coefficients: Values) -> FloatArray:
        """See `Part`."""
        return step_seconds(self._cost(coefficients), self._columns)

    def _cost(self, coefficients: Values) -> CostModel:
        shares = {"compression_share": 0.5, "compression_rate": 0.5}
        return cost_of({**coefficients, **dict.fromkeys(OTHERS, 0.0), **shares})

    def fit(self, kept: Mask) -> dict[str, float]:
        """See `Part`. The best of several starts: the maximum of work and launch has more than one resting place."""
        columns = {name: values[kept] for name, values in self._columns.items()}
        measured = self.measured[kept]
        most = np.array([1.0 if name == "corner" else np.inf for name in STEP_TERMS])

        def predicted(values: FloatArray) -> FloatArray:
            return step_seconds(self._cost(self._coefficients(values)), columns)

        found = [robust_nonlinear(predicted, measured, start, most) for start in self._starts(kept)]
        return self._coefficients(min(found, key=lambda each: each.loss).values)

    def _starts(self, kept: Mask) -> list[FloatArray]:
        """Linear fits in which nothing hides anything, but for the steps with chunks that wait for their launch."""
        table, measured = self.table, self.measured[kept]
        rows = table["decodes"] + table["prefill_tokens"]
        heads = table["decodes"] + table["prefills"]
        flops = self._model.layer_flops_per_token * rows + self._model.head_flops_per_row * heads
        amounts = (
            np.ones(len(table)), flops, heads, table["context_tokens"], table["decodes"] > 0, table["prefill_pairs"],
        )  # fmt: skip
        work = np.stack(amounts, axis=1).astype(np.float64)[kept]
        launched = (table["prefills"] > 0) & (table["decodes"] + table["prefill_tokens"] > self._graph_tokens)
        chunked = launched[kept]
        launching = measured + self._before_s[kept]  # from when a step could be launched to its end
        starts = []
        for share in START_LAUNCHES:
            launch_s = float(np.quantile(launching[chunked], share)) if chunked.any() and share else 0.0
            working = ~chunked | (launching > launch_s)
            found = robust_linear(work[working], measured[working])
            typical = SMALL * np.median(measured) / np.maximum(work.max(axis=0), 1.0)
            fixed_s, flop_s, request_s, kv_s, _, pair_s = np.maximum(found, typical)
            mixed_s = max(launch_s / 4, float(typical[0]))
            wait_s = fixed_s / 10_000.0
            starts += [
                np.array([
                    fixed_s / 4, fixed_s, flop_s, request_s, kv_s, wait_s, pair_s, max(launch_s, typical[0]), mixed_s,
                    corner,
                ])
                for corner in START_CORNERS
            ]  # fmt: skip
        return starts

    def _coefficients(self, values: FloatArray) -> dict[str, float]:
        found = {name: float(value) for name, value in zip(STEP_TERMS, values, strict=True)}
        flop_s = found.pop("product_flop_s")
        return found | {
            "graph_tokens": float(self._graph_tokens),
            "layer_token_s": flop_s * self._model.layer_flops_per_token,
            "head_row_s": flop_s * self._model.head_flops_per_row,
        }

"""The cost model over whole columns of steps, and what a compression does to the step beside it in closed form.

`CostModel` takes one step at a time and the simulation lets a device do the sharing; here many steps that somebody else
took are priced at once. Both give the same seconds.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from policies.core.policy import Join
from sim.cost import SHARPEST, SPLIT_TOKENS, CostModel

FloatArray = npt.NDArray[np.float64]
Columns = Mapping[str, npt.NDArray[np.float64]]


def step_seconds(cost: CostModel, steps: Columns) -> FloatArray:
    """`CostModel.step_seconds` of every step; 0 for one without decodes and prefill chunks.

    `steps` has columns `decodes`, `context_tokens`, `prefills`, `prefill_tokens`, `prefill_pairs` and, where steps are
    planned ahead, `before_s`.
    """
    decodes, prefills, context = steps["decodes"], steps["prefills"], steps["context_tokens"]
    products = cost.decode_token_s * decodes + cost.layer_token_s * steps["prefill_tokens"] + cost.head_row_s * prefills
    in_a_row = cost.attention_wait_token_s * np.minimum(context / np.maximum(decodes, 1.0), SPLIT_TOKENS)
    seconds = cost.step_s + _rounded_maximum(np.full(len(products), cost.weight_read_s), products, cost.corner)
    seconds = seconds + cost.request_s * (decodes + prefills)
    seconds = seconds + _rounded_maximum(in_a_row, cost.kv_read_token_s * context, cost.corner)
    launch = launch_seconds(cost, decodes, steps["prefill_tokens"]) - steps.get("before_s", np.zeros(len(decodes)))
    chunked = np.maximum(seconds + cost.attention_pair_s * steps["prefill_pairs"], launch)
    found = np.where(prefills > 0, chunked, seconds)
    return np.asarray(np.where(decodes + prefills > 0, found, 0.0), dtype=np.float64)


def _rounded_maximum(first_s: FloatArray, second_s: FloatArray, corner: float) -> FloatArray:
    longer = np.maximum(first_s, second_s)
    if corner < SHARPEST:
        return longer
    share = np.minimum(first_s, second_s) / np.maximum(longer, np.finfo(np.float64).tiny)
    return np.asarray(longer * (1.0 + share ** (1.0 / corner)) ** corner)


def launch_seconds(cost: CostModel, decodes: FloatArray, prefill_tokens: FloatArray) -> FloatArray:
    """`CostModel.launch_seconds` of every step."""
    launched = cost.launch_s + cost.mixed_launch_s * (decodes > 0)
    return np.where(decodes + prefill_tokens <= cost.graph_tokens, 0.0, launched)


def host_free_before(cost: CostModel, steps: Columns, took_s: FloatArray, afresh: npt.NDArray[np.bool_]) -> FloatArray:
    """`before_s` of steps one after the other, each planned while the one before ran: as a simulation counts it.

    Before a step that begins `afresh` nobody was there to be served, and the host begins with the step.
    """
    found = np.zeros(len(took_s))
    found[1:] = took_s[:-1]
    found[afresh] = 0.0
    for place in np.flatnonzero(steps["prefills"][:-1] > 0):
        if not afresh[place + 1]:
            counts = int(steps["decodes"][place]), int(steps["prefill_tokens"][place])
            found[place + 1] = cost.host_free_seconds(*counts, float(found[place]), float(took_s[place]))
    return found


def together_seconds(
    work_s: FloatArray, compression_s: FloatArray, share: float | FloatArray, rate: float | FloatArray
) -> FloatArray:
    """Until a step of `work_s` and compressions of `compression_s`, begun together, are both over.

    As `sim.device.Device` does it: beside each other the step keeps `1 - share` of its speed and the compression `rate`
    of its own.
    """
    step_ends = work_s / (1.0 - share)
    compression_ends = compression_s / rate
    after_step = step_ends + (compression_s - rate * step_ends)
    after_compression = compression_ends + (work_s - (1.0 - share) * compression_ends)
    return np.asarray(np.where(compression_ends >= step_ends, after_step, after_compression), dtype=np.float64)


def run_seconds(
    cost: CostModel, work_s: Sequence[float], compression_s: Sequence[float], swap_s: Sequence[float], join: Join
) -> FloatArray:
    """Seconds of steps one after the other, each with the compressions it starts, as a simulation with that join.

    Compressions that are joined when done run on into later steps; time between steps does not count for them.
    """
    share, rate = cost.compression_share, cost.compression_rate
    left = 0.0
    found = np.zeros(len(work_s))
    for place, (work, started, swap) in enumerate(zip(work_s, compression_s, swap_s, strict=True)):
        if join is Join.BLOCKING:
            found[place] = started + max(work, swap)
            continue
        left += started
        if join is Join.WHEN_DONE:
            step_ends = work / (1.0 - share)
            if left / rate >= step_ends:
                lasts, left = step_ends, left - rate * step_ends
            else:
                lasts, left = work + left * (share / rate), 0.0
        else:
            lasts, left = float(together_seconds(np.array(work), np.array(left), share, rate)), 0.0
        found[place] = max(lasts, swap)
    return found

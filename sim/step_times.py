"""The cost model over whole columns of steps, and what a compression does to the step beside it in closed form.

`CostModel` takes one step at a time and the simulation lets a device do the sharing; here many steps that somebody else
took are priced at once. Both give the same seconds.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from policies.core.policy import Join
from sim.cost import CostModel

FloatArray = npt.NDArray[np.float64]
Columns = Mapping[str, npt.NDArray[np.float64]]


def step_seconds(cost: CostModel, steps: Columns) -> FloatArray:
    """`CostModel.step_seconds` of every step; 0 for one without decodes and prefill chunks.

    `steps` has columns `decodes`, `context_tokens`, `prefills`, `prefill_tokens`, `prefill_pairs` and, where steps are
    planned ahead, `before_s`.
    """
    decodes, prefills = steps["decodes"], steps["prefills"]
    products = cost.decode_token_s * decodes + cost.layer_token_s * steps["prefill_tokens"] + cost.head_row_s * prefills
    seconds = cost.step_s + np.maximum(products, cost.weight_read_s) + cost.request_s * (decodes + prefills)
    seconds = seconds + cost.kv_read_token_s * steps["context_tokens"]
    launch = cost.launch_s - steps.get("before_s", np.zeros(len(decodes)))
    chunked = np.maximum(seconds + cost.attention_pair_s * steps["prefill_pairs"], launch) + cost.prefill_step_s
    found = np.where(prefills > 0, chunked, seconds)
    return np.asarray(np.where(decodes + prefills > 0, found, 0.0), dtype=np.float64)


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

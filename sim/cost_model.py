"""How long a step, a compression or a swap takes: a physical model with named coefficients.

docs/COST.md has every formula with its units and its source. `CostModel` prices one step at a time
and leaves the sharing of the GPU to `zlab.sim.simulator.Device`. The functions `step_seconds` and
`run_seconds` price many recorded steps at once, with the sharing in closed form. Both give the same
seconds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from zlab.policies.core.policy import Join, Policy
from zlab.policies.spec import load_policy
from zlab.sim.memory import SPLIT_TOKENS
from zlab.sim.specs import Gpu, ModelSpec, SimError

COEFFICIENT_UNITS: dict[str, str] = {
    "step_s": "s per step",
    "weight_read_s": "s per step",
    "layer_token_s": "s per token in the step",
    "head_row_s": "s per row of logits",
    "request_s": "s per request in the step",
    "kv_read_token_s": "s per cached token read by a decode",
    "attention_wait_token_s": "s per cached token that one request's attention reads in a row",
    "corner": "0: of two things that hide one another the longer counts, 1: their sum",
    "attention_pair_s": "s per (query, key) pair of a prefill",
    "launch_s": "s to launch a step with prefill chunks, begun when the host is free",
    "mixed_launch_s": "s more where it has decodes, too",
    "graph_tokens": "tokens, those of decodes and of chunks, up to which such a step is a graph "
    "and launched at once",
    "compression_start_s": "s per step that starts compressions",
    "compression_launch_s": "s per compressed sequence",
    "compression_source_token_s": "s per token taking part in a compression",
    "compression_kept_token_s": "s per token kept by a compression",
    "compression_share": "fraction of its speed that a step loses beside a compression",
    "compression_rate": "fraction of its speed alone that a compression keeps beside a step",
    "swap_launch_s": "s per swap",
    "swap_token_s": "s per token moved one way between host and device",
}

SHARPEST = 1e-3  # below it the maximum is sharp: the power of 1000 removes the shorter time


def _check_number(what: str, value: object) -> None:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value < 0
    ):
        raise SimError(f"{what} must be a finite number of at least 0, got {value!r}")


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """The share of the datasheet's rates that a real engine reaches, and its fixed costs.

    With the defaults, H200 with Qwen3-8B agrees with published and own measurements
    (`../shared/design/peers.md`): Nano-vLLM's decode steps of 10.88 / 15.87 / 28.02 ms at batch 64
    / 128 / 256 with 2,048 tokens of context each, its prefill of 34,000 to 38,000 tokens/s, and
    Zipage's compression of 4.9 ms per sequence (the lower bound from bytes is 0.15 ms). Values
    marked "assumed" were not measured. On other GPUs the same shares are an assumption.
    """

    weight_read: float = (
        0.584  # of memory bandwidth: matrix products reach 63 % of the readable 4.45 TB/s
    )
    kv_read: float = 0.927  # of memory bandwidth: 4.45 TB/s of 4.8 TB/s can be read
    matmul: float = 0.53  # of dense flops, matrix products of a prefill
    attention: float = 0.45  # of dense flops, attention of a prefill (assumed)
    compression: float = 0.054  # of bandwidth and of flops: Zipage's kernels
    pcie: float = 0.85  # of the PCIe rate, pinned memory (assumed)
    compression_share: float = (
        # share of the GPU while a step runs beside a compression: overlap gains nothing (assumed)
        0.1
    )
    step_overhead_s: float = (
        0.35e-3  # host and sampler: measured 0.2 to 0.6 ms and 0.3 to 0.6 ms, partly hidden
    )
    layer_overhead_s: float = 12.5e-6  # small kernels between the matrix products of a layer
    request_overhead_s: float = 7e-6  # cost of a row besides reading and arithmetic
    compression_launch_s: float = 50e-6  # (assumed)
    swap_launch_s: float = 20e-6  # (assumed)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            _check_number(f"efficiency {item.name}", value)
            if item.name.endswith("_s"):
                continue
            if not 0.0 < value <= 1.0:
                raise SimError(
                    f"efficiency {item.name} must be above 0 and at most 1, got {value!r}"
                )


@dataclass(frozen=True, slots=True)
class CostModel:
    """The seconds of each operation of the GPU, as a sum of few terms over whole-number counts.

    The model is deterministic: it uses Python floats and always adds them in the same order. More
    work never takes less time, because every coefficient is at least zero. Counts are not checked;
    they come from the scheduler.
    """

    gpu: str
    model: str
    source: str  # "roofline", or the profile's name
    step_s: float
    weight_read_s: float
    layer_token_s: float
    head_row_s: float
    request_s: float
    kv_read_token_s: float
    attention_wait_token_s: float
    corner: float  # in [0, 1], see `rounded_maximum`
    attention_pair_s: float
    launch_s: float
    mixed_launch_s: float
    graph_tokens: float
    compression_start_s: float
    compression_launch_s: float
    compression_source_token_s: float
    compression_kept_token_s: float
    compression_share: float  # in (0, 1): a step beside a compression runs at 1 - this of its speed
    compression_rate: (
        # in (0, 1]: a compression beside a step runs at this share of its speed; overlap gains time
        # where it is larger than `compression_share`
        float
    )
    swap_launch_s: float
    swap_token_s: float
    decode_token_s: float = field(
        init=False, repr=False
    )  # layers and output head: every decode needs its logits
    _sharp: bool = field(
        init=False, repr=False
    )  # whether the maximum is sharp and attention costs nothing besides reading

    def __post_init__(self) -> None:
        for name in COEFFICIENT_UNITS:
            value = getattr(self, name)
            _check_number(f"coefficient {name}", value)
            # a numpy scalar would make every call slower
            object.__setattr__(self, name, float(value))
        if not 0.0 < self.compression_share < 1.0:
            raise SimError(
                f"coefficient compression_share must lie between 0 and 1, got "
                f"{self.compression_share!r}"
            )
        if not 0.0 < self.compression_rate <= 1.0:
            raise SimError(
                f"coefficient compression_rate must be above 0 and at most 1, got "
                f"{self.compression_rate!r}"
            )
        if self.corner > 1.0:
            raise SimError(f"coefficient corner must lie between 0 and 1, got {self.corner!r}")
        object.__setattr__(self, "decode_token_s", self.layer_token_s + self.head_row_s)
        object.__setattr__(self, "_sharp", self.corner == self.attention_wait_token_s == 0.0)

    def decode_seconds(self, num_decodes: int, context_tokens: int) -> float:
        """Return the seconds of a step of `num_decodes` decodes that read `context_tokens` cached
        tokens together.
        """
        matmul_s = self.decode_token_s * num_decodes
        attention_s = self.kv_read_token_s * context_tokens
        if self._sharp:
            if matmul_s < self.weight_read_s:  # noqa: PLR1730 - `max` takes as long as the whole rest
                matmul_s = self.weight_read_s
        else:
            matmul_s = rounded_maximum(self.weight_read_s, matmul_s, self.corner)
            attention_s = rounded_maximum(
                self._wait_s(num_decodes, context_tokens), attention_s, self.corner
            )
        return self.step_s + matmul_s + self.request_s * num_decodes + attention_s

    def step_seconds(
        self,
        num_decodes: int,
        context_tokens: int,
        prefill_tokens: int,
        prefill_pairs: int,
        num_prefills: int,
        before_s: float = 0.0,
    ) -> float:
        """Return the seconds of a step that mixes decodes and prefill chunks.

        Without chunks the result equals `decode_seconds` to the last bit. The launch of a step with
        chunks takes `launch_seconds` of the host. It began `before_s` before the step, when the
        host became free (`host_free_seconds`). The rest of it overlaps with the GPU's work, and the
        longer of the two counts.

        Args:
            num_decodes: Requests that decode.
            context_tokens: Cached tokens that the decodes read.
            prefill_tokens: Tokens of the chunks.
            prefill_pairs: (query, key) pairs of the chunks (`zlab.policies.core.plan`).
            num_prefills: Number of chunks.
            before_s: Seconds for which the host has been free when the step begins.
        """
        if not num_prefills:
            return self.decode_seconds(num_decodes, context_tokens)
        arithmetic_s = (
            self.decode_token_s * num_decodes
            + self.layer_token_s * prefill_tokens
            + self.head_row_s * num_prefills
        )
        attention_s = rounded_maximum(
            self._wait_s(num_decodes, context_tokens),
            self.kv_read_token_s * context_tokens,
            self.corner,
        )
        matmul_s = rounded_maximum(self.weight_read_s, arithmetic_s, self.corner)
        work_s = (
            self.step_s + matmul_s + self.request_s * (num_decodes + num_prefills) + attention_s
        )
        work_s += self.attention_pair_s * prefill_pairs
        return max(work_s, self.launch_seconds(num_decodes, prefill_tokens) - before_s)

    def _wait_s(self, num_decodes: int, context_tokens: int) -> float:
        """Return the seconds to read the mean context of a request in sequence, at most
        `SPLIT_TOKENS` tokens.
        """
        return self.attention_wait_token_s * min(context_tokens / max(num_decodes, 1), SPLIT_TOKENS)

    def launch_seconds(self, num_decodes: int, prefill_tokens: int) -> float:
        """Return the seconds for which the host launches a step with prefill chunks; 0 for a step
        that fits a CUDA graph.
        """
        if num_decodes + prefill_tokens <= self.graph_tokens:
            return 0.0
        return self.launch_s + (self.mixed_launch_s if num_decodes else 0.0)

    def host_free_seconds(
        self, num_decodes: int, prefill_tokens: int, before_s: float, took_s: float
    ) -> float:
        """Return how long the host has been free when a step ends; it is `before_s` of the next
        step.

        The host may launch the next step as soon as it has finished the launch of this one.

        Args:
            num_decodes: Requests that decode in the step.
            prefill_tokens: Tokens of the step's chunks.
            before_s: Seconds for which the host had been free when the step began.
            took_s: Seconds that the step took.
        """
        if not prefill_tokens:
            return took_s
        return max(
            took_s - max(self.launch_seconds(num_decodes, prefill_tokens) - before_s, 0.0), 0.0
        )

    def compression_seconds(self, source_tokens: int, kept_tokens: int) -> float:
        """Return the seconds to compress one sequence from `source_tokens` to `kept_tokens` on an
        otherwise idle GPU.

        A step that starts compressions takes `compression_start_s` once in addition.
        """
        moved_s = (
            self.compression_source_token_s * source_tokens
            + self.compression_kept_token_s * kept_tokens
        )
        return self.compression_launch_s + moved_s

    def swap_seconds(self, num_tokens: int) -> float:
        """Return the seconds to copy the keys and values of `num_tokens` tokens one way between
        host and GPU.
        """
        return self.swap_launch_s + self.swap_token_s * num_tokens

    def describe(self) -> dict[str, Any]:
        """Return every coefficient with its unit, and their source, as plain JSON for a run's
        manifest.
        """
        coefficients = {
            name: {"value": getattr(self, name), "unit": unit}
            for name, unit in COEFFICIENT_UNITS.items()
        }
        return {
            "gpu": self.gpu,
            "model": self.model,
            "source": self.source,
            "coefficients": coefficients,
        }


def rounded_maximum(first_s: float, second_s: float, corner: float) -> float:
    """Return the time of two operations that overlap: `(a^(1/corner) + b^(1/corner))^corner`.

    Args:
        first_s: Seconds of the one.
        second_s: Seconds of the other.
        corner: In [0, 1]: 0 gives the longer time, 1 the sum.
    """
    longer, shorter = (first_s, second_s) if first_s > second_s else (second_s, first_s)
    if corner < SHARPEST or shorter == 0.0:
        return longer
    return float(longer * (1.0 + (shorter / longer) ** (1.0 / corner)) ** corner)


def roofline(
    gpu: Gpu,
    model: ModelSpec,
    efficiencies: Efficiencies = Efficiencies(),
    *,
    window: int = 16,
    block_size: int = 256,
) -> CostModel:
    """Return a cost model from datasheet figures, each multiplied by its efficiency.

    Args:
        gpu: The GPU.
        model: Shape of the model.
        efficiencies: Reached shares of the datasheet's rates.
        window: Queries that a compression scores with, in tokens.
        block_size: Tokens that the redundancy score compares with each other.

    Returns:
        The cost model, with `source` "roofline".

    Raises:
        SimError: `window` or `block_size` is below 1, or the window is larger than a block.
    """
    if not 1 <= window <= block_size:
        raise SimError(
            f"window must be between 1 and the block size, got window {window} and block size "
            f"{block_size}"
        )
    bandwidth, flops = gpu.memory_bandwidth_bytes_per_s, gpu.bf16_flops
    matmul_flops = flops * efficiencies.matmul
    # One pass for the softmax sums and one for the scores, then every key against its block.
    score_flops = model.num_layers * (
        4 * window * model.query_width + 2 * block_size * model.kv_width
    )
    source_s = (
        model.kv_bytes_per_token / bandwidth + score_flops / flops
    )  # keys read twice are as many bytes as keys and values once
    kept_s = 2 * model.kv_bytes_per_token / bandwidth  # keys and values are read and written
    return CostModel(
        gpu=gpu.name,
        model=model.name,
        source="roofline",
        step_s=efficiencies.step_overhead_s + model.num_layers * efficiencies.layer_overhead_s,
        weight_read_s=model.step_weight_bytes / (bandwidth * efficiencies.weight_read),
        layer_token_s=model.layer_flops_per_token / matmul_flops,
        head_row_s=model.head_flops_per_row / matmul_flops,
        request_s=efficiencies.request_overhead_s,
        kv_read_token_s=model.kv_bytes_per_token / (bandwidth * efficiencies.kv_read),
        attention_pair_s=model.attention_flops_per_pair / (flops * efficiencies.attention),
        attention_wait_token_s=0.0,  # no datasheet has the following values
        corner=0.0,
        launch_s=0.0,
        mixed_launch_s=0.0,
        graph_tokens=0.0,
        compression_start_s=0.0,
        compression_launch_s=efficiencies.compression_launch_s,
        compression_source_token_s=source_s / efficiencies.compression,
        compression_kept_token_s=kept_s / efficiencies.compression,
        compression_share=efficiencies.compression_share,
        compression_rate=efficiencies.compression_share,
        swap_launch_s=efficiencies.swap_launch_s,
        swap_token_s=model.kv_bytes_per_token / (gpu.pcie_bytes_per_s * efficiencies.pcie),
    )


FloatArray = npt.NDArray[np.float64]
Columns = Mapping[str, npt.NDArray[np.float64]]


def step_seconds(cost: CostModel, steps: Columns) -> FloatArray:
    """Return `CostModel.step_seconds` of every step; 0 for a step without decodes and prefill
    chunks.

    `steps` has columns `decodes`, `context_tokens`, `prefills`, `prefill_tokens`, `prefill_pairs`
    and, where steps are planned ahead, `before_s`. All have the shape [steps].
    """
    decodes, prefills, context = steps["decodes"], steps["prefills"], steps["context_tokens"]
    products = (
        cost.decode_token_s * decodes
        + cost.layer_token_s * steps["prefill_tokens"]
        + cost.head_row_s * prefills
    )
    in_a_row = cost.attention_wait_token_s * np.minimum(
        context / np.maximum(decodes, 1.0), SPLIT_TOKENS
    )
    seconds = cost.step_s + _rounded_maximum(
        np.full(len(products), cost.weight_read_s), products, cost.corner
    )
    seconds = seconds + cost.request_s * (decodes + prefills)
    seconds = seconds + _rounded_maximum(in_a_row, cost.kv_read_token_s * context, cost.corner)
    launch = launch_seconds(cost, decodes, steps["prefill_tokens"]) - steps.get(
        "before_s", np.zeros(len(decodes))
    )
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
    """Return `CostModel.launch_seconds` of every step.

    Args:
        cost: The cost model.
        decodes: Decoding requests, [steps].
        prefill_tokens: Tokens of the chunks, [steps].
    """
    launched = cost.launch_s + cost.mixed_launch_s * (decodes > 0)
    return np.where(decodes + prefill_tokens <= cost.graph_tokens, 0.0, launched)


def host_free_before(
    cost: CostModel, steps: Columns, took_s: FloatArray, afresh: npt.NDArray[np.bool_]
) -> FloatArray:
    """Return `before_s` of consecutive steps that are planned ahead, as a simulation computes it.

    Args:
        cost: The cost model.
        steps: The columns of `step_seconds`.
        took_s: Seconds of each step, [steps].
        afresh: Whether no request was present before the step, [steps]. The host then starts with
            the step.
    """
    found = np.zeros(len(took_s))
    found[1:] = took_s[:-1]
    found[afresh] = 0.0
    for place in np.flatnonzero(steps["prefills"][:-1] > 0):
        if not afresh[place + 1]:
            counts = int(steps["decodes"][place]), int(steps["prefill_tokens"][place])
            found[place + 1] = cost.host_free_seconds(
                *counts, float(found[place]), float(took_s[place])
            )
    return found


def together_seconds(
    work_s: FloatArray,
    compression_s: FloatArray,
    share: float | FloatArray,
    rate: float | FloatArray,
) -> FloatArray:
    """Return the time until a step and compressions that begin together have both ended.

    It is the closed form of `zlab.sim.simulator.Device`: while both run, the step has `1 - share`
    of its speed and the compression has `rate` of its speed.

    Args:
        work_s: Seconds of the step alone, [steps].
        compression_s: Seconds of the compressions alone, [steps].
        share: Share of its speed that the step loses.
        rate: Share of its speed that the compression keeps.
    """
    step_ends = work_s / (1.0 - share)
    compression_ends = compression_s / rate
    after_step = step_ends + (compression_s - rate * step_ends)
    after_compression = compression_ends + (work_s - (1.0 - share) * compression_ends)
    return np.asarray(
        np.where(compression_ends >= step_ends, after_step, after_compression), dtype=np.float64
    )


def run_seconds(
    cost: CostModel,
    work_s: Sequence[float],
    compression_s: Sequence[float],
    swap_s: Sequence[float],
    join: Join,
) -> FloatArray:
    """Return the seconds of consecutive steps with the compressions that they start, [steps].

    A compression that is joined when done continues into later steps; time between steps does not
    count for it.

    Args:
        cost: The cost model.
        work_s: Seconds of each step alone.
        compression_s: Seconds of the compressions that each step starts, alone.
        swap_s: Seconds of the copies that each step starts.
        join: When compressions are joined.
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


@dataclass(frozen=True, slots=True)
class Change:
    """A change of policy: `policy` decides from `step` on.

    It takes effect before the requests that arrive in that step are submitted. `cost` holds from
    then on; None keeps the cost model.
    """

    step: int
    policy: Policy
    cost: CostModel | None = None


def read_change(spec: str) -> Change:
    """Return the change that a command line names by `STEP:POLICY`. Raise SimError, and PolicyError
    for the policy.
    """
    step, colon, policy = spec.partition(":")
    if not colon or not step.isdecimal() or not policy:
        raise SimError(f"a change must be STEP:POLICY, as 4000:hybrid, not {spec!r}")
    return Change(int(step), load_policy(policy))


def check_order(changes: Sequence[Change]) -> None:
    """Raise SimError unless the steps of the changes are at least 0 and do not decrease."""
    before = 0
    for change in changes:
        if change.step < before:
            raise SimError(
                f"changes of the policy must be in order of their steps: {change.step} after "
                f"{before}"
            )
        before = change.step

"""How long a step, a compression or a swap takes: a small physical model with named coefficients.

Every formula, its units and its source stand in docs/COST.md.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from sim.errors import SimError
from sim.hardware import Gpu
from sim.model_shape import Model

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
    "graph_tokens": "tokens, those of decodes and of chunks, up to which such a step is a graph and launched at once",
    "compression_start_s": "s per step that starts compressions",
    "compression_launch_s": "s per compressed sequence",
    "compression_source_token_s": "s per token taking part in a compression",
    "compression_kept_token_s": "s per token kept by a compression",
    "compression_share": "fraction of its speed that a step loses beside a compression",
    "compression_rate": "fraction of its speed alone that a compression keeps beside a step",
    "swap_launch_s": "s per swap",
    "swap_token_s": "s per token moved one way between host and device",
}

# Decode attention reads pieces of this many tokens of a request side by side and the tokens of a piece in a row
# (`SPLIT_TOKENS` of engine/kernels/decode_plan.py; a test holds them equal).
SPLIT_TOKENS = 1024
SHARPEST = 1e-3  # a corner below is none: a power of a thousand leaves nothing of the shorter


def _check_number(what: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise SimError(f"{what} must be a finite number of at least 0, got {value!r}")


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """What share of the datasheet a real engine reaches, and what it loses besides.

    The defaults are set so that H200 with Qwen3-8B agrees with what was measured there (`../shared/design/peers.md`):
    Nano-vLLM's decode steps 10.88 / 15.87 / 28.02 ms at batch 64 / 128 / 256 with 2,048 tokens of context each and its
    prefill of 34..38 thousand tokens/s; Zipage's compression of 4.9 ms a sequence (byte floor 0.15 ms). Figures marked
    "assumed" were measured by nobody here. On every other card the same shares are a guess.
    """

    weight_read: float = 0.584  # of memory bandwidth: matrix products at 63 % of the 4.45 TB/s that can be read
    kv_read: float = 0.927  # of memory bandwidth: the 4.45 TB/s that can be read of 4.8
    matmul: float = 0.53  # of dense flops, prefill's matrix products
    attention: float = 0.45  # of dense flops, prefill's attention (assumed)
    compression: float = 0.054  # of bandwidth and flops alike: Zipage's kernels
    pcie: float = 0.85  # of the PCIe rate, pinned memory (assumed)
    compression_share: float = 0.1  # of the card, while a step runs beside a compression: nothing is gained (assumed)
    step_overhead_s: float = 0.35e-3  # host, sampler: measured 0.2..0.6 and 0.3..0.6 ms, partly hidden
    layer_overhead_s: float = 12.5e-6  # small kernels between a layer's products
    request_overhead_s: float = 7e-6  # what a row costs besides reading and arithmetic
    compression_launch_s: float = 50e-6  # (assumed)
    swap_launch_s: float = 20e-6  # (assumed)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            _check_number(f"efficiency {item.name}", value)
            if item.name.endswith("_s"):
                continue
            if not 0.0 < value <= 1.0:
                raise SimError(f"efficiency {item.name} must be above 0 and at most 1, got {value!r}")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of everything the GPU does, as few terms over whole-number counts.

    Pure and deterministic: plain Python floats, the same order of additions every time. More work never takes less
    time, because every coefficient is at least zero. Counts are not checked: the scheduler owns them.
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
    compression_share: float  # in (0, 1): a step beside a compression keeps the rest of its speed
    compression_rate: float  # in (0, 1]: a compression beside a step keeps this; above the share, overlap gains
    swap_launch_s: float
    swap_token_s: float
    decode_token_s: float = field(init=False, repr=False)  # layers and head: a decode always needs its logits
    _sharp: bool = field(init=False, repr=False)  # a plain maximum, and attention is nothing but reading

    def __post_init__(self) -> None:
        for name in COEFFICIENT_UNITS:
            value = getattr(self, name)
            _check_number(f"coefficient {name}", value)
            object.__setattr__(self, name, float(value))  # a numpy scalar would slow every call
        if not 0.0 < self.compression_share < 1.0:
            raise SimError(f"coefficient compression_share must lie between 0 and 1, got {self.compression_share!r}")
        if not 0.0 < self.compression_rate <= 1.0:
            raise SimError(f"coefficient compression_rate must be above 0 and at most 1, got {self.compression_rate!r}")
        if self.corner > 1.0:
            raise SimError(f"coefficient corner must lie between 0 and 1, got {self.corner!r}")
        object.__setattr__(self, "decode_token_s", self.layer_token_s + self.head_row_s)
        object.__setattr__(self, "_sharp", self.corner == self.attention_wait_token_s == 0.0)

    def decode_seconds(self, num_decodes: int, context_tokens: int) -> float:
        """Seconds of a step of `num_decodes` decodes that read `context_tokens` cached tokens in all."""
        matmul_s = self.decode_token_s * num_decodes
        attention_s = self.kv_read_token_s * context_tokens
        if self._sharp:
            if matmul_s < self.weight_read_s:  # noqa: PLR1730 - `max` takes as long as the whole rest
                matmul_s = self.weight_read_s
        else:
            matmul_s = rounded_maximum(self.weight_read_s, matmul_s, self.corner)
            attention_s = rounded_maximum(self._wait_s(num_decodes, context_tokens), attention_s, self.corner)
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
        """Seconds of a step that mixes decodes (as in `decode_seconds`) with `num_prefills` prefill chunks.

        `prefill_tokens` are the chunks' tokens; `prefill_pairs` their (query, key) pairs, summed over the chunks
        (`policies.core.plan`). Equal to `decode_seconds`, to the last bit, when the three are zero. Launching a step
        with chunks takes `launch_seconds`, begun `before_s` ago when the host became free (`host_free_seconds`); what
        is left of that hides behind the device's work, or is waited for.
        """
        if not num_prefills:
            return self.decode_seconds(num_decodes, context_tokens)
        arithmetic_s = (
            self.decode_token_s * num_decodes + self.layer_token_s * prefill_tokens + self.head_row_s * num_prefills
        )
        attention_s = rounded_maximum(
            self._wait_s(num_decodes, context_tokens), self.kv_read_token_s * context_tokens, self.corner
        )
        matmul_s = rounded_maximum(self.weight_read_s, arithmetic_s, self.corner)
        work_s = self.step_s + matmul_s + self.request_s * (num_decodes + num_prefills) + attention_s
        work_s += self.attention_pair_s * prefill_pairs
        return max(work_s, self.launch_seconds(num_decodes, prefill_tokens) - before_s)

    def _wait_s(self, num_decodes: int, context_tokens: int) -> float:
        """Seconds to read the mean context in a row, or as much of it as one piece holds."""
        return self.attention_wait_token_s * min(context_tokens / max(num_decodes, 1), SPLIT_TOKENS)

    def launch_seconds(self, num_decodes: int, prefill_tokens: int) -> float:
        """Seconds for which a step with prefill chunks keeps the host; none where a graph has room for it."""
        if num_decodes + prefill_tokens <= self.graph_tokens:
            return 0.0
        return self.launch_s + (self.mixed_launch_s if num_decodes else 0.0)

    def host_free_seconds(self, num_decodes: int, prefill_tokens: int, before_s: float, took_s: float) -> float:
        """How long the host has been free when a step that took `took_s` ends: `before_s` of the next one.

        It may launch the next one from this one's start on, but for what it then still had to launch of this one.
        """
        if not prefill_tokens:
            return took_s
        return max(took_s - max(self.launch_seconds(num_decodes, prefill_tokens) - before_s, 0.0), 0.0)

    def compression_seconds(self, source_tokens: int, kept_tokens: int) -> float:
        """Seconds to compress one sequence from `source_tokens` to `kept_tokens`, alone on the GPU.

        The compressions that a step starts take `compression_start_s` together, besides.
        """
        moved_s = self.compression_source_token_s * source_tokens + self.compression_kept_token_s * kept_tokens
        return self.compression_launch_s + moved_s

    def swap_seconds(self, num_tokens: int) -> float:
        """Seconds to move the keys and values of `num_tokens` tokens one way between host and device."""
        return self.swap_launch_s + self.swap_token_s * num_tokens

    def describe(self) -> dict[str, Any]:
        """Every coefficient with its unit, and where they came from: plain JSON for a run's manifest."""
        coefficients = {name: {"value": getattr(self, name), "unit": unit} for name, unit in COEFFICIENT_UNITS.items()}
        return {"gpu": self.gpu, "model": self.model, "source": self.source, "coefficients": coefficients}


def rounded_maximum(first_s: float, second_s: float, corner: float) -> float:
    """Two times that hide one another: `(a^(1/corner) + b^(1/corner))^corner`.

    With corner 0 the longer, with 1 the sum.
    """
    longer, shorter = (first_s, second_s) if first_s > second_s else (second_s, first_s)
    if corner < SHARPEST or shorter == 0.0:
        return longer
    return float(longer * (1.0 + (shorter / longer) ** (1.0 / corner)) ** corner)


def roofline(
    gpu: Gpu,
    model: Model,
    efficiencies: Efficiencies = Efficiencies(),
    *,
    window: int = 16,
    block_size: int = 256,
) -> CostModel:
    """A cost model from datasheet figures alone, each times its efficiency.

    `window` (queries scored) and `block_size` (tokens compared with each other) set the arithmetic of a compression.

    Raises:
        SimError: `window` or `block_size` below 1, or a window larger than a block.
    """
    if not 1 <= window <= block_size:
        raise SimError(f"window must be between 1 and the block size, got window {window} and block size {block_size}")
    bandwidth, flops = gpu.memory_bandwidth_bytes_per_s, gpu.bf16_flops
    matmul_flops = flops * efficiencies.matmul
    # One pass for the softmax's sums and one for the scores, then every key against its block.
    score_flops = model.num_layers * (4 * window * model.query_width + 2 * block_size * model.kv_width)
    source_s = model.kv_bytes_per_token / bandwidth + score_flops / flops  # K twice = as many bytes as K and V once
    kept_s = 2 * model.kv_bytes_per_token / bandwidth  # K and V read and written
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
        attention_wait_token_s=0.0,  # these are in nobody's datasheet
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

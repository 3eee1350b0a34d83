"""How many KV blocks fit on the card: GPU memory, less everything else that lives there, each term by name."""

from dataclasses import asdict, dataclass
from typing import Any

from sim.errors import SimError
from sim.hardware import GIB, Gpu
from sim.model_shape import Model

FP32_BYTES = 4
LOGIT_COPIES = 2  # the sampler's fp32 logits and their probabilities, beside the logits in the model's dtype
WORKSPACE_VALUES = 5  # per token, layer and KV head: attention, history, redundancy, combined score, kept index


class MemoryPlanError(SimError):
    """The pool would hold no block; the message lists every term in bytes."""


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """What an engine is started with, as far as memory is concerned. Without slots nothing is ever compressed."""

    block_size: int = 256  # tokens
    utilisation: float = 0.9  # share of the card's memory the engine may use
    max_batched_tokens: int = 8_192  # tokens of one step
    max_running: int = 256  # requests of one step: rows of logits
    max_model_len: int | None = None  # tokens; the model's own limit when None
    reserve_bytes: int = 3 * GIB // 2  # driver context, library workspaces, CUDA graphs (assumed)
    num_slots: int = 0  # query slots `M`
    budget_blocks: int = 0  # `N_max`; at least 2 with slots
    window: int = 16  # queries kept per slot and layer
    global_scores: bool = True  # the scorer keeps a history
    concurrent_compressions: int = 8  # sequences the workspace has room for

    def __post_init__(self) -> None:
        for key in ("block_size", "max_batched_tokens", "max_running", "concurrent_compressions"):
            if getattr(self, key) < 1:
                raise SimError(f"{key} must be at least 1, got {getattr(self, key)}")
        for key in ("reserve_bytes", "num_slots", "budget_blocks"):
            if getattr(self, key) < 0:
                raise SimError(f"{key} must be at least 0, got {getattr(self, key)}")
        if not 0.0 < self.utilisation <= 1.0:
            raise SimError(f"memory utilisation must be above 0 and at most 1, got {self.utilisation!r}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise SimError(f"max_model_len must be at least 1, got {self.max_model_len}")
        if self.num_slots and self.budget_blocks < 2:
            raise SimError(
                f"budget_blocks must be at least 2 with query slots (one is emptied by a compression), "
                f"got {self.budget_blocks} with num_slots {self.num_slots}"
            )
        if self.num_slots and not 1 <= self.window <= self.block_size:
            raise SimError(
                f"window must be between 1 and the block size, got window {self.window} "
                f"and block_size {self.block_size}"
            )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the card's memory goes. All terms are bytes and add up to `memory_bytes`."""

    gpu: str
    model: str
    settings: MemorySettings
    memory_bytes: int
    withheld_bytes: int  # beyond the utilisation
    weight_bytes: int
    activation_bytes: int
    reserve_bytes: int
    query_slot_bytes: int
    score_cache_bytes: int
    workspace_bytes: int
    block_bytes: int  # one KV block, all layers
    num_blocks: int
    unused_bytes: int  # less than one block

    @property
    def num_tokens(self) -> int:
        """Tokens the pool holds."""
        return self.num_blocks * self.settings.block_size

    @property
    def terms(self) -> dict[str, int]:
        """Every term in bytes by name, in the order they are taken; their sum is `memory_bytes`."""
        return {
            "withheld (1 - utilisation)": self.withheld_bytes,
            "weights": self.weight_bytes,
            "activations": self.activation_bytes,
            "context, graphs, libraries": self.reserve_bytes,
            "query slots": self.query_slot_bytes,
            "score cache": self.score_cache_bytes,
            "compression workspace": self.workspace_bytes,
            "KV blocks": self.num_blocks * self.block_bytes,
            "unused (under one block)": self.unused_bytes,
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON: the terms under stable keys, the settings they follow from, the blocks."""
        keys = (
            "memory_bytes withheld_bytes weight_bytes activation_bytes reserve_bytes query_slot_bytes "
            "score_cache_bytes workspace_bytes block_bytes num_blocks num_tokens unused_bytes"
        )
        numbers = {key: getattr(self, key) for key in keys.split(" ")}
        return {"gpu": self.gpu, "model": self.model, **numbers, "settings": asdict(self.settings)}


def plan_memory(gpu: Gpu, model: Model, settings: MemorySettings) -> MemoryPlan:
    """Divide the card's memory.

    Raises:
        MemoryPlanError: not even one block fits beside the rest.
        SimError: `max_model_len` is beyond the model's positions.
    """
    max_model_len = settings.max_model_len or model.max_positions
    if max_model_len > model.max_positions:
        raise SimError(
            f"max_model_len {max_model_len} is beyond the {model.max_positions} positions of model {model.name}"
        )
    usable_bytes = int(gpu.memory_bytes * settings.utilisation)
    block_bytes = settings.block_size * model.kv_bytes_per_token
    fixed = {
        "weights": model.weight_bytes,
        "activations": activation_bytes(model, settings.max_batched_tokens, settings.max_running),
        "context, graphs, libraries": settings.reserve_bytes,
        "query slots": settings.num_slots * query_slot_bytes(model, settings.window),
        "score cache": score_cache_bytes(model, settings) if settings.global_scores else 0,
        "compression workspace": workspace_bytes(model, settings, max_model_len),
    }
    pool_bytes = usable_bytes - sum(fixed.values())
    if pool_bytes < block_bytes:
        listed = "; ".join(f"{name} {value:,}" for name, value in fixed.items())
        raise MemoryPlanError(
            f"model {model.name} does not fit on {gpu.name}: {settings.utilisation:g} of {gpu.memory_bytes:,} bytes is "
            f"{usable_bytes:,}; less {listed}; leaves {pool_bytes:,}, but one KV block of {settings.block_size} tokens "
            f"takes {block_bytes:,}"
        )
    num_blocks = pool_bytes // block_bytes
    return MemoryPlan(
        gpu=gpu.name,
        model=model.name,
        settings=settings,
        memory_bytes=gpu.memory_bytes,
        withheld_bytes=gpu.memory_bytes - usable_bytes,
        weight_bytes=fixed["weights"],
        activation_bytes=fixed["activations"],
        reserve_bytes=fixed["context, graphs, libraries"],
        query_slot_bytes=fixed["query slots"],
        score_cache_bytes=fixed["score cache"],
        workspace_bytes=fixed["compression workspace"],
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        unused_bytes=pool_bytes - num_blocks * block_bytes,
    )


def activation_bytes(model: Model, num_tokens: int, num_rows: int) -> int:
    """Most bytes alive at once in a step of `num_tokens` tokens that needs `num_rows` rows of logits.

    The residual lives throughout; beside it the largest of: the attention's input, queries, keys, values and output;
    the MLP's input, gate, up and their product; the last hidden states and the logits with the sampler's copies.
    """
    attention = num_tokens * (model.hidden + 2 * model.query_width + 2 * model.kv_width) * model.dtype_bytes
    mlp = num_tokens * (model.hidden + 3 * model.intermediate) * model.dtype_bytes
    rows = min(num_rows, num_tokens)
    head = rows * (model.hidden * model.dtype_bytes + model.vocab * (model.dtype_bytes + LOGIT_COPIES * FP32_BYTES))
    return num_tokens * model.hidden * model.dtype_bytes + max(attention, mlp, head)


def query_slot_bytes(model: Model, window: int) -> int:
    """Bytes of one query slot: the last `window` queries of every layer."""
    return model.num_layers * window * model.query_width * model.dtype_bytes


def score_cache_bytes(model: Model, settings: MemorySettings) -> int:
    """Bytes of the history: an fp32 score per token, layer and KV head of the requests that may be compressed.

    Only a slot's holder is ever compressed, and it then has at most `budget_blocks` blocks.
    """
    num_tokens = settings.num_slots * settings.budget_blocks * settings.block_size
    return num_tokens * model.num_layers * model.num_kv_heads * FP32_BYTES


def workspace_bytes(model: Model, settings: MemorySettings, max_model_len: int) -> int:
    """Bytes a compression works in: scores of every layer, and one layer's keys and values staged.

    Room for `concurrent_compressions` requests at their budget, or for one prompt of the greatest length, whichever is
    more: a longer batch is split.
    """
    if settings.num_slots == 0:
        return 0
    longest = -(-max_model_len // settings.block_size) * settings.block_size
    num_sequences = min(settings.concurrent_compressions, settings.num_slots)
    num_tokens = max(num_sequences * settings.budget_blocks * settings.block_size, longest)
    scores = model.num_layers * model.num_kv_heads * WORKSPACE_VALUES * FP32_BYTES
    staged = 2 * model.kv_width * model.dtype_bytes
    return num_tokens * (scores + staged)

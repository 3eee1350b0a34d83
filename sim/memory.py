"""Plan how many KV blocks fit on a GPU: its memory minus all other uses, term by term.

Simulator and engine plan with this module, so that a policy has the same pool in both. For Qwen3-8B
on an H200 under `hybrid`:

    total                                139.8 GiB
    - withheld (1 - utilisation)          14.0
    - weights                             15.3
    - activations of a step                0.7
    - context, graphs, libraries           3.0
    - attention workspace                  0.2    partial results of split decodes
    - query slots                          1.1    256 slots: min(slots of the policy, max_running)
    - compression workspace                0.2
    - swap staging                         0.0    with host blocks only
    = KV blocks and their score history  105.3    divided by the bytes of one block of each

`plan_memory` divides the memory for given settings. `plan_pool` divides it for the policies that a
run may use: their needs (`PolicyNeeds`) depend on the pool, and the pool depends on their needs.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from zlab.policies.core.plan import SchedulerLimits
from zlab.policies.core.policy import Policy
from zlab.policies.core.query_slots import QuerySlots
from zlab.policies.scorers import scorer_traits
from zlab.sim.specs import GIB, Gpu, ModelSpec, SimError

FP32_BYTES = 4
# The sampler holds fp32 logits and their probabilities beside the logits in the model's dtype.
LOGIT_COPIES = 2
# A compression holds global score, redundancy, combined score and kept index for each token.
WORKSPACE_VALUES = 4
# Beside the row sums it holds the row maxima of the softmax, for each tile of tokens.
ROW_STATISTICS = 2
SCORE_TILE = 64  # tokens of one score program, where blocks are not larger
# Cached tokens of one split of a decode. Measured on an H200: with enough requests to fill the GPU,
# few splits are best (fewer partial results), and sizes from 256 to 2048 are up to 3 % apart; with
# few requests only many splits fill it.
SPLIT_TOKENS, SPLIT_TOKENS_OF_FEW, FEW_REQUESTS = 1024, 256, 32
NUM_STAGES = 8  # pieces of swapped blocks that can be in transit to the host at once
STAGING_BYTES = 1 << 30  # all stages together; more only where pieces of one block need it


class MemoryPlanError(SimError):
    """No KV block fits. The message lists every term in bytes."""


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """The settings of an engine that decide its use of memory.

    Nothing is compressed if `budget_blocks` is 0.

    Attributes:
        block_size: Tokens of a block.
        utilisation: Share of the GPU's memory that the engine may use.
        max_batched_tokens: Most tokens of one step.
        max_running: Most requests of one step, and therefore most rows of logits.
        max_model_len: Longest request in tokens; None selects the model's own limit.
        reserve_bytes: Driver context, library workspaces, CUDA graphs, fragmentation. Measured on
            an H200 with Qwen3-8B, graphs for up to 256 requests and torch 2.11: 0.8 GiB of context
            and libraries, 1.2 GiB of graphs, 0.6 GiB of activations beyond the plan and of
            fragmentation.
        num_slots: Query slots; 0 with a budget means that the scorer needs no queries.
        budget_blocks: Most blocks of a compressed request (N_max).
        window: Queries that a slot keeps in each layer.
        global_scores: Whether each token of the cache has a score history.
        concurrent_compressions: Requests that the workspace is sized for, each at its budget.
        host_blocks: Blocks of host memory for swapped requests.
        num_engines: Engines that share weights and pool; each has its own working memory.
    """

    block_size: int = 256
    utilisation: float = 0.9
    max_batched_tokens: int = 8_192
    max_running: int = 256
    max_model_len: int | None = None
    reserve_bytes: int = 3 * GIB
    num_slots: int = 0
    budget_blocks: int = 0
    window: int = 16
    global_scores: bool = True
    concurrent_compressions: int = 16
    host_blocks: int = 0
    num_engines: int = 1

    def __post_init__(self) -> None:
        for key in (
            "block_size",
            "max_batched_tokens",
            "max_running",
            "concurrent_compressions",
            "num_engines",
        ):
            if getattr(self, key) < 1:
                raise SimError(f"{key} must be at least 1, got {getattr(self, key)}")
        for key in ("reserve_bytes", "num_slots", "budget_blocks", "host_blocks"):
            if getattr(self, key) < 0:
                raise SimError(f"{key} must be at least 0, got {getattr(self, key)}")
        if not 0.0 < self.utilisation <= 1.0:
            raise SimError(
                f"memory utilisation must be above 0 and at most 1, got {self.utilisation!r}"
            )
        if self.max_model_len is not None and self.max_model_len < 1:
            raise SimError(f"max_model_len must be at least 1, got {self.max_model_len}")
        if self.num_slots and self.budget_blocks < 2:
            raise SimError(
                f"budget_blocks must be at least 2 with query slots (one is emptied by a "
                f"compression), got {self.budget_blocks} with num_slots {self.num_slots}"
            )
        if self.num_slots and not 1 <= self.window <= self.block_size:
            raise SimError(
                f"window must be between 1 and the block size, got window {self.window} "
                f"and block_size {self.block_size}"
            )

    @property
    def has_history(self) -> bool:
        """Whether each token of the cache has a score history."""
        return self.budget_blocks > 0 and self.global_scores


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The division of the GPU's memory. All terms are bytes; their sum is `memory_bytes`.

    Attributes:
        block_bytes: Keys and values of one KV block, all layers.
        withheld_bytes: Memory beyond the utilisation.
        score_cache_bytes: Score history of all blocks.
        unused_bytes: Rest of less than one block.
    """

    gpu: str
    model: str
    settings: MemorySettings
    memory_bytes: int
    withheld_bytes: int
    weight_bytes: int
    activation_bytes: int
    reserve_bytes: int
    attention_workspace_bytes: int
    query_slot_bytes: int
    score_cache_bytes: int
    workspace_bytes: int
    staging_bytes: int
    block_bytes: int
    num_blocks: int
    unused_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.settings.block_size

    @property
    def terms(self) -> dict[str, int]:
        """Return every term in bytes by name, in the order in which they are subtracted. Their sum
        is `memory_bytes`.
        """
        return {
            "withheld (1 - utilisation)": self.withheld_bytes,
            "weights": self.weight_bytes,
            "activations": self.activation_bytes,
            "context, graphs, libraries": self.reserve_bytes,
            "attention workspace": self.attention_workspace_bytes,
            "query slots": self.query_slot_bytes,
            "compression workspace": self.workspace_bytes,
            "swap staging": self.staging_bytes,
            "score cache": self.score_cache_bytes,
            "KV blocks": self.num_blocks * self.block_bytes,
            "unused (under one block)": self.unused_bytes,
        }

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON: the terms under stable keys, the settings, and the blocks."""
        keys = (
            "memory_bytes withheld_bytes weight_bytes activation_bytes reserve_bytes "
            "query_slot_bytes score_cache_bytes workspace_bytes attention_workspace_bytes "
            "staging_bytes block_bytes num_blocks num_tokens unused_bytes"
        )
        numbers = {key: getattr(self, key) for key in keys.split()}
        return {"gpu": self.gpu, "model": self.model, **numbers, "settings": asdict(self.settings)}


@dataclass(frozen=True)
class PolicyNeeds:
    """The memory that an engine needs for all policies that it may run under.

    Attributes:
        num_slots: Query slots: the number that the policy has, but at most one for each request.
        window: Last positions of a block whose queries a slot keeps.
        num_rows: Requests that may have blocks at once.
        budget_blocks: Largest of the policies' smallest budgets; 0 where nothing is compressed.
        keeps_history: Whether there is a score history: always with query slots, otherwise where a
            scorer keeps one.
    """

    num_slots: int
    window: int
    num_rows: int
    budget_blocks: int
    keeps_history: bool

    @property
    def compresses(self) -> bool:
        """Whether there is a workspace for compressions."""
        return self.budget_blocks > 0

    @classmethod
    def of(cls, policies: Sequence[Policy], limits: SchedulerLimits) -> Self:
        """Return the maximum of each need over the policies.

        Raises:
            ConfigError: A policy cannot work within the limits.
        """
        needs = [cls._of_one(policy, limits) for policy in policies]
        return cls(
            max(need.num_slots for need in needs),
            max(need.window for need in needs),
            max(need.num_rows for need in needs),
            max(need.budget_blocks for need in needs),
            any(need.keeps_history for need in needs),
        )

    @classmethod
    def _of_one(cls, policy: Policy, limits: SchedulerLimits) -> Self:
        slots = QuerySlots(policy, limits)
        # Where the limit holds for each step only, more requests than that may hold blocks at once.
        num_rows = limits.num_blocks if policy.batching.limit_per_step else limits.max_running
        # The lowest free slot is assigned first, so slots beyond the largest number of holders are
        # unused.
        num_slots = min(slots.num_slots, num_rows)
        budget_blocks = slots.floor or 0
        remembers = budget_blocks > 0 and scorer_traits(policy.compression.scorer).keeps_history
        return cls(
            num_slots,
            policy.window(limits.block_size),
            num_rows,
            budget_blocks,
            num_slots > 0 or remembers,
        )


def plan_pool(
    gpu: Gpu,
    model: ModelSpec,
    policies: Sequence[Policy],
    limits: SchedulerLimits,
    *,
    utilisation: float | None = None,
    num_engines: int = 1,
    weight_bytes: int | None = None,
) -> MemoryPlan:
    """Divide the GPU's memory for the policies that a run may use.

    Args:
        gpu: The GPU.
        model: Shape of the model.
        policies: The policy at the start and all that may take over.
        limits: Bounds of a step; `num_blocks` is not read.
        utilisation: Share of the memory that may be used; by default that of `MemorySettings`.
        num_engines: Engines that share weights and pool.
        weight_bytes: Bytes of the weights; by default those of the model's shape.

    Returns:
        The plan.

    Raises:
        MemoryPlanError: No block fits beside the rest.
        SimError: `max_model_len` is beyond the model's positions.
        ConfigError: A policy cannot work in the pool.
    """
    settings = MemorySettings(
        block_size=limits.block_size,
        max_batched_tokens=limits.max_batched_tokens,
        max_running=limits.max_running,
        max_model_len=limits.max_model_len,
        host_blocks=limits.host_blocks,
        num_engines=num_engines,
    )
    if utilisation is not None:
        settings = replace(settings, utilisation=utilisation)
    # A pool planned without slots is larger than the final one, so the policies have at least as
    # many slots in it.
    largest = plan_memory(gpu, model, settings, weight_bytes)
    needs = PolicyNeeds.of(policies, replace(limits, num_blocks=largest.num_blocks))
    if not needs.compresses:
        return largest
    num_slots = needs.num_slots
    if num_engines > 1 and num_slots:  # each engine assigns its own slots
        num_slots = min(num_slots * num_engines, largest.num_blocks // needs.budget_blocks)
    compressing = replace(
        settings,
        num_slots=num_slots,
        window=needs.window,
        budget_blocks=needs.budget_blocks,
        global_scores=needs.keeps_history,
    )
    return plan_memory(gpu, model, compressing, weight_bytes)


def plan_memory(
    gpu: Gpu, model: ModelSpec, settings: MemorySettings, weight_bytes: int | None = None
) -> MemoryPlan:
    """Divide the GPU's memory.

    Args:
        gpu: The GPU; its name and memory are read.
        model: Shape of the model.
        settings: The other uses of the memory.
        weight_bytes: Bytes of the weights; by default those of the model's shape.

    Returns:
        The plan.

    Raises:
        MemoryPlanError: Not even one block fits beside the rest.
        SimError: `max_model_len` is beyond the model's positions.
    """
    max_model_len = settings.max_model_len or model.max_positions
    if max_model_len > model.max_positions:
        raise SimError(
            f"max_model_len {max_model_len} is beyond the {model.max_positions} positions of "
            f"model {model.name}"
        )
    usable_bytes = int(gpu.memory_bytes * settings.utilisation)
    block_bytes = settings.block_size * model.kv_bytes_per_token
    history_bytes = history_block_bytes(model, settings.block_size) if settings.has_history else 0
    engines = settings.num_engines
    fixed = {
        "weights": model.weight_bytes if weight_bytes is None else weight_bytes,
        "activations": engines
        * activation_bytes(model, settings.max_batched_tokens, settings.max_running),
        "context, graphs, libraries": engines * settings.reserve_bytes,
        "attention workspace": engines
        * attention_workspace_bytes(model, max_model_len, settings.max_running),
        "query slots": settings.num_slots * query_slot_bytes(model, settings.window),
        "compression workspace": engines * workspace_bytes(model, settings, max_model_len),
        "swap staging": engines * staging_bytes(model, settings),
    }
    pool_bytes = usable_bytes - sum(fixed.values())
    if pool_bytes < block_bytes + history_bytes:
        listed = "; ".join(f"{name} {value:,}" for name, value in fixed.items())
        raise MemoryPlanError(
            f"model {model.name} does not fit on {gpu.name}: {settings.utilisation:g} of "
            f"{gpu.memory_bytes:,} bytes is {usable_bytes:,}; less {listed}; leaves "
            f"{pool_bytes:,}, but one KV block of {settings.block_size} tokens takes "
            f"{block_bytes + history_bytes:,}"
        )
    num_blocks = pool_bytes // (block_bytes + history_bytes)
    return MemoryPlan(
        gpu=gpu.name,
        model=model.name,
        settings=settings,
        memory_bytes=gpu.memory_bytes,
        withheld_bytes=gpu.memory_bytes - usable_bytes,
        weight_bytes=fixed["weights"],
        activation_bytes=fixed["activations"],
        reserve_bytes=fixed["context, graphs, libraries"],
        attention_workspace_bytes=fixed["attention workspace"],
        query_slot_bytes=fixed["query slots"],
        score_cache_bytes=num_blocks * history_bytes,
        workspace_bytes=fixed["compression workspace"],
        staging_bytes=fixed["swap staging"],
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        unused_bytes=pool_bytes - num_blocks * (block_bytes + history_bytes),
    )


def activation_bytes(model: ModelSpec, num_tokens: int, num_rows: int) -> int:
    """Return the most bytes that a step has allocated at once.

    The residual is always allocated. Beside it counts the largest of three groups: the attention's
    input, queries, keys, values and output; the MLP's input, gate, up and their product; the last
    hidden states and the logits with the sampler's copies.

    Args:
        model: Shape of the model.
        num_tokens: Tokens of the step.
        num_rows: Rows of logits of the step.
    """
    widths = model.hidden_size + 2 * model.query_width + 2 * model.kv_width
    attention = num_tokens * widths * model.dtype_bytes
    mlp = num_tokens * (model.hidden_size + 3 * model.intermediate_size) * model.dtype_bytes
    head = min(num_rows, num_tokens) * (
        model.hidden_size * model.dtype_bytes
        + model.vocab_size * (model.dtype_bytes + LOGIT_COPIES * FP32_BYTES)
    )
    return num_tokens * model.hidden_size * model.dtype_bytes + max(attention, mlp, head)


def split_tokens(max_requests: int) -> int:
    """Return the cached tokens of one split of a decode, for a workspace of `max_requests`
    requests.

    The result depends only on the workspace's fixed size, so that no output depends on which
    requests share a batch.
    """
    return SPLIT_TOKENS_OF_FEW if max_requests <= FEW_REQUESTS else SPLIT_TOKENS


def attention_workspace_bytes(model: ModelSpec, max_model_len: int, max_running: int) -> int:
    """Return the bytes of the partial results of split decodes.

    Each split of each request, and of one padding request, has an fp32 output and normaliser for
    each query head.

    Args:
        model: Shape of the model.
        max_model_len: Longest request, in tokens.
        max_running: Most requests of a step.
    """
    num_requests = max_running + 1
    splits = num_requests * -(-max_model_len // split_tokens(num_requests))
    return splits * model.num_query_heads * (model.head_dim + 1) * FP32_BYTES


def query_slot_bytes(model: ModelSpec, window: int) -> int:
    """Return the bytes of one query slot: the last `window` queries of every layer."""
    return model.num_layers * window * model.query_width * model.dtype_bytes


def history_block_bytes(model: ModelSpec, block_size: int) -> int:
    """Return the bytes of a block's score history: an fp32 score for each token, layer and KV
    head.
    """
    return block_size * model.num_layers * model.num_kv_heads * FP32_BYTES


def workspace_blocks(
    budget_blocks: int, max_model_len: int, block_size: int, concurrent_compressions: int
) -> int:
    """Return the blocks that one batch of compressions works on: several requests at their budget,
    each with one block to grow into, or one request of the greatest length. A larger batch is
    divided.

    Args:
        budget_blocks: Most blocks of a compressed request (N_max).
        max_model_len: Longest request, in tokens.
        block_size: Tokens of a block.
        concurrent_compressions: Requests of the batch at their budget.
    """
    longest = -(-max_model_len // block_size) + 1
    return max(longest, concurrent_compressions * (budget_blocks + 1))


def score_tile(block_size: int) -> int:
    """Return the tokens of one score program: whole blocks, at least `SCORE_TILE` tokens."""
    return max(block_size, SCORE_TILE // block_size * block_size)


def workspace_bytes(model: ModelSpec, settings: MemorySettings, max_model_len: int) -> int:
    """Return the bytes of the compression workspace: scores of every layer, and softmax statistics
    of the window's queries for each tile.

    Args:
        model: Shape of the model.
        settings: Budget, window, block size and number of concurrent compressions.
        max_model_len: Longest request, in tokens.
    """
    if not settings.budget_blocks:
        return 0
    num_requests = settings.concurrent_compressions
    num_tokens = settings.block_size * workspace_blocks(
        settings.budget_blocks, max_model_len, settings.block_size, num_requests
    )
    rows = model.num_query_heads // model.num_kv_heads * settings.window
    tiles = -(-num_tokens // score_tile(settings.block_size)) + num_requests
    values = WORKSPACE_VALUES * num_tokens + rows * (ROW_STATISTICS * tiles + num_requests)
    return model.num_layers * model.num_kv_heads * values * FP32_BYTES


def piece_blocks(block_bytes: int, host_blocks: int, bytes_of_stages: int = STAGING_BYTES) -> int:
    """Return the blocks that are copied to or from the host as one piece.

    If a piece has more than one block, the pieces of all stages and of the receiving buffer stay
    within `bytes_of_stages`.

    Args:
        block_bytes: Bytes of one block, score history included.
        host_blocks: Blocks of host memory.
        bytes_of_stages: Bytes of all stages together.
    """
    return max(min(bytes_of_stages // block_bytes, host_blocks) // (NUM_STAGES + 1), 1)


def staging_bytes(model: ModelSpec, settings: MemorySettings) -> int:
    """Return the bytes of the staging buffers for swapped blocks and for the queries of a slot."""
    if not settings.host_blocks:
        return 0
    block = settings.block_size * model.kv_bytes_per_token
    if settings.has_history:
        block += history_block_bytes(model, settings.block_size)
    queries = query_slot_bytes(model, settings.window) if settings.num_slots else 0
    return (NUM_STAGES + 1) * (piece_blocks(block, settings.host_blocks) * block + queries)

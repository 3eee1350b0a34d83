"""Measurements of a card that does exactly what a cost model says, give or take some noise.

Small simulations for the tests of this room.
"""

from typing import Any

import numpy as np

from zlab.engine.calibration import FULL, Chunks
from zlab.policies.core.plan import SchedulerLimits, prefill_pairs
from zlab.policies.spec import load_policy
from zlab.sim.cost_model import CostModel, roofline, together_seconds
from zlab.sim.replay import Run, replay
from zlab.sim.specs import MODELS, find_gpu, find_model
from zlab.traces.workload import TraceRequest, Workload, WorkloadMeta

BLOCK = 256
MODEL = MODELS["qwen3-8b"]
FLOP_S = 1.0 / 600e12
# About what was measured of the engine on an H200 (docs/LOG.md): 9.7 / 14.8 / 25.2 ms at 64, 128,
# 256 x 2,048 tokens.
TRUTH: dict[str, float] = {
    "step_s": 1.2e-3,
    "weight_read_s": 3.6e-3,
    "layer_token_s": FLOP_S * MODEL.layer_flops_per_token,
    "head_row_s": FLOP_S * MODEL.head_flops_per_row,
    "request_s": 6e-6,
    "kv_read_token_s": 147_456 / 4.3e12,
    "attention_pair_s": MODEL.attention_flops_per_pair / 380e12,
    "attention_wait_token_s": 0.4e-6,
    "corner": 0.4,
    "launch_s": 14e-3,
    "mixed_launch_s": 4e-3,
    "graph_tokens": 0.0,
    "compression_start_s": 0.5e-3,
    "compression_launch_s": 30e-6,
    "compression_source_token_s": 0.15e-6,
    "compression_kept_token_s": 0.05e-6,
    "compression_share": 0.2,
    "compression_rate": 0.6,
    "swap_launch_s": 60e-6,
    "swap_token_s": 147_456 / 50e9,
}


def document(
    truth: dict[str, float], noise: float, seed: int, most_context: int = 700_000
) -> dict[str, Any]:
    """What `zlab.engine.calibration.measure` would write on that card: the full grid, every time
    off by a factor.
    """
    generator = np.random.default_rng(seed)
    cost = CostModel(gpu="h200", model=MODEL.name, source="made up", **truth)

    def spread(seconds: float) -> dict[str, float]:
        median = seconds * float(np.exp(generator.normal(0.0, noise)))
        return {"median": median, "low": median * 0.99, "high": median * 1.01, "count": 5}

    def step(
        part: str, decodes: int, context: int, chunks: Chunks | None = None, rested: bool = False
    ) -> dict[str, Any]:
        number, count, pairs = 0, 0, 0
        if chunks is not None:
            number, count = chunks.number, chunks.tokens(BLOCK)
            pairs = number * prefill_pairs(chunks.prefix_blocks * BLOCK, count)
        counts = (decodes, context, number * count, pairs, number)
        before_s = cost.decode_seconds(decodes, context) if part == "mixed" else 0.0
        seconds = cost.step_seconds(*counts, before_s)
        if (
            part == "prefill" and not rested
        ):  # back to back: the one before took as long, and kept the host as long
            before_s = seconds
        return {
            "part": part, "decodes": decodes, "context_tokens": context, "prefills": number,
            "prefill_tokens": number * count, "prefill_pairs": pairs, "before_s": before_s,
            "seconds": spread(seconds),
        }  # fmt: skip

    steps = [
        step("decode", batch, batch * (blocks * BLOCK + 20))
        for blocks in FULL.contexts
        for batch in FULL.batches
        if batch * blocks * BLOCK <= most_context
    ]
    steps += [step("prefill", 0, 0, chunks) for chunks in FULL.prefills]
    steps += [step("prefill", 0, 0, chunks, rested=True) for chunks in FULL.rested]
    steps += [
        step("mixed", batch, batch * FULL.mixed_context * BLOCK, chunks)
        for batch in FULL.mixed_batches
        for chunks in FULL.mixed
    ]
    compressions = [
        {
            "sequences": count,
            "source_tokens": blocks * BLOCK,
            "kept_tokens": kept * BLOCK,
            "seconds": spread(
                cost.compression_start_s
                + count * cost.compression_seconds(blocks * BLOCK, kept * BLOCK)
            ),
        }
        for blocks in FULL.sources
        for count in FULL.compressed
        for kept in sorted({blocks - 1, blocks // 2})
    ]
    beside = []
    for batch in FULL.beside:
        for count in FULL.beside_batches:
            context, later = batch * 700, batch * 700 + count * 2049
            work = cost.decode_seconds(batch, context)
            alone = cost.compression_start_s + count * cost.compression_seconds(2304, 2048)
            both = float(
                together_seconds(
                    np.array(work), np.array(alone), cost.compression_share, cost.compression_rate
                )
            )
            after = cost.decode_seconds(batch + count, later)
            beside.append(
                {
                    "decodes": batch,
                    "context_tokens": context,
                    "sequences": count,
                    "source_tokens": 2304,
                    "kept_tokens": 2048,
                    "after_context_tokens": later,
                    "seconds": spread(both + after),
                    "after": spread(after),
                }
            )
    return {
        "format": "zlab-measurements/1",
        "card": "NVIDIA H200",
        "model": MODEL.name,
        "shape": MODEL.profile_shape,
        "dtype": "bfloat16",
        "date": "2026-11-30",
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "block_size": BLOCK,
        "window": 16,
        "graph_tokens": round(truth["graph_tokens"]),
        "steps": steps,
        "compressions": compressions,
        "beside": beside,
        "swaps": [
            {
                "direction": way,
                "tokens": blocks * BLOCK,
                "seconds": spread(cost.swap_seconds(blocks * BLOCK)),
            }
            for blocks in FULL.swapped
            for way in ("out", "in")
        ],
        "sampling": [],
        "host": [step("decode", batch, batch * 300) for batch in FULL.hosted],
        "skipped": [],
    }


LIMITS = SchedulerLimits(
    num_blocks=512, block_size=16, max_batched_tokens=4096, max_running=64, max_model_len=8192
)


def workload(*requests: TraceRequest, block_size: int | None = None) -> Workload:
    return Workload(requests, WorkloadMeta(name="test", block_size=block_size))


def request(id: str, prompt: int, output: int, arrival_s: float = 0.0, **more: Any) -> TraceRequest:
    return TraceRequest(
        id=id,
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=output,
        arrival_s=arrival_s,
        **more,
    )


def cost_of(policy: str = "full-kv", block_size: int = 16) -> CostModel:
    window = load_policy(policy).compression.window
    return roofline(find_gpu("h200"), find_model("qwen3-8b"), window=window, block_size=block_size)


def simulate(
    load: Workload, policy: str = "full-kv", limits: SchedulerLimits = LIMITS, **more: Any
) -> Run:
    return replay(load, policy, "h200", "qwen3-8b", limits=limits, **more)

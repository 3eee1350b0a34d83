"""Small simulations for the tests of this room."""

from typing import Any

from policies.core.limits import Limits
from policies.spec import load_policy
from sim.cost import CostModel, roofline
from sim.hardware import find_gpu, find_model
from sim.replay import Run, replay
from traces.workload import TraceRequest, Workload, WorkloadMeta

LIMITS = Limits(num_blocks=512, block_size=16, max_batched_tokens=4096, max_running=64, max_model_len=8192)


def workload(*requests: TraceRequest, block_size: int | None = None) -> Workload:
    return Workload(requests, WorkloadMeta(name="test", block_size=block_size))


def request(id: str, prompt: int, output: int, arrival_s: float = 0.0, **more: Any) -> TraceRequest:
    return TraceRequest(
        id=id, prompt_tokens=prompt, output_tokens=output, max_tokens=output, arrival_s=arrival_s, **more
    )


def cost_of(policy: str = "full-kv", block_size: int = 16) -> CostModel:
    window = load_policy(policy).compression.window
    return roofline(find_gpu("h200"), find_model("qwen3-8b"), window=window, block_size=block_size)


def simulate(load: Workload, policy: str = "full-kv", limits: Limits = LIMITS, **more: Any) -> Run:
    return replay(load, policy, "h200", "qwen3-8b", limits=limits, **more)

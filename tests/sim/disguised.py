"""Recordings whose truth is known: simulated with a cost model, then dressed up as the engine's."""

import json
from pathlib import Path
from typing import Any

from zlab.policies.core.plan import SchedulerLimits
from zlab.sim.cost_model import CostModel
from zlab.sim.replay import replay
from zlab.traces.recording import AskedFile, Recording
from zlab.traces.workload import Workload

LIMITS = SchedulerLimits(
    num_blocks=48, block_size=16, max_batched_tokens=256, max_running=12, max_model_len=1024
)


def disguised(
    folder: Path,
    load: Workload,
    policy: str,
    cost: CostModel,
    limits: SchedulerLimits = LIMITS,
    plan_ahead: bool = False,
    **manifest: Any,
) -> Path:
    """Simulate into `folder` and let its manifest say that an engine on an H200 did it."""
    replay(load, policy, limits=limits, cost=cost, out=folder, plan_ahead=plan_ahead)
    asked = AskedFile(folder)
    for request in load:
        asked.write(request)
    asked.close()
    change_manifest(
        folder,
        source="engine",
        gpu="NVIDIA H200",
        model="qwen3-8b",
        prefix_block_size=load.meta.block_size,
        engine={"dtype": "bfloat16", "overlap": plan_ahead, "cuda_graphs": True},
        versions={"torch": "2.11.0"},
        **manifest,
    )
    return folder


def change_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(Recording(folder).manifest | changes), "utf-8")

"""Small simulated runs that use every state and phase between them, and what the scheduler itself
knew in each step.

Made-up rows in every public format, and a way to lay them down as files.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zlab.policies.core.plan import SchedulerLimits, StepPlan
from zlab.policies.core.scheduler import Scheduler
from zlab.sim.replay import Run, replay
from zlab.traces.synthetic import ChatShape, LogNormal, Poisson, chat
from zlab.traces.workload import Workload

BLOCK = 16
LIMITS = SchedulerLimits(
    num_blocks=96, block_size=BLOCK, max_batched_tokens=512, max_running=24, max_model_len=4096
)
SWAPPING = SchedulerLimits(96, BLOCK, 512, 24, 4096, host_blocks=400)
TIGHT = "budget=fixed,tokens=96,window=8,num_slots=6"

POLICIES: tuple[tuple[str, SchedulerLimits], ...] = (
    (f"hybrid:{TIGHT}", LIMITS),
    (f"hybrid:{TIGHT},join=when_done", LIMITS),
    (f"hybrid:{TIGHT},join=blocking", LIMITS),
    (f"hybrid:{TIGHT},comes_back=swap,slotted=true", SWAPPING),
    (f"constrained:{TIGHT}", LIMITS),
    ("full-kv", LIMITS),
    ("nano-vllm", LIMITS),
    (f"zipage:{TIGHT}", LIMITS),
)


def conversations(num_requests: int = 90, seed: int = 3) -> Workload:
    """Chats with a common system prompt: shared, cached and private blocks, arrivals over time."""
    shape = ChatShape(
        system_tokens=64,
        num_system_prompts=2,
        user=LogNormal(mu=3.4, sigma=0.8, cap=200),
        answer=LogNormal(mu=4.3, sigma=0.8, cap=400),
        max_context=1200,
        mean_think_s=0.4,
        s_per_token=0.002,
        block_size=BLOCK,
    )
    return chat(num_requests, shape, Poisson(40.0), seed)


@dataclass
class Witness:
    """What each step's plan left behind: (state, references) of every block, table of every running
    request.
    """

    pools: list[list[tuple[int, int]]] = field(default_factory=list)
    tables: list[dict[int, list[int]]] = field(default_factory=list)


def watched(policy: str, limits: SchedulerLimits) -> tuple[Run, Witness]:
    """Simulate step by step and note the scheduler's own pool after each plan."""
    witness = Witness()

    class Watched(Scheduler):
        def plan(self, now_ns: int) -> StepPlan | None:
            plan = super().plan(now_ns)
            if plan is not None:
                pool, state = self.state.pool, self.state
                witness.pools.append(
                    [(int(pool.state(block)), pool.refs[block]) for block in range(pool.num_blocks)]
                )
                witness.tables.append({r.number: list(r.table) for r in state.running.values()})
            return plan

    run = replay(conversations(), policy, limits=limits, quiet=False, make_scheduler=Watched)
    return run, witness


def manifest_of(run: Run) -> dict[str, Any]:
    """The run's manifest as a dictionary that may be changed."""
    return dict(run.manifest)


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2024-02-28 "
    "23:59:59.9999999,300,12\r\n2024-02-29 00:00:00.0000001,41,7"
)
BURSTGPT_1 = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
7,ChatGPT,100,20,120,Conversation log
9,GPT-4,0,0,0,API log
9,GPT-4,11,5,16,API log
"""
BURSTGPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
100.0,ab-1,12,GPT-4,30,6,36,Conversation log
101.0,,3.5,ChatGPT,31,7,38,API log
"""
MOONCAKE: list[dict[str, Any]] = [
    {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1024, "output_length": 6, "hash_ids": [0, 1]},
    {"timestamp": 1500, "input_length": 1, "output_length": 1, "hash_ids": [3]},
]
BAILIAN: list[dict[str, Any]] = [
    {
        "chat_id": 4,
        "parent_chat_id": -1,
        "timestamp": 2.5,
        "input_length": 40,
        "output_length": 9,
        "type": "text",
        "turn": 1,
        "hash_ids": [7, 8, 9],
    },
    {
        "chat_id": 5,
        "parent_chat_id": 4,
        "timestamp": 3.0,
        "input_length": 48,
        "output_length": 3,
        "type": "text",
        "turn": 2,
        "hash_ids": [1, 8, 9],
    },
]
SERVEGEN: list[dict[str, Any]] = [
    {"request_id": 3, "type": "text", "input_length": 20, "hash_ids": [5, 6], "img_ids": []}
]
BENCH: list[dict[str, Any]] = [
    {
        "id": 0,
        "kind": "a",
        "problem": 0,
        "sample": 0,
        "prompt_seed": [1, 2],
        "prompt_len": 5,
        "output_len": 8,
        "arrival": 0.0,
    },
    {
        "id": 1,
        "kind": "a",
        "problem": 0,
        "sample": 1,
        "prompt_seed": [1, 2],
        "prompt_len": 5,
        "output_len": 9,
        "arrival": 0.0,
    },
    {
        "id": 2,
        "kind": "b",
        "problem": 1,
        "sample": 0,
        "prompt_seed": 3,
        "prompt_len": 4,
        "output_len": 2,
        "arrival": 0.0,
    },
]


def write_text(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    return write_text(path, "".join(json.dumps(row) + "\n" for row in rows))

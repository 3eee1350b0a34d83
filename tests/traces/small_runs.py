"""Small simulated runs that use every state and phase between them, and what the scheduler itself knew in each step."""

from dataclasses import dataclass, field
from typing import Any

from policies.core.limits import Limits
from policies.core.plan import StepPlan
from policies.core.scheduler import Scheduler
from sim.replay import Run, replay
from traces.arrivals import Poisson
from traces.recipe import LogNormal
from traces.sharing import ChatShape, chat
from traces.workload import Workload

BLOCK = 16
LIMITS = Limits(num_blocks=96, block_size=BLOCK, max_batched_tokens=512, max_running=24, max_model_len=4096)
SWAPPING = Limits(96, BLOCK, 512, 24, 4096, host_blocks=400)
TIGHT = "budget=fixed,tokens=96,window=8,num_slots=6"

POLICIES: tuple[tuple[str, Limits], ...] = (
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
    """What each step's plan left behind: (state, references) of every block, table of every running request."""

    pools: list[list[tuple[int, int]]] = field(default_factory=list)
    tables: list[dict[int, list[int]]] = field(default_factory=list)


def watched(policy: str, limits: Limits) -> tuple[Run, Witness]:
    """Simulate step by step and note the scheduler's own pool after each plan."""
    witness = Witness()

    class Watched(Scheduler):
        def plan(self, now_ns: int) -> StepPlan | None:
            plan = super().plan(now_ns)
            if plan is not None:
                pool, state = self.state.pool, self.state
                witness.pools.append([(int(pool.state(block)), pool.refs[block]) for block in range(pool.num_blocks)])
                witness.tables.append({r.number: list(r.table) for r in state.running.values()})
            return plan

    run = replay(conversations(), policy, limits=limits, quiet=False, make_scheduler=Watched)
    return run, witness


def manifest_of(run: Run) -> dict[str, Any]:
    """The run's manifest as a dictionary that may be changed."""
    return dict(run.manifest)

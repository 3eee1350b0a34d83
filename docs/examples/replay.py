"""Replay a made-up reasoning workload under two policies and look at the runs as tables."""

from zlab.policies.core.plan import SchedulerLimits
from zlab.sim.replay import replay
from zlab.traces.synthetic import ReasoningShape, reasoning

workload = reasoning(ReasoningShape(num_problems=16, mu=8.0, sigma=0.6, samples=4), seed=0)
pool = SchedulerLimits(num_blocks=128, block_size=256)
for name in ("full-kv", "hybrid:budget.tokens=1024"):
    run = replay(workload, name, gpu="h200", model="qwen3-8b", limits=pool)
    slowest = run.requests.sort_by([("finish_s", "descending")]).slice(0, 1).to_pylist()[0]
    print(
        f"{name}: {run.summary['requests_per_s']:.3f} requests/s, {run.steps.num_rows:,} steps; "
        f"last to end: {slowest['id']}, {slowest['preemptions']} preemptions"
    )

"""The decisions of two published engines, to the last preemption (table in
../shared/design/scheduling.md).
"""

import pytest

from tests.shared import SHARED, needs_shared
from tests.sim.cases import simulate
from zlab.policies.core.plan import SchedulerLimits
from zlab.traces.formats import read_trace

LIMITS = SchedulerLimits(num_blocks=512, block_size=256, max_batched_tokens=16384, max_running=256)
NO_HYBRID = "zipage:slots=constrained"
NO_PREFIX = "zipage:prefix=none"
MEASURED = [
    # preset, workload; prefill and decode steps, prefill tokens, preemptions, most running,
    # compressions, steps to 90 %
    ("nano-vllm", "W1", 203, 17951, 498_128, 600, 256, 0, 11062),
    ("nano-vllm", "W2", 160, 8674, 299_807, 254, 254, 0, 5094),
    ("zipage", "W1", 177, 14978, 313_741, 390, 256, 1165, 8738),
    (NO_HYBRID, "W1", 200, 19316, 49_640, 0, 56, 1165, 12517),
    (NO_PREFIX, "W1", 177, 14978, 351_629, 390, 256, 1165, 8738),
    ("zipage", "W2", 145, 8191, 252_333, 217, 254, 540, 4693),
]


KEYS = (
    "prefill_steps", "decode_steps", "prefill_tokens", "preemptions", "running_max", "compressions",
    "steps_to_90pct",
)  # fmt: skip
Row = tuple[str, str, int, int, int, int, int, int, int]


@needs_shared
@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row[0]}-{row[1]}")
def test_counts_of_the_published_engines(row: Row) -> None:
    policy, name, *counts = row
    summary = simulate(read_trace(SHARED / "workloads" / f"{name}.jsonl"), policy, LIMITS).summary
    assert [summary[key] for key in KEYS] == counts

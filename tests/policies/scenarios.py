"""Small runs in which something is going on: each planted fault shows in at least one of them."""

from dataclasses import replace
from typing import Any

from policies.core.limits import Limits
from policies.core.policy import Join
from policies.prefix import FullBlocks
from policies.spec import load_policy
from tests.policies.cases import preset
from tests.policies.drive import Case, job

LIMITS = Limits(num_blocks=10, block_size=4, max_batched_tokens=16, max_running=8, max_model_len=200, host_blocks=20)


def growing(name: str = "full-kv", limits: Limits = LIMITS, **changes: Any) -> Case:
    """Four requests whose outputs do not fit together: preemption, or compression."""
    jobs = tuple(job(f"r{n}", 5 + n, 17, arrival_ns=300 * n) for n in range(4))
    return replace(Case(preset(name, limits), limits, jobs, decode_ns=5), **changes)


def together(name: str, gap_ns: int, **answers: Any) -> Case:
    """Three requests with two blocks in common, the later ones when the first has computed them."""
    jobs = tuple(job(f"r{n}", 0, 24, gap_ns * n, ids=(1, 2, 3, 4, 5, 6, 7, 8, 20 + n)) for n in range(3))
    limits = replace(LIMITS, num_blocks=24)
    return Case(replace(preset(name, limits), **answers), limits, jobs)


def aborted_prefill() -> Case:
    """The first is aborted in the middle of its prompt; the second begins alike."""
    limits, ids = replace(LIMITS, max_batched_tokens=8, num_blocks=20), tuple(range(30))
    jobs = (replace(job("a", 0, 6, ids=ids), abort_ns=1500), job("b", 0, 6, 2500, ids=ids))
    return growing(limits=limits, jobs=jobs)


def aborted_compression() -> Case:
    """The first is aborted while its compression is in flight."""
    base = growing("hybrid", replace(LIMITS, num_blocks=12), copy_ns=6000)
    answer = replace(base.policy.compression, join=Join.WHEN_DONE)  # type: ignore[type-var]
    jobs = (replace(base.jobs[0], abort_ns=9_500), *base.jobs[1:])
    return replace(base, policy=replace(base.policy, compression=answer), jobs=jobs)


def whole_prompt_twice() -> Case:
    ids = tuple(range(8))
    return growing(jobs=(job("a", 0, 6, ids=ids), job("b", 0, 6, 2000, ids=ids)))


def small_one_waits() -> Case:
    """The first grows at the cost of the second; what is left would do for the third."""
    limits = replace(LIMITS, num_blocks=9)
    jobs = (job("a", 14, 9), job("b", 14, 9), job("c", 3, 4, 1500))
    return growing(limits=limits, jobs=jobs, policy=load_policy("full-kv:order=shortest-prompt"))


def long_prompt_joins() -> Case:
    limits = replace(LIMITS, max_batched_tokens=4, num_blocks=40)
    return growing(limits=limits, jobs=(job("a", 4, 30), job("b", 40, 2)))


SCENARIOS: tuple[Case, ...] = (
    growing(),
    growing(policy=load_policy("full-kv:preemption.comes_back=swap")),
    growing("hybrid", replace(LIMITS, num_blocks=9)),
    growing("hybrid", replace(LIMITS, num_blocks=24), policy=preset("hybrid", LIMITS, num_slots=1)),
    growing(jobs=(job("big", 60, 2), job("small", 3, 4))),
    together("full-kv", 1200),
    together("hybrid", 1200, prefix=FullBlocks(keep=False)),
    aborted_prefill(),
    aborted_compression(),
    whole_prompt_twice(),
    small_one_waits(),
    long_prompt_joins(),
)

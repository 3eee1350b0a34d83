"""Random workloads, limits and policies, small enough to be crowded and odd enough to hurt.

Small runs in which something is going on: each planted fault shows in at least one of them.
"""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.policies.drive import Case, Job, job
from zlab.policies.core.plan import SchedulerLimits
from zlab.policies.core.policy import Join, Policy
from zlab.policies.options import FullBlocks
from zlab.policies.spec import load_policy, policy_from_table, policy_to_table, presets
from zlab.traces.workload import TraceRequest

Draw = st.DrawFn


@st.composite
def limits(draw: Draw) -> SchedulerLimits:
    """Pools of 2 to 64 blocks of 1 to 8 tokens."""
    size = draw(st.sampled_from([4, 2, 3, 8, 4, 1]))
    return SchedulerLimits(
        num_blocks=draw(st.one_of(st.integers(4, 12), st.integers(2, 40))),
        block_size=size,
        max_batched_tokens=draw(st.sampled_from([16, 8, 64, 3, 1000, 1])),
        max_running=draw(st.sampled_from([256, 4, 8, 2, 1])),
        max_model_len=draw(st.sampled_from([200, 400, 60])),
        host_blocks=draw(st.sampled_from([0, 100, 6, 12])),
    )


def orders() -> st.SearchStrategy[dict[str, Any]]:
    """Every order, with and without skip-ahead and predictors."""
    skip = {"lookahead": st.sampled_from([0, 0, 1, 4]), "max_skips": st.sampled_from([0, 2, 16])}
    predictor = st.one_of(
        st.just({"kind": "oracle"}),
        st.fixed_dictionaries(
            {"kind": st.just("noisy-oracle"), "sigma": st.floats(0, 1), "seed": st.integers(0, 3)}
        ),
        st.fixed_dictionaries({"kind": st.just("class-mean"), "default": st.floats(1, 50)}),
    )
    return st.one_of(
        st.fixed_dictionaries({"kind": st.just("first-come"), **skip}),
        st.fixed_dictionaries(
            {"kind": st.just("priority"), "arrivals_per_level": st.integers(1, 5), **skip}
        ),
        st.fixed_dictionaries({"kind": st.just("shortest-prompt"), **skip}),
        st.fixed_dictionaries({"kind": st.just("shortest-output"), "predictor": predictor, **skip}),
        st.just({"kind": "fair-share"}),
    )


@st.composite
def slots_and_budget(
    draw: Draw, lim: SchedulerLimits
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Answers to slots and budget that fit the pool and each other, and a window with a scorer."""
    scoring: dict[str, Any] = {"window": draw(st.integers(1, lim.block_size))}
    kind = draw(st.sampled_from(["hybrid", "none", "constrained", "hybrid", "slotless"]))
    if kind == "none":
        return {"kind": "none"}, {"kind": "unlimited"}, scoring
    if kind == "slotless":
        scoring = {"window": draw(st.integers(1, 2 * lim.block_size)), "scorer": "recent"}
    floor = draw(st.integers(2, max(2, min(6, lim.num_blocks))))
    num_slots = draw(
        st.one_of(st.just(0), st.just(1), st.integers(1, max(1, lim.num_blocks // floor)))
    )
    slots: dict[str, Any] = (
        {"kind": "none"} if kind == "slotless" else {"kind": kind, "num_slots": num_slots}
    )
    if kind == "hybrid":
        slots["handout"] = draw(st.sampled_from(["nearest", "line"]))
    budget: dict[str, Any] = {"kind": "fixed", "blocks": floor}
    if draw(st.booleans()):
        grow = draw(st.sampled_from([0.2, 0.0, 0.5]))
        least = (floor - 1) * lim.block_size
        budget = {
            "kind": "adaptive",
            "tokens": least,
            "most_tokens": least + draw(st.integers(0, 5)) * lim.block_size,
            "grow_above": grow,
            "shrink_below": draw(st.sampled_from([0.0, grow])),
        }
    return slots, budget, scoring


@st.composite
def policies(draw: Draw, lim: SchedulerLimits) -> Policy:
    """Any answer beside any other."""
    slots, budget, scoring = draw(slots_and_budget(lim))
    share = st.sampled_from([0.0, 0.01, 0.2])
    admission = {
        "watermark_share": share,
        "count_hits": st.booleans(),
        "reserve": st.sampled_from(["sequence", "sequence", "peak", "chunk"]),
        "allocate": st.sampled_from(["sequence", "sequence", "chunk"]),
        "watermark_rounding": st.sampled_from(["up", "down"]),
    }
    chunk = st.sampled_from([0, 0, 1, 5, 9])
    running_order = {
        "kind": st.just("running-order"),
        "after_own_preemption": st.sampled_from(["stop", "continue"]),
        "max_chunk": chunk,
    }
    full_blocks = {
        "kind": st.just("full-blocks"),
        "keep": st.booleans(),
        "findable": st.sampled_from(["computed", "planned"]),
        "copies": st.sampled_from(["newest", "all"]),
        "reuse": st.sampled_from(["released", "unmatchable"]),
    }
    prefill_first = {
        "kind": st.just("prefill-first"),
        "cut": st.sampled_from(["any", "first"]),
        "limit": st.sampled_from(["running", "step"]),
    }
    back = st.sampled_from(["recompute", "swap"])
    table = {
        "name": "random",
        "order": draw(orders()),
        "admission": draw(st.fixed_dictionaries({"kind": st.just("when-it-fits"), **admission})),
        "batching": draw(
            st.one_of(
                st.fixed_dictionaries({"kind": st.just("mixed"), "max_chunk": chunk}),
                st.fixed_dictionaries(prefill_first),
                st.fixed_dictionaries(running_order),
            )
        ),
        "slots": slots,
        "budget": budget,
        "preemption": draw(
            st.one_of(
                st.fixed_dictionaries({"kind": st.just("latest-first"), "comes_back": back}),
                st.fixed_dictionaries(
                    {
                        "kind": st.just("slotless-first"),
                        "comes_back": back,
                        "slotted": st.booleans(),
                    }
                ),
                st.fixed_dictionaries(
                    {
                        "kind": st.just("latest-behind"),
                        "comes_back": back,
                        "uncompressed": st.booleans(),
                    }
                ),
                st.fixed_dictionaries({"kind": st.just("never"), "comes_back": back}),
            )
        ),
        "prefix": draw(
            st.one_of(
                st.fixed_dictionaries(full_blocks),
                st.just({"kind": "none"}),
            )
        ),
        "compression": {
            "kind": "by-score",
            **scoring,
            "join": draw(st.sampled_from(["boundary", "when_done", "blocking"])),
        },
    }
    return policy_from_table(table)


def preset(
    name: str, lim: SchedulerLimits, floor: int = 3, window: int = 2, num_slots: int = 0
) -> Policy:
    """A preset with its budget, window and slots cut to a small pool."""
    table = policy_to_table(load_policy(name))
    window = min(window, lim.block_size)
    floor = min(floor, lim.num_blocks)
    table["compression"]["window"] = window
    if table["budget"]["kind"] != "unlimited":
        table["budget"] |= {"blocks": 0, "tokens": (floor - 1) * lim.block_size}
        table["slots"]["num_slots"] = min(num_slots, lim.num_blocks // floor)
    if table["budget"]["kind"] == "adaptive":
        table["budget"]["most_tokens"] = (floor + 2) * lim.block_size
    return policy_from_table(table)


@st.composite
def preset_policies(draw: Draw, lim: SchedulerLimits) -> Policy:
    """Any preset, any join."""
    name = draw(st.sampled_from(list(presets())))
    policy = preset(
        name, lim, draw(st.integers(2, 5)), draw(st.integers(1, 4)), draw(st.integers(0, 3))
    )
    join = draw(st.sampled_from([policy.compression.join, *type(policy.compression.join)]))
    return replace(policy, compression=replace(policy.compression, join=join))  # type: ignore[type-var]


@st.composite
def requests(
    draw: Draw, number: int, lim: SchedulerLimits, prefix_block_size: int | None, crowded: bool
) -> TraceRequest:
    """One request; its prompt may begin like others'. In a crowd all are short enough to be
    admitted, then grow.
    """
    room = lim.num_blocks * lim.block_size
    if crowded:
        prompt: int = draw(st.integers(1, 3 * lim.block_size))
        output: int | None = draw(st.integers(lim.block_size, 40))
        most = None
    else:
        prompt = draw(
            st.one_of(
                st.integers(1, 1 + room // 3),
                st.integers(1, 1 + room // 2),
                st.integers(0, room + 2),
            )
        )
        output = draw(
            st.one_of(
                st.integers(1, 1 + room // 2), st.integers(0, 60), st.sampled_from([None, 0, 1])
            )
        )
        most = draw(st.sampled_from([None, output, output, 20]))
    ids = prefix_ids = None
    kind = draw(st.sampled_from(["ids", "nothing", "ids"]))
    family = draw(st.sampled_from([0, 0, 1]))
    common = draw(st.sampled_from([1000, 4 * lim.block_size, lim.block_size, 5]))
    if kind == "ids" and prefix_block_size is None:
        ids = tuple(family * 7 + at % 3 if at < common else 100 + number for at in range(prompt))
    elif kind == "ids" and prefix_block_size is not None:
        count = -(-prompt // prefix_block_size)
        prefix_ids = tuple(family if at < common else 1000 * number + at for at in range(count))
    return TraceRequest(
        id=f"r{number}",
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=most,
        prompt_ids=ids,
        prefix_ids=prefix_ids,
        session=draw(st.sampled_from([None, "s", "t"])),
        priority=draw(st.integers(0, 2)),
        cls=draw(st.sampled_from([None, "c"])),
    )


@st.composite
def cases(draw: Draw, presets_only: bool = False, disturbed: bool = True) -> Case:
    """A whole case; `disturbed` ones have aborts, failures and early stops."""
    lim = draw(limits())
    policy = draw(
        preset_policies(lim) if presets_only else st.one_of(policies(lim), preset_policies(lim))
    )
    prefix_block_size = draw(st.sampled_from([None, None, lim.block_size * 2, lim.block_size]))
    jobs: list[Job] = []
    now = 0
    step = 1000
    crowded = draw(st.booleans())
    if crowded:
        lim = replace(
            lim,
            max_running=256,
            max_batched_tokens=max(16, lim.max_batched_tokens),
            max_model_len=400,
        )
    gaps = (
        (0, 500)
        if crowded
        else draw(st.sampled_from([(0, 1, 500, 1000, 2500), (0,), (0, 3000, 30_000)]))
    )
    maybe = st.one_of(st.none(), st.none(), st.integers(0, 60_000)) if disturbed else st.none()
    for number in range(draw(st.integers(4 if crowded else 2, 10))):
        now += draw(st.sampled_from(gaps))
        request = draw(requests(number, lim, prefix_block_size, crowded))
        stop = draw(st.sampled_from([None, None, 1, 5, 10])) if disturbed else None
        jobs.append(Job(request, now, draw(maybe), draw(maybe), stop))
    return Case(
        policy,
        lim,
        tuple(jobs),
        prefix_block_size,
        step,
        decode_ns=draw(st.sampled_from([0, 7])),
        prefill_ns=draw(st.sampled_from([0, 13])),
        copy_ns=draw(st.sampled_from([0, 500, 4000, 50_000])),
    )


LIMITS = SchedulerLimits(
    num_blocks=10,
    block_size=4,
    max_batched_tokens=16,
    max_running=8,
    max_model_len=200,
    host_blocks=20,
)


def growing(name: str = "full-kv", limits: SchedulerLimits = LIMITS, **changes: Any) -> Case:
    """Four requests whose outputs do not fit together: preemption, or compression."""
    jobs = tuple(job(f"r{n}", 5 + n, 17, arrival_ns=300 * n) for n in range(4))
    return replace(Case(preset(name, limits), limits, jobs, decode_ns=5), **changes)


def together(name: str, gap_ns: int, **answers: Any) -> Case:
    """Three requests with two blocks in common, the later ones when the first has computed them."""
    jobs = tuple(
        job(f"r{n}", 0, 24, gap_ns * n, ids=(1, 2, 3, 4, 5, 6, 7, 8, 20 + n)) for n in range(3)
    )
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

"""Random workloads, limits and policies, small enough to be crowded and odd enough to hurt."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from policies.core.limits import Limits
from policies.core.policy import Policy
from policies.spec import load_policy, policy_from_table, policy_to_table, presets
from tests.policies.drive import Case, Job
from traces.workload import TraceRequest

Draw = st.DrawFn


@st.composite
def limits(draw: Draw) -> Limits:
    """Pools of 2 to 64 blocks of 1 to 8 tokens."""
    size = draw(st.sampled_from([4, 2, 3, 8, 4, 1]))
    return Limits(
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
        st.fixed_dictionaries({"kind": st.just("noisy-oracle"), "sigma": st.floats(0, 1), "seed": st.integers(0, 3)}),
        st.fixed_dictionaries({"kind": st.just("class-mean"), "default": st.floats(1, 50)}),
    )
    return st.one_of(
        st.fixed_dictionaries({"kind": st.just("first-come"), **skip}),
        st.fixed_dictionaries({"kind": st.just("priority"), "arrivals_per_level": st.integers(1, 5), **skip}),
        st.fixed_dictionaries({"kind": st.just("shortest-prompt"), **skip}),
        st.fixed_dictionaries({"kind": st.just("shortest-output"), "predictor": predictor, **skip}),
        st.just({"kind": "fair-share"}),
    )


@st.composite
def slots_and_budget(draw: Draw, lim: Limits) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Answers to slots and budget that fit the pool and each other, and a window."""
    window = draw(st.integers(1, lim.block_size))
    kind = draw(st.sampled_from(["hybrid", "none", "constrained", "hybrid"]))
    if kind == "none":
        return {"kind": "none"}, {"kind": "unlimited"}, window
    floor = draw(st.integers(2, max(2, min(6, lim.num_blocks))))
    num_slots = draw(st.one_of(st.just(0), st.just(1), st.integers(1, max(1, lim.num_blocks // floor))))
    slots: dict[str, Any] = {"kind": kind, "num_slots": num_slots}
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
    return slots, budget, window


@st.composite
def policies(draw: Draw, lim: Limits) -> Policy:
    """Any answer beside any other."""
    slots, budget, window = draw(slots_and_budget(lim))
    share = st.sampled_from([0.0, 0.01, 0.2])
    admission = {
        "watermark_share": share,
        "count_hits": st.booleans(),
        "reserve": st.sampled_from(["sequence", "sequence", "peak"]),
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
        "batching": draw(st.one_of(st.just({"kind": "mixed"}), st.fixed_dictionaries(prefill_first))),
        "slots": slots,
        "budget": budget,
        "preemption": draw(
            st.one_of(
                st.fixed_dictionaries({"kind": st.just("latest-first"), "comes_back": back}),
                st.fixed_dictionaries(
                    {"kind": st.just("slotless-first"), "comes_back": back, "slotted": st.booleans()}
                ),
                st.fixed_dictionaries(
                    {"kind": st.just("latest-behind"), "comes_back": back, "uncompressed": st.booleans()}
                ),
                st.fixed_dictionaries({"kind": st.just("never"), "comes_back": back}),
            )
        ),
        "prefix": draw(
            st.one_of(
                st.fixed_dictionaries({"kind": st.just("full-blocks"), "keep": st.booleans()}),
                st.just({"kind": "none"}),
            )
        ),
        "compression": {
            "kind": "by-score",
            "window": window,
            "join": draw(st.sampled_from(["boundary", "when_done", "blocking"])),
        },
    }
    return policy_from_table(table)


def preset(name: str, lim: Limits, floor: int = 3, window: int = 2, num_slots: int = 0) -> Policy:
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
def preset_policies(draw: Draw, lim: Limits) -> Policy:
    """Any preset, any join."""
    name = draw(st.sampled_from(list(presets())))
    policy = preset(name, lim, draw(st.integers(2, 5)), draw(st.integers(1, 4)), draw(st.integers(0, 3)))
    join = draw(st.sampled_from([policy.compression.join, *type(policy.compression.join)]))
    return replace(policy, compression=replace(policy.compression, join=join))  # type: ignore[type-var]


@st.composite
def requests(draw: Draw, number: int, lim: Limits, prefix_block_size: int | None, crowded: bool) -> TraceRequest:
    """One request; its prompt may begin like others'. In a crowd all are short enough to be admitted, then grow."""
    room = lim.num_blocks * lim.block_size
    if crowded:
        prompt: int = draw(st.integers(1, 3 * lim.block_size))
        output: int | None = draw(st.integers(lim.block_size, 40))
        most = None
    else:
        prompt = draw(st.one_of(st.integers(1, 1 + room // 3), st.integers(1, 1 + room // 2), st.integers(0, room + 2)))
        output = draw(st.one_of(st.integers(1, 1 + room // 2), st.integers(0, 60), st.sampled_from([None, 0, 1])))
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
    policy = draw(preset_policies(lim) if presets_only else st.one_of(policies(lim), preset_policies(lim)))
    prefix_block_size = draw(st.sampled_from([None, None, lim.block_size * 2, lim.block_size]))
    jobs: list[Job] = []
    now = 0
    step = 1000
    crowded = draw(st.booleans())
    if crowded:
        lim = replace(lim, max_running=256, max_batched_tokens=max(16, lim.max_batched_tokens), max_model_len=400)
    gaps = (0, 500) if crowded else draw(st.sampled_from([(0, 1, 500, 1000, 2500), (0,), (0, 3000, 30_000)]))
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

"""One workload made into another, each change noted and every row accounted for."""

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlab.traces.block_ids import splitmix64
from zlab.traces.synthetic import chat, fixed, reasoning, shared_prefix
from zlab.traces.transform import (
    as_table,
    cut,
    faster,
    longer,
    merge,
    splice,
    spread,
    thin,
    with_token_ids,
)
from zlab.traces.workload import TraceError, TraceRequest, Workload, WorkloadMeta
from zlab.traces.workload_stats import prefix_reuse


def batch(times: list[float], resolution_s: float | None = 3.0) -> Workload:
    rows = tuple(TraceRequest(str(i), 10, 5, time) for i, time in enumerate(times))
    meta = WorkloadMeta(
        "b", rows_read=len(rows), rows_kept=len(rows), arrival_resolution_s=resolution_s
    )
    return Workload(rows, meta)


def times_of(workload: Workload) -> list[float | None]:
    return [request.arrival_s for request in workload]


def adds_up(workload: Workload) -> bool:
    meta = workload.meta
    return meta.rows_kept == len(workload) and meta.rows_read == meta.rows_kept + sum(
        meta.dropped.values()
    )


def test_faster_and_slower() -> None:
    workload = faster(batch([0.0, 1.0, 4.0]), 2)
    assert times_of(workload) == [0.0, 0.5, 2.0]
    assert times_of(faster(workload, 0.5)) == [0.0, 1.0, 4.0]
    assert workload.meta.modifications == ("arrivals x 2",)
    with pytest.raises(TraceError, match="factor is 0"):
        faster(workload, 0)


def test_offline_batches_have_no_times_to_change() -> None:
    offline = Workload((TraceRequest("a", 1, 1),), WorkloadMeta("o"))
    changes: list[Callable[[], Workload]] = [
        lambda: faster(offline, 2),
        lambda: spread(offline, within_s=1),
        lambda: cut(offline, 0, 1),
    ]
    for change in changes:
        with pytest.raises(TraceError, match="'o' is an offline batch"):
            change()
    with pytest.raises(TraceError, match="not in order of arrival"):
        spread(batch([1.0, 0.0]))


def test_thin_keeps_its_share_and_counts_the_rest() -> None:
    workload = thin(fixed(5_000), 0.3, seed=1)
    assert len(workload) == pytest.approx(1_500, rel=0.1)
    assert workload.requests[0].arrival_s == 0.0
    assert workload.meta.dropped == {"thinned out": 5_000 - len(workload)}
    assert adds_up(workload)
    assert (
        thin(fixed(5_000), 0.3, seed=1).sha256
        == workload.sha256
        != thin(fixed(5_000), 0.3, seed=2).sha256
    )
    twice = thin(workload, 0.5)
    assert adds_up(twice)
    for keep in (0, 1.5, float("nan")):
        with pytest.raises(TraceError, match="keep is"):
            thin(workload, keep)
    with pytest.raises(TraceError, match="leaves none of 1"):
        thin(batch([0.0]), 1e-9)


def test_longer_outputs() -> None:
    rows = (
        TraceRequest("a", 10, 5, 0.0, max_tokens=6, reasoning_tokens=0),
        TraceRequest("b", 10, None, 0.0),
    )
    first, second = longer(Workload(rows, WorkloadMeta("x")), output=1.5).requests
    assert (first.output_tokens, first.max_tokens, first.reasoning_tokens, first.prompt_tokens) == (
        8,
        9,
        0,
        10,
    )
    assert (second.output_tokens, second.max_tokens) == (None, None)
    assert longer(Workload(rows, WorkloadMeta("x")), prompt=0.01).requests[0].prompt_tokens == 1
    with pytest.raises(
        TraceError, match="prompt lengths cannot be multiplied: requests have prompt_ids"
    ):
        longer(reasoning(), prompt=2)
    with pytest.raises(TraceError, match="multiplied by 1"):
        longer(fixed(3))
    with pytest.raises(TraceError, match="output_tokens would reach 10240000"):
        longer(fixed(3), output=10_000)


def test_cut_by_time_class_predicate_and_number() -> None:
    workload = shared_prefix(500, seed=5)
    window = cut(workload, 100, 200)
    kept = [r for r in workload if 100 <= (r.arrival_s or 0) < 200]
    assert [r.id for r in window] == [r.id for r in kept]
    assert window.requests[0].arrival_s == 0.0
    assert adds_up(window)
    assert window.requests[3].prefix_ids == kept[3].prefix_ids
    assert {r.cls for r in cut(workload, classes=["group-2"])} == {"group-2"}
    assert [r.id for r in cut(workload, first=7, where=lambda r: r.prompt_tokens > 1_100)] == [
        r.id for r in workload if r.prompt_tokens > 1_100
    ][:7]
    assert "group-2" in cut(workload, classes=["group-2"]).meta.modifications[-1]


def test_cut_misuse() -> None:
    workload = shared_prefix(50)
    with pytest.raises(TraceError, match="no request of class 'group-x'; classes are group-0, "):
        cut(workload, classes=["group-x"])
    with pytest.raises(TraceError, match="nothing to cut by"):
        cut(workload)
    with pytest.raises(TraceError, match=r"time window 5\.\.5 s is empty"):
        cut(workload, 5, 5)
    with pytest.raises(TraceError, match="leaves none of 50"):
        cut(workload, start_s=1e9)
    with pytest.raises(TraceError, match="first is 0"):
        cut(workload, first=0)


def test_spread_evenly() -> None:
    workload = spread(batch([0.0, 0.0, 0.0, 3.0, 10.0, 10.0]))
    assert times_of(workload) == [0.0, 1.0, 2.0, 3.0, 10.0, 11.5]
    assert workload.meta.modifications == ("3 arrivals spread evenly over 3 s",)
    assert workload.meta.arrival_resolution_s == 3.0
    assert times_of(spread(workload)) == times_of(workload)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    gaps=st.lists(st.integers(1, 50), min_size=8, max_size=8),
    seed=st.integers(0, 9),
)
def test_spread_uniformly_keeps_order_and_stays_within(
    sizes: list[int], gaps: list[int], seed: int
) -> None:
    starts = np.cumsum([0, *gaps])[: len(sizes)]
    times = np.repeat(starts, sizes).astype(float)
    moved = np.asarray(times_of(spread(batch(times.tolist()), "uniform", seed)), dtype=float)
    assert np.all(np.diff(moved) >= 0)
    assert np.all((moved >= times) & (moved <= times + 3.0))
    for this, following in pairwise(starts):
        assert np.all(moved[times == this] <= following)


def test_uniform_spread_is_uniform_in_every_batch() -> None:
    times = np.repeat([0.0, 3.0, 6.0], 2_000)
    moved = np.asarray(times_of(spread(batch(times.tolist()), "uniform", 1)), dtype=float)
    for start in (0.0, 3.0, 6.0):
        offsets = moved[times == start] - start
        assert offsets.mean() == pytest.approx(1.5, abs=0.08)
        assert offsets.std() == pytest.approx(3 / 12**0.5, rel=0.05)


def test_spread_misuse() -> None:
    with pytest.raises(TraceError, match=r"unknown way to spread 'odd' .choices: even, uniform"):
        spread(batch([0.0]), "odd")  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="no arrival resolution"):
        spread(batch([0.0], None))


def test_splitmix64_known_answers() -> None:
    # The generator started at 0 gives these outputs (the algorithm's authors' reference code).
    states = np.asarray([0, 0x9E3779B97F4A7C15, 0x3C6EF372FE94F82A], dtype=np.uint64)
    assert [hex(word) for word in splitmix64(states).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


@pytest.mark.parametrize("last_block", ["partial", "full"])
def test_tokens_share_exactly_what_the_ids_say(last_block: str) -> None:
    lengths, ids = [10, 12, 9, 8], [(0, 1, 2), (0, 1, 3), (0, 4, 5), (0, 1)]
    if last_block == "full":
        ids = [found[: length // 4] for found, length in zip(ids, lengths, strict=True)]
    rows = tuple(
        TraceRequest(str(i), n, 1, 0.0, prefix_ids=f)
        for i, (n, f) in enumerate(zip(lengths, ids, strict=True))
    )
    meta = WorkloadMeta("x", block_size=4, block_id_kind="chained", last_block=last_block)
    workload = with_token_ids(Workload(rows, meta), seed=7, first_token_id=5, end_token_id=50_000)
    tokens = [request.prompt_ids or () for request in workload]
    assert [len(prompt) for prompt in tokens] == lengths
    assert all(5 <= token < 50_000 for prompt in tokens for token in prompt)
    assert tokens[0][:8] == tokens[1][:8] == tokens[3]
    assert tokens[0][8:10] != tokens[1][8:10]
    assert tokens[0][:4] == tokens[2][:4]
    assert tokens[0][4:8] != tokens[2][4:8]
    other = with_token_ids(Workload(rows, meta), seed=8, first_token_id=5, end_token_id=50_000)
    assert tokens[0] != other.requests[0].prompt_ids


def plain_splitmix64(state: int) -> int:
    """The same in plain whole numbers, from its published definition."""
    mixed = (state + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def test_tokens_are_the_same_for_ever() -> None:
    row = TraceRequest("a", 3, 1, 0.0, prefix_ids=(41,))
    meta = WorkloadMeta("x", block_size=4, block_id_kind="chained", last_block="partial")
    (made,) = with_token_ids(Workload((row,), meta), seed=1)
    start = plain_splitmix64(plain_splitmix64(2 * 1) ^ 41)
    words = [plain_splitmix64((start + j * 0x9E3779B97F4A7C15) % 2**64) for j in range(3)]
    assert (
        made.prompt_ids == tuple(1000 + word % 149_000 for word in words) == (44_394, 85_241, 6_060)
    )


def test_a_requests_own_rest_never_meets_a_block() -> None:
    own = int.from_bytes(hashlib.sha256(b"e").digest()[:8], "little")
    rows = (
        TraceRequest("e", 3, 1, 0.0, prefix_ids=()),
        TraceRequest("b", 4, 1, 0.0, prefix_ids=(own,)),
    )
    meta = WorkloadMeta("x", block_size=4, block_id_kind="chained", last_block="full")
    rest, block = (request.prompt_ids or () for request in with_token_ids(Workload(rows, meta)))
    assert rest != block[:3]


def test_tokens_reuse_what_the_ids_reuse() -> None:
    workload = chat(300, seed=6)
    tokens = with_token_ids(workload)
    assert prefix_reuse(tokens, 16) == prefix_reuse(workload)
    assert prefix_reuse(tokens, 256) == prefix_reuse(workload, 256)
    with pytest.raises(TraceError, match="no block ids"):
        with_token_ids(fixed(3))
    with pytest.raises(TraceError, match=r"token ids 5\.\.5 are an empty range"):
        with_token_ids(workload, 0, 5, 5)


def test_splice_one_after_the_other() -> None:
    first, second = fixed(5, seed=1), fixed(4, seed=2)
    both = splice(first, second, gap_s=10)
    end = first.requests[-1].arrival_s or 0.0
    assert [r.id for r in both] == [*(f"0/{i}" for i in range(5)), *(f"1/{i}" for i in range(4))]
    assert both.requests[5].arrival_s == pytest.approx(end + 10)
    assert adds_up(both)
    assert both.meta.modifications == (
        "spliced with gaps of 10 s: fixed (synthetic) + fixed (synthetic)",
    )


def test_merge_keeps_order_and_blocks_apart() -> None:
    one, two = chat(60, seed=1), chat(50, seed=2)
    merged = merge(one, two)
    times = [r.arrival_s or 0.0 for r in merged]
    assert times == sorted(times)
    assert prefix_reuse(merged).num_reused_blocks == (
        prefix_reuse(one).num_reused_blocks + prefix_reuse(two).num_reused_blocks
    )
    ids = {r.id for r in merged}
    assert len(ids) == 110
    assert all(r.parent is None or r.parent in ids for r in merged)


def test_parts_of_one_trace_may_share_blocks_again() -> None:
    whole = shared_prefix(200, seed=3)
    half = (whole.requests[100].arrival_s or 0.0) - 1e-7
    parts = cut(whole, 0, half), cut(whole, half)
    assert prefix_reuse(splice(*parts, same_blocks=True)) == prefix_reuse(whole)
    assert prefix_reuse(splice(*parts)).num_reused_blocks < prefix_reuse(whole).num_reused_blocks


def test_joining_misuse() -> None:
    with pytest.raises(TraceError, match="1 workload given"):
        splice(fixed(2))
    odd = replace(chat(5), meta=replace(chat(5).meta, block_size=32))
    with pytest.raises(
        TraceError, match=r"different block sizes or last blocks: chat: 16 \(full\), chat: 32"
    ):
        merge(chat(5), odd)
    with pytest.raises(TraceError, match="gap_s is -1"):
        splice(fixed(2), fixed(2), gap_s=-1)


def test_reshaped_tables_pickle_and_slice() -> None:
    workload = with_token_ids(cut(chat(200, seed=8), first=50))
    again = pickle.loads(pickle.dumps(workload))
    assert [*again] == [*workload]
    assert again.sha256 == workload.sha256 == Workload(tuple(workload), workload.meta).sha256
    assert [*workload.requests[5:40:7]] == [*workload][5:40:7]
    assert workload.requests[-1] == [*workload][-1]
    assert as_table(Workload(tuple(workload), workload.meta)) == workload.requests
    with pytest.raises(IndexError, match="request 50 of 50"):
        workload.requests[50]

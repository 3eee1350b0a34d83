"""How far two loads are apart: the distance against a count by hand and its own theory, and what is
said of it.

Workloads by row and by column are the same, and so is their hash; statistics of small ones by hand.
"""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlab.traces.workload import (
    CHUNK_ROWS,
    TableBuilder,
    TraceError,
    TraceRequest,
    Workload,
    WorkloadMeta,
)
from zlab.traces.workload_stats import (
    Distance,
    Distribution,
    LoadDifference,
    compare_loads,
    describe,
    ks_distance,
)

BASE = TraceRequest(
    "a", 4, 2, 0.5, 9, (1, 2), (1, 2, 3, 4), (5, 6), "s", 1, "p", 0.25, 3, "c", "m", 1, 0.75, "ok"
)


@pytest.mark.parametrize("name", [f.name for f in fields(TraceRequest)])
def test_every_field_counts(name: str) -> None:
    value = getattr(BASE, name)
    other: Any = (
        (*value, 7)
        if isinstance(value, tuple)
        else value + "x"
        if isinstance(value, str)
        else value + 1
    )
    changed = replace(BASE, **{name: other})
    hashes = {Workload((request,), WorkloadMeta("x")).sha256 for request in (BASE, changed)}
    if name not in {"id", "prompt_tokens"}:
        unknown: Any = 0 if name == "priority" else None
        hashes.add(Workload((replace(BASE, **{name: unknown}),), WorkloadMeta("x")).sha256)
        assert len(hashes) == 3
    assert len(hashes) >= 2


def test_order_block_size_and_nothing_else_count() -> None:
    rows = (BASE, replace(BASE, id="b"))
    one = Workload(rows, WorkloadMeta("x"))
    assert one.sha256 == Workload(rows, WorkloadMeta("y", source="elsewhere")).sha256
    assert one.sha256 != Workload(rows[::-1], WorkloadMeta("x")).sha256
    assert one.sha256 != Workload(rows, WorkloadMeta("x", block_size=4)).sha256
    zero, whole = replace(BASE, arrival_s=-0.0), replace(BASE, arrival_s=0)
    assert (
        Workload((zero,), WorkloadMeta("x")).sha256 == Workload((whole,), WorkloadMeta("x")).sha256
    )


cells: dict[str, st.SearchStrategy[Any]] = {
    "output_tokens": st.integers(1, 9),
    "arrival_s": st.floats(0, 9, allow_nan=False),
    "prefix_ids": st.lists(st.integers(0, 9), max_size=3).map(tuple),
    "session": st.text(max_size=2),
    "priority": st.integers(-2, 2),
}


@given(st.lists(st.fixed_dictionaries({"id": st.text(max_size=3)}, optional=cells), max_size=20))
def test_rows_by_column_are_the_same_rows(rows: list[dict[str, Any]]) -> None:
    builder = TableBuilder()
    for row in rows:
        builder.append({"prompt_tokens": 3, **row})
    table = builder.build()
    plain = tuple(TraceRequest(prompt_tokens=3, **row) for row in rows)
    assert tuple(table) == plain
    assert table == plain
    assert Workload(table, WorkloadMeta("x")).sha256 == Workload(plain, WorkloadMeta("x")).sha256


def test_fields_that_first_appear_in_a_later_chunk() -> None:
    builder = TableBuilder()
    for i in range(2 * CHUNK_ROWS + 5):
        late = (
            {"turn": i, "session": "s", "think_s": 0.5, "prompt_ids": (i,)}
            if i > CHUNK_ROWS
            else {}
        )
        builder.append({"id": str(i), "prompt_tokens": 1, **late})
    table = builder.build()
    assert table[CHUNK_ROWS] == TraceRequest(str(CHUNK_ROWS), 1)
    i = CHUNK_ROWS + 1
    assert table[i] == TraceRequest(str(i), 1, turn=i, session="s", think_s=0.5, prompt_ids=(i,))
    assert len(table) == 2 * CHUNK_ROWS + 5
    assert (
        Workload(table, WorkloadMeta("x")).sha256
        == Workload(tuple(table), WorkloadMeta("x")).sha256
    )


def test_statistics_by_hand() -> None:
    rows = tuple(
        TraceRequest(str(i), i + 1, None if i == 4 else 10, t)
        for i, t in enumerate([0.0, 1.0, 1.0, 6.0, 8.0])
    )
    found = describe(Workload(rows, WorkloadMeta("x")))
    assert (found.num_requests, found.span_s, found.rate_per_s, found.longest_gap_s) == (
        5,
        8.0,
        0.5,
        5.0,
    )
    assert found.prompt_tokens == Distribution(5, 3.0, 3.0, 4.6, 4.96, 1.0, 5.0)
    assert found.output_tokens is not None
    assert (found.output_tokens.count, found.total_output_tokens, found.total_prompt_tokens) == (
        4,
        40,
        15,
    )


def test_statistics_of_an_offline_batch_claim_nothing() -> None:
    found = describe(Workload((TraceRequest("a", 3), TraceRequest("b", 4)), WorkloadMeta("x")))
    assert (found.span_s, found.rate_per_s, found.longest_gap_s, found.gap_cv) == (
        None,
        None,
        None,
        None,
    )
    assert found.output_tokens is None
    at_once = describe(
        Workload(
            (TraceRequest("a", 3, arrival_s=0.0), TraceRequest("b", 4, arrival_s=0.0)),
            WorkloadMeta("x"),
        )
    )
    assert (at_once.span_s, at_once.rate_per_s, at_once.gap_cv) == (0.0, None, None)


VALUES = st.lists(st.integers(0, 6), min_size=1, max_size=12)


@given(VALUES, VALUES)
def test_the_distance_is_the_largest_gap_between_the_shares_below(
    one: list[int], other: list[int]
) -> None:
    shares = [
        abs(
            sum(value <= mark for value in one) / len(one)
            - sum(value <= mark for value in other) / len(other)
        )
        for mark in range(7)
    ]
    assert ks_distance(np.array(one, float), np.array(other, float)).value == pytest.approx(
        max(shares)
    )


def test_chance_is_how_often_it_happens() -> None:
    """Over many pairs from one distribution, one in a hundred is a distance that chance gives once
    in a hundred.
    """
    rng = np.random.default_rng(1)
    found = [ks_distance(rng.normal(size=60), rng.normal(size=90)).chance for _ in range(2000)]
    for level in (0.01, 0.05, 0.1):
        assert np.mean(np.array(found) <= level) == pytest.approx(
            level, abs=3 * (level * (1 - level) / 2000) ** 0.5
        )


@pytest.mark.parametrize(
    ("effective", "distance", "chance"),
    [
        (5000, 0.0192, 0.05),
        (5000, 0.02302, 0.01),
    ],  # 1.358 and 1.628 over the root: any table of the limit
)
def test_chance_agrees_with_the_table(effective: int, distance: float, chance: float) -> None:
    size = 2 * effective
    one = np.arange(size, dtype=float)
    other = one + distance * size  # shifted by that share of all ranks
    assert ks_distance(one, other).value == pytest.approx(distance, abs=1.01 / size)
    assert ks_distance(one, other).chance == pytest.approx(chance, rel=0.1)


def test_an_empty_sample_has_no_distance() -> None:
    with pytest.raises(TraceError, match="values on both sides"):
        ks_distance(np.array([]), np.array([1.0]))


def load(
    seed: int, count: int = 400, prompt: int = 100, rate: float = 2.0, shared: float = 0.5
) -> Workload:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count))
    rows = []
    for place, length in enumerate(rng.integers(prompt // 2, prompt * 3 // 2, count)):
        blocks = int(length) // 16
        ids = (
            tuple(range(blocks))
            if rng.random() < shared
            else tuple(1000 * (place + 1) + at for at in range(blocks))
        )
        rows.append(
            TraceRequest(
                str(place), int(length), 20 + place % 50, float(times[place]), prefix_ids=ids
            )
        )
    return Workload(
        rows, WorkloadMeta("made", block_size=16, block_id_kind="chained", last_block="full")
    )


def by_name(found: list[LoadDifference]) -> dict[str, LoadDifference]:
    return {each.name: each for each in found}


def test_two_days_of_the_same_load_are_alike() -> None:
    found = compare_loads(load(1), load(2))
    assert [each.name for each in found] == [
        "prompt tokens",
        "output tokens",
        "gap between arrivals, s",
        "arrivals a second",
        "prompt blocks that repeat",
    ]
    assert all(each.is_alike for each in found), [each.words for each in found]


def test_what_has_changed_is_said_in_words() -> None:
    found = by_name(compare_loads(load(1), load(2, prompt=300, rate=5.0, shared=0.1)))
    prompts = found["prompt tokens"]
    assert not prompts.is_alike
    assert prompts.words.startswith("prompt tokens: another distribution, longer, half above ")
    assert isinstance(prompts.distance, Distance)
    assert prompts.distance.value > 0.5
    assert found["output tokens"].is_alike
    assert "narrower" in found["gap between arrivals, s"].words
    assert "faster" in found["arrivals a second"].words
    assert found["arrivals a second"].now == pytest.approx(5.0, rel=0.15)
    assert not found["prompt blocks that repeat"].is_alike


def test_a_small_sample_is_no_proof() -> None:
    few = compare_loads(load(1), load(2, count=3, prompt=130))
    assert by_name(few)["prompt tokens"].is_alike


def test_what_one_side_lacks_is_left_out() -> None:
    batch = Workload(
        [replace(row, arrival_s=None, prefix_ids=None) for row in load(1)], WorkloadMeta("batch")
    )
    names = [each.name for each in compare_loads(batch, batch)]
    assert names == ["prompt tokens", "output tokens"]
    unknown = Workload([replace(row, output_tokens=None) for row in batch], WorkloadMeta("open"))
    assert (
        by_name(compare_loads(batch, unknown))["output tokens"].words
        == "output tokens: not known on both sides"
    )

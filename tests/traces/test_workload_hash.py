"""Workloads by row and by column are the same, and so is their hash; statistics of small ones by hand."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.builder import TableBuilder
from traces.statistics import Distribution, describe
from traces.workload import CHUNK_ROWS, TraceRequest, Workload, WorkloadMeta

BASE = TraceRequest("a", 4, 2, 0.5, 9, (1, 2), (1, 2, 3, 4), (5, 6), "s", 1, "p", 0.25, 3, "c", "m", 1, 0.75, "ok")


@pytest.mark.parametrize("name", [f.name for f in fields(TraceRequest)])
def test_every_field_counts(name: str) -> None:
    value = getattr(BASE, name)
    other: Any = (*value, 7) if isinstance(value, tuple) else value + "x" if isinstance(value, str) else value + 1
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
    assert Workload((zero,), WorkloadMeta("x")).sha256 == Workload((whole,), WorkloadMeta("x")).sha256


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
        late = {"turn": i, "session": "s", "think_s": 0.5, "prompt_ids": (i,)} if i > CHUNK_ROWS else {}
        builder.append({"id": str(i), "prompt_tokens": 1, **late})
    table = builder.build()
    assert table[CHUNK_ROWS] == TraceRequest(str(CHUNK_ROWS), 1)
    i = CHUNK_ROWS + 1
    assert table[i] == TraceRequest(str(i), 1, turn=i, session="s", think_s=0.5, prompt_ids=(i,))
    assert len(table) == 2 * CHUNK_ROWS + 5
    assert Workload(table, WorkloadMeta("x")).sha256 == Workload(tuple(table), WorkloadMeta("x")).sha256


def test_statistics_by_hand() -> None:
    rows = tuple(
        TraceRequest(str(i), i + 1, None if i == 4 else 10, t) for i, t in enumerate([0.0, 1.0, 1.0, 6.0, 8.0])
    )
    found = describe(Workload(rows, WorkloadMeta("x")))
    assert (found.num_requests, found.span_s, found.rate_per_s, found.longest_gap_s) == (5, 8.0, 0.5, 5.0)
    assert found.prompt_tokens == Distribution(5, 3.0, 3.0, 4.6, 4.96, 1.0, 5.0)
    assert found.output_tokens is not None
    assert (found.output_tokens.count, found.total_output_tokens, found.total_prompt_tokens) == (4, 40, 15)


def test_statistics_of_an_offline_batch_claim_nothing() -> None:
    found = describe(Workload((TraceRequest("a", 3), TraceRequest("b", 4)), WorkloadMeta("x")))
    assert (found.span_s, found.rate_per_s, found.longest_gap_s, found.gap_cv) == (None, None, None, None)
    assert found.output_tokens is None
    at_once = describe(
        Workload((TraceRequest("a", 3, arrival_s=0.0), TraceRequest("b", 4, arrival_s=0.0)), WorkloadMeta("x"))
    )
    assert (at_once.span_s, at_once.rate_per_s, at_once.gap_cv) == (0.0, None, None)

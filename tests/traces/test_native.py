"""The project's own format and Mooncake's: what is written is what is read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.traces.trace_rows import write_rows, write_text
from traces.formats import read_trace, write_mooncake, write_native
from traces.formats.native import read_meta
from traces.reuse import prefix_reuse
from traces.synthetic import chat, fixed, reasoning
from traces.workload import TraceError, TraceRequest, Workload, WorkloadMeta

names = st.text(min_size=1, max_size=8)
counts = st.integers(1, 10_000_000)
seconds = st.integers(0, 10**13).map(lambda ticks: ticks / 10**7)


@st.composite
def requests(draw: st.DrawFn, number: int, timed: bool, block_size: int) -> TraceRequest:
    prompt_tokens = draw(st.integers(1, 60))
    output_tokens = draw(st.none() | st.integers(1, 20))
    ids = st.integers(0, 2**63 - 1)

    def exactly(length: int) -> st.SearchStrategy[tuple[int, ...]]:
        return st.lists(ids, min_size=length, max_size=length).map(tuple)

    return TraceRequest(
        id=f"{number}{draw(names)}",
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        arrival_s=draw(seconds) if timed else None,
        max_tokens=draw(st.none() | counts),
        prefix_ids=draw(st.none() | exactly(-(-prompt_tokens // block_size))),
        prompt_ids=draw(st.none() | exactly(prompt_tokens)),
        output_ids=None if output_tokens is None else draw(st.none() | exactly(output_tokens)),
        session=draw(st.none() | names),
        turn=draw(st.none() | st.integers(0, 99)),
        parent=draw(st.none() | names),
        think_s=draw(st.none() | seconds),
        priority=draw(st.integers(-3, 3)),
        cls=draw(st.none() | names),
        model=draw(st.none() | names),
        reasoning_tokens=draw(st.none() | st.integers(0, 99)),
        source_e2e_s=draw(st.none() | seconds),
        status=draw(st.none() | names),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    timed, block_size, number = draw(st.booleans()), draw(st.integers(1, 16)), draw(st.integers(1, 6))
    made = [draw(requests(i, timed, block_size)) for i in range(number)]
    made.sort(key=lambda request: request.arrival_s or 0.0)
    meta = WorkloadMeta(
        name="t",
        rows_read=number + 2,
        rows_kept=number,
        dropped={"bad": 2},
        block_size=block_size,
        block_id_kind="chained",
        last_block="partial",
        arrival_resolution_s=draw(st.none() | st.just(0.5)),
        modifications=("made up",),
    )
    return Workload(tuple(made), meta)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(workload=workloads(), suffix=st.sampled_from([".jsonl", ".jsonl.gz"]))
def test_native_round_trip(tmp_path: Path, workload: Workload, suffix: str) -> None:
    path = tmp_path / f"t{suffix}"
    write_native(workload, path)
    again = read_trace(path)
    assert tuple(again.requests) == workload.requests
    assert again.meta == workload.meta
    assert again.sha256 == workload.sha256
    written = path.read_bytes()
    write_native(again, path)
    assert path.read_bytes() == written


@st.composite
def block_prompts(draw: st.DrawFn) -> Workload:
    """Prompts that share beginnings by construction: each continues a cut of an earlier one."""
    made: list[TraceRequest] = []
    next_id = 0
    for number in range(draw(st.integers(1, 8))):
        shared: tuple[int, ...] = ()
        if draw(st.booleans()) and made:
            other = made[draw(st.integers(0, len(made) - 1))]
            full = (other.prefix_ids or ())[: other.prompt_tokens // 512]
            shared = full[: draw(st.integers(0, len(full)))]
        prompt_tokens = 512 * len(shared) + draw(st.integers(1, 1500))
        num_own = -(-prompt_tokens // 512) - len(shared)
        ids = (*shared, *range(next_id, next_id + num_own))
        next_id += num_own
        arrival_s = (made[-1].arrival_s or 0.0) if made else 0.0
        step = draw(st.integers(0, 10**6)) / 10**4 if made else 0.0
        made.append(TraceRequest(str(number), prompt_tokens, draw(counts), round(arrival_s + step, 7), prefix_ids=ids))
    meta = WorkloadMeta("m", block_size=512, block_id_kind="chained", last_block="partial")
    return Workload(tuple(made), meta)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(workload=block_prompts(), suffix=st.sampled_from([".jsonl", ".jsonl.gz"]))
def test_mooncake_round_trip(tmp_path: Path, workload: Workload, suffix: str) -> None:
    path = tmp_path / f"m{suffix}"
    write_mooncake(workload, path)
    again = read_trace(path)
    assert tuple(again.requests) == workload.requests
    assert prefix_reuse(again) == prefix_reuse(workload)


def test_mooncake_of_other_blocks_keeps_what_full_512_blocks_share(tmp_path: Path) -> None:
    workload = chat(400, seed=2)
    write_mooncake(workload, tmp_path / "c.jsonl")
    again = read_trace(tmp_path / "c.jsonl")
    assert len(again) == 400
    shared = prefix_reuse(again)
    expected = prefix_reuse(workload, 512)
    assert shared.num_reused_blocks == expected.num_reused_blocks > 0
    assert [r.arrival_s for r in again] == [r.arrival_s for r in workload]


def test_mooncake_from_tokens_and_without_any(tmp_path: Path) -> None:
    write_mooncake(reasoning("aime24"), tmp_path / "r.jsonl")
    again = read_trace(tmp_path / "r.jsonl")
    assert len({r.prefix_ids for r in again}) == 30
    write_mooncake(fixed(20), tmp_path / "f.jsonl")
    assert {r.prefix_ids for r in read_trace(tmp_path / "f.jsonl")} == {None}


def test_mooncake_refuses_what_it_cannot_say(tmp_path: Path) -> None:
    known, unknown = TraceRequest("a", 3, 4, 0.0, prompt_ids=(1, 2, 3)), TraceRequest("b", 3, 4, 0.0)
    with pytest.raises(TraceError, match="request 'b' has no prefix or prompt ids, others have"):
        write_mooncake(Workload((known, unknown), WorkloadMeta("x")), tmp_path / "x.jsonl")
    with pytest.raises(TraceError, match="request 'b' has no output length"):
        write_mooncake(Workload((replace(unknown, output_tokens=None),), WorkloadMeta("x")), tmp_path / "x.jsonl")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TraceError, match="cannot be written"):
        write_mooncake(Workload((unknown,), WorkloadMeta("x")), tmp_path / "no" / "x.jsonl")


GOOD_META = {"name": "t", "rows_read": 1, "rows_kept": 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows_read": 5}, "rows do not add up"),
        ({"colour": "red"}, "unknown field 'colour'"),
        ({"schema": "llm-trace/2"}, "schema is 'llm-trace/2'"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_id_kind": "hashed"}, "block_id_kind is 'hashed', must be one of chained, content"),
        ({"last_block": "half"}, "last_block is 'half'"),
        ({"dropped": {"x": -1}}, "dropped is"),
        ({"rows_kept": "1"}, "rows_kept is '1'"),
        ({"arrival_resolution_s": -1}, "arrival_resolution_s is -1"),
        ({"modifications": "all"}, "modifications is 'all'"),
        ({"licence": 3}, "licence is 3"),
    ],
)
def test_bad_metadata(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = write_rows(tmp_path / "t.jsonl", [{"id": "a", "arrival_s": 0, "prompt_tokens": 3}])
    write_text(tmp_path / "t.meta.json", json.dumps({**GOOD_META, **change}))
    with pytest.raises(TraceError, match=said):
        read_trace(path)
    write_text(tmp_path / "t.meta.json", "{")
    with pytest.raises(TraceError, match="cannot be read"):
        read_meta(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colour": 1}, "unknown field 'colour'"),
        ({"id": None}, "id is empty"),
        ({"id": ""}, "id is empty"),
        ({"prompt_tokens": None}, "prompt_tokens is empty"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"arrival_s": -0.5}, "arrival_s is -0.5"),
        ({"arrival_s": None}, "arrival_s must be a time as in the rows before"),
        ({"prompt_ids": [1]}, "prompt_ids holds 1 ids, prompt_tokens is 3"),
        ({"output_ids": [1]}, "output_ids holds 1 ids, output_tokens is None"),
        ({"prefix_ids": [1]}, "prefix_ids need block_size"),
        ({"priority": 1.5}, "priority is 1.5"),
        ({"session": ["a"]}, "session is"),
    ],
)
def test_bad_native_rows(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    good = {"id": "a", "arrival_s": 0, "prompt_tokens": 3}
    path = write_rows(tmp_path / "t.jsonl", [good, {**good, "id": "b", **change}])
    with pytest.raises(TraceError, match=rf"t\.jsonl:2: {said}"):
        read_trace(path)


@pytest.mark.parametrize(("last_block", "expected"), [("partial", 3), ("full", 2)])
def test_prefix_ids_match_the_kind_of_last_block(tmp_path: Path, last_block: str, expected: int) -> None:
    meta = {**GOOD_META, "block_size": 4, "block_id_kind": "chained", "last_block": last_block}
    write_text(tmp_path / "t.meta.json", json.dumps(meta))
    row = {"id": "a", "arrival_s": 0, "prompt_tokens": 9}
    right = write_rows(tmp_path / "t.jsonl", [{**row, "prefix_ids": list(range(expected))}])
    assert read_trace(right).requests[0].prefix_ids == tuple(range(expected))
    wrong = write_rows(tmp_path / "t.jsonl", [{**row, "prefix_ids": [1]}])
    with pytest.raises(TraceError, match=f"holds 1 ids, must be {expected}"):
        read_trace(wrong)


def test_content_ids_are_chained_and_said_so(tmp_path: Path) -> None:
    meta = {"name": "t", "block_size": 1, "block_id_kind": "content", "last_block": "full"}
    write_text(tmp_path / "t.meta.json", json.dumps(meta))
    rows = [
        {"id": "a", "arrival_s": 0, "prompt_tokens": 2, "prefix_ids": [5, 9]},
        {"id": "b", "arrival_s": 0, "prompt_tokens": 2, "prefix_ids": [6, 9]},
    ]
    workload = read_trace(write_rows(tmp_path / "t.jsonl", rows))
    assert [r.prefix_ids for r in workload] == [(0, 1), (2, 3)]
    assert workload.meta.block_id_kind == "chained"
    assert workload.meta.modifications == ("content block ids chained",)


def test_an_edited_file_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    write_native(fixed(5), path)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:3]), encoding="utf-8")
    meta = read_trace(path).meta
    assert (meta.rows_read, meta.rows_kept) == (3, 3)
    assert meta.modifications == ("edited after writing: 5 rows by its metadata, 3 found",)


def test_native_needs_no_metadata(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", [{"id": 7, "arrival_s": 0.25, "prompt_tokens": "3", "output_tokens": None}])
    workload = read_trace(path)
    assert workload.requests[0] == TraceRequest("7", 3, None, 0.25)
    assert (workload.meta.name, workload.meta.rows_read) == ("t", 1)

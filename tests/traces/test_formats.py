"""Case B39: trace rows that lie.

Every public format read from made-up rows, whatever the file is wrapped in.

The project's own format and Mooncake's: what is written is what is read.
"""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.traces.cases import (
    AZURE,
    BAILIAN,
    BENCH,
    BURSTGPT_1,
    BURSTGPT_3,
    MOONCAKE,
    SERVEGEN,
    write_rows,
    write_text,
)
from zlab.traces.formats import (
    EmptyTraceError,
    check_trace,
    detect_format,
    read_trace,
    write_mooncake,
    write_native,
)
from zlab.traces.formats.layout import clock_ticks
from zlab.traces.formats.native import read_meta
from zlab.traces.synthetic import chat, fixed, reasoning
from zlab.traces.workload import TraceError, TraceRequest, Workload, WorkloadMeta
from zlab.traces.workload_stats import prefix_reuse


def test_azure_keeps_all_seven_digits_over_midnight_of_a_leap_day(tmp_path: Path) -> None:
    first, second = read_trace(write_text(tmp_path / "a.csv", AZURE)).requests
    assert (first.prompt_tokens, first.output_tokens, first.arrival_s) == (300, 12, 0.0)
    assert second.arrival_s == 2e-7
    assert (
        clock_ticks("t", "2024-02-29 00:00:00.0000001")
        - clock_ticks("t", "2024-02-28 23:59:59.9999999")
        == 2
    )
    assert (
        clock_ticks("t", "2024-05-10 00:00:00.009930+00:00")
        - clock_ticks("t", "2024-05-10T00:00:00Z")
        == 99_300
    )


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_wrappings(tmp_path: Path, end: str, mark: str, last: bool, packed: bool) -> None:
    text = mark + end.join(AZURE.split("\r\n")) + (end if last else "")
    plain = read_trace(write_text(tmp_path / "plain.csv", AZURE))
    wrapped = read_trace(write_text(tmp_path / ("a.csv.gz" if packed else "a.csv"), text))
    assert wrapped.requests == plain.requests
    assert wrapped.meta.name == "a"
    assert len(wrapped.meta.sha256) == 64


def test_gzip_is_told_by_content_and_blank_lines_keep_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(gzip.compress(AZURE.replace("\r\n", "\n\n").encode()))
    assert len(read_trace(path)) == 2


def test_burstgpt_versions(tmp_path: Path) -> None:
    one = read_trace(write_text(tmp_path / "b1.csv", BURSTGPT_1))
    assert [(r.id, r.arrival_s, r.prompt_tokens, r.output_tokens, r.model, r.cls) for r in one] == [
        ("0", 0.0, 100, 20, "ChatGPT", "Conversation log"),
        ("2", 2.0, 11, 5, "GPT-4", "API log"),
    ]
    assert one.meta.dropped == {"failed request (0 request and 0 response tokens)": 1}
    assert (one.meta.rows_read, one.meta.rows_kept) == (3, 2)
    three = read_trace(write_text(tmp_path / "b3.csv", BURSTGPT_3)).requests
    assert [(r.arrival_s, r.session, r.source_e2e_s) for r in three] == [
        (0.0, "ab-1", 12.0),
        (1.0, None, 3.5),
    ]


def test_mooncake_rows(tmp_path: Path) -> None:
    workload = read_trace(write_rows(tmp_path / "m.jsonl", MOONCAKE))
    assert [r.prefix_ids for r in workload] == [(0, 1, 2), (0, 1), (3,)]
    assert [r.arrival_s for r in workload] == [0.0, 1.5, 1.5]
    assert (workload.meta.block_size, workload.meta.block_id_kind, workload.meta.last_block) == (
        512,
        "chained",
        "partial",
    )


def test_batched_times_give_the_resolution(tmp_path: Path) -> None:
    rows = [{**MOONCAKE[2], "timestamp": 3000 * (i // 4), "hash_ids": [i]} for i in range(40)]
    assert read_trace(write_rows(tmp_path / "m.jsonl", rows)).meta.arrival_resolution_s == 3.0
    singles = [{**row, "timestamp": 3000 * i} for i, row in enumerate(rows)]
    assert read_trace(write_rows(tmp_path / "s.jsonl", singles)).meta.arrival_resolution_s == 0.001


def test_bailian_contents_are_chained(tmp_path: Path) -> None:
    workload = read_trace(write_rows(tmp_path / "q.jsonl", BAILIAN))
    first, second = workload.requests
    assert first.prefix_ids is not None
    assert second.prefix_ids is not None
    # Equal contents 8 and 9 stand behind different first blocks: nothing is shared.
    assert not set(first.prefix_ids) & set(second.prefix_ids)
    assert prefix_reuse(workload).num_reused_blocks == 0
    assert (second.parent, second.session, second.turn, second.arrival_s) == ("4", "4", 2, 0.5)
    assert workload.meta.block_id_kind == "chained"
    assert "content block ids chained" in workload.meta.modifications


def test_servegen_offline_batch_invents_nothing(tmp_path: Path) -> None:
    (request,) = read_trace(write_rows(tmp_path / "s.jsonl", SERVEGEN)).requests
    assert (request.id, request.arrival_s, request.output_tokens, request.prompt_tokens) == (
        "3",
        None,
        None,
        20,
    )


def test_bench_prompts_follow_their_seed(tmp_path: Path) -> None:
    workload = read_trace(write_rows(tmp_path / "w.jsonl", BENCH))
    first, second, third = workload.requests
    assert (
        first.prompt_ids
        == second.prompt_ids
        == tuple(np.random.default_rng([1, 2]).integers(1000, 150000, size=5).tolist())
    )
    assert third.prompt_ids == tuple(
        np.random.default_rng(3).integers(1000, 150000, size=4).tolist()
    )
    assert [(r.id, r.cls, r.arrival_s, r.max_tokens, r.output_tokens) for r in workload] == [
        ("0", "a", 0.0, 8, 8),
        ("1", "a", 0.0, 9, 9),
        ("2", "b", 0.0, 2, 2),
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [("azure", AZURE), ("burstgpt", BURSTGPT_1), ("burstgpt", BURSTGPT_3)],
)
def test_csv_formats_are_told_apart(tmp_path: Path, name: str, text: str) -> None:
    assert detect_format(write_text(tmp_path / "x", text)).name == name


def test_jsonl_formats_are_told_apart(tmp_path: Path) -> None:
    native = [{"id": "a", "arrival_s": None, "prompt_tokens": 3}]
    rows: dict[str, list[dict[str, Any]]] = {
        "mooncake": MOONCAKE,
        "bailian": BAILIAN,
        "servegen": SERVEGEN,
        "bench": BENCH,
        "native": native,
    }
    for name, content in rows.items():
        assert detect_format(write_rows(tmp_path / f"{name}.x", content)).name == name


def test_progress_reaches_the_caller(tmp_path: Path) -> None:
    text = AZURE.split("\r\n")[0] + "\n" + "2024-01-01 00:00:00,1,1\n" * 9000
    shares: list[float] = []
    read_trace(write_text(tmp_path / "a.csv", text), on_progress=shares.append)
    assert len(shares) == 2
    assert 0 < shares[0] <= shares[1] <= 1


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = "2024-01-01 00:00:00.5,10,20\n"
BAD_LENGTHS = {
    "0": "below 1",
    "-1": "below 1",
    "1000000000": "above 10000000",
    "1e9": "not a whole number",
    "12.0": "not a whole number",
    "NaN": "not a whole number",
    "": "empty",
    "١٢": "not a whole number",
    "9" * 5000: "not a whole number",
}


@pytest.mark.parametrize("cell", BAD_LENGTHS)
def test_bad_length_in_csv(tmp_path: Path, cell: str) -> None:
    path = write_text(tmp_path / "a.csv", f"{HEADER}{GOOD}2024-01-01 00:00:01,10,{cell}\n{GOOD}")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:3: GeneratedTokens is ")
    assert repr(cell)[:50] in str(caught.value) or cell in {"", "0", "-1", "1000000000"}
    meta = read_trace(path, skip_bad=True).meta
    assert meta.dropped == {f"GeneratedTokens is {BAD_LENGTHS[cell]}": 1}
    assert (meta.rows_read, meta.rows_kept) == (3, 2)


@pytest.mark.parametrize(
    "cell", [0, -1, 10**9, 1e9, "12.0", 12.0, float("nan"), "", None, True, [], "x"]
)
def test_bad_length_in_json(tmp_path: Path, cell: Any) -> None:
    rows = [*MOONCAKE, {**MOONCAKE[2], "output_length": cell}]
    path = write_rows(tmp_path / "m.jsonl", rows)
    with pytest.raises(TraceError, match=r"m\.jsonl:4: output_length is "):
        read_trace(path)
    meta = read_trace(path, skip_bad=True).meta
    assert (meta.rows_read, meta.rows_kept, sum(meta.dropped.values())) == (4, 3, 1)


def test_quoted_numbers_are_read(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.csv", f'{HEADER}"2024-01-01 00:00:00.5"," 10 ","20"\n')
    assert read_trace(path).requests[0].prompt_tokens == 10
    rows = write_rows(
        tmp_path / "m.jsonl", [{**MOONCAKE[2], "input_length": "1", "timestamp": "0"}]
    )
    assert read_trace(rows).requests[0].prompt_tokens == 1


@pytest.mark.parametrize(
    "cell",
    [
        "",
        "soon",
        "2024-01-01",
        "2024-13-01 00:00:00",
        "2024-01-01 24:00:00",
        "2024-01-01 00:00:00.00000001",
    ],
)
def test_bad_clock(tmp_path: Path, cell: str) -> None:
    path = write_text(tmp_path / "a.csv", f"{HEADER}{GOOD}{cell},10,20\n")
    with pytest.raises(TraceError, match=r"a\.csv:3: TIMESTAMP is "):
        read_trace(path)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "x", None, 1e300, [0]])
def test_bad_timestamp_in_json(tmp_path: Path, value: Any) -> None:
    path = write_rows(tmp_path / "m.jsonl", [MOONCAKE[0], {**MOONCAKE[1], "timestamp": value}])
    with pytest.raises(TraceError, match=r"m\.jsonl:2: timestamp is "):
        read_trace(path)


def test_missing_and_renamed_columns_are_named(tmp_path: Path) -> None:
    renamed = write_text(tmp_path / "a.csv", AZURE.replace("GeneratedTokens", "OutputTokens"))
    for format in (None, "azure"):
        with pytest.raises(
            TraceError,
            match=r"a\.csv: column 'GeneratedTokens' of format azure is missing; found .*Output",
        ):
            read_trace(renamed, format)
    row = {k: v for k, v in MOONCAKE[1].items() if k != "output_length"}
    partly = write_rows(tmp_path / "m.jsonl", [MOONCAKE[0], row])
    with pytest.raises(TraceError, match=r"m\.jsonl:2: output_length is missing"):
        read_trace(partly)
    renamed_ids = [
        {("hashes" if k == "hash_ids" else k): v for k, v in row.items()} for row in MOONCAKE
    ]
    with pytest.raises(TraceError, match=r"hash_ids is missing, found instead: hashes"):
        read_trace(write_rows(tmp_path / "h.jsonl", renamed_ids))


def test_no_header_and_unknown_formats(tmp_path: Path) -> None:
    bare = write_text(tmp_path / "a.csv", AZURE.split("\r\n", 1)[1])
    with pytest.raises(
        TraceError,
        match=r"a\.csv: has no header line of a known format, its first line is '2024-02-28.*azure \(TIMESTAMP",
    ):
        read_trace(bare)
    with pytest.raises(TraceError, match=r"a\.csv: has no header line of format azure"):
        read_trace(bare, "azure")
    with pytest.raises(
        TraceError,
        match=r"unknown trace format 'azur'; did you mean 'azure'\? .choices: native, azure",
    ):
        read_trace(bare, "azur")
    strange = write_rows(tmp_path / "s.jsonl", [{"a": 1}])
    with pytest.raises(TraceError, match="in no known format"):
        read_trace(strange)
    twice = write_text(
        tmp_path / "t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens\nx,1,1,1\n"
    )
    with pytest.raises(TraceError, match="column 'ContextTokens' occurs twice"):
        read_trace(twice)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "\ufeff",
        HEADER,
        HEADER.strip(),
        "Timestamp,Model,Request tokens,Response tokens\n",
    ],
)
def test_zero_rows_are_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="has no rows"):
        read_trace(write_text(tmp_path / "a.csv", text))


def test_nothing_left_after_skipping_is_an_error_that_says_why(tmp_path: Path) -> None:
    path = write_text(
        tmp_path / "a.csv", f"{HEADER}2024-01-01 00:00:00,0,1\n2024-01-01 00:00:00,x,1\n"
    )
    with pytest.raises(
        EmptyTraceError,
        match="1 x ContextTokens is below 1, 1 x ContextTokens is not a whole number",
    ):
        read_trace(path, skip_bad=True)
    failures = write_text(tmp_path / "b.csv", "\n".join(BURSTGPT_1.splitlines()[i] for i in (0, 2)))
    with pytest.raises(EmptyTraceError, match="1 x failed request"):
        read_trace(failures)


def test_a_half_failed_burstgpt_row_is_bad_and_sums_are_checked(tmp_path: Path) -> None:
    half = write_text(tmp_path / "b.csv", BURSTGPT_1 + "12,GPT-4,5,0,5,API log\n")
    with pytest.raises(TraceError, match=r"b\.csv:5: Response tokens is 0"):
        read_trace(half)
    lying = write_text(tmp_path / "c.csv", BURSTGPT_1 + "12,GPT-4,5,6,12,API log\n")
    with pytest.raises(
        TraceError, match=r"c\.csv:5: Total tokens is 12, request and response make 11"
    ):
        read_trace(lying)
    assert read_trace(lying, skip_bad=True).meta.dropped == {
        "Total tokens do not add up": 1,
        "failed request (0 request and 0 response tokens)": 1,
    }


@pytest.mark.parametrize(
    "ids",
    [[0, 1], [0, 1, 2, 3], [], [0, 1, -2], [0, 1, 2.0], [0, 1, True], [0, 1, 2**63], "012", None],
)
def test_hash_ids_that_do_not_match(tmp_path: Path, ids: Any) -> None:
    path = write_rows(tmp_path / "m.jsonl", [MOONCAKE[1], {**MOONCAKE[0], "hash_ids": ids}])
    with pytest.raises(TraceError, match=r"m\.jsonl:2: hash_ids "):
        read_trace(path)
    wrong = write_rows(tmp_path / "b.jsonl", [BAILIAN[0], {**BAILIAN[1], "hash_ids": [1]}])
    with pytest.raises(
        TraceError,
        match=r"b\.jsonl:2: hash_ids holds 1 ids, must be 3 for 48 tokens in blocks of 16",
    ):
        read_trace(wrong)


def test_ids_in_some_rows_only(tmp_path: Path) -> None:
    bare = {k: v for k, v in MOONCAKE[1].items() if k != "hash_ids"}
    with pytest.raises(TraceError, match=r":2: hash_ids in some rows only"):
        read_trace(write_rows(tmp_path / "m.jsonl", [MOONCAKE[0], bare]))
    assert read_trace(write_rows(tmp_path / "n.jsonl", [bare, bare])).requests[0].prefix_ids is None


def test_repeated_ids_name_both_lines(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "w.jsonl", [*BENCH, {**BENCH[1], "output_len": 4}])
    with pytest.raises(TraceError, match=r"w\.jsonl:4: id '1' is repeated, first on line 2"):
        read_trace(path)
    kept = read_trace(path, skip_bad=True)
    assert kept.meta.dropped == {"id is repeated": 1}
    assert kept.requests[1].output_tokens == 9


def test_unsorted_and_equal_times(tmp_path: Path) -> None:
    times = ["00:00:05", "00:00:02", "00:00:05", "00:00:02"]
    text = HEADER + "".join(f"2024-01-01 {time},{i + 1},1\n" for i, time in enumerate(times))
    path = write_text(tmp_path / "a.csv", text)
    workload = read_trace(path)
    assert [(r.id, r.arrival_s) for r in workload] == [
        ("1", 0.0),
        ("3", 0.0),
        ("0", 3.0),
        ("2", 3.0),
    ]
    assert workload.meta.modifications == (
        "sorted by arrival (2 rows came earlier than the row before)",
    )
    with pytest.raises(TraceError, match=r"a\.csv:3: arrives 3 s before the row above it"):
        read_trace(path, strict_order=True)
    in_order = read_trace(path, strict_order=True, skip_bad=True)
    assert [r.id for r in in_order] == ["0", "2"]
    assert in_order.meta.dropped == {"earlier than the row before": 2}


def test_many_equal_times_keep_the_files_order(tmp_path: Path) -> None:
    rows = [{**MOONCAKE[2], "timestamp": 1000 * (i % 2), "hash_ids": [i]} for i in range(400)]
    workload = read_trace(write_rows(tmp_path / "m.jsonl", rows))
    assert [int(request.id) for request in workload] == [*range(0, 400, 2), *range(1, 400, 2)]


@pytest.mark.parametrize(
    "line", ["{", "[1]", "nonsense", '{"timestamp": ' + "9" * 5000 + "}", "[" * 100_000]
)
def test_lines_that_are_no_json_object(tmp_path: Path, line: str) -> None:
    text = json.dumps(MOONCAKE[0]) + "\n" + line + "\n" + json.dumps(MOONCAKE[1]) + "\n"
    path = write_text(tmp_path / "m.jsonl", text)
    with pytest.raises(TraceError, match=r"m\.jsonl:2: not (JSON|a JSON object)"):
        read_trace(path)
    assert len(read_trace(path, skip_bad=True)) == 2


def test_a_bad_first_row_does_not_hide_the_format(tmp_path: Path) -> None:
    path = write_text(tmp_path / "m.jsonl", "{broken\n" + json.dumps(MOONCAKE[0]) + "\n")
    assert len(read_trace(path, skip_bad=True)) == 1


def test_cells_too_many_too_few_and_an_open_quote(tmp_path: Path) -> None:
    text = (
        HEADER
        + GOOD
        + "2024-01-01 00:00:01,1\n"
        + "2024-01-01 00:00:01,1,1,1\n"
        + '"2024-01-01 00:00:01,1,1\n'
        + GOOD
    )
    report = check_trace(write_text(tmp_path / "a.csv", text))
    assert [(bad.line, bad.reason) for bad in report.bad_lines] == [
        (3, "wrong number of cells"),
        (4, "wrong number of cells"),
        (5, "not a CSV row"),
    ]
    assert report.workload is not None
    assert len(report.workload) == 2


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path)
    latin = tmp_path / "l.csv"
    latin.write_bytes(HEADER.encode() + b"2024-01-01 00:00:00,1,1 \xe9\n")
    with pytest.raises(TraceError, match="is not UTF-8 text"):
        read_trace(latin)
    whole = write_text(tmp_path / "w.csv.gz", AZURE).read_bytes()
    damaged = tmp_path / "d.csv.gz"
    damaged.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="is a damaged gzip file"):
        read_trace(damaged)


def test_check_lists_bad_rows_up_to_a_limit(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.csv", HEADER + GOOD + "2024-01-01 00:00:00,0,1\n" * 30)
    report = check_trace(path, limit=5)
    assert (report.num_bad, len(report.bad_lines), report.bad_lines[0].line) == (30, 5, 3)
    hopeless = check_trace(write_text(tmp_path / "b.csv", HEADER + "x,0,1\n"))
    assert (hopeless.num_bad, hopeless.workload) == (1, None)
    with pytest.raises(EmptyTraceError):
        check_trace(write_text(tmp_path / "c.csv", HEADER))


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
    timed, block_size, number = (
        draw(st.booleans()),
        draw(st.integers(1, 16)),
        draw(st.integers(1, 6)),
    )
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


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
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
        made.append(
            TraceRequest(
                str(number), prompt_tokens, draw(counts), round(arrival_s + step, 7), prefix_ids=ids
            )
        )
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
    known, unknown = (
        TraceRequest("a", 3, 4, 0.0, prompt_ids=(1, 2, 3)),
        TraceRequest("b", 3, 4, 0.0),
    )
    with pytest.raises(TraceError, match="request 'b' has no prefix or prompt ids, others have"):
        write_mooncake(Workload((known, unknown), WorkloadMeta("x")), tmp_path / "x.jsonl")
    with pytest.raises(TraceError, match="request 'b' has no output length"):
        write_mooncake(
            Workload((replace(unknown, output_tokens=None),), WorkloadMeta("x")),
            tmp_path / "x.jsonl",
        )
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
def test_prefix_ids_match_the_kind_of_last_block(
    tmp_path: Path, last_block: str, expected: int
) -> None:
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
    path = write_rows(
        tmp_path / "t.jsonl",
        [{"id": 7, "arrival_s": 0.25, "prompt_tokens": "3", "output_tokens": None}],
    )
    workload = read_trace(path)
    assert workload.requests[0] == TraceRequest("7", 3, None, 0.25)
    assert (workload.meta.name, workload.meta.rows_read) == ("t", 1)

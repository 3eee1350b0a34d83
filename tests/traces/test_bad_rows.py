"""Case B39: trace rows that lie."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.traces.trace_rows import AZURE, BAILIAN, BENCH, BURSTGPT_1, MOONCAKE, write_rows, write_text
from traces.formats import EmptyTraceError, check_trace, read_trace
from traces.workload import TraceError

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


@pytest.mark.parametrize("cell", [0, -1, 10**9, 1e9, "12.0", 12.0, float("nan"), "", None, True, [], "x"])
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
    rows = write_rows(tmp_path / "m.jsonl", [{**MOONCAKE[2], "input_length": "1", "timestamp": "0"}])
    assert read_trace(rows).requests[0].prompt_tokens == 1


@pytest.mark.parametrize(
    "cell", ["", "soon", "2024-01-01", "2024-13-01 00:00:00", "2024-01-01 24:00:00", "2024-01-01 00:00:00.00000001"]
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
            TraceError, match=r"a\.csv: column 'GeneratedTokens' of format azure is missing; found .*Output"
        ):
            read_trace(renamed, format)
    row = {k: v for k, v in MOONCAKE[1].items() if k != "output_length"}
    partly = write_rows(tmp_path / "m.jsonl", [MOONCAKE[0], row])
    with pytest.raises(TraceError, match=r"m\.jsonl:2: output_length is missing"):
        read_trace(partly)
    renamed_ids = [{("hashes" if k == "hash_ids" else k): v for k, v in row.items()} for row in MOONCAKE]
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
        TraceError, match=r"unknown trace format 'azur' .did you mean azure\?.; known are native, azure"
    ):
        read_trace(bare, "azur")
    strange = write_rows(tmp_path / "s.jsonl", [{"a": 1}])
    with pytest.raises(TraceError, match="in no known format"):
        read_trace(strange)
    twice = write_text(tmp_path / "t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens\nx,1,1,1\n")
    with pytest.raises(TraceError, match="column 'ContextTokens' stands twice"):
        read_trace(twice)


@pytest.mark.parametrize(
    "text", ["", "\n\n", "\ufeff", HEADER, HEADER.strip(), "Timestamp,Model,Request tokens,Response tokens\n"]
)
def test_zero_rows_are_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="has no rows"):
        read_trace(write_text(tmp_path / "a.csv", text))


def test_nothing_left_after_skipping_is_an_error_that_says_why(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.csv", f"{HEADER}2024-01-01 00:00:00,0,1\n2024-01-01 00:00:00,x,1\n")
    with pytest.raises(EmptyTraceError, match="1 x ContextTokens is below 1, 1 x ContextTokens is not a whole number"):
        read_trace(path, skip_bad=True)
    failures = write_text(tmp_path / "b.csv", "\n".join(BURSTGPT_1.splitlines()[i] for i in (0, 2)))
    with pytest.raises(EmptyTraceError, match="1 x failed request"):
        read_trace(failures)


def test_a_half_failed_burstgpt_row_is_bad_and_sums_are_checked(tmp_path: Path) -> None:
    half = write_text(tmp_path / "b.csv", BURSTGPT_1 + "12,GPT-4,5,0,5,API log\n")
    with pytest.raises(TraceError, match=r"b\.csv:5: Response tokens is 0"):
        read_trace(half)
    lying = write_text(tmp_path / "c.csv", BURSTGPT_1 + "12,GPT-4,5,6,12,API log\n")
    with pytest.raises(TraceError, match=r"c\.csv:5: Total tokens is 12, request and response make 11"):
        read_trace(lying)
    assert read_trace(lying, skip_bad=True).meta.dropped == {
        "Total tokens do not add up": 1,
        "failed request (0 request and 0 response tokens)": 1,
    }


@pytest.mark.parametrize(
    "ids", [[0, 1], [0, 1, 2, 3], [], [0, 1, -2], [0, 1, 2.0], [0, 1, True], [0, 1, 2**63], "012", None]
)
def test_hash_ids_that_do_not_match(tmp_path: Path, ids: Any) -> None:
    path = write_rows(tmp_path / "m.jsonl", [MOONCAKE[1], {**MOONCAKE[0], "hash_ids": ids}])
    with pytest.raises(TraceError, match=r"m\.jsonl:2: hash_ids "):
        read_trace(path)
    wrong = write_rows(tmp_path / "b.jsonl", [BAILIAN[0], {**BAILIAN[1], "hash_ids": [1]}])
    with pytest.raises(TraceError, match=r"b\.jsonl:2: hash_ids holds 1 ids, must be 3 for 48 tokens in blocks of 16"):
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
    assert [(r.id, r.arrival_s) for r in workload] == [("1", 0.0), ("3", 0.0), ("0", 3.0), ("2", 3.0)]
    assert workload.meta.modifications == ("sorted by arrival (2 rows came earlier than the row before)",)
    with pytest.raises(TraceError, match=r"a\.csv:3: arrives 3 s before the row above it"):
        read_trace(path, strict_order=True)
    in_order = read_trace(path, strict_order=True, skip_bad=True)
    assert [r.id for r in in_order] == ["0", "2"]
    assert in_order.meta.dropped == {"earlier than the row before": 2}


def test_many_equal_times_keep_the_files_order(tmp_path: Path) -> None:
    rows = [{**MOONCAKE[2], "timestamp": 1000 * (i % 2), "hash_ids": [i]} for i in range(400)]
    workload = read_trace(write_rows(tmp_path / "m.jsonl", rows))
    assert [int(request.id) for request in workload] == [*range(0, 400, 2), *range(1, 400, 2)]


@pytest.mark.parametrize("line", ["{", "[1]", "nonsense", '{"timestamp": ' + "9" * 5000 + "}", "[" * 100_000])
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
        HEADER + GOOD + "2024-01-01 00:00:01,1\n" + "2024-01-01 00:00:01,1,1,1\n" + '"2024-01-01 00:00:01,1,1\n' + GOOD
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

"""Every public format read from made-up rows, whatever the file is wrapped in."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.traces.trace_rows import (
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
from traces.formats import detect_format, read_trace
from traces.formats.cells import clock_ticks
from traces.reuse import prefix_reuse


def test_azure_keeps_all_seven_digits_over_midnight_of_a_leap_day(tmp_path: Path) -> None:
    first, second = read_trace(write_text(tmp_path / "a.csv", AZURE)).requests
    assert (first.prompt_tokens, first.output_tokens, first.arrival_s) == (300, 12, 0.0)
    assert second.arrival_s == 2e-7
    assert clock_ticks("t", "2024-02-29 00:00:00.0000001") - clock_ticks("t", "2024-02-28 23:59:59.9999999") == 2
    assert clock_ticks("t", "2024-05-10 00:00:00.009930+00:00") - clock_ticks("t", "2024-05-10T00:00:00Z") == 99_300


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
    assert [(r.arrival_s, r.session, r.source_e2e_s) for r in three] == [(0.0, "ab-1", 12.0), (1.0, None, 3.5)]


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
    assert (request.id, request.arrival_s, request.output_tokens, request.prompt_tokens) == ("3", None, None, 20)


def test_bench_prompts_follow_their_seed(tmp_path: Path) -> None:
    workload = read_trace(write_rows(tmp_path / "w.jsonl", BENCH))
    first, second, third = workload.requests
    assert (
        first.prompt_ids
        == second.prompt_ids
        == tuple(np.random.default_rng([1, 2]).integers(1000, 150000, size=5).tolist())
    )
    assert third.prompt_ids == tuple(np.random.default_rng(3).integers(1000, 150000, size=4).tolist())
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

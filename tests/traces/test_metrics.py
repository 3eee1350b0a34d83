"""The published traces, read in place: every golden figure of the traces README."""

from pathlib import Path

import pytest

from tests.shared import SHARED, needs_shared
from zlab.traces.formats import read_trace, write_mooncake
from zlab.traces.servegen import ServeGenSource, servegen
from zlab.traces.workload_stats import Distribution, describe, lru_hit_shares, prefix_reuse

pytestmark = needs_shared
TRACES = SHARED / "traces"
WORKLOADS = SHARED / "workloads"


def rounded(lengths: Distribution | None) -> tuple[float, int, int, int]:
    assert lengths is not None
    return round(lengths.mean, 2), round(lengths.p50), round(lengths.p99), round(lengths.max)


@pytest.mark.parametrize(
    ("kind", "rows", "span_s", "prompt", "output"),
    [
        ("code", 8_819, 3_435.948, (2_047.85, 1_469, 7_436, 7_437), (27.88, 13, 251, 1_899)),
        ("conv", 19_366, 3_501.722, (1_154.70, 1_020, 4_142, 14_050), (211.13, 129, 601, 1_000)),
    ],
)
def test_azure(
    kind: str,
    rows: int,
    span_s: float,
    prompt: tuple[float, int, int, int],
    output: tuple[float, int, int, int],
) -> None:
    workload = read_trace(TRACES / f"AzureLLMInferenceTrace_{kind}.csv")
    statistics = describe(workload)
    assert len(workload) == workload.meta.rows_read == workload.meta.rows_kept == rows
    assert statistics.span_s is not None
    assert round(statistics.span_s, 3) == span_s
    assert rounded(statistics.prompt_tokens) == prompt
    assert rounded(statistics.output_tokens) == output
    assert workload.meta.licence == "CC-BY-4.0"


def test_azure_code_longest_gap_and_exact_ticks() -> None:
    workload = read_trace(TRACES / "AzureLLMInferenceTrace_code.csv")
    gap = describe(workload).longest_gap_s
    assert gap is not None
    assert round(gap) == 217
    # 18:17:03.9799600 -> 18:17:04.0319600 -> 18:17:04.0781490
    assert [request.arrival_s for request in workload.requests[:3]] == [0.0, 0.052, 0.098189]


@pytest.mark.parametrize(
    ("name", "rows", "reused", "blocks", "whole", "lru", "resolution_s"),
    [
        (
            "conversation",
            12_031,
            105_710,
            288_500,
            118,
            {1_000: 0.0445, 10_000: 0.2116, 50_000: 0.3546},
            3.0,
        ),
        ("synthetic", 3_993, 77_953, 121_877, 213, {1_000: 0.0841, 10_000: 0.4239}, 0.001),
    ],
)
def test_mooncake(
    name: str,
    rows: int,
    reused: int,
    blocks: int,
    whole: int,
    lru: dict[int, float],
    resolution_s: float,
) -> None:
    workload = read_trace(TRACES / f"mooncake_{name}_trace.jsonl")
    reuse = prefix_reuse(workload)
    assert (reuse.num_requests, reuse.num_reused_blocks, reuse.num_blocks) == (rows, reused, blocks)
    assert reuse.num_wholly_cached == whole
    shares = lru_hit_shares(workload, list(lru))
    assert {capacity: round(share, 4) for capacity, share in shares.items()} == lru
    assert workload.meta.arrival_resolution_s == resolution_s


def test_mooncake_is_written_back_byte_for_byte(tmp_path: Path) -> None:
    source = TRACES / "mooncake_synthetic_trace.jsonl"
    target = tmp_path / "again.jsonl"
    write_mooncake(read_trace(source), target)
    assert target.read_bytes() == source.read_bytes()


def test_burstgpt_1_drops_failures_and_counts_them() -> None:
    workload = read_trace(TRACES / "burstgpt_1_first400.csv")
    statistics = describe(workload)
    assert sum(workload.meta.dropped.values()) == 17
    assert (workload.meta.rows_read, len(workload)) == (400, 383)
    assert statistics.prompt_tokens is not None
    assert statistics.output_tokens is not None
    assert round(statistics.prompt_tokens.mean, 1) == 543.6
    assert round(statistics.output_tokens.mean, 1) == 288.8
    assert workload.meta.arrival_resolution_s == 1.0


def test_burstgpt_3_is_read_by_column_name() -> None:
    workload = read_trace(TRACES / "burstgpt_3_first57.csv")
    first = workload.requests[0]
    assert len(workload) == 57
    assert (first.prompt_tokens, first.output_tokens, first.model, first.source_e2e_s) == (
        906,
        446,
        "GPT-4",
        43.0,
    )
    assert first.session is not None
    assert workload.requests[-1].session is None


def test_bailian_and_servegen_examples_are_chained() -> None:
    (request,) = read_trace(TRACES / "qwen_bailian_format_example.jsonl").requests
    assert (request.prompt_tokens, request.output_tokens, request.turn, request.cls) == (
        502,
        1_494,
        1,
        "thinking",
    )
    assert request.prefix_ids is not None
    assert len(request.prefix_ids) == 32
    offline = read_trace(TRACES / "servegen_offline_format_example.jsonl")
    assert [r.arrival_s for r in offline] == [None] * 3
    assert [r.output_tokens for r in offline] == [None] * 3
    assert prefix_reuse(offline).num_reused_blocks == 20
    assert offline.meta.block_id_kind == "chained"
    assert offline.meta.modifications == ("content block ids chained",)


def test_servegen_marginals_give_the_published_lengths() -> None:
    source = ServeGenSource.read(
        TRACES / "servegen_deepseek-r1_rate_10min.csv",
        TRACES / "servegen_deepseek-r1_marginals.json",
    )
    levels, values = (
        source.lengths[0].marginals["output_tokens"].levels,
        source.lengths[0].marginals["output_tokens"].values,
    )
    by_level = dict(zip([round(float(level), 3) for level in levels], values.tolist(), strict=True))
    assert (by_level[0.5], by_level[0.9], by_level[0.99], by_level[1.0]) == (
        792,
        3_432,
        12_607,
        32_768,
    )
    drawn = describe(servegen(source, seed=1, start_s=36_000, duration_s=3_600))
    assert drawn.output_tokens is not None
    assert drawn.output_tokens.mean == pytest.approx(1_527, rel=0.05)
    assert drawn.output_tokens.p50 == pytest.approx(792, rel=0.03)
    assert drawn.output_tokens.p99 == pytest.approx(12_607, rel=0.1)


def test_servegen_client_windows() -> None:
    source = ServeGenSource.read(
        TRACES / "servegen_deepseek-r1_chunk-10-trace.csv",
        TRACES / "servegen_deepseek-r1_chunk-10-dataset.json",
    )
    active = [(w.start_s, w.end_s, w.family) for w in source.rates if w.rate_per_s]
    assert active == [(55_800, 56_400, "Weibull"), (56_400, 57_000, "Gamma")]
    workload = servegen(source, seed=3)
    assert workload.requests == servegen(source, seed=3).requests
    assert all(r.reasoning_tokens is not None and r.output_tokens is not None for r in workload)
    assert all((r.reasoning_tokens or 0) <= (r.output_tokens or 0) for r in workload)


def test_benchmark_workloads() -> None:
    counts = {}
    for name in ("W1", "W2", "W4"):
        workload = read_trace(WORKLOADS / f"{name}.jsonl")
        counts[name] = (
            len(workload),
            len({r.prompt_ids for r in workload}),
            sum(r.output_tokens or 0 for r in workload),
        )
        assert all(
            r.prompt_ids is not None and len(r.prompt_ids) == r.prompt_tokens for r in workload
        )
        assert all(r.arrival_s == 0.0 and r.max_tokens == r.output_tokens for r in workload)
    assert counts["W1"][:2] == (256, 32)
    assert counts["W2"][0] == 256
    assert counts["W4"] == (128, 32, 1_104_293)

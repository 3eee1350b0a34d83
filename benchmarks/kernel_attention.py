"""Decode attention, prefill attention and store: checked against their twins, timed beside their floors."""

from typing import Any

import torch

from benchmarks.kernel_timing import (
    BF16_FLOP_PER_S,
    COPY_BYTES_PER_S,
    READ_BYTES_PER_S,
    Bench,
    launch_name,
    relative_error,
)
from engine.kernels import torch_kernels, triton_kernels, triton_prefill
from engine.kernels.decode_plan import SPLIT_TOKENS, reserve_decode_workspace
from engine.kernels.triton_common import Launch
from engine.kernels.triton_decode import LAUNCH as DECODE_LAUNCH
from engine.kernels.triton_decode import decode_attention, plan_decodes

DECODE_CANDIDATES = (
    (SPLIT_TOKENS, DECODE_LAUNCH),
    (256, DECODE_LAUNCH),
    (512, DECODE_LAUNCH),
    (2048, DECODE_LAUNCH),
    (1024, Launch(tile=64, num_warps=4, num_stages=4)),
    (1024, Launch(tile=32, num_warps=4, num_stages=5)),
    (512, Launch(tile=32, num_warps=4, num_stages=5)),
    (1024, Launch(tile=128, num_warps=4, num_stages=2)),
)
PREFILL_CANDIDATES = (
    (128, triton_prefill.LAUNCH),
    (128, Launch(tile=128, num_warps=8, num_stages=3)),
    (128, Launch(tile=64, num_warps=8, num_stages=2)),
    (128, Launch(tile=64, num_warps=8, num_stages=2, max_registers=128)),
    (128, Launch(tile=64, num_warps=4, num_stages=2)),
    (64, Launch(tile=64, num_warps=4, num_stages=2)),
    (64, Launch(tile=64, num_warps=4, num_stages=3)),
    (64, Launch(tile=32, num_warps=4, num_stages=3)),
    (256, Launch(tile=64, num_warps=8, num_stages=2)),
)


def decode(bench: Bench) -> None:
    shapes = bench.shapes
    for block_size in shapes.block_sizes:
        batches = shapes.decode_batches if block_size == shapes.block_sizes[0] else shapes.decode_batches[-1:]
        for batch in batches:
            _decode_case(bench, batch, block_size, sweep=bench.sweep and batch in (batches[0], batches[-1]))


def _decode_case(bench: Bench, batch: int, block_size: int, *, sweep: bool) -> None:
    shapes = bench.shapes
    per_request = -(-shapes.context // block_size)
    cache_k, cache_v = (
        bench.randn(batch * per_request, block_size, shapes.num_kv_heads, shapes.head_dim) for _ in range(2)
    )
    tables = torch.randperm(batch * per_request, device=bench.device).int().view(batch, per_request)
    lengths = torch.full((batch,), shapes.context, dtype=torch.int32, device=bench.device)
    queries = bench.randn(batch, shapes.num_query_heads, shapes.head_dim)
    wanted = torch.empty_like(queries[:2])
    scale = shapes.head_dim**-0.5
    candidates = DECODE_CANDIDATES if sweep else DECODE_CANDIDATES[:1]
    floor = 2 * cache_k.element_size() * batch * shapes.context * shapes.num_kv_heads * shapes.head_dim
    for split, launch in candidates:
        workspace = reserve_decode_workspace(
            max_length=shapes.context, max_requests=batch, num_query_heads=shapes.num_query_heads,
            num_kv_heads=shapes.num_kv_heads, head_dim=shapes.head_dim, device=bench.device, split_tokens=split,
        )  # fmt: skip
        few = torch_kernels.plan_decodes(lengths[:2], workspace, 2 * shapes.context)
        torch_kernels.decode_attention(queries[:2], cache_k, cache_v, tables[:2], few, scale, workspace, wanted)
        plan = plan_decodes(lengths, workspace, batch * shapes.context)
        output = torch.full_like(queries, float("nan"))

        arguments = (queries, cache_k, cache_v, tables, plan, scale, workspace, output)

        def call(arguments: Any = arguments, launch: Launch = launch) -> None:
            decode_attention(*arguments, launch=launch)

        row = bench.row(
            "decode",
            f"batch {batch} b {block_size}",
            f"split {split} {launch_name(launch)}",
            call,
            floor / READ_BYTES_PER_S,
        )
        row["error"] = relative_error(output[:2], wanted) if bool(output.isfinite().all()) else float("nan")


def prefill(bench: Bench) -> None:
    shapes = bench.shapes
    block_size = shapes.block_sizes[0]
    for num_requests, chunk, prefix in shapes.chunks:
        length = prefix + chunk
        per_request = -(-length // block_size)
        cache_k, cache_v = (
            bench.randn(num_requests * per_request, block_size, shapes.num_kv_heads, shapes.head_dim) for _ in range(2)
        )
        tables = torch.randperm(num_requests * per_request, device=bench.device).int().view(num_requests, per_request)
        lengths = torch.full((num_requests,), length, dtype=torch.int32, device=bench.device)
        starts = torch.arange(num_requests + 1, dtype=torch.int32, device=bench.device) * chunk
        queries = bench.randn(num_requests * chunk, shapes.num_query_heads, shapes.head_dim)
        scale = shapes.head_dim**-0.5
        wanted = torch.empty_like(queries[:chunk])
        torch_kernels.prefill_attention(
            queries[:chunk], cache_k, cache_v, tables[:1], lengths[:1], starts[:2], scale, wanted
        )
        pairs = num_requests * (chunk * prefix + chunk * (chunk + 1) // 2)
        flop = 4 * shapes.head_dim * shapes.num_query_heads * pairs
        for rows, launch in PREFILL_CANDIDATES if bench.sweep else PREFILL_CANDIDATES[:1]:
            output = torch.full_like(queries, float("nan"))
            arguments = (queries, cache_k, cache_v, tables, lengths, starts, scale, output)

            def call(arguments: Any = arguments, launch: Launch = launch, rows: int = rows) -> None:
                triton_prefill.prefill_attention(*arguments, launch=launch, query_rows=rows)

            case = f"{num_requests} x {chunk} behind {prefix}"
            row = bench.row("prefill", case, f"rows {rows} {launch_name(launch)}", call, flop / BF16_FLOP_PER_S)
            row["error"] = relative_error(output[:chunk], wanted)
            row["tflops"] = flop / row["ms"] / 1e9 if "ms" in row else 0.0


def store(bench: Bench) -> None:
    shapes = bench.shapes
    block_size = shapes.block_sizes[0]
    for num_tokens in shapes.store_tokens:
        num_blocks = -(-num_tokens // block_size) + 1
        cache_k, cache_v = (bench.randn(num_blocks, block_size, shapes.num_kv_heads, shapes.head_dim) for _ in range(2))
        keys, values = (bench.randn(num_tokens, shapes.num_kv_heads, shapes.head_dim) for _ in range(2))
        queries = bench.randn(num_tokens, shapes.num_query_heads, shapes.head_dim)
        window = bench.randn(num_tokens, shapes.window, shapes.num_query_heads, shapes.head_dim)
        slots = torch.randperm(num_blocks * block_size, device=bench.device)[:num_tokens].int()
        places = torch.arange(num_tokens, device=bench.device, dtype=torch.int32) * shapes.window
        values_moved = keys.numel() + values.numel() + queries.numel()
        floor = 2 * keys.element_size() * values_moved / COPY_BYTES_PER_S
        arguments = (keys, values, slots, cache_k, cache_v, queries, places, window)
        row = bench.row("store", f"{num_tokens} tokens", "-", lambda a=arguments: triton_kernels.store(*a), floor)  # type: ignore[misc]
        stored = cache_k.flatten(0, 1)[slots.long()]
        row["error"] = relative_error(stored, keys) + relative_error(window[:, 0], queries)

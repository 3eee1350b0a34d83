"""Check and time every kernel on one GPU at the shapes of Qwen3-8B, beside its floor.

    python -m benchmarks.kernels --out results.json [--only decode compress] [--no-sweep]
    python -m benchmarks.kernels --dry-run   # tiny shapes on the CPU, in Triton's interpreter

Every kernel is first compared with its plain-torch form, then timed. A time is the median of
`triton.testing.do_bench` (device events, L2 cleared between runs). A floor is the bytes that must
move over the measured bandwidth of the H200 (copy 4.29 TB/s, read 4.45 TB/s), or the operations
over 790 TFLOP/s where that takes longer.
"""

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton

from zlab.engine.compression import CompressionSettings, compress, scoring_rotation
from zlab.engine.kernels import torch_backend as torch_kernels
from zlab.engine.kernels import triton_backend as triton_kernels
from zlab.engine.kernels import triton_prefill, triton_scores, triton_select
from zlab.engine.kernels.interface import AttentionOptions
from zlab.engine.kernels.triton_common import Launch
from zlab.engine.kernels.triton_decode import LAUNCH as DECODE_LAUNCH
from zlab.engine.kernels.triton_decode import (
    decode_attention,
    plan_decodes,
    reserve_decode_workspace,
)
from zlab.engine.kernels.workspace import (
    CompressionBatch,
    CompressionRequest,
    CompressionShape,
    CompressionWorkspace,
    Scratch,
    lay_out,
)
from zlab.engine.model.decoder import rotation_table
from zlab.engine.model.spec import Rope
from zlab.sim.memory import SPLIT_TOKENS

COPY_BYTES_PER_S = 4.29e12
READ_BYTES_PER_S = 4.45e12
BF16_FLOP_PER_S = 790e12


@dataclass(frozen=True)
class Shapes:
    """The shapes of the model and its cache, and the sizes that are measured."""

    num_layers: int = 36
    num_query_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    window: int = 16
    dtype: torch.dtype = torch.bfloat16
    context: int = 2048
    decode_batches: tuple[int, ...] = (64, 128, 256)
    block_sizes: tuple[int, ...] = (256, 64, 32, 16)
    chunks: tuple[tuple[int, int, int], ...] = (
        (1, 2048, 0),
        (1, 2048, 6144),
        (8, 512, 512),
        (1, 8192, 0),
    )
    store_tokens: tuple[int, ...] = (64, 256, 2048, 8192)
    compress_batches: tuple[int, ...] = (1, 4, 16, 56)
    compress_block: int = 256
    compress_blocks: int = 9


TINY = Shapes(
    num_layers=1,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=16,
    window=4,
    dtype=torch.float32,
    context=40,
    decode_batches=(2,),
    block_sizes=(32, 16),
    chunks=((2, 9, 20),),
    store_tokens=(3,),
    compress_batches=(1, 2),
    compress_block=16,
    compress_blocks=3,
)


@dataclass
class Bench:
    """The rows measured so far, and how a call is timed on this device."""

    shapes: Shapes
    device: torch.device
    sweep: bool
    rows: list[dict[str, Any]]

    def time_ms(self, call: Callable[[], None]) -> float:
        """Return the median time of a call in milliseconds."""
        if self.device.type == "cuda":
            return float(triton.testing.do_bench(call, warmup=20, rep=80, return_mode="median"))
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3

    def row(
        self,
        section: str,
        case: str,
        config: str,
        call: Callable[[], None],
        floor_s: float,
        **more: Any,
    ) -> dict[str, Any]:
        """Time one call, keep its row and return it.

        A configuration that does not fit the GPU gives a row with its error.

        Args:
            section: the part of the benchmark.
            case: the sizes.
            config: the launch settings.
            call: launches the kernel.
            floor_s: seconds that the call takes at least.
            **more: further columns of the row.
        """
        row: dict[str, Any] = {
            "section": section,
            "case": case,
            "config": config,
            "floor_ms": floor_s * 1e3,
            **more,
        }
        try:
            row["ms"] = self.time_ms(call)
            row["over_floor"] = row["ms"] / row["floor_ms"]
        except (triton.runtime.errors.OutOfResources, RuntimeError) as error:
            row["failed"] = str(error)[:200]
        self.rows.append(row)
        print(line_of(row), flush=True)
        return row

    def randn(self, *shape: int) -> torch.Tensor:
        """Return random values in the cache's dtype, made in place without a float32 copy."""
        return torch.empty(shape, dtype=self.shapes.dtype, device=self.device).normal_()


def line_of(row: dict[str, Any]) -> str:
    """Return one line of the printed table."""
    timing = (
        f"{row['ms']:9.4f} ms {row['over_floor']:6.2f}x"
        if "ms" in row
        else f"FAILED {row['failed'][:60]}"
    )
    extra = " ".join(
        f"{key} {row[key]:.3g}" for key in ("error", "ms_per_sequence", "tflops") if key in row
    )
    return (
        f"{row['section']:>15} {row['case']:<26} {row['config']:<34} {row['floor_ms']:8.4f} "
        f"floor {timing} {extra}"
    )


def launch_name(launch: Launch) -> str:
    """Return the launch settings in a few characters."""
    return (
        f"tile {launch.tile} w{launch.num_warps} s{launch.num_stages} "
        f"r{launch.max_registers or '-'}"
    )


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return ||found - wanted|| / ||wanted||; it is NaN when an output was not written."""
    difference = (found.double() - wanted.double()).norm() / wanted.double().norm()
    return float(difference)


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
        batches = (
            shapes.decode_batches
            if block_size == shapes.block_sizes[0]
            else shapes.decode_batches[-1:]
        )
        for batch in batches:
            _decode_case(
                bench, batch, block_size, sweep=bench.sweep and batch in (batches[0], batches[-1])
            )


def _decode_case(bench: Bench, batch: int, block_size: int, *, sweep: bool) -> None:
    shapes = bench.shapes
    per_request = -(-shapes.context // block_size)
    cache_k, cache_v = (
        bench.randn(batch * per_request, block_size, shapes.num_kv_heads, shapes.head_dim)
        for _ in range(2)
    )
    tables = torch.randperm(batch * per_request, device=bench.device).int().view(batch, per_request)
    lengths = torch.full((batch,), shapes.context, dtype=torch.int32, device=bench.device)
    queries = bench.randn(batch, shapes.num_query_heads, shapes.head_dim)
    wanted = torch.empty_like(queries[:2])
    scale = shapes.head_dim**-0.5
    candidates = DECODE_CANDIDATES if sweep else DECODE_CANDIDATES[:1]
    floor = (
        2 * cache_k.element_size() * batch * shapes.context * shapes.num_kv_heads * shapes.head_dim
    )
    for split, launch in candidates:
        workspace = reserve_decode_workspace(
            max_length=shapes.context,
            max_requests=batch,
            num_query_heads=shapes.num_query_heads,
            num_kv_heads=shapes.num_kv_heads,
            head_dim=shapes.head_dim,
            device=bench.device,
            split_tokens=split,
        )
        few = torch_kernels.plan_decodes(lengths[:2], workspace, 2 * shapes.context)
        torch_kernels.decode_attention(
            queries[:2], cache_k, cache_v, tables[:2], few, scale, workspace, wanted
        )
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
        row["error"] = (
            relative_error(output[:2], wanted) if bool(output.isfinite().all()) else float("nan")
        )


def prefill(bench: Bench) -> None:
    shapes = bench.shapes
    block_size = shapes.block_sizes[0]
    for num_requests, chunk, prefix in shapes.chunks:
        length = prefix + chunk
        per_request = -(-length // block_size)
        cache_k, cache_v = (
            bench.randn(
                num_requests * per_request, block_size, shapes.num_kv_heads, shapes.head_dim
            )
            for _ in range(2)
        )
        tables = (
            torch.randperm(num_requests * per_request, device=bench.device)
            .int()
            .view(num_requests, per_request)
        )
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
            row = bench.row(
                "prefill", case, f"rows {rows} {launch_name(launch)}", call, flop / BF16_FLOP_PER_S
            )
            row["error"] = relative_error(output[:chunk], wanted)
            row["tflops"] = flop / row["ms"] / 1e9 if "ms" in row else 0.0


def store(bench: Bench) -> None:
    shapes = bench.shapes
    block_size = shapes.block_sizes[0]
    for num_tokens in shapes.store_tokens:
        num_blocks = -(-num_tokens // block_size) + 1
        cache_k, cache_v = (
            bench.randn(num_blocks, block_size, shapes.num_kv_heads, shapes.head_dim)
            for _ in range(2)
        )
        keys, values = (
            bench.randn(num_tokens, shapes.num_kv_heads, shapes.head_dim) for _ in range(2)
        )
        queries = bench.randn(num_tokens, shapes.num_query_heads, shapes.head_dim)
        window = bench.randn(num_tokens, shapes.window, shapes.num_query_heads, shapes.head_dim)
        slots = torch.randperm(num_blocks * block_size, device=bench.device)[:num_tokens].int()
        places = torch.arange(num_tokens, device=bench.device, dtype=torch.int32) * shapes.window
        values_moved = keys.numel() + values.numel() + queries.numel()
        floor = 2 * keys.element_size() * values_moved / COPY_BYTES_PER_S
        arguments = (keys, values, slots, cache_k, cache_v, queries, places, window)
        row = bench.row(
            "store",
            f"{num_tokens} tokens",
            "-",
            lambda a=arguments: triton_kernels.store(*a),  # type: ignore[misc]
            floor,
        )
        stored = cache_k.flatten(0, 1)[slots.long()]
        row["error"] = relative_error(stored, keys) + relative_error(window[:, 0], queries)


LIGHTNING_CANDIDATES = (
    triton_scores.LAUNCH,
    Launch(tile=32, num_warps=8, num_stages=2),
    Launch(tile=32, num_warps=8, num_stages=1, max_registers=80),
    Launch(tile=64, num_warps=8, num_stages=2),
    Launch(tile=64, num_warps=4, num_stages=2),
    Launch(tile=32, num_warps=4, num_stages=2),
    Launch(tile=32, num_warps=4, num_stages=1, max_registers=168),
)
PASS_CANDIDATES = (
    Launch(tile=64, num_warps=4, num_stages=2),
    Launch(tile=64, num_warps=4, num_stages=3),
    Launch(tile=64, num_warps=4, num_stages=5),
    Launch(tile=128, num_warps=8, num_stages=2),
    Launch(tile=128, num_warps=4, num_stages=2),
    Launch(tile=32, num_warps=4, num_stages=4),
    Launch(tile=256, num_warps=8, num_stages=1),
)
COMPACT_CANDIDATES = (
    triton_select.LAUNCH,
    Launch(tile=32, num_warps=2),
    Launch(tile=128, num_warps=8),
)
SELECT_CANDIDATES = (triton_select.SELECT_LARGE, Launch(4096, 4), Launch(4096, 16))


@dataclass(frozen=True)
class Compression:
    """A batch of requests to compress, with each stage of the pipeline as a call."""

    cache_k: torch.Tensor
    cache_v: torch.Tensor
    history: torch.Tensor
    window_queries: torch.Tensor
    requests: tuple[CompressionRequest, ...]
    workspace: CompressionWorkspace
    batch: CompressionBatch
    scratch: Scratch
    settings: CompressionSettings

    def score(self) -> None:
        triton_kernels.attention_score(
            self.cache_k, self.window_queries, self.batch, self.scratch,
            self.history, AttentionOptions(decay=0.8, lightning_threshold=0.5),
        )  # fmt: skip

    def attention(self) -> None:
        triton_kernels.attention_score(
            self.cache_k, self.window_queries, self.batch, self.scratch,
            self.history, AttentionOptions(decay=0.8),
        )  # fmt: skip

    def lightning(self) -> None:
        triton_kernels.lightning_redundancy(self.cache_k, self.batch, self.scratch, threshold=0.5)

    def combine(self) -> None:
        triton_kernels.combine(
            self.batch,
            self.scratch,
            pool_size=5,
            attention_weight=0.2,
            temperature=0.4,
            segment="block",
        )

    def select(self) -> None:
        triton_kernels.select(self.batch, self.scratch, window=self.settings.window, sink=0)

    def compact(self) -> None:
        triton_kernels.compact(self.cache_k, self.cache_v, self.history, self.batch, self.scratch)

    def whole(self, rotation: torch.Tensor | None = None) -> None:
        compress(
            self.cache_k,
            self.cache_v,
            self.history,
            self.window_queries,
            self.requests,
            self.settings,
            self.workspace,
            kernels=triton_kernels,
            rotation=rotation,
        )


def make_compression(bench: Bench, num_requests: int) -> Compression:
    """Make a batch whose requests were compressed before and whose blocks are scattered.

    The keys lie around seven directions, so that there is redundancy to find.
    """
    shapes = bench.shapes
    num_blocks = num_requests * shapes.compress_blocks
    sizes = (
        shapes.num_layers,
        num_blocks,
        shapes.compress_block,
        shapes.num_kv_heads,
        shapes.head_dim,
    )
    cache_k, cache_v = bench.randn(*sizes), bench.randn(*sizes)
    directions = bench.randn(7, shapes.head_dim) * 2
    for layer in range(
        shapes.num_layers
    ):  # a layer at a time: the whole would take the memory twice
        chosen = torch.randint(0, 7, sizes[1:4], device=bench.device)
        cache_k[layer] += directions[chosen]
    group = shapes.num_query_heads // shapes.num_kv_heads
    workspace = CompressionWorkspace(
        CompressionShape(
            shapes.num_layers, shapes.num_kv_heads, group, shapes.window, shapes.compress_block
        ),
        capacity_blocks=num_blocks,
        max_requests=num_requests,
        device=bench.device,
    )
    order = torch.randperm(num_blocks).tolist()
    tables = [
        tuple(order[row * shapes.compress_blocks :][: shapes.compress_blocks])
        for row in range(num_requests)
    ]
    requests = tuple(
        CompressionRequest(table, table[:-1], query_slot=row, compressed_before=True)
        for row, table in enumerate(tables)
    )
    batch = lay_out(requests, shapes.compress_block, workspace.batch_storage)
    history = torch.rand(sizes[:4], device=bench.device) * 0.01
    queries = bench.randn(
        shapes.num_layers, num_requests, shapes.window, shapes.num_query_heads, shapes.head_dim
    )
    scratch = workspace.scratch(num_requests, batch.max_blocks, batch.max_targets)
    settings = CompressionSettings(window=shapes.window)
    return Compression(
        cache_k, cache_v, history, queries, requests, workspace, batch, scratch, settings
    )


def check_compression(bench: Bench, case: Compression) -> dict[str, float]:
    """Compare scores, kept tokens and moved rows of the first request with plain torch.

    Returns the relative error of each score. Ends the program when a result is wrong.
    """
    one = (case.requests[0],)
    shapes = bench.shapes
    workspace = CompressionWorkspace(
        case.workspace.shape,
        capacity_blocks=shapes.compress_blocks,
        max_requests=1,
        device=bench.device,
    )
    batch = lay_out(one, shapes.compress_block, workspace.batch_storage)
    scratch = workspace.scratch(1, batch.max_blocks, batch.max_targets)
    for buffer in (case.scratch.global_score, case.scratch.redundancy_logits, case.scratch.score):
        buffer.fill_(float("nan"))
    case.scratch.keep_index.fill_(-1)
    torch_kernels.attention_score(
        case.cache_k,
        case.window_queries,
        batch,
        scratch,
        case.history,
        AttentionOptions(decay=0.8, lightning_threshold=0.5),
    )
    case.score()
    errors = {
        "global_score": relative_error(case.scratch.global_score[:, :1], scratch.global_score),
        "lightning": relative_error(
            case.scratch.redundancy_logits[:, :1], scratch.redundancy_logits
        ),
    }
    torch_kernels.combine(
        batch, scratch, pool_size=5, attention_weight=0.2, temperature=0.4, segment="block"
    )
    case.combine()
    errors["score"] = relative_error(case.scratch.score[:, :1], scratch.score)
    # Both forms select from equal scores, so that the kept tokens must be equal.
    scratch.score.copy_(case.scratch.score[:, :1])
    torch_kernels.select(batch, scratch, window=case.settings.window, sink=0)
    case.select()
    same = torch.equal(case.scratch.keep_index[:, :1], scratch.keep_index)
    block, targets = list(one[0].block_table), list(one[0].target_blocks)
    num_keep = len(targets) * shapes.compress_block
    before = case.cache_v[:, block].flatten(1, 2)
    index = (
        scratch.keep_index[:, 0]
        .long()
        .transpose(1, 2)[..., None]
        .expand(-1, -1, -1, shapes.head_dim)
    )
    wanted = before.gather(1, index)
    case.compact()
    moved = torch.equal(case.cache_v[:, targets].flatten(1, 2)[:, :num_keep], wanted)
    if not same or not moved or max(errors.values()) > 1e-3 or any(map(isnan, errors.values())):
        raise SystemExit(
            f"compression is wrong: same choice {same}, rows moved {moved}, errors {errors}"
        )
    return errors


@contextmanager
def patched(module: ModuleType, name: str, launch: Launch) -> Iterator[None]:
    """A context in which a module constant holds another launch setting."""
    before = getattr(module, name)
    setattr(module, name, launch)
    try:
        yield
    finally:
        setattr(module, name, before)


def compression(bench: Bench) -> None:
    """Time each stage at each batch size; launch settings are swept at the second largest."""
    shapes = bench.shapes
    keys = shapes.num_layers * shapes.num_kv_heads * shapes.compress_blocks * shapes.compress_block
    kept = keys // shapes.compress_blocks * (shapes.compress_blocks - 1)
    for num_requests in shapes.compress_batches:
        case = make_compression(bench, num_requests)
        errors = check_compression(bench, case)
        row_bytes = shapes.head_dim * case.cache_k.element_size()
        read_keys = num_requests * keys * row_bytes / READ_BYTES_PER_S
        move = num_requests * 4 * kept * row_bytes / COPY_BYTES_PER_S
        scores = num_requests * keys * 4
        stages: Sequence[tuple[str, Callable[[], None], float]] = (
            ("score", case.attention, 2 * read_keys),
            ("lightning", case.lightning, read_keys),
            ("combine", case.combine, 3 * scores / COPY_BYTES_PER_S),
            ("select", case.select, 2 * scores / COPY_BYTES_PER_S),
            ("compact", case.compact, move),
            ("whole", case.whole, 2 * read_keys + move),
        )
        for name, call, floor in stages:
            row = bench.row("compress", f"{num_requests} x {name}", "default", call, floor)
            if name == "whole":
                row |= {f"error_{key}": value for key, value in errors.items()}
                row["ms_per_sequence"] = row.get("ms", float("nan")) / num_requests
        if bench.sweep and num_requests == shapes.compress_batches[-2]:
            _sweep(bench, case, num_requests, read_keys, move)
        del case


def _sweep(
    bench: Bench, case: Compression, num_requests: int, read_keys: float, move: float
) -> None:
    sweeps: Sequence[tuple[str, ModuleType, str, Sequence[Launch], Callable[[], None], float]] = (
        ("lightning", triton_scores, "LAUNCH", LIGHTNING_CANDIDATES, case.lightning, read_keys),
        (
            "both passes, first",
            triton_scores,
            "FIRST_PASS",
            PASS_CANDIDATES,
            case.attention,
            2 * read_keys,
        ),
        (
            "both passes, second",
            triton_scores,
            "SECOND_PASS",
            PASS_CANDIDATES,
            case.attention,
            2 * read_keys,
        ),
        ("compact", triton_select, "LAUNCH", COMPACT_CANDIDATES, case.compact, move),
        ("select", triton_select, "SELECT_LARGE", SELECT_CANDIDATES, case.select, move),
    )
    for name, module, setting, candidates, call, floor in sweeps:
        for launch in candidates:
            with patched(module, setting, launch):
                bench.row(
                    "compress-sweep", f"{num_requests} x {name}", launch_name(launch), call, floor
                )


def full_redundancy(bench: Bench) -> None:
    """Time the redundancy over all pairs for one sequence, beside lightning alone."""
    case = make_compression(bench, 1)
    shapes = bench.shapes
    keys = shapes.num_layers * shapes.num_kv_heads * shapes.compress_blocks * shapes.compress_block
    floor = keys * shapes.head_dim * case.cache_k.element_size() / READ_BYTES_PER_S
    for name, run in (
        ("full", triton_kernels.full_redundancy),
        ("lightning alone", triton_kernels.lightning_redundancy),
    ):
        bench.row(
            "redundancy", f"1 x {name}", "default",
            lambda run=run: run(case.cache_k, case.batch, case.scratch, threshold=0.5), floor,  # type: ignore[misc]
        )  # fmt: skip


def scorers(bench: Bench) -> None:
    """Time a whole compression under the old and the new default scorer at each batch size.

    The first request is compared with plain torch: `kept_as_torch` is the share of the kept keys
    and values that are equal.
    """
    shapes = bench.shapes
    positions = shapes.compress_blocks * shapes.compress_block
    rotation = scoring_rotation(rotation_table(Rope(1e6), shapes.head_dim, positions, bench.device))
    row_bytes = shapes.head_dim * 2
    keys = shapes.num_layers * shapes.num_kv_heads * positions
    kept = keys // shapes.compress_blocks * (shapes.compress_blocks - 1)
    for num_requests in shapes.compress_batches:
        case = make_compression(bench, num_requests)
        read = num_requests * keys * row_bytes / READ_BYTES_PER_S
        move = num_requests * 4 * kept * row_bytes / COPY_BYTES_PER_S
        for name, passes in (("attention+global+lightning", 2), ("distinct", 4)):
            history = case.history.clone()
            if name == "distinct":
                for request in case.requests:
                    for place, block in enumerate(request.block_table):
                        first = place * shapes.compress_block
                        places = torch.arange(first, first + shapes.compress_block)
                        history[:, block] = torch_kernels.pack(
                            places.to(bench.device)[None, :, None], case.history[:, block]
                        )
            one = replace(case, history=history, settings=replace(case.settings, scorer=name))
            equal = _kept_as_torch(one, rotation)
            row = bench.row(
                "scorers",
                f"{num_requests} x {name}",
                "default",
                lambda one=one: one.whole(rotation),  # type: ignore[misc]
                passes * read + move,
            )
            row["ms_per_sequence"] = row.get("ms", float("nan")) / num_requests
            row["kept_as_torch"] = equal
        del case


def _kept_as_torch(case: Compression, rotation: torch.Tensor | None) -> float:
    """Return the share of the first request's kept rows that are equal under both backends."""
    first = case.requests[0]
    table = list(first.block_table)
    targets = list(range(len(first.target_blocks)))
    request = replace(first, block_table=tuple(range(len(table))), target_blocks=tuple(targets))
    found = []
    for backend in (triton_kernels, torch_kernels):
        k, v, history = (
            one[:, table].clone() for one in (case.cache_k, case.cache_v, case.history)
        )
        compress(
            k, v, history, case.window_queries, (request,), case.settings, case.workspace,
            kernels=backend, rotation=rotation,
        )  # fmt: skip
        found.append(k[:, targets])
    return (found[0] == found[1]).all(dim=-1).float().mean().item()


def ceilings(bench: Bench) -> None:
    """Measure the GPU's copy and read bandwidth on 4 GB of random data."""
    values = bench.randn(2**31 if bench.device.type == "cuda" else 2**12)
    copy = torch.empty_like(values)
    bytes_moved = values.numel() * values.element_size()
    bench.row(
        "ceilings",
        "copy",
        "torch",
        lambda: _drop(copy.copy_(values)),
        2 * bytes_moved / COPY_BYTES_PER_S,
    )
    bench.row(
        "ceilings",
        "read",
        "torch.amax",
        lambda: _drop(values.amax()),
        bytes_moved / READ_BYTES_PER_S,
    )


def _drop(_result: object) -> None:
    """Discard the result of a timed call."""


SECTIONS: Mapping[str, Callable[[Bench], None]] = {
    "ceilings": ceilings,
    "decode": decode,
    "prefill": prefill,
    "store": store,
    "compress": compression,
    "full-redundancy": full_redundancy,
    "scorers": scorers,
}


def summary(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the fastest configuration of every case, in the order of the run."""
    best: dict[tuple[object, object], dict[str, object]] = {}
    for row in rows:
        key = (row["section"], row["case"])
        if "ms" in row and (key not in best or float(str(row["ms"])) < float(str(best[key]["ms"]))):
            best[key] = row
    return list(best.values())


def main() -> None:
    """Run the chosen sections, write every row as JSON, print the best of each case last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where to write all rows as JSON")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS))
    parser.add_argument("--no-sweep", action="store_true", help="default configurations only")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on the CPU, in Triton's interpreter"
    )
    options = parser.parse_args()
    if options.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton chose at its import to compile; only a new process can choose otherwise.
        arguments = [sys.executable, "-m", "benchmarks.kernels", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, "TRITON_INTERPRET": "1"})
    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --dry-run shows that the script works")
    torch.manual_seed(0)
    device = torch.device("cpu" if options.dry_run else "cuda")
    shapes = TINY if options.dry_run else Shapes()
    bench = Bench(shapes, device, sweep=not options.no_sweep and not options.dry_run, rows=[])
    for name in options.only:
        SECTIONS[name](bench)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if options.out is not None:
        about = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "card": torch.cuda.get_device_name() if device.type == "cuda" else "CPU, interpreter",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "command": " ".join(sys.argv[1:]),
        }
        options.out.write_text(
            json.dumps({"about": about, "rows": bench.rows}, indent=1) + "\n", encoding="utf-8"
        )
    print("\nbest configuration of each case")
    for row in summary(bench.rows):
        print(line_of(row))


if __name__ == "__main__":
    main()

"""Compression stage by stage and whole, for batches of sequences of 9 blocks that shrink to 8."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan
from types import ModuleType

import torch

from benchmarks.kernel_timing import COPY_BYTES_PER_S, READ_BYTES_PER_S, Bench, launch_name, relative_error
from engine.compression_pipeline import compress
from engine.kernels import (
    torch_kernels,
    triton_compaction,
    triton_kernels,
    triton_lightning,
    triton_scores,
    triton_select,
)
from engine.kernels.batch import CompressionBatch, CompressionRequest, lay_out
from engine.kernels.triton_common import Launch
from engine.kernels.workspace import CompressionShape, CompressionWorkspace, Scratch
from engine.scorers import CompressionSettings

LIGHTNING_CANDIDATES = (
    triton_lightning.LAUNCH,
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
COMPACT_CANDIDATES = (triton_compaction.LAUNCH, Launch(tile=32, num_warps=2), Launch(tile=128, num_warps=8))
SELECT_CANDIDATES = (triton_select.SELECT_LARGE, Launch(4096, 4), Launch(4096, 16))


@dataclass(frozen=True)
class Compression:
    """A batch that is compressed, laid out once; the stages of the pipeline as calls."""

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
            history=self.history, decay=0.8, lightning_threshold=0.5,
        )  # fmt: skip

    def attention(self) -> None:
        triton_kernels.attention_score(
            self.cache_k, self.window_queries, self.batch, self.scratch,
            history=self.history, decay=0.8, lightning_threshold=None,
        )  # fmt: skip

    def lightning(self) -> None:
        triton_kernels.lightning_redundancy(self.cache_k, self.batch, self.scratch, threshold=0.5)

    def combine(self) -> None:
        triton_kernels.combine(
            self.batch, self.scratch, pool_size=5, attention_weight=0.2, temperature=0.4, segment="block"
        )

    def select(self) -> None:
        triton_kernels.select(self.batch, self.scratch, window=self.settings.window, sink=0)

    def compact(self) -> None:
        triton_kernels.compact(self.cache_k, self.cache_v, self.history, self.batch, self.scratch)

    def whole(self) -> None:
        compress(
            self.cache_k, self.cache_v, self.history, self.window_queries, self.requests, self.settings,
            self.workspace, kernels=triton_kernels,
        )  # fmt: skip


def make_compression(bench: Bench, num_requests: int) -> Compression:
    """Every request compressed before, with blocks scattered over the cache; keys around a few directions."""
    shapes = bench.shapes
    num_blocks = num_requests * shapes.compress_blocks
    sizes = (shapes.num_layers, num_blocks, shapes.compress_block, shapes.num_kv_heads, shapes.head_dim)
    cache_k, cache_v = bench.randn(*sizes), bench.randn(*sizes)
    directions = bench.randn(7, shapes.head_dim) * 2
    for layer in range(shapes.num_layers):  # a layer at a time: the whole would take the memory twice
        chosen = torch.randint(0, 7, sizes[1:4], device=bench.device)
        cache_k[layer] += directions[chosen]
    group = shapes.num_query_heads // shapes.num_kv_heads
    workspace = CompressionWorkspace(
        CompressionShape(shapes.num_layers, shapes.num_kv_heads, group, shapes.window, shapes.compress_block),
        capacity_blocks=num_blocks, max_requests=num_requests, device=bench.device,
    )  # fmt: skip
    order = torch.randperm(num_blocks).tolist()
    tables = [tuple(order[row * shapes.compress_blocks :][: shapes.compress_blocks]) for row in range(num_requests)]
    requests = tuple(
        CompressionRequest(table, table[:-1], query_slot=row, compressed_before=True)
        for row, table in enumerate(tables)
    )
    batch = lay_out(requests, shapes.compress_block, workspace.batch_storage)
    history = torch.rand(sizes[:4], device=bench.device) * 0.01
    queries = bench.randn(shapes.num_layers, num_requests, shapes.window, shapes.num_query_heads, shapes.head_dim)
    scratch = workspace.scratch(num_requests, batch.max_blocks, batch.max_targets)
    settings = CompressionSettings(window=shapes.window)
    return Compression(cache_k, cache_v, history, queries, requests, workspace, batch, scratch, settings)


def check_compression(bench: Bench, case: Compression) -> dict[str, float]:
    """Scores, choice and moved rows of the first request against the twins; raises where they are wrong."""
    one = (case.requests[0],)
    shapes = bench.shapes
    workspace = CompressionWorkspace(
        case.workspace.shape, capacity_blocks=shapes.compress_blocks, max_requests=1, device=bench.device
    )
    batch = lay_out(one, shapes.compress_block, workspace.batch_storage)
    scratch = workspace.scratch(1, batch.max_blocks, batch.max_targets)
    for buffer in (case.scratch.global_score, case.scratch.redundancy_logits, case.scratch.score):
        buffer.fill_(float("nan"))
    case.scratch.keep_index.fill_(-1)
    torch_kernels.attention_score(
        case.cache_k, case.window_queries, batch, scratch, history=case.history, decay=0.8, lightning_threshold=0.5
    )
    case.score()
    errors = {
        "global_score": relative_error(case.scratch.global_score[:, :1], scratch.global_score),
        "lightning": relative_error(case.scratch.redundancy_logits[:, :1], scratch.redundancy_logits),
    }
    torch_kernels.combine(batch, scratch, pool_size=5, attention_weight=0.2, temperature=0.4, segment="block")
    case.combine()
    errors["score"] = relative_error(case.scratch.score[:, :1], scratch.score)
    # The choice is checked on equal scores, so that it must be equal to the last token.
    scratch.score.copy_(case.scratch.score[:, :1])
    torch_kernels.select(batch, scratch, window=case.settings.window, sink=0)
    case.select()
    same = torch.equal(case.scratch.keep_index[:, :1], scratch.keep_index)
    block, targets = list(one[0].block_table), list(one[0].target_blocks)
    num_keep = len(targets) * shapes.compress_block
    before = case.cache_v[:, block].flatten(1, 2)
    index = scratch.keep_index[:, 0].long().transpose(1, 2)[..., None].expand(-1, -1, -1, shapes.head_dim)
    wanted = before.gather(1, index)
    case.compact()
    moved = torch.equal(case.cache_v[:, targets].flatten(1, 2)[:, :num_keep], wanted)
    if not same or not moved or max(errors.values()) > 1e-3 or any(map(isnan, errors.values())):
        raise SystemExit(f"compression is wrong: same choice {same}, rows moved {moved}, errors {errors}")
    return errors


@contextmanager
def patched(module: ModuleType, name: str, launch: Launch) -> Iterator[None]:
    """A module's launch setting, for the time of a measurement."""
    before = getattr(module, name)
    setattr(module, name, launch)
    try:
        yield
    finally:
        setattr(module, name, before)


def compression(bench: Bench) -> None:
    """Each batch size with its stages; the settings are swept on the second largest."""
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


def _sweep(bench: Bench, case: Compression, num_requests: int, read_keys: float, move: float) -> None:
    sweeps: Sequence[tuple[str, ModuleType, str, Sequence[Launch], Callable[[], None], float]] = (
        ("lightning", triton_lightning, "LAUNCH", LIGHTNING_CANDIDATES, case.lightning, read_keys),
        ("both passes, first", triton_scores, "FIRST_PASS", PASS_CANDIDATES, case.attention, 2 * read_keys),
        ("both passes, second", triton_scores, "SECOND_PASS", PASS_CANDIDATES, case.attention, 2 * read_keys),
        ("compact", triton_compaction, "LAUNCH", COMPACT_CANDIDATES, case.compact, move),
        ("select", triton_select, "SELECT_LARGE", SELECT_CANDIDATES, case.select, move),
    )
    for name, module, setting, candidates, call, floor in sweeps:
        for launch in candidates:
            with patched(module, setting, launch):
                bench.row("compress-sweep", f"{num_requests} x {name}", launch_name(launch), call, floor)


def full_redundancy(bench: Bench) -> None:
    """The slow rule over all pairs, for one sequence, beside lightning alone."""
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

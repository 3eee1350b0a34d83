"""Random caches and ragged batches for the kernel tests, where they run, and their float64 answers.

Attention without a paged cache, to run a model's layers on their own.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.engine import kernel_reference as reference
from zlab.engine.compression import CompressionSettings
from zlab.engine.kernels.backends import find_backend
from zlab.engine.kernels.interface import KernelBackend
from zlab.engine.kernels.workspace import (
    CompressionBatch,
    CompressionRequest,
    CompressionShape,
    CompressionWorkspace,
    Scratch,
    lay_out,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Place:
    """A set of kernels on a device with a dtype."""

    kernels_name: str
    device: str
    dtype: torch.dtype

    @property
    def kernels(self) -> KernelBackend:
        return find_backend(torch.device(self.device), self.kernels_name)

    @property
    def tolerance(self) -> float:
        """Largest ||out - ref|| / ||ref|| of an output that is stored in the cache's dtype."""
        return 1e-5 if self.dtype == torch.float32 else 1e-2


def _places(interpreted: tuple[torch.dtype, ...]) -> list[pytest.param]:  # type: ignore[valid-type]
    """Here: torch on the CPU, or under the interpreter Triton; on a GPU: both, in every dtype."""
    if INTERPRETED:
        return [
            pytest.param(place, id=_name(place))
            for place in (Place("triton", "cpu", d) for d in interpreted)
        ]
    params = [
        pytest.param(place, id=_name(place))
        for place in (Place("torch", "cpu", torch.float32), Place("torch", "cpu", torch.bfloat16))
    ]
    marks = [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ]
    for name in ("torch", "triton"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            place = Place(name, "cuda", dtype)
            params.append(pytest.param(place, marks=marks, id=_name(place)))
    return params


def _name(place: Place) -> str:
    return f"{place.kernels_name}-{place.device}-{str(place.dtype).removeprefix('torch.')}"


# The interpreter multiplies the bit patterns of bfloat16, not its values, so float16 stands in for
# it there.
on_every_place = pytest.mark.parametrize("place", _places((torch.float32, torch.float16)))
# For what moves rows or counts tokens: the slow interpreter runs it in one dtype only.
on_one_dtype = pytest.mark.parametrize("place", _places((torch.float32,)))


@dataclass(frozen=True)
class Sizes:
    num_layers: int = 2
    num_blocks: int = 14
    block_size: int = 16
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    window: int = 8
    num_slots: int = 4


@dataclass(frozen=True)
class Case:
    """Tensors on a device; `requests` is what is compressed."""

    sizes: Sizes
    cache_k: torch.Tensor
    cache_v: torch.Tensor
    history: torch.Tensor
    window_queries: torch.Tensor
    requests: tuple[CompressionRequest, ...]
    workspace: CompressionWorkspace

    def laid_out(self) -> tuple[CompressionBatch, Scratch]:
        """The whole batch in one launch, every float of the workspace poisoned."""
        for buffer in self.workspace._floats.values():
            buffer.fill_(float("nan"))
        for buffer in self.workspace._ints.values():
            buffer.fill_(-7)
        batch = lay_out(list(self.requests), self.sizes.block_size, self.workspace.batch_storage)
        return batch, self.workspace.scratch(
            batch.num_requests, batch.max_blocks, batch.max_targets
        )


# First and repeat compressions, different lengths, and two requests that share blocks 3 and 1 and
# get fresh targets.
RAGGED = (
    CompressionRequest((5, 0, 9), (5, 0), query_slot=2, compressed_before=True, seed=11),
    CompressionRequest((3, 1, 7, 11, 2), (12, 13), query_slot=0, seed=-5),
    CompressionRequest((3, 1, 8, 4), (10, 6, 8), query_slot=3, compressed_before=False, seed=7),
)


def make_case(
    place: Place,
    sizes: Sizes = Sizes(),
    requests: tuple[CompressionRequest, ...] = RAGGED,
    seed: int = 0,
) -> Case:
    """Keys around a few directions, so that many pairs are alike and the redundancy rule has work
    to do.
    """
    rng = np.random.default_rng(seed)
    shape = (
        sizes.num_layers,
        sizes.num_blocks,
        sizes.block_size,
        sizes.num_kv_heads,
        sizes.head_dim,
    )
    directions = rng.standard_normal((5, sizes.head_dim)) * 1.5
    keys = directions[rng.integers(0, 5, shape[:4])] + rng.standard_normal(shape)
    queries = rng.standard_normal(
        (
            sizes.num_layers,
            sizes.num_slots,
            sizes.window,
            sizes.num_kv_heads * sizes.group,
            sizes.head_dim,
        )
    )
    longest = max(len(request.block_table) for request in requests)

    def tensor(values: reference.Float, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values).to(device=place.device, dtype=dtype)

    return Case(
        sizes=sizes,
        cache_k=tensor(keys, place.dtype),
        cache_v=tensor(rng.standard_normal(shape), place.dtype),
        history=tensor(rng.random(shape[:4]) * 0.05, torch.float32),
        window_queries=tensor(queries, place.dtype),
        requests=requests,
        workspace=CompressionWorkspace(
            CompressionShape(
                sizes.num_layers, sizes.num_kv_heads, sizes.group, sizes.window, sizes.block_size
            ),
            capacity_blocks=longest * len(requests),
            max_requests=len(requests),
            device=torch.device(place.device),
        ),
    )


def to_numpy(tensor: torch.Tensor) -> reference.Float:
    array: reference.Float = tensor.detach().cpu().double().numpy()
    return array


@dataclass(frozen=True)
class Expected:
    """Float64 answers for one request in one layer."""

    attention: reference.Float
    global_score: reference.Float
    lightning_logits: reference.Float
    full_logits: reference.Float
    score: reference.Float
    keep: reference.Bool


def expected(
    case: Case, layer: int, request: CompressionRequest, settings: CompressionSettings
) -> Expected:
    block_size = case.sizes.block_size
    table = list(request.block_table)
    keys = reference.gather_cache_order(to_numpy(case.cache_k)[layer], table)
    attention = reference.window_attention(
        to_numpy(case.window_queries)[layer, request.query_slot], keys
    )
    prior = (
        reference.gather_cache_order(to_numpy(case.history)[layer], table)
        if request.compressed_before
        else None
    )
    uses_history = settings.scorer in ("attention+global", "attention+global+lightning")
    global_score = reference.global_score(
        attention, prior if uses_history else None, block_size, settings.decay
    )
    pooled = (
        global_score
        if request.compressed_before
        else reference.pool(global_score, settings.pool_size)
    )
    num_tokens = keys.shape[1]
    lightning_logits = reference.redundancy_logits(keys, block_size, settings.threshold)
    full_logits = reference.redundancy_logits(keys, num_tokens, settings.threshold)
    if settings.scorer == "attention+global+lightning":
        redundant = reference.redundancy(lightning_logits, settings.temperature, block_size)
        score = reference.combined_score(pooled, redundant, settings.attention_weight)
    elif settings.scorer == "attention+full-redundancy":
        redundant = reference.redundancy(full_logits, settings.temperature, num_tokens)
        score = reference.combined_score(pooled, redundant, settings.attention_weight)
    else:
        score = pooled
    num_keep = len(request.target_blocks) * block_size
    keep = reference.keep_tokens(score, num_keep, settings.window, settings.sink)
    return Expected(attention, global_score, lightning_logits, full_logits, score, keep)


def assert_close(
    out: torch.Tensor | reference.Float, ref: reference.Float, tolerance: float, what: str
) -> None:
    """Relative error in the norm; NaN never passes."""
    values = to_numpy(out) if isinstance(out, torch.Tensor) else out
    assert values.shape == ref.shape, f"{what}: {values.shape} instead of {ref.shape}"
    error = float(np.linalg.norm(values - ref)) / max(float(np.linalg.norm(ref)), 1e-30)
    assert error <= tolerance, f"{what}: relative error {error:.2e} above {tolerance:.0e}"


def keep_flags(keep_index: torch.Tensor, num_tokens: int) -> reference.Bool:
    """Increasing indices `[..., k]` -> flags `[..., num_tokens]`."""
    index = keep_index.cpu().long()
    assert bool((index[..., 1:] > index[..., :-1]).all()), "kept indices must increase"
    flags = torch.zeros(*index.shape[:-1], num_tokens, dtype=torch.bool)
    flags.scatter_(-1, index, True)
    result: reference.Bool = flags.numpy()
    return result


class DenseContext:
    """Attention over plain lists of keys and values, a sequence at a time: nothing paged, nothing
    padded.
    """

    def __init__(self, num_layers: int, num_sequences: int) -> None:
        self._keys: list[list[list[torch.Tensor]]] = [
            [[] for _ in range(num_sequences)] for _ in range(num_layers)
        ]
        self._values: list[list[list[torch.Tensor]]] = [
            [[] for _ in range(num_sequences)] for _ in range(num_layers)
        ]
        self._rows: list[tuple[int, int]] = []

    def begin(self, rows: Sequence[tuple[int, int]]) -> None:
        """The next forward packs, in order, (sequence, number of its next tokens)."""
        self._rows = list(rows)

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        outputs = []
        start = 0
        for sequence, count in self._rows:
            part = slice(start, start + count)
            start += count
            self._keys[layer][sequence].append(keys[part])
            self._values[layer][sequence].append(values[part])
            outputs.append(
                causal_attention(
                    queries[part],
                    torch.cat(self._keys[layer][sequence]),
                    torch.cat(self._values[layer][sequence]),
                )
            )
        assert start == queries.shape[0]
        return torch.cat(outputs)


def causal_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """`queries [q, H_q, d]` are the last of `keys, values [t, H_kv, d]`."""
    num_queries, num_tokens = queries.shape[0], keys.shape[0]
    mask = torch.ones(num_queries, num_tokens, dtype=torch.bool, device=queries.device).tril(
        num_tokens - num_queries
    )
    group = queries.shape[1] // keys.shape[1]
    result = scaled_dot_product_attention(
        queries.transpose(0, 1),
        keys.repeat_interleave(group, dim=1).transpose(0, 1),
        values.repeat_interleave(group, dim=1).transpose(0, 1),
        attn_mask=mask,
    )
    return result.transpose(0, 1)

"""The Triton stages of a layer against plain torch: each kernel, and whole models through every
path of the steps.

Run in the interpreter by `test_model_interpreter.py`, on a GPU natively.
"""

from pathlib import Path

import pytest
import torch

from tests.engine.engine_cases import save_tiny
from tests.engine.kernel_cases import INTERPRETED, DenseContext, causal_attention
from tests.engine.test_model import load, random_ids
from zlab.engine.model import layers as torch_layers
from zlab.engine.model.decoder import Decoder
from zlab.engine.model.layers import (
    AttentionContext,
    HeadShape,
    StoredAttentionContext,
    StoreDestination,
)
from zlab.engine.sampling import torch_ops as draws

pytest.importorskip("triton")
fused = pytest.importorskip("zlab.engine.model.triton_layers")
fused_kernels = pytest.importorskip("zlab.engine.model.triton_layers")
products = pytest.importorskip("zlab.engine.model.triton_layers")
product_table = pytest.importorskip("zlab.engine.model.triton_layers")

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU and not INTERPRETED else "cpu")
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.bfloat16]
pytestmark = (
    []
    if INTERPRETED
    else [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")]
)


def values(seed: int, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=generator).to(dtype).to(DEVICE)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    tolerance = 1e-5 if found.dtype == torch.float32 else 1e-2
    distance = (found.double() - expected.double()).norm() / expected.double().norm()
    assert distance < tolerance, distance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "splits"), [(48, 0), (200, 3), (256, 1)])
def test_add_norm(dtype: torch.dtype, width: int, splits: int) -> None:
    delta = values(1, splits, 5, width) if splits else values(1, 5, width, dtype=dtype)
    residual, weight = values(2, 5, width, dtype=dtype), values(3, width, dtype=dtype)
    whole = delta.sum(dim=0) if splits else delta
    normed, total = torch_layers.add_norm(whole, residual, weight, 1e-5)
    found = fused_kernels.add_norm(delta, residual, weight, 1e-5)
    assert_near(found, normed)
    assert_near(residual, total)  # in place


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [0, 2])
def test_gated(dtype: torch.dtype, splits: int) -> None:
    whole = values(4, 3, 2 * 1100, dtype=dtype)
    parts = torch.stack([whole.float() * 0.25, whole.float() * 0.75]) if splits else whole
    assert_near(fused_kernels.gated(parts, dtype), torch_layers.gated(whole))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "head_dim", "normed", "biased", "splits"),
    [
        (8, 4, 16, True, False, 0),
        (9, 3, 12, False, True, 2),
        (4, 4, 64, False, False, 0),
        (2, 1, 16, True, True, 3),
    ],
)
def test_heads_are_normed_rotated_and_stored(
    dtype: torch.dtype,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    normed: bool,
    biased: bool,
    splits: int,
) -> None:
    shape = HeadShape(query_heads, kv_heads, head_dim, 1e-6)
    num_tokens, width = 5, (query_heads + 2 * kv_heads) * head_dim
    merged = values(5, num_tokens, width, dtype=dtype)
    parts = torch.stack([merged.float() / splits] * splits) if splits else merged
    bias = values(6, width, dtype=dtype) if biased else None
    norms = [values(seed, head_dim, dtype=dtype) if normed else None for seed in (7, 8)]
    table = values(9, 40, head_dim)
    positions = torch.tensor([3, 39, 0, 7, 8], device=DEVICE)
    whole = merged if bias is None else merged + bias
    queries, keys, kept = torch_layers.split_heads(
        whole, positions, table, norms[0], norms[1], shape
    )
    cache = torch.full(
        (2, 4, 8, kv_heads, head_dim), 77.0, dtype=dtype, device=DEVICE
    )  # K and V blocks of 8
    window = torch.full((3, 2, query_heads, head_dim), 77.0, dtype=dtype, device=DEVICE)
    slots = [17, -1, 0, 31, 9]
    rows = [-1, 5, 0, -1, 3]
    place = StoreDestination(
        torch.tensor(slots, device=DEVICE),
        cache[0],
        cache[1],
        torch.tensor(rows, device=DEVICE),
        window,
    )
    found = fused_kernels.store_heads(
        parts, bias, positions, table, norms[0], norms[1], shape, place, dtype
    )
    assert_near(found, queries)
    flat_k, flat_v, flat_window = (
        cache[0].flatten(0, 1),
        cache[1].flatten(0, 1),
        window.flatten(0, 1),
    )
    stored = [token for token, slot in enumerate(slots) if slot >= 0]
    taken = [slots[token] for token in stored]
    assert_near(flat_k[taken], keys[stored])
    assert_near(flat_v[taken], kept[stored])
    in_window = [token for token, row in enumerate(rows) if row >= 0]
    assert_near(flat_window[[rows[token] for token in in_window]], queries[in_window])
    untouched = [slot for slot in range(32) if slot not in slots]
    assert (flat_k[untouched] == 77.0).all()
    assert (flat_v[untouched] == 77.0).all()
    assert (flat_window[[row for row in range(6) if row not in rows]] == 77.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "splits", "is_gated"), [(3, 1, False), (37, 3, False), (20, 1, True)]
)
def test_skinny_gemm(dtype: torch.dtype, num_rows: int, splits: int, is_gated: bool) -> None:
    depth, columns = 192, 64
    config = products.ProductConfig(
        rows=16, columns=32, depth=32, splits=splits, num_warps=4, num_stages=2
    )
    inputs = values(10, num_rows, depth, dtype=dtype)
    weight = values(11, (2 if is_gated else 1) * columns, depth, dtype=dtype) * 0.1
    found = products.skinny_gemm(inputs, weight, config, gated=is_gated)
    whole = inputs.double() @ weight.double().T
    expected = torch_layers.gated(whole) if is_gated else whole
    if splits > 1:
        assert found.shape == (splits, num_rows, columns)
        found = found.sum(dim=0)
    assert_near(found, expected.to(found.dtype))


class TinyPaged:
    """Every token's keys and values in a block of their own, one sequence; lets the layer store."""

    def __init__(self, decoder: Decoder, num_slots: int) -> None:
        part = decoder.part
        sizes = (part.num_layers, num_slots, 1, part.num_kv_heads, part.head_dim)
        self.k = torch.full(sizes, float("nan"), device=DEVICE)
        self.v = torch.full(sizes, float("nan"), device=DEVICE)
        self.slots = torch.zeros(0, dtype=torch.int64, device=DEVICE)
        self.num_tokens = 0

    def begin(self, count: int) -> None:
        self.slots = torch.arange(self.num_tokens, self.num_tokens + count, device=DEVICE)
        self.num_tokens += count

    def destination(self, layer: int) -> StoreDestination:
        return StoreDestination(self.slots, self.k[layer], self.v[layer])

    def attend_stored(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        used = slice(0, self.num_tokens)
        return causal_attention(queries, self.k[layer, used, 0], self.v[layer, used, 0])

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        raise AssertionError("the layer should have stored")


@pytest.mark.parametrize(("kind", "tuned"), [("qwen3", True), ("qwen2", True), ("llama", False)])
def test_a_model_in_triton_equals_plain_torch(kind: str, tuned: bool, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path, num_hidden_layers=2)
    plain = load(tmp_path, device=DEVICE)
    part = plain.part
    config = products.ProductConfig(16, 16, 16, 1, 4, 1)
    split = products.ProductConfig(16, 16, 16, 2, 4, 1)
    shape = product_table.ProductShape
    choices = {
        shape(part.qkv_width, part.hidden_size, False, 16): split,
        shape(part.hidden_size, part.query_width, False, 16): split,
        shape(part.intermediate_size, part.hidden_size, True, 16): config,
        shape(part.hidden_size, part.intermediate_size, False, 16): config,
    }
    table = product_table.ProductTable(choices if tuned else {})
    triton_model = Decoder(
        plain.config,
        plain.weights,
        make_steps=lambda heads, turns: fused.TritonSteps(heads, turns, products=table),
    )
    dense, stored, second = DenseContext(2, 1), TinyPaged(plain, 9), DenseContext(2, 1)
    assert isinstance(stored, StoredAttentionContext)
    assert not isinstance(dense, StoredAttentionContext)
    ids = random_ids(12, 9).to(DEVICE)
    for start, end in ((0, 5), (5, 6), (6, 9)):
        dense.begin([(0, end - start)])
        second.begin([(0, end - start)])
        stored.begin(end - start)
        positions = torch.arange(start, end, device=DEVICE)
        expected = plain.forward(ids[start:end], positions, dense)
        contexts: list[AttentionContext] = [stored, second]
        for context in contexts:
            assert_near(triton_model.forward(ids[start:end], positions, context), expected)
    rows = torch.tensor([4], device=DEVICE)
    dense.begin([(0, 5)])
    second.begin([(0, 5)])
    last = (ids[:5], torch.arange(9, 14, device=DEVICE))
    assert_near(triton_model.forward(*last, second, rows), plain.forward(*last, dense, rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_pass_finds_logits_that_are_not_finite(dtype: torch.dtype) -> None:
    """Wherever they lie in a row; and what is drawn of such a row is a token all the same."""
    fused_draw = pytest.importorskip("zlab.engine.sampling.triton_ops")
    logits = values(14, 7, 5003, dtype=dtype)
    assert fused_draw.checked_most_probable(logits).tolist() == logits.argmax(dim=-1).tolist()
    for row, place in enumerate((0, 4095, 4096, 5002)):
        logits[row, place] = (float("nan"), float("inf"), float("-inf"))[row % 3]
    logits[4] = float("nan")
    logits[5] = float("-inf")
    wanted = draws.checked_most_probable(logits).tolist()
    assert wanted == [-1] * 6 + [int(logits[6].argmax())]
    assert fused_draw.checked_most_probable(logits).tolist() == wanted
    ones = torch.ones(7, device=DEVICE)
    seeds = torch.arange(7, device=DEVICE)
    for drawn in (
        fused_draw.most_probable(logits),
        fused_draw.draw(logits, ones, ones, seeds, seeds),
        fused_draw.draw(logits, ones, ones, seeds, seeds, torch.full_like(ones, float("nan"))),
    ):
        assert bool(((drawn >= 0) & (drawn < 5003)).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_drawing_in_one_pass_draws_the_same_tokens(dtype: torch.dtype) -> None:
    fused_draw = pytest.importorskip("zlab.engine.sampling.triton_ops")
    logits = values(13, 6, 5003, dtype=dtype)
    assert fused_draw.most_probable(logits).tolist() == logits.argmax(dim=-1).tolist()
    ties = torch.zeros(2, 9000, dtype=dtype, device=DEVICE)
    ties[0, [7, 8191, 8999]] = 1.0
    assert fused_draw.most_probable(ties).tolist() == [7, 0]
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 4.0], device=DEVICE)
    noise = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0], device=DEVICE)
    seeds = torch.tensor([0, 1, 2**62 + 5, 3, 2**33, 5], device=DEVICE)
    for threshold in (None, torch.full((6,), 0.5, device=DEVICE)):
        for place in (0, 1, 100_000):
            settings = (logits, temperature, noise, seeds, torch.full_like(seeds, place), threshold)
            assert fused_draw.draw(*settings).tolist() == draws.draw(*settings).tolist()

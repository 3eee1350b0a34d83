"""Scoring kernels against the float64 reference: ragged batches, first and repeat compressions, poisoned outputs."""

import numpy as np
import pytest
import torch

from engine.kernels import reference
from engine.kernels.batch import CompressionRequest
from engine.kernels.hashing import LAYER_STEP, TOKEN_STEP, mix
from engine.scorers import CompressionSettings
from tests.engine.kernel_cases import (
    RAGGED,
    Case,
    Place,
    Sizes,
    assert_close,
    expected,
    make_case,
    on_every_place,
    to_numpy,
)

# Scores are float32 whatever the cache's dtype: the stored 16-bit keys are what the reference sees too.
SCORE_TOLERANCE = 1e-5
# Sums of similarities of both signs: the absolute error of a sum against the size of its terms.
LOGIT_TOLERANCE = 3e-5

SIZES = (
    pytest.param(Sizes(), id="grouped"),
    pytest.param(Sizes(group=1, head_dim=24, num_layers=1), id="no-groups-odd-dim"),
    pytest.param(Sizes(group=3, block_size=32, num_kv_heads=1, window=5, head_dim=64), id="group-of-three"),
    pytest.param(Sizes(block_size=128, num_layers=1, num_kv_heads=1, window=16, head_dim=32), id="large-blocks"),
)


def check_rows(case: Case, found: torch.Tensor, wanted: list[list[reference.Float]], tolerance: float) -> None:
    """Every entry of every request right, everything behind a request's end untouched."""
    for layer in range(case.sizes.num_layers):
        for row, request in enumerate(case.requests):
            num_tokens = len(request.block_table) * case.sizes.block_size
            assert_close(found[layer, row, :, :num_tokens], wanted[layer][row], tolerance, f"layer {layer} row {row}")
            assert bool(found[layer, row, :, num_tokens:].isnan().all()), "padding was written"


@on_every_place
@pytest.mark.parametrize("sizes", SIZES)
def test_attention_global_score_and_lightning(place: Place, sizes: Sizes) -> None:
    case = make_case(place, sizes)
    settings = CompressionSettings(window=sizes.window)
    batch, scratch = case.laid_out()
    place.kernels.attention_score(
        case.cache_k, case.window_queries, batch, scratch,
        history=case.history, decay=settings.decay, lightning_threshold=settings.threshold,
    )  # fmt: skip
    answers = [[expected(case, layer, r, settings) for r in case.requests] for layer in range(sizes.num_layers)]
    check_rows(case, scratch.global_score, [[a.global_score for a in row] for row in answers], SCORE_TOLERANCE)
    check_rows(case, scratch.redundancy_logits, [[a.lightning_logits for a in row] for row in answers], LOGIT_TOLERANCE)


@on_every_place
def test_attention_without_history_is_the_plain_window_score(place: Place) -> None:
    case = make_case(place)
    settings = CompressionSettings(window=case.sizes.window)
    batch, scratch = case.laid_out()
    place.kernels.attention_score(
        case.cache_k, case.window_queries, batch, scratch, history=None, decay=0.8, lightning_threshold=None
    )
    wanted = [
        [expected(case, layer, r, settings).attention for r in case.requests] for layer in range(case.sizes.num_layers)
    ]
    check_rows(case, scratch.global_score, wanted, SCORE_TOLERANCE)
    assert bool(scratch.redundancy_logits.isnan().all()), "no lightning was asked for"


@on_every_place
@pytest.mark.parametrize("full", [False, True], ids=["lightning", "full"])
def test_redundancy_alone(place: Place, full: bool) -> None:
    case = make_case(place, seed=3)
    settings = CompressionSettings(window=case.sizes.window, threshold=0.6)
    batch, scratch = case.laid_out()
    run = place.kernels.full_redundancy if full else place.kernels.lightning_redundancy
    run(case.cache_k, batch, scratch, threshold=settings.threshold)
    answers = [[expected(case, layer, r, settings) for r in case.requests] for layer in range(case.sizes.num_layers)]
    wanted = [[a.full_logits if full else a.lightning_logits for a in row] for row in answers]
    check_rows(case, scratch.redundancy_logits, wanted, LOGIT_TOLERANCE)


@on_every_place
def test_identical_and_zero_keys(place: Place) -> None:
    case = make_case(place, Sizes(num_layers=1, num_kv_heads=1))
    case.cache_k[:] = 1.0
    case.cache_k[:, 11] = 0.0
    batch, scratch = case.laid_out()
    place.kernels.lightning_redundancy(case.cache_k, batch, scratch, threshold=0.5)
    same = np.array([15.0] * 14 + [14.0, 0.0])
    found = to_numpy(scratch.redundancy_logits)[0, 1, 0]
    np.testing.assert_allclose(found[:16], same, atol=1e-4)
    np.testing.assert_allclose(found[48:64], 0.0, atol=0.0)  # block 11 is the fourth of the second request


@on_every_place
@pytest.mark.parametrize("segment", [None, "block", "sequence"])
@pytest.mark.parametrize("pool_size", [1, 5])
def test_combine(place: Place, segment: str | None, pool_size: int) -> None:
    case = make_case(place)
    batch, scratch = case.laid_out()
    generator = torch.Generator().manual_seed(1)
    scratch.global_score.copy_(torch.rand(scratch.global_score.shape, generator=generator))
    scratch.redundancy_logits.copy_(torch.randn(scratch.redundancy_logits.shape, generator=generator) * 3)
    scratch.score.fill_(float("nan"))
    place.kernels.combine(
        batch, scratch, pool_size=pool_size, attention_weight=0.3, temperature=0.4,
        segment=segment,  # type: ignore[arg-type]
    )  # fmt: skip
    wanted: list[list[reference.Float]] = []
    for layer in range(case.sizes.num_layers):
        wanted.append([])
        for row, request in enumerate(case.requests):
            num_tokens = len(request.block_table) * case.sizes.block_size
            score = to_numpy(scratch.global_score)[layer, row, :, :num_tokens]
            if not request.compressed_before:
                score = reference.pool(score, pool_size)
            if segment is not None:
                length = case.sizes.block_size if segment == "block" else num_tokens
                logits = to_numpy(scratch.redundancy_logits)[layer, row, :, :num_tokens]
                score = reference.combined_score(score, reference.redundancy(logits, 0.4, length), 0.3)
            wanted[layer].append(score)
    check_rows(case, scratch.score, wanted, 1e-6)


@on_every_place
def test_random_score_depends_on_seed_layer_head_and_place_alone(place: Place) -> None:
    case = make_case(place)
    batch, scratch = case.laid_out()
    place.kernels.random_score(batch, scratch)
    every = scratch.score.cpu().clone()
    assert bool(((every >= 0) & (every < 1)).all())
    flat = every.flatten(0, 2)
    assert torch.unique(flat, dim=0).shape[0] == flat.shape[0], "two rows are alike"
    assert abs(float(every.mean()) - 0.5) < 0.05
    alone = make_case(place, requests=(RAGGED[2],))
    lone_batch, lone_scratch = alone.laid_out()
    place.kernels.random_score(lone_batch, lone_scratch)
    assert torch.equal(lone_scratch.score.cpu()[:, 0], every[:, 2, :, : lone_scratch.score.shape[3]])


@on_every_place
def test_random_score_has_the_same_bits_everywhere(place: Place) -> None:
    case = make_case(place, requests=(CompressionRequest((0, 1), (0,), query_slot=0, seed=-123456789),))
    batch, scratch = case.laid_out()
    place.kernels.random_score(batch, scratch)
    found = (scratch.score.cpu()[1, 0, 1, :3] * 2**24).int().tolist()
    assert found == FIRST_RANDOM


def _first_random() -> list[int]:
    """The same bits from the host's hash: layer 1, KV head 1 of 2, seed -123456789, places 0, 1, 2."""
    state = mix(-123456789 + mix(3 * LAYER_STEP))
    return [mix(state + token * TOKEN_STEP) >> 8 for token in range(3)]


FIRST_RANDOM = _first_random()

"""Scoring kernels against the float64 reference: ragged batches, first and repeat compressions,
poisoned outputs.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engine import kernel_reference as reference
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
from zlab.engine.compression import CompressionSettings, scoring_rotation
from zlab.engine.kernels.interface import AttentionOptions, DistinctWeights
from zlab.engine.kernels.torch_backend import LAYER_STEP, TOKEN_STEP, mix, pack, unpack
from zlab.engine.kernels.workspace import CompressionRequest
from zlab.engine.model.decoder import rotation_table
from zlab.engine.model.spec import Rope

# Scores are float32 whatever the cache's dtype: the stored 16-bit keys are what the reference sees
# too.
SCORE_TOLERANCE = 1e-5
# Sums of similarities of both signs: the absolute error of a sum against the size of its terms.
LOGIT_TOLERANCE = 3e-5

SIZES = (
    pytest.param(Sizes(), id="grouped"),
    pytest.param(Sizes(group=1, head_dim=24, num_layers=1), id="no-groups-odd-dim"),
    pytest.param(
        Sizes(group=3, block_size=32, num_kv_heads=1, window=5, head_dim=64), id="group-of-three"
    ),
    pytest.param(
        Sizes(block_size=128, num_layers=1, num_kv_heads=1, window=16, head_dim=32),
        id="large-blocks",
    ),
)


def check_rows(
    case: Case, found: torch.Tensor, wanted: list[list[reference.Float]], tolerance: float
) -> None:
    """Every entry of every request right, everything behind a request's end untouched."""
    for layer in range(case.sizes.num_layers):
        for row, request in enumerate(case.requests):
            num_tokens = len(request.block_table) * case.sizes.block_size
            assert_close(
                found[layer, row, :, :num_tokens],
                wanted[layer][row],
                tolerance,
                f"layer {layer} row {row}",
            )
            assert bool(found[layer, row, :, num_tokens:].isnan().all()), "padding was written"


@on_every_place
@pytest.mark.parametrize("sizes", SIZES)
def test_attention_global_score_and_lightning(place: Place, sizes: Sizes) -> None:
    case = make_case(place, sizes)
    settings = CompressionSettings(window=sizes.window)
    batch, scratch = case.laid_out()
    place.kernels.attention_score(
        case.cache_k, case.window_queries, batch, scratch,
        case.history, AttentionOptions(settings.decay, settings.threshold),
    )  # fmt: skip
    answers = [
        [expected(case, layer, r, settings) for r in case.requests]
        for layer in range(sizes.num_layers)
    ]
    check_rows(
        case,
        scratch.global_score,
        [[a.global_score for a in row] for row in answers],
        SCORE_TOLERANCE,
    )
    check_rows(
        case,
        scratch.redundancy_logits,
        [[a.lightning_logits for a in row] for row in answers],
        LOGIT_TOLERANCE,
    )


@on_every_place
def test_attention_without_history_is_the_plain_window_score(place: Place) -> None:
    case = make_case(place)
    settings = CompressionSettings(window=case.sizes.window)
    batch, scratch = case.laid_out()
    place.kernels.attention_score(
        case.cache_k,
        case.window_queries,
        batch,
        scratch,
        None,
        AttentionOptions(),
    )
    wanted = [
        [expected(case, layer, r, settings).attention for r in case.requests]
        for layer in range(case.sizes.num_layers)
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
    answers = [
        [expected(case, layer, r, settings) for r in case.requests]
        for layer in range(case.sizes.num_layers)
    ]
    wanted = [[a.full_logits if full else a.lightning_logits for a in row] for row in answers]
    check_rows(case, scratch.redundancy_logits, wanted, LOGIT_TOLERANCE)


def packed_case(place: Place, sizes: Sizes) -> tuple[Case, torch.Tensor, reference.Int]:
    """A case whose history words hold positions, the scores alone, and the positions.

    The third request was compressed to two of its four blocks.
    """
    again = replace(RAGGED[2], compressed_before=True, carried_blocks=2)
    case = make_case(place, sizes, (*RAGGED[:2], again))
    steps = np.random.default_rng(1).integers(1, 4, case.history.shape)
    positions = steps.cumsum(axis=2) + 100 * np.arange(sizes.num_blocks)[:, None, None]
    scores = case.history.bfloat16().float()
    words = pack(torch.from_numpy(positions).to(place.device), scores)
    return replace(case, history=words), scores, positions


def carried_of(case: Case, layer: int, row: int, values: reference.Int) -> reference.Int:
    """What a compression has left of `values [layers, blocks, b, H]`: `[H, carried]`."""
    request = case.requests[row]
    carried = request.num_carried(case.sizes.block_size)
    rows = values[layer][list(request.block_table)]
    ordered: reference.Int = rows.reshape(-1, rows.shape[-1])[:carried].T
    return ordered


def positions_of(case: Case, layer: int, row: int, positions: reference.Int) -> reference.Int:
    """Those of the carried tokens, and then one after the other."""
    carried = carried_of(case, layer, row, positions)
    num_new = len(case.requests[row].block_table) * case.sizes.block_size - carried.shape[1]
    last = carried[:, -1:] if carried.shape[1] else np.full((len(carried), 1), -1)
    return np.concatenate([carried, last + 1 + np.arange(num_new)], axis=1)


@on_every_place
@pytest.mark.parametrize("sizes", SIZES)
def test_positions_and_mean_attention_travel_in_one_word(place: Place, sizes: Sizes) -> None:
    case, scores, positions = packed_case(place, sizes)
    batch, scratch = case.laid_out()
    place.kernels.attention_score(
        case.cache_k, case.window_queries, batch, scratch,
        case.history, AttentionOptions(decay=0.5, mean_heads=True, with_positions=True),
    )  # fmt: skip
    for layer, row in np.ndindex(sizes.num_layers, len(case.requests)):
        request = case.requests[row]
        table = list(request.block_table)
        keys = reference.gather_cache_order(to_numpy(case.cache_k)[layer], table)
        queries = to_numpy(case.window_queries)[layer, request.query_slot]
        wanted = reference.causal_weights(queries, keys).mean(axis=(1, 2))
        carried = request.num_carried(sizes.block_size)
        prior = reference.gather_cache_order(to_numpy(scores)[layer], table)[:, :carried]
        wanted[:, :carried] = np.maximum(wanted[:, :carried], 0.5 * prior)
        found = scratch.global_score[layer, row]
        found_positions, found_scores = unpack(found[:, : keys.shape[1]])
        np.testing.assert_array_equal(
            found_positions.cpu().numpy(), positions_of(case, layer, row, positions)
        )
        # A word has eight significant bits of the score.
        np.testing.assert_allclose(to_numpy(found_scores), wanted, rtol=2**-8, atol=1e-8)
        assert bool(found[:, keys.shape[1] :].isnan().all()), "padding was written"


@on_every_place
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("undo", [True, False], ids=["undone", "as-cached"])
def test_distinct_score(place: Place, sizes: Sizes, undo: bool) -> None:
    case, _, positions = packed_case(place, sizes)
    rope = rotation_table(Rope(), sizes.head_dim, 600, torch.device(place.device))
    rotation = scoring_rotation(rope) if undo else None
    weights = DistinctWeights(
        pool_size=5, attention_weight=0.3, key_weight=0.3, value_weight=0.4, copy_weight=0.7,
        sharpness=0.5,
    )  # fmt: skip
    batch, scratch = case.laid_out()
    attention = np.random.default_rng(2).random((sizes.num_kv_heads, 5 * sizes.block_size)) * 0.05
    score = torch.from_numpy(attention).to(place.device, torch.bfloat16).float()
    wanted: list[list[reference.Float]] = [[] for _ in range(sizes.num_layers)]
    for layer, row in np.ndindex(sizes.num_layers, len(case.requests)):
        table = list(case.requests[row].block_table)
        keys = reference.gather_cache_order(to_numpy(case.cache_k)[layer], table)
        values = reference.gather_cache_order(to_numpy(case.cache_v)[layer], table)
        places = positions_of(case, layer, row, positions)
        of_row = score[:, : keys.shape[1]]
        words = pack(torch.from_numpy(places).to(place.device), of_row)
        scratch.global_score[layer, row, :, : keys.shape[1]] = words
        pooled = to_numpy(of_row)
        if not case.requests[row].compressed_before:
            pooled = reference.pool(pooled, 5)
        lengths = np.linalg.norm(keys, axis=-1)
        plain = keys if rotation is None else reference.unrotated(keys, places, to_numpy(rotation))
        unit = plain / lengths[..., None]
        copies = reference.latest_copies(
            unit,
            max(64, sizes.block_size),
            lambda x: to_numpy(torch.from_numpy(x).to(case.cache_k.dtype)),
        )
        common = reference.standardised(reference.likeness(unit))
        common += 0.7 * reference.standardised(copies)
        common -= 0.3 * reference.standardised(lengths, 0.01)
        common -= 0.4 * reference.standardised(np.linalg.norm(values, axis=-1), 0.01)
        redundant = reference.softmax(0.5 * reference.standardised(common))
        wanted[layer].append(reference.combined_score(pooled, redundant, 0.3))
    place.kernels.distinct_score(case.cache_k, case.cache_v, rotation, batch, scratch, weights)
    # Centred keys are rounded to the cache's dtype: to the other side where float32 and float64
    # differ about the middle.
    exact = case.cache_k.dtype == torch.float32
    check_rows(case, scratch.score, wanted, SCORE_TOLERANCE if exact else 1e-3)


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
    np.testing.assert_allclose(
        found[48:64], 0.0, atol=0.0
    )  # block 11 is the fourth of the second request


@on_every_place
@pytest.mark.parametrize("segment", [None, "block", "sequence"])
@pytest.mark.parametrize("pool_size", [1, 5])
def test_combine(place: Place, segment: str | None, pool_size: int) -> None:
    case = make_case(place)
    batch, scratch = case.laid_out()
    generator = torch.Generator().manual_seed(1)
    scratch.global_score.copy_(torch.rand(scratch.global_score.shape, generator=generator))
    scratch.redundancy_logits.copy_(
        torch.randn(scratch.redundancy_logits.shape, generator=generator) * 3
    )
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
                score = reference.combined_score(
                    score, reference.redundancy(logits, 0.4, length), 0.3
                )
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
    assert torch.equal(
        lone_scratch.score.cpu()[:, 0], every[:, 2, :, : lone_scratch.score.shape[3]]
    )


@on_every_place
def test_random_score_has_the_same_bits_everywhere(place: Place) -> None:
    case = make_case(
        place, requests=(CompressionRequest((0, 1), (0,), query_slot=0, seed=-123456789),)
    )
    batch, scratch = case.laid_out()
    place.kernels.random_score(batch, scratch)
    found = (scratch.score.cpu()[1, 0, 1, :3] * 2**24).int().tolist()
    assert found == FIRST_RANDOM


def _first_random() -> list[int]:
    """The same bits from the host's hash: layer 1, KV head 1 of 2, seed -123456789, places 0, 1,
    2.
    """
    state = mix(-123456789 + mix(3 * LAYER_STEP))
    return [mix(state + token * TOKEN_STEP) >> 8 for token in range(3)]


FIRST_RANDOM = _first_random()

"""Selection with its tie rule, and compaction that is safe in place, against the float64 reference."""

import numpy as np
import pytest
import torch

from engine.kernels import reference
from engine.kernels.batch import CompressionRequest
from tests.engine.kernel_cases import (
    RAGGED,
    Case,
    Place,
    Sizes,
    keep_flags,
    make_case,
    on_one_dtype,
    to_numpy,
)

# Few different values: ties everywhere, among them zeros of both signs.
TIED = torch.tensor([-1.5, -0.0, 0.0, 0.25, 0.2500001, 3.0, float("-inf")])


def select(case: Case, place: Place, scores: torch.Tensor, window: int, sink: int) -> list[list[reference.Bool]]:
    """Keep flags per layer and request; what lies behind a request's end must not have been written."""
    batch, scratch = case.laid_out()
    scratch.score.copy_(scores)
    place.kernels.select(batch, scratch, window=window, sink=sink)
    block_size = case.sizes.block_size
    flags: list[list[reference.Bool]] = []
    for layer in range(case.sizes.num_layers):
        flags.append([])
        for row, request in enumerate(case.requests):
            num_keep = len(request.target_blocks) * block_size
            index = scratch.keep_index[layer, row]
            assert bool((index[:, num_keep:] == -7).all()), "padding was written"
            flags[layer].append(keep_flags(index[:, :num_keep], len(request.block_table) * block_size))
    return flags


@on_one_dtype
@pytest.mark.parametrize("tied", [True, False], ids=["ties", "distinct"])
@pytest.mark.parametrize("sink", [0, 3])
def test_selection_is_exact(place: Place, tied: bool, sink: int) -> None:
    case = make_case(place)
    generator = torch.Generator().manual_seed(sink + 10 * tied)
    shape = case.laid_out()[1].score.shape
    scores = TIED[torch.randint(0, len(TIED), shape, generator=generator)] if tied else torch.randn(shape)
    found = select(case, place, scores, window=5, sink=sink)
    for layer in range(case.sizes.num_layers):
        for row, request in enumerate(case.requests):
            num_tokens = len(request.block_table) * case.sizes.block_size
            num_keep = len(request.target_blocks) * case.sizes.block_size
            wanted = reference.keep_tokens(to_numpy(scores)[layer, row, :, :num_tokens], num_keep, 5, sink)
            np.testing.assert_array_equal(found[layer][row], wanted)


@on_one_dtype
@pytest.mark.parametrize("num_blocks", [5, 17], ids=["larger-tile", "several-tiles"])
def test_selection_of_many_tokens(place: Place, num_blocks: int) -> None:
    """More tokens than the small tile, and more than fit the registers of a program at all."""
    sizes = Sizes(num_layers=1, num_blocks=20, block_size=256, num_kv_heads=2, head_dim=16)
    request = CompressionRequest(tuple(range(num_blocks)), (0, 1, 2), query_slot=0)
    case = make_case(place, sizes, (request,))
    generator = torch.Generator().manual_seed(num_blocks)
    scores = torch.randn(case.laid_out()[1].score.shape, generator=generator).round(decimals=1)
    found = select(case, place, scores, window=16, sink=4)
    wanted = reference.keep_tokens(to_numpy(scores)[0, 0], 768, 16, 4)
    np.testing.assert_array_equal(found[0][0], wanted)


@on_one_dtype
def test_all_equal_keeps_the_latest_and_nan_breaks_nothing(place: Place) -> None:
    case = make_case(place)
    shape = case.laid_out()[1].score.shape
    for value in (0.0, float("nan")):
        for flags in select(case, place, torch.full(shape, value), window=4, sink=2)[0]:
            num_tokens = flags.shape[1]
            num_keep = int(flags[0].sum())
            assert flags[:, :2].all()
            assert flags[:, num_tokens - num_keep + 2 :].all()


@on_one_dtype
def test_nan_counts_as_minus_infinity(place: Place) -> None:
    """NaN of both signs between numbers, infinities and ties: the same choice as with -inf in its place."""
    case = make_case(place)
    shape = case.laid_out()[1].score.shape
    values = torch.tensor([float("nan"), -float("nan"), float("-inf"), float("inf"), -2.0, 0.5, 1.0])
    scores = values[torch.randint(0, len(values), shape, generator=torch.Generator().manual_seed(6))]
    plain = scores.masked_fill(scores.isnan(), float("-inf"))
    for with_nan, without in zip(
        select(case, place, scores, window=4, sink=2), select(case, place, plain, window=4, sink=2), strict=True
    ):
        for found, wanted in zip(with_nan, without, strict=True):
            np.testing.assert_array_equal(found, wanted)


def snapshot(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return case.cache_k.cpu().clone(), case.cache_v.cpu().clone(), case.history.cpu().clone()


@on_one_dtype
@pytest.mark.parametrize("with_history", [True, False], ids=["history", "no-history"])
@pytest.mark.parametrize("block_size", [16, 128])
def test_compaction_moves_whole_rows_and_nothing_else(place: Place, with_history: bool, block_size: int) -> None:
    case = make_case(place, Sizes(block_size=block_size, head_dim=24, num_layers=2))
    before_k, before_v, before_history = snapshot(case)
    batch, scratch = case.laid_out()
    generator = torch.Generator().manual_seed(4)
    scratch.score.copy_(torch.randn(scratch.score.shape, generator=generator))
    scratch.global_score.copy_(torch.rand(scratch.score.shape, generator=generator))
    place.kernels.select(batch, scratch, window=8, sink=0)
    history = case.history if with_history else None
    place.kernels.compact(case.cache_k, case.cache_v, history, batch, scratch)
    wanted_k, wanted_v, wanted_history = before_k.clone(), before_v.clone(), before_history.clone()
    for row, request in enumerate(case.requests):
        num_keep = len(request.target_blocks) * block_size
        table = torch.tensor(request.block_table)
        targets = list(request.target_blocks)
        for layer in range(case.sizes.num_layers):
            for head in range(case.sizes.num_kv_heads):
                source = scratch.keep_index[layer, row, head, :num_keep].cpu().long()
                for before, wanted in ((before_k, wanted_k), (before_v, wanted_v)):
                    rows = before[layer, table][:, :, head].flatten(0, 1)[source]
                    wanted[layer, targets, :, head] = rows.view(-1, block_size, rows.shape[-1])
                if with_history:
                    score = scratch.global_score[layer, row, head].cpu()[source]
                    wanted_history[layer, targets, :, head] = score.view(-1, block_size)
    after_k, after_v, after_history = snapshot(case)
    assert torch.equal(after_k, wanted_k), "K, or a block that is no target, differs"
    assert torch.equal(after_v, wanted_v), "V, or a block that is no target, differs"
    assert torch.equal(after_history, wanted_history), "history differs"


@on_one_dtype
@pytest.mark.parametrize("pattern", ["first-dropped", "alternate", "one-late"])
def test_in_place_equals_out_of_place(place: Place, pattern: str) -> None:
    """The same choice once into own blocks and once into fresh ones: a race would show in the first."""
    sizes = Sizes(num_layers=2, block_size=64, num_blocks=14, head_dim=32)
    table = (3, 1, 7, 11)
    own = make_case(place, sizes, (CompressionRequest(table, table[:3], query_slot=0),))
    fresh = make_case(place, sizes, (CompressionRequest(table, (0, 5, 9), query_slot=0),))
    num_tokens = len(table) * sizes.block_size
    scores = torch.arange(num_tokens, dtype=torch.float32)
    if pattern == "alternate":
        scores = torch.where(torch.arange(num_tokens) % 4 == 1, -scores, scores)
    elif pattern == "one-late":
        scores = -scores
    for case in (own, fresh):
        batch, scratch = case.laid_out()
        scratch.score.copy_(scores.expand(scratch.score.shape))
        scratch.global_score.copy_(torch.rand(scratch.score.shape, generator=torch.Generator().manual_seed(2)))
        place.kernels.select(batch, scratch, window=1, sink=0)
        place.kernels.compact(case.cache_k, case.cache_v, case.history, batch, scratch)
    for name in ("cache_k", "cache_v", "history"):
        in_place = getattr(own, name)[:, list(table[:3])]
        out_of_place = getattr(fresh, name)[:, [0, 5, 9]]
        assert torch.equal(in_place, out_of_place), name
    assert torch.equal(own.cache_k[:, 11], make_case(place, sizes, RAGGED[:1]).cache_k[:, 11]), "a freed block changed"

"""A whole compression, every scorer, against the float64 reference and for its promises."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.compression_pipeline import compress, warm_up
from engine.kernels import reference
from engine.kernels.batch import CompressionRequest
from engine.kernels.workspace import CompressionShape, CompressionWorkspace
from engine.scorers import CompressionSettings
from tests.engine.kernel_cases import (
    RAGGED,
    Case,
    Place,
    Sizes,
    assert_close,
    expected,
    make_case,
    on_one_dtype,
    to_numpy,
)

WITH_SCORES = ("attention", "attention+global", "attention+full-redundancy", "attention+global+lightning")
HAND = Sizes(num_layers=1, num_blocks=3, block_size=4, num_kv_heads=1, group=2, head_dim=2, window=2, num_slots=1)


def run(case: Case, place: Place, settings: CompressionSettings, requests: tuple[CompressionRequest, ...] = ()) -> None:
    compress(
        case.cache_k, case.cache_v, case.history, case.window_queries, requests or case.requests, settings,
        case.workspace, kernels=place.kernels,
    )  # fmt: skip


@on_one_dtype
@pytest.mark.parametrize("scorer", WITH_SCORES)
@pytest.mark.parametrize("sink", [0, 3])
def test_compression_equals_the_reference(place: Place, scorer: str, sink: int) -> None:
    case = make_case(place, seed=sink)
    before = make_case(place, seed=sink)
    settings = CompressionSettings(scorer=scorer, window=8, sink=sink)
    run(case, place, settings)
    untouched = torch.ones(case.sizes.num_blocks, dtype=torch.bool)
    for request in case.requests:
        targets = list(request.target_blocks)
        untouched[targets] = False
        for layer in range(case.sizes.num_layers):
            answer = expected(before, layer, request, settings)
            for name in ("cache_k", "cache_v"):
                rows = reference.gather_cache_order(to_numpy(getattr(before, name))[layer], list(request.block_table))
                wanted = reference.kept_rows(rows, answer.keep)
                found = reference.gather_cache_order(to_numpy(getattr(case, name))[layer], targets)
                np.testing.assert_array_equal(found, wanted, err_msg=f"{name} of {request}")
            found = reference.gather_cache_order(to_numpy(case.history)[layer], targets)
            if "global" in scorer:
                assert_close(found, reference.kept_rows(answer.global_score, answer.keep), 1e-5, "history")
            else:
                same = reference.gather_cache_order(to_numpy(before.history)[layer], targets)
                np.testing.assert_array_equal(found, same, err_msg="a scorer without history wrote one")
    for name in ("cache_k", "cache_v", "history"):
        assert torch.equal(getattr(case, name)[:, untouched], getattr(before, name)[:, untouched]), name


@on_one_dtype
def test_recent_keeps_sink_and_latest(place: Place) -> None:
    case, before = make_case(place), make_case(place)
    run(case, place, CompressionSettings(scorer="recent", window=8, sink=5))
    for request in case.requests:
        num_keep = len(request.target_blocks) * case.sizes.block_size
        rows = before.cache_k[:, list(request.block_table)].flatten(1, 2)
        wanted = torch.cat([rows[:, :5], rows[:, rows.shape[1] - num_keep + 5 :]], dim=1)
        assert torch.equal(case.cache_k[:, list(request.target_blocks)].flatten(1, 2), wanted)


@on_one_dtype
def test_random_is_the_same_alone_and_in_a_batch_and_differs_by_seed(place: Place) -> None:
    settings = CompressionSettings(scorer="random", window=8)
    together, alone, other = (make_case(place) for _ in range(3))
    run(together, place, settings)
    run(alone, place, settings, (RAGGED[1],))
    run(other, place, settings, (replace(RAGGED[1], seed=99),))
    targets = list(RAGGED[1].target_blocks)
    assert torch.equal(together.cache_k[:, targets], alone.cache_k[:, targets])
    assert not torch.equal(other.cache_k[:, targets], alone.cache_k[:, targets])


@on_one_dtype
def test_a_batch_cut_into_launches_gives_the_same(place: Place) -> None:
    settings = CompressionSettings(window=8)
    whole, cut = make_case(place), make_case(place)
    run(whole, place, settings)
    sizes = cut.sizes
    small = CompressionWorkspace(
        CompressionShape(sizes.num_layers, sizes.num_kv_heads, sizes.group, sizes.window, sizes.block_size),
        capacity_blocks=6, max_requests=2, device=torch.device(place.device),
    )  # fmt: skip
    assert [len(launch) for launch in small.slices(list(cut.requests))] == [1, 1, 1]
    run(replace(cut, workspace=small), place, settings)
    for name in ("cache_k", "cache_v", "history"):
        assert torch.equal(getattr(whole, name), getattr(cut, name)), name


@on_one_dtype
def test_hand_example_and_its_repeat(place: Place) -> None:
    """Section 7 of the design page: tokens 1, 3, 6, 7 stay, first and (with a history) again."""
    for repeat in (False, True):
        request = CompressionRequest((2, 0), (2,), query_slot=0, compressed_before=repeat)
        case = make_case(replace(place, dtype=torch.float32), HAND, (request,))
        rows = [(1, 0), (0.8, 0.6), (0, 1), (-1, 0), (0.6, 0.8), (1, 0.1), (0.2, 1), (0.9, 0.5)]
        keys = torch.tensor(rows, dtype=torch.float32, device=place.device)
        case.cache_k[0, 2, :, 0], case.cache_k[0, 0, :, 0] = keys[:4], keys[4:]
        case.history[0, 2, :, 0] = torch.tensor([0.2, 0.05, 0.3, 0.01], device=place.device)
        queries = torch.tensor([[(1, 0), (0.5, 0.5)], [(0, 1), (1, -1)]], device=place.device)
        case.window_queries[0, 0] = queries
        run(case, replace(place, dtype=torch.float32), CompressionSettings(window=2))
        assert torch.equal(case.cache_k[0, 2, :, 0], keys[[1, 3, 6, 7]])
        score = to_numpy(case.history)[0, 2, :, 0]
        np.testing.assert_allclose(score, [0.1534277540, 0.0779177764, 0.1633309521, 0.0752310255], rtol=1e-6)


@on_one_dtype
def test_warm_up_runs_every_length(place: Place) -> None:
    case = make_case(place, Sizes(num_layers=1))
    warm_up(
        case.cache_k, case.cache_v, case.history, case.window_queries, CompressionSettings(window=8), case.workspace,
        num_target_blocks=2, kernels=place.kernels,
    )  # fmt: skip
    assert bool(case.cache_k.isfinite().all())

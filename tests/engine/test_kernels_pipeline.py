"""A whole compression, every scorer, against the float64 reference and for its promises.

The float64 reference: the hand-checkable example of the design page digit by digit, and its rules
one by one.

The Triton kernels on the CPU: the kernel tests once more.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine import kernel_reference as reference
from tests.engine.interpreter import passed_in_the_interpreter
from tests.engine.kernel_cases import (
    INTERPRETED,
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
from zlab.engine.compression import CompressionSettings, compress, warm_up
from zlab.engine.kernels.workspace import CompressionRequest, CompressionShape, CompressionWorkspace

WITH_SCORES = (
    "attention",
    "attention+global",
    "attention+full-redundancy",
    "attention+global+lightning",
)
HAND = Sizes(
    num_layers=1,
    num_blocks=3,
    block_size=4,
    num_kv_heads=1,
    group=2,
    head_dim=2,
    window=2,
    num_slots=1,
)


def run(
    case: Case,
    place: Place,
    settings: CompressionSettings,
    requests: tuple[CompressionRequest, ...] = (),
) -> None:
    compress(
        case.cache_k,
        case.cache_v,
        case.history,
        case.window_queries,
        requests or case.requests,
        settings,
        case.workspace,
        kernels=place.kernels,
    )


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
                rows = reference.gather_cache_order(
                    to_numpy(getattr(before, name))[layer], list(request.block_table)
                )
                wanted = reference.kept_rows(rows, answer.keep)
                found = reference.gather_cache_order(to_numpy(getattr(case, name))[layer], targets)
                np.testing.assert_array_equal(found, wanted, err_msg=f"{name} of {request}")
            found = reference.gather_cache_order(to_numpy(case.history)[layer], targets)
            if "global" in scorer:
                assert_close(
                    found, reference.kept_rows(answer.global_score, answer.keep), 1e-5, "history"
                )
            else:
                same = reference.gather_cache_order(to_numpy(before.history)[layer], targets)
                np.testing.assert_array_equal(
                    found, same, err_msg="a scorer without history wrote one"
                )
    for name in ("cache_k", "cache_v", "history"):
        assert torch.equal(
            getattr(case, name)[:, untouched], getattr(before, name)[:, untouched]
        ), name


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
        CompressionShape(
            sizes.num_layers, sizes.num_kv_heads, sizes.group, sizes.window, sizes.block_size
        ),
        capacity_blocks=6,
        max_requests=2,
        device=torch.device(place.device),
    )
    assert [len(launch) for launch in small.slices(list(cut.requests))] == [1, 1, 1]
    run(replace(cut, workspace=small), place, settings)
    for name in ("cache_k", "cache_v"):  # copies of the tokens that are kept
        assert torch.equal(getattr(whole, name), getattr(cut, name)), name
    assert_close(cut.history, to_numpy(whole.history), 1e-6, "history")


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
        np.testing.assert_allclose(
            score, [0.1534277540, 0.0779177764, 0.1633309521, 0.0752310255], rtol=1e-6
        )


@on_one_dtype
def test_warm_up_runs_every_length(place: Place) -> None:
    case = make_case(place, Sizes(num_layers=1))
    warm_up(
        case.cache_k,
        case.cache_v,
        case.history,
        case.window_queries,
        CompressionSettings(window=8),
        case.workspace,
        num_target_blocks=2,
        kernels=place.kernels,
    )
    assert bool(case.cache_k.isfinite().all())


KEYS = np.array([[(1, 0), (0.8, 0.6), (0, 1), (-1, 0), (0.6, 0.8), (1, 0.1), (0.2, 1), (0.9, 0.5)]])
QUERIES = np.array([[(1, 0), (0.5, 0.5)], [(0, 1), (1, -1)]])  # [w, H_q, d]
ATTENTION = [0.2164919263, 0.1534277540, 0.1580262097, 0.0779177764]
ATTENTION += [0.1577321906, 0.2086418591, 0.1633309521, 0.0752310255]
POOLED = [0.2164919263] * 3 + [0.2086418591] * 5
LOGITS = [-0.2, -0.8, 0, -1.8, 2.4917682216, 1.8874818390, 1.1948484937, 0]
REDUNDANCY = [0.0633820716, 0.0435618183, 0.0718212964, 0.0233169611]
REDUNDANCY += [0.3408819321, 0.2336576916, 0.1515569326, 0.0718212964]
SCORE = [-0.0074072720, 0.0084489307, -0.0141586518, 0.0230748030, -0.2309771739, -0.1451977815]
DIGITS = 5e-11


def test_hand_example_to_the_last_digit() -> None:
    attention = reference.window_attention(QUERIES, KEYS)
    pooled = reference.pool(reference.global_score(attention, None, 4, 0.8), 5)
    logits = reference.redundancy_logits(KEYS, 4, 0.5)
    redundant = reference.redundancy(logits, 0.4, 4)
    score = reference.combined_score(pooled, redundant, 0.2)
    for name, found, wanted in (
        ("A", attention, ATTENTION),
        ("P", pooled, POOLED),
        ("L", logits, LOGITS),
        ("R", redundant, REDUNDANCY),
        ("score", score[:, :6], SCORE),
    ):
        np.testing.assert_allclose(found[0], wanted, rtol=0, atol=DIGITS, err_msg=name)
    assert np.flatnonzero(reference.keep_tokens(score, 4, 2)[0]).tolist() == [1, 3, 6, 7]


def test_hand_example_with_history() -> None:
    attention = reference.window_attention(QUERIES, KEYS)
    prior = np.array(
        [[0.2, 0.05, 0.3, 0.01, 9, 9, 9, 9]]
    )  # what stands behind the carried tokens must not count
    score = reference.global_score(attention, prior, 4, 0.8)
    wanted = [*ATTENTION[:2], 0.24, *ATTENTION[3:]]
    np.testing.assert_allclose(score[0], wanted, rtol=0, atol=DIGITS)
    redundant = reference.redundancy(reference.redundancy_logits(KEYS, 4, 0.5), 0.4, 4)
    keep = reference.keep_tokens(reference.combined_score(score, redundant, 0.2), 4, 2)
    assert np.flatnonzero(keep[0]).tolist() == [1, 3, 6, 7]


def test_redundancy_of_identical_keys_of_a_lone_pair_and_of_orthogonal_keys() -> None:
    same = np.tile(np.array([[3.0, 4.0]]), (1, 6, 1)).reshape(1, 6, 2)
    np.testing.assert_allclose(
        reference.redundancy_logits(same, 6, 0.5)[0], [5, 5, 5, 5, 4, 0], atol=1e-12
    )
    pair = np.eye(4)[None].copy()
    pair[0, 2] = pair[0, 0]
    np.testing.assert_allclose(reference.redundancy_logits(pair, 4, 0.5)[0], 0.0, atol=1e-12)
    orthogonal = reference.redundancy(reference.redundancy_logits(np.eye(4)[None], 4, 0.5), 0.4, 4)
    np.testing.assert_allclose(orthogonal[0], 0.25)


def test_threshold_is_strict() -> None:
    keys = np.array([[(1.0, 0.0), (0.5, np.sqrt(0.75))]])
    similarity = (keys[0] / np.linalg.norm(keys[0], axis=1, keepdims=True) @ keys[0].T)[0, 1]
    assert reference.redundancy_logits(keys, 2, similarity + 1e-9)[0] == pytest.approx([0.5, 0.5])
    assert reference.redundancy_logits(keys, 2, similarity - 1e-9)[0] == pytest.approx([0.0, 0.0])


def test_a_zero_key_is_similar_to_nothing() -> None:
    keys = np.array([[(0.0, 0.0), (1.0, 0.0), (1.0, 0.0)]])
    np.testing.assert_allclose(reference.redundancy_logits(keys, 3, 0.5)[0], 0.0)


@given(
    scores=st.lists(st.sampled_from([-1.5, 0.0, 0.25, 0.25000001, 2.0]), min_size=6, max_size=24),
    window=st.integers(1, 3),
    sink=st.integers(0, 2),
    data=st.data(),
)
def test_keep_is_exact_holds_window_and_sink_and_prefers_later_of_equals(
    scores: list[float], window: int, sink: int, data: st.DataObject
) -> None:
    num_keep = data.draw(st.integers(window + sink, len(scores)))
    keep = reference.keep_tokens(np.array([scores]), num_keep, window, sink)[0]
    assert keep.sum() == num_keep
    assert keep[len(scores) - window :].all()
    assert keep[:sink].all()
    free = range(sink, len(scores) - window)
    for dropped in (t for t in free if not keep[t]):
        for kept in (t for t in free if keep[t]):
            assert (scores[kept], kept) > (scores[dropped], dropped)


THRESHOLDS = "mixed_filters or made_to_be_hard or ties_by_hand or without_any_token or same_bits"
MODULES = (
    ("kernels_scores",),
    ("kernels",),
    ("kernels_pipeline",),
    ("sampler", "-k", f"{THRESHOLDS} or few_passes or nan_counts or a_mask"),
    ("vectors",),
)


@pytest.mark.skipif(INTERPRETED, reason="is the outer process of the interpreter's tests")
@pytest.mark.parametrize("module", MODULES, ids=[module[0] for module in MODULES])
def test_triton_kernels_in_the_interpreter(module: tuple[str, ...]) -> None:
    name, *chosen = module
    assert "passed" in passed_in_the_interpreter(f"tests/engine/test_{name}.py", *chosen)

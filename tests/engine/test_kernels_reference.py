"""The float64 reference: the hand-checkable example of the design page digit by digit, and its rules one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels import reference

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
    prior = np.array([[0.2, 0.05, 0.3, 0.01, 9, 9, 9, 9]])  # what stands behind the carried tokens must not count
    score = reference.global_score(attention, prior, 4, 0.8)
    wanted = [*ATTENTION[:2], 0.24, *ATTENTION[3:]]
    np.testing.assert_allclose(score[0], wanted, rtol=0, atol=DIGITS)
    redundant = reference.redundancy(reference.redundancy_logits(KEYS, 4, 0.5), 0.4, 4)
    keep = reference.keep_tokens(reference.combined_score(score, redundant, 0.2), 4, 2)
    assert np.flatnonzero(keep[0]).tolist() == [1, 3, 6, 7]


def test_redundancy_of_identical_keys_of_a_lone_pair_and_of_orthogonal_keys() -> None:
    same = np.tile(np.array([[3.0, 4.0]]), (1, 6, 1)).reshape(1, 6, 2)
    np.testing.assert_allclose(reference.redundancy_logits(same, 6, 0.5)[0], [5, 5, 5, 5, 4, 0], atol=1e-12)
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

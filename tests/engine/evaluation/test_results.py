"""The statistics of an evaluation, against scipy, simulation and cases by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from zlab.engine.evaluation import results
from zlab.engine.evaluation.results import Answered, EvaluatedColumn, ModelOutput, compare, figures


def column(name: str = "a", samples: int = 1) -> EvaluatedColumn:
    return EvaluatedColumn(name, f"{name}-policy", "recent", 0.0, samples, 128)


def booleans(*values: int) -> np.ndarray:
    return np.array(values, bool)[:, None]


@pytest.mark.parametrize(("right", "trials"), [(0, 10), (7, 10), (10, 10), (470, 480)])
def test_wilson_is_scipys(right: int, trials: int) -> None:
    expected = stats.binomtest(right, trials).proportion_ci(method="wilson")
    assert results.wilson(right / trials, trials) == pytest.approx((expected.low, expected.high))


def test_samples_that_agree_count_once_and_independent_ones_each() -> None:
    rng = np.random.default_rng(1)
    alike = np.repeat(rng.integers(0, 2, 100), 1) * 8
    apart = rng.binomial(8, 0.5, 100)
    trials = np.full(100, 8)
    once = results.wilson(alike.sum() / 800, 100)
    each = results.wilson(apart.sum() / 800, 800)
    found = results.pass_share(alike, trials)
    assert (found.low, found.high) == pytest.approx(once, abs=0.002)
    found = results.pass_share(apart, trials)
    assert found.high - found.low == pytest.approx(each[1] - each[0], rel=0.15)


def test_paired_counts_and_exact_mcnemar() -> None:
    own = booleans(1, 1, 1, 0, 0, 1, 1, 1, 1)
    baseline = booleans(1, 0, 0, 1, 0, 0, 0, 0, 1)
    found = compare(own, baseline)
    assert (found.gained, found.lost) == (5, 1)
    assert found.p_value == pytest.approx(2 * (1 + 6) / 2**6)
    assert found.difference.value == pytest.approx(4 / 9)
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(7 / 3)
    assert found.ratio.low == pytest.approx(1 + found.difference.low / (3 / 9))


def test_equal_columns_differ_by_nothing_with_an_interval_around_it() -> None:
    for right in (booleans(*[1] * 50), booleans(*[1, 0] * 25)):
        found = compare(right, right)
        assert (found.difference.value, found.p_value) == (0.0, 1.0)
        assert found.difference.low <= 0.0 <= found.difference.high
    assert found.difference.low == pytest.approx(-found.difference.high)
    everything = compare(booleans(*[1] * 50), booleans(*[1] * 50)).difference
    assert -0.1 < everything.low < 0.0  # 50 of 50 do not show that both are perfect
    assert compare(booleans(0, 0), booleans(0, 0)).ratio is None


def test_the_interval_of_a_difference_covers_the_truth() -> None:
    rng = np.random.default_rng(7)
    covered, runs = 0, 400
    for _ in range(runs):
        easy = rng.random(120)
        baseline = (easy < 0.9)[:, None]
        own = ((easy < 0.8) | (rng.random(120) < 0.1))[:, None]
        truth = 0.8 + 0.2 * 0.1 - 0.9
        found = compare(own, baseline).difference
        covered += found.low <= truth <= found.high
    assert 0.92 <= covered / runs <= 0.99


def test_clustered_pairs_that_differ_once_give_mcnemars_chi_square() -> None:
    own = np.zeros((40, 2), bool)
    baseline = np.zeros((40, 2), bool)
    own[:14, 0] = True  # gained 14, lost 5
    baseline[14:19, 0] = True
    found = compare(own, baseline)
    assert found.p_value == pytest.approx(stats.chi2.sf((14 - 5) ** 2 / (14 + 5), 1))
    assert (found.gained, found.lost) == (14, 5)


def test_length_ratio_and_its_interval() -> None:
    rng = np.random.default_rng(3)
    other = rng.uniform(500, 1500, 400)
    own = other * 1.3 + rng.normal(0, 50, 400)
    found = results.length_ratio(own, other)
    assert found.low < 1.3 < found.high
    assert found.high - found.low < 0.03
    assert results.length_ratio(other, other).as_list() == [1.0, 1.0]


def test_figures_of_a_column_and_of_each_source() -> None:
    def output(problem: int, sample: int, tokens: int, finish: str) -> ModelOutput:
        return ModelOutput(problem, sample, "", tokens, finish, compressions=2)

    outputs = [
        output(2, 0, 30, "stop"),
        output(0, 1, 20, "length"),
        output(0, 0, 10, "stop"),
        output(1, 0, 40, "stop"),
        output(2, 1, 50, "stop"),
        output(1, 1, 60, "length"),
    ]
    right = [True, False, True, True, True, False]
    answered = Answered(column("a", 2), outputs, right, wall_s=2.0, timed_tokens=210)
    baseline = Answered(
        column("b", 2),
        [output(one.problem, one.sample, 2 * one.tokens, "stop") for one in outputs],
        [True] * 6,
    )
    found = figures(answered, [0, 0, 1], ["x", "y"], baseline)
    assert found["pass_at_1"] == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert (found["outputs"], found["right"], found["problems"]) == (6, 4, 3)
    assert found["share_at_cap"] == pytest.approx(2 / 6)
    assert found["mean_output_tokens"] == 35
    assert found["tokens_per_s"] == 105
    assert found["compressions_per_output"] == 2
    assert found["of_baseline"]["length_ratio"] == 0.5
    assert found["of_baseline"]["lost"] == 2
    assert found["data"]["y"]["pass_at_1"] == 1.0
    assert found["data"]["x"]["of_baseline"]["difference"] == -0.5
    assert figures(baseline, [0, 0, 1], ["x", "y"], None)["of_baseline"] is None


def test_one_problem_has_an_unbounded_difference_of_samples() -> None:
    found = compare(np.array([[True, False]]), np.array([[True, True]]))
    assert found.difference.low == -math.inf

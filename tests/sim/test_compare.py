"""Comparisons: figures, ratios and intervals against what can be worked out by hand."""

from pathlib import Path

import numpy as np
import pytest

from policies.core.errors import ConfigError
from policies.spec import PolicyError
from sim.compare import (
    LATENCIES,
    T_QUANTILES,
    _distributions,
    _resampled,
    _student,
    compare,
    recording_folders,
)
from sim.errors import SimError
from sim.replay import replay
from sim.scenario import Scenario
from traces.metrics import distribution
from traces.run import load_run
from traces.synthetic import ReasoningShape, reasoning

SHAPE = ReasoningShape(6, mu=7.0, sigma=0.5, samples=2, cap=3000)
SMALL = Scenario(kv_blocks=30)
POLICIES = ("full-kv", "hybrid:budget.tokens=512")


def test_students_t_by_hand() -> None:
    # mean 3, standard deviation sqrt(2.5); 2.776 is t(0.975) with 4 degrees of freedom
    found = _student([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776 * 2.5**0.5 / 5**0.5
    assert found.value == 3.0
    assert found.low == pytest.approx(3.0 - half)
    assert found.high == pytest.approx(3.0 + half)


def test_the_quantiles_fall_towards_the_normal_one() -> None:
    assert list(T_QUANTILES) == sorted(T_QUANTILES, reverse=True)
    assert len(T_QUANTILES) == 30
    assert _student([0.0, 1.0] * 20).high == pytest.approx(0.5 + 1.960 * np.std([0.0, 1.0] * 20, ddof=1) / 40**0.5)


def test_t_intervals_cover_the_mean_as_often_as_they_say() -> None:
    rng = np.random.Generator(np.random.PCG64(1))
    found = [_student(row.tolist()) for row in rng.normal(10.0, 3.0, (4000, 4))]
    inside = np.mean([row.low is not None and row.high is not None and row.low <= 10 <= row.high for row in found])
    assert 0.94 <= inside <= 0.96


def test_percentiles_of_rows_are_those_of_the_summary() -> None:
    rng = np.random.Generator(np.random.PCG64(2))
    rows = rng.exponential(1.0, (20, 37))
    rows[rng.random(rows.shape) < 0.3] = np.nan
    rows[3] = np.nan
    found = _distributions(rows)
    for place, row in enumerate(rows):
        for mark, value in distribution(row).items():
            expected = np.nan if value is None else value
            np.testing.assert_allclose(found[mark][place], expected, rtol=1e-12)


def test_samples_are_the_same_requests_for_every_policy() -> None:
    values = np.arange(50, dtype=np.float64)
    one, other = _resampled("x", values), _resampled("x", 3 * values)
    for key, drawn in one.items():
        np.testing.assert_allclose(other[key], 3 * drawn)


def test_several_workloads_give_means_and_ratios_within_each() -> None:
    workloads = [reasoning(SHAPE, seed) for seed in range(3)]
    first, other = compare(workloads, POLICIES, SMALL)
    speeds = [[replay(w, p, limits=SMALL.set_up().limits).summary["tokens_per_s"] for w in workloads] for p in POLICIES]
    assert [row.policy for row in (first, other)] == list(POLICIES)
    assert other.figures["tokens_per_s"] == _student(speeds[1])
    logs = _student([float(np.log(b / a)) for a, b in zip(*speeds, strict=True)])
    assert logs.value is not None
    assert other.ratios["tokens_per_s"].value == pytest.approx(np.exp(logs.value))
    assert first.ratios["tokens_per_s"].value == 1.0
    assert "compressions" not in other.ratios  # full-kv has none: there is nothing to divide by


def test_one_workload_gives_its_own_figures_and_intervals_of_latencies() -> None:
    workload = reasoning(SHAPE, 0)
    first, other = compare([workload], POLICIES, SMALL)
    run = replay(workload, POLICIES[1], limits=SMALL.set_up().limits)
    assert other.figures["tokens_per_s"].value == run.summary["tokens_per_s"]
    assert other.figures["tokens_per_s"].low is None
    for name in LATENCIES:
        for mark, value in run.summary[name].items():
            estimate = other.figures[f"{name}_{mark}"]
            assert estimate.value == value
            assert estimate.low is not None
            assert estimate.high is not None
            assert estimate.low <= value <= estimate.high
    ratio = other.ratios["e2e_s_mean"]
    expected = run.summary["e2e_s"]["mean"] / first.summaries[0]["e2e_s"]["mean"]
    assert ratio.value == pytest.approx(expected)
    assert ratio.low is not None
    assert ratio.low < expected


def test_recordings_lie_in_folders_named_after_the_policies(tmp_path: Path) -> None:
    compared = compare([reasoning(SHAPE, 0)], POLICIES, SMALL, tmp_path)
    folders = recording_folders(POLICIES, 1, tmp_path)
    assert folders == [[str(tmp_path / "full-kv")], [str(tmp_path / "hybrid_budget.tokens=512")]]
    for row, (folder,) in zip(compared, folders, strict=True):
        assert folder is not None
        assert load_run(folder).summary["digest"] == row.summaries[0]["digest"]
    alike = recording_folders(["a:b", "a/b"], 2, tmp_path)
    assert len({folder for row in alike for folder in row}) == 4


def test_what_cannot_start_is_told_before_anything_runs(tmp_path: Path) -> None:
    workload = reasoning(SHAPE, 0)
    for policies, error, words in (
        ((), SimError, "at least one workload and one policy"),
        (("hybrid", "hybrid"), SimError, "a policy is named twice: hybrid, hybrid"),
        (("full-kv", "hybrd"), PolicyError, "did you mean 'hybrid'"),
    ):
        with pytest.raises(error, match=words):
            compare([workload], policies, SMALL, tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="does not fit in a pool of 5"):
        compare([workload], ("hybrid",), Scenario(kv_blocks=5))

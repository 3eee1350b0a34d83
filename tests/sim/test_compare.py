"""Comparisons: figures, ratios and intervals against what can be worked out by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from zlab.policies.core.plan import ConfigError
from zlab.policies.spec import PolicyError
from zlab.sim.compare import (
    LATENCIES,
    _distributions,
    _resampled,
    _student,
    break_even,
    compare,
    recording_folders,
)
from zlab.sim.replay import Scenario, replay
from zlab.sim.specs import SimError
from zlab.traces.metrics import MARKS, distribution
from zlab.traces.recording import load_run
from zlab.traces.synthetic import ReasoningShape, reasoning
from zlab.traces.workload import TraceRequest, Workload, WorkloadMeta

SHAPE = ReasoningShape(6, mu=7.0, sigma=0.5, samples=2, cap=3000)
SMALL = Scenario(kv_blocks=30)
POLICIES = ("full-kv", "hybrid:budget.tokens=512")


def test_students_t_by_hand() -> None:
    # mean 3, standard deviation sqrt(2.5); 2.776 is t(0.975) with 4 degrees of freedom
    found = _student([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776 * 2.5**0.5 / 5**0.5
    assert found.value == 3.0
    assert found.low == pytest.approx(3.0 - half, rel=1e-3)
    assert found.high == pytest.approx(3.0 + half, rel=1e-3)


def test_the_interval_of_two_workloads_is_wide() -> None:
    # 12.706 is t(0.975) with 1 degree of freedom; the standard deviation of 0 and 1 is sqrt(0.5)
    found = _student([0.0, 1.0])
    assert found.high == pytest.approx(0.5 + 12.706 * 0.5**0.5 / 2**0.5, rel=1e-4)


def test_t_intervals_cover_the_mean_as_often_as_they_say() -> None:
    rng = np.random.Generator(np.random.PCG64(1))
    found = [_student(row.tolist()) for row in rng.normal(10.0, 3.0, (4000, 4))]
    inside = np.mean(
        [
            row.low is not None and row.high is not None and row.low <= 10 <= row.high
            for row in found
        ]
    )
    assert 0.94 <= inside <= 0.96


def test_percentiles_of_rows_are_those_of_the_summary() -> None:
    rng = np.random.Generator(np.random.PCG64(2))
    rows = rng.exponential(1.0, (20, 37))
    rows[rng.random(rows.shape) < 0.3] = np.nan
    rows[3] = np.nan
    found = dict(zip(MARKS, _distributions(rows, -1), strict=True))
    for place, row in enumerate(rows):
        for mark, value in distribution(row).items():
            expected = np.nan if value is None else value
            np.testing.assert_allclose(found[mark][place], expected, rtol=1e-12)


def test_a_single_request_has_an_interval_without_width() -> None:
    for key, drawn in _resampled("x", np.array([3.0])).items():
        np.testing.assert_array_equal(drawn, 3.0, err_msg=key)


def test_samples_without_a_value_are_nan_and_no_warning() -> None:
    for drawn in _resampled("x", np.array([np.nan, np.nan, np.nan])).values():
        assert np.isnan(drawn).all()


def test_samples_are_the_same_requests_for_every_policy() -> None:
    values = np.arange(50, dtype=np.float64)
    one, other = _resampled("x", values), _resampled("x", 3 * values)
    for key, drawn in one.items():
        np.testing.assert_allclose(other[key], 3 * drawn)


def test_several_workloads_give_means_and_ratios_within_each() -> None:
    workloads = [reasoning(SHAPE, seed) for seed in range(3)]
    first, other = compare(workloads, POLICIES, SMALL)
    speeds = [
        [replay(w, p, limits=SMALL.set_up().limits).summary["tokens_per_s"] for w in workloads]
        for p in POLICIES
    ]
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


CROWD = Workload(
    [
        TraceRequest(id=str(n), prompt_tokens=32, output_tokens=600, max_tokens=600)
        for n in range(24)
    ],
    WorkloadMeta(name="crowd"),
)
CROWDED = Scenario(kv_blocks=160, block_size=16, max_running=24)


def finished_per_s(policy: str, multiplier: float) -> float:
    scenario = replace(CROWDED, policy=policy, length_multiplier=multiplier)
    return float(scenario.run(CROWD).summary["requests_per_s"])


def test_at_the_break_even_multiplier_both_finish_as_many_requests() -> None:
    policy, first = "constrained:tokens=64,window=8", finished_per_s("full-kv", 1.0)
    found = break_even(CROWD, policy, first, CROWDED)
    assert found is not None
    assert not found.bound
    assert 1.1 < found.multiplier < 16
    assert finished_per_s(policy, 0.97 * found.multiplier) > first
    assert finished_per_s(policy, 1.03 * found.multiplier) < first
    assert found.runs <= 12
    assert found.words == f"{found.multiplier:.2f}x"


def test_break_even_has_bounds_and_none_without_compression() -> None:
    assert break_even(CROWD, "full-kv", 1.0, CROWDED) is None
    policy = "constrained:tokens=64,window=8"
    below = break_even(CROWD, policy, 1e6, CROWDED)
    assert below is not None
    assert (below.bound, below.words) == ("below", "below 1x")
    above = break_even(CROWD, policy, 1e-9, CROWDED)
    assert above is not None
    assert (above.bound, above.words) == ("above", "above 16x")


def test_outputs_beyond_the_models_positions_are_not_cut_in_the_search() -> None:
    """Requests that are cut short would look finished, and the policy better than it is."""
    base = replace(CROWDED, max_model_len=700)
    policy, first = "constrained:tokens=64,window=8", finished_per_s("full-kv", 1.0)
    short, long = (break_even(CROWD, policy, first, one) for one in (base, CROWDED))
    assert short is not None
    assert long is not None
    assert short.multiplier == pytest.approx(long.multiplier, rel=0.03)

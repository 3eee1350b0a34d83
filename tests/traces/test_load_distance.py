"""How far two loads are apart: the distance against a count by hand and its own theory, and what is said of it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.load_distance import Distance, LoadDifference, compare_loads, ks_distance
from traces.workload import TraceError, TraceRequest, Workload, WorkloadMeta

VALUES = st.lists(st.integers(0, 6), min_size=1, max_size=12)


@given(VALUES, VALUES)
def test_the_distance_is_the_largest_gap_between_the_shares_below(one: list[int], other: list[int]) -> None:
    shares = [
        abs(sum(value <= mark for value in one) / len(one) - sum(value <= mark for value in other) / len(other))
        for mark in range(7)
    ]
    assert ks_distance(np.array(one, float), np.array(other, float)).value == pytest.approx(max(shares))


def test_chance_is_how_often_it_happens() -> None:
    """Over many pairs from one distribution, one in a hundred is a distance that chance gives once in a hundred."""
    rng = np.random.default_rng(1)
    found = [ks_distance(rng.normal(size=60), rng.normal(size=90)).chance for _ in range(2000)]
    for level in (0.01, 0.05, 0.1):
        assert np.mean(np.array(found) <= level) == pytest.approx(level, abs=3 * (level * (1 - level) / 2000) ** 0.5)


@pytest.mark.parametrize(
    ("effective", "distance", "chance"),
    [(5000, 0.0192, 0.05), (5000, 0.02302, 0.01)],  # 1.358 and 1.628 over the root: any table of the limit
)
def test_chance_agrees_with_the_table(effective: int, distance: float, chance: float) -> None:
    size = 2 * effective
    one = np.arange(size, dtype=float)
    other = one + distance * size  # shifted by that share of all ranks
    assert ks_distance(one, other).value == pytest.approx(distance, abs=1.01 / size)
    assert ks_distance(one, other).chance == pytest.approx(chance, rel=0.1)


def test_an_empty_sample_has_no_distance() -> None:
    with pytest.raises(TraceError, match="values on both sides"):
        ks_distance(np.array([]), np.array([1.0]))


def load(seed: int, count: int = 400, prompt: int = 100, rate: float = 2.0, shared: float = 0.5) -> Workload:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count))
    rows = []
    for place, length in enumerate(rng.integers(prompt // 2, prompt * 3 // 2, count)):
        blocks = int(length) // 16
        ids = tuple(range(blocks)) if rng.random() < shared else tuple(1000 * (place + 1) + at for at in range(blocks))
        rows.append(TraceRequest(str(place), int(length), 20 + place % 50, float(times[place]), prefix_ids=ids))
    return Workload(rows, WorkloadMeta("made", block_size=16, block_id_kind="chained", last_block="full"))


def by_name(found: list[LoadDifference]) -> dict[str, LoadDifference]:
    return {each.name: each for each in found}


def test_two_days_of_the_same_load_are_alike() -> None:
    found = compare_loads(load(1), load(2))
    assert [each.name for each in found] == [
        "prompt tokens", "output tokens", "gap between arrivals, s", "arrivals a second", "prompt blocks that repeat",
    ]  # fmt: skip
    assert all(each.is_alike for each in found), [each.words for each in found]


def test_what_has_changed_is_said_in_words() -> None:
    found = by_name(compare_loads(load(1), load(2, prompt=300, rate=5.0, shared=0.1)))
    prompts = found["prompt tokens"]
    assert not prompts.is_alike
    assert prompts.words.startswith("prompt tokens: another distribution, longer, half above ")
    assert isinstance(prompts.distance, Distance)
    assert prompts.distance.value > 0.5
    assert found["output tokens"].is_alike
    assert "narrower" in found["gap between arrivals, s"].words
    assert "faster" in found["arrivals a second"].words
    assert found["arrivals a second"].now == pytest.approx(5.0, rel=0.15)
    assert not found["prompt blocks that repeat"].is_alike


def test_a_small_sample_is_no_proof() -> None:
    few = compare_loads(load(1), load(2, count=3, prompt=130))
    assert by_name(few)["prompt tokens"].is_alike


def test_what_one_side_lacks_is_left_out() -> None:
    batch = Workload([replace(row, arrival_s=None, prefix_ids=None) for row in load(1)], WorkloadMeta("batch"))
    names = [each.name for each in compare_loads(batch, batch)]
    assert names == ["prompt tokens", "output tokens"]
    unknown = Workload([replace(row, output_tokens=None) for row in batch], WorkloadMeta("open"))
    assert by_name(compare_loads(batch, unknown))["output tokens"].words == "output tokens: not known on both sides"

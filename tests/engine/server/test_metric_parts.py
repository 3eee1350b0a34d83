"""The parts that metrics are made of: gaps between tokens, buckets, and the table that documents them."""

import numpy as np
import pytest

from engine.server.histogram import LATENCY_S, STEP_S, STEP_TOKENS, Histogram, lengths_up_to
from engine.server.metric_table import FAMILIES, SERVER_FAMILIES
from engine.server.tally import TokenGaps
from tests.shared import REPOSITORY


def test_gaps_of_a_mixed_life_are_exact() -> None:
    """Joins, pauses and ends in any order, against each request's own list of times."""
    rng = np.random.default_rng(5)
    gaps = TokenGaps(Histogram(STEP_S))
    times: dict[int, list[int]] = {}
    live: list[int] = []
    total, count, now, newest = 0, 0, 0, 0
    for _ in range(2000):
        now += int(rng.integers(1, 50_000_000))
        if rng.random() < 0.2:
            live.append(newest)
            newest += 1
        if live and rng.random() < 0.1:
            gone = live.pop(int(rng.integers(len(live))))
            gaps.forget(gone)
            times.pop(gone, None)
        members = [number for number in live if rng.random() < 0.9] if rng.random() < 0.3 else list(live)
        gaps.step(members, now)
        for number in members:
            if number in times:
                total, count = total + now - times[number][-1], count + 1
            times.setdefault(number, []).append(now)
    assert sum(gaps.histogram.counts) == count > 5000
    assert gaps.histogram.total == pytest.approx(total / 1e9)
    assert len(gaps._last_ns) <= len(live)


@pytest.mark.parametrize("bounds", [LATENCY_S, STEP_S, STEP_TOKENS, lengths_up_to(40960)])
def test_buckets_rise_and_count_what_is_at_most_their_bound(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))
    single, bulk = Histogram(bounds), Histogram(bounds)
    values = np.array([0.0, *bounds, bounds[-1] * 2, bounds[0] * 1.01])
    for value in values.tolist():
        single.add(value)
    bulk.add_all(values)
    assert single.counts == bulk.counts
    for name, number in bulk.buckets():
        assert number == np.count_nonzero(values <= float(name))


def test_the_document_names_every_metric_with_its_meaning() -> None:
    text = (REPOSITORY / "docs" / "SERVE_METRICS.md").read_text(encoding="utf-8")
    for family in (*FAMILIES, *SERVER_FAMILIES):
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        (line,) = [row for row in text.splitlines() if row.startswith(f"| `{name}` |")]
        assert family.help in line
        assert family.kind in line
        assert family.vllm in line
        for label in family.labels:
            assert f"`{label}`" in line

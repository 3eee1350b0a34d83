"""Grids of scenarios: which points, spread where, and what becomes of a bad one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from joblib import parallel_config
from joblib._parallel_backends import MultiprocessingBackend
from joblib.parallel import register_parallel_backend

from zlab.sim.replay import Scenario
from zlab.sim.specs import SimError
from zlab.sim.sweep import (
    SweepRow,
    Value,
    check_key,
    flat,
    points,
    results,
    run_point,
    split_values,
    sweep,
    vary,
)
from zlab.traces.synthetic import ReasoningShape, reasoning
from zlab.traces.workload import Workload

SHAPE = ReasoningShape(4, mu=6.0, sigma=0.5, samples=2, cap=1000)
SMALL = Scenario(kv_blocks=24)
GRID: Mapping[str, Sequence[Value]] = {
    "policy": ("full-kv", "hybrid"),
    "kv-blocks": (4, 24),
    "window": (8, 16),
}


def make(seed: int) -> Workload:
    """A workload of a few requests."""
    return reasoning(SHAPE, seed)


def digests(rows: Iterator[tuple[int, SweepRow]]) -> dict[int, tuple[str | None, str | None]]:
    """What each point came to, by place."""
    return {
        place: (row.summary["digest"] if row.summary else None, row.error) for place, row in rows
    }


def test_points_are_all_combinations_and_the_last_key_varies_fastest() -> None:
    found = points(make(0), GRID, SMALL)
    assert [tuple(point.parameters.values()) for point in found] == [
        ("full-kv", 4, 8), ("full-kv", 4, 16), ("full-kv", 24, 8), ("full-kv", 24, 16),
        ("hybrid", 4, 8), ("hybrid", 4, 16), ("hybrid", 24, 8), ("hybrid", 24, 16),
    ]  # fmt: skip
    assert found[6].scenario == Scenario(policy="hybrid:window=8", kv_blocks=24)


def test_a_policys_settings_come_after_the_policy_wherever_they_stand() -> None:
    (point,) = points(
        make(0), {"budget.tokens": (512,), "policy": ("hybrid:join=blocking",)}, SMALL
    )
    assert point.scenario.policy == "hybrid:join=blocking,budget.tokens=512"


def test_a_setting_that_a_policy_does_not_have_leaves_one_blank_point() -> None:
    grid: Mapping[str, Sequence[Value]] = {
        "policy": ("full-kv", "hybrid"),
        "budget.tokens": (512, 1024),
        "kv-blocks": (4, 24),
    }
    found = points(make(0), grid, SMALL)
    assert [tuple(point.parameters.values()) for point in found] == [
        ("full-kv", None, 4),
        ("full-kv", None, 24),
        ("hybrid", 512, 4),
        ("hybrid", 512, 24),
        ("hybrid", 1024, 4),
        ("hybrid", 1024, 24),
    ]
    assert [found[place].scenario.policy for place in (0, 5)] == [
        "full-kv",
        "hybrid:budget.tokens=1024",
    ]
    row = SweepRow(found[0].parameters, None, "words")
    assert row.as_dict() == {
        "parameters": {"policy": "full-kv", "budget.tokens": None, "kv-blocks": 4},
        "blank": ["budget.tokens"],
        "error": "words",
        "rows": None,
    }


def test_which_settings_a_policy_has_depends_on_its_answers() -> None:
    grid: Mapping[str, Sequence[Value]] = {
        "num_slots": (2, 4),
        "slots": ("none", "constrained"),
        "scorer": ("recent",),
    }
    found = points(make(0), grid, SMALL)
    assert [tuple(point.parameters.values()) for point in found] == [
        (None, "none", "recent"),
        (2, "constrained", "recent"),
        (4, "constrained", "recent"),
    ]
    assert found[1].scenario.policy == "hybrid:slots=constrained,num_slots=2,scorer=recent"
    with pytest.raises(
        SimError, match=r"'num_slots' is not a setting of any policy of the grid \(full-kv\)"
    ):
        points(make(0), {"num_slots": (2, 4)}, replace(SMALL, policy="full-kv"))


def test_a_policy_that_cannot_be_read_is_the_error_of_its_points() -> None:
    grid: Mapping[str, Sequence[Value]] = {"policy": ("hybrd",), "budget.tokens": (512,)}
    (point,) = points(make(0), grid, SMALL)
    assert "unknown policy 'hybrd'" in (run_point(point).error or "")


def test_seeds_make_workloads_once_each() -> None:
    asked: list[int] = []

    def counted(seed: int) -> Workload:
        asked.append(seed)
        return make(seed)

    found = points(counted, {"kv-blocks": (4, 24), "seed": (3, 5)}, SMALL)
    assert asked == [3, 5]
    assert [point.workload.sha256 for point in found] == [
        make(seed).sha256 for seed in (3, 5, 3, 5)
    ]
    with pytest.raises(SimError, match="is fixed: only a generated workload has a seed to vary"):
        points(make(0), {"seed": (1,)}, SMALL)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("kv-blocks", "12", Scenario(kv_blocks=12)),
        ("kv_blocks", 12.0, Scenario(kv_blocks=12)),
        ("memory-utilisation", "0.5", Scenario(memory_utilisation=0.5)),
        ("length-multiplier", 2, Scenario(length_multiplier=2.0)),
        ("gpu", "a100-80", Scenario(gpu="a100-80")),
        ("tokens", 512, Scenario(policy="hybrid:tokens=512")),
        ("seed", 3, Scenario()),
    ],
)
def test_one_value_of_a_grid(key: str, value: Value, expected: Scenario) -> None:
    assert vary(Scenario(), key, value) == expected


def test_settings_of_a_class_of_ones_own_go_behind_its_name() -> None:
    mine = Scenario(policy="mine.py:Mine")
    assert vary(mine, "tokens", 5).policy == "mine.py:Mine:tokens=5"
    assert vary(vary(mine, "tokens", 5), "window", 8).policy == "mine.py:Mine:tokens=5,window=8"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("kv-blocks", "many", "kv-blocks must be a whole number, not 'many'"),
        ("kv-blocks", 2.5, "kv-blocks must be a whole number, not 2.5"),
        ("memory-utilisation", "half", "memory-utilisation must be a number, not 'half'"),
    ],
)
def test_a_value_that_is_no_number(key: str, value: Value, words: str) -> None:
    with pytest.raises(SimError, match=words):
        vary(Scenario(), key, value)


def test_an_unknown_key_names_the_nearest() -> None:
    for key in (
        "policy",
        "kv-blocks",
        "budget.tokens",
        "tokens",
        "slots",
        "seed",
        "compression.window",
    ):
        check_key(key)
    for key, near in (
        ("kv-block", "kv-blocks"),
        ("budget.token", "budget.tokens"),
        ("polcy", "policy"),
    ):
        with pytest.raises(SimError, match=f"unknown grid key '{key}'; did you mean '{near}'"):
            check_key(key)
    with pytest.raises(SimError, match=r"unknown grid key 'slots\.tokns'"):
        check_key("slots.tokns")
    with pytest.raises(SimError, match="grid key 'gpu' has no values"):
        points(make(0), {"gpu": ()}, SMALL)


def test_values_are_split_at_commas_but_not_within_a_policy() -> None:
    assert split_values("full-kv, hybrid:prefix=none,join=blocking,zipage") == [
        "full-kv", "hybrid:prefix=none,join=blocking", "zipage"
    ]  # fmt: skip
    assert split_values("1,2,3") == ["1", "2", "3"]
    assert split_values(" , ") == []


def test_a_row_flattens_without_losing_a_parameter() -> None:
    row = SweepRow(
        {"policy": "hybrid"}, {"policy": "hybrid:join=blocking", "e2e_s": {"p50": 1.5, "p99": None}}
    )
    assert row.as_cells() == {
        "policy": "hybrid",
        "policy_spec": "hybrid:join=blocking",
        "e2e_s_p50": 1.5,
        "e2e_s_p99": None,
        "rows_dropped": 0,
        "error": None,
    }
    assert flat({"a": 1}) == {"a": 1}


def test_a_bad_point_is_a_row_and_the_others_run() -> None:
    rows = dict(sweep(make(0), GRID, SMALL))
    assert sorted(rows) == list(range(8))
    for place, row in rows.items():
        assert (row.error is None) == (row.summary is not None) == (place not in (4, 5))
    assert rows[4].error == (
        "ConfigError: a budget of 9 blocks does not fit in a pool of 4: the pool needs at least "
        "9 blocks, or the "
        "budget may keep at most 768 tokens"
    )


def test_whatever_a_users_policy_raises_is_its_points_error(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("1 / 0\n")
    (point,) = points(make(0), {"policy": (f"{path}:Mine",)}, SMALL)
    row = run_point(point)
    assert row.error is not None
    assert "ZeroDivisionError: division by zero" in row.error


def test_processes_give_what_one_process_gives() -> None:
    alone = digests(sweep(make, {**GRID, "seed": (0, 1)}, SMALL))
    assert len(alone) == 16
    with parallel_config(backend="loky", n_jobs=2):
        assert digests(sweep(make, {**GRID, "seed": (0, 1)}, SMALL)) == alone


class WholeLists(MultiprocessingBackend):  # type: ignore[misc]
    """A backend that hands results over as a whole list only, as Ray's does."""

    supports_retrieve_callback = False


def test_a_backend_that_hands_over_whole_lists_works_in_portions() -> None:
    register_parallel_backend("whole-lists", WholeLists)
    alone = digests(sweep(make(0), GRID, SMALL))
    with parallel_config(backend="whole-lists", n_jobs=2):
        assert digests(sweep(make(0), GRID, SMALL)) == alone


def _fails_at_two(number: int) -> int:
    if number == 2:
        raise ValueError("two")
    return number


def test_what_a_function_raises_ends_the_iteration() -> None:
    found = results(_fails_at_two, [0, 1, 2, 3])
    assert [next(found), next(found)] == [(0, 0), (1, 1)]
    with pytest.raises(ValueError, match="two"):
        next(found)

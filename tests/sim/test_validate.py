"""The laws of a finished run: they hold of every preset's runs, and each one tells of a fault in
the tables.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest

from tests.policies.planted import release_forgets_a_block
from tests.traces.cases import LIMITS, conversations
from zlab.policies.core.invariants import CheckedScheduler
from zlab.policies.spec import presets
from zlab.sim.replay import Scenario, replay
from zlab.sim.validate import Load, check_run, setup_of, validate
from zlab.traces.recording import Run
from zlab.traces.schema import EventKind
from zlab.traces.workload import TraceRequest, Workload, WorkloadMeta

SCENARIO = Scenario(
    "full-kv", kv_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size, max_model_len=4096
)
TIGHT = "tokens=64,window=8,num_slots=6"


def crowd() -> Workload:
    """Requests that crowd the pool, and one that can never fit."""
    some = conversations()
    return Workload([*some, TraceRequest("too-long", 5000, 10, 60.0)], some.meta)


def finished(policy: str) -> tuple[Run, CheckedScheduler]:
    """A run and its scheduler."""
    made: list[CheckedScheduler] = []

    def watched(*args: Any, **more: Any) -> CheckedScheduler:
        made.append(CheckedScheduler(*args, **more))
        return made[0]

    return replay(crowd(), policy, limits=LIMITS, make_scheduler=watched), made[0]


@pytest.mark.parametrize("name", presets())
def test_they_hold_of_every_preset(name: str) -> None:
    policy = f"{name}:{TIGHT}" if name not in ("full-kv", "nano-vllm", "vllm") else name
    run, scheduler = finished(policy)
    assert check_run(run, scheduler) is None
    assert run.summary["requests_refused"] == 1
    assert run.summary["preemptions"] or run.summary["compressions"]
    assert run.summary["digest"] == replay(crowd(), policy, limits=LIMITS).summary["digest"]


@dataclass
class Altered:
    """A run's tables with one of them replaced."""

    manifest: dict[str, Any]
    tables: dict[str, pa.Table]

    def table(self, name: str) -> pa.Table:
        """One table."""
        return self.tables[name]


def altered(run: Run, name: str, change: Callable[[pa.Table], pa.Table]) -> Run:
    """The run with a table changed."""
    tables = {table: getattr(run, table) for table in ("requests", "steps", "events", "blocks")}
    return Run(Altered(dict(run.manifest), tables | {name: change(tables[name])}))


def with_column(
    name: str, change: Callable[[list[Any]], list[Any]]
) -> Callable[[pa.Table], pa.Table]:
    """A table whose column is changed."""

    def changed(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(name)
        return table.set_column(
            at, table.schema.field(at), pa.array(change(table[name].to_pylist()), table[name].type)
        )

    return changed


FAULTS: tuple[tuple[str, Callable[[pa.Table], pa.Table], str], ...] = (
    (
        "requests",
        with_column("decode_s", lambda values: [values[0] + 0.5, *values[1:]]),
        "its phases add up to",
    ),
    (
        "requests",
        with_column("status", lambda values: ["failed", *values[1:]]),
        "is failed, its events say finished",
    ),
    (
        "requests",
        with_column("output_tokens", lambda values: [values[0] + 1, *values[1:]]),
        "requests have",
    ),
    ("requests", lambda table: table.slice(1), "have a row"),
    (
        "events",
        lambda table: table.filter(pa.array(table["kind"].to_numpy() != EventKind.FINISHED)),
        "no end",
    ),
    ("events", lambda table: pa.concat_tables([table, table]), "finished, finished"),
    (
        "steps",
        with_column("output_tokens", lambda values: [values[0] + 1, *values[1:]]),
        "steps produced",
    ),
)


@pytest.mark.parametrize(("table", "change", "words"), FAULTS)
def test_each_tells_of_its_fault(
    table: str, change: Callable[[pa.Table], pa.Table], words: str
) -> None:
    run, scheduler = finished("full-kv")
    said = check_run(altered(run, table, change), scheduler)
    assert said is not None
    assert words in said


def test_what_was_not_given_back_is_told() -> None:
    run, scheduler = finished("full-kv")
    scheduler.state.pool.num_free -= 2
    assert check_run(run, scheduler) == "2 of 96 blocks were never released"
    late = CheckedScheduler(scheduler.state.policy, LIMITS)
    late.submit(TraceRequest("late", 10, 10), 0)
    assert check_run(run, late) == "1 requests never ended, the first 'late'"


def test_a_broken_invariant_is_found_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    release_forgets_a_block(monkeypatch)
    (case,) = validate([Load("chat", None, crowd())], SCENARIO)
    assert case.error is not None
    assert case.error.startswith("an invariant was broken: ")
    assert case.measured["laws"] != "ok"
    assert "tokens_per_s" not in case.measured


def test_cases_and_their_setup() -> None:
    few = Workload([TraceRequest("a", 9, 9)], WorkloadMeta("few"))
    loads = [Load("chat", 3, crowd()), Load("few", None, few)]
    told: list[int] = []
    cases = validate(loads, SCENARIO, replace(SCENARIO, policy=f"hybrid:{TIGHT}"), told.append)
    assert told == [1, 2, 3, 4]
    assert [(case.name, case.seed) for case in cases] == [("chat", 3), ("few", None)]
    assert cases[0].measured["refused"] == 1.0
    assert cases[0].baseline is not None
    assert cases[0].measured["compressions_per_request"] == 0.0
    assert cases[0].baseline["compressions_per_request"]
    setup = setup_of(SCENARIO, replace(SCENARIO, policy=f"hybrid:{TIGHT}"))
    assert setup["gpu"] == "h200"
    assert setup["limits"] == setup["baseline_limits"]
    assert setup["cost"]["coefficients"]

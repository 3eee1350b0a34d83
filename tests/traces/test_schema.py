"""The vocabulary of recordings: codes, names and effects are a contract."""

import re
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from zlab.policies.core.plan import SchedulerLimits
from zlab.sim.replay import replay
from zlab.traces import schema
from zlab.traces.recording import TABLES, RecordingError
from zlab.traces.schema import (
    PHASES,
    BlockEffect,
    EventKind,
    Phase,
    Reason,
    WrittenBy,
    manifest_names,
)
from zlab.traces.timeline import Names, kinds_where
from zlab.traces.workload import TraceRequest, Workload, WorkloadMeta

KINDS = [
    "arrived",
    "refused",
    "admitted",
    "hit",
    "took",
    "chunk",
    "first",
    "grew",
    "slot",
    "slot_freed",
    "stalled",
    "resumed",
    "compressing",
    "compressed",
    "preempted",
    "swap_out",
    "swap_in",
    "swapped_in",
    "freed",
    "cached",
    "left",
    "held",
    "finished",
    "aborted",
    "failed",
    "decodes",
    "prefix_lost",
    "capped",
    "policy",
]
LATER_KINDS = ["corrupted"]  # added behind those of the first recordings
REASONS = [
    "stop",
    "length",
    "never_fits",
    "too_long",
    "empty_prompt",
    "bad_max_tokens",
    "no_slot",
    "no_block",
    "limit",
]
STATES = ["free", "owned", "shared", "cached", "target", "held"]
VERDICTS = ["not_admitted", "no_slot", "no_block", "paused", "preempted"]
CAUSES = [
    "blocks",
    "watermark",
    "reserved",
    "slots",
    "slot_blocks",
    "running",
    "step_tokens",
    "step_requests",
    "deadlock",
]


def test_codes_and_names_are_those_of_the_first_recordings() -> None:
    assert manifest_names() == {
        "kinds": {str(code): name for code, name in enumerate(KINDS + LATER_KINDS, start=1)},
        "reasons": {str(code): name for code, name in enumerate(REASONS, start=1)},
        "block_states": {str(code): name for code, name in enumerate(STATES)},
        "verdicts": {str(code): name for code, name in enumerate(VERDICTS, start=1)},
        "causes": {str(code): name for code, name in enumerate(CAUSES, start=1)},
    }


def test_an_event_with_blocks_gives_them_a_state_and_no_other_event_does() -> None:
    for kind in EventKind:
        assert (kind.effect.blocks is BlockEffect.NONE) == (kind.effect.state is None), kind


def test_a_reason_to_wait_has_a_phase_in_which_blocks_are_kept() -> None:
    waits = {reason: reason.phase for reason in Reason if reason.phase is not None}
    assert waits == {
        Reason.NO_SLOT: Phase.WAITS_FOR_SLOT,
        Reason.NO_BLOCK: Phase.WAITS_FOR_BLOCK,
        Reason.LIMIT: Phase.PAUSED,
    }


def test_every_phase_but_the_last_has_a_column_of_the_requests_table() -> None:
    assert {f"{phase}_s" for phase in PHASES} < set(TABLES["requests"].names)
    assert Phase.DONE.place == -1
    for phase in Phase:
        assert phase is Phase.DONE or PHASES[phase.place] == phase.label


def test_the_worked_example_of_the_module_is_what_the_scheduler_writes() -> None:
    rows = re.findall(
        r"^    (\d) +(plan|commit) +(\w+) +(\d+)  (?:(\d \d)|   ) ",
        schema.__doc__ or "",
        re.MULTILINE,
    )
    shown = [
        (int(step), kind, int(value), [int(block) for block in blocks.split()])
        for step, _, kind, value, blocks in rows
    ]
    request = TraceRequest(id="0", arrival_s=0.0, prompt_tokens=40, output_tokens=3)
    run = replay(
        Workload([request], WorkloadMeta("one")),
        "full-kv",
        limits=SchedulerLimits(num_blocks=8, block_size=32),
    )
    blocks = iter(run.blocks["block"].to_pylist())
    written = [
        (row["step"], EventKind(row["kind"]).label, row["value"], take(blocks, row["num_blocks"]))
        for row in run.events.to_pylist()
    ]
    assert shown == written
    for _, stage, kind, _, _ in rows:
        by_commit = EventKind[kind.upper()].effect.stage in (WrittenBy.COMMIT, WrittenBy.BEFORE_END)
        assert by_commit == (stage == "commit"), kind


def take(blocks: Iterator[int], count: int) -> list[int]:
    return [next(blocks) for _ in range(count)]


def kinds_table(*codes: int) -> pa.Table:
    return pa.table({"kind": pa.array(codes, pa.int8())})


def test_codes_are_read_by_the_names_of_the_manifest() -> None:
    names = Names(
        {
            "kinds": {"7": "arrived", "3": "freed", "90": "of a later version"},
            "reasons": {"4": "no_slot"},
            "block_states": {"1": "free"},
        }
    )
    found = names.kinds(kinds_table(7, 3, 90, 1)).tolist()
    assert found == [EventKind.ARRIVED, EventKind.FREED, 0, 0]
    assert names.reason(4) is Reason.NO_SLOT
    assert names.reason(1) is None
    phases = names.phases_of_reasons(np.array([4, 8]))
    assert phases[0] == Phase.WAITS_FOR_SLOT.place
    assert phases[1] not in range(-1, len(PHASES))
    assert not kinds_where(lambda _: True)[0]  # an unknown kind has no effect


@pytest.mark.parametrize("code", ["128", "-1", "x", "1e3"])
def test_a_code_that_no_table_can_hold_is_refused(code: str) -> None:
    with pytest.raises(RecordingError, match="kinds"):
        Names(manifest_names() | {"kinds": {code: "arrived"}})

"""What the scheduler's own records look like as columns of a recording: the same for every driver."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from policies.core.blocks import BlockState
from policies.core.events import Int64Array, Kind, Reason
from policies.core.request import Phase, Request, Status

NS = 1e-9
Columns = dict[str, Any]

STATE_OF_KIND = {  # the state a block is in from an event on; HIT and LEFT depend on its other owners
    Kind.HIT: BlockState.SHARED,
    Kind.TOOK: BlockState.OWNED,
    Kind.GREW: BlockState.OWNED,
    Kind.COMPRESSING: BlockState.TARGET,
    Kind.COMPRESSED: BlockState.OWNED,
    Kind.SWAP_OUT: BlockState.HELD,
    Kind.SWAP_IN: BlockState.OWNED,
    Kind.FREED: BlockState.FREE,
    Kind.CACHED: BlockState.CACHED,
    Kind.LEFT: BlockState.SHARED,
    Kind.POLICY: BlockState.FREE,
}
_STATE = np.full(len(Kind) + 2, -1, dtype=np.int8)
for _kind, _state in STATE_OF_KIND.items():
    _STATE[_kind] = _state

PHASE_COLUMNS = {
    Phase.QUEUED: "queued_s",
    Phase.PREFILL: "prefill_s",
    Phase.DECODE: "decode_s",
    Phase.WAITS_FOR_SLOT: "slot_wait_s",
    Phase.WAITS_FOR_BLOCK: "block_wait_s",
    Phase.COMPRESSING: "compressing_s",
    Phase.PREEMPTED: "preempted_s",
    Phase.PAUSED: "paused_s",
}


def names() -> Columns:
    """Names behind the numbers of the event and block tables, for the manifest."""
    return {
        "kinds": {str(int(kind)): kind.name.lower() for kind in Kind},
        "reasons": {str(int(reason)): reason.name.lower() for reason in Reason},
        "block_states": {str(int(state)): state.name.lower() for state in BlockState},
    }


def event_columns(rows: Int64Array) -> Columns:
    """Columns of the `events` table from journal rows [n, 5]."""
    return {name: rows[:, index] for index, name in enumerate(("step", "kind", "request", "value", "num_blocks"))}


def block_columns(rows: Int64Array, blocks: Int64Array) -> Columns:
    """Columns of the `blocks` table: one row for every block that an event names."""
    counts = rows[:, 4]
    kinds = np.repeat(rows[:, 1], counts)
    return {
        "step": np.repeat(rows[:, 0], counts),
        "block": blocks,
        "state": _STATE[kinds],
        "kind": kinds,
        "request": np.repeat(rows[:, 2], counts),
    }


def request_columns(requests: Sequence[Request], steps: Sequence[int]) -> Columns:
    """Columns of the `requests` table; `steps` holds the step in which each ended (-1: still alive)."""
    columns: Columns = {
        "number": [request.number for request in requests],
        "id": [request.id for request in requests],
        "status": ["unfinished" if r.status is Status.LIVE else r.status.name.lower() for r in requests],
        "reason": [Reason(request.reason).name.lower() if request.reason else "" for request in requests],
        "message": [request.message for request in requests],
        "session": [request.session for request in requests],
        "cls": [request.cls for request in requests],
        "priority": [request.priority for request in requests],
        "arrival_s": [request.arrival_ns * NS for request in requests],
        "arrival_step": [request.arrival_step for request in requests],
        "finish_step": list(steps),
        "prompt_tokens": [request.prompt_tokens for request in requests],
        "max_tokens": [request.max_tokens for request in requests],
        "output_tokens": [request.generated for request in requests],
        "asked_output_tokens": [request.forced_output_tokens for request in requests],
        "prefix_hit_tokens": [request.hit_tokens for request in requests],
        "recomputed_tokens": [request.recomputed_tokens for request in requests],
        "preemptions": [request.preemptions for request in requests],
        "swaps": [request.swaps for request in requests],
        "compressions": [request.compressions for request in requests],
    }
    for moment in ("first_admitted", "first_token", "finish"):
        times = np.array([getattr(request, f"{moment}_ns") for request in requests], dtype=np.float64)
        columns[f"{moment}_s"] = np.where(times < 0, np.nan, times * NS)
    phases = (
        np.array([request.phase_ns for request in requests], dtype=np.float64).reshape(len(requests), len(Phase)) * NS
    )
    for phase, name in PHASE_COLUMNS.items():
        columns[name] = phases[:, phase]
    columns["swapped_s"] = phases[:, Phase.SWAPPED] + phases[:, Phase.SWAPPING_IN]
    return columns

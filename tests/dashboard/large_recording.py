"""A recording as large as the dashboard must bear, written by column: every request lives through
one timetable.

The pool is cut into lanes of equal size; requests follow each other in a lane, so that block
changes, events and steps agree as in a real run.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zlab.traces.recording import FolderRecorder
from zlab.traces.schema import EventKind, Reason, manifest_names

BLOCK_SIZE = 256
LANE_BLOCKS = 8
STEP_S = 0.01
SPREAD = 1_000
Ints = npt.NDArray[np.int64]


def write_large(
    folder: Path, num_requests: int = 20_000, num_steps: int = 100_000, num_blocks: int = 4_096
) -> dict[str, int]:
    """Write the recording; returns its numbers of rows by table."""
    lanes = num_blocks // LANE_BLOCKS
    turns = -(-num_requests // lanes)
    life = (num_steps - SPREAD) // turns - 4
    request = np.arange(num_requests, dtype=np.int64)
    lane, start = request % lanes, request // lanes * (life + 4) + lane_offset(request % lanes)
    rows = _timetable(life)
    events, blocks = _events(rows, request, start, lane, num_steps)
    manifest = {
        "source": "sim",
        "policy": "large",
        "num_blocks": num_blocks,
        "block_size": BLOCK_SIZE,
        "workload_sha256": "0" * 64,
        "digest": "1" * 64,
        "num_steps": num_steps,
        "summary": {"tokens_per_s": 1.0, "makespan_s": num_steps * STEP_S, "ttft_s": {"p99": 1.0}},
        **manifest_names(),
    }
    recorder = FolderRecorder(folder, manifest)
    recorder.write("steps", _steps(num_steps, lanes))
    recorder.write("events", events)
    recorder.write("blocks", blocks)
    recorder.write("requests", _requests(request, start, life))
    recorder.close()
    return {
        "events": len(events["step"]),
        "blocks": len(blocks["step"]),
        "steps": num_steps,
        "requests": num_requests,
    }


def lane_offset(lane: Ints) -> Ints:
    """Steps by which a lane is behind the first: lanes do not keep time with each other."""
    return lane * 37 % SPREAD


def _timetable(life: int) -> list[tuple[int, bool, int, int, list[int]]]:
    """(step within the life, settled late, kind, value, blocks of the lane) of one request."""
    whole = list(range(LANE_BLOCKS))
    rows: list[tuple[int, bool, int, int, list[int]]] = [
        (0, False, EventKind.ARRIVED, 900, []),
        (0, False, EventKind.ADMITTED, 900, []),
        (0, False, EventKind.TOOK, 0, whole[:4]),
        (0, False, EventKind.CHUNK, 900, []),
        (0, True, EventKind.FIRST, 1, []),
    ]
    rows += [(125 + 60 * i, False, EventKind.GREW, 0, [4 + i]) for i in range(4)]
    for at in range(400, life - 60, 180):
        rows.append((at, False, EventKind.COMPRESSING, LANE_BLOCKS * BLOCK_SIZE, whole))
        rows.append((at + 1, False, EventKind.COMPRESSED, 7 * BLOCK_SIZE, whole))
    half = 400 + (life - 460) // 360 * 180 + 90
    rows += [
        (half, False, EventKind.STALLED, Reason.NO_SLOT, []),
        (half + 20, False, EventKind.RESUMED, 0, []),
        (half + 40, False, EventKind.PREEMPTED, 500, []),
        (half + 40, False, EventKind.FREED, 0, whole[::-1]),
        (half + 60, False, EventKind.ADMITTED, 1500, []),
        (half + 60, False, EventKind.TOOK, 0, whole),
        (half + 60, False, EventKind.CHUNK, 1500, []),
        (half + 60, True, EventKind.FIRST, 600, []),
        (life - 1, True, EventKind.FREED, 0, whole[::-1]),
        (life - 1, True, EventKind.FINISHED, Reason.LENGTH, []),
    ]
    gone = range(half + 40, half + 100)  # not compressed around the preemption
    return [
        r
        for r in rows
        if not (r[2] in (EventKind.COMPRESSING, EventKind.COMPRESSED) and r[0] in gone)
    ]


def _events(
    rows: list[tuple[int, bool, int, int, list[int]]],
    request: Ints,
    start: Ints,
    lane: Ints,
    num_steps: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    count, num = len(rows), len(request)
    offset, late, kind, value = (
        np.array([row[i] for row in rows], dtype=np.int64) for i in range(4)
    )
    sizes = np.array([len(row[4]) for row in rows], dtype=np.int64)
    step = (start[:, None] + offset).ravel()
    who, place = np.repeat(request, count), np.tile(np.arange(count), num)
    order = np.lexsort((place, who, np.tile(late, num), step))
    order = order[step[order] < num_steps]
    place = place[order]
    events = {
        "step": step[order],
        "kind": kind[place].astype(np.int8),
        "request": who[order],
        "value": value[place],
        "num_blocks": sizes[place].astype(np.int32),
    }
    table = np.zeros((count, LANE_BLOCKS), dtype=np.int64)
    for index, row in enumerate(rows):
        table[index, : len(row[4])] = row[4]
    repeats = sizes[place]
    within = np.arange(int(repeats.sum())) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    block = table[np.repeat(place, repeats), within] + np.repeat(
        lane[events["request"]] * LANE_BLOCKS, repeats
    )
    blocks = {
        "step": np.repeat(events["step"], repeats),
        "block": block.astype(np.int32),
        "state": np.zeros(len(block), dtype=np.int8),
        "kind": np.repeat(events["kind"], repeats),
        "request": np.repeat(events["request"], repeats),
    }
    return events, blocks


def _steps(num_steps: int, lanes: int) -> dict[str, Any]:
    step = np.arange(num_steps, dtype=np.int64)
    constant = {
        "output_tokens": lanes,
        "decodes": lanes,
        "running": lanes,
        "free_blocks": 7,
        "cached_blocks": 0,
    }
    zero = (
        "context_tokens",
        "prefills",
        "prefill_tokens",
        "prefill_pairs",
        "compressions",
        "compressing",
        "swaps",
        "preemptions",
        "waiting",
        "waiting_for_slot",
        "waiting_for_block",
        "shared_extra",
        "stored_tokens",
    )
    columns: dict[str, Any] = {"step": step, "start_s": step * STEP_S, "end_s": (step + 1) * STEP_S}
    columns |= {name: np.full(num_steps, value) for name, value in constant.items()}
    return columns | {name: np.zeros(num_steps, dtype=np.int64) for name in zero}


def _requests(request: Ints, start: Ints, life: int) -> dict[str, Any]:
    count = len(request)
    arrival, finish = start * STEP_S, (start + life) * STEP_S
    columns: dict[str, Any] = {
        "number": request,
        "id": [f"id-{number}" for number in request.tolist()],
        "status": ["finished"] * count,
        "reason": ["length"] * count,
        "arrival_s": arrival,
        "arrival_step": start,
        "finish_step": start + life,
        "first_admitted_s": arrival,
        "first_token_s": arrival + STEP_S,
        "finish_s": finish,
        "decode_s": finish - arrival,
    }
    columns |= {name: [""] * count for name in ("message", "session", "cls")}
    for name in ("prompt_tokens", "max_tokens", "output_tokens", "asked_output_tokens"):
        columns[name] = np.full(count, 900)
    for phase in (
        "queued",
        "prefill",
        "slot_wait",
        "block_wait",
        "compressing",
        "preempted",
        "swapped",
        "paused",
    ):
        columns[f"{phase}_s"] = np.zeros(count)
    zero = (
        "priority",
        "prefix_hit_tokens",
        "recomputed_tokens",
        "preemptions",
        "swaps",
        "compressions",
    )
    return columns | {name: np.zeros(count, dtype=np.int64) for name in zero}

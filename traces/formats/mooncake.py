"""Mooncake-style JSON Lines, read and written: milliseconds, lengths, one chained id for each 512
prompt tokens.

vLLM, AIPerf, Dynamo and guidellm read the output of `write_mooncake`.
"""

import json
from pathlib import Path
from typing import Any

from zlab.traces.block_ids import PromptBlocks
from zlab.traces.formats.layout import (
    TICKS_PER_S,
    BadRowError,
    Format,
    Record,
    Row,
    block_ids,
    length,
    ticks,
)
from zlab.traces.formats.native import text_output
from zlab.traces.workload import TraceError, TraceRequest, Workload

BLOCK_SIZE = 512
MS_PER_S = 1000
TICKS_PER_MS = TICKS_PER_S // MS_PER_S
COLUMNS = ("timestamp", "input_length", "output_length", "hash_ids")


class _MooncakeReader:
    """Reads rows. `hash_ids` may be missing in all rows of a file (then it is unknown what prompts
    share), but not in some rows, and not under another name.
    """

    def __init__(self, _path: Path) -> None:
        self._has_ids: bool | None = None

    def __call__(self, record: Record) -> Row:
        prompt_tokens = length("input_length", record["input_length"])
        row: Row = {
            "ticks": ticks("timestamp", record["timestamp"], MS_PER_S),
            "prompt_tokens": prompt_tokens,
            "output_tokens": length("output_length", record["output_length"]),
        }
        if "hash_ids" in record:
            row["prefix_ids"] = block_ids("hash_ids", record["hash_ids"], prompt_tokens, BLOCK_SIZE)
        elif any(isinstance(value, list) for value in record.values()):
            others = ", ".join(name for name in record if name not in COLUMNS)
            raise BadRowError(
                "hash_ids is missing", f"hash_ids is missing, found instead: {others}"
            )
        has_ids = "hash_ids" in record
        if self._has_ids is None:
            self._has_ids = has_ids
        if has_ids != self._has_ids:
            raise BadRowError("hash_ids in some rows only")
        return row


MOONCAKE = Format(
    name="mooncake",
    what="Mooncake FAST'25 trace (JSON Lines)",
    layout="jsonl",
    required=("timestamp", "input_length", "output_length"),
    begin=_MooncakeReader,
    source="github.com/kvcache-ai/Mooncake",
    licence="Apache-2.0",
    arrival_resolution_s=0.001,
    block_size=BLOCK_SIZE,
    block_id_kind="chained",
    last_block="partial",
)


def _timestamp_ms(arrival_s: float | None) -> int | float:
    if arrival_s is None:
        return 0
    whole_ticks = round(arrival_s * TICKS_PER_S)
    return (
        whole_ticks // TICKS_PER_MS
        if whole_ticks % TICKS_PER_MS == 0
        else whole_ticks / TICKS_PER_MS
    )


def _line(request: TraceRequest, ids: tuple[int, ...] | None) -> str:
    if request.output_tokens is None:
        raise TraceError(
            f"request {request.id!r} has no output length, which the Mooncake format needs"
        )
    row: dict[str, Any] = {
        "timestamp": _timestamp_ms(request.arrival_s),
        "input_length": request.prompt_tokens,
        "output_length": request.output_tokens,
    }
    if ids is not None:
        row["hash_ids"] = list(ids)
    return json.dumps(row) + "\n"


def write_mooncake(workload: Workload, path: Path | str) -> None:
    """Write the workload as Mooncake-style JSON Lines, gzipped if the name ends in `.gz`.

    The file keeps times to 100 ns (whole milliseconds as integers; an offline batch is all at 0),
    lengths, and what the prompts share, in blocks of 512 tokens for any block size of the workload.
    It loses ids, sessions, classes and priorities. Raise TraceError for a workload in which only
    some requests say what they share: neither missing nor invented ids would be true.
    """
    blocks = PromptBlocks(workload.meta, BLOCK_SIZE)
    has_ids: bool | None = None
    with text_output(Path(path)) as lines:
        for request in workload:
            ids = blocks.all_blocks(request)
            has_ids = ids is not None if has_ids is None else has_ids
            if has_ids != (ids is not None):
                known = (
                    "no prefix or prompt ids, others have"
                    if has_ids
                    else "prefix or prompt ids, others have none"
                )
                raise TraceError(
                    f"request {request.id!r} has {known}; the Mooncake format needs all or none"
                )
            lines.write(_line(request, ids))

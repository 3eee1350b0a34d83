"""Azure LLM inference traces: one request per row, wall-clock times with seven fractional digits,
no ids.
"""

from pathlib import Path

from zlab.traces.formats.layout import Format, Record, Row, RowReader, clock_ticks, length


def _row(record: Record) -> Row:
    return {
        "ticks": clock_ticks("TIMESTAMP", record["TIMESTAMP"]),
        "prompt_tokens": length("ContextTokens", record["ContextTokens"]),
        "output_tokens": length("GeneratedTokens", record["GeneratedTokens"]),
    }


def _begin(_path: Path) -> RowReader:
    return _row


AZURE = Format(
    name="azure",
    what="Azure LLM inference trace (CSV)",
    layout="csv",
    required=("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    begin=_begin,
    source="github.com/Azure/AzurePublicDataset",
    licence="CC-BY-4.0",
    arrival_resolution_s=1e-7,
)

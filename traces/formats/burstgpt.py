"""BurstGPT: one request per row, times in whole seconds. Columns are read by name, because version
3 inserted some.

A row of 0 request and 0 response tokens is a failed request: it is dropped and counted. Any other
zero makes a bad row.
"""

from pathlib import Path

from zlab.traces.formats.layout import (
    BadRowError,
    FailedRequestError,
    Format,
    Record,
    Row,
    RowReader,
    length,
    number,
    text,
    ticks,
    whole,
)


def _row(record: Record) -> Row:
    request, response = record["Request tokens"], record["Response tokens"]
    if request.strip() == response.strip() == "0":
        raise FailedRequestError("failed request (0 request and 0 response tokens)")
    row: Row = {
        "ticks": ticks("Timestamp", record["Timestamp"]),
        "prompt_tokens": length("Request tokens", request),
        "output_tokens": length("Response tokens", response),
        "model": text("Model", record.get("Model")),
        "cls": text("Log Type", record.get("Log Type")),
        "session": text("Session ID", record.get("Session ID")),
    }
    if record.get("Elapsed time"):
        row["source_e2e_s"] = number("Elapsed time", record["Elapsed time"])
    if "Total tokens" in record:
        total = whole("Total tokens", record["Total tokens"])
        if total != row["prompt_tokens"] + row["output_tokens"]:
            raise BadRowError(
                "Total tokens do not add up",
                f"Total tokens is {total}, request and response make "
                f"{row['prompt_tokens'] + row['output_tokens']}",
            )
    return row


def _begin(_path: Path) -> RowReader:
    return _row


BURSTGPT = Format(
    name="burstgpt",
    what="BurstGPT, versions 1 and 3 (CSV)",
    layout="csv",
    required=("Timestamp", "Model", "Request tokens", "Response tokens"),
    begin=_begin,
    source="github.com/HPMLL/BurstGPT",
    licence="CC-BY-4.0",
    arrival_resolution_s=1.0,
)

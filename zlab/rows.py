"""The rows of a sweep as the bytes of a file: CSV, JSON or Parquet."""

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sim.sweep import Row


def _columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Every column that any row has; a parameter with values of several kinds is text."""
    cells = [row.as_cells() for row in rows]
    names = list(dict.fromkeys(name for row in cells for name in row if name != "error"))
    columns = {name: [row.get(name) for row in cells] for name in [*names, "error"]}
    for name in {name for row in rows for name in row.parameters}:
        columns[name] = _typed(columns[name])
    return columns


def _typed(values: list[Any]) -> list[Any]:
    """As they are if all are of one kind, or all numbers; otherwise as text."""
    kinds = {type(value) for value in values}
    if len(kinds) == 1:
        return values
    return [float(value) for value in values] if kinds == {int, float} else [str(value) for value in values]


def _as_csv(rows: Sequence[Row]) -> bytes:
    columns = _columns(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue().encode()


def _as_json(rows: Sequence[Row]) -> bytes:
    return (json.dumps([row.as_dict() for row in rows], indent=1) + "\n").encode()


def _as_parquet(rows: Sequence[Row]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(_columns(rows)), sink)
    written: bytes = sink.getvalue().to_pybytes()
    return written


WRITERS: Mapping[str, Callable[[Sequence[Row]], bytes]] = {".csv": _as_csv, ".json": _as_json, ".parquet": _as_parquet}


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write the file in one move; its ending, one of `WRITERS`, says as what."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(WRITERS[path.suffix](rows))
    os.replace(unfinished, path)

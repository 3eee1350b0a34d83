"""The known formats, and which of them a file is in."""

import difflib
from pathlib import Path
from typing import Literal

from traces.formats.azure import AZURE
from traces.formats.bailian import BAILIAN, SERVEGEN_OFFLINE
from traces.formats.bench import BENCH
from traces.formats.burstgpt import BURSTGPT
from traces.formats.cells import BadRowError, shown
from traces.formats.layout import Format
from traces.formats.mooncake import MOONCAKE
from traces.formats.native import NATIVE
from traces.formats.source import json_object, numbered_lines, split_cells
from traces.workload import TraceError

FORMATS: dict[str, Format] = {f.name: f for f in (NATIVE, AZURE, BURSTGPT, MOONCAKE, BAILIAN, SERVEGEN_OFFLINE, BENCH)}
SNIFFED_LINES = 20
"""Lines looked at to tell a JSON Lines format: the first rows may be bad ones."""


def known_formats() -> str:
    """The formats with the columns that tell them, for error messages."""
    return "; ".join(f"{f.name} ({', '.join(f.required)})" for f in FORMATS.values())


def named_format(name: str) -> Format:
    """The format of this name; an unknown name is an error that shows the nearest."""
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise TraceError(f"unknown trace format {name!r}{hint}; known are {', '.join(FORMATS)}")
    return FORMATS[name]


def _column_sets(path: Path) -> tuple[Literal["csv", "jsonl"], list[str], str]:
    """The file's layout, the column names of its first usable row, and its first line."""
    first_line = ""
    for seen, (_, line) in enumerate(numbered_lines(path)):
        first_line = first_line or line
        if not first_line.startswith("{"):
            return "csv", [cell.strip() for cell in split_cells(line)], line
        try:
            return "jsonl", list(json_object(line)), line
        except BadRowError:
            if seen >= SNIFFED_LINES:
                break
    if not first_line:
        raise TraceError(f"{path}: has no rows")
    return "jsonl", [], first_line


def missing_columns(path: Path, fmt: Format, columns: list[str], first_line: str) -> TraceError:
    """The error that names the columns of a format which a file lacks, or that it has no header at all."""
    missing = [name for name in fmt.required if name not in columns]
    if len(missing) == len(fmt.required):
        return TraceError(
            f"{path}: has no header line of format {fmt.name} ({', '.join(fmt.required)}); "
            f"its first line is {shown(first_line)}"
        )
    names = ", ".join(repr(name) for name in missing)
    return TraceError(f"{path}: column {names} of format {fmt.name} is missing; found are {', '.join(columns)}")


def detect_format(path: Path) -> Format:
    """The one format whose columns the file has; otherwise an error that names the nearest one's missing columns."""
    try:
        layout, columns, first_line = _column_sets(path)
    except BadRowError as error:
        raise TraceError(f"{path}:1: {error}") from None
    candidates = [f for f in FORMATS.values() if f.layout == layout]
    fitting = [f for f in candidates if set(f.required) <= set(columns)]
    if fitting:
        return max(fitting, key=lambda f: len(f.required))
    nearest = max(candidates, key=lambda f: len(set(f.required) & set(columns)) / len(f.required))
    if set(nearest.required) & set(columns):
        missing = missing_columns(path, nearest, columns, first_line)
        raise TraceError(f"{missing} (known formats: {known_formats()})")
    lacks = "has no header line of a known format" if layout == "csv" else "is in no known format"
    raise TraceError(f"{path}: {lacks}, its first line is {shown(first_line)}; known formats: {known_formats()}")

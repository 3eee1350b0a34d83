"""A trace file as numbered lines of text, whatever it is wrapped in: gzip, a byte-order mark, CRLF, no last newline."""

import csv
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from traces.formats.cells import BadRowError, shown
from traces.workload import TraceError

GZIP_MAGIC = b"\x1f\x8b"
PROGRESS_LINES = 4096
TAIL_BYTES = 65536


def trace_name(path: Path) -> str:
    """The file's name without `.gz` and without its kind: `W1` for `W1.jsonl.gz`."""
    name = path.name.removesuffix(".gz")
    for suffix in (".jsonl", ".csv", ".json"):
        name = name.removesuffix(suffix)
    return name


def file_sha256(path: Path) -> str:
    """SHA-256 of the file's bytes as they lie on disk."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


def numbered_lines(path: Path, on_progress: Callable[[float], None] | None = None) -> Iterator[tuple[int, str]]:
    """Every line that is not blank with its number from 1; raises `TraceError` for what is not readable text.

    `on_progress` is told now and then which share of the file's bytes has been read.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            num_bytes = max(path.stat().st_size, 1)
            data = gzip.GzipFile(fileobj=raw) if packed else raw
            with io.TextIOWrapper(data, encoding="utf-8-sig") as lines:  # universal newlines: CRLF and LF alike
                for line_number, line in enumerate(lines, 1):
                    if on_progress is not None and line_number % PROGRESS_LINES == 0:
                        on_progress(raw.tell() / num_bytes)
                    stripped = line.strip()
                    if stripped:
                        yield line_number, stripped
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: is a damaged gzip file ({error})") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


def unended_bytes(path: Path) -> int:
    """How many bytes of a plain file come after its last line end; 0 for one that is gzipped."""
    with path.open("rb") as file:
        if file.read(2) == GZIP_MAGIC:
            return 0
        file.seek(0, io.SEEK_END)
        end, tail = file.tell(), b""
        while end and b"\n" not in tail:
            start = max(0, end - TAIL_BYTES)
            file.seek(start)
            tail = file.read(end - start) + tail
            end = start
    return len(tail) - (tail.rfind(b"\n") + 1)


def split_cells(line: str) -> list[str]:
    """The cells of one CSV line. A quote left open is a bad row and does not swallow the lines after it."""
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise BadRowError("not a CSV row", f"not a CSV row ({error}): {shown(line)}") from None


def json_object(line: str) -> dict[str, Any]:
    """One JSON object from one line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRowError("not JSON", f"not JSON ({error}): {shown(line)}") from None
    if not isinstance(row, dict):
        raise BadRowError("not a JSON object", f"not a JSON object: {shown(line)}")
    return row

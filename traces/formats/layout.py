"""Building blocks of trace readers: the description of a format, checks of one cell, and lines of a
file.

`Format` is what a public format defines so that one reader can read all of them. The cell functions
return a checked value or raise `BadRowError`, which names the value. `numbered_lines` reads text in
gzip, with a byte-order mark, with CRLF, or without a last newline.
"""

import csv
import gzip
import hashlib
import io
import json
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal, Protocol

from zlab.traces.workload import TraceError

Record = Mapping[str, Any]
"""One row of the file by column name: strings from CSV, any JSON value from JSON Lines."""
Row = dict[str, Any]
"""One row as `TraceRequest` fields; `ticks` instead of `arrival_s` where the format has its own
clock.
"""


class RowReader(Protocol):
    """Turns the records of one file into rows, in order. It may keep state between rows (block
    chains, prompts).
    """

    def __call__(self, record: Record) -> Row:
        """Return the row. Raise `BadRowError` for a faulty record and `FailedRequestError` for a
        record of a failed request.
        """


@dataclass(frozen=True)
class Format:
    """A public trace format: how to detect it, how to read a row, and what holds for every file."""

    name: str
    what: str
    layout: Literal["csv", "jsonl"]
    required: tuple[str, ...]  # a file without these columns is in another format
    begin: Callable[[Path], RowReader]  # creates a reader for one file
    # True: times are `ticks` and count from the first row; False: times are `arrival_s` and are not
    # changed
    ticks: bool = True
    source: str = ""
    licence: str = ""
    arrival_resolution_s: float | None = None
    block_size: int | None = None
    block_id_kind: str | None = None
    last_block: str | None = None
    modifications: tuple[str, ...] = ()  # changes that the reader always makes


MAX_LENGTH_TOKENS = 10_000_000
"""A longer prompt or output is taken for a corrupt cell: no published context window comes near."""
MAX_ID = 2**63 - 1
TICKS_PER_S = 10_000_000
"""Times of public traces are held as whole ticks of 100 ns, the finest any of them writes."""
MAX_TIME_S = 3_200_000_000
"""About 100 years: keeps ticks below 2**53, so that seconds as a float name each tick."""

MAX_NUMBER = MAX_TIME_S * 1000  # largest time in milliseconds
CLOCK = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,7})0*)?(?:Z|\+00:00)?", re.ASCII
)


class BadRowError(TraceError):
    """A row that cannot be used. `reason` groups equal faults in counts; the message names the
    value.
    """

    def __init__(self, reason: str, detail: str | None = None) -> None:
        self.reason = reason
        super().__init__(detail or reason)


class FailedRequestError(BadRowError):
    """A valid row without a request, because the source recorded a failure. It is dropped and
    counted and is never an error.
    """


def shown(value: object) -> str:
    """Return the value for an error message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def whole(name: str, value: Any, lowest: int = 0, highest: int = MAX_ID) -> int:
    """Return a whole number, also from a quoted one.

    Args:
        name: Column name, for the error.
        value: The cell.
        lowest: Smallest allowed value.
        highest: Largest allowed value.

    Raises:
        BadRowError: The cell is not a whole number in this range.
    """
    if type(value) is int:
        number = value
    elif value is None or (isinstance(value, str) and not value.strip()):
        raise BadRowError(f"{name} is empty")
    else:
        text = value.strip() if isinstance(value, str) else ""
        if not (text.removeprefix("-").isdigit() and text.isascii() and len(text) <= 20):
            raise BadRowError(
                f"{name} is not a whole number", f"{name} is {shown(value)}, must be a whole number"
            )
        number = int(text)
    if number < lowest:
        raise BadRowError(
            f"{name} is below {lowest}", f"{name} is {shown(number)}, must be at least {lowest}"
        )
    if number > highest:
        raise BadRowError(
            f"{name} is above {highest}", f"{name} is {shown(number)}, must be at most {highest}"
        )
    return number


def length(name: str, value: Any) -> int:
    """Return a number of tokens in [1, `MAX_LENGTH_TOKENS`]."""
    if type(value) is int and 1 <= value <= MAX_LENGTH_TOKENS:  # the usual case
        return value
    return whole(name, value, 1, MAX_LENGTH_TOKENS)


def number(name: str, value: Any) -> float:
    """Return a finite number >= 0, also from a quoted one. The caller must ensure that times are
    exact in ticks.
    """
    if type(value) is float and 0 <= value <= MAX_NUMBER:  # the usual case
        return value
    if isinstance(value, str):
        if not value.strip():
            raise BadRowError(f"{name} is empty")
        try:
            value = float(value)
        except ValueError:
            raise BadRowError(
                f"{name} is not a number", f"{name} is {shown(value)}, must be a number"
            ) from None
    if value is None:
        raise BadRowError(f"{name} is empty")
    if type(value) not in {int, float} or not 0 <= value <= MAX_NUMBER:
        raise BadRowError(
            f"{name} is not a finite number >= 0",
            f"{name} is {shown(value)}, must be a finite number >= 0",
        )
    return float(value)


def ticks(name: str, value: Any, per_s: int = 1) -> int:
    """Return a time, given in units of 1/per_s seconds, in ticks of 100 ns.

    Args:
        name: Column name, for the error.
        value: The cell.
        per_s: Units per second.
    """
    units = number(name, value)
    if units > MAX_TIME_S * per_s:
        raise BadRowError(
            f"{name} is out of range", f"{name} is {shown(value)}, beyond {MAX_TIME_S} s"
        )
    return round(units * (TICKS_PER_S // per_s))


def clock_ticks(name: str, value: Any) -> int:
    """Return the ticks since year 1 of `YYYY-MM-DD hh:mm:ss[.f...]`. Seven fractional digits are
    kept exactly; a UTC mark may follow.

    Python's `datetime` has a resolution of microseconds only, so it cannot read seven digits.
    """
    if value is None or not str(value).strip():
        raise BadRowError(f"{name} is empty")
    found = CLOCK.fullmatch(str(value).strip())
    try:
        if found is None or int(found[2]) > 23 or int(found[3]) > 59 or int(found[4]) > 59:
            raise ValueError
        day = date.fromisoformat(found[1]).toordinal()
    except ValueError:
        raise BadRowError(
            f"{name} is not a time",
            f"{name} is {shown(value)}, must be YYYY-MM-DD hh:mm:ss with at most 7 "
            f"fractional digits",
        ) from None
    whole_seconds = ((day * 24 + int(found[2])) * 60 + int(found[3])) * 60 + int(found[4])
    return whole_seconds * TICKS_PER_S + int((found[5] or "0").ljust(7, "0"))


def ids(name: str, value: Any) -> "array[int]":
    """Return a list of whole numbers in [0, 2**63 - 1] as an array of eight bytes each. Rows of a
    large trace have hundreds of ids.
    """
    if not isinstance(value, list):
        raise BadRowError(
            f"{name} is not a list", f"{name} is {shown(value)}, must be a list of whole numbers"
        )
    try:
        packed = array("q", value)
        if not value or (set(map(type, value)) == {int} and min(value) >= 0):
            return packed
    except (TypeError, OverflowError):
        pass
    wrong = next(v for v in value if type(v) is not int or not 0 <= v <= MAX_ID)
    raise BadRowError(
        f"{name} holds something else than ids", f"{name} holds {shown(wrong)}, not an id"
    )


def block_ids(name: str, value: Any, prompt_tokens: int, block_size: int) -> "array[int]":
    """Return the ids of a prompt's blocks: exactly one for each full or partial block.

    Args:
        name: Column name, for the error.
        value: The cell.
        prompt_tokens: Length of the prompt.
        block_size: Tokens that one id covers.
    """
    found = ids(name, value)
    expected = -(-prompt_tokens // block_size)
    if len(found) != expected:
        raise BadRowError(
            f"{name} do not match the prompt's length",
            f"{name} holds {len(found)} ids, must be {expected} for {prompt_tokens} tokens in "
            f"blocks of {block_size}",
        )
    return found


def text(name: str, value: Any) -> str | None:
    """Return a string or None. A whole number (an id in JSON) becomes its digits."""
    if type(value) is str and value:  # the usual case
        return value
    if value is None or value == "":
        return None
    if type(value) is int:
        return str(value)
    if not isinstance(value, str):
        raise BadRowError(f"{name} is not a string", f"{name} is {shown(value)}, must be a string")
    return value


GZIP_MAGIC = b"\x1f\x8b"
PROGRESS_LINES = 4096
TAIL_BYTES = 65536


def trace_name(path: Path) -> str:
    """Return the file's name without `.gz` and without its type: `W1` for `W1.jsonl.gz`."""
    name = path.name.removesuffix(".gz")
    for suffix in (".jsonl", ".csv", ".json"):
        name = name.removesuffix(suffix)
    return name


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of the file's bytes on disk."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


def numbered_lines(
    path: Path, on_progress: Callable[[float], None] | None = None
) -> Iterator[tuple[int, str]]:
    """Yield every line that is not blank with its number from 1. Raise `TraceError` if the file is
    not readable text.

    `on_progress` is called now and then with the share of the file's bytes that has been read.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            num_bytes = max(path.stat().st_size, 1)
            data = gzip.GzipFile(fileobj=raw) if packed else raw
            with io.TextIOWrapper(
                data, encoding="utf-8-sig"
            ) as lines:  # universal newlines: CRLF and LF are equal
                for line_number, line in enumerate(lines, 1):
                    if on_progress is not None and line_number % PROGRESS_LINES == 0:
                        on_progress(raw.tell() / num_bytes)
                    stripped = line.strip()
                    if stripped:
                        yield line_number, stripped
    except UnicodeDecodeError as error:
        raise TraceError(
            f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: is a damaged gzip file ({error})") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


def unended_bytes(path: Path) -> int:
    """Return the number of bytes of a plain file after its last line end; 0 for a gzip file."""
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
    """Return the cells of one CSV line. An unclosed quote makes a bad row and does not extend to
    the next lines.
    """
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise BadRowError("not a CSV row", f"not a CSV row ({error}): {shown(line)}") from None


def json_object(line: str) -> dict[str, Any]:
    """Return the JSON object in a line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRowError("not JSON", f"not JSON ({error}): {shown(line)}") from None
    if not isinstance(row, dict):
        raise BadRowError("not a JSON object", f"not a JSON object: {shown(line)}")
    return row

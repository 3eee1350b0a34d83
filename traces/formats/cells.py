"""What one cell of a trace may hold, and what is said when it holds something else."""

import re
from array import array
from datetime import date
from typing import Any

from traces.workload import TraceError

MAX_LENGTH_TOKENS = 10_000_000
"""A longer prompt or output is taken for a corrupt cell: no published context window comes near."""
MAX_ID = 2**63 - 1
TICKS_PER_S = 10_000_000
"""Times of public traces are held as whole ticks of 100 ns, the finest any of them writes."""
MAX_TIME_S = 3_200_000_000
"""About 100 years: keeps ticks below 2**53, so that seconds as a float name each tick."""

MAX_NUMBER = MAX_TIME_S * 1000  # a time in milliseconds
CLOCK = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,7})0*)?(?:Z|\+00:00)?", re.ASCII)


class BadRowError(TraceError):
    """A row that cannot be used. `reason` groups equal faults in counts, the message names the value."""

    def __init__(self, reason: str, detail: str | None = None) -> None:
        self.reason = reason
        super().__init__(detail or reason)


class FailedRequestError(BadRowError):
    """A row that is right but holds no request: the source recorded a failure. Dropped and counted, never an error."""


def shown(value: object) -> str:
    """The value as an error message shows it, cut when long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def whole(name: str, value: Any, lowest: int = 0, highest: int = MAX_ID) -> int:
    """A whole number, also a quoted one. Raises `BadRowError` for anything else or outside lowest..highest."""
    if type(value) is int:
        number = value
    elif value is None or (isinstance(value, str) and not value.strip()):
        raise BadRowError(f"{name} is empty")
    else:
        text = value.strip() if isinstance(value, str) else ""
        if not (text.removeprefix("-").isdigit() and text.isascii() and len(text) <= 20):
            raise BadRowError(f"{name} is not a whole number", f"{name} is {shown(value)}, must be a whole number")
        number = int(text)
    if number < lowest:
        raise BadRowError(f"{name} is below {lowest}", f"{name} is {shown(number)}, must be at least {lowest}")
    if number > highest:
        raise BadRowError(f"{name} is above {highest}", f"{name} is {shown(number)}, must be at most {highest}")
    return number


def length(name: str, value: Any) -> int:
    """A number of tokens, 1..`MAX_LENGTH_TOKENS`."""
    if type(value) is int and 1 <= value <= MAX_LENGTH_TOKENS:  # nearly always
        return value
    return whole(name, value, 1, MAX_LENGTH_TOKENS)


def number(name: str, value: Any) -> float:
    """A finite number >= 0, also a quoted one (`TICKS_PER_S` exactness is the caller's matter)."""
    if type(value) is float and 0 <= value <= MAX_NUMBER:  # nearly always
        return value
    if isinstance(value, str):
        if not value.strip():
            raise BadRowError(f"{name} is empty")
        try:
            value = float(value)
        except ValueError:
            raise BadRowError(f"{name} is not a number", f"{name} is {shown(value)}, must be a number") from None
    if value is None:
        raise BadRowError(f"{name} is empty")
    if type(value) not in {int, float} or not 0 <= value <= MAX_NUMBER:
        raise BadRowError(
            f"{name} is not a finite number >= 0", f"{name} is {shown(value)}, must be a finite number >= 0"
        )
    return float(value)


def ticks(name: str, value: Any, per_s: int = 1) -> int:
    """A time in units of 1/per_s seconds, rounded to whole ticks of 100 ns."""
    units = number(name, value)
    if units > MAX_TIME_S * per_s:
        raise BadRowError(f"{name} is out of range", f"{name} is {shown(value)}, beyond {MAX_TIME_S} s")
    return round(units * (TICKS_PER_S // per_s))


def clock_ticks(name: str, value: Any) -> int:
    """Ticks since year 1 of `YYYY-MM-DD hh:mm:ss[.f...]`, seven fractional digits kept exactly; a UTC mark may follow.

    Seven digits are finer than what Python's `datetime` holds (microseconds), hence not read with it.
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
            f"{name} is {shown(value)}, must be YYYY-MM-DD hh:mm:ss with at most 7 fractional digits",
        ) from None
    whole_seconds = ((day * 24 + int(found[2])) * 60 + int(found[3])) * 60 + int(found[4])
    return whole_seconds * TICKS_PER_S + int((found[5] or "0").ljust(7, "0"))


def ids(name: str, value: Any) -> "array[int]":
    """A list of whole numbers 0..2**63-1, packed (eight bytes each; rows of a big trace hold hundreds)."""
    if not isinstance(value, list):
        raise BadRowError(f"{name} is not a list", f"{name} is {shown(value)}, must be a list of whole numbers")
    try:
        packed = array("q", value)
        if not value or (set(map(type, value)) == {int} and min(value) >= 0):
            return packed
    except (TypeError, OverflowError):
        pass
    wrong = next(v for v in value if type(v) is not int or not 0 <= v <= MAX_ID)
    raise BadRowError(f"{name} holds something else than ids", f"{name} holds {shown(wrong)}, not an id")


def block_ids(name: str, value: Any, prompt_tokens: int, block_size: int) -> "array[int]":
    """Ids of a prompt's blocks: exactly one per started block."""
    found = ids(name, value)
    expected = -(-prompt_tokens // block_size)
    if len(found) != expected:
        raise BadRowError(
            f"{name} do not match the prompt's length",
            f"{name} holds {len(found)} ids, must be {expected} for {prompt_tokens} tokens in blocks of {block_size}",
        )
    return found


def text(name: str, value: Any) -> str | None:
    """A string or nothing; whole numbers (ids in JSON) are taken as their digits."""
    if type(value) is str and value:  # nearly always
        return value
    if value is None or value == "":
        return None
    if type(value) is int:
        return str(value)
    if not isinstance(value, str):
        raise BadRowError(f"{name} is not a string", f"{name} is {shown(value)}, must be a string")
    return value

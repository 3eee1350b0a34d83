"""Columns of a `RequestTable` that are worked out when looked at instead of being held."""

from array import array
from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """The same value in every row."""

    value: object

    def __getitem__(self, index: int) -> object:
        return self.value


@dataclass(frozen=True)
class Numbered:
    """Names made of the row's number: `prefix` + number."""

    prefix: str = ""

    def __getitem__(self, index: int) -> str:
        return f"{self.prefix}{index}"


@dataclass(frozen=True)
class NamedBy:
    """Names made of another column of numbers."""

    prefix: str
    numbers: "array[int]"

    def __getitem__(self, index: int) -> str:
        return f"{self.prefix}{self.numbers[index]}"


@dataclass(frozen=True)
class TurnNames:
    """`s<session>-t<turn>`, `back` turns earlier; None before the first turn (1)."""

    sessions: "array[int]"
    turns: "array[int]"
    back: int = 0

    def __getitem__(self, index: int) -> str | None:
        turn = self.turns[index] - self.back
        return f"s{self.sessions[index]}-t{turn}" if turn >= 1 else None


@dataclass(frozen=True)
class PrefixRanges:
    """Block ids that run on: first those of a shared beginning, then the request's or its session's own."""

    head_starts: "array[int]"
    head_ends: "array[int]"
    tail_starts: "array[int]"
    tail_ends: "array[int]"

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return (
            *range(self.head_starts[index], self.head_ends[index]),
            *range(self.tail_starts[index], self.tail_ends[index]),
        )

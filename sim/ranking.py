"""How alike two orders are."""

from collections.abc import Sequence
from math import sqrt


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Kendall's tau-b of two rankings of the same things: 1 for the same order, -1 for the opposite.

    Pairs that are tied on one side count for neither order (Kendall 1945). None where all are tied on a side.
    """
    assert len(left) == len(right)
    agree = untied_left = untied_right = 0
    for first in range(len(left)):
        for second in range(first):
            one = _sign(left[first] - left[second])
            other = _sign(right[first] - right[second])
            agree += one * other
            untied_left += one != 0
            untied_right += other != 0
    return agree / sqrt(untied_left * untied_right) if untied_left and untied_right else None


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)

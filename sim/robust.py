"""Least squares that a few disturbed values do not move: iteratively reweighted, at last without what is far off."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.nnls import nonnegative_least_squares

FloatArray = npt.NDArray[np.float64]

MAD_TO_SIGMA = 1.4826  # of a normal distribution: standard deviation / median of sizes
LEAST_SCALE = 0.01  # a spread below a hundredth is not told from none
HUBER, BISQUARE = 1.3, 4.7  # in spreads; the usual constants, 95 % efficient where all is normal
HUBER_ROUNDS, MOST_ROUNDS = 8, 60
SETTLED = 1e-9  # relative change of the parameters that ends the rounds
DIFFERENCE = 1e-4  # of a parameter's size, for its derivative
LEAST_STEP = 2.0**-8


@dataclass(frozen=True)
class Solution:
    """Parameters, the weight of every row, and the mean size of its errors as `mean_loss` counts it."""

    values: FloatArray
    weights: FloatArray
    loss: float


def weights_of(errors: FloatArray, settled: bool) -> FloatArray:
    """A weight of 0 to 1 for every error: Huber's (1964), and once the rest has settled Tukey's bisquare."""
    spread = max(MAD_TO_SIGMA * float(np.median(np.abs(errors))), LEAST_SCALE)
    if not settled:
        return np.asarray(1.0 / np.maximum(np.abs(errors) / (HUBER * spread), 1.0))
    return np.asarray(np.maximum(1.0 - (errors / (BISQUARE * spread)) ** 2, 0.0) ** 2)


def robust_linear(terms: FloatArray, measured: FloatArray) -> FloatArray:
    """The x >= 0 for which `terms @ x` comes nearest to most of `measured`, by relative errors."""
    relative = terms / measured[:, None]
    weights = np.ones(len(measured))
    found = np.zeros(terms.shape[1])
    for number in range(MOST_ROUNDS):
        root = np.sqrt(weights)
        before, found = found, nonnegative_least_squares(relative * root[:, None], root)
        if number > HUBER_ROUNDS and np.allclose(before, found, rtol=SETTLED, atol=0.0):
            break
        weights = weights_of(relative @ found - 1.0, number >= HUBER_ROUNDS)
    return found


def robust_nonlinear(
    predicted: Callable[[FloatArray], FloatArray], measured: FloatArray, start: FloatArray, most: FloatArray
) -> Solution:
    """Parameters between 0 and `most` whose prediction comes nearest to most of `measured`, by relative errors.

    Gauss-Newton from `start` (all above 0: they give the parameters' sizes), each step a non-negative least squares of
    the linearised model, halved until it is one forwards.
    """
    sizes, values = start, start.copy()
    weights = np.ones(len(measured))

    def errors(at: FloatArray) -> FloatArray:
        return np.asarray(predicted(at) / measured - 1.0)

    for number in range(MOST_ROUNDS):
        off = errors(values)
        weights = weights_of(off, number >= HUBER_ROUNDS)
        slopes = np.empty((len(measured), len(values)))
        for place, size in enumerate(sizes):
            moved, change = values.copy(), DIFFERENCE * float(size)
            if moved[place] + change > most[place]:
                change = -change
            moved[place] += change
            slopes[:, place] = (errors(moved) - off) / change
        root = np.sqrt(weights)
        aim = np.minimum(nonnegative_least_squares(slopes * root[:, None], (slopes @ values - off) * root), most)
        before, share = float((weights * off**2).sum()), 1.0
        while share >= LEAST_STEP and float((weights * errors(values + share * (aim - values)) ** 2).sum()) > before:
            share /= 2.0
        moved = values + share * (aim - values) if share >= LEAST_STEP else values
        settled = np.all(np.abs(moved - values) <= SETTLED * sizes)
        values = moved
        if settled and number > HUBER_ROUNDS:
            break
    return Solution(values, weights, mean_loss(errors(values)))


def mean_loss(errors: FloatArray) -> float:
    """How far most errors are off, to choose between solutions: their mean size, none counted above a tenth."""
    return float(np.minimum(np.abs(errors), 0.1).mean())

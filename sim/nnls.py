"""Least squares with coefficients of at least zero."""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def nonnegative_least_squares(matrix: FloatArray, values: FloatArray) -> FloatArray:
    """The x >= 0 that makes |matrix @ x - values| least: the active-set method of Lawson and Hanson (1974, chapter 23).

    `matrix [n, k]`, `values [n]`, result `[k]`. Columns are scaled to length one inside, so that units do not matter; a
    column of zeros gets the coefficient 0.
    """
    lengths = np.sqrt((matrix**2).sum(axis=0))
    scaled = matrix / np.where(lengths > 0.0, lengths, 1.0)
    num = matrix.shape[1]
    found, free = np.zeros(num), np.zeros(num, dtype=bool)
    barred = lengths == 0.0
    tolerance = 1e-10 * float(np.abs(scaled.T @ values).max(initial=0.0))
    for _ in range(3 * num):
        gain = scaled.T @ (values - scaled @ found)
        gain[free | barred] = -np.inf
        best = int(np.argmax(gain))
        if gain[best] <= tolerance:
            break
        free[best] = True
        found = _step_back(scaled, values, found, free)
    return np.where(lengths > 0.0, found / np.where(lengths > 0.0, lengths, 1.0), 0.0)


def _step_back(matrix: FloatArray, values: FloatArray, before: FloatArray, free: npt.NDArray[np.bool_]) -> FloatArray:
    """The least squares of the free columns, or as far towards them as none turns negative; those leave `free`."""
    found = before
    while True:
        wanted = np.zeros_like(found)
        wanted[free] = np.linalg.lstsq(matrix[:, free], values, rcond=None)[0]
        negative = free & (wanted <= 0.0)
        if not negative.any():
            return wanted
        share = found[negative] / (found[negative] - wanted[negative])
        found = found + float(share.min()) * (wanted - found)
        free &= found > 1e-15
        found[~free] = 0.0

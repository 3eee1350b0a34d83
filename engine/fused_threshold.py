"""`engine.filters.thresholds` without sorting: a program a row closes in on the border by halving.

The border is the least logit of a row above which there is less than so much: fewer than k tokens, or less than p of
the kept ones' mass. Every pass over the row asks this of one value in the middle and gets the nearest logits on both
sides of it, so that what is left is bounded by logits that occur; few passes do for bfloat16, which has few values.
A row is read from the cache: 2 passes, about 10 for bfloat16 (at most 50 in any format) for each of top-k and top-p,
and one or two between them.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from engine.filters import FilterSettings

TILE = 8192
NUM_WARPS = 16
MASS_UNIT = tl.constexpr(2.0**40)  # masses are whole 2^-40ths of the most probable token's: their sum has no order
MOST_TOKENS = 2**22  # so that a row's mass fits 63 bits
LINEAR_STEPS = tl.constexpr(16)


@triton.jit
def _scaled(row_logits: tl.tensor, token: tl.tensor, num_tokens: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """Scaled logits; -inf past the end. NaN is above nothing, and minima and maxima pass over it: it counts as -inf."""
    return tl.load(row_logits + token, mask=token < num_tokens, other=float("-inf")).to(tl.float32) * factor


@triton.jit
def _ordered(value: tl.tensor) -> tl.tensor:
    """The bits of a float as an integer of the same order; its own inverse but for the type."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _middle(low: tl.tensor, high: tl.tensor, step: tl.tensor) -> tl.tensor:
    """A value from `low` to below `high`: of the first steps half way, then half way of the floats between them.

    Halves of the distance suit logits, but only halves of the floats between end after 32 steps whatever they are.
    """
    first, last = _ordered(low), _ordered(high)
    between = (first & last) + ((first ^ last) >> 1)
    among_floats = (between ^ ((between >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    middle = tl.where(step < LINEAR_STEPS, 0.5 * low + 0.5 * high, among_floats)
    # Rounding may reach `high`, and the float before 0.0 is -0.0, which equals it.
    return tl.where((middle >= low) & (middle < high), middle, low)


@triton.jit
def _above(
    row_logits: tl.tensor,
    num_tokens: tl.tensor,
    factor: tl.tensor,
    highest: tl.tensor,
    border: tl.tensor,
    WEIGHED: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of the tokens above `border` the mass (or else the number) and the least; the greatest of the others.

    A place of the tile adds up its tokens' masses in float32 in the order of the tiles, then all places are added as
    integers: neither the batch nor the layout of threads can change the sum.
    """
    place = tl.arange(0, TILE)
    over_least = tl.full((TILE,), float("inf"), tl.float32)
    under_most = tl.full((TILE,), float("-inf"), tl.float32)
    amount = tl.zeros((TILE,), tl.float32 if WEIGHED else tl.int32)
    for start in range(0, num_tokens, TILE):
        value = _scaled(row_logits, start + place, num_tokens, factor)
        over = value > border
        if WEIGHED:
            amount += tl.where(over, tl.exp(value - highest), 0.0)
        else:
            amount += over.to(tl.int32)
        over_least = tl.minimum(over_least, tl.where(over, value, float("inf")))
        under_most = tl.maximum(under_most, tl.where(over, float("-inf"), value))
    if WEIGHED:
        amount *= MASS_UNIT
    total = tl.sum(amount.to(tl.int64), axis=0)
    return total, tl.min(over_least, axis=0), tl.max(under_most, axis=0)


@triton.jit
def _least(
    row_logits: tl.tensor,
    num_tokens: tl.tensor,
    factor: tl.tensor,
    highest: tl.tensor,
    low: tl.tensor,
    bound: tl.tensor,
    WEIGHED: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The least logit, of those from `low` up, with less than `bound` (float64, above 0) above it.

    The answer is never below `low` nor above `high`, and `high` is a logit that could be it. A step raises `low` above
    the middle, to a logit, or lowers `high` to the middle or below, so the two meet.
    """
    high = highest
    step = 0
    while low < high:
        middle = _middle(low, high, step)
        amount, over_least, under_most = _above(row_logits, num_tokens, factor, highest, middle, WEIGHED, TILE)
        less = amount.to(tl.float64) < bound
        high = tl.where(less, under_most, high)
        low = tl.where(less, low, over_least)
        step += 1
    return high


@triton.jit
def _threshold_kernel(
    logits: tl.tensor,
    inverse_temperature: tl.tensor,
    rows: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    log_min_p: tl.tensor,
    border: tl.tensor,
    num_tokens: tl.tensor,
    row_stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    place = tl.arange(0, TILE)
    row = tl.load(rows + tl.program_id(0))
    row_logits = logits + row * row_stride
    factor = tl.load(inverse_temperature + row)
    most = tl.full((TILE,), float("-inf"), tl.float32)
    least = tl.full((TILE,), float("inf"), tl.float32)
    finite = tl.zeros((TILE,), tl.int32)
    for start in range(0, num_tokens, TILE):
        value = _scaled(row_logits, start + place, num_tokens, factor)
        possible = value > float("-inf")
        most = tl.maximum(most, value)
        least = tl.minimum(least, tl.where(possible, value, float("inf")))
        finite += possible.to(tl.int32)
    highest, num_possible = tl.max(most, axis=0), tl.sum(finite, axis=0).to(tl.int64)
    lowest = tl.minimum(tl.min(least, axis=0), highest)
    if highest == float("inf"):
        lowest = highest  # nothing else has any probability
    asked = tl.load(top_k + tl.program_id(0))
    share = tl.load(top_p + tl.program_id(0))
    found, under = lowest, float("-inf")
    ties = tl.zeros((), tl.float64)
    if asked < num_possible:
        found = _least(row_logits, num_tokens, factor, highest, lowest, asked.to(tl.float64), False, TILE)
        under = found
        num_above, _, _ = _above(row_logits, num_tokens, factor, highest, found, False, TILE)
        # Of the tokens that tie at the border of top-k so many count as make up k.
        ties = (asked - num_above).to(tl.float64) * tl.exp(found - highest).to(tl.float64)
    if (share < 1.0) & (found < highest):
        mass, _, _ = _above(row_logits, num_tokens, factor, highest, under, True, TILE)
        kept_mass = mass.to(tl.float64) / MASS_UNIT + ties
        # All tokens below this together, were they all just below it, are a third of what top-p may leave out.
        negligible = highest + tl.log((1.0 - share) * kept_mass.to(tl.float32) / num_tokens) - 1.0
        bound = kept_mass * share.to(tl.float64) * MASS_UNIT
        low = tl.maximum(found, negligible)
        found = _least(row_logits, num_tokens, factor, highest, low, bound, True, TILE)
    limit = highest + tl.load(log_min_p + tl.program_id(0))
    if (asked < num_tokens) | (share < 1.0):
        limit = tl.maximum(limit, found)
    tl.store(border + row, limit)


def thresholds(logits: torch.Tensor, inverse_temperature: torch.Tensor, filters: FilterSettings) -> torch.Tensor:
    """See `engine.filters.thresholds`; rows of `logits` may be strided. NaN counts as -inf.

    Top-p's border may differ from the twin's where the mass above a token is p to within 1e-5: float32 exponentials.
    """
    num_rows, num_tokens = logits.shape
    assert num_tokens <= MOST_TOKENS, num_tokens
    border = torch.full((num_rows,), float("-inf"), dtype=torch.float32, device=logits.device)
    # Sizes are specialised on purpose: a model has one, and rows that begin at multiples of 16 are read in wide loads.
    _threshold_kernel[(filters.rows.shape[0],)](
        logits, inverse_temperature, filters.rows, filters.top_k, filters.top_p, filters.min_p.log(), border,
        num_tokens, logits.stride(0), TILE=TILE, num_warps=NUM_WARPS,
    )  # fmt: skip
    return border

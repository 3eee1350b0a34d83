"""Sampling in Triton: `draw` in one pass over the logits, and `thresholds` without sorting.

`draw` uses the hash and the race of `zlab.engine.sampling.torch_ops` and writes a partial winner
for each chunk of the vocabulary.

`thresholds` runs one program for each row. It searches the smallest logit above which there are
fewer than k tokens, or less than p of the kept probability mass, by bisection. Every pass over the
row tests one value in the middle and returns the nearest logits on both sides, so the bounds are
always logits that occur. bfloat16 has few values and needs about 10 passes, other formats at most
50, for each of top-k and top-p, and one or two between them. A row is read from the cache after the
first pass.
"""

import torch
import triton
import triton.language as tl

from zlab.engine.kernels import torch_backend as hashing
from zlab.engine.sampling import torch_ops as draws
from zlab.engine.sampling.torch_ops import FilterSettings

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"


FIRST_MULTIPLIER = tl.constexpr(hashing.MULTIPLIERS[0])
SECOND_MULTIPLIER = tl.constexpr(hashing.MULTIPLIERS[1])
TOKEN_STEP = tl.constexpr(hashing.LAYER_STEP)
PLACE_STEP = tl.constexpr(hashing.TOKEN_STEP)
SECOND_KEY = tl.constexpr(draws.SECOND_KEY)
SMALL = tl.constexpr(draws.SMALL)
LARGEST = tl.constexpr(draws.LARGEST)
NOT_FINITE = tl.constexpr(draws.NOT_FINITE)
CHUNK = 4096


@triton.jit
def _mix(state: tl.tensor) -> tl.tensor:
    """Compute `torch_backend.mix` on uint32."""
    state ^= state >> 16
    state *= FIRST_MULTIPLIER
    state ^= state >> 15
    state *= SECOND_MULTIPLIER
    return state ^ (state >> 16)


@triton.jit
def _draw_kernel(
    logits: tl.tensor,
    inverse_temperature: tl.tensor,
    noise: tl.tensor,
    seeds: tl.tensor,
    places: tl.tensor,
    threshold: tl.tensor,
    best: tl.tensor,
    best_token: tl.tensor,
    num_tokens: tl.tensor,
    row_stride: tl.tensor,
    HAS_NOISE: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    CHECKS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < num_tokens
    score = tl.load(
        logits + row.to(tl.int64) * row_stride + token, mask=inside, other=float("-inf")
    ).to(tl.float32)
    if CHECKS:
        strange = tl.max((inside & ~(tl.abs(score) < float("inf"))).to(tl.int32), axis=0) > 0
    if HAS_NOISE:
        score *= tl.load(inverse_temperature + row)
        allowed = inside
        if HAS_THRESHOLD:
            allowed = inside & (score >= tl.load(threshold + row))
        if tl.load(noise + row) > 0:
            seed = tl.load(seeds + row)
            place = tl.load(places + row).to(tl.uint32)
            low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
            first = _mix(_mix(_mix(low) + high) + place)
            second = _mix(_mix(_mix(high ^ SECOND_KEY) + low) + place * PLACE_STEP)
            bits = _mix(_mix(token.to(tl.uint32) * TOKEN_STEP + first) ^ second)
            uniform = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), LARGEST)
            series = uniform + 0.5 * uniform * uniform
            race = tl.where(uniform < SMALL, series, -tl.log(1.0 - uniform))
            score -= tl.log(race)
        score = tl.where(allowed, score, float("-inf"))
    score = tl.where(score > float("-inf"), score, float("-inf"))  # NaN never wins
    place_out = row * tl.num_programs(1) + chunk
    highest, where = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    winner = chunk * CHUNK + where
    if CHECKS:  # the argmax over the chunks takes a NaN as the greatest value
        highest = tl.where(strange, float("nan"), highest)
        winner = tl.where(strange, NOT_FINITE, winner)
    tl.store(best + place_out, highest)
    tl.store(best_token + place_out, winner)


def draw(
    logits: torch.Tensor,
    inverse_temperature: torch.Tensor,
    noise: torch.Tensor,
    seeds: torch.Tensor,
    places: torch.Tensor,
    threshold: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample a token for every row; see `zlab.engine.sampling.torch_ops.draw`.

    Args:
        logits: `[rows, vocab]`; rows may be strided.
        inverse_temperature: `[rows]` float32.
        noise: 0 for greedy rows, else 1, `[rows]` float32.
        seeds: `[rows]` int64.
        places: places in the outputs, `[rows]` int64.
        threshold: smallest scaled logits that may be sampled, `[rows]` float32.
    """
    return _launch(logits, (inverse_temperature, noise, seeds, places), threshold)


def most_probable(logits: torch.Tensor) -> torch.Tensor:
    """Return the argmax of every row, the lowest id of equal ones, `[rows]` int64."""
    return _launch(logits, None, None)


def checked_most_probable(logits: torch.Tensor) -> torch.Tensor:
    """Return `zlab.engine.sampling.torch_ops.checked_most_probable`; one pass finds the argmax and
    checks the logits.
    """
    return _launch(logits, None, None, checks=True)


def _launch(
    logits: torch.Tensor,
    settings: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
    threshold: torch.Tensor | None,
    checks: bool = False,
) -> torch.Tensor:
    num_rows, num_tokens = logits.shape
    num_chunks = triton.cdiv(num_tokens, CHUNK)
    best = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    best_token = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    # The kernel never reads an absent tensor; the logits take its place.
    inverse_temperature, noise, seeds, places = settings if settings is not None else (logits,) * 4
    _draw_kernel[(num_rows, num_chunks)](
        logits,
        inverse_temperature,
        noise,
        seeds,
        places,
        threshold if threshold is not None else logits,
        best,
        best_token,
        num_tokens,
        logits.stride(0),
        HAS_NOISE=settings is not None,
        HAS_THRESHOLD=threshold is not None,
        CHECKS=checks,
        CHUNK=CHUNK,
        num_warps=8,
    )
    return best_token.gather(1, best.argmax(dim=1, keepdim=True)).squeeze(1)


@triton.jit
def _keep_allowed_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    masks: tl.tensor,
    num_tokens: tl.tensor,
    num_words: tl.tensor,
    row_stride: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    place, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < num_tokens
    word = tl.load(masks + place.to(tl.int64) * num_words + token // 32, mask=inside, other=-1)
    excluded = inside & (((word >> (token % 32)) & 1) == 0)
    target = logits + tl.load(rows + place) * row_stride + token
    tl.store(target, tl.full((CHUNK,), float("-inf"), tl.float32), mask=excluded)


def keep_allowed(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Set excluded logits to -inf, in place; see `zlab.engine.sampling.torch_ops.keep_allowed`.

    Args:
        logits: `[all rows, vocab]` float32.
        rows: the rows to mask, `[rows]` int64.
        masks: `[rows, words]` int32, contiguous.
    """
    num_tokens = logits.shape[-1]
    grid = (len(rows), triton.cdiv(num_tokens, CHUNK))
    _keep_allowed_kernel[grid](
        logits, rows, masks, num_tokens, masks.shape[1], logits.stride(0), CHUNK=CHUNK
    )


TILE = 8192
NUM_WARPS = 16
MASS_UNIT = tl.constexpr(
    2.0**40
    # masses are integers, in units of 2^-40 of the most probable token's mass, so their sum has no
    # order
)
MOST_TOKENS = 2**22  # so that the mass of a row fits into 63 bits
LINEAR_STEPS = tl.constexpr(16)


@triton.jit
def _scaled(
    row_logits: tl.tensor, token: tl.tensor, num_tokens: tl.tensor, factor: tl.tensor
) -> tl.tensor:
    """Return scaled logits, -inf after the end. NaN compares as smaller than all, and minima and
    maxima ignore it, so it counts as -inf.
    """
    return (
        tl.load(row_logits + token, mask=token < num_tokens, other=float("-inf")).to(tl.float32)
        * factor
    )


@triton.jit
def _ordered(value: tl.tensor) -> tl.tensor:
    """Return the bits of a float as an integer of the same order. Up to the type it is its own
    inverse.
    """
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _middle(low: tl.tensor, high: tl.tensor, step: tl.tensor) -> tl.tensor:
    """Return a value from `low` to below `high`. The first steps halve the distance, later steps
    halve the number of floats between.

    Halving the distance suits logits, but only halving the floats ends after 32 steps for all
    values.
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
    """Return, for the tokens above `border`, their mass (or number) and their smallest logit, and
    the greatest logit of the others.

    Each lane of the tile adds masses in float32 in the order of the tiles, then all lanes are added
    as integers. So neither the batch nor the thread layout changes the sum.
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
    """Return the smallest logit of at least `low` that has less than `bound` (float64, above 0)
    above it.

    The answer lies between `low` and `high`, and `high` is always a logit that qualifies. A step
    raises `low` above the middle, to a logit, or lowers `high` to the middle or below, so the two
    meet.
    """
    high = highest
    step = 0
    while low < high:
        middle = _middle(low, high, step)
        amount, over_least, under_most = _above(
            row_logits, num_tokens, factor, highest, middle, WEIGHED, TILE
        )
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
        lowest = highest  # no other token has any probability
    asked = tl.load(top_k + tl.program_id(0))
    share = tl.load(top_p + tl.program_id(0))
    found, under = lowest, float("-inf")
    ties = tl.zeros((), tl.float64)
    if asked < num_possible:
        found = _least(
            row_logits, num_tokens, factor, highest, lowest, asked.to(tl.float64), False, TILE
        )
        under = found
        num_above, _, _ = _above(row_logits, num_tokens, factor, highest, found, False, TILE)
        # Of the tokens that tie at the border of top-k, only as many count as complete k.
        ties = (asked - num_above).to(tl.float64) * tl.exp(found - highest).to(tl.float64)
    if (share < 1.0) & (found < highest):
        mass, _, _ = _above(row_logits, num_tokens, factor, highest, under, True, TILE)
        kept_mass = mass.to(tl.float64) / MASS_UNIT + ties
        # All tokens below this, even if all were just below it, have a third of the mass that top-p
        # may leave out.
        negligible = highest + tl.log((1.0 - share) * kept_mass.to(tl.float32) / num_tokens) - 1.0
        bound = kept_mass * share.to(tl.float64) * MASS_UNIT
        low = tl.maximum(found, negligible)
        found = _least(row_logits, num_tokens, factor, highest, low, bound, True, TILE)
    limit = highest + tl.load(log_min_p + tl.program_id(0))
    if (asked < num_tokens) | (share < 1.0):
        limit = tl.maximum(limit, found)
    tl.store(border + row, limit)


def thresholds(
    logits: torch.Tensor, inverse_temperature: torch.Tensor, filters: FilterSettings
) -> torch.Tensor:
    """Return the smallest scaled logit of each row that may be sampled; see
    `zlab.engine.sampling.torch_ops.thresholds`.

    NaN counts as -inf. The threshold of top-p may differ from that of plain torch where the mass
    above a token is p to within 1e-5, because exponentials are float32 here.

    Args:
        logits: `[rows, vocab]`; rows may be strided.
        inverse_temperature: `[rows]` float32.
        filters: the filters of the rows.
    """
    num_rows, num_tokens = logits.shape
    assert num_tokens <= MOST_TOKENS, num_tokens
    border = torch.full((num_rows,), float("-inf"), dtype=torch.float32, device=logits.device)
    # Sizes are specialised on purpose: a model has one vocabulary size, and rows that begin at
    # multiples of 16 are read in wide loads.
    _threshold_kernel[(filters.rows.shape[0],)](
        logits,
        inverse_temperature,
        filters.rows,
        filters.top_k,
        filters.top_p,
        filters.min_p.log(),
        border,
        num_tokens,
        logits.stride(0),
        TILE=TILE,
        num_warps=NUM_WARPS,
    )
    return border

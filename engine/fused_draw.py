"""`engine.draws.draw` in one pass over the logits: the same hash, the same race, a partial winner per chunk."""

# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from engine import draws
from engine.kernels import hashing

FIRST_MULTIPLIER = tl.constexpr(hashing.MULTIPLIERS[0])
SECOND_MULTIPLIER = tl.constexpr(hashing.MULTIPLIERS[1])
TOKEN_STEP = tl.constexpr(hashing.LAYER_STEP)
PLACE_STEP = tl.constexpr(hashing.TOKEN_STEP)
SECOND_KEY = tl.constexpr(draws.SECOND_KEY)
SMALL = tl.constexpr(draws.SMALL)
LARGEST = tl.constexpr(draws.LARGEST)
CHUNK = 4096


@triton.jit
def _mix(state: tl.tensor) -> tl.tensor:
    """`hashing.mix` on uint32."""
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
    CHUNK: tl.constexpr,
) -> None:
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < num_tokens
    score = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
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
    place_out = row * tl.num_programs(1) + chunk
    highest, where = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + place_out, highest)
    tl.store(best_token + place_out, chunk * CHUNK + where)


def draw(
    logits: torch.Tensor,
    inverse_temperature: torch.Tensor,
    noise: torch.Tensor,
    seeds: torch.Tensor,
    places: torch.Tensor,
    threshold: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `engine.draws.draw`; rows of `logits` may be strided."""
    return _launch(logits, (inverse_temperature, noise, seeds, places), threshold)


def most_probable(logits: torch.Tensor) -> torch.Tensor:
    """The argmax of every row, the lowest id of equal ones, `[rows]` int64."""
    return _launch(logits, None, None)


def _launch(
    logits: torch.Tensor,
    settings: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
    threshold: torch.Tensor | None,
) -> torch.Tensor:
    num_rows, num_tokens = logits.shape
    num_chunks = triton.cdiv(num_tokens, CHUNK)
    best = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    best_token = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    # What is absent is never read; the logits stand in for its pointer.
    inverse_temperature, noise, seeds, places = settings if settings is not None else (logits,) * 4
    _draw_kernel[(num_rows, num_chunks)](
        logits, inverse_temperature, noise, seeds, places, threshold if threshold is not None else logits,
        best, best_token, num_tokens, logits.stride(0),
        HAS_NOISE=settings is not None, HAS_THRESHOLD=threshold is not None, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    return best_token.gather(1, best.argmax(dim=1, keepdim=True)).squeeze(1)

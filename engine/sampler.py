"""Drawing the next token of every request of a step, on the device, without waiting for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.draw_choice import draw, most_probable, thresholds
from engine.errors import SamplingError
from engine.filters import FilterSettings
from engine.kernels.hashing import mix
from engine.penalties import TokenCounts
from engine.sampling_params import SEED_BITS, SamplingParams
from engine.transfer import moved, sent

MOST_TOP_K = 1024  # up to here a partial selection; beyond, a row is sorted


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One row to draw: `seed` is `request_seed`'s, `place` the number of tokens generated so far.

    `penalty_slot` is the request's slot in `TokenCounts`, for parameters that penalise.
    """

    params: SamplingParams
    seed: int
    place: int
    penalty_slot: int | None = None


@dataclass(frozen=True)
class RowSettings:
    """What `draw` needs of every row, on the device: float32 and int64 `[rows]`."""

    inverse_temperature: torch.Tensor
    noise: torch.Tensor
    seeds: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True)
class PenaltySettings:
    """Rows (int64) that are penalised, their slots and penalties; `all_slots` has one for every row of the step."""

    rows: torch.Tensor
    slots: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    all_slots: torch.Tensor


@dataclass(frozen=True)
class SamplePlan:
    """A step's rows laid out; what is None no row asks for. `num_logprobs` is the most that any row asks for."""

    settings: RowSettings
    all_greedy: bool
    filters: FilterSettings | None = None
    penalties: PenaltySettings | None = None
    num_logprobs: int | None = None


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of probabilities before penalties and temperature; ranks count from 1.

    `chosen`, `chosen_rank [rows]`; `top_ids`, `top [rows, num_logprobs]`, most probable first.
    """

    chosen: torch.Tensor
    chosen_rank: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


@dataclass(frozen=True)
class Sampled:
    """Token ids `[rows]` int64 on the device, and log-probabilities when some row asked."""

    token_ids: torch.Tensor
    logprobs: Logprobs | None = None


def request_seed(params: SamplingParams, *, engine_seed: int, request_number: int, copy: int = 0) -> int:
    """The seed of one output: of its own seed and which of `n` it is, or else of the engine's seed and its number."""
    parts = (params.seed, copy) if params.seed is not None else (engine_seed, request_number + 1, copy)
    low = high = len(parts)
    for part in parts:
        for word in (part & 0xFFFFFFFF, part >> 32):
            low, high = mix(mix(low) + word), mix(mix(high ^ 0xA5A5A5A5) + word)
    return (high << 32 | low) & ((1 << SEED_BITS) - 1)


class Sampler:
    """Lays out a step's rows on a device and draws from logits. Holds nothing of any request but the counts."""

    def __init__(self, vocab_size: int, device: torch.device, *, counts: TokenCounts | None = None) -> None:
        """`counts` is needed once a request penalises."""
        self.vocab_size = vocab_size
        self.device = device
        self.counts = counts

    def plan(self, requests: Sequence[SampleRequest]) -> SamplePlan:
        """Lay out the rows of a step, in the order of the logits; nothing waits for the device."""
        params = [request.params for request in requests]
        logprobs = [item.logprobs for item in params if item.logprobs is not None]
        return SamplePlan(
            settings=RowSettings(
                self._floats([1.0 if item.is_greedy else 1.0 / item.temperature for item in params]),
                self._floats([0.0 if item.is_greedy else 1.0 for item in params]),
                self._ints([request.seed for request in requests]),
                self._ints([request.place for request in requests]),
            ),
            all_greedy=all(item.is_greedy for item in params),
            filters=self._filters(params),
            penalties=self._penalties(requests),
            num_logprobs=max(logprobs) if logprobs else None,
        )

    def moved(self, plan: SamplePlan, places: list[int]) -> SamplePlan:
        """The same rows with other places: all that changes while a step has the rows of the one before."""
        return replace(plan, settings=replace(plan.settings, places=self._ints(places)))

    def sample(self, logits: torch.Tensor, plan: SamplePlan) -> Sampled:
        """One token for every row of `logits [rows, vocab]` (any float dtype; left as they are)."""
        settings = plan.settings
        penalised = self._penalised(logits, plan.penalties) if plan.penalties else logits
        if plan.all_greedy:
            token_ids = most_probable(penalised)
        else:
            threshold = None
            if plan.filters is not None:
                threshold = thresholds(penalised, settings.inverse_temperature, plan.filters)
            token_ids = draw(
                penalised,
                settings.inverse_temperature,
                settings.noise,
                settings.seeds,
                settings.places,
                threshold,
            )
        if plan.penalties is not None and self.counts is not None:
            self.counts.add(plan.penalties.all_slots, token_ids)
        logprobs = None if plan.num_logprobs is None else log_probabilities(logits, token_ids, plan.num_logprobs)
        return Sampled(token_ids, logprobs)

    def _penalised(self, logits: torch.Tensor, settings: PenaltySettings) -> torch.Tensor:
        assert self.counts is not None
        rows = settings.rows
        wide = logits.float() if logits.dtype != torch.float32 else logits.clone()
        wide[rows] = self.counts.penalise(
            wide[rows], settings.slots, settings.repetition, settings.presence, settings.frequency
        )
        return wide

    def _filters(self, params: Sequence[SamplingParams]) -> FilterSettings | None:
        rows = [row for row, item in enumerate(params) if item.filters]
        if not rows:
            return None
        chosen = [params[row] for row in rows]
        top_k = [min(item.top_k, self.vocab_size) if item.top_k > 0 else self.vocab_size for item in chosen]
        # A row that asks for min-p alone needs no order of its tokens, so it does not widen the selection.
        needed = [k for k, item in zip(top_k, chosen, strict=True) if item.top_k > 0 or item.top_p < 1.0]
        widest = max(needed, default=1)
        return FilterSettings(
            rows=self._ints(rows),
            top_k=self._ints(top_k),
            top_p=self._floats([item.top_p for item in chosen]),
            min_p=self._floats([item.min_p for item in chosen]),
            widest_k=widest if widest <= MOST_TOP_K else 0,
            sorts=bool(needed),
        )

    def _penalties(self, requests: Sequence[SampleRequest]) -> PenaltySettings | None:
        rows = [row for row, request in enumerate(requests) if request.params.penalises]
        if not rows:
            return None
        if self.counts is None:
            raise SamplingError("a request has penalties, but the sampler was made without token counts")
        chosen = [requests[row] for row in rows]
        if missing := [row for row, request in zip(rows, chosen, strict=True) if request.penalty_slot is None]:
            raise SamplingError(f"rows {missing} have penalties but no penalty slot")
        slots = [
            request.penalty_slot if request.params.penalises and request.penalty_slot is not None else None
            for request in requests
        ]
        spare = self.counts.spare_slot
        return PenaltySettings(
            rows=self._ints(rows),
            slots=self._ints([slot for slot in slots if slot is not None]),
            repetition=self._floats([request.params.repetition_penalty for request in chosen]),
            presence=self._floats([request.params.presence_penalty for request in chosen]),
            frequency=self._floats([request.params.frequency_penalty for request in chosen]),
            all_slots=self._ints([spare if slot is None else slot for slot in slots]),
        )

    def _floats(self, values: list[float]) -> torch.Tensor:
        return moved(torch.tensor(values, dtype=torch.float32), self.device)

    def _ints(self, values: list[int]) -> torch.Tensor:
        return sent(values, self.device)


def log_probabilities(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """Of the chosen tokens and the `num_top` most probable, from logits before any change."""
    wide = torch.log_softmax(logits.float(), dim=-1)
    chosen = wide.gather(-1, token_ids[:, None])
    top = wide.topk(num_top, dim=-1)
    return Logprobs(chosen.squeeze(-1), (wide > chosen).sum(dim=-1) + 1, top.indices, top.values)

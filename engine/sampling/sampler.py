"""Sampling of the next token of every request of a step, on the device and without waiting for it.

`StepSampler` is the runner's interface, by request number. It lays out the rows of a step
(`Sampler.plan`), and the device then applies, in this order:

    logits -> constraints (`constrain`) -> penalties (`TokenCounts`) -> temperature
           -> top-k, top-p, min-p (`thresholds`) -> `draw`

Triton kernels run on CUDA and plain torch elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from zlab.engine.errors import SamplingError
from zlab.engine.input_batch import moved, sent
from zlab.engine.kernels.torch_backend import mix
from zlab.engine.sampling import torch_ops as draws
from zlab.engine.sampling import torch_ops as filters
from zlab.engine.sampling.constraints import ConstrainedRow, Constraint, constrain
from zlab.engine.sampling.torch_ops import FilterSettings
from zlab.engine.sampling_params import SEED_BITS, SamplingParams


class TokenCounts:
    """Counts of the tokens of prompt and output, for up to `num_slots` requests at a time.

    Each slot has a row `[vocab]`: one byte for the prompt and four for the output. One spare slot
    takes the tokens of requests without penalties, so that adding the tokens of a step needs no
    branch on data.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._in_prompt = torch.zeros(num_slots + 1, vocab_size, dtype=torch.bool, device=device)
        self._in_output = torch.zeros(num_slots + 1, vocab_size, dtype=torch.int32, device=device)

    @staticmethod
    def bytes_needed(num_slots: int, vocab_size: int) -> int:
        """Return the device bytes of the counts."""
        return (num_slots + 1) * vocab_size * 5

    @property
    def spare_slot(self) -> int:
        """The slot of requests that are not counted."""
        return self.num_slots

    def begin(self, slot: int, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        """Give a slot to a request.

        Args:
            slot: the slot.
            prompt: tokens of the prompt.
            output: tokens generated so far, where the request was preempted.

        Raises:
            SamplingError: there is no such slot.
        """
        if not 0 <= slot < self.num_slots:
            raise SamplingError(f"penalty slot must lie in 0..{self.num_slots - 1}, got {slot}")
        device = self._in_prompt.device
        self._in_prompt[slot] = False
        self._in_output[slot] = 0
        if prompt:
            self._in_prompt[slot, torch.tensor(list(prompt), device=device)] = True
        if output:
            self.add(
                torch.full((len(output),), slot, device=device),
                torch.tensor(list(output), device=device),
            )

    def add(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count one more token in each of `slots` (int64). Requests that are not counted use the
        spare slot.
        """
        ones = torch.ones_like(token_ids, dtype=torch.int32)
        self._in_output.index_put_((slots, token_ids), ones, accumulate=True)

    def penalise(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        repetition: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
    ) -> torch.Tensor:
        """Return logits after the penalties of each row.

        The logit of a token in prompt or output is divided by `repetition` when it is positive and
        multiplied when it is negative (arXiv 1909.05858). Then `frequency` times the token's count
        in the output is subtracted, and `presence` if the token is in the output.

        Args:
            logits: `[rows, vocab]` float32.
            slots: slot of each row, `[rows]` int64.
            repetition: repetition penalties `[rows]`.
            presence: presence penalties `[rows]`.
            frequency: frequency penalties `[rows]`.
        """
        counts = self._in_output[slots]
        in_output = counts > 0
        seen = self._in_prompt[slots] | in_output
        factor = repetition[:, None]
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(seen, repeated, logits)
        return logits - frequency[:, None] * counts - presence[:, None] * in_output


MostProbable = Callable[[torch.Tensor], torch.Tensor]
ON_CUDA: MostProbable = draws.most_probable
CHECKED_ON_CUDA: MostProbable = draws.checked_most_probable
draw_on_cuda = draws.draw
thresholds_on_cuda = filters.thresholds
try:
    from zlab.engine.sampling import triton_ops as fused_draw
    from zlab.engine.sampling import triton_ops as fused_threshold
except ImportError:  # Triton does not support this platform
    pass
else:
    ON_CUDA = fused_draw.most_probable
    CHECKED_ON_CUDA = fused_draw.checked_most_probable
    draw_on_cuda = fused_draw.draw
    thresholds_on_cuda = fused_threshold.thresholds


def most_probable(logits: torch.Tensor) -> torch.Tensor:
    """Return the most probable token of every row; see
    `zlab.engine.sampling.torch_ops.most_probable`.
    """
    return ON_CUDA(logits) if logits.is_cuda else draws.most_probable(logits)


def checked_most_probable(logits: torch.Tensor) -> torch.Tensor:
    """Return the most probable tokens and mark bad rows; see
    `zlab.engine.sampling.torch_ops.checked_most_probable`.
    """
    return CHECKED_ON_CUDA(logits) if logits.is_cuda else draws.checked_most_probable(logits)


def thresholds(
    logits: torch.Tensor, inverse_temperature: torch.Tensor, settings: filters.FilterSettings
) -> torch.Tensor:
    """Return the smallest logit of each row that may be sampled; see
    `zlab.engine.sampling.torch_ops.thresholds`.

    Args:
        logits: `[rows, vocab]`.
        inverse_temperature: `[rows]` float32.
        settings: the filters of the rows.
    """
    chosen = thresholds_on_cuda if logits.is_cuda else filters.thresholds
    return chosen(logits, inverse_temperature, settings)


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
        logits: `[rows, vocab]`.
        inverse_temperature: `[rows]` float32.
        noise: 0 for greedy rows, else 1, `[rows]` float32.
        seeds: `[rows]` int64.
        places: places in the outputs, `[rows]` int64.
        threshold: smallest scaled logits that may be sampled, `[rows]` float32.
    """
    chosen = draw_on_cuda if logits.is_cuda else draws.draw
    return chosen(logits, inverse_temperature, noise, seeds, places, threshold)


LOGIT_ROWS = 256  # rows of a prompt whose logits are in memory at once
MOST_TOP_K = 1024  # a selection up to here; rows that keep more tokens are sorted


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One row to sample: `seed` is that of `request_seed`, `place` the number of tokens generated
    so far.

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
    """Rows (int64) that are penalised, their slots and penalties. `all_slots` has a slot for every
    row of the step.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    all_slots: torch.Tensor


@dataclass(frozen=True)
class SamplePlan:
    """The rows of a step on the device. A part is None where no row asks for it; `num_logprobs` is
    the most that a row asks for.
    """

    settings: RowSettings
    all_greedy: bool
    filters: FilterSettings | None = None
    penalties: PenaltySettings | None = None
    num_logprobs: int | None = None


@dataclass(frozen=True)
class Logprobs:
    """Natural log-probabilities before penalties and temperature; ranks count from 1.

    `chosen` and `chosen_rank` are `[rows]`, `top_ids` and `top` are `[rows, num_logprobs]`, most
    probable first.
    """

    chosen: torch.Tensor
    chosen_rank: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


@dataclass(frozen=True)
class Sampled:
    """Token ids `[rows]` int64 on the device, and log-probabilities where a row asks for them."""

    token_ids: torch.Tensor
    logprobs: Logprobs | None = None


def request_seed(
    params: SamplingParams, *, engine_seed: int, request_number: int, copy: int = 0
) -> int:
    """Return the seed of one output, from the request's own seed or else from the engine's.

    Args:
        params: sampling parameters; their seed is used with `copy` where it is given.
        engine_seed: the engine's seed, used with the request number.
        request_number: number of the request.
        copy: which of `params.n` outputs this is.
    """
    parts = (
        (params.seed, copy) if params.seed is not None else (engine_seed, request_number + 1, copy)
    )
    low = high = len(parts)
    for part in parts:
        for word in (part & 0xFFFFFFFF, part >> 32):
            low, high = mix(mix(low) + word), mix(mix(high ^ 0xA5A5A5A5) + word)
    return (high << 32 | low) & ((1 << SEED_BITS) - 1)


class Sampler:
    """Lays out the rows of a step on the device and samples from logits. The only state of requests
    is the counts.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, *, counts: TokenCounts | None = None
    ) -> None:
        """Make a sampler. `counts` is needed as soon as a request penalises."""
        self.vocab_size = vocab_size
        self.device = device
        self.counts = counts

    def plan(self, requests: Sequence[SampleRequest]) -> SamplePlan:
        """Lay out the rows of a step, in the order of the logits. Nothing waits for the device."""
        params = [request.params for request in requests]
        logprobs = [item.logprobs for item in params if item.logprobs is not None]
        return SamplePlan(
            settings=RowSettings(
                self._floats(
                    [1.0 if item.is_greedy else 1.0 / item.temperature for item in params]
                ),
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
        """Return the same rows with other places, which is all that changes while consecutive steps
        have the same rows.
        """
        return replace(plan, settings=replace(plan.settings, places=self._ints(places)))

    def sample(
        self, logits: torch.Tensor, plan: SamplePlan, constrained: Sequence[ConstrainedRow] = ()
    ) -> Sampled:
        """Return one token for each row of `logits [rows, vocab]` (any dtype; not modified).

        Args:
            logits: the model's logits; log-probabilities are theirs.
            plan: the rows.
            constrained: the rows whose tokens are constrained.
        """
        settings = plan.settings
        allowed = constrain(logits, constrained) if constrained else logits
        penalised = self._penalised(allowed, plan.penalties) if plan.penalties else allowed
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
        logprobs = (
            None
            if plan.num_logprobs is None
            else log_probabilities(logits, token_ids, plan.num_logprobs)
        )
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
        top_k = [
            min(item.top_k, self.vocab_size) if item.top_k > 0 else self.vocab_size
            for item in chosen
        ]
        # min-p alone needs no order of the tokens, so such a row does not widen the selection.
        needed = [
            k for k, item in zip(top_k, chosen, strict=True) if item.top_k > 0 or item.top_p < 1.0
        ]
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
            raise SamplingError(
                "a request has penalties, but the sampler was made without token counts"
            )
        chosen = [requests[row] for row in rows]
        if missing := [
            row for row, request in zip(rows, chosen, strict=True) if request.penalty_slot is None
        ]:
            raise SamplingError(f"rows {missing} have penalties but no penalty slot")
        slots = [
            request.penalty_slot
            if request.params.penalises and request.penalty_slot is not None
            else None
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
    """Return log-probabilities of the sampled tokens and of the `num_top` most probable ones, from
    unmodified logits.
    """
    wide = torch.log_softmax(logits.float(), dim=-1)
    chosen = wide.gather(-1, token_ids[:, None])
    top = wide.topk(num_top, dim=-1)
    return Logprobs(chosen.squeeze(-1), (wide > chosen).sum(dim=-1) + 1, top.indices, top.values)


OutputIds = Callable[[int], Sequence[int]]  # request number -> output ids so far


@dataclass(frozen=True)
class _Known:
    params: SamplingParams
    seed: int
    prompt_ids: Sequence[int]
    constraint: Constraint | None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability and rank (from 1) of one sampled token, and the most probable tokens with
    theirs.
    """

    chosen: float
    rank: int
    top: tuple[tuple[int, float], ...]


def row_of(logprobs: Logprobs, row: int, num_top: int) -> TokenLogprobs:
    """Return one row of log-probabilities that are on the host."""
    ids: list[int] = logprobs.top_ids[row, :num_top].tolist()
    values: list[float] = logprobs.top[row, :num_top].tolist()
    chosen, rank = float(logprobs.chosen[row]), int(logprobs.chosen_rank[row])
    return TokenLogprobs(chosen, rank, tuple(zip(ids, values, strict=True)))


def judged(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    num_top: int,
) -> list[TokenLogprobs]:
    """Return the log-probability of each token of a text but the first, given those before it.

    Args:
        hidden: final hidden states `[tokens, hidden]`.
        ids: the tokens, `[tokens]` int64.
        logits_of: returns the logits of hidden states; it gets `LOGIT_ROWS` of them at once.
        num_top: how many most probable tokens to report for each place.
    """
    found: list[TokenLogprobs] = []
    for first in range(0, len(ids) - 1, LOGIT_ROWS):
        targets = ids[first + 1 : first + 1 + LOGIT_ROWS]
        part = log_probabilities(logits_of(hidden[first : first + len(targets)]), targets, num_top)
        host = Logprobs(*(values.cpu() for values in vars(part).values()))
        found += [row_of(host, row, num_top) for row in range(len(targets))]
    return found


class StepSampler:
    """Samples a token for every row of a step, by request number.

    The request's seed and the number of its tokens so far (`place`) fix each sample, so neither the
    batch nor a preemption changes it.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        place: Callable[[int], int],
        output_ids: OutputIds,
        *,
        max_penalised: int,
        engine_seed: int = 0,
    ) -> None:
        self._counts: TokenCounts | None = None
        self._vocab_size = vocab_size
        self._device = device
        self._place = place
        self._engine_seed = engine_seed
        self._max_penalised = max_penalised
        self._slots: dict[int, int] = {}  # request -> its penalty slot
        self._known: dict[int, _Known] = {}
        self._output_ids = output_ids
        self._sampler = Sampler(vocab_size, device)
        self._planned: tuple[
            int, ...
        ] = ()  # rows of the last step and their layout; slots change only when the rows change
        self._plan: SamplePlan | None = None
        # of the last sampled step, where a row asked for them
        self.logprobs: Logprobs | None = None

    def add(
        self,
        number: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        copy: int = 0,
        constraint: Constraint | None = None,
    ) -> None:
        """Take the parameters of a new request.

        Args:
            number: the request.
            params: its sampling parameters.
            prompt_ids: its prompt.
            copy: which of `params.n` outputs it is.
            constraint: what `params` exclude, compiled.
        """
        seed = request_seed(params, engine_seed=self._engine_seed, request_number=number, copy=copy)
        self._known[number] = _Known(params, seed, prompt_ids, constraint)

    def forget(self, number: int) -> None:
        """Forget a request that has ended."""
        self._known.pop(number, None)
        self._slots.pop(number, None)

    def warm_up(self, logits: torch.Tensor) -> None:
        """Compile every way of sampling from `logits [rows, vocab]`. Penalised logits are float32,
        so both dtypes are compiled.
        """
        for drawn_from in (logits, logits.float()):
            self.most_probable(drawn_from)
            most_probable(drawn_from)
            for params in (
                SamplingParams(temperature=1.0),
                SamplingParams(temperature=1.0, top_p=0.9, logprobs=1),
            ):
                rows = [SampleRequest(params, seed=0, place=0)] * len(logits)
                self._sampler.sample(drawn_from, self._sampler.plan(rows))

    def plain(self, numbers: Sequence[int]) -> bool:
        """Return whether every row takes its most probable token and asks for nothing else."""
        known = [self._known[number].params for number in numbers]
        return all(
            item.is_greedy and not item.penalises and not item.constrains and item.logprobs is None
            for item in known
        )

    def most_probable(self, logits: torch.Tensor) -> torch.Tensor:
        """Return token ids `[rows]` int64 of `logits [rows, vocab]`; `NOT_FINITE` for a row whose
        logits are not finite.
        """
        self.logprobs = None
        return checked_most_probable(logits)

    def sample(
        self, logits: torch.Tensor, numbers: Sequence[int], probable: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return token ids `[rows]` int64; `NOT_FINITE` for a row whose logits are not finite.

        Args:
            logits: `[rows, vocab]`.
            numbers: the request of each row.
            probable: the result of `most_probable` for these logits, where it is known.
        """
        if probable is None:
            probable = self.most_probable(logits)
        if self.plain(numbers):
            return probable
        self._give_slots(numbers)
        plan, constrained = self._lay_out(tuple(numbers)), self._constrained(numbers)
        sampled = self._sampler.sample(logits, plan, constrained)
        self.logprobs = sampled.logprobs
        return torch.where(probable < 0, probable, sampled.token_ids)

    def _lay_out(self, numbers: tuple[int, ...]) -> SamplePlan:
        """Return the rows of the step on the device. Only places are uploaded where the rows are
        those of the last sampled step.
        """
        places = [self._place(number) for number in numbers]
        if self._plan is not None and self._planned == numbers:
            self._plan = self._sampler.moved(self._plan, places)
        else:
            known = [self._known[number] for number in numbers]
            rows = [
                SampleRequest(one.params, one.seed, place, self._slots.get(number))
                for number, one, place in zip(numbers, known, places, strict=True)
            ]
            self._planned, self._plan = numbers, self._sampler.plan(rows)
        return self._plan

    def _constrained(self, numbers: Sequence[int]) -> list[ConstrainedRow]:
        return [
            ConstrainedRow(row, constraint, self._place(number), partial(self._output_ids, number))
            for row, number in enumerate(numbers)
            if (constraint := self._known[number].constraint) is not None
        ]

    def _give_slots(self, numbers: Sequence[int]) -> None:
        """Give a penalty slot to every row that needs one. A preempted request, which is not in
        this step, may lose its slot.
        """
        penalised = [number for number in numbers if self._known[number].params.penalises]
        asking = [number for number in penalised if number not in self._slots]
        if not asking:
            return
        if (
            self._counts is None
        ):  # made when first needed: it holds a count of every token for every slot
            self._counts = TokenCounts(self._max_penalised, self._vocab_size, self._device)
            self._sampler = Sampler(self._vocab_size, self._device, counts=self._counts)
        taken = set(self._slots.values())
        free = [slot for slot in range(self._max_penalised) if slot not in taken]
        idle = [number for number in self._slots if number not in set(penalised)]
        for number in asking:
            slot = free.pop() if free else self._slots.pop(idle.pop())
            self._counts.begin(slot, self._known[number].prompt_ids, self._output_ids(number))
            self._slots[number] = slot

"""Sampling for the runner: which rows of a step are drawn how, by request number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.draw_choice import most_probable
from engine.penalties import TokenCounts
from engine.sampler import Logprobs, SamplePlan, Sampler, SampleRequest, request_seed
from engine.sampling_params import SamplingParams

OutputIds = Callable[[int], Sequence[int]]  # request number -> output ids so far


@dataclass(frozen=True)
class _Known:
    params: SamplingParams
    seed: int
    prompt_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one drawn token: its log-probability and rank (from 1), and the most probable tokens with theirs."""

    chosen: float
    rank: int
    top: tuple[tuple[int, float], ...]


def row_of(logprobs: Logprobs, row: int, num_top: int) -> TokenLogprobs:
    """One row of log-probabilities that lie on the host."""
    ids: list[int] = logprobs.top_ids[row, :num_top].tolist()
    values: list[float] = logprobs.top[row, :num_top].tolist()
    chosen, rank = float(logprobs.chosen[row]), int(logprobs.chosen_rank[row])
    return TokenLogprobs(chosen, rank, tuple(zip(ids, values, strict=True)))


class StepSampler:
    """Draws a token for every row of a step; knows the parameters of live requests.

    `place` gives the number of tokens a request has been given so far: with the request's seed it fixes the draw, so
    that neither batch nor preemption changes it.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        place: Callable[[int], int],
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
        self.output_ids: OutputIds = _no_requests  # the loop puts its own here; for penalties
        self._sampler = Sampler(vocab_size, device)
        self._planned: tuple[int, ...] = ()  # the rows drawn last, and their layout: slots change only with the rows
        self._plan: SamplePlan | None = None
        self.logprobs: Logprobs | None = None  # of the step sampled last, where some row asked

    def add(self, number: int, params: SamplingParams, prompt_ids: Sequence[int], copy: int = 0) -> None:
        """A request comes in; `copy` counts the outputs of one prompt."""
        seed = request_seed(params, engine_seed=self._engine_seed, request_number=number, copy=copy)
        self._known[number] = _Known(params, seed, prompt_ids)

    def forget(self, number: int) -> None:
        """A request has ended."""
        self._known.pop(number, None)
        self._slots.pop(number, None)

    def warm_up(self, logits: torch.Tensor) -> None:
        """Compile and settle every way of drawing from `logits [rows, vocab]`; penalised ones are float32."""
        for drawn_from in (logits, logits.float()):
            self.most_probable(drawn_from)
            for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)):
                rows = [SampleRequest(params, seed=0, place=0)] * len(logits)
                self._sampler.sample(drawn_from, self._sampler.plan(rows))

    def plain(self, numbers: Sequence[int]) -> bool:
        """Whether every row takes its most probable token and nothing else is asked."""
        known = [self._known[number].params for number in numbers]
        return all(item.is_greedy and not item.penalises and item.logprobs is None for item in known)

    def most_probable(self, logits: torch.Tensor) -> torch.Tensor:
        """Token ids `[rows]` int64 of `logits [rows, vocab]`."""
        self.logprobs = None
        return most_probable(logits)

    def sample(self, logits: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """Token ids `[rows]` int64, row i for request `numbers[i]`."""
        if self.plain(numbers):
            return self.most_probable(logits)
        self._give_slots(numbers)
        sampled = self._sampler.sample(logits, self._lay_out(tuple(numbers)))
        self.logprobs = sampled.logprobs
        return sampled.token_ids

    def _lay_out(self, numbers: tuple[int, ...]) -> SamplePlan:
        """The step's rows on the device; laid out anew where they are not those of the step drawn last."""
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

    def _give_slots(self, numbers: Sequence[int]) -> None:
        """A penalty slot for every row that needs one; one that is not drawn now (it waits, preempted) gives way."""
        penalised = [number for number in numbers if self._known[number].params.penalises]
        asking = [number for number in penalised if number not in self._slots]
        if not asking:
            return
        if self._counts is None:  # made when first needed: it holds a count of every token for every slot
            self._counts = TokenCounts(self._max_penalised, self._vocab_size, self._device)
            self._sampler = Sampler(self._vocab_size, self._device, counts=self._counts)
        taken = set(self._slots.values())
        free = [slot for slot in range(self._max_penalised) if slot not in taken]
        idle = [number for number in self._slots if number not in set(penalised)]
        for number in asking:
            slot = free.pop() if free else self._slots.pop(idle.pop())
            self._counts.begin(slot, self._known[number].prompt_ids, self.output_ids(number))
            self._slots[number] = slot


def _no_requests(number: int) -> list[int]:
    raise KeyError(f"no tokens are known of request {number}")

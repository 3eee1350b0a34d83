"""Sampling for the runner: which rows of a step are drawn how, by request number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.penalties import TokenCounts
from engine.sampler import Logprobs, Sampler, SampleRequest, request_seed
from engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class _Known:
    params: SamplingParams
    seed: int
    penalty_slot: int | None


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
        self._free_slots = list(range(max_penalised - 1, -1, -1))
        self._known: dict[int, _Known] = {}
        self._sampler = Sampler(vocab_size, device)
        self.logprobs: Logprobs | None = None  # of the step sampled last, where some row asked

    def add(self, number: int, params: SamplingParams, prompt_ids: Sequence[int], copy: int = 0) -> None:
        """A request comes in."""
        slot = None
        if params.penalises:
            if self._counts is None:  # made when first needed: it holds a count of every token for every slot
                self._counts = TokenCounts(self._max_penalised, self._vocab_size, self._device)
                self._sampler = Sampler(self._vocab_size, self._device, counts=self._counts)
            slot = self._free_slots.pop()
            self._counts.begin(slot, prompt_ids)
        seed = request_seed(params, engine_seed=self._engine_seed, request_number=number, copy=copy)
        self._known[number] = _Known(params, seed, slot)

    def forget(self, number: int) -> None:
        """A request has ended."""
        known = self._known.pop(number, None)
        if known is not None and known.penalty_slot is not None:
            self._free_slots.append(known.penalty_slot)

    def plain(self, numbers: Sequence[int]) -> bool:
        """Whether every row takes its most probable token and nothing else is asked."""
        known = [self._known[number].params for number in numbers]
        return all(item.is_greedy and not item.penalises and item.logprobs is None for item in known)

    def most_probable(self, logits: torch.Tensor) -> torch.Tensor:
        """Token ids `[rows]` int64 of `logits [rows, vocab]`."""
        self.logprobs = None
        return logits.argmax(dim=-1)

    def sample(self, logits: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """Token ids `[rows]` int64, row i for request `numbers[i]`."""
        if self.plain(numbers):
            return self.most_probable(logits)
        rows = [
            SampleRequest(known.params, known.seed, self._place(number), known.penalty_slot)
            for number in numbers
            for known in (self._known[number],)
        ]
        sampled = self._sampler.sample(logits, self._sampler.plan(rows))
        self.logprobs = sampled.logprobs
        return sampled.token_ids

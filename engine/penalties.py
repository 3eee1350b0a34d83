"""Counts of the tokens so far, on the device, for the requests whose penalties need them."""

from collections.abc import Sequence

import torch

from engine.errors import SamplingError


class TokenCounts:
    """Which tokens a prompt has and how often the output has each, for up to `num_slots` requests at a time.

    A row of `[vocab]` per slot: one byte for the prompt, four for the output; one slot more takes what is counted for
    requests without penalties, so that adding a step's tokens needs no choice by data.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._in_prompt = torch.zeros(num_slots + 1, vocab_size, dtype=torch.bool, device=device)
        self._in_output = torch.zeros(num_slots + 1, vocab_size, dtype=torch.int32, device=device)

    @staticmethod
    def bytes_needed(num_slots: int, vocab_size: int) -> int:
        """What the counts take on the device."""
        return (num_slots + 1) * vocab_size * 5

    @property
    def spare_slot(self) -> int:
        """The slot of requests that are not counted."""
        return self.num_slots

    def begin(self, slot: int, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        """Give a slot to a request, with what it has generated so far where it comes back from preemption.

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
            self.add(torch.full((len(output),), slot, device=device), torch.tensor(list(output), device=device))

    def add(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count one more token in each of `slots` (int64; the spare one for requests that are not counted)."""
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
        """`logits [rows, vocab]` float32 after the penalties of each row; `slots`, penalties `[rows]`.

        A logit of a token in prompt or output is divided by `repetition` when positive, multiplied when negative; then
        `frequency` times its count and, if it is in the output, `presence` are subtracted.
        """
        counts = self._in_output[slots]
        in_output = counts > 0
        seen = self._in_prompt[slots] | in_output
        factor = repetition[:, None]
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(seen, repeated, logits)
        return logits - frequency[:, None] * counts - presence[:, None] * in_output

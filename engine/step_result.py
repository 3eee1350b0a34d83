"""What a step gives, perhaps still on its way to the host."""

from dataclasses import dataclass, field

import torch

from engine.sampler import Logprobs
from engine.sampling import TokenLogprobs, row_of


@dataclass
class StepResult:
    """Tokens of one step, perhaps still on their way to the host: `numbers[i]` is the request that got `tokens[i]`.

    The device passes `begun` when it begins with the step and `event` when the tokens are on the host.
    """

    numbers: list[int]
    host: torch.Tensor | None = None
    begun: torch.cuda.Event | None = None
    event: torch.cuda.Event | None = None
    failed: dict[int, str] = field(default_factory=dict)
    host_logprobs: Logprobs | None = None  # where some request asked

    @property
    def done(self) -> bool:
        """Whether the device has finished the step; asks, does not wait."""
        return self.event is None or self.event.query()

    def device_ns(self) -> int | None:
        """How long the device took for the step, which is done; None where there is no such clock."""
        if self.event is None or self.begun is None:
            return None
        milliseconds: float = self.begun.elapsed_time(self.event)
        return round(milliseconds * 1e6)

    def tokens(self) -> list[int]:
        """Wait for the step and return its tokens."""
        if self.event is not None:
            self.event.synchronize()
        values: list[int] = self.host.tolist() if self.host is not None else []
        return values[: len(self.numbers)]

    def logprobs(self, row: int, num_top: int) -> TokenLogprobs | None:
        """Log-probabilities of the token of `numbers[row]`, after `tokens()` has waited; None if nobody asked."""
        return None if self.host_logprobs is None else row_of(self.host_logprobs, row, num_top)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """An event that is timed, at this place of the current stream; None without CUDA."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def brought_to_host(numbers: list[int], tokens: torch.Tensor, logprobs: Logprobs | None) -> StepResult:
    """Start to bring a step's tokens to the host, behind everything that it has enqueued on the current stream."""
    if not tokens.is_cuda:
        return StepResult(numbers, tokens, host_logprobs=logprobs)
    host = _pinned(tokens)
    if logprobs is not None:
        logprobs = Logprobs(*map(_pinned, (logprobs.chosen, logprobs.chosen_rank, logprobs.top_ids, logprobs.top)))
    return StepResult(numbers, host, event=mark(tokens.device), host_logprobs=logprobs)


def _pinned(values: torch.Tensor) -> torch.Tensor:
    """Start to copy to pinned host memory."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)

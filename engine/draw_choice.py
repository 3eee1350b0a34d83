"""Which way tokens are drawn: Triton passes on CUDA, plain torch elsewhere."""

from collections.abc import Callable

import torch

from engine import draws, filters

MostProbable = Callable[[torch.Tensor], torch.Tensor]
ON_CUDA: MostProbable = draws.most_probable
draw_on_cuda = draws.draw
thresholds_on_cuda = filters.thresholds
try:
    from engine import fused_draw, fused_threshold
except ImportError:  # there is no triton for this platform
    pass
else:
    ON_CUDA = fused_draw.most_probable
    draw_on_cuda = fused_draw.draw
    thresholds_on_cuda = fused_threshold.thresholds


def most_probable(logits: torch.Tensor) -> torch.Tensor:
    """See `engine.draws.most_probable`."""
    return ON_CUDA(logits) if logits.is_cuda else draws.most_probable(logits)


def thresholds(
    logits: torch.Tensor, inverse_temperature: torch.Tensor, settings: filters.FilterSettings
) -> torch.Tensor:
    """See `engine.filters.thresholds`."""
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
    """See `engine.draws.draw`."""
    chosen = draw_on_cuda if logits.is_cuda else draws.draw
    return chosen(logits, inverse_temperature, noise, seeds, places, threshold)

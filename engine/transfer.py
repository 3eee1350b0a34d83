"""Host values on the device without waiting for it: a copy from pageable memory would wait for every step under way."""

from collections.abc import Sequence

import torch


def sent(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """The values as a tensor on the device, `[len(values)]`; on CUDA the copy is enqueued on the current stream."""
    return moved(torch.tensor(values, dtype=dtype), device)


def moved(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device, in the same way."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite `target` with a host tensor of its size, in the same way."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)

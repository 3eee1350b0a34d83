"""Which set of kernels runs: Triton on CUDA, plain torch elsewhere, or the one that is named."""

import torch

from engine.kernels import torch_kernels
from engine.kernels.contract import Kernels
from engine.kernels.errors import KernelInputError

KERNEL_SETS: dict[str, Kernels] = {"torch": torch_kernels}
try:
    from engine.kernels import triton_kernels
except ImportError:  # there is no triton for this platform
    pass
else:
    KERNEL_SETS["triton"] = triton_kernels


def find_kernels(device: torch.device, name: str | None = None) -> Kernels:
    """The kernels for a device; `name` overrides."""
    chosen = name if name is not None else ("triton" if device.type == "cuda" else "torch")
    if chosen not in KERNEL_SETS:
        raise KernelInputError(f"no set of kernels called {chosen!r} here; there are {', '.join(KERNEL_SETS)}")
    return KERNEL_SETS[chosen]

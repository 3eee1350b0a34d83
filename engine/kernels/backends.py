"""Which set of kernels runs: Triton on CUDA, plain torch elsewhere, or the one that is named."""

import torch

from zlab.engine.errors import KernelInputError
from zlab.engine.kernels import torch_backend as torch_kernels
from zlab.engine.kernels.interface import KernelBackend

KERNEL_BACKENDS: dict[str, KernelBackend] = {"torch": torch_kernels}
try:
    from zlab.engine.kernels import triton_backend as triton_kernels
except ImportError:  # there is no triton for this platform
    pass
else:
    KERNEL_BACKENDS["triton"] = triton_kernels


def find_backend(device: torch.device, name: str | None = None) -> KernelBackend:
    """The kernels for a device; `name` overrides."""
    chosen = name if name is not None else ("triton" if device.type == "cuda" else "torch")
    if chosen not in KERNEL_BACKENDS:
        raise KernelInputError(
            f"no set of kernels called {chosen!r} here; there are {', '.join(KERNEL_BACKENDS)}"
        )
    return KERNEL_BACKENDS[chosen]

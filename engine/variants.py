"""Which way the own decoder's layers run: chosen by name, so that one measurement can compare them."""

from collections.abc import Callable

import torch

from engine.errors import ModelError, nearest
from engine.layers import HeadShape, LayerSteps
from engine.torch_layers import TorchSteps

StepsMaker = Callable[[HeadShape, torch.Tensor], LayerSteps]


def _eager(shape: HeadShape, table: torch.Tensor) -> LayerSteps:
    return TorchSteps(shape, table)


def _compiled(shape: HeadShape, table: torch.Tensor) -> LayerSteps:
    return TorchSteps(shape, table, compile_mode="default")


def _compiled_by_size(shape: HeadShape, table: torch.Tensor) -> LayerSteps:
    return TorchSteps(shape, table, compile_mode="default", dynamic=False)


def _autotuned(shape: HeadShape, table: torch.Tensor) -> LayerSteps:
    return TorchSteps(shape, table, compile_mode="max-autotune-no-cudagraphs", dynamic=False)


VARIANTS: dict[str, StepsMaker] = {
    "eager": _eager,
    "compile": _compiled,
    "compile-by-size": _compiled_by_size,
    "autotune": _autotuned,
}
try:
    from engine.fused import TritonSteps
except ImportError:  # there is no triton for this platform
    pass
else:
    VARIANTS["triton"] = TritonSteps


def default_variant(device: torch.device) -> str:
    """Triton kernels on CUDA, plain torch elsewhere."""
    return "triton" if device.type == "cuda" and "triton" in VARIANTS else "eager"


def find_variant(name: str) -> StepsMaker:
    """What makes the stages of a layer in the way of that name.

    Raises:
        ModelError: there is no such way here.
    """
    if name not in VARIANTS:
        raise ModelError(f"unknown variant {name!r}{nearest(name, VARIANTS)} (choices: {', '.join(VARIANTS)})")
    return VARIANTS[name]

"""The Triton kernels on the CPU: the kernel tests once more."""

import pytest

from tests.engine.interpreter import passed_in_the_interpreter
from tests.engine.kernel_cases import INTERPRETED

MODULES = ("kernels_scores", "kernels_selection", "kernels_attention", "kernels_pipeline", "thresholds", "vectors")


@pytest.mark.skipif(INTERPRETED, reason="is the outer process of the interpreter's tests")
@pytest.mark.parametrize("module", MODULES)
def test_triton_kernels_in_the_interpreter(module: str) -> None:
    assert "passed" in passed_in_the_interpreter(f"tests/engine/test_{module}.py")

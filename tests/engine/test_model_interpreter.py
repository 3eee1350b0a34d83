"""The layers' Triton kernels on the CPU."""

import pytest

from tests.engine.interpreter import passed_in_the_interpreter
from tests.engine.kernel_cases import INTERPRETED


@pytest.mark.skipif(INTERPRETED, reason="is the outer process of the interpreter's tests")
def test_fused_layers_in_the_interpreter() -> None:
    assert "passed" in passed_in_the_interpreter("tests/engine/test_model_fused.py")

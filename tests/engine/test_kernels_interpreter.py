"""The Triton kernels on the CPU: the kernel tests once more, in a process of their own.

Triton decides at its import whether it compiles or interprets, so the switch must not reach any other test.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.kernel_cases import INTERPRETED

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("kernels_scores", "kernels_selection", "kernels_attention", "kernels_pipeline", "vectors")


@pytest.mark.skipif(INTERPRETED, reason="is the outer process of the interpreter's tests")
@pytest.mark.parametrize("module", MODULES)
def test_triton_kernels_in_the_interpreter(module: str) -> None:
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/engine/test_{module}.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-6000:]}\n{run.stderr[-2000:]}"
    assert "passed" in run.stdout

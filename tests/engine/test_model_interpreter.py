"""The layers' Triton kernels on the CPU, in a process of their own: Triton decides at its import to interpret."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.kernel_cases import INTERPRETED

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(INTERPRETED, reason="is the outer process of the interpreter's tests")
def test_fused_layers_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/engine/test_model_fused.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-6000:]}\n{run.stderr[-2000:]}"
    assert "passed" in run.stdout

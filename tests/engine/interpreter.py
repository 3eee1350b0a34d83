"""Triton interprets where it is told so before its import, so tests that need that run in a process
of their own.
"""

import os
import subprocess
import sys

import pytest

from tests.house_source import ROOT

MOST_S = 900  # far more than any takes; only so that a kernel that never ends is found out


def passed_in_the_interpreter(*arguments: str) -> str:
    """What pytest says of these tests under the interpreter; fails unless all that were chosen
    pass.
    """
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=MOST_S,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-6000:]}\n{run.stderr[-2000:]}"
    return run.stdout

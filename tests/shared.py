"""Where the shared data lies, and the mark for a test that needs it."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"shared data folder missing: {SHARED}")

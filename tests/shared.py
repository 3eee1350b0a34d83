"""Where the shared data lies, and the mark for a test that needs it."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PLACES = (
    REPOSITORY.parent / "shared",
    REPOSITORY / ".carry" / "shared",
)  # the second where only the checkout travels
SHARED = next((place for place in PLACES if place.is_dir()), PLACES[0])
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"shared data folder missing: {SHARED}"
)

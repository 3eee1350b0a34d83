"""What goes wrong at the doors of the engine; every message names the value and the choices."""

import difflib
from collections.abc import Iterable


class EngineError(ValueError):
    """The root: input or settings that the engine cannot work with."""


class ModelError(EngineError):
    """A model that cannot be found, read, built or split."""


class SamplingError(EngineError):
    """Sampling parameters outside their range, or an unknown one."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the choice nearest to `name`, or nothing."""
    near = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""

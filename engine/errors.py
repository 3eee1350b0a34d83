"""Errors of the engine for input or settings that it refuses. Every message names the value and the
choices or what was expected.
"""


class EngineError(ValueError):
    """The base class: input or settings that the engine cannot work with."""


class ModelError(EngineError):
    """A model that cannot be found, read, built or split."""


class SamplingError(EngineError):
    """A sampling parameter is unknown or outside its range."""


class KernelInputError(ValueError):
    """Shapes, tables or settings with which a kernel cannot be launched."""

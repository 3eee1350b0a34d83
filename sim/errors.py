"""The error root of the simulator's room."""


class SimError(ValueError):
    """The simulator was asked for something that cannot be; the message names the value and the choices."""

"""What goes wrong at the door of a kernel: shapes, tables or settings that make no sense together."""


class KernelInputError(ValueError):
    """Input that a kernel cannot be launched with; the message names the value and what was expected."""

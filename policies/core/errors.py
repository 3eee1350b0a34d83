"""What can go wrong in the scheduler: one root, few leaves."""


class SchedulerError(Exception):
    """Root of every error the scheduler raises."""


class ConfigError(SchedulerError, ValueError):
    """Limits and policy that cannot work together; the message names the numbers."""


class DuplicateRequestError(SchedulerError, ValueError):
    """A request id that is still alive was submitted again."""


class UnknownRequestError(SchedulerError, KeyError):
    """No living request has this id."""


class StuckError(SchedulerError, RuntimeError):
    """Nothing ran, nothing is in flight and work waits: a fault of a policy, reported instead of hanging."""

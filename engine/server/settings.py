"""How a server is set up: what it lets in, and how long it waits for whom."""

from dataclasses import dataclass, fields

from engine.errors import EngineError
from engine.server.worker import WorkerSettings


@dataclass(frozen=True)
class ServerSettings:
    """Bounds of one server; every one has an option of `zlab serve`.

    Attributes:
        max_body_bytes: a larger request body is answered with 413.
        max_prompt_tokens: a longer prompt is answered with 400; None: what the model takes.
        max_outputs: prompts times `n` of one request; more is answered with 400.
        max_concurrent: requests under way at once, those included that wait; more are answered with 429.
        max_queue: outputs that may wait for room in the engine; more are answered with 429.
        max_unread_tokens: how far the reader of a stream may fall behind before its request is ended.
        request_timeout_s: from a request's arrival to the end of its answer.
        body_timeout_s: for a request's body to arrive.
        write_timeout_s: for a reader to take what it was sent.
        grace_s: for what runs to finish after a first SIGTERM.
        stall_s: an engine step that takes longer makes the server unhealthy.
    """

    max_body_bytes: int = 4 << 20
    max_prompt_tokens: int | None = None
    max_outputs: int = 128
    max_concurrent: int = 1024
    max_queue: int = 1024
    max_unread_tokens: int = 2048
    request_timeout_s: float = 600.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    grace_s: float = 60.0
    stall_s: float = 120.0

    def __post_init__(self) -> None:
        """Raise EngineError on a bound that lets nothing through."""
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "grace_s" and not value >= 0:
                raise EngineError(f"grace_s must be 0 or more, got {value!r}")
            if item.name != "grace_s" and value is not None and not value > 0:
                raise EngineError(f"{item.name} must be more than 0, got {value!r}")

    @property
    def worker(self) -> WorkerSettings:
        """The part that concerns the engine's thread."""
        return WorkerSettings(max_queue=self.max_queue, stall_s=self.stall_s)

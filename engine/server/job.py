"""One API request on its way through the engine: its outputs, and the events its reader gets."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.loop import Sequence
from engine.outputs import finish_reason
from engine.sampling import TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.server.errors import ApiError
from engine.stopping import Piece


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is in the engine; `notes` are what its caller should know (an output length that was capped)."""

    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What output `index` has gained; the last one of an output has a finish reason.

    `finish_reason`: "stop", "length", "abort" or "error"; `logprobs`: one a token, where asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing of the request ran, or nothing more will: what the client is told."""

    error: ApiError


Event = Accepted | Delta | Refusal


class Stream:
    """Events of one job from the engine's thread to a reader on an event loop.

    The engine never waits for the reader: it counts the tokens that lie unread and ends the request of one that falls
    behind by more than `most_unread_tokens`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most_unread_tokens: float = math.inf) -> None:
        self.loop = loop
        self._most_unread_tokens = most_unread_tokens
        self._events: deque[Event] = deque()  # append and popleft are atomic
        self._there = asyncio.Event()
        self._tokens_put = 0  # written by the engine's thread only
        self._tokens_read = 0  # written by the reader only

    def put(self, event: Event) -> None:
        """Add an event; the engine's thread. The reader sleeps on until `wake_all`."""
        self._events.append(event)
        if isinstance(event, Delta):
            self._tokens_put += len(event.token_ids)

    @property
    def overrun(self) -> bool:
        """Whether more lies unread than is allowed."""
        return self._tokens_put - self._tokens_read > self._most_unread_tokens

    async def read(self) -> list[Event]:
        """Everything that has come since last time, at least one event; the reader's event loop."""
        while not self._events:
            self._there.clear()
            if self._events:
                break
            await self._there.wait()
        events = [self._events.popleft() for _ in range(len(self._events))]
        self._tokens_read += sum(len(event.token_ids) for event in events if isinstance(event, Delta))
        return events

    def wake(self) -> None:
        """Let the reader look; on its own event loop."""
        self._there.set()


def wake_all(streams: Iterable[Stream]) -> None:
    """Wake the readers of these streams, one call into each event loop however many there are."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
    for stream in streams:
        by_loop.setdefault(stream.loop, []).append(stream)
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake, group)
        except RuntimeError:
            assert loop.is_closed()  # its readers are gone with it


def _wake(streams: list[Stream]) -> None:
    for stream in streams:
        stream.wake()


@dataclass(eq=False)
class Job:
    """What one API request asks of the engine: `params.n` outputs for each of its prompts.

    `max_tokens` None: as many as fit. `streamed`: a delta a token; otherwise one delta an output, at its end.
    It came at `arrived_ns` on the clock `time.perf_counter_ns`.
    `prompt_param` and `length_param` are the fields of the request that errors name. `cause` is why it was called off.
    """

    id: str
    prompts: list[list[int]]
    params: SamplingParams
    max_tokens: int | None
    stream: Stream
    streamed: bool
    with_text: bool = True
    priority: int = 0
    session: str | None = None
    prompt_param: str = "prompt"
    length_param: str = "max_tokens"
    arrived_ns: int = field(default_factory=time.perf_counter_ns)
    arrived_unix_s: float = field(default_factory=time.time)
    entries: list["Entry"] = field(default_factory=list)
    cause: ApiError | None = None
    ended: bool = False  # every output has ended, or the job was refused: written by the engine's thread

    @property
    def num_outputs(self) -> int:
        """Outputs it asks for."""
        return len(self.prompts) * self.params.n


@dataclass(eq=False)
class Entry:
    """One output of a job: number `index` among its choices, of prompt number `prompt`."""

    job: Job
    index: int
    prompt: int
    copy: int
    sequence: Sequence | None = None  # None until the scheduler has it
    num_given: int = 0  # tokens handed to the reader
    finish_reason: str | None = None

    @property
    def id(self) -> str:
        """The scheduler's id. An API request's own id holds no slash, so that these meet no other's."""
        return self.job.id if self.job.num_outputs == 1 else f"{self.job.id}/{self.index}"

    def take(self, piece: Piece) -> Delta | None:
        """The delta that a piece makes, if the reader is to get one now."""
        sequence = self.sequence
        assert sequence is not None
        ending = finish_reason(sequence)
        if ending is None and not self.job.streamed:
            return None
        text = piece.text if self.job.streamed else sequence.text
        tokens = sequence.output.token_ids[self.num_given :]
        logprobs = sequence.logprobs[self.num_given : self.num_given + len(tokens)]
        if not (text or tokens or ending):
            return None
        self.num_given += len(tokens)
        stop_reason = sequence.stop_reason if ending else None
        message = sequence.request.message if ending in ("error", "refused") else ""
        return Delta(self.index, text, tokens, logprobs, ending, stop_reason, message)

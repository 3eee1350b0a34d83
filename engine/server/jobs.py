"""One API request on its way through the engine: its outputs, and the events that its reader gets.

    event loop                                    engine thread
    Job(request, prompts, stream)  -- submit -->  an Output for each prompt and copy
    await stream.read()  <-- wake_all, put  ----  Accepted | Refusal, then Deltas

The engine never waits for a reader: `Stream` is unbounded, and the engine aborts the job of a
reader that falls behind.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from zlab.engine.engine import EngineRequest
from zlab.engine.llm import finish_reason
from zlab.engine.sampling.constraints import Grammar
from zlab.engine.sampling.sampler import TokenLogprobs
from zlab.engine.server.protocol import ApiError, ParsedRequest
from zlab.engine.tokenizer import TokenText


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is in the engine; `notes` are for its caller: a field of the request, and what
    became of it (an output length was capped).
    """

    notes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What output `index` has gained; the last delta of an output has a finish reason.

    `finish_reason` is "stop", "length", "abort" or "error". `logprobs` has an entry a token where
    the request asks for log-probabilities. `failed_field` is the field of the request that is at
    fault for an error, None where the request is not.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    message: str = ""
    failed_field: str | None = None

    def join(self, later: "Delta") -> "Delta":
        """Return one delta for this one and what the same output has gained since."""
        return replace(
            later,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing of the request has run; the client gets the error."""

    error: ApiError


Event = Accepted | Delta | Refusal


class Stream:
    """Events of one job, from the engine's thread to a reader on an event loop.

    The engine counts the tokens that are unread and aborts the job of a reader that has more than
    `max_unread_tokens` of them.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, max_unread_tokens: float = math.inf
    ) -> None:
        self.loop = loop
        self._max_unread_tokens = max_unread_tokens
        self._events: deque[Event] = deque()  # append and popleft are atomic
        self._has_events = asyncio.Event()
        self._tokens_put = 0  # written by the engine's thread only
        self._tokens_read = 0  # written by the reader only

    def put(self, event: Event) -> None:
        """Add an event, on the engine's thread; the reader sleeps on until `wake_all`."""
        self._events.append(event)
        if isinstance(event, Delta):
            self._tokens_put += len(event.token_ids)

    @property
    def overrun(self) -> bool:
        """Whether more tokens are unread than the stream allows."""
        return self._tokens_put - self._tokens_read > self._max_unread_tokens

    async def read(self) -> list[Event]:
        """Wait for at least one event and return all, on the reader's event loop."""
        while not self._events:
            self._has_events.clear()
            if self._events:
                break
            await self._has_events.wait()
        events = [self._events.popleft() for _ in range(len(self._events))]
        self._tokens_read += sum(
            len(event.token_ids) for event in events if isinstance(event, Delta)
        )
        return events

    def wake(self) -> None:
        """Let the reader look for events, on its own event loop."""
        self._has_events.set()


def wake_all(streams: Iterable[Stream]) -> None:
    """Wake the readers of these streams, with one call into each event loop."""
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
    """A request with its prompts as token ids: `params.n` outputs for each prompt.

    Attributes:
        request: what the client asks for.
        prompts: token ids of each prompt.
        stream: where the job's events go.
        grammar: the first state of the grammar that every output follows.
        prompt_texts: the text of each prompt, where the answer repeats it.
        arrived_ns: the arrival on the clock `time.perf_counter_ns`.
        arrived_unix_s: the arrival in Unix time.
        outputs: those that the scheduler has; written by the engine's thread.
        prompt_logprobs: of each prompt, of its tokens but the first, where they are asked for;
            written by the engine's thread before the job is accepted.
        cause: why the job was aborted.
        ended: every output has ended, or the job was refused; written by the engine's thread.
    """

    request: ParsedRequest
    prompts: list[list[int]]
    stream: Stream
    grammar: Grammar | None = None
    prompt_texts: Sequence[str] = ()
    arrived_ns: int = field(default_factory=time.perf_counter_ns)
    arrived_unix_s: float = field(default_factory=time.time)
    outputs: list["Output"] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    cause: ApiError | None = None
    ended: bool = False

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def num_outputs(self) -> int:
        """How many outputs the job asks for."""
        return len(self.prompts) * self.request.params.n

    def output_id(self, index: int) -> str:
        """Return the scheduler's id of an output; request ids hold no slash, so it is unique."""
        return self.id if self.num_outputs == 1 else f"{self.id}/{index}"


@dataclass(eq=False)
class Output:
    """One output of a job, number `index` among its choices, on its way back to the reader.

    `num_given` counts the tokens that the reader got; `finish_reason` is None while the output
    runs, then "stop", "length", "abort", "error" or "refused". `held` is what the output gained in
    this step: the reader gets it when the step is over.
    """

    job: Job
    index: int
    engine_request: EngineRequest
    num_given: int = 0
    finish_reason: str | None = None
    held: Delta | None = None

    @property
    def id(self) -> str:
        """The scheduler's id."""
        return self.job.output_id(self.index)

    def take(self, added: TokenText) -> Delta | None:
        """Return the delta that new text makes; None if the reader gets none now."""
        running, streamed = self.engine_request, self.job.request.streamed
        ending = finish_reason(running)
        if ending is None and not streamed:
            return None
        text = added.text if streamed else running.text
        tokens = running.output.token_ids[self.num_given :]
        logprobs = running.logprobs[self.num_given : self.num_given + len(tokens)]
        if not (text or tokens or ending):
            return None
        self.num_given += len(tokens)
        stop_reason = running.stop_reason if ending else None
        failed = ending in ("error", "refused")
        message, field_name = (running.message, running.failed_field) if failed else ("", None)
        return Delta(self.index, text, tokens, logprobs, ending, stop_reason, message, field_name)

"""A server under test: a tiny model with a tokenizer, a real socket, and a gate before every step.

`served` gives a whole server on a free port; `open_tiny` gives its parts without HTTP, and `play`
submits jobs to them as API requests would.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import httpx
import openai
import tokenizers
import transformers

from tests.engine.engine_cases import SMALL, VOCABULARY, mixed, tiny
from zlab.engine.engine import EngineSettings
from zlab.engine.model.loader import LoadedModel
from zlab.engine.sampling_params import SamplingParams
from zlab.engine.server.app import create_app
from zlab.engine.server.auto_rollback import GateMonitor
from zlab.engine.server.context import ServerContext, ServerSettings, open_context
from zlab.engine.server.jobs import Delta, Job, Output, Refusal, Stream
from zlab.engine.server.lanes import Lane, Observer
from zlab.engine.server.launch import Process
from zlab.engine.server.metrics import ServerMetrics
from zlab.engine.server.middleware import Keys
from zlab.engine.server.protocol import ApiError, ParsedRequest
from zlab.engine.tokenizer import Tokenizer
from zlab.policies.core.request import Request
from zlab.policies.spec import load_policy
from zlab.traces.schema import Phase
from zlab.traces.workload import TraceRequest

WAIT_S = 180.0  # a test waits that long only where something is broken
LETTERS = "".join(map(chr, range(32, 127))) + "\n"
END = "<end>"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% if thinks %}<{{ thinks }}>{% endif %}{% endif %}"
)
HYBRID = "hybrid:tokens=24,window=4"
ROOMY = replace(SMALL, policy=HYBRID)


@cache
def lettered() -> LoadedModel:
    """Return the tiny model with one token per printable character and one for the end."""
    vocabulary = {letter: number for number, letter in enumerate([*LETTERS, END])}
    assert len(vocabulary) == VOCABULARY
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = tokenizers.decoders.Fuse()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)  # type: ignore[no-untyped-call]
    wrapped.chat_template = TEMPLATE
    return LoadedModel(tiny().model, Tokenizer(wrapped), (vocabulary[END],))


def wait_for(condition: Callable[[], Any], what: str) -> None:
    """Wait until the condition holds; fail the test if it never does."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.002)


class Gate(Observer):
    """Stands before every step of the engine; once closed, it lets single steps through.

    It also counts the outputs that arrived and ended, and how they ended.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = True
        self._permits = 0
        self._at = "moving"  # "step": waits before a step that is not permitted; "idle"; "moving"
        self.fault: Exception | None = None  # the next step raises it
        self.num_arrived = self.num_idle = 0
        self.about_to_step = ""
        self.arrivals: dict[str, int] = {}  # by the scheduler's id
        self.num_ended: dict[str, int] = {}
        self.reasons: dict[str, str] = {}
        self.num_tokens: dict[str, int] = {}
        self.lanes: dict[str, Lane] = {}

    def begin(self, lane: Lane) -> None:
        self.lanes[lane.name] = lane
        step = lane.engine.step

        def gated() -> bool:
            with self._changed:
                self.about_to_step = lane.name
                self._now_at("step")
                self._changed.wait_for(lambda: self._open or self._permits)
                self._permits -= not self._open
                self._now_at("moving")
            if self.fault is not None:
                fault, self.fault = self.fault, None
                raise fault
            return step()

        lane.engine.step = gated  # type: ignore[method-assign]

    def rebuilt(self, lane: Lane) -> None:
        self.begin(lane)

    def idle(self) -> None:
        with self._changed:
            self.num_idle += 1
            self._now_at("idle")

    def arrived(self, lane: Lane, output: Output) -> None:
        with self._changed:
            self.num_arrived += 1
            self.arrivals[output.id] = self.arrivals.get(output.id, 0) + 1
            self._now_at("moving")

    def ended(self, lane: Lane, output: Output) -> None:
        self.num_ended[output.id] = self.num_ended.get(output.id, 0) + 1
        self.reasons[output.id] = output.finish_reason or "none"
        self.num_tokens[output.id] = len(output.engine_request.output.token_ids)

    def forget(self) -> None:
        """Count anew."""
        self.num_arrived = 0
        self.arrivals.clear()
        self.num_ended.clear()

    def close(self) -> None:
        """Let no step through from now on, but those of `let_through`."""
        with self._changed:
            self._open = False

    def open(self) -> None:
        """Let every step through."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def let_through(self, num_steps: int = 1) -> None:
        """Let steps through, one by one, and wait until the thread waits or idles again."""
        for _ in range(num_steps):
            with self._changed:
                self._wait("step")
                self._permits += 1
                self._at = "moving"
                self._changed.notify_all()
                self._wait("step", "idle")

    def until_idle(self) -> None:
        """Wait until the thread has no work."""
        with self._changed:
            self._wait("idle")

    def _wait(self, *places: str) -> None:
        assert self._changed.wait_for(lambda: self._at in places, WAIT_S), (
            f"the engine's thread is {self._at}"
        )

    def _now_at(self, place: str) -> None:
        self._at = place
        self._changed.notify_all()


class Later:
    """A request that runs on a thread of its own."""

    def __init__(self, ask: Callable[[], httpx.Response]) -> None:
        self._answers: list[httpx.Response] = []
        self._thread = threading.Thread(target=lambda: self._answers.append(ask()))
        self._thread.start()

    @property
    def waits(self) -> bool:
        """Whether there is no answer yet."""
        return self._thread.is_alive()

    def answer(self) -> httpx.Response:
        """Wait for it."""
        self._thread.join(WAIT_S)
        return self._answers[0]


class Served:
    """A running server."""

    def __init__(self, context: ServerContext, process: Process, gate: Gate, port: int) -> None:
        self.context = context
        self.process = process
        self.gate = gate
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def client(self, api_key: str = "none", **more: Any) -> openai.OpenAI:
        """Return the official client, without retries."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=WAIT_S, **more
        )

    def http(self, **more: Any) -> httpx.Client:
        """Return a plain HTTP client."""
        return httpx.Client(base_url=self.url, timeout=WAIT_S, **more)

    def later(self, path: str, body: Any, **more: Any) -> Later:
        """Send a request that is answered while the test goes on."""
        return Later(lambda: self.post(path, body, **more))

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        """Send one request and wait for its answer."""
        with self.http() as client:
            return client.post(path, json=body, **more)

    def sent(self, num_requests: int) -> None:
        """Wait until the engine's thread has been sent so many requests; the gate is closed."""
        worker, gate = self.context.worker, self.gate
        wait_for(
            lambda: gate.num_arrived + worker.num_pending == num_requests,
            f"{num_requests} requests sent",
        )

    def connect(self) -> socket.socket:
        """Open a bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), WAIT_S)

    def requests(self, lane: str = "live") -> list[Request]:
        """Return the scheduler's live requests, while the gate holds the thread."""
        return list(self.gate.lanes[lane].engine.scheduler.live())

    def step_until(self, phase: Phase, most_steps: int = 300) -> Request:
        """Let steps through until a request is in that phase, and return it."""
        wait_for(lambda: self.gate.num_arrived, "the first request")
        self.gate.let_through()
        for _ in range(most_steps):
            for request in self.requests():
                if request.phase is phase:
                    return request
            self.gate.let_through()
        raise AssertionError(f"no request was ever {phase.name}")

    def assert_all_free(self) -> None:
        """Check that no request holds anything, and that every output ended exactly once."""
        wait_for(
            lambda: not self.context.worker.busy and not self.context.concurrency.num_active,
            "all requests gone",
        )
        self.context.worker.call(assert_free).result(WAIT_S)
        assert self.gate.num_ended == self.gate.arrivals


def assert_free(lanes: Sequence[Lane]) -> None:
    """Check that no lane holds anything."""
    for lane in lanes:
        state = lane.engine.scheduler.state
        assert state.pool.num_free == state.limits.num_blocks, (
            f"{state.pool.num_free} of {state.limits.num_blocks}"
        )
        assert state.slots.num_free == state.slots.num_slots
        assert not state.host_blocks_used
        assert not state.requests
        assert not lane.engine.sequences
        assert not lane.engine.runner.num_rows
        assert not lane.outputs


@contextmanager
def served(
    engine: EngineSettings = ROOMY,
    settings: ServerSettings | None = None,
    keys: Keys | None = None,
    loaded: LoadedModel | None = None,
    canary_share: float | None = None,
    observers: Sequence[Observer] = (),
    monitor: GateMonitor | None = None,
    ends_well: bool = True,
    metrics: ServerMetrics | None = None,
) -> Iterator[Served]:
    """Run a server on a free port of this machine.

    At its end nothing may be held, unless `ends_well` is false.
    """
    gate = Gate()
    context = open_context(
        engine,
        settings,
        keys,
        served_model="tiny",
        canary_share=canary_share,
        observers=[gate, *observers, *(one for one in (monitor, metrics) if one is not None)],
        loaded=loaded or lettered(),
    )
    listening = socket.create_server(("127.0.0.1", 0))
    process = Process(create_app(context, metrics, monitor), context)
    thread = threading.Thread(target=lambda: asyncio.run(process.serve([listening])))
    thread.start()
    try:
        wait_for(lambda: process.started, "the server's start")
        running = Served(context, process, gate, listening.getsockname()[1])
        yield running
        if ends_well:
            gate.open()
            running.assert_all_free()
    finally:
        gate.open()
        process.stop_soon()
        thread.join(WAIT_S)
        context.worker.stop(WAIT_S)
        assert not thread.is_alive()


def sse(text: str) -> list[str]:
    """Return the data of a stream's events, and check the form of each."""
    assert text.endswith("\n\n"), "a stream ends with a blank line"
    events = text[:-2].split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


BUSY = "hybrid:tokens=40,window=4"  # compresses, preempts and shares on the small pool


def open_tiny(observers: Sequence[Observer], policy: str = BUSY, **changes: Any) -> ServerContext:
    """Open a server with the tiny model on a small pool."""
    settings = replace(SMALL, policy=load_policy(policy), num_blocks=20, **changes)
    return open_context(settings, observers=observers, loaded=tiny())


def conversation_load(count: int = 16, seed: int = 7) -> list[TraceRequest]:
    """Return requests from three sessions; some prompts begin alike."""
    return [
        replace(asked, session=f"user-{place % 3}")
        for place, asked in enumerate(mixed(count, seed, longest=60))
    ]


class ChangesPolicy(Observer):
    """Changes the policy at some steps, with requests running."""

    def __init__(self, *policies: str, every: int = 25) -> None:
        self._policies = list(policies)
        self._every = every
        self._num_steps = 0

    def stepped(self, lane: Lane) -> None:
        self._num_steps += 1
        if self._policies and self._num_steps % self._every == 0:
            lane.engine.replace_policy(load_policy(self._policies.pop(0)))


@dataclass
class Answer:
    finish_reason: str
    token_ids: list[int]


def play(
    context: ServerContext,
    requests: Sequence[TraceRequest],
    cancelled: Callable[[str], bool] = lambda _: False,
    params: SamplingParams | None = None,
) -> dict[str, Answer]:
    """Submit all requests at once; return how each ended.

    A request for whose id `cancelled` is true is aborted after its first token.
    """
    chosen = params or SamplingParams(temperature=0.0, ignore_eos=True)

    async def one(asked: TraceRequest) -> Answer:
        stream = Stream(asyncio.get_running_loop())
        assert asked.prompt_ids is not None
        parsed = ParsedRequest(
            asked.id, chosen, asked.max_tokens, streamed=True, session_id=asked.session
        )
        job = Job(parsed, [list(asked.prompt_ids)], stream)
        context.worker.submit(job)
        tokens: list[int] = []
        while True:
            for event in await stream.read():
                if isinstance(event, Refusal):
                    return Answer("refused", [])
                if isinstance(event, Delta):
                    tokens += event.token_ids
                    if event.finish_reason is not None:
                        return Answer(event.finish_reason, tokens)
                    if cancelled(asked.id):
                        context.worker.abort(job, ApiError(499, "called off"))

    async def every() -> list[Answer]:
        return list(await asyncio.gather(*(one(asked) for asked in requests)))

    return dict(zip([asked.id for asked in requests], asyncio.run(every()), strict=True))

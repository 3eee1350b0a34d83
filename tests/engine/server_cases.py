"""A server under test: a tiny model with a tokenizer, a real socket, an engine whose steps can be let through."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import openai
import tokenizers
import transformers

from engine.build import EngineSettings
from engine.loading import LoadedModel
from engine.server.app import Routes, create_app
from engine.server.house import House
from engine.server.job import Entry
from engine.server.keys import Keys
from engine.server.lanes import Lane
from engine.server.observing import Observer
from engine.server.opening import open_house
from engine.server.process import Process
from engine.server.settings import ServerSettings
from engine.tokenizer import Tokenizer
from policies.core.request import Phase, Request
from tests.engine.engine_cases import SMALL, VOCABULARY, tiny

WAIT_S = 180.0  # for what must come; nobody waits that long but for a fault
LETTERS = "".join(map(chr, range(32, 127))) + "\n"
END = "<end>"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}a:"
    "{% if thinks %}<{{ thinks }}>{% endif %}"
)
HYBRID = "hybrid:tokens=24,window=4"
ROOMY = replace(SMALL, policy=HYBRID)


@cache
def lettered() -> LoadedModel:
    """The tiny model, one token a printable character and one for the end."""
    vocabulary = {letter: number for number, letter in enumerate([*LETTERS, END])}
    assert len(vocabulary) == VOCABULARY
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = tokenizers.decoders.Fuse()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)  # type: ignore[no-untyped-call]
    wrapped.chat_template = TEMPLATE
    return LoadedModel(tiny().model, Tokenizer(wrapped), (vocabulary[END],))


def wait_for(condition: Callable[[], Any], what: str) -> None:
    """Until it holds; a fault if it never does."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.002)


class Gate(Observer):
    """Once closed, the engine's thread does a step only when it is let through. Counts what has ended, and how."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = True
        self._permits = 0
        self._at = "moving"  # "step": stands before one that is not permitted; "idle"; "moving"
        self.fault: Exception | None = None  # the next step raises it
        self.num_arrived = self.num_idle = 0
        self.about_to_step = ""
        self.arrivals: dict[str, int] = {}  # by the scheduler's id
        self.num_ended: dict[str, int] = {}
        self.reasons: dict[str, str] = {}
        self.num_tokens: dict[str, int] = {}
        self.lanes: dict[str, Lane] = {}

    def begin(self, lane: Lane) -> None:
        """Put the gate before the lane's steps."""
        self.lanes[lane.name] = lane
        step = lane.engine.loop.step

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

        lane.engine.loop.step = gated  # type: ignore[method-assign]

    def rebuilt(self, lane: Lane) -> None:
        """Again."""
        self.begin(lane)

    def idle(self) -> None:
        """The thread is about to sleep."""
        with self._changed:
            self.num_idle += 1
            self._now_at("idle")

    def arrived(self, lane: Lane, entry: Entry) -> None:
        """The thread is awake."""
        with self._changed:
            self.num_arrived += 1
            self.arrivals[entry.id] = self.arrivals.get(entry.id, 0) + 1
            self._now_at("moving")

    def ended(self, lane: Lane, entry: Entry) -> None:
        """Count terminal events."""
        self.num_ended[entry.id] = self.num_ended.get(entry.id, 0) + 1
        self.reasons[entry.id] = entry.finish_reason or "none"
        self.num_tokens[entry.id] = len(entry.sequence.output.token_ids) if entry.sequence is not None else 0

    def forget(self) -> None:
        """Count anew."""
        self.num_arrived = 0
        self.arrivals.clear()
        self.num_ended.clear()

    def close(self) -> None:
        """No step from now on but those let through."""
        with self._changed:
            self._open = False

    def open(self) -> None:
        """Steps as they come."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def let_through(self, num_steps: int = 1) -> None:
        """So many steps, each once the thread stands before it; then wait until it rests."""
        for _ in range(num_steps):
            with self._changed:
                self._wait("step")
                self._permits += 1
                self._at = "moving"
                self._changed.notify_all()
                self._wait("step", "idle")

    def until_idle(self) -> None:
        """Wait until the thread sleeps."""
        with self._changed:
            self._wait("idle")

    def _wait(self, *places: str) -> None:
        assert self._changed.wait_for(lambda: self._at in places, WAIT_S), f"the engine's thread is {self._at}"

    def _now_at(self, place: str) -> None:
        self._at = place
        self._changed.notify_all()


class Later:
    """A request on a thread of its own."""

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

    def __init__(self, house: House, process: Process, gate: Gate, port: int) -> None:
        self.house = house
        self.process = process
        self.gate = gate
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def client(self, api_key: str = "none", **more: Any) -> openai.OpenAI:
        """The official client; it does not try again by itself."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=WAIT_S, **more)

    def http(self, **more: Any) -> httpx.Client:
        """A plain client."""
        return httpx.Client(base_url=self.url, timeout=WAIT_S, **more)

    def later(self, path: str, body: Any, **more: Any) -> Later:
        """One request that is answered while the test goes on."""
        return Later(lambda: self.post(path, body, **more))

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        """One request by itself."""
        with self.http() as client:
            return client.post(path, json=body, **more)

    def sent(self, num_requests: int) -> None:
        """Wait until so many requests have been handed to the engine, with the gate closed."""
        worker, gate = self.house.worker, self.gate
        wait_for(
            lambda: gate.num_arrived + worker._mailbox.qsize() + len(worker._held) == num_requests,
            f"{num_requests} requests sent",
        )

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), WAIT_S)

    def requests(self, lane: str = "live") -> list[Request]:
        """What the scheduler has; while the gate keeps the thread at rest."""
        return list(self.gate.lanes[lane].engine.scheduler.live())

    def step_until(self, phase: Phase, most_steps: int = 300) -> Request:
        """Let steps through until a request is in that phase; all that were sent are in the engine by then."""
        wait_for(lambda: self.gate.num_arrived, "the first request")
        self.gate.let_through()
        for _ in range(most_steps):
            for request in self.requests():
                if request.phase is phase:
                    return request
            self.gate.let_through()
        raise AssertionError(f"nobody was ever {phase.name}")

    def assert_all_free(self) -> None:
        """Nothing is held by anybody, and every output had exactly one end."""
        wait_for(lambda: not self.house.worker.busy and not self.house.door.num_inside, "all requests gone")
        self.house.worker.call(assert_free).result(WAIT_S)
        assert self.gate.num_ended == self.gate.arrivals


def assert_free(lanes: Sequence[Lane]) -> None:
    """No lane holds anything."""
    for lane in lanes:
        state = lane.engine.scheduler.state
        assert state.pool.num_free == state.limits.num_blocks, f"{state.pool.num_free} of {state.limits.num_blocks}"
        assert state.slots.num_free == state.slots.num_slots
        assert not state.host_blocks_used
        assert not state.requests
        assert not lane.engine.loop.sequences
        assert not lane.engine.runner.num_rows
        assert not lane.entries


@contextmanager
def served(
    engine: EngineSettings = ROOMY,
    settings: ServerSettings | None = None,
    keys: Keys | None = None,
    loaded: LoadedModel | None = None,
    canary_share: float | None = None,
    observers: Sequence[Observer] = (),
    more_routes: Sequence[Routes] = (),
    ends_well: bool = True,
) -> Iterator[Served]:
    """A server on a free port of this machine; at its end all must be free (unless it is not to end well)."""
    gate = Gate()
    house = open_house(engine, settings, keys, "tiny", canary_share, [gate, *observers], loaded or lettered())
    listening = socket.create_server(("127.0.0.1", 0))
    process = Process(create_app(house, more_routes), house, "127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(process.serve([listening])))
    thread.start()
    try:
        wait_for(lambda: process.started, "the server's start")
        running = Served(house, process, gate, listening.getsockname()[1])
        yield running
        if ends_well:
            gate.open()
            running.assert_all_free()
    finally:
        gate.open()
        process.end_soon()
        thread.join(WAIT_S)
        house.worker.stop(WAIT_S)
        assert not thread.is_alive()


def sse(text: str) -> list[str]:
    """The data of a stream's events, with the form of each checked."""
    assert text.endswith("\n\n"), "a stream ends with a blank line"
    events = text[:-2].split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]

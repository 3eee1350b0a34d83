"""One server as a process: listens, drains on the first signal, stops on the second, never outlives its engine."""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from engine.server.limits import Door
from engine.server.settings import ServerSettings

LOG = logging.getLogger("zlab.server")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOK_S = 0.05  # between two looks at whether everybody has left
KEEP_ALIVE_S = 30
LAST_WORDS_S = 5  # for the answers of requests that were called off


class Worker(Protocol):
    """What computes the answers; `failure` is why it has given up, `on_failure` is called when it does."""

    on_failure: Callable[[], None] | None

    @property
    def failure(self) -> Exception | None:
        """None while it works."""

    def stop(self) -> None:
        """End what runs."""


class Tenant(Protocol):
    """What a process needs of the house that it serves."""

    @property
    def worker(self) -> Worker:
        """Computes the answers."""

    @property
    def door(self) -> Door:
        """Counts those under way."""

    @property
    def settings(self) -> ServerSettings:
        """Says how long to wait for them."""


class Process(uvicorn.Server):
    """Serves `app` until told to stop. Its `exit_code`: 0 when everything it had let in was served, else 1."""

    def __init__(self, app: ASGIApp, tenant: Tenant, host: str, port: int) -> None:
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_WORDS_S,
        )
        super().__init__(config)
        self.exit_code = 0
        self._house = tenant
        self._num_signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        tenant.worker.on_failure = self._engine_failed

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until stopped. Where it cannot listen the log says why, and the exit code is 1."""
        try:
            super().run(sockets)
        except SystemExit:  # uvicorn's way to give up
            self.exit_code = 1

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until stopped, then end the engine's thread."""
        self._loop = asyncio.get_running_loop()
        with self.capture_signals():
            if self._house.worker.failure is not None:
                self._engine_failed()
            await super()._serve(sockets)
        if self._draining is not None:
            self._draining.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """While entered, signals drain and stop; the process is not killed by them afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second stops."""
        self._num_signals += 1
        self._soon(self.drain if self._num_signals == 1 else self.stop)

    def end_soon(self) -> None:
        """Stop, from any thread."""
        self._soon(self.stop)

    def drain_soon(self) -> None:
        """Drain, from any thread."""
        self._soon(self.drain)

    def _soon(self, call: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # closed: it has ended
                self._loop.call_soon_threadsafe(call)

    def drain(self) -> None:
        """Let nobody in any more, and leave when the last is out or `grace_s` is over; on the event loop."""
        if self._draining is None:
            self._house.door.shut = True
            LOG.warning("draining: %d requests under way", self._house.door.num_inside)
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    def stop(self) -> None:
        """Leave now; on the event loop."""
        self._house.door.shut = True
        if self._house.door.num_inside:
            LOG.warning("stopping: %d requests are cut off", self._house.door.num_inside)
            self.exit_code = 1
        threading.Thread(target=self._house.worker.stop, daemon=True).start()  # it may be in the middle of a step
        self.should_exit = True

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._house.settings.grace_s):
                while self._house.door.num_inside:
                    await asyncio.sleep(LOOK_S)
        self.stop()

    def _engine_failed(self) -> None:
        """The engine's thread has given up: so does the process, after its clients have been told."""
        self.exit_code = 1
        self.end_soon()

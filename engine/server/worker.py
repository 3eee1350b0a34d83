"""The engine's thread: the only one that touches lanes, schedulers and runners; everybody else sends it messages."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.collecting import set_aside
from engine.server.errors import ApiError, unavailable
from engine.server.job import Job
from engine.server.lanes import Lane, MakeSink
from engine.server.observing import Observer, Observers
from engine.server.serving import Serving

LOG = logging.getLogger("zlab.server")
COPY_WAIT_S = 0.0005  # a compression is under way and nothing else is to do
T = TypeVar("T")


@dataclass(frozen=True)
class WorkerSettings:
    """Bounds of the engine's thread.

    Attributes:
        max_queue: outputs that may wait for blocks; a request that comes while so many wait is turned away.
        max_crashes: failed steps within `crash_window_s` after which the thread gives up.
        stall_s: a step that takes longer than this is no progress any more.
    """

    max_queue: int = 1024
    max_crashes: int = 3
    crash_window_s: float = 60.0
    stall_s: float = 120.0


@dataclass(frozen=True)
class _Submit:
    job: Job


@dataclass(frozen=True)
class _Abort:
    job: Job
    cause: ApiError


@dataclass(frozen=True)
class _Call:
    function: Callable[[Sequence[Lane]], Any]
    future: "Future[Any]"


_Message = _Submit | _Abort | _Call | None  # None only wakes


class EngineWorker:
    """Owns all lanes on one thread. Messages are applied at step boundaries, in the order in which they came.

    `state` is "starting", "running", "recovering", "failed" or "stopped".
    """

    def __init__(
        self,
        build: Callable[[MakeSink], Sequence[Lane]],
        settings: WorkerSettings | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        """`build` makes the lanes, on the engine's thread; it is given what makes the sinks of their journals."""
        self.settings = settings or WorkerSettings()
        self.observers = Observers(observers)
        self.state = "starting"
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] | None = None  # called on the engine's thread when it gives up
        self._build = build
        self._serving: Serving | None = None
        self._mailbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._held: deque[_Message] = deque()  # taken out of the mailbox, not applied yet
        self._stopping = False
        self._closed = False  # the thread reads no message any more
        self._ready = threading.Event()
        self._beat_s = time.monotonic()
        self._crashes: deque[float] = deque()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # every thread

    def start(self) -> None:
        """Start the thread and wait until the lanes are built; raises what building them raised."""
        self._thread.start()
        self._ready.wait()
        if self.failure is not None:
            raise self.failure

    def submit(self, job: Job) -> None:
        """Hand a job over; its stream gets Accepted or a Refusal, then its deltas."""
        self._send(_Submit(job))

    def abort(self, job: Job, cause: ApiError) -> None:
        """End what still runs of a job; nothing happens when it has ended."""
        if not job.ended:
            self._send(_Abort(job, cause))

    def call(self, function: Callable[[Sequence[Lane]], T]) -> "Future[T]":
        """Run `function(lanes)` on the engine's thread between two steps; what it raises is in the future."""
        future: Future[T] = Future()
        self._send(_Call(function, future))
        return future

    def stop(self, timeout_s: float | None = None) -> None:
        """End what runs and end the thread."""
        self._stopping = True
        self._mailbox.put(None)
        self._thread.join(timeout_s)

    def trouble(self) -> str | None:
        """Why the engine cannot be said to be well; None if it is."""
        if self.state in ("starting", "recovering", "stopped"):
            return f"the engine is {self.state}"
        if self.state == "failed" or not self._thread.is_alive():
            return f"the engine has failed: {type(self.failure).__name__}"
        silent_s = time.monotonic() - self._beat_s
        if self.busy and silent_s > self.settings.stall_s:
            return f"no step has ended for {silent_s:.0f} s"
        return None

    @property
    def busy(self) -> bool:
        """Whether a request is in an engine; from another thread, a moment ago."""
        return self._serving is not None and self._serving.busy

    @property
    def retry_after_s(self) -> int:
        """When it is worth while to try again, by the pace at which outputs have been ending."""
        return 1 if self._serving is None else self._serving.retry_after_s

    def _send(self, message: _Message) -> None:
        self._mailbox.put(message)
        if self._closed:
            self._turn_away()  # nobody else will read it

    # the engine's thread

    def _run(self) -> None:
        try:
            self._serving = Serving(self._build(self.observers.sink), self.observers, self.settings.max_queue)
            for lane in self._serving.lanes:
                self.observers.begin(lane)
            self.state = "running"
        except Exception as error:
            self.failure, self.state = error, "failed"
        self._ready.set()
        with set_aside():
            while self._serving is not None and not self._stopping and self.failure is None:
                try:
                    self._turn(self._serving)
                except Exception as error:  # whatever a step raises concerns the requests of that lane
                    self._mend(self._serving, error)
        self._end()

    def _turn(self, serving: Serving) -> None:
        """Apply what has come, then one step of every lane; sleeps while there is nothing to do."""
        self._apply(serving)
        serving.flush()
        if not serving.busy or self._stopping:
            return
        self._beat_s = time.monotonic()
        progressed = serving.step()
        serving.flush()
        if not progressed and serving.busy:
            self._receive(COPY_WAIT_S)

    def _receive(self, timeout_s: float | None) -> None:
        try:
            self._held.append(self._mailbox.get(timeout=timeout_s))
        except queue.Empty:
            return

    def _apply(self, serving: Serving) -> None:
        if not serving.busy and not self._held:
            if self._mailbox.empty():
                self.observers.idle()
            self._receive(None)
            self._beat_s = time.monotonic()
        for _ in range(self._mailbox.qsize()):
            self._receive(0.0)
        while self._held:
            match self._held[0]:
                case _Submit(job):
                    if serving.must_step_first(job):
                        break  # the queue is full, but a step may take from it: those behind wait for that, too
                    self._held.popleft()
                    serving.submit(job)
                case _Abort(job, cause):
                    self._held.popleft()
                    serving.abort(job, cause)
                case _Call(function, future):
                    self._held.popleft()
                    _answer(future, function, serving.lanes)
                case None:
                    self._held.popleft()

    def _mend(self, serving: Serving, error: Exception) -> None:
        try:
            self._recover(serving, error)
        except Exception as again:
            LOG.critical("the engine's thread cannot mend itself: giving up", exc_info=again)
            self.failure = again

    def _recover(self, serving: Serving, error: Exception) -> None:
        """Fail the requests of the lane that broke and build it anew; give up when that fails or happens too often."""
        self.state = "recovering"
        lane = serving.current
        LOG.error("a step of lane %s failed", lane.name, exc_info=error)
        now = time.monotonic()
        self._crashes.append(now)
        while self._crashes[0] < now - self.settings.crash_window_s:
            self._crashes.popleft()
        serving.fail(lane, error)
        # Its frames hold the engine that is to go.
        error = error.with_traceback(None)
        error.__cause__ = error.__context__ = None
        if len(self._crashes) > self.settings.max_crashes:
            LOG.critical("%d steps failed within %.0f s: giving up", len(self._crashes), self.settings.crash_window_s)
            self.failure = error
            return
        try:
            lane.rebuild()
        except Exception as again:
            LOG.critical("lane %s could not be built anew: giving up", lane.name, exc_info=again)
            self.failure = again
            return
        serving.rebuilt(lane)
        LOG.warning("lane %s has a new engine", lane.name)
        self.state = "running"

    def _end(self) -> None:
        self.state = "stopped" if self.failure is None else "failed"
        if self._serving is not None:
            self._serving.give_up(self._why_gone())
            self.observers.stopped()
        self._closed = True
        while self._held:
            self._mailbox.put(self._held.popleft())
        self._turn_away()
        if self.failure is not None and self.on_failure is not None:
            self.on_failure()

    def _turn_away(self) -> None:
        """Answer messages that nobody will carry out any more."""
        while True:
            try:
                message = self._mailbox.get_nowait()
            except queue.Empty:
                return
            match message:
                case _Submit(job):
                    Serving.refuse(job, self._why_gone())
                case _Call(_, future) if future.set_running_or_notify_cancel():
                    future.set_exception(self._why_gone())

    def _why_gone(self) -> ApiError:
        if self.failure is not None:
            return ApiError(500, f"the engine has failed ({type(self.failure).__name__})", code="engine_failed")
        return unavailable("the server is shutting down", "shutting_down")


def _answer(future: "Future[Any]", function: Callable[[Sequence[Lane]], Any], lanes: Sequence[Lane]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(lanes))
    except Exception as error:
        future.set_exception(error)

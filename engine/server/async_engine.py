"""`AsyncEngine`: one thread owns all lanes; every other thread sends it messages.

    any thread                       engine thread, from start() to stop()
    submit(job)     --.              repeat: apply the messages, in order of arrival
    abort(job)      --+-- queue -->          one step of every lane that has work
    call(function)  --'                      wake the readers that have something to read

A step that raises fails the requests of its lane alone; the lane gets a new engine. The newest
policy is the first suspect: it is replaced by the one before it at once where its decision raised,
otherwise at the second failure. A thread that has failed too often, or cannot build a new engine,
gives up: every job is answered, `failure` says why, and `ended` is done.

A decision has a time limit (`_Watchdog`): a policy that does not return is interrupted by
`PolicyHangError`, which counts as its crash.
"""

import ctypes
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, TypeVar

from zlab.engine.engine import plain_request, set_aside
from zlab.engine.errors import EngineError, SamplingError
from zlab.engine.sampling.sampler import TokenLogprobs
from zlab.engine.server.jobs import Accepted, Delta, Job, Output, Refusal, Stream, wake_all
from zlab.engine.server.lanes import (
    Lane,
    MakeEventSink,
    Observer,
    Observers,
    lane_for,
    lane_to_put_back,
    longest_where,
    put_back,
)
from zlab.engine.server.protocol import (
    ApiError,
    invalid,
    overloaded,
    sampling_error,
    unavailable,
)
from zlab.engine.tokenizer import TokenText
from zlab.policies.core.plan import UnknownRequestError
from zlab.policies.core.policy import Policy
from zlab.policies.core.request import Request
from zlab.policies.core.scheduler import Scheduler
from zlab.traces.schema import Reason, Status

LOG = logging.getLogger("zlab.server")
COPY_WAIT_S = 0.0005  # a compression is in flight and there is nothing else to do
MAX_RETRY_S = 60
PACE_WEIGHT = 0.1  # of the newest gap between two ends of outputs, in their running mean
T = TypeVar("T")


@dataclass(frozen=True)
class WorkerSettings:
    """Bounds of the engine's thread.

    Attributes:
        max_queue: outputs that may wait in a lane; a request that comes while so many wait is
            refused.
        max_crashes: failed steps within `crash_window_s` after which the thread gives up.
        crash_window_s: seconds.
        stall_s: a step that takes longer makes the engine unhealthy.
        decision_s: a decision that takes longer is interrupted, and its policy replaced.
    """

    max_queue: int = 1024
    max_crashes: int = 3
    crash_window_s: float = 60.0
    stall_s: float = 120.0
    decision_s: float = 5.0


class PolicyHangError(BaseException):
    """A decision was interrupted because it took too long.

    It is no `Exception`, so that a policy that catches its own errors does not catch it.
    """


@dataclass(frozen=True)
class _Abort:
    job: Job
    cause: ApiError


@dataclass(frozen=True)
class _Call:
    function: Callable[[Sequence[Lane]], Any]
    future: "Future[Any]"


_Message = Job | _Abort | _Call | None  # None only wakes the thread


class AsyncEngine:
    """Owns all lanes on one thread; messages are applied between two steps.

    Attributes:
        settings: the thread's bounds.
        observers: who learns what happens.
        state: "starting", "running", "recovering", "failed" or "stopped".
        failure: why the thread has given up; None while it works.
        ended: done when the thread has ended.
    """

    def __init__(
        self,
        build: Callable[[MakeEventSink], Sequence[Lane]],
        settings: WorkerSettings | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        """Prepare the thread.

        Args:
            build: makes the lanes, on the engine's thread, with the event logs that it is given.
            settings: the defaults if None.
            observers: see `zlab.engine.server.lanes.Observer`.
        """
        self.settings = settings or WorkerSettings()
        self.observers = Observers(observers)
        self.state = "starting"
        self.failure: Exception | None = None
        self.ended: Future[None] = Future()
        self._build = build
        self._jobs: JobRunner | None = None
        self._mailbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._held: deque[_Message] = deque()  # out of the mailbox, but not applied yet
        self._stopping = False
        self._closed = False  # the thread reads no message any more
        self._ready = threading.Event()
        self._last_step_s = time.monotonic()
        self._works_since_s: float | None = None  # None while the thread waits for a message
        self._crashes: deque[float] = deque()
        self._watchdog: _Watchdog | None = None
        self._crashed_under: tuple[str, int] | None = None  # lane and number of its policy change
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # any thread

    def start(self) -> None:
        """Start the thread and wait for its lanes; raises what building them raised."""
        self._thread.start()
        self._ready.wait()
        if self.failure is not None:
            raise self.failure

    def submit(self, job: Job) -> None:
        """Hand a job over; its stream gets Accepted and then deltas, or a Refusal."""
        self._send(job)

    def abort(self, job: Job, cause: ApiError) -> None:
        """End what still runs of a job; has no effect when it has ended."""
        if not job.ended:
            self._send(_Abort(job, cause))

    def call(self, function: Callable[[Sequence[Lane]], T]) -> "Future[T]":
        """Run `function(lanes)` between two steps; the future has what it returns or raises."""
        future: Future[T] = Future()
        self._send(_Call(function, future))
        return future

    def stop(self, timeout_s: float | None = None) -> None:
        """End what runs, then the thread; wait for its end, at most `timeout_s` seconds."""
        self._stopping = True
        self._mailbox.put(None)
        self._thread.join(timeout_s)

    def trouble(self) -> str | None:
        """Return why the engine is not healthy; None if it is."""
        if self.state in ("starting", "recovering", "stopped"):
            return f"the engine is {self.state}"
        if self.state == "failed" or not self._thread.is_alive():
            return f"the engine has failed: {type(self.failure).__name__}"
        now_s, since_s = time.monotonic(), self._works_since_s
        if self._watchdog is not None and self._watchdog.stuck_s > self.settings.decision_s:
            return f"the policy has not decided for {self._watchdog.stuck_s:.0f} s"
        silent_s = now_s - (self._last_step_s if since_s is None else since_s)
        if (self.busy or since_s is not None) and silent_s > self.settings.stall_s:
            return f"no step has ended for {silent_s:.0f} s"
        return None

    def deciding_frame(self) -> FrameType | None:
        """Return the scheduler's frame on the thread's stack, if a decision is under way."""
        return _deciding_frame(sys._current_frames().get(self._thread.ident or 0))

    @property
    def busy(self) -> bool:
        """Whether a request is in an engine; from another thread, a moment ago."""
        return self._jobs is not None and self._jobs.busy

    @property
    def retry_after_s(self) -> int:
        """After how many seconds a new attempt is worthwhile, by the pace at which outputs end."""
        return 1 if self._jobs is None else self._jobs.retry_after_s

    @property
    def num_pending(self) -> int:
        """How many messages have not been applied yet."""
        return self._mailbox.qsize() + len(self._held)

    def _send(self, message: _Message) -> None:
        self._mailbox.put(message)
        if self._closed:
            self._refuse_messages()  # the thread does not read it any more

    # the engine's thread

    def _run(self) -> None:
        try:
            lanes = self._build(self.observers.event_sink)
            self._jobs = JobRunner(lanes, self.observers, self.settings.max_queue)
            self.observers.notify(Observer.start, self.call)
            for lane in lanes:
                self.observers.notify(Observer.begin, lane)
            self.state = "running"
        except Exception as error:
            self.failure, self.state = error, "failed"
        self._ready.set()
        watchdog = self._watchdog = _Watchdog(self)
        with set_aside():
            while self._jobs is not None and not self._stopping and self.failure is None:
                try:
                    self._turn(self._jobs)
                except (Exception, PolicyHangError) as error:
                    if self.failure is None:  # the watchdog has not given the thread up
                        # It concerns the requests of the lane that raised.
                        self._recover(self._jobs, error)
        watchdog.stop()
        if not self.ended.done():
            self._end()

    def _turn(self, jobs: "JobRunner") -> None:
        """Apply the messages, then step every lane; sleep while there is nothing to do."""
        self._works_since_s = time.monotonic()
        self._apply_messages(jobs)
        jobs.flush()
        if not jobs.busy or self._stopping:
            return
        self._last_step_s = self._works_since_s = time.monotonic()
        progressed = jobs.step()
        jobs.flush()
        if not progressed and jobs.busy:
            self._receive(COPY_WAIT_S)

    def _receive(self, timeout_s: float | None) -> None:
        self._works_since_s = None
        try:
            self._held.append(self._mailbox.get(timeout=timeout_s))
        except queue.Empty:
            return
        finally:
            self._works_since_s = time.monotonic()

    def _apply_messages(self, jobs: "JobRunner") -> None:
        if not jobs.busy and not self._held:
            if self._mailbox.empty():
                self.observers.notify(Observer.idle)
            self._receive(None)
            self._last_step_s = time.monotonic()
        for _ in range(self._mailbox.qsize()):
            self._receive(0.0)
        while self._held:
            message = self._held[0]
            if isinstance(message, Job) and jobs.must_step_first(message):
                # The queue is full, but a step may take from it. The messages behind this one
                # wait, too: they are applied in order.
                break
            self._held.popleft()
            match message:
                case Job():
                    jobs.submit(message)
                case _Abort(job, cause):
                    jobs.abort(job, cause)
                case _Call(function, future):
                    _resolve(future, function, jobs.lanes)

    def _recover(self, jobs: "JobRunner", error: BaseException) -> None:
        """Fail the requests of the lane that broke and rebuild it, or give up."""
        try:
            self.failure = self._rebuild_lane(jobs, error)
        except Exception as again:
            LOG.critical("the engine's thread cannot mend itself: giving up", exc_info=again)
            self.failure = again
        if self.failure is None:
            self.state = "running"

    def _rebuild_lane(self, jobs: "JobRunner", error: BaseException) -> Exception | None:
        """Return why the thread gives up: the lane cannot be rebuilt, or fails too often."""
        self.state = "recovering"
        lane = jobs.current
        LOG.error("a step of lane %s failed", lane.name, exc_info=error)
        now = time.monotonic()
        self._crashes.append(now)
        while self._crashes[0] < now - self.settings.crash_window_s:
            self._crashes.popleft()
        decided = isinstance(error, PolicyHangError) or _raised_by_a_decision(error)
        jobs.fail(lane, error)
        cause = type(error.__cause__ or error)
        # The frames of its traceback hold the engine whose memory is to be freed.
        error = error.with_traceback(None)
        error.__cause__ = error.__context__ = None
        again, self._crashed_under = self._crashed_under, (lane.name, lane.num_changes)
        suspected = decided or again == self._crashed_under
        try:
            if not (suspected and self._put_back(jobs, lane, cause)):
                if len(self._crashes) > self.settings.max_crashes:
                    LOG.critical(
                        "%d steps failed within %.0f s: giving up",
                        len(self._crashes),
                        self.settings.crash_window_s,
                    )
                    return _as_exception(error)
                lane.rebuild()
        except Exception as again_error:
            LOG.critical(
                "lane %s could not be built anew: giving up", lane.name, exc_info=again_error
            )
            return again_error
        self.observers.notify(Observer.rebuilt, lane)
        LOG.warning("lane %s has a new engine", lane.name)
        return None

    def _put_back(self, jobs: "JobRunner", lane: Lane, cause: type[BaseException]) -> bool:
        """Replace the policy under which the lane crashed; returns whether there was another."""
        guilty = lane.policy
        # Its message may be about a client's prompt; only the log has it.
        why = f"put back after a crash: {cause.__name__}"
        changed = put_back(jobs.lanes, lane, why)
        if changed is None:
            return False
        LOG.warning(
            "lane %s: policy %s crashed (%s); policy %s decides again",
            changed.name,
            guilty.name,
            cause.__name__,
            changed.policy.name,
        )
        self._crashes.clear()
        self._crashed_under = None
        self.observers.notify(Observer.put_back, changed, guilty, why)
        return True

    def interrupt(self, stuck_s: float) -> None:
        """Interrupt a decision that has been under way for `stuck_s` seconds.

        Called by the watchdog. Code that does not return to Python cannot be interrupted; then the
        thread is given up while it is stuck.
        """
        thread = self._thread.ident or 0
        if stuck_s > 2 * self.settings.decision_s:
            if not self.ended.done():
                LOG.critical("the policy cannot be interrupted: giving up")
                self.failure = EngineError("the policy hangs and cannot be interrupted")
                self._give_up_stuck()
            return
        LOG.error("the policy has not decided for %.1f s: interrupting it", stuck_s)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread), ctypes.py_object(PolicyHangError)
        )

    def _give_up_stuck(self) -> None:
        """End all jobs while the engine's thread is stuck: it touches nothing any more."""
        jobs = self._jobs
        assert jobs is not None
        changed = lane_to_put_back(jobs.lanes, jobs.current)
        if changed is not None:
            why = "put back after a decision that did not end"
            self.observers.notify(Observer.put_back, changed, jobs.current.policy, why)
        self._end()

    def _end(self) -> None:
        self.state = "stopped" if self.failure is None else "failed"
        if self._jobs is not None:
            self._jobs.give_up(self._end_reason())
            self.observers.notify(Observer.stopped)
        self._closed = True
        while self._held:
            self._mailbox.put(self._held.popleft())
        self._refuse_messages()
        self.ended.set_result(None)

    def _refuse_messages(self) -> None:
        """Answer the messages that the thread will not carry out."""
        while True:
            try:
                message = self._mailbox.get_nowait()
            except queue.Empty:
                return
            match message:
                case Job():
                    JobRunner.refuse(message, self._end_reason())
                case _Call(_, future) if future.set_running_or_notify_cancel():
                    future.set_exception(self._end_reason())

    def _end_reason(self) -> ApiError:
        if self.failure is not None:
            return ApiError(
                500, f"the engine has failed ({type(self.failure).__name__})", code="engine_failed"
            )
        return unavailable("the server is shutting down", "shutting_down")


class _Watchdog:
    """Looks from a thread of its own whether the engine's thread is stuck in a decision.

    A decision is stuck when the same call of the scheduler is on the thread's stack at every look
    for the time limit. This costs the engine's thread nothing.

    Attributes:
        stuck_s: for how long the decision that is under way has been seen.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.stuck_s = 0.0
        self._engine = engine
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch."""
        self._stopped.set()

    def _run(self) -> None:
        limit_s = self._engine.settings.decision_s
        seen, seen_s = None, 0.0
        while not self._stopped.wait(limit_s / 4):
            frame, now_s = self._engine.deciding_frame(), time.monotonic()
            if frame is None or frame is not seen:
                seen, seen_s = frame, now_s
            del frame
            self.stuck_s = now_s - seen_s if seen is not None else 0.0
            if self.stuck_s > limit_s:
                self._engine.interrupt(self.stuck_s)


def _deciding_frame(frame: FrameType | None) -> FrameType | None:
    """Return the call of the scheduler that a stack is inside; None where there is none."""
    found = None
    while frame is not None:
        if frame.f_globals.get("__name__") == Scheduler.__module__:
            found = frame
        frame = frame.f_back
    return found


def _raised_by_a_decision(error: BaseException) -> bool:
    """Whether an error came from the scheduler or the policy that it asked."""
    trace, last = error.__traceback__, None
    while trace is not None:
        last, trace = trace.tb_frame, trace.tb_next
    return _deciding_frame(last) is not None


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else EngineError("the policy hangs")


def _resolve(
    future: "Future[Any]", function: Callable[[Sequence[Lane]], Any], lanes: Sequence[Lane]
) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(lanes))
    except Exception as error:
        future.set_exception(error)


class JobRunner:
    """Submits jobs to the lanes, steps them, aborts them, and feeds their streams.

    Belongs to the engine's thread. `current` is the lane that was used last: the one that broke,
    if one did.
    """

    def __init__(self, lanes: Sequence[Lane], observers: Observers, max_queue: int) -> None:
        self.lanes = lanes
        self.current = lanes[0]
        self._observers = observers
        self._max_queue = max_queue
        self._live: dict[str, tuple[Job, Lane]] = {}  # the jobs that have not ended, by id
        self._submitting: Job | None = None
        self._touched: dict[Stream, Job] = {}
        self._has_stepped = True  # since a job was last submitted
        self._gap_s = 1.0  # mean time between the ends of two outputs
        self._last_end_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether some lane has work."""
        return any(lane.busy for lane in self.lanes)

    @property
    def retry_after_s(self) -> int:
        """Seconds until an output is likely to have ended, 1..60."""
        return max(1, min(MAX_RETRY_S, round(self._gap_s)))

    # submitting

    def must_step_first(self, job: Job) -> bool:
        """Return whether the queue may be full only because no step has followed the last job."""
        return not self._has_stepped and lane_for(self.lanes, job).num_waiting >= self._max_queue

    def submit(self, job: Job) -> None:
        """Submit all outputs of a job or none; its stream gets Accepted or a Refusal."""
        if job.id in self._live:
            message = f"a request with the id {job.id!r} is still running"
            return self.refuse(
                job, ApiError(409, message, param="request_id", code="duplicate_request_id")
            )
        lane = lane_for(self.lanes, job)
        if lane.num_waiting >= self._max_queue:
            message = f"{lane.num_waiting} outputs wait already, as many as the queue holds"
            return self.refuse(job, overloaded(message, self.retry_after_s, "queue_full"))
        self._has_stepped = False
        self.current, self._submitting = lane, job
        self._live[job.id] = (job, lane)
        try:
            notes = self._submit_outputs(lane, job)
        except ApiError as error:
            self._abort_outputs(job, lane)
            self._forget(job)
            self.refuse(job, error)
        else:
            job.stream.put(Accepted(notes))
            self._touched[job.stream] = job
        self._submitting = None

    def _submit_outputs(self, lane: Lane, job: Job) -> tuple[tuple[str, str], ...]:
        """Return notes for the caller, each with the field that it is about.

        Raises:
            ApiError: an output can never be served.
        """
        notes: dict[tuple[str, str], None] = {}
        if job.request.params.prompt_logprobs is not None:
            job.prompt_logprobs = _prompt_logprobs(lane, job)
        for index in range(job.num_outputs):
            try:
                request = self._submit_output(lane, job, index)
            except SamplingError as error:
                raise sampling_error(error) from error
            except EngineError as error:  # the engine refused it before anything changed
                raise invalid(None, str(error)) from error
            if request.status is Status.REFUSED:
                raise _refusal(job, index, request)
            message = request.message or _length_note(lane, job, request)
            if message:
                notes[job.request.length_param, message] = None
            if request.priority and not _heeds_priority(lane.policy, request):
                order = type(lane.policy.order).__name__
                message = f"has no effect: the policy's order ({order}) knows no priority"
                notes["priority", f"parameter 'priority' {message}"] = None
        return tuple(notes)

    def _submit_output(self, lane: Lane, job: Job, index: int) -> Request:
        request, params = job.request, job.request.params
        prompt = job.prompts[index // params.n]
        max_tokens = _capped(lane, len(prompt), request.max_tokens)
        output: Output | None = None
        has_tokens = False

        def on_text(added: TokenText) -> None:
            nonlocal has_tokens
            if output is None:
                return  # the scheduler refuses it: handled below
            if not has_tokens and output.engine_request.output.token_ids:
                has_tokens = True
                self._observers.notify(Observer.first_token, lane, output)
            delta = output.take(added)
            if delta is not None:
                self._give(lane, output, delta)

        engine_request = lane.engine.submit(
            replace(
                plain_request(job.output_id(index), prompt, params),
                max_tokens=max_tokens,
                priority=request.priority,
                session=request.session_id,
            ),
            prompt,
            params,
            copy=index % params.n,
            grammar=job.grammar,
            arrival_ns=max(lane.engine.clock_ns() - (time.perf_counter_ns() - job.arrived_ns), 0),
            on_text=on_text,
        )
        output = Output(job, index, engine_request)
        job.outputs.append(output)
        lane.outputs[engine_request.request.number] = output
        self._observers.notify(Observer.arrived, lane, output)
        if engine_request.closed:
            self._end_output(lane, output, "refused")
        return engine_request.request

    def _give(self, lane: Lane, output: Output, delta: Delta) -> None:
        if delta.finish_reason is not None:
            # Metrics count the end before the client can know of it.
            self._end_output(lane, output, delta.finish_reason)
        if output.job is not self._submitting:  # else it is about to be refused as a whole
            # The end of an output follows its last token within a step: the client gets both at
            # once.
            output.held = delta if output.held is None else output.held.join(delta)
            self._touched[output.job.stream] = output.job

    def _end_output(self, lane: Lane, output: Output, finish_reason: str) -> None:
        assert output.finish_reason is None, f"{output.id} has ended twice"
        output.finish_reason = finish_reason
        lane.outputs.pop(output.engine_request.request.number, None)
        now = time.monotonic()
        if self._last_end_s:
            self._gap_s += PACE_WEIGHT * (now - self._last_end_s - self._gap_s)
        self._last_end_s = now
        self._observers.notify(Observer.ended, lane, output)
        job = output.job
        if job is not self._submitting and all(each.finish_reason for each in job.outputs):
            self._forget(job)

    def _forget(self, job: Job) -> None:
        job.ended = True
        del self._live[job.id]

    # stepping

    def step(self) -> bool:
        """Step every lane that has work once; return False when all of them wait for a copy."""
        progressed = False
        for lane in self.lanes:
            if not lane.busy:
                continue
            self.current = lane
            engine = lane.engine
            progressed |= engine.step()
            self._observers.notify(Observer.stepped, lane)
            engine.take_ended()
            if engine.steps.large:  # no observer has taken them
                engine.drain()
                engine.steps.take()
        self._has_stepped = True
        return progressed

    def flush(self) -> None:
        """Wake the readers that have something to read; abort the jobs of those far behind."""
        touched = self._put_held()
        for job in touched.values():
            if job.stream.overrun and not job.ended:
                message = "the reader of this stream fell too far behind"
                self.abort(job, ApiError(408, message, code="slow_reader"))
        wake_all(touched)
        self._wake_touched()

    def _wake_touched(self) -> None:
        wake_all(self._put_held())

    def _put_held(self) -> dict[Stream, Job]:
        """Put what outputs have gained into their streams; return the streams to wake."""
        touched, self._touched = self._touched, {}
        for stream, job in touched.items():
            for output in job.outputs:
                if output.held is not None:
                    stream.put(output.held)
                    output.held = None
        return touched

    # ending

    def abort(self, job: Job, cause: ApiError) -> None:
        """End what still runs of a job."""
        if not job.ended:
            job.cause = job.cause or cause
            self._abort_outputs(job, self._live[job.id][1])

    def _abort_outputs(self, job: Job, lane: Lane) -> None:
        self.current = lane
        lane.engine.drain()
        for output in job.outputs:
            if output.finish_reason is None:
                try:
                    lane.engine.abort(output.id)
                except UnknownRequestError:
                    # It was aborted before, and a copy in flight still uses its blocks.
                    continue

    def fail(self, lane: Lane, error: BaseException) -> None:
        """End every request of a lane whose step raised."""
        kind = type(error).__name__
        self._observers.notify(Observer.crashed, lane, error)
        message = f"the engine failed in a step ({kind}); the request was not finished"
        cause = ApiError(500, message, code="step_failed")
        self._fail_outputs(lane, cause)
        self._refuse_submitting(cause)
        self._wake_touched()

    def give_up(self, cause: ApiError) -> None:
        """End every request of every lane."""
        for lane in self.lanes:
            self._fail_outputs(lane, cause)
        self._refuse_submitting(cause)
        self._wake_touched()

    def _refuse_submitting(self, cause: ApiError) -> None:
        """Refuse the job that the engine was taking in when it broke, if there is one."""
        job, self._submitting = self._submitting, None
        if job is not None:
            self._forget(job)
            self.refuse(job, cause)

    def _fail_outputs(self, lane: Lane, cause: ApiError) -> None:
        for output in list(lane.outputs.values()):
            output.job.cause = output.job.cause or cause
            delta = Delta(output.index, "", [], [], "error", None, cause.message)
            self._give(lane, output, delta)

    @staticmethod
    def refuse(job: Job, error: ApiError) -> None:
        """Tell a job's reader that the job does not run."""
        job.ended = True
        job.stream.put(Refusal(error))
        wake_all([job.stream])


def _capped(lane: Lane, num_prompt: int, max_tokens: int | None) -> int | None:
    """Return the output length to ask for: what the pool can hold at most, if that is less.

    The scheduler caps an output at the model's limit, but refuses one that outgrows the pool. A
    client sees one rule for both.
    """
    scheduler = lane.engine.scheduler
    if max_tokens is None or scheduler.can_ever_run(num_prompt, max_tokens):
        return max_tokens
    most = min(max_tokens, lane.engine.limits.max_model_len)
    fitting = longest_where(lambda size: scheduler.can_ever_run(num_prompt, size), most)
    return fitting or max_tokens


def _length_note(lane: Lane, job: Job, request: Request) -> str:
    """Return what the caller should know of the output's length; empty if it is as asked."""
    asked = job.request.max_tokens
    if request.status is Status.REFUSED or asked is None or request.max_tokens == asked:
        return ""
    blocks = lane.engine.limits.num_blocks
    return f"output capped at {request.max_tokens} of {asked} tokens by the pool of {blocks} blocks"


class _NoHistory:
    """What a scheduler knows before a request has finished."""

    def mean_output(self, cls: str | None) -> float | None:
        """Return None: no output has been seen."""
        return None


def _heeds_priority(policy: Policy, request: Request) -> bool:
    """Whether the policy's order looks at the priority of a request."""
    other = copy(request)
    other.priority = request.priority + 1
    try:
        keys = [policy.order.key(each, _NoHistory()) for each in (request, other)]
    except Exception:  # an own class may need more than this; then nothing is claimed
        return True
    return keys[0] != keys[1]


def _prompt_logprobs(lane: Lane, job: Job) -> list[list[TokenLogprobs]]:
    num_top = job.request.params.prompt_logprobs or 0
    try:
        return [lane.engine.prompt_logprobs(prompt, num_top) for prompt in job.prompts]
    except EngineError as error:
        raise invalid(job.request.prompt_param, str(error)) from error


def _refusal(job: Job, index: int, request: Request) -> ApiError:
    """Return the 400 of an output that can never be served, with the field that makes it so."""
    parsed = job.request
    which = f"prompt {index // parsed.params.n}: " if len(job.prompts) > 1 else ""
    reason = Reason(request.reason)
    param = parsed.length_param if reason is Reason.BAD_MAX_TOKENS else parsed.prompt_param
    code = {Reason.TOO_LONG: "context_length_exceeded", Reason.NEVER_FITS: "never_fits"}.get(reason)
    return invalid(param, f"{which}{request.message}", code)

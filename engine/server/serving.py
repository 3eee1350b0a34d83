"""Jobs in lanes: taken in, stepped, called off, and their readers told. Belongs to the engine's thread."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.errors import EngineError
from engine.server.errors import ApiError, invalid, overloaded
from engine.server.job import Accepted, Delta, Entry, Job, Refusal, Stream, wake_all
from engine.server.lanes import Lane, lane_of
from engine.server.observing import Observers
from engine.stopping import Piece
from engine.submitting import plain_request, submit
from policies.core.errors import UnknownRequestError
from policies.core.events import Reason
from policies.core.request import Request, Status

MOST_RETRY_S = 60
PACE_WEIGHT = 0.1  # of the newest gap between two endings in their running mean


class Serving:
    """The lanes and every job in them. `current` is the lane that was touched last: the one that broke, if one did."""

    def __init__(self, lanes: Sequence[Lane], observers: Observers, max_queue: int) -> None:
        self.lanes = lanes
        self.current = lanes[0]
        self._observers = observers
        self._max_queue = max_queue
        self._ids: dict[str, Job] = {}
        self._lane: dict[Job, Lane] = {}  # of every job that has not ended
        self._taking: Job | None = None  # the job that is being taken in
        self._touched: dict[Stream, Job] = {}
        self._has_stepped = True  # since a job was last taken in
        self._gap_s = 1.0  # mean time between two outputs' endings
        self._last_end_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether some lane has work."""
        return any(lane.busy for lane in self.lanes)

    @property
    def num_live(self) -> int:
        """Jobs that have not ended."""
        return len(self._lane)

    @property
    def retry_after_s(self) -> int:
        """Seconds until an output is likely to have ended, 1..60."""
        return max(1, min(MOST_RETRY_S, round(self._gap_s)))

    # a job comes

    def must_step_first(self, job: Job) -> bool:
        """Whether the queue may be full only because no step has looked at it since the last job came."""
        return not self._has_stepped and lane_of(self.lanes, job).num_waiting >= self._max_queue

    def submit(self, job: Job) -> None:
        """Take a job in, all of its outputs or none; its reader is told which."""
        if job.id in self._ids:
            message = f"a request with the id {job.id!r} is still running"
            return self.refuse(job, ApiError(409, message, param="request_id", code="duplicate_request_id"))
        lane = lane_of(self.lanes, job)
        if lane.num_waiting >= self._max_queue:
            message = f"{lane.num_waiting} outputs wait already, as many as the queue holds"
            return self.refuse(job, overloaded(message, self.retry_after_s, "queue_full"))
        self._has_stepped = False
        self.current, self._taking = lane, job
        self._ids[job.id], self._lane[job] = job, lane
        try:
            notes = self._take(lane, job)
        except ApiError as error:
            self._call_off(job, lane)
            self._forget(job)
            self.refuse(job, error)
        else:
            job.stream.put(Accepted(notes))
            self._touched[job.stream] = job
        self._taking = None

    def _take(self, lane: Lane, job: Job) -> tuple[str, ...]:
        """Every output of the job into the lane; raises ApiError for one that can never be served."""
        notes: dict[str, None] = {}
        for place in range(job.num_outputs):
            entry = Entry(job, place, place // job.params.n, place % job.params.n)
            job.entries.append(entry)
            try:
                request = self._submit_one(lane, entry)
            except EngineError as error:  # raised at the engine's door, before anything has changed
                raise invalid(None, str(error)) from error
            if request.status is Status.REFUSED:
                raise _refusal(job, entry, request)
            if request.message:
                notes[request.message] = None
        return tuple(notes)

    def _submit_one(self, lane: Lane, entry: Entry) -> Request:
        job = entry.job
        prompt = job.prompts[entry.prompt]
        asked = replace(
            plain_request(entry.id, prompt, job.params),
            max_tokens=job.max_tokens,
            priority=job.priority,
            session=job.session,
        )
        entry.sequence = submit(
            lane.engine,
            asked,
            prompt,
            job.params,
            copy=entry.copy,
            arrival_ns=max(lane.engine.loop.clock_ns() - (time.perf_counter_ns() - job.arrived_ns), 0),
            with_text=job.with_text,
            on_piece=self._listener(lane, entry),
        )
        lane.entries[entry.sequence.request.number] = entry
        self._observers.arrived(lane, entry)
        if entry.sequence.closed:
            self._end_entry(lane, entry, "refused")
        return entry.sequence.request

    # tokens come

    def _listener(self, lane: Lane, entry: Entry) -> Callable[[Piece], None]:
        has_tokens = False

        def listen(piece: Piece) -> None:
            nonlocal has_tokens
            if entry.sequence is None:
                return  # refused at the door, which `submit` sees
            if not has_tokens and entry.sequence.output.token_ids:
                has_tokens = True
                self._observers.first_token(lane, entry)
            delta = entry.take(piece)
            if delta is not None:
                self._give(lane, entry, delta)

        return listen

    def _give(self, lane: Lane, entry: Entry, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self._end_entry(lane, entry, delta.finish_reason)  # counted before its client can know
        if entry.job is not self._taking:  # else it is about to be refused as a whole
            entry.job.stream.put(delta)
            self._touched[entry.job.stream] = entry.job

    def _end_entry(self, lane: Lane, entry: Entry, finish_reason: str) -> None:
        assert entry.finish_reason is None, f"{entry.id} has ended twice"
        assert entry.sequence is not None
        entry.finish_reason = finish_reason
        lane.entries.pop(entry.sequence.request.number, None)
        now = time.monotonic()
        if self._last_end_s:
            self._gap_s += PACE_WEIGHT * (now - self._last_end_s - self._gap_s)
        self._last_end_s = now
        self._observers.ended(lane, entry)
        job = entry.job
        if job is not self._taking and all(each.finish_reason for each in job.entries):
            self._forget(job)

    def _forget(self, job: Job) -> None:
        job.ended = True
        del self._ids[job.id], self._lane[job]

    # steps

    def step(self) -> bool:
        """One step of every lane that has work; False when all of them wait for a copy."""
        progressed = False
        for lane in self.lanes:
            if not lane.busy:
                continue
            self.current = lane
            progressed |= lane.engine.loop.step()
            self._observers.stepped(lane)
            lane.engine.loop.ended.clear()
            if lane.engine.steps.large:  # nobody has taken them
                lane.engine.loop.drain()
                lane.engine.steps.take()
        self._has_stepped = True
        return progressed

    def flush(self) -> None:
        """Wake the readers that have something to read; call off the jobs of those who do not."""
        touched, self._touched = self._touched, {}
        for job in touched.values():
            if job.stream.overrun and not job.ended:
                self.abort(job, ApiError(408, "the reader of this stream fell too far behind", code="slow_reader"))
        wake_all(touched)
        wake_all(self._touched)
        self._touched = {}

    # a job is called off

    def abort(self, job: Job, cause: ApiError) -> None:
        """End what still runs of a job."""
        if not job.ended:
            job.cause = job.cause or cause
            self._call_off(job, self._lane[job])

    def _call_off(self, job: Job, lane: Lane) -> None:
        self.current = lane
        lane.engine.loop.drain()
        for entry in job.entries:
            if entry.finish_reason is None and entry.sequence is not None:
                try:
                    lane.engine.loop.abort(entry.id)
                except UnknownRequestError:
                    continue  # its end is decided: it is called off already, and a copy still uses its blocks

    def fail(self, lane: Lane, error: Exception) -> None:
        """A step of the lane broke: every request in it has failed."""
        kind = type(error).__name__
        self._observers.crashed(lane, error)
        cause = ApiError(500, f"the engine failed in a step ({kind}); the request was not finished", code="step_failed")
        for entry in list(lane.entries.values()):
            entry.job.cause = entry.job.cause or cause
            self._give(lane, entry, Delta(entry.index, "", [], [], "error", None, cause.message))
        job, self._taking = self._taking, None
        if job is not None:  # it broke while the job was taken in
            self._forget(job)
            self.refuse(job, cause)
        wake_all(self._touched)
        self._touched = {}

    def rebuilt(self, lane: Lane) -> None:
        """The lane has a new engine."""
        self._observers.rebuilt(lane)

    def give_up(self, cause: ApiError) -> None:
        """Tell every reader that nothing more will come."""
        for lane in self.lanes:
            for entry in list(lane.entries.values()):
                entry.job.cause = entry.job.cause or cause
                self._give(lane, entry, Delta(entry.index, "", [], [], "error", None, cause.message))
        wake_all(self._touched)

    @staticmethod
    def refuse(job: Job, error: ApiError) -> None:
        """Tell a job's reader that it is not taken."""
        job.ended = True
        job.stream.put(Refusal(error))
        wake_all([job.stream])


def _refusal(job: Job, entry: Entry, request: Request) -> ApiError:
    """The 400 of a request that can never be served, naming the field that makes it so."""
    which = f"prompt {entry.prompt}: " if len(job.prompts) > 1 else ""
    reason = Reason(request.reason)
    param = job.length_param if reason is Reason.BAD_MAX_TOKENS else job.prompt_param
    code = {Reason.TOO_LONG: "context_length_exceeded", Reason.NEVER_FITS: "never_fits"}.get(reason)
    return invalid(param, f"{which}{request.message}", code)

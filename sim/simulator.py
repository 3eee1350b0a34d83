"""The discrete-event simulation: a SimPy clock drives the same scheduler that drives the engine.

The simulated GPU has a compute stream and a compression stream, which slow each other down while
both have work. Step 2 of this run starts the compression of a request:

    ms            0          4          8               14
    loop          plan 0     plan 1     plan 2          plan 3
    compute       [ step 0  ][ step 1  ][ step 2    ]   [ step 3 ...
    compression                         [ request A    ]
    arrivals            B

Under join `next_step` (drawn here) the step ends when both streams have ended, and request A
decodes again in step 3. Under `when_done`, step 3 begins as soon as the compute stream is free, and
the compression runs beside it. Under `blocking`, the compression runs before the step's other work.
Request B is submitted before plan 1. With `plan_ahead`, plan 1 is made when step 0 begins, so B is
submitted before plan 2.

1. `Simulation._arrivals` makes each request known to the loop at its arrival time.
2. `Simulation._loop` submits the known requests, calls `Scheduler.plan`, runs the step on the two
   streams of `Device` for the time that the cost model gives, and calls `Scheduler.commit`.
3. Steps in which nothing is decided are taken many at a time (`Scheduler.fast_forward`).
4. A change of policy takes effect before the step that it names.
5. The first Ctrl-C takes effect at a step boundary, so that the recording is whole.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from math import ceil
from types import FrameType, TracebackType
from typing import Any

import simpy

from zlab.policies.core.journal import Int64Array
from zlab.policies.core.plan import SchedulerLimits, StepPlan
from zlab.policies.core.policy import Join, Policy
from zlab.policies.core.request import Request
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.snapshot import PolicyChange
from zlab.policies.spec import policy_mark
from zlab.policies.step_log import (
    StepLog,
    block_columns,
    cause_columns,
    event_columns,
    report_columns,
    request_columns,
)
from zlab.sim.cost_model import Change, CostModel
from zlab.traces.recording import Recorder
from zlab.traces.workload import TraceRequest, Workload


class Device:
    """A simulated GPU with a compute stream and a compression stream.

    While both streams have work, compute runs at `1 - share` of its speed and compression at `rate`
    of its speed. With `rate == share` the GPU's time is only divided; with a larger rate, the two
    streams together do more than one after the other. Each stream runs its jobs in order. Times are
    whole nanoseconds; the end of a job is rounded up.
    """

    def __init__(self, env: simpy.Environment, share: float, rate: float | None = None) -> None:
        """Create an idle device.

        Args:
            env: The SimPy environment whose clock the device uses.
            share: Share of its speed that compute loses while a compression runs, in (0, 1).
            rate: Speed of a compression beside compute, relative to its speed alone, in (0, 1].
                None sets it to `share`: running both at once then gains no time.
        """
        self._env = env
        self._beside = (1.0 - share, share if rate is None else rate)
        self._compute: deque[_StreamJob] = deque()
        self._compression: deque[_StreamJob] = deque()
        self._since: float = 0
        self._version = 0

    @property
    def compressing(self) -> bool:
        """Whether a compression runs or waits for the stream."""
        return bool(self._compression)

    def compute(self, work_ns: float) -> simpy.Event:
        """Start a job on the compute stream. It takes `work_ns` nanoseconds on an otherwise idle
        GPU. Return the event that fires when the job ends.
        """
        return self._start(self._compute, work_ns)

    def compress(self, work_ns: float) -> simpy.Event:
        """Start a job on the compression stream, like `compute`."""
        return self._start(self._compression, work_ns)

    def _start(self, stream: "deque[_StreamJob]", work_ns: float) -> simpy.Event:
        self._settle()
        job = _StreamJob(work_ns, self._env.event())
        stream.append(job)
        self._schedule()
        return job.done

    def _rates(self) -> tuple[float, float]:
        if self._compute and self._compression:
            return self._beside
        return 1.0, 1.0

    def _settle(self) -> None:
        """Reduce the remaining work by what was done since the last call, and end the jobs that
        have none left.
        """
        elapsed = self._env.now - self._since
        self._since = self._env.now
        for stream, rate in zip((self._compute, self._compression), self._rates(), strict=True):
            if stream:
                stream[0].left_ns -= elapsed * rate
        for stream in (self._compute, self._compression):
            if stream and stream[0].left_ns <= 1e-6:
                stream.popleft().done.succeed()

    def _schedule(self) -> None:
        """Set a wake-up for the end of the next job. A change of either stream before then makes it
        void.
        """
        self._version += 1
        waits = [
            ceil(max(stream[0].left_ns, 0.0) / rate)
            for stream, rate in zip((self._compute, self._compression), self._rates(), strict=True)
            if stream
        ]
        if waits:
            self._env.process(self._wake(min(waits), self._version))

    def _wake(self, wait_ns: int, version: int) -> Generator[simpy.Event, Any, None]:
        yield self._env.timeout(wait_ns)
        if version == self._version:
            self._settle()
            self._schedule()


class _StreamJob:
    __slots__ = ("done", "left_ns")

    def __init__(self, work_ns: float, done: simpy.Event) -> None:
        self.left_ns = work_ns
        self.done = done


class AtBoundary:
    """Delays Ctrl-C to a step boundary.

    Inside the `with` block the first Ctrl-C is delayed until `check` is called or until the block
    ends. A second one interrupts at once. On another thread than the main thread, signals are left
    as they are.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None
        self._installed = False

    def __enter__(self) -> "AtBoundary":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self._asked:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._before)
            if self._asked and kind is None:
                signal.raise_signal(
                    signal.SIGINT
                )  # The signal came after the last check, so the code outside has to receive it.


NS_PER_S = 1_000_000_000
Progress = Callable[[int, int, int], None]  # (requests ended, requests in all, simulated ns)
Process = Generator[simpy.Event, Any, None]
PROGRESS_EVERY = 512  # plans


def to_ns(seconds: float) -> int:
    """Return the seconds as whole nanoseconds. Sums of whole numbers are exact, so the clock does
    not depend on how many steps are taken at a time.
    """
    return int(seconds * NS_PER_S + 0.5)


class Simulation:
    """One run of a workload under a policy on a simulated GPU.

    The SimPy processes are the arrivals, the engine loop (plan, run, commit) and the wake-ups of
    the device's two streams.
    """

    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        limits: SchedulerLimits,
        cost: CostModel,
        recorder: Recorder,
        quiet: bool = True,
        progress: Progress | None = None,
        make_scheduler: Callable[..., Scheduler] = Scheduler,
        plan_ahead: bool = False,
        changes: Sequence[Change] = (),
    ) -> None:
        """Prepare a run; `run` carries it out.

        Args:
            workload: The requests, in order of arrival.
            policy: The policy at the start.
            limits: Sizes of the pool and of a step.
            cost: The time that each step takes.
            recorder: What receives the tables of the recording.
            quiet: Whether steps without a decision are taken many at a time. Decisions and times
                are the same without it.
            progress: Called every `PROGRESS_EVERY` plans with (requests ended, requests in all,
                simulated ns).
            make_scheduler: What creates the scheduler; it takes the arguments of `Scheduler`.
            plan_ahead: Whether a step is planned when the step before it begins, as an engine does
                that overlaps planning with the GPU's work. A request that arrives during step n is
                then planned in step n + 2 at the earliest.
            changes: Changes of the policy, in order of their steps.
        """
        self.workload = workload
        self.env = simpy.Environment(initial_time=0)
        self.scheduler = make_scheduler(
            policy, limits, self._write_events, prefix_block_size=workload.meta.block_size
        )
        self.compression_ns = 0  # work of all compressions on an otherwise idle GPU
        self.swapped_tokens = 0
        self._cost = cost
        self._device = Device(self.env, cost.compression_share, cost.compression_rate)
        self._recorder = recorder
        self._steps = StepLog(self.scheduler)
        self._quiet = quiet
        self._progress = progress
        self._inbox: list[TraceRequest] = []
        self._plan_ahead = plan_ahead
        self._planned_ns = (
            # with `plan_ahead`: when the next step was planned; later arrivals are not part of it
            0
        )
        # with `plan_ahead`: the time from which the host could launch the next step
        self._free_ns = 0
        self._arrived: simpy.Event | None = None  # event that an idle loop waits for
        self._all_arrived = False
        self._now_ns = 0  # the loop's own clock
        self.policy_changes: list[PolicyChange] = []  # changes that have been made
        self._changes = deque(changes)
        self._overdue: list[
            simpy.Event
        ] = []  # compressions that a policy change joined early: the next step waits for them
        self._pending: dict[
            simpy.Event, int
        ] = {}  # unfinished compressions under join `when_done`, with their request's number
        self._ended: list[tuple[Request, int]] = []
        self._num_ended = 0
        self._plans = 0

    def run(self) -> None:
        """Run to the end of the workload. The recorder receives the tables. Raise StuckError if the
        scheduler can plan nothing although requests are left.
        """
        self.env.process(self._arrivals())
        loop = self.env.process(self._loop())
        try:
            self.env.run(until=loop)
        finally:
            self.flush()

    def flush(self) -> None:
        """Write all rows so far to the recorder, including the rows of requests that have not
        ended.
        """
        self._write_steps()
        self._ended += [(request, -1) for request in self.scheduler.live()]
        self._write_requests()
        self.scheduler.flush_events()

    # SimPy processes

    def _arrivals(self) -> Process:
        """Make each request known at its arrival time. Requests with the same time keep their
        order.
        """
        env = self.env
        for request in self.workload:
            wait = to_ns(request.arrival_s or 0.0) - env.now
            if wait > 0:
                yield env.timeout(wait)
            self._inbox.append(request)
            if self._arrived is not None:
                self._arrived.succeed()
                self._arrived = None
        self._all_arrived = True

    def _loop(self) -> Process:
        """Run the engine loop. Its own clock `_now_ns` is ahead of SimPy's clock as long as no
        other SimPy event lies between them.
        """
        scheduler, env = self.scheduler, self.env
        yield env.timeout(0)  # requests that arrive at time 0 are known before the first plan
        while True:
            while env.peek() <= self._now_ns:  # events at or before the loop's time come first
                yield env.timeout(self._now_ns - env.now)
            self._change_policy()
            self._submit_arrivals()
            if (
                self._quiet
                and not self._device.compressing
                and not self._inbox
                and self._fast_forward()
            ):
                continue
            plan = scheduler.plan(self._now_ns)
            if plan is None:
                # under asynchronous scheduling the outputs of the last step have just returned
                self._collect()
                # no step is in flight: requests that arrived meanwhile are planned now
                if self._inbox:
                    self._planned_ns = self._free_ns = self._now_ns
                    continue
                if self._all_arrived and not self._pending:
                    return
                yield self._next_arrival_or_join()
                self._now_ns = self._planned_ns = self._free_ns = int(env.now)
                continue
            self._steps.plan(plan)
            start_ns = self._now_ns
            if plan.compressions or plan.swaps or self._device.compressing:
                if env.now < self._now_ns:
                    yield env.timeout(self._now_ns - env.now)
                yield from self._carry_out(plan)
                self._now_ns = int(env.now)
            else:
                self._now_ns += to_ns(self._seconds(plan))
            self._steps.ran(start_ns, self._now_ns)
            self._planned_ns = start_ns
            self._free_ns = self._host_free_ns(plan, start_ns)
            scheduler.commit(plan, self._now_ns)
            self._collect()

    def _next_arrival_or_join(self) -> simpy.Event:
        """Return an event that fires when a request arrives or a compression finishes."""
        self._arrived = self.env.event()
        return simpy.AnyOf(self.env, [self._arrived, *self._pending])

    def _seconds(self, plan: StepPlan) -> float:
        """Return the seconds that the decodes and prefills of the step take on an otherwise idle
        GPU.
        """
        cost, chunks = self._cost, plan.prefills
        if not chunks:
            return (
                cost.decode_seconds(plan.num_decodes, plan.context_tokens)
                if plan.num_decodes
                else 0.0
            )
        pairs = sum(chunk.pairs for chunk in chunks)
        counts = (
            plan.num_decodes,
            plan.context_tokens,
            plan.num_prefill_tokens,
            pairs,
            len(chunks),
        )
        before_s = (self._now_ns - self._free_ns) / NS_PER_S if self._plan_ahead else 0.0
        return cost.step_seconds(*counts, before_s)

    def _host_free_ns(self, plan: StepPlan, start_ns: int) -> int:
        """Return the time from which the host could launch the step after the one that has just
        ended.
        """
        if not plan.prefills:
            return start_ns
        before_s, took_s = (
            (start_ns - self._free_ns) / NS_PER_S,
            (self._now_ns - start_ns) / NS_PER_S,
        )
        counts = plan.num_decodes, plan.num_prefill_tokens
        return self._now_ns - to_ns(self._cost.host_free_seconds(*counts, before_s, took_s))

    def _carry_out(self, plan: StepPlan) -> Process:
        """Run the work of the plan on both streams. The process ends when the step ends."""
        cost, device = self._cost, self._device
        work_ns = to_ns(self._seconds(plan))
        waits, self._overdue = self._overdue, []
        join = self.scheduler.policy.compression.join
        together = 0
        start_s = cost.compression_start_s  # paid once a step, by its first compression
        for task in plan.compressions:
            alone = to_ns(start_s + cost.compression_seconds(task.source_tokens, task.kept_tokens))
            start_s = 0.0
            self.compression_ns += alone
            together += alone
            if join is Join.WHEN_DONE:
                self._pending[device.compress(alone)] = task.request.number
        if together and join is not Join.WHEN_DONE:
            waits.append(device.compress(together))
        if waits and join is Join.BLOCKING:
            yield simpy.AllOf(self.env, waits)
            waits = []
        if plan.swaps:
            tokens = sum(len(task.blocks) for task in plan.swaps) * self.scheduler.limits.block_size
            self.swapped_tokens += tokens
            waits.append(self.env.timeout(to_ns(cost.swap_seconds(tokens))))
        waits.append(device.compute(work_ns) if device.compressing else self.env.timeout(work_ns))
        yield simpy.AllOf(self.env, waits)

    def _fast_forward(self) -> bool:
        """Take uneventful decode steps at once, up to the first step boundary at or after the next
        SimPy event. Return whether any step was taken.
        """
        scheduler = self.scheduler
        most = scheduler.uneventful_steps()
        if not most:
            return False
        num_decodes, context = scheduler.decode_load()
        until, decode_seconds = self.env.peek(), self._cost.decode_seconds
        time = self._now_ns
        ends: list[int] = []
        first_step, first_context = scheduler.next_step, context
        if self._changes:
            most = min(most, self._changes[0].step - first_step)
        for _ in range(most):
            time += int(decode_seconds(num_decodes, context) * NS_PER_S + 0.5)
            ends.append(time)
            context += num_decodes
            if time >= until:
                break
        blocks = scheduler.fast_forward(len(ends))
        if blocks:
            self._steps.quiet(first_step, first_context, self._now_ns, ends, blocks)
            self._planned_ns = self._free_ns = (
                ends[len(blocks) - 2] if len(blocks) > 1 else self._now_ns
            )
            self._now_ns = ends[len(blocks) - 1]
        return bool(blocks)

    # interface to the scheduler

    def _change_policy(self) -> None:
        """Make the policy changes whose step has come. Each change joins the compressions in
        flight.
        """
        scheduler = self.scheduler
        while self._changes and self._changes[0].step <= scheduler.next_step:
            change = self._changes.popleft()
            scheduler.replace_policy(change.policy, self._now_ns, policy_mark(change.policy))
            self.policy_changes.append(
                PolicyChange(scheduler.next_step, self._now_ns, change.policy)
            )
            self._overdue += self._pending
            self._pending.clear()
            self._cost = change.cost or self._cost
            self._collect()

    def _submit_arrivals(self) -> None:
        """Submit the requests that have arrived and report the compressions that have finished."""
        done = [event for event in self._pending if event.processed]
        if done:
            self.scheduler.finished_compressions([self._pending.pop(event) for event in done])
        known = len(self._inbox)
        if self._plan_ahead:  # the unsubmitted requests are in order of arrival
            known = sum(
                1 for request in self._inbox if to_ns(request.arrival_s or 0.0) <= self._planned_ns
            )
        if known:
            for request in self._inbox[:known]:
                self.scheduler.submit(request, self._now_ns, to_ns(request.arrival_s or 0.0))
            del self._inbox[:known]
            self._collect()

    def _collect(self) -> None:
        """Collect the requests that have ended. Now and then report progress and write rows to the
        recorder.
        """
        step = self.scheduler.next_step
        for request in self.scheduler.take_finished():
            self._ended.append((request, step))
            self._num_ended += 1
        self._plans += 1
        if self._plans % PROGRESS_EVERY == 0:
            if self._progress is not None:
                self._progress(self._num_ended, len(self.workload), self._now_ns)
            if len(self._ended) > 50_000:
                self._write_requests()
            if self._steps.large:
                self._write_steps()

    def _write_requests(self) -> None:
        if self._ended:
            requests, steps = zip(*self._ended, strict=True)
            self._recorder.write("requests", request_columns(requests, steps))
            self._ended.clear()

    def _write_steps(self) -> None:
        columns = self._steps.take()
        if columns is not None:
            self._recorder.write("steps", columns)

    def _write_events(self, rows: Int64Array, blocks: Int64Array) -> None:
        self._recorder.write("events", event_columns(rows))
        self._recorder.write("blocks", block_columns(rows, blocks))
        self._recorder.write("reports", report_columns(self.scheduler.take_reports()))
        self._recorder.write("causes", cause_columns(self.scheduler.take_causes()))

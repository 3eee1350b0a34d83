"""The discrete-event simulation: a SimPy clock under the same scheduler that drives the engine."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import simpy

from policies.changes import PolicyChange
from policies.core.events import Int64Array
from policies.core.limits import Limits
from policies.core.plan import StepPlan
from policies.core.policy import Join, Policy
from policies.core.request import Request
from policies.core.scheduler import Scheduler
from policies.record import block_columns, event_columns, request_columns
from policies.spec import policy_mark
from policies.steplog import StepLog
from sim.changing import Change
from sim.cost import CostModel
from sim.device import Device
from traces.recording import Recorder
from traces.workload import TraceRequest, Workload

NS_PER_S = 1_000_000_000
Progress = Callable[[int, int, int], None]  # (requests ended, requests in all, simulated ns)
Process = Generator[simpy.Event, Any, None]
PROGRESS_EVERY = 512  # plans


def to_ns(seconds: float) -> int:
    """Seconds as whole nanoseconds: sums of steps are exact, in whatever portions they are taken."""
    return int(seconds * NS_PER_S + 0.5)


class Simulation:
    """One run of a workload under a policy on a simulated GPU.

    Processes: arrivals, the engine loop (plan, let the device work, commit), and the device's two streams. With
    `quiet` the loop takes stretches of steps without a decision at once; decisions and times are the same either way.
    With `plan_ahead` a step is planned when the one before begins, as an engine does that overlaps the two: who arrives
    while a step runs is not in the next one, but in the one after.
    """

    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        limits: Limits,
        cost: CostModel,
        recorder: Recorder,
        quiet: bool = True,
        progress: Progress | None = None,
        make_scheduler: Callable[..., Scheduler] = Scheduler,
        plan_ahead: bool = False,
        changes: Sequence[Change] = (),
    ) -> None:
        """`make_scheduler` takes what `Scheduler` takes; `changes` stand in order of their steps."""
        self.workload = workload
        self.env = simpy.Environment(initial_time=0)
        self.scheduler = make_scheduler(policy, limits, self._write_events, prefix_block_size=workload.meta.block_size)
        self.compression_ns = 0  # work of all compressions, alone on the card
        self.swapped_tokens = 0
        self._cost = cost
        self._device = Device(self.env, cost.compression_share, cost.compression_rate)
        self._recorder = recorder
        self._steps = StepLog(self.scheduler)
        self._quiet = quiet
        self._progress = progress
        self._inbox: list[TraceRequest] = []
        self._plan_ahead = plan_ahead
        self._planned_ns = 0  # with `plan_ahead`: when the coming step was planned; who came later is not in it
        self._free_ns = 0  # with `plan_ahead`: from when on the host could launch the coming step
        self._arrived: simpy.Event | None = None  # what an idle loop waits for
        self._all_arrived = False
        self._now_ns = 0  # where the loop stands
        self.policy_changes: list[PolicyChange] = []  # that have happened
        self._changes = deque(changes)
        self._overdue: list[simpy.Event] = []  # compressions joined by a change: the next step waits for them
        self._pending: dict[simpy.Event, int] = {}  # compressions the scheduler waits for (join `when_done`)
        self._ended: list[tuple[Request, int]] = []
        self._num_ended = 0
        self._plans = 0

    def run(self) -> None:
        """Run to the end of the workload; what happened goes to the recorder. Raises StuckError."""
        self.env.process(self._arrivals())
        loop = self.env.process(self._loop())
        try:
            self.env.run(until=loop)
        finally:
            self.flush()

    def flush(self) -> None:
        """Hand everything noted so far to the recorder, requests that are still alive included."""
        self._write_steps()
        self._ended += [(request, -1) for request in self.scheduler.live()]
        self._write_requests()
        self.scheduler.state.journal.flush()

    # processes

    def _arrivals(self) -> Process:
        """Requests appear at their times; several at one time keep their order."""
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
        """The engine loop. Its own clock, `_now_ns`, is ahead of SimPy's while nothing else happens in between."""
        scheduler, env = self.scheduler, self.env
        yield env.timeout(0)  # whoever arrives at time 0 comes first
        while True:
            while env.peek() <= self._now_ns:  # let everything that happens up to this very time happen first
                yield env.timeout(self._now_ns - env.now)
            self._change_policy()
            self._take_in()
            if self._quiet and not self._device.compressing and not self._inbox and self._stretch():
                continue
            plan = scheduler.plan(self._now_ns)
            if plan is None:
                if self._inbox:  # nothing is under way: who came meanwhile is looked at now
                    self._planned_ns = self._free_ns = self._now_ns
                    continue
                if self._all_arrived and not self._pending:
                    return
                yield self._something()
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

    def _something(self) -> simpy.Event:
        """An event that fires when a request arrives or a compression finishes."""
        self._arrived = self.env.event()
        return simpy.AnyOf(self.env, [self._arrived, *self._pending])

    def _seconds(self, plan: StepPlan) -> float:
        """What the step's decodes and prefills take, alone on the card."""
        cost, chunks = self._cost, plan.prefills
        if not chunks:
            return cost.decode_seconds(plan.num_decodes, plan.context_tokens) if plan.num_decodes else 0.0
        pairs = sum(chunk.pairs for chunk in chunks)
        counts = (plan.num_decodes, plan.context_tokens, plan.num_prefill_tokens, pairs, len(chunks))
        before_s = (self._now_ns - self._free_ns) / NS_PER_S if self._plan_ahead else 0.0
        return cost.step_seconds(*counts, before_s)

    def _host_free_ns(self, plan: StepPlan, start_ns: int) -> int:
        """From when on the host could launch what follows the step that has just ended."""
        if not plan.prefills:
            return start_ns
        before_s, took_s = (start_ns - self._free_ns) / NS_PER_S, (self._now_ns - start_ns) / NS_PER_S
        counts = plan.num_decodes, plan.num_prefill_tokens
        return self._now_ns - to_ns(self._cost.host_free_seconds(*counts, before_s, took_s))

    def _carry_out(self, plan: StepPlan) -> Process:
        """Let both streams do what the plan says; ends when the step ends."""
        cost, device = self._cost, self._device
        work_ns = to_ns(self._seconds(plan))
        waits, self._overdue = self._overdue, []
        join = self.scheduler.state.policy.compression.join
        together = 0
        start_s = cost.compression_start_s  # once a step, with its first compression
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
            tokens = sum(len(task.blocks) for task in plan.swaps) * self.scheduler.state.limits.block_size
            self.swapped_tokens += tokens
            waits.append(self.env.timeout(to_ns(cost.swap_seconds(tokens))))
        waits.append(device.compute(work_ns) if device.compressing else self.env.timeout(work_ns))
        yield simpy.AllOf(self.env, waits)

    def _stretch(self) -> bool:
        """Take steps that only decode at once, up to the first step boundary at which something may have happened."""
        scheduler = self.scheduler
        most = scheduler.quiet_steps()
        if not most:
            return False
        decoding = scheduler.state.decoding
        num_decodes, context = decoding.num_requests, decoding.context_tokens
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
        blocks = scheduler.advance(len(ends))
        if blocks:
            self._steps.quiet(first_step, first_context, self._now_ns, ends, blocks)
            self._planned_ns = self._free_ns = ends[len(blocks) - 2] if len(blocks) > 1 else self._now_ns
            self._now_ns = ends[len(blocks) - 1]
        return bool(blocks)

    # to and from the scheduler

    def _change_policy(self) -> None:
        """Policies whose step has come take over; compressions in flight are joined with that."""
        scheduler = self.scheduler
        while self._changes and self._changes[0].step <= scheduler.next_step:
            change = self._changes.popleft()
            scheduler.replace_policy(change.policy, self._now_ns, policy_mark(change.policy))
            self.policy_changes.append(PolicyChange(scheduler.next_step, self._now_ns, change.policy))
            self._overdue += self._pending
            self._pending.clear()
            self._cost = change.cost or self._cost
            self._collect()

    def _take_in(self) -> None:
        """Tell the scheduler what has arrived and which compressions have finished."""
        done = [event for event in self._pending if event.processed]
        if done:
            self.scheduler.finished_compressing([self._pending.pop(event) for event in done])
        known = len(self._inbox)
        if self._plan_ahead:  # they stand in order of arrival
            known = sum(1 for request in self._inbox if to_ns(request.arrival_s or 0.0) <= self._planned_ns)
        if known:
            for request in self._inbox[:known]:
                self.scheduler.submit(request, self._now_ns, to_ns(request.arrival_s or 0.0))
            del self._inbox[:known]
            self._collect()

    def _collect(self) -> None:
        """Write down requests that have ended, and now and then what else has come together."""
        step = self.scheduler.next_step
        for request in self.scheduler.take_ended():
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

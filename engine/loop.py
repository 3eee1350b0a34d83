"""The engine loop: plan, execute, commit, under the real clock and the same scheduler that drives the simulator."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.runner import Runner
from engine.sampling import StepSampler, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.step_result import StepResult
from engine.stopping import Output, Piece
from policies.changes import PolicyChange
from policies.core.plan import NOTHING, Outcome, StepPlan
from policies.core.policy import Join, Policy
from policies.core.request import Request
from policies.core.scheduler import Scheduler
from policies.spec import policy_mark
from policies.steplog import StepLog
from traces.workload import TraceRequest

OnTokens = Callable[[list[int], int], None]  # (numbers of the requests that got one, ns of the loop's clock)


@dataclass
class Sequence:
    """A request's tokens on the host. `may_stop`: it may end before its length limit, so every step is looked at."""

    request: Request
    prompt_ids: list[int]
    params: SamplingParams
    output: Output
    may_stop: bool
    on_piece: Callable[[Piece], None] | None = None
    text: str = ""
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one a token, where asked for
    closed: bool = False  # its terminal event has happened and all its tokens are here


@dataclass(eq=False)
class _UnderWay:
    plan: StepPlan
    result: StepResult
    start_ns: int
    committed: bool = False
    ended: list[Request] = field(default_factory=list)


class EngineLoop:
    """Steps of one engine; the only thread that touches scheduler and runner.

    While no live request can stop early, step n + 1 is planned and enqueued while n still runs. That is safe because
    the outcome of n is then known before it has run: every request gets its token, and its end is the scheduler's
    length limit. The scheduler is then told a time extrapolated from the step before; the steps' own times are measured
    either way. Otherwise a step's tokens are looked at before the next is planned.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: StepSampler,
        steps: StepLog,
        overlap: bool = True,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.scheduler = scheduler
        self.sequences: dict[int, Sequence] = {}  # those that are not closed
        self.ended: list[tuple[Request, int]] = []  # with the step in which each ended; a driver empties it
        self.policy_changes: list[PolicyChange] = []
        self.on_tokens: OnTokens | None = None  # told of every step's tokens when they have come to the host
        self._runner = runner
        runner.token_ids = self.token_ids
        sampler.output_ids = self._output_ids
        self._sampler = sampler
        self._steps = steps
        self.overlaps = overlap
        self._clock = clock
        self._origin_ns = clock()
        self._under_way: deque[_UnderWay] = deque()
        self._num_may_stop = 0
        self._last_end_ns = 0
        self._step_ns = 0
        self._told_ns = 0

    def start_clock(self) -> None:
        """Count time from now on; before the first request."""
        assert not self.sequences
        assert self._told_ns == 0
        self._origin_ns = self._clock()

    def clock_ns(self) -> int:
        """Nanoseconds since the clock was started."""
        return self._clock() - self._origin_ns

    def now_ns(self) -> int:
        """What the scheduler is told: `clock_ns`, or the estimated end of a step under way where that lies ahead."""
        return max(self.clock_ns(), self._told_ns)

    def submit(
        self,
        asked: TraceRequest,
        prompt_ids: list[int],
        params: SamplingParams,
        output: Output,
        *,
        may_stop: bool,
        copy: int = 0,
        on_piece: Callable[[Piece], None] | None = None,
        arrival_ns: int | None = None,
    ) -> Sequence:
        """Hand a request to the scheduler; a refused one has ended already, with its reason in `request.message`.

        `copy` says which of several outputs for one prompt this is.
        """
        request = self.scheduler.submit(asked, self._tell(self.now_ns()), arrival_ns)
        sequence = Sequence(request, prompt_ids, params, output, may_stop, on_piece)
        self.sequences[request.number] = sequence
        self._sampler.add(request.number, params, prompt_ids, copy)
        self._num_may_stop += may_stop
        self._collect(None)
        return sequence

    def abort(self, id: str) -> None:
        """End a request; raises UnknownRequestError."""
        self.drain()
        self.scheduler.abort(id, self._tell(self.now_ns()))
        self._collect(None)

    def replace_policy(self, policy: Policy) -> PolicyChange:
        """Let another policy decide from the next step on; steps under way are waited for first.

        Raises EngineError where it needs more memory than `EngineSettings.may_become` set aside, ConfigError where it
        cannot work within the limits; the policy of before then goes on.
        """
        self.drain()
        self._runner.check_policy(policy)
        now_ns = self._tell(self.now_ns())
        self.scheduler.replace_policy(policy, now_ns, policy_mark(policy))
        self._runner.follow_policy()
        self._collect(None)
        change = PolicyChange(self.scheduler.next_step, now_ns, policy)
        self.policy_changes.append(change)
        return change

    def token_ids(self, number: int, count: int) -> list[int]:
        """The first `count` ids of a request, prompt and output; waits for steps under way only if some lack."""
        sequence = self.sequences[number]
        if count <= len(sequence.prompt_ids):
            return sequence.prompt_ids
        if count > len(sequence.prompt_ids) + len(sequence.output.token_ids):
            self.drain()
        return sequence.prompt_ids + sequence.output.token_ids

    def _output_ids(self, number: int) -> list[int]:
        self.drain()
        return self.sequences[number].output.token_ids

    def step(self) -> bool:
        """Plan and carry out one step; False when there is nothing to do until something arrives or a copy finishes."""
        if self._waits_for_copies():
            self.scheduler.finished_compressing(self._runner.finished_compressions())
        plan = self.scheduler.plan(self._tell(self.now_ns()))
        if plan is None:
            self.drain()
            self._collect(None)
            return False
        # Before execute: enqueuing belongs to the step, and without CUDA it is the step. By the clock itself: what the
        # scheduler has been told may lie ahead of it.
        start_ns = self.clock_ns()
        current = _UnderWay(plan, self._runner.execute(plan), start_ns)
        self._steps.plan(plan)
        self._under_way.append(current)
        if self.overlaps and not self._num_may_stop and not current.result.failed:
            while len(self._under_way) > 1:
                self._settle(self._under_way.popleft())
            end_ns = max(self._last_end_ns + self._step_ns, current.start_ns)
            self._commit(current, end_ns, NOTHING)
        else:
            self.drain()
        return True

    def drain(self) -> None:
        """Wait for every step under way and take in its tokens."""
        while self._under_way:
            self._settle(self._under_way.popleft())

    # one step

    def _settle(self, step: _UnderWay) -> None:
        """The step has finished on the device: note its time and its tokens, and commit it if that was put off."""
        was_done = step.result.done
        tokens = step.result.tokens()
        end_ns = self.clock_ns()
        start_ns = max(step.start_ns, self._last_end_ns)
        taken_ns = step.result.device_ns() if was_done else None
        if taken_ns is not None:  # nobody was there when it ended
            end_ns = min(end_ns, start_ns + taken_ns)
        self._steps.ran(start_ns, max(end_ns, start_ns))
        self._step_ns = max(end_ns - start_ns, 0)
        self._last_end_ns = max(end_ns, start_ns)
        if self.on_tokens is not None:
            self.on_tokens(step.result.numbers, max(end_ns, start_ns))
        stopped = []
        for row, (number, token) in enumerate(zip(step.result.numbers, tokens, strict=True)):
            sequence = self.sequences[number]
            if sequence.params.logprobs is not None:
                found = step.result.logprobs(row, sequence.params.logprobs)
                sequence.logprobs += [found] if found is not None else []
            if self._push(sequence, token):
                stopped.append(number)
        if step.committed:
            for request in step.ended:
                self._close(request)
        else:
            self._commit(step, end_ns, Outcome(stopped=stopped, failed=step.result.failed))

    def _push(self, sequence: Sequence, token: int) -> bool:
        piece = sequence.output.push(token)
        sequence.text += piece.text
        sequence.stop_reason = piece.stop_reason
        if sequence.on_piece is not None:
            sequence.on_piece(piece)
        return piece.stopped

    def _commit(self, step: _UnderWay, end_ns: int, outcome: Outcome) -> None:
        step.committed = True
        self.scheduler.commit(step.plan, self._tell(end_ns), outcome)
        self._collect(step)

    def _collect(self, step: _UnderWay | None) -> None:
        """Let go of requests that have ended: at once, or when the last step under way has brought their tokens."""
        for request in self.scheduler.take_ended():
            self._runner.forget(request)
            self.ended.append((request, self.scheduler.next_step))
            self._num_may_stop -= self.sequences[request.number].may_stop
            if step is not None and step in self._under_way:
                step.ended.append(request)
            else:
                self._close(request)

    def _close(self, request: Request) -> None:
        """All tokens are here: say the rest of the text and let go of the sequence; its caller keeps it."""
        sequence = self.sequences.pop(request.number)
        rest = sequence.output.finish() if sequence.stop_reason is None else ""
        sequence.text += rest
        sequence.closed = True
        if sequence.on_piece is not None:
            sequence.on_piece(Piece(rest, stopped=True, stop_reason=sequence.stop_reason))

    def _waits_for_copies(self) -> bool:
        state = self.scheduler.state
        return bool(state.compressing) and state.policy.compression.join is Join.WHEN_DONE

    def _tell(self, now_ns: int) -> int:
        self._told_ns = max(self._told_ns, now_ns)
        return self._told_ns

"""The engine: it plans, executes and commits steps under the real clock, with the scheduler that
also drives the simulator.

    submit -> Scheduler.plan -> ModelRunner.execute -> (device) -> tokens on the host -> settle
                   ^                  |                                                   |
                   |                  +-- with overlap, commit and plan step n + 1 here   |
                   +--------------------- else commit here <------------------------------+

With overlap, step n + 1 is planned and enqueued while step n still runs on the device:

    host    plan 0 | exec 0 | commit 0 | plan 1 | exec 1 | settle 0 | commit 1 | plan 2 ...
    device           [------ step 0 ------][------ step 1 ------][------ step 2 ...

This is safe while no live request can stop early: then the outcome of a step is known before it has
run, because every request gets a token and ends at its length limit. The scheduler gets an end time
extrapolated from the previous step; the recorded times of steps are measured in any case. While a
request can stop early, each step is settled before the next is planned.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch.nn.functional import scaled_dot_product_attention

from zlab.engine.compression import CompressionStream, scoring_rotation, settings_for
from zlab.engine.errors import EngineError, SamplingError
from zlab.engine.kernels.backends import find_backend
from zlab.engine.kernels.interface import KernelBackend
from zlab.engine.kernels.workspace import CompressionShape, CompressionWorkspace
from zlab.engine.kv_cache import CacheShape, KVCache, Reserved
from zlab.engine.model.loader import LoadedModel, default_dtype, load_model
from zlab.engine.model_runner import ModelRunner, StepResult
from zlab.engine.sampling.constraints import (
    Constraint,
    Grammar,
    GrammarCompiler,
    compile_constraint,
)
from zlab.engine.sampling.sampler import StepSampler, TokenLogprobs, judged
from zlab.engine.sampling.torch_ops import NOT_FINITE
from zlab.engine.sampling_params import SamplingParams
from zlab.engine.tokenizer import StopChecker, Tokenizer, TokenText
from zlab.policies.core.journal import EventSink
from zlab.policies.core.plan import EMPTY_OUTCOME, SchedulerLimits, StepOutcome, StepPlan
from zlab.policies.core.policy import Join, Policy
from zlab.policies.core.request import Request
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.snapshot import PolicyChange
from zlab.policies.spec import load_policy, policy_mark
from zlab.policies.step_log import StepLog
from zlab.sim.memory import MemorySettings, plan_pool, workspace_blocks
from zlab.sim.specs import Gpu, ModelSpec, SimError, gpu_with_memory
from zlab.traces.choices import unknown_choice
from zlab.traces.workload import TraceRequest

OnTokens = Callable[
    [list[int], int], None
]  # (numbers of the requests that got a token, end of the step in ns of the engine's clock)


@dataclass
class EngineRequest:
    """A request with its tokens and text on the host. With `may_stop` it may end before its length
    limit, so each of its steps is settled before the next is planned.
    """

    request: Request
    prompt_ids: list[int]
    params: SamplingParams
    output: StopChecker
    may_stop: bool
    on_text: Callable[[TokenText], None] | None = None
    constraint: Constraint | None = None
    text: str = ""
    stop_reason: int | str | None = None
    # one for each token, where requested
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    closed: bool = False  # it has ended, and all its tokens are here
    # Why its output is of no use from here on. The scheduler may have let the request finish before
    # this is known.
    failure: str = ""
    # The field of the request that is at fault; None: the request is not.
    failed_field: str | None = None

    @property
    def message(self) -> str:
        """Why the request failed or was refused, or what its caller should know."""
        return self.failure or self.request.message


NOT_FINITE_MESSAGE = "the model's logits are not finite (NaN or infinite) at output token {}"


@dataclass(eq=False)
class StepInFlight:
    """A step that was enqueued on the device. `ended` are the requests that close when its tokens
    reach the host.
    """

    plan: StepPlan
    result: StepResult
    start_ns: int
    committed: bool = False
    ended: list[Request] = field(default_factory=list)


MEMORY_SHARE = MemorySettings().utilisation
CONTEXT_BYTES = 1 << 30  # most that this process takes of a GPU before there is a cache
HOST_CACHE_BYTES = 1 << 30  # for keys and values where the model runs on the CPU
MOST_COMPRESSED_AT_ONCE = MemorySettings().concurrent_compressions
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class EngineSettings:
    """How an engine is set up. A setting that is None is chosen for the device.

    Attributes:
        model: a model, as `zlab.engine.model.loader.load_model` names it.
        policy: a policy or its name.
        may_become: policies that may take over later (`Engine.replace_policy`). Their memory is
            reserved at the start.
        num_blocks: blocks of the cache. By default those that fit into `memory_share` of the GPU's
            memory, or into `HOST_CACHE_BYTES` on a CPU.
        block_size: tokens of a block.
        max_batched_tokens: most tokens of a step.
        max_running: most requests that run at once.
        max_model_len: most tokens of a request; by default the positions of the model.
        host_blocks: blocks of host memory for swapped requests, allocated (on CUDA pinned) at the
            start.
        memory_share: share of the GPU's memory; by default `MEMORY_SHARE`.
        device: where the model runs.
        dtype: type of weights and cache; by default that of the device.
        variant: implementation of the model's layers; by default that of the device.
        kernels: "torch" or "triton"; by default Triton on CUDA.
        use_graphs: replay decode steps as CUDA graphs; by default on CUDA.
        overlap: plan a step while the previous one still runs; by default on CUDA. A CPU has run a
            step once it is enqueued, so overlap would only delay the report of its end.
        seed: seed of requests that bring none.
    """

    model: str = "smollm2"
    policy: Policy | str = "hybrid"
    may_become: tuple[Policy | str, ...] = ()
    num_blocks: int | None = None
    block_size: int = 256
    max_batched_tokens: int = 8192
    max_running: int = 256
    max_model_len: int | None = None
    host_blocks: int = 0
    memory_share: float | None = None
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: torch.dtype | str | None = None
    variant: str | None = None
    kernels: str | None = None
    use_graphs: bool | None = None
    overlap: bool | None = None
    seed: int = 0


class Engine:
    """One model under one scheduler. All calls must come from one thread, which alone touches
    scheduler and runner.

    The module's docstring shows the order of a step.
    """

    def __init__(
        self,
        settings: EngineSettings,
        loaded: LoadedModel,
        policies: Sequence[Policy],
        *,
        event_sink: EventSink | None = None,
        prefix_block_size: int | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        make_sampler: Callable[..., StepSampler] = StepSampler,
    ) -> None:
        """Reserve all memory and warm up; `create` finds the model and the policies first.

        Args:
            settings: how the engine is set up.
            loaded: the model.
            policies: the first policy, then those that may take over.
            event_sink: receives the scheduler's events.
            prefix_block_size: block size of prefix ids in the requests, if they have any.
            clock: a nanosecond clock.
            make_sampler: makes the sampler, with the arguments of `StepSampler`.
        """
        device = find_device(settings.device)
        dtype = find_dtype(settings.dtype) or default_dtype(device)
        self.settings = settings
        self.loaded = loaded
        for policy in policies:
            _check_runnable(policy)
        self.limits = _limits(settings, loaded, policies, dtype, device)
        self.scheduler = Scheduler(
            policies[0], self.limits, event_sink, prefix_block_size=prefix_block_size
        )
        self.steps = StepLog(self.scheduler)
        self.sequences: dict[int, EngineRequest] = {}  # those that are not closed
        self.policy_changes: list[PolicyChange] = []
        self.token_listeners: list[OnTokens] = []  # called when a step's tokens are on the host
        self._ended: list[tuple[Request, int]] = []
        self._in_flight: deque[StepInFlight] = deque()
        self._num_may_stop = 0
        self._closed = False
        # their logits were not finite; not reported to the scheduler yet
        self._corrupted: list[EngineRequest] = []
        self._last_end_ns = 0
        self._step_ns = 0
        self._reported_ns = 0
        reserved = Reserved.of(policies, self.limits)
        self.cache = KVCache(
            _shape(loaded, policies, self.limits, reserved.num_slots, reserved.keeps_history),
            dtype,
            device,
        )
        kernels = find_backend(device, settings.kernels)
        rotation = scoring_rotation(loaded.model.rotation)
        self.compression = _compression(
            self.cache, kernels, policies, self.limits, settings.seed, rotation
        )
        self.sampler = make_sampler(
            loaded.config.vocab_size,
            device,
            self.scheduler.num_output_tokens,
            self._output_ids,
            max_penalised=self.limits.max_running,
            engine_seed=settings.seed,
        )
        cuda = device.type == "cuda"
        self.overlaps = cuda if settings.overlap is None else settings.overlap
        self.uses_graphs = cuda if settings.use_graphs is None else settings.use_graphs
        if self.uses_graphs and not cuda:
            raise EngineError(f"CUDA graphs need a CUDA device, not {settings.device!r}")
        self.runner = ModelRunner(
            loaded.model,
            self.cache,
            kernels,
            self.compression,
            self.sampler,
            self.scheduler,
            reserved,
            self.token_ids,
            use_graphs=self.uses_graphs,
        )
        self._clock = clock
        self._origin_ns = clock()

    @classmethod
    def create(
        cls,
        settings: EngineSettings,
        loaded: LoadedModel | None = None,
        event_sink: EventSink | None = None,
        prefix_block_size: int | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        make_sampler: Callable[..., StepSampler] = StepSampler,
    ) -> Self:
        """Load the model, reserve the cache and warm up.

        Args:
            settings: how the engine is set up.
            loaded: a loaded model; by default the one that the settings name.
            event_sink: receives the scheduler's events.
            prefix_block_size: block size of prefix ids in the requests, if they have any.
            clock: a nanosecond clock.
            make_sampler: makes the sampler, with the arguments of `StepSampler`.

        Raises:
            EngineError, ModelError, PolicyError, ConfigError: settings that do not fit together.
        """
        policies = _policies(settings)
        if loaded is None:
            device = find_device(settings.device)
            dtype = find_dtype(settings.dtype) or default_dtype(device)
            loaded = load_model(
                settings.model, device=device, dtype=dtype, variant=settings.variant
            )
        return cls(
            settings,
            loaded,
            policies,
            event_sink=event_sink,
            prefix_block_size=prefix_block_size,
            clock=clock,
            make_sampler=make_sampler,
        )

    @property
    def policy(self) -> Policy:
        """The policy that decides now."""
        return self.scheduler.policy

    def start_clock(self) -> None:
        """Start the clock at 0. No request may have been submitted."""
        assert not self.sequences
        assert self._reported_ns == 0
        self._origin_ns = self._clock()

    def clock_ns(self) -> int:
        """Return the nanoseconds since the clock was started."""
        return self._clock() - self._origin_ns

    def now_ns(self) -> int:
        """Return the time for the scheduler: `clock_ns`, or the estimated end of a step in flight
        where that is later.
        """
        return max(self.clock_ns(), self._reported_ns)

    def submit(
        self,
        asked: TraceRequest,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        copy: int = 0,
        with_text: bool = True,
        on_text: Callable[[TokenText], None] | None = None,
        arrival_ns: int | None = None,
        grammar: Grammar | None = None,
    ) -> EngineRequest:
        """Submit one output of one request.

        A request that can never be served comes back closed, with the reason in
        `request.message`.

        Args:
            asked: the request as the scheduler sees it. Its length limits count, not
                `params.max_tokens`; an output of forced length never stops earlier.
            prompt_ids: tokens of the prompt.
            params: how tokens are sampled, and what stops the output.
            copy: which of `params.n` outputs this is.
            with_text: whether tokens are turned into text; stop strings need text anyway.
            on_text: called with what each token adds.
            arrival_ns: when the request arrived, on the engine's clock; by default now.
            grammar: what `params.structured_outputs` asks for, where it is compiled already.

        Raises:
            EngineError: the output has a forced length and may stop earlier, or stop strings
                lack a tokenizer.
            SamplingError: constraints that this model cannot follow.
        """
        self._check_open()
        eos = self.loaded.eos_token_ids
        constraint = self._constraint(params, grammar) if params.constrains else None
        may_stop = bool(
            (eos and not params.ignore_eos)
            or params.stop_token_ids
            or params.stop_strings
            or (constraint is not None and constraint.needs_tokens)
        )
        if asked.output_tokens is not None and may_stop:
            raise EngineError(
                f"request {asked.id!r} has a forced output length; its parameters must have "
                f"nothing to stop it"
            )
        tokenizer = self.loaded.tokenizer
        if params.stop_strings and tokenizer is None:
            raise EngineError(
                f"stop strings {list(params.stop_strings)} need a tokenizer, and model "
                f"{self.loaded.config.name!r} has none; stop_token_ids work"
            )
        output = StopChecker(params, eos, tokenizer if with_text or params.stop_strings else None)
        request = self.scheduler.submit(asked, self._report_time(self.now_ns()), arrival_ns)
        sequence = EngineRequest(
            request, list(prompt_ids), params, output, may_stop, on_text, constraint
        )
        self.sequences[request.number] = sequence
        self.sampler.add(request.number, params, sequence.prompt_ids, copy, constraint)
        self._num_may_stop += may_stop
        self._close_ended()
        return sequence

    def abort(self, id: str) -> None:
        """Abort a request. Raises UnknownRequestError for an id that does not live."""
        self._check_open()
        self.drain()
        self.scheduler.abort(id, self._report_time(self.now_ns()))
        self._report_corrupted()
        self._close_ended()

    def replace_policy(self, policy: Policy) -> PolicyChange:
        """Let another policy decide from the next step on. Steps in flight are settled first.

        Raises EngineError where the policy needs more memory than `EngineSettings.may_become`
        reserved or is for simulation only, and ConfigError where it cannot work within the limits.
        The former policy then continues.
        """
        self._check_open()
        _check_runnable(policy)
        self.drain()
        self._report_corrupted()
        self.runner.check_policy(policy)
        now_ns = self._report_time(self.now_ns())
        self.scheduler.replace_policy(policy, now_ns, policy_mark(policy))
        self.runner.follow_policy()
        self._close_ended()
        change = PolicyChange(self.scheduler.next_step, now_ns, policy)
        self.policy_changes.append(change)
        return change

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles structured outputs for this model."""
        return grammar_compiler(self.loaded, self.loaded.tokenizer)

    def _constraint(self, params: SamplingParams, grammar: Grammar | None) -> Constraint:
        """Return the constraint of one output; its grammar starts as a copy."""
        tokenizer, wanted = self.loaded.tokenizer, params.structured_outputs
        if wanted is not None:
            grammar = self.grammars.compile(wanted) if grammar is None else grammar.copy()
        if params.bad_words and tokenizer is None:
            raise SamplingError("bad_words need a tokenizer, and this model has none")
        bad = tokenizer.sequences_of(params.bad_words) if tokenizer is not None else []
        eos = self.loaded.eos_token_ids
        return compile_constraint(params, eos, self.loaded.config.vocab_size, bad, grammar)

    def prompt_logprobs(self, prompt_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Return the log-probability of each prompt token but the first.

        The model reads the prompt in a pass of its own, which neither uses nor fills the cache: so
        no decision of the scheduler depends on it.

        Args:
            prompt_ids: the prompt.
            num_top: how many most probable tokens to report for each place.

        Raises:
            EngineError: the prompt is longer than a step.
        """
        limit = self.limits.max_batched_tokens
        if len(prompt_ids) > limit:
            raise EngineError(
                f"log-probabilities of a prompt need it in one step, which takes {limit} tokens "
                f"(max_batched_tokens); the prompt has {len(prompt_ids)}"
            )
        self.drain()
        model, device = self.loaded.model, self.cache.k.device
        ids = torch.tensor(list(prompt_ids), device=device)
        places = torch.arange(len(ids), device=device)
        with torch.inference_mode():
            hidden = model.forward(ids, places, _PromptAttention())
            return judged(hidden, ids, model.logits, num_top)

    def token_ids(self, number: int, count: int) -> list[int]:
        """Return at least the first `count` ids of a request, prompt and output. Steps in flight
        are settled only where ids are missing.
        """
        sequence = self.sequences[number]
        if count <= len(sequence.prompt_ids):
            return sequence.prompt_ids
        if count > len(sequence.prompt_ids) + len(sequence.output.token_ids):
            self.drain()
        found = sequence.prompt_ids + sequence.output.token_ids
        if sequence.failure:  # it runs on, from any token, until the scheduler can end it
            found += [0] * (count - len(found))
        return found

    def _output_ids(self, number: int) -> list[int]:
        self.drain()
        return self.sequences[number].output.token_ids

    def step(self) -> bool:
        """Plan and execute one step. Returns False when nothing is to do until a request arrives or
        a copy finishes.
        """
        self._check_open()
        self._report_corrupted()
        if self._waits_for_copies():
            self.scheduler.finished_compressions(self.runner.finished_compressions())
        plan = self.scheduler.plan(self._report_time(self.now_ns()))
        if plan is None:
            self.drain()
            self._report_corrupted()
            self._close_ended()
            return False
        # The plan may end requests (for example one that was aborted while a copy was in flight)
        # and reuse their blocks, rows and host memory. The runner frees these before it takes any.
        ended = self._release_ended(plan.step + 1)
        # Read before execute: enqueuing belongs to the step, and without CUDA it is the step. The
        # clock itself is read, because the time reported to the scheduler may be later.
        start_ns = self.clock_ns()
        current = StepInFlight(plan, self.runner.execute(plan), start_ns, ended=ended)
        self.steps.plan(plan)
        self._in_flight.append(current)
        if self.overlaps and not self._num_may_stop and not current.result.failed:
            while len(self._in_flight) > 1:
                self._settle(self._in_flight.popleft())
            end_ns = max(self._last_end_ns + self._step_ns, current.start_ns)
            self._commit(current, end_ns, EMPTY_OUTCOME)
        else:
            self.drain()
        self._report_corrupted()
        return True

    def close(self) -> None:
        """End the engine: abort the requests that live, settle the steps in flight and release
        the model runner, the KV cache and the sampler.

        A closed engine takes no request, step or change of policy any more; its scheduler, steps
        and limits can still be read. A second call does nothing.
        """
        if self._closed:
            return
        for request in list(self.scheduler.live()):
            self.abort(request.id)
        self._closed = True
        device = self.cache.k.device
        if device.type == "cuda":  # compressions and copies run on streams of their own
            torch.cuda.synchronize(device)
        del self.runner, self.cache, self.compression, self.sampler
        if device.type == "cuda":
            gc.collect()  # an engine is full of reference cycles
            torch.cuda.empty_cache()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; make another with Engine.create")

    def take_ended(self) -> list[tuple[Request, int]]:
        """Return the requests that ended since the last call, each with the step of its end."""
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Settle every step in flight."""
        while self._in_flight:
            self._settle(self._in_flight.popleft())

    # Stages of a step.

    def _settle(self, step: StepInFlight) -> None:
        """Wait for the step, note its time and tokens, and commit it unless that has been done."""
        was_done = step.result.done
        tokens = step.result.tokens()
        end_ns = self.clock_ns()
        start_ns = max(step.start_ns, self._last_end_ns)
        taken_ns = step.result.device_ns() if was_done else None
        if taken_ns is not None:  # the step ended before it was settled
            end_ns = min(end_ns, start_ns + taken_ns)
        self.steps.ran(start_ns, max(end_ns, start_ns))
        self._step_ns = max(end_ns - start_ns, 0)
        self._last_end_ns = max(end_ns, start_ns)
        failed = step.result.failed
        for number, token in zip(step.result.numbers, tokens, strict=True):
            if token == NOT_FINITE and number not in failed:
                self._corrupt(self.sequences[number])
        if self.token_listeners:
            given = step.result.numbers
            if failed or self._corrupted:
                given = [
                    number
                    for number in given
                    if number not in failed and not self.sequences[number].failure
                ]
            for listener in self.token_listeners:
                listener(given, max(end_ns, start_ns))
        stopped = []
        for row, (number, token) in enumerate(zip(step.result.numbers, tokens, strict=True)):
            sequence = self.sequences[number]
            if number in failed or sequence.failure:
                # the token depends on what failed work left in the cache, so no client may see it
                continue
            if sequence.params.logprobs is not None:
                found = step.result.logprobs(row, sequence.params.logprobs)
                sequence.logprobs += [found] if found is not None else []
            if self._push(sequence, token):
                stopped.append(number)
        if not step.committed:
            self._commit(step, end_ns, StepOutcome(stopped=stopped, failed=failed))
        for request in step.ended:
            self._close(request)

    def _corrupt(self, sequence: EngineRequest) -> None:
        """Fail a request whose logits are not finite. None of its later tokens count."""
        if not sequence.failure:
            place = len(sequence.output.token_ids) + 1
            sequence.failure = NOT_FINITE_MESSAGE.format(place)
            self._corrupted.append(sequence)

    def _report_corrupted(self) -> None:
        """Report failed requests to the scheduler between two steps, so that no other request
        reuses their keys and values.

        Requests that no commit has ended, because no step was left to commit, end here.
        """
        while self._corrupted:
            corrupted, self._corrupted = self._corrupted, []
            for sequence in corrupted:
                now_ns = self._report_time(self.now_ns())
                self.scheduler.invalidate(sequence.request, sequence.failure, now_ns)
            self.drain()  # a step in flight may hold tokens of these requests
            self._close_ended()

    def _push(self, sequence: EngineRequest, token: int) -> bool:
        added = sequence.output.push(token)
        if sequence.constraint is not None and not sequence.failure:
            added = self._follow(sequence, token, added)
        sequence.text += added.text
        sequence.stop_reason = added.stop_reason
        if sequence.on_text is not None:
            sequence.on_text(added)
        return added.stopped

    def _follow(self, sequence: EngineRequest, token: int, added: TokenText) -> TokenText:
        """Let the request's constraint follow its new token; a complete output ends."""
        assert sequence.constraint is not None
        try:
            complete = sequence.constraint.accept(token)
        except SamplingError as error:
            sequence.failure, sequence.failed_field = str(error), "structured_outputs"
            self._corrupted.append(sequence)
            return added
        if not complete or added.stopped:
            return added
        return TokenText(added.text + sequence.output.finish(), True, None)

    def _commit(self, step: StepInFlight, end_ns: int, outcome: StepOutcome) -> None:
        step.committed = True
        if self._corrupted:  # including the step before, whose tokens came after its commit
            failed = {each.request.number: each.failure for each in self._corrupted}
            outcome = replace(outcome, failed={**outcome.failed, **failed})
        self.scheduler.commit(step.plan, self._report_time(end_ns), outcome)
        step.ended += self._release_ended(self.scheduler.next_step)

    def _release_ended(self, finish_step: int) -> list[Request]:
        """Free what ended requests hold in the runner and return them. The caller still has to
        close them.
        """
        ended = self.scheduler.take_finished()
        for request in ended:
            self.runner.forget(request)
            self._ended.append((request, finish_step))
            self._num_may_stop -= self.sequences[request.number].may_stop
        return ended

    def _close_ended(self) -> None:
        """Close requests that ended between two steps, when all their tokens are here."""
        for request in self._release_ended(self.scheduler.next_step):
            self._close(request)

    def _close(self, request: Request) -> None:
        """Give the rest of the text to a request and forget it. All its tokens are here."""
        sequence = self.sequences.pop(request.number)
        rest = sequence.output.finish() if sequence.stop_reason is None else ""
        sequence.text += rest
        sequence.closed = True
        if sequence.on_text is not None:
            sequence.on_text(TokenText(rest, stopped=True, stop_reason=sequence.stop_reason))

    def _waits_for_copies(self) -> bool:
        scheduler = self.scheduler
        waits = scheduler.policy.compression.join is Join.WHEN_DONE
        return waits and scheduler.stats().num_compressing > 0

    def _report_time(self, now_ns: int) -> int:
        self._reported_ns = max(self._reported_ns, now_ns)
        return self._reported_ns


def pool_blocks(settings: EngineSettings, loaded: LoadedModel, num_engines: int = 1) -> int:
    """Return the blocks that fit for `num_engines` engines on one loaded model together; each
    engine has its own working memory.
    """
    device = find_device(settings.device)
    dtype = find_dtype(settings.dtype) or default_dtype(device)
    return _limits(settings, loaded, _policies(settings), dtype, device, num_engines).num_blocks


def _policies(settings: EngineSettings) -> list[Policy]:
    """Return the first policy, then those that may take over."""
    named = (settings.policy, *settings.may_become)
    policies = [load_policy(policy) if isinstance(policy, str) else policy for policy in named]
    for policy in policies:
        _check_runnable(policy)
    return policies


def _check_runnable(policy: Policy) -> None:
    """Raise EngineError where only the simulator can run the policy."""
    if policy.simulation_only is not None:
        raise EngineError(policy.simulation_only)


def _compression(
    cache: KVCache,
    kernels: KernelBackend,
    policies: Sequence[Policy],
    limits: SchedulerLimits,
    seed: int,
    rotation: torch.Tensor | None,
) -> CompressionStream | None:
    """Return the compression stream that serves all policies, under the settings of the first; None
    where no policy compresses.
    """
    size = limits.block_size
    floor = _largest_budget(policies, size)
    if floor is None:
        return None
    workspace = _workspace(cache.shape, limits, floor, cache.k.device)
    stream = CompressionStream(
        cache, kernels, settings_for(policies[0].compression, size, seed), workspace, rotation
    )
    for policy in policies:
        budget = policy.budget.floor(size)
        if budget is not None:
            stream.prepare(settings_for(policy.compression, size, seed), budget)
    return stream


def _largest_budget(policies: Sequence[Policy], block_size: int) -> int | None:
    """Return the largest of the policies' smallest budgets, in blocks; None where no policy has
    one.
    """
    floors = (policy.budget.floor(block_size) for policy in policies)
    return max((floor for floor in floors if floor is not None), default=None)


def find_dtype(name: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype of that name. Raises EngineError with the choices."""
    if name is None or isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise EngineError(unknown_choice("dtype", name, DTYPES))
    return DTYPES[name]


def find_device(name: str) -> torch.device:
    """Return the device of that name. Raises EngineError with the choices where there is none."""
    there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if name not in (*there, "cuda") or (name == "cuda" and len(there) == 1):
        raise EngineError(f"no device {name!r} here (choices: {', '.join(there)})")
    return torch.device(name)


def _limits(
    settings: EngineSettings,
    loaded: LoadedModel,
    policies: Sequence[Policy],
    dtype: torch.dtype,
    device: torch.device,
    num_engines: int = 1,
) -> SchedulerLimits:
    most = loaded.config.max_positions
    length = settings.max_model_len or most
    if length > most:
        raise EngineError(
            f"max_model_len {length} is more than the {most} positions of {loaded.config.name}"
        )
    limits = SchedulerLimits(
        num_blocks=2 if settings.num_blocks is None else settings.num_blocks,
        block_size=settings.block_size,
        max_batched_tokens=settings.max_batched_tokens,
        max_running=settings.max_running,
        max_model_len=length,
        host_blocks=settings.host_blocks,
    )
    if settings.num_blocks is not None:
        return limits
    spec = replace(loaded.model.part, dtype_bytes=dtype.itemsize)
    if device.type != "cuda":
        if settings.memory_share is not None:
            raise EngineError(
                f"a share of memory ({settings.memory_share:g}) is taken of a GPU's, and this is "
                f"{device}"
            )
        return replace(limits, num_blocks=_blocks_on_host(spec, limits.block_size))
    try:
        plan = plan_pool(
            _free_gpu(device, loaded.model.weight_bytes),
            spec,
            policies,
            limits,
            utilisation=settings.memory_share,
            num_engines=num_engines,
            weight_bytes=loaded.model.weight_bytes,
        )
    except SimError as error:
        raise EngineError(str(error)) from error
    return replace(limits, num_blocks=plan.num_blocks)


def _blocks_on_host(spec: ModelSpec, block_size: int) -> int:
    """Return the blocks that `HOST_CACHE_BYTES` hold. Raises EngineError for fewer than two."""
    block_bytes = block_size * spec.kv_bytes_per_token
    num_blocks = HOST_CACHE_BYTES // block_bytes
    if num_blocks < 2:
        raise EngineError(
            f"no room for a cache: {HOST_CACHE_BYTES:,} bytes are set aside on the CPU, and a "
            f"block takes {block_bytes:,}; give num_blocks"
        )
    return num_blocks


def _free_gpu(device: torch.device, weight_bytes: int) -> Gpu:
    """Return the GPU with the memory that other processes and other engines leave of it.

    Where they leave all of it, the plan is the simulator's for this GPU.
    """
    free, total = torch.cuda.mem_get_info(device)
    gpu = gpu_with_memory(torch.cuda.get_device_name(device), total)
    taken = total - free - weight_bytes - CONTEXT_BYTES
    return replace(gpu, memory_bytes=gpu.memory_bytes - taken) if taken > 0 else gpu


def _shape(
    loaded: LoadedModel,
    policies: Sequence[Policy],
    limits: SchedulerLimits,
    slots: int,
    keeps_history: bool = False,
) -> CacheShape:
    window = min(max(policy.compression.window for policy in policies), limits.block_size)
    return CacheShape.of(
        loaded.model.part,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        num_slots=slots,
        window=window,
        keeps_history=keeps_history,
    )


def _capacity(limits: SchedulerLimits, floor: int) -> int:
    """Return the blocks that compressions need at once."""
    return min(
        limits.num_blocks,
        workspace_blocks(floor, limits.max_model_len, limits.block_size, MOST_COMPRESSED_AT_ONCE),
    )


def _compression_shape(shape: CacheShape) -> CompressionShape:
    group = shape.num_query_heads // shape.num_kv_heads
    return CompressionShape(
        shape.num_layers, shape.num_kv_heads, group, shape.window, shape.block_size
    )


def _workspace(
    shape: CacheShape, limits: SchedulerLimits, floor: int, device: torch.device
) -> CompressionWorkspace:
    return CompressionWorkspace(
        _compression_shape(shape),
        capacity_blocks=_capacity(limits, floor),
        max_requests=MOST_COMPRESSED_AT_ONCE,
        device=device,
    )


def grammar_compiler(loaded: LoadedModel, tokenizer: Tokenizer | None) -> GrammarCompiler:
    """Return a compiler of structured outputs for a model and one of its tokenizers."""

    def vocabulary() -> Any:
        if tokenizer is None:
            raise SamplingError("structured_outputs need a tokenizer, and this model has none")
        return tokenizer.grammar_vocabulary(loaded.config.vocab_size, loaded.eos_token_ids)

    return GrammarCompiler(vocabulary)


class _PromptAttention:
    """An `AttentionContext` of one whole prompt, which keeps no cache."""

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Attend causally among the tokens of this pass; see `AttentionContext.attend`."""
        q, k, v = (part.transpose(0, 1)[None] for part in (queries, keys, values))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended[0].transpose(0, 1).contiguous()


def synthetic_prompt(seed: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Return random token ids for a request of which only the length is known."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()


def plain_request(id: str, prompt_ids: Sequence[int], params: SamplingParams) -> TraceRequest:
    """Return a request that came without a trace in the form that the scheduler takes."""
    return TraceRequest(
        id=id,
        prompt_tokens=len(prompt_ids),
        max_tokens=params.max_tokens,
        prompt_ids=tuple(prompt_ids),
    )


def check_token_ids(prompt_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Return the prompt as a list. Raises EngineError for an item that is no token of the model."""
    for place, token in enumerate(prompt_ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise EngineError(
                f"prompt token {place} is {token!r}, not a token id in 0..{vocab_size - 1}"
            )
    return list(prompt_ids)


@contextmanager
def set_aside() -> Iterator[None]:
    """Exclude all objects that are alive now from garbage collection while the context is entered.

    Libraries and a loaded model are about 370,000 objects. A full collection over them takes 0.4 s,
    in the middle of a step.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

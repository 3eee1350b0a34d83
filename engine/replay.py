"""Replay of a workload on the engine: the counterpart of `zlab.sim.replay`, with real tokens and
measured times.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zlab.engine.engine import Engine, EngineSettings, set_aside, synthetic_prompt
from zlab.engine.model.loader import LoadedModel
from zlab.engine.recorder import EngineRecorder
from zlab.engine.sampling_params import SamplingParams
from zlab.policies.core.policy import Policy
from zlab.traces.recording import Run
from zlab.traces.transform import with_token_ids
from zlab.traces.workload import TraceRequest, Workload

NS_PER_S = 1_000_000_000
LONGEST_NAP_S = 0.05
IDLE_S = 0.0005
Progress = Callable[[int, int, int], None]  # (requests ended, requests in all, ns since the start)
FORCED = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class ReplaySettings:
    """How a workload is replayed.

    Attributes:
        at_once: submit all requests at the start, whatever their arrival times.
        live: treat the trace's output length as a maximum; what `params` says may stop an output
            earlier.
        params: how tokens are sampled and, with `live`, what stops an output. `n` and `max_tokens`
            are
            not used.
        seed: seed of random prompts.
        changes: (step, policy) pairs: the policy takes over before that step and before the
            requests
            that are submitted then.
    """

    at_once: bool = False
    live: bool = False
    params: SamplingParams = FORCED
    seed: int = 0
    changes: tuple[tuple[int, Policy], ...] = ()


PLAIN = ReplaySettings()


@dataclass
class Replayed:
    """A run, the submitted requests by request number, and the output tokens by request id."""

    run: Run
    asked: Sequence[TraceRequest]
    token_ids: dict[str, list[int]]


def replay(
    workload: Workload,
    settings: EngineSettings,
    how: ReplaySettings = PLAIN,
    *,
    loaded: LoadedModel | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> Replayed:
    """Run a workload on the engine.

    Prompts are the trace's token ids (modulo the vocabulary, where they come from a larger one), or
    are made from its block ids, or are random. Equal prefixes stay equal.

    Args:
        workload: the requests.
        settings: how the engine is set up.
        how: how the workload is replayed.
        loaded: a loaded model; by default the engine loads it.
        out: a folder for the recording; by default it stays in memory.
        progress: called between steps with (ended requests, all requests, ns since the start).
            What it raises ends the run; the recording is then readable and marked as incomplete.
        clock: a nanosecond clock.
    """
    recorder = EngineRecorder()
    settings = replace(
        settings, may_become=(*settings.may_become, *(policy for _, policy in how.changes))
    )
    engine = Engine.create(settings, loaded, recorder.sink, workload.meta.block_size, clock)
    prompts = Prompts(workload, engine.loaded.config.vocab_size, how.seed)
    recorder.open(engine, out, _origin(workload, how, prompts.notes), workload.meta.block_size)
    player = _Player(engine, recorder, workload, prompts, how)
    try:
        with set_aside():
            player.run(progress)
    except BaseException as error:
        recorder.close(stopped_by=type(error).__name__)
        raise
    run = recorder.close()
    engine.close()
    return Replayed(run, recorder.asked, player.token_ids)


class Prompts:
    """The token ids of every request of a workload, within a vocabulary. `notes` says which ids
    were made up or changed.
    """

    def __init__(self, workload: Workload, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self.notes: list[str] = []
        blocks = any(request.prefix_ids is not None for request in workload)
        self._made = (
            with_token_ids(workload, seed, 0, vocab_size).requests if blocks else workload.requests
        )
        if blocks:
            self.notes.append(f"token ids made from block ids, seed {seed}")
        if any(max(request.prompt_ids or (0,)) >= vocab_size for request in workload):
            self.notes.append(f"token ids taken modulo {vocab_size}")
        if any(request.prompt_ids is None and request.prefix_ids is None for request in workload):
            self.notes.append(f"random token ids where the trace has none, seed {seed}")

    def of(self, place: int, asked: TraceRequest) -> list[int]:
        """Return the prompt of the request at `place` in the workload."""
        found = asked.prompt_ids if asked.prompt_ids is not None else self._made[place].prompt_ids
        if found is not None:
            return [token % self._vocab_size for token in found]
        own = hashlib.sha256(f"{self._seed}:{asked.id}".encode()).digest()
        return synthetic_prompt(
            int.from_bytes(own[:7], "little"), asked.prompt_tokens, self._vocab_size
        )


class _Player:
    """Submits requests when they are due and steps the engine until all have ended."""

    def __init__(
        self,
        engine: Engine,
        recorder: EngineRecorder,
        workload: Workload,
        prompts: Prompts,
        how: ReplaySettings,
    ) -> None:
        self._engine = engine
        self._recorder = recorder
        self._prompts = prompts
        self._how = how
        self._pending = deque(enumerate(workload))
        self._changes = deque(how.changes)
        self._num_requests = len(workload)
        self._num_ended = 0
        self.token_ids: dict[str, list[int]] = {}

    def run(self, progress: Progress | None) -> None:
        """Replay the whole workload."""
        engine, scheduler = self._engine, self._engine.scheduler
        engine.start_clock()
        while True:
            while self._changes and self._changes[0][0] <= scheduler.next_step:
                engine.replace_policy(self._changes.popleft()[1])
            self._hand_in(engine.clock_ns())
            stepped = engine.step()
            self._num_ended += self._recorder.collect()
            if progress is not None:
                progress(self._num_ended, self._num_requests, engine.now_ns())
            if stepped:
                continue
            if self._pending:
                left_s = (self._due_ns(self._pending[0][1]) - engine.clock_ns()) / NS_PER_S
                time.sleep(
                    IDLE_S
                    if scheduler.stats().num_requests
                    else min(max(left_s, 0.0), LONGEST_NAP_S)
                )
            elif scheduler.stats().num_requests:
                time.sleep(IDLE_S)  # only a compression is in flight; there is nothing else to do
            else:
                break
        engine.drain()

    def _due_ns(self, asked: TraceRequest) -> int:
        return 0 if self._how.at_once else round((asked.arrival_s or 0.0) * NS_PER_S)

    def _hand_in(self, now_ns: int) -> None:
        while self._pending and (due_ns := self._due_ns(self._pending[0][1])) <= now_ns:
            place, asked = self._pending.popleft()
            prompt = self._prompts.of(place, asked)
            told = self._told(asked, prompt)
            sequence = self._engine.submit(
                told, prompt, self._how.params, with_text=False, arrival_ns=due_ns
            )
            self._recorder.submitted(told)
            self.token_ids[asked.id] = sequence.output.token_ids

    def _told(self, asked: TraceRequest, prompt: list[int]) -> TraceRequest:
        """Return the request as it is submitted to the scheduler."""
        told = asked if asked.prompt_ids is None else replace(asked, prompt_ids=tuple(prompt))
        if not self._how.live:
            return told
        known = [value for value in (asked.max_tokens, asked.output_tokens) if value is not None]
        return replace(told, output_tokens=None, max_tokens=min(known, default=None))


def _origin(workload: Workload, how: ReplaySettings, notes: Sequence[str]) -> dict[str, Any]:
    meta = workload.meta
    changes = [*meta.modifications, *notes, *(["all at once"] if how.at_once else [])]
    return {
        "workload": {
            "name": meta.name,
            "source": meta.source,
            "num_requests": len(workload),
            "rows": meta.rows(),
            "modifications": changes + (["outputs may stop early"] if how.live else []),
        },
        "workload_sha256": workload.sha256,
    }

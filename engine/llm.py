"""Text in, text out: `LLM(...).generate(prompts, SamplingParams)`, in the shape that users of vLLM know."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from engine.build import Engine, EngineSettings, build_engine
from engine.errors import EngineError, nearest
from engine.loading import LoadedModel
from engine.loop import Sequence as Running
from engine.outputs import RequestOutput, TextDelta, finish_reason, request_output
from engine.sampling_params import SamplingParams
from engine.stopping import Piece
from engine.submitting import check_token_ids, plain_request, submit
from engine.tokenizer import Tokenizer
from policies.core.policy import Policy
from policies.core.request import Status

IDLE_S = 0.0005
Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class RefusedError(EngineError):
    """A request that can never be served; the message has the need and what there is."""


@dataclass
class _Job:
    """One prompt under way: a sequence an output."""

    request_id: str
    prompt: str | None
    sequences: list[Running]


class LLM:
    """A model under a policy, driven by whoever calls; not to be shared between threads."""

    def __init__(
        self,
        model: str = "smollm2",
        policy: Policy | str = "hybrid",
        *,
        loaded: LoadedModel | None = None,
        **settings: Any,
    ) -> None:
        """Load the model and build the engine; `settings` are the fields of `EngineSettings`.

        Raises EngineError, PolicyError or ConfigError with what does not fit together.
        """
        known = [item.name for item in fields(EngineSettings)]
        for name in settings:
            if name not in known:
                raise EngineError(f"unknown setting {name!r}{nearest(name, known)} (choices: {', '.join(known)})")
        self.engine: Engine = build_engine(EngineSettings(model=model, policy=policy, **settings), loaded)
        self._num_requests = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises EngineError for a model that has none."""
        found = self.engine.loaded.tokenizer
        if found is None:
            raise EngineError(
                f"model {self.engine.loaded.config.name!r} has no tokenizer: give prompts as lists of token ids"
            )
        return found

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer prompts (texts or lists of token ids), all at once; results in their order.

        `params` for all, or one for each. Raises RefusedError, before anything has run, when one can never be served.
        An output that fails on its way has finish reason "error" and a message.
        """
        jobs = self._begin(_as_prompts(prompts), params)
        self._run(jobs)
        return [self._result(job) for job in jobs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, by the model's chat template; raises as `generate`, and ModelError."""
        return self.generate(self.chat_prompts(messages), params)

    def chat_prompts(self, messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Prompt]:
        """The token ids of a conversation, or of several, up to where the answer begins."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        return [self.tokenizer.chat(conversation) for conversation in conversations]

    def stream(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> Iterator[TextDelta]:
        """Answer prompts, giving text as it comes; a caller that stops listening ends what still runs."""
        deltas: list[TextDelta] = []
        jobs = self._begin(_as_prompts(prompts), params, deltas)
        try:
            while not all(_closed(job) for job in jobs):
                self._step()
                yield from deltas
                deltas.clear()
            yield from deltas
        finally:
            self._abandon(jobs)

    # from prompts to sequences

    def _begin(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        deltas: list[TextDelta] | None = None,
    ) -> list[_Job]:
        chosen = _for_each(params, len(prompts))
        ids = [self._token_ids(prompt) for prompt in prompts]
        jobs: list[_Job] = []
        try:
            for prompt, prompt_ids, each in zip(prompts, ids, chosen, strict=True):
                jobs.append(self._submit(prompt, prompt_ids, each, deltas))
                self._check_taken(jobs[-1], len(jobs) - 1)
        except Exception:
            self._abandon(jobs)
            raise
        return jobs

    def _submit(
        self, prompt: Prompt, prompt_ids: list[int], params: SamplingParams, deltas: list[TextDelta] | None
    ) -> _Job:
        job = _Job(str(self._num_requests), prompt if isinstance(prompt, str) else None, [])
        self._num_requests += 1
        for copy in range(params.n):
            id = job.request_id if params.n == 1 else f"{job.request_id}-{copy}"
            asked = plain_request(id, prompt_ids, params)
            listener = None if deltas is None else _Listener(job, copy, deltas)
            job.sequences.append(submit(self.engine, asked, prompt_ids, params, copy=copy, on_piece=listener))
        return job

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return check_token_ids(prompt, self.engine.loaded.config.vocab_size)

    def _check_taken(self, job: _Job, place: int) -> None:
        for sequence in job.sequences:
            if sequence.request.status is Status.REFUSED:
                raise RefusedError(f"prompt {place} can't be served: {sequence.request.message}")

    # running

    def _run(self, jobs: Sequence[_Job]) -> None:
        try:
            while not all(_closed(job) for job in jobs):
                self._step()
        except BaseException:
            self._abandon(jobs)
            raise

    def _step(self) -> None:
        loop = self.engine.loop
        if not loop.step():
            time.sleep(IDLE_S)  # a compression is under way and nothing else is to do
        loop.ended.clear()
        if self.engine.steps.large:  # nobody records them here
            loop.drain()
            self.engine.steps.take()

    def _result(self, job: _Job) -> RequestOutput:
        return request_output(job.request_id, job.prompt, job.sequences, self.engine.loaded.tokenizer)

    def _abandon(self, jobs: Sequence[_Job]) -> None:
        """End what still runs; what a copy in flight uses comes back with the next step."""
        for job in jobs:
            for sequence in job.sequences:
                if sequence.request.status is Status.LIVE:
                    self.engine.loop.abort(sequence.request.id)


class _Listener:
    """Turns the pieces of one sequence into deltas."""

    def __init__(self, job: _Job, index: int, deltas: list[TextDelta]) -> None:
        self._job = job
        self._index = index
        self._deltas = deltas
        self._num_given = 0

    def __call__(self, piece: Piece) -> None:
        if self._index >= len(self._job.sequences):
            return  # refused at the door; whoever asked is told by an error
        sequence = self._job.sequences[self._index]
        tokens = sequence.output.token_ids[self._num_given :]
        self._num_given += len(tokens)
        ending = finish_reason(sequence)
        if piece.text or tokens or ending:
            request = sequence.request
            self._deltas.append(
                TextDelta(
                    self._job.request_id,
                    self._index,
                    piece.text,
                    tokens,
                    ending,
                    sequence.stop_reason if ending else None,
                    request.message if ending else "",
                )
            )


def _closed(job: _Job) -> bool:
    return all(sequence.closed for sequence in job.sequences)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a text or a flat list of token ids is one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [[item for item in prompts if isinstance(item, int)]]
    several: list[Prompt] = []
    for place, item in enumerate(prompts):
        if isinstance(item, int) or not isinstance(item, str | Sequence):
            raise EngineError(f"prompt {place} must be a text or a list of token ids, got {item!r}")
        several.append(item)
    return several


def _for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise EngineError(f"{len(params)} sampling parameters for {count} prompts: give one for all, or one for each")
    return list(params)

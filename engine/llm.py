"""The offline interface: `LLM(...).generate(prompts, SamplingParams)` returns texts, with the names
and result types that vLLM users know.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, fields
from typing import Any, Self

from zlab.engine.engine import Engine, EngineRequest, EngineSettings, check_token_ids, plain_request
from zlab.engine.engine import EngineRequest as Running
from zlab.engine.errors import EngineError
from zlab.engine.model.loader import LoadedModel
from zlab.engine.sampling.sampler import TokenLogprobs
from zlab.engine.sampling_params import SamplingParams
from zlab.engine.tokenizer import Tokenizer, TokenText
from zlab.policies.core.policy import Policy
from zlab.traces.choices import unknown_choice
from zlab.traces.schema import Reason, Status

FINISH_REASONS = {Reason.STOP: "stop", Reason.LENGTH: "length"}
OTHER_ENDS = {Status.ABORTED: "abort", Status.FAILED: "error", Status.REFUSED: "refused"}


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token, its rank (1 is the most probable) and its text (None
    without a tokenizer).
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a prompt.

    Attributes:
        index: which of the prompt's outputs this is.
        text: the generated text.
        token_ids: the generated tokens.
        finish_reason: "stop", "length", "abort" or "error"; None while the request runs.
        stop_reason: the stop token or string that ended the output; None for an end-of-sequence
            token.
        logprobs: a mapping by token id for each generated token, where requested.
        cumulative_logprob: the sum over the generated tokens, where requested.
        message: what failed, for the finish reason "error".
        num_compressions: how often the KV cache of the request was compressed.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    message: str = ""
    num_compressions: int = 0

    @property
    def finished(self) -> bool:
        """Whether the output has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its outputs. `num_cached_tokens` prompt tokens of its first output were found
    in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended."""
        return all(output.finished for output in self.outputs)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a streamed output has gained since the last delta: text and tokens. The last delta of an
    output carries the finish reason.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    message: str = ""


def finish_reason(sequence: EngineRequest) -> str | None:
    """Return why a request ended; None while it runs."""
    request = sequence.request
    if not sequence.closed:
        return None
    if sequence.failure:
        return OTHER_ENDS[Status.FAILED]
    if request.status is Status.FINISHED:
        return FINISH_REASONS[Reason(request.reason)]
    return OTHER_ENDS[request.status]


def completion(
    sequence: EngineRequest, index: int, tokenizer: Tokenizer | None
) -> CompletionOutput:
    """Return the output of a request so far.

    Args:
        sequence: the request on the engine.
        index: which of the prompt's outputs it is.
        tokenizer: decodes the tokens of log-probabilities, where there is one.

    Returns:
        The output.
    """
    token_ids = list(sequence.output.token_ids)
    logprobs = None
    cumulative = None
    if sequence.params.logprobs is not None:
        logprobs = [
            _mapping(token, found, tokenizer)
            for token, found in zip(token_ids, sequence.logprobs, strict=True)
        ]
        cumulative = sum(found.chosen for found in sequence.logprobs)
    return CompletionOutput(
        index=index,
        text=sequence.text,
        token_ids=token_ids,
        finish_reason=finish_reason(sequence),
        stop_reason=sequence.stop_reason,
        logprobs=logprobs,
        cumulative_logprob=cumulative,
        message=sequence.message,
        num_compressions=sequence.request.compressions,
    )


def request_output(
    request_id: str,
    prompt: str | None,
    sequences: Items[EngineRequest],
    tokenizer: Tokenizer | None,
) -> RequestOutput:
    """Return all outputs of one prompt.

    Args:
        request_id: the id of the prompt.
        prompt: its text, if it was given as text.
        sequences: its requests on the engine, one for each output.
        tokenizer: the model's tokenizer, if it has one.

    Returns:
        The prompt with its outputs.
    """
    first = sequences[0]
    outputs = [completion(sequence, index, tokenizer) for index, sequence in enumerate(sequences)]
    return RequestOutput(request_id, prompt, first.prompt_ids, outputs, first.request.hit_tokens)


def _mapping(token: int, found: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Return log-probabilities by token id: the sampled token, then the most probable ones."""
    entries = {token: (found.chosen, found.rank)}
    for rank, (other, value) in enumerate(found.top, start=1):
        entries.setdefault(other, (value, rank))
    return {
        id: Logprob(
            value, rank, tokenizer.decode([id], skip_special_tokens=False) if tokenizer else None
        )
        for id, (value, rank) in entries.items()
    }


IDLE_S = 0.0005
Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class RefusedError(EngineError):
    """A request can never be served; the message has what it needs and what there is."""


@dataclass
class _PromptJob:
    """One prompt in progress, with an engine request for each output."""

    request_id: str
    prompt: str | None
    sequences: list[Running]


class LLM:
    """A model under a policy, driven by the caller's thread. An LLM must not be shared between
    threads.
    """

    def __init__(
        self,
        model: str = "smollm2",
        policy: Policy | str = "hybrid",
        *,
        loaded: LoadedModel | None = None,
        **settings: Any,
    ) -> None:
        """Load the model and build the engine.

        Args:
            model: a model, as `EngineSettings.model` names it.
            policy: a policy or its name.
            loaded: a loaded model, used in place of `model`.
            **settings: fields of `EngineSettings`.

        Raises:
            EngineError, PolicyError, ConfigError: settings that do not fit together.
        """
        known = [item.name for item in fields(EngineSettings)]
        for name in settings:
            if name not in known:
                raise EngineError(unknown_choice("setting", name, known))
        self.engine: Engine = Engine.create(
            EngineSettings(model=model, policy=policy, **settings), loaded
        )
        self._num_requests = 0

    def close(self) -> None:
        """End the engine and release its memory, as `Engine.close`; `with LLM(...) as llm` does."""
        self.engine.close()

    def __enter__(self) -> Self:
        """Return the LLM; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises EngineError for a model that has none."""
        found = self.engine.loaded.tokenizer
        if found is None:
            raise EngineError(
                f"model {self.engine.loaded.config.name!r} has no tokenizer: give prompts as "
                f"lists of token ids"
            )
        return found

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate outputs for all prompts together.

        An output that fails while it runs has the finish reason "error" and a message.

        Args:
            prompts: a prompt or several, as text or as lists of token ids.
            params: sampling parameters for all prompts, or one for each.

        Returns:
            The results, in the order of the prompts.

        Raises:
            RefusedError: a prompt can never be served; nothing has run then.
        """
        jobs = self._begin(_as_prompts(prompts), params)
        self._run(jobs)
        return [self._result(job) for job in jobs]

    def as_completed(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Generate outputs for all prompts together and yield each result as soon as it is
        complete.

        Requests that still run are aborted when the caller closes the iterator.

        Args:
            prompts: texts or lists of token ids.
            params: sampling parameters for all prompts, or one for each.
            on_step: called before every step; what it raises ends the run.

        Yields:
            The place of a prompt, and its result.

        Raises:
            RefusedError: a prompt can never be served; nothing has run then.
        """
        jobs = self._begin(prompts, params)
        waiting = dict(enumerate(jobs))
        try:
            while waiting:
                for place in [place for place, job in waiting.items() if _closed(job)]:
                    yield place, self._result(waiting.pop(place))
                if waiting and on_step is not None:
                    on_step()
                if waiting:
                    self._step()
        finally:
            self._abandon(jobs)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate the answer to a conversation, or to several, with the model's chat template.
        Raises like `generate`, and ModelError for messages that the template refuses.
        """
        return self.generate(self.chat_prompts(messages), params)

    def chat_prompts(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]]
    ) -> list[Prompt]:
        """Return the token ids of each conversation, up to the beginning of the answer."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        return [self.tokenizer.chat(conversation) for conversation in conversations]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> Iterator[TextDelta]:
        """Generate outputs and yield text as it comes. Requests that still run are aborted when the
        caller closes the iterator.
        """
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

    # From prompts to requests.

    def _begin(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        deltas: list[TextDelta] | None = None,
    ) -> list[_PromptJob]:
        chosen = _for_each(params, len(prompts))
        ids = [self._token_ids(prompt) for prompt in prompts]
        jobs: list[_PromptJob] = []
        try:
            for prompt, prompt_ids, each in zip(prompts, ids, chosen, strict=True):
                jobs.append(self._submit(prompt, prompt_ids, each, deltas))
                self._check_taken(jobs[-1], len(jobs) - 1)
        except Exception:
            self._abandon(jobs)
            raise
        return jobs

    def _submit(
        self,
        prompt: Prompt,
        prompt_ids: list[int],
        params: SamplingParams,
        deltas: list[TextDelta] | None,
    ) -> _PromptJob:
        job = _PromptJob(str(self._num_requests), prompt if isinstance(prompt, str) else None, [])
        self._num_requests += 1
        for copy in range(params.n):
            id = job.request_id if params.n == 1 else f"{job.request_id}-{copy}"
            asked = plain_request(id, prompt_ids, params)
            listener = None if deltas is None else _Listener(job, copy, deltas)
            job.sequences.append(
                self.engine.submit(asked, prompt_ids, params, copy=copy, on_text=listener)
            )
        return job

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return check_token_ids(prompt, self.engine.loaded.config.vocab_size)

    def _check_taken(self, job: _PromptJob, place: int) -> None:
        for sequence in job.sequences:
            if sequence.request.status is Status.REFUSED:
                raise RefusedError(f"prompt {place} can't be served: {sequence.request.message}")

    # Running.

    def _run(self, jobs: Sequence[_PromptJob]) -> None:
        try:
            while not all(_closed(job) for job in jobs):
                self._step()
        except BaseException:
            self._abandon(jobs)
            raise

    def _step(self) -> None:
        engine = self.engine
        if not engine.step():
            time.sleep(IDLE_S)  # only a compression is in flight; there is nothing else to do
        engine.take_ended()
        if engine.steps.large:  # no recorder takes the rows here
            engine.drain()
            engine.steps.take()

    def _result(self, job: _PromptJob) -> RequestOutput:
        return request_output(
            job.request_id, job.prompt, job.sequences, self.engine.loaded.tokenizer
        )

    def _abandon(self, jobs: Sequence[_PromptJob]) -> None:
        """Abort the requests that still run. Blocks that a copy in flight uses are freed in the
        next step.
        """
        self.engine.drain()  # a step in flight may end a request that looks alive
        for job in jobs:
            for sequence in job.sequences:
                if sequence.request.status is Status.LIVE:
                    self.engine.abort(sequence.request.id)


class _Listener:
    """Turns the text of one request into deltas."""

    def __init__(self, job: _PromptJob, index: int, deltas: list[TextDelta]) -> None:
        self._job = job
        self._index = index
        self._deltas = deltas
        self._num_given = 0

    def __call__(self, added: TokenText) -> None:
        if self._index >= len(self._job.sequences):
            return  # refused on submission: the caller gets an error
        sequence = self._job.sequences[self._index]
        tokens = sequence.output.token_ids[self._num_given :]
        self._num_given += len(tokens)
        ending = finish_reason(sequence)
        if added.text or tokens or ending:
            self._deltas.append(
                TextDelta(
                    self._job.request_id,
                    self._index,
                    added.text,
                    tokens,
                    ending,
                    sequence.stop_reason if ending else None,
                    sequence.message if ending else "",
                )
            )


def _closed(job: _PromptJob) -> bool:
    return all(sequence.closed for sequence in job.sequences)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list. A text or a flat list of token ids is one prompt."""
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


def _for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise EngineError(
            f"{len(params)} sampling parameters for {count} prompts: give one for all, or one "
            f"for each"
        )
    return list(params)

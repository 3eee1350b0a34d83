"""What a caller gets back, in the shape that users of vLLM know."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from engine.loop import Sequence
from engine.sampling import TokenLogprobs
from engine.tokenizer import Tokenizer
from policies.core.events import Reason
from policies.core.request import Status

FINISH_REASONS = {Reason.STOP: "stop", Reason.LENGTH: "length"}
OTHER_ENDS = {Status.ABORTED: "abort", Status.FAILED: "error", Status.REFUSED: "refused"}


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token in one place, its rank (1: most probable), its text (None without a tokenizer)."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class CompletionOutput:
    """One output. `logprobs`: a mapping from token id for each token, where asked for.

    `finish_reason`: "stop" (end of sequence, stop token or string; `stop_reason` says which, None for end of sequence),
    "length", "abort", "error" (`message` says what failed); None while it runs.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    message: str = ""

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its outputs; `num_cached_tokens` were found in the prefix cache (by its first output)."""

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
    """What a streamed output has gained: text, and tokens; the last one carries the finish reason."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    message: str = ""


def finish_reason(sequence: Sequence) -> str | None:
    """Why a sequence ended; None while it runs."""
    request = sequence.request
    if not sequence.closed:
        return None
    if request.status is Status.FINISHED:
        return FINISH_REASONS[Reason(request.reason)]
    return OTHER_ENDS[request.status]


def completion(sequence: Sequence, index: int, tokenizer: Tokenizer | None) -> CompletionOutput:
    """The output of one sequence so far."""
    token_ids = list(sequence.output.token_ids)
    logprobs = None
    cumulative = None
    if sequence.params.logprobs is not None:
        logprobs = [
            _mapping(token, found, tokenizer) for token, found in zip(token_ids, sequence.logprobs, strict=True)
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
        message=sequence.request.message,
    )


def request_output(
    request_id: str, prompt: str | None, sequences: Items[Sequence], tokenizer: Tokenizer | None
) -> RequestOutput:
    """All outputs of one prompt."""
    first = sequences[0]
    outputs = [completion(sequence, index, tokenizer) for index, sequence in enumerate(sequences)]
    return RequestOutput(request_id, prompt, first.prompt_ids, outputs, first.request.hit_tokens)


def _mapping(token: int, found: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Token id -> log-probability: the chosen token, then the most probable ones."""
    entries = {token: (found.chosen, found.rank)}
    for rank, (other, value) in enumerate(found.top, start=1):
        entries.setdefault(other, (value, rank))
    return {
        id: Logprob(value, rank, tokenizer.decode([id], skip_special_tokens=False) if tokenizer else None)
        for id, (value, rank) in entries.items()
    }

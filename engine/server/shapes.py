"""Answers in the two shapes of the OpenAI API: whole, and as the chunks of a stream."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from engine.sampling import TokenLogprobs
from engine.server.job import Delta, Job
from engine.server.warnings import Warnings

TokenName = Callable[[int], str]
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON has not; the OpenAI API does the same


@dataclass
class Gathered:
    """One output, put together from its deltas."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        """Take in what it has gained."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


class Shape(ABC):
    """How one request is answered. `wants_logprobs`, `wants_ids`: what its choices carry besides text."""

    def __init__(
        self, request_id: str, model: str, token_name: TokenName, *, wants_logprobs: bool, wants_ids: bool
    ) -> None:
        created = int(time.time())
        self._heads = {
            name: {"id": f"{self.id_prefix}-{request_id}", "object": name, "created": created, "model": model}
            for name in (self.whole_object, self.chunk_object)
        }
        self._token_name = token_name
        self._wants_logprobs = wants_logprobs
        self._wants_ids = wants_ids

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, outputs: Iterable[Gathered], usage: dict[str, Any], warnings: Warnings) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        choices = [self._finished(output, self._whole_choice(output)) for output in outputs]
        return self._body(self.whole_object, choices) | {"usage": usage} | ({"warnings": warnings} if warnings else {})

    def opening(self, num_outputs: int, warnings: Warnings) -> list[dict[str, Any]]:
        """Chunks before the first token."""
        bodies = self._opening(num_outputs)
        if warnings:
            bodies = bodies or [self._body(self.chunk_object, [])]
            bodies[0]["warnings"] = warnings
        return bodies

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """What a delta becomes: a chunk with what is new, a chunk with the finish reason."""
        if delta.finish_reason is None:
            return [self._chunk(delta, self._delta_choice(delta))]
        found = []
        if delta.text or delta.token_ids:
            new = replace(delta, finish_reason=None, stop_reason=None)
            found.append(self._chunk(new, self._delta_choice(new)))
        end = Delta(delta.index, "", [], [], delta.finish_reason, delta.stop_reason)
        return [*found, self._chunk(end, self._delta_choice(end))]

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk after the last, where it was asked for."""
        return self._body(self.chunk_object, []) | {"usage": usage}

    def _chunk(self, delta: Delta, choice: dict[str, Any]) -> dict[str, Any]:
        return self._body(self.chunk_object, [self._finished(delta, choice)])

    def _finished(self, output: Gathered | Delta, choice: dict[str, Any]) -> dict[str, Any]:
        choice |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        return choice | ({"token_ids": output.token_ids} if self._wants_ids else {})

    def _body(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._heads[object_name], "choices": choices}

    @abstractmethod
    def _whole_choice(self, output: Gathered) -> dict[str, Any]: ...

    @abstractmethod
    def _delta_choice(self, delta: Delta) -> dict[str, Any]: ...

    @abstractmethod
    def _opening(self, num_outputs: int) -> list[dict[str, Any]]: ...


class CompletionShape(Shape):
    """`text_completion`."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._offsets: dict[int, int] = {}  # characters of each choice's tokens so far

    def _whole_choice(self, output: Gathered) -> dict[str, Any]:
        return self._choice(output.index, output.text, output.token_ids, output.logprobs)

    def _delta_choice(self, delta: Delta) -> dict[str, Any]:
        return self._choice(delta.index, delta.text, delta.token_ids, delta.logprobs)

    def _opening(self, num_outputs: int) -> list[dict[str, Any]]:
        return []

    def _choice(self, index: int, text: str, ids: list[int], logprobs: list[TokenLogprobs]) -> dict[str, Any]:
        found = self._logprobs(index, ids, logprobs) if self._wants_logprobs and ids else None
        return {"index": index, "text": text, "logprobs": found}

    def _logprobs(self, index: int, ids: list[int], logprobs: list[TokenLogprobs]) -> dict[str, Any]:
        names = [self._token_name(token) for token in ids]
        offset, offsets = self._offsets.get(index, 0), []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        self._offsets[index] = offset
        return {
            "tokens": names,
            "token_logprobs": [_finite(found.chosen) for found in logprobs],
            "top_logprobs": [
                {self._token_name(token): _finite(value) for token, value in found.top} | {name: _finite(found.chosen)}
                for name, found in zip(names, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }


class ChatShape(Shape):
    """`chat.completion` and its chunks."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _whole_choice(self, output: Gathered) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"index": output.index, "message": message, "logprobs": self._logprobs(output)}

    def _delta_choice(self, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text or delta.token_ids else {}
        return {"index": delta.index, "delta": content, "logprobs": self._logprobs(delta)}

    def _opening(self, num_outputs: int) -> list[dict[str, Any]]:
        opening = {"role": "assistant", "content": "", "refusal": None}
        return [
            self._body(
                self.chunk_object,
                [{"index": index, "delta": dict(opening), "logprobs": None, "finish_reason": None}],
            )
            for index in range(num_outputs)
        ]

    def _logprobs(self, output: Gathered | Delta) -> dict[str, Any] | None:
        if not self._wants_logprobs or not output.token_ids:
            return None
        content = [
            self._entry(token, found.chosen) | {"top_logprobs": [self._entry(*pair) for pair in found.top]}
            for token, found in zip(output.token_ids, output.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        name = self._token_name(token_id)
        return {"token": name, "logprob": _finite(logprob), "bytes": list(name.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def usage_of(job: Job) -> dict[str, Any]:
    """Tokens of a job that has ended: each prompt counted once, however many outputs it has."""
    prompt = sum(map(len, job.prompts))
    outputs = [entry.sequence for entry in job.entries if entry.sequence is not None]
    completion = sum(len(sequence.output.token_ids) for sequence in outputs)
    cached = sum(sequence.request.hit_tokens for sequence in outputs[:: job.params.n])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Deltas with those of the same output joined: a reader that fell behind gets larger pieces."""
    found: dict[int, Delta] = {}
    for delta in deltas:
        before = found.get(delta.index)
        found[delta.index] = delta if before is None else _joined(before, delta)
    return list(found.values())


def _joined(before: Delta, delta: Delta) -> Delta:
    return replace(
        delta,
        text=before.text + delta.text,
        token_ids=before.token_ids + delta.token_ids,
        logprobs=before.logprobs + delta.logprobs,
    )

"""From the body of a request to what is asked of the engine."""

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from re import fullmatch
from typing import Any

from pydantic import BaseModel

from engine.errors import SamplingError
from engine.sampling_params import SamplingParams
from engine.server.errors import ApiError, invalid
from engine.server.protocol import ID_PATTERN, ChatRequest, CompletionRequest, SamplingRequest
from engine.server.warnings import Warnings, warnings_for

ID_HEADER = "X-Request-Id"
DEFAULT_COMPLETION_TOKENS = 16  # of the OpenAI API
# Fields that mean the same here and in the engine, by the same name.
SHARED = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """A request that has been checked as far as that goes without the engine; `body` still holds the prompt.

    `max_tokens` None: as many as fit. `length_param` is the field that set it.
    """

    body: CompletionRequest | ChatRequest
    request_id: str
    params: SamplingParams
    max_tokens: int | None
    length_param: str
    streamed: bool
    include_usage: bool
    return_token_ids: bool
    warnings: Warnings


def make_ask(body: CompletionRequest | ChatRequest, id_header: str | None, served_model: str) -> Ask:
    """Check a body. Raises ApiError: 404 for a model that is not served, 400 with the field otherwise."""
    _check_text(body)
    if body.model is not None and body.model != served_model:
        message = f"model {body.model!r} is not served here (there is: {served_model!r})"
        raise ApiError(404, message, param="model", code="model_not_found")
    warnings = warnings_for(body)
    length_param, max_tokens = "max_tokens", body.max_tokens
    if isinstance(body, ChatRequest):
        if body.max_completion_tokens is not None:
            if max_tokens is not None and max_tokens != body.max_completion_tokens:
                raise invalid("max_tokens", f"max_tokens {max_tokens} contradicts max_completion_tokens")
            length_param, max_tokens = "max_completion_tokens", body.max_completion_tokens
    elif max_tokens is None:
        max_tokens = DEFAULT_COMPLETION_TOKENS
    options = body.stream_options
    return Ask(
        body,
        _request_id(body.request_id, id_header),
        _params(body, max_tokens),
        max_tokens,
        length_param,
        bool(body.stream),
        bool(options is not None and options.include_usage),
        bool(body.return_token_ids),
        warnings,
    )


def _params(body: SamplingRequest, max_tokens: int | None) -> SamplingParams:
    given: dict[str, Any] = {name: value for name in SHARED if (value := getattr(body, name)) is not None}
    if isinstance(body, ChatRequest):
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
        given["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    elif isinstance(body, CompletionRequest):
        given["logprobs"] = body.logprobs
    try:
        # The length limit is the scheduler's, which also knows an open one and none.
        return SamplingParams(max_tokens=max(max_tokens or 1, 1), **given)
    except SamplingError as error:
        first = str(error).split(" ", 1)[0]
        raise invalid(first if first in SHARED else None, str(error)) from error


def _check_text(body: SamplingRequest) -> None:
    """JSON can spell half of a surrogate pair, which is no character: nothing can be done with such a text."""
    for name in (*type(body).model_fields, *(body.model_extra or ())):
        for text in _texts(getattr(body, name)):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise invalid(name, f"{name} is no valid Unicode: {error.reason} at {error.start}") from error


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case BaseModel():
            for name in (*type(value).model_fields, *(value.model_extra or ())):
                yield from _texts(getattr(value, name))
        case dict():
            yield from value
            yield from chain.from_iterable(map(_texts, value.values()))
        case [int(), *_]:
            return  # token ids
        case list():
            yield from chain.from_iterable(map(_texts, value))


def _request_id(field: str | None, header: str | None) -> str:
    if header is not None and fullmatch(ID_PATTERN, header) is None:
        raise invalid(ID_HEADER, f"{ID_HEADER} must be 1..128 letters, digits or any of . _ : -, got {header[:200]!r}")
    if field is not None and header is not None and field != header:
        raise invalid("request_id", f"request_id {field!r} contradicts the header {ID_HEADER} {header!r}")
    return field or header or uuid.uuid4().hex


def id_header(headers: Mapping[str, str]) -> str | None:
    """The caller's own id among the headers."""
    return headers.get(ID_HEADER.lower())

"""The OpenAI protocol: request bodies, their validation, and the bytes of answers and errors.

    bytes --FastAPI--> ChatRequest | CompletionRequest --parse_request--> ParsedRequest
                 |                                |
          validation_error (400)            ApiError (400, 404), warnings

A field that the server does not know is kept by pydantic and named in the response's `warnings`, so
that nothing is silently ignored. Every error is an `ApiError`, whose body is the error object of
the OpenAI API.
"""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from re import fullmatch
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Send
from typing_extensions import override

from zlab.engine.errors import SamplingError
from zlab.engine.sampling_params import (
    MOST_BIAS,
    MOST_COPIES,
    MOST_LOGPROBS,
    SEED_BITS,
    STRUCTURES,
    SamplingParams,
    StructuredOutputs,
)
from zlab.traces.choices import did_you_mean, unknown_choice

MAX_TOKENS = 2**31 - 1
MAX_STOPS = 64
ID_PATTERN = r"^[A-Za-z0-9._:\-]{1,128}$"
ID_HEADER = "X-Request-Id"
DEFAULT_COMPLETION_TOKENS = 16  # of the OpenAI API

TokenIds = list[Annotated[int, Field(ge=0, le=MAX_TOKENS)]]
Text = Annotated[str, Field(min_length=1)]
RequestId = Annotated[str, Field(pattern=ID_PATTERN)]
Warnings = list[dict[str, str]]


@dataclass(frozen=True)
class TemplateUse:
    """How the chat template turns a conversation into a prompt.

    Attributes:
        begins_answer: the prompt ends where the assistant's next message begins.
        continues: the prompt ends inside the last message.
        values: for the template.
    """

    begins_answer: bool = True
    continues: bool = False
    values: Mapping[str, bool | int | str] = field(default_factory=dict)


class StreamOptions(BaseModel):
    """What a stream carries besides its deltas."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None


class ResponseFormatField(BaseModel):
    """The form of the output, as the OpenAI API names it."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class StructuredOutputsField(BaseModel):
    """The form of the output, under vLLM's names; one field is given."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None


class SamplingRequest(BaseModel):
    """The fields that both kinds of completion share; null stands for the default everywhere."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = Field(
        None, description="The served model; left out, it is the one there is."
    )
    n: int | None = Field(None, ge=1, le=MOST_COPIES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0.0, le=100.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    seed: int | None = Field(
        None, ge=-1, lt=2**SEED_BITS, description="-1 asks for no seed, as vLLM does."
    )
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    user: str | None = Field(
        None, description="The user of this request; policies that share fairly group by it."
    )
    # Beyond the OpenAI API, under vLLM's names.
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, gt=0.0, le=2.0)
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = Field(
        None,
        gt=-(2**31),
        lt=2**31,
        description="Smaller is more urgent, as in vLLM; traces and policies negate it.",
    )
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    logit_bias: dict[str, Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    response_format: ResponseFormatField | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MOST_LOGPROBS,
        description="Return log-probabilities of the prompt's tokens, too.",
    )
    request_id: RequestId | None = Field(
        None, description="The request's id, as the header X-Request-Id."
    )
    return_token_ids: bool | None = Field(
        None, description="Return the ids of the output tokens, too."
    )


class CompletionRequest(SamplingRequest):
    """The body of `POST /v1/completions`."""

    prompt: str | list[str] | TokenIds | list[TokenIds] = Field(
        description="A text, a list of texts, the token ids of one prompt, or a list of those."
    )
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS, description="16 if left out.")
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = Field(None, description="Return the prompt before each output.")
    best_of: int | None = Field(
        None,
        ge=1,
        le=MOST_COPIES,
        description="Generate so many outputs; return the n with the highest mean log-probability.",
    )


class ContentPart(BaseModel):
    """A part of a message; this server knows texts."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation; its other fields are handed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Text
    content: str | list[ContentPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the fields for the chat template, with the parts of a text joined."""
        content = self.content
        joined = "".join(part.text for part in content) if isinstance(content, list) else content
        return {**(self.model_extra or {}), "role": self.role, "content": joined}


class TemplateRequest(BaseModel):
    """The fields that say how the chat template is used."""

    add_generation_prompt: bool | None = Field(
        None, description="Begin the assistant's message behind the conversation; true if left out."
    )
    continue_final_message: bool | None = Field(
        None,
        description="Continue the last message in place of a new one; only new text is returned.",
    )
    chat_template_kwargs: dict[str, bool | int | str] | None = Field(
        None, description="Values for the chat template, as enable_thinking (by vLLM's name)."
    )

    def template_use(self) -> TemplateUse:
        """Return how the template is used. Raises ApiError for fields that contradict."""
        continues, begins = bool(self.continue_final_message), self.add_generation_prompt
        if continues and begins:
            raise invalid(
                "continue_final_message",
                "continue_final_message and add_generation_prompt contradict each other",
            )
        begins = not continues if begins is None else begins
        return TemplateUse(begins, continues, dict(self.chat_template_kwargs or {}))


class ChatRequest(SamplingRequest, TemplateRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="As many as fit if left out."
    )
    max_completion_tokens: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="The newer name of max_tokens."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)


class TokenizeRequest(TemplateRequest):
    """The body of `POST /tokenize`: a text or a conversation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = Field(None, description="The served model.")
    prompt: str | None = Field(None, description="A text; or give messages.")
    messages: Annotated[list[Message], Field(min_length=1)] | None = Field(
        None, description="A conversation, which the chat template turns into a text."
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Add the tokens that the tokenizer puts around a text. If left out, true for a "
        "text and false for a conversation, whose template writes them itself.",
    )
    return_token_strs: bool | None = Field(None, description="Return the text of each token, too.")


class DetokenizeRequest(BaseModel):
    """The body of `POST /detokenize`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = Field(None, description="The served model.")
    tokens: TokenIds = Field(description="Token ids.")


class PolicyChangeRequest(BaseModel):
    """The body of `POST /v1/policy`.

    `policy` is TOML with every setting written out; `digest` is what the policy and its `sources`
    (the text of the file of each own class) must amount to. Without a policy, a canary ends: its
    lane follows the live one. `change` is the sender's number.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    lane: Literal["live", "canary"]
    policy: str | None = None
    sources: dict[str, str] = Field(default_factory=dict)
    name: str = "policy"
    digest: str | None = None
    who: str = Field(min_length=1, max_length=200)
    why: str = Field(default="", max_length=2000)
    evidence: str | None = None
    setup: dict[str, str | int] | None = Field(
        None,
        description="The setup that the policy was judged in (gpu, model, dtype_bytes, kv_dtype, "
        "num_blocks, block_size). The server answers 409 where its own differs.",
    )
    change: int | None = None


class PolicyUndoRequest(BaseModel):
    """The body of `POST /v1/policy/undo`: takes the lane's last change back.

    The change is named by the digest of the policy that it put in place.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    lane: Literal["live", "canary"]
    digest: str


# errors

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(HTTPException):
    """An error that a client gets: a status, and the error object of the OpenAI API.

    It is an HTTPException, so that frameworks hand it on wherever it is raised, also while they
    read a body. `param` names the field of the request, `code` is for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the answer."""
        default = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = ERROR_TYPES.get(self.status_code, default)
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Return a 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str, retry_after_s: int, code: str) -> ApiError:
    """Return a 429 that says after how many seconds a new attempt is worthwhile."""
    return ApiError(429, message, code=code, headers={"Retry-After": str(retry_after_s)})


def unavailable(message: str, code: str, retry_after_s: int | None = None) -> ApiError:
    """Return a 503: the server cannot serve now."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, code=code, headers=headers)


BODY_FIELDS = frozenset(
    name
    for model in (
        CompletionRequest,
        ChatRequest,
        Message,
        ContentPart,
        StreamOptions,
        ResponseFormatField,
        PolicyChangeRequest,
        TokenizeRequest,
        DetokenizeRequest,
    )
    for name in model.model_fields
) | {"json", *STRUCTURES, "json_object"}
# Fields of several types: pydantic would report one error for each type.
UNION_FIELDS = {
    "prompt": "must be a text, a list of texts, a list of token ids, or a list of lists of "
    "token ids",
    "stop": "must be a text or a list of at most 64 texts, none empty",
    "content": "must be a text, a list of parts {type: text, text: ...}, or null",
    "guided_json": "must be a JSON schema: an object, or its text",
    "json": "must be a JSON schema: an object, or its text",
}
MAX_SHOWN = 80  # characters of a wrong value


def validation_error(errors: Sequence[Any]) -> ApiError:
    """Return the 400 for the first field that pydantic reports."""
    first: Mapping[str, Any] = errors[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return invalid(None, f"the body is no JSON: {reason}")
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        if "structured_outputs" in first["loc"]:
            choices = (*STRUCTURES, "json_object")
            return invalid("structured_outputs", unknown_choice("structured output", name, choices))
        return invalid(name, f"field {name!r} is unknown to this route")
    path = [part for part in first["loc"][1:] if isinstance(part, int) or part in BODY_FIELDS]
    if not path:
        return invalid(None, "the body must be a JSON object, sent as application/json")
    is_missing = first["type"] == "missing"
    for position, part in enumerate(path):
        if part in UNION_FIELDS:
            name = _dotted(path[: position + 1])
            return invalid(name, f"{name} {'is missing' if is_missing else UNION_FIELDS[part]}")
    name = _dotted(path)
    if is_missing:
        return invalid(name, f"{name} is missing")
    shown = repr(first.get("input"))
    shown = shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."
    return invalid(name, f"{name}: {first['msg'][0].lower()}{first['msg'][1:]}, got {shown}")


def _dotted(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


# from a body to a request

# The fields that have the same name and meaning in SamplingParams.
SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
)


@dataclass(frozen=True)
class ParsedRequest:
    """A checked request, all but its prompt: what the engine and the answer need to know of it.

    Attributes:
        id: the request's id, the caller's own or a new one.
        params: how to sample. Its `max_tokens` does not count.
        max_tokens: the length limit; None stands for as many tokens as fit.
        streamed: the reader gets a delta a token; otherwise one delta an output, at its end.
        include_usage: a stream ends with a chunk that counts tokens.
        return_token_ids: choices carry token ids besides text.
        shows_logprobs: choices carry log-probabilities; `best_of` needs them in any case.
        prompt_logprobs: choices carry the log-probabilities of the prompt's tokens and of so many
            most probable ones; None: they do not.
        echo: the prompt and, with `logprobs`, its log-probabilities come before each output.
        num_choices: outputs of each prompt that are returned; `params.n` are generated.
        priority: larger is more urgent, as in traces and policies.
        session_id: the user of the request, by which policies may share fairly.
        prompt_param: the field of the body that errors about the prompt name.
        length_param: the field of the body that errors about the length limit name.
        warnings: the fields that had no effect, each with a message.
    """

    id: str
    params: SamplingParams
    max_tokens: int | None
    streamed: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    shows_logprobs: bool = False
    prompt_logprobs: int | None = None
    echo: bool = False
    num_choices: int = 1
    priority: int = 0
    session_id: str | None = None
    prompt_param: str = "prompt"
    length_param: str = "max_tokens"
    warnings: Warnings = field(default_factory=list)


def parse_request(
    body: CompletionRequest | ChatRequest, header_id: str | None, served_model: str
) -> ParsedRequest:
    """Check a body as far as that is possible without tokenizer and engine.

    Args:
        body: the request's body; it keeps the prompt.
        header_id: the value of the header X-Request-Id, if there is one.
        served_model: the name of the model, as clients use it.

    Raises:
        ApiError: 404 for a model that is not served, otherwise 400 with the field.
    """
    check_text(body)
    check_model(body.model, served_model)
    for name, value in (body.model_extra or {}).items():
        if name in REFUSED and not _asks_nothing(value) and value not in REFUSED[name]:
            raise invalid(
                name,
                f"{name} is not supported by this server, and an output without it would "
                f"mean something else",
            )
    is_chat = isinstance(body, ChatRequest)
    length_param, max_tokens = "max_tokens", body.max_tokens
    if isinstance(body, ChatRequest):
        if body.max_completion_tokens is not None:
            if max_tokens is not None and max_tokens != body.max_completion_tokens:
                raise invalid(
                    "max_tokens", f"max_tokens {max_tokens} contradicts max_completion_tokens"
                )
            length_param, max_tokens = "max_completion_tokens", body.max_completion_tokens
    elif max_tokens is None:
        max_tokens = DEFAULT_COMPLETION_TOKENS
    options = body.stream_options
    params = _sampling_params(body, max_tokens)
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs cannot be streamed; leave stream out")
    return ParsedRequest(
        id=_request_id(body.request_id, header_id),
        params=params,
        max_tokens=max_tokens,
        streamed=bool(body.stream),
        include_usage=bool(options is not None and options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        shows_logprobs=body.logprobs is not None and body.logprobs is not False,
        prompt_logprobs=body.prompt_logprobs,
        echo=isinstance(body, CompletionRequest) and bool(body.echo),
        num_choices=body.n or 1,
        priority=-(body.priority or 0),
        session_id=body.user,
        prompt_param="messages" if is_chat else "prompt",
        length_param=length_param,
        warnings=warnings_for(body),
    )


def check_model(model: str | None, served_model: str) -> None:
    """Raise ApiError (404) for a model that is not served; None is the served one."""
    if model is not None and model != served_model:
        message = f"model {model!r} is not served here (there is: {served_model!r})"
        raise ApiError(404, message, param="model", code="model_not_found")


def _sampling_params(body: SamplingRequest, max_tokens: int | None) -> SamplingParams:
    given: dict[str, Any] = {
        name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None
    }
    if isinstance(body, ChatRequest):
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
        given["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    elif isinstance(body, CompletionRequest):
        given["logprobs"] = body.logprobs
        _check_best_of(body, given)
        if body.echo and body.logprobs is not None:
            given["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if given.get("seed") == -1:
        del given["seed"]
    # The scheduler applies the length limit: it also knows an open one and a limit of 0.
    limit = MAX_TOKENS if max_tokens is None else max(max_tokens, 1)
    try:
        given["structured_outputs"] = structured_outputs(body)
        return SamplingParams(max_tokens=limit, **given)
    except SamplingError as error:
        raise sampling_error(error) from error


def sampling_error(error: SamplingError) -> ApiError:
    """Return the 400 for a sampling parameter, with the field that its message begins with."""
    name = str(error).split(" ", 1)[0]
    known = name in SAMPLING_FIELDS or name == "structured_outputs"
    return invalid(name if known else None, str(error))


def _check_best_of(body: CompletionRequest, given: dict[str, Any]) -> None:
    """Generate `best_of` outputs in place of `n`, with what choosing the best of them needs."""
    wanted = body.n or 1
    if body.best_of is None or body.best_of == wanted:
        return
    if body.best_of < wanted:
        raise invalid("best_of", f"best_of {body.best_of} is less than n {wanted}")
    if body.stream:
        raise invalid("best_of", "best_of cannot be streamed: all outputs must end before a choice")
    given["n"] = body.best_of
    if given["logprobs"] is None:
        given["logprobs"] = 0


ANY_OBJECT = '{"type": "object"}'


def structured_outputs(body: SamplingRequest) -> StructuredOutputs | None:
    """Return the form that a request asks for, under any of its names; None for free text.

    Raises:
        ApiError: two forms, or a JSON schema that is missing or none.
    """
    given: dict[str, tuple[str, Any]] = {}  # by the field of the body
    form = body.response_format
    if form is not None and form.type == "json_object":
        given["response_format"] = ("json", ANY_OBJECT)
    if form is not None and form.type == "json_schema":
        schema = (form.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise invalid(
                "response_format", "response_format json_schema needs an object json_schema.schema"
            )
        given["response_format"] = ("json", schema)
    if body.structured_outputs is not None:
        fields = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        if fields.pop("json_object", False):
            fields = {"json": ANY_OBJECT} | fields
        if len(fields) != 1:
            raise invalid(
                "structured_outputs",
                f"structured_outputs takes one of {', '.join(STRUCTURES)}, json_object; got "
                f"{' and '.join(fields) or 'none'}",
            )
        given["structured_outputs"] = next(iter(fields.items()))
    for kind in STRUCTURES:
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            given[f"guided_{kind}"] = (kind, value)
    if len(given) > 1:
        names = " and ".join(given)
        raise invalid(next(iter(given)), f"{names} ask for different forms of the output")
    if not given:
        return None
    ((kind, value),) = given.values()
    if kind == "choice":
        return StructuredOutputs(choice=tuple(value))
    if kind == "json" and not isinstance(value, str):
        return StructuredOutputs(json=json.dumps(value))
    return StructuredOutputs(**{kind: value})


def check_text(body: BaseModel) -> None:
    """Raise ApiError for text that has no UTF-8: JSON can spell half of a surrogate pair."""
    for name in (*type(body).model_fields, *(body.model_extra or ())):
        for text in _texts(getattr(body, name)):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise invalid(
                    name, f"{name} is no valid Unicode: {error.reason} at {error.start}"
                ) from error


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


def _request_id(field_id: str | None, header_id: str | None) -> str:
    if header_id is not None and fullmatch(ID_PATTERN, header_id) is None:
        raise invalid(
            ID_HEADER,
            f"{ID_HEADER} must be 1..128 letters, digits or any of . _ : -, "
            f"got {header_id[:200]!r}",
        )
    if field_id is not None and header_id is not None and field_id != header_id:
        raise invalid(
            "request_id",
            f"request_id {field_id!r} contradicts the header {ID_HEADER} {header_id!r}",
        )
    return field_id or header_id or uuid.uuid4().hex


# Fields of the OpenAI API and of vLLM that change what an output means and that this server does
# not support, each with the values that ask for nothing. Any other value is refused.
REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": (),
    "guided_whitespace_pattern": (),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "suffix": ("",),
    "structural_tag": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (),
    "web_search_options": (),
}
# Fields that this server does not support and that leave the meaning of an output as it is.
NOT_SUPPORTED = frozenset(
    {"guided_decoding_backend", "metadata", "parallel_tool_calls", "prediction"}
    | {"prompt_cache_key", "reasoning_effort", "safety_identifier", "service_tier", "store"}
    | {"verbosity"}
)
MAX_WARNINGS = 32
MAX_NAME_CHARACTERS = 64


def warnings_for(request: SamplingRequest) -> Warnings:
    """Return a warning for each field without effect, with the nearest name that is known."""
    known = list(type(request).model_fields)
    found = _unknown_fields(request.model_extra or {}, known, "")
    if request.stream_options is not None:
        options = list(type(request.stream_options).model_fields)
        found += _unknown_fields(
            request.stream_options.model_extra or {}, options, "stream_options."
        )
        if not request.stream:
            found.append(_warning("stream_options", "has no effect without stream"))
    if len(found) > MAX_WARNINGS:
        message = f"{len(found) - MAX_WARNINGS} more fields are unknown and were ignored"
        found = [*found[:MAX_WARNINGS], {"param": "", "message": message}]
    return found


def _unknown_fields(extra: Mapping[str, Any], known: list[str], prefix: str) -> Warnings:
    found = []
    for name, value in extra.items():
        if name in REFUSED and not prefix:
            continue  # a value that asks for nothing
        if name in NOT_SUPPORTED and not prefix:
            if _asks_nothing(value):
                continue
            found.append(_warning(name, "is not supported by this server and was ignored"))
        else:
            hint = did_you_mean(name[:MAX_NAME_CHARACTERS], known)
            found.append(_warning(prefix + name, f"is unknown and was ignored{hint}"))
    return found


def _asks_nothing(value: Any) -> bool:
    return value is None or value is False or value in ([], {})


def _warning(name: str, what: str) -> dict[str, str]:
    shown = name if len(name) <= MAX_NAME_CHARACTERS else name[:MAX_NAME_CHARACTERS] + "..."
    return {"param": shown, "message": f"parameter {shown!r} {what}"}


# bytes for clients

DONE = b"data: [DONE]\n\n"
_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def to_json(value: Any) -> bytes:
    """Return compact JSON in UTF-8; half of a surrogate pair, in a quoted name, becomes `?`."""
    return _COMPACT.encode(value).encode("utf-8", "replace")


def event(value: Any) -> bytes:
    """Return one event of a stream (server-sent events).

    It is put together here and not by a library, because a busy server makes one for every token.
    """
    return b"data: " + to_json(value) + b"\n\n"


class Json(Response):
    """A JSON answer."""

    media_type = "application/json"

    @override
    def render(self, content: Any) -> bytes:
        return to_json(content)


def error_response(error: ApiError) -> Response:
    """Return the answer for an error."""
    return Json(error.body, error.status_code, error.headers)


async def send_error(send: Send, error: ApiError) -> None:
    """Answer with an error, outside of the framework."""
    response = error_response(error)
    await send_response(send, response.status_code, response.raw_headers, bytes(response.body))


async def send_response(
    send: Send, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes
) -> None:
    """Send a whole answer over ASGI."""
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})

"""The parts that all routes of one server share, and how they are put together.

ServerSettings --open_context--> ServerContext
                                   worker:      AsyncEngine, the lanes on their thread
                                   prompts:     PromptEncoder, the tokenizer on its thread
                                   concurrency: ConcurrencyLimit
                                   keys:        Keys
"""

import asyncio
import copy
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from inspect import signature
from re import fullmatch
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from zlab.engine.engine import EngineSettings, check_token_ids, grammar_compiler
from zlab.engine.errors import EngineError, ModelError, SamplingError
from zlab.engine.model.loader import LoadedModel
from zlab.engine.sampling.constraints import Grammar, GrammarCompiler
from zlab.engine.sampling_params import StructuredOutputs
from zlab.engine.server.async_engine import AsyncEngine, WorkerSettings
from zlab.engine.server.lanes import (
    Lane,
    Observer,
    RequestLengths,
    build_lanes,
    longest_requests,
)
from zlab.engine.server.middleware import ConcurrencyLimit, Keys
from zlab.engine.server.protocol import TemplateUse, invalid, sampling_error, unavailable
from zlab.engine.tokenizer import Tokenizer
from zlab.policies.evidence import Target

CACHED_NAMES = 8192
# Parameters of the tokenizer's method: they would change how the template is used.
NOT_FOR_TEMPLATES = (
    frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    | frozenset(signature(Tokenizer.chat).parameters)
    | {"messages"}
)
Texts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
T = TypeVar("T")


@dataclass(frozen=True)
class ServerSettings:
    """Bounds of one server; every one has an option of `zlab serve`.

    Attributes:
        max_body_bytes: a larger request body is answered with 413.
        max_prompt_tokens: a longer prompt is answered with 400; None: what the model takes.
        max_outputs: prompts times `n` of one request; more is answered with 400.
        max_concurrent: requests under way at once, waiting ones included; more get 429.
        max_queue: outputs that may wait in a lane; more are answered with 429.
        max_unread_tokens: how far the reader of a stream may fall behind before its request is
            aborted.
        cors_origins: origins whose pages may call the server from a browser; `*` for every one.
        request_timeout_s: from a request's arrival to the end of its answer.
        body_timeout_s: for a request's body to arrive.
        write_timeout_s: for a reader to take what it was sent.
        grace_s: for the requests under way to finish after a first SIGTERM.
        stall_s: an engine step that takes longer makes the server unhealthy.
        decision_s: a decision of the policy that takes longer is interrupted, and the policy before
            it decides again.
    """

    max_body_bytes: int = 4 << 20
    max_prompt_tokens: int | None = None
    max_outputs: int = 128
    max_concurrent: int = 1024
    max_queue: int = 1024
    max_unread_tokens: int = 2048
    cors_origins: tuple[str, ...] = ()
    request_timeout_s: float = 600.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    grace_s: float = 60.0
    stall_s: float = 120.0
    decision_s: float = 5.0

    def __post_init__(self) -> None:
        """Raise EngineError for a bound that lets nothing through."""
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "cors_origins":
                _check_origins(value)
            elif item.name == "grace_s":
                if not value >= 0:
                    raise EngineError(f"grace_s must be 0 or more, got {value!r}")
            elif value is not None and not value > 0:
                raise EngineError(f"{item.name} must be more than 0, got {value!r}")


def _check_origins(origins: Sequence[str]) -> None:
    """Raise EngineError for an origin that no browser would send."""
    for origin in origins:
        if origin != "*" and not fullmatch(r"https?://[^/?#\s]+", origin):
            raise EngineError(
                f"an origin is * or like https://host:port, without a path, not {origin!r}"
            )


class PromptEncoder:
    """Turns the texts and conversations of requests into token ids, on a thread of its own.

    A tokenizer may not be used by two threads at once, so there is one copy for the thread that
    encodes and one for the event loop, which names single tokens; the engine's thread keeps the
    original.
    """

    def __init__(self, loaded: LoadedModel, max_prompt_tokens: int | None) -> None:
        self._model = loaded.config.name
        self._vocab_size = loaded.config.vocab_size
        self._max_prompt_tokens = max_prompt_tokens
        self._tokenizer = copy.deepcopy(loaded.tokenizer)
        self._loaded = loaded
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self.has_tokenizer = loaded.tokenizer is not None
        self.token_name = token_names(copy.deepcopy(loaded.tokenizer))

    async def run(self, encode: Callable[[], T]) -> T:
        """Run `encode` (a call of one of the methods below) on the tokenizer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, encode)

    def completion(self, prompt: Texts) -> list[list[int]]:
        """Return the token ids of each prompt of a completion request. Raises ApiError."""
        if isinstance(prompt, str):
            return [self._encode(prompt, "prompt")]
        if not prompt:
            raise invalid("prompt", "prompt is empty: give a text, or token ids")
        if isinstance(prompt[0], int):
            return [self._check_ids(prompt, "prompt")]
        return [
            self._encode(item, f"prompt {index}")
            if isinstance(item, str)
            else self._check_ids(item, f"prompt {index}")
            for index, item in enumerate(prompt)
        ]

    def chat(self, messages: Sequence[dict[str, Any]], use: TemplateUse) -> list[list[int]]:
        """Return the one prompt of a conversation. Raises ApiError."""
        ids = self.conversation(messages, use)
        return [self._check_length(ids, "messages", "messages")]

    def conversation(
        self,
        messages: Sequence[dict[str, Any]],
        use: TemplateUse,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Return the tokens of a conversation of any length. Raises ApiError."""
        if self._tokenizer is None:
            raise invalid("messages", self._no_tokenizer())
        for name in use.values:
            if name in NOT_FOR_TEMPLATES:
                raise invalid("chat_template_kwargs", f"chat_template_kwargs may not set {name!r}")
        try:
            return self._tokenizer.chat(
                messages,
                begins_answer=use.begins_answer,
                continues=use.continues,
                add_special_tokens=add_special_tokens,
                **use.values,
            )
        except ModelError as error:
            raise invalid("messages", str(error)) from error

    def text_tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text of any length. Raises ApiError."""
        if self._tokenizer is None:
            raise invalid("prompt", self._no_tokenizer())
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included. Raises ApiError."""
        if self._tokenizer is None:
            raise invalid("tokens", self._no_tokenizer())
        try:
            check_token_ids(token_ids, self._vocab_size)
        except EngineError as error:
            raise invalid("tokens", str(error)) from error
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return grammar_compiler(self._loaded, self._tokenizer)

    def grammar(self, wanted: StructuredOutputs) -> Grammar:
        """Return the first state of the grammar that a request asks for. Raises ApiError."""
        try:
            return self._grammars.compile(wanted)
        except SamplingError as error:
            raise sampling_error(error) from error

    def texts(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each prompt; empty texts without a tokenizer."""
        if self._tokenizer is None:
            return [""] * len(prompts)
        return [self._tokenizer.decode(ids) for ids in prompts]

    def close(self) -> None:
        """End the tokenizer's thread."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, which: str) -> list[int]:
        if self._tokenizer is None:
            raise invalid("prompt", self._no_tokenizer())
        return self._check_length(self._tokenizer.encode(text), which)

    def _check_ids(self, ids: Any, which: str) -> list[int]:
        try:
            return self._check_length(check_token_ids(ids, self._vocab_size), which)
        except EngineError as error:
            prefix = "" if which == "prompt" else f"{which}: "
            raise invalid("prompt", f"{prefix}{error}") from error

    def _check_length(self, ids: list[int], which: str, param: str = "prompt") -> list[int]:
        if not ids:
            raise invalid(param, f"{which} has 0 tokens, at least 1 is needed")
        longest = self._max_prompt_tokens
        if longest is not None and len(ids) > longest:
            message = f"{which} has {len(ids)} tokens, this server takes at most {longest}"
            raise invalid(param, message, "context_length_exceeded")
        return ids

    def _no_tokenizer(self) -> str:
        return (
            f"model {self._model!r} has no tokenizer: give /v1/completions its prompt as token ids"
        )


def token_names(tokenizer: Tokenizer | None) -> Callable[[int], str]:
    """Return a function from a token id to its text; `token_id:N` without a tokenizer."""
    if tokenizer is None:
        return "token_id:{}".format

    @lru_cache(CACHED_NAMES)
    def name(token_id: int) -> str:
        return tokenizer.decode([token_id], skip_special_tokens=False)

    return name


@dataclass(frozen=True)
class ServerContext:
    """The parts of one server.

    Attributes:
        worker: the engine's thread.
        settings: the bounds.
        keys: the API and admin keys.
        concurrency: counts the requests under way.
        prompts: encodes prompts.
        served_model: the model's name for clients.
        started_unix_s: when the server was opened.
        target: the model and GPU that the server is in a registry, if any.
        at_close: what is left to do when the engine's thread has ended.
    """

    worker: AsyncEngine
    settings: ServerSettings
    keys: Keys
    concurrency: ConcurrencyLimit
    prompts: PromptEncoder
    served_model: str
    started_unix_s: float
    target: Target | None = None
    at_close: tuple[Callable[[], None], ...] = ()

    def close(self, timeout_s: float | None = None) -> None:
        """End what runs and the engine's thread, then do what is left to do."""
        self.worker.stop(timeout_s)
        for last in self.at_close:
            last()

    async def call_engine(self, function: Callable[[Sequence[Lane]], T]) -> T:
        """Return what `function(lanes)` returns, or raise what it raises, between two steps."""
        return await asyncio.wrap_future(self.worker.call(function))

    async def lengths(self) -> RequestLengths:
        """Return the lengths that are served now.

        Raises:
            ApiError: 503 where the engine cannot be asked.
        """
        if self.worker.trouble() is not None:
            raise unavailable("the engine cannot be asked now", "engine_unavailable")
        found = await self.call_engine(longest_requests)
        longest = self.settings.max_prompt_tokens or found.prompt
        return replace(found, prompt=min(found.prompt, longest))


def open_context(
    engine: EngineSettings,
    settings: ServerSettings | None = None,
    keys: Keys | None = None,
    *,
    served_model: str | None = None,
    canary_share: float | None = None,
    observers: Sequence[Observer] = (),
    loaded: LoadedModel | None = None,
    target: Target | None = None,
    at_close: Sequence[Callable[[], None]] = (),
) -> ServerContext:
    """Start the engine's thread and return what the routes share; `close` ends the thread.

    Args:
        engine: how to build the engines.
        settings: the defaults if None.
        keys: none if None.
        served_model: the model's name for clients; its own name if None.
        canary_share: see `zlab.engine.server.lanes.build_lanes`.
        observers: who learns what happens in the lanes.
        loaded: the model; loaded by `engine` if None.
        target: the model and GPU that the server is in a registry.
        at_close: what is left to do when the engine's thread has ended.

    Raises:
        EngineError, ModelError, PolicyError, ConfigError: what building an engine raises.
    """
    settings = settings or ServerSettings()
    worker = AsyncEngine(
        partial(build_lanes, engine, loaded, canary_share),
        WorkerSettings(
            max_queue=settings.max_queue,
            stall_s=settings.stall_s,
            decision_s=settings.decision_s,
        ),
        observers,
    )
    worker.start()
    first = worker.call(lambda lanes: lanes[0].engine).result()
    return ServerContext(
        worker=worker,
        settings=settings,
        keys=keys or Keys(),
        concurrency=ConcurrencyLimit(settings.max_concurrent, lambda: worker.retry_after_s),
        prompts=PromptEncoder(first.loaded, settings.max_prompt_tokens),
        served_model=served_model or first.loaded.config.name,
        started_unix_s=time.time(),
        target=target,
        at_close=tuple(at_close),
    )

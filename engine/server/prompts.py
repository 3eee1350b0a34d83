"""From the texts and conversations of requests to token ids, off the event loop; and the names of single tokens."""

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from inspect import signature
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from engine.errors import EngineError, ModelError
from engine.loading import LoadedModel
from engine.server.errors import invalid
from engine.submitting import check_token_ids
from engine.tokenizer import Tokenizer

NAMES_KEPT = 8192
NOT_FOR_TEMPLATES = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}
Texts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
T = TypeVar("T")


class Prompts:
    """A model's way of reading requests.

    A tokenizer may not be used by two threads at once, so there is a copy for the thread that encodes and one for the
    event loop; the engine's thread keeps the original.
    """

    def __init__(self, loaded: LoadedModel, max_prompt_tokens: int | None) -> None:
        self._name = loaded.config.name
        self._vocab_size = loaded.config.vocab_size
        self._most = max_prompt_tokens
        self._tokenizer = copy.deepcopy(loaded.tokenizer)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self.has_text = loaded.tokenizer is not None
        self.token_name = token_names(copy.deepcopy(loaded.tokenizer))

    async def off_loop(self, encode: Callable[[], T]) -> T:
        """Run `encode` (one of the two below) on the tokenizer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, encode)

    def completion(self, prompt: Texts) -> list[list[int]]:
        """Token ids of each prompt of a completion request. Raises ApiError."""
        if isinstance(prompt, str):
            return [self._encode(prompt, "prompt")]
        if not prompt:
            raise invalid("prompt", "prompt is empty: give a text, or token ids")
        if isinstance(prompt[0], int):
            return [self._checked(prompt, "prompt")]
        return [
            self._encode(item, "prompt", place) if isinstance(item, str) else self._checked(item, "prompt", place)
            for place, item in enumerate(prompt)
        ]

    def chat(self, messages: Sequence[dict[str, Any]], values: Mapping[str, bool | int | str]) -> list[int]:
        """Token ids of a conversation up to where the answer begins; `values` are for the template. Raises ApiError."""
        if self._tokenizer is None:
            raise invalid("messages", self._no_text())
        for name in values:
            if name in NOT_FOR_TEMPLATES:  # it would change what is made of the template, not what is in it
                raise invalid("chat_template_kwargs", f"chat_template_kwargs may not set {name!r}")
        try:
            return self._bounded(self._tokenizer.chat(messages, **values), "messages")
        except ModelError as error:
            raise invalid("messages", str(error)) from error

    def close(self) -> None:
        """End the tokenizer's thread."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, param: str, place: int | None = None) -> list[int]:
        if self._tokenizer is None:
            raise invalid(param, self._no_text())
        return self._bounded(self._tokenizer.encode(text), param, place)

    def _checked(self, ids: Any, param: str, place: int | None = None) -> list[int]:
        try:
            return self._bounded(check_token_ids(ids, self._vocab_size), param, place)
        except EngineError as error:
            raise invalid(param, str(error) if place is None else f"prompt {place}: {error}") from error

    def _bounded(self, ids: list[int], param: str, place: int | None = None) -> list[int]:
        which = param if place is None else f"prompt {place}"
        if not ids:
            raise invalid(param, f"{which} has 0 tokens, at least 1 is needed")
        if self._most is not None and len(ids) > self._most:
            message = f"{which} has {len(ids)} tokens, this server takes at most {self._most}"
            raise invalid(param, message, "context_length_exceeded")
        return ids

    def _no_text(self) -> str:
        return f"model {self._name!r} has no tokenizer: give /v1/completions its prompt as token ids"


def token_names(tokenizer: Tokenizer | None) -> Callable[[int], str]:
    """A function from a token id to its text, `token_id:N` where there is none."""
    if tokenizer is None:
        return "token_id:{}".format

    @lru_cache(NAMES_KEPT)
    def name(token_id: int) -> str:
        return tokenizer.decode([token_id], skip_special_tokens=False)

    return name

"""Tokenizer of a model, incremental detokenization, and stop conditions.

`Tokenizer` wraps a transformers tokenizer with its chat template. `GrowingText` turns tokens into
text as they come. `StopChecker` ends an output at end-of-sequence tokens, stop tokens, and stop
strings, which may span tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import transformers

from zlab.engine.errors import ModelError, SamplingError
from zlab.engine.sampling_params import SamplingParams

try:
    import llguidance
    import llguidance.hf
except ImportError:  # it comes with the extra `server`
    llguidance = None  # type: ignore[assignment]

REPLACEMENT = (
    "\N{REPLACEMENT CHARACTER}"  # a decoder writes it for bytes that are no character, or not yet
)
MOST_PENDING_TOKENS = (
    8  # a character has at most 4 bytes and so at most 4 tokens; longer broken text stays broken
)


class Tokenizer:
    """A transformers tokenizer, reduced to the calls that the engine needs."""

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a `PreTrainedTokenizer` of any kind."""
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer)

    @staticmethod
    def from_folder(folder: Path) -> "Tokenizer":
        """Return the tokenizer of a Hugging Face folder.

        Raises:
            ModelError: transformers cannot read a tokenizer there.
        """
        try:
            return Tokenizer(
                transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{folder} has no tokenizer that can be read: {error}") from error

    @staticmethod
    def from_gguf(path: Path) -> "Tokenizer":
        """Return the tokenizer of a GGUF file.

        Raises:
            ModelError: it cannot be read.
        """
        try:
            # AutoTokenizer would read the whole header of the model several times to find this
            # class.
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{path} has no tokenizer that can be read: {error}") from error
        return Tokenizer(tokenizer)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end-of-sequence token, if it has one."""
        found = self._tokenizer.eos_token_id
        return None if found is None else int(found)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, by default with the special tokens that the tokenizer
        adds around it.
        """
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        begins_answer: bool = True,
        continues: bool = False,
        add_special_tokens: bool = False,
        **template_values: Any,
    ) -> list[int]:
        """Return the token ids of a conversation, by the model's chat template.

        Args:
            messages: the conversation.
            begins_answer: end with the beginning of the assistant's answer.
            continues: end inside the last message, so that the output continues it.
            add_special_tokens: add the tokens that the tokenizer puts around a text; most templates
                write them.
            template_values: for the template.

        Raises:
            ModelError: there is no template, or it refuses the messages.
        """
        if not self.has_chat_template:
            raise ModelError("this model's tokenizer has no chat template; give the prompt as text")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=begins_answer,
                continue_final_message=continues,
                **template_values,
            )
        except (
            Exception
        ) as error:  # a template is a program of the model's authors and may raise anything
            raise ModelError(f"the chat template refuses the messages: {error}") from error
        return self.encode(text, add_special_tokens=add_special_tokens)

    def sequences_of(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the tokens that usually spell each word, at the start of a text and behind another
        word.
        """
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, f" {word.lstrip()}"):
                found[tuple(self.encode(text, add_special_tokens=False))] = None
        found.pop((), None)
        return list(found)

    def grammar_vocabulary(self, vocab_size: int, eos_token_ids: Sequence[int]) -> Any:
        """Return llguidance's table of the tokens, which takes up to a second.

        Args:
            vocab_size: tokens of the model.
            eos_token_ids: the model's end-of-sequence tokens.

        Raises:
            SamplingError: the model has no such token, or the tokenizer is of another kind.
        """
        eos = list(eos_token_ids)
        if not eos:
            raise SamplingError(
                "structured_outputs need an end-of-sequence token, and this model has none"
            )
        try:
            return llguidance.hf.from_tokenizer(self._tokenizer, vocab_size, eos_token=eos)
        except (TypeError, ValueError, AssertionError) as error:
            plain = _PlainVocabulary.of(self, vocab_size, eos[0])
            if plain is None:
                raise SamplingError(
                    f"structured_outputs cannot use this model's tokenizer: {error}"
                ) from error
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(plain), vocab_size, eos_token=eos)

    def special_ids(self, vocab_size: int) -> tuple[list[int], list[int]]:
        """Return all token ids below `vocab_size`, and the special ones among them."""
        special = [token for token in self._tokenizer.all_special_ids if token < vocab_size]
        return list(range(min(len(self._tokenizer), vocab_size))), special

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of all tokens."""
        if self._backend is not None:
            found: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
            return found
        text = self._tokenizer.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return str(text)


@dataclass(frozen=True)
class _PlainVocabulary:
    """A tokenizer whose text is the texts of its tokens, one after the other, for llguidance.

    llguidance reads the two usual kinds of byte-level tokenizers by itself.
    """

    tokens: list[bytes]
    eos_token_id: int
    bos_token_id: None
    special_token_ids: list[int]
    encode: Callable[[str], list[int]]

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text."""
        return self.encode(text.decode())

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos: int) -> "_PlainVocabulary | None":
        """Return the vocabulary; None where the text of a token depends on its neighbours."""
        ids, special = tokenizer.special_ids(vocab_size)
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        for order in (1, -1):
            together = tokenizer.decode(ids[::order], skip_special_tokens=False)
            if together != "".join(texts[::order]):
                return None
        tokens = [text.encode() for text in texts] + [b""] * (vocab_size - len(texts))
        return cls(tokens, eos, None, special, partial(tokenizer.encode, add_special_tokens=False))


def _backend(tokenizer: Any) -> Any | None:
    """Return the `tokenizers.Tokenizer` behind the transformers class, or None where a class
    changes how text is decoded.

    The direct call takes a quarter of the time for few tokens. Every token of every stream is
    decoded on the engine's thread, so this time is part of a step.
    """
    general = transformers.PreTrainedTokenizerFast
    if not isinstance(tokenizer, general):
        return None
    kind = type(tokenizer)
    unchanged = kind.decode is general.decode and kind._decode is general._decode
    return tokenizer.backend_tokenizer if unchanged else None


class GrowingText:
    """The text of one output as its tokens come: parts that add up to `decode` of all tokens and
    never cut a character.

    The text of a token can depend on the token before it (a leading space), and the bytes of a
    character can span several tokens. So the new tokens are decoded together with those of the
    previous part, and the new part is returned once it does not end in a broken character.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        self._context = 0  # first token of the previous part
        self._given = 0  # first token whose text is not returned yet

    def push(self, token_id: int) -> str:
        """Add a token and return the new text; it is empty while a character is incomplete."""
        self._token_ids.append(token_id)
        text, num_before = self._unsaid()
        waits = len(self._token_ids) - self._given < MOST_PENDING_TOKENS
        if text.endswith(REPLACEMENT) and waits:
            return ""
        return self._give(text, num_before)

    def finish(self) -> str:
        """Return the remaining text. An incomplete character becomes the replacement character."""
        return self._give(*self._unsaid())

    def _unsaid(self) -> tuple[str, int]:
        before = self._decode(self._token_ids[self._context : self._given])
        return self._decode(self._token_ids[self._context :]), len(before)

    def _give(self, text: str, num_before: int) -> str:
        if (
            len(text) <= num_before
        ):  # a skipped special token adds no text; the context keeps a token that has text
            return ""
        self._context, self._given = self._given, len(self._token_ids)
        return text[num_before:]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


@dataclass(frozen=True, slots=True)
class TokenText:
    """What one more token adds to an output.

    Attributes:
        text: the new text.
        stopped: whether the output ends here.
        stop_reason: the stop token or string; None for an end-of-sequence token and for an output
            that
            goes on.
    """

    text: str
    stopped: bool = False
    stop_reason: int | str | None = None


class StopChecker:
    """The text of one output and its stop conditions. Text that was returned is never taken back.

    Text that may be the beginning of a stop string is held until that is known. Without a tokenizer
    there is no text, and only token ids stop. The scheduler applies the length limit.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Sequence[int], tokenizer: Tokenizer | None
    ) -> None:
        self._params = params
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._growing = tokenizer and GrowingText(
            tokenizer, skip_special_tokens=params.skip_special_tokens
        )
        self._held = ""
        self.token_ids: list[int] = []

    def push(self, token_id: int) -> TokenText:
        """Add a token. The token that stops is in `token_ids`, but its text is not returned."""
        self.token_ids.append(token_id)
        if token_id in self._eos or token_id in self._stop_ids:
            reason = token_id if token_id in self._stop_ids else None
            # Text that was held as an incomplete character may complete a stop string.
            added = self._add(self._growing.finish() if self._growing else "")
            return added if added.stopped else TokenText(added.text + self._release(), True, reason)
        return self._add(self._growing.push(token_id) if self._growing else "")

    def finish(self) -> str:
        """Return the text that is still held when the output ends at its length limit or by an
        abort.
        """
        added = self._add(self._growing.finish() if self._growing else "")
        return added.text if added.stopped else added.text + self._release()

    def _add(self, text: str) -> TokenText:
        if not self._params.stop_strings or len(self.token_ids) < self._params.min_tokens:
            return TokenText(text)
        self._held += text
        found = [
            (at, stop) for stop in self._params.stop_strings if (at := self._held.find(stop)) >= 0
        ]
        if found:
            at, stop = min(found, key=lambda item: (item[0], -len(item[1])))
            end = at + len(stop) if self._params.include_stop_str_in_output else at
            kept, self._held = self._held[:end], ""
            return TokenText(kept, True, stop)
        num_held = max(
            (_overlap(self._held, stop) for stop in self._params.stop_strings), default=0
        )
        cut = len(self._held) - num_held
        given, self._held = self._held[:cut], self._held[cut:]
        return TokenText(given)

    def _release(self) -> str:
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)

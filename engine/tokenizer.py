"""Text to token ids and back: a model's own tokenizer, chat template included, and text that grows token by token."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers

from engine.errors import ModelError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder puts for bytes that are no character, or not yet
MOST_PENDING_TOKENS = 8  # a character has at most 4 bytes, so at most 4 tokens; what stays broken longer is broken


class Tokenizer:
    """A transformers tokenizer behind the few calls that the engine needs."""

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a `PreTrainedTokenizer` of any kind."""
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer)

    @staticmethod
    def from_folder(folder: Path) -> "Tokenizer":
        """The tokenizer of a Hugging Face folder.

        Raises:
            ModelError: there is none that transformers can read.
        """
        try:
            return Tokenizer(transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True))
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{folder} has no tokenizer that can be read: {error}") from error

    @staticmethod
    def from_gguf(path: Path) -> "Tokenizer":
        """The tokenizer that a GGUF file carries.

        Raises:
            ModelError: it cannot be read.
        """
        try:
            # Not AutoTokenizer: it reads the whole model's header several times over to arrive at this class.
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{path} has no tokenizer that can be read: {error}") from error
        return Tokenizer(tokenizer)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-sequence token."""
        found = self._tokenizer.eos_token_id
        return None if found is None else int(found)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with what the tokenizer puts around a text (a start token, say)."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def chat(self, messages: Sequence[Mapping[str, Any]], **template_values: Any) -> list[int]:
        """Token ids of a conversation up to where the assistant's answer begins, by the model's own template.

        Raises:
            ModelError: there is no template, or it refuses the messages.
        """
        if not self.has_chat_template:
            raise ModelError("this model's tokenizer has no chat template; give the prompt as text")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, **template_values
            )
        except Exception as error:  # a template is a program of the model's makers and may raise anything
            raise ModelError(f"the chat template refuses the messages: {error}") from error
        return self.encode(text, add_special_tokens=False)  # the template writes its own

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all tokens at once."""
        if self._backend is not None:
            found: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
            return found
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)


def _backend(tokenizer: Any) -> Any | None:
    """What decodes behind transformers' own class, where nobody has changed how: a quarter of the time for few tokens.

    A `tokenizers.Tokenizer`. Every token of every stream is decoded on the engine's thread: its time is a step's time.
    """
    general = transformers.PreTrainedTokenizerFast
    if not isinstance(tokenizer, general):
        return None
    kind = type(tokenizer)
    unchanged = kind.decode is general.decode and kind._decode is general._decode
    return tokenizer.backend_tokenizer if unchanged else None


class GrowingText:
    """The text of one output as its tokens come: pieces that add up to `decode` of all, no character cut in two.

    A token's text can depend on the one before it (a leading space), and a character's bytes can lie in several
    tokens. So the tokens since the last piece are decoded together with those of the piece before, and a piece is given
    out when it does not end in a broken character.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        self._context = 0  # first token of the piece before
        self._given = 0  # first token that is in no piece yet

    def push(self, token_id: int) -> str:
        """The next piece; empty while a character is incomplete."""
        self._token_ids.append(token_id)
        text, num_before = self._unsaid()
        waits = len(self._token_ids) - self._given < MOST_PENDING_TOKENS
        if text.endswith(REPLACEMENT) and waits:
            return ""
        return self._give(text, num_before)

    def finish(self) -> str:
        """What is left when no more tokens come: an incomplete character shows as the replacement character."""
        return self._give(*self._unsaid())

    def _unsaid(self) -> tuple[str, int]:
        before = self._decode(self._token_ids[self._context : self._given])
        return self._decode(self._token_ids[self._context :]), len(before)

    def _give(self, text: str, num_before: int) -> str:
        if len(text) <= num_before:  # a special token that is skipped: keep the context that has a text
            return ""
        self._context, self._given = self._given, len(self._token_ids)
        return text[num_before:]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

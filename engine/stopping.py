"""When an output ends: end-of-sequence and stop tokens, and stop strings that may lie across tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.sampling_params import SamplingParams
from engine.tokenizer import GrowingText, Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """What one more token adds. `stopped` says that the output ends here; `stop_reason` is the token id or the string.

    `stop_reason` is None for an end-of-sequence token, as for an output that goes on.
    """

    text: str
    stopped: bool = False
    stop_reason: int | str | None = None


class Output:
    """The text of one output and its stop conditions; the pieces it gives never need to be taken back.

    Text that may turn out to be the beginning of a stop string is held until it is known. Without a tokenizer there is
    no text, and only token ids stop. The length limit is the scheduler's.
    """

    def __init__(self, params: SamplingParams, eos_token_ids: Sequence[int], tokenizer: Tokenizer | None) -> None:
        self._params = params
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._growing = tokenizer and GrowingText(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._held = ""
        self.token_ids: list[int] = []

    def push(self, token_id: int) -> Piece:
        """Add a token. The token that stops is in `token_ids`, its text in no piece."""
        self.token_ids.append(token_id)
        if token_id in self._eos or token_id in self._stop_ids:
            reason = token_id if token_id in self._stop_ids else None
            # A stop string may be completed by what was still held back as an incomplete character.
            piece = self._add(self._growing.finish() if self._growing else "")
            return piece if piece.stopped else Piece(piece.text + self._release(), True, reason)
        return self._add(self._growing.push(token_id) if self._growing else "")

    def finish(self) -> str:
        """What is still held when the output ends for another reason than `push` saw: its length, or an abort."""
        piece = self._add(self._growing.finish() if self._growing else "")
        return piece.text if piece.stopped else piece.text + self._release()

    def _add(self, text: str) -> Piece:
        if not self._params.stop_strings:
            return Piece(text)
        self._held += text
        found = [(at, stop) for stop in self._params.stop_strings if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda item: (item[0], -len(item[1])))
            end = at + len(stop) if self._params.include_stop_str_in_output else at
            kept, self._held = self._held[:end], ""
            return Piece(kept, True, stop)
        num_held = max((_overlap(self._held, stop) for stop in self._params.stop_strings), default=0)
        cut = len(self._held) - num_held
        given, self._held = self._held[:cut], self._held[cut:]
        return Piece(given)

    def _release(self) -> str:
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)

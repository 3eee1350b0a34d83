"""What a request asks of its output: how tokens are drawn, and when to stop."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from engine.errors import SamplingError, nearest

MOST_LOGPROBS = 20
MOST_COPIES = 1024
SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Names, meanings and defaults as in vLLM's class of this name; values are checked when it is made.

    `temperature` 0 takes the most probable token. `top_k` 0 (or -1) and `top_p` 1 keep all tokens; `min_p` drops those
    less probable than that share of the most probable. Penalties: `repetition_penalty` divides positive and multiplies
    negative logits of tokens in prompt or output; `presence_penalty` and `frequency_penalty` are subtracted once, or
    per occurrence, for tokens in the output. `logprobs` n: log-probabilities of the chosen and the n most probable
    tokens, before penalties and temperature. `seed` fixes the draws whatever else runs. `stop` strings are not part of
    the output unless `include_stop_str_in_output`. `ignore_eos` runs on past the model's end-of-sequence tokens;
    `stop_token_ids` still stop.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    max_tokens: int = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Refuse a keyword that is none of the fields by name, before the generated constructor sees it."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise SamplingError(
                    f"unknown sampling parameter {name!r}{nearest(name, known)} (choices: {', '.join(known)})"
                )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        _check_whole("n", self.n, 1, MOST_COPIES)
        _check_real("temperature", self.temperature, 0.0, math.inf, open_top=True)
        _check_real("top_p", self.top_p, 0.0, 1.0, open_bottom=True)
        _check_whole("top_k", self.top_k, -1, None)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, 2**SEED_BITS - 1)
        _check_real("repetition_penalty", self.repetition_penalty, 0.0, 2.0, open_bottom=True)
        _check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        _check_whole("max_tokens", self.max_tokens, 1, None)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise SamplingError(f"{name} must be true or false, got {getattr(self, name)!r}")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        if self.temperature == 0.0 and self.n > 1:
            raise SamplingError(f"n must be 1 with temperature 0, which gives the same output every time; got {self.n}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Parameters out of the keys of a JSON request; an unknown key is refused by name."""
        return cls(**values)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0.0

    @property
    def filters(self) -> bool:
        """Whether some tokens may not be drawn: top-k, top-p or min-p are set and matter."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _check_real(
    name: str, value: Any, low: float, high: float, *, open_bottom: bool = False, open_top: bool = False
) -> None:
    bounds = f"{'(' if open_bottom else '['}{low:g}, {high:g}{')' if open_top else ']'}"
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise SamplingError(f"{name} must be a number in {bounds}, got {value!r}")
    if not low <= value <= high or (open_bottom and value == low) or (open_top and value == high):
        raise SamplingError(f"{name} must be in {bounds}, got {value!r}")


def _check_whole(name: str, value: Any, low: int, high: int | None) -> None:
    bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise SamplingError(f"{name} must be a whole number {bounds}, got {value!r}")


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(item, str) and item for item in strings):
        raise SamplingError(f"stop must be a string or a list of strings, none empty; got {stop!r}")
    return tuple(strings)


def _token_ids(ids: Any) -> tuple[int, ...]:
    valid = isinstance(ids, Sequence) and not isinstance(ids, str)
    if not valid or not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise SamplingError(f"stop_token_ids must be a list of token ids of at least 0, got {ids!r}")
    return tuple(ids)

"""Sampling parameters of a request: how tokens are sampled and when the output stops."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from zlab.engine.errors import SamplingError
from zlab.traces.choices import unknown_choice

MOST_LOGPROBS = 20
MOST_COPIES = 1024
LEAST_TEMPERATURE = 1e-5  # below it the most probable token is taken, as vLLM does
SEED_BITS = 63


MOST_BIAS = 100.0  # of the OpenAI API
STRUCTURES = ("json", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form that an output must have; exactly one field is given. The names are vLLM's.

    Attributes:
        json: a JSON schema, as text; `{"type": "object"}` asks for any object.
        regex: a regular expression that the whole output matches.
        choice: texts, of which the output is one.
        grammar: a context-free grammar in Lark's or GBNF's notation.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) != 1:
            raise SamplingError(
                f"structured_outputs takes one of {', '.join(STRUCTURES)}; got "
                f"{' and '.join(given) or 'none'}"
            )
        if self.choice is not None and (
            not self.choice or not all(isinstance(one, str) and one for one in self.choice)
        ):
            raise SamplingError(
                f"structured_outputs choice must be a list of texts, none empty; got "
                f"{self.choice!r}"
            )

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in STRUCTURES if getattr(self, name) is not None)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request, with the names, meanings and defaults of vLLM's class
    of this name. Values are checked on construction; SamplingError names a value out of range.

    Attributes:
        n: outputs of one prompt.
        temperature: 0, or less than 1e-5, takes the most probable token.
        top_p: keep the most probable tokens up to this total probability; 1 keeps all.
        top_k: keep this many tokens; 0 or -1 keeps all.
        min_p: drop tokens less probable than this share of the most probable token.
        seed: makes the samples independent of all other requests.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt
            or
            the output.
        presence_penalty: is subtracted once for each token in the output.
        frequency_penalty: is subtracted for each occurrence in the output.
        logprobs: report log-probabilities of the sampled token and of this many most probable ones,
            before penalties and temperature.
        max_tokens: the longest output.
        stop: strings that end the output.
        stop_token_ids: tokens that end the output, also with `ignore_eos`.
        ignore_eos: continue after the model's end-of-sequence tokens.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        min_tokens: the shortest output: nothing stops it before.
        logit_bias: is added to the logits of these tokens, from -100 to 100.
        allowed_token_ids: the only tokens that the output may have.
        bad_words: texts that the output must not have, as far as their usual tokens spell them.
        structured_outputs: the form that the output must have.
        prompt_logprobs: report the log-probability of each prompt token and of this many most
            probable ones in its place.
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
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Refuse an unknown keyword by name, before the generated constructor sees it."""
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                raise SamplingError(unknown_choice("sampling parameter", name, known))
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
        object.__setattr__(self, "stop", _texts("stop", self.stop))
        object.__setattr__(
            self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids)
        )
        self._check_constraints()
        if self.is_greedy and self.n > 1:
            raise SamplingError(
                f"n must be 1 with temperature 0, which gives the same output every time; got "
                f"{self.n}"
            )

    def _check_constraints(self) -> None:
        """Check the fields that exclude tokens, and that they do not contradict each other."""
        _check_whole("min_tokens", self.min_tokens, 0, None)
        if self.min_tokens > self.max_tokens:
            raise SamplingError(
                f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}"
            )
        if self.prompt_logprobs is not None:
            _check_whole("prompt_logprobs", self.prompt_logprobs, 0, MOST_LOGPROBS)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise SamplingError("allowed_token_ids must have at least one token id, got []")
            object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "bad_words", _texts("bad_words", self.bad_words))
        wanted = self.structured_outputs
        if wanted is None:
            return
        if not isinstance(wanted, StructuredOutputs):
            raise SamplingError(f"structured_outputs must be StructuredOutputs, got {wanted!r}")
        for name in ("min_tokens", "allowed_token_ids", "bad_words"):
            if getattr(self, name):
                raise SamplingError(
                    f"{name} does not go together with structured_outputs, which says alone "
                    f"which tokens may follow"
                )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Return the parameters of the keys of a JSON request. Raises SamplingError for an unknown
        key.
        """
        return cls(**values)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature < LEAST_TEMPERATURE

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p excludes tokens."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def constrains(self) -> bool:
        """Whether some tokens are excluded or have a bias."""
        return bool(
            self.min_tokens
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.structured_outputs is not None
        )

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _check_real(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    open_bottom: bool = False,
    open_top: bool = False,
) -> None:
    bounds = f"{'(' if open_bottom else '['}{low:g}, {high:g}{')' if open_top else ']'}"
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise SamplingError(f"{name} must be a number in {bounds}, got {value!r}")
    if not low <= value <= high or (open_bottom and value == low) or (open_top and value == high):
        raise SamplingError(f"{name} must be in {bounds}, got {value!r}")


def _check_whole(name: str, value: Any, low: int, high: int | None) -> None:
    bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < low
        or (high is not None and value > high)
    ):
        raise SamplingError(f"{name} must be a whole number {bounds}, got {value!r}")


def _texts(name: str, texts: Any) -> tuple[str, ...]:
    strings = (texts,) if isinstance(texts, str) else texts
    if not isinstance(strings, Sequence) or not all(
        isinstance(item, str) and item for item in strings
    ):
        raise SamplingError(
            f"{name} must be a string or a list of strings, none empty; got {texts!r}"
        )
    return tuple(strings)


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    valid = isinstance(ids, Sequence) and not isinstance(ids, str)
    if not valid or not all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids
    ):
        raise SamplingError(f"{name} must be a list of token ids of at least 0, got {ids!r}")
    return tuple(ids)


def _biases(biases: Any) -> dict[int, float]:
    """Return biases by token id; the keys of a JSON object are texts."""
    if not isinstance(biases, Mapping):
        raise SamplingError(f"logit_bias must map token ids to numbers, got {biases!r}")
    found = {}
    for key, value in biases.items():
        text = str(key)
        if isinstance(key, bool) or not (text.isascii() and text.isdecimal()):
            raise SamplingError(f"logit_bias must have token ids as keys, got {key!r}")
        _check_real(f"logit_bias of token {text}", value, -MOST_BIAS, MOST_BIAS)
        found[int(text)] = float(value)
    return found

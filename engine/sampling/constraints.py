"""Constraints on the next token of one output, and how a step applies them to its logits.

    SamplingParams --compile_constraint--> Constraint (one for each output, on the engine's thread)
        logit_bias          a number is added to the logits of some tokens
        allowed_token_ids   every other token is excluded
        min_tokens          tokens that stop are excluded until the output has so many tokens
        bad_words           the last token of a sequence is excluded after the tokens before it
        structured_outputs  a grammar says which tokens may follow (llguidance)

A step first enqueues its forward pass. The host then collects exclusions and grammar masks
(`StepConstraints`) while the device runs, and the device applies them before penalties and
temperature. Only the output itself decides its exclusions, so no other request of the batch changes
a token. Log-probabilities are those of the logits before all of this.

Sequences and grammars depend on the newest token, so the engine settles each step of such a request
before it plans the next (`Constraint.needs_tokens`).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from zlab.engine.errors import SamplingError
from zlab.engine.input_batch import moved
from zlab.engine.sampling import torch_ops
from zlab.engine.sampling_params import SamplingParams, StructuredOutputs

try:
    import llguidance
    import llguidance.numpy as masking
except ImportError:  # it comes with the extra `server`
    llguidance = masking = None  # type: ignore[assignment]
try:
    from zlab.engine.sampling.triton_ops import keep_allowed as keep_allowed_on_cuda
except ImportError:  # Triton does not support this platform
    keep_allowed_on_cuda = torch_ops.keep_allowed

EXCLUDED = float("-inf")
CACHED_GRAMMARS = 256
# Where a grammar asks for characters that no token of the model spells.
STUCK = "structured_outputs cannot continue with the tokens of this model"
# JSON allows any amount of white space between two values. A model that likes spaces would write
# them to its length limit, so the grammar takes at most this much.
JSON_SPACE = r"[ \n\r\t]{0,24}"


class Grammar:
    """The state of one output in a grammar; `GrammarCompiler.compile` makes the first state."""

    def __init__(self, matcher: Any, executor: Any) -> None:
        self._matcher = matcher
        self._executor = executor

    def copy(self) -> "Grammar":
        """Return an independent state at the same place."""
        return Grammar(self._matcher.deep_copy(), self._executor)

    def accept(self, token_id: int) -> bool:
        """Move past a token; returns whether the output is complete.

        Raises:
            SamplingError: the grammar does not allow the token, or became too complex.
        """
        if not self._matcher.consume_token(token_id):
            reason = self._matcher.get_error().strip().splitlines()[0]
            raise SamplingError(f"{STUCK}: {reason}")
        return bool(self._matcher.is_stopped())

    @staticmethod
    def fill(grammars: Sequence["Grammar"], masks: np.ndarray) -> None:
        """Write the tokens that each grammar allows next, one bit for each token.

        Args:
            grammars: one state for each row.
            masks: `[len(grammars), words]` int32; bit `t % 32` of word `t // 32` is token `t`.
        """
        if len(grammars) == 1:
            masking.fill_next_token_bitmask(grammars[0]._matcher, masks, 0)
            return
        rows = [(grammar._matcher, row) for row, grammar in enumerate(grammars)]
        masking.fill_next_token_bitmask_par(grammars[0]._executor, rows, masks)


class GrammarCompiler:
    """Compiles structured outputs for one model. Its methods may be called from any thread."""

    def __init__(self, read_vocabulary: Callable[[], Any]) -> None:
        """Prepare to compile.

        Args:
            read_vocabulary: returns llguidance's table of the model's tokens, or raises
                SamplingError; it is called once, for the first grammar.
        """
        self._read_vocabulary = read_vocabulary
        self._tables: tuple[Any, Any] | None = None
        self._compiled: Callable[[StructuredOutputs], Grammar] = lru_cache(CACHED_GRAMMARS)(
            self._compile
        )

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """Return the first state of a grammar; a large schema takes up to a second.

        Raises:
            SamplingError: the grammar is not valid, the vocabulary cannot be read, or llguidance is
                not installed.
        """
        return self._compiled(wanted).copy()

    def _compile(self, wanted: StructuredOutputs) -> Grammar:
        if llguidance is None:
            raise SamplingError("structured_outputs need llguidance: pip install llguidance")
        if self._tables is None:
            self._tables = self._read_vocabulary(), llguidance.LLExecutor()
        vocabulary, executor = self._tables
        matchers = llguidance.LLMatcher
        try:
            if wanted.json is not None:
                source = matchers.grammar_from_json_schema(
                    wanted.json, {"whitespace_pattern": JSON_SPACE}
                )
            elif wanted.regex is not None:
                source = matchers.grammar_from_regex(wanted.regex)
            elif wanted.choice is not None:
                choices = " | ".join(json.dumps(choice) for choice in wanted.choice)
                source = matchers.grammar_from_lark(f"start: {choices}")
            else:
                source = llguidance.grammar_from("grammar", str(wanted.grammar))
        except ValueError as error:
            raise SamplingError(
                f"structured_outputs {wanted.kind} is not valid: {error}"
            ) from error
        matcher = matchers(vocabulary, source, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().strip().splitlines()[0]
            raise SamplingError(f"structured_outputs {wanted.kind} is not valid: {reason}")
        return Grammar(matcher, executor)


class Constraint:
    """What one output may write next."""

    def __init__(
        self,
        params: SamplingParams,
        stop_ids: Sequence[int],
        bad_sequences: Sequence[tuple[int, ...]],
        grammar: Grammar | None,
    ) -> None:
        """Combine the constraints of one output; `compile_constraint` finds the arguments.

        Args:
            params: the sampling parameters.
            stop_ids: tokens that end the output.
            bad_sequences: token sequences that must not occur.
            grammar: the first state of the output's grammar.
        """
        self.grammar = grammar
        self.bias = dict(params.logit_bias or {})
        self.allowed = params.allowed_token_ids
        self._min_tokens = params.min_tokens
        self._stop_ids = list(stop_ids)
        self._bad_tokens = [one[0] for one in bad_sequences if len(one) == 1]
        self._bad_sequences = [one for one in bad_sequences if len(one) > 1]
        self._vector: torch.Tensor | None = None

    @property
    def needs_tokens(self) -> bool:
        """Whether the next token depends on which tokens came before."""
        return self.grammar is not None or bool(self._bad_sequences)

    @property
    def has_vector(self) -> bool:
        """Whether something is added to the logits at every place alike."""
        return bool(self.bias) or self.allowed is not None or bool(self._bad_tokens)

    def vector(self, vocab_size: int, device: torch.device) -> torch.Tensor:
        """Return what is added to the logits at every place, `[vocab]` float32."""
        if self._vector is None:
            start = 0.0 if self.allowed is None else EXCLUDED
            vector = torch.full((vocab_size,), start, dtype=torch.float32)
            if self.allowed is not None:
                vector[list(self.allowed)] = 0.0
            for token, bias in self.bias.items():
                vector[token] += bias
            vector[self._bad_tokens] = EXCLUDED
            self._vector = vector.to(device)
        return self._vector

    def excluded(self, place: int, output_ids: Callable[[], Sequence[int]]) -> list[int]:
        """Return tokens that are excluded at this place alone.

        Args:
            place: the number of tokens of the output so far.
            output_ids: returns those tokens; it is called only where they matter.
        """
        found = list(self._stop_ids) if place < self._min_tokens else []
        if self._bad_sequences:
            written = output_ids()
            for *before, last in self._bad_sequences:
                if len(before) <= len(written) and list(written[-len(before) :]) == before:
                    found.append(last)
        return found

    def accept(self, token_id: int) -> bool:
        """Take note of a new token; returns whether it completes the output.

        Raises:
            SamplingError: the grammar cannot continue.
        """
        return self.grammar is not None and self.grammar.accept(token_id)


def compile_constraint(
    params: SamplingParams,
    eos_token_ids: Sequence[int],
    vocab_size: int,
    bad_sequences: Sequence[tuple[int, ...]],
    grammar: Grammar | None,
) -> Constraint:
    """Return the constraint of an output.

    Args:
        params: the sampling parameters.
        eos_token_ids: the model's end-of-sequence tokens.
        vocab_size: tokens of the model.
        bad_sequences: the tokens of `params.bad_words`.
        grammar: the first state of the grammar that `params.structured_outputs` asks for.

    Raises:
        SamplingError: a token that the model does not have, or constraints that together exclude
            every token.
    """
    for name in ("logit_bias", "allowed_token_ids"):
        for token in getattr(params, name) or ():
            if token >= vocab_size:
                raise SamplingError(
                    f"{name} names token {token}, and the model has tokens 0..{vocab_size - 1}"
                )
    eos = () if params.ignore_eos else eos_token_ids
    stop_ids = sorted({*eos, *params.stop_token_ids} & set(range(vocab_size)))
    if params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
        if allowed <= {sequence[-1] for sequence in bad_sequences}:
            raise SamplingError("allowed_token_ids has no token that bad_words always leaves")
        if params.min_tokens and allowed <= set(stop_ids):
            raise SamplingError(
                f"allowed_token_ids has only tokens that stop, and min_tokens is "
                f"{params.min_tokens}"
            )
    return Constraint(params, stop_ids, bad_sequences, grammar)


@dataclass(frozen=True)
class ConstrainedRow:
    """A row of a step with a constraint: where it is, and how far its output is."""

    row: int
    constraint: Constraint
    place: int
    output_ids: Callable[[], Sequence[int]]


def constrain(logits: torch.Tensor, rows: Sequence[ConstrainedRow]) -> torch.Tensor:
    """Return logits `[rows, vocab]` float32 after the constraints of these rows.

    Grammars are asked on the host; nothing waits for the device.

    Args:
        logits: `[rows, vocab]`; not modified.
        rows: the rows that have a constraint.
    """
    device, vocab_size = logits.device, logits.shape[-1]
    wide = logits.float() if logits.dtype != torch.float32 else logits.clone()
    fixed = [one for one in rows if one.constraint.has_vector]
    if fixed:
        vectors = torch.stack([one.constraint.vector(vocab_size, device) for one in fixed])
        wide.index_add_(0, _placed([one.row for one in fixed], device), vectors)
    pairs = [
        (one.row, token)
        for one in rows
        for token in one.constraint.excluded(one.place, one.output_ids)
    ]
    if pairs:
        where = _placed(pairs, device)
        wide.index_put_((where[:, 0], where[:, 1]), wide.new_tensor(EXCLUDED))
    guided = [one for one in rows if one.constraint.grammar is not None]
    if guided:
        masks = np.full((len(guided), -(-vocab_size // 32)), -1, dtype=np.int32)
        Grammar.fill([one.constraint.grammar for one in guided if one.constraint.grammar], masks)
        keep_allowed = keep_allowed_on_cuda if wide.is_cuda else torch_ops.keep_allowed
        keep_allowed(
            wide,
            _placed([one.row for one in guided], device),
            moved(torch.from_numpy(masks), device),
        )
    return wide


def _placed(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    return moved(torch.tensor(values, dtype=torch.int64), device)

"""The own engine as what answers: one loaded model, an engine of its own for every column."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zlab.engine.compression import check_settings, settings_for
from zlab.engine.engine import EngineSettings, find_device, find_dtype
from zlab.engine.errors import EngineError, ModelError
from zlab.engine.evaluation.dataset import TASK, DataError, Example
from zlab.engine.evaluation.results import EvaluatedColumn, ModelOutput
from zlab.engine.evaluation.runner import Question, RunError
from zlab.engine.llm import LLM
from zlab.engine.model.loader import LoadedModel, default_dtype, load_model
from zlab.engine.sampling_params import SamplingParams
from zlab.engine.tokenizer import Tokenizer
from zlab.policies.spec import load_policy

SHAPE = ("num_layers", "num_query_heads", "num_kv_heads", "head_dim", "vocab_size")


class LocalBackend:
    """Answers by `LLM`; a finished column's engine is let go before the next is built."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        max_tokens: int,
        top_p: float,
        chat: bool,
        loaded: LoadedModel | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        """Load the model.

        Args:
            settings: of the engines; the policy in them is not used.
            max_tokens: the cap of every output.
            top_p: of every output that is drawn.
            chat: a prompt becomes a user's message in the model's chat template.
            loaded: the model, if it is loaded already.
            on_step: is called between steps; what it raises ends the run.

        Raises:
            EngineError: the model cannot be loaded, or has no tokenizer.
        """
        self._settings = settings
        self._max_tokens, self._top_p, self._chat = max_tokens, top_p, chat
        self._on_step = on_step
        device = find_device(settings.device)
        self._dtype = find_dtype(settings.dtype) or default_dtype(device)
        self.loaded = loaded or load_model(
            settings.model, device=device, dtype=self._dtype, variant=settings.variant
        )
        if self.loaded.tokenizer is None:
            raise EngineError(
                f"model {settings.model!r} has no tokenizer, so it has no text to evaluate"
            )
        self._tokenizer: Tokenizer = self.loaded.tokenizer
        self._prompt_ids: dict[str, list[int]] = {}

    def describe(self) -> Mapping[str, Any]:
        """Model, device, type of numbers and sizes: what may change an output."""
        settings = self._settings
        return {
            "model": settings.model,
            "device": settings.device.partition(":")[0],
            "dtype": str(self._dtype).removeprefix("torch."),
            "block_size": settings.block_size,
            "chat": self._chat,
            "model_shape": {name: getattr(self.loaded.config, name) for name in SHAPE},
        }

    def check(self, columns: Sequence[EvaluatedColumn], examples: Sequence[Example]) -> None:
        """Raise EngineError where a budget does not hold what its policy always keeps, a window
        does not fit a block, or a prompt and its output exceed what a request may have.
        """
        size = self._settings.block_size
        for column in columns:
            policy = load_policy(column.policy)
            blocks = policy.budget.floor(size)
            if blocks is None:
                continue
            window = policy.compression.window
            if window > size:
                raise EngineError(
                    f"{column.policy}: a window of {window} tokens does not fit a block of {size}"
                )
            try:
                check_settings(settings_for(policy.compression, size, 0), size, blocks)
            except EngineError as error:
                raise EngineError(
                    f"{column.policy}: a budget of {column.budget} tokens is too small: {error}"
                ) from error
        most = self._settings.max_model_len or self.loaded.config.max_positions
        for example in examples:
            count = len(self.prompt_ids(example))
            if count + self._max_tokens > most:
                raise DataError(
                    f"{example.place}: a prompt of {count} tokens and an output of at most "
                    f"{self._max_tokens} are more than the {most} that a request may have"
                )

    def prompt_ids(self, example: Example) -> list[int]:
        """The example's prompt in tokens. Raises DataError where the tokenizer cannot write it."""
        if example.place not in self._prompt_ids:
            self._prompt_ids[example.place] = self._tokenized(example)
        return self._prompt_ids[example.place]

    def _tokenized(self, example: Example) -> list[int]:
        messages = example.messages
        if messages is None and self._chat:
            messages = ({"role": "user", "content": example.prompt},)
        if messages is not None:
            try:
                return self._tokenizer.chat(messages)
            except ModelError as error:
                raise DataError(f"{example.place}: {error}") from error
        assert example.prompt is not None
        ids = self._tokenizer.encode(example.prompt)
        if example.source.startswith(TASK):
            written = self._tokenizer.decode(ids, skip_special_tokens=False)
            if written.split() != example.prompt.split():
                raise DataError(
                    f"{example.place}: model {self._settings.model!r} has no tokens for this task: "
                    f"its tokenizer reads {written[:60]!r} for {example.prompt[:60]!r}"
                )
        return ids

    def answer(
        self, column: EvaluatedColumn, questions: Sequence[Question]
    ) -> Iterator[ModelOutput]:
        """The outputs in the order in which they are complete. Raises RefusedError before any."""
        settings = replace(self._settings, policy=column.policy)
        own = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
        llm = LLM(own.pop("model"), own.pop("policy"), loaded=self.loaded, **own)
        prompts = [self.prompt_ids(question.example) for question in questions]
        params = [
            SamplingParams(
                temperature=column.temperature,
                top_p=self._top_p if column.temperature > 0 else 1.0,
                seed=question.seed,
                max_tokens=self._max_tokens,
            )
            for question in questions
        ]
        try:
            for place, result in llm.as_completed(prompts, params, self._on_step):
                output, question = result.outputs[0], questions[place]
                if output.finish_reason not in ("stop", "length"):
                    raise RunError(
                        f"{question.example.place}: the request ended with "
                        f"{output.finish_reason!r}: {output.message}"
                    )
                yield ModelOutput(
                    problem=question.problem,
                    sample=question.sample,
                    text=output.text,
                    tokens=len(output.token_ids),
                    finish=output.finish_reason,
                    compressions=output.num_compressions,
                )
        finally:
            llm.close()  # its cache goes before the next engine measures what is free

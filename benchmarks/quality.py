"""Measure what compression costs a model's predictions: `python -m benchmarks.quality --out JSON`.

Texts are generated once with full KV (seeded). Then the engine reads them again, token by token,
under every scorer and budget: the decode path runs with its compressions as in serving, but the
next token is always the text's. At every position the benchmark notes the negative log-likelihood
of the text's token and the most probable token. Figures are over the positions after the first
compression of the budget, and full KV is judged on the same positions. The perplexity of full KV on
its own samples is low by nature; the ratio counts.

The smallest budget comes first, under all scorers. The file is written after each of them, so that
a run that ends early (`--minutes`) keeps its results. `--table FILE.json` prints a result as
Markdown.
"""

import argparse
import gc
import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from zlab.engine.compression import SCORERS, check_settings, settings_for
from zlab.engine.engine import Engine, EngineSettings, find_device, find_dtype
from zlab.engine.errors import EngineError, KernelInputError, ModelError
from zlab.engine.input_batch import sent
from zlab.engine.kernels.backends import KERNEL_BACKENDS
from zlab.engine.llm import LLM
from zlab.engine.model.decoder import VARIANTS
from zlab.engine.model.loader import LoadedModel, load_model
from zlab.engine.sampling.sampler import StepSampler
from zlab.engine.sampling_params import SamplingParams
from zlab.policies.core.plan import ConfigError
from zlab.policies.spec import PolicyError, load_policy
from zlab.traces.workload import TraceRequest

QUESTIONS = (
    "Tell a long story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain step by step how a steam engine works, with its history and its parts.",
    "Write a long dialogue between a teacher and a student about fractions.",
    "Describe a journey through a large city from morning to night in great detail.",
    "Write an essay on how people found out that the Earth goes around the Sun.",
    "Solve: a train leaves at 9 with 60 km/h, another at 10 with 90 km/h. When do they meet? "
    "Check every step.",
    "Write a long list of recipes for a week, each with ingredients and steps.",
    "Tell the history of writing, from clay tablets to computers.",
    "Write a Python program for a library with books, readers and loans, and explain every "
    "function.",
    "Describe the life of a river from its spring to the sea, with everything that lives in it.",
    "Write a play in three acts about two sisters who inherit a bakery.",
    "Explain how the human heart works, what can go wrong with it, and how doctors treat it.",
    "Compare ten musical instruments: how they are built, how they sound, where they are played.",
    "Plan a garden for a whole year, month by month, with plants, tools and mistakes to avoid.",
    "Write letters between a sailor and his daughter over the course of five years.",
    "Explain probability to a beginner with dice, cards and coins, and solve ten exercises.",
    "Tell the story of a village that loses its bridge, from the view of four people who "
    "live there.",
    "Write a guide for a first journey through the mountains: what to pack, where to sleep, what "
    "to fear.",
    "Explain how a computer runs a program, from the source code down to the transistor.",
    "Describe the rules of an invented board game, then play a whole game with comments on "
    "every move.",
    "Write an interview with an astronaut who has come back from a year in space.",
    "Explain the water cycle, the carbon cycle and the nitrogen cycle, and how they depend on "
    "each other.",
    "Write a detective story in which the detective is a retired postman.",
    "List fifty English proverbs; explain each, say where it comes from, and give an example.",
)
FORCED = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Text:
    """A prompt and the tokens that follow it."""

    prompt_ids: list[int]
    token_ids: list[int]


@dataclass(frozen=True)
class Judged:
    """Of each text, the negative log-likelihood of each token and the most probable token there."""

    losses: list[torch.Tensor]
    most_probable: list[torch.Tensor]
    compressions: int = 0


class Teacher(StepSampler):
    """A sampler that returns the tokens of text n for request n and notes the model's logits.

    Notes stay on the device, so that a step waits for nothing; `judged` copies them to the host.
    """

    def give(self, texts: Sequence[Text]) -> None:
        """Set the texts, before the first step."""
        self._lengths = [len(text.token_ids) for text in texts]
        self._starts = [0, *accumulate(self._lengths)]
        self._texts = sent([token for text in texts for token in text.token_ids], self._device)
        self._losses = torch.full(self._texts.shape, math.nan, device=self._device)
        self._most_probable = torch.full_like(self._texts, -1)

    def plain(self, numbers: Sequence[int]) -> bool:
        """Return False: the sampler looks at every row."""
        return False

    def sample(
        self, logits: torch.Tensor, numbers: Sequence[int], probable: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the next tokens of the texts."""
        places = sent(
            [self._starts[number] + self._place(number) for number in numbers], self._device
        )
        given = self._texts[places]
        wide = logits.float()
        losses = wide.logsumexp(dim=-1) - wide.gather(-1, given[:, None])[:, 0]
        self._losses.index_copy_(0, places, losses)
        self._most_probable.index_copy_(0, places, self.most_probable(logits))
        return given

    def judged(self, compressions: int) -> Judged:
        """Return all notes; waits for the device."""
        losses, tokens = self._losses.cpu(), self._most_probable.cpu()
        return Judged(
            list(losses.split(self._lengths)), list(tokens.split(self._lengths)), compressions
        )


def prompts_of(loaded: LoadedModel, num_texts: int) -> list[list[int]]:
    """Return the first questions in the model's chat template.

    Raises ModelError when the model has no tokenizer or no template.
    """
    if loaded.tokenizer is None:
        raise ModelError(
            f"model {loaded.config.name!r} has no tokenizer, so it cannot answer the questions"
        )
    return [
        loaded.tokenizer.chat([{"role": "user", "content": text}]) for text in QUESTIONS[:num_texts]
    ]


def write_texts(
    settings: EngineSettings,
    loaded: LoadedModel,
    prompts: Sequence[list[int]],
    length: int,
    seed: int,
) -> list[Text]:
    """Return the model's answers with full KV.

    Args:
        settings: the engine's settings.
        loaded: the model.
        prompts: token ids of the prompts.
        length: tokens of each text.
        seed: text n is drawn with `seed` + n.
    """
    llm = LLM(loaded=loaded, **vars(replace(settings, policy="full-kv")))
    params = [
        SamplingParams(
            temperature=0.8, top_p=0.95, seed=seed + n, max_tokens=length, ignore_eos=True
        )
        for n in range(len(prompts))
    ]
    return [
        Text(r.prompt_token_ids, r.outputs[0].token_ids)
        for r in llm.generate(list(prompts), params)
    ]


def judge(
    settings: EngineSettings,
    loaded: LoadedModel,
    texts: Sequence[Text],
    stop_at_s: float = math.inf,
) -> Judged:
    """Feed the texts through an engine and return what the model says of them.

    Args:
        settings: the engine's settings, with the policy.
        loaded: the model.
        texts: the texts.
        stop_at_s: a time of `time.perf_counter`.

    Raises:
        TimeoutError: the time is over.
    """
    # the parts of an engine refer to one another, so the last one may still hold its cache
    gc.collect()
    engine = Engine.create(settings, loaded, make_sampler=Teacher)
    teacher = engine.sampler
    assert isinstance(teacher, Teacher)
    teacher.give(texts)
    sequences = []
    for place, text in enumerate(texts):
        length = len(text.token_ids)
        asked = TraceRequest(str(place), len(text.prompt_ids), length, max_tokens=length)
        sequences.append(engine.submit(asked, text.prompt_ids, FORCED, with_text=False))
    while engine.step():
        if time.perf_counter() >= stop_at_s:
            raise TimeoutError(f"no time to judge {len(texts)} texts under {engine.policy.name}")
    engine.drain()
    for sequence, text in zip(sequences, texts, strict=True):
        assert sequence.output.token_ids == text.token_ids, sequence.request.message
    return teacher.judged(sum(sequence.request.compressions for sequence in sequences))


CONTROL = "random"  # every other scorer is compared with it
MISSING = "-"


@dataclass(frozen=True)
class Mean:
    """A mean over the positions of all texts and its standard error (None for a single text)."""

    value: float
    error: float | None


def mean_over_texts(sums: torch.Tensor, counts: torch.Tensor) -> Mean:
    """Return the mean over positions; text i has `counts[i]` of them with the sum `sums[i]`.

    Positions of one text depend on each other, so texts are the sample: the error is that of a
    ratio of two means over texts (linearised; W. G. Cochran, Sampling Techniques, chapter 6).
    """
    counts = counts.double()
    total = float(counts.sum())
    value = float(sums.sum()) / total
    num_texts = len(sums)
    if num_texts < 2:
        return Mean(value, None)
    rests = sums - value * counts
    return Mean(value, math.sqrt(num_texts / (num_texts - 1) * float((rests**2).sum())) / total)


def first_places(prompt_lengths: Sequence[int], budget: int, block_size: int) -> list[int]:
    """Return for each text the first position whose prediction reads a compressed cache.

    A compression runs once the budget and one block more are full.
    """
    full = -(-budget // block_size) * block_size + block_size
    return [max(full - length + 1, 1) for length in prompt_lengths]


def compare(full: Judged, other: Judged, first_place: Sequence[int]) -> dict[str, Any]:
    """Return figures over each text's positions from `first_place` on.

    They are the perplexity under both, their ratio, and the share of equal most probable tokens;
    `_error` is a standard error over texts. `by_text` has the figures of each text.
    """
    kept = [slice(start, None) for start in first_place]
    full_losses = [losses[part].double() for losses, part in zip(full.losses, kept, strict=True)]
    losses = [losses[part].double() for losses, part in zip(other.losses, kept, strict=True)]
    pairs = zip(full.most_probable, other.most_probable, kept, strict=True)
    equal = torch.tensor([int((one[part] == two[part]).sum()) for one, two, part in pairs])
    counts = torch.tensor([len(part) for part in losses])
    full_sums = torch.stack([part.sum() for part in full_losses])
    sums = torch.stack([part.sum() for part in losses])
    worse = mean_over_texts(sums - full_sums, counts)
    agreement = mean_over_texts(equal.double(), counts)
    return {
        "places": int(counts.sum()),
        "perplexity_full": math.exp(mean_over_texts(full_sums, counts).value),
        "perplexity": math.exp(mean_over_texts(sums, counts).value),
        "ratio": math.exp(worse.value),
        "ratio_error": None if worse.error is None else math.exp(worse.value) * worse.error,
        "greedy_agreement": agreement.value,
        "greedy_agreement_error": agreement.error,
        "by_text": {
            "places": counts.tolist(),
            "loss_full": (full_sums / counts).tolist(),
            "loss": (sums / counts).tolist(),
            "equal": equal.tolist(),
        },
    }


def table(result: Mapping[str, Any]) -> str:
    """Return a result as Markdown: a line on what was measured, then a row a configuration."""
    rows = result["rows"]
    controls = {row["budget"]: row for row in rows if row["scorer"] == CONTROL}
    head = (
        "budget",
        "scorer",
        "places",
        "perplexity of full KV",
        "perplexity",
        "ratio",
        "equal greedy tokens",
        f"texts with less loss than {CONTROL}",
        "compressions",
    )
    lines = [
        _line(head),
        _line(["---"] * len(head)),
        *(_row(row, controls.get(row["budget"])) for row in rows),
    ]
    return "\n".join((_described(result), "", *lines))


def _row(row: Mapping[str, Any], control: Mapping[str, Any] | None) -> str:
    return _line(
        (
            row["budget"],
            row["scorer"],
            f"{row['places']:,}",
            f"{row['perplexity_full']:.3f}",
            f"{row['perplexity']:.3f}",
            f"{row['ratio']:.3f}{_spread(row['ratio_error'], '.3f')}",
            f"{row['greedy_agreement']:.1%}{_spread(row['greedy_agreement_error'], '.1%')}",
            _better(row, control),
            row["compressions"],
        )
    )


def _described(result: Mapping[str, Any]) -> str:
    given, texts = result["arguments"], result["texts"]
    ended = sorted(texts["tokens_before_end"])
    left_out = [f"{each['scorer']} at {each['budget']}" for each in result["left_out"]]
    parts = [
        f"{result['date']}, {result['card']}, {given['model']} in {given['dtype']}, seed "
        f"{given['seed']}: {len(ended)} "
        f"texts of {given['length']:,} tokens, ends of text ignored (the first after "
        f"{ended[len(ended) // 2]:,} tokens "
        f"in the median); blocks of {given['block_size']}, window {given['window']}; "
        f"{result['wall_s']:.0f} s; ± is a "
        "standard error over texts"
    ]
    if left_out:
        parts.append(f"not measured, the time was over: {', '.join(left_out)}")
    return ". ".join(parts) + "."


def _better(row: Mapping[str, Any], control: Mapping[str, Any] | None) -> str:
    if control is None or control is row:
        return MISSING
    pairs = list(zip(row["by_text"]["loss"], control["by_text"]["loss"], strict=True))
    return f"{sum(own < theirs for own, theirs in pairs)} of {len(pairs)}"


def _spread(error: float | None, form: str) -> str:
    return "" if error is None else f" ± {error:{form}}"


def _line(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


# All scorers; `recent` also with the first tokens kept, as in StreamingLLM.
SUBJECTS = (*(scorer.name for scorer in SCORERS), "recent,sink=4")


class ResultError(ValueError):
    """The file is not a result of this benchmark."""


@dataclass(frozen=True)
class Configuration:
    """One scorer at one budget; `scorer` may carry settings of the policy ("recent,sink=4")."""

    budget: int
    scorer: str
    window: int

    @property
    def policy(self) -> str:
        """Return the policy as a command line names it."""
        return f"hybrid:tokens={self.budget},window={self.window},scorer={self.scorer}"

    def check(self, block_size: int) -> None:
        """Raise PolicyError or EngineError if no engine can run it."""
        policy = load_policy(self.policy)
        window = policy.compression.window
        if window > block_size:
            raise EngineError(
                f"a window of {window} tokens does not fit a block of {block_size}, and "
                f"would be cut"
            )
        blocks = policy.budget.floor(block_size)
        assert blocks is not None
        check_settings(settings_for(policy.compression, block_size, 0), block_size, blocks)


@dataclass
class Run:
    """The configurations that were measured, and the result file."""

    result: dict[str, Any]
    out: Path | None
    stop_at_s: float
    began_s: float
    expected_s: float  # of the next configuration: the time of the one before
    rows: list[dict[str, Any]] = field(default_factory=list)

    def judge(
        self,
        configuration: Configuration,
        settings: EngineSettings,
        loaded: LoadedModel,
        texts: Sequence[Text],
        full: Judged,
    ) -> None:
        """Measure one more configuration and keep its row.

        Raises TimeoutError when too little time is left, judged by the configuration before.
        """
        start = time.perf_counter()
        if start + self.expected_s > self.stop_at_s:
            raise TimeoutError(f"the one before took {self.expected_s:.1f} s")
        judged = judge(
            replace(settings, policy=configuration.policy), loaded, texts, self.stop_at_s
        )
        self.expected_s = time.perf_counter() - start
        first = first_places(
            [len(text.prompt_ids) for text in texts], configuration.budget, settings.block_size
        )
        self.rows.append(
            {
                "budget": configuration.budget,
                "scorer": configuration.scorer,
                "compressions": judged.compressions,
            }
            | compare(full, judged, first)
            | {"wall_s": self.expected_s}
        )
        shown = {name: value for name, value in self.rows[-1].items() if name != "by_text"}
        print(json.dumps(shown), flush=True)

    def write(self, left_out: Sequence[Configuration]) -> dict[str, Any]:
        """Write the result so far to the file, if there is one, and return it."""
        rest = [{"budget": each.budget, "scorer": each.scorer} for each in left_out]
        found = self.result | {
            "wall_s": time.perf_counter() - self.began_s,
            "left_out": rest,
            "rows": self.rows,
        }
        if self.out is not None:
            unfinished = self.out.with_name(f"{self.out.name}.part")
            unfinished.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            unfinished.replace(self.out)
        return found


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure all configurations, as far as the time allows.

    Raises EngineError, PolicyError or TimeoutError.
    """
    began = time.perf_counter()
    stop_at_s = math.inf if given.minutes is None else began + 60.0 * given.minutes
    wanted = [
        Configuration(budget, scorer, given.window)
        for budget in given.budgets
        for scorer in given.scorers
    ]
    for configuration in wanted:
        configuration.check(given.block_size)
    dtype = find_dtype(given.dtype)
    loaded = load_model(
        given.model, device=find_device(given.device), dtype=dtype, variant=given.variant
    )
    prompts = prompts_of(loaded, given.texts)
    for budget in given.budgets:
        if (
            max(first_places([len(prompt) for prompt in prompts], budget, given.block_size))
            >= given.length
        ):
            raise EngineError(
                f"texts of {given.length} tokens (--length) are too short for a budget of {budget}"
            )
    longest = given.length + max(len(prompt) for prompt in prompts)
    settings = EngineSettings(
        model=given.model,
        num_blocks=given.texts * (-(-longest // given.block_size) + 1),
        block_size=given.block_size,
        max_running=given.texts,
        max_model_len=longest,
        device=given.device,
        dtype=dtype,
        kernels=given.kernels,
        variant=given.variant,
        seed=given.seed,
    )
    texts = write_texts(settings, loaded, prompts, given.length, given.seed)
    start = time.perf_counter()
    full = judge(replace(settings, policy="full-kv"), loaded, texts, stop_at_s)
    expected_s = time.perf_counter() - start
    run = Run(
        described(given, texts, loaded.eos_token_ids), given.out, stop_at_s, began, expected_s
    )
    found = run.write(wanted)
    for place, configuration in enumerate(wanted):
        try:
            run.judge(configuration, settings, loaded, texts, full)
        except TimeoutError as error:
            print(
                f"stopped before {configuration.scorer} at {configuration.budget} tokens: {error}",
                flush=True,
            )
            break
        found = run.write(wanted[place + 1 :])
    return found


def described(
    given: argparse.Namespace, texts: Sequence[Text], eos: Sequence[int]
) -> dict[str, Any]:
    """Return the arguments, the machine, and where each text would have ended by itself."""
    ends = [[place for place, token in enumerate(text.token_ids) if token in eos] for text in texts]
    lengths = [
        found[0] if found else len(text.token_ids) for found, text in zip(ends, texts, strict=True)
    ]
    return {
        "what": "quality under compression, teacher-forced on the model's own texts",
        "arguments": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(given).items()
        },
        "card": torch.cuda.get_device_name() if given.device.startswith("cuda") else "CPU",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": time.strftime("%Y-%m-%d"),
        "texts": {
            "prompt_tokens": [len(text.prompt_ids) for text in texts],
            "tokens_before_end": lengths,
        },
    }


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; ends the program with a message when it makes no sense."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2", help="with a chat template; also a folder or a .gguf file"
    )
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024], help="tokens")
    parser.add_argument(
        "--scorers", nargs="+", default=list(SUBJECTS), help="SCORER or SCORER,SETTING=VALUE,..."
    )
    parser.add_argument("--texts", type=int, default=len(QUESTIONS))
    parser.add_argument("--length", type=int, default=2048, help="tokens a text")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", default="float32", help="float32 keeps rounding out of the comparison"
    )
    parser.add_argument(
        "--kernels", choices=list(KERNEL_BACKENDS), help="by default Triton on CUDA"
    )
    parser.add_argument(
        "--variant", choices=list(VARIANTS), help="how the layers run; by default Triton on CUDA"
    )
    parser.add_argument("--minutes", type=float, help="stop by then, with what has been measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--table", type=Path, metavar="FILE.json", help="only print this result as Markdown"
    )
    given = parser.parse_args(words)
    if not 1 <= given.texts <= len(QUESTIONS):
        parser.error(f"--texts {given.texts}: there are 1 to {len(QUESTIONS)}")
    if given.length < 1:
        parser.error(f"--length {given.length}: a text has 1 token or more")
    if given.minutes is not None and not given.minutes > 0:
        parser.error(f"--minutes {given.minutes}: it must be more than 0")
    return given


def table_of(path: Path) -> str:
    """Return a result file as Markdown. Raises ResultError if it is not a result."""
    try:
        return table(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError) as error:
        raise ResultError(f"cannot read {path}: {error}") from error
    except (KeyError, TypeError) as error:
        raise ResultError(f"{path} is no result of this benchmark: {error!r}") from error


def main(words: Sequence[str] | None = None) -> None:
    """Parse, run, write, print the table."""
    given = arguments(words)
    try:
        print(table_of(given.table) if given.table is not None else table(measure(given)))
    except (
        EngineError,
        PolicyError,
        ConfigError,
        KernelInputError,
        ResultError,
        TimeoutError,
    ) as error:
        raise SystemExit(f"benchmarks.quality: {error}") from error


if __name__ == "__main__":
    main()

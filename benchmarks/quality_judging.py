"""A model's own texts, written with full KV, and what a model under compression says of each of their tokens."""

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from engine.build import EngineSettings, build_engine
from engine.errors import ModelError
from engine.llm import LLM
from engine.loading import LoadedModel
from engine.sampling import StepSampler
from engine.sampling_params import SamplingParams
from engine.submitting import submit
from engine.transfer import sent
from traces.workload import TraceRequest

QUESTIONS = (
    "Tell a long story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain step by step how a steam engine works, with its history and its parts.",
    "Write a long dialogue between a teacher and a student about fractions.",
    "Describe a journey through a large city from morning to night in great detail.",
    "Write an essay on how people found out that the Earth goes around the Sun.",
    "Solve: a train leaves at 9 with 60 km/h, another at 10 with 90 km/h. When do they meet? Check every step.",
    "Write a long list of recipes for a week, each with ingredients and steps.",
    "Tell the history of writing, from clay tablets to computers.",
    "Write a Python program for a library with books, readers and loans, and explain every function.",
    "Describe the life of a river from its spring to the sea, with everything that lives in it.",
    "Write a play in three acts about two sisters who inherit a bakery.",
    "Explain how the human heart works, what can go wrong with it, and how doctors treat it.",
    "Compare ten musical instruments: how they are built, how they sound, where they are played.",
    "Plan a garden for a whole year, month by month, with plants, tools and mistakes to avoid.",
    "Write letters between a sailor and his daughter over the course of five years.",
    "Explain probability to a beginner with dice, cards and coins, and solve ten exercises.",
    "Tell the story of a village that loses its bridge, from the view of four people who live there.",
    "Write a guide for a first journey through the mountains: what to pack, where to sleep, what to fear.",
    "Explain how a computer runs a program, from the source code down to the transistor.",
    "Describe the rules of an invented board game, then play a whole game with comments on every move.",
    "Write an interview with an astronaut who has come back from a year in space.",
    "Explain the water cycle, the carbon cycle and the nitrogen cycle, and how they depend on each other.",
    "Write a detective story in which the detective is a retired postman.",
    "List fifty English proverbs; explain each, say where it comes from, and give an example.",
)
FORCED = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Text:
    """A prompt and what followed it."""

    prompt_ids: list[int]
    token_ids: list[int]


@dataclass(frozen=True)
class Judged:
    """By text: negative log-likelihood of each of its tokens, and the most probable token in its place."""

    losses: list[torch.Tensor]
    most_probable: list[torch.Tensor]
    compressions: int = 0


class Teacher(StepSampler):
    """Gives request n the tokens of text n, whatever the model says, and notes on the device what it says.

    A step sends the places of its rows and waits for nothing; `judged` brings everything to the host at the end.
    """

    def give(self, texts: Sequence[Text]) -> None:
        """The texts; before the first step."""
        self._lengths = [len(text.token_ids) for text in texts]
        self._starts = [0, *accumulate(self._lengths)]
        self._told = sent([token for text in texts for token in text.token_ids], self._device)
        self._losses = torch.full(self._told.shape, math.nan, device=self._device)
        self._most_probable = torch.full_like(self._told, -1)

    def plain(self, numbers: Sequence[int]) -> bool:
        """Never: every row is looked at."""
        return False

    def sample(self, logits: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """The texts' next tokens."""
        places = sent([self._starts[number] + self._place(number) for number in numbers], self._device)
        told = self._told[places]
        wide = logits.float()
        losses = wide.logsumexp(dim=-1) - wide.gather(-1, told[:, None])[:, 0]
        self._losses.index_copy_(0, places, losses)
        self._most_probable.index_copy_(0, places, self.most_probable(logits))
        return told

    def judged(self, compressions: int) -> Judged:
        """All that was noted; waits for the device."""
        losses, tokens = self._losses.cpu(), self._most_probable.cpu()
        return Judged(list(losses.split(self._lengths)), list(tokens.split(self._lengths)), compressions)


def prompts_of(loaded: LoadedModel, num_texts: int) -> list[list[int]]:
    """The first questions as the model's chat template puts them. Raises ModelError without tokenizer or template."""
    if loaded.tokenizer is None:
        raise ModelError(f"model {loaded.config.name!r} has no tokenizer, so it cannot be asked anything")
    return [loaded.tokenizer.chat([{"role": "user", "content": text}]) for text in QUESTIONS[:num_texts]]


def write_texts(
    settings: EngineSettings, loaded: LoadedModel, prompts: Sequence[list[int]], length: int, seed: int
) -> list[Text]:
    """What the model answers with full KV, `length` tokens each; text n is drawn with seed + n."""
    llm = LLM(loaded=loaded, **vars(replace(settings, policy="full-kv")))
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=seed + n, max_tokens=length, ignore_eos=True)
        for n in range(len(prompts))
    ]
    return [Text(r.prompt_token_ids, r.outputs[0].token_ids) for r in llm.generate(list(prompts), params)]


def judge(settings: EngineSettings, loaded: LoadedModel, texts: Sequence[Text], stop_at_s: float = math.inf) -> Judged:
    """Feed the texts through an engine under a policy. Raises TimeoutError at `stop_at_s` of `time.perf_counter`."""
    gc.collect()  # parts of an engine hold each other; the one before may still hold a cache on the device
    engine = build_engine(settings, loaded, make_sampler=Teacher)
    teacher = engine.sampler
    assert isinstance(teacher, Teacher)
    teacher.give(texts)
    sequences = []
    for place, text in enumerate(texts):
        length = len(text.token_ids)
        asked = TraceRequest(str(place), len(text.prompt_ids), length, max_tokens=length)
        sequences.append(submit(engine, asked, text.prompt_ids, FORCED, with_text=False))
    while engine.loop.step():
        if time.perf_counter() >= stop_at_s:
            raise TimeoutError(f"no time to judge {len(texts)} texts under {engine.policy.name}")
    engine.loop.drain()
    for sequence, text in zip(sequences, texts, strict=True):
        assert sequence.output.token_ids == text.token_ids, sequence.request.message
    return teacher.judged(sum(sequence.request.compressions for sequence in sequences))

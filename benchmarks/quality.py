"""What compression costs a model's predictions: `python -m benchmarks.quality --out FILE.json`.

Texts are generated once with full KV (seeded), then fed to the engine again, token by token, under every scorer and
budget: the decode path with its compressions as in serving, but for the next token, which is the text's. For every
place the negative log-likelihood of the text's token and the most probable token are noted. Figures are over the places
behind the first compression of that budget, where full KV is judged on the same places. Perplexity of full KV on its
own samples is low by nature; what counts is the ratio.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.build import EngineSettings, build_engine
from engine.llm import LLM
from engine.loading import LoadedModel, load_model
from engine.sampling import StepSampler
from engine.sampling_params import SamplingParams
from engine.scorers import SCORERS
from engine.submitting import submit
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
)


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


class Teacher(StepSampler):
    """Gives every request the tokens of its text, whatever the model says, and notes what it says."""

    texts: Sequence[Text] = ()

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._noted: list[tuple[list[tuple[int, int]], torch.Tensor, torch.Tensor]] = []

    def plain(self, numbers: Sequence[int]) -> bool:
        """Never: every row is looked at."""
        return False

    def sample(self, logits: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """The texts' next tokens."""
        places = [(number, self._place(number)) for number in numbers]
        told = torch.tensor([self.texts[number].token_ids[place] for number, place in places], device=logits.device)
        wide = torch.log_softmax(logits.float(), dim=-1)
        self._noted.append((places, -wide.gather(-1, told[:, None])[:, 0], logits.argmax(dim=-1)))
        return told

    def judged(self) -> Judged:
        """All that was noted."""
        losses = [torch.full((len(text.token_ids),), math.nan) for text in self.texts]
        tokens = [torch.full((len(text.token_ids),), -1) for text in self.texts]
        for places, loss, most in self._noted:
            for (number, place), value, token in zip(places, loss.tolist(), most.tolist(), strict=True):
                losses[number][place], tokens[number][place] = value, token
        return Judged(losses, tokens)


def write_texts(settings: EngineSettings, loaded: LoadedModel, num_texts: int, length: int, seed: int) -> list[Text]:
    """Texts of the model's own, with full KV."""
    llm = LLM(loaded=loaded, **vars(replace(settings, policy="full-kv")))
    prompts = llm.chat_prompts([[{"role": "user", "content": question}] for question in QUESTIONS[:num_texts]])
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=seed + n, max_tokens=length, ignore_eos=True)
        for n in range(num_texts)
    ]
    return [Text(r.prompt_token_ids, r.outputs[0].token_ids) for r in llm.generate(prompts, params)]


def judge(settings: EngineSettings, loaded: LoadedModel, texts: Sequence[Text]) -> tuple[Judged, int]:
    """Feed the texts through the engine under a policy; also the number of compressions."""
    engine = build_engine(settings, loaded, make_sampler=Teacher)
    teacher = engine.sampler
    assert isinstance(teacher, Teacher)
    teacher.texts = texts
    forced = SamplingParams(temperature=0.0, ignore_eos=True)
    sequences = []
    for place, text in enumerate(texts):
        length = len(text.token_ids)
        asked = TraceRequest(str(place), len(text.prompt_ids), length, max_tokens=length)
        sequences.append(submit(engine, asked, text.prompt_ids, forced, with_text=False))
    while engine.loop.step():
        pass
    engine.loop.drain()
    for sequence, text in zip(sequences, texts, strict=True):
        assert sequence.output.token_ids == text.token_ids, sequence.request.message
    return teacher.judged(), sum(sequence.request.compressions for sequence in sequences)


def compare(full: Judged, other: Judged, texts: Sequence[Text], first_place: Sequence[int]) -> dict[str, float]:
    """Figures over the places from `first_place` on: perplexities, their ratio, share of equal most probable tokens."""
    kept = [slice(start, None) for start in first_place]
    losses = [torch.cat([x[part] for x, part in zip(one.losses, kept, strict=True)]) for one in (full, other)]
    tokens = [torch.cat([x[part] for x, part in zip(one.most_probable, kept, strict=True)]) for one in (full, other)]
    nll_full, nll = (float(loss.double().mean()) for loss in losses)
    return {
        "places": len(losses[0]),
        "perplexity_full": math.exp(nll_full),
        "perplexity": math.exp(nll),
        "ratio": math.exp(nll - nll_full),
        "greedy_agreement": float((tokens[0] == tokens[1]).double().mean()),
    }


def first_places(texts: Sequence[Text], budget: int, block_size: int) -> list[int]:
    """For each text the first place whose prediction reads a compressed cache: its budget and one block are full."""
    full = -(-budget // block_size) * block_size + block_size
    return [max(full - len(text.prompt_ids) + 1, 1) for text in texts]


def main() -> None:
    """Parse, run, write, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--scorers", nargs="+", default=sorted(scorer.name for scorer in SCORERS))
    parser.add_argument("--texts", type=int, default=len(QUESTIONS))
    parser.add_argument("--length", type=int, default=2048, help="tokens a text")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", help="float32 keeps rounding out of the comparison")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not 1 <= given.texts <= len(QUESTIONS):
        raise SystemExit(f"--texts {given.texts}: there are 1 to {len(QUESTIONS)}")
    blocks = given.texts * (-(-(given.length + 128) // given.block_size) + 1)
    settings = EngineSettings(
        model=given.model, num_blocks=blocks, block_size=given.block_size, max_running=given.texts,
        max_model_len=given.length + 128, device=given.device, dtype=given.dtype, seed=given.seed,
    )  # fmt: skip
    began = time.perf_counter()
    loaded = load_model(given.model, device=given.device, dtype=getattr(torch, given.dtype))
    texts = write_texts(settings, loaded, given.texts, given.length, given.seed)
    full, _ = judge(replace(settings, policy="full-kv"), loaded, texts)
    rows = []
    for budget in given.budgets:
        first = first_places(texts, budget, given.block_size)
        if max(first) >= given.length:
            raise SystemExit(f"--length {given.length} is too short for a budget of {budget}")
        for scorer in given.scorers:
            policy = f"hybrid:tokens={budget},window={given.window},scorer={scorer}"
            judged, compressions = judge(replace(settings, policy=policy), loaded, texts)
            rows.append({"budget": budget, "scorer": scorer, "compressions": compressions}
                        | compare(full, judged, texts, first))  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    result = {
        "what": "quality under compression, teacher-forced on the model's own texts",
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()},
        "card": torch.cuda.get_device_name() if given.device.startswith("cuda") else "CPU",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": time.strftime("%Y-%m-%d"),
        "wall_s": time.perf_counter() - began,
        "rows": rows,
    }
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print_table(rows)


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """As Markdown, for docs/LOG.md."""
    print("\n| budget | scorer | perplexity (full KV) | perplexity | ratio | greedy agreement | compressions |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['budget']} | {row['scorer']} | {row['perplexity_full']:.3f} | {row['perplexity']:.3f} | "
            f"{row['ratio']:.3f} | {row['greedy_agreement']:.1%} | {row['compressions']} |"
        )


if __name__ == "__main__":
    main()

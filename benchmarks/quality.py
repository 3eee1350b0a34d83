"""What compression costs a model's predictions: `python -m benchmarks.quality --out FILE.json`.

Texts are generated once with full KV (seeded), then fed to the engine again, token by token, under every scorer and
budget: the decode path with its compressions as in serving, but for the next token, which is the text's. For every
place the negative log-likelihood of the text's token and the most probable token are noted. Figures are over the places
behind the first compression of that budget, where full KV is judged on the same places. Perplexity of full KV on its
own samples is low by nature; what counts is the ratio.

The smallest budget comes first, under all scorers; the file is written after each of them, so that a run that is cut
short (`--minutes`) leaves what it has measured. `--table FILE.json` prints a result as Markdown.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality_figures import compare, first_places, table
from benchmarks.quality_judging import QUESTIONS, Judged, Text, judge, prompts_of, write_texts
from engine.build import EngineSettings, find_device, find_dtype
from engine.compressing import check_settings, settings_for
from engine.errors import EngineError
from engine.kernels.choice import KERNEL_SETS
from engine.kernels.errors import KernelInputError
from engine.loading import LoadedModel, load_model
from engine.scorers import SCORERS
from engine.variants import VARIANTS
from policies.core.errors import ConfigError
from policies.spec import PolicyError, load_policy

# All there are; the latest tokens alone, and again with the first ones kept as StreamingLLM does.
SUBJECTS = (*(scorer.name for scorer in SCORERS), "recent,sink=4")


class ResultError(ValueError):
    """A file that is no result of this benchmark."""


@dataclass(frozen=True)
class Configuration:
    """One scorer at one budget; `scorer` may bring settings of the policy with it ("recent,sink=4")."""

    budget: int
    scorer: str
    window: int

    @property
    def policy(self) -> str:
        """As a command line names it."""
        return f"hybrid:tokens={self.budget},window={self.window},scorer={self.scorer}"

    def check(self, block_size: int) -> None:
        """Raise PolicyError or EngineError where no engine could run it."""
        policy = load_policy(self.policy)
        window = policy.compression.window
        if window > block_size:
            raise EngineError(f"a window of {window} tokens does not fit a block of {block_size}, and would be cut")
        blocks = policy.budget.floor(block_size)
        assert blocks is not None
        check_settings(settings_for(policy.compression, block_size, 0), block_size, blocks)


@dataclass
class Run:
    """What is measured one after the other, and the file that says so."""

    result: dict[str, Any]
    out: Path | None
    stop_at_s: float
    began_s: float
    expected_s: float  # what the next one will take: what the one before took
    rows: list[dict[str, Any]] = field(default_factory=list)

    def judge(
        self, configuration: Configuration, settings: EngineSettings, loaded: LoadedModel, texts: Sequence[Text],
        full: Judged,
    ) -> None:  # fmt: skip
        """Measure one more, and write it down. Raises TimeoutError where there is, or may be, no time left for it."""
        start = time.perf_counter()
        if start + self.expected_s > self.stop_at_s:
            raise TimeoutError(f"the one before took {self.expected_s:.1f} s")
        judged = judge(replace(settings, policy=configuration.policy), loaded, texts, self.stop_at_s)
        self.expected_s = time.perf_counter() - start
        first = first_places([len(text.prompt_ids) for text in texts], configuration.budget, settings.block_size)
        self.rows.append(
            {"budget": configuration.budget, "scorer": configuration.scorer, "compressions": judged.compressions}
            | compare(full, judged, first)
            | {"wall_s": self.expected_s}
        )
        shown = {name: value for name, value in self.rows[-1].items() if name != "by_text"}
        print(json.dumps(shown), flush=True)

    def write(self, left_out: Sequence[Configuration]) -> dict[str, Any]:
        """The result so far, in the file if there is one."""
        rest = [{"budget": each.budget, "scorer": each.scorer} for each in left_out]
        found = self.result | {"wall_s": time.perf_counter() - self.began_s, "left_out": rest, "rows": self.rows}
        if self.out is not None:
            unfinished = self.out.with_name(f"{self.out.name}.part")
            unfinished.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            unfinished.replace(self.out)
        return found


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for, as far as there is time. Raises EngineError, PolicyError or TimeoutError."""
    began = time.perf_counter()
    stop_at_s = math.inf if given.minutes is None else began + 60.0 * given.minutes
    wanted = [Configuration(budget, scorer, given.window) for budget in given.budgets for scorer in given.scorers]
    for configuration in wanted:
        configuration.check(given.block_size)
    dtype = find_dtype(given.dtype)
    loaded = load_model(given.model, device=find_device(given.device), dtype=dtype, variant=given.variant)
    prompts = prompts_of(loaded, given.texts)
    for budget in given.budgets:
        if max(first_places([len(prompt) for prompt in prompts], budget, given.block_size)) >= given.length:
            raise EngineError(f"texts of {given.length} tokens (--length) are too short for a budget of {budget}")
    longest = given.length + max(len(prompt) for prompt in prompts)
    settings = EngineSettings(
        model=given.model, num_blocks=given.texts * (-(-longest // given.block_size) + 1), block_size=given.block_size,
        max_running=given.texts, max_model_len=longest, device=given.device, dtype=dtype, kernels=given.kernels,
        variant=given.variant, seed=given.seed,
    )  # fmt: skip
    texts = write_texts(settings, loaded, prompts, given.length, given.seed)
    start = time.perf_counter()
    full = judge(replace(settings, policy="full-kv"), loaded, texts, stop_at_s)
    expected_s = time.perf_counter() - start
    run = Run(described(given, texts, loaded.eos_token_ids), given.out, stop_at_s, began, expected_s)
    found = run.write(wanted)
    for place, configuration in enumerate(wanted):
        try:
            run.judge(configuration, settings, loaded, texts, full)
        except TimeoutError as error:
            print(f"stopped before {configuration.scorer} at {configuration.budget} tokens: {error}", flush=True)
            break
        found = run.write(wanted[place + 1 :])
    return found


def described(given: argparse.Namespace, texts: Sequence[Text], eos: Sequence[int]) -> dict[str, Any]:
    """What was asked, on what, and where the texts would have ended by themselves."""
    ends = [[place for place, token in enumerate(text.token_ids) if token in eos] for text in texts]
    lengths = [found[0] if found else len(text.token_ids) for found, text in zip(ends, texts, strict=True)]
    return {
        "what": "quality under compression, teacher-forced on the model's own texts",
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()},
        "card": torch.cuda.get_device_name() if given.device.startswith("cuda") else "CPU",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": time.strftime("%Y-%m-%d"),
        "texts": {"prompt_tokens": [len(text.prompt_ids) for text in texts], "tokens_before_end": lengths},
    }


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line; leaves with a message where it makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="with a chat template; also a folder or a .gguf file")
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024], help="tokens")
    parser.add_argument("--scorers", nargs="+", default=list(SUBJECTS), help="SCORER or SCORER,SETTING=VALUE,...")
    parser.add_argument("--texts", type=int, default=len(QUESTIONS))
    parser.add_argument("--length", type=int, default=2048, help="tokens a text")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", help="float32 keeps rounding out of the comparison")
    parser.add_argument("--kernels", choices=list(KERNEL_SETS), help="by default Triton on CUDA")
    parser.add_argument("--variant", choices=list(VARIANTS), help="how the layers run; by default Triton on CUDA")
    parser.add_argument("--minutes", type=float, help="stop by then, with what has been measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, metavar="FILE.json", help="only print this result as Markdown")
    given = parser.parse_args(words)
    if not 1 <= given.texts <= len(QUESTIONS):
        parser.error(f"--texts {given.texts}: there are 1 to {len(QUESTIONS)}")
    if given.length < 1:
        parser.error(f"--length {given.length}: a text has 1 token or more")
    if given.minutes is not None and not given.minutes > 0:
        parser.error(f"--minutes {given.minutes}: it must be more than 0")
    return given


def table_of(path: Path) -> str:
    """A result's file as Markdown. Raises ResultError where it is none."""
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
    except (EngineError, PolicyError, ConfigError, KernelInputError, ResultError, TimeoutError) as error:
        raise SystemExit(f"benchmarks.quality: {error}") from error


if __name__ == "__main__":
    main()

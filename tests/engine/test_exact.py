"""SmolLM2 in float32: the own decoder's greedy tokens are those of `transformers.generate`, one by
one.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers

from tests.engine.kernel_cases import DenseContext
from zlab.engine.model.loader import BUNDLED_PACKAGE, LoadedModel, bundled_gguf, load_model
from zlab.engine.model.transformers_model import TransformersModel

gguf = pytest.importorskip("gguf")

pytestmark = pytest.mark.skipif(
    find_spec(BUNDLED_PACKAGE) is None, reason=f"{BUNDLED_PACKAGE} is not installed"
)

NUM_NEW = 20
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea, there lived a clockmaker who",
    "1, 2, 3, 5, 8, 13,",
    "Zürich, Genève und 東京 sind",
)
QUESTION = "Name three primary colours, one a line."


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("smollm2", dtype=torch.float32)


@pytest.fixture(scope="module")
def oracle() -> transformers.PreTrainedModel:
    path = bundled_gguf()
    with pytest.MonkeyPatch.context() as patch:
        # Transformers parses the file's header several times over, seconds each.
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
        return _load(path)


def _load(path: Path) -> transformers.PreTrainedModel:
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()  # type: ignore[no-untyped-call, no-any-return]


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    assert loaded.tokenizer is not None
    texts = [loaded.tokenizer.encode(text) for text in TEXTS]
    return [*texts, loaded.tokenizer.chat([{"role": "user", "content": QUESTION}])]


@pytest.fixture(scope="module")
def expected(oracle: transformers.PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = oracle.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_NEW
            )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def greedy(loaded: LoadedModel, prompts: list[list[int]], chunk: int) -> list[list[int]]:
    """All prompts together, each prefilled `chunk` tokens a step while those that are through
    decode.
    """
    context = DenseContext(loaded.config.num_layers, len(prompts))
    waiting = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)
    outputs: list[list[int]] = [[] for _ in prompts]
    while any(waiting):
        rows = [
            (number, min(chunk, len(tokens))) for number, tokens in enumerate(waiting) if tokens
        ]
        ids = [token for number, count in rows for token in waiting[number][:count]]
        positions = [done[number] + place for number, count in rows for place in range(count)]
        ends = torch.tensor([count for _, count in rows]).cumsum(0) - 1
        context.begin(rows)
        with torch.inference_mode():
            hidden = loaded.model.forward(torch.tensor(ids), torch.tensor(positions), context, ends)
            drawn = loaded.model.logits(hidden).argmax(dim=-1).tolist()
        for (number, count), token in zip(rows, drawn, strict=True):
            done[number] += count
            waiting[number] = waiting[number][count:]
            if not waiting[number]:
                outputs[number].append(token)
                if token not in loaded.eos_token_ids and len(outputs[number]) < NUM_NEW:
                    waiting[number] = [token]
    return outputs


@pytest.mark.parametrize("chunk", [7, 1000])
def test_greedy_tokens_equal_generate(
    chunk: int, loaded: LoadedModel, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert loaded.eos_token_ids == (2,)
    assert any(output[-1] == 2 for output in expected) or all(
        len(output) == NUM_NEW for output in expected
    )
    assert greedy(loaded, prompts, chunk) == expected


def test_alone_as_together(
    loaded: LoadedModel, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert greedy(loaded, prompts[2:3], 5) == expected[2:3]


def test_logits_and_the_fallback_agree(
    loaded: LoadedModel, oracle: transformers.PreTrainedModel, prompts: list[list[int]]
) -> None:
    ids = torch.tensor(prompts[2])
    with torch.inference_mode():
        wanted = oracle(ids[None]).logits[0]
        found = []
        for model in (
            loaded.model,
            TransformersModel(oracle, loaded.config),
        ):  # last: it takes the oracle over
            context = DenseContext(loaded.config.num_layers, 1)
            context.begin([(0, len(ids))])
            found.append(model.logits(model.forward(ids, torch.arange(len(ids)), context)))
    for logits in found:
        torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=2e-3)

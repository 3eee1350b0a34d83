"""Full KV is exact: SmolLM2's greedy tokens through the engine are those of
`transformers.generate`, one by one.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers

from tests.engine.engine_cases import Watched, request, watched
from zlab.engine.engine import EngineSettings
from zlab.engine.model.loader import BUNDLED_PACKAGE, LoadedModel, bundled_gguf, load_model
from zlab.traces.schema import EventKind

gguf = pytest.importorskip("gguf")

pytestmark = pytest.mark.skipif(
    find_spec(BUNDLED_PACKAGE) is None, reason=f"{BUNDLED_PACKAGE} is not installed"
)

NUM_NEW = 9
SHARED = (
    "You are a patient teacher. Answer briefly, in plain words, and give one example that a "
    "child would know. "
)
QUESTIONS = (
    "Why is the sky blue?", "What is a prime number?", "How do birds fly?", "Who was Ada Lovelace?",
    "What does a heart do?", "Why do leaves fall?", "What is money for?", "How is glass made?",
    "What is a verb?", "Where does rain come from?",
)  # fmt: skip
TEXTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "def add(a, b):\n    return",
    "1, 1, 2, 3, 5, 8,",
    "Water boils at",
    "The opposite of hot is",
    "My favourite season is autumn, because",
    "In 1969, the first man",
    "Zürich, Genève und 東京 sind",
    "To be, or not to be, that is",
)
SETTINGS = EngineSettings(
    model="smollm2",
    num_blocks=64,
    block_size=8,
    max_batched_tokens=512,
    max_running=32,
    max_model_len=96,
    device="cpu",
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("smollm2", dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> dict[str, list[int]]:
    assert loaded.tokenizer is not None
    texts = [*(SHARED + question for question in QUESTIONS), *TEXTS]
    return {f"p{place}": loaded.tokenizer.encode(text) for place, text in enumerate(texts)}


@pytest.fixture(scope="module")
def expected(prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "GGUFReader",
            "get_tensor_name_map",
        ):  # transformers asks for them over and over, seconds each
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        oracle: Any = transformers.AutoModelForCausalLM.from_pretrained(
            bundled_gguf().parent, gguf_file=bundled_gguf().name, dtype=torch.float32
        )
    found = {}
    for id, ids in prompts.items():
        given = torch.tensor([ids])
        whole = oracle.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=NUM_NEW,
            eos_token_id=None,
            pad_token_id=0,
        )
        found[id] = whole[0, len(ids) :].tolist()
    return found


def answered(run: Watched, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    for id, ids in prompts.items():
        run.submit(request(id, ids, NUM_NEW))
    run.run()
    run.assert_empty()
    return run.tokens()


def start(loaded: LoadedModel, policy: str = "full-kv", **changes: Any) -> Watched:
    return watched(policy, loaded, settings=SETTINGS, **changes)


def test_there_are_twenty(expected: dict[str, list[int]]) -> None:
    assert len(expected) == 20
    assert all(len(tokens) == NUM_NEW for tokens in expected.values())


def test_alone(
    loaded: LoadedModel, prompts: dict[str, list[int]], expected: dict[str, list[int]]
) -> None:
    run = start(loaded)
    for id, ids in prompts.items():
        run.submit(request(id, ids, NUM_NEW))
        run.run()
        assert run.tokens()[id] == expected[id]


@pytest.mark.parametrize("overlap", [True, False])
def test_batched(
    loaded: LoadedModel,
    prompts: dict[str, list[int]],
    expected: dict[str, list[int]],
    overlap: bool,
) -> None:
    run = start(loaded, num_blocks=160, overlap=overlap)
    assert answered(run, prompts) == expected
    assert run.count(EventKind.PREEMPTED) == 0


def test_in_chunks(
    loaded: LoadedModel, prompts: dict[str, list[int]], expected: dict[str, list[int]]
) -> None:
    run = start(loaded, num_blocks=160, max_batched_tokens=21)
    assert answered(run, prompts) == expected
    assert run.count(EventKind.CHUNK) > 30


def test_with_prefix_hits(
    loaded: LoadedModel, prompts: dict[str, list[int]], expected: dict[str, list[int]]
) -> None:
    run = start(loaded, num_blocks=160)
    assert answered(run, prompts) == expected
    assert answered(run, prompts) == expected  # now with whole prompts in the cache
    hits = [sequence.request.hit_tokens for sequence in run.sequences.values()]
    assert sum(hit >= 16 for hit in hits) >= 10


def test_after_preemption_by_recompute(
    loaded: LoadedModel, prompts: dict[str, list[int]], expected: dict[str, list[int]]
) -> None:
    run = start(loaded, "full-kv:prefix=none", num_blocks=16)
    assert answered(run, prompts) == expected
    assert run.count(EventKind.PREEMPTED) > 2
    assert any(sequence.request.recomputed_tokens > 8 for sequence in run.sequences.values())


def test_after_swapping(
    loaded: LoadedModel, prompts: dict[str, list[int]], expected: dict[str, list[int]]
) -> None:
    run = start(loaded, "full-kv:comes_back=swap,prefix=none", num_blocks=16, host_blocks=64)
    assert answered(run, prompts) == expected
    assert run.count(EventKind.SWAPPED_IN) > 2


def test_a_budget_that_is_never_reached_changes_nothing(
    loaded: LoadedModel, prompts: dict[str, list[int]], expected: dict[str, list[int]]
) -> None:
    run = start(loaded, "hybrid:tokens=88,window=4", num_blocks=160)
    assert answered(run, prompts) == expected
    assert run.count(EventKind.COMPRESSED) == 0

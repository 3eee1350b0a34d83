"""The quality benchmark measures what it says: full KV's losses are the model's own."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.quality import Text, compare, first_places, judge
from engine.loading import load_model
from tests.engine.engine_cases import SMALL, prompt
from tests.engine.tiny_models import save_tiny

TEXTS = [Text(prompt(n, 5 + n), prompt(n + 10, 60)) for n in range(3)]


def test_losses_are_those_of_transformers(tmp_path: Path) -> None:
    oracle = save_tiny("qwen3", tmp_path, seed=3)
    loaded = load_model(str(tmp_path))
    full, none = judge(replace(SMALL, policy="full-kv", num_blocks=100, max_model_len=200), loaded, TEXTS)
    assert none == 0
    for text, losses, most in zip(TEXTS, full.losses, full.most_probable, strict=True):
        ids = torch.tensor([text.prompt_ids + text.token_ids])
        with torch.no_grad():
            logits = oracle(ids).logits[0, len(text.prompt_ids) - 1 : -1]
        wanted = torch.nn.functional.cross_entropy(logits, ids[0, len(text.prompt_ids) :], reduction="none")
        torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(most, logits.argmax(dim=-1))
    budgets = {}
    for tokens in (24, 72):
        policy = f"hybrid:tokens={tokens},window=4"
        judged, compressions = judge(replace(SMALL, policy=policy, num_blocks=100, max_model_len=200), loaded, TEXTS)
        assert (compressions > 0) == (tokens == 24)
        budgets[tokens] = judged
    first = first_places(TEXTS, 24, SMALL.block_size)
    for text, start, one, other in zip(TEXTS, first, full.losses, budgets[24].losses, strict=True):
        assert len(text.prompt_ids) + start == 33
        torch.testing.assert_close(one[:start], other[:start], rtol=1e-4, atol=1e-4)
        assert abs(float(one[start] - other[start])) > 1e-3, "from here on it reads a compressed cache"
    same = compare(full, budgets[72], TEXTS, first)
    assert same["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert same["greedy_agreement"] == 1.0
    small = compare(full, budgets[24], TEXTS, first)
    assert small["greedy_agreement"] < 1.0
    assert small["places"] == sum(60 - start for start in first)

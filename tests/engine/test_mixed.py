"""Steps with chunks, padded as graphs have them: the same tokens, cache and decisions as without
padding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.engine_cases import GREEDY, SMALL, mixed, play, prompt, request, tiny
from zlab.engine.engine import Engine, EngineSettings
from zlab.engine.input_batch import MixedSizes, TokenIds, sizes_of
from zlab.engine.model_runner import (
    GRAPH_TOKENS,
    MOST_CHUNKS,
    Decoded,
    MixedSteps,
    smallest_with_room,
)
from zlab.engine.sampling_params import SamplingParams
from zlab.policies.core.plan import PrefillChunk

DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=2, ignore_eos=True)


class Padded:
    """Steps as a graph would run them, without one; counts them by the size that they were padded
    to.
    """

    def __init__(self, most_decodes: int) -> None:
        self.most_decodes = most_decodes
        self.num_steps: dict[int, int] = {}
        self.largest_decodes = 0

    def run(
        self,
        steps: MixedSteps,
        chunks: Sequence[PrefillChunk],
        token_ids: TokenIds,
        decode_rows: Sequence[int],
        row_of: Mapping[int, int],
        most_tokens: int,
    ) -> Decoded:
        wanted = sizes_of(chunks, len(decode_rows))
        assert wanted.chunks <= MOST_CHUNKS
        size = next(size for size in GRAPH_TOKENS if size >= wanted.tokens)
        self.num_steps[size] = self.num_steps.get(size, 0) + 1
        self.largest_decodes = max(self.largest_decodes, wanted.decodes)
        packing = steps.packing_of(size, self.most_decodes)
        wide, narrow = packing.fill(chunks, token_ids, decode_rows, row_of)
        return steps.step(
            packing.inputs(torch.from_numpy(wide), torch.from_numpy(narrow)), most_tokens
        )


@pytest.mark.parametrize("params", [GREEDY, DRAWN, PENALISED], ids=["greedy", "drawn", "penalised"])
@pytest.mark.parametrize(
    "policy", ["hybrid:tokens=32,window=4", "full-kv", "full-kv:comes_back=swap", "nano-vllm"]
)
def test_padding_changes_nothing(
    policy: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked prompts, shared prefixes, preemptions; what is free is poisoned all the while."""
    settings = replace(
        SMALL, num_blocks=26, max_batched_tokens=24, host_blocks=16 if "swap" in policy else 0
    )
    requests = mixed(14, seed=2, longest=60)
    plain = play(requests, policy, params, settings=settings)
    padded = Padded(settings.max_running)

    def run(steps: MixedSteps, *arguments: Any) -> Decoded:
        return padded.run(steps, *arguments)

    monkeypatch.setattr(MixedSteps, "run", run)
    again = play(requests, policy, params, settings=settings)
    assert again.tokens() == plain.tokens()
    assert again.engine.scheduler.digest() == plain.engine.scheduler.digest()
    assert sum(padded.num_steps.values()) > 10
    assert (padded.largest_decodes > 3) is (policy != "nano-vllm"), "whose prefill goes alone"


def test_a_step_is_given_the_smallest_graph_that_has_room() -> None:
    steps = Engine.create(replace(SMALL, policy="full-kv"), tiny()).runner._mixed
    packings = {size: steps.packing_of(size, 100) for size in GRAPH_TOKENS[:3]}
    fits = MixedSizes(tokens=70, decodes=64, chunks=3, blocks=2, logits=67)
    assert smallest_with_room(packings, fits) == 128
    assert smallest_with_room(packings, replace(fits, tokens=64, decodes=63)) == 64
    assert smallest_with_room(packings, replace(fits, tokens=192)) == 192
    assert smallest_with_room(packings, replace(fits, tokens=193)) is None
    assert smallest_with_room(packings, replace(fits, chunks=MOST_CHUNKS + 1)) is None
    assert smallest_with_room(packings, replace(fits, decodes=101, tokens=150)) is None
    assert smallest_with_room({}, fits) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_on_a_card_graphs_give_the_tokens_of_steps_without(params: SamplingParams) -> None:
    """Float32, so that a product of other sizes gives the same token."""
    found: list[dict[str, Any]] = []
    for graphs in (True, False):
        settings = EngineSettings(
            "dummy:tiny",
            "hybrid:tokens=32,window=4",
            num_blocks=60,
            block_size=16,
            max_batched_tokens=256,
            max_running=24,
            max_model_len=400,
            device="cuda",
            dtype="float32",
            use_graphs=graphs,
        )
        engine = Engine.create(settings)
        captured = engine.runner._mixed._captured
        assert set(captured) == ({64, 128, 192, 256} if graphs else set())
        sequences = [
            engine.submit(asked, list(asked.prompt_ids or ()), params)
            for asked in [*mixed(30, seed=4), request("long", prompt(7, 200), 40)]
        ]
        while engine.step():
            pass
        engine.drain()
        tokens = {one.request.id: list(one.output.token_ids) for one in sequences}
        found.append({"tokens": tokens, "digest": engine.scheduler.digest()})
    assert found[0] == found[1]

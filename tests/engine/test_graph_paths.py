"""A whole engine that runs its steps by graphs, on the CPU: graphs that repeat what was captured stand in for CUDA's.

What a graph reads and writes lies at fixed places, and is padded to a fixed size: that is tested here. That CUDA
captures the kernels is tested on a card (`test_mixed.py`, `test_engine_replacing.py`). Steps do not overlap: only on
CUDA are a step's tokens copied before the next one can write over them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from engine import decode_graphs, mixed
from engine.build import Engine
from engine.decode_graphs import Captured, Decoded, DecodeGraphs, graph_sizes
from engine.sampling_params import SamplingParams
from tests.engine.engine_cases import GREEDY, SMALL, play, watched
from tests.engine.engine_cases import mixed as mixed_requests

ALONE = replace(SMALL, max_batched_tokens=140, overlap=False)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)


class Repeated:
    """Does again what was captured, with what lies at its inputs by then, and writes over the first results."""

    num_replays = 0

    def __init__(self, step: Callable[[], Decoded]) -> None:
        self._step = step
        self.output = step()

    def replay(self) -> None:
        Repeated.num_replays += 1
        for place, values in zip(self.output, self._step(), strict=True):
            place.copy_(values)


def capture(step: Callable[[], Decoded], stream: object, pool: object) -> Captured:
    graph = Repeated(step)
    return Captured(cast(Any, graph), graph.output)


def give_graphs(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """What `Runner` does at its start on CUDA."""
    patch.setattr(decode_graphs, "capture", capture)
    patch.setattr(mixed, "capture", capture)
    patch.setattr(torch.cuda, "Stream", lambda **more: None)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    runner, limits = engine.runner, engine.limits
    sizes = graph_sizes(limits.max_running)
    runner._graphs = DecodeGraphs(runner._pool_wide, sizes, runner._rows.padding_row, torch.device("cpu"))
    runner._mixed.capture(limits.max_running, limits.max_batched_tokens, 0)
    assert runner.graph_tokens == 128


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("policy", ["hybrid:tokens=32,window=4", "full-kv", "full-kv:comes_back=swap", "nano-vllm"])
def test_an_engine_with_graphs_says_what_one_without_says(
    policy: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several chunks, shared prefixes, preemptions, compressions; free blocks are poisoned all the while."""
    host_blocks = 16 if "swap" in policy else 0
    settings = replace(ALONE, num_blocks=26, host_blocks=host_blocks)
    requests = mixed_requests(14, seed=2, longest=60)
    plain = play(requests, policy, params, settings=settings)
    run = watched(policy, settings=settings)
    give_graphs(run.engine, monkeypatch)
    Repeated.num_replays = 0
    for asked in requests:
        run.submit(asked, params)
    run.run()
    run.assert_empty()
    assert run.tokens() == plain.tokens()
    assert run.engine.scheduler.digest() == plain.engine.scheduler.digest()
    assert Repeated.num_replays > run.num_steps // 2


def test_a_step_that_reads_more_than_the_pool_has_is_run_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that share blocks may: a graph is laid out for as many tokens as there are in the pool."""
    run = watched("full-kv", settings=ALONE)
    give_graphs(run.engine, monkeypatch)
    steps = run.engine.runner._mixed
    monkeypatch.setattr(steps, "_pool_tokens", 120)
    requests = mixed_requests(6, seed=3, longest=30)
    Repeated.num_replays = 0
    monkeypatch.setattr(run.engine.runner, "_pool_tokens", 120)
    for asked in requests:
        run.submit(asked)
    run.run()
    assert run.tokens() == play(requests, "full-kv", settings=ALONE).tokens()
    assert 0 < Repeated.num_replays < run.num_steps

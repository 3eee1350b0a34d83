"""Compressed runs: within their budget, the same joined early or late, beside neighbours, swapped, or preempted."""

from dataclasses import replace
from typing import Any

import pytest

from policies.core.events import Kind
from tests.engine.engine_cases import SMALL, Watched, mixed, play, prompt, request, watched
from tests.engine.interpreter import passed_in_the_interpreter
from tests.engine.kernel_cases import INTERPRETED

HYBRID = "hybrid:tokens=24,window=4"
JOINS = ("boundary", "blocking", "when_done")


@pytest.fixture(scope="module")
def at_boundary() -> Watched:
    return play(mixed(20), HYBRID)


def test_it_is_a_run_worth_looking_at(at_boundary: Watched) -> None:
    assert at_boundary.count(Kind.COMPRESSED) > 50
    assert at_boundary.count(Kind.HIT) > 5
    assert at_boundary.count(Kind.PREEMPTED) > 0
    assert max(s.request.compressions for s in at_boundary.sequences.values()) > 3


def test_nobody_decodes_beyond_its_budget(at_boundary: Watched) -> None:
    """`engine_cases` asserts it in every step; here, that the bound of 24 kept tokens and a block is met at all."""
    assert at_boundary.most_blocks == 24 // SMALL.block_size + 1


@pytest.mark.parametrize("join", JOINS[1:])
def test_joined_at_once_or_later_the_tokens_are_the_same(at_boundary: Watched, join: str) -> None:
    assert play(mixed(20), f"{HYBRID},join={join}").tokens() == at_boundary.tokens()


@pytest.mark.parametrize("policy", ["constrained:tokens=24,window=4", f"{HYBRID},prefix=none"])
def test_what_shares_a_step_or_a_prefix_changes_no_token(at_boundary: Watched, policy: str) -> None:
    assert play(mixed(20), policy).tokens() == at_boundary.tokens()


@pytest.mark.parametrize("limits", [{"max_batched_tokens": 7}, {"num_blocks": 100}, {"overlap": False}])
def test_pool_chunks_and_overlap_change_no_token(at_boundary: Watched, limits: dict[str, Any]) -> None:
    assert play(mixed(20), HYBRID, **limits).tokens() == at_boundary.tokens()


def test_it_depends_on_what_is_kept(at_boundary: Watched) -> None:
    """The other tests compare tokens: these are seen to depend on the scorer and on the budget."""
    for other in (f"{HYBRID},scorer=recent", "hybrid:tokens=32,window=4", "full-kv"):
        assert play(mixed(20), other).tokens() != at_boundary.tokens()


@pytest.mark.parametrize("scorer", ["attention", "attention+global", "attention+full-redundancy", "recent", "random"])
def test_every_scorer_joined_at_once_or_later(scorer: str) -> None:
    runs = [play(mixed(8), f"{HYBRID},scorer={scorer},join={join}") for join in JOINS]
    assert runs[0].count(Kind.COMPRESSED) > 10
    assert runs[0].tokens() == runs[1].tokens() == runs[2].tokens()


def test_a_sharer_is_the_same_with_and_without_a_compressing_neighbour() -> None:
    """Both hold the neighbour's leading blocks while it is compressed."""
    shared = prompt(1, 24)
    sharer = request("sharer", [*shared, *prompt(2, 3)], 10)
    neighbour = request("neighbour", [*shared, *prompt(3, 5)], 40)
    alone = play([sharer], HYBRID)
    run = watched(HYBRID)
    run.submit(neighbour)
    while not run.engine.scheduler.state.running or not run.engine.scheduler.state.requests[0].generated:
        run.step()
    run.submit(sharer)
    run.run()
    run.assert_empty()
    assert run.sequences["sharer"].request.hit_tokens == 24
    assert run.sequences["neighbour"].request.compressions > 2
    assert run.tokens()["sharer"] == alone.tokens()["sharer"]
    assert run.tokens()["neighbour"] == play([neighbour], HYBRID).tokens()["neighbour"]


@pytest.mark.parametrize(("policy", "num_blocks"), [("hybrid:tokens=40,window=4,slotted=true", 16), ("full-kv", 24)])
def test_swapped_out_and_back_the_tokens_are_the_same(policy: str, num_blocks: int) -> None:
    """Compressed requests too, whose state no recomputing could bring back."""
    requests = mixed(16, seed=5, longest=120)
    swapping = policy + (",comes_back=swap" if ":" in policy else ":comes_back=swap")
    small = play(requests, swapping, num_blocks=num_blocks, host_blocks=200)
    large = play(requests, policy, num_blocks=200)
    swapped = [sequence.request for sequence in small.sequences.values() if sequence.request.swaps]
    assert len(swapped) > 4
    if "full-kv" not in policy:
        assert sum(request.compressions > 0 for request in swapped) > 3
    assert not any(sequence.request.preemptions for sequence in large.sequences.values())
    assert small.tokens() == large.tokens()
    assert small.engine.runner.swapped_tokens >= 2 * 8 * len(swapped)


@pytest.mark.skipif(INTERPRETED, reason="is the outer process")
def test_torch_and_triton_kernels_give_the_same_tokens() -> None:
    assert "1 passed" in passed_in_the_interpreter(__file__, "-k", "in_the_interpreter")


@pytest.mark.skipif(not INTERPRETED, reason="is run by the test above")
def test_a_compressed_request_in_the_interpreter() -> None:
    asked = [request("k", prompt(1, 31), 4)]
    torch_run = play(asked, HYBRID, kernels="torch")
    assert torch_run.count(Kind.COMPRESSED) == 1
    assert play(asked, HYBRID, kernels="triton").tokens() == torch_run.tokens()


def test_adaptive_budgets_grow_and_shrink() -> None:
    run = play(mixed(16, longest=120), "hybrid-adaptive:tokens=24,window=4,most_tokens=64")
    assert run.most_blocks > 24 // SMALL.block_size + 1
    assert run.count(Kind.COMPRESSED) > 10
    alone = [play([asked], "hybrid-adaptive:tokens=24,window=4,most_tokens=64") for asked in mixed(16, longest=120)[:3]]
    assert all(one.count(Kind.COMPRESSED) <= run.count(Kind.COMPRESSED) for one in alone)


def test_more_hold_blocks_than_a_step_takes() -> None:
    """Where `max_running` bounds one step alone, whoever sits out keeps its row."""
    requests = [replace(asked, output_tokens=20, max_tokens=20) for asked in mixed(12)]
    run = play(requests, "nano-vllm", max_running=3, num_blocks=100)
    assert run.count(Kind.STALLED) > 0
    assert run.tokens() == play(requests, "full-kv", num_blocks=100).tokens()

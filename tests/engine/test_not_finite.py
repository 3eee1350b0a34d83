"""Logits that are NaN or infinite: the request fails and says so, and nothing of it is left behind.

A token of the vocabulary has NaN for its embedding: a request fails with the step that reads it,
and its keys and values hold NaN from there on.
"""

from dataclasses import replace

import pytest
import torch

from tests.engine.engine_cases import (
    GREEDY,
    VOCABULARY,
    Watched,
    mixed,
    play,
    poisoned,
    prompt,
    request,
    tiny,
    watched,
)
from tests.parity.parity_cases import decided_again, on_engine
from zlab.engine.engine import EngineRequest
from zlab.engine.llm import finish_reason
from zlab.engine.model.decoder import Decoder
from zlab.engine.replay import ReplaySettings
from zlab.engine.sampling.sampler import checked_most_probable
from zlab.engine.sampling_params import SamplingParams
from zlab.traces.schema import EventKind, Phase, Status
from zlab.traces.workload import TraceRequest

POLICIES = {
    "full-kv": {"num_blocks": 24},
    "full-kv:comes_back=swap": {"num_blocks": 16, "host_blocks": 100},
    "hybrid:tokens=40,window=4": {"num_blocks": 20},
    "hybrid:tokens=24,window=4,join=blocking": {"num_blocks": 24},
    "nano-vllm": {"num_blocks": 24},
}
DRAWN = SamplingParams(temperature=0.8, seed=3, logprobs=2, top_p=0.9, ignore_eos=True)
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.3, ignore_eos=True)
REQUESTS = mixed(14, seed=2)


def good_tokens(asked: TraceRequest, whole: list[int], token: int) -> list[int] | None:
    """What a request is given before the model reads the token; None if it never does."""
    if token in (asked.prompt_ids or ()):
        return []
    return whole[: whole.index(token) + 1] if token in whole[:-1] else None


def read_by_some(expected: dict[str, list[int]]) -> int:
    """The token that about a third of the requests have read before they end."""

    def num_readers(token: int) -> int:
        return sum(good_tokens(one, expected[one.id], token) is not None for one in REQUESTS)

    return min(range(VOCABULARY), key=lambda token: abs(num_readers(token) - len(REQUESTS) // 3))


def assert_failed(sequence: EngineRequest, good: list[int]) -> None:
    assert sequence.closed
    assert sequence.output.token_ids == good
    assert finish_reason(sequence) == "error"
    place = f"not finite (NaN or infinite) at output token {len(good) + 1}"
    assert place in sequence.message
    assert len(sequence.logprobs) == (len(good) if sequence.params.logprobs is not None else 0)


def assert_others_unharmed(run: Watched, expected: dict[str, list[int]], token: int) -> int:
    """Returns how many have failed.

    One that was admitted while the step that showed it still ran (overlap) may have matched blocks
    of a damaged prompt: in its own chunk, NaN comes to earlier positions, too.
    """
    num_failed = 0
    for asked in REQUESTS:
        sequence, whole = run.sequences[asked.id], expected[asked.id]
        good = good_tokens(asked, whole, token)
        if good is None and sequence.failure:
            assert run.engine.overlaps
            assert sequence.request.hit_tokens
            assert_failed(sequence, [])
            num_failed += 1
        elif good is None:
            assert finish_reason(sequence) == "length"
            assert sequence.output.token_ids == whole
        else:
            assert_failed(sequence, good)
            num_failed += 1
    return num_failed


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("params", [GREEDY, DRAWN, PENALISED], ids=["greedy", "drawn", "penalised"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_fails_where_its_logits_do_and_no_neighbour_notices(
    policy: str, params: SamplingParams, overlap: bool
) -> None:
    calm = policy.replace(":comes_back=swap", "")
    expected = play(REQUESTS, calm, params, num_blocks=200).tokens()
    token = read_by_some(expected)
    with poisoned(token) as loaded:
        run = play(REQUESTS, policy, params, loaded=loaded, overlap=overlap, **POLICIES[policy])
    num_failed = assert_others_unharmed(run, expected, token)
    assert 0 < num_failed < len(REQUESTS)
    assert run.count(EventKind.CORRUPTED) == num_failed


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("output", [1, 2, 3, 9])
def test_the_last_token_may_be_the_one(output: int, overlap: bool) -> None:
    """With overlap the scheduler has let the request finish before its token comes to the host."""
    whole = play([request("a", prompt(1, 20), 9)], "full-kv").tokens()["a"]
    place = next(index for index, token in enumerate(whole) if token not in whole[:index])
    assert place == 0, "the first token is the one that is poisoned"
    with poisoned(whole[0]) as loaded:
        run = play([request("a", prompt(1, 20), output)], "full-kv", loaded=loaded, overlap=overlap)
    sequence = run.sequences["a"]
    if output == 1:  # the token is given, and never read
        assert finish_reason(sequence) == "length"
        return
    assert_failed(sequence, whole[:1])
    assert run.count(EventKind.CORRUPTED) == 1
    assert run.count(EventKind.FAILED) + run.count(EventKind.FINISHED) == 1


def test_a_request_that_may_stop_fails_before_the_next_step_is_planned() -> None:
    whole = play([request("a", prompt(1, 20), 9)], "full-kv").tokens()["a"]
    with poisoned(whole[2]) as loaded:
        run = watched("full-kv", loaded)
        asked = replace(request("a", prompt(1, 20), 9), output_tokens=None)
        sequence = run.submit(asked, replace(GREEDY, stop_token_ids=(0,)))
        run.run()
        run.assert_empty()
    assert_failed(sequence, whole[: whole.index(whole[2]) + 1])
    assert sequence.request.status is Status.FAILED


@pytest.mark.parametrize("num_steps", range(1, 8))
def test_an_abort_meets_a_failure(num_steps: int) -> None:
    """Before it, in the step that shows it, in the one behind: one end, and what was good."""
    whole = play([request("a", prompt(1, 20), 9)], "full-kv").tokens()["a"]
    good = whole[: whole.index(whole[2]) + 1]
    with poisoned(whole[2]) as loaded:
        run = watched("full-kv", loaded)
        sequence = run.submit(request("a", prompt(1, 20), 9))
        for _ in range(num_steps):
            run.step()
        if sequence.request.status is Status.LIVE:
            run.engine.abort("a")
        run.run()
        run.assert_empty()
    assert sequence.output.token_ids == good[: len(sequence.output.token_ids)]
    failed = finish_reason(sequence) == "error"
    assert failed or finish_reason(sequence) == "abort"
    assert run.count(EventKind.CORRUPTED) == failed
    assert run.count(EventKind.FAILED) + run.count(EventKind.ABORTED) == 1


@pytest.mark.parametrize("overlap", [True, False])
def test_keys_that_are_not_finite_are_not_found_again(overlap: bool) -> None:
    """Neither those of the request itself nor of one that had matched them meanwhile."""
    ids = [*prompt(1, 30)[:10], 3, *prompt(2, 30)]
    clean = play([request("clean", ids, 8)], "full-kv").tokens()["clean"]
    run = watched("full-kv", overlap=overlap, max_batched_tokens=16)  # the prompt comes in chunks
    with poisoned(3):
        first = run.submit(request("first", ids, 8))
        while first.request.phase is not Phase.PREFILL or not first.request.num_registered:
            run.step()
        second = run.submit(request("second", [*ids[:32], *prompt(3, 9)], 8))
        run.run()
    for sequence in (first, second):
        assert finish_reason(sequence) == "error"
    pool = run.engine.scheduler.state.pool
    assert not pool.num_cached, "a block of a damaged prompt can still be matched"
    again = run.submit(request("again", ids, 8))
    run.run()
    assert again.request.hit_tokens == 0
    assert again.output.token_ids == clean
    repeated = run.submit(request("repeated", ids, 8))
    run.run()
    assert repeated.request.hit_tokens == 40
    assert repeated.output.token_ids == clean


def test_nothing_of_a_head_with_an_infinite_row_is_served() -> None:
    loaded = tiny()
    assert isinstance(loaded.model, Decoder)
    head = loaded.model.weights.head
    kept = head[5].clone()
    for value in (float("inf"), float("-inf"), float("nan")):
        head[5] = value
        try:
            run = play(REQUESTS[:3], "full-kv")
        finally:
            head[5] = kept
        for sequence in run.sequences.values():
            assert_failed(sequence, [])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "policy", ["full-kv:comes_back=swap", "hybrid:tokens=40,window=4", "nano-vllm"]
)
def test_a_recording_of_it_is_decided_again(policy: str, overlap: bool) -> None:
    token = read_by_some({one.id: [] for one in REQUESTS})  # with their prompts
    asked = [replace(one, arrival_s=0.004 * place) for place, one in enumerate(REQUESTS)]
    params = SamplingParams(temperature=0.8, seed=11, stop_token_ids=[7, 19])
    with poisoned(token) as loaded:
        how = ReplaySettings(at_once=True) if overlap else ReplaySettings(live=True, params=params)
        of = on_engine(policy, asked, how, loaded, overlap=overlap)
    kinds = of.run.events["kind"].to_pylist()
    assert kinds.count(EventKind.CORRUPTED) > 0
    again = decided_again(of)
    assert again.digest == of.run.summary["digest"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_place_of_a_row_is_looked_at(dtype: torch.dtype) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(13, 5003, generator=generator) * 50).to(device, dtype)
    clean = logits.argmax(dim=-1).tolist()
    assert checked_most_probable(logits).tolist() == clean
    for row, place in enumerate((0, 1, 4095, 4096, 5002)):
        for at, value in enumerate((float("nan"), float("inf"), float("-inf"))):
            spoiled = logits.clone()
            spoiled[row + at, place] = value
            wanted = [-1 if number == row + at else token for number, token in enumerate(clean)]
            assert checked_most_probable(spoiled).tolist() == wanted
    spoiled = torch.full_like(logits, float("-inf"))
    assert checked_most_probable(spoiled).tolist() == [-1] * 13

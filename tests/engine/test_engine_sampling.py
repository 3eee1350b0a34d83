"""Sampling through the engine: the same tokens whatever runs beside, and what ends an output."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from engine.llm import LLM
from engine.loading import BUNDLED_PACKAGE
from engine.sampling_params import SamplingParams
from policies.core.events import Kind
from tests.engine.engine_cases import GREEDY, mixed, play, prompt, request, tiny, watched
from traces.workload import TraceRequest

needs_smollm2 = pytest.mark.skipif(find_spec(BUNDLED_PACKAGE) is None, reason=f"{BUNDLED_PACKAGE} is not installed")
REQUESTS = mixed(12, seed=3, longest=40)


def drawn(asked: TraceRequest) -> SamplingParams:
    """Everybody draws in another way."""
    seed = int(asked.id[1:])
    ways = (
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"temperature": 0.0, "repetition_penalty": 1.5},
    )
    return SamplingParams(seed=seed, ignore_eos=True, **ways[seed % len(ways)])  # type: ignore[arg-type]


def test_the_same_alone_in_a_batch_preempted_and_swapped() -> None:
    batch = play(REQUESTS, "full-kv", drawn, num_blocks=200)
    tokens = batch.tokens()
    for asked in REQUESTS[:6]:
        assert play([asked], "full-kv", drawn).tokens()[asked.id] == tokens[asked.id]
    for policy in ("full-kv:prefix=none", "full-kv:comes_back=swap"):
        small = play(REQUESTS, policy, drawn, num_blocks=14, host_blocks=50)
        assert small.count(Kind.PREEMPTED) > 2
        assert small.tokens() == tokens
    assert play(REQUESTS, "full-kv", drawn, num_blocks=200, overlap=False).tokens() == tokens


def test_another_seed_draws_otherwise() -> None:
    params = SamplingParams(temperature=1.0, seed=1, ignore_eos=True)
    asked = [request("a", prompt(1, 9), 30)]
    one = play(asked, "full-kv", params).tokens()
    assert play(asked, "full-kv", params).tokens() == one
    assert play(asked, "full-kv", replace(params, seed=2)).tokens() != one


def test_more_penalised_requests_than_run_at_once() -> None:
    """Counts are kept for those that are drawn; whoever waits, or comes back, is counted anew."""
    params = SamplingParams(temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.2, ignore_eos=True)
    requests = [replace(asked, output_tokens=24, max_tokens=24) for asked in mixed(14, seed=8)]
    tokens = play(requests, "full-kv", params, num_blocks=300, max_running=2).tokens()
    assert tokens == play(requests, "full-kv", params, num_blocks=300).tokens()
    few = play(requests, "full-kv:prefix=none", params, num_blocks=18, max_running=4)
    assert few.count(Kind.PREEMPTED) > 2
    assert few.tokens() == tokens
    assert tokens != play(requests, "full-kv", GREEDY, num_blocks=300).tokens()


def test_stop_tokens_end_an_output_and_are_part_of_it() -> None:
    asked = [replace(one, output_tokens=None) for one in REQUESTS]
    free = play(REQUESTS, "full-kv", num_blocks=200).tokens()
    params = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=[38, 64])
    run = play(asked, "full-kv", params, num_blocks=200)
    stopped = 0
    for id, tokens in run.tokens().items():
        ends = [place for place, token in enumerate(free[id]) if token in (38, 64)]
        assert tokens == free[id][: ends[0] + 1 if ends else None]
        assert run.sequences[id].stop_reason == (tokens[-1] if ends else None)
        stopped += bool(ends)
    assert stopped > 6


def test_every_end_of_sequence_id_ends_an_output() -> None:
    """The second of them, too."""
    base = tiny()
    several = replace(base, eos_token_ids=(96, 38))
    free = play(REQUESTS, "full-kv", num_blocks=200).tokens()
    asked = [replace(one, output_tokens=None) for one in REQUESTS]
    run = play(asked, "full-kv", SamplingParams(temperature=0.0), loaded=several, num_blocks=200)
    for id, tokens in run.tokens().items():
        ends = [place for place, token in enumerate(free[id]) if token in (96, 38)]
        assert tokens == free[id][: ends[0] + 1 if ends else None]
        assert run.sequences[id].stop_reason is None
    ignoring = play(asked, "full-kv", SamplingParams(temperature=0.0, ignore_eos=True), loaded=several, num_blocks=200)
    assert ignoring.tokens() == free


def test_logprobs_of_every_token() -> None:
    params = SamplingParams(temperature=1.0, seed=4, logprobs=3, ignore_eos=True)
    run = watched("full-kv")
    asking = run.submit(request("a", prompt(1, 9), 12), params)
    other = run.submit(request("b", prompt(2, 9), 12), replace(params, logprobs=1))
    silent = run.submit(request("c", prompt(3, 9), 12))
    run.run()
    assert (len(asking.logprobs), len(other.logprobs), len(silent.logprobs)) == (12, 12, 0)
    for sequence, num_top in ((asking, 3), (other, 1)):
        for token, found in zip(sequence.output.token_ids, sequence.logprobs, strict=True):
            assert len(found.top) == num_top
            values = [value for _, value in found.top]
            assert values == sorted(values, reverse=True)
            assert found.chosen <= values[0] <= 0.0
            if found.rank <= num_top:
                assert found.top[found.rank - 1] == (token, found.chosen)
    greedy = play([request("a", prompt(1, 9), 12)], "full-kv", replace(GREEDY, logprobs=0)).sequences["a"]
    assert [found.rank for found in greedy.logprobs] == [1] * 12
    assert all(not found.top for found in greedy.logprobs)


@pytest.fixture(scope="module")
def smollm2() -> LLM:
    return LLM("smollm2", "hybrid:tokens=128", num_blocks=24, block_size=16, max_model_len=256, device="cpu")


@needs_smollm2
def test_a_stop_string_across_tokens_ends_the_text_before_it(smollm2: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16)
    free = smollm2.generate("One, two, three, four,", params)[0].outputs[0]
    words = free.text.split(",")
    stop = f"{words[0][-2:]},{words[1][:2]}"  # ends in the middle of a token
    assert stop in free.text
    for include in (False, True):
        asked = replace(params, stop=[stop, "never said"], include_stop_str_in_output=include)
        output = smollm2.generate("One, two, three, four,", asked)[0].outputs[0]
        at = free.text.index(stop)
        assert output.text == free.text[: at + len(stop) * include]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert len(output.token_ids) < len(free.token_ids)
    text = "".join(delta.text for delta in smollm2.stream("One, two, three, four,", replace(params, stop=stop)))
    assert text == free.text[: free.text.index(stop)]


@needs_smollm2
def test_several_outputs_of_a_prompt(smollm2: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=8, ignore_eos=True)
    result = smollm2.generate(["The sea is"], params)[0]
    texts = [output.text for output in result.outputs]
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert [output.text for output in smollm2.generate("The sea is", params)[0].outputs] == texts
    first = smollm2.generate("The sea is", replace(params, n=1))[0].outputs[0].text
    assert first == texts[0], "the first of several is the only one of one"

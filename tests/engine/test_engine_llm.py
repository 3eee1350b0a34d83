"""`LLM`: what it returns, streams and refuses."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.errors import EngineError, ModelError
from engine.llm import LLM, RefusedError
from engine.sampling_params import SamplingParams
from policies.core.errors import ConfigError
from policies.spec import PolicyError
from tests.engine.engine_cases import prompt, tiny

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def llm(policy: str = "hybrid:tokens=24,window=4", **changes: Any) -> LLM:
    sizes = {"num_blocks": 40, "block_size": 8, "max_model_len": 200, "device": "cpu"} | changes
    return LLM("tiny", policy, loaded=tiny(), **sizes)


@pytest.fixture(scope="module")
def shared() -> LLM:
    return llm()


def free(of: LLM) -> int:
    return of.engine.scheduler.state.pool.num_free


def test_one_prompt_or_several_results_in_their_order(shared: LLM) -> None:
    prompts = [prompt(n, 5 + n) for n in range(7)]
    lengths = [replace(PARAMS, max_tokens=9 - n) for n in range(7)]
    results = shared.generate(prompts, lengths)
    assert [result.prompt_token_ids for result in results] == prompts
    assert [len(result.outputs[0].token_ids) for result in results] == [9, 8, 7, 6, 5, 4, 3]
    assert all(result.finished and result.outputs[0].finish_reason == "length" for result in results)
    single = shared.generate(prompts[2], PARAMS)
    assert len(single) == 1
    assert single[0].outputs[0].token_ids == results[2].outputs[0].token_ids[:6]
    assert len({result.request_id for result in (*results, *single)}) == 8
    assert free(shared) == 40
    assert shared.generate([], PARAMS) == []


def test_a_repeated_prompt_is_found_in_the_cache(shared: LLM) -> None:
    ids = prompt(50, 33)
    first, second = shared.generate(ids, PARAMS)[0], shared.generate(ids, PARAMS)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_logprobs_come_as_mappings(shared: LLM) -> None:
    output = shared.generate(prompt(1, 9), replace(PARAMS, logprobs=2))[0].outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == 6
    for token, found in zip(output.token_ids, output.logprobs, strict=True):
        assert found[token].rank == 1
        assert len(found) == 2
        assert found[token].decoded_token is None
    assert output.cumulative_logprob == pytest.approx(
        sum(found[token].logprob for token, found in zip(output.token_ids, output.logprobs, strict=True))
    )
    assert shared.generate(prompt(1, 9), PARAMS)[0].outputs[0].logprobs is None


def test_a_stream_gives_every_token_once(shared: LLM) -> None:
    prompts = [prompt(n, 9) for n in range(3)]
    deltas = list(shared.stream(prompts, PARAMS))
    whole = shared.generate(prompts, PARAMS)
    ids = sorted({delta.request_id for delta in deltas}, key=int)
    for id, result in zip(ids, whole, strict=True):
        mine = [delta for delta in deltas if delta.request_id == id]
        assert [token for delta in mine for token in delta.token_ids] == result.outputs[0].token_ids
        assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + ["length"]
    assert free(shared) == 40


def test_a_token_that_stops_at_the_limit_is_a_stop(shared: LLM) -> None:
    ids = prompt(1, 9)
    free_tokens = shared.generate(ids, PARAMS)[0].outputs[0].token_ids
    for length in (1, 4):  # the prefill's own token, and a decode step's
        stop = free_tokens[length - 1]
        assert free_tokens.index(stop) == length - 1
        asked = replace(PARAMS, max_tokens=length, stop_token_ids=[stop])
        output = shared.generate(ids, asked)[0].outputs[0]
        assert (output.token_ids, output.finish_reason, output.stop_reason) == (free_tokens[:length], "stop", stop)
        assert [delta.finish_reason for delta in shared.stream(ids, asked)][-1] == "stop"


def test_a_stream_that_nobody_listens_to_ends(shared: LLM) -> None:
    stream = shared.stream(prompt(1, 9), replace(PARAMS, max_tokens=100))
    next(stream)
    assert free(shared) < 40
    stream.close()  # type: ignore[attr-defined]
    shared.generate(prompt(2, 3), PARAMS)
    assert free(shared) == 40
    assert not shared.engine.loop.sequences


def test_what_can_never_be_served_is_refused_before_anything_runs(shared: LLM) -> None:
    with pytest.raises(RefusedError, match=r"prompt 1 can't be served: the prompt has 250 tokens.*limit is 200"):
        shared.generate([prompt(1, 5), prompt(2, 250)], PARAMS)
    with pytest.raises(RefusedError, match="prompt 0 can't be served: the prompt has 0 tokens"):
        shared.generate([[]], PARAMS)
    small = llm("full-kv", num_blocks=4)
    with pytest.raises(RefusedError, match=r"it needs 7 blocks of 8 tokens .* the pool has 4"):
        list(small.stream(prompt(1, 50), PARAMS))
    assert free(shared) == 40
    assert not shared.engine.loop.sequences
    assert shared.generate(prompt(1, 5), PARAMS)[0].finished


def test_an_output_that_fails_on_its_way_says_so() -> None:
    one = llm()
    assert one.engine.compression is not None
    one.engine.compression.inject_failure = "out of workspace"
    results = one.generate([prompt(1, 30), prompt(2, 4)], replace(PARAMS, max_tokens=20))
    failed, good = (result.outputs[0] for result in results)
    assert (failed.finish_reason, failed.message) == ("error", "compression failed: out of workspace")
    assert (good.finish_reason, len(good.token_ids)) == ("length", 20)
    assert free(one) == 40


def test_an_output_beyond_the_model_is_capped_and_says_so(shared: LLM) -> None:
    output = shared.generate(prompt(1, 190), replace(PARAMS, max_tokens=50))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (10, "length")
    assert "capped at 10 of 50 tokens by the limit 200" in output.message


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1, 97], "prompt token 1 is 97, not a token id in 0..96"),
        ([-1], "prompt token 0 is -1"),
        ([[1, True]], "prompt token 1 is True"),
        ("text", "has no tokenizer: give prompts as lists of token ids"),
        ([[1], 2.5], "prompt 1 must be a text or a list of token ids, got 2.5"),
    ],
)
def test_prompts_that_make_no_sense(shared: LLM, given: Any, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        shared.generate(given, PARAMS)
    assert not shared.engine.loop.sequences


def test_parameters_for_all_or_one_for_each(shared: LLM) -> None:
    with pytest.raises(EngineError, match="2 sampling parameters for 1 prompts"):
        shared.generate([prompt(1, 5)], [PARAMS, PARAMS])
    with pytest.raises(EngineError, match=r"stop strings \['x'\] need a tokenizer"):
        shared.generate([prompt(1, 5)], replace(PARAMS, stop="x"))
    with pytest.raises(EngineError, match="has no tokenizer"):
        shared.chat([{"role": "user", "content": "hello"}], PARAMS)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"policy": "hybird"}, PolicyError, "unknown policy 'hybird'; did you mean 'hybrid'"),
        ({"policy": "constrained:window=4"}, ConfigError, "a budget of 257 blocks does not fit in a pool of 40"),
        ({"device": "tpu"}, EngineError, "no device 'tpu' here"),
        ({"dtype": "float3"}, EngineError, "unknown dtype 'float3'; did you mean 'float32'"),
        ({"max_model_len": 5000}, EngineError, "max_model_len 5000 is more than the 1024 positions"),
        ({"kernels": "cuda"}, ValueError, "no set of kernels called 'cuda'"),
        ({"num_blocks": 0}, ConfigError, "num_blocks must be a whole number of at least 1"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        llm(**changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without one")
def test_cuda_where_there_is_none() -> None:
    with pytest.raises(EngineError, match=r"no device 'cuda' here \(choices: cpu\)"):
        llm(device="cuda")
    with pytest.raises(EngineError, match="CUDA graphs need a CUDA device, not 'cpu'"):
        llm(use_graphs=True)


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ModelError, match="model 'nowhere' does not exist"):
        LLM("nowhere")


def test_blocks_on_the_cpu_come_from_a_gibibyte() -> None:
    one = LLM("dummy:tiny", "full-kv", block_size=16, device="cpu", max_model_len=64)
    per_block = 2 * 2 * 16 * 2 * 16 * 4  # K and V, layers, tokens, heads, head_dim, bytes
    assert one.engine.limits.num_blocks == (1 << 30) // per_block

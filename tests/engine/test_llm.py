"""`LLM`: what it returns, streams and refuses.

Sampling through the engine: the same tokens whatever runs beside, and what ends an output.
"""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.engine.engine_cases import GREEDY, mixed, play, prompt, request, tiny, watched
from zlab.engine.errors import EngineError, ModelError
from zlab.engine.llm import LLM, RefusedError
from zlab.engine.model.loader import BUNDLED_PACKAGE
from zlab.engine.sampling_params import SamplingParams
from zlab.policies.core.plan import ConfigError
from zlab.policies.spec import PolicyError
from zlab.traces.schema import EventKind
from zlab.traces.workload import TraceRequest

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
    assert all(
        result.finished and result.outputs[0].finish_reason == "length" for result in results
    )
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
        sum(
            found[token].logprob
            for token, found in zip(output.token_ids, output.logprobs, strict=True)
        )
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
        assert (output.token_ids, output.finish_reason, output.stop_reason) == (
            free_tokens[:length],
            "stop",
            stop,
        )
        assert [delta.finish_reason for delta in shared.stream(ids, asked)][-1] == "stop"


def test_a_stream_that_nobody_listens_to_ends(shared: LLM) -> None:
    stream = shared.stream(prompt(1, 9), replace(PARAMS, max_tokens=100))
    next(stream)
    assert free(shared) < 40
    stream.close()  # type: ignore[attr-defined]
    shared.generate(prompt(2, 3), PARAMS)
    assert free(shared) == 40
    assert not shared.engine.sequences


def test_a_step_in_flight_may_end_a_request_that_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen on a GPU: Ctrl-C while the step that ends a request was under way."""
    with llm() as one:
        drain, seen, ended = one.engine.drain, [0], list[str]()

        def on_step() -> None:
            seen[0] += 1
            if seen[0] == 3:
                raise KeyboardInterrupt

        def drain_and_end_one() -> None:
            drain()
            if seen[0] == 3 and not ended:
                ended.extend(request.id for request in one.engine.scheduler.live())
                one.engine.scheduler.abort(ended[0], one.engine.now_ns())

        monkeypatch.setattr(one.engine, "drain", drain_and_end_one)
        with pytest.raises(KeyboardInterrupt):
            list(one.as_completed([prompt(1, 5), prompt(2, 6)], PARAMS, on_step))
        assert len(ended) == 2
        assert not list(one.engine.scheduler.live())


def test_what_can_never_be_served_is_refused_before_anything_runs(shared: LLM) -> None:
    with pytest.raises(
        RefusedError, match=r"prompt 1 can't be served: the prompt has 250 tokens.*limit is 200"
    ):
        shared.generate([prompt(1, 5), prompt(2, 250)], PARAMS)
    with pytest.raises(RefusedError, match="prompt 0 can't be served: the prompt has 0 tokens"):
        shared.generate([[]], PARAMS)
    small = llm("full-kv", num_blocks=4)
    with pytest.raises(RefusedError, match=r"it needs 7 blocks of 8 tokens .* the pool has 4"):
        list(small.stream(prompt(1, 50), PARAMS))
    assert free(shared) == 40
    assert not shared.engine.sequences
    assert shared.generate(prompt(1, 5), PARAMS)[0].finished


def test_an_output_that_fails_on_its_way_says_so() -> None:
    one = llm()
    assert one.engine.compression is not None
    one.engine.compression.inject_failure = "out of workspace"
    results = one.generate([prompt(1, 30), prompt(2, 4)], replace(PARAMS, max_tokens=20))
    failed, good = (result.outputs[0] for result in results)
    assert (failed.finish_reason, failed.message) == (
        "error",
        "compression failed: out of workspace",
    )
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
    assert not shared.engine.sequences


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
        (
            {"policy": "constrained:window=4"},
            ConfigError,
            "a budget of 257 blocks does not fit in a pool of 40",
        ),
        ({"device": "tpu"}, EngineError, "no device 'tpu' here"),
        ({"dtype": "float3"}, EngineError, "unknown dtype 'float3'; did you mean 'float32'"),
        (
            {"max_model_len": 5000},
            EngineError,
            "max_model_len 5000 is more than the 1024 positions",
        ),
        ({"kernels": "cuda"}, ValueError, "no set of kernels called 'cuda'"),
        ({"num_blocks": 0}, ConfigError, "num_blocks must be a whole number of at least 1"),
    ],
)
def test_settings_that_do_not_fit(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
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


needs_smollm2 = pytest.mark.skipif(
    find_spec(BUNDLED_PACKAGE) is None, reason=f"{BUNDLED_PACKAGE} is not installed"
)
REQUESTS = mixed(12, seed=3, longest=40)


def drawn(asked: TraceRequest) -> SamplingParams:
    """Everybody draws in another way."""
    seed = int(asked.id[1:])
    ways = (
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.05},
        {
            "temperature": 0.9,
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.4,
            "presence_penalty": 0.2,
        },
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
        assert small.count(EventKind.PREEMPTED) > 2
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
    params = SamplingParams(
        temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.2, ignore_eos=True
    )
    requests = [replace(asked, output_tokens=24, max_tokens=24) for asked in mixed(14, seed=8)]
    tokens = play(requests, "full-kv", params, num_blocks=300, max_running=2).tokens()
    assert tokens == play(requests, "full-kv", params, num_blocks=300).tokens()
    few = play(requests, "full-kv:prefix=none", params, num_blocks=18, max_running=4)
    assert few.count(EventKind.PREEMPTED) > 2
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
    ignoring = play(
        asked,
        "full-kv",
        SamplingParams(temperature=0.0, ignore_eos=True),
        loaded=several,
        num_blocks=200,
    )
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
    greedy = play(
        [request("a", prompt(1, 9), 12)], "full-kv", replace(GREEDY, logprobs=0)
    ).sequences["a"]
    assert [found.rank for found in greedy.logprobs] == [1] * 12
    assert all(not found.top for found in greedy.logprobs)


@pytest.fixture(scope="module")
def smollm2() -> LLM:
    return LLM(
        "smollm2",
        "hybrid:tokens=128",
        num_blocks=24,
        block_size=16,
        max_model_len=256,
        device="cpu",
    )


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
    text = "".join(
        delta.text for delta in smollm2.stream("One, two, three, four,", replace(params, stop=stop))
    )
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

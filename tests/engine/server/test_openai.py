"""The official client of the OpenAI API against a running server; what it gets is what the engine
gives.
"""

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import openai
import pytest

from tests.engine.server.server_cases import HYBRID, ROOMY, Served, lettered, served
from zlab.engine.engine import EngineSettings
from zlab.engine.llm import LLM
from zlab.engine.model.loader import BUNDLED_PACKAGE, load_model
from zlab.engine.sampling_params import SamplingParams

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "max_tokens": 30}
PROMPTS = [
    "Hello there",
    "hello",
    "A longer prompt, so that blocks are filled and later compressed. " * 2,
    "7",
]
# Of a log-probability: a step rounds by its size, so by what shares the batch and what is cached.
ROUNDING = 1e-4
CHAT: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is 6 x 7?"},
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with server.client() as found:
        yield found
    server.assert_all_free()


@pytest.fixture(scope="module")
def llm() -> LLM:
    names = ("num_blocks", "block_size", "max_batched_tokens", "max_running", "max_model_len")
    settings = {name: getattr(ROOMY, name) for name in names}
    return LLM(policy=HYBRID, loaded=lettered(), device="cpu", **settings)


def expected(llm: LLM, prompts: Any, **params: Any) -> list[Any]:
    given = {"temperature": 0.0, "max_tokens": 30} | params
    return [result.outputs for result in llm.generate(prompts, SamplingParams(**given))]


def near(values: Iterable[float]) -> Any:
    """These log-probabilities, as a step of any other size rounds them."""
    return pytest.approx(list(values), abs=ROUNDING)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("gpt-5")


def test_a_completion_is_what_the_engine_gives(client: openai.OpenAI, llm: LLM) -> None:
    for prompt in PROMPTS:
        answer = client.completions.create(prompt=prompt, **GREEDY)
        (wanted,) = expected(llm, prompt)[0]
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason, choice.index) == (
            wanted.text,
            wanted.finish_reason,
            0,
        )
        assert answer.object == "text_completion"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(wanted.token_ids)
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.total_tokens == len(prompt) + len(wanted.token_ids)


@pytest.mark.parametrize("as_ids", [False, True])
def test_several_prompts_at_once(client: openai.OpenAI, llm: LLM, as_ids: bool) -> None:
    prompts: Any = [llm.tokenizer.encode(prompt) for prompt in PROMPTS] if as_ids else PROMPTS
    answer = client.completions.create(prompt=prompts, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [
        outputs[0].text for outputs in expected(llm, PROMPTS)
    ]
    one = client.completions.create(prompt=llm.tokenizer.encode(PROMPTS[0]), **GREEDY)
    assert one.choices[0].text == answer.choices[0].text


def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI, llm: LLM) -> None:
    texts = ["", "", "", ""]
    ends: list[str | None] = [None] * 4
    usage = None
    for chunk in client.completions.create(
        prompt=PROMPTS, stream=True, stream_options={"include_usage": True}, **GREEDY
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert ends[choice.index] is None, "nothing comes after a finish reason"
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason
    wanted = [outputs[0] for outputs in expected(llm, PROMPTS)]
    assert texts == [output.text for output in wanted]
    assert ends == [output.finish_reason for output in wanted]
    assert usage is not None
    assert usage.completion_tokens == sum(len(output.token_ids) for output in wanted)


def test_chat_whole_and_streamed(client: openai.OpenAI, llm: LLM) -> None:
    (wanted,) = llm.chat(CHAT, SamplingParams(temperature=0.0, max_tokens=30))[0].outputs
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0.0, max_completion_tokens=30
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert (choice.message.content, choice.finish_reason) == (wanted.text, wanted.finish_reason)
    streamed = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0.0, max_completion_tokens=30, stream=True
    )
    chunks = list(streamed)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    assert chunks[-1].choices[0].finish_reason == wanted.finish_reason
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_parts_of_a_message_are_one_text(client: openai.OpenAI) -> None:
    def say(content: Any) -> str | None:
        messages: Any = [{"role": "user", "content": content}]
        answer = client.chat.completions.create(
            model="tiny", messages=messages, temperature=0.0, max_tokens=9
        )
        return answer.choices[0].message.content

    assert say([{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]) == say("abcd")
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content") as caught:
        say([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}])
    assert caught.value.param == "messages[0].content"


def test_values_for_the_template(client: openai.OpenAI, llm: LLM) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": CHAT, "temperature": 0.0, "max_tokens": 9}
    thinking = client.chat.completions.create(
        **asked, extra_body={"chat_template_kwargs": {"thinks": "hard"}}
    )
    prompt = llm.tokenizer.chat(CHAT, thinks="hard")
    assert thinking.usage is not None
    assert (
        thinking.usage.prompt_tokens == len(prompt) == len(llm.tokenizer.chat(CHAT)) + len("<hard>")
    )
    (wanted,) = expected(llm, [prompt], max_tokens=9)[0]
    assert thinking.choices[0].message.content == wanted.text
    for name in ("chat_template", "tokenize", "messages", "add_generation_prompt"):
        with pytest.raises(openai.BadRequestError, match=f"may not set '{name}'") as caught:
            client.chat.completions.create(
                **asked, extra_body={"chat_template_kwargs": {name: "x"}}
            )
        assert caught.value.param == "chat_template_kwargs"


def test_an_open_length_runs_as_far_as_there_is_room(client: openai.OpenAI) -> None:
    more = {"ignore_eos": True}
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0.0, extra_body=more
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == ROOMY.max_model_len
    assert answer.choices[0].finish_reason == "length"


def test_logprobs_of_a_completion(client: openai.OpenAI, llm: LLM) -> None:
    (wanted,) = expected(llm, "Hello there", logprobs=3)[0]
    whole = client.completions.create(prompt="Hello there", logprobs=3, **GREEDY).choices[0]
    streamed = client.completions.create(prompt="Hello there", logprobs=3, stream=True, **GREEDY)
    pieces = [
        chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs is not None
    ]
    found = whole.logprobs
    assert found is not None
    assert found.tokens is not None
    assert wanted.logprobs is not None
    assert found.token_logprobs == near(
        each[token].logprob for each, token in zip(wanted.logprobs, wanted.token_ids, strict=True)
    )
    assert found.tokens == [
        llm.tokenizer.decode([token], skip_special_tokens=False) for token in wanted.token_ids
    ]
    assert found.top_logprobs is not None
    for given, each in zip(found.top_logprobs, wanted.logprobs, strict=True):
        assert given == pytest.approx(
            {item.decoded_token: item.logprob for item in each.values()}, abs=ROUNDING
        )
    assert found.text_offset is not None
    assert found.text_offset == list(range(len(wanted.token_ids)))  # one letter a token
    for name in ("tokens", "text_offset"):
        assert [item for piece in pieces for item in getattr(piece, name)] == getattr(found, name)
    assert found.token_logprobs == near(
        value for piece in pieces for value in piece.token_logprobs or ()
    )
    tops = [top for piece in pieces for top in piece.top_logprobs or ()]
    for top, each in zip(tops, found.top_logprobs, strict=True):
        assert top == pytest.approx(each, abs=ROUNDING)


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": CHAT,
        "temperature": 0.0,
        "max_tokens": 12,
        "logprobs": True,
    }
    whole = client.chat.completions.create(top_logprobs=2, **asked).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.content is not None
    assert len(whole.logprobs.content) == 12
    for entry in whole.logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.token == entry.top_logprobs[0].token  # greedy
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert bytes(entry.bytes or []).decode() == entry.token
    streamed = client.chat.completions.create(top_logprobs=2, stream=True, **asked)
    entries = [
        e for chunk in streamed if (found := chunk.choices[0].logprobs) for e in found.content or []
    ]
    for entry, again in zip(whole.logprobs.content, entries, strict=True):
        assert (entry.token, entry.bytes) == (again.token, again.bytes)
        assert [top.token for top in entry.top_logprobs] == [t.token for t in again.top_logprobs]
        assert [entry.logprob, *(top.logprob for top in entry.top_logprobs)] == near(
            [again.logprob, *(top.logprob for top in again.top_logprobs)]
        )
    plain = client.chat.completions.create(**asked).choices[0].logprobs
    assert plain is not None
    assert plain.content is not None
    assert not plain.content[0].top_logprobs
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
        client.chat.completions.create(**asked | {"top_logprobs": 2, "logprobs": False})


def test_stop_n_and_seed(client: openai.OpenAI, llm: LLM) -> None:
    (free,) = expected(llm, "Hello there")[0]
    stop = free.text[10:12]
    cut = client.completions.create(prompt="Hello there", stop=[stop], **GREEDY).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.index(stop)]
    drawn: dict[str, Any] = {
        "model": "tiny",
        "prompt": ["Hello", "there"],
        "max_tokens": 12,
        "n": 3,
        "seed": 5,
    }
    first, second = (client.completions.create(**drawn) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == list(range(6))
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) == 6
    assert first.usage is not None
    assert first.usage.prompt_tokens == 10, "each prompt counts once"
    wanted = expected(llm, ["Hello", "there"], temperature=1.0, n=3, seed=5, max_tokens=12)
    assert texts == [output.text for outputs in wanted for output in outputs]
    streamed = dict.fromkeys(range(6), "")
    for chunk in client.completions.create(stream=True, **drawn):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == texts


def test_penalties_reach_the_engine(client: openai.OpenAI, llm: LLM) -> None:
    given: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    more = {"repetition_penalty": 1.3, "min_p": 0.01, "top_k": 50}
    answer = client.completions.create(prompt="aaaa", extra_body=more, **given, **GREEDY)
    (wanted,) = expected(llm, "aaaa", **given, **more)[0]
    assert answer.choices[0].text == wanted.text
    assert answer.choices[0].text != expected(llm, "aaaa")[0][0].text


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 2}, "n"),  # with temperature 0
        ({"seed": -2}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"stop": ["a", ""]}, "stop"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [3, 97]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"request_id": "a/b"}, "request_id"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ],
)
def test_a_value_out_of_range_is_named(
    client: openai.OpenAI, given: dict[str, Any], param: str
) -> None:
    body = {**GREEDY, "prompt": "ab", **given}
    prompt = body.pop("prompt")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="", extra_body=body | {"prompt": prompt})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert param.split("[", 1)[0].split(".", 1)[0] in caught.value.message or param == "prompt"


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny") as caught:
        client.completions.create(model="gpt-5", prompt="a")
    assert caught.value.code == "model_not_found"


@pytest.mark.skipif(
    find_spec(BUNDLED_PACKAGE) is None, reason=f"{BUNDLED_PACKAGE} is not installed"
)
def test_a_real_model_answers() -> None:
    """SmolLM2, its own tokenizer and template: what is streamed over HTTP is what the engine says
    by itself.
    """
    loaded = load_model("smollm2")
    sizes: dict[str, Any] = {
        "num_blocks": 16,
        "block_size": 16,
        "max_model_len": 128,
        "device": "cpu",
    }
    question: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    model = LLM(loaded=loaded, policy="full-kv", **sizes)
    (wanted,) = model.chat(question, SamplingParams(temperature=0.0, max_tokens=10))[0].outputs
    with (
        served(EngineSettings(policy="full-kv", **sizes), loaded=loaded) as server,
        server.client() as client,
    ):
        chunks = client.chat.completions.create(
            model="tiny", messages=question, temperature=0.0, max_tokens=10, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == wanted.text
    assert "Paris" in text

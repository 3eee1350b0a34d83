"""Outputs that must have a form or avoid tokens: JSON, patterns, biases, bad words, least lengths;
and the log-probabilities of a prompt, which evaluation tools read.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.engine.engine_cases import SMALL, tiny
from tests.engine.server.server_cases import END, LETTERS, ROOMY, Served, lettered, served, sse
from zlab.engine.llm import LLM
from zlab.engine.sampling_params import SamplingParams, StructuredOutputs
from zlab.engine.server.protocol import REFUSED
from zlab.policies.core.request import Request

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "tiny", "prompt": "Name an animal:", "max_tokens": 120}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "tame": {"type": "boolean"},
    },
    "required": ["name", "legs", "tame"],
    "additionalProperties": False,
}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
END_ID = len(LETTERS)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


def ask(server: Served, **given: Any) -> dict[str, Any]:
    answer = server.post(COMPLETIONS, ASKED | given)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def refusal(server: Served, path: str = COMPLETIONS, **given: Any) -> dict[str, Any]:
    answer = server.post(path, ASKED | given)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def is_animal(text: str) -> bool:
    found = json.loads(text)
    return (
        set(found) == {"name", "legs", "tame"}
        and len(found["name"]) <= 8
        and 0 <= found["legs"] <= 8
        and isinstance(found["tame"], bool)
    )


# the form of an output


def test_every_output_that_ends_by_itself_has_the_schema(server: Served) -> None:
    answer = ask(server, response_format=AS_SCHEMA, n=24, seed=1, max_tokens=300)
    ended = [one for one in answer["choices"] if one["finish_reason"] == "stop"]
    assert len(ended) >= 20
    assert all(is_animal(one["text"]) for one in ended)
    assert len({one["text"] for one in ended}) > 10, "the model hardly varies"


def test_any_object(server: Served) -> None:
    answer = ask(server, response_format={"type": "json_object"}, n=8, seed=2, max_tokens=380)
    ended = [one["text"] for one in answer["choices"] if one["finish_reason"] == "stop"]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)


FORMS: list[tuple[str, dict[str, Any], str]] = [
    ("regex", {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, "[a-c]{3}-[0-9]{2}"),
    ("guided", {"guided_regex": "[x-z]+[0-9]"}, "[x-z]+[0-9]"),
    ("choice", {"structured_outputs": {"choice": ["a dog", 'a "cat"', "yes|no"]}}, ""),
    ("guided choice", {"guided_choice": ["a dog", 'a "cat"', "yes|no"]}, ""),
    ("lark", {"guided_grammar": 'start: "<" NAME ">"\nNAME: /[a-z]{1,5}/'}, "<[a-z]{1,5}>"),
]


@pytest.mark.parametrize(("name", "given", "pattern"), FORMS, ids=[form[0] for form in FORMS])
def test_a_form(server: Served, name: str, given: dict[str, Any], pattern: str) -> None:
    answer = ask(server, n=6, seed=3, max_tokens=300, **given)
    pattern = pattern or 'a dog|a "cat"|yes\\|no'
    assert {one["finish_reason"] for one in answer["choices"]} == {"stop"}
    assert all(re.fullmatch(pattern, text) for text in texts(answer)), texts(answer)


def test_a_chat_that_streams_json(server: Served) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "an animal"}],
        "response_format": AS_SCHEMA,
        "stream": True,
        "seed": 5,
        "max_tokens": 300,
    }
    answer = server.post(CHAT, body)
    *events, done = sse(answer.text)
    choices = [json.loads(data)["choices"][0] for data in events]
    assert done == "[DONE]"
    assert choices[-1]["finish_reason"] == "stop"
    assert is_animal("".join(choice["delta"].get("content", "") for choice in choices))


def test_a_form_does_not_depend_on_the_batch() -> None:
    """Alone and beside others, with little room: recomputation after a preemption, too."""
    params = [
        SamplingParams(seed=seed, max_tokens=90, structured_outputs=form)
        for seed, form in enumerate(
            [
                StructuredOutputs(json=json.dumps(SCHEMA)),
                StructuredOutputs(regex="([a-z] ){20,40}"),
                StructuredOutputs(json=json.dumps(SCHEMA)),
                StructuredOutputs(choice=("one thing", "another thing altogether")),
            ]
        )
    ]
    settings = {
        name: getattr(SMALL, name) for name in ("block_size", "max_batched_tokens", "max_model_len")
    }
    prompts = ["Name an animal: "[: 4 + seed] * 3 for seed in range(len(params))]

    def outputs(num_blocks: int, together: bool) -> tuple[list[list[int]], int]:
        llm = LLM(policy="full-kv", loaded=lettered(), num_blocks=num_blocks, **settings)
        ended: list[Request] = []
        take = llm.engine.take_ended

        def collect() -> list[tuple[Request, int]]:
            rows = take()
            ended.extend(request for request, _ in rows)
            return rows

        llm.engine.take_ended = collect  # type: ignore[method-assign]
        if together:
            results = llm.generate(prompts, params)
        else:
            results = [llm.generate(*pair)[0] for pair in zip(prompts, params, strict=True)]
        preemptions = sum(request.preemptions for request in ended)
        return [one.outputs[0].token_ids for one in results], preemptions

    alone, _ = outputs(60, together=False)
    assert outputs(60, together=True) == (alone, 0)
    again, preemptions = outputs(22, together=True)
    assert again == alone
    assert preemptions, "the pool is not small enough"


BAD_FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
    ({"structured_outputs": {}}, "structured_outputs", "got none"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and"),
    ({"structured_outputs": {"regx": "a"}}, "structured_outputs", "did you mean 'regex'"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs", "regex is not valid"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "different forms"),
    ({"guided_json": '{"type": "objekt"}'}, "structured_outputs", "json is not valid"),
    ({"guided_json": "{"}, "structured_outputs", "json is not valid"),
    ({"guided_grammar": "start: ("}, "structured_outputs", "grammar is not valid"),
    ({"guided_regex": "a", "min_tokens": 3}, "min_tokens", "structured_outputs"),
    ({"guided_regex": "a", "bad_words": ["b"]}, "bad_words", "structured_outputs"),
]


@pytest.mark.parametrize(("given", "param", "words"), BAD_FORMS)
def test_a_form_that_cannot_be_is_refused(
    server: Served, given: dict[str, Any], param: str, words: str
) -> None:
    error = refusal(server, **given)
    assert error["param"] == param, error
    assert words in error["message"], error


def test_a_model_without_tokenizer_knows_no_form() -> None:
    with served(loaded=tiny()) as server:
        error = refusal(server, prompt=[5, 6, 7], guided_regex="a")
        assert "tokenizer" in error["message"]
        error = refusal(server, prompt=[5, 6, 7], bad_words=["a"])
        assert "tokenizer" in error["message"]


# tokens that are excluded or wanted


def test_biases_and_allowed_tokens(server: Served) -> None:
    x, y = LETTERS.index("x"), LETTERS.index("y")
    answer = ask(server, logit_bias={str(x): 100}, max_tokens=12)
    assert texts(answer) == ["x" * 12]
    answer = ask(server, allowed_token_ids=[x, y], n=4, seed=1, max_tokens=12)
    assert all(set(text) <= {"x", "y"} for text in texts(answer))
    assert set("".join(texts(answer))) == {"x", "y"}
    plain = ask(server, temperature=0, max_tokens=6)
    first = LETTERS.index(texts(plain)[0][0])
    without = ask(server, temperature=0, max_tokens=6, logit_bias={str(first): -100})
    assert texts(without)[0][0] != texts(plain)[0][0]


def test_bad_words(server: Served) -> None:
    plain = texts(ask(server, temperature=0, max_tokens=30))[0]
    words = sorted({first + second for first, second in pairwise(plain)})[:12]
    single = plain[0]
    answer = texts(ask(server, temperature=0, max_tokens=30, bad_words=words))[0]
    assert not [word for word in words if word in answer]
    assert single not in texts(ask(server, temperature=0, max_tokens=30, bad_words=[single]))[0]


def test_nothing_stops_an_output_before_its_least_length(server: Served) -> None:
    soon = {"logit_bias": {str(END_ID): 100}, "max_tokens": 40}
    assert ask(server, **soon)["usage"]["completion_tokens"] == 1
    answer = ask(server, min_tokens=7, **soon)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert END not in texts(answer)[0]
    plain = texts(ask(server, temperature=0, max_tokens=30))[0]
    stopped = ask(server, temperature=0, max_tokens=30, stop=[plain[1]], min_tokens=9)
    assert stopped["usage"]["completion_tokens"] >= 9


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"min_tokens": 121}, "min_tokens", "more than max_tokens 120"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids as keys"),
        ({"logit_bias": {"97": 1}}, "logit_bias", "tokens 0..96"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "100"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
        ({"allowed_token_ids": [97]}, "allowed_token_ids", "tokens 0..96"),
        ({"allowed_token_ids": [96], "min_tokens": 2}, "allowed_token_ids", "min_tokens is 2"),
        ({"allowed_token_ids": [56], "bad_words": ["X"]}, "allowed_token_ids", "bad_words"),
        ({"bad_words": [""]}, "bad_words[0]", "at least 1"),
        ({"best_of": 1, "n": 2}, "best_of", "less than n 2"),
        ({"best_of": 3, "stream": True}, "best_of", "streamed"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "streamed"),
    ],
)
def test_constraints_that_cannot_hold_are_refused(
    server: Served, given: dict[str, Any], param: str, words: str
) -> None:
    error = refusal(server, **given)
    assert error["param"] is not None, error
    assert error["param"].startswith(param), error
    assert words in error["message"], error


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_an_output_and_is_not_done_is_refused(server: Served, name: str) -> None:
    asked: dict[str, Any] = {name: {"something": 1}}
    error = refusal(server, **asked)
    assert error["param"] == name
    for nothing in (None, [], *REFUSED[name]):
        assert "warnings" not in ask(server, max_tokens=1, **{name: nothing})


def test_values_that_mean_nothing_bring_no_warning(server: Served) -> None:
    answer = ask(server, max_tokens=2, response_format={"type": "text"}, best_of=1, seed=-1)
    assert "warnings" not in answer


def test_a_priority_that_no_order_knows_is_a_warning(server: Served) -> None:
    (warning,) = ask(server, max_tokens=1, priority=-3)["warnings"]
    assert warning["param"] == "priority"
    assert "FirstCome" in warning["message"]
    assert "warnings" not in ask(server, max_tokens=1, priority=0)


def test_a_smaller_priority_is_more_urgent() -> None:
    """As in vLLM: of two that wait, the one with the smaller value is served first."""
    urgent = "hybrid:tokens=24,window=4,order=priority"
    with served(replace(ROOMY, policy=urgent, max_running=1)) as server:
        server.gate.close()
        asked = []
        for place, (value, id) in enumerate(
            ((0, "running"), (9, "idle"), (0, "usual"), (-5, "urgent")), start=1
        ):
            body = ASKED | {"max_tokens": 3, "priority": value, "request_id": id}
            asked.append(server.later(COMPLETIONS, body))
            server.sent(place)
        server.gate.open()
        answers = [each.answer().json() for each in asked]
        assert not any("warnings" in answer for answer in answers)
        assert list(server.gate.num_ended) == ["running", "urgent", "usual", "idle"]


# the best of several, and the prompt


def test_the_best_of_several_outputs(server: Served) -> None:
    given = {"seed": 9, "max_tokens": 12, "logprobs": 0}
    every = ask(server, n=6, **given)["choices"]

    def mean(choice: dict[str, Any]) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return float(sum(values) / len(values))

    wanted = sorted(every, key=mean, reverse=True)[:2]
    best = ask(server, n=2, best_of=6, **given)
    assert texts(best) == [choice["text"] for choice in wanted]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] >= 6
    plain = ask(server, n=1, best_of=3, seed=9, max_tokens=5)
    assert plain["choices"][0]["logprobs"] is None


def prompt_values(ids: list[int]) -> list[float]:
    """Log-probabilities of the tokens but the first, by the model in one pass over the text."""
    llm = LLM(policy="full-kv", loaded=lettered(), num_blocks=60, block_size=8, max_model_len=400)
    values = []
    for end in range(1, len(ids)):
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
        (found,) = llm.generate([ids[:end]], params)[0].outputs[0].logprobs or []
        values.append(found[ids[end]].logprob if ids[end] in found else float("nan"))
    return values


def test_the_prompt_of_an_echo_is_judged_as_evaluation_tools_expect(server: Served) -> None:
    prompt = "ab cd, ab cd"
    ids = [LETTERS.index(letter) for letter in prompt]
    # As lm-eval asks: token ids, one token, the log-probabilities of prompt and output.
    answer = ask(server, prompt=[ids], max_tokens=1, temperature=0, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == list(range(len(prompt) + 1))
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert len(found["token_logprobs"]) == len(ids) + 1
    wanted = prompt_values(ids)
    checked = 0
    for given, value, top in zip(
        found["token_logprobs"][1:-1], wanted, found["top_logprobs"][1:-1], strict=True
    ):
        if value == value:
            checked += 1
            assert given == pytest.approx(value, abs=1e-4)
        assert max(top.values()) >= given
    assert checked >= 2
    alone = ask(server, prompt=prompt, max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert alone["text"] == prompt
    assert alone["logprobs"]["token_logprobs"][1:] == pytest.approx(
        found["token_logprobs"][1:-1], abs=1e-4
    )
    *events, _ = sse(
        server.post(
            COMPLETIONS, ASKED | {"prompt": prompt, "echo": True, "stream": True, "max_tokens": 3}
        ).text
    )
    pieces = [json.loads(data)["choices"][0]["text"] for data in events]
    assert pieces[0].startswith(prompt)
    assert "".join(pieces).count(prompt) == 1


def test_prompt_logprobs_have_the_shape_of_vllms(server: Served) -> None:
    answer = ask(server, prompt=["ab cd", "xyz"], max_tokens=2, n=2, seed=1, prompt_logprobs=2)
    choices = answer["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [5, 5, 3, 3]
    first, second = choices[0]["prompt_logprobs"][:2]
    assert first is None
    own = second[str(LETTERS.index("b"))]
    assert own["decoded_token"] == "b"
    assert {1, 2} <= {entry["rank"] for entry in second.values()}
    ranked = sorted(second.values(), key=lambda entry: entry["rank"])
    assert [e["logprob"] for e in ranked] == sorted((e["logprob"] for e in ranked), reverse=True)
    chat = server.post(
        CHAT,
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 1,
            "prompt_logprobs": 0,
        },
    ).json()
    assert chat["prompt_logprobs"][0] is None
    assert all(len(entry) <= 2 for entry in chat["prompt_logprobs"][1:])
    error = refusal(server, prompt="a" * (ROOMY.max_batched_tokens + 1), prompt_logprobs=1)
    assert "in one step" in error["message"]


def test_probabilities_of_a_prompt_are_the_models() -> None:
    """Against the model's own logits, for every token."""
    llm = LLM(policy="full-kv", loaded=tiny(), num_blocks=60, block_size=8, max_model_len=400)
    ids = [5 + (7 * place * place) % 90 for place in range(40)]
    found = llm.engine.prompt_logprobs(ids, 3)
    with torch.inference_mode():
        for end, one in enumerate(found, start=1):
            params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
            (top,) = llm.generate([ids[:end]], params)[0].outputs[0].logprobs or []
            best = sorted(top.values(), key=lambda entry: entry.rank)[:3]
            assert [value for _, value in one.top] == pytest.approx(
                [entry.logprob for entry in best], abs=1e-4
            )

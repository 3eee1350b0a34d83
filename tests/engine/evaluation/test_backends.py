"""The own engine and servers as what answers: the tiny reasoner solves its tasks on a CPU."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.engine.server.server_cases import served
from zlab.engine.engine import EngineSettings
from zlab.engine.errors import EngineError
from zlab.engine.evaluation.dataset import DataError, Example, read_datasets
from zlab.engine.evaluation.local import LocalBackend
from zlab.engine.evaluation.remote import RemoteBackend, ServerError
from zlab.engine.evaluation.results import EvaluatedColumn, ModelOutput
from zlab.engine.evaluation.runner import Evaluation, KeptTokens, Plan, Question, RunError
from zlab.engine.model.loader import LoadedModel, load_model

torch.set_num_threads(1)
COUNT = 16
TASK = f"task:chain?count={COUNT}&level=1&seed=9"
SETTINGS = EngineSettings(model="tiny-reasoner", device="cpu", block_size=16, num_blocks=1000)


@pytest.fixture(scope="module")
def reasoner() -> LoadedModel:
    return load_model("tiny-reasoner")


def backend(loaded: LoadedModel, **changes: Any) -> LocalBackend:
    given: dict[str, Any] = {"max_tokens": 500, "top_p": 1.0, "chat": False, "loaded": loaded}
    return LocalBackend(SETTINGS, **{**given, **changes})


def plan(*policies: str, **changes: Any) -> Plan:
    given: dict[str, Any] = {
        "baseline": "full-kv",
        "policies": policies,
        "budgets": (KeptTokens.parse("256"),),
        "temperatures": (0.0,),
        "samples": 1,
        "top_p": 1.0,
        "seed": 0,
        "max_tokens": 500,
        "block_size": 16,
    }
    return Plan(**{**given, **changes})


def test_full_kv_is_right_a_recency_window_wrong_and_the_default_scorer_between(
    reasoner: LoadedModel, tmp_path: Path
) -> None:
    wanted = plan("hybrid:scorer=recent", "hybrid:scorer=attention+global+lightning")
    data = read_datasets([TASK], None, None)
    found = Evaluation(wanted, data, backend(reasoner), tmp_path / "out").run()
    full, recent, zipage = found["columns"]
    assert full["pass_at_1"] >= 0.95
    assert full["compressions_per_output"] == 0
    assert recent["pass_at_1"] <= 0.05
    assert zipage["pass_at_1"] >= 0.75
    assert recent["of_baseline"]["p_value"] < 0.001
    assert recent["compressions_per_output"] > 5
    assert 380 < full["mean_output_tokens"] < 420


def test_drawn_outputs_depend_on_the_seed_alone(reasoner: LoadedModel) -> None:
    examples = read_datasets([TASK], None, 4)[0].examples
    column = EvaluatedColumn("a", "full-kv", "", 20.0, 1)

    def drawn(seed: int, count: int) -> dict[int, str]:
        questions = [
            Question(number, 0, seed + number, example)
            for number, example in enumerate(examples[:count])
        ]
        found = backend(reasoner, max_tokens=20).answer(column, questions)
        return {one.problem: one.text for one in found}

    first = drawn(0, 4)
    assert drawn(0, 2) == {number: first[number] for number in (0, 1)}
    assert drawn(50, 4) != first


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("hybrid:window=16,tokens=16,sink=8", "budget of 16 tokens is too small: window 16 + sink"),
        ("hybrid:window=32,tokens=256", "a window of 32 tokens does not fit a block of 16"),
    ],
)  # fmt: skip
def test_a_budget_below_what_the_policy_needs(
    reasoner: LoadedModel, policy: str, words: str
) -> None:
    column = plan(policy, budgets=()).others(1.0)[0]
    with pytest.raises(EngineError, match=words.replace("+", r"\+")):
        backend(reasoner).check([column], [])


def test_rows_that_cannot_be_served_are_named(reasoner: LoadedModel, tmp_path: Path) -> None:
    def refused(words: str, rows: str, **changes: Any) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text(rows)
        examples = read_datasets([str(path)], None, None)[0].examples
        with pytest.raises(DataError, match=words):
            backend(reasoner, **changes).check([], examples)

    prompt = json.dumps({"prompt": "walk : A B 1 ;", "answer": "x"})
    chat = json.dumps({"messages": [{"role": "user", "content": "a"}], "answer": "x"})
    refused(r"rows.jsonl:2: .* no chat template", f"{prompt}\n{chat}\n")
    refused(r"rows.jsonl:1: .* no chat template", f"{prompt}\n", chat=True)
    refused(r"rows.jsonl:1: a prompt of 6 tokens .* 5000 .* 4096", f"{prompt}\n", max_tokens=5000)


def test_a_model_without_the_words_of_a_task_is_refused(reasoner: LoadedModel) -> None:
    strange = Example("task:other", 1, "1", "<bos> unheard of", None, "x")
    with pytest.raises(DataError, match=r"task:other:1: .* has no tokens for this task"):
        backend(reasoner).check([], [strange])
    nameless = replace(reasoner, tokenizer=None)
    with pytest.raises(EngineError, match="'tiny-reasoner' has no tokenizer"):
        backend(nameless)


def test_what_is_called_between_steps_can_end_a_run(reasoner: LoadedModel) -> None:
    steps = 0

    def stop() -> None:
        nonlocal steps
        steps += 1
        if steps == 30:
            raise KeyboardInterrupt

    examples = read_datasets([TASK], None, 2)[0].examples
    questions = [Question(n, 0, n, example) for n, example in enumerate(examples)]
    with pytest.raises(KeyboardInterrupt):
        list(
            backend(reasoner, on_step=stop).answer(
                EvaluatedColumn("a", "full-kv", "", 0, 1), questions
            )
        )


# servers


def texts_of(journal: Path) -> dict[int, str]:
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    outputs = [row["output"] for row in rows if "output" in row]
    return {one["problem"]: one["text"] for one in outputs}


def test_a_server_gives_what_its_engine_gives(reasoner: LoadedModel, tmp_path: Path) -> None:
    data = read_datasets([TASK], None, 6)
    own = backend(reasoner, max_tokens=50)
    local = Evaluation(plan(budgets=()), data, own, tmp_path / "own").run()
    settings = replace(SETTINGS, policy="full-kv", max_model_len=700)
    with served(settings, loaded=reasoner) as server:
        address = f"http://127.0.0.1:{server.port}"
        remote = RemoteBackend(
            [address],
            model=None,
            max_tokens=50,
            top_p=1.0,
            chat=False,
            concurrency=4,
            timeout_s=60,
        )
        wanted = plan(budgets=(), servers=(address,))
        found = Evaluation(wanted, data, remote, tmp_path / "served").run()
    (one,), (other,) = found["columns"], local["columns"]
    assert one["server"] == one["name"] == address
    for name in ("pass_at_1", "mean_output_tokens", "share_at_cap"):
        assert one[name] == other[name]
    texts = [texts_of(tmp_path / folder / "journal.jsonl") for folder in ("own", "served")]
    assert texts[0] == texts[1]
    assert one["compressions_per_output"] is None


def completion(request: httpx.Request) -> httpx.Response:
    asked = json.loads(request.content)
    return httpx.Response(
        200,
        json={
            "choices": [{"text": asked["prompt"].upper(), "finish_reason": "stop"}],
            "usage": {"completion_tokens": 3},
        },
    )


def remote(handler: Callable[[httpx.Request], httpx.Response], **changes: Any) -> RemoteBackend:
    given: dict[str, Any] = {
        "model": "m",
        "max_tokens": 10,
        "top_p": 0.9,
        "chat": False,
        "concurrency": 2,
        "timeout_s": 5,
        "transport": httpx.MockTransport(handler),
    }
    return RemoteBackend(["http://a/"], **{**given, **changes})


def ask(
    answering: RemoteBackend, count: int = 5, temperature: float = 0.0, **row: Any
) -> Iterator[ModelOutput]:
    row = {"prompt": "hi", "messages": None, **row}
    example = Example("rows.jsonl", 3, "3", row["prompt"], row["messages"], "x")
    column = EvaluatedColumn("a", "", "", temperature, 1, server="http://a/")
    return answering.answer(column, [Question(n, 0, n, example) for n in range(count)])


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zlab.engine.evaluation.remote.WAITS_S", (0.0, 0.0))


def test_what_a_server_is_asked() -> None:
    asked: list[tuple[str, dict[str, Any], str | None]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        asked.append((request.url.path, body, request.headers.get("authorization")))
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "first"}, {"id": "second"}]})
        if "messages" in body:
            choice = {"message": {"content": None}, "finish_reason": "length"}
            usage = {"completion_tokens": 10}
            return httpx.Response(200, json={"choices": [choice], "usage": usage})
        return completion(request)

    (one,) = ask(remote(handler, model=None, key="secret"), 1, 0.7)
    assert (one.text, one.tokens, one.finish) == ("HI", 3, "stop")
    (two,) = ask(remote(handler, chat=True), 1)
    assert (two.text, two.finish) == ("", "length")
    messages = ({"role": "system", "content": "be brief"},)
    list(ask(remote(handler), 1, prompt=None, messages=messages))
    paths = [path for path, _, _ in asked]
    assert paths == [
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions",
    ]
    sampling = {"max_tokens": 10, "temperature": 0.7, "seed": 0, "top_p": 0.9}
    assert asked[1][1:] == ({"model": "first", "prompt": "hi", **sampling}, "Bearer secret")
    assert asked[2][1]["messages"] == [{"role": "user", "content": "hi"}]
    assert "top_p" not in asked[2][1]
    assert asked[3][1]["messages"] == list(messages)


def test_a_request_that_fails_is_tried_again(no_waits: None) -> None:
    lock, fails = threading.Lock(), [503, 429]

    def handler(request: httpx.Request) -> httpx.Response:
        with lock:
            status = fails.pop() if fails else 200
        return completion(request) if status == 200 else httpx.Response(status, text="busy")

    assert sorted(one.problem for one in ask(remote(handler))) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(400, text="no such model"), r"rows.jsonl:3: .*answers 400: no such model"),
        (httpx.Response(503, text="busy"), r"rows.jsonl:3: .*answers 503: busy"),
        (httpx.Response(200, json={"choices": []}), r"rows.jsonl:3: .*answers with no completion"),
        (httpx.Response(200, text="<html>"), r"rows.jsonl:3: .*answers with no JSON"),
        (httpx.ConnectError("refused"), r"rows.jsonl:3: .*cannot be reached: ConnectError"),
    ],
)
def test_a_server_that_does_not_answer(
    no_waits: None, answer: httpx.Response | Exception, words: str
) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(RunError, match=words):
        list(ask(remote(handler)))


def test_a_server_that_lists_no_model() -> None:
    with pytest.raises(ServerError, match="http://a/: lists no model"):
        remote(lambda request: httpx.Response(200, json={"data": []}), model=None)

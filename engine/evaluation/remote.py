"""Servers as what answers: any that speaks OpenAI's completions or chat completions."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import httpx

from zlab.engine.errors import EngineError
from zlab.engine.evaluation.dataset import Example
from zlab.engine.evaluation.results import EvaluatedColumn, ModelOutput
from zlab.engine.evaluation.runner import Question, RunError

RETRIED = (408, 429, 500, 502, 503, 504)
WAITS_S = (0.5, 2.0, 8.0)  # before each further attempt
CONNECT_S = 10.0
SHOWN = 300


class ServerError(EngineError):
    """A server that cannot be reached, or does not answer as OpenAI's would."""


class RemoteBackend:
    """Answers by HTTP, several requests at once; a request that fails is tried again."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        model: str | None,
        max_tokens: int,
        top_p: float,
        chat: bool,
        concurrency: int,
        timeout_s: float,
        key: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Ask every server for its model.

        Args:
            servers: addresses up to before `/v1`.
            model: as the servers name it; None takes the first that each lists.
            max_tokens: the cap of every output.
            top_p: of every output that is drawn.
            chat: a prompt becomes a user's message of a chat completion.
            concurrency: requests under way at once.
            timeout_s: for one output.
            key: sent as a bearer token.
            transport: takes the network's place, for tests.

        Raises:
            ServerError: a server cannot be reached, or lists no model.
        """
        self._max_tokens, self._top_p, self._chat = max_tokens, top_p, chat
        self._concurrency = concurrency
        self._client: Callable[[], httpx.Client] = partial(
            httpx.Client,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=concurrency),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            transport=transport,
        )
        with self._client() as http:
            self._models = {one: model or self._first_model(http, one) for one in servers}

    def _first_model(self, http: httpx.Client, server: str) -> str:
        body = _call(http, "GET", f"{server.rstrip('/')}/v1/models", None)
        try:
            return str(body["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ServerError(f"{server}: lists no model: {str(body)[:SHOWN]}") from error

    def describe(self) -> Mapping[str, Any]:
        """Which model each server serves."""
        return {"model": self._models, "chat": self._chat}

    def check(self, columns: Sequence[EvaluatedColumn], examples: Sequence[Example]) -> None:
        """A server judges its requests itself."""

    def answer(
        self, column: EvaluatedColumn, questions: Sequence[Question]
    ) -> Iterator[ModelOutput]:
        """The outputs in the order in which they are complete.

        Raises:
            RunError: a request failed after several attempts; the message has its row.
        """
        with self._client() as http:
            yield from self._answer(http, column, questions)

    def _answer(
        self, http: httpx.Client, column: EvaluatedColumn, questions: Sequence[Question]
    ) -> Iterator[ModelOutput]:
        stopped = threading.Event()
        left = iter(questions)
        pool = ThreadPoolExecutor(self._concurrency)
        running: set[Future[ModelOutput]] = set()
        try:
            while True:
                for question in left:
                    running.add(pool.submit(self._ask, http, column, question, stopped))
                    if len(running) == self._concurrency:
                        break
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            stopped.set()  # no further attempts
            pool.shutdown(wait=not running, cancel_futures=True)

    def _ask(
        self,
        http: httpx.Client,
        column: EvaluatedColumn,
        question: Question,
        stopped: threading.Event,
    ) -> ModelOutput:
        example = question.example
        asked: dict[str, Any] = {
            "model": self._models[column.server],
            "max_tokens": self._max_tokens,
            "temperature": column.temperature,
            "seed": question.seed,
        }
        if column.temperature > 0:
            asked["top_p"] = self._top_p
        messages = example.messages
        if messages is None and self._chat:
            messages = ({"role": "user", "content": example.prompt},)
        if messages is None:
            asked["prompt"] = example.prompt
        else:
            asked["messages"] = list(messages)
        route = "completions" if messages is None else "chat/completions"
        url = f"{column.server.rstrip('/')}/v1/{route}"
        try:
            body = _call(http, "POST", url, asked, stopped)
            choice = body["choices"][0]
            text = choice["text"] if messages is None else choice["message"]["content"]
            return ModelOutput(
                problem=question.problem,
                sample=question.sample,
                text=text or "",
                tokens=int(body["usage"]["completion_tokens"]),
                finish=str(choice["finish_reason"]),
            )
        except ServerError as error:
            raise RunError(f"{example.place}: {error}") from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RunError(
                f"{example.place}: {url} answers with no completion: {error!r} in "
                f"{str(body)[:SHOWN]}"
            ) from error


def _call(
    http: httpx.Client, method: str, url: str, asked: Any, stopped: threading.Event | None = None
) -> Any:
    """The answer's JSON. Raises ServerError after the last attempt."""
    problem = ""
    for wait_s in (*WAITS_S, None):
        try:
            answer = http.request(method, url, json=asked)
            if answer.is_success:
                return answer.json()
            problem = f"{url} answers {answer.status_code}: {answer.text[:SHOWN]}"
            if answer.status_code not in RETRIED:
                break
        except httpx.HTTPError as error:
            problem = f"{url} cannot be reached: {error!r}"
        except ValueError as error:
            raise ServerError(f"{url} answers with no JSON: {error}") from error
        if wait_s is None or (stopped is not None and stopped.wait(wait_s)):
            break
        if stopped is None:
            time.sleep(wait_s)
    raise ServerError(problem)

"""Answers of `/v1/completions` and `/v1/chat/completions`, whole or streamed.

    CompletionHandler (one request, on the event loop)
        encode the prompt -> Job -> AsyncEngine.submit -> deltas of its stream
        deltas -> ResponseFormat -> one JSON body, or the events of a stream

A request whose client disconnects is aborted in the engine. Every write to a stream has a time
limit (`WriteGuard`).
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from types import TracebackType
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from zlab.engine.sampling.constraints import Grammar
from zlab.engine.sampling.sampler import TokenLogprobs
from zlab.engine.server.context import ServerContext
from zlab.engine.server.jobs import Accepted, Delta, Event, Job, Refusal, Stream
from zlab.engine.server.protocol import (
    DONE,
    ID_HEADER,
    ApiError,
    Json,
    ParsedRequest,
    Warnings,
    error_response,
    event,
    invalid,
)

LOG = logging.getLogger("zlab.server")
EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
DISCONNECTED = ApiError(499, "the client closed the connection", code="client_gone")
MIN_LOGPROB = -9999.0  # minus infinity, which JSON does not have; the OpenAI API does the same
TokenName = Callable[[int], str]


class CompletionHandler(Response):
    """The answer to one request; the job is aborted on every way out that is not its end."""

    def __init__(
        self,
        context: ServerContext,
        request: ParsedRequest,
        encode: Callable[[], list[list[int]]],
        response_format: "type[ResponseFormat]",
        texts: Sequence[str] | None = None,
    ) -> None:
        """Prepare the answer.

        Args:
            context: the server's parts.
            request: the checked request.
            encode: returns the token ids of its prompts; runs on the tokenizer's thread.
            response_format: the shape of the answer.
            texts: the prompts, where they came as texts.
        """
        super().__init__()
        self._context = context
        self._request = request
        self._encode = encode
        self._response_format = response_format
        self._texts = texts
        self._job: Job | None = None
        self._started = False
        self._id_header = (ID_HEADER.lower().encode(), request.id.encode())

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        try:
            with self._context.concurrency.enter():
                status = await self._answer_unless_disconnected(scope, receive, send)
        except ApiError as error:
            status = await self._send_error(error, scope, receive, send)
        self._log(status, time.monotonic() - began)

    async def _answer_unless_disconnected(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Return the status; on every way out, abort what is left of the job."""
        answer = asyncio.create_task(self._answer(scope, receive, send))
        disconnect = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait((answer, disconnect), return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else DISCONNECTED.status_code
        finally:
            answer.cancel()
            disconnect.cancel()
            await asyncio.gather(answer, disconnect, return_exceptions=True)
            if self._job is not None:
                self._context.worker.abort(self._job, DISCONNECTED)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        timeout_s = self._context.settings.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._serve(scope, receive, send)
                return 200
        except TimeoutError:
            error = ApiError(504, f"not answered within {timeout_s:g} s", code="timeout")
            if self._job is not None:
                self._context.worker.abort(self._job, error)
        except ApiError as caught:
            error = caught
        except OSError:  # nothing more can be written to this client
            raise
        except Exception:
            if not self._started:
                raise
            LOG.exception("%s: the answer broke off", self._request.id)
            message = "an internal error; the server's log has it"
            error = ApiError(500, message, code="internal_error")
        return await self._send_error(error, scope, receive, send)

    async def _send_error(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> int:
        """Send the error, as far as that still goes; return its status."""
        if not self._started:
            response = error_response(error)
            response.headers[ID_HEADER] = self._request.id
            await response(scope, receive, send)
        elif error.code != "slow_reader":  # which would take nothing more: the connection closes
            with self._write_guard() as guard:
                await guard.send(send, event(error.body) + DONE, last=False)
                await guard.send(send, b"", last=True)
        return error.status_code

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, request = self._context, self._request
        prompts = await context.prompts.run(self._encode)
        wanted = request.params.structured_outputs
        grammar = None
        if wanted is not None:
            grammar = await context.prompts.run(partial(context.prompts.grammar, wanted))
        texts = self._texts or ()
        if request.echo and self._texts is None:
            texts = await context.prompts.run(partial(context.prompts.texts, prompts))
        job = self._job = self._make_job(prompts, grammar, texts)
        context.worker.submit(job)
        notes, events = await _accepted(job)
        warnings = [*request.warnings, *notes]
        response_format = self._response_format(
            job, context.served_model, context.prompts.token_name
        )
        if request.streamed:
            await self._stream(send, job, response_format, warnings, events)
            return
        # Without streaming, each output comes as one delta.
        outputs = [delta async for delta in _deltas(job, events)]
        outputs = best_outputs(outputs, request.params.n, request.num_choices)
        response = Json(response_format.whole(outputs, usage_of(job), warnings))
        response.headers[ID_HEADER] = request.id
        await response(scope, receive, send)

    async def _stream(
        self,
        send: Send,
        job: Job,
        response_format: "ResponseFormat",
        warnings: Warnings,
        events: list[Event],
    ) -> None:
        headers = [EVENT_STREAM, (b"cache-control", b"no-cache"), self._id_header]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._started = True
        usage = {"usage": None} if self._request.include_usage else {}
        # A chunk without choices, for the warnings alone, would break clients that read the first.
        extra: dict[str, Any] = usage | ({"warnings": warnings} if warnings else {})
        with self._write_guard() as guard:
            await guard.send(send, b"", last=False)  # sends the headers: the request is accepted
            async for delta in _deltas(job, events):
                await guard.send(send, event(response_format.chunk(delta) | extra), last=False)
                extra = usage
            if self._request.include_usage:
                usage_event = event(response_format.usage_chunk(usage_of(job)))
                await guard.send(send, usage_event, last=False)
            await guard.send(send, DONE, last=False)
            await guard.send(send, b"", last=True)

    def _write_guard(self) -> "WriteGuard":
        return WriteGuard(self._context.settings.write_timeout_s)

    def _make_job(
        self, prompts: list[list[int]], grammar: Grammar | None, texts: Sequence[str]
    ) -> Job:
        context, request = self._context, self._request
        n, limit = request.params.n, context.settings.max_outputs
        num_outputs = len(prompts) * n
        if num_outputs > limit:
            param = "n" if len(prompts) <= limit else "prompt"
            message = (
                f"{len(prompts)} prompts times n {n} are {num_outputs} outputs; "
                f"one request may ask for {limit}"
            )
            raise invalid(param, message)
        if request.params.stop_strings and not context.prompts.has_tokenizer:
            raise invalid(
                "stop", "this model has no tokenizer, so no text to stop at; stop_token_ids work"
            )
        # Without streaming, an output comes in one piece and is read at once.
        unread = context.settings.max_unread_tokens * num_outputs if request.streamed else inf
        stream = Stream(asyncio.get_running_loop(), unread)
        return Job(request, prompts, stream, grammar, texts)

    def _log(self, status: int, seconds: float) -> None:
        """Log one line a request: no text, no token, no key."""
        job = self._job
        LOG.info(
            "%s %d: %d prompt and %d output tokens in %.3f s",
            self._request.id,
            status,
            sum(map(len, job.prompts)) if job is not None else 0,
            sum(output.num_given for output in job.outputs) if job is not None else 0,
            seconds,
        )


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _accepted(job: Job) -> tuple[Warnings, list[Event]]:
    """Wait until the engine has the job; return its notes, and the events that came with them.

    Raises the error of a refused job.
    """
    first, *rest = await job.stream.read()
    if isinstance(first, Refusal):
        raise first.error
    assert isinstance(first, Accepted)
    return [{"param": param, "message": message} for param, message in first.notes], rest


async def _deltas(job: Job, events: list[Event]) -> AsyncIterator[Delta]:
    """Yield what the job's outputs gain until all have ended.

    Raises ApiError when an output was aborted or has failed.
    """
    num_open = job.num_outputs
    while True:
        for delta in _merge(item for item in events if isinstance(item, Delta)):
            if delta.finish_reason in ("abort", "error"):
                if delta.token_ids:  # what came before the end is good
                    yield replace(delta, finish_reason=None, stop_reason=None)
                if delta.failed_field is not None:  # not the server's fault
                    raise invalid(delta.failed_field, delta.message)
                raise job.cause or ApiError(
                    500, delta.message or "the request was called off", code="request_failed"
                )
            num_open -= delta.finish_reason is not None
            yield delta
        if not num_open:
            return
        events = await job.stream.read()


def _merge(deltas: Iterable[Delta]) -> list[Delta]:
    """Join the deltas of the same output: a reader that fell behind gets larger pieces."""
    found: dict[int, Delta] = {}
    for delta in deltas:
        before = found.get(delta.index)
        found[delta.index] = delta if before is None else before.join(delta)
    return list(found.values())


def best_outputs(outputs: Sequence[Delta], generated: int, returned: int) -> list[Delta]:
    """Return the outputs of an answer in order: of each prompt the best, by the mean of their
    tokens' log-probabilities, where more are generated than returned.

    Args:
        outputs: the one delta of each output.
        generated: outputs of each prompt.
        returned: outputs of each prompt in the answer.
    """
    found = sorted(outputs, key=lambda output: output.index)
    if generated == returned:
        return found
    best: list[Delta] = []
    for first in range(0, len(found), generated):
        ranked = sorted(found[first : first + generated], key=_mean_logprob, reverse=True)
        best += ranked[:returned]
    return [replace(output, index=index) for index, output in enumerate(best)]


def _mean_logprob(output: Delta) -> float:
    chosen = [logprobs.chosen for logprobs in output.logprobs]
    return sum(chosen) / len(chosen) if chosen else 0.0


def usage_of(job: Job) -> dict[str, Any]:
    """Count the tokens of a job that has ended: each prompt once, however many outputs it has."""
    prompt = sum(map(len, job.prompts))
    outputs = [output.engine_request for output in job.outputs]
    completion = sum(len(output.output.token_ids) for output in outputs)
    firsts = [output.request for output in outputs[:: job.request.params.n]]
    cached = sum(min(each.hit_tokens, each.num_prompt_tokens) for each in firsts)
    compressed = [output.request for output in outputs if output.request.compressions]
    evicted = sum(max(each.total_tokens - each.cache_tokens, 0) for each in compressed)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        # Beyond the OpenAI API: tokens that the output's last step could no longer attend to.
        "compression_details": {
            "compressions": sum(each.compressions for each in compressed),
            "evicted_tokens": evicted,
        },
    }


class ResponseFormat(ABC):
    """The shape of an answer. A whole answer and the chunks of a stream share their choices."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, job: Job, model: str, token_name: TokenName) -> None:
        """Prepare the shape.

        Args:
            job: the accepted job.
            model: the model's name for clients.
            token_name: returns the text of a token.
        """
        request = job.request
        created = int(time.time())
        self._heads = {
            name: {
                "id": f"{self.id_prefix}-{request.id}",
                "object": name,
                "created": created,
                "model": model,
            }
            for name in (self.whole_object, self.chunk_object)
        }
        self._token_name = token_name
        self._job = job
        self._has_logprobs = request.shows_logprobs
        self._has_token_ids = request.return_token_ids

    def whole(
        self, outputs: Sequence[Delta], usage: dict[str, Any], warnings: Warnings
    ) -> dict[str, Any]:
        """Return the body of an answer that is not streamed.

        Args:
            outputs: the one delta of each output, in order.
            usage: the token counts.
            warnings: the request's warnings; left out if empty.

        Returns:
            The JSON body.
        """
        choices = [self._ended(output, self._whole_choice(output)) for output in outputs]
        body = self._body(self.whole_object, choices) | {"usage": usage}
        body |= self._of_the_prompt()
        return body | ({"warnings": warnings} if warnings else {})

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Return the chunk with what is new; the last tokens come with the finish reason."""
        return self._body(self.chunk_object, [self._ended(delta, self._delta_choice(delta))])

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the chunk that counts tokens, after the last choice."""
        return self._body(self.chunk_object, []) | {"usage": usage}

    def _of_the_prompt(self) -> dict[str, Any]:
        """Return fields of a whole answer that describe its prompt."""
        return {}

    def _prompt_logprobs(self, prompt: int) -> list[dict[str, Any] | None]:
        """Return the log-probabilities of a prompt's tokens, as vLLM shapes them."""
        ids, num_top = self._job.prompts[prompt], self._job.request.prompt_logprobs or 0
        found: list[dict[str, Any] | None] = [None]
        for token, logprobs in zip(ids[1:], self._job.prompt_logprobs[prompt], strict=True):
            top = logprobs.top[:num_top]
            ranked = [(rank, *pair) for rank, pair in enumerate(top, start=1)]
            found.append(
                {
                    str(each): {
                        "logprob": _finite(value),
                        "rank": rank,
                        "decoded_token": self._token_name(each),
                    }
                    for rank, each, value in [*ranked, (logprobs.rank, token, logprobs.chosen)]
                }
            )
        return found

    def _ended(self, delta: Delta, choice: dict[str, Any]) -> dict[str, Any]:
        choice |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        return choice | ({"token_ids": delta.token_ids} if self._has_token_ids else {})

    def _body(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._heads[object_name], "choices": choices}

    @abstractmethod
    def _whole_choice(self, output: Delta) -> dict[str, Any]: ...

    @abstractmethod
    def _delta_choice(self, delta: Delta) -> dict[str, Any]: ...


class CompletionFormat(ResponseFormat):
    """`text_completion`: the answer of `/v1/completions`."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, job: Job, model: str, token_name: TokenName) -> None:
        super().__init__(job, model, token_name)
        self._offsets: dict[int, int] = {}  # characters of each choice's tokens so far

    @override
    def _whole_choice(self, output: Delta) -> dict[str, Any]:
        request, prompt = self._job.request, output.index // self._job.request.num_choices
        text, tokens, logprobs = output.text, output.token_ids, [*output.logprobs]
        top: list[TokenLogprobs | None] = [*logprobs]
        if request.echo and output.index not in self._offsets:
            text = self._job.prompt_texts[prompt] + text
            if self._has_logprobs:  # the first token of a prompt has no probability
                tokens = [*self._job.prompts[prompt], *tokens]
                top = [None, *self._job.prompt_logprobs[prompt], *logprobs]
        choice = {"index": output.index, "text": text, "logprobs": None}
        if self._has_logprobs and tokens:
            choice["logprobs"] = self._logprobs(output.index, tokens, top)
        self._offsets.setdefault(output.index, 0)
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(prompt)
        return choice

    @override
    def _delta_choice(self, delta: Delta) -> dict[str, Any]:
        return self._whole_choice(delta)

    def _logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        names = [self._token_name(token) for token in token_ids]
        offset, offsets = self._offsets.get(index, 0), []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        self._offsets[index] = offset
        return {
            "tokens": names,
            "token_logprobs": [None if one is None else _finite(one.chosen) for one in logprobs],
            "top_logprobs": [
                None if one is None else self._top(one) | {name: _finite(one.chosen)}
                for name, one in zip(names, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        num_top = self._job.request.params.logprobs or 0
        top = logprobs.top[:num_top]
        return {self._token_name(token): _finite(value) for token, value in top}


class ChatFormat(ResponseFormat):
    """`chat.completion` and its chunks: the answer of `/v1/chat/completions`.

    The first chunk of an output has the role and the first token: clients take the time of the
    first chunk for the time to the first token.
    """

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, job: Job, model: str, token_name: TokenName) -> None:
        super().__init__(job, model, token_name)
        self._begun: set[int] = set()  # outputs whose first chunk has been made

    @override
    def _whole_choice(self, output: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"index": output.index, "message": message, "logprobs": self._logprobs(output)}

    @override
    def _of_the_prompt(self) -> dict[str, Any]:
        if self._job.request.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": self._prompt_logprobs(0)}

    @override
    def _delta_choice(self, delta: Delta) -> dict[str, Any]:
        content: dict[str, Any] = {}
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            content = {"role": "assistant", "content": delta.text, "refusal": None}
        elif delta.text or delta.token_ids:
            content = {"content": delta.text}
        return {"index": delta.index, "delta": content, "logprobs": self._logprobs(delta)}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self._has_logprobs or not delta.token_ids:
            return None
        content = [
            self._entry(token, logprobs.chosen)
            | {"top_logprobs": [self._entry(*pair) for pair in logprobs.top]}
            for token, logprobs in zip(delta.token_ids, delta.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        name = self._token_name(token_id)
        return {"token": name, "logprob": _finite(logprob), "bytes": list(name.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


class WriteGuard:
    """Cancels the task that enters it, by an ApiError, when one write lasts over `timeout_s`.

    `asyncio.timeout` would set and clear a timer for every token of every stream, which costs the
    event loop more than the write. Here `begin` notes when a write began, and one timer looks at
    that, at most once every `timeout_s`.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None
        self._expired = False

    def begin(self) -> None:
        """Note that a write begins."""
        self._began_s = self._loop.time()

    def end(self) -> None:
        """Note that the write is over."""
        self._began_s = None

    def __enter__(self) -> "WriteGuard":
        task = asyncio.current_task()
        assert task is not None
        self._task, self._num_cancels = task, task.cancelling()
        self._timer = self._loop.call_later(self._timeout_s, self._look)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise ApiError in place of the cancellation that was this guard's own."""
        self._timer.cancel()
        own = self._expired and self._task.uncancel() <= self._num_cancels
        if own and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise ApiError(
                408, "the reader of this stream takes nothing", code="slow_reader"
            ) from None

    async def send(self, send: Send, body: bytes, last: bool) -> None:
        """Write a part of an answer; `last` ends the answer."""
        self.begin()
        await send({"type": "http.response.body", "body": body, "more_body": not last})
        self.end()

    def _look(self) -> None:
        now_s, began_s = self._loop.time(), self._began_s
        ends_s = (now_s if began_s is None else began_s) + self._timeout_s
        if ends_s <= now_s:
            self._expired = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_at(ends_s, self._look)

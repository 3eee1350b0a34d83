"""One request from the event loop's side: into the engine, its answer out, and called off when its client is gone."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from math import inf

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.server.asking import ID_HEADER, Ask
from engine.server.errors import ApiError, invalid
from engine.server.house import House
from engine.server.job import Accepted, Delta, Event, Job, Refusal, Stream
from engine.server.protocol import ChatRequest
from engine.server.sending import DONE, Json, error_response, event
from engine.server.shapes import ChatShape, CompletionShape, Gathered, Shape, merged, usage_of
from engine.server.warnings import Warnings
from engine.server.write_guard import WriteGuard

LOG = logging.getLogger("zlab.server")
EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
GONE = ApiError(499, "the client closed the connection", code="client_gone")


class Answer(Response):
    """The answer to `ask`. Whoever leaves before its end, however that shows, leaves nothing behind in the engine."""

    def __init__(self, house: House, ask: Ask) -> None:
        super().__init__()
        self._house = house
        self._ask = ask
        self._job: Job | None = None
        self._started = False
        self._id_header = (ID_HEADER.lower().encode(), ask.request_id.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client goes first."""
        began = time.monotonic()
        try:
            with self._house.door.entered():
                status = await self._attend(scope, receive, send)
        except ApiError as error:
            status = await self._say(error, scope, receive, send)
        self._log(status, time.monotonic() - began)

    async def _attend(self, scope: Scope, receive: Receive, send: Send) -> int:
        """The status that the client got; on every way out, what is left of the job is called off."""
        answering = asyncio.create_task(self._answer(scope, receive, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            return answering.result() if answering.done() else GONE.status_code
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
            if self._job is not None:
                self._house.worker.abort(self._job, GONE)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        try:
            async with asyncio.timeout(self._house.settings.request_timeout_s):
                await self._serve(scope, receive, send)
                return 200
        except TimeoutError:
            message = f"not answered within {self._house.settings.request_timeout_s:g} s"
            error = ApiError(504, message, code="timeout")
            if self._job is not None:
                self._house.worker.abort(self._job, error)
        except ApiError as caught:
            error = caught
        return await self._say(error, scope, receive, send)

    async def _say(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> int:
        """Tell the client what went wrong, as far as it still listens."""
        if not self._started:
            response = error_response(error)
            response.headers[ID_HEADER] = self._ask.request_id
            await response(scope, receive, send)
        elif error.code != "slow_reader":  # to whom nothing more would arrive: the connection is closed
            with self._guard() as guard:
                await guard.send(send, event(error.body) + DONE, last=False)
                await guard.send(send, b"", last=True)
        return error.status_code

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        ask, house = self._ask, self._house
        prompts = await house.prompts.off_loop(self._encode)
        job = self._job = self._make_job(prompts)
        house.worker.submit(job)
        notes, events = await _accepted(job)
        warnings = [*ask.warnings, *notes]
        shape = self._shape()
        if ask.streamed:
            await self._stream(send, job, shape, warnings, events)
            return
        outputs = [Gathered(index) for index in range(job.num_outputs)]
        async for delta in _deltas(job, events):
            outputs[delta.index].add(delta)
        response = Json(shape.whole(outputs, usage_of(job), warnings))
        response.headers[ID_HEADER] = ask.request_id
        await response(scope, receive, send)

    async def _stream(self, send: Send, job: Job, shape: Shape, warnings: Warnings, events: list[Event]) -> None:
        head = {"type": "http.response.start", "status": 200}
        headers = [EVENT_STREAM, (b"cache-control", b"no-cache"), self._id_header]
        await send(head | {"headers": headers})
        self._started = True
        usage = {"usage": None} if self._ask.include_usage else {}
        with self._guard() as guard:
            opening = shape.opening(job.num_outputs, warnings)
            await guard.send(send, b"".join(event(body | usage) for body in opening), last=False)
            async for delta in _deltas(job, events):
                await guard.send(send, b"".join(event(body | usage) for body in shape.chunks(delta)), last=False)
            if self._ask.include_usage:
                await guard.send(send, event(shape.usage_chunk(usage_of(job))), last=False)
            await guard.send(send, DONE, last=False)
            await guard.send(send, b"", last=True)

    def _guard(self) -> WriteGuard:
        """Gives up a client that takes nothing for too long."""
        return WriteGuard(self._house.settings.write_timeout_s)

    def _encode(self) -> list[list[int]]:
        body = self._ask.body
        if isinstance(body, ChatRequest):
            messages = [message.for_template() for message in body.messages]
            return [self._house.prompts.chat(messages, body.chat_template_kwargs or {})]
        return self._house.prompts.completion(body.prompt)

    def _make_job(self, prompts: list[list[int]]) -> Job:
        ask, house = self._ask, self._house
        most = house.settings.max_outputs
        if len(prompts) * ask.params.n > most:
            param = "n" if len(prompts) <= most else "prompt"
            asked = f"{len(prompts)} prompts times n {ask.params.n} are {len(prompts) * ask.params.n} outputs"
            raise invalid(param, f"{asked}; one request may ask for {most}")
        if ask.params.stop_strings and not house.prompts.has_text:
            raise invalid("stop", "this model has no tokenizer, so no text to stop at; stop_token_ids work")
        # What is not streamed comes in one piece, and its reader has nothing else to do.
        unread = house.settings.max_unread_tokens * ask.params.n * len(prompts) if ask.streamed else inf
        return Job(
            ask.request_id,
            prompts,
            ask.params,
            ask.max_tokens,
            Stream(asyncio.get_running_loop(), unread),
            ask.streamed,
            priority=ask.body.priority or 0,
            session=ask.body.user,
            prompt_param="messages" if isinstance(ask.body, ChatRequest) else "prompt",
            length_param=ask.length_param,
        )

    def _shape(self) -> Shape:
        kind = ChatShape if isinstance(self._ask.body, ChatRequest) else CompletionShape
        return kind(
            self._ask.request_id,
            self._house.served_model,
            self._house.prompts.token_name,
            wants_logprobs=self._ask.params.logprobs is not None,
            wants_ids=self._ask.return_token_ids,
        )

    def _log(self, status: int, seconds: float) -> None:
        """One line a request: no text, no token, no key."""
        job = self._job
        given = sum(entry.num_given for entry in job.entries) if job is not None else 0
        prompt = sum(map(len, job.prompts)) if job is not None else 0
        LOG.info(
            "%s %d: %d prompt and %d output tokens in %.3f s", self._ask.request_id, status, prompt, given, seconds
        )


async def _left(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _accepted(job: Job) -> tuple[Warnings, list[Event]]:
    """Wait until the engine has taken the job: its notes, and what came with them. Raises what it is refused with."""
    first, *rest = await job.stream.read()
    if isinstance(first, Refusal):
        raise first.error
    assert isinstance(first, Accepted)
    return [{"param": job.length_param, "message": note} for note in first.notes], rest


async def _deltas(job: Job, events: list[Event]) -> AsyncIterator[Delta]:
    """What the job's outputs gain until all have ended. Raises ApiError when one was called off or failed."""
    num_open = job.num_outputs
    while True:
        for item in merged(item for item in events if isinstance(item, Delta)):
            if item.finish_reason in ("abort", "error"):
                raise job.cause or ApiError(500, item.message or "the request was called off", code="request_failed")
            num_open -= item.finish_reason is not None
            yield item
        if not num_open:
            return
        events = await job.stream.read()

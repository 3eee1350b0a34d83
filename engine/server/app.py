"""The ASGI application: the routes of one server, around a `ServerContext`.

    /v1/completions, /v1/chat/completions, /v1/models   clients of the OpenAI API
    /tokenize, /detokenize                              the model's tokenizer
    /docs, /openapi.json                                what the routes take
    /health, /metrics                                   open to all
    GET /v1/policy, GET /v1/policy/watch                what each lane runs, and how it does
    POST /v1/policy, POST /v1/policy/undo               another policy decides, or the former again

Routes get the server's parts by FastAPI's dependencies, from `app.state`. API keys and body limits
are middleware: they answer before a body is parsed.
"""

import asyncio
import html
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware import Middleware
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from zlab.engine.server.auto_rollback import GateMonitor
from zlab.engine.server.completions import ChatFormat, CompletionFormat, CompletionHandler
from zlab.engine.server.context import ServerContext
from zlab.engine.server.lanes import (
    Lane,
    change_policy,
    check_setup,
    serving_setup,
    undo_change,
)
from zlab.engine.server.metrics import ServerMetrics
from zlab.engine.server.middleware import BodyLimit, KeyCheck
from zlab.engine.server.protocol import (
    ID_HEADER,
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Json,
    PolicyChangeRequest,
    PolicyUndoRequest,
    TokenizeRequest,
    check_model,
    check_text,
    error_response,
    invalid,
    parse_request,
    unavailable,
    validation_error,
)
from zlab.policies.core.policy import Policy
from zlab.policies.evidence import Target
from zlab.policies.snapshot import stored_from_dict
from zlab.policies.spec import PolicyError, policy_digest, policy_to_toml

CHANGE_TIMEOUT_S = 15.0  # `zlab promote` waits 20 s for the answer
UNKNOWN_ROUTE = "elsewhere"  # label of all other paths, so that no client makes up labels


def create_app(
    context: ServerContext,
    metrics: ServerMetrics | None = None,
    monitor: GateMonitor | None = None,
) -> FastAPI:
    """Build the application.

    Args:
        context: the server's parts.
        metrics: what `/metrics` shows; without it there is no such route.
        monitor: what `/v1/policy/watch` shows; without it that route answers 404.

    Returns:
        The application; its end closes the prompt encoder.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        context.prompts.close()

    settings = context.settings
    app = _App(
        title="Zipage Lab",
        summary="An OpenAI-compatible server whose scheduling policy is known.",
        version="1",
        docs_url=None,  # its page would load scripts from elsewhere; ours is `docs_page`
        redoc_url=None,
        lifespan=lifespan,
        middleware=[
            *cors(settings.cors_origins),
            Middleware(KeyCheck, keys=context.keys),
            Middleware(
                BodyLimit, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
            ),
        ],
    )
    app.state.context, app.state.metrics, app.state.monitor = context, metrics, monitor
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(Exception, _on_exception)
    app.include_router(open_routes)
    app.include_router(completion_routes)
    app.include_router(text_routes)
    app.include_router(policy_routes)
    if metrics is not None:
        app.include_router(metrics_routes)
    return app


def cors(origins: Sequence[str]) -> list[Middleware]:
    """Return the middleware that lets pages of these origins call the server; none for none."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=[ID_HEADER, "Retry-After"],
        )
    ]


class _App(FastAPI):
    @override
    def openapi(self) -> dict[str, Any]:
        """Leave out the framework's own shape of a validation error: no client ever gets it."""
        description = super().openapi()
        for path in description["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            description["components"]["schemas"].pop(name, None)
        return description


class ResponseCount:
    """ASGI middleware that counts every response, those of other middleware included."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                # A request that was refused before routing has no route yet.
                path = getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
                self._metrics.count_response(path, message["status"])
            await send(message)

        await self._app(scope, receive, count)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return error_response(error)
    return error_response(ApiError(error.status_code, str(error.detail), headers=error.headers))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(validation_error(error.errors()))


async def _on_exception(request: Request, error: Exception) -> Response:
    """Answer without details; the server's log has them."""
    message = "an internal error; the server's log has it"
    return error_response(ApiError(500, message, code="internal_error"))


# what the OpenAPI description says of answers

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_JSON = {"application/json": {"schema": {"type": "object"}}}
_MEANINGS = {
    400: "A field has a wrong type or value, `param` names it; or the request can never be served.",
    401: "No API key, or a wrong one.",
    403: "The server was started without an admin key.",
    404: "No such model.",
    405: "No such method here.",
    408: "The body did not arrive in time.",
    409: "A request of this id is still running.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests are under way or wait; `Retry-After` says when to come back.",
    500: "The engine failed in a step of this request.",
    503: "The server is shutting down, starting or not healthy.",
    504: "Not answered in time.",
}
Answers = dict[int | str, dict[str, Any]]


def _error(description: str) -> dict[str, Any]:
    content = {"application/json": {"schema": ERROR_SCHEMA}}
    return {"description": description, "content": content}


def _errors(*statuses: int) -> Answers:
    return {status: _error(_MEANINGS[status]) for status in statuses}


JSON_ANSWERS: Answers = {
    200: {"description": "As the OpenAI API has it.", "content": _JSON},
    **_errors(400, 401, 404, 503),
}
CHANGE_ANSWERS: Answers = {
    200: {"description": "The lane, now that the policy decides.", "content": _JSON},
    **_errors(400, 401, 403, 408, 413, 415, 503),
    409: _error("The policy cannot work in the lane, or is not the last change; nothing changed."),
}
HEALTH_ANSWERS: Answers = {
    200: {"description": "The engine is healthy.", "content": _JSON},
    503: {"description": "It is not, or the server is shutting down.", "content": _JSON},
}
TEXT_ANSWERS: Answers = {
    200: {"description": "As vLLM has it.", "content": _JSON},
    **_errors(400, 401, 404, 408, 413, 415, 503),
}
STREAM_ANSWERS: Answers = {
    200: {
        "description": "As the OpenAI API has it; with `stream`, server-sent events that end "
        "with `[DONE]`.",
        "content": _JSON | {"text/event-stream": {}},
    },
    **_errors(*(status for status in _MEANINGS if status not in (403, 405))),
}

# dependencies


async def _context(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


async def _metrics(request: Request) -> ServerMetrics:
    metrics: ServerMetrics = request.app.state.metrics
    return metrics


async def _monitor(request: Request) -> GateMonitor:
    monitor: GateMonitor | None = request.app.state.monitor
    if monitor is None:
        raise ApiError(404, "this server was started without --gates", code="no_watch")
    return monitor


Context = Annotated[ServerContext, Depends(_context)]
Metrics = Annotated[ServerMetrics, Depends(_metrics)]
Monitor = Annotated[GateMonitor, Depends(_monitor)]
IdHeader = Annotated[str | None, Header(alias=ID_HEADER)]

# completions

completion_routes = APIRouter(prefix="/v1")


@completion_routes.post("/completions", response_class=Response, responses=STREAM_ANSWERS)
async def completions(
    body: CompletionRequest, context: Context, header_id: IdHeader = None
) -> Response:
    """Go on with a text, several texts, or lists of token ids."""
    request = parse_request(body, header_id, context.served_model)
    encode = partial(context.prompts.completion, body.prompt)
    several = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    texts = [text for text in several if isinstance(text, str)] or None
    return CompletionHandler(context, request, encode, CompletionFormat, texts)


@completion_routes.post("/chat/completions", response_class=Response, responses=STREAM_ANSWERS)
async def chat_completions(
    body: ChatRequest, context: Context, header_id: IdHeader = None
) -> Response:
    """Answer a conversation, by the model's chat template."""
    request = parse_request(body, header_id, context.served_model)
    messages = [message.for_template() for message in body.messages]
    encode = partial(context.prompts.chat, messages, body.template_use())
    return CompletionHandler(context, request, encode, ChatFormat)


@completion_routes.get("/models", response_class=Response, responses=JSON_ANSWERS)
async def models(context: Context) -> Response:
    """List the one model that is served."""
    return Json({"object": "list", "data": [await _model(context)]})


@completion_routes.get("/models/{model:path}", response_class=Response, responses=JSON_ANSWERS)
async def model(model: str, context: Context) -> Response:
    """Describe the model that is served."""
    check_model(model, context.served_model)
    return Json(await _model(context))


async def _model(context: ServerContext) -> dict[str, Any]:
    lengths = await context.lengths()
    return {
        "id": context.served_model,
        "object": "model",
        "created": int(context.started_unix_s),
        "owned_by": "zipage-lab",
        # Any prompt and output up to this together are served; the other two are the extremes.
        "max_model_len": lengths.total,
        "max_prompt_tokens": lengths.prompt,
        "max_output_tokens": lengths.output,
    }


# the tokenizer, and the description of the routes

text_routes = APIRouter()


@text_routes.post("/tokenize", response_class=Response, responses=TEXT_ANSWERS)
async def tokenize(body: TokenizeRequest, context: Context) -> Response:
    """Turn a text or a conversation into tokens, as the server does with a prompt."""
    check_model(body.model, context.served_model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    check_text(body)
    special = body.add_special_tokens
    prompts = context.prompts
    if body.prompt is not None:
        encode = partial(prompts.text_tokens, body.prompt, special is not False)
    else:
        messages = [message.for_template() for message in body.messages or ()]
        encode = partial(prompts.conversation, messages, body.template_use(), bool(special))
    tokens = await prompts.run(encode)
    texts = [prompts.token_name(token) for token in tokens] if body.return_token_strs else None
    lengths = await context.lengths()
    return Json(
        {
            "count": len(tokens),
            "max_model_len": lengths.total,
            "tokens": tokens,
            "token_strs": texts,
        }
    )


@text_routes.post("/detokenize", response_class=Response, responses=TEXT_ANSWERS)
async def detokenize(body: DetokenizeRequest, context: Context) -> Response:
    """Turn tokens into the text that they spell, special tokens included."""
    check_model(body.model, context.served_model)
    return Json(
        {"prompt": await context.prompts.run(partial(context.prompts.text_of, body.tokens))}
    )


@text_routes.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """Show the description of the routes as a page."""
    return HTMLResponse(docs_page(request.app.openapi()))


def docs_page(description: dict[str, Any]) -> str:
    """Return a page without scripts: the routes of an OpenAPI description, and their fields."""
    schemas = description["components"]["schemas"]
    parts = []
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            text = html.escape(operation.get("description", ""))
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{text}</p>")
            content = operation.get("requestBody", {}).get("content", {})
            name = content.get("application/json", {}).get("schema", {}).get("$ref", "")
            if name:
                parts.append(_fields_table(schemas[name.rpartition("/")[2]]))
            answers = "".join(
                f"<li>{status}: {html.escape(answer['description'])}</li>"
                for status, answer in operation["responses"].items()
            )
            parts.append(f"<ul>{answers}</ul>")
    title = html.escape(description["info"]["title"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<h1>{title}</h1><p>{html.escape(description['info']['summary'])} "
        f'<a href="openapi.json">openapi.json</a></p>{"".join(parts)}</html>'
    )


def _fields_table(schema: dict[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code><td>{'required' if name in needed else ''}"
        f"<td>{html.escape(field.get('description', ''))}"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<table>{rows}</table>"


# health and metrics

open_routes = APIRouter()  # no key needed: they say nothing of any request
metrics_routes = APIRouter()


@open_routes.head("/health", include_in_schema=False)
@open_routes.get("/health", response_class=Response, responses=HEALTH_ANSWERS)
async def health(context: Context) -> Response:
    """Answer 200 while requests are taken and the engine makes progress; otherwise 503 and why."""
    trouble, num_active = context.worker.trouble(), context.concurrency.num_active
    if context.concurrency.closed:
        return Json({"status": "draining", "under_way": num_active}, 503)
    if trouble is not None:
        return Json({"status": "unhealthy", "reason": trouble}, 503)
    failed = context.worker.observers.failed
    return Json({"status": "ok", "under_way": num_active, "observers_failed": failed})


# A plain function runs on a thread of the pool: it waits for the engine and writes a long text.
@metrics_routes.get(
    "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}}
)
def scrape(context: Context, metrics: Metrics) -> Response:
    """Figures of every lane and of the server, in Prometheus' text format."""
    return Response(metrics.exposition(context.worker.call), media_type=CONTENT_TYPE_LATEST)


# policies

policy_routes = APIRouter(prefix="/v1")


@policy_routes.get("/policy", response_class=Response, responses=JSON_ANSWERS)
async def policy(context: Context) -> Response:
    """Every lane's policy, since when, why and on what evidence."""
    if context.worker.trouble() is not None:
        raise unavailable("the engine cannot be asked now", "engine_unavailable")
    return Json(
        {"lanes": await context.call_engine(partial(describe_lanes, target=context.target))}
    )


@policy_routes.post("/policy", response_class=Response, responses=CHANGE_ANSWERS)
async def change(body: PolicyChangeRequest, context: Context) -> Response:
    """Answer 200 once the policy decides; otherwise nothing has changed."""
    policy = await asyncio.to_thread(_load_policy, body)
    why = f"{body.who}: {body.why}" if body.why else body.who

    def change_checked(lanes: Sequence[Lane]) -> Lane:
        if body.setup is not None:
            check_setup(lanes, body.lane, context.target, body.setup)
        return change_policy(lanes, body.lane, policy, why, body.evidence)

    return await _change_lane(context, change_checked)


@policy_routes.post("/policy/undo", response_class=Response, responses=CHANGE_ANSWERS)
async def undo(body: PolicyUndoRequest, context: Context) -> Response:
    """Answer 200 once all is as before the last change; any other status says why it is not."""
    return await _change_lane(context, partial(undo_change, name=body.lane, digest=body.digest))


@policy_routes.get("/policy/watch", response_class=Response, responses=JSON_ANSWERS)
async def watch(context: Context, monitor: Monitor) -> Response:
    """Which gates are watched, what was measured lately, and what was rolled back."""
    return Json(await context.call_engine(lambda _: monitor.state()))


def describe_lanes(lanes: Sequence[Lane], target: Target | None = None) -> list[dict[str, Any]]:
    """Return the lanes as JSON; on the engine's thread."""
    return [
        {
            "lane": lane.name,
            "share": lane.share,
            "policy": lane.policy.name,
            "digest": policy_digest(lane.policy),
            "toml": policy_to_toml(lane.policy),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(lane.deployed.since_unix_s)),
            "why": lane.deployed.why,
            "evidence": lane.deployed.evidence,
            "num_blocks": lane.engine.limits.num_blocks,
            "setup": serving_setup(lanes, lane, target),
            "decision_digest": lane.engine.scheduler.digest(),
            "follows_live": lane.deployed.follows_live,
            "before": None if lane.deployed.before is None else lane.deployed.before[0].name,
            "rebuilt": lane.num_rebuilt,
        }
        for lane in lanes
    ]


async def _change_lane(
    context: ServerContext, change: Callable[[Sequence[Lane]], Lane]
) -> Response:
    """Change a lane between two steps, and describe it. Raises ApiError."""

    def changed(lanes: Sequence[Lane]) -> dict[str, Any]:
        lane = change(lanes)
        return next(
            row for row in describe_lanes(lanes, context.target) if row["lane"] == lane.name
        )

    future = context.worker.call(changed)
    answer = asyncio.wrap_future(future)
    done, _ = await asyncio.wait([answer], timeout=CHANGE_TIMEOUT_S)
    if not done and future.cancel():
        message = f"the engine was busy for {CHANGE_TIMEOUT_S:.0f} s; nothing was changed"
        raise unavailable(message, "engine_busy", 5)
    return Json(await answer)


def _load_policy(body: PolicyChangeRequest) -> Policy | None:
    """Return the policy that was sent. Raises ApiError with the field that is wrong."""
    if body.policy is None:
        if body.lane == "live":
            raise invalid("policy", "the live lane needs a policy", "no_policy")
        return None
    if body.digest is None:
        raise invalid("digest", "a policy comes with its digest", "no_digest")
    stored = {
        "name": body.name,
        "toml": body.policy,
        "digest": body.digest,
        "sources": body.sources,
    }
    try:
        return stored_from_dict(stored).load()
    except PolicyError as error:
        raise invalid("policy", str(error), "bad_policy") from error

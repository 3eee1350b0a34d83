"""`/metrics`: what Prometheus scrapes; and the count of responses that it shows."""

from collections.abc import Callable

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.house import House
from engine.server.metrics import ServerMetrics

ELSEWHERE = "elsewhere"  # paths that are none of the application's: no client makes up labels


def metrics_routes(metrics: ServerMetrics) -> Callable[[House], APIRouter]:
    """The route, for `create_app(..., more_routes=[metrics_routes(metrics)])`."""

    def routes(house: House) -> APIRouter:
        router = APIRouter()

        # A plain function: it waits for the engine's thread and writes a long text, on a thread of the pool.
        @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
        def scrape() -> Response:
            """Figures of every lane and of the server in Prometheus' text format (docs/SERVE_METRICS.md)."""
            return Response(metrics.exposition(house.worker.call), media_type=CONTENT_TYPE_LATEST)

        return router

    return routes


class ResponseCount:
    """ASGI middleware: tells the metrics of every response, also of those that other middleware gives."""

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
                self._metrics.answered(_route(scope), message["status"])
            await send(message)

        await self._app(scope, receive, count)


def _route(scope: Scope) -> str:
    """The path that a route was declared with; a request that was turned away earlier has none yet."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else ELSEWHERE

"""The ASGI application: routes, limits and keys around one engine worker."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware import Middleware
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine.server.asking import ID_HEADER
from engine.server.errors import ApiError
from engine.server.house import House
from engine.server.keys import KeyCheck
from engine.server.limits import BodyLimit
from engine.server.mistakes import mistake
from engine.server.routes_completions import completion_routes
from engine.server.routes_state import health_routes, policy_routes
from engine.server.sending import error_response

Routes = Callable[[House], APIRouter]


def create_app(house: House, more_routes: Sequence[Routes] = ()) -> FastAPI:
    """The application; `more_routes` make further routers (metrics, administration) for the same house."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        house.prompts.close()

    app = FastAPI(
        title="Zipage Lab",
        summary="An OpenAI-compatible server whose scheduling policy is known.",
        version="1",
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        middleware=[
            Middleware(KeyCheck, keys=house.keys),
            Middleware(BodyLimit, max_bytes=house.settings.max_body_bytes, timeout_s=house.settings.body_timeout_s),
        ],
    )
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_mistake)
    app.add_exception_handler(Exception, _on_fault)
    for routes in (health_routes, completion_routes, policy_routes, *more_routes):
        app.include_router(routes(house))
    describe = app.openapi

    def described() -> dict[str, Any]:
        return _without_framework_errors(describe())

    app.openapi = described  # type: ignore[method-assign]
    return app


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return error_response(error)
    found = ApiError(error.status_code, str(error.detail), headers=error.headers)
    return error_response(found)


async def _on_mistake(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(mistake(error.errors()))


async def _on_fault(request: Request, error: Exception) -> Response:
    """A fault of this program: the log has it, the client gets the shape that it knows and no details."""
    return error_response(ApiError(500, "an internal error; the server's log has it", code="internal_error"))


def _without_framework_errors(description: dict[str, Any]) -> dict[str, Any]:
    """The framework describes its own shape of a validation error, which no client of this server ever sees."""
    for path in description["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            if operation.get("requestBody"):
                operation.setdefault("parameters", []).append(
                    {"name": ID_HEADER, "in": "header", "required": False, "schema": {"type": "string"}}
                    if not any(each["name"] == ID_HEADER for each in operation.get("parameters", []))
                    else operation["parameters"].pop()
                )
    for name in ("HTTPValidationError", "ValidationError"):
        description["components"]["schemas"].pop(name, None)
    return description

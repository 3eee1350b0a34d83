"""Bytes for clients: JSON that is always valid UTF-8, errors, and the events of a stream."""

import json
from typing import Any

from starlette.responses import Response
from starlette.types import Send

from engine.server.errors import ApiError

DONE = b"data: [DONE]\n\n"
_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def to_json(value: Any) -> bytes:
    """Compact JSON. What is no character (half of a surrogate pair, in a name that is quoted) becomes `?`."""
    return _COMPACT.encode(value).encode("utf-8", "replace")


def event(value: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + to_json(value) + b"\n\n"


class Json(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return to_json(content)


def error_response(error: ApiError) -> Response:
    """The answer that an error is."""
    return Json(error.body, error.status_code, error.headers)


async def send_error(send: Send, error: ApiError) -> None:
    """Answer with an error, outside of the framework."""
    response = error_response(error)
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})

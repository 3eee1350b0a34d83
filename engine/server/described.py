"""What the OpenAPI description says about answers, errors included."""

from typing import Any

ERROR: dict[str, Any] = {
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
    403: "The server has no such key to give.",
    404: "No such model.",
    405: "No such method here.",
    408: "The body did not arrive in time.",
    409: "A request of this id is still running.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests are under way or wait; `Retry-After` says when to come back.",
    500: "The engine failed in a step of this request.",
    503: "The server is shutting down, starting or not well.",
    504: "Not answered in time.",
}
Answers = dict[int | str, dict[str, Any]]


def _described(*statuses: int) -> Answers:
    return {
        status: {"description": _MEANINGS[status], "content": {"application/json": {"schema": ERROR}}}
        for status in statuses
    }


ANSWERS: Answers = {
    200: {"description": "As the OpenAI API has it.", "content": _JSON},
    **_described(400, 401, 404, 503),
}
HEALTH: Answers = {
    200: {"description": "The engine is well.", "content": _JSON},
    503: {"description": "It is not, or the server is shutting down.", "content": _JSON},
}
STREAMED: Answers = {
    200: {
        "description": "As the OpenAI API has it; with `stream`, server-sent events that end with `[DONE]`.",
        "content": _JSON | {"text/event-stream": {}},
    },
    **_described(*(status for status in _MEANINGS if status not in (403, 405))),
}

"""What is wrong with a body, in the words of the API: the field, what it must be, what it was."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import nearest
from engine.server.errors import ApiError, invalid
from engine.server.protocol import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    Message,
    PolicyChangeRequest,
    StreamOptions,
)

FIELDS = frozenset(
    name
    for model in (CompletionRequest, ChatRequest, Message, ContentPart, StreamOptions, PolicyChangeRequest)
    for name in model.model_fields
)
EITHER = {  # fields that may be one of several things, of which each would complain by itself
    "prompt": "must be a text, a list of texts, a list of token ids, or a list of lists of token ids",
    "stop": "must be a text or a list of at most 64 texts, none empty",
    "content": "must be a text, a list of parts {type: text, text: ...}, or null",
}
MOST_SHOWN = 80  # characters of a wrong value


def mistake(errors: Sequence[Any]) -> ApiError:
    """The 400 for the first field that is wrong."""
    first: Mapping[str, Any] = errors[0]
    if first["type"] == "json_invalid":
        return invalid(None, f"the body is no JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if first["type"] == "extra_forbidden":  # where a field too many is an error and no warning
        field = str(first["loc"][-1])
        known = PolicyChangeRequest.model_fields
        return invalid(field, f"unknown field {field!r}{nearest(field, known)} (choices: {', '.join(known)})")
    path = [part for part in first["loc"][1:] if isinstance(part, int) or part in FIELDS]
    if not path:
        return invalid(None, "the body must be a JSON object, sent as application/json")
    for place, part in enumerate(path):
        if part in EITHER:
            name = _dotted(path[: place + 1])
            return invalid(name, f"{name} {EITHER[part]}" if first["type"] != "missing" else f"{name} is missing")
    name = _dotted(path)
    if first["type"] == "missing":
        return invalid(name, f"{name} is missing")
    shown = repr(first.get("input"))
    shown = shown if len(shown) <= MOST_SHOWN else shown[:MOST_SHOWN] + "..."
    return invalid(name, f"{name}: {first['msg'][0].lower()}{first['msg'][1:]}, got {shown}")


def _dotted(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text

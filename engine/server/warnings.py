"""What a request asks for and does not get: every such field is named in the response, none is silently ignored."""

import difflib
from collections.abc import Mapping
from typing import Any

from engine.server.protocol import SamplingRequest

NOT_SUPPORTED = frozenset(  # of the OpenAI API
    {"audio", "best_of", "echo", "function_call", "functions", "logit_bias", "metadata", "modalities"}
    | {"parallel_tool_calls", "prediction", "prompt_cache_key", "reasoning_effort", "response_format"}
    | {"safety_identifier", "service_tier", "store", "suffix", "tool_choice", "tools", "verbosity"}
    | {"web_search_options"}
)
MOST_WARNINGS = 32
MOST_NAME_CHARACTERS = 64
Warnings = list[dict[str, str]]


def warnings_for(request: SamplingRequest) -> Warnings:
    """A warning for each field that this server does not know or support, with the nearest name that it does."""
    known = list(type(request).model_fields)
    found = _unknown(request.model_extra or {}, known, "")
    if request.stream_options is not None:
        options = list(type(request.stream_options).model_fields)
        found += _unknown(request.stream_options.model_extra or {}, options, "stream_options.")
        if not request.stream:
            found.append(_warning("stream_options", "has no effect without stream"))
    if len(found) > MOST_WARNINGS:
        more = len(found) - MOST_WARNINGS
        found = [*found[:MOST_WARNINGS], {"param": "", "message": f"{more} more fields are unknown and were ignored"}]
    return found


def _unknown(extra: Mapping[str, Any], known: list[str], where: str) -> Warnings:
    found = []
    for name, value in extra.items():
        if name in NOT_SUPPORTED and not where:
            if value is None or value is False or value in ([], {}):
                continue  # asks for nothing
            found.append(_warning(name, "is not supported by this server and was ignored"))
        else:
            found.append(_warning(where + name, f"is unknown and was ignored{_nearest(name, known)}"))
    return found


def _warning(name: str, what: str) -> dict[str, str]:
    shown = name if len(name) <= MOST_NAME_CHARACTERS else name[:MOST_NAME_CHARACTERS] + "..."
    return {"param": shown, "message": f"parameter {shown!r} {what}"}


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name[:MOST_NAME_CHARACTERS], known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""

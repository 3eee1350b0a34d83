"""What of a request's body says where its prefix is held, without a tokenizer and before anything has been checked."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.server.replicas_affinity import prefix_keys

BYTES_PER_TOKEN = 4  # of English text; a rough guess costs only that a block begins to count a little early or late


@dataclass(frozen=True)
class Demand:
    """What the affinity rule is told of a request. `request_id`: the caller's own, in the body."""

    keys: tuple[int, ...] = ()
    num_outputs: int = 1
    request_id: str | None = None


def demand_of(body: bytes, block_size: int) -> Demand:
    """Keys of the prompt (the first, of several) and how many outputs are asked for.

    A prompt of token ids is cut where the engine cuts it; a text or a conversation in pieces of about as many tokens.
    A body that makes no sense has no keys: whoever it is sent to refuses it.
    """
    try:
        fields = json.loads(body)
    except ValueError:
        return Demand()
    if not isinstance(fields, dict):
        return Demand()
    prompts = _prompts(fields)
    copies = fields.get("n")
    num_copies = copies if isinstance(copies, int) and copies > 0 else 1
    id = fields.get("request_id")
    return Demand(
        _keys(prompts[0], block_size) if prompts else (),
        max(len(prompts), 1) * num_copies,
        id if isinstance(id, str) else None,
    )


def _prompts(fields: Mapping[str, Any]) -> list[Any]:
    """The prompts as they came: texts or lists of ids; a conversation is one text, and so begins as its past did."""
    messages = fields.get("messages")
    if isinstance(messages, list):
        tools = json.dumps(fields.get("tools"))  # a template puts them before the messages
        return [tools + "".join(json.dumps(message, ensure_ascii=False, sort_keys=True) for message in messages)]
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt
    return [] if prompt is None else [prompt]


def _keys(prompt: Any, block_size: int) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return prefix_keys(prompt.encode("utf-8", "surrogatepass"), block_size * BYTES_PER_TOKEN)
    if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
        return prefix_keys(prompt, block_size)
    return ()

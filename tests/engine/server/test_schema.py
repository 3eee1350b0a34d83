"""Whatever the OpenAPI description allows, and much that it does not, is answered as it says, and
never by a 500.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as openapi_checks

from tests.engine.server.server_cases import ROOMY, WAIT_S, Served, served
from zlab.engine.server.app import create_app
from zlab.engine.server.context import ServerSettings
from zlab.engine.server.middleware import Keys

ADMIN = "the-key-of-the-admin"
KEPT = (
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(
        replace(ROOMY, max_model_len=48), ServerSettings(max_outputs=3), Keys.of(admin=[ADMIN])
    ) as running:
        yield running


OPERATIONS = {
    "POST /v1/completions": 30,
    "POST /v1/chat/completions": 30,
    "GET /v1/models": 2,
    "GET /v1/models/{model}": 10,
    "GET /v1/policy": 2,
    "POST /v1/policy": 20,
    "POST /v1/policy/undo": 10,
    "GET /v1/policy/watch": 2,
    "GET /health": 2,
    "POST /tokenize": 15,
    "POST /detokenize": 10,
}  # with how many requests to make

CASES = [(name, GenerationMode.POSITIVE) for name in OPERATIONS] + [
    (name, GenerationMode.NEGATIVE) for name in OPERATIONS if name.startswith("POST")
]


@pytest.fixture(scope="module")
def description(server: Served) -> Any:
    return schemathesis.openapi.from_dict(create_app(server.context).openapi())


@pytest.fixture(scope="module")
def narrowed(server: Served) -> Any:
    """The description with what this very server can serve: its model, its tokens, few outputs of
    drawn tokens.
    """
    found = create_app(server.context).openapi()
    for name in ("CompletionRequest", "ChatRequest"):
        fields = found["components"]["schemas"][name]["properties"]
        fields["model"] = {"enum": ["tiny"]}
        fields["n"] = {"type": "integer", "minimum": 1, "maximum": 2}
        fields["temperature"] = {"type": "number", "minimum": 0.5, "maximum": 2.0}
    words = {"type": "string", "pattern": "^[a-z ]{1,20}$"}
    fields["messages"] = {
        "type": "array",
        "minItems": 1,
        "maxItems": 2,
        "items": {"$ref": "#/components/schemas/Message"},
    }
    found["components"]["schemas"]["Message"]["properties"]["content"] = words
    ids = {
        "type": "array",
        "minItems": 1,
        "maxItems": 20,
        "items": {"type": "integer", "minimum": 0, "maximum": 96},
    }
    found["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"] = {
        "anyOf": [words, ids]
    }
    return schemathesis.openapi.from_dict(found)


def test_every_route_is_described(description: Any) -> None:
    described = {
        f"{found.ok().method.upper()} {found.ok().path}"
        for found in description.get_all_operations()
    }
    assert described == set(OPERATIONS)


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_nothing_is_a_500(
    server: Served, description: Any, name: str, mode: GenerationMode
) -> None:
    ask_much(server, description, name, mode, OPERATIONS[name])


@pytest.mark.parametrize("name", ["POST /v1/completions", "POST /v1/chat/completions"])
def test_what_can_be_served_is(server: Served, narrowed: Any, name: str) -> None:
    assert 200 in ask_much(server, narrowed, name, GenerationMode.POSITIVE, 12)


def ask_much(
    server: Served, description: Any, name: str, mode: GenerationMode, num_requests: int
) -> list[int]:
    """Requests made up by the description; the statuses of their answers."""
    method, path = name.split()
    statuses = []

    @settings(
        max_examples=num_requests,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=description[path][method].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        headers = {"Authorization": f"Bearer {ADMIN}"} if "/policy" in path else {}
        response = case.call(base_url=server.url, timeout=WAIT_S, headers=headers)
        case.validate_response(response, checks=list(KEPT))
        statuses.append(response.status_code)

    ask()
    server.assert_all_free()
    return statuses

"""docs/SERVE.md says what the server does: its routes, the keys they ask for, and a change of
policy by hand.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.engine.server.server_cases import served
from tests.house_source import ROOT
from zlab.engine.server.app import create_app
from zlab.engine.server.metrics import ServerMetrics
from zlab.engine.server.middleware import Keys
from zlab.policies.spec import load_policy, policy_digest

PAGE = (ROOT / "docs" / "SERVE.md").read_text("utf-8")
ROW = re.compile(r"^\| (`(?:GET|POST) /.*?) \| (.*?) \| .*\|$", flags=re.MULTILINE)
API, ADMIN = "a-key-of-the-api", "the-key-of-the-admin"
ASKED_FOR = {"none": set(), "API": {API}, "API or admin": {API, ADMIN}, "admin": {ADMIN}}


def told() -> dict[tuple[str, str], set[str]]:
    """Method and path -> keys that are good enough, as the page has it."""
    return {
        (method, path): ASKED_FOR[keys]
        for routes, keys in ROW.findall(PAGE)
        for method, path in re.findall(r"`(\w+) (\S+?)`", routes)
    }


def test_the_routes_are_those_of_the_server_and_ask_for_those_keys() -> None:
    with served(keys=Keys.of([API], [ADMIN])) as server, server.http() as client:
        app = create_app(server.context, ServerMetrics())
        paths = app.openapi()["paths"]
        found = {(method.upper(), path) for path, methods in paths.items() for method in methods}
        found |= {("GET", "/docs"), ("GET", "/openapi.json")}  # they are about the routes
        assert set(told()) == found
        for (method, path), good in told().items():
            if path == "/metrics":
                continue  # the application under test has none
            for key in ("", API, ADMIN):
                headers = {"Authorization": f"Bearer {key}"} if key else {"Authorization": ""}
                status = client.request(
                    method, path, headers=headers, json={} if method == "POST" else None
                ).status_code
                assert (status not in (401, 403)) == (not good or key in good), (
                    method,
                    path,
                    key,
                    status,
                )


def test_the_change_by_hand_works_as_written_and_is_taken_back(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    fits = source.replace("hybrid:budget.tokens=1024", "hybrid:tokens=32,window=4")
    assert fits != source, "a budget for so small a pool"
    (tmp_path / "change.py").write_text(fits, "utf-8")
    made = subprocess.run(
        [sys.executable, "change.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    change = json.loads(made.stdout)
    headers = {"Authorization": f"Bearer {ADMIN}"}
    with served(keys=Keys.of(admin=[ADMIN]), canary_share=0.5) as server:
        with server.http() as client:
            before = client.get("/v1/policy").json()["lanes"][0]["digest"]
        digest = policy_digest(load_policy("hybrid:tokens=32,window=4"))
        answer = server.post("/v1/policy", change | {"lane": "canary"}, headers=headers)
        assert (answer.status_code, answer.json()["digest"]) == (200, digest)
        (ends,) = re.findall(r'`(\{"lane": "canary".*?\})`', PAGE)
        assert (
            server.post("/v1/policy", json.loads(ends), headers=headers).json()["digest"] == before
        )
        answer = server.post("/v1/policy", change, headers=headers)
        assert (answer.status_code, answer.json()["digest"], answer.json()["why"]) == (
            200,
            digest,
            "ada: a try",
        )
        (undo,) = re.findall(r"`POST /v1/policy/undo` with `(\{.*?\})`", PAGE)
        answer = server.post(
            "/v1/policy/undo", json.loads(undo) | {"digest": digest}, headers=headers
        )
        assert (answer.status_code, answer.json()["digest"]) == (200, before)

"""`/metrics` of a whole server over HTTP, with what it records."""

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client import CONTENT_TYPE_LATEST

from engine.server.house import House
from engine.server.keys import Keys
from engine.server.live_trace import RecordSettings
from engine.server.server import ServerPlan, open_server
from tests.engine.engine_cases import SMALL
from tests.engine.server.test_metrics import one, parsed
from traces.formats import read_trace
from traces.run import load_run

KEY = "a-key-of-some-length"
PROMPT = list(range(5, 40))
ENGINE = replace(SMALL, model="dummy:tiny")


async def served(plan: ServerPlan) -> tuple[House, list[httpx.Response]]:
    """A few requests, good and bad, and then the metrics."""
    house, app = open_server(plan)
    transport, wanted = httpx.ASGITransport(app), {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        body = {"model": "tiny-there", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        answers = [
            await client.post("/v1/completions", json=body, headers=wanted),
            await client.post("/v1/completions", json=body | {"max_tokens": "many"}, headers=wanted),
            await client.post("/v1/completions", json=body),
            await client.get("/nowhere/7", headers=wanted),
            await client.get("/metrics"),
        ]
    return house, answers


@pytest.mark.parametrize("steps", [True, False])
def test_a_server_shows_and_records_what_it_did(tmp_path: Path, steps: bool) -> None:
    plan = ServerPlan(
        engine=ENGINE,
        policy="full-kv:window=4",
        keys=Keys.of([KEY]),
        served_model="tiny-there",
        record=tmp_path,
        record_settings=RecordSettings(steps=steps),
    )
    house, answers = asyncio.run(served(plan))
    house.close(timeout_s=30)
    assert [answer.status_code for answer in answers] == [200, 400, 401, 404, 200]
    assert answers[-1].headers["content-type"] == CONTENT_TYPE_LATEST
    page = parsed(answers[-1].content)
    assert one(page, "vllm:generation_tokens_total") == 8
    assert one(page, "vllm:prompt_tokens_total") == len(PROMPT)
    assert 'model_name="tiny-there"' in answers[-1].text
    counted = {tuple(dict(labels).values()): value for labels, value in page["zlab:http_responses_total"].items()}
    assert counted == {
        ("/v1/completions", "200"): 1,
        ("/v1/completions", "400"): 1,
        ("elsewhere", "401"): 1,
        ("elsewhere", "404"): 1,
    }
    assert one(page, "zlab:recording_failed") == 0
    (folder,) = tmp_path.iterdir()
    (row,) = read_trace(folder / "trace-00000.jsonl")
    assert (row.prompt_tokens, row.output_tokens, row.prompt_ids) == (len(PROMPT), 8, None)
    assert (folder / "live").exists() == steps
    if steps:
        run = load_run(folder / "live")
        assert run.manifest["complete"]
        assert run.summary["output_tokens"] == 8

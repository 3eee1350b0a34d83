"""Many clients at once, some of them leaving, while the policy changes: nothing is lost, doubled, or altered."""

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import httpx
import pytest

from engine.build import EngineSettings
from engine.loading import BUNDLED_PACKAGE, load_model
from engine.server.changing import Order, carry_out
from engine.server.lanes import LIVE, Lane
from engine.server.settings import ServerSettings
from policies.core.policy import Policy
from policies.spec import load_policy
from tests.engine.server_cases import ROOMY, Served, lettered, served

COMPLETIONS = "/v1/completions"
# None of them gives up a token at the lengths of these tests, so that outputs can be set against a quiet run.
SMALL_POLICIES = (
    "full-kv",
    "hybrid:tokens=48,window=4",
    "full-kv:order=shortest-prompt",
    "constrained:tokens=48,window=4",
)
SOAK_POLICIES = ("full-kv", "hybrid:tokens=192", "full-kv:order=shortest-prompt", "constrained:tokens=192")
CANCELLED = 0.2  # share of the requests whose client leaves


@dataclass
class Tally:
    """What the clients have seen."""

    wanted: list[list[int]]  # tokens of each prompt in a quiet run
    prompts: list[list[int]]
    num_tokens: int
    rng: random.Random
    finished: list[str] = field(default_factory=list)  # ids
    left: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def body(self, number: int) -> dict[str, Any]:
        """A greedy request of fixed length for one of the prompts."""
        return {
            "prompt": self.prompts[number],
            "max_tokens": self.num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }


def quiet(server: Served, tally: Tally) -> None:
    """Every prompt by itself, one after the other."""
    for number in range(len(tally.prompts)):
        answer = server.post(COMPLETIONS, tally.body(number))
        tally.wanted.append(answer.json()["choices"][0]["token_ids"])
    server.assert_all_free()
    server.gate.forget()


async def one(client: httpx.AsyncClient, tally: Tally, id: str) -> None:
    """A request: streamed or not, to its end or not."""
    number = tally.rng.randrange(len(tally.prompts))
    streamed = tally.rng.random() < 0.5
    leaves = tally.rng.random() < CANCELLED
    patience = tally.rng.random()  # of what a whole answer takes, roughly
    body = tally.body(number) | {"request_id": id, "stream": streamed}
    if not streamed:
        try:
            async with asyncio.timeout(patience * 0.2 if leaves else None):
                answer = await client.post(COMPLETIONS, json=body)
        except TimeoutError:
            tally.left.append(id)
            return
        tally.statuses[answer.status_code] += 1
        note(tally, id, number, answer.json()["choices"][0]["token_ids"])
        return
    most_chunks = int(patience * tally.num_tokens) if leaves else None
    tokens: list[int] = []
    num_chunks = 0
    async with client.stream("POST", COMPLETIONS, json=body) as answer:
        tally.statuses[answer.status_code] += 1
        async for line in answer.aiter_lines():
            if most_chunks is not None and num_chunks >= most_chunks:
                tally.left.append(id)
                return
            if line.startswith("data: {"):
                num_chunks += 1
                tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
    note(tally, id, number, tokens)


def note(tally: Tally, id: str, number: int, tokens: list[int]) -> None:
    tally.finished.append(id)
    if tokens != tally.wanted[number]:
        tally.wrong.append(f"{id}: {tokens} instead of {tally.wanted[number]}")


def swap(lanes: Sequence[Lane], policy: Policy) -> None:
    carry_out(lanes, Order(LIVE, policy, "load"))


async def load(server: Served, tally: Tally, num_clients: int, num_each: int, for_s: float, every: float) -> int:
    """So many clients with `num_each` requests each, or for so long; the policy changes every `every` endings (or
    seconds). Returns how often it has changed."""
    policies = [load_policy(name) for name in server.house.worker.call(_names).result()]
    ends_at = time.monotonic() + for_s
    changes = 0
    running = True

    async def client_of(number: int) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=None) as client:
            turn = 0
            while (turn < num_each) if num_each else (time.monotonic() < ends_at):
                await one(client, tally, f"c{number}-{turn}")
                turn += 1

    async def swapping() -> None:
        nonlocal changes
        last = 0.0
        while running:
            now = time.monotonic() if for_s else float(len(server.gate.num_ended))
            if now - last >= every:
                last = now
                changes += 1
                policy = policies[changes % len(policies)]
                await server.house.ask_engine(partial(swap, policy=policy))
            await asyncio.sleep(0.005)

    swapper = asyncio.create_task(swapping())
    await asyncio.gather(*(client_of(number) for number in range(num_clients)))
    running = False
    await swapper
    return changes


def _names(lanes: Sequence[Lane]) -> list[str]:
    settings = lanes[0].engine.settings
    return [name for name in settings.may_become if isinstance(name, str)]


def check(server: Served, tally: Tally, changes: int) -> None:
    """No id twice, none lost; all is free; what was finished is what a quiet run gives."""
    server.assert_all_free()
    assert not tally.wrong, tally.wrong[:3]
    assert set(tally.statuses) == {200}
    assert tally.finished
    assert tally.left
    assert changes > 1
    ended = server.gate.num_ended
    assert set(ended.values()) == {1}
    assert set(tally.finished) <= set(ended), "a finished request that the engine never ended"
    assert set(ended) <= set(tally.finished) | set(tally.left), "an id that nobody asked for"
    for id in tally.finished:
        assert server.gate.reasons[id] == "length"
    for id in set(ended) & set(tally.left):
        assert server.gate.reasons[id] in ("abort", "length")  # it may have been done before that was known


def tally_of(num_prompts: int, num_tokens: int, vocabulary: int, longest: int) -> Tally:
    rng = random.Random(7)
    shared = [rng.randrange(5, vocabulary) for _ in range(longest // 2)]
    prompts = []
    for place in range(num_prompts):
        own = [rng.randrange(5, vocabulary) for _ in range(rng.randrange(2, longest // 2))]
        prompts.append(shared + own if place % 2 else own)
    return Tally([], prompts, num_tokens, rng)


def test_a_small_load() -> None:
    engine = replace(ROOMY, policy=SMALL_POLICIES[0], may_become=SMALL_POLICIES)
    tally = tally_of(num_prompts=8, num_tokens=20, vocabulary=96, longest=20)
    with served(engine, loaded=lettered()) as server:
        quiet(server, tally)
        changes = asyncio.run(load(server, tally, num_clients=10, num_each=5, for_s=0.0, every=6))
        check(server, tally, changes)
        assert len(tally.finished) + len(tally.left) == 50


@pytest.mark.soak
def test_soak() -> None:
    """200 clients for 2 minutes on SmolLM2, a fifth of the requests given up, another policy every 10 s."""
    if find_spec(BUNDLED_PACKAGE) is None:
        pytest.skip(f"{BUNDLED_PACKAGE} is not installed")
    num_clients = int(os.environ.get("ZLAB_SOAK_CLIENTS", "200"))
    seconds = float(os.environ.get("ZLAB_SOAK_SECONDS", "120"))
    engine = EngineSettings(
        model="smollm2", policy=SOAK_POLICIES[0], may_become=SOAK_POLICIES, device="cpu", num_blocks=600, block_size=16,
        max_model_len=128, max_running=64, max_batched_tokens=512,
    )  # fmt: skip
    tally = tally_of(num_prompts=16, num_tokens=12, vocabulary=49_000, longest=48)
    began = time.monotonic()
    with served(engine, ServerSettings(request_timeout_s=3600.0), loaded=load_model("smollm2")) as server:
        quiet(server, tally)
        first_step = server.gate.lanes[LIVE].engine.scheduler.next_step
        changes = asyncio.run(load(server, tally, num_clients, num_each=0, for_s=seconds, every=10.0))
        check(server, tally, changes)
        steps = server.gate.lanes[LIVE].engine.scheduler.next_step - first_step
        reasons = Counter(server.gate.reasons[id] for id in server.gate.num_ended)
        print(
            f"\nsoak: {num_clients} clients, {len(tally.finished)} requests finished, {len(tally.left)} given up, "
            f"{dict(reasons)} in the engine, {changes} policy changes, {steps} steps, "
            f"{sum(server.gate.num_tokens.values())} tokens, {time.monotonic() - began:.0f} s in all"
        )

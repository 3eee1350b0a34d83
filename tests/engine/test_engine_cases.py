"""Cases of ../shared/cases that an engine can break with its tensors, not only a scheduler with its
books.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.engine_cases import SMALL, Watched, play, prompt, request, tiny, watched
from tests.shared import SHARED, needs_shared
from zlab.engine.engine import EngineSettings
from zlab.engine.errors import EngineError
from zlab.engine.llm import LLM
from zlab.engine.sampling_params import SamplingParams
from zlab.policies.spec import PolicyError, load_policy, policy_from_toml, policy_to_toml
from zlab.traces.schema import EventKind, Phase, Status
from zlab.traces.workload import TraceRequest

pytestmark = needs_shared


def read(id: str) -> dict[str, Any]:
    lines = (SHARED / "cases" / "cases.jsonl").read_text("utf-8").splitlines()
    return next(found for found in map(json.loads, lines) if found["id"] == id)


def asked(item: dict[str, Any], seed: int) -> TraceRequest:
    ids = item.get("prompt_ids") or prompt(seed, item["prompt"])
    return replace(request(item["id"], ids, item["output"]), max_tokens=item["max_tokens"])


def engine(id: str, policy: str = "", **changes: Any) -> tuple[Watched, list[TraceRequest]]:
    row = read(id)
    spec = row["preset"] + (
        f":blocks={row['n_max']},tokens=0,window={row['window']}{policy}" if "n_max" in row else ""
    )
    sizes = {"num_blocks": row["pool_blocks"], "block_size": row["block_size"]} | changes
    return watched(spec, **sizes), [asked(item, seed) for seed, item in enumerate(row["requests"])]


@pytest.mark.parametrize("join", ["boundary", "when_done", "blocking"])
def test_b18_a_sharer_ends_while_the_other_compresses(join: str) -> None:
    run, (first, second) = engine("B18", f",join={join}")
    one = run.submit(first).request
    while not one.generated:
        run.step()
    two = run.submit(second).request
    run.run()
    run.assert_empty()
    assert two.hit_tokens == 8
    assert one.compressions > 2
    assert two.status is one.status is Status.FINISHED
    alone = play(
        [first], f"hybrid:blocks=3,tokens=0,window=2,join={join}", num_blocks=16, block_size=4
    )
    assert run.tokens()["A"] == alone.tokens()["A"]


def test_b20_blocks_of_an_aborted_request_are_not_handed_on_early() -> None:
    run, requests = engine("B20")
    for one in requests:
        run.submit(one)
    first = run.sequences["A"].request
    while first.phase is not Phase.COMPRESSING:
        run.step()
    table, state = list(first.table), run.engine.scheduler.state
    run.engine.abort("A")
    assert all(state.pool.refs[block] for block in table), "the compression still reads them"
    assert run.engine.compression is not None
    run.step()
    assert first.number not in run.engine.compression.running
    run.run()
    run.assert_empty()
    assert first.status is Status.ABORTED
    other = play([requests[1]], "hybrid:blocks=3,tokens=0,window=2", num_blocks=8, block_size=4)
    assert run.tokens()["B"] == other.tokens()["B"]


def test_b24_a_prefix_outlives_the_compression_of_its_only_user() -> None:
    run, (first, second) = engine("B24")
    run.submit(first)
    run.run()
    assert run.sequences["A"].request.compressions > 5
    run.submit(second)
    run.run()
    run.assert_empty()
    assert run.sequences["B"].request.hit_tokens == 8
    fresh = play([second], "full-kv", num_blocks=64, block_size=4)
    assert run.tokens()["B"] == fresh.tokens()["B"], (
        "what it found there is what it would have computed"
    )
    assert run.count(EventKind.PREFIX_LOST) == 0


def test_b24_where_the_policy_gives_it_up_it_is_counted() -> None:
    run, (first, second) = engine("B24", ",prefix.keep=false")
    run.submit(first)
    run.run()
    run.submit(second)
    run.run()
    assert run.count(EventKind.PREFIX_LOST) > 0
    fresh = play([second], "full-kv", num_blocks=64, block_size=4)
    assert run.tokens()["B"] == fresh.tokens()["B"]


def test_b28_no_token_wanted() -> None:
    run, (zero, negative) = engine("B28")
    run.submit(zero)
    run.submit(negative)
    again = run.submit(replace(zero, id="Z2", output_tokens=2, max_tokens=2))
    run.run()
    run.assert_empty()
    first, refused = run.sequences["Z"], run.sequences["N"]
    assert (first.request.status, first.output.token_ids) == (Status.FINISHED, [])
    assert first.closed
    assert refused.request.status is Status.REFUSED
    assert refused.closed
    assert "-1" in refused.request.message
    assert len(again.output.token_ids) == 2
    later = run.submit(replace(zero, id="Z3", output_tokens=1, max_tokens=1))
    run.run()
    assert later.request.hit_tokens == 4, "the prefix was cached"


def test_b43_an_unknown_option_is_an_error_that_names_it() -> None:
    text = policy_to_toml(load_policy("hybrid")) + "redundncy_lambda = 0.2\n"
    with pytest.raises(PolicyError, match="redundncy_lambda"):
        policy_from_toml(text)
    with pytest.raises(
        EngineError, match=r"unknown setting 'num_block'; did you mean 'num_blocks'\?"
    ):
        LLM("nothing", num_block=3)
    with pytest.raises(
        EngineError, match=r"unknown sampling parameter 'temprature'; did you mean 'temperature'\?"
    ):
        SamplingParams(temprature=0.2)  # type: ignore[call-arg]
    with pytest.raises(
        PolicyError, match=r"unknown policy setting 'scorr'; did you mean 'scorer'\?"
    ):
        watched("hybrid:tokens=24,window=4,scorr=recent")


def test_a_scorer_that_is_not_there_is_named() -> None:
    settings: EngineSettings = replace(SMALL, policy="hybrid:tokens=24,window=4,scorer=atention")
    with pytest.raises(ValueError, match="atention"):
        watched("hybrid:tokens=24,window=4,scorer=atention", tiny(), settings=settings)

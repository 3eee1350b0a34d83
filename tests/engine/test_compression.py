"""Settings and requests that make no sense are refused at the door, with the offending number.

Compressed runs: within their budget, the same joined early or late, beside neighbours, swapped, or
preempted.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.engine_cases import SMALL, Watched, mixed, play, prompt, request, watched
from tests.engine.interpreter import passed_in_the_interpreter
from tests.engine.kernel_cases import INTERPRETED, Case, Place, make_case
from zlab.engine.compression import (
    SCORERS,
    CompressionSettings,
    compress,
    find_scorer,
    settings_for,
)
from zlab.engine.errors import KernelInputError
from zlab.engine.kernels.backends import find_backend
from zlab.engine.kernels.torch_backend import mix, pack, seed_of
from zlab.engine.kernels.workspace import (
    CompressionRequest,
    CompressionShape,
    CompressionWorkspace,
    check_requests,
)
from zlab.engine.model.decoder import rotation_table
from zlab.engine.model.spec import Rope
from zlab.engine.scorers.interface import ScoringInputs
from zlab.policies.options import ByScore
from zlab.policies.scorers import SCORERS as NAMED
from zlab.traces.schema import EventKind

HYBRID = "hybrid:tokens=24,window=4"
JOINS = ("boundary", "blocking", "when_done")


@pytest.fixture(scope="module")
def at_boundary() -> Watched:
    return play(mixed(20), HYBRID)


def test_it_is_a_run_worth_looking_at(at_boundary: Watched) -> None:
    assert at_boundary.count(EventKind.COMPRESSED) > 50
    assert at_boundary.count(EventKind.HIT) > 5
    assert at_boundary.count(EventKind.PREEMPTED) > 0
    assert max(s.request.compressions for s in at_boundary.sequences.values()) > 3


def test_nobody_decodes_beyond_its_budget(at_boundary: Watched) -> None:
    """`engine_cases` asserts it in every step; here, that the bound of 24 kept tokens and a block
    is met at all.
    """
    assert at_boundary.most_blocks == 24 // SMALL.block_size + 1


@pytest.mark.parametrize("join", JOINS[1:])
def test_joined_at_once_or_later_the_tokens_are_the_same(at_boundary: Watched, join: str) -> None:
    assert play(mixed(20), f"{HYBRID},join={join}").tokens() == at_boundary.tokens()


@pytest.mark.parametrize("policy", ["constrained:tokens=24,window=4", f"{HYBRID},prefix=none"])
def test_what_shares_a_step_or_a_prefix_changes_no_token(at_boundary: Watched, policy: str) -> None:
    assert play(mixed(20), policy).tokens() == at_boundary.tokens()


@pytest.mark.parametrize(
    "limits", [{"max_batched_tokens": 7}, {"num_blocks": 100}, {"overlap": False}]
)
def test_pool_chunks_and_overlap_change_no_token(
    at_boundary: Watched, limits: dict[str, Any]
) -> None:
    assert play(mixed(20), HYBRID, **limits).tokens() == at_boundary.tokens()


def test_it_depends_on_what_is_kept(at_boundary: Watched) -> None:
    """The other tests compare tokens: these are seen to depend on the scorer and on the budget."""
    for other in (f"{HYBRID},scorer=recent", "hybrid:tokens=32,window=4", "full-kv"):
        assert play(mixed(20), other).tokens() != at_boundary.tokens()


@pytest.mark.parametrize("scorer", ["recent", "random"])
def test_a_scorer_that_needs_no_queries_keeps_the_same_tokens_without_slots(scorer: str) -> None:
    """Four slots for four requests: both policies compress each request at the same token."""
    asked = [request(f"r{n}", prompt(n, 10 + n), 60) for n in range(4)]
    with_slots = play(asked, f"{HYBRID},scorer={scorer},num_slots=4")
    without = play(asked, f"{HYBRID},scorer={scorer},slots=none")
    assert without.count(EventKind.SLOT) == 0 < with_slots.count(EventKind.SLOT)
    assert without.count(EventKind.COMPRESSED) == with_slots.count(EventKind.COMPRESSED) > 8
    assert without.tokens() == with_slots.tokens()


@pytest.mark.parametrize(
    "scorer", ["attention", "attention+global", "attention+full-redundancy", "recent", "random"]
)
def test_every_scorer_joined_at_once_or_later(scorer: str) -> None:
    runs = [play(mixed(8), f"{HYBRID},scorer={scorer},join={join}") for join in JOINS]
    assert runs[0].count(EventKind.COMPRESSED) > 10
    assert runs[0].tokens() == runs[1].tokens() == runs[2].tokens()


def test_a_sharer_is_the_same_with_and_without_a_compressing_neighbour() -> None:
    """Both hold the neighbour's leading blocks while it is compressed."""
    shared = prompt(1, 24)
    sharer = request("sharer", [*shared, *prompt(2, 3)], 10)
    neighbour = request("neighbour", [*shared, *prompt(3, 5)], 40)
    alone = play([sharer], HYBRID)
    run = watched(HYBRID)
    run.submit(neighbour)
    while (
        not run.engine.scheduler.state.running
        or not run.engine.scheduler.state.requests[0].generated
    ):
        run.step()
    run.submit(sharer)
    run.run()
    run.assert_empty()
    assert run.sequences["sharer"].request.hit_tokens == 24
    assert run.sequences["neighbour"].request.compressions > 2
    assert run.tokens()["sharer"] == alone.tokens()["sharer"]
    assert run.tokens()["neighbour"] == play([neighbour], HYBRID).tokens()["neighbour"]


@pytest.mark.parametrize(
    ("policy", "num_blocks"), [("hybrid:tokens=40,window=4,slotted=true", 16), ("full-kv", 24)]
)
def test_swapped_out_and_back_the_tokens_are_the_same(policy: str, num_blocks: int) -> None:
    """Compressed requests too, whose state no recomputing could bring back."""
    requests = mixed(16, seed=5, longest=120)
    swapping = policy + (",comes_back=swap" if ":" in policy else ":comes_back=swap")
    small = play(requests, swapping, num_blocks=num_blocks, host_blocks=200)
    large = play(requests, policy, num_blocks=200)
    swapped = [sequence.request for sequence in small.sequences.values() if sequence.request.swaps]
    assert len(swapped) > 4
    if "full-kv" not in policy:
        assert sum(request.compressions > 0 for request in swapped) > 3
    assert not any(sequence.request.preemptions for sequence in large.sequences.values())
    assert small.tokens() == large.tokens()
    assert small.engine.runner.swapped_tokens >= 2 * 8 * len(swapped)


@pytest.mark.skipif(INTERPRETED, reason="is the outer process")
def test_torch_and_triton_kernels_give_the_same_tokens() -> None:
    assert "1 passed" in passed_in_the_interpreter(__file__, "-k", "in_the_interpreter")


@pytest.mark.skipif(not INTERPRETED, reason="is run by the test above")
def test_a_compressed_request_in_the_interpreter() -> None:
    asked = [request("k", prompt(1, 31), 4)]
    torch_run = play(asked, HYBRID, kernels="torch")
    assert torch_run.count(EventKind.COMPRESSED) == 1
    assert play(asked, HYBRID, kernels="triton").tokens() == torch_run.tokens()


def test_adaptive_budgets_grow_and_shrink() -> None:
    run = play(mixed(16, longest=120), "hybrid-adaptive:tokens=24,window=4,most_tokens=64")
    assert run.most_blocks > 24 // SMALL.block_size + 1
    assert run.count(EventKind.COMPRESSED) > 10
    alone = [
        play([asked], "hybrid-adaptive:tokens=24,window=4,most_tokens=64")
        for asked in mixed(16, longest=120)[:3]
    ]
    assert all(one.count(EventKind.COMPRESSED) <= run.count(EventKind.COMPRESSED) for one in alone)


def test_more_hold_blocks_than_a_step_takes() -> None:
    """Where `max_running` bounds one step alone, whoever sits out keeps its row."""
    requests = [replace(asked, output_tokens=20, max_tokens=20) for asked in mixed(12)]
    run = play(requests, "nano-vllm", max_running=3, num_blocks=100)
    assert run.count(EventKind.STALLED) > 0
    assert run.tokens() == play(requests, "full-kv", num_blocks=100).tokens()


PLACE = Place("torch", "cpu", torch.float32)


def test_every_scorer_that_a_policy_may_name_has_an_implementation_with_its_traits() -> None:
    assert {scorer.name: scorer.traits for scorer in SCORERS} == NAMED
    assert [find_scorer(name).name for name in NAMED] == list(NAMED)


@pytest.mark.parametrize("name", NAMED)
def test_a_scorer_reads_what_its_traits_say_and_nothing_else(name: str) -> None:
    case, traits = make_case(PLACE), NAMED[name]
    rotation = rotation_table(Rope(), case.sizes.head_dim, 1000, torch.device("cpu"))
    settings, kernels = (
        CompressionSettings(scorer=name, window=8),
        find_backend(case.cache_k.device, "torch"),
    )

    def scores(queries: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        batch, scratch = case.laid_out()
        scratch.score.zero_()  # what is behind a request's last token is never written
        find_scorer(name).score(
            ScoringInputs(
                case.cache_k, case.cache_v, queries, history, batch, scratch, settings, rotation
            ),
            kernels,
        )
        return scratch.score.clone()

    kept, other = case.history, case.history.flip(1) * 2
    if traits.keeps_positions:
        places = torch.arange(kept[0, :, :, 0].numel()).view(1, *kept.shape[1:3], 1).expand_as(kept)
        kept, other = pack(places, kept), pack(places * 3, other)
    plain = scores(case.window_queries, kept)
    other_queries = scores(case.window_queries.flip(2, 4) * 2, kept)
    other_history = scores(case.window_queries, other)
    assert torch.equal(plain, other_queries) == (not traits.needs_queries)
    assert torch.equal(plain, other_history) == (not traits.keeps_history)


TEN_LINES = """from zlab.engine.scorers.interface import Scorer


class Longest(Scorer):
    needs_queries = False

    def rate(self, tokens):
        return tokens.keys.norm(dim=-1)
"""


def test_a_scorer_of_ones_own_chooses_the_tokens(tmp_path: Path) -> None:
    """The same run as with the opposite of `knorm`, and after the file has gone."""
    (tmp_path / "own.py").write_text(TEN_LINES)
    (tmp_path / "negated.py").write_text(TEN_LINES.replace("return ", "return -"))
    asked = mixed(4)
    own = play(asked, f"{HYBRID},scorer={tmp_path}/own.py:Longest")
    assert own.count(EventKind.COMPRESSED) > 10
    assert own.tokens() != play(asked, f"{HYBRID},scorer=knorm").tokens()
    same = play(asked, f"{HYBRID},scorer={tmp_path}/negated.py:Longest")
    assert same.tokens() == play(asked, f"{HYBRID},scorer=knorm").tokens()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return tokens.keys", r"rate must return a tensor \[layers, KV heads, tokens\]"),
        ("return tokens.keys.sum(-1) * float('nan')", "a score that is not a number"),
        ("return tokens.kyes", "rate raised AttributeError"),
    ],
)
def test_what_an_own_scorer_does_wrong(tmp_path: Path, body: str, words: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(TEN_LINES.replace("return tokens.keys.norm(dim=-1)", body))
    case = make_case(PLACE)
    settings = CompressionSettings(scorer=f"{path}:Longest", window=8)
    tensors = (case.cache_k, case.cache_v, case.history, case.window_queries)
    with pytest.raises(KernelInputError, match=words):
        compress(*tensors, case.requests, settings, case.workspace)
    path.write_text("raise OSError('gone')\n" + TEN_LINES)
    with pytest.raises(KernelInputError, match="does not run: OSError: gone"):
        find_scorer(f"{path}:Longest")


@pytest.mark.parametrize(
    ("settings", "num_keep", "latest"),
    [
        ({"scorer": "distinct"}, 256, 64),
        ({"scorer": "distinct"}, 120, 40),  # at most a third of what is kept
        ({"scorer": "distinct"}, 30, 16),  # never less than the window
        ({"scorer": "distinct", "recent": 100}, 120, 60),  # at most half
        ({"scorer": "distinct", "sink": 90}, 120, 30),
        ({"recent": 100}, 256, 100),
        ({}, 256, 16),
    ],
)
def test_how_many_of_the_latest_are_always_kept(
    settings: dict[str, Any], num_keep: int, latest: int
) -> None:
    assert CompressionSettings(**settings).latest_kept(num_keep) == latest


def test_an_unknown_scorer_names_the_nearest() -> None:
    with pytest.raises(
        KernelInputError, match=r"'atention\+global'; did you mean 'attention\+global'.*recent"
    ):
        find_scorer("atention+global")
    with pytest.raises(KernelInputError, match="unknown scorer 'zzz'"):
        CompressionSettings(scorer="zzz")


WEIRD = (float("nan"), float("inf"), -1.0, 0.0, 0.5, 1.0, 1.5)


@given(
    scorer=st.sampled_from([*NAMED, "nonsense", ""]),
    window=st.integers(-1, 20),
    sink=st.integers(-1, 5),
    redundancy_lambda=st.sampled_from(WEIRD),
    temperature=st.sampled_from(WEIRD),
    decay=st.sampled_from(WEIRD),
    pool_size=st.integers(-2, 7),
    threshold=st.sampled_from(WEIRD),
)
def test_the_engine_refuses_no_setting_that_a_policy_accepts(**settings: Any) -> None:
    try:
        answer = ByScore(**settings)
    except ValueError:
        return
    settings_for(answer, longest_window=16, seed=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": 0}, "window must be at least 1 token, got 0"),
        ({"sink": -1}, "sink must not be negative, got -1"),
        ({"attention_weight": 1.5}, "in 0..1, got 1.5"),
        ({"attention_weight": float("nan")}, "got nan"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"decay": -0.1}, "decay must be in 0..1, got -0.1"),
        ({"pool_size": 4}, "odd and positive, got 4"),
        ({"threshold": 2.0}, "threshold must be in 0..1, got 2.0"),
    ],
)
def test_settings_are_validated(change: dict[str, Any], words: str) -> None:
    with pytest.raises(KernelInputError, match=re.escape(words)):
        replace(CompressionSettings(), **change)


def test_window_must_fit_the_block_and_the_budget() -> None:
    settings = CompressionSettings(window=16, sink=4)
    settings.check_fits(block_size=16, num_target_blocks=2)
    with pytest.raises(KernelInputError, match="window 16 is larger than the block size 8"):
        settings.check_fits(block_size=8, num_target_blocks=4)
    with pytest.raises(
        KernelInputError, match=re.escape("window 16 + sink 4 tokens are always kept, but only 16")
    ):
        settings.check_fits(block_size=16, num_target_blocks=1)


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "at least one request"),
        ([CompressionRequest((1, 2), (1, 2), 0)], "keeps 2 of 2 blocks"),
        ([CompressionRequest((1, 2), (), 0)], "keeps 0 of 2 blocks"),
        ([CompressionRequest((1, 2, 1), (1,), 0)], "lists a block twice"),
        ([CompressionRequest((1, 14), (1,), 0)], "names block 14; the cache has blocks 0..13"),
        ([CompressionRequest((1, 2), (-1,), 0)], "names block -1"),
        ([CompressionRequest((1, 2), (1,), 4)], "names query slot 4; there are 0..3"),
        (
            [CompressionRequest((1, 2, 3), (2, 5), 0)],
            "target 0 = block 2, which is block 1 of its own table",
        ),
        (
            [CompressionRequest((1, 2), (1,), 0), CompressionRequest((3, 4), (1,), 1)],
            "target block 1 is given twice",
        ),
        (
            [CompressionRequest((1, 2), (7,), 0), CompressionRequest((7, 4), (5,), 1)],
            "block 7 is read by request 1",
        ),
    ],
)
def test_requests_that_would_race_or_leave_the_cache_are_refused(
    requests: list[CompressionRequest], words: str
) -> None:
    with pytest.raises(KernelInputError, match=re.escape(words)):
        check_requests(requests, num_blocks=14, num_slots=4)


def test_two_requests_may_read_the_same_blocks() -> None:
    shared = [CompressionRequest((1, 2, 3), (7, 8), 0), CompressionRequest((1, 2, 4), (9, 10), 1)]
    check_requests(shared, num_blocks=14, num_slots=4)


def call(case: Case, **change: Any) -> None:
    arguments: dict[str, Any] = {
        "cache_k": case.cache_k,
        "cache_v": case.cache_v,
        "history": case.history,
        "window_queries": case.window_queries,
        "requests": case.requests,
        "settings": CompressionSettings(window=8),
        "workspace": case.workspace,
    }
    compress(**{**arguments, **change})


def test_tensors_that_do_not_fit_together_are_refused_before_anything_is_written() -> None:
    case = make_case(PLACE)
    before = case.cache_k.clone()
    for change, words in (
        ({"cache_v": case.cache_v[:, :3]}, "but V is (2, 3, 16, 2, 16)"),
        ({"history": case.history.double()}, "float32, got (2, 14, 16, 2) torch.float64"),
        ({"settings": CompressionSettings(window=9)}, "hold 8 rows a slot but the window is 9"),
        ({"window_queries": case.window_queries[..., :5]}, "do not fit 2 layers"),
        ({"settings": CompressionSettings(window=8, sink=30)}, "sink 30"),
        (
            {"workspace": CompressionWorkspace(
                CompressionShape(2, 2, 2, 8, 32), capacity_blocks=9, max_requests=3, device=torch.device("cpu")
            )},
            "the workspace is for",
        ),
    ):  # fmt: skip
        with pytest.raises(KernelInputError, match=re.escape(words)):
            call(case, **change)
    assert torch.equal(case.cache_k, before)


def test_a_workspace_says_what_it_cannot_hold() -> None:
    shape = CompressionShape(num_layers=2, num_kv_heads=2, group=3, window=8, block_size=16)
    workspace = CompressionWorkspace(
        shape, capacity_blocks=8, max_requests=2, device=torch.device("cpu")
    )
    long = CompressionRequest(tuple(range(9)), (0,), 0)
    with pytest.raises(KernelInputError, match="9 blocks does not fit a workspace of 8"):
        workspace.slices([long])
    with pytest.raises(KernelInputError, match="1 blocks and 2 requests"):
        CompressionWorkspace(shape, capacity_blocks=1, max_requests=2, device=torch.device("cpu"))


def test_a_full_workspace_holds_every_batch_that_its_slices_allow() -> None:
    """The largest views that `slices` lets through fit their buffers, whatever the mix of
    lengths.
    """
    for block_size in (16, 64, 256):
        shape = CompressionShape(
            num_layers=1, num_kv_heads=2, group=3, window=8, block_size=block_size
        )
        workspace = CompressionWorkspace(
            shape, capacity_blocks=10, max_requests=4, device=torch.device("cpu")
        )
        for num_blocks in range(2, 11):
            requests = [
                CompressionRequest(tuple(range(num_blocks)), tuple(range(num_blocks - 1)), 0)
            ] * 9
            for launch in workspace.slices(requests):
                assert len(launch) * num_blocks <= 10
                assert len(launch) <= 4
                workspace.scratch(len(launch), num_blocks, num_blocks - 1)


def test_unknown_kernels_name_the_choices() -> None:
    with pytest.raises(KernelInputError, match="'cutlass' here; there are torch"):
        find_backend(torch.device("cpu"), "cutlass")


def test_hash_spreads_and_keeps_its_range() -> None:
    assert len({mix(state) for state in range(10_000)}) == 10_000
    seeds = {seed_of(request, step) for request in range(50) for step in range(50)}
    assert len(seeds) == 2500
    assert all(-(2**31) <= seed < 2**31 for seed in seeds)
    assert seed_of(1, 2) != seed_of(2, 1)

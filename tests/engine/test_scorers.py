"""Settings and requests that make no sense are refused at the door, with the offending number."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.compression_pipeline import compress
from engine.kernels.batch import CompressionRequest, check_requests
from engine.kernels.choice import find_kernels
from engine.kernels.errors import KernelInputError
from engine.kernels.hashing import mix, seed_of
from engine.kernels.workspace import CompressionShape, CompressionWorkspace
from engine.scorers import SCORERS, CompressionSettings, find_scorer
from tests.engine.kernel_cases import Case, Place, make_case

PLACE = Place("torch", "cpu", torch.float32)


def test_every_scorer_is_found_by_its_name() -> None:
    assert [find_scorer(scorer.name) for scorer in SCORERS] == list(SCORERS)
    assert len(SCORERS) == 6


def test_an_unknown_scorer_names_the_nearest() -> None:
    with pytest.raises(KernelInputError, match=r"'atention\+global'; did you mean 'attention\+global'.*recent"):
        find_scorer("atention+global")
    with pytest.raises(KernelInputError, match="no scorer is called 'zzz'"):
        CompressionSettings(scorer="zzz")


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
    with pytest.raises(KernelInputError, match=re.escape("window 16 + sink 4 tokens are always kept, but only 16")):
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
        ([CompressionRequest((1, 2, 3), (2, 5), 0)], "target 0 = block 2, which is block 1 of its own table"),
        ([CompressionRequest((1, 2), (1,), 0), CompressionRequest((3, 4), (1,), 1)], "target block 1 is given twice"),
        ([CompressionRequest((1, 2), (7,), 0), CompressionRequest((7, 4), (5,), 1)], "block 7 is read by request 1"),
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


def test_a_workspace_says_what_it_takes_and_what_it_cannot_hold() -> None:
    shape = CompressionShape(num_layers=2, num_kv_heads=2, group=3, window=8, block_size=16)
    workspace = CompressionWorkspace(shape, capacity_blocks=8, max_requests=2, device=torch.device("cpu"))
    assert workspace.num_bytes == CompressionWorkspace.bytes_needed(shape, capacity_blocks=8, max_requests=2)
    long = CompressionRequest(tuple(range(9)), (0,), 0)
    with pytest.raises(KernelInputError, match="9 blocks does not fit a workspace of 8"):
        workspace.slices([long])
    with pytest.raises(KernelInputError, match="1 blocks and 2 requests"):
        CompressionWorkspace(shape, capacity_blocks=1, max_requests=2, device=torch.device("cpu"))


def test_a_full_workspace_holds_every_batch_that_its_slices_allow() -> None:
    """The largest views that `slices` lets through fit their buffers, whatever the mix of lengths."""
    for block_size in (16, 64, 256):
        shape = CompressionShape(num_layers=1, num_kv_heads=2, group=3, window=8, block_size=block_size)
        workspace = CompressionWorkspace(shape, capacity_blocks=10, max_requests=4, device=torch.device("cpu"))
        for num_blocks in range(2, 11):
            requests = [CompressionRequest(tuple(range(num_blocks)), tuple(range(num_blocks - 1)), 0)] * 9
            for launch in workspace.slices(requests):
                assert len(launch) * num_blocks <= 10
                assert len(launch) <= 4
                workspace.scratch(len(launch), num_blocks, num_blocks - 1)


def test_unknown_kernels_name_the_choices() -> None:
    with pytest.raises(KernelInputError, match="'cutlass' here; there are torch"):
        find_kernels(torch.device("cpu"), "cutlass")


def test_hash_spreads_and_keeps_its_range() -> None:
    assert len({mix(state) for state in range(10_000)}) == 10_000
    seeds = {seed_of(request, step) for request in range(50) for step in range(50)}
    assert len(seeds) == 2500
    assert all(-(2**31) <= seed < 2**31 for seed in seeds)
    assert seed_of(1, 2) != seed_of(2, 1)

"""Store, decode attention and prefill attention against the float64 reference: ragged, paged,
poisoned.

Selection with its tie rule, and compaction that is safe in place, against the float64 reference.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engine import kernel_reference as reference
from tests.engine.kernel_cases import (
    INTERPRETED,
    RAGGED,
    Case,
    Place,
    Sizes,
    assert_close,
    keep_flags,
    make_case,
    on_every_place,
    on_one_dtype,
    to_numpy,
)
from zlab.engine.errors import KernelInputError
from zlab.engine.kernels.triton_decode import (
    DecodeWorkspace,
    num_splits,
    reserve_decode_workspace,
)
from zlab.engine.kernels.workspace import CompressionRequest
from zlab.sim import memory

SIZES = (
    pytest.param(Sizes(num_layers=1), id="b16"),
    pytest.param(Sizes(num_layers=1, group=1, head_dim=96), id="b16-no-groups-d96"),
    pytest.param(
        Sizes(num_layers=1, block_size=64, group=3, num_kv_heads=1, head_dim=64),
        id="b64-group-of-three",
    ),
    pytest.param(
        Sizes(num_layers=1, block_size=256, group=4, num_kv_heads=2, head_dim=128), id="b256-d128"
    ),
)
TABLES = ((5, 0, 9, -1), (3, 1, 7, 11), (3, 1, 8, 4), (2, -1, -1, -1), (-1, -1, -1, -1))


def block_tables(device: str) -> torch.Tensor:
    return torch.tensor(TABLES, dtype=torch.int32, device=device)


def random_rows(shape: tuple[int, ...], place: Place, seed: int) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal(shape)
    return torch.from_numpy(values).to(device=place.device, dtype=place.dtype)


def poison_unused(cache: torch.Tensor, lengths: list[int]) -> None:
    """NaN wherever no request has a token: reading there must not reach any output."""
    block_size = cache.shape[1]
    used = torch.zeros(cache.shape[:2], dtype=torch.bool)
    for table, length in zip(TABLES, lengths, strict=True):
        for token in range(length):
            used[table[token // block_size], token % block_size] = True
    cache[~used.to(cache.device)] = float("nan")


@on_every_place
@pytest.mark.parametrize("sizes", SIZES)
def test_decode_attention(place: Place, sizes: Sizes) -> None:
    case = make_case(place, sizes)
    block_size = sizes.block_size
    lengths = [3 * block_size - 5, 4 * block_size, 2 * block_size + 1, 1, 0]
    cache_k, cache_v = case.cache_k[0], case.cache_v[0]
    poison_unused(cache_k, lengths)
    poison_unused(cache_v, lengths)
    num_query_heads = sizes.num_kv_heads * sizes.group
    queries = random_rows((len(lengths), num_query_heads, sizes.head_dim), place, 5)
    output = torch.full_like(queries, float("nan"))
    workspace = reserve_decode_workspace(
        max_length=max(lengths),
        max_requests=len(lengths),
        num_query_heads=num_query_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        device=torch.device(place.device),
        split_tokens=64,
    )
    workspace.partial_output.fill_(float("nan"))
    workspace.partial_normaliser.fill_(float("nan"))
    length = torch.tensor(lengths, dtype=torch.int32, device=place.device)
    plan = place.kernels.plan_decodes(length, workspace, sum(lengths))
    scale = sizes.head_dim**-0.5
    place.kernels.decode_attention(
        queries, cache_k, cache_v, block_tables(place.device), plan, scale, workspace, output
    )
    for row, tokens in enumerate(lengths):
        if tokens == 0:
            assert bool((output[row] == 0).all()), "a padding request gets zeros"
            continue
        table = [block for block in TABLES[row] if block >= 0]
        keys = reference.gather_cache_order(to_numpy(cache_k), table)[:, :tokens]
        values = reference.gather_cache_order(to_numpy(cache_v), table)[:, :tokens]
        wanted = reference.attention(to_numpy(queries[row : row + 1]), keys, values)
        assert_close(
            output[row : row + 1], wanted, place.tolerance, f"request {row} of {tokens} tokens"
        )


@on_every_place
def test_decode_attention_does_not_depend_on_the_batch(place: Place) -> None:
    """The bits of one request's output are the same alone and among others (splits are its own)."""
    if place.kernels_name == "torch":
        pytest.skip("matrix products of the torch path may round differently for another batch")
    sizes = Sizes(num_layers=1)
    case = make_case(place, sizes)
    lengths = [40, 64, 33]
    queries = random_rows((3, 4, sizes.head_dim), place, 6)

    def run(rows: list[int]) -> torch.Tensor:
        output = torch.empty_like(queries[rows])
        tokens = torch.tensor(
            [lengths[row] for row in rows], dtype=torch.int32, device=place.device
        )
        workspace = reserve_decode_workspace(
            max_length=64,
            max_requests=4,
            num_query_heads=4,
            num_kv_heads=2,
            head_dim=sizes.head_dim,
            device=torch.device(place.device),
            split_tokens=64,
        )
        place.kernels.decode_attention(
            queries[rows], case.cache_k[0], case.cache_v[0], block_tables(place.device)[rows],
            place.kernels.plan_decodes(tokens, workspace, sum(lengths)), 0.25, workspace, output,
        )  # fmt: skip
        return output

    together = run([0, 1, 2])
    for row in range(3):
        assert torch.equal(run([row])[0], together[row])


@on_every_place
def test_decode_without_room_for_its_splits_is_loud(place: Place) -> None:
    if place.kernels_name == "torch":
        pytest.skip("the torch path has no splits")
    sizes = Sizes(num_layers=1, block_size=64)
    case = make_case(place, sizes)
    queries = random_rows((2, 4, sizes.head_dim), place, 6)
    output = torch.zeros_like(queries)
    workspace = reserve_decode_workspace(
        max_length=64, max_requests=2, num_query_heads=4, num_kv_heads=2, head_dim=16,
        device=torch.device(place.device), split_tokens=64,
    )  # fmt: skip
    place.kernels.decode_attention(
        queries,
        case.cache_k[0],
        case.cache_v[0],
        block_tables(place.device)[:2],
        place.kernels.plan_decodes(
            torch.tensor([64, 256], dtype=torch.int32, device=place.device), workspace, 320
        ),
        0.25,
        workspace,
        output,
    )
    assert bool(output[0].isfinite().all())
    assert bool(output[1].isnan().all())


@on_every_place
@pytest.mark.parametrize(
    "lengths",
    [
        [64],
        [0],
        [1, 63, 64, 65, 128, 0, 0, 300],
        [64] * 33,
        [64, 300, 1, 0, 64],
        [80, 5, 47, 0, 255, 48, 144, 63, 15],
    ],
)
def test_a_plan_has_every_split_once_and_the_longest_first(
    place: Place, lengths: list[int]
) -> None:
    """Whole ones, then by quarters of a split. Who has no room, as in the fifth case, has one item
    that says so.
    """
    if place.kernels_name == "torch":
        pytest.skip("the torch path has no splits")
    is_short = lengths == [64, 300, 1, 0, 64]
    capacity = num_splits(max(lengths), len(lengths), 64)
    workspace = DecodeWorkspace(
        64,
        torch.empty(capacity, 1, 16, device=place.device),
        torch.empty(capacity, 1, device=place.device),
        torch.full((len(lengths), 1), 7, dtype=torch.int32, device=place.device),
    )
    on_place = torch.tensor(lengths, dtype=torch.int32, device=place.device)
    plan = place.kernels.plan_decodes(on_place, workspace, 0 if is_short else sum(lengths))
    wanted = []
    first = 0
    for request, length in enumerate(lengths):
        needed = -(-length // 64)
        splits = range(max(needed, 1)) if not is_short or request == 0 else (-1,)
        wanted += [[request, first, split, length] for split in splits]
        first += needed

    def quarters(item: list[int]) -> int:
        _, _, split, length = item
        return 0 if split < 0 else min(length - 64 * split, 64) // 16

    assert plan.items[: int(plan.num_rows)].tolist() == sorted(wanted, key=quarters, reverse=True)
    assert not bool(workspace.tickets.any())


@on_every_place
def test_layers_of_a_step_share_a_plan(place: Place) -> None:
    """The tickets that tell who is last are as they were after every launch."""
    case = make_case(place, Sizes(num_layers=2, block_size=64))
    queries = random_rows((4, 4, 16), place, 6)
    workspace = reserve_decode_workspace(
        max_length=256, max_requests=4, num_query_heads=4, num_kv_heads=2, head_dim=16,
        device=torch.device(place.device), split_tokens=64,
    )  # fmt: skip
    lengths = torch.tensor([40, 256, 129, 0], dtype=torch.int32, device=place.device)
    plan = place.kernels.plan_decodes(lengths, workspace, 425)
    outputs = [torch.full_like(queries, float("nan")) for _ in range(4)]
    for output, layer in zip(outputs, (0, 1, 0, 1), strict=True):
        place.kernels.decode_attention(
            queries,
            case.cache_k[layer],
            case.cache_v[layer],
            block_tables(place.device)[:4],
            plan,
            0.25,
            workspace,
            output,
        )
        assert not bool(workspace.tickets.any())
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])
    caches = (case.cache_k[1], case.cache_v[1])
    keys, values = (
        reference.gather_cache_order(to_numpy(cache), list(TABLES[2][:3]))[:, :129]
        for cache in caches
    )
    wanted = reference.attention(to_numpy(queries[2:3]), keys, values)
    assert_close(outputs[1][2:3], wanted, place.tolerance, "of three splits")


def test_decode_workspace_refuses_an_odd_split() -> None:
    with pytest.raises(KernelInputError, match="power of two, got 96"):
        reserve_decode_workspace(
            max_length=1,
            max_requests=1,
            num_query_heads=1,
            num_kv_heads=1,
            head_dim=16,
            device=torch.device("cpu"),
            split_tokens=96,
        )


@on_every_place
@pytest.mark.parametrize("sizes", SIZES)
def test_prefill_attention(place: Place, sizes: Sizes) -> None:
    """Chunks of 37, 1, all and 0 tokens behind prefixes of different lengths, decodes before them,
    padding behind.
    """
    case = make_case(place, sizes)
    block_size = sizes.block_size
    lengths = [3 * block_size - 5, 4 * block_size, 2 * block_size + 1, min(block_size, 20), 0]
    chunks = [37, 1, 3, min(block_size, 20), 0]
    cache_k, cache_v = case.cache_k[0], case.cache_v[0]
    poison_unused(cache_k, lengths)
    poison_unused(cache_v, lengths)
    before, behind = 41, 9
    queries = random_rows(
        (before + sum(chunks) + behind, sizes.num_kv_heads * sizes.group, sizes.head_dim), place, 7
    )
    output = torch.full_like(queries, 55.0)
    starts = [before, *(before + np.cumsum(chunks)).tolist()]
    place.kernels.prefill_attention(
        queries, cache_k, cache_v, block_tables(place.device),
        torch.tensor(lengths, dtype=torch.int32, device=place.device),
        torch.tensor(starts, dtype=torch.int32, device=place.device), sizes.head_dim**-0.5, output,
    )  # fmt: skip
    for row, tokens in enumerate(lengths):
        table = [block for block in TABLES[row] if block >= 0]
        if chunks[row] == 0:
            continue
        keys = reference.gather_cache_order(to_numpy(cache_k), table)[:, :tokens]
        values = reference.gather_cache_order(to_numpy(cache_v), table)[:, :tokens]
        own = slice(starts[row], starts[row + 1])
        wanted = reference.attention(to_numpy(queries[own]), keys, values)
        assert_close(
            output[own], wanted, place.tolerance, f"request {row}: {chunks[row]} of {tokens} tokens"
        )
    assert (output[:before] == 55.0).all()
    assert (output[-behind:] == 55.0).all()


@on_every_place
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_store(place: Place, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    """K, V and window queries land in their rows, rows mapped to -1 nowhere, and all else stays."""
    place = replace(place, dtype=dtype)
    sizes = Sizes(num_layers=1, head_dim=24)
    case = make_case(place, sizes)
    cache_k, cache_v, window_queries = case.cache_k[0], case.cache_v[0], case.window_queries[0]
    wanted = [cache_k.clone(), cache_v.clone(), window_queries.clone()]
    slots = [3, -1, 17, 13 * 16 + 15, 16]
    windows = [-1, 0, 7, 3 * 8 + 3, -1]
    # Slices of one merged projection, as a model hands them over: rows are apart.
    merged = random_rows((5, 2 + 2 + 4, 24), place, 8)
    keys, values, queries = merged[:, :2], merged[:, 2:4], merged[:, 4:]
    for token in range(5):
        if slots[token] >= 0:
            wanted[0][slots[token] // 16, slots[token] % 16] = keys[token]
            wanted[1][slots[token] // 16, slots[token] % 16] = values[token]
        if windows[token] >= 0:
            wanted[2][windows[token] // 8, windows[token] % 8] = queries[token]

    def indices(rows: list[int]) -> torch.Tensor:
        return torch.tensor(rows, dtype=index_dtype, device=place.device)

    place.kernels.store(
        keys, values, indices(slots), cache_k, cache_v, queries, indices(windows), window_queries
    )  # fmt: skip
    for name, found, right in zip(
        ("K", "V", "Q"), (cache_k, cache_v, window_queries), wanted, strict=True
    ):
        assert torch.equal(found, right), name
    place.kernels.store(keys, values, indices([5, -1, -1, -1, -1]), cache_k, cache_v)
    assert torch.equal(cache_k[0, 5], keys[0])
    assert torch.equal(window_queries, wanted[2])


def test_a_block_size_that_is_no_power_of_two_is_refused() -> None:
    if not INTERPRETED:
        pytest.skip("a check of the Triton launchers")
    place = Place("triton", "cpu", torch.float32)
    case = make_case(place, Sizes(num_layers=1, block_size=48))
    with pytest.raises(KernelInputError, match="power of two up to 256, got 48"):
        place.kernels.compact(case.cache_k, case.cache_v, None, *case.laid_out())


@pytest.mark.parametrize(
    ("max_requests", "split_tokens"), [(1, 256), (32, 256), (33, 1024), (256, 1024)]
)
def test_a_split_is_chosen_by_the_workspace_alone(max_requests: int, split_tokens: int) -> None:
    assert memory.split_tokens(max_requests) == split_tokens
    workspace = reserve_decode_workspace(
        max_length=5000,
        max_requests=max_requests,
        num_query_heads=2,
        num_kv_heads=1,
        head_dim=16,
        device=torch.device("cpu"),
    )
    assert workspace.split_tokens == split_tokens
    assert workspace.partial_output.shape[0] == num_splits(5000, max_requests, split_tokens)


# Few different values: ties everywhere, among them zeros of both signs.
TIED = torch.tensor([-1.5, -0.0, 0.0, 0.25, 0.2500001, 3.0, float("-inf")])


def select(
    case: Case, place: Place, scores: torch.Tensor, window: int, sink: int
) -> list[list[reference.Bool]]:
    """Keep flags per layer and request; what lies behind a request's end must not have been
    written.
    """
    batch, scratch = case.laid_out()
    scratch.score.copy_(scores)
    place.kernels.select(batch, scratch, window=window, sink=sink)
    block_size = case.sizes.block_size
    flags: list[list[reference.Bool]] = []
    for layer in range(case.sizes.num_layers):
        flags.append([])
        for row, request in enumerate(case.requests):
            num_keep = len(request.target_blocks) * block_size
            index = scratch.keep_index[layer, row]
            assert bool((index[:, num_keep:] == -7).all()), "padding was written"
            flags[layer].append(
                keep_flags(index[:, :num_keep], len(request.block_table) * block_size)
            )
    return flags


@on_one_dtype
@pytest.mark.parametrize("tied", [True, False], ids=["ties", "distinct"])
@pytest.mark.parametrize("sink", [0, 3])
def test_selection_is_exact(place: Place, tied: bool, sink: int) -> None:
    case = make_case(place)
    generator = torch.Generator().manual_seed(sink + 10 * tied)
    shape = case.laid_out()[1].score.shape
    scores = (
        TIED[torch.randint(0, len(TIED), shape, generator=generator)]
        if tied
        else torch.randn(shape)
    )
    found = select(case, place, scores, window=5, sink=sink)
    for layer in range(case.sizes.num_layers):
        for row, request in enumerate(case.requests):
            num_tokens = len(request.block_table) * case.sizes.block_size
            num_keep = len(request.target_blocks) * case.sizes.block_size
            wanted = reference.keep_tokens(
                to_numpy(scores)[layer, row, :, :num_tokens], num_keep, 5, sink
            )
            np.testing.assert_array_equal(found[layer][row], wanted)


@on_one_dtype
@pytest.mark.parametrize("num_blocks", [5, 17], ids=["larger-tile", "several-tiles"])
def test_selection_of_many_tokens(place: Place, num_blocks: int) -> None:
    """More tokens than the small tile, and more than fit the registers of a program at all."""
    sizes = Sizes(num_layers=1, num_blocks=20, block_size=256, num_kv_heads=2, head_dim=16)
    request = CompressionRequest(tuple(range(num_blocks)), (0, 1, 2), query_slot=0)
    case = make_case(place, sizes, (request,))
    generator = torch.Generator().manual_seed(num_blocks)
    scores = torch.randn(case.laid_out()[1].score.shape, generator=generator).round(decimals=1)
    found = select(case, place, scores, window=16, sink=4)
    wanted = reference.keep_tokens(to_numpy(scores)[0, 0], 768, 16, 4)
    np.testing.assert_array_equal(found[0][0], wanted)


@on_one_dtype
def test_all_equal_keeps_the_latest_and_nan_breaks_nothing(place: Place) -> None:
    case = make_case(place)
    shape = case.laid_out()[1].score.shape
    for value in (0.0, float("nan")):
        for flags in select(case, place, torch.full(shape, value), window=4, sink=2)[0]:
            num_tokens = flags.shape[1]
            num_keep = int(flags[0].sum())
            assert flags[:, :2].all()
            assert flags[:, num_tokens - num_keep + 2 :].all()


@on_one_dtype
def test_nan_counts_as_minus_infinity(place: Place) -> None:
    """NaN of both signs between numbers, infinities and ties: the same choice as with -inf in its
    place.
    """
    case = make_case(place)
    shape = case.laid_out()[1].score.shape
    values = torch.tensor(
        [float("nan"), -float("nan"), float("-inf"), float("inf"), -2.0, 0.5, 1.0]
    )
    scores = values[
        torch.randint(0, len(values), shape, generator=torch.Generator().manual_seed(6))
    ]
    plain = scores.masked_fill(scores.isnan(), float("-inf"))
    for with_nan, without in zip(
        select(case, place, scores, window=4, sink=2),
        select(case, place, plain, window=4, sink=2),
        strict=True,
    ):
        for found, wanted in zip(with_nan, without, strict=True):
            np.testing.assert_array_equal(found, wanted)


def snapshot(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return case.cache_k.cpu().clone(), case.cache_v.cpu().clone(), case.history.cpu().clone()


@on_one_dtype
@pytest.mark.parametrize("with_history", [True, False], ids=["history", "no-history"])
@pytest.mark.parametrize("block_size", [16, 128])
def test_compaction_moves_whole_rows_and_nothing_else(
    place: Place, with_history: bool, block_size: int
) -> None:
    case = make_case(place, Sizes(block_size=block_size, head_dim=24, num_layers=2))
    before_k, before_v, before_history = snapshot(case)
    batch, scratch = case.laid_out()
    generator = torch.Generator().manual_seed(4)
    scratch.score.copy_(torch.randn(scratch.score.shape, generator=generator))
    scratch.global_score.copy_(torch.rand(scratch.score.shape, generator=generator))
    place.kernels.select(batch, scratch, window=8, sink=0)
    history = case.history if with_history else None
    place.kernels.compact(case.cache_k, case.cache_v, history, batch, scratch)
    wanted_k, wanted_v, wanted_history = before_k.clone(), before_v.clone(), before_history.clone()
    for row, request in enumerate(case.requests):
        num_keep = len(request.target_blocks) * block_size
        table = torch.tensor(request.block_table)
        targets = list(request.target_blocks)
        for layer in range(case.sizes.num_layers):
            for head in range(case.sizes.num_kv_heads):
                source = scratch.keep_index[layer, row, head, :num_keep].cpu().long()
                for before, wanted in ((before_k, wanted_k), (before_v, wanted_v)):
                    rows = before[layer, table][:, :, head].flatten(0, 1)[source]
                    wanted[layer, targets, :, head] = rows.view(-1, block_size, rows.shape[-1])
                if with_history:
                    score = scratch.global_score[layer, row, head].cpu()[source]
                    wanted_history[layer, targets, :, head] = score.view(-1, block_size)
    after_k, after_v, after_history = snapshot(case)
    assert torch.equal(after_k, wanted_k), "K, or a block that is no target, differs"
    assert torch.equal(after_v, wanted_v), "V, or a block that is no target, differs"
    assert torch.equal(after_history, wanted_history), "history differs"


@on_one_dtype
@pytest.mark.parametrize("pattern", ["first-dropped", "alternate", "one-late"])
def test_in_place_equals_out_of_place(place: Place, pattern: str) -> None:
    """The same choice once into own blocks and once into fresh ones: a race would show in the
    first.
    """
    sizes = Sizes(num_layers=2, block_size=64, num_blocks=14, head_dim=32)
    table = (3, 1, 7, 11)
    own = make_case(place, sizes, (CompressionRequest(table, table[:3], query_slot=0),))
    fresh = make_case(place, sizes, (CompressionRequest(table, (0, 5, 9), query_slot=0),))
    num_tokens = len(table) * sizes.block_size
    scores = torch.arange(num_tokens, dtype=torch.float32)
    if pattern == "alternate":
        scores = torch.where(torch.arange(num_tokens) % 4 == 1, -scores, scores)
    elif pattern == "one-late":
        scores = -scores
    for case in (own, fresh):
        batch, scratch = case.laid_out()
        scratch.score.copy_(scores.expand(scratch.score.shape))
        scratch.global_score.copy_(
            torch.rand(scratch.score.shape, generator=torch.Generator().manual_seed(2))
        )
        place.kernels.select(batch, scratch, window=1, sink=0)
        place.kernels.compact(case.cache_k, case.cache_v, case.history, batch, scratch)
    for name in ("cache_k", "cache_v", "history"):
        in_place = getattr(own, name)[:, list(table[:3])]
        out_of_place = getattr(fresh, name)[:, [0, 5, 9]]
        assert torch.equal(in_place, out_of_place), name
    assert torch.equal(own.cache_k[:, 11], make_case(place, sizes, RAGGED[:1]).cache_k[:, 11]), (
        "a freed block changed"
    )

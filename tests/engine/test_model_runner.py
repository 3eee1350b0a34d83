"""What a step with chunks reads, packed on the host.

Which batch sizes are prepared before serving.

A whole engine that runs its steps by graphs, on the CPU: graphs that repeat what was captured stand
in for CUDA's.

What a graph reads and writes lies at fixed places, and is padded to a fixed size: that is tested
here. That CUDA captures the kernels is tested on a card (`test_mixed.py`,
`test_engine_replacing.py`). Steps do not overlap: only on CUDA are a step's tokens copied before
the next one can write over them.

When steps ended, as the engine's loop notes it: by the device's clock where nobody was looking.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.engine.engine_cases import GREEDY, SMALL, play, prompt, request, tiny, watched
from tests.engine.engine_cases import mixed as mixed_requests
from zlab.engine import model_runner as decode_graphs
from zlab.engine import model_runner as mixed
from zlab.engine import replay as replaying
from zlab.engine.engine import Engine
from zlab.engine.input_batch import (
    MixedInputs,
    MixedSizes,
    PrefillBatch,
    nothing_to_store,
    sizes_of,
)
from zlab.engine.kv_cache import CacheShape
from zlab.engine.model_runner import (
    Captured,
    Decoded,
    DecodeGraphs,
    ModelRunner,
    StepResult,
    graph_sizes,
    product_sizes,
)
from zlab.engine.sampling_params import SamplingParams
from zlab.policies.core.plan import PrefillChunk, StepPlan
from zlab.traces.recording import to_table
from zlab.traces.workload import Workload, WorkloadMeta


@pytest.mark.parametrize(
    "most", [1, 2, 7, 8, 9, 64, 100, 255, 256, 257, 1000, 1024, 2048, 4096, 4097, 8192, 40_960]
)
def test_products_are_prepared_close_to_every_number_of_rows(most: int) -> None:
    """A kernel is chosen by the number of rows, so one in a wide gap would be loaded while
    serving.
    """
    sizes = product_sizes(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    for size, larger in itertools.pairwise(sizes):
        assert 0 < larger - size <= max(8, size // 8)
    assert len(sizes) < 100 + most // 512, "each is run before serving"


def test_few_rows_are_prepared_one_by_one_only_where_they_end() -> None:
    assert [product_sizes(most) for most in (1, 2, 8, 17)] == [(1,), (1, 2), (1, 8), (1, 8, 16, 17)]


ALONE = replace(SMALL, max_batched_tokens=140, overlap=False)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)


class Repeated:
    """Does again what was captured, with what lies at its inputs by then, and writes over the first
    results.
    """

    num_replays = 0

    def __init__(self, step: Callable[[], Decoded]) -> None:
        self._step = step
        self.output = step()

    def replay(self) -> None:
        Repeated.num_replays += 1
        for place, values in zip(self.output, self._step(), strict=True):
            place.copy_(values)


def capture(step: Callable[[], Decoded], stream: object, pool: object) -> Captured:
    graph = Repeated(step)
    return Captured(cast(Any, graph), graph.output)


def give_graphs(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """What `Runner` does at its start on CUDA."""
    patch.setattr(decode_graphs, "capture", capture)
    patch.setattr(mixed, "capture", capture)
    patch.setattr(torch.cuda, "Stream", lambda **more: None)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    runner, limits = engine.runner, engine.limits
    sizes = graph_sizes(limits.max_running)
    runner._graphs = DecodeGraphs(
        runner._pool_wide, sizes, runner._rows.padding_row, torch.device("cpu")
    )
    runner._mixed.capture(limits.max_running, limits.max_batched_tokens, 0)
    assert runner.graph_tokens == 128


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "policy", ["hybrid:tokens=32,window=4", "full-kv", "full-kv:comes_back=swap", "nano-vllm"]
)
def test_an_engine_with_graphs_says_what_one_without_says(
    policy: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several chunks, shared prefixes, preemptions, compressions; free blocks are
    poisoned all the while.
    """
    host_blocks = 16 if "swap" in policy else 0
    settings = replace(ALONE, num_blocks=26, host_blocks=host_blocks)
    requests = mixed_requests(14, seed=2, longest=60)
    plain = play(requests, policy, params, settings=settings)
    run = watched(policy, settings=settings)
    give_graphs(run.engine, monkeypatch)
    Repeated.num_replays = 0
    for asked in requests:
        run.submit(asked, params)
    run.run()
    run.assert_empty()
    assert run.tokens() == plain.tokens()
    assert run.engine.scheduler.digest() == plain.engine.scheduler.digest()
    assert Repeated.num_replays > run.num_steps // 2


def test_a_step_that_reads_more_than_the_pool_has_is_run_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests that share blocks may: a graph is laid out for as many tokens as there are in the
    pool.
    """
    run = watched("full-kv", settings=ALONE)
    give_graphs(run.engine, monkeypatch)
    steps = run.engine.runner._mixed
    monkeypatch.setattr(steps, "_pool_tokens", 120)
    requests = mixed_requests(6, seed=3, longest=30)
    Repeated.num_replays = 0
    monkeypatch.setattr(run.engine.runner, "_pool_tokens", 120)
    for asked in requests:
        run.submit(asked)
    run.run()
    assert run.tokens() == play(requests, "full-kv", settings=ALONE).tokens()
    assert 0 < Repeated.num_replays < run.num_steps


MILLISECOND_NS = 1_000_000
STEP_MS = 4
META = WorkloadMeta(name="arrivals", source="here")


@dataclass
class Device:
    """Works on what is enqueued, each step for 4 ms; the host's clock moves when it waits or is
    late.
    """

    now_ns: int = 0
    free_ns: int = 0
    late_ms: list[int] = field(
        default_factory=list
    )  # how long the host is busy otherwise after each step it enqueues

    def clock(self) -> int:
        return self.now_ns

    def enqueue(self, result: StepResult, took_ms: int = STEP_MS) -> StepResult:
        """The step's result, as if the device had been given its work."""
        begins_ns = max(self.free_ns, self.now_ns)
        self.free_ns = begins_ns + took_ms * MILLISECOND_NS
        self.now_ns += (self.late_ms.pop(0) if self.late_ms else 0) * MILLISECOND_NS
        result.begun, result.event = (
            cast(Any, Passed(self, begins_ns)),
            cast(Any, Passed(self, self.free_ns)),
        )
        return result


@dataclass
class Passed:
    """The event at one end of a step."""

    device: Device
    at_ns: int

    def query(self) -> bool:
        return self.device.now_ns >= self.at_ns

    def synchronize(self) -> None:
        self.device.now_ns = max(self.device.now_ns, self.at_ns)

    def elapsed_time(self, other: "Passed") -> float:
        return (other.at_ns - self.at_ns) / MILLISECOND_NS


@pytest.mark.parametrize(
    "late_ms",
    [
        [0] * 12,
        [0, 0, 0, 11, 0, 0, 0, 7, 0, 0, 0, 0],
        [0, 30, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [9] + [0] * 11,
    ],
    ids=["in time", "twice late", "late behind the first", "late with the first"],
)
def test_a_late_host_does_not_change_what_steps_take(late_ms: list[int]) -> None:
    """While the host is away two steps end: it then sees both at once, which by its clock would be
    a long and a short one.
    """
    device = Device(late_ms=list(late_ms))
    engine = Engine.create(replace(SMALL, policy="full-kv"), tiny(), clock=device.clock)
    execute = engine.runner.execute

    def timed(plan: StepPlan) -> StepResult:
        return device.enqueue(execute(plan))

    engine.runner.execute = timed  # type: ignore[method-assign]
    engine.submit(request("a", prompt(1, 9), 12), prompt(1, 9), GREEDY)
    while engine.step():
        pass
    columns = engine.steps.take()
    assert columns is not None
    steps = to_table("steps", columns)
    took = (steps["end_s"].to_numpy() - steps["start_s"].to_numpy()) * 1e3
    assert took == pytest.approx(STEP_MS)


def test_nobody_is_handed_in_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long step the scheduler is told of a time that lies ahead; requests come by the clock
    all the same.
    """
    device = Device()
    execute = ModelRunner.execute
    handed: list[tuple[int, int]] = []

    def timed(self: ModelRunner, plan: StepPlan) -> StepResult:
        return device.enqueue(execute(self, plan), 40 if plan.prefills else STEP_MS)

    submit = Engine.submit

    def noted(self: Engine, *arguments: Any, arrival_ns: int, **more: Any) -> Any:
        handed.append((device.now_ns, arrival_ns))
        return submit(self, *arguments, arrival_ns=arrival_ns, **more)

    def nap(seconds: float) -> None:
        device.now_ns += round(seconds * 1e9)

    monkeypatch.setattr(ModelRunner, "execute", timed)
    monkeypatch.setattr(Engine, "submit", noted)
    monkeypatch.setattr(replaying, "time", SimpleNamespace(sleep=nap))
    arrivals = [0.0, *(0.041 + 0.003 * place for place in range(12))]
    asked = [
        request(str(place), prompt(place, 9), 12, arrival_s=arrival_s)
        for place, arrival_s in enumerate(arrivals)
    ]
    replayed = replaying.replay(
        Workload(asked, META), replace(SMALL, policy="full-kv"), loaded=tiny(), clock=device.clock
    )
    assert len(replayed.token_ids) == len(asked)
    assert [arrival_ns for _, arrival_ns in handed] == [
        round(arrival_s * 1e9) for arrival_s in arrivals
    ]
    assert all(now_ns >= arrival_ns for now_ns, arrival_ns in handed)


CPU = torch.device("cpu")
PADDING_ROW = 99
SHAPE = CacheShape(
    num_layers=1,
    num_blocks=99,
    block_size=16,
    num_kv_heads=1,
    num_query_heads=1,
    head_dim=16,
    num_slots=4,
    window=4,
)


def chunk(
    number: int,
    table: list[int],
    start: int,
    count: int,
    slot: int = -1,
    last: bool = True,
    target: int = 9,
) -> PrefillChunk:
    request: Any = SimpleNamespace(number=number, table=table, slot=slot, target_tokens=target)
    return PrefillChunk(cast(Any, request), start, count, last)


def ids(number: int, count: int) -> list[int]:
    return [1000 * number + place for place in range(count)]


def packed(
    chunks: list[PrefillChunk], decode_rows: list[int], sizes: MixedSizes | None = None
) -> MixedInputs:
    packing = PrefillBatch(sizes or sizes_of(chunks, len(decode_rows)), SHAPE, PADDING_ROW)
    wide, narrow = packing.fill(
        chunks, ids, decode_rows, {number: 10 * number for number in range(20)}
    )
    return packing.inputs(torch.from_numpy(wide), torch.from_numpy(narrow))


def test_chunks_are_packed_behind_the_decodes_and_one_another() -> None:
    inputs = packed([chunk(1, [7, 3], 14, 4), chunk(2, [5], 0, 3, slot=2)], [8, 6])
    prefill = inputs.prefill
    assert prefill.token_ids[2:].tolist() == [1014, 1015, 1016, 1017, 2000, 2001, 2002]
    assert prefill.positions[2:].tolist() == [14, 15, 16, 17, 0, 1, 2]
    assert prefill.slot_mapping.tolist() == [-1, -1, 126, 127, 48, 49, 80, 81, 82]
    assert prefill.block_tables.tolist() == [[7, 3], [5, -1]]
    assert prefill.lengths.tolist() == [18, 3]
    assert prefill.query_starts.tolist() == [2, 6, 9]
    assert prefill.window_rows.tolist() == [-1] * 9
    assert inputs.decode_rows.tolist() == [8, 6]
    assert inputs.logit_rows.tolist() == [0, 1, 5, 8]
    assert inputs.start_rows.tolist() == [PADDING_ROW, PADDING_ROW, 10, 20]


def test_only_a_chunk_that_ends_a_prompt_of_someone_who_wants_output_gives_a_token() -> None:
    inputs = packed(
        [chunk(1, [7], 0, 4, last=False), chunk(2, [5], 0, 3, target=0), chunk(3, [6], 0, 2)], []
    )
    assert inputs.decode_rows.tolist() == []
    assert inputs.logit_rows.tolist() == [8]
    assert inputs.start_rows.tolist() == [30]


def test_what_a_larger_step_has_room_for_is_padding() -> None:
    chunks = [chunk(1, [7, 3], 14, 4), chunk(2, [5], 0, 3)]
    inputs = packed(chunks, [8], MixedSizes(tokens=13, decodes=3, chunks=5, blocks=4, logits=8))
    prefill = inputs.prefill
    assert inputs.decode_rows.tolist() == [8, PADDING_ROW, PADDING_ROW]
    assert prefill.slot_mapping.tolist() == [-1, 126, 127, 48, 49, 80, 81, 82, *[-1] * 5]
    assert prefill.query_starts.tolist() == [1, 5, 8, 8, 8, 8]
    assert prefill.lengths.tolist() == [18, 3, 0, 0, 0]
    assert prefill.block_tables.tolist() == [[7, 3, -1, -1], [5, -1, -1, -1], *[[-1] * 4] * 3]
    assert inputs.logit_rows.tolist() == [0, 4, 7, 0, 0, 0, 0, 0]
    assert inputs.start_rows.tolist() == [PADDING_ROW, 10, 20, *[PADDING_ROW] * 5]


def test_queries_of_the_last_blocks_window_are_kept_where_there_is_a_slot() -> None:
    with_slot = packed([chunk(1, [7, 3], 10, 20, slot=2)], []).prefill
    assert with_slot.window_rows.tolist() == [-1] * 18 + [
        8,
        9,
    ]  # places 12 and 13 of the second block
    without = packed([chunk(1, [7, 3], 10, 20)], []).prefill
    assert without.window_rows.tolist() == [-1] * 20


@pytest.mark.parametrize("num_chunks", range(1, 10))
def test_no_kernel_is_compiled_anew_for_a_number_of_chunks(num_chunks: int) -> None:
    """Triton makes another kernel of a pointer that is not aligned to 16 bytes: while serving, that
    takes seconds.
    """
    inputs = packed([chunk(n, [n + 1] * 3, 0, n + 1) for n in range(num_chunks)], [5]).prefill
    for tensor in (
        inputs.lengths,
        inputs.query_starts,
        inputs.block_tables,
        inputs.slot_mapping,
        inputs.window_rows,
    ):
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0


def test_a_chunk_that_stores_nothing_reads_blocks_that_there_are() -> None:
    inputs = nothing_to_store(40, SHAPE.block_size, CPU)
    assert inputs.block_tables.tolist() == [[0, 0, 0]]
    assert inputs.lengths.tolist() == [40]
    assert inputs.query_starts.tolist() == [1, 41]
    assert inputs.slot_mapping.tolist() == inputs.window_rows.tolist() == [-1] * 41

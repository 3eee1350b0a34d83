"""The engine under test: tiny models, and a run in which every step is audited and what nobody may read is poisoned."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from engine.build import Engine, EngineSettings, build_engine
from engine.loading import LoadedModel, load_model
from engine.loop import Sequence as Running
from engine.sampling_params import SamplingParams
from engine.step_result import StepResult
from engine.submitting import submit
from policies.core.audit import audit, audit_plan
from policies.core.events import Int64Array, Kind
from policies.core.plan import StepPlan
from policies.core.request import Phase
from policies.record import event_columns
from policies.spec import load_policy
from tests.engine.tiny_models import save_tiny
from traces.recording import to_table
from traces.workload import TraceRequest

torch.set_num_threads(1)
POISON = 777.0  # finite: a weight of exactly 0 may meet it, anything else shows
VOCABULARY = 97
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SMALL = EngineSettings(
    model="tiny",
    num_blocks=40,
    block_size=8,
    max_batched_tokens=64,
    max_running=16,
    max_model_len=400,
    device="cpu",
    overlap=True,  # as on CUDA: the harder case
)


@cache
def tiny(kind: str = "qwen3") -> LoadedModel:
    """A random model whose next token depends strongly on all before; not that of `dummy:`, which repeats itself."""
    folder = Path(mkdtemp(prefix="zlab-tiny-"))
    save_tiny(kind, folder, seed=3, max_position_embeddings=1024)
    return load_model(str(folder))


def prompt(seed: int, num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(5, VOCABULARY, (num_tokens,), generator=generator).tolist()
    return found


def request(id: str, prompt_ids: Sequence[int], output: int | None, **more: Any) -> TraceRequest:
    return TraceRequest(id, len(prompt_ids), output, max_tokens=output, prompt_ids=tuple(prompt_ids), **more)


def mixed(count: int, seed: int = 0, longest: int = 90) -> list[TraceRequest]:
    """Prompts of which some share their beginning, and outputs of all lengths."""
    generator = torch.Generator().manual_seed(seed)
    shared = prompt(1000 + seed, 24)
    found = []
    for place in range(count):
        head, own, output = (int(value) for value in torch.randint(0, 1 << 20, (3,), generator=generator))
        ids = shared[: (0, 16, 24)[head % 3]] + prompt(seed * 100 + place, 3 + own % 30)
        found.append(request(f"r{place}", ids, 1 + output % longest))
    return found


@dataclass
class Watched:
    """An engine whose every step is checked; `events` are its rows, `most_blocks` the largest table after a first
    compression."""

    engine: Engine
    rows: list[Int64Array] = field(default_factory=list)
    sequences: dict[str, Running] = field(default_factory=dict)
    most_blocks: int = 0
    num_steps: int = 0

    def submit(self, asked: TraceRequest, params: SamplingParams = GREEDY, **more: Any) -> Running:
        sequence = submit(self.engine, asked, list(asked.prompt_ids or ()), params, **more)
        self.sequences[asked.id] = sequence
        return sequence

    def step(self) -> bool:
        """One step, audited on both sides."""
        again = self.engine.loop.step()
        self.num_steps += again
        audit(self.engine.scheduler)
        return again

    def run(self, most_steps: int = 5000) -> None:
        """Until nothing is left to do."""
        for _ in range(most_steps):
            if not self.step() and not self.engine.scheduler.state.requests:
                self.engine.loop.drain()
                return
        raise AssertionError(f"after {most_steps} steps there is still work")

    def tokens(self) -> dict[str, list[int]]:
        return {id: list(sequence.output.token_ids) for id, sequence in self.sequences.items()}

    def count(self, kind: Kind) -> int:
        """Events of a kind so far."""
        self.engine.scheduler.state.journal.flush()
        return sum(int((rows[:, 1] == kind).sum()) for rows in self.rows)

    def events(self) -> Any:
        self.engine.scheduler.state.journal.flush()
        return to_table("events", event_columns(torch.cat([torch.from_numpy(rows) for rows in self.rows]).numpy()))

    def assert_empty(self) -> None:
        """Nothing is held any more by anybody."""
        state = self.engine.scheduler.state
        assert state.pool.num_free == state.limits.num_blocks
        assert state.slots.num_free == state.slots.num_slots
        assert not state.host_blocks_used
        assert not self.engine.loop.sequences
        assert not self.engine.runner.num_rows
        assert self.engine.compression is None or not self.engine.compression.running


def watched(
    policy: str = "hybrid",
    loaded: LoadedModel | None = None,
    *,
    settings: EngineSettings = SMALL,
    poison: bool = True,
    **changes: Any,
) -> Watched:
    """An engine on the CPU, its steps audited; free blocks and free query slots hold `POISON`."""
    found = loaded or tiny()
    rows: list[Int64Array] = []
    chosen = replace(settings, policy=load_policy(policy), **changes)
    engine = build_engine(chosen, found, lambda events, blocks: rows.append(events.copy()))
    result = Watched(engine, rows)
    execute = engine.runner.execute

    def checked(plan: StepPlan) -> StepResult:
        audit_plan(engine.scheduler, plan)
        _check_budget(result)
        _check_windows(engine, plan)
        if poison:
            _poison(engine, plan)
        return execute(plan)

    engine.runner.execute = checked  # type: ignore[method-assign]
    return result


def _check_budget(run: Watched) -> None:
    """While it decodes, nobody has more than N_max blocks, but for a prompt that is longer and not compressed yet."""
    state = run.engine.scheduler.state
    for request in state.running.values():
        if state.floor is None or request.phase is not Phase.DECODE:
            continue
        if request.compressions:
            run.most_blocks = max(run.most_blocks, len(request.table))
        adaptive = hasattr(state.policy.budget, "most_tokens")
        if not adaptive:
            prompt_blocks = 0 if request.compressions else state.blocks_for(request.prefill_until)
            assert len(request.table) <= max(state.floor, prompt_blocks, request.held_at_change)


def _check_windows(engine: Engine, plan: StepPlan) -> None:
    """A compression finds all queries of its window: none is the poison that a slot holds when it is handed out."""
    window = engine.policy.compression.window
    for task in plan.compressions:
        queries = engine.cache.window_queries[:, task.request.slot, -window:]
        assert not (queries == POISON).any(), f"{task.request.id} is compressed without all of its queries"


def _poison(engine: Engine, plan: StepPlan) -> None:
    """Overwrite what is free; a compression that is joined at once still reads blocks that it has given up."""
    state, cache = engine.scheduler.state, engine.cache
    pool = state.pool
    read = {block for task in plan.compressions for block in task.sources}
    free = [block for block in range(pool.num_blocks) if not pool.refs[block] and pool.entries[block] is None]
    free = [block for block in free if block not in read]
    for part in (cache.k, cache.v):
        part[:, free] = POISON
    num_slots = cache.shape.num_slots
    if num_slots:
        cache.history[:, free] = POISON
        taken = {request.slot for request in state.requests.values()}
        cache.window_queries[:, [slot for slot in range(num_slots) if slot not in taken]] = POISON


def play(
    requests: Iterable[TraceRequest],
    policy: str = "hybrid",
    params: SamplingParams | Callable[[TraceRequest], SamplingParams] = GREEDY,
    **more: Any,
) -> Watched:
    """All requests at once, to the end; afterwards nothing may be held."""
    run = watched(policy, **more)
    for asked in requests:
        run.submit(asked, params(asked) if callable(params) else params)
    run.run()
    run.assert_empty()
    return run

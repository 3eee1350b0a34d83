"""The engine under test: tiny models, and a run in which every step is audited and what nobody may
read is poisoned.

A small cache with something in it, for swaps.

Tiny random checkpoints made by transformers.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import transformers

from zlab.engine.engine import Engine, EngineSettings
from zlab.engine.engine import EngineRequest as Running
from zlab.engine.kv_cache import CacheShape, KVCache
from zlab.engine.model.decoder import Decoder
from zlab.engine.model.loader import LoadedModel, load_model
from zlab.engine.model_runner import StepResult
from zlab.engine.sampling_params import SamplingParams
from zlab.policies.core.invariants import check_plan, check_state
from zlab.policies.core.journal import Int64Array
from zlab.policies.core.plan import StepPlan
from zlab.policies.spec import load_policy
from zlab.policies.step_log import event_columns
from zlab.traces.recording import to_table
from zlab.traces.schema import EventKind, Phase
from zlab.traces.workload import TraceRequest

SHAPE = CacheShape(
    num_layers=3,
    num_blocks=40,
    block_size=4,
    num_kv_heads=2,
    num_query_heads=4,
    head_dim=6,
    num_slots=5,
    window=2,
)


def filled(device: str, dtype: torch.dtype = torch.float32, shape: CacheShape = SHAPE) -> KVCache:
    cache = KVCache(shape, dtype, torch.device(device))
    generator = torch.Generator().manual_seed(1)
    for part in (cache.k, cache.v, cache.history, cache.window_queries):
        part.copy_(torch.randn(part.shape, generator=generator))
    return cache


TINY: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16, "rope_theta": 1_000_000.0, "tie_word_embeddings": False},
    "qwen3-bias": {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    "llama": {"mlp_bias": True, "attention_bias": True},
    "llama-scaled": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama-linear": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}
    },
}
CONFIGS = {
    "qwen3": transformers.Qwen3Config,
    "qwen2": transformers.Qwen2Config,
    "llama": transformers.LlamaConfig,
}


def save_tiny(
    kind: str, folder: Path, *, seed: int = 0, shard_size: str = "50GB", **changes: Any
) -> transformers.PreTrainedModel:
    """A random float32 model of `TINY[kind]`, saved in `folder` as config.json and safetensors."""
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    config = CONFIGS[kind.split("-")[0]](**(sizes | TINY[kind] | changes))
    torch.manual_seed(seed)
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in (
            model.parameters()
        ):  # initialisation leaves biases at 0 and norms at 1, which would hide them
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of the config.json in `folder`."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


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
    """A random model whose next token depends strongly on all before; not that of `dummy:`, which
    repeats itself.
    """
    folder = Path(mkdtemp(prefix="zlab-tiny-"))
    save_tiny(kind, folder, seed=3, max_position_embeddings=1024)
    return load_model(str(folder))


@contextmanager
def poisoned(token: int) -> Iterator[LoadedModel]:
    """The tiny model while the embedding of a token is NaN."""
    loaded = tiny()
    assert isinstance(loaded.model, Decoder)
    embedding = loaded.model.weights.embedding
    kept = embedding[token].clone()
    embedding[token] = float("nan")
    try:
        yield loaded
    finally:
        embedding[token] = kept


def prompt(seed: int, num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(5, VOCABULARY, (num_tokens,), generator=generator).tolist()
    return found


def request(id: str, prompt_ids: Sequence[int], output: int | None, **more: Any) -> TraceRequest:
    return TraceRequest(
        id, len(prompt_ids), output, max_tokens=output, prompt_ids=tuple(prompt_ids), **more
    )


def mixed(count: int, seed: int = 0, longest: int = 90) -> list[TraceRequest]:
    """Prompts of which some share their beginning, and outputs of all lengths."""
    generator = torch.Generator().manual_seed(seed)
    shared = prompt(1000 + seed, 24)
    found = []
    for place in range(count):
        head, own, output = (
            int(value) for value in torch.randint(0, 1 << 20, (3,), generator=generator)
        )
        ids = shared[: (0, 16, 24)[head % 3]] + prompt(seed * 100 + place, 3 + own % 30)
        found.append(request(f"r{place}", ids, 1 + output % longest))
    return found


@dataclass
class Watched:
    """An engine whose every step is checked; `events` are its rows, `most_blocks` the largest table
    after a first compression.
    """

    engine: Engine
    rows: list[Int64Array] = field(default_factory=list)
    sequences: dict[str, Running] = field(default_factory=dict)
    most_blocks: int = 0
    num_steps: int = 0

    def submit(self, asked: TraceRequest, params: SamplingParams = GREEDY, **more: Any) -> Running:
        sequence = self.engine.submit(asked, list(asked.prompt_ids or ()), params, **more)
        self.sequences[asked.id] = sequence
        return sequence

    def step(self) -> bool:
        """One step, audited on both sides."""
        again = self.engine.step()
        self.num_steps += again
        check_state(self.engine.scheduler)
        return again

    def run(self, most_steps: int = 5000) -> None:
        """Until nothing is left to do."""
        for _ in range(most_steps):
            if not self.step() and not self.engine.scheduler.state.requests:
                self.engine.drain()
                return
        raise AssertionError(f"after {most_steps} steps there is still work")

    def tokens(self) -> dict[str, list[int]]:
        return {id: list(sequence.output.token_ids) for id, sequence in self.sequences.items()}

    def count(self, kind: EventKind) -> int:
        """Events of a kind so far."""
        self.engine.scheduler.state.journal.flush()
        return sum(int((rows[:, 1] == kind).sum()) for rows in self.rows)

    def events(self) -> Any:
        self.engine.scheduler.state.journal.flush()
        return to_table(
            "events",
            event_columns(torch.cat([torch.from_numpy(rows) for rows in self.rows]).numpy()),
        )

    def assert_empty(self) -> None:
        """Nothing is held any more by anybody."""
        state = self.engine.scheduler.state
        assert state.pool.num_free == state.limits.num_blocks
        assert state.slots.num_free == state.slots.num_slots
        assert not state.host_blocks_used
        assert not self.engine.sequences
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
    engine = Engine.create(chosen, found, lambda events, blocks: rows.append(events.copy()))
    result = Watched(engine, rows)
    execute = engine.runner.execute

    def checked(plan: StepPlan) -> StepResult:
        check_plan(engine.scheduler, plan)
        _check_budget(result)
        _check_windows(engine, plan)
        if poison:
            _poison(engine, plan)
        return execute(plan)

    engine.runner.execute = checked  # type: ignore[method-assign]
    return result


def _check_budget(run: Watched) -> None:
    """While it decodes, nobody has more than N_max blocks, but for a prompt that is longer and not
    compressed yet.
    """
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
    """A compression finds all queries of its window: none is the poison that a slot holds when it
    is handed out.
    """
    window = engine.policy.compression.window
    for task in plan.compressions:
        if task.request.slot < 0:
            continue  # compressed by a scorer that reads none
        queries = engine.cache.window_queries[:, task.request.slot, -window:]
        assert not (queries == POISON).any(), (
            f"{task.request.id} is compressed without all of its queries"
        )


def _poison(engine: Engine, plan: StepPlan) -> None:
    """Overwrite what is free; a compression that is joined at once still reads blocks that it has
    given up.
    """
    state, cache = engine.scheduler.state, engine.cache
    pool = state.pool
    read = {block for task in plan.compressions for block in task.sources}
    free = [
        block
        for block in range(pool.num_blocks)
        if not pool.refs[block] and pool.entries[block] is None
    ]
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

"""Measure the engine on a GPU: `python -m benchmarks.engine decode|prefill|run --out FILE.json`.

* `decode`: the time of one decode step under CUDA graphs at several batch sizes, beside its byte
  floor (weights, keys and values that are read, over the GPU's measured read bandwidth).
* `prefill`: the tokens per second of prompts alone.
* `run WORKLOAD POLICY...`: closed workloads of `../shared/workloads` with forced output lengths,
  random weights and one pool for all. A run ends early after `--seconds` or at `--until-share`.
"""

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
import triton
from triton import knobs

from benchmarks.run_figures import seconds_to_shares, shared
from zlab.engine.engine import Engine, EngineSettings, set_aside
from zlab.engine.model.loader import LoadedModel, load_model
from zlab.engine.sampling_params import SamplingParams
from zlab.policies.step_log import request_columns
from zlab.traces.formats import read_trace
from zlab.traces.metrics import summarize
from zlab.traces.recording import to_table
from zlab.traces.workload import TraceRequest, Workload

READ_BYTES_PER_S = 4.45e12  # measured on an H200, ../shared/design/peers.md


def header() -> dict[str, Any]:
    """Return the GPU, the versions and the date that the figures belong to."""
    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "date": time.strftime("%Y-%m-%d"),
    }


@dataclass(frozen=True)
class Compilation:
    """A Triton kernel that became ready at one moment (`time.perf_counter_ns`)."""

    kernel: str
    ready_ns: int
    from_disk: bool


class Compilations:
    """A context that collects in `made` every kernel which this process compiles or loads.

    It sets the listener of Triton's compiler (Triton 3.4 and later). A kernel passes it once for
    each of its specialisations, at its first launch. A listener that was set before is called too.
    """

    def __init__(self) -> None:
        self.made: list[Compilation] = []
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = knobs.compilation.listener
        knobs.compilation.listener = self._on_compile
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        knobs.compilation.listener = self._before

    def since(self, moment_ns: int) -> list[Compilation]:
        """Return the kernels that were not ready at that moment."""
        return [one for one in self.made if one.ready_ns >= moment_ns]

    def _on_compile(self, *, src: Any, cache_hit: bool, **more: Any) -> None:
        self.made.append(Compilation(str(src.name), time.perf_counter_ns(), cache_hit))
        if self._before is not None:
            self._before(src=src, cache_hit=cache_hit, **more)


def submit_one(engine: Engine, asked: TraceRequest, prompt: Sequence[int]) -> None:
    """Submit a request that writes exactly as many tokens as its trace row says."""
    params = SamplingParams(temperature=0.0, max_tokens=asked.output_tokens or 1, ignore_eos=True)
    engine.submit(asked, prompt, params, with_text=False, arrival_ns=0)


def submit(engine: Engine, load: Workload) -> int:
    """Submit all requests at once with forced output lengths; returns the output tokens asked."""
    vocab_size = engine.loaded.config.vocab_size
    for asked in load:
        prompt = asked.prompt_ids or range(asked.prompt_tokens)
        submit_one(engine, asked, [token % vocab_size for token in prompt])
    return sum(asked.output_tokens or 1 for asked in load)


def submit_random(engine: Engine, number: int, prompt_tokens: int, output_tokens: int) -> None:
    """Submit `number` requests of equal size, each with a random prompt of its own."""
    for index in range(number):
        generator = torch.Generator().manual_seed(index)
        size = (prompt_tokens,)
        prompt = torch.randint(0, engine.loaded.config.vocab_size, size, generator=generator)
        asked = TraceRequest(
            id=str(index),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            max_tokens=output_tokens,
            arrival_s=0.0,
        )
        submit_one(engine, asked, prompt.tolist())


def steps_of(engine: Engine) -> pa.Table:
    """Return the steps that the engine has taken, as a table of the recording."""
    columns = engine.steps.take()
    assert columns is not None
    return to_table("steps", columns)


def run_to_end(engine: Engine) -> pa.Table:
    """Run until no request is left; returns the steps."""
    while engine.step():
        pass
    engine.drain()
    return steps_of(engine)


def run(
    settings: EngineSettings,
    loaded: LoadedModel,
    load: Workload,
    seconds: float,
    until_share: float,
) -> dict[str, Any]:
    """Run one closed workload and return its figures.

    Args:
        settings: the engine's settings, with the policy.
        loaded: the model.
        load: the requests, all submitted at the start.
        seconds: the run ends after this time, complete or not.
        until_share: the run ends once this share of the output tokens is out.
    """
    began = time.perf_counter()
    engine = Engine.create(settings, loaded)
    set_up = time.perf_counter() - began
    total = submit(engine, load)
    complete, produced = True, 0
    with set_aside():
        start = time.perf_counter()
        while engine.step():
            produced += engine.scheduler.stats().num_decoding  # near enough to know when to stop
            if time.perf_counter() - start > seconds or produced > until_share * total + 2000:
                complete = False
                break
        engine.drain()
    wall = time.perf_counter() - start
    steps = steps_of(engine)
    alive = [(request, -1) for request in engine.scheduler.live()]
    ended = [*engine.take_ended(), *alive]
    requests = to_table(
        "requests", request_columns([item[0] for item in ended], [item[1] for item in ended])
    )
    manifest = {
        "num_blocks": engine.limits.num_blocks,
        "block_size": engine.limits.block_size,
        "compression_work_s": engine.compression.work_seconds()
        if engine.compression is not None
        else 0.0,
        "swapped_tokens": engine.runner.swapped_tokens,
    }
    summary = dict(summarize(requests, steps, manifest))
    tokens_out = int(steps["output_tokens"].to_numpy().sum(dtype=np.int64))
    step_s = steps["end_s"].to_numpy() - steps["start_s"].to_numpy()
    host_gap = steps["start_s"].to_numpy()[1:] - steps["end_s"].to_numpy()[:-1]
    return {
        "policy": engine.policy.name,
        "complete": complete,
        "wall_s": wall,
        "set_up_s": set_up,
        "tokens_asked": total,
        "tokens_out": tokens_out,
        "tokens_per_s": tokens_out / wall,
        "seconds_to_share": seconds_to_shares(steps, total),
        "step_ms": {"mean": float(step_s.mean() * 1e3), "p50": float(np.median(step_s) * 1e3)},
        "gap_ms_mean": float(host_gap.mean() * 1e3) if len(host_gap) else 0.0,
        "digest": engine.scheduler.digest(),
        "summary": summary,
        "step_samples": sample_steps(steps),
    }


def sample_steps(steps: Any, count: int = 400) -> dict[str, list[float]]:
    """Return at most `count` evenly chosen steps, to plot times over batch and context."""
    rows = np.unique(np.linspace(0, steps.num_rows - 1, min(count, steps.num_rows)).astype(int))
    names = (
        "step",
        "start_s",
        "end_s",
        "decodes",
        "context_tokens",
        "prefill_tokens",
        "compressions",
        "running",
    )
    return {name: steps[name].to_numpy()[rows].tolist() for name in names}


def decode(
    settings: EngineSettings, loaded: LoadedModel, batches: list[int], context: int
) -> list[dict[str, Any]]:
    """Time decode steps of equal batches around a mean context; returns a row for each batch."""
    rows = []
    config = loaded.config
    for batch in batches:
        blocks = batch * (-(-(context + 192) // settings.block_size)) + 8
        chosen = replace(
            settings,
            num_blocks=blocks,
            policy="full-kv",
            max_running=batch,
            max_batched_tokens=16384,
        )
        engine = Engine.create(chosen, loaded)
        submit_random(engine, batch, prompt_tokens=context - 64, output_tokens=160)
        steps = run_to_end(engine)
        full = (steps["decodes"].to_numpy() == batch) & (steps["prefill_tokens"].to_numpy() == 0)
        seconds = (steps["end_s"].to_numpy() - steps["start_s"].to_numpy())[full][8:-8]
        contexts = steps["context_tokens"].to_numpy()[full][8:-8]
        kv = (
            2
            * config.num_layers
            * config.num_kv_heads
            * config.head_dim
            * engine.cache.k.element_size()
        )
        weights = weight_bytes(loaded)
        floor = (weights + kv * float(contexts.mean())) / READ_BYTES_PER_S
        median = statistics.median(seconds.tolist())
        rows.append(
            {
                "batch": batch,
                "mean_context": float(contexts.mean() / batch),
                "step_ms": median * 1e3,
                "step_ms_p10_p90": [float(np.percentile(seconds, p) * 1e3) for p in (10, 90)],
                "floor_ms": floor * 1e3,
                "over_floor": median / floor,
                "steps": len(seconds),
            }
        )
        print(rows[-1], flush=True)
        del engine
        free_memory()
    return rows


def free_memory() -> None:
    """Free the last engine's cache; its parts refer to one another, so only a collection does."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def weight_bytes(loaded: LoadedModel) -> int:
    """Return the bytes of weights that a decode step reads.

    The embedding table does not count, because a step gathers a few of its rows.
    """
    weights = loaded.model.weights  # type: ignore[attr-defined]
    tensors = [weights.final_norm, weights.head]
    for layer in weights.layers:
        tensors += [
            tensor
            for name in layer.__dataclass_fields__
            if (tensor := getattr(layer, name)) is not None
        ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def prefill(settings: EngineSettings, loaded: LoadedModel, length: int) -> dict[str, Any]:
    """Return the tokens per second of prompts of one length, in full steps."""
    number = 32
    chosen = replace(
        settings,
        num_blocks=number * (length // settings.block_size + 2),
        policy="full-kv:prefix=none",
    )
    engine = Engine.create(chosen, loaded)
    submit_random(engine, number, prompt_tokens=length, output_tokens=1)
    steps = run_to_end(engine)
    seconds = steps["end_s"].to_numpy() - steps["start_s"].to_numpy()
    tokens = steps["prefill_tokens"].to_numpy()
    rates = (tokens / seconds)[1:]
    return {"prompt": length, "tokens_per_s_median": float(np.median(rates)), "steps": len(rates)}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("decode", "prefill", "run"))
    parser.add_argument("names", nargs="*", help="run: a workload, then policies")
    parser.add_argument("--model", default="dummy:qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--variant")
    parser.add_argument("--kv-blocks", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--max-batched-tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument(
        "--until-share", type=float, default=2.0, help="stop once that share of the tokens is out"
    )
    parser.add_argument("--batches", default="64,128,256")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    settings = EngineSettings(
        model=options.model,
        device=options.device,
        variant=options.variant,
        num_blocks=options.kv_blocks,
        block_size=options.block_size,
        max_batched_tokens=options.max_batched_tokens,
        max_running=256,
        overlap=not options.no_overlap,
    )
    loaded = load_model(options.model, device=options.device, variant=options.variant)
    results: dict[str, Any] = header() | {"command": vars(options) | {"out": str(options.out)}}
    if options.what == "decode":
        results["decode"] = decode(
            settings, loaded, [int(b) for b in options.batches.split(",")], options.context
        )
    elif options.what == "prefill":
        results["prefill"] = []
        for length in (512, 2048):
            results["prefill"].append(prefill(settings, loaded, length))
            print(results["prefill"][-1], flush=True)
            free_memory()
    else:
        name, *policies = options.names
        load = read_trace(shared("workloads", f"{name}.jsonl"))
        results["runs"] = []
        for policy in policies:
            figures = run(
                replace(settings, policy=policy), loaded, load, options.seconds, options.until_share
            )
            results["runs"].append({"workload": name, **figures})
            shown = (
                "policy",
                "complete",
                "wall_s",
                "set_up_s",
                "tokens_out",
                "tokens_per_s",
                "seconds_to_share",
            )
            print(
                {key: figures[key] for key in (*shown, "step_ms", "gap_ms_mean", "digest")},
                flush=True,
            )
            options.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
            free_memory()
    options.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

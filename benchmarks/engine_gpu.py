"""The engine on a GPU: `python -m benchmarks.engine_gpu decode|prefill|run ... --out FILE.json`.

`decode`: seconds of one decode step under CUDA graphs at several batch sizes, beside the byte floor (weights, keys and
values read, over the card's measured read bandwidth). `prefill`: tokens a second of prompts alone. `run WORKLOAD
POLICY...`: closed workloads from ../shared/workloads with forced output lengths, random weights, one pool for all, cut
after `--seconds` if need be (then: seconds until that share of all tokens was out).
"""

import argparse
import gc
import json
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from benchmarks.run_figures import seconds_to_shares
from engine.build import Engine, EngineSettings, build_engine
from engine.collecting import set_aside
from engine.loading import LoadedModel, load_model
from engine.sampling_params import SamplingParams
from engine.stopping import Output
from policies.record import request_columns
from traces.formats import read_trace
from traces.metrics import summarize
from traces.recording import to_table
from traces.workload import TraceRequest, Workload

READ_BYTES_PER_S = 4.45e12  # measured on an H200, ../shared/design/peers.md
REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_PLACES = (REPOSITORY.parent / "shared", REPOSITORY / ".carry" / "shared")


def shared(kind: str, name: str) -> Path:
    """A file of `../shared/KIND`, beside the checkout or carried in it."""
    places = [place / kind / name for place in SHARED_PLACES]
    for place in places:
        if place.is_file():
            return place
    raise SystemExit(f"no {' or '.join(map(str, places))}")


def header() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "date": time.strftime("%Y-%m-%d"),
    }


def submit(engine: Engine, load: Workload, limit: int | None = None) -> int:
    """Hand all requests over at once, output lengths forced; returns the output tokens asked for."""
    total = 0
    for asked in load:
        length = asked.output_tokens or 1
        prompt = list(asked.prompt_ids or range(asked.prompt_tokens))
        prompt = [token % engine.loaded.config.vocab_size for token in prompt]
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        engine.loop.submit(asked, prompt, params, Output(params, (), None), may_stop=False, arrival_ns=0)
        total += length
    return total


def run(
    settings: EngineSettings, loaded: LoadedModel, load: Workload, seconds: float, until_share: float
) -> dict[str, Any]:
    """One closed workload to its end, or for so many seconds, or until that share of its tokens is out."""
    began = time.perf_counter()
    engine = build_engine(settings, loaded)
    set_up = time.perf_counter() - began
    total = submit(engine, load)
    complete, produced = True, 0
    with set_aside():
        start = time.perf_counter()
        while engine.loop.step():
            produced += engine.scheduler.state.decoding.num_requests  # near enough to know when to stop
            if time.perf_counter() - start > seconds or produced > until_share * total + 2000:
                complete = False
                break
        engine.loop.drain()
    wall = time.perf_counter() - start
    columns = engine.steps.take()
    assert columns is not None
    steps = to_table("steps", columns)
    alive = [(request, -1) for request in engine.scheduler.live()]
    ended = [*engine.loop.ended, *alive]
    requests = to_table("requests", request_columns([item[0] for item in ended], [item[1] for item in ended]))
    manifest = {
        "num_blocks": engine.limits.num_blocks,
        "block_size": engine.limits.block_size,
        "compression_work_s": engine.compression.work_seconds() if engine.compression is not None else 0.0,
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
    """Evenly chosen steps, enough to see times against batch and context."""
    rows = np.unique(np.linspace(0, steps.num_rows - 1, min(count, steps.num_rows)).astype(int))
    names = ("step", "start_s", "end_s", "decodes", "context_tokens", "prefill_tokens", "compressions", "running")
    return {name: steps[name].to_numpy()[rows].tolist() for name in names}


def decode(settings: EngineSettings, loaded: LoadedModel, batches: list[int], context: int) -> list[dict[str, Any]]:
    """Steps of equal batches around a mean context, everything else idle."""
    rows = []
    config = loaded.config
    for batch in batches:
        blocks = batch * (-(-(context + 192) // settings.block_size)) + 8
        chosen = replace(settings, num_blocks=blocks, policy="full-kv", max_running=batch, max_batched_tokens=16384)
        engine = build_engine(chosen, loaded)
        requests = [
            TraceRequest(id=str(i), prompt_tokens=context - 64, output_tokens=160, max_tokens=160, arrival_s=0.0)
            for i in range(batch)
        ]
        for number, asked in enumerate(requests):
            generator = torch.Generator().manual_seed(number)
            prompt = torch.randint(0, config.vocab_size, (asked.prompt_tokens,), generator=generator).tolist()
            params = SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True)
            engine.loop.submit(asked, prompt, params, Output(params, (), None), may_stop=False, arrival_ns=0)
        while engine.loop.step():
            pass
        engine.loop.drain()
        columns = engine.steps.take()
        assert columns is not None
        steps = to_table("steps", columns)
        full = (steps["decodes"].to_numpy() == batch) & (steps["prefill_tokens"].to_numpy() == 0)
        seconds = (steps["end_s"].to_numpy() - steps["start_s"].to_numpy())[full][8:-8]
        contexts = steps["context_tokens"].to_numpy()[full][8:-8]
        kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * engine.cache.k.element_size()
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
    """Let go of the last engine's cache (its parts refer to one another) before the next is made."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def weight_bytes(loaded: LoadedModel) -> int:
    """Bytes of weights that a decode step reads: all but the embedding table (its rows are gathered)."""
    weights = loaded.model.weights  # type: ignore[attr-defined]
    tensors = [weights.final_norm, weights.head]
    for layer in weights.layers:
        tensors += [tensor for name in layer.__dataclass_fields__ if (tensor := getattr(layer, name)) is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def prefill(settings: EngineSettings, loaded: LoadedModel, length: int) -> dict[str, Any]:
    """Tokens a second of prompts alone, in full steps."""
    number = 32
    chosen = replace(settings, num_blocks=number * (length // settings.block_size + 2), policy="full-kv:prefix=none")
    engine = build_engine(chosen, loaded)
    for index in range(number):
        asked = TraceRequest(id=str(index), prompt_tokens=length, output_tokens=1, max_tokens=1, arrival_s=0.0)
        generator = torch.Generator().manual_seed(index)
        prompt = torch.randint(0, loaded.config.vocab_size, (length,), generator=generator).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        engine.loop.submit(asked, prompt, params, Output(params, (), None), may_stop=False, arrival_ns=0)
    while engine.loop.step():
        pass
    engine.loop.drain()
    columns = engine.steps.take()
    assert columns is not None
    steps = to_table("steps", columns)
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
    parser.add_argument("--until-share", type=float, default=2.0, help="stop once that share of the tokens is out")
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
        results["decode"] = decode(settings, loaded, [int(b) for b in options.batches.split(",")], options.context)
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
            figures = run(replace(settings, policy=policy), loaded, load, options.seconds, options.until_share)
            results["runs"].append({"workload": name, **figures})
            shown = ("policy", "complete", "wall_s", "set_up_s", "tokens_out", "tokens_per_s", "seconds_to_share")
            print({key: figures[key] for key in (*shown, "step_ms", "gap_ms_mean", "digest")}, flush=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
            free_memory()
    options.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

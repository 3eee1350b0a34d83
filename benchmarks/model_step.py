"""Time one decode step of a model, with and without attention: `python -m benchmarks.model_step`.

For every way the layers can run (`zlab.engine.model.decoder`) and every batch, it captures a CUDA
graph of a whole step (layers, head, most probable token) on random weights and a random paged
cache, with ragged contexts around the mean given. A time is the median of replays, beside the bytes
to read over the GPU's read bandwidth. `--profile` lists the time kernel by kernel. `--dry-run` runs
a tiny model on the CPU, without graphs. `--out FILE.json` writes the rows.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from zlab.engine.input_batch import (
    LENGTH,
    POSITION,
    SLOT,
    TOKEN,
    DecodeInputs,
    DecodeState,
    StepAttention,
)
from zlab.engine.kernels.backends import find_backend
from zlab.engine.kernels.triton_decode import reserve_decode_workspace
from zlab.engine.kv_cache import CacheShape, KVCache
from zlab.engine.model.decoder import VARIANTS, Decoder, DecoderWeights, StepsMaker
from zlab.engine.model.layers import StoreDestination
from zlab.engine.model.loader import allocate, fill_random
from zlab.engine.model.spec import ModelConfig, find_row
from zlab.engine.model.tensor_parallel import Parallel
from zlab.engine.model.triton_layers import table_from_rows
from zlab.engine.sampling import sampler, torch_ops
from zlab.engine.sampling.torch_ops import FilterSettings

READ_BYTES_PER_SECOND = 4.45e12  # measured on an H200, docs/COST.md
WINDOW = 16
WARM_UP, REPEATS = 3, 15


class NoAttention:
    """Stands in for attention: it returns the queries, and stores keys and values as usual."""

    def __init__(
        self, config: ModelConfig, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        sizes = (num_rows, 1, config.num_kv_heads, config.head_dim)
        self._k = torch.zeros(sizes, dtype=dtype, device=device)
        self._v = torch.zeros(sizes, dtype=dtype, device=device)
        self._slots = torch.arange(num_rows, device=device)
        self._kernels = find_backend(device)

    def destination(self, layer: int) -> StoreDestination:
        return StoreDestination(self._slots, self._k, self._v)

    def attend_stored(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        return queries

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        self._kernels.store(keys, values, self._slots, self._k, self._v)
        return queries


class Step:
    """A decode step of one batch over one cache, with the same rows at every replay."""

    def __init__(self, decoder: Decoder, cache: KVCache, contexts: list[int]) -> None:
        self.decoder, self.cache = decoder, cache
        device = decoder.device
        size = cache.shape.block_size
        blocks = [-(-length // size) for length in contexts]
        state = DecodeState(len(contexts), max(blocks), device)
        first = 0
        for number, (length, count) in enumerate(zip(contexts, blocks, strict=True)):
            values = {
                TOKEN: number,
                POSITION: length - 1,
                LENGTH: length,
                SLOT: number % max(1, cache.shape.num_slots),
            }
            for column, value in values.items():
                state.set(number, column, value)
            state.set_table(number, range(first, first + count))
            first += count
        state.upload()
        self._state = state.state
        self._rows = torch.arange(len(contexts), device=device)
        self._context = sum(contexts)
        self._kernels = find_backend(device)
        self._workspace = reserve_decode_workspace(
            max_length=max(contexts),
            max_requests=len(contexts),
            num_query_heads=cache.shape.num_query_heads,
            num_kv_heads=cache.shape.num_kv_heads,
            head_dim=cache.shape.head_dim,
            device=device,
        )
        self._without = NoAttention(decoder.config, len(contexts), cache.k.dtype, device)

    def run(self, with_attention: bool) -> torch.Tensor:
        """Return the most probable tokens of all rows."""
        inputs = DecodeInputs(self._state, self._rows, self.cache.shape.block_size, WINDOW)
        attention = StepAttention(
            self.cache, self._kernels, self._workspace, inputs, None, self._context
        )
        context = attention if with_attention else self._without
        hidden = self.decoder.forward(attention.token_ids, attention.positions, context)
        return sampler.most_probable(self.decoder.logits(hidden))


def milliseconds(run: Callable[[], object], *, graphs: bool) -> tuple[float, Callable[[], object]]:
    """Return the median milliseconds of a call, replayed from a graph on a GPU, and the replay."""
    for _ in range(WARM_UP if graphs else 1):
        run()
    replay = run
    if graphs:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
        replay()
    times = []
    for _ in range(REPEATS if graphs else 2):
        if graphs:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        replay()
        if graphs:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times), replay


def contexts_around(mean: int, batch: int) -> list[int]:
    """Return ragged lengths from 0.5 to 1.5 times `mean`, in a fixed mixed order."""
    lengths = (
        [mean // 2 + mean * place // max(1, batch - 1) for place in range(batch)]
        if batch > 1
        else [mean]
    )
    return [lengths[place * 37 % batch] for place in range(batch)] if batch % 37 else lengths


def floor_ms(decoder: Decoder, contexts: list[int] | None, dtype: torch.dtype) -> float:
    """Return the time to read the weights once, and keys and values if `contexts` are given."""
    config, weights = decoder.config, decoder.weights
    layer = config.qkv_width + config.query_width + 3 * config.intermediate_size
    values = config.num_layers * layer * config.hidden_size + weights.head.numel()
    if contexts is not None:
        values += 2 * config.num_layers * config.kv_width * sum(contexts)
    return values * dtype.itemsize / READ_BYTES_PER_SECOND * 1e3


def kernel_times(replay: Callable[[], object], num_runs: int = 3) -> list[dict[str, Any]]:
    """Return microseconds and launches a step by kernel, the largest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(num_runs):
            replay()
        torch.cuda.synchronize()
    rows = [
        {
            "kernel": item.key[:90],
            "microseconds": item.device_time_total / num_runs,
            "launches": item.count / num_runs,
        }
        for item in recorded.key_averages()
    ]
    return sorted(rows, key=lambda row: -row["microseconds"])[:25]


def time_sampling(batch: int, vocab: int, device: torch.device, graphs: bool) -> dict[str, float]:
    """Return the milliseconds of sampling a batch of tokens, in each way there is."""
    logits = torch.randn(batch, vocab, device=device).to(
        torch.bfloat16 if graphs else torch.float32
    )
    ones = torch.ones(batch, device=device)
    numbers = torch.arange(batch, device=device)
    settings = (0.6 * ones, ones, numbers, numbers)
    top_p = FilterSettings(
        numbers,
        top_k=torch.full_like(numbers, vocab),
        top_p=0.95 * ones,
        min_p=0.0 * ones,
        widest_k=0,
        sorts=True,
    )
    # Peaked logits fall like those of a language model: top-p keeps tens of tokens.
    ranks = torch.rand(batch, vocab, device=device).argsort(dim=-1) + 1
    peaked = (25.0 - 1.5 * ranks.float().log()).to(logits.dtype)
    ways: dict[str, Callable[[], object]] = {
        "argmax, torch": lambda: torch_ops.most_probable(logits),
        "argmax, chosen": lambda: sampler.most_probable(logits),
        "draw, torch": lambda: torch_ops.draw(logits, *settings),
        "draw, chosen": lambda: sampler.draw(logits, *settings),
    }
    for name, values in (("flat", logits), ("peaked", peaked)):
        ways |= {
            f"top-p draw of {name}, torch": lambda values=values: torch_ops.draw(  # type: ignore[misc]
                values, *settings, torch_ops.thresholds(values, settings[0], top_p)
            ),
            f"top-p draw of {name}, chosen": lambda values=values: sampler.draw(  # type: ignore[misc]
                values, *settings, sampler.thresholds(values, settings[0], top_p)
            ),
        }
    return {name: milliseconds(way, graphs=graphs)[0] for name, way in ways.items()}


def time_variant(
    name: str,
    make_steps: StepsMaker,
    config: ModelConfig,
    weights: DecoderWeights,
    cache: KVCache,
    contexts: list[int],
    *,
    graphs: bool,
    profiled: bool,
) -> list[dict[str, Any]]:
    """Return a row without attention and one with it."""
    decoder = Decoder(config, weights, make_steps=make_steps)
    step = Step(decoder, cache, contexts)
    rows = []
    for with_attention in (False, True):
        began = time.perf_counter()
        try:
            taken, replay = milliseconds(lambda on=with_attention: step.run(on), graphs=graphs)  # type: ignore[misc]
        except Exception as error:  # a variant that fails must not end the measurement
            print(f"{name:10s} batch {len(contexts):4d} FAILED: {str(error)[:300]}", flush=True)
            rows.append(
                {
                    "variant": name,
                    "batch": len(contexts),
                    "attention": with_attention,
                    "failed": str(error),
                }
            )
            continue
        floor = floor_ms(decoder, contexts if with_attention else None, cache.k.dtype)
        row: dict[str, Any] = {
            "variant": name,
            "batch": len(contexts),
            "attention": with_attention,
            "milliseconds": taken,
            "floor_milliseconds": floor,
            "over_floor": taken / floor,
            "set_up_seconds": time.perf_counter() - began,
        }
        print(
            f"{name:10s} batch {len(contexts):4d} {'with' if with_attention else 'no  '} "
            f"attention: {taken:8.3f} ms, "
            f"floor {floor:7.3f}, {taken / floor:5.2f}x (set up in {row['set_up_seconds']:.0f} s)",
            flush=True,
        )
        if profiled and graphs:
            row["kernels"] = kernel_times(replay)
            for item in row["kernels"][:14]:
                print(
                    f"    {item['microseconds']:9.1f} us {item['launches']:6.0f} x "
                    f"{item['kernel'][:80]}"
                )
        rows.append(row)
    return rows


def main() -> None:
    """Time every variant at every batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=None, help="cut the model to so many layers")
    parser.add_argument("--batches", default="64,128,256")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument(
        "--table", type=Path, help="product table for `triton`, from benchmarks.tune"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    config = find_row(arguments.model)
    batches = [int(item) for item in arguments.batches.split(",")]
    device, dtype, graphs = torch.device("cuda"), torch.bfloat16, True
    if arguments.dry_run:
        config = replace(
            config,
            num_layers=2,
            hidden_size=64,
            intermediate_size=96,
            num_query_heads=4,
            num_kv_heads=2,
            head_dim=16,
            vocab_size=500,
            max_positions=512,
        )
        batches, arguments.context, arguments.block_size = [2, 3], 40, 16
        device, dtype, graphs = torch.device("cpu"), torch.float32, False
        arguments.variants = "eager"
    if arguments.layers is not None:
        config = replace(config, num_layers=arguments.layers)
    makers: dict[str, StepsMaker] = {name: VARIANTS[name] for name in arguments.variants.split(",")}
    if arguments.table is not None:
        table = table_from_rows(json.loads(arguments.table.read_text(encoding="utf-8"))["products"])
        tuned: Any = VARIANTS["triton"]
        makers["triton-tuned"] = lambda heads, turns: tuned(heads, turns, products=table)
    results = _measure(arguments, config, batches, makers, device, dtype, graphs)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


@torch.inference_mode()
def _measure(
    arguments: argparse.Namespace,
    config: ModelConfig,
    batches: list[int],
    makers: dict[str, StepsMaker],
    device: torch.device,
    dtype: torch.dtype,
    graphs: bool,
) -> dict[str, Any]:
    weights = allocate(config, Parallel(), dtype=dtype, device=device)
    fill_random(weights)
    longest = contexts_around(arguments.context, max(batches))
    num_blocks = sum(-(-length // arguments.block_size) for length in longest)
    shape = CacheShape.of(
        config, num_blocks=num_blocks, block_size=arguments.block_size, num_slots=64, window=WINDOW
    )
    cache = KVCache(shape, dtype, device)
    for layer in range(config.num_layers):
        cache.k[layer].normal_()
        cache.v[layer].normal_()
    rows: list[dict[str, Any]] = []
    for batch in batches:
        contexts = contexts_around(arguments.context, batch)
        for name, make_steps in makers.items():
            rows += time_variant(
                name,
                make_steps,
                config,
                weights,
                cache,
                contexts,
                graphs=graphs,
                profiled=arguments.profile,
            )
        sampling = time_sampling(batch, config.vocab_size, device, graphs)
        rows.append({"sampling": sampling, "batch": batch})
        print(
            f"sampling of {batch}: "
            + ", ".join(f"{name} {taken:.3f} ms" for name, taken in sampling.items())
        )
    card = torch.cuda.get_device_name() if graphs else "cpu"
    about = {
        "card": card,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "model": config.name,
    }
    return about | {"context": arguments.context, "block_size": arguments.block_size, "rows": rows}


if __name__ == "__main__":
    main()

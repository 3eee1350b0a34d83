"""Choose how skinny GEMMs run on this GPU: `python -m benchmarks.tune --out FILE.json`.

Every candidate is timed as a CUDA graph over the weights of several layers, so that the cache does
not serve one weight twice, together with the kernel that reads its output and sums the splits. The
file goes to `engine/tuned/<gpu>.json`.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn.functional import linear

from zlab.engine.model import triton_layers
from zlab.engine.model.spec import ModelConfig, find_row
from zlab.engine.model.triton_layers import ProductConfig, ProductShape, skinny_gemm

SHARED_BYTES = 227 * 1024
# Columns, depth, warps, stages of one program's tile.
TILES = (
    (32, 128, 4, 5),
    (64, 64, 4, 5),
    (64, 128, 4, 4),
    (64, 128, 4, 5),
    (128, 64, 4, 5),
    (128, 64, 8, 4),
    (128, 128, 8, 3),
    (128, 64, 4, 7),
    (256, 64, 8, 4),
)
ROWS = (64, 128, 256)
SPLITS = (1, 2, 3, 4, 6, 8)
PROGRAMS = (90, 1400)  # fewer leave SMs idle, more pay for waves and partial sums
REPEATS = 7
ERROR_LIMIT = 1e-2


@dataclass(frozen=True)
class Product:
    """A weight of the model and the number of copies that are used in turn."""

    name: str
    columns: int
    depth: int
    gated: bool
    num_copies: int


def products_of(config: ModelConfig, num_copies: int) -> list[Product]:
    """Return the five products of a decoder."""
    hidden = config.hidden_size
    return [
        Product("qkv", config.qkv_width, hidden, False, num_copies),
        Product("output", hidden, config.query_width, False, num_copies),
        Product("gate-up", config.intermediate_size, hidden, True, num_copies),
        Product("down", hidden, config.intermediate_size, False, num_copies),
        Product("head", config.vocab_size, hidden, False, 2),
    ]


def candidates(product: Product, rows: int) -> Iterator[ProductConfig]:
    """Yield launch settings with whole tiles, within shared memory, and with enough programs."""
    for (columns, depth, warps, stages), tile_rows, splits in itertools.product(
        TILES, (64, 128), SPLITS
    ):
        if splits > 1 and (product.gated or product.name == "head"):
            continue
        if tile_rows > 64 and (tile_rows > rows or columns == 256):
            continue
        weights = columns * (2 if product.gated else 1)
        if product.gated and columns > 128:
            continue
        config = ProductConfig(tile_rows, columns, depth, splits, warps, stages)
        shared = stages * (tile_rows + weights) * depth * 2
        programs = -(-rows // tile_rows) * (product.columns // columns) * splits
        most = PROGRAMS[1] if product.name != "head" else 10**6
        if (
            config.fits(product.columns, product.depth)
            and shared <= SHARED_BYTES
            and PROGRAMS[0] <= programs <= most
        ):
            yield config


def graph_microseconds(run: Callable[[], None], num_calls: int) -> float:
    """Return the median microseconds of one of the `num_calls` of `run`, replayed from a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / num_calls)
    return float(statistics.median(times))


def time_product(product: Product, weights: list[torch.Tensor], rows: int) -> dict[str, Any]:
    """Time cuBLAS and every candidate; returns the fastest correct one, or None for cuBLAS."""
    device, dtype = weights[0].device, weights[0].dtype
    inputs = torch.empty(rows, product.depth, dtype=dtype, device=device).normal_()
    residual = torch.zeros(rows, product.columns, dtype=dtype, device=device)
    gain = torch.ones(product.columns, dtype=dtype, device=device)

    def read(output: torch.Tensor) -> None:
        if not product.gated and product.name != "head":
            triton_layers.add_norm(output, residual, gain, 1e-6)

    def cublas() -> None:
        for weight in weights:
            output = linear(inputs, weight)
            read(triton_layers.gated(output, dtype) if product.gated else output)

    tried: list[tuple[float, ProductConfig | None]] = [
        (graph_microseconds(cublas, len(weights)), None)
    ]
    for config in candidates(product, rows):

        def triton_way(config: ProductConfig = config) -> None:
            for weight in weights:
                read(skinny_gemm(inputs, weight, config, gated=product.gated))

        try:
            tried.append((graph_microseconds(triton_way, len(weights)), config))
        except (triton.runtime.errors.OutOfResources, RuntimeError) as error:
            print(f"  {product.name} {config}: {str(error)[:100]}")
    tried.sort(key=lambda item: item[0])
    best, chosen = next(
        (micros, config)
        for micros, config in tried
        if _is_right(inputs, weights[0], config, product)
    )
    weight_bytes = weights[0].numel() * weights[0].element_size()
    shape = ProductShape(product.columns, product.depth, product.gated, rows)
    return asdict(shape) | {
        "name": product.name,
        "config": None if chosen is None else asdict(chosen),
        "microseconds": best,
        "cublas_microseconds": next(micros for micros, config in tried if config is None),
        "floor_microseconds": weight_bytes / 4.45e12 * 1e6,
        "runners_up": [
            [round(micros, 2), None if config is None else asdict(config)]
            for micros, config in tried[1:4]
        ],
        "num_tried": len(tried),
    }


def _is_right(
    inputs: torch.Tensor, weight: torch.Tensor, config: ProductConfig | None, product: Product
) -> bool:
    if config is None:
        return True
    found = skinny_gemm(inputs, weight, config, gated=product.gated).float()
    found = found.sum(dim=0) if config.splits > 1 else found
    whole = inputs.float() @ weight.float().T
    gate, up = whole.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up if product.gated else whole
    error = float((found - expected).norm() / expected.norm())
    if not error < ERROR_LIMIT:
        print(f"  WRONG by {error:.2e}: {product.name} {config}")
    return error < ERROR_LIMIT


def main() -> None:
    """Tune every product of a model and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--out", type=Path, help="the table; needed without --dry-run")
    parser.add_argument("--dry-run", action="store_true", help="list the candidates; needs no GPU")
    arguments = parser.parse_args()
    if arguments.out is None and not arguments.dry_run:
        parser.error("--out FILE.json is missing")
    rows_list = [int(item) for item in arguments.rows.split(",")]
    found = []
    for product in products_of(find_row(arguments.model), num_copies=6):
        if arguments.dry_run:
            for rows in rows_list:
                print(
                    f"{product.name:8s} rows {rows:4d}: "
                    f"{sum(1 for _ in candidates(product, rows))} candidates"
                )
            continue
        num_weight_rows = product.columns * (2 if product.gated else 1)
        weights = [
            torch.empty(
                num_weight_rows, product.depth, dtype=torch.bfloat16, device="cuda"
            ).normal_(0.0, 0.02)
            for _ in range(product.num_copies)
        ]
        for rows in rows_list:
            began = time.perf_counter()
            row = time_product(product, weights, rows)
            found.append(row)
            print(
                f"{product.name:8s} rows {rows:4d}: {row['microseconds']:7.1f} us, cuBLAS "
                f"{row['cublas_microseconds']:7.1f}, floor {row['floor_microseconds']:6.1f}, "
                f"{row['config']} "
                f"({row['num_tried']} tried in {time.perf_counter() - began:.0f} s)",
                flush=True,
            )
        del weights
    if not arguments.dry_run:
        card = torch.cuda.get_device_name()
        versions = {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        }
        content = {"card": card, **versions, "date": time.strftime("%Y-%m-%d"), "products": found}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""What the kernel benchmarks share: the shapes, the ceilings of the card, and how a row is timed, kept and shown."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from engine.kernels.triton_common import Launch

COPY_BYTES_PER_S = 4.29e12
READ_BYTES_PER_S = 4.45e12
BF16_FLOP_PER_S = 790e12


@dataclass(frozen=True)
class Shapes:
    """A model's cache and the sizes that are run."""

    num_layers: int = 36
    num_query_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    window: int = 16
    dtype: torch.dtype = torch.bfloat16
    context: int = 2048
    decode_batches: tuple[int, ...] = (64, 128, 256)
    block_sizes: tuple[int, ...] = (256, 64, 32, 16)
    chunks: tuple[tuple[int, int, int], ...] = ((1, 2048, 0), (1, 2048, 6144), (8, 512, 512), (1, 8192, 0))
    store_tokens: tuple[int, ...] = (64, 256, 2048, 8192)
    compress_batches: tuple[int, ...] = (1, 4, 16, 56)
    compress_block: int = 256
    compress_blocks: int = 9


TINY = Shapes(
    num_layers=1, num_query_heads=4, num_kv_heads=2, head_dim=16, window=4, dtype=torch.float32, context=40,
    decode_batches=(2,), block_sizes=(32, 16), chunks=((2, 9, 20),), store_tokens=(3,), compress_batches=(1, 2),
    compress_block=16, compress_blocks=3,
)  # fmt: skip


@dataclass
class Bench:
    """Where rows go, and how a call is timed on this device."""

    shapes: Shapes
    device: torch.device
    sweep: bool
    rows: list[dict[str, Any]]

    def time_ms(self, call: Callable[[], None]) -> float:
        """Median milliseconds."""
        if self.device.type == "cuda":
            return float(triton.testing.do_bench(call, warmup=20, rep=80, return_mode="median"))
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3

    def row(
        self, section: str, case: str, config: str, call: Callable[[], None], floor_s: float, **more: Any
    ) -> dict[str, Any]:
        """Time one call and keep the row; a configuration that does not fit the card is a row with its error."""
        row: dict[str, Any] = {"section": section, "case": case, "config": config, "floor_ms": floor_s * 1e3, **more}
        try:
            row["ms"] = self.time_ms(call)
            row["over_floor"] = row["ms"] / row["floor_ms"]
        except (triton.runtime.errors.OutOfResources, RuntimeError) as error:
            row["failed"] = str(error)[:200]
        self.rows.append(row)
        print(line_of(row), flush=True)
        return row

    def randn(self, *shape: int) -> torch.Tensor:
        """Random values in the cache's dtype, made on the device without a float32 copy of the whole."""
        return torch.empty(shape, dtype=self.shapes.dtype, device=self.device).normal_()


def line_of(row: dict[str, Any]) -> str:
    """One row of the table that is printed."""
    timing = f"{row['ms']:9.4f} ms {row['over_floor']:6.2f}x" if "ms" in row else f"FAILED {row['failed'][:60]}"
    extra = " ".join(f"{key} {row[key]:.3g}" for key in ("error", "ms_per_sequence", "tflops") if key in row)
    return f"{row['section']:>15} {row['case']:<26} {row['config']:<34} {row['floor_ms']:8.4f} floor {timing} {extra}"


def launch_name(launch: Launch) -> str:
    """Short enough for a column."""
    return f"tile {launch.tile} w{launch.num_warps} s{launch.num_stages} r{launch.max_registers or '-'}"


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """||found - wanted|| / ||wanted||; NaN where an output was left unwritten."""
    difference = (found.double() - wanted.double()).norm() / wanted.double().norm()
    return float(difference)

"""Check and time every kernel on one GPU, for the shapes of Qwen3-8B, beside its floor.

    python -m benchmarks.kernels --out results.json [--only decode compress] [--no-sweep]
    python -m benchmarks.kernels --dry-run        # tiny shapes in Triton's interpreter: shows that the script works

Every timed kernel is first compared with its plain-torch twin. Times are medians of `triton.testing.do_bench` (device
events, L2 cleared between runs). A floor is the bytes that must move over the measured bandwidth of the card (copy
4.29 TB/s, read 4.45 TB/s), or its operations over 790 TFLOP/s where that is more.
"""

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import triton

from benchmarks.kernel_attention import decode, prefill, store
from benchmarks.kernel_compression import compression, full_redundancy
from benchmarks.kernel_timing import COPY_BYTES_PER_S, READ_BYTES_PER_S, TINY, Bench, Shapes, line_of


def ceilings(bench: Bench) -> None:
    """The card's own copy and read bandwidth today, on 4 GB of random data."""
    values = bench.randn(2**31 if bench.device.type == "cuda" else 2**12)
    copy = torch.empty_like(values)
    bytes_moved = values.numel() * values.element_size()
    bench.row("ceilings", "copy", "torch", lambda: _drop(copy.copy_(values)), 2 * bytes_moved / COPY_BYTES_PER_S)
    bench.row("ceilings", "read", "torch.amax", lambda: _drop(values.amax()), bytes_moved / READ_BYTES_PER_S)


def _drop(_result: object) -> None:
    """A call is timed for what it does."""


SECTIONS: Mapping[str, Callable[[Bench], None]] = {
    "ceilings": ceilings,
    "decode": decode,
    "prefill": prefill,
    "store": store,
    "compress": compression,
    "full-redundancy": full_redundancy,
}


def summary(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """The fastest configuration of every case, in the order they were run."""
    best: dict[tuple[object, object], dict[str, object]] = {}
    for row in rows:
        key = (row["section"], row["case"])
        if "ms" in row and (key not in best or float(str(row["ms"])) < float(str(best[key]["ms"]))):
            best[key] = row
    return list(best.values())


def main() -> None:
    """Run the chosen sections, write every row as JSON, print the best of each case last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write all rows as JSON")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS))
    parser.add_argument("--no-sweep", action="store_true", help="default configurations only")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, in Triton's interpreter")
    options = parser.parse_args()
    if options.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton chose at its import to compile; only a new process can choose otherwise.
        arguments = [sys.executable, "-m", "benchmarks.kernels", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, "TRITON_INTERPRET": "1"})
    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --dry-run shows that the script works")
    torch.manual_seed(0)
    device = torch.device("cpu" if options.dry_run else "cuda")
    shapes = TINY if options.dry_run else Shapes()
    bench = Bench(shapes, device, sweep=not options.no_sweep and not options.dry_run, rows=[])
    for name in options.only:
        SECTIONS[name](bench)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if options.out is not None:
        about = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "card": torch.cuda.get_device_name() if device.type == "cuda" else "CPU, interpreter",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "command": " ".join(sys.argv[1:]),
        }
        options.out.write_text(json.dumps({"about": about, "rows": bench.rows}, indent=1) + "\n", encoding="utf-8")
    print("\nbest configuration of each case")
    for row in summary(bench.rows):
        print(line_of(row))


if __name__ == "__main__":
    main()

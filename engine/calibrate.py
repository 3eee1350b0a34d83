"""Measures on the device at hand what a simulator's cost model needs: seconds of steps, compressions and copies.

Nothing is fitted here. The result is a JSON object of the format `zlab-measurements/1` (docs/COST.md), which
`sim.fitting` turns into a profile.
"""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from engine.build import EngineSettings, find_device, find_dtype
from engine.calibrate_copies import compression_cell, swap_cells
from engine.calibrate_grid import FULL, QUICK, Chunks, Grid
from engine.calibrate_stage import Deadline, Stage, free_memory
from engine.calibrate_steps import Cell, CellError, beside_cell, decode_cell, mixed_cells, prefill_cell, rested_cell
from engine.errors import EngineError
from engine.loading import DUMMY, LoadedModel, default_dtype, load_model
from engine.sampling_params import SamplingParams
from policies.spec import load_policy

FORMAT = "zlab-measurements/1"
LEAST_BLOCK = 16  # tokens: a sixteenth of a block is a token
STEP_BLOCKS = 64  # blocks that the largest step computes
CPU_BLOCKS = 1024
SMALLEST = f"{DUMMY}tiny"
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True, seed=1)
PACKAGES = ("zipage-lab", "torch", "triton", "numpy")
Note = Callable[[str], None]


@dataclass(frozen=True)
class CalibrationSettings:
    """What is measured, where, and how long it may take.

    Attributes:
        model, device, dtype, variant: as of `engine.build.EngineSettings`.
        block_size: tokens; at least 16.
        max_running: largest batch.
        num_blocks: of the pool; by default what fits on the device, and a few on a CPU.
        quick: fewer sizes and repeats.
        limit_s: cells that have not begun by then are left out.
    """

    model: str
    device: str = EngineSettings.device
    dtype: torch.dtype | str | None = None
    variant: str | None = None
    block_size: int = 256
    max_running: int = 256
    num_blocks: int | None = None
    quick: bool = False
    limit_s: float = 270.0

    def __post_init__(self) -> None:
        """Raise EngineError for sizes that cannot be measured."""
        if self.block_size < LEAST_BLOCK or self.block_size % LEAST_BLOCK:
            raise EngineError(f"block_size must be a multiple of {LEAST_BLOCK} to be calibrated, got {self.block_size}")
        if self.max_running < 1:
            raise EngineError(f"max_running must be at least 1, got {self.max_running}")


def measure(settings: CalibrationSettings, loaded: LoadedModel | None = None, note: Note | None = None) -> Cell:
    """Run every cell of the grid and return the measurements; `note` is told what is being done.

    Raises EngineError, ModelError or PolicyError where nothing can be measured at all. A single cell that does not fit
    is left out and named under `skipped`.
    """
    find_device(settings.device)
    dtype = find_dtype(settings.dtype)
    loaded = loaded or load_model(settings.model, device=settings.device, dtype=dtype, variant=settings.variant)
    run = _Calibration(settings, loaded, QUICK if settings.quick else FULL, note or (lambda text: None))
    for part in (run.steps, run.compressions, run.host):
        part()
    return run.document()


class _Calibration:
    """One calibration: the cells found so far, and what was left out."""

    def __init__(self, settings: CalibrationSettings, loaded: LoadedModel, grid: Grid, note: Note) -> None:
        self._settings = settings
        self._loaded = loaded
        self._grid = grid
        self._note = note
        self._deadline = Deadline(settings.limit_s)
        self._cells: dict[str, list[Cell]] = {
            part: [] for part in ("steps", "compressions", "beside", "swaps", "sampling", "host")
        }
        self._skipped: list[dict[str, str]] = []
        self._stopped = ""  # why the engine of this stage can do nothing more
        self._window = load_policy("hybrid").compression.window
        self._graph_tokens = 0

    def steps(self) -> None:
        """Steps and swaps of an engine that compresses nothing."""
        grid = self._grid
        with self._stage("full-kv") as stage:
            self._graph_tokens = stage.engine.runner.graph_tokens
            for blocks in grid.contexts:
                for batch in self._batches(grid.batches):
                    self._add("steps", f"decode {batch} x {blocks}", decode_cell, stage, batch, blocks, *self._times)
            for blocks in grid.swapped:
                self._add("swaps", f"swap {blocks} blocks", swap_cells, stage, blocks, grid.repeats)
            for batch in self._batches(grid.mixed_batches, max(chunks.number for chunks in grid.mixed)):
                self._add("steps", f"prefill beside {batch} decodes", self._mixed, stage, batch)
            for chunks in grid.prefills:
                self._add("steps", _words("prefill", chunks), prefill_cell, stage, chunks, grid.repeats)
            for chunks in grid.rested:
                self._add("steps", _words("rested", chunks), rested_cell, stage, chunks, grid.repeats)
            for batch in self._batches(grid.sampled):
                self._add("sampling", f"draw {batch}", self._drawn, stage, batch)

    def compressions(self) -> None:
        """Compressions beside decodes, and alone."""
        grid = self._grid
        tokens = grid.budget_blocks * self._settings.block_size
        with self._stage(f"hybrid:budget.tokens={tokens}") as stage:
            for batch in self._batches(grid.beside, max(grid.beside_batches)):
                for count in grid.beside_batches:
                    cell = (stage, batch, count, 2, grid.budget_blocks, grid.repeats)
                    self._add("beside", f"{count} compressions beside {batch}", beside_cell, *cell)
            stage.engine.cache.k.normal_()
            stage.engine.cache.v.normal_()
            for blocks in grid.sources:
                for count in grid.compressed:
                    for kept in sorted({blocks - 1, max(blocks // 2, 1)}):
                        sizes = (stage, count, blocks, kept, grid.repeats)
                        self._add("compressions", f"compress {count} x {blocks}", compression_cell, *sizes)

    def host(self) -> None:
        """Steps of the smallest model there is: nearly nothing but the host's part."""
        if find_device(self._settings.device).type == "cpu":
            return self._skip("host", "without a GPU the host is the device")
        try:
            smallest = load_model(SMALLEST, device=self._settings.device)
            with self._stage("full-kv", smallest, num_blocks=4 * self._settings.max_running) as stage:
                for batch in self._batches(self._grid.hosted):
                    self._add("host", f"host {batch}", decode_cell, stage, batch, 1, *self._times)
        except RuntimeError as error:  # no fit needs it
            self._skip("host", f"{SMALLEST} does not run here: {error}")
        return None

    def document(self) -> Cell:
        """Everything, as plain JSON."""
        settings, config = self._settings, self._loaded.config
        device = find_device(settings.device)
        dtype = find_dtype(settings.dtype) or default_dtype(device)
        return {
            "format": FORMAT,
            "card": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}",
            "model": config.name,
            "shape": {
                "num_layers": config.num_layers,
                "hidden": config.hidden_size,
                "intermediate": config.intermediate_size,
                "num_query_heads": config.num_query_heads,
                "num_kv_heads": config.num_kv_heads,
                "head_dim": config.head_dim,
                "vocab": config.vocab_size,
            },
            "dtype": str(dtype).removeprefix("torch."),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "versions": {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
            "block_size": settings.block_size,
            "window": self._window,
            "graph_tokens": self._graph_tokens,
            "settings": asdict(replace(settings, dtype=None)),
            "wall_s": self._deadline.seconds,
            **self._cells,
            "skipped": self._skipped,
        }

    # parts

    @property
    def _times(self) -> tuple[int, int]:
        return self._grid.repeats, self._grid.steps

    def _batches(self, wanted: Sequence[int], others: int = 0) -> list[int]:
        """Those of the grid that leave room for so many others, and the largest that does."""
        most = max(self._settings.max_running - others, 1)
        return sorted({min(batch, most) for batch in wanted})

    @contextmanager
    def _stage(self, policy: str, loaded: LoadedModel | None = None, num_blocks: int | None = None) -> Iterator[Stage]:
        given = self._settings
        free_memory()  # of the stage before
        self._note(f"{policy}: engine and graphs")
        self._stopped = ""
        chosen = EngineSettings(
            model=given.model,
            policy=policy,
            num_blocks=num_blocks or given.num_blocks or (CPU_BLOCKS if given.device == "cpu" else None),
            block_size=given.block_size,
            max_batched_tokens=STEP_BLOCKS * given.block_size,
            max_running=given.max_running,
            device=given.device,
            dtype=given.dtype,
        )
        yield Stage(chosen, loaded or self._loaded)

    def _add(self, part: str, what: str, cell: Callable[..., Cell | list[Cell]], stage: Stage, *sizes: Any) -> None:
        """Measure one cell, or say why it is not there."""
        if self._stopped or self._deadline.over:
            return self._skip(what, self._stopped or f"the {self._settings.limit_s:.0f} s were over")
        self._note(what)
        try:
            found = cell(stage, *sizes)
        except CellError as error:
            stage.empty()
            stage.take()
            return self._skip(what, str(error))
        except RuntimeError as error:  # out of memory, say: what was measured so far is not to be lost
            self._stopped = f"the engine stopped at {what}: {error}"
            return self._skip(what, self._stopped)
        self._cells[part] += found if isinstance(found, list) else [found]
        return None

    def _mixed(self, stage: Stage, batch: int) -> list[Cell]:
        """Prefill chunks beside a batch, those that fit."""
        grid, measured = self._grid, []
        cells = mixed_cells(stage, batch, grid.mixed_context, grid.mixed, grid.repeats)
        for chunks, found in zip(grid.mixed, cells, strict=True):
            if isinstance(found, str):
                self._skip(_words(f"mixed beside {batch}", chunks), found)
            else:
                measured.append(found)
        return measured

    def _drawn(self, stage: Stage, batch: int) -> Cell:
        """The same decode steps with tokens drawn, and with the most probable taken."""
        drawn = decode_cell(stage, batch, 2, *self._times, DRAWN)
        plain = decode_cell(stage, batch, 2, *self._times)
        return {
            "rows": batch,
            "how": "temperature 0.8, top_p 0.95",
            "drawn": drawn["seconds"],
            "plain": plain["seconds"],
        }

    def _skip(self, what: str, reason: str) -> None:
        self._skipped.append({"what": what, "reason": reason})


def _words(part: str, chunks: Chunks) -> str:
    return f"{part} {chunks.number} x {chunks.sixteenths}/16 blocks behind {chunks.prefix_blocks}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

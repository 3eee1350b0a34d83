"""One process of a tensor-parallel group: `python -m tests.engine.parallel_worker RANK SIZE ADDRESS
FOLDER...`.

Loads its part of every folder's model, runs a prompt in two chunks and writes `logits-RANK.npy`
beside it.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from tests.engine.kernel_cases import DenseContext
from zlab.engine.model.decoder import Decoder
from zlab.engine.model.layers import HeadShape, LayerSteps, LayerWeights, TorchSteps
from zlab.engine.model.loader import allocate, fill, read_safetensors, safetensors_files
from zlab.engine.model.spec import config_from_hf, read_json
from zlab.engine.model.tensor_parallel import Parallel, join

NUM_TOKENS = 20
CPU = torch.device("cpu")


class SplitSteps(TorchSteps):
    """Gives its deltas in two float32 splits, as tuned products do."""

    def project(self, layer: LayerWeights, attended: torch.Tensor) -> torch.Tensor:
        whole = super().project(layer, attended)
        return torch.stack([whole * 0.25, whole * 0.75])


def run(
    folder: Path, parallel: Parallel, ids: torch.Tensor, *, splits: bool = False
) -> torch.Tensor:
    config = config_from_hf(read_json(folder / "config.json"), name="tiny")
    weights = allocate(config, parallel, dtype=torch.float32, device=CPU)
    fill(config, weights, parallel, read_safetensors(safetensors_files(folder)), source=str(folder))

    def make_steps(heads: HeadShape, table: torch.Tensor) -> LayerSteps:
        return SplitSteps(heads, table) if splits else TorchSteps(heads, table)

    decoder = Decoder(config, weights, parallel=parallel, make_steps=make_steps)
    context = DenseContext(config.num_layers, 1)
    parts = []
    for start, end in ((0, 13), (13, len(ids))):
        context.begin([(0, end - start)])
        parts.append(
            decoder.logits(decoder.forward(ids[start:end], torch.arange(start, end), context))
        )
    return torch.cat(parts)


def prompt(vocab_size: int = 97) -> torch.Tensor:
    return torch.arange(NUM_TOKENS) * 31 % vocab_size  # ids from both halves of the vocabulary


def main() -> None:
    rank, size, address, *folders = sys.argv[1:]
    parallel = join(int(rank), int(size), address=address, device=CPU)
    with torch.inference_mode():
        for place, folder in enumerate(folders):
            logits = run(Path(folder), parallel, prompt(), splits=place == 0)
            np.save(Path(folder) / f"logits-{rank}.npy", logits.numpy())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

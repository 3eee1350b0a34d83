"""Two processes that share a model give the logits of one."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.engine_cases import save_tiny
from tests.engine.parallel_worker import prompt, run
from zlab.engine.errors import ModelError
from zlab.engine.model.spec import find_row
from zlab.engine.model.tensor_parallel import Parallel, part_of

ROOT = Path(__file__).resolve().parents[2]
# The first runs its output projection in splits. Biases of row-split products must be added once;
# one KV head is held
# by both processes; 97 vocabulary rows are 49 and 48.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3-bias": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "qwen2": {},
    "llama": {},
}


def test_two_processes_give_the_logits_of_one(tmp_path: Path) -> None:
    folders = [tmp_path / kind for kind in KINDS]
    for folder, (kind, changes) in zip(folders, KINDS.items(), strict=True):
        save_tiny(kind, folder, **changes)
    address = f"file://{tmp_path / 'meeting'}"
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.parallel_worker"]
    workers = [
        subprocess.Popen(
            [*command, str(rank), "2", address, *map(str, folders)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    for folder in folders:
        with torch.inference_mode():
            alone = run(folder, Parallel(), prompt()).numpy()
        for rank in range(2):
            found = np.load(folder / f"logits-{rank}.npy")
            np.testing.assert_allclose(
                found, alone, rtol=1e-4, atol=1e-4, err_msg=f"{folder.name}, rank {rank}"
            )


def test_what_cannot_be_split_is_refused_with_the_numbers() -> None:
    row = find_row("qwen3-8b")
    assert part_of(row, Parallel(0, 8)).num_kv_heads == 1
    assert part_of(row, Parallel(3, 16)).num_kv_heads == 1  # two processes hold each
    assert part_of(row, Parallel(1, 4)).intermediate_size == 3072
    with pytest.raises(ModelError, match="32 query heads cannot be split among 3"):
        part_of(row, Parallel(0, 3))
    odd = replace(row, num_query_heads=12, num_kv_heads=6)
    with pytest.raises(ModelError, match="6 KV heads can be neither split nor repeated among 4"):
        part_of(odd, Parallel(0, 4))
    with pytest.raises(ModelError, match="12289 feed-forward columns cannot be split among 32"):
        part_of(replace(row, intermediate_size=12_288 + 1, num_kv_heads=32), Parallel(0, 32))
    with pytest.raises(ModelError, match=r"rank must lie in 0\.\.1, got 2"):
        Parallel(2, 2)

"""The training of the bench model, for a few steps on a CPU."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks import train_reasoner
from zlab.engine.evaluation import tasks
from zlab.engine.llm import LLM
from zlab.engine.sampling_params import SamplingParams

TINY = shlex.split(
    "--tasks chain --level 1 --hidden 32 --layers 2 --heads 4 --kv-heads 2 --head-dim 16 "
    "--inner 64 --tokens 1024 --chunk 2 --workers 1 --judged 2 --device cpu --no-compile "
    "--lr 1e-2 --warm-up 2 --seed 5"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "out"
    assert train_reasoner.main(["--out", str(out), "--steps", "60", *TINY]) == 0
    return out


def load_reasoner(folder: Path) -> train_reasoner.Reasoner:
    shape = train_reasoner._shape(train_reasoner._options().parse_args(["--out", "x", *TINY]))
    model = train_reasoner.Reasoner(shape, compiled=False)
    stored = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.by_name().items():
            parameter.copy_(stored.pop(name))
    assert not stored
    return model


def test_a_short_training_lowers_the_loss_and_writes_its_curve(trained: Path) -> None:
    rows = [json.loads(line) for line in (trained / "curve.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 60
    assert rows[-1]["loss"] < 4.0  # a guess over 161 words costs 5.1
    assert rows[-1]["tasks"]["chain"]["token_errors"] < 0.97


def test_the_engine_takes_the_tokens_that_the_training_finds_most_probable(trained: Path) -> None:
    problem = tasks.problems("chain", 1, level=1)[0]
    llm = LLM(str(trained / "model"), "full-kv", num_blocks=64, block_size=16, device="cpu")
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    written = llm.generate([problem.prompt], params)[0].outputs[0].token_ids
    prompt = tasks.encode(problem.prompt)
    batch = train_reasoner.Batch.of([([*prompt, *written], len(prompt))])
    flat = train_reasoner.FlatBatch.of(batch, batch.ids.size, torch.device("cpu"))
    with torch.no_grad():
        _, right = load_reasoner(trained / "model")(flat, torch.float32)
    assert right[len(prompt) - 1 : len(prompt) - 1 + len(written)].all()


def test_judging_counts_whole_traces_and_answers(trained: Path) -> None:
    class Parrot(train_reasoner.Reasoner):
        """Every token is right but for one in the middle of the second problem's trace."""

        def forward(
            self, flat: train_reasoner.FlatBatch, kind: torch.dtype
        ) -> tuple[torch.Tensor, torch.Tensor]:
            right = torch.ones(len(flat.ids), dtype=torch.bool)
            rows, width = flat.size
            right[: rows * width].view(rows, width)[:, 100] &= torch.arange(rows) != 1
            return torch.zeros(()), right

    parrot = Parrot(load_reasoner(trained / "model").shape, compiled=False)
    judged = train_reasoner.judge(parrot, tasks.problems("chain", 4, level=1), 4096, torch.float32)
    assert judged["exact"] == 0.75
    assert judged["answer"] == 1.0
    assert 0 < judged["token_errors"] < 0.01


def test_only_tokens_of_the_trace_are_counted() -> None:
    batch = train_reasoner.Batch.of([([5, 6, 7, 8, 9], 3), ([5, 6, 7, 8], 1)])
    flat = train_reasoner.FlatBatch.of(batch, 256, torch.device("cpu"))
    counted = flat.counted[:128].view(2, 64)
    assert np.flatnonzero(counted[0]).tolist() == [2, 3]  # where tokens 8 and 9 are predicted
    assert np.flatnonzero(counted[1]).tolist() == [0, 1, 2]
    assert flat.targets[:128].view(2, 64)[0, 2:4].tolist() == [8, 9]
    assert not flat.counted[128:].any()


def test_packing_leaves_no_document_out_and_fits() -> None:
    documents = [([1] * length, 1) for length in (10, 60, 70, 70, 200, 200, 200)]
    runs = list(train_reasoner._packed(documents, 512))
    assert [len(run) for run in runs] == [4, 2, 1]
    assert [document for run in runs for document in run] == documents


def test_a_missed_goal_is_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert train_reasoner.main(["--out", str(out), "--steps", "1", "--goal", "0.98", *TINY]) == 1
    assert "below --goal 0.98: {'chain': 0.0}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train_reasoner.main(["--out", str(out), "--steps", "1", *TINY])
    assert "already holds a model" in capsys.readouterr().err

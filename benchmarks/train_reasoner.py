"""Train a small reasoner on the synthetic tasks: `python -m benchmarks.train_reasoner --out DIR`.

The model has Qwen3's shape and loads with `--model DIR/model` (safetensors, config and tokenizer as
transformers writes them). One H200 takes about five minutes for the default of 10.7 M parameters.
The folder also gets `curve.jsonl`, one line a judgement: the share of held-out problems of which
every token of the trace is the most probable one (what greedy decoding needs), and of which the
answer is right given the trace before it.

Recipe: short problems first, then all sizes; 65,536 tokens a step, the prompt not in the loss;
AdamW (0.9, 0.95), decay 0.1 on matrices, warm-up, cosine; gradient norm at most 1; bfloat16
activations over float32 weights on a GPU. The tokens of a batch lie in one flat row of constant
length, so that all but the attention compiles once for every batch shape.

    python -m benchmarks.train_reasoner --out runs/reasoner --goal 0.98
    python -m benchmarks.train_reasoner --out runs/b --theta 1e6 --hidden 448 --seed 1
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F  # noqa: N812 (the name that torch's own documents use)
import transformers
from numpy.typing import NDArray
from safetensors.torch import save_file

from zlab.engine.evaluation import tasks

ROUND_WIDTH = 64  # rows of a batch are padded to a multiple, so that few shapes occur
ROUND_VOCABULARY = 16
SHARD_BYTES = 12 << 20
NORM_EPS = 1e-6
Ids = NDArray[np.uint8]
Lengths = NDArray[np.int64]
Document = tuple[list[int], int]  # token ids of prompt and trace, tokens of the prompt


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    hidden: int = 384
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    inner: int = 1024
    theta: float = 10_000.0
    vocabulary: int = -(-len(tasks.VOCABULARY) // ROUND_VOCABULARY) * ROUND_VOCABULARY
    positions: int = 4096


@dataclass(frozen=True)
class Batch:
    """Rows of like length: ids `[rows, width]` padded with 0, tokens of each prompt and row."""

    ids: Ids
    prompts: Lengths
    lengths: Lengths

    @staticmethod
    def of(documents: Sequence[Document]) -> "Batch":
        width = _rounded(max(len(ids) for ids, _ in documents))
        rows = np.zeros((len(documents), width), np.uint8)
        for row, (ids, _) in enumerate(documents):
            rows[row, : len(ids)] = ids
        prompts = np.array([prompt for _, prompt in documents])
        return Batch(rows, prompts, np.array([len(ids) for ids, _ in documents]))


def _rounded(length: int) -> int:
    return -(-length // ROUND_WIDTH) * ROUND_WIDTH


def _document(problem: tasks.Problem) -> Document:
    prompt = tasks.encode(problem.prompt)
    return prompt + tasks.encode(problem.trace), len(prompt)


def _packed(documents: Sequence[Document], tokens: int) -> Iterator[list[Document]]:
    """Runs of documents (sorted by length) that fit `tokens` when padded to the longest of them."""
    run: list[Document] = []
    for document in documents:
        if run and (len(run) + 1) * _rounded(len(document[0])) > tokens:
            yield run
            run = []
        run.append(document)
    if run:
        yield run


# one worker's share of data


def make_batches(
    seed: str, names: Sequence[str], level: int, short_share: float, tokens: int, chunk: int
) -> list[Batch]:
    """Batches of `chunk` tokens of fresh problems in a random order; runs in a worker process."""
    stream = tasks.training_problems(seed, names, short_share=short_share, level=level)
    documents, total = [], 0
    while total < chunk:
        documents.append(_document(next(stream)))
        total += len(documents[-1][0])
    documents.sort(key=lambda document: len(document[0]))
    runs = list(_packed(documents, tokens))
    batches = [Batch.of(run) for run in (runs[:-1] if len(runs) > 1 else runs)]  # no half-empty one
    random.Random(seed).shuffle(batches)
    return batches


class BatchSource:
    """Batches from worker processes, a few chunks ahead of the training."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        # Before CUDA starts in this process: a forked child could not use it, and needs it not.
        self._pool = ProcessPoolExecutor(given.workers, multiprocessing.get_context("fork"))
        self._waiting: list[Future[list[Batch]]] = []
        self._num_asked = 0
        self.short_share = 1.0
        for _ in range(2 * given.workers):
            self._ask()

    def _ask(self) -> None:
        given = self._given
        seed = f"{given.seed} {self._num_asked}"
        self._num_asked += 1
        chunk = given.chunk * given.tokens
        parts = (seed, given.tasks, given.level, self.short_share, given.tokens, chunk)
        self._waiting.append(self._pool.submit(make_batches, *parts))

    def __iter__(self) -> Iterator[Batch]:
        while True:
            batches = self._waiting.pop(0).result()
            self._ask()
            yield from batches

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


# the model


def _normed(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = values.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + NORM_EPS)
    return (wide * scale * weight).to(values.dtype)


def _rotated(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = values.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Layer(torch.nn.Module):
    """One decoder layer; parameters have transformers' names."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        deep = (2 * shape.layers) ** -0.5  # of matrices that add to the residual
        sizes = {
            "self_attn.q_proj": (queries, shape.hidden, 1.0),
            "self_attn.k_proj": (keys, shape.hidden, 1.0),
            "self_attn.v_proj": (keys, shape.hidden, 1.0),
            "self_attn.o_proj": (shape.hidden, queries, deep),
            "mlp.gate_proj": (shape.inner, shape.hidden, 1.0),
            "mlp.up_proj": (shape.inner, shape.hidden, 1.0),
            "mlp.down_proj": (shape.hidden, shape.inner, deep),
        }
        norms = {
            "input_layernorm": shape.hidden,
            "post_attention_layernorm": shape.hidden,
            "self_attn.q_norm": shape.head_dim,
            "self_attn.k_norm": shape.head_dim,
        }
        self.matrices = {
            name: torch.nn.Parameter(torch.randn(rows, columns) * scale * columns**-0.5)
            for name, (rows, columns, scale) in sizes.items()
        }
        self.norms = {name: torch.nn.Parameter(torch.ones(size)) for name, size in norms.items()}
        for name, parameter in {**self.matrices, **self.norms}.items():
            self.register_parameter(name.replace(".", "_"), parameter)

    def named(self) -> dict[str, torch.nn.Parameter]:
        return {f"{name}.weight": value for name, value in {**self.matrices, **self.norms}.items()}


def project(
    hidden: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weights: Sequence[torch.Tensor],
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries `[N, heads, d]`, rotated keys and values `[N, kv_heads, d]` of N tokens."""
    norm, query, key, value, query_norm, key_norm = weights
    kind = hidden.dtype
    normed = _normed(hidden, norm)
    queries = (normed @ query.to(kind).T).unflatten(1, (-1, head_dim))
    keys = (normed @ key.to(kind).T).unflatten(1, (-1, head_dim))
    values = (normed @ value.to(kind).T).unflatten(1, (-1, head_dim))
    queries = _rotated(_normed(queries, query_norm), cos, sin)
    return queries, _rotated(_normed(keys, key_norm), cos, sin), values


def feed_forward(
    hidden: torch.Tensor, attended: torch.Tensor, weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The layer's output from its attention."""
    output, norm, gate, up, down = weights
    kind = hidden.dtype
    hidden = hidden + attended @ output.to(kind).T
    normed = _normed(hidden, norm)
    inner = F.silu(normed @ gate.to(kind).T) * (normed @ up.to(kind).T)
    return hidden + inner @ down.to(kind).T


def judge_tokens(
    hidden: torch.Tensor,
    norm: torch.Tensor,
    embedding: torch.Tensor,
    targets: torch.Tensor,
    counted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss over counted tokens, and where the most probable token is the target."""
    logits = (_normed(hidden, norm) @ embedding.to(hidden.dtype).T).float()
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses * counted).sum() / counted.sum(), logits.argmax(-1) == targets


class Reasoner(torch.nn.Module):
    """A decoder over flat tokens, with tied embeddings."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: Shape, compiled: bool) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = torch.nn.Parameter(torch.randn(shape.vocabulary, shape.hidden) * 0.02)
        self.norm = torch.nn.Parameter(torch.ones(shape.hidden))
        self.layers = torch.nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        steps = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.arange(shape.positions).float()[:, None] * shape.theta**-steps
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

        def maybe(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False) if compiled else function

        self._project, self._feed = maybe(project), maybe(feed_forward)
        self._judge = maybe(judge_tokens)

    def forward(self, flat: "FlatBatch", kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss, and right tokens `[N]`; the first `rows * width` of N tokens are the batch."""
        shape, (rows, width) = self.shape, flat.size
        hidden = F.embedding(flat.ids, self.embedding).to(kind)
        cos = self.cos[flat.positions][:, None].to(kind)
        sin = self.sin[flat.positions][:, None].to(kind)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            matrices, norms = layer.matrices, layer.norms
            parts = self._project(
                hidden,
                cos,
                sin,
                (
                    norms["input_layernorm"],
                    *(matrices[f"self_attn.{name}_proj"] for name in "qkv"),
                    norms["self_attn.q_norm"],
                    norms["self_attn.k_norm"],
                ),
                shape.head_dim,
            )
            group = shape.heads // shape.kv_heads
            queries, keys, values = (
                part[: rows * width].view(rows, width, -1, shape.head_dim).transpose(1, 2)
                for part in (parts[0], *(part.repeat_interleave(group, 1) for part in parts[1:]))
            )
            attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            attended = attended.transpose(1, 2).reshape(rows * width, -1)
            attended = F.pad(attended, (0, 0, 0, len(flat.ids) - rows * width))
            hidden = self._feed(
                hidden,
                attended,
                (
                    matrices["self_attn.o_proj"],
                    norms["post_attention_layernorm"],
                    *(matrices[f"mlp.{name}_proj"] for name in ("gate", "up", "down")),
                ),
            )
        found: tuple[torch.Tensor, torch.Tensor] = self._judge(
            hidden, self.norm, self.embedding, flat.targets, flat.counted
        )
        return found

    def by_name(self) -> dict[str, torch.nn.Parameter]:
        """Parameters by transformers' names."""
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            named |= {f"model.layers.{number}.{name}": one for name, one in layer.named().items()}
        return named

    def save(self, folder: Path) -> None:
        """Write config, weights (bfloat16, in shards) and tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(_config(self.shape), indent=2) + "\n")
        shards: list[dict[str, torch.Tensor]] = [{}]
        for name, parameter in self.by_name().items():
            tensor = parameter.detach().to(torch.bfloat16).cpu().contiguous()
            size = sum(other.nbytes for other in shards[-1].values())
            if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
                shards.append({})
            shards[-1][name] = tensor
        _save_shards(shards, folder)
        save_tokenizer(folder)


def _save_shards(shards: Sequence[dict[str, torch.Tensor]], folder: Path) -> None:
    """One file `model.safetensors`, or several with the index that transformers reads."""
    metadata = {"format": "pt"}
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata=metadata)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata=metadata)
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files into a model folder: one token a word, split at spaces."""
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(tasks.WORD_IDS), tasks.PAD))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    wrapped = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        bos_token=tasks.BOS,
        eos_token=tasks.EOS,
        pad_token=tasks.PAD,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(str(folder))


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": shape.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "bos_token_id": tasks.WORD_IDS[tasks.BOS],
        "eos_token_id": tasks.WORD_IDS[tasks.EOS],
        "pad_token_id": tasks.WORD_IDS[tasks.PAD],
        "dtype": "bfloat16",
    }


# batches on the device


@dataclass(frozen=True)
class FlatBatch:
    """A batch as flat tensors `[N]` of constant length; `size` is (rows, width)."""

    ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    counted: torch.Tensor  # 1.0 where the target is a token of a trace
    size: tuple[int, int]

    @staticmethod
    def of(batch: Batch, tokens: int, device: torch.device) -> "FlatBatch":
        rows, width = batch.ids.shape
        place = np.arange(width)[None]
        counted = (place >= batch.prompts[:, None] - 1) & (place < batch.lengths[:, None] - 1)
        following = np.concatenate((batch.ids[:, 1:], np.zeros((rows, 1), np.uint8)), axis=1)
        positions = np.broadcast_to(place, batch.ids.shape)

        def placed(values: NDArray[Any], kind: type[np.generic]) -> torch.Tensor:
            whole = np.zeros(tokens, kind)
            whole[: rows * width] = values.reshape(-1)
            tensor = torch.from_numpy(whole)
            if device.type == "cuda":
                tensor = tensor.pin_memory()
            return tensor.to(device, non_blocking=True)

        return FlatBatch(
            placed(batch.ids, np.int64),
            placed(positions, np.int64),
            placed(following, np.int64),
            placed(counted, np.float32),
            (rows, width),
        )


@torch.no_grad()
def judge(
    model: Reasoner, problems: Sequence[tasks.Problem], tokens: int, kind: torch.dtype
) -> dict[str, float]:
    """Teacher-forced: shares of problems with the whole trace and with the answer right."""
    answer_id = tasks.WORD_IDS[tasks.ANSWER]
    documents = sorted((_document(problem) for problem in problems), key=lambda one: len(one[0]))
    exact = answers = wrong = total = 0
    for run in _packed(documents, tokens):
        flat = FlatBatch.of(Batch.of(run), tokens, model.embedding.device)
        _, right = model(flat, kind)
        rows = right[: flat.size[0] * flat.size[1]].view(flat.size).cpu().numpy()
        for row, (ids, prompt) in zip(rows, run, strict=True):
            trace = row[prompt - 1 : len(ids) - 1]
            last = len(ids) - 1 - ids[::-1].index(answer_id)
            exact += bool(trace.all())
            answers += bool(row[last : len(ids) - 1].all())
            wrong += int((~trace).sum())
            total += len(trace)
    count = len(problems)
    return {"exact": exact / count, "answer": answers / count, "token_errors": wrong / total}


# training


class Clock:
    """How much of the training is over: by steps where they are given, else by time."""

    def __init__(self, minutes: float, steps: int | None) -> None:
        self._minutes, self._steps = minutes, steps
        self._began: float | None = None

    def start(self) -> None:
        """Compilation is over."""
        self._began = time.perf_counter()

    @property
    def minutes(self) -> float:
        return 0.0 if self._began is None else (time.perf_counter() - self._began) / 60

    def share(self, step: int) -> float:
        if self._steps is not None:
            return min(1.0, step / self._steps)
        return min(1.0, self.minutes / self._minutes)


def short_share(share: float, until: float) -> float:
    """Short problems alone at first, then fewer and fewer, a tenth from `until` of the time on."""
    return 1.0 if share < 0.05 else max(0.1, 1.0 - (share - 0.05) / until)


def learning_rate(peak: float, step: int, warm_up: int, share: float) -> float:
    """Linear warm-up, then a cosine down to a fiftieth."""
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return peak * min(1.0, (step + 1) / warm_up) * (0.02 + 0.98 * cosine)


def train(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Train as the options say; returns the last judgement of each task."""
    began = time.perf_counter()
    source = BatchSource(given)
    device = torch.device(given.device)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(given.seed)
    model = Reasoner(_shape(given), compiled=given.compile).to(device)
    matrices = [one for layer in model.layers for one in layer.parameters() if one.dim() == 2]
    rest = [one for one in model.parameters() if not any(one is other for other in matrices)]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=given.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    held_out = {
        name: tasks.problems(name, given.judged, level=given.level, seed=given.judged_seed)
        for name in given.tasks
    }
    print(f"{sum(one.numel() for one in model.parameters()):,} parameters", flush=True)
    clock = Clock(given.minutes, given.steps)
    step = seen = 0
    recent: list[float] = []
    judged_at = time.perf_counter()

    def report() -> dict[str, dict[str, float]]:
        loss = sum(recent) / max(1, len(recent))
        found = {
            name: judge(model, problems, given.tokens, kind) for name, problems in held_out.items()
        }
        row = {"minutes": clock.minutes, "step": step, "tokens": seen, "loss": loss, "tasks": found}
        with (given.out / "curve.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = " ".join(
            f"{name} {one['exact']:.3f}/{one['answer']:.3f}" for name, one in found.items()
        )
        print(
            f"{clock.minutes:.2f} min, step {step}, {seen / 1e6:.1f} M tokens, "
            f"loss {loss:.4f}: {shown}",
            flush=True,
        )
        recent.clear()
        return found

    for batch in source:
        share = clock.share(step)
        if share >= 1.0:
            break
        source.short_share = short_share(share, given.short_until)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(given.lr, step, given.warm_up, share)
        loss, _ = model(FlatBatch.of(batch, given.tokens, device), kind)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        seen += int(batch.lengths.sum())
        if step % 20 == 0 or step == 1:
            recent.append(loss.item())
        if step == 1:
            clock.start()
            print(f"ready after {time.perf_counter() - began:.0f} s", flush=True)
        if time.perf_counter() - judged_at > given.judge_every:
            report()
            judged_at = time.perf_counter()
    source.close()
    found = report()
    model.save(given.out / "model")
    print(f"all in {time.perf_counter() - began:.0f} s: {given.out / 'model'}", flush=True)
    return found


def _shape(given: argparse.Namespace) -> Shape:
    return Shape(
        hidden=given.hidden,
        layers=given.layers,
        heads=given.heads,
        kv_heads=given.kv_heads,
        head_dim=given.head_dim,
        inner=given.inner,
        theta=given.theta,
    )


def _options() -> argparse.ArgumentParser:
    kind = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_reasoner", formatter_class=kind
    )
    cuda = torch.cuda.is_available()
    shape = Shape()
    add = parser.add_argument
    add("--out", type=Path, required=True, help="new folder")
    add("--tasks", nargs="+", choices=list(tasks.TASKS), default=list(tasks.TASKS))
    add("--level", type=int, default=tasks.HARDEST, help="the hardest level to learn")
    add("--minutes", type=float, default=5.0, help="of training, compilation not counted")
    add("--steps", type=int, help="instead of --minutes")
    add("--seed", type=int, default=0)
    add("--hidden", type=int, default=shape.hidden)
    add("--layers", type=int, default=shape.layers)
    add("--heads", type=int, default=shape.heads)
    add("--kv-heads", type=int, default=shape.kv_heads)
    add("--head-dim", type=int, default=shape.head_dim)
    add("--inner", type=int, default=shape.inner)
    add("--theta", type=float, default=shape.theta, help="base of the rotary embedding")
    add("--tokens", type=int, default=65_536, help="of one step, padding included")
    add("--lr", type=float, default=1.5e-3)
    add("--warm-up", type=int, default=200, help="steps")
    add("--short-until", type=float, default=0.25, help="share of the time until few are short")
    add("--chunk", type=int, default=16, help="batches that a worker makes at once")
    add("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    add("--judge-every", type=float, default=30.0, help="seconds")
    add("--judged", type=int, default=128, help="held-out problems a task")
    add("--judged-seed", type=int, default=77)
    add("--goal", type=float, help="exit with 1 unless each task has this share of right traces")
    add("--device", default="cuda" if cuda else "cpu")
    add("--compile", action=argparse.BooleanOptionalAction, default=cuda)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _options()
    given = parser.parse_args(arguments)
    for name in given.tasks:
        if given.level not in tasks.TASKS[name].levels:
            parser.error(f"task {name} has no level {given.level}")
    if given.heads % given.kv_heads:
        parser.error(f"{given.heads} heads are no multiple of {given.kv_heads} KV heads")
    if (given.out / "model").exists():
        parser.error(f"--out {given.out} already holds a model")
    given.out.mkdir(parents=True, exist_ok=True)
    found = train(given)
    missed = {name: one["exact"] for name, one in found.items() if one["exact"] < (given.goal or 0)}
    if missed:
        print(f"below --goal {given.goal}: {missed}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The teacher-forced laboratory: how much of known traces survives a compression, in seconds.

A trace is fed to the model a block at a time, many problems at once, with the engine's own
compression between the blocks; a token is right where it is the most probable one given the true
tokens before it. The share of traces with every token right is what greedy decoding needs token by
token, so it is a lower bound of pass@1.

    chunk:     the tokens up to the next moment at which the engine would compress
    compress:  `zlab.engine.compression.compress`, as in serving
    oracle:    in place of a scorer; keeps the tokens to which full KV's later queries attend most

The oracle reads the future: no scorer can know as much. Its distance to a scorer says how much a
better choice of tokens can gain, its distance to full KV what the room itself costs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zlab.engine.compression import (
    CompressionSettings,
    check_settings,
    compress,
    scoring_rotation,
    settings_for,
)
from zlab.engine.errors import EngineError
from zlab.engine.evaluation.dataset import DataError, Example
from zlab.engine.evaluation.results import wilson
from zlab.engine.evaluation.runner import Plan
from zlab.engine.kernels.backends import find_backend
from zlab.engine.kernels.workspace import (
    CompressionRequest,
    CompressionShape,
    CompressionWorkspace,
    lay_out,
)
from zlab.engine.kv_cache import CacheShape, KVCache
from zlab.engine.model.loader import LoadedModel
from zlab.engine.tokenizer import Tokenizer
from zlab.policies.spec import load_policy

ORACLE = "oracle"
CHUNK = 512  # tokens of a chunk where nothing is compressed
AT_ONCE = 64  # problems in the cache together
LOGIT_ROWS = 4096  # tokens whose logits are computed at once
MOST_COMPRESSED = 64


@dataclass(frozen=True)
class Trace:
    """One problem in tokens: the prompt, and what is judged."""

    ids: tuple[int, ...]
    num_prompt: int


@dataclass(frozen=True)
class JudgedPolicy:
    """One policy over all traces.

    Attributes:
        policy: as a command line names it.
        scorer: of its compression, or `ORACLE`; empty where nothing is compressed.
        budget: kept tokens; None where nothing is compressed.
        exact: for each trace, whether every token was right.
        num_tokens: judged tokens.
        num_right: of them, right ones.
        wall_s: what it took.
    """

    policy: str
    scorer: str
    budget: int | None
    exact: tuple[bool, ...]
    num_tokens: int
    num_right: int
    wall_s: float

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON, with Wilson's 95 % interval of the share of whole traces."""
        share = sum(self.exact) / len(self.exact)
        return {
            "policy": self.policy,
            "scorer": self.scorer,
            "budget_tokens": self.budget,
            "traces": len(self.exact),
            "exact": share,
            "exact_interval": list(wilson(share, len(self.exact))),
            "token_errors": 1 - self.num_right / self.num_tokens,
            "wall_s": self.wall_s,
        }


def read_trace_tokens(tokenizer: Tokenizer, example: Example) -> Trace:
    """The example's prompt and trace in tokens. Raises DataError where it has no trace."""
    if example.trace is None:
        raise DataError(f"{example.place}: the row has no trace, which --teacher-forced needs")
    if example.messages is not None:
        prompt = tokenizer.chat(example.messages)
    else:
        assert example.prompt is not None
        prompt = tokenizer.encode(example.prompt)
    trace = tokenizer.encode(example.trace, add_special_tokens=False)
    if not trace:
        raise DataError(f"{example.place}: the trace has no tokens: {example.trace!r}")
    return Trace((*prompt, *trace), len(prompt))


class Laboratory:
    """A loaded model, and traces that are fed to it under one policy after the other."""

    def __init__(
        self,
        loaded: LoadedModel,
        traces: Sequence[Trace],
        *,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Nothing is computed yet.

        Args:
            loaded: the model.
            traces: at least one, none longer than the model's positions.
            block_size: of the cache.
            device: where the model is.
            dtype: of the cache.

        Raises:
            DataError: a trace is too long.
        """
        most = loaded.config.max_positions
        longest = max(len(trace.ids) for trace in traces)
        if longest > most:
            raise DataError(f"a trace of {longest} tokens exceeds the model's {most} positions")
        self._bench = _Bench(loaded, block_size, device, dtype)
        self._traces = traces
        self._foreseen: dict[int, list[torch.Tensor]] = {}  # by number of the first trace

    def judge(self, spec: str, *, oracle: bool = False) -> JudgedPolicy:
        """Feed all traces under a policy.

        Args:
            spec: the policy as a command line names it; its budget, scorer, window and sink count.
            oracle: the oracle chooses in place of the policy's scorer.

        Raises:
            EngineError: the budget does not hold what the policy always keeps.
            PolicyError: there is no such policy.
        """
        policy, size = load_policy(spec), self._bench.block_size
        budget = policy.budget.floor(size)
        settings = settings_for(policy.compression, size, 0)
        if budget is not None:
            check_settings(settings, size, budget)
        elif oracle:
            raise EngineError(f"policy {spec!r} compresses nothing, so there is no oracle of it")
        began = time.perf_counter()
        exact: list[bool] = []
        num_tokens = num_right = 0
        for first in range(0, len(self._traces), AT_ONCE):
            part = self._traces[first : first + AT_ONCE]
            future = self._foresee(first, part) if oracle else None
            run = _LaboratoryRun(self._bench, part, budget, settings, future)
            for trace, right in zip(part, run.judge(), strict=True):
                judged = right[trace.num_prompt - 1 : len(trace.ids) - 1]
                exact.append(bool(judged.all()))
                num_tokens += len(judged)
                num_right += int(judged.sum())
        scorer = "" if budget is None else ORACLE if oracle else settings.scorer
        kept = None if budget is None else (budget - 1) * size
        wall_s = time.perf_counter() - began
        return JudgedPolicy(spec, scorer, kept, tuple(exact), num_tokens, num_right, wall_s)

    def _foresee(self, first: int, part: Sequence[Trace]) -> list[torch.Tensor]:
        if first not in self._foreseen:
            self._foreseen[first] = [later_attention(self._bench, trace) for trace in part]
        return self._foreseen[first]


def run_laboratory(
    loaded: LoadedModel,
    examples: Sequence[Example],
    plan: Plan,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> list[JudgedPolicy]:
    """Judge the baseline and every policy at every budget of a plan, and the oracle beside them.

    Args:
        loaded: the model, with a tokenizer.
        examples: problems with traces.
        plan: baseline, policies, budgets and block size; a ratio is one of the mean trace.
        device: where the model is.
        dtype: of the cache.
        progress: is called before every policy with how many are done, how many there are, and its
            name; it may raise KeyboardInterrupt.

    Raises:
        DataError: a row has no trace, or one that is too long.
        EngineError: the model has no tokenizer, or a budget is too small.
        PolicyError: there is no such policy.
    """
    if loaded.tokenizer is None:
        raise EngineError(f"model {loaded.config.name!r} has no tokenizer to read traces with")
    traces = [read_trace_tokens(loaded.tokenizer, example) for example in examples]
    mean = sum(len(one.ids) - one.num_prompt for one in traces) / len(traces)
    columns = plan.others(mean)
    asked = [(plan.baseline, False), *((column.policy, False) for column in columns)]
    chosen = set()
    for column in columns:  # the oracle: once for each budget, window and sink
        options = load_policy(column.policy).compression
        key = (column.budget, options.window, options.sink)
        if column.budget is not None and key not in chosen:
            chosen.add(key)
            asked.append((column.policy, True))
    laboratory = Laboratory(loaded, traces, block_size=plan.block_size, device=device, dtype=dtype)
    found = []
    for number, (spec, oracle) in enumerate(asked):
        progress(number, len(asked), ORACLE if oracle else spec)
        found.append(laboratory.judge(spec, oracle=oracle))
    return found


@dataclass(frozen=True)
class _Bench:
    """What all runs have in common."""

    loaded: LoadedModel
    block_size: int
    device: torch.device
    dtype: torch.dtype


@dataclass
class _PolicyRow:
    """One trace in the cache: where it has come to, and its blocks (all but the last are full)."""

    number: int  # also of its query slot
    trace: Trace
    blocks: tuple[int, ...]  # its own, the first of them in use
    place: int = 0  # tokens that were fed
    cached: int = 0  # tokens that the cache holds
    compressed: bool = False


class _LaboratoryRun:
    """Traces that are in the cache together."""

    def __init__(
        self,
        bench: _Bench,
        traces: Sequence[Trace],
        budget: int | None,
        settings: CompressionSettings,
        future: Sequence[torch.Tensor] | None,
    ) -> None:
        """`future`: of each trace, as `later_attention` gives it, where the oracle chooses."""
        block_size = bench.block_size
        self.bench, self.budget, self.settings, self.future = bench, budget, settings, future
        blocks = [-(-self._first_end(trace) // block_size) + 1 for trace in traces]
        starts = [sum(blocks[:row]) for row in range(len(traces))]
        self._rows = [
            _PolicyRow(number, trace, tuple(range(start, start + count)))
            for number, (trace, start, count) in enumerate(zip(traces, starts, blocks, strict=True))
        ]
        shape = CacheShape.of(
            bench.loaded.model.part,
            num_blocks=sum(blocks),
            block_size=block_size,
            num_slots=len(traces) if budget is not None else 0,
            window=settings.window,
        )
        self.cache = KVCache(shape, bench.dtype, bench.device)
        self.kernels = find_backend(bench.device)
        self._workspace: CompressionWorkspace | None = None
        if budget is not None:
            most = max(blocks)
            self._workspace = CompressionWorkspace(
                CompressionShape(
                    shape.num_layers,
                    shape.num_kv_heads,
                    shape.num_query_heads // shape.num_kv_heads,
                    settings.window,
                    block_size,
                ),
                capacity_blocks=max(2, most * min(len(traces), MOST_COMPRESSED)),
                max_requests=MOST_COMPRESSED,
                device=bench.device,
            )

    def _first_end(self, trace: Trace) -> int:
        """Tokens up to the first compression: of a long prompt all, in whole blocks."""
        if self.budget is None:
            return len(trace.ids)
        size = self.bench.block_size
        blocks = max(self.budget, -(-trace.num_prompt // size))
        return min(blocks * size, len(trace.ids))

    @torch.inference_mode()
    def judge(self) -> list[torch.Tensor]:
        """For each trace, by position, whether the next token was the most probable one."""
        right = [torch.zeros(len(row.trace.ids), dtype=torch.bool) for row in self._rows]
        while chunks := self._next_chunks():
            tokens = torch.tensor(
                [token for row, end in chunks for token in row.trace.ids[row.place : end]],
                device=self.bench.device,
            )
            found = self._feed(chunks, tokens)
            start = 0
            for row, end in chunks:
                count = end - row.place
                following = row.trace.ids[row.place + 1 : end + 1]
                best = found[start : start + len(following)] == torch.tensor(following)
                right[row.number][row.place : row.place + len(following)] = best
                start += count
                row.place, row.cached = end, row.cached + count
            self._compress_full()
        return right

    def _next_chunks(self) -> list[tuple[_PolicyRow, int]]:
        """Rows that are not at their end, each with the end of its next chunk."""
        chunks = []
        for row in self._rows:
            total = len(row.trace.ids)
            if row.place == total:
                continue
            if self.budget is None:
                end = row.place + CHUNK
            elif row.place == 0:
                end = self._first_end(row.trace)
            else:
                end = row.place + self.bench.block_size
            chunks.append((row, min(end, total)))
        return chunks

    def _feed(self, chunks: Sequence[tuple[_PolicyRow, int]], tokens: torch.Tensor) -> torch.Tensor:
        """Run the model over packed chunks; the most probable next token of each, on the host."""
        positions = [place for row, end in chunks for place in range(row.place, end)]
        context = _ChunkContext(self, chunks)
        model = self.bench.loaded.model
        hidden = model.forward(tokens, torch.tensor(positions, device=self.bench.device), context)
        best = [
            model.logits(hidden[first : first + LOGIT_ROWS]).argmax(-1)
            for first in range(0, len(hidden), LOGIT_ROWS)
        ]
        return torch.cat(best).cpu()

    def _compress_full(self) -> None:
        """Compress every row that has as many full blocks as its budget, and goes on."""
        if self.budget is None or self._workspace is None:
            return
        size, keep = self.bench.block_size, self.budget - 1
        full = [
            row for row in self._rows if row.place < len(row.trace.ids) and row.cached > keep * size
        ]
        if not full:
            return
        requests = [
            CompressionRequest(
                block_table=row.blocks[: row.cached // size],
                target_blocks=row.blocks[:keep],
                query_slot=row.number,
                compressed_before=row.compressed,
                seed=row.number,
            )
            for row in full
        ]
        cache, parts = self.cache, (self.settings, self._workspace)
        if self.future is not None:
            self._compress_by_oracle(requests, self.future, self._workspace)
        else:
            tensors = (cache.k, cache.v, cache.history, cache.window_queries)
            rotation = scoring_rotation(self.bench.loaded.model.rotation)
            compress(*tensors, requests, *parts, kernels=self.kernels, rotation=rotation)
        for row in full:
            row.cached, row.compressed = keep * size, True

    def _compress_by_oracle(
        self,
        requests: Sequence[CompressionRequest],
        future: Sequence[torch.Tensor],
        workspace: CompressionWorkspace,
    ) -> None:
        """As `compress`; the score history holds every token's position, and travels with it."""
        cache, size = self.cache, self.bench.block_size
        for launch in workspace.slices(list(requests)):
            batch = lay_out(launch, size, workspace.batch_storage)
            scratch = workspace.scratch(batch.num_requests, batch.max_blocks, batch.max_targets)
            for place, request in enumerate(launch):
                table = torch.tensor(request.block_table, device=self.bench.device)
                positions = cache.history[:, table].flatten(1, 2).transpose(1, 2)  # [L, H_kv, S]
                count = positions.shape[2]
                later = future[request.query_slot][self._rows[request.query_slot].place // size]
                scratch.global_score[:, place, :, :count] = positions
                scratch.score[:, place, :, :count] = later.gather(2, positions.long())
            self.kernels.select(
                batch, scratch, window=self.settings.window, sink=self.settings.sink
            )
            self.kernels.compact(cache.k, cache.v, cache.history, batch, scratch)


class _ChunkContext:
    """An `AttentionContext`: packed chunks, each the last tokens of its row's cached ones."""

    def __init__(self, run: _LaboratoryRun, chunks: Sequence[tuple[_PolicyRow, int]]) -> None:
        size, device, window = run.bench.block_size, run.bench.device, run.settings.window
        self._cache, self._kernels = run.cache, run.kernels
        self._scale = run.cache.shape.head_dim**-0.5
        slots, window_rows, lengths, starts = list[int](), list[int](), list[int](), [0]
        for row, end in chunks:
            count = end - row.place
            lengths.append(row.cached + count)
            starts.append(starts[-1] + count)
            cached = range(row.cached, row.cached + count)
            slots += [row.blocks[place // size] * size + place % size for place in cached]
            window_rows += [-1] * (count - window)
            window_rows += [
                (row.number + 1) * window - left for left in range(min(count, window), 0, -1)
            ]
        width = max(-(-length // size) for length in lengths)
        tables = [[*row.blocks[:width], *[-1] * (width - len(row.blocks))] for row, _ in chunks]

        def placed(values: Any) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self._slots, self._lengths, self._starts = placed(slots), placed(lengths), placed(starts)
        self._tables = placed(tables)
        self._window_rows = placed(window_rows) if run.budget is not None else None
        if run.future is not None:
            stored = self._slots.long()
            positions = [place for row, end in chunks for place in range(row.place, end)]
            places = torch.tensor(positions, dtype=torch.float32, device=device)
            self._cache.history[:, stored // size, stored % size] = places[None, :, None]

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Store, then attend to what the cache holds."""
        k, v = self._cache.k[layer], self._cache.v[layer]
        if self._window_rows is None:
            self._kernels.store(keys, values, self._slots, k, v)
        else:
            window = (self._window_rows, self._cache.window_queries[layer])
            self._kernels.store(keys, values, self._slots, k, v, queries, *window)
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        self._kernels.prefill_attention(
            queries, k, v, self._tables, self._lengths, self._starts, self._scale, output
        )
        return output


@torch.inference_mode()
def later_attention(bench: _Bench, trace: Trace) -> torch.Tensor:
    """The most attention that full KV's queries pay each token from a block of the trace on.

    Returns:
        `[blocks, layers, H_kv, tokens]` float32; entry `b` is the maximum over the queries of block
        `b` and all later ones, and over the query heads of a group.
    """
    context = _FullContext(bench.block_size)
    ids = torch.tensor(trace.ids, device=bench.device)
    bench.loaded.model.forward(ids, torch.arange(len(ids), device=bench.device), context)
    by_block = torch.stack(context.most, dim=1)
    return by_block.flip(0).cummax(0).values.flip(0)


class _FullContext:
    """An `AttentionContext` of one whole sequence; `most` gets the most attention that the queries
    of each block pay each token, a tensor `[blocks, H_kv, tokens]` for each layer.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.most: list[torch.Tensor] = []

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Causal attention over the sequence itself, a block of queries at a time."""
        total, num_kv_heads, head_dim = keys.shape
        places = torch.arange(total, device=keys.device)
        outputs, most = [], []
        for begin in range(0, total, self._block_size):
            block = queries[begin : begin + self._block_size].float()
            grouped = block.view(len(block), num_kv_heads, -1, head_dim)
            logits = torch.einsum("qhgd,thd->hgqt", grouped, keys.float()) * head_dim**-0.5
            hidden = places[None, :] > places[begin : begin + len(block), None]
            weights = torch.softmax(logits.masked_fill(hidden, float("-inf")), dim=-1)
            most.append(weights.amax(dim=(1, 2)))
            attended = torch.einsum("hgqt,thd->qhgd", weights, values.float())
            outputs.append(attended.reshape(block.shape).to(queries.dtype))
        self.most.append(torch.stack(most))
        return torch.cat(outputs)

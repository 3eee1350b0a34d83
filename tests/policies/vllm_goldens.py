"""Read the counts and logs of vLLM's own scheduler classes, and drive ours to compare.

A step is compared as the goldens write it down (`../shared/goldens/vllm.json`, field `digest`).
"""

import csv
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from tests.shared import SHARED
from zlab.policies.core.plan import SchedulerLimits, StepPlan
from zlab.policies.core.policy import Policy
from zlab.policies.core.request import Request
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.spec import load_policy
from zlab.traces.workload import TraceRequest

Row = list[Any]  # step, [[id, tokens, hit] ...], decodes, [preempted ids], free, running, waiting


@dataclass(frozen=True)
class VllmRequest:
    """A request of a golden, as vLLM is given it."""

    id: Any
    prompt: tuple[int, ...]
    output_len: int
    priority: int = 0  # the lowest is first
    arrival_step: int = 1


def spec_of(config: dict[str, Any]) -> str:
    """Return the policy that follows a configuration of vLLM."""
    changes = [f"watermark_share={config['watermark']}"]
    if config["policy"] == "priority":
        changes += ["order=strict-priority", "order.first=lowest", "preemption=least-urgent"]
        changes += ["preemption.first=lowest", "withdrawn=findable"]
    if not config["prefix_caching"]:
        changes += ["prefix=none", "prefix.reuse=unmatchable"]
    if not config["scheduler_reserve_full_isl"]:
        changes += ["reserve=chunk"]
    if config["async_scheduling"]:
        changes += ["asynchronous=true"]
    if config["long_prefill_token_threshold"]:
        changes += [f"max_chunk={config['long_prefill_token_threshold']}"]
    return f"vllm:{','.join(changes)}"


def limits_of(config: dict[str, Any]) -> SchedulerLimits:
    """Return our limits for a configuration of vLLM."""
    return SchedulerLimits(
        num_blocks=config["num_blocks"],
        block_size=config["block_size"],
        max_batched_tokens=config["max_num_batched_tokens"],
        max_running=config["max_num_seqs"],
        max_model_len=config["max_model_len"],
    )


class LoggedScheduler(Scheduler):
    """Keeps every decision of a step as the goldens have it, those without any token included."""

    def __init__(
        self, policy: Policy, limits: SchedulerLimits, requests: Iterable[VllmRequest]
    ) -> None:
        super().__init__(policy, limits)
        self.log: list[Row] = []
        self.ended: list[Request] = []
        self.coming = sorted(requests, key=lambda request: request.arrival_step)

    def take_in(self) -> None:
        """Submit what arrives before the next decision."""
        while self.coming and self.coming[0].arrival_step <= len(self.log) + 1:
            request = self.coming.pop(0)
            asked = TraceRequest(
                id=str(request.id),
                prompt_tokens=len(request.prompt),
                output_tokens=request.output_len,
                priority=request.priority,
                prompt_ids=request.prompt,
            )
            self.submit(asked, self.state.now_ns)

    def _decide(self, plan: StepPlan) -> None:
        self.take_in()  # one plan may be several steps of vLLM, all but the last without tokens
        first_line, num_preempted = self.state.next_line, len(plan.preempted)
        super()._decide(plan)
        prefills = [
            [
                chunk.request.id,
                chunk.count,
                chunk.start if chunk.request.line >= first_line else -1,
            ]
            for chunk in plan.prefills
        ]
        preempted = [request.id for request in plan.preempted[num_preempted:]]
        stats = self.stats()
        self.log.append(
            [
                len(self.log) + 1,
                prefills,
                plan.num_decodes,
                preempted,
                stats.num_free_blocks,
                stats.num_running,
                stats.num_waiting,
            ]
        )


def drive(
    requests: Iterable[VllmRequest],
    config: dict[str, Any],
    spec: str | None = None,
    steps: int | None = None,
) -> LoggedScheduler:
    """Run the requests to their end, or for some steps, under the policy of the configuration."""
    policy = load_policy(spec or spec_of(config))
    scheduler = LoggedScheduler(policy, limits_of(config), requests)
    while steps is None or len(scheduler.log) < steps:
        scheduler.take_in()
        now_ns = len(scheduler.log)
        plan = scheduler.plan(now_ns)
        if plan is not None:
            scheduler.commit(plan, now_ns)
        scheduler.ended += scheduler.take_finished()
        if plan is None and not scheduler.coming:
            break
    return scheduler


def digest_of(log: list[Row]) -> str:
    """Return the digest of a log."""
    found = hashlib.sha256()
    for row in log:
        found.update(json.dumps(row, separators=(",", ":")).encode())
    return found.hexdigest()


def goldens() -> dict[str, Any]:
    """Return the file, or nothing where it is missing."""
    path = SHARED / "goldens" / "vllm.json"
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return found


def tiny_requests_of(run: dict[str, Any]) -> list[VllmRequest]:
    """Return the requests of a tiny case."""
    return [
        VllmRequest(
            row["id"],
            tuple(row["prompt"]),
            row["output_len"],
            row["priority"],
            row["arrival_step"],
        )
        for row in run["requests"]
    ]


def requests_of(run: dict[str, Any]) -> list[VllmRequest]:
    """Return the requests of a large run."""
    name = run["workload"]
    every = run["priority_by_index"]
    found = []
    for row, parts, output_len in _rows(name, run["config"]["max_model_len"]):
        found.append(VllmRequest(row, _prompt(parts), output_len, row % every if every else 0))
    return found


def _prompt(parts: list[tuple[Any, int]]) -> tuple[int, ...]:
    tokens: list[int] = []
    for seed, size in parts:
        tokens += np.random.default_rng(seed).integers(1000, 150_000, size).tolist()
    return tuple(tokens)


def _rows(name: str, max_model_len: int) -> Iterable[tuple[int, list[tuple[Any, int]], int]]:
    """Yield (number in the file, seeds and sizes of the prompt's parts, output tokens)."""
    if name.startswith("W"):
        text = (SHARED / "workloads" / f"{name}.jsonl").read_text("utf-8")
        for number, row in enumerate(map(json.loads, text.splitlines())):
            yield number, [(row["prompt_seed"], row["prompt_len"])], row["output_len"]
    elif name.startswith("mooncake"):
        with (SHARED / "traces" / "mooncake_conversation_trace.jsonl").open() as lines:
            for number, line in enumerate(islice(lines, int(name.removeprefix("mooncake")))):
                row = json.loads(line)
                left, parts = row["input_length"], []
                for block in row["hash_ids"]:
                    parts.append((block, min(left, 512)))
                    left -= parts[-1][1]
                if row["input_length"] + row["output_length"] <= max_model_len:
                    yield number, parts, row["output_length"]
    else:
        with (SHARED / "traces" / "AzureLLMInferenceTrace_conv.csv").open() as lines:
            rows = islice(csv.DictReader(lines), int(name.removeprefix("azure")))
            for number, cells in enumerate(rows):
                size, output = int(cells["ContextTokens"]), int(cells["GeneratedTokens"])
                if size + output <= max_model_len:
                    yield number, [(number, size)], output


def main() -> None:
    """Compare all large runs and print what is equal."""
    for name, run in goldens()["runs"].items():
        scheduler = drive(requests_of(run), run["config"])
        equal = digest_of(scheduler.log) == run["counts"]["digest"]
        print(f"{name:28} {'equal in every step' if equal else 'DIFFERENT'}")


if __name__ == "__main__":
    main()

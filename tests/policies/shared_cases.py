"""The small inputs of ../shared/cases, read as something to drive."""

import json
from dataclasses import replace
from typing import Any

from tests.policies import laws
from tests.policies.drive import Case, Job, Run, drive
from tests.shared import SHARED
from zlab.policies.core.plan import SchedulerLimits
from zlab.policies.core.request import Request
from zlab.policies.spec import load_policy, policy_from_table, policy_to_table
from zlab.traces.workload import TraceRequest

STEP_NS = 1_000_000  # a step takes 1 ms


def read(id: str) -> dict[str, Any]:
    """The case's line."""
    lines = (SHARED / "cases" / "cases.jsonl").read_text("utf-8").splitlines()
    return next(found for found in map(json.loads, lines) if found["id"] == id)


def case(id: str, preset: str | None = None, **changes: Any) -> Case:
    """The case as something to drive."""
    row = read(id)
    names = {"max_batched_tokens", "max_running", "max_model_len"} & set(row)
    policy = load_policy(preset or row["preset"])
    # A block that is never given out comes on top, so that every policy has as many to give.
    num_blocks = row["pool_blocks"] + policy.admission.null_blocks
    limits = SchedulerLimits(num_blocks, row["block_size"], **{name: row[name] for name in names})
    table = policy_to_table(policy)
    if table["budget"]["kind"] != "unlimited":
        table["budget"] = {"kind": "fixed", "blocks": row.get("n_max", 3)}
        table["compression"]["window"] = row.get("window", 2)
    jobs = tuple(job(item) for item in row["requests"])
    return replace(Case(policy_from_table(table), limits, jobs, step_ns=STEP_NS), **changes)


def job(item: dict[str, Any]) -> Job:
    ids = tuple(item["prompt_ids"]) if "prompt_ids" in item else None
    prompt = len(ids) if ids is not None else item["prompt"]
    request = TraceRequest(
        item["id"], prompt, item["output"], max_tokens=item["max_tokens"], prompt_ids=ids
    )
    return Job(request, round(item["arrival"] * 1e9))


def lawful(of: Case) -> Run:
    """Drive it both ways, audited; every law that applies must hold."""
    run = drive(of)
    for law in (
        laws.conservation,
        laws.one_terminal_event,
        laws.refused_at_the_door,
        laws.bounded_preemptions,
    ):
        law(run)
    for law in (
        laws.times_add_up,
        laws.order_kept,
        laws.recomputed_counted,
        laws.nobody_gives_way_for_nothing,
    ):
        law(run)
    if not any(one.abort_ns is not None for one in of.jobs):
        laws.liveness(run)
    laws.same_decisions(run, drive(of, fast=True))
    return run


def named(run: Run) -> dict[str, Request]:
    return {request.id: request for request in run.requests}

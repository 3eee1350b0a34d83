"""Evidence made by hand for tests of gates, records and registry."""

from typing import Any

from zlab.policies.deciding_code import code_digest
from zlab.policies.evidence import Case, Evidence, Target, make_evidence
from zlab.policies.gates import Gates, gates_from_list
from zlab.policies.snapshot import PolicySnapshot, store_policy
from zlab.policies.spec import load_policy

NOT_ASKED: dict[str, Any] = {"required": False, "reason": "made by hand"}
HERE = Target("qwen3-8b", "h200")
GATES = ("tokens_per_s >= 1.5x", "p99_ttft <= 2 s", "laws == ok")
JUDGED = gates_from_list(GATES)


def stored(spec: str = "hybrid") -> PolicySnapshot:
    """A policy written down."""
    return store_policy(load_policy(spec))


def record(
    policy: PolicySnapshot | None = None,
    target: Target = HERE,
    speed: float = 2000.0,
    code: str | None = None,
    made_at: str = "2026-11-29T18:00:00Z",
    quality: dict[str, Any] | None = NOT_ASKED,
    finished: float = 60.0,
    gates: Gates = JUDGED,
) -> Evidence:
    """A record of two cases against a baseline of 1,000 tokens/s, which passes at 1,500."""
    cases = [
        Case(
            "synth:amc23",
            seed,
            f"{seed:064x}",
            {"tokens_per_s": speed + seed, "p99_ttft": 0.5, "laws": "ok", "finished": finished},
            {"tokens_per_s": 1000.0, "p99_ttft": 9.0, "laws": None},
            ("a" * 64, "b" * 64),
        )
        for seed in (0, 1)
    ]
    limits = {"num_blocks": 3035, "block_size": 256}
    setup = {"gpu": target.gpu, "model": target.model, "limits": limits}
    chosen = stored() if policy is None else policy
    return make_evidence(
        chosen,
        code or code_digest(chosen),
        target,
        gates,
        cases,
        setup,
        made_at,
        quality=quality,
    )

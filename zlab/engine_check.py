"""Does the engine decide as the simulator does under this policy, and serve everybody? A small run on a real model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from policies.core.policy import Policy
from policies.measures import OK
from zlab.engine_options import Device, Dtype, engine_room, engine_settings
from zlab.outcome import MisuseError
from zlab.parity import Verdict, closed, decided_by_both
from zlab.source import PREFIX, Source

SMALL = f"{PREFIX}amc23?num_problems=4&samples=2&mu=4.5&sigma=0.4&cap=160"  # 8 requests, about 130 tokens in, 90 out
SMALL_BLOCKS = 32  # about half of what they come to hold
SMALL_BUDGET_TOKENS = 96
BLOCK_SIZE = 16
DEFAULT_MODEL = "dummy:tiny"


@dataclass(frozen=True)
class EngineCheck:
    """What came of it: `ok`, or what was not; and the runs as plain JSON for a record."""

    words: str
    runs: list[Mapping[str, Any]]


@dataclass(frozen=True)
class EngineCheckOptions:
    """Whether the engine is asked, and which one."""

    engine: Annotated[
        bool, typer.Option("--engine", help="Also run it on the engine: it must decide the same and fail nobody.")
    ] = False
    engine_model: Annotated[
        str | None,
        typer.Option(
            "--engine-model", show_default=DEFAULT_MODEL, help="The model of --engine, as of `zlab bench --model`."
        ),
    ] = None
    device: Device = None
    dtype: Dtype = None

    def check(self) -> None:
        """Raise MisuseError where an engine is described that is not asked."""
        given = {"--engine-model": self.engine_model, "--device": self.device, "--dtype": self.dtype}
        for option, value in given.items():
            if value is not None and not self.engine:
                raise MisuseError(f"{option} {value} says where --engine runs, and that is not given")

    def run(self, policy: Policy) -> EngineCheck | None:
        """What came of it; None where nobody asked. Raises MisuseError as `check_engine`."""
        if not self.engine:
            return None
        return check_engine(policy, self.engine_model or DEFAULT_MODEL, self.device, self.dtype)


def check_engine(policy: Policy, model: str, device: str | None, dtype: str | None) -> EngineCheck:
    """Run a small closed workload on the engine and in the simulator: as the policy is, and so that it has to compress.

    Small outputs never reach a budget of thousands of tokens, so a policy with one runs a second time with a budget cut
    to the workload's lengths. Raises MisuseError where there is no such model or no engine.
    """
    workload = closed(Source(SMALL).read(silent=True))
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "device": device, "dtype": dtype}
    settings = [
        {**engine_settings(model, one.name, kv_blocks=num_blocks, **sizes), "policy": one}
        for one, num_blocks in _variants(policy)
    ]
    with engine_room():
        verdicts = decided_by_both(workload, settings)
    words = next((said for said in map(_wrong, verdicts) if said), OK)
    return EngineCheck(words, [_as_dict(verdict, model) for verdict in verdicts])


def _variants(policy: Policy) -> list[tuple[Policy, int]]:
    """The policy with room for its budget, and with a budget that the workload reaches in a pool that is too small."""
    floor = policy.budget.floor(BLOCK_SIZE)
    if floor is None:
        return [(policy, SMALL_BLOCKS)]
    whole = (policy, max(SMALL_BLOCKS, 2 * floor))
    if policy.budget.floor(1) is None or not hasattr(policy.budget, "tokens") or not hasattr(policy.budget, "blocks"):
        return [whole]  # a budget of the user's own: nobody knows how to cut it
    budget: Any = policy.budget
    small = replace(budget, tokens=SMALL_BUDGET_TOKENS, blocks=0)
    if floor <= (small.floor(BLOCK_SIZE) or 0):
        return [whole]
    return [
        whole,
        (replace(policy, name=f"{policy.name} with {SMALL_BUDGET_TOKENS} tokens", budget=small), SMALL_BLOCKS),
    ]


def _wrong(verdict: Verdict) -> str | None:
    if verdict.figures["failed"]:
        return f"{verdict.figures['failed']} requests failed under {verdict.policy}"
    if not verdict.equal:
        at = verdict.difference.step if verdict.difference else "the blocks"
        return f"the engine decides otherwise under {verdict.policy}: first at step {at} (`zlab parity` shows it)"
    return None


def _as_dict(verdict: Verdict, model: str) -> dict[str, Any]:
    return {
        "policy": verdict.policy,
        "model": model,
        "workload": SMALL,
        "equal": verdict.equal,
        "engine_digest": verdict.engine_digest,
        "simulator_digest": verdict.other_digest,
        **verdict.figures,
    }

"""Simulator and engine decide the same across changes of the policy, on closed workloads and from
recordings.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.engine_cases import tiny
from tests.parity.parity_cases import CLOSED, CountingClock, decided_again, settings, workload
from tests.parity.test_redecided import LIVE, TIMED
from tests.zlab.command_line import zlab
from zlab.engine.replay import Replayed, ReplaySettings
from zlab.engine.replay import replay as replay_on_engine
from zlab.policies.core.plan import SchedulerLimits
from zlab.policies.spec import load_policy
from zlab.sim.cost_model import Change
from zlab.sim.recorded_run import redecide
from zlab.sim.replay import replay as simulate
from zlab.sim.specs import SimError
from zlab.traces.recording import Recording, Run, first_difference, read_asked
from zlab.traces.schema import EventKind
from zlab.traces.workload import TraceRequest

FULL, HYBRID, CONSTRAINED = (
    "full-kv:window=4",
    "hybrid:tokens=40,window=4",
    "constrained:tokens=24,window=6",
)
ADAPTIVE = "hybrid-adaptive:tokens=40,most_tokens=80,window=3"
SLOTLESS = f"{HYBRID},slots=none,scorer=recent"
PLANS = {  # policies by turns, and what must have happened for the run to count
    (FULL, HYBRID): ("preemptions", "compressions", "prefix_hit_tokens"),
    (HYBRID, FULL): ("preemptions", "compressions", "prefix_hit_tokens"),
    (FULL, HYBRID, CONSTRAINED, FULL): ("preemptions", "compressions"),
    (CONSTRAINED, ADAPTIVE, HYBRID): ("compressions",),
    (f"{HYBRID},comes_back=swap,slotted=true", f"{ADAPTIVE},comes_back=swap", CONSTRAINED): (
        "swaps",
        "compressions",
    ),
    ("nano-vllm:window=4", "zipage:tokens=40,window=4", FULL): ("preemptions", "compressions"),
    (HYBRID, SLOTLESS, HYBRID, FULL, SLOTLESS, CONSTRAINED): ("preemptions", "compressions"),
    (SLOTLESS, FULL, HYBRID): ("preemptions", "compressions"),
    (
        f"{HYBRID},comes_back=swap,slotted=true",
        f"{SLOTLESS},comes_back=swap",
        CONSTRAINED,
    ): ("swaps", "compressions"),
    (HYBRID, f"{HYBRID},prefix=none", f"{HYBRID},join=blocking", HYBRID): (
        "preemptions",
        "compressions",
    ),
}
FIRST, APART = 25, 20  # steps


def turns(specs: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    return tuple((FIRST + APART * place, spec) for place, spec in enumerate(specs[1:]))


def on_engine(
    specs: tuple[str, ...],
    requests: list[TraceRequest] = CLOSED,
    how: ReplaySettings | None = None,
    out: Path | None = None,
) -> Replayed:
    chosen = settings(specs[0])  # where slotted requests are swapped, a smaller pool
    settled = how or ReplaySettings(at_once=True)
    settled = replace(
        settled, changes=tuple((step, load_policy(spec)) for step, spec in turns(specs))
    )
    return replay_on_engine(
        workload(requests), chosen, settled, loaded=tiny(), out=out, clock=CountingClock()
    )


def in_simulation(specs: tuple[str, ...], of: Replayed) -> Run:
    changes = [Change(step, load_policy(spec)) for step, spec in turns(specs)]
    limits = SchedulerLimits(**of.run.manifest["limits"])
    return simulate(workload(list(of.asked)), specs[0], limits=limits, changes=changes)


@pytest.mark.parametrize("specs", PLANS, ids=" ".join)
def test_the_same_decisions_across_changes(specs: tuple[str, ...]) -> None:
    of = on_engine(specs)
    summary = of.run.summary
    for figure in PLANS[specs]:
        assert summary[figure] > 0, f"nothing to compare: {figure} is 0"
    assert summary["requests_finished"] == len(CLOSED)
    kinds = of.run.events["kind"].to_pylist()
    assert kinds.count(EventKind.POLICY) == len(specs) - 1 == len(of.run.manifest["policy_changes"])
    simulated = in_simulation(specs, of)
    assert first_difference(of.run.events, simulated.events) is None
    assert of.run.blocks.equals(simulated.blocks)
    assert summary["digest"] == simulated.summary["digest"]
    names = ("step", "digest")
    assert [[one[name] for name in names] for one in of.run.manifest["policy_changes"]] == [
        [one[name] for name in names] for one in simulated.manifest["policy_changes"]
    ]
    assert decided_again(of).digest == summary["digest"]


def test_a_live_run_with_changes_from_its_folder_alone(tmp_path: Path) -> None:
    specs = (
        FULL,
        f"{HYBRID},join=when_done",
        f"{HYBRID},comes_back=swap",
        f"{ADAPTIVE},join=when_done",
        FULL,
    )
    of = on_engine(specs, TIMED, LIVE, tmp_path / "run")
    assert of.run.summary["compressions"] > 0
    found = Recording(tmp_path / "run")
    assert [one["name"] for one in found.manifest["policy_changes"]] == list(specs[1:])
    again = redecide(
        found.manifest, found.table("requests"), found.table("events"), read_asked(tmp_path / "run")
    )
    difference = first_difference(found.table("events"), again.tables.table("events"))
    assert difference is None, difference
    assert again.digest == found.manifest["digest"]
    shown = zlab("parity", "--recording", str(tmp_path / "run"), "--json")
    assert shown.exit_code == 0
    assert '"equal": true' in shown.stdout


def test_the_digest_covers_which_policy_took_over_and_when() -> None:
    """Policies that decide the same here, one step apart or under another scorer, have other
    digests.
    """
    of = on_engine((FULL, HYBRID))
    (change,) = of.run.manifest["policy_changes"]
    limits = SchedulerLimits(**of.run.manifest["limits"])
    digests = {
        simulate(
            workload(list(of.asked)),
            FULL,
            limits=limits,
            changes=[Change(step, load_policy(f"{HYBRID}{more}"))],
        ).summary["digest"]
        for step, more in ((FIRST, ""), (FIRST + 1, ""), (FIRST, ",scorer=recent"))
    }
    assert len(digests) == 3
    assert of.run.summary["digest"] in digests
    assert change["step"] == FIRST


def test_a_recording_that_lacks_a_policy() -> None:
    of = on_engine((FULL, HYBRID))
    manifest = {**of.run.manifest, "policy_changes": []}
    with pytest.raises(SimError, match="changed 1 times, the manifest names 0"):
        redecide(manifest, of.run.requests, of.run.events, of.asked)

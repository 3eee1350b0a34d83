"""How much longer outputs get when tokens are evicted: measured profiles and assumptions.

`zlab evaluate` measures the output lengths of a model under a policy and at full KV on the same
problems and writes them as a profile. A simulation lengthens outputs by the profile's multiplier
for its policy: the compression must be the same (scorer, window and all other settings), and the
budget may lie between two measured ones. Without a measurement the lengths stay as the workload has
them, and every command says so.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zlab.policies.core.policy import Policy
from zlab.policies.spec import PolicyError, load_policy, policy_to_table
from zlab.sim.specs import SimError

FORMAT = "zlab-length-profile/1"
NOTHING_COMPRESSED = "nothing is compressed"
NOT_A_CHOICE = ("join",)  # settings of a compression that do not change which tokens are kept


@dataclass(frozen=True)
class Lengths:
    """What a simulation assumes about output lengths under a policy.

    Attributes:
        multiplier: Output length of compressed requests, relative to the workload.
        is_known: Whether the multiplier was measured or given, or nothing is compressed.
        source: Where the multiplier comes from, as text.
        interval: The 95 % interval of the multiplier, where it was measured.
        pass_at_1: Share of problems solved under the policy, where it was measured.
    """

    multiplier: float
    is_known: bool
    source: str
    interval: tuple[float, float] | None = None
    pass_at_1: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {
            "multiplier": self.multiplier,
            "known": self.is_known,
            "source": self.source,
            "interval": None if self.interval is None else list(self.interval),
            "pass_at_1": self.pass_at_1,
        }


@dataclass(frozen=True)
class LengthEntry:
    """One measured policy: its compression, kept tokens, multiplier with interval, and accuracy."""

    compression: Mapping[str, Any]
    budget_tokens: int
    multiplier: float
    low: float
    high: float
    pass_at_1: float


@dataclass(frozen=True)
class LengthProfile:
    """A length profile.

    Attributes:
        name: The file, for messages.
        model: The model whose outputs were measured.
        baseline_pass_at_1: Share of problems that the uncompressed baseline solved.
        entries: The measured policies.
    """

    name: str
    model: str
    baseline_pass_at_1: float
    entries: tuple[LengthEntry, ...]

    def of(self, policy: Policy, block_size: int) -> Lengths:
        """Return the lengths under a policy. They are not known if the profile has no such
        compression, or if the budget lies outside the measured ones.
        """
        floor = policy.budget.floor(block_size)
        where = f"{self.name} (measured with {self.model})"
        if floor is None:
            return Lengths(1.0, True, NOTHING_COMPRESSED, None, self.baseline_pass_at_1)
        budget = (floor - 1) * block_size
        chosen = _choice(policy_to_table(policy)["compression"])
        same = sorted(
            (one for one in self.entries if one.compression == chosen),
            key=lambda one: one.budget_tokens,
        )
        if not same:
            return Lengths(1.0, False, f"not known: {where} has no such compression")
        smallest, largest = same[0].budget_tokens, same[-1].budget_tokens
        if not smallest <= budget <= largest:
            return Lengths(
                1.0,
                False,
                f"not known: {where} has budgets of {smallest} to {largest} tokens, not {budget}",
            )
        below = next(one for one in reversed(same) if one.budget_tokens <= budget)
        above = next(one for one in same if one.budget_tokens >= budget)
        span = above.budget_tokens - below.budget_tokens
        share = (budget - below.budget_tokens) / span if span else 0.0

        def between(name: str) -> float:
            first, second = float(getattr(below, name)), float(getattr(above, name))
            return first + share * (second - first)

        interval = (between("low"), between("high"))
        return Lengths(between("multiplier"), True, where, interval, between("pass_at_1"))


def _choice(compression: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in compression.items() if name not in NOT_A_CHOICE}


def assumed_lengths(policy: Policy, block_size: int, given: float, profile: str | None) -> Lengths:
    """Return what a simulation of the policy assumes.

    Args:
        policy: The simulated policy.
        block_size: Tokens of a block.
        given: The multiplier that the user gave; 1.0 means none.
        profile: Path of a length profile, if there is one.

    Raises:
        SimError: Both are given, or the profile cannot be read.
    """
    if profile is not None and given != 1.0:
        raise SimError(
            f"length-multiplier {given:g} cannot be given together with length-profile {profile}"
        )
    if profile is not None:
        return read_length_profile(Path(profile)).of(policy, block_size)
    if policy.budget.floor(block_size) is None:
        return Lengths(1.0, True, NOTHING_COMPRESSED)
    if given != 1.0:
        return Lengths(given, True, "given")
    return Lengths(1.0, False, "not known: no length profile was given")


def make_length_profiles(results: Mapping[str, Any]) -> dict[float, dict[str, Any]]:
    """Make the length profile of each temperature of an evaluation.

    Args:
        results: The content of `results.json`, which `zlab evaluate` writes for the project's
            engine.

    Returns:
        Temperature -> profile as plain JSON. Temperatures without a compressed policy are left out.
    """
    profiles: dict[float, dict[str, Any]] = {}
    for column in results["columns"]:
        compared = column["of_baseline"]
        if compared is None or column["budget_tokens"] is None:
            continue
        heat = column["temperature"]
        baseline = next(
            one
            for one in results["columns"]
            if one["of_baseline"] is None and one["temperature"] == heat
        )
        profile = profiles.setdefault(
            heat,
            {
                "format": FORMAT,
                "model": results["model"],
                "made_at": results["made_at"],
                "data": results["data"],
                "temperature": heat,
                "baseline": {
                    "policy": baseline["policy"],
                    "pass_at_1": baseline["pass_at_1"],
                    "mean_output_tokens": baseline["mean_output_tokens"],
                },
                "entries": [],
            },
        )
        profile["entries"].append(
            {
                "policy": column["policy"],
                "compression": policy_to_table(load_policy(column["policy"]))["compression"],
                "budget_tokens": column["budget_tokens"],
                "multiplier": compared["length_ratio"],
                "interval": compared["length_ratio_interval"],
                "problems": column["problems"],
                "share_at_cap": column["share_at_cap"],
                "pass_at_1": column["pass_at_1"],
                "pass_at_1_interval": column["pass_at_1_interval"],
            }
        )
    return profiles


def read_length_profile(path: Path) -> LengthProfile:
    """Read a profile from its file. Raise SimError, which names the file and the fault."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SimError(f"length profile {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise SimError(f"length profile {path}: not JSON: {error}") from error
    said = document.get("format") if isinstance(document, dict) else None
    if said != FORMAT:
        raise SimError(f"length profile {path}: its format is {said!r}, not {FORMAT!r}")
    try:
        entries = tuple(_entry(row) for row in document["entries"])
        accuracy = float(document["baseline"]["pass_at_1"])
        profile = LengthProfile(str(path), str(document["model"]), accuracy, entries)
    except (KeyError, TypeError, ValueError, PolicyError) as error:
        raise SimError(f"length profile {path}: cannot be read: {error!r}") from error
    for one in entries:
        if not 0 < one.multiplier < float("inf"):
            raise SimError(
                f"length profile {path}: multiplier must be a finite number above 0, "
                f"got {one.multiplier!r}"
            )
    return profile


def _entry(row: Mapping[str, Any]) -> LengthEntry:
    low, high = _pair(row["interval"])
    return LengthEntry(
        compression=_choice(row["compression"]),
        budget_tokens=int(row["budget_tokens"]),
        multiplier=float(row["multiplier"]),
        low=low,
        high=high,
        pass_at_1=float(row["pass_at_1"]),
    )


def _pair(values: Sequence[Any]) -> tuple[float, float]:
    low, high = values
    return float(low), float(high)

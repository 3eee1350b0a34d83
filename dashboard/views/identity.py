"""What a recording is: who decided, on which machine, for which requests; and what two runs have in
common.

Manifests come from files that anybody may have written: whatever they hold, these functions return
text and raise nothing.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from zlab.sim.specs import gpu_of_card

Manifest = Mapping[str, Any]
UNKNOWN = "unknown"
MOST_CHANGES = 20
DIGITS = 12  # of a digest
SOURCES = {"sim": "simulated", "engine": "measured on the engine"}


@dataclass(frozen=True)
class Changed:
    """Another policy decides from `step` on."""

    step: int
    policy: str


def part_of(manifest: Manifest, *path: str) -> Any:
    """Return an entry of an entry of ... a manifest, None where there is none."""
    found: Any = manifest
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def text_of(value: object, most: int = 60) -> str:
    """Return a value of a manifest as one line of at most `most` characters."""
    if value is None or value == "":
        return UNKNOWN
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**15:
        return f"{value:,}"
    line = " ".join(str(value).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def card_of(manifest: Manifest) -> str:
    """Return the GPU; the engine names the card as its driver does."""
    value = manifest.get("gpu")
    return UNKNOWN if value is None else gpu_of_card(text_of(value))


def workload_of(manifest: Manifest) -> str:
    """Return name, number of requests and the beginning of the hash of the workload."""
    count = part_of(manifest, "workload", "num_requests")
    sha = manifest.get("workload_sha256")
    words = text_of(part_of(manifest, "workload", "name"), 40)
    if isinstance(count, int):
        words += f", {count:,} requests"
    return words + (f" ({text_of(sha, 200)[:8]})" if sha else "")


def cost_of(manifest: Manifest) -> str:
    """Return where the times come from."""
    source = text_of(part_of(manifest, "cost", "source"), 60)
    return "measured" if manifest.get("source") == "engine" else f"simulated, {source}"


def changes_of(manifest: Manifest) -> list[Changed]:
    """Return the changes of the policy in order, the first MOST_CHANGES."""
    entries = manifest.get("policy_changes")
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        return []
    return [
        Changed(entry["step"], text_of(entry.get("name"), 40))
        for entry in entries[:MOST_CHANGES]
        if isinstance(entry, Mapping) and isinstance(entry.get("step"), int)
    ]


def identity(manifest: Manifest) -> dict[str, str]:
    """Return what tells a recording from others, in words, for the head of a page."""
    pool = [text_of(manifest.get(name)) for name in ("num_blocks", "block_size")]
    changes = changes_of(manifest)
    digest = manifest.get("digest")
    found = {
        "Policy": text_of(manifest.get("policy"), 80),
        "GPU": card_of(manifest),
        "Model": text_of(manifest.get("model"), 80),
        "Pool": f"{pool[0]} blocks of {pool[1]} tokens",
        "Workload": workload_of(manifest),
        "Times": cost_of(manifest),
        "Version": text_of(part_of(manifest, "versions", "zipage-lab"), 30),
        "Digest": text_of(digest, 200)[:DIGITS] if digest else "not finished",
    }
    if changes:
        steps = ", ".join(f"{change.policy} from step {change.step:,} on" for change in changes)
        found["Changes of the policy"] = steps
    if manifest.get("pretended"):
        found["Pretended"] = text_of(manifest["pretended"], 200)
    return found


ALIKE: dict[
    str, Callable[[Manifest], object]
] = {  # what must be the same in runs that are compared by policy
    "workload": lambda manifest: manifest.get("workload_sha256"),
    "GPU": card_of,
    "model": lambda manifest: manifest.get("model"),
    "pool": lambda manifest: (manifest.get("num_blocks"), manifest.get("block_size")),
    "source of times": lambda manifest: part_of(manifest, "cost", "source"),
}


def key_of(manifest: Manifest) -> tuple[str, ...]:
    """Return what is equal for runs that can be compared."""
    return tuple(repr(of(manifest)) for of in ALIKE.values())


def unlike(manifests: Mapping[str, Manifest]) -> list[str]:
    """Return in which of ALIKE these runs differ."""
    return [
        words
        for words, of in ALIKE.items()
        if len({repr(of(manifest)) for manifest in manifests.values()}) > 1
    ]


LEFT_OUT = frozenset(
    {
        "summary",
        "rows",
        "alive",
        "policy_toml",
        "kinds",
        "reasons",
        "block_states",
        "format",
        "digest",
        "wall_s",
        "started",
        "complete",
        "num_steps",
        "compression_work_s",
        "swapped_tokens",
        "policy_changes",
    }
)  # results, and what is no setting


def settings_of(manifest: Manifest) -> dict[str, str]:
    """Return all settings of a run by name, those of the policy and of nested tables with a dot."""
    found = dict(_flat({k: v for k, v in manifest.items() if k not in LEFT_OUT}))
    policy = manifest.get("policy_toml")
    if isinstance(policy, str):
        try:
            found |= dict(_flat({"policy": tomllib.loads(policy)}))
        except (ValueError, RecursionError):
            found["policy.toml"] = "cannot be read"
    for index, change in enumerate(changes_of(manifest), 1):
        found[f"policy change {index}"] = f"{change.policy} from step {change.step:,} on"
    return found


def _flat(table: Mapping[str, Any], depth: int = 6) -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, Mapping) and depth:
            for inner, text in _flat(value, depth - 1):
                yield f"{name}.{inner}", text
        else:
            yield str(name), text_of(value, 200)


def settings_table(manifests: Mapping[str, Manifest]) -> tuple[pd.DataFrame, int]:
    """Return a row for each setting in which the runs differ, and how many settings are equal."""
    settings = {label: settings_of(manifest) for label, manifest in manifests.items()}
    names = list(dict.fromkeys(name for found in settings.values() for name in found))
    rows = []
    for name in names:
        values = [found.get(name, "-") for found in settings.values()]
        if len(set(values)) > 1:
            rows.append({"setting": name} | dict(zip(settings, values, strict=True)))
    return pd.DataFrame(rows, columns=["setting", *settings]), len(names) - len(rows)

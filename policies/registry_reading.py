"""The registry's tables as what they mean: policies, records, standings and changes, read in a transaction."""

import json
import sqlite3

from policies.evidence import Evidence, Target, evidence_from_dict
from policies.registry_file import RegistryError
from policies.registry_rows import SERVING, Change, Stage, Standing, change_from_row
from policies.spec import PolicyError
from policies.stored import StoredPolicy, stored_from_dict

CHANGES = "SELECT change.*, policy.name FROM change JOIN policy USING (digest)"


def read_policy(connection: sqlite3.Connection, digest: str) -> StoredPolicy:
    """A policy by its digest. Raises RegistryError where it is unknown or was changed."""
    row = connection.execute("SELECT * FROM policy WHERE digest = ?", (digest,)).fetchone()
    if row is None:
        raise RegistryError(f"the registry knows no policy {digest[:16]}")
    try:
        return stored_from_dict({**dict(row), "sources": json.loads(row["sources"])})
    except (PolicyError, ValueError) as error:
        raise RegistryError(f"registry: {error}") from error


def read_evidence_row(connection: sqlite3.Connection, id: str) -> Evidence:
    """A record by its id. Raises EvidenceError where it was changed, RegistryError where it is unknown."""
    row = connection.execute("SELECT id, content FROM evidence WHERE id = ?", (id,)).fetchone()
    if row is None:
        raise RegistryError(f"the registry has no evidence {id[:16]}")
    return evidence_from_dict({"id": row["id"], **json.loads(row["content"])}, f"evidence {id[:12]} in the registry")


def evidence_on(connection: sqlite3.Connection, policy: StoredPolicy) -> list[Evidence]:
    """Every record about this policy or one of its name, in the order in which they came."""
    rows = connection.execute(
        "SELECT id FROM evidence WHERE digest = ? OR name = ? ORDER BY number", (policy.digest, policy.name)
    )
    return [read_evidence_row(connection, row["id"]) for row in rows.fetchall()]


def stage_of(connection: sqlite3.Connection, target: Target, digest: str) -> Stage | None:
    """Where the policy stands at the target."""
    row = connection.execute(
        "SELECT stage FROM standing WHERE model = ? AND gpu = ? AND digest = ?", (target.model, target.gpu, digest)
    ).fetchone()
    return Stage(row["stage"]) if row else None


def serving(connection: sqlite3.Connection, target: Target, stage: Stage) -> Change | None:
    """The change by which a policy is canary or live there."""
    row = connection.execute(
        f"{CHANGES} WHERE change.number = (SELECT change FROM standing WHERE model = ? AND gpu = ? AND stage = ?)",
        (target.model, target.gpu, stage),
    ).fetchone()
    return change_from_row(row) if row else None


def read_change(connection: sqlite3.Connection, number: int) -> Change:
    """A change by its number. Raises RegistryError."""
    row = connection.execute(f"{CHANGES} WHERE change.number = ?", (number,)).fetchone()
    if row is None:
        raise RegistryError(f"the registry has no change {number}")
    return change_from_row(row)


def newest(connection: sqlite3.Connection, target: Target) -> Change | None:
    """The last change of what serves there, done or pending."""
    row = connection.execute(
        f"{CHANGES} WHERE model = ? AND gpu = ? AND action != 'validate' AND state != 'undone' "
        "ORDER BY change.number DESC LIMIT 1",
        (target.model, target.gpu),
    ).fetchone()
    return change_from_row(row) if row else None


def pending(connection: sqlite3.Connection, target: Target) -> Change | None:
    """The change there that waits for a server's answer."""
    row = connection.execute(
        f"{CHANGES} WHERE model = ? AND gpu = ? AND state = 'pending'", (target.model, target.gpu)
    ).fetchone()
    return change_from_row(row) if row else None


def read_standing(connection: sqlite3.Connection, target: Target, digest: str) -> Standing:
    """How a policy stands at a target that has heard of it. What serves has the evidence by which it came to serve."""
    row = connection.execute(
        "SELECT * FROM standing WHERE model = ? AND gpu = ? AND digest = ?", (target.model, target.gpu, digest)
    ).fetchone()
    change, stage = read_change(connection, row["change"]), Stage(row["stage"])
    id = change.evidence
    if stage not in SERVING:
        newest_id = connection.execute(
            "SELECT id FROM evidence WHERE model = ? AND gpu = ? AND digest = ? ORDER BY number DESC LIMIT 1",
            (target.model, target.gpu, digest),
        ).fetchone()
        id = newest_id["id"] if newest_id else None
    evidence = read_evidence_row(connection, id) if id else None
    return Standing(target, read_policy(connection, digest), stage, row["since"], evidence, change)

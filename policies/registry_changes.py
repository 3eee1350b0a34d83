"""Changes of the registry inside one transaction: proposed, with what is wrong about them, and carried out."""

import json
import sqlite3
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from policies.evidence import Evidence, Target
from policies.registry_file import RegistryError
from policies.registry_reading import evidence_on, newest, pending, read_change, serving, stage_of
from policies.registry_rows import SERVING, Action, Change, ChangeState, Stage, this_process
from policies.stored import StoredPolicy
from policies.sufficient import what_is_missing

PATIENCE_S = 60.0  # how long a process may wait for a server before its change counts as abandoned


@dataclass(frozen=True)
class Signed:
    """Who wants a change and why, what they had seen, and whether they insist.

    Attributes:
        code: digest of the code that would decide.
        seen: number of the newest change at the target when they looked; a later one makes theirs void.
        url: of the server that must agree; the change is pending until it has.
    """

    who: str
    why: str
    code: str
    force: bool = False
    seen: int | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        """Raise RegistryError on a change without a name, and on force without a reason."""
        if not self.who.strip():
            raise RegistryError("a change needs a name: who")
        if self.force and not self.why.strip():
            raise RegistryError("force needs a reason: why")


def now() -> str:
    """The time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def keep_policy(connection: sqlite3.Connection, policy: StoredPolicy) -> None:
    """Write the policy down, once a digest."""
    connection.execute(
        "INSERT OR IGNORE INTO policy VALUES (?, ?, ?, ?)",
        (policy.digest, policy.name, policy.toml, json.dumps(dict(policy.sources))),
    )


def propose_promotion(
    connection: sqlite3.Connection, policy: StoredPolicy, stage: Stage, target: Target, signed: Signed
) -> Change:
    """Write a promotion down as pending. Raises RegistryError with what is missing."""
    if stage not in SERVING:
        raise RegistryError(f"a policy is promoted to {' or '.join(SERVING)}, not to {stage}")
    _may_change(connection, target, signed)
    before = stage_of(connection, target, policy.digest)
    if before is stage or (before is Stage.LIVE and stage is Stage.CANARY):
        by = serving(connection, target, before)
        words = "already" if before is stage else "and a canary must be another policy"
        raise RegistryError(f"{policy.name} is {before} for {target}, {words} ({by.describe() if by else ''})")
    records = evidence_on(connection, policy)
    missing = what_is_missing(records, policy, signed.code, target)
    if missing and not signed.force:
        raise RegistryError(f"{policy.name} cannot become {stage} for {target}: {missing}")
    keep_policy(connection, policy)
    own = [one for one in records if one.policy.digest == policy.digest]
    leaving, live = serving(connection, target, stage), serving(connection, target, Stage.LIVE)
    return _write(
        connection,
        target,
        Action.PROMOTE,
        policy.digest,
        before,
        stage,
        leaves=leaving.digest if leaving else None,
        below=live.number if live and stage is Stage.LIVE else None,
        evidence=own[-1].id if own else None,
        forced=bool(missing),
        signed=signed,
    )


def propose_rollback(connection: sqlite3.Connection, target: Target, stage: Stage, signed: Signed) -> Change:
    """Write down as pending that the live policy goes back to the one before it, or that the canary ends."""
    if stage not in SERVING:
        raise RegistryError(f"what is {' or '.join(SERVING)} is rolled back, not what is {stage}")
    _may_change(connection, target, signed)
    current = serving(connection, target, stage)
    if current is None:
        raise RegistryError(f"nothing is {stage} for {target}: there is nothing to roll back")
    if stage is Stage.CANARY:
        return _write(
            connection, target, Action.ROLLBACK, current.digest, stage, Stage.RETIRED,
            leaves=current.digest, below=None, evidence=current.evidence, forced=False, signed=signed,
        )  # fmt: skip
    if current.below is None:
        raise RegistryError(f"{current.name} is the first that went live for {target}: there is none to go back to")
    back = read_change(connection, current.below)
    before = stage_of(connection, target, back.digest)
    return _write(
        connection, target, Action.ROLLBACK, back.digest, before, Stage.LIVE,
        leaves=current.digest, below=back.below, evidence=back.evidence, forced=False, signed=signed,
    )  # fmt: skip


def carry_out(connection: sqlite3.Connection, change: Change, reason: str = "") -> Change:
    """What was proposed holds from now on: the one that leaves retires, the other takes its place."""
    at = now()
    place = (change.target.model, change.target.gpu)
    if change.leaves is not None:
        connection.execute(
            "UPDATE standing SET stage = 'retired', since = ?, change = ? WHERE model = ? AND gpu = ? AND digest = ?",
            (at, change.number, *place, change.leaves),
        )
    stand(connection, change.target, change.digest, change.to_stage, at, change.number)
    connection.execute(
        "UPDATE change SET state = 'done', settled_at = ?, reason = ?, owner = NULL, expires = NULL WHERE number = ?",
        (at, reason, change.number),
    )
    return read_change(connection, change.number)


def stand(connection: sqlite3.Connection, target: Target, digest: str, stage: Stage, since: str, change: int) -> None:
    """Write down where a policy stands."""
    connection.execute(
        "INSERT INTO standing VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (model, gpu, digest) "
        "DO UPDATE SET stage = excluded.stage, since = excluded.since, change = excluded.change",
        (target.model, target.gpu, digest, stage, since, change),
    )


def take_back(connection: sqlite3.Connection, change: Change, reason: str) -> Change:
    """What was proposed does not hold, for that reason."""
    connection.execute(
        "UPDATE change SET state = 'undone', settled_at = ?, reason = ?, owner = NULL, expires = NULL WHERE number = ?",
        (now(), reason, change.number),
    )
    return read_change(connection, change.number)


def add_validation(connection: sqlite3.Connection, evidence: Evidence, signed: Signed) -> Change | None:
    """Keep a record and write down where its policy stands by it; None if the registry has it already."""
    keep_policy(connection, evidence.policy)
    target, digest = evidence.target, evidence.policy.digest
    known = connection.execute("SELECT 1 FROM evidence WHERE id = ?", (evidence.id,)).fetchone()
    if known is not None:
        return None
    connection.execute(
        "INSERT INTO evidence (id, digest, name, code, model, gpu, content, added_at, added_by) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            evidence.id, digest, evidence.policy.name, evidence.code, target.model, target.gpu,
            json.dumps(evidence.content), now(), signed.who,
        ),
    )  # fmt: skip
    before = stage_of(connection, target, digest)
    after = before if before in SERVING else Stage.VALIDATED if evidence.passed else Stage.CANDIDATE
    assert after is not None
    change = _write(
        connection, target, Action.VALIDATE, digest, before, after,
        leaves=None, below=None, evidence=evidence.id, forced=False, signed=signed, state=ChangeState.DONE,
    )  # fmt: skip
    if after not in SERVING:
        stand(connection, target, digest, after, change.at, change.number)
    return change


def _may_change(connection: sqlite3.Connection, target: Target, signed: Signed) -> None:
    """Raise RegistryError while another change is under way, or when one came since the caller looked."""
    waiting = pending(connection, target)
    if waiting is not None and waiting.is_abandoned and signed.force:
        take_back(connection, waiting, f"taken as not done by {signed.who}: {signed.why}")
    elif waiting is not None:
        hint = (
            f"was never finished; `zlab promote` or `zlab rollback` with --live {waiting.url} asks the server whether "
            "it took it, --force --why takes it as not done"
            if waiting.is_abandoned
            else "is under way; try again in a moment"
        )
        raise RegistryError(f"{target}: {waiting.describe()}, {hint}")
    last = newest(connection, target)
    if signed.seen is not None and last is not None and last.number > signed.seen:
        raise RegistryError(
            f"{target}: somebody was faster: {last.describe()}. Nothing was changed; look at it (`zlab history`) and "
            "try again if it is still what you want"
        )


def _write(
    connection: sqlite3.Connection,
    target: Target,
    action: Action,
    digest: str,
    before: Stage | None,
    after: Stage,
    *,
    leaves: str | None,
    below: int | None,
    evidence: str | None,
    forced: bool,
    signed: Signed,
    state: ChangeState = ChangeState.PENDING,
) -> Change:
    cursor = connection.execute(
        "INSERT INTO change (model, gpu, action, digest, from_stage, to_stage, leaves, below, evidence, code, forced, "
        "who, why, at, state, reason, url, owner, expires) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, '', ?, ?, ?)",
        (
            target.model, target.gpu, action, digest, before, after, leaves, below, evidence, signed.code, forced,
            signed.who, signed.why, now(), state, signed.url, this_process(), time.time() + PATIENCE_S,
        ),
    )  # fmt: skip
    assert cursor.lastrowid is not None
    return read_change(connection, cursor.lastrowid)

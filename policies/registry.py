"""The policy registry: which policy serves where, since when, by whose decision and on what
evidence.

The registry is one SQLite file in WAL mode. Each call opens it, so threads and processes may share
it. Every change is one transaction: a process that is killed leaves the file as it was before or
after the change. A change that a running server must accept is first written as pending and holds
once it is confirmed, so registry and server never disagree unnoticed.
"""

import json
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from zlab.policies.core.policy import Policy
from zlab.policies.deciding_code import code_digest
from zlab.policies.evidence import (
    Evidence,
    EvidenceError,
    Target,
    evidence_from_dict,
    what_is_missing,
)
from zlab.policies.snapshot import PolicySnapshot, store_policy, stored_from_dict
from zlab.policies.spec import PolicyError

APPLICATION = 0x7A6C6162  # "zlab" in the file's header
VERSION = 1
BUSY_S = 10.0  # time to wait for another process's transaction
SCHEMA = (
    "CREATE TABLE policy (digest TEXT PRIMARY KEY, name TEXT NOT NULL, toml TEXT NOT NULL, "
    "sources TEXT NOT NULL)",
    """CREATE TABLE evidence (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, digest TEXT NOT NULL, name TEXT NOT NULL,
        code TEXT NOT NULL, model TEXT NOT NULL, gpu TEXT NOT NULL, content TEXT NOT NULL,
        added_at TEXT NOT NULL, added_by TEXT NOT NULL)""",
    # stage of each policy at each target; `change` is the one that led there, for a live policy
    # that of its promotion
    """CREATE TABLE standing (
        model TEXT NOT NULL, gpu TEXT NOT NULL, digest TEXT NOT NULL REFERENCES policy (digest),
        stage TEXT NOT NULL CHECK (stage IN ('candidate', 'validated', 'canary', 'live', 'retired')),
        since TEXT NOT NULL, change INTEGER NOT NULL REFERENCES change (number), PRIMARY KEY (model, gpu, digest))""",
    "CREATE UNIQUE INDEX one_live ON standing (model, gpu) WHERE stage = 'live'",
    "CREATE UNIQUE INDEX one_canary ON standing (model, gpu) WHERE stage = 'canary'",
    # every change; `below` is the change whose policy was live before, to which a rollback returns
    """CREATE TABLE change (
        number INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL, gpu TEXT NOT NULL,
        action TEXT NOT NULL CHECK (action IN ('validate', 'promote', 'rollback')), digest TEXT NOT NULL,
        from_stage TEXT, to_stage TEXT NOT NULL, leaves TEXT, below INTEGER, evidence TEXT, code TEXT NOT NULL,
        forced INTEGER NOT NULL, who TEXT NOT NULL, why TEXT NOT NULL, at TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('pending', 'done', 'undone')), settled_at TEXT, reason TEXT NOT NULL,
        url TEXT, owner TEXT, expires REAL)""",
    "CREATE UNIQUE INDEX one_pending ON change (model, gpu) WHERE state = 'pending'",
    """CREATE TRIGGER evidence_is_final BEFORE UPDATE ON evidence
        BEGIN SELECT RAISE(ABORT, 'evidence is never changed'); END""",
)


class RegistryError(EvidenceError):
    """The registry refuses a change, with what is missing; or the file is no registry, or locked by
    another process.
    """


class RegistryFile:
    """Opens the file for each call, so that threads and processes may share it, and creates it when
    needed.
    """

    def __init__(self, path: Path | str, create: bool = True) -> None:
        """Raise RegistryError when the file is no registry, or is missing and not to be created."""
        self.path = Path(path)
        if not create and not self.path.exists():
            raise RegistryError(
                f"no registry at {self.path}: `zlab validate ... --registry {self.path}` makes one"
            )
        if not self.path.parent.is_dir():
            raise RegistryError(f"registry {self.path}: there is no folder {self.path.parent}")
        with self._open() as connection:
            self._prepare(connection)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection that sees one moment of the registry."""
        with self._open() as connection:
            connection.execute("BEGIN")
            yield connection
            connection.execute("ROLLBACK")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection in an exclusive transaction: all of its changes happen, or none."""
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(
                sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
            ) as connection:
                connection.row_factory = sqlite3.Row
                connection.execute("PRAGMA foreign_keys = ON")
                connection.execute("PRAGMA synchronous = FULL")
                yield connection
        except sqlite3.OperationalError as error:
            if "locked" in str(error) or "busy" in str(error):
                raise RegistryError(
                    f"registry {self.path}: another process has been writing for {BUSY_S:.0f} s; "
                    f"nothing was changed"
                ) from error
            raise RegistryError(f"registry {self.path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise RegistryError(f"registry {self.path}: {error}") from error

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute(
            "BEGIN"
        )  # header and tables of one moment: another process may be creating them
        found = self._version(connection)
        connection.execute("ROLLBACK")
        if found == VERSION:
            return
        self._to_wal(connection)
        connection.execute("BEGIN IMMEDIATE")
        try:
            if self._version(connection) == 0:
                for statement in SCHEMA:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
                connection.execute(f"PRAGMA user_version = {VERSION}")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    def _version(self, connection: sqlite3.Connection) -> int:
        """Return the version of the tables, 0 for an empty file. Raises RegistryError for another
        kind of file.
        """
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        num_tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if num_tables and application != APPLICATION:
            raise RegistryError(f"registry {self.path}: is another program's database")
        if num_tables and version != VERSION:
            raise RegistryError(
                f"registry {self.path}: version {version} is not one this version reads ({VERSION})"
            )
        return version if num_tables else 0

    @staticmethod
    def _to_wal(connection: sqlite3.Connection) -> None:
        """Set WAL mode, so that readers go on while one writes. Changing the mode does not wait for
        other processes, so it is retried.
        """
        until = time.monotonic() + BUSY_S
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)
            else:
                return


class DeploymentStage(StrEnum):
    """The stage of a policy; at a target at most one is canary and one live."""

    CANDIDATE = "candidate"  # there is evidence, and the newest does not pass
    VALIDATED = "validated"  # the newest evidence passes
    CANARY = "canary"
    LIVE = "live"
    RETIRED = "retired"


SERVING = (DeploymentStage.CANARY, DeploymentStage.LIVE)


class Action(StrEnum):
    """What caused a change."""

    VALIDATE = "validate"
    PROMOTE = "promote"
    ROLLBACK = "rollback"


class ChangeState(StrEnum):
    """Whether a change holds. One that concerns a running server is pending until the server has
    answered.
    """

    PENDING = "pending"
    DONE = "done"
    UNDONE = "undone"


@dataclass(frozen=True)
class StageChange:
    """One row of the history.

    Attributes:
        number: Counts up over the whole registry.
        target, action, digest, name: What was done to which policy. For a rollback, the policy that
            returns; for a canary's rollback, the one that ends.
        from_stage, to_stage: Stages of that policy before and after; None: unknown to the target.
        leaves: Digest of the policy that had the place before and retires.
        below: Number of the change whose policy a rollback of this one restores.
        evidence, code: Id of the evidence used, and digest of the code at that time.
        forced: Without sufficient evidence, whatever setup the asked server has, or over an
            unfinished change.
        who, why, at: By whom, for what reason, when (UTC).
        state, settled_at, reason: Whether it holds, since when, and why not.
        url: The server that was asked.
        owner: Host and process that made the change.
        expires: Unix time until which that process may be waiting for the server.
    """

    number: int
    target: Target
    action: Action
    digest: str
    name: str
    from_stage: DeploymentStage | None
    to_stage: DeploymentStage
    leaves: str | None
    below: int | None
    evidence: str | None
    code: str
    forced: bool
    who: str
    why: str
    at: str
    state: ChangeState
    settled_at: str | None
    reason: str
    url: str | None
    owner: str | None
    expires: float | None

    @property
    def lane(self) -> DeploymentStage:
        """The lane of the server that the change concerns: `LIVE` or `CANARY`."""
        return (
            DeploymentStage.CANARY
            if self.action is Action.ROLLBACK and self.to_stage is DeploymentStage.RETIRED
            else self.to_stage
        )

    @property
    def is_abandoned(self) -> bool:
        """Whether the change is pending and no process can be working on it any more."""
        if self.state is not ChangeState.PENDING:
            return False
        return (self.expires or 0.0) < time.time() or not _lives(self.owner)

    def describe(self) -> str:
        """Describe the change for a message: number, what, by whom, when."""
        words = {
            Action.VALIDATE: f"evidence on {self.name}",
            Action.PROMOTE: f"promotion of {self.name} to {self.to_stage}",
            Action.ROLLBACK: f"rollback {'of the canary' if self.lane is DeploymentStage.CANARY else 'to'} "
            f"{self.name}",
        }
        return f"change {self.number}, {words[self.action]} by {self.who} at {self.at}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Deployment:
    """A policy at a target.

    Attributes:
        policy: The snapshot; `policy.load()` makes the policy.
        stage, since: Its stage, and since when (UTC).
        evidence: What led there; None when it was forced without evidence.
        change: The change that led there.
    """

    target: Target
    policy: PolicySnapshot
    stage: DeploymentStage
    since: str
    evidence: Evidence | None
    change: StageChange


def change_from_row(row: sqlite3.Row) -> StageChange:
    """Return the change of a row of the `change` table, with the policy's name joined."""
    return StageChange(
        number=row["number"],
        target=Target(row["model"], row["gpu"]),
        action=Action(row["action"]),
        digest=row["digest"],
        name=row["name"],
        from_stage=DeploymentStage(row["from_stage"]) if row["from_stage"] else None,
        to_stage=DeploymentStage(row["to_stage"]),
        leaves=row["leaves"],
        below=row["below"],
        evidence=row["evidence"],
        code=row["code"],
        forced=bool(row["forced"]),
        who=row["who"],
        why=row["why"],
        at=row["at"],
        state=ChangeState(row["state"]),
        settled_at=row["settled_at"],
        reason=row["reason"],
        url=row["url"],
        owner=row["owner"],
        expires=row["expires"],
    )


def this_process() -> str:
    """Return host and process, as in `StageChange.owner`."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _lives(owner: str | None) -> bool:
    """Whether that process still runs, as far as this host can say."""
    host, _, process = (owner or "").rpartition(":")
    if host != socket.gethostname():
        return True
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


CHANGES = "SELECT change.*, policy.name FROM change JOIN policy USING (digest)"


def read_policy(connection: sqlite3.Connection, digest: str) -> PolicySnapshot:
    """Return a policy by digest. Raises RegistryError when it is unknown or was changed."""
    row = connection.execute("SELECT * FROM policy WHERE digest = ?", (digest,)).fetchone()
    if row is None:
        raise RegistryError(f"the registry knows no policy {digest[:16]}")
    try:
        return stored_from_dict({**dict(row), "sources": json.loads(row["sources"])})
    except (PolicyError, ValueError) as error:
        raise RegistryError(f"registry: {error}") from error


def read_evidence_row(connection: sqlite3.Connection, id: str) -> Evidence:
    """Return a record by id. Raises EvidenceError when it was changed, RegistryError when it is
    unknown.
    """
    row = connection.execute("SELECT id, content FROM evidence WHERE id = ?", (id,)).fetchone()
    if row is None:
        raise RegistryError(f"the registry has no evidence {id[:16]}")
    return evidence_from_dict(
        {"id": row["id"], **json.loads(row["content"])}, f"evidence {id[:12]} in the registry"
    )


def evidence_on(connection: sqlite3.Connection, policy: PolicySnapshot) -> list[Evidence]:
    """Return every record about this policy or one of its name, in order of time."""
    rows = connection.execute(
        "SELECT id FROM evidence WHERE digest = ? OR name = ? ORDER BY number",
        (policy.digest, policy.name),
    )
    return [read_evidence_row(connection, row["id"]) for row in rows.fetchall()]


def stage_of(connection: sqlite3.Connection, target: Target, digest: str) -> DeploymentStage | None:
    """Return the stage of the policy at the target."""
    row = connection.execute(
        "SELECT stage FROM standing WHERE model = ? AND gpu = ? AND digest = ?",
        (target.model, target.gpu, digest),
    ).fetchone()
    return DeploymentStage(row["stage"]) if row else None


def serving(
    connection: sqlite3.Connection, target: Target, stage: DeploymentStage
) -> StageChange | None:
    """Return the change by which a policy is canary or live there."""
    row = connection.execute(
        f"{CHANGES} WHERE change.number = (SELECT change FROM standing WHERE model = ? AND gpu = "
        f"? AND stage = ?)",
        (target.model, target.gpu, stage),
    ).fetchone()
    return change_from_row(row) if row else None


def read_change(connection: sqlite3.Connection, number: int) -> StageChange:
    """Return a change by number. Raises RegistryError."""
    row = connection.execute(f"{CHANGES} WHERE change.number = ?", (number,)).fetchone()
    if row is None:
        raise RegistryError(f"the registry has no change {number}")
    return change_from_row(row)


def newest(connection: sqlite3.Connection, target: Target) -> StageChange | None:
    """Return the last change of what serves there, done or pending."""
    row = connection.execute(
        f"{CHANGES} WHERE model = ? AND gpu = ? AND action != 'validate' AND state != 'undone' "
        "ORDER BY change.number DESC LIMIT 1",
        (target.model, target.gpu),
    ).fetchone()
    return change_from_row(row) if row else None


def pending(connection: sqlite3.Connection, target: Target) -> StageChange | None:
    """Return the change there that waits for a server's answer."""
    row = connection.execute(
        f"{CHANGES} WHERE model = ? AND gpu = ? AND state = 'pending'", (target.model, target.gpu)
    ).fetchone()
    return change_from_row(row) if row else None


def read_standing(connection: sqlite3.Connection, target: Target, digest: str) -> Deployment:
    """Return the deployment of a policy that a target knows. What serves has the evidence by which
    it came to serve.
    """
    row = connection.execute(
        "SELECT * FROM standing WHERE model = ? AND gpu = ? AND digest = ?",
        (target.model, target.gpu, digest),
    ).fetchone()
    change, stage = read_change(connection, row["change"]), DeploymentStage(row["stage"])
    id = change.evidence
    if stage not in SERVING:
        newest_id = connection.execute(
            "SELECT id FROM evidence WHERE model = ? AND gpu = ? AND digest = ? ORDER BY number "
            "DESC LIMIT 1",
            (target.model, target.gpu, digest),
        ).fetchone()
        id = newest_id["id"] if newest_id else None
    evidence = read_evidence_row(connection, id) if id else None
    return Deployment(
        target, read_policy(connection, digest), stage, row["since"], evidence, change
    )


PATIENCE_S = 60.0  # how long a process may wait for a server before its change counts as abandoned


@dataclass(frozen=True)
class Approval:
    """Who asks for a change and why, the state they had seen, and whether they insist.

    Attributes:
        seen: Number of the newest change at the target when they looked; a later change makes
            theirs void.
        url: The server that must accept; the change is pending until it has.
    """

    who: str
    why: str
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
    """Return the time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def keep_policy(connection: sqlite3.Connection, policy: PolicySnapshot) -> None:
    """Store the policy, once for each digest."""
    connection.execute(
        "INSERT OR IGNORE INTO policy VALUES (?, ?, ?, ?)",
        (policy.digest, policy.name, policy.toml, json.dumps(dict(policy.sources))),
    )


def propose_promotion(
    connection: sqlite3.Connection,
    policy: PolicySnapshot,
    stage: DeploymentStage,
    target: Target,
    signed: Approval,
) -> StageChange:
    """Write a promotion as pending. Raises RegistryError with what is missing."""
    if stage not in SERVING:
        raise RegistryError(f"a policy is promoted to {' or '.join(SERVING)}, not to {stage}")
    _may_change(connection, target, signed)
    before = stage_of(connection, target, policy.digest)
    if before is stage or (before is DeploymentStage.LIVE and stage is DeploymentStage.CANARY):
        by = serving(connection, target, before)
        words = "already" if before is stage else "and a canary must be another policy"
        raise RegistryError(
            f"{policy.name} is {before} for {target}, {words} ({by.describe() if by else ''})"
        )
    records = evidence_on(connection, policy)
    code = code_digest(policy)
    missing = what_is_missing(records, policy, code, target)
    if missing and not signed.force:
        raise RegistryError(f"{policy.name} cannot become {stage} for {target}: {missing}")
    keep_policy(connection, policy)
    own = [one for one in records if one.policy.digest == policy.digest]
    leaving, live = (
        serving(connection, target, stage),
        serving(connection, target, DeploymentStage.LIVE),
    )
    return _write(
        connection,
        target,
        Action.PROMOTE,
        policy.digest,
        before,
        stage,
        leaves=leaving.digest if leaving else None,
        below=live.number if live and stage is DeploymentStage.LIVE else None,
        evidence=own[-1].id if own else None,
        code=code,
        forced=bool(missing) or (signed.force and signed.url is not None),
        signed=signed,
    )


def propose_rollback(
    connection: sqlite3.Connection, target: Target, stage: DeploymentStage, signed: Approval
) -> StageChange:
    """Write as pending that the live policy returns to the one before it, or that the canary
    ends.
    """
    if stage not in SERVING:
        raise RegistryError(f"what is {' or '.join(SERVING)} is rolled back, not what is {stage}")
    _may_change(connection, target, signed)
    current = serving(connection, target, stage)
    if current is None:
        raise RegistryError(f"nothing is {stage} for {target}: there is nothing to roll back")
    if stage is DeploymentStage.CANARY:
        return _write(
            connection, target, Action.ROLLBACK, current.digest, stage, DeploymentStage.RETIRED,
            leaves=current.digest, below=None, evidence=current.evidence,
            code=code_digest(read_policy(connection, current.digest)), forced=False, signed=signed,
        )  # fmt: skip
    if current.below is None:
        raise RegistryError(
            f"{current.name} is the first that went live for {target}: there is none to go back to"
        )
    back = to_go_back_to(connection, current)
    if back is None:
        under = read_change(connection, current.below)
        raise RegistryError(
            f"all that was live before {current.name} for {target} has been rolled back since, "
            f"{under.name} the last: `zlab promote POLICY` brings back the one that it names"
        )
    before = stage_of(connection, target, back.digest)
    return _write(
        connection, target, Action.ROLLBACK, back.digest, before, DeploymentStage.LIVE,
        leaves=current.digest, below=back.below, evidence=back.evidence,
        code=code_digest(read_policy(connection, back.digest)), forced=False, signed=signed,
    )  # fmt: skip


def to_go_back_to(connection: sqlite3.Connection, current: StageChange) -> StageChange | None:
    """Return the change whose policy a rollback of `current` restores: the latest before it whose
    policy is another one and has not been rolled back since. None where there is none.
    """
    below = current.below
    while below is not None:
        back = read_change(connection, below)
        thrown_out = connection.execute(
            "SELECT 1 FROM change WHERE model = ? AND gpu = ? AND action = 'rollback' AND "
            "to_stage = 'live' AND state = 'done' AND leaves = ? AND number > ?",
            (back.target.model, back.target.gpu, back.digest, back.number),
        ).fetchone()
        if thrown_out is None and back.digest != current.digest:
            return back
        below = back.below
    return None


def carry_out(connection: sqlite3.Connection, change: StageChange, reason: str = "") -> StageChange:
    """Make a proposed change hold: the old policy retires, the new one takes its place."""
    at = now()
    place = (change.target.model, change.target.gpu)
    if change.leaves is not None:
        connection.execute(
            "UPDATE standing SET stage = 'retired', since = ?, change = ? WHERE model = ? AND "
            "gpu = ? AND digest = ?",
            (at, change.number, *place, change.leaves),
        )
    stand(connection, change.target, change.digest, change.to_stage, at, change.number)
    connection.execute(
        "UPDATE change SET state = 'done', settled_at = ?, reason = ?, owner = NULL, expires = "
        "NULL WHERE number = ?",
        (at, reason, change.number),
    )
    return read_change(connection, change.number)


def stand(
    connection: sqlite3.Connection,
    target: Target,
    digest: str,
    stage: DeploymentStage,
    since: str,
    change: int,
) -> None:
    """Write the stage of a policy."""
    connection.execute(
        "INSERT INTO standing VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (model, gpu, digest) "
        "DO UPDATE SET stage = excluded.stage, since = excluded.since, change = excluded.change",
        (target.model, target.gpu, digest, stage, since, change),
    )


def take_back(connection: sqlite3.Connection, change: StageChange, reason: str) -> StageChange:
    """Mark a proposed change as not done, with the reason."""
    connection.execute(
        "UPDATE change SET state = 'undone', settled_at = ?, reason = ?, owner = NULL, expires = "
        "NULL WHERE number = ?",
        (now(), reason, change.number),
    )
    return read_change(connection, change.number)


def add_validation(
    connection: sqlite3.Connection, evidence: Evidence, signed: Approval
) -> StageChange | None:
    """Store a record and set its policy's stage by it; None if the registry has it already."""
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
    after = (
        before
        if before in SERVING
        else DeploymentStage.VALIDATED
        if evidence.passed
        else DeploymentStage.CANDIDATE
    )
    assert after is not None
    change = _write(
        connection, target, Action.VALIDATE, digest, before, after,
        leaves=None, below=None, evidence=evidence.id, code=evidence.code, forced=False, signed=signed, state=ChangeState.DONE,
    )  # fmt: skip
    if after not in SERVING:
        stand(connection, target, digest, after, change.at, change.number)
    return change


def _may_change(connection: sqlite3.Connection, target: Target, signed: Approval) -> None:
    """Raise RegistryError while another change is in progress, or when one came since the caller
    looked.
    """
    waiting = pending(connection, target)
    if waiting is not None and waiting.is_abandoned and signed.force:
        take_back(connection, waiting, f"taken as not done by {signed.who}: {signed.why}")
    elif waiting is not None:
        hint = (
            f"was never finished; `zlab promote` or `zlab rollback` with --live {waiting.url} "
            f"asks the server whether "
            "it took it, --force --why takes it as not done"
            if waiting.is_abandoned
            else "is under way; try again in a moment"
        )
        raise RegistryError(f"{target}: {waiting.describe()}, {hint}")
    last = newest(connection, target)
    if signed.seen is not None and last is not None and last.number > signed.seen:
        raise RegistryError(
            f"{target}: somebody was faster: {last.describe()}. Nothing was changed; look at it "
            f"(`zlab history`) and "
            "try again if it is still what you want"
        )


def _write(
    connection: sqlite3.Connection,
    target: Target,
    action: Action,
    digest: str,
    before: DeploymentStage | None,
    after: DeploymentStage,
    *,
    leaves: str | None,
    below: int | None,
    evidence: str | None,
    code: str,
    forced: bool,
    signed: Approval,
    state: ChangeState = ChangeState.PENDING,
) -> StageChange:
    cursor = connection.execute(
        "INSERT INTO change (model, gpu, action, digest, from_stage, to_stage, leaves, below, "
        "evidence, code, forced, "
        "who, why, at, state, reason, url, owner, expires) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, '', ?, ?, ?)",
        (
            target.model, target.gpu, action, digest, before, after, leaves, below, evidence, code, forced,
            signed.who, signed.why, now(), state, signed.url, this_process(), time.time() + PATIENCE_S,
        ),
    )  # fmt: skip
    assert cursor.lastrowid is not None
    return read_change(connection, cursor.lastrowid)


__all__ = [
    "Action",
    "StageChange",
    "ChangeState",
    "PolicyRegistry",
    "RegistryError",
    "DeploymentStage",
    "Deployment",
    "Target",
]

DEFAULT = "registry.db"


class PolicyRegistry:
    """The registry of one file. Every method may raise RegistryError; reading evidence may raise
    EvidenceError.
    """

    def __init__(self, path: Path | str = DEFAULT, create: bool = True) -> None:
        """Raise RegistryError when the file is no registry, or is missing and not to be created."""
        self._file = RegistryFile(path, create)

    # reading

    def live(self, target: Target) -> Deployment | None:
        """Return the live deployment: policy, evidence, since when and why."""
        return self._serving(target, DeploymentStage.LIVE)

    def canary(self, target: Target) -> Deployment | None:
        """Return the canary deployment."""
        return self._serving(target, DeploymentStage.CANARY)

    def standings(self, target: Target | None = None) -> list[Deployment]:
        """Return every policy that a target, or any target, knows, by name."""
        with self._file.reading() as connection:
            found_rows = connection.execute(
                "SELECT * FROM standing ORDER BY model, gpu, since"
            ).fetchall()
            found = [
                read_standing(connection, Target(row["model"], row["gpu"]), row["digest"])
                for row in found_rows
            ]
        return [one for one in found if target is None or one.target == target]

    def standing(self, target: Target, digest: str) -> Deployment | None:
        """Return the deployment of a policy; None if the target does not know it."""
        with self._file.reading() as connection:
            known = stage_of(connection, target, digest) is not None
            return read_standing(connection, target, digest) if known else None

    def before_live(self, target: Target) -> StageChange | None:
        """Return the change whose policy a rollback restores; None where there is none."""
        with self._file.reading() as connection:
            current = serving(connection, target, DeploymentStage.LIVE)
            return None if current is None else to_go_back_to(connection, current)

    def history(self, target: Target | None = None) -> list[StageChange]:
        """Return every change in order, undone and pending ones included."""
        with self._file.reading() as connection:
            found = [
                change_from_row(row)
                for row in connection.execute(f"{CHANGES} ORDER BY change.number")
            ]
        return [one for one in found if target is None or one.target == target]

    def newest(self, target: Target) -> int:
        """Return the number of the last change of what serves there, 0 if there was none; pass it
        as `seen`.
        """
        with self._file.reading() as connection:
            last = newest(connection, target)
        return last.number if last else 0

    def pending(self, target: Target) -> StageChange | None:
        """Return the change there that waits for a server."""
        with self._file.reading() as connection:
            return pending(connection, target)

    def evidence(self, id: str) -> Evidence:
        """Return a record by id."""
        with self._file.reading() as connection:
            return read_evidence_row(connection, id)

    def evidence_on(self, policy: Policy | PolicySnapshot) -> list[Evidence]:
        """Return every record about this policy, or another of its name, in order of time."""
        with self._file.reading() as connection:
            return evidence_on(connection, _stored(policy))

    def policy(self, digest: str) -> PolicySnapshot:
        """Return a policy that the registry knows."""
        with self._file.reading() as connection:
            return read_policy(connection, digest)

    # changing

    def add_evidence(self, evidence: Evidence, who: str, why: str = "") -> Deployment:
        """Store a record: its policy becomes `validated` if it passed, `candidate` if not, unless
        it serves already.
        """
        with self._file.writing() as connection:
            add_validation(connection, evidence, Approval(who, why))
            return read_standing(connection, evidence.target, evidence.policy.digest)

    def promote(
        self,
        policy: Policy | PolicySnapshot,
        stage: DeploymentStage,
        target: Target,
        who: str,
        why: str = "",
        *,
        force: bool = False,
        seen: int | None = None,
    ) -> Deployment:
        """Make a policy canary or live; the policy that was so before retires.

        The change is refused, with what is missing, unless the newest evidence about exactly this
        policy, code and target passed; `force` (which needs `why`) is recorded. It is also refused
        when a change came after `seen`, or one is in progress.
        """
        signed = Approval(who, why, force, seen)
        stored = _stored(policy)
        return self._at_once(lambda db: propose_promotion(db, stored, stage, target, signed))

    def rollback(
        self,
        target: Target,
        who: str,
        why: str = "",
        stage: DeploymentStage = DeploymentStage.LIVE,
        *,
        force: bool = False,
        seen: int | None = None,
    ) -> Deployment:
        """Retire the live policy and restore the one before it that was not rolled back since; a
        canary retires.

        Returns the deployment that returned (for a canary, the one that ended). The next rollback
        returns to what was live before that. `force` treats an abandoned change as not done.
        """
        signed = Approval(who, why, force, seen)
        return self._at_once(lambda db: propose_rollback(db, target, stage, signed))

    # in agreement with a server: begin, ask the server, confirm or undo

    def begin_promotion(
        self,
        policy: Policy | PolicySnapshot,
        stage: DeploymentStage,
        target: Target,
        who: str,
        why: str,
        url: str,
        *,
        force: bool = False,
        seen: int | None = None,
    ) -> StageChange:
        """Like `promote`, but pending until `confirm` or `undo`."""
        signed = Approval(who, why, force, seen, url)
        with self._file.writing() as connection:
            return propose_promotion(connection, _stored(policy), stage, target, signed)

    def begin_rollback(
        self,
        target: Target,
        who: str,
        why: str,
        url: str,
        stage: DeploymentStage = DeploymentStage.LIVE,
        *,
        force: bool = False,
        seen: int | None = None,
    ) -> StageChange:
        """Like `rollback`, but pending until `confirm` or `undo`."""
        signed = Approval(who, why, force, seen, url)
        with self._file.writing() as connection:
            return propose_rollback(connection, target, stage, signed)

    def confirm(self, number: int) -> StageChange:
        """Record that the server accepted the pending change: it holds."""
        with self._file.writing() as connection:
            return carry_out(connection, _still_pending(connection, number))

    def undo(self, number: int, reason: str) -> StageChange:
        """Record that the server did not accept the change, with the reason."""
        with self._file.writing() as connection:
            return take_back(connection, _still_pending(connection, number), reason)

    def settle(self, target: Target, running: str | None, who: str) -> StageChange | None:
        """Finish an abandoned change by the digest of what the server runs in that change's lane.

        A lane without a canary runs None. Returns the change as it is now, None if there was
        nothing to do.
        """
        with self._file.writing() as connection:
            waiting = pending(connection, target)
            if waiting is None or not waiting.is_abandoned:
                return None
            wanted = None if waiting.to_stage is DeploymentStage.RETIRED else waiting.digest
            if running == wanted:
                return carry_out(
                    connection, waiting, f"{who} found it unfinished; the server runs it"
                )
            runs = f"policy {running[:12]}" if running else "no policy of its own"
            reason = f"{who} found it unfinished; the server runs {runs}"
            return take_back(connection, waiting, reason)

    def _at_once(self, propose: Callable[[Connection], StageChange]) -> Deployment:
        with self._file.writing() as connection:
            change = carry_out(connection, propose(connection))
            return read_standing(connection, change.target, change.digest)

    def _serving(self, target: Target, stage: DeploymentStage) -> Deployment | None:
        with self._file.reading() as connection:
            by = serving(connection, target, stage)
            return read_standing(connection, target, by.digest) if by else None


def _still_pending(connection: Connection, number: int) -> StageChange:
    change = read_change(connection, number)
    if change.state is not ChangeState.PENDING:
        words = f": {change.reason}" if change.reason else ""
        raise RegistryError(
            f"{change.describe()} is not pending any more, it is {change.state}{words}"
        )
    return change


def _stored(policy: Policy | PolicySnapshot) -> PolicySnapshot:
    return policy if isinstance(policy, PolicySnapshot) else store_policy(policy)

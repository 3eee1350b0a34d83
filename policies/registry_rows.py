"""What the registry gives back: how a policy stands at a target, and the changes that brought it there."""

import os
import socket
import sqlite3
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from policies.evidence import Evidence, Target
from policies.stored import StoredPolicy


class Stage(StrEnum):
    """How far a policy has come; at most one is canary and one live at a target."""

    CANDIDATE = "candidate"  # there is evidence, the newest of it does not pass
    VALIDATED = "validated"  # the newest evidence passes
    CANARY = "canary"
    LIVE = "live"
    RETIRED = "retired"


SERVING = (Stage.CANARY, Stage.LIVE)


class Action(StrEnum):
    """What brought a change about."""

    VALIDATE = "validate"
    PROMOTE = "promote"
    ROLLBACK = "rollback"


class ChangeState(StrEnum):
    """Whether a change holds. One that concerns a running server is pending until the server has answered."""

    PENDING = "pending"
    DONE = "done"
    UNDONE = "undone"


@dataclass(frozen=True)
class Change:
    """One row of the history.

    Attributes:
        number: counts up over the whole registry.
        target, action, digest, name: what was done to which policy; of a rollback, the policy that comes back (of a
            canary's rollback the one that goes).
        from_stage, to_stage: where that policy stood and stands; None: the target had not heard of it.
        leaves: digest of the policy that had the place before and retires.
        below: number of the change whose policy a rollback of this one brings back.
        evidence, code: id of the evidence it went by, and the digest of the code at the time.
        forced: without evidence that suffices, or over an unfinished change.
        who, why, at: by whom, for what reason, when (UTC).
        state, settled_at, reason: whether it holds, since when, and why not.
        url: of the server that it was put to.
        owner: host and process that put it there.
        expires: Unix time until when that process may be waiting for the server.
    """

    number: int
    target: Target
    action: Action
    digest: str
    name: str
    from_stage: Stage | None
    to_stage: Stage
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
    def lane(self) -> Stage:
        """The place at the server that it is about: `LIVE` or `CANARY`."""
        return Stage.CANARY if self.action is Action.ROLLBACK and self.to_stage is Stage.RETIRED else self.to_stage

    @property
    def is_abandoned(self) -> bool:
        """Whether it is pending and nobody can be working on it any more."""
        if self.state is not ChangeState.PENDING:
            return False
        return (self.expires or 0.0) < time.time() or not _lives(self.owner)

    def describe(self) -> str:
        """For a message: number, what, by whom, when."""
        words = {
            Action.VALIDATE: f"evidence on {self.name}",
            Action.PROMOTE: f"promotion of {self.name} to {self.to_stage}",
            Action.ROLLBACK: f"rollback {'of the canary' if self.lane is Stage.CANARY else 'to'} {self.name}",
        }
        return f"change {self.number}, {words[self.action]} by {self.who} at {self.at}"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Standing:
    """How a policy stands at a target.

    Attributes:
        policy: written down; `policy.load()` makes it.
        stage, since: where it is, and since when (UTC).
        evidence: what brought it there; None where it was forced without any.
        change: the change that did.
    """

    target: Target
    policy: StoredPolicy
    stage: Stage
    since: str
    evidence: Evidence | None
    change: Change


def change_from_row(row: sqlite3.Row) -> Change:
    """A row of the `change` table, with the policy's name joined."""
    return Change(
        number=row["number"],
        target=Target(row["model"], row["gpu"]),
        action=Action(row["action"]),
        digest=row["digest"],
        name=row["name"],
        from_stage=Stage(row["from_stage"]) if row["from_stage"] else None,
        to_stage=Stage(row["to_stage"]),
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
    """Host and process, as `Change.owner` has them."""
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

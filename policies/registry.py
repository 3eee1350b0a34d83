"""Which policy serves where, since when, by whose decision and on what evidence: candidate to retired, in one file.

Every change is one transaction, and the file is opened for each call: threads and processes may share it, and a process
killed anywhere leaves it as it was before its last change or after it. A change that a running server must agree to is
written down as pending first, and holds once it is confirmed: registry and server never disagree without a trace.
"""

from collections.abc import Callable
from pathlib import Path
from sqlite3 import Connection

from policies import registry_changes as changes
from policies import registry_reading as rows
from policies.code import code_digest
from policies.core.policy import Policy
from policies.evidence import Evidence, Target
from policies.registry_changes import Signed
from policies.registry_file import RegistryError, RegistryFile
from policies.registry_rows import Action, Change, ChangeState, Stage, Standing, change_from_row
from policies.stored import StoredPolicy, store_policy

__all__ = ["Action", "Change", "ChangeState", "Registry", "RegistryError", "Stage", "Standing", "Target"]

DEFAULT = "registry.db"


class Registry:
    """The registry of one file. Every method may raise RegistryError; reading evidence may raise EvidenceError."""

    def __init__(self, path: Path | str = DEFAULT, create: bool = True) -> None:
        """Raise RegistryError when the file is no registry, or not there and not to be made."""
        self._file = RegistryFile(path, create)

    # looking

    def live(self, target: Target) -> Standing | None:
        """What is live there: policy, evidence, since when and why."""
        return self._serving(target, Stage.LIVE)

    def canary(self, target: Target) -> Standing | None:
        """What is canary there."""
        return self._serving(target, Stage.CANARY)

    def standings(self, target: Target | None = None) -> list[Standing]:
        """Every policy that a target has heard of, or of all targets, in order of their names."""
        with self._file.reading() as connection:
            found_rows = connection.execute("SELECT * FROM standing ORDER BY model, gpu, since").fetchall()
            found = [
                rows.read_standing(connection, Target(row["model"], row["gpu"]), row["digest"]) for row in found_rows
            ]
        return [one for one in found if target is None or one.target == target]

    def standing(self, target: Target, digest: str) -> Standing | None:
        """How a policy stands there; None if the target has not heard of it."""
        with self._file.reading() as connection:
            known = rows.stage_of(connection, target, digest) is not None
            return rows.read_standing(connection, target, digest) if known else None

    def history(self, target: Target | None = None) -> list[Change]:
        """Every change in order, undone and pending ones included."""
        with self._file.reading() as connection:
            found = [change_from_row(row) for row in connection.execute(f"{rows.CHANGES} ORDER BY change.number")]
        return [one for one in found if target is None or one.target == target]

    def newest(self, target: Target) -> int:
        """Number of the last change of what serves there, 0 if there was none: to be given as `seen`."""
        with self._file.reading() as connection:
            last = rows.newest(connection, target)
        return last.number if last else 0

    def pending(self, target: Target) -> Change | None:
        """The change there that waits for a server."""
        with self._file.reading() as connection:
            return rows.pending(connection, target)

    def evidence(self, id: str) -> Evidence:
        """A record by its id."""
        with self._file.reading() as connection:
            return rows.read_evidence_row(connection, id)

    def evidence_on(self, policy: Policy | StoredPolicy) -> list[Evidence]:
        """Every record about this policy, or another one of its name, in the order in which they came."""
        with self._file.reading() as connection:
            return rows.evidence_on(connection, _stored(policy))

    def policy(self, digest: str) -> StoredPolicy:
        """A policy that the registry has heard of."""
        with self._file.reading() as connection:
            return rows.read_policy(connection, digest)

    # changing

    def add_evidence(self, evidence: Evidence, who: str, why: str = "") -> Standing:
        """Keep a record: its policy becomes `validated` if it passed, `candidate` if not, unless it serves already."""
        with self._file.writing() as connection:
            changes.add_validation(connection, evidence, Signed(who, why, evidence.code))
            return rows.read_standing(connection, evidence.target, evidence.policy.digest)

    def promote(
        self,
        policy: Policy | StoredPolicy,
        stage: Stage,
        target: Target,
        who: str,
        why: str = "",
        *,
        force: bool = False,
        seen: int | None = None,
    ) -> Standing:
        """Make a policy canary or live there; whatever was so before retires.

        Refused, with what is missing, unless the newest evidence about exactly this policy, this code and this target
        passed; `force` (which needs `why`) is written down. Refused as well when a change came after `seen`, or one is
        under way.
        """
        signed = Signed(who, why, code_digest(), force, seen)
        stored = _stored(policy)
        return self._at_once(lambda db: changes.propose_promotion(db, stored, stage, target, signed))

    def rollback(
        self,
        target: Target,
        who: str,
        why: str = "",
        stage: Stage = Stage.LIVE,
        *,
        force: bool = False,
        seen: int | None = None,
    ) -> Standing:
        """The live policy retires and the one before it is live again; of a canary: it retires.

        Returns how the policy that came back (the canary that went) stands. What was live before that is what the next
        rollback returns to. `force` takes an abandoned change as not done.
        """
        signed = Signed(who, why, code_digest(), force, seen)
        return self._at_once(lambda db: changes.propose_rollback(db, target, stage, signed))

    # in agreement with a server: begin, tell the server, confirm or undo

    def begin_promotion(
        self,
        policy: Policy | StoredPolicy,
        stage: Stage,
        target: Target,
        who: str,
        why: str,
        url: str,
        *,
        force: bool = False,
        seen: int | None = None,
    ) -> Change:
        """As `promote`, but only written down: it is pending until `confirm` or `undo`."""
        signed = Signed(who, why, code_digest(), force, seen, url)
        with self._file.writing() as connection:
            return changes.propose_promotion(connection, _stored(policy), stage, target, signed)

    def begin_rollback(
        self,
        target: Target,
        who: str,
        why: str,
        url: str,
        stage: Stage = Stage.LIVE,
        *,
        force: bool = False,
        seen: int | None = None,
    ) -> Change:
        """As `rollback`, but only written down: it is pending until `confirm` or `undo`."""
        signed = Signed(who, why, code_digest(), force, seen, url)
        with self._file.writing() as connection:
            return changes.propose_rollback(connection, target, stage, signed)

    def confirm(self, number: int) -> Change:
        """The server took the pending change: it holds."""
        with self._file.writing() as connection:
            return changes.carry_out(connection, _still_pending(connection, number))

    def undo(self, number: int, reason: str) -> Change:
        """The server did not take it: it does not hold, for that reason."""
        with self._file.writing() as connection:
            return changes.take_back(connection, _still_pending(connection, number), reason)

    def settle(self, target: Target, running: str | None, who: str) -> Change | None:
        """Finish a change that was abandoned, by the digest of what the server runs in that change's lane.

        A lane that is no canary (any more) runs None. Returns the change as it is now, None if there was nothing to do.
        """
        with self._file.writing() as connection:
            waiting = rows.pending(connection, target)
            if waiting is None or not waiting.is_abandoned:
                return None
            wanted = None if waiting.to_stage is Stage.RETIRED else waiting.digest
            if running == wanted:
                return changes.carry_out(connection, waiting, f"{who} found it unfinished; the server runs it")
            runs = f"policy {running[:12]}" if running else "no policy of its own"
            reason = f"{who} found it unfinished; the server runs {runs}"
            return changes.take_back(connection, waiting, reason)

    def _at_once(self, propose: Callable[[Connection], Change]) -> Standing:
        with self._file.writing() as connection:
            change = changes.carry_out(connection, propose(connection))
            return rows.read_standing(connection, change.target, change.digest)

    def _serving(self, target: Target, stage: Stage) -> Standing | None:
        with self._file.reading() as connection:
            by = rows.serving(connection, target, stage)
            return rows.read_standing(connection, target, by.digest) if by else None


def _still_pending(connection: Connection, number: int) -> Change:
    change = rows.read_change(connection, number)
    if change.state is not ChangeState.PENDING:
        words = f": {change.reason}" if change.reason else ""
        raise RegistryError(f"{change.describe()} is not pending any more, it is {change.state}{words}")
    return change


def _stored(policy: Policy | StoredPolicy) -> StoredPolicy:
    return policy if isinstance(policy, StoredPolicy) else store_policy(policy)

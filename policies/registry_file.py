"""The registry's file: one SQLite database in WAL mode, a connection for each call, one writer at a time."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from policies.evidence import EvidenceError

APPLICATION = 0x7A6C6162  # "zlab" in the file's header
VERSION = 1
BUSY_S = 10.0  # how long to wait for another process's transaction
SCHEMA = (
    "CREATE TABLE policy (digest TEXT PRIMARY KEY, name TEXT NOT NULL, toml TEXT NOT NULL, sources TEXT NOT NULL)",
    """CREATE TABLE evidence (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, digest TEXT NOT NULL, name TEXT NOT NULL,
        code TEXT NOT NULL, model TEXT NOT NULL, gpu TEXT NOT NULL, content TEXT NOT NULL,
        added_at TEXT NOT NULL, added_by TEXT NOT NULL)""",
    # how a policy stands where; `change` is the one that brought it there, for a live one that of its promotion
    """CREATE TABLE standing (
        model TEXT NOT NULL, gpu TEXT NOT NULL, digest TEXT NOT NULL REFERENCES policy (digest),
        stage TEXT NOT NULL CHECK (stage IN ('candidate', 'validated', 'canary', 'live', 'retired')),
        since TEXT NOT NULL, change INTEGER NOT NULL REFERENCES change (number), PRIMARY KEY (model, gpu, digest))""",
    "CREATE UNIQUE INDEX one_live ON standing (model, gpu) WHERE stage = 'live'",
    "CREATE UNIQUE INDEX one_canary ON standing (model, gpu) WHERE stage = 'canary'",
    # every change there was; `below` is the change whose policy was live before, to which a rollback returns
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
    """What the registry refuses, with what is missing; or a file that is none, or that another process holds."""


class RegistryFile:
    """Opens the file for each call, so that threads and processes may share it; makes it when it is not there."""

    def __init__(self, path: Path | str, create: bool = True) -> None:
        """Raise RegistryError when the file is no registry, or not there and not to be made."""
        self.path = Path(path)
        if not create and not self.path.exists():
            raise RegistryError(f"no registry at {self.path}: `zlab validate ... --registry {self.path}` makes one")
        if not self.path.parent.is_dir():
            raise RegistryError(f"registry {self.path}: there is no folder {self.path.parent}")
        with self._open() as connection:
            self._prepare(connection)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that sees one moment of the registry."""
        with self._open() as connection:
            connection.execute("BEGIN")
            yield connection
            connection.execute("ROLLBACK")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A connection in a transaction that is alone: all of what is done in it happens, or nothing."""
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
            with closing(sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)) as connection:
                connection.row_factory = sqlite3.Row
                connection.execute("PRAGMA foreign_keys = ON")
                connection.execute("PRAGMA synchronous = FULL")
                yield connection
        except sqlite3.OperationalError as error:
            if "locked" in str(error) or "busy" in str(error):
                raise RegistryError(
                    f"registry {self.path}: another process has been writing for {BUSY_S:.0f} s; nothing was changed"
                ) from error
            raise RegistryError(f"registry {self.path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise RegistryError(f"registry {self.path}: {error}") from error

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN")  # header and tables of one moment: another process may be making them
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
        """The version of the tables, 0 of an empty file. Raises RegistryError on what is none of ours."""
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        num_tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if num_tables and application != APPLICATION:
            raise RegistryError(f"registry {self.path}: is another program's database")
        if num_tables and version != VERSION:
            raise RegistryError(f"registry {self.path}: version {version} is not one this version reads ({VERSION})")
        return version if num_tables else 0

    @staticmethod
    def _to_wal(connection: sqlite3.Connection) -> None:
        """Readers go on while one writes. Changing the mode does not wait for other processes: ask again."""
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

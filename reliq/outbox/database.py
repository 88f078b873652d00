"""The relay's own connection to the database: PostgreSQL by psycopg, or a file of SQLite."""

from __future__ import annotations

import os
import re
import select
import sqlite3
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from urllib.parse import unquote

from reliq import distribution
from reliq.errors import ConfigurationError
from reliq.outbox.statements import percent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reliq.outbox.tables import Dialect

_SCHEME = re.compile(r"(?P<dialect>postgresql|postgres|sqlite)(?:\+\w+)?://")
_WANTED = "a database URL must be postgresql://USER:PASSWORD@HOST:PORT/NAME or sqlite:///PATH"
#: A database that takes longer to answer is away.
ANSWER_SECONDS = 5
#: `RETURNING` came with this release of SQLite.
OLDEST_SQLITE = (3, 35)
#: libpq's own settings, where the URL has none: a connection that died without a word is given up after 20 s.
_CONNECTING = {
    "connect_timeout": str(ANSWER_SECONDS),
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "2",
    "tcp_user_timeout": "20000",
    "application_name": "reliq-relay",
}
#: A transaction of a relay whose process stands still ends after this time, and a relay waits this long for a lock.
STUCK_SECONDS = 10


@runtime_checkable
class Database(Protocol):
    """
    One connection, opened when it is first used and anew after `close`.

    Attributes:
        dialect: which SQL it takes.
        away: the exceptions of its library: the database cannot be reached, or refuses a statement.
    """

    dialect: Dialect
    away: tuple[type[Exception], ...]

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Run a statement in the transaction that it begins when there is none; return its rows."""

    def commit(self) -> None:
        """Commit the transaction; do nothing when there is none."""

    def wait(self, channel: str, seconds: float) -> None:
        """Wait until `channel` says that there is something new, until `poke`, or for so many seconds."""

    def poke(self) -> None:
        """End a wait, of another thread; it may be the next one."""

    def close(self) -> None:
        """Close the connection, and take back what was not committed."""


def database(url: Any) -> Database:
    """
    Return the connection to the database that `url` names: a text, SQLAlchemy's URL or engine, or such a connection.

    Raises:
        ConfigurationError: it names none that a relay can use.
    """
    if isinstance(url, Database):
        return url
    given = getattr(url, "url", url)
    text = given.render_as_string(hide_password=False) if hasattr(given, "render_as_string") else given
    found = _SCHEME.match(text) if isinstance(text, str) else None
    if found is None:
        shown = text.partition(":")[0][:20] + ":…" if isinstance(text, str) else type(url).__name__
        raise ConfigurationError(f"{_WANTED}, not {shown!r}")
    rest = text[found.end() :]
    if found["dialect"] == "sqlite":
        return SqliteDatabase(_path(rest))
    return PostgresDatabase(f"postgresql://{rest}")


class Waiter:
    """A wait in one thread that another can end."""

    def __init__(self) -> None:
        self._end, self._poke = os.pipe()
        os.set_blocking(self._end, False)
        os.set_blocking(self._poke, False)

    def wait(self, seconds: float, *others: int) -> bool:
        """Wait until `poke`, or until one of the file descriptors `others` can be read; say whether one can."""
        ready, _, _ = select.select([self._end, *others], [], [], seconds)
        if self._end in ready:
            os.read(self._end, 512)
        return any(one in ready for one in others)

    def poke(self) -> None:
        """End the wait."""
        try:
            os.write(self._poke, b"1")
        except BlockingIOError:
            return  # it is full of earlier ones

    def __del__(self) -> None:
        os.close(self._end)
        os.close(self._poke)


class PostgresDatabase:
    """PostgreSQL, by psycopg 3."""

    dialect: Dialect = "postgresql"

    def __init__(self, url: str) -> None:
        try:
            self._psycopg: Any = import_module("psycopg")
        except ImportError:
            raise ConfigurationError(distribution.missing("a relay of PostgreSQL", "psycopg 3", "psycopg")) from None
        self.away: tuple[type[Exception], ...] = (self._psycopg.Error,)
        try:
            given = self._psycopg.conninfo.conninfo_to_dict(url)
        except self._psycopg.ProgrammingError:
            raise ConfigurationError(f"{_WANTED}; this one cannot be read") from None
        self._settings = {**_CONNECTING, **given}
        self._waiter = Waiter()
        self._connection: Any = None
        self._channel = ""
        self._was_notified = False

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """See `Database`."""
        connection = self._open()
        if connection.info.transaction_status == self._psycopg.pq.TransactionStatus.IDLE:
            # For this transaction alone: behind a pooler the next one may have another connection. The last of them is for
            # a relay that stood still while the server was sending rows.
            names = ("lock_timeout", "idle_in_transaction_session_timeout", "tcp_user_timeout")
            connection.execute("; ".join(f"SET LOCAL {name} = '{STUCK_SECONDS}s'" for name in names))
        cursor = connection.execute(percent(sql), values or {}, binary=True)
        rows: list[tuple[Any, ...]] = cursor.fetchall() if cursor.description else []
        return rows

    def commit(self) -> None:
        """See `Database`."""
        if self._connection is not None:
            self._connection.commit()

    def wait(self, channel: str, seconds: float) -> None:
        """See `Database`."""
        connection = self._open()
        if self._channel != channel:
            connection.execute(f'LISTEN "{channel}"')
            connection.commit()
            self._channel = channel
            return  # what was committed before was told to nobody
        if not self._was_notified and self._waiter.wait(seconds, connection.fileno()):
            connection.pgconn.consume_input()
            while connection.pgconn.notifies():
                pass
        self._was_notified = False

    def poke(self) -> None:
        """See `Database`."""
        self._waiter.poke()

    def close(self) -> None:
        """See `Database`."""
        connection, self._connection, self._channel = self._connection, None, ""
        if connection is not None:
            connection.close()

    def _open(self) -> Any:
        if self._connection is None:
            # No statement is prepared: behind a pooler each transaction may have another connection.
            made = self._psycopg.connect(**self._settings, prepare_threshold=None)
            made.add_notify_handler(self._notified)
            # A later snapshot for each statement: the lock of a relay is waited for before its calls are read.
            made.isolation_level = self._psycopg.IsolationLevel.READ_COMMITTED
            self._connection = made
        return self._connection

    def _notified(self, _notify: Any) -> None:
        """Note what came while a statement ran."""
        self._was_notified = True


class SqliteDatabase:
    """A file of SQLite; transactions begin as writers, so that none fails half-way because of another."""

    dialect: Dialect = "sqlite"

    def __init__(self, path: str) -> None:
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            raise ConfigurationError(f"a relay needs SQLite 3.35 or newer, not {sqlite3.sqlite_version}")
        self.away: tuple[type[Exception], ...] = (sqlite3.Error,)
        self._path = path
        self._waiter = Waiter()
        self._connection: sqlite3.Connection | None = None

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """See `Database`."""
        connection = self._open()
        if not connection.in_transaction:
            connection.execute("BEGIN IMMEDIATE")
        return connection.execute(sql, values or {}).fetchall()

    def commit(self) -> None:
        """See `Database`."""
        if self._connection is not None and self._connection.in_transaction:
            self._connection.execute("COMMIT")

    def wait(self, _channel: str, seconds: float) -> None:
        """See `Database`."""
        self._waiter.wait(seconds)

    def poke(self) -> None:
        """See `Database`."""
        self._waiter.poke()

    def close(self) -> None:
        """See `Database`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            # A file that is not there is not made: its tables would be missing.
            self._connection = sqlite3.connect(
                f"file:{self._path}?mode=rw",
                uri=True,
                timeout=ANSWER_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
        return self._connection


def _path(rest: str) -> str:
    """Return the path of a file of SQLite, of what follows `sqlite://`; raise ConfigurationError when it names none."""
    path = rest.partition("?")[0]
    if not path.startswith("/") or path in ("/", "/:memory:"):
        raise ConfigurationError(f"{_WANTED}; of SQLite a relay needs the path of a file")
    return unquote(path[1:]).replace("?", "%3f").replace("#", "%23")

"""
The SQL statements of the relay on the outbox, and its connection to PostgreSQL (psycopg 3) or SQLite.

The relay stores a publish call and the numbers of its rows before it sends the call to Redis. So if a reply is missing,
any relay can repeat the call. After the reply, the rows are marked as sent. No transaction is open while the relay
waits for Redis.
"""

from __future__ import annotations

import json
import os
import re
import select
import sqlite3
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from zlib import crc32

from reliq import distribution
from reliq.errors import ConfigurationError
from reliq.outbox.tables import NOW_MS, Dialect, Tables, percent
from reliq.settings import READ_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_SCHEME = re.compile(r"(?P<dialect>postgresql|postgres|sqlite)(?:\+\w+)?://")
_URL_FORMS = "postgresql://USER:PASSWORD@HOST:PORT/NAME or sqlite:///PATH"
#: A database counts as unavailable if a connection (PostgreSQL) or its lock (SQLite) takes longer than this.
ANSWER_SECONDS = 5
#: The oldest supported version of SQLite. It is the first version with `RETURNING`.
OLDEST_SQLITE = (3, 35)
#: libpq settings that are used unless the URL contains them. With them, libpq detects a dead connection after 20 s.
_CONNECTING = {
    "connect_timeout": str(ANSWER_SECONDS),
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "2",
    "tcp_user_timeout": "20000",
    "application_name": "reliq-relay",
}
#: PostgreSQL ends the transaction of a relay that hangs for this long. Other relays wait as long for its lock.
STUCK_SECONDS = 10
#: The column `note` of a row that may have been sent before and must be sent again. For other unsent rows, `note` is
#: empty, or contains why a relay refused the row.
AGAIN = "again"
_CAN_BE_TAKEN = f"sent_ms IS NULL AND note IN ('', '{AGAIN}')"
_IS_REFUSED = f"sent_ms IS NULL AND note NOT IN ('', '{AGAIN}')"
#: SQL for the start of the column `note`. For a refused row, it contains the version of reliq that refused the row.
_START = "substr(note, 1, 60)"
_REFUSED_BY = re.compile(r"refused by reliq ([\d.]+)")
#: One transaction deletes at most this many rows.
DELETE_LIMIT = 5000
#: A relay counts at most this many unsent rows, to limit the load on the database.
COUNT_LIMIT = 100_000
#: One round of a relay repeats at most this many publish calls.
OVERDUE_LIMIT = 20
#: If a publish call has no outcome after 10 s, the first relay that finds it repeats the call.
#: A failed publish call is repeated after 5 s, then after 10, 20, 40 and 80 s, and then every 80 s.
OVERDUE_MS = 10_000
FAILED_MS = 5000
DOUBLINGS = 4
#: SQL that selects the numbers of all rows that belong to an unfinished publish call.
_OF_CALLS: dict[Dialect, str] = {
    "postgresql": "SELECT unnest(seqs) FROM {calls}",
    "sqlite": "SELECT value FROM {calls}, json_each({calls}.seqs)",
}
#: SQL that tests whether a value is in the array parameter `name`.
_AMONG: dict[Dialect, str] = {
    "postgresql": "= ANY(CAST(:{name} AS {kind}[]))",
    "sqlite": "IN (SELECT value FROM json_each(:{name}))",
}


class Database:
    """
    A connection to the database. The first use opens it. After `close`, the next use opens it again.

    Attributes:
        dialect: the SQL dialect.
        away: the exception classes that the database library raises if the database is unavailable or refuses a
            statement.
    """

    dialect: Dialect
    away: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        self._connection: Any = None
        self._end, self._poke = os.pipe()
        os.set_blocking(self._end, False)
        os.set_blocking(self._poke, False)

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Run an SQL statement and return its rows. If no transaction is open, begin one."""
        raise NotImplementedError

    def commit(self) -> None:
        """Commit the open transaction, if there is one."""
        if self._connection is not None:
            self._connection.commit()

    def wait(self, _channel: str, seconds: float) -> None:
        """Wait at most `seconds` for a notification of PostgreSQL or a call of `poke`."""
        self._select(seconds)

    def poke(self) -> None:
        """End the `wait` of another thread. If no thread is waiting, the next `wait` ends immediately."""
        with suppress(BlockingIOError):  # the pipe is full, so the `wait` will end without this byte
            os.write(self._poke, b"1")

    def close(self) -> None:
        """Close the connection. The database rolls back an open transaction."""
        connection = self._connection
        self._connection = None
        if connection is not None:
            connection.close()

    def __del__(self) -> None:
        os.close(self._end)
        os.close(self._poke)

    def _select(self, seconds: float, *others: int) -> bool:
        """Wait for `poke`, or for data on the file descriptors `others`. Return whether one of `others` has data."""
        ready, _, _ = select.select([self._end, *others], [], [], seconds)
        if self._end in ready:
            os.read(self._end, 512)
        return any(other in ready for other in others)


def database(url: Any) -> Database:
    """
    Return a connection for a relay. It is opened at its first use.

    Args:
        url: a URL text, a URL or an engine of SQLAlchemy, or a `Database`, which is returned unchanged.

    Raises:
        ConfigurationError: a relay cannot use this database.
    """
    if isinstance(url, Database):
        return url
    given = getattr(url, "url", url)
    text = given.render_as_string(hide_password=False) if hasattr(given, "render_as_string") else given
    match = _SCHEME.match(text) if isinstance(text, str) else None
    if match is None:
        shown = text.partition(":")[0][:20] + ":…" if isinstance(text, str) else type(url).__name__
        raise ConfigurationError(f"a database URL must be {_URL_FORMS}, not {shown!r}")
    rest = text[match.end() :]
    if match["dialect"] != "sqlite":
        return PostgresDatabase(f"postgresql://{rest}")
    path = rest.partition("?")[0]
    if not path.startswith("/") or path in ("/", "/:memory:"):
        raise ConfigurationError(f"a database URL must be {_URL_FORMS}; a relay cannot use a database in memory")
    return SqliteDatabase(unquote(path[1:]).replace("?", "%3f").replace("#", "%23"))


class PostgresDatabase(Database):
    """A connection to PostgreSQL with psycopg 3."""

    dialect: Dialect = "postgresql"

    def __init__(self, url: str) -> None:
        super().__init__()
        try:
            self._psycopg: Any = import_module("psycopg")
        except ImportError:
            raise ConfigurationError(distribution.missing("a relay of PostgreSQL", "psycopg 3", "psycopg")) from None
        self.away = (self._psycopg.Error,)
        try:
            given = self._psycopg.conninfo.conninfo_to_dict(url)
        except self._psycopg.ProgrammingError:
            raise ConfigurationError(f"a database URL must be {_URL_FORMS}; psycopg cannot parse this URL") from None
        self._settings = {**_CONNECTING, **given}
        self._channel = ""
        self._notifications = deque[Any](maxlen=1)  # arrived during a statement; ends the next `wait`

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Run an SQL statement and return its rows, see `Database.query`."""
        connection = self._open()
        if connection.info.transaction_status == self._psycopg.pq.TransactionStatus.IDLE:
            # Use SET LOCAL, because with a connection pooler the next transaction may use another connection.
            # tcp_user_timeout ends the transaction of a relay that stops reading while the server sends rows.
            names = ("lock_timeout", "idle_in_transaction_session_timeout", "tcp_user_timeout")
            connection.execute("; ".join(f"SET LOCAL {name} = '{STUCK_SECONDS}s'" for name in names))
        cursor = connection.execute(percent(sql), values or {}, binary=True)
        rows: list[tuple[Any, ...]] = cursor.fetchall() if cursor.description else []
        return rows

    def wait(self, channel: str, seconds: float) -> None:
        """Wait at most `seconds` for a notification on `channel` or a call of `poke`."""
        connection = self._open()
        if self._channel != channel:
            connection.execute(f'LISTEN "{channel}"')
            connection.commit()
            self._channel = channel
            return  # there were no notifications before LISTEN, so the relay must check the table
        if not self._notifications and self._select(seconds, connection.fileno()):
            connection.pgconn.consume_input()
            while connection.pgconn.notifies():
                pass
        self._notifications.clear()

    def close(self) -> None:
        """Close the connection. The database rolls back an open transaction."""
        self._channel = ""
        super().close()

    def _open(self) -> Any:
        if self._connection is None:
            # Use no prepared statements, because with a connection pooler each transaction may use another connection.
            connection = self._psycopg.connect(**self._settings, prepare_threshold=None)
            connection.add_notify_handler(self._notifications.append)
            # With READ COMMITTED, a relay that has waited for the lock sees the calls that other relays have committed.
            connection.isolation_level = self._psycopg.IsolationLevel.READ_COMMITTED
            self._connection = connection
        return self._connection


class SqliteDatabase(Database):
    """
    A connection to an SQLite file.

    Each transaction takes the write lock when it begins. If it took the lock later, a concurrent writer could make it
    fail.
    """

    dialect: Dialect = "sqlite"
    away = (sqlite3.Error,)

    def __init__(self, path: str) -> None:
        super().__init__()
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            raise ConfigurationError(f"a relay needs SQLite 3.35 or newer, not {sqlite3.sqlite_version}")
        self._path = path

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Run an SQL statement and return its rows, see `Database.query`."""
        if self._connection is None:
            # With mode=rw, a missing file is an error. A new file would have no tables.
            self._connection = sqlite3.connect(
                f"file:{self._path}?mode=rw",
                uri=True,
                timeout=ANSWER_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
        if not self._connection.in_transaction:
            self._connection.execute("BEGIN IMMEDIATE")
        rows: list[tuple[Any, ...]] = self._connection.execute(sql, values or {}).fetchall()
        return rows


@dataclass(frozen=True, slots=True)
class StoredRow:
    """
    An unsent row of the outbox, which is a message to publish.

    Attributes:
        seq: the number of the row.
        queue: the text that names the queue; in the Go layout, the layout and the name. `Keys.registered` parses it.
        id: the message id.
        terms: the publish options as JSON, see `RowTerms`.
        value: the encoded message.
        age_ms: how many ms ago the row was inserted, by the clock of the database.
        note: AGAIN if the row may have been sent before; otherwise empty.
    """

    seq: int
    queue: str
    id: str
    terms: str
    value: bytes
    age_ms: int
    note: str


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """
    A row of the outbox that a relay refused, because it could not publish the message.

    Attributes:
        age_ms: how many ms ago the row was inserted, by the clock of the database.
        note: the version of reliq that refused the row, and the reason.
    """

    seq: int
    queue: str
    id: str
    age_ms: int
    note: str


@dataclass(frozen=True, slots=True)
class OutboxLook:
    """
    The backlog of the outbox.

    Attributes:
        waiting: the number of unsent rows, including refused rows; at most COUNT_LIMIT.
        oldest_seconds: the age of the oldest unsent row in seconds; 0 if there are no unsent rows.
    """

    waiting: int
    oldest_seconds: float


def _version_numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


class Store:
    """
    Runs the SQL statements of a relay on the outbox and inbox tables.

    Call `begin` before the other methods, and `database.commit` after them. Only `refused`, `again`, `clean` and `look`
    need no `begin`, and commit by themselves.
    """

    def __init__(self, database: Database, prefix: str) -> None:
        self.database = database
        tables = Tables.of(prefix)
        self._outbox = tables.outbox
        self._calls = tables.calls
        self._inbox = tables.inbox
        self._now = NOW_MS[database.dialect]
        self._of_calls = _OF_CALLS[database.dialect].format(calls=tables.calls)
        self._among = _AMONG[database.dialect]
        self._columns = f"seq, queue, id, terms, value, {self._now} - made_ms, note"

    def begin(self) -> None:
        """Begin a transaction. Until it ends, other relays wait in their own `begin`."""
        if self.database.dialect == "postgresql":
            self.database.query(f"SELECT pg_advisory_xact_lock({crc32(self._calls.encode())})")

    def waiting(self, limit: int) -> list[StoredRow]:
        """
        Return the first unsent rows that belong to no publish call, but no rows of queues with failed publish calls.

        Args:
            limit: the largest number of rows. Fewer rows are returned if their values together exceed 8 MiB.
        """
        first = (
            f"SELECT * FROM {self._outbox} WHERE {_CAN_BE_TAKEN} AND queue NOT IN (SELECT queue FROM {self._calls} WHERE failures > 0) AND seq NOT IN ({self._of_calls}) "
            "ORDER BY seq LIMIT :limit"
        )
        summed = f"SELECT *, sum(length(value)) OVER (ORDER BY seq) AS total FROM ({first}) AS first_rows"
        rows = self.database.query(
            f"SELECT {self._columns} FROM ({summed}) AS summed WHERE total - length(value) < {READ_BYTES} ORDER BY seq",
            {"limit": limit},
        )
        return [StoredRow(*row) for row in rows]

    def hurry(self, queues: Sequence[str] | None = None) -> None:
        """
        Let relays repeat unfinished publish calls immediately.

        Args:
            queues: only the failed publish calls of these queues are repeated, and relays take new rows of these queues
                again. If None, all unfinished publish calls are repeated.
        """
        if queues is None:
            self.database.query(f"UPDATE {self._calls} SET again_ms = {self._now}")
        else:
            self.database.query(
                f"UPDATE {self._calls} SET again_ms = {self._now}, failures = 0 "
                f"WHERE failures > 0 AND queue {self._among.format(name='queues', kind='text')}",
                {"queues": self._array(queues)},
            )

    def overdue(self) -> dict[str, list[StoredRow]]:
        """Return the publish calls that must be repeated now: for each call number, the unsent rows of the call."""
        late = f"SELECT call_number FROM {self._calls} WHERE again_ms <= {self._now}"
        calls = self.database.query(
            f"UPDATE {self._calls} SET again_ms = {self._now} + {OVERDUE_MS} WHERE call_number IN "
            f"({late} ORDER BY again_ms LIMIT {OVERDUE_LIMIT}) RETURNING call_number, seqs"
        )
        rows_of = (
            f"SELECT {self._columns} FROM {self._outbox} "
            f"WHERE sent_ms IS NULL AND seq {self._among.format(name='seqs', kind='bigint')} ORDER BY seq"
        )
        # The column `seqs` has the format that `_array` returns, so its value can be passed as a parameter.
        return {
            number: [StoredRow(*row) for row in self.database.query(rows_of, {"seqs": seqs})] for number, seqs in calls
        }

    def note_call(self, number: str, queue: str, seqs: Sequence[int]) -> None:
        """Store a new publish call and the numbers of its rows, before the relay sends the call."""
        self.database.query(
            f"INSERT INTO {self._calls} (call_number, queue, again_ms, seqs) "
            f"VALUES (:number, :queue, {self._now} + {OVERDUE_MS}, :seqs)",
            {"number": number, "queue": queue, "seqs": self._array(seqs)},
        )

    def note_failed(self, calls: Sequence[str]) -> None:
        """Mark publish calls as failed. Relays take no more rows of their queues until a repeated call succeeds."""
        if calls:
            doublings = f"CASE WHEN failures < {DOUBLINGS} THEN failures ELSE {DOUBLINGS} END"
            self.database.query(
                f"UPDATE {self._calls} SET failures = failures + 1, again_ms = {self._now} + {FAILED_MS} * (1 << {doublings}) "
                f"WHERE call_number {self._among.format(name='calls', kind='text')}",
                {"calls": self._array(calls)},
            )

    def note_sent(self, calls: Sequence[str], seqs: Sequence[int], *, keep: bool) -> None:
        """Delete publish calls that Redis has run. Mark their rows `seqs` as sent; if `keep` is false, delete them."""
        sent = f"UPDATE {self._outbox} SET sent_ms = {self._now}" if keep else f"DELETE FROM {self._outbox}"
        self._end(calls, sent, seqs)

    def give_up(self, calls: Sequence[str], seqs: Sequence[int]) -> None:
        """
        Delete publish calls that published nothing, so that relays take their rows again.

        Args:
            calls: the numbers of the publish calls.
            seqs: the numbers of those rows that an earlier call may have sent. They are marked with AGAIN.
        """
        self._end(calls, f"UPDATE {self._outbox} SET note = '{AGAIN}'", seqs)

    def note_refused(self, row: StoredRow, version: str, why: str) -> None:
        """Mark a row as refused by this `version` of reliq, for the reason `why`."""
        note = f"{row.note}{', ' if row.note else ''}refused by reliq {version}: {why}"
        self.database.query(f"UPDATE {self._outbox} SET note = :note WHERE seq = :seq", {"note": note, "seq": row.seq})

    def refused(self, limit: int) -> list[RefusedRow]:
        """Return the first `limit` rows that relays have refused."""
        rows = self.database.query(
            f"SELECT seq, queue, id, {self._now} - made_ms, note FROM {self._outbox} WHERE {_IS_REFUSED} ORDER BY seq LIMIT :limit",
            {"limit": limit},
        )
        self.database.commit()
        return [RefusedRow(*row) for row in rows]

    def retry(self, *, newer: str = "") -> int:
        """
        Let relays take refused rows again. Return the number of these rows.

        Args:
            newer: a version of reliq. Only rows that an older version has refused are taken again. If it is empty, all
                refused rows are taken again.
        """
        starts = self.database.query(f"SELECT DISTINCT {_START} FROM {self._outbox} WHERE {_IS_REFUSED}")
        before = f"CASE WHEN note LIKE '{AGAIN}%%' THEN '{AGAIN}' ELSE '' END"
        update = f"UPDATE {self._outbox} SET note = {before} WHERE {_IS_REFUSED} AND {_START} = :start RETURNING 1"
        return sum(
            len(self.database.query(update, {"start": start}))
            for (start,) in starts
            if not newer or ((by := _REFUSED_BY.search(start)) and _version_numbers(by[1]) < _version_numbers(newer))
        )

    def again(self, since_ms: int) -> int:
        """Let relays send all rows again that were sent in the last `since_ms`. Return the number of these rows."""
        rows = self.database.query(
            f"UPDATE {self._outbox} SET sent_ms = NULL, note = :note WHERE sent_ms >= {self._now} - :since RETURNING seq",
            {"note": AGAIN, "since": since_ms},
        )
        self.database.commit()
        return len(rows)

    def clean(self, keep_ms: int) -> tuple[int, int]:
        """Delete rows that were sent over `keep_ms` ago, and expired inbox rows. Return the number of each kind."""
        sent = self._delete(
            f"DELETE FROM {self._outbox} WHERE seq IN (SELECT seq FROM {self._outbox} "
            f"WHERE sent_ms < {self._now} - :keep ORDER BY seq LIMIT {DELETE_LIMIT}) RETURNING 1",
            {"keep": keep_ms},
        )
        key = "queue, id, publication_id"
        over = self._delete(
            f"DELETE FROM {self._inbox} WHERE ({key}) IN (SELECT {key} FROM {self._inbox} "
            f"WHERE keep_until_ms < {self._now} ORDER BY keep_until_ms LIMIT {DELETE_LIMIT}) RETURNING 1",
            {},
        )
        return sent, over

    def look(self) -> OutboxLook:
        """Count the unsent rows, and return their number and the age of the oldest row."""
        unsent = f"SELECT made_ms FROM {self._outbox} WHERE sent_ms IS NULL ORDER BY seq LIMIT {COUNT_LIMIT}"
        [(waiting, oldest)] = self.database.query(
            f"SELECT count(*), {self._now} - min(made_ms) FROM ({unsent}) AS unsent"
        )
        self.database.commit()
        return OutboxLook(int(waiting), max(0.0, int(oldest or 0) / 1000))

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for a notification of committed rows (PostgreSQL only) or a call of `poke`."""
        self.database.wait(self._outbox, seconds)

    def _end(self, calls: Sequence[str], change: str, seqs: Sequence[int]) -> None:
        """Delete finished publish calls, and run the SQL statement `change` on the rows with the numbers `seqs`."""
        if calls:
            rows = f"{change} WHERE seq {self._among.format(name='seqs', kind='bigint')}"
            self.database.query(rows, {"seqs": self._array(seqs)})
            over = f"DELETE FROM {self._calls} WHERE call_number {self._among.format(name='calls', kind='text')}"
            self.database.query(over, {"calls": self._array(calls)})

    def _array(self, values: Sequence[int | str]) -> Any:
        """Return `values` as one SQL parameter: an array for PostgreSQL, a JSON text for SQLite."""
        return json.dumps(list(values)) if self.database.dialect == "sqlite" else list(values)

    def _delete(self, sql: str, values: Mapping[str, int]) -> int:
        """Repeat the DELETE statement `sql` and commit, until no rows are left. Return the number of deleted rows."""
        count = 0
        while True:
            gone = len(self.database.query(sql, values))
            self.database.commit()
            count += gone
            if gone < DELETE_LIMIT:
                return count

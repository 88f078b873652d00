"""
The relay's access to the outbox over a separate connection to PostgreSQL (psycopg 3) or SQLite.

A call and its rows are stored before the call is made, so any relay can repeat a call without an answer. Rows are
marked as sent when Redis has answered. No transaction is open during a call to Redis.
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
#: A database that needs longer to connect or to release a lock counts as unavailable.
ANSWER_SECONDS = 5
#: The oldest supported version of SQLite: the first with `RETURNING`.
OLDEST_SQLITE = (3, 35)
#: Defaults for libpq settings that the URL does not contain. They detect a dead connection after 20 s.
_CONNECTING = {
    "connect_timeout": str(ANSWER_SECONDS),
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "2",
    "tcp_user_timeout": "20000",
    "application_name": "reliq-relay",
}
#: PostgreSQL ends the transaction of a hanging relay after this time. Other relays wait this long for its lock.
STUCK_SECONDS = 10
#: The note of a row that must be sent again. Other rows have an empty note, or the note of their refusal.
AGAIN = "again"
_CAN_BE_TAKEN = f"sent_ms IS NULL AND note IN ('', '{AGAIN}')"
_IS_REFUSED = f"sent_ms IS NULL AND note NOT IN ('', '{AGAIN}')"
#: SQL for the start of a note, which contains the version of reliq that refused the row.
_START = "substr(note, 1, 60)"
_REFUSED_BY = re.compile(r"refused by reliq ([\d.]+)")
#: One transaction deletes at most this many rows.
DELETE_LIMIT = 5000
#: At most this many unsent rows are counted, to limit the load on the database.
COUNT_LIMIT = 100_000
#: A round repeats at most this many unanswered calls.
OVERDUE_LIMIT = 20
#: A call without an answer is repeated after 10 s by the first relay that finds it.
#: A failed call is repeated after 5 s, then after 10, 20, 40 and 80 s.
OVERDUE_MS = 10_000
FAILED_MS = 5000
DOUBLINGS = 4
#: SQL that selects the numbers of all rows that belong to a call.
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
    A connection to the database. It opens at the first use, and again at the first use after `close`.

    Attributes:
        dialect: the SQL dialect.
        away: the exception classes of its library for an unavailable database or a refused statement.
    """

    dialect: Dialect
    away: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        self._connection: Any = None
        self._end, self._poke = os.pipe()
        os.set_blocking(self._end, False)
        os.set_blocking(self._poke, False)

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows; begin a transaction if none is open."""
        raise NotImplementedError

    def commit(self) -> None:
        """Commit the open transaction, if any."""
        if self._connection is not None:
            self._connection.commit()

    def wait(self, _channel: str, seconds: float) -> None:
        """Wait until a notification arrives or `poke` is called, at most `seconds`."""
        self._select(seconds)

    def poke(self) -> None:
        """End the current `wait` of another thread; if no thread waits, end the next `wait`."""
        with suppress(BlockingIOError):  # the pipe is full, so the wait ends anyway
            os.write(self._poke, b"1")

    def close(self) -> None:
        """Close the connection, which rolls back an open transaction."""
        connection = self._connection
        self._connection = None
        if connection is not None:
            connection.close()

    def __del__(self) -> None:
        os.close(self._end)
        os.close(self._poke)

    def _select(self, seconds: float, *others: int) -> bool:
        """Wait for `poke`, or for data on `others`; return whether a descriptor in `others` has data."""
        ready, _, _ = select.select([self._end, *others], [], [], seconds)
        if self._end in ready:
            os.read(self._end, 512)
        return any(other in ready for other in others)


def database(url: Any) -> Database:
    """
    Return the connection for a URL text, SQLAlchemy URL or engine; a `Database` is returned unchanged.

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
    """A connection to PostgreSQL over psycopg 3."""

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
        self._notifications = deque[Any](maxlen=1)  # notifications during a statement; they end the next `wait`

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Run a statement as `Database.query` does."""
        connection = self._open()
        if connection.info.transaction_status == self._psycopg.pq.TransactionStatus.IDLE:
            # SET LOCAL, because behind a connection pooler the next transaction may use another connection.
            # tcp_user_timeout ends the transaction of a relay that stopped reading while the server sends rows.
            names = ("lock_timeout", "idle_in_transaction_session_timeout", "tcp_user_timeout")
            connection.execute("; ".join(f"SET LOCAL {name} = '{STUCK_SECONDS}s'" for name in names))
        cursor = connection.execute(percent(sql), values or {}, binary=True)
        rows: list[tuple[Any, ...]] = cursor.fetchall() if cursor.description else []
        return rows

    def wait(self, channel: str, seconds: float) -> None:
        """Wait as `Database.wait` does."""
        connection = self._open()
        if self._channel != channel:
            connection.execute(f'LISTEN "{channel}"')
            connection.commit()
            self._channel = channel
            return  # commits before this LISTEN sent no notification, so check the table before waiting
        if not self._notifications and self._select(seconds, connection.fileno()):
            connection.pgconn.consume_input()
            while connection.pgconn.notifies():
                pass
        self._notifications.clear()

    def close(self) -> None:
        """Close the connection as `Database.close` does."""
        self._channel = ""
        super().close()

    def _open(self) -> Any:
        if self._connection is None:
            # No prepared statements, because behind a connection pooler each transaction may use another connection.
            connection = self._psycopg.connect(**self._settings, prepare_threshold=None)
            connection.add_notify_handler(self._notifications.append)
            # READ COMMITTED: after waiting for the lock, the relay must see the calls that other relays have committed.
            connection.isolation_level = self._psycopg.IsolationLevel.READ_COMMITTED
            self._connection = connection
        return self._connection


class SqliteDatabase(Database):
    """
    A connection to an SQLite file.

    A transaction takes the write lock when it begins. Otherwise a concurrent writer could make it fail later.
    """

    dialect: Dialect = "sqlite"
    away = (sqlite3.Error,)

    def __init__(self, path: str) -> None:
        super().__init__()
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            raise ConfigurationError(f"a relay needs SQLite 3.35 or newer, not {sqlite3.sqlite_version}")
        self._path = path

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Run a statement as `Database.query` does."""
        if self._connection is None:
            # mode=rw, because a missing file must be an error: a new file would have no tables
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
    A row of the outbox.

    Attributes:
        seq: the number of the row.
        queue: the queue's name with its layout, as `Keys.registered` reads it.
        id: the message id.
        terms: the publish options as JSON.
        value: the encoded message.
        age_ms: ms since the insert of the row, by the database's clock.
        note: AGAIN for a row that may have been sent before; otherwise empty.
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
    A row that a relay could not publish.

    Attributes:
        age_ms: ms since the insert of the row.
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
        waiting: the number of unsent rows, refused rows included, up to COUNT_LIMIT.
        oldest_seconds: the age of the oldest unsent row in seconds; 0 without unsent rows.
    """

    waiting: int
    oldest_seconds: float


def _version_numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


class Store:
    """
    The relay's statements on the outbox and inbox tables.

    Call `begin` before other methods, and commit `database` after them. `refused`, `again`, `clean` and `look` need no
    `begin`, and commit their own transaction.
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
        """Begin a transaction to take rows; other relays wait until this transaction ends."""
        if self.database.dialect == "postgresql":
            self.database.query(f"SELECT pg_advisory_xact_lock({crc32(self._calls.encode())})")

    def waiting(self, limit: int) -> list[StoredRow]:
        """
        Return the first unsent rows that belong to no call, except rows of queues with failed calls.

        Args:
            limit: the largest number of rows; fewer are returned if their values exceed 8 MiB.
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
        Let relays repeat calls immediately.

        Args:
            queues: repeat only the failed calls of these queues, and take new rows of these queues again. None: repeat
                all calls.
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
        """Return the calls that are due to be repeated: a dict from call number to the call's unsent rows."""
        late = f"SELECT call_number FROM {self._calls} WHERE again_ms <= {self._now}"
        calls = self.database.query(
            f"UPDATE {self._calls} SET again_ms = {self._now} + {OVERDUE_MS} WHERE call_number IN "
            f"({late} ORDER BY again_ms LIMIT {OVERDUE_LIMIT}) RETURNING call_number, seqs"
        )
        rows_of = (
            f"SELECT {self._columns} FROM {self._outbox} "
            f"WHERE sent_ms IS NULL AND seq {self._among.format(name='seqs', kind='bigint')} ORDER BY seq"
        )
        # `_array` has written the column `seqs`, so its value can be passed as a parameter unchanged.
        return {
            number: [StoredRow(*row) for row in self.database.query(rows_of, {"seqs": seqs})] for number, seqs in calls
        }

    def note_call(self, number: str, queue: str, seqs: Sequence[int]) -> None:
        """Store a call with the numbers of its rows, before the call is made."""
        self.database.query(
            f"INSERT INTO {self._calls} (call_number, queue, again_ms, seqs) "
            f"VALUES (:number, :queue, {self._now} + {OVERDUE_MS}, :seqs)",
            {"number": number, "queue": queue, "seqs": self._array(seqs)},
        )

    def note_failed(self, calls: Sequence[str]) -> None:
        """Mark calls as failed; no more rows of their queues are taken until a call of the queue succeeds."""
        if calls:
            doublings = f"CASE WHEN failures < {DOUBLINGS} THEN failures ELSE {DOUBLINGS} END"
            self.database.query(
                f"UPDATE {self._calls} SET failures = failures + 1, again_ms = {self._now} + {FAILED_MS} * (1 << {doublings}) "
                f"WHERE call_number {self._among.format(name='calls', kind='text')}",
                {"calls": self._array(calls)},
            )

    def note_sent(self, calls: Sequence[str], seqs: Sequence[int], *, keep: bool) -> None:
        """Delete answered calls; with `keep`, mark the rows `seqs` as sent, otherwise delete these rows."""
        sent = f"UPDATE {self._outbox} SET sent_ms = {self._now}" if keep else f"DELETE FROM {self._outbox}"
        self._end(calls, sent, seqs)

    def give_up(self, calls: Sequence[str], seqs: Sequence[int]) -> None:
        """
        Delete calls that published nothing, so that their rows are taken again.

        Args:
            calls: the call numbers.
            seqs: the rows that may have been sent by an earlier call; they are marked with AGAIN.
        """
        self._end(calls, f"UPDATE {self._outbox} SET note = '{AGAIN}'", seqs)

    def note_refused(self, row: StoredRow, version: str, why: str) -> None:
        """Mark a row that this `version` of reliq cannot publish, with the reason `why`."""
        note = f"{row.note}{', ' if row.note else ''}refused by reliq {version}: {why}"
        self.database.query(f"UPDATE {self._outbox} SET note = :note WHERE seq = :seq", {"note": note, "seq": row.seq})

    def refused(self, limit: int) -> list[RefusedRow]:
        """Return the first `limit` refused rows."""
        rows = self.database.query(
            f"SELECT seq, queue, id, {self._now} - made_ms, note FROM {self._outbox} WHERE {_IS_REFUSED} ORDER BY seq LIMIT :limit",
            {"limit": limit},
        )
        self.database.commit()
        return [RefusedRow(*row) for row in rows]

    def retry(self, *, newer: str = "") -> int:
        """
        Let relays take refused rows again; return the number of rows.

        Args:
            newer: a version of reliq; only rows that an older version has refused are taken. Empty: all refused rows.
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
        """Let relays send all rows again that were sent in the last `since_ms`; return the number of rows."""
        rows = self.database.query(
            f"UPDATE {self._outbox} SET sent_ms = NULL, note = :note WHERE sent_ms >= {self._now} - :since RETURNING seq",
            {"note": AGAIN, "since": since_ms},
        )
        self.database.commit()
        return len(rows)

    def clean(self, keep_ms: int) -> tuple[int, int]:
        """Delete rows sent over `keep_ms` ago, and expired inbox rows; return the number of each."""
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
        """Return the number of unsent rows, and the age of the oldest unsent row."""
        unsent = f"SELECT made_ms FROM {self._outbox} WHERE sent_ms IS NULL ORDER BY seq LIMIT {COUNT_LIMIT}"
        [(waiting, oldest)] = self.database.query(
            f"SELECT count(*), {self._now} - min(made_ms) FROM ({unsent}) AS unsent"
        )
        self.database.commit()
        return OutboxLook(int(waiting), max(0.0, int(oldest or 0) / 1000))

    def wait(self, seconds: float) -> None:
        """Wait until new rows are committed, at most `seconds`."""
        self.database.wait(self._outbox, seconds)

    def _end(self, calls: Sequence[str], change: str, seqs: Sequence[int]) -> None:
        """Delete finished calls, and run the SQL statement `change` on the rows `seqs`."""
        if calls:
            rows = f"{change} WHERE seq {self._among.format(name='seqs', kind='bigint')}"
            self.database.query(rows, {"seqs": self._array(seqs)})
            over = f"DELETE FROM {self._calls} WHERE call_number {self._among.format(name='calls', kind='text')}"
            self.database.query(over, {"calls": self._array(calls)})

    def _array(self, values: Sequence[int | str]) -> Any:
        """Return a sequence as one SQL parameter: an array in PostgreSQL, JSON in SQLite."""
        return json.dumps(list(values)) if self.database.dialect == "sqlite" else list(values)

    def _delete(self, sql: str, values: Mapping[str, int]) -> int:
        """Delete rows, at most DELETE_LIMIT in each transaction, until none is left; return the number of rows."""
        count = 0
        while True:
            gone = len(self.database.query(sql, values))
            self.database.commit()
            count += gone
            if gone < DELETE_LIMIT:
                return count

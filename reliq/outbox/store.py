"""
The outbox as its relay uses it, over a connection of the relay's own: PostgreSQL by psycopg, or a file of SQLite.

Rows are taken for calls, and noted as sent when Redis has answered. A call and its rows are written down before it is
made, so that any relay that finds it without an answer makes it again as it was. No transaction is open while Redis is
asked.
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
#: The note of a row that is to be sent for a second time, and the notes of rows that can be taken; every other row is refused.
AGAIN = "again"
_CAN_BE_TAKEN = f"sent_ms IS NULL AND note IN ('', '{AGAIN}')"
_IS_REFUSED = f"sent_ms IS NULL AND note NOT IN ('', '{AGAIN}')"
#: The first characters of the note of a refused row: they contain the version of reliq that refused it.
_START = "substr(note, 1, 60)"
_REFUSED_BY = re.compile(r"refused by reliq ([\d.]+)")
#: Rows are deleted so many at a time.
DELETE_LIMIT = 5000
#: A look counts at most so many rows that wait.
COUNT_LIMIT = 100_000
#: At most this many calls without an answer are taken up at a time.
OVERDUE_LIMIT = 20
#: A call without an answer is made again after 10 s, by the relay that finds it first; a call that failed after 5 s, then
#: 10, 20, 40 and 80 s.
OVERDUE_MS = 10_000
FAILED_MS = 5000
DOUBLINGS = 4
#: Every row that a call has; whether a number or a text is among those of a parameter.
_OF_CALLS: dict[Dialect, str] = {
    "postgresql": "SELECT unnest(seqs) FROM {calls}",
    "sqlite": "SELECT value FROM {calls}, json_each({calls}.seqs)",
}
_AMONG: dict[Dialect, str] = {
    "postgresql": "= ANY(CAST(:{name} AS {kind}[]))",
    "sqlite": "IN (SELECT value FROM json_each(:{name}))",
}


class Database:
    """
    One connection, opened when it is first used and anew after `close`.

    Attributes:
        dialect: which SQL it takes.
        away: the exceptions of its library: the database cannot be reached, or refuses a statement.
    """

    dialect: Dialect
    away: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        self._connection: Any = None
        self._end, self._poke = os.pipe()
        os.set_blocking(self._end, False)
        os.set_blocking(self._poke, False)

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Run a statement in the transaction that it begins when there is none; return its rows."""
        raise NotImplementedError

    def commit(self) -> None:
        """Commit the transaction; do nothing when there is none."""
        if self._connection is not None:
            self._connection.commit()

    def wait(self, _channel: str, seconds: float) -> None:
        """Wait until the channel says that there is something new, until `poke`, or for so many seconds."""
        self._select(seconds)

    def poke(self) -> None:
        """End a wait, of another thread; it may be the next one."""
        with suppress(BlockingIOError):  # it is full of earlier pokes
            os.write(self._poke, b"1")

    def close(self) -> None:
        """Close the connection, and take back what was not committed."""
        connection = self._connection
        self._connection = None
        if connection is not None:
            connection.close()

    def __del__(self) -> None:
        os.close(self._end)
        os.close(self._poke)

    def _select(self, seconds: float, *others: int) -> bool:
        """Wait until `poke`, or until one of the file descriptors `others` can be read; return whether one can."""
        ready, _, _ = select.select([self._end, *others], [], [], seconds)
        if self._end in ready:
            os.read(self._end, 512)
        return any(other in ready for other in others)


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
    match = _SCHEME.match(text) if isinstance(text, str) else None
    if match is None:
        shown = text.partition(":")[0][:20] + ":…" if isinstance(text, str) else type(url).__name__
        raise ConfigurationError(f"{_WANTED}, not {shown!r}")
    rest = text[match.end() :]
    if match["dialect"] != "sqlite":
        return PostgresDatabase(f"postgresql://{rest}")
    path = rest.partition("?")[0]
    if not path.startswith("/") or path in ("/", "/:memory:"):
        raise ConfigurationError(f"{_WANTED}; of SQLite a relay needs the path of a file")
    return SqliteDatabase(unquote(path[1:]).replace("?", "%3f").replace("#", "%23"))


class PostgresDatabase(Database):
    """PostgreSQL, by psycopg 3."""

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
            raise ConfigurationError(f"{_WANTED}; this one cannot be read") from None
        self._settings = {**_CONNECTING, **given}
        self._channel = ""
        self._notifications = deque[Any](maxlen=1)  # that came while a statement ran

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

    def wait(self, channel: str, seconds: float) -> None:
        """See `Database`."""
        connection = self._open()
        if self._channel != channel:
            connection.execute(f'LISTEN "{channel}"')
            connection.commit()
            self._channel = channel
            return  # a commit before this has notified no connection
        if not self._notifications and self._select(seconds, connection.fileno()):
            connection.pgconn.consume_input()
            while connection.pgconn.notifies():
                pass
        self._notifications.clear()

    def close(self) -> None:
        """See `Database`."""
        self._channel = ""
        super().close()

    def _open(self) -> Any:
        if self._connection is None:
            # No statement is prepared: behind a pooler each transaction may have another connection.
            connection = self._psycopg.connect(**self._settings, prepare_threshold=None)
            connection.add_notify_handler(self._notifications.append)
            # A later snapshot for each statement: the lock of a relay is waited for before its calls are read.
            connection.isolation_level = self._psycopg.IsolationLevel.READ_COMMITTED
            self._connection = connection
        return self._connection


class SqliteDatabase(Database):
    """A file of SQLite; transactions begin as writers, so that none fails half-way because of another."""

    dialect: Dialect = "sqlite"
    away = (sqlite3.Error,)

    def __init__(self, path: str) -> None:
        super().__init__()
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            raise ConfigurationError(f"a relay needs SQLite 3.35 or newer, not {sqlite3.sqlite_version}")
        self._path = path

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """See `Database`."""
        if self._connection is None:
            # A file that is not there is not made: its tables would be missing.
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
        age_ms: since it was written, by the database's clock.
        note: AGAIN, or empty.
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
    """A row that no relay takes, how long ago it was written, and why."""

    seq: int
    queue: str
    id: str
    age_ms: int
    note: str


@dataclass(frozen=True, slots=True)
class OutboxLook:
    """
    How much waits in the outbox.

    Attributes:
        waiting: rows that are not sent, refused ones included; counted up to COUNT_LIMIT.
        oldest_seconds: how long ago the first of them was written; 0 without one.
    """

    waiting: int
    oldest_seconds: float


def _version_numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


class Store:
    """
    The statements of a relay on one database.

    `begin` begins a transaction in which rows are taken and noted; the others are their own.
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
        """Begin to take rows; one relay at a time does, for only its calls say which it has."""
        if self.database.dialect == "postgresql":
            self.database.query(f"SELECT pg_advisory_xact_lock({crc32(self._calls.encode())})")

    def waiting(self, limit: int) -> list[StoredRow]:
        """Return up to `limit` rows that no call has, in their order, of up to 8 MiB or one; none of a queue whose call failed."""
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
        """Have all calls made again now; with `queues`, the failed calls of these, whose rows are taken again too."""
        if queues is None:
            self.database.query(f"UPDATE {self._calls} SET again_ms = {self._now}")
        else:
            self.database.query(
                f"UPDATE {self._calls} SET again_ms = {self._now}, failures = 0 "
                f"WHERE failures > 0 AND queue {self._among.format(name='queues', kind='text')}",
                {"queues": self._array(queues)},
            )

    def overdue(self) -> dict[str, list[StoredRow]]:
        """Take up calls that are to be made again; return the rows of each that are not sent."""
        late = f"SELECT call_number FROM {self._calls} WHERE again_ms <= {self._now}"
        calls = self.database.query(
            f"UPDATE {self._calls} SET again_ms = {self._now} + {OVERDUE_MS} WHERE call_number IN "
            f"({late} ORDER BY again_ms LIMIT {OVERDUE_LIMIT}) RETURNING call_number, seqs"
        )
        rows_of = (
            f"SELECT {self._columns} FROM {self._outbox} "
            f"WHERE sent_ms IS NULL AND seq {self._among.format(name='seqs', kind='bigint')} ORDER BY seq"
        )
        # A column that was written as an `_array` is one: as it was read, it is the parameter too.
        return {
            number: [StoredRow(*row) for row in self.database.query(rows_of, {"seqs": seqs})] for number, seqs in calls
        }

    def note_call(self, number: str, queue: str, seqs: Sequence[int]) -> None:
        """Write down which rows a call is going to publish."""
        self.database.query(
            f"INSERT INTO {self._calls} (call_number, queue, again_ms, seqs) "
            f"VALUES (:number, :queue, {self._now} + {OVERDUE_MS}, :seqs)",
            {"number": number, "queue": queue, "seqs": self._array(seqs)},
        )

    def note_failed(self, calls: Sequence[str]) -> None:
        """Note that Redis has refused or not confirmed calls; no rows of their queues are taken until a call succeeds again."""
        if calls:
            doublings = f"CASE WHEN failures < {DOUBLINGS} THEN failures ELSE {DOUBLINGS} END"
            self.database.query(
                f"UPDATE {self._calls} SET failures = failures + 1, again_ms = {self._now} + {FAILED_MS} * (1 << {doublings}) "
                f"WHERE call_number {self._among.format(name='calls', kind='text')}",
                {"calls": self._array(calls)},
            )

    def note_sent(self, calls: Sequence[str], seqs: Sequence[int], *, keep: bool) -> None:
        """Note that calls have their answers and their rows are sent; rows that are not to be kept are deleted."""
        sent = f"UPDATE {self._outbox} SET sent_ms = {self._now}" if keep else f"DELETE FROM {self._outbox}"
        self._end(calls, sent, seqs)

    def give_up(self, calls: Sequence[str], seqs: Sequence[int]) -> None:
        """Forget calls that have published nothing, so that their rows are taken anew; `seqs` may have been sent."""
        self._end(calls, f"UPDATE {self._outbox} SET note = '{AGAIN}'", seqs)

    def note_refused(self, row: StoredRow, version: str, why: str) -> None:
        """Note that this version of reliq cannot publish a row."""
        note = f"{row.note}{', ' if row.note else ''}refused by reliq {version}: {why}"
        self.database.query(f"UPDATE {self._outbox} SET note = :note WHERE seq = :seq", {"note": note, "seq": row.seq})

    def refused(self, limit: int) -> list[RefusedRow]:
        """Return the first refused rows."""
        rows = self.database.query(
            f"SELECT seq, queue, id, {self._now} - made_ms, note FROM {self._outbox} WHERE {_IS_REFUSED} ORDER BY seq LIMIT :limit",
            {"limit": limit},
        )
        self.database.commit()
        return [RefusedRow(*row) for row in rows]

    def retry(self, *, newer: str = "") -> int:
        """Have refused rows taken again, all or those that a version before `newer` has refused; return how many."""
        starts = self.database.query(f"SELECT DISTINCT {_START} FROM {self._outbox} WHERE {_IS_REFUSED}")
        before = f"CASE WHEN note LIKE '{AGAIN}%%' THEN '{AGAIN}' ELSE '' END"
        return sum(
            len(
                self.database.query(
                    f"UPDATE {self._outbox} SET note = {before} WHERE {_IS_REFUSED} AND {_START} = :start RETURNING 1",
                    {"start": start},
                )
            )
            for (start,) in starts
            if not newer or ((by := _REFUSED_BY.search(start)) and _version_numbers(by[1]) < _version_numbers(newer))
        )

    def again(self, since_ms: int) -> int:
        """Have rows that were sent in the last `since_ms` sent again; return how many."""
        rows = self.database.query(
            f"UPDATE {self._outbox} SET sent_ms = NULL, note = :note WHERE sent_ms >= {self._now} - :since RETURNING seq",
            {"note": AGAIN, "since": since_ms},
        )
        self.database.commit()
        return len(rows)

    def clean(self, keep_ms: int) -> tuple[int, int]:
        """Delete rows that were sent over `keep_ms` ago, and those of the inbox that are over; return how many of each."""
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
        """Count what waits."""
        unsent = f"SELECT made_ms FROM {self._outbox} WHERE sent_ms IS NULL ORDER BY seq LIMIT {COUNT_LIMIT}"
        [(waiting, oldest)] = self.database.query(
            f"SELECT count(*), {self._now} - min(made_ms) FROM ({unsent}) AS unsent"
        )
        self.database.commit()
        return OutboxLook(int(waiting), max(0.0, int(oldest or 0) / 1000))

    def wait(self, seconds: float) -> None:
        """Wait for a commit of new rows, or for so many seconds."""
        self.database.wait(self._outbox, seconds)

    def _end(self, calls: Sequence[str], change: str, seqs: Sequence[int]) -> None:
        """Make a change of the rows of calls that are over, and forget those calls."""
        if calls:
            rows = f"{change} WHERE seq {self._among.format(name='seqs', kind='bigint')}"
            self.database.query(rows, {"seqs": self._array(seqs)})
            over = f"DELETE FROM {self._calls} WHERE call_number {self._among.format(name='calls', kind='text')}"
            self.database.query(over, {"calls": self._array(calls)})

    def _array(self, values: Sequence[int | str]) -> Any:
        """Return numbers or texts as one parameter, or as the value of a column."""
        return json.dumps(list(values)) if self.database.dialect == "sqlite" else list(values)

    def _delete(self, sql: str, values: Mapping[str, int]) -> int:
        """Delete in pieces, each a transaction of its own; return how many rows."""
        count = 0
        while True:
            gone = len(self.database.query(sql, values))
            self.database.commit()
            count += gone
            if gone < DELETE_LIMIT:
                return count

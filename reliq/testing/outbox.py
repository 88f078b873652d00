"""Moving an outbox to the test's Redis: by a `Relay`, or within the transaction of the test itself."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from importlib import import_module
from typing import TYPE_CHECKING, Any

from reliq.outbox.relay import OutboxMover, Relay
from reliq.outbox.tables import check_dialect, percent
from reliq.outbox.transactions import wrong_kind
from reliq.redis.client import Clients

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reliq.outbox.tables import Dialect


def move(outbox: Any, prefix: str) -> int:
    """Move the rows of an outbox to the test's Redis: of a `Relay`, or those that a transaction sees; return how many."""
    relay = outbox if isinstance(outbox, Relay) else Relay(TransactionDatabase(outbox), prefix=prefix)
    with closing(OutboxMover(relay, Clients(None, ()))) as mover:
        return mover.move_all()


async def amove(outbox: Any, prefix: str) -> int:
    """As `move`; `outbox` may be an AsyncSession or AsyncConnection of SQLAlchemy."""
    if hasattr(outbox, "run_sync"):
        moved: int = await outbox.run_sync(move, prefix)
        return moved
    return move(outbox, prefix)


class TransactionDatabase:
    """
    The database of a relay within a transaction of the test: rows are read and marked in it, and nothing is committed.

    Args:
        tx: what `Queue.publish_in` takes in blocking code.
    """

    away: tuple[type[Exception], ...] = ()

    def __init__(self, tx: Any) -> None:
        self._tx = tx
        self._query, dialect = self._known()
        self.dialect: Dialect = check_dialect(dialect)

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Run a statement; return its rows."""
        return [tuple(row) for row in self._query(sql, values or {})]

    def commit(self) -> None:
        """Do nothing: the transaction is the test's."""

    def wait(self, _channel: str, _seconds: float) -> None:
        """Do nothing: a test does not wait for rows."""

    def poke(self) -> None:
        """Do nothing: no relay waits."""

    def close(self) -> None:
        """Do nothing: the connection is the test's."""

    def _known(self) -> tuple[Callable[[str, Mapping[str, Any]], Sequence[Any]], str]:
        """Return how the library of the transaction runs a statement, and the dialect of its database."""
        tx = self._tx
        if isinstance(tx, sqlite3.Connection):
            return self._sqlite, "sqlite"
        if hasattr(tx, "in_atomic_block"):
            return self._django, tx.vendor
        if hasattr(tx, "pgconn") and not hasattr(tx, "__aenter__"):
            return self._psycopg, "postgresql"
        if (hasattr(tx, "get_bind") or hasattr(tx, "dialect")) and not hasattr(tx, "run_sync"):
            return self._sqlalchemy, (tx if hasattr(tx, "dialect") else tx.get_bind()).dialect.name
        raise wrong_kind(tx, "a Relay, or what publish_in takes; in async code `await reliq.arelay(session)`")

    def _sqlite(self, sql: str, values: Mapping[str, Any]) -> Sequence[Any]:
        cursor = self._tx.cursor()
        cursor.row_factory = None  # the connection's own may make rows that are no tuples
        return cursor.execute(sql, values).fetchall()  # type: ignore[no-any-return]

    def _psycopg(self, sql: str, values: Mapping[str, Any]) -> Sequence[Any]:
        psycopg = import_module("psycopg")
        cursor = psycopg.Cursor(self._tx, row_factory=psycopg.rows.tuple_row)
        cursor.execute(percent(sql), values)
        return cursor.fetchall() if cursor.description else ()

    def _django(self, sql: str, values: Mapping[str, Any]) -> Sequence[Any]:
        with self._tx.cursor() as cursor:
            cursor.execute(percent(sql), values)
            return cursor.fetchall() if cursor.description else ()

    def _sqlalchemy(self, sql: str, values: Mapping[str, Any]) -> Sequence[Any]:
        result = self._tx.execute(import_module("sqlalchemy").text(sql), values)
        return result.all() if result.returns_rows else ()

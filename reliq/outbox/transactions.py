"""
Write a row of the outbox or the inbox in an open database transaction of the application.

The application may use SQLAlchemy 2, Django, psycopg 3, or sqlite3 of the standard library.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any, Protocol

from reliq.errors import ConfigurationError
from reliq.outbox.tables import RowTerms, Statement, Tables, check_dialect, explaining_missing_table, percent
from reliq.settings import Durability, milliseconds

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from reliq.keys import Keys
    from reliq.publish import PreparedMessage


_ACCEPTED = (
    "a Session or Connection of SQLAlchemy 2, a connection of Django, a psycopg 3 or sqlite3 Connection, in async code "
    "an AsyncSession or AsyncConnection of SQLAlchemy, or an AsyncConnection of psycopg"
)


class Transaction(Protocol):
    """A type for all supported sessions and connections of blocking code, for type checkers."""

    def commit(self) -> None:
        """Commit the transaction."""

    def rollback(self) -> None:
        """Roll back the transaction."""


class AsyncTransaction(Protocol):
    """A type for all supported sessions and connections of async code, for type checkers."""

    def commit(self) -> Awaitable[None]:
        """Commit the transaction."""

    def rollback(self) -> Awaitable[None]:
        """Roll back the transaction."""


def write(tx: Transaction, statement: Statement) -> int:
    """
    Run `statement` in the open transaction of `tx`, without a commit. Return the number of written rows.

    Raises:
        ConfigurationError: `tx` is not a supported session or connection or is in autocommit mode, or the table does
            not exist.
    """
    with explaining_missing_table(statement.table):
        written: int = _writer(tx, is_async=False)(tx, statement)
        return written


async def awrite(tx: AsyncTransaction, statement: Statement) -> int:
    """Async version of `write`."""
    with explaining_missing_table(statement.table):
        written: int = await _writer(tx, is_async=True)(tx, statement)
        return written


def publish_statement(message: PreparedMessage, keys: Keys, durability: Durability, prefix: str) -> Statement:
    """Return the statement that inserts `message` into the outbox."""
    terms = message.terms
    confirmation = None
    if durability.kind != "none":
        confirmation = (durability.kind, durability.count, durability.local, milliseconds(durability.timeout))
    given = terms._asdict()
    if given.pop("conflict"):
        raise ConfigurationError(
            "on_conflict cannot be used with an outbox, because several relays could publish an older body after a newer "
            "one: leave it out, or publish after the commit"
        )
    stored = RowTerms(**given, durability=confirmation, keyed=bool(message.line))
    values = {"queue": keys.entry, "id": message.id, "value": message.value, "terms": stored.text()}
    return Statement("publish", Tables.of(prefix), values)


def wrong_kind(wanted: str, tx: Any) -> ConfigurationError:
    """Return the error for a `tx` of the wrong type. `wanted` describes the supported types."""
    return ConfigurationError(f"the transaction must be {wanted}, not {type(tx).__module__}.{type(tx).__qualname__}")


def autocommit(how: str) -> ConfigurationError:
    """Return the error for a connection in autocommit mode. `how` explains how to begin a transaction."""
    return ConfigurationError(
        f"no transaction is open and the connection is in autocommit: the row would be committed by itself; {how}"
    )


def is_in_transaction(tx: Any) -> bool:
    """
    Return whether the application has opened a transaction on the Django connection `tx`.

    A transaction that Django's TestCase has opened for a test does not count, because it does not exist in production.
    """
    own_blocks = [block for block in tx.atomic_blocks if not block._from_testcase]  # noqa: SLF001  as durable=True
    return bool(own_blocks) or not (tx.in_atomic_block or tx.get_autocommit())


def _writer(tx: Any, *, is_async: bool) -> Any:
    """Return the function that writes with `tx`. Raise ConfigurationError if the type of `tx` is not supported."""
    for kind in type(tx).__mro__:
        if writers := _WRITERS.get(kind.__module__.partition(".")[0]):
            writer = writers[is_async]
            if isinstance(writer, str):
                raise wrong_kind(writer, tx)
            return writer
    raise wrong_kind(_ACCEPTED, tx)


def _write_sqlite(tx: Any, statement: Statement) -> int:
    if not isinstance(tx, sqlite3.Connection):
        raise wrong_kind("the sqlite3.Connection", tx)
    mode = getattr(tx, "autocommit", -1)  # -1 means that isolation_level applies
    begins_by_itself = mode is False or (mode is not True and tx.isolation_level is not None)
    if not (tx.in_transaction or begins_by_itself):
        raise autocommit("execute BEGIN IMMEDIATE first, and COMMIT at the end")
    return tx.execute(statement.sql("sqlite"), statement.values).rowcount


def _write_django(tx: Any, statement: Statement) -> int:
    if not hasattr(tx, "in_atomic_block"):
        raise wrong_kind("a connection of Django, such as django.db.connection or connections['default']", tx)
    dialect = check_dialect(tx.vendor)
    if not is_in_transaction(tx):
        raise autocommit("write `with transaction.atomic():` around it")
    with tx.cursor() as cursor:
        cursor.execute(percent(statement.sql(dialect)), dict(statement.values))
        rows: int = cursor.rowcount
    return rows


def _write_psycopg(tx: Any, statement: Statement) -> int:
    import psycopg  # noqa: PLC0415  already imported by the caller

    if not isinstance(tx, psycopg.Connection):
        raise wrong_kind("a psycopg.Connection; in async code use the method whose name begins with `a`", tx)
    sql = _psycopg_sql(tx, statement, "with connection.transaction():")
    # Use `psycopg.Cursor`, because a cursor class that the application has set may need other arguments.
    return _known_rows(psycopg.Cursor(tx).execute(sql, dict(statement.values)).rowcount)


async def _awrite_psycopg(tx: Any, statement: Statement) -> int:
    import psycopg  # noqa: PLC0415  as above

    if not isinstance(tx, psycopg.AsyncConnection):
        raise wrong_kind("a psycopg.AsyncConnection; in blocking code leave out the `a` of the method", tx)
    sql = _psycopg_sql(tx, statement, "async with connection.transaction():")
    return _known_rows((await psycopg.AsyncCursor(tx).execute(sql, dict(statement.values))).rowcount)


def _psycopg_sql(tx: Any, statement: Statement, begin: str) -> bytes:
    """Return the SQL of `statement` for psycopg. Raise ConfigurationError in autocommit mode without a transaction."""
    from psycopg.pq import TransactionStatus  # noqa: PLC0415  as above

    if tx.autocommit and tx.info.transaction_status == TransactionStatus.IDLE:
        raise autocommit(f"write `{begin}` around it")
    two_phase = bool(getattr(tx, "_tpc", None))  # `tpc_begin` sets this private attribute
    return percent(statement.sql("postgresql", two_phase=two_phase)).encode()


def _known_rows(rows: int) -> int:
    """Return `rows`. Raise ConfigurationError if it is negative, because psycopg is in pipeline mode."""
    if rows < 0:
        raise ConfigurationError(
            "in a pipeline of psycopg the number of written rows is not known: leave the pipeline first"
        )
    return rows


def _write_sqlalchemy(tx: Any, statement: Statement) -> int:
    from sqlalchemy import Connection, text  # noqa: PLC0415  already imported by the caller
    from sqlalchemy.exc import UnboundExecutionError  # noqa: PLC0415
    from sqlalchemy.orm import Session, scoped_session  # noqa: PLC0415

    if not isinstance(tx, Session | scoped_session | Connection):
        raise wrong_kind(
            "a Session or Connection of SQLAlchemy; for an AsyncSession use the method that begins with `a`", tx
        )
    try:
        connection = tx if isinstance(tx, Connection) else tx.connection()
    except UnboundExecutionError:
        raise ConfigurationError(
            "the Session has no default bind, so reliq cannot choose its database: give the "
            "connection of a mapped class, session.connection(bind_arguments={'mapper': Order})"
        ) from None
    if not connection.in_transaction():
        connection.begin()
    driver: Any = connection.connection.dbapi_connection
    if isinstance(driver, sqlite3.Connection) or connection.dialect.name == "sqlite":
        within = getattr(driver, "driver_connection", driver)  # for aiosqlite, `driver` is a wrapper of the connection
        commits_by_itself = driver.isolation_level is None and not getattr(within, "in_transaction", True)
    else:
        commits_by_itself = bool(getattr(driver, "autocommit", False))
    if commits_by_itself:
        raise autocommit("take an engine or connection whose isolation_level is not AUTOCOMMIT")
    dialect = check_dialect(connection.dialect.name)
    two_phase = hasattr(connection.get_transaction(), "prepare")
    return connection.execute(text(statement.sql(dialect, two_phase=two_phase)), dict(statement.values)).rowcount


async def _awrite_sqlalchemy(tx: Any, statement: Statement) -> int:
    # This import needs greenlet. Every application that uses async sessions of SQLAlchemy has installed it.
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session  # noqa: PLC0415

    if isinstance(tx, async_scoped_session):
        tx = tx()
    if not isinstance(tx, AsyncSession | AsyncConnection):
        raise wrong_kind("an AsyncSession or AsyncConnection of SQLAlchemy; in blocking code leave out the `a`", tx)
    return await tx.run_sync(_write_sqlalchemy, statement)


#: For each database library, the functions that write a row in blocking and in async code. If a library has no such
#: function, there is a text that tells the caller which transaction to use instead.
_WRITERS: dict[str, tuple[Any, Any]] = {
    "sqlalchemy": (_write_sqlalchemy, _awrite_sqlalchemy),
    "django": (
        _write_django,
        "an async transaction, and Django has none: call the method without `a` in sync_to_async",
    ),
    "psycopg": (_write_psycopg, _awrite_psycopg),
    "sqlite3": (
        _write_sqlite,
        "an async transaction, such as an AsyncSession; for sqlite3 leave out the `a` of the method",
    ),
}

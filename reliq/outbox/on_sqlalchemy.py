"""Transactions of SQLAlchemy 2: sessions and connections, blocking and async."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, text
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

from reliq.errors import ConfigurationError
from reliq.outbox.tables import check_dialect
from reliq.outbox.transactions import autocommit, wrong_kind

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    from reliq.outbox.tables import Statement


def write(tx: Session | scoped_session[Any] | Connection, statement: Statement) -> int:
    """Run `statement` in the transaction of `tx`, which it begins when there is none yet; return how many rows it wrote."""
    if not isinstance(tx, Session | scoped_session | Connection):
        raise wrong_kind(
            tx, "a Session or Connection of SQLAlchemy; for one of async code use the method that begins with `a`"
        )
    try:
        connection = tx if isinstance(tx, Connection) else tx.connection()
    except UnboundExecutionError:
        raise ConfigurationError(
            "the Session has no default bind, so reliq cannot choose its database: give the connection of a mapped class, "
            "session.connection(bind_arguments={'mapper': Order})"
        ) from None
    if _commits_by_itself(connection):
        raise autocommit("take an engine or connection whose isolation_level is not AUTOCOMMIT")
    dialect = check_dialect(connection.dialect.name)
    two_phase = hasattr(connection.get_transaction(), "prepare")
    return connection.execute(text(statement.sql(dialect, two_phase=two_phase)), dict(statement.values)).rowcount


async def awrite(tx: AsyncSession | async_scoped_session[Any] | AsyncConnection, statement: Statement) -> int:
    """As `write`, in async code. This module is the only one to import the async part of SQLAlchemy, which needs greenlet."""
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session  # noqa: PLC0415

    if isinstance(tx, async_scoped_session):
        tx = tx()
    if not isinstance(tx, AsyncSession | AsyncConnection):
        raise wrong_kind(tx, "an AsyncSession or AsyncConnection of SQLAlchemy; in blocking code leave out the `a`")
    return await tx.run_sync(write, statement)


def _commits_by_itself(connection: Connection) -> bool:
    """Say whether the driver's connection would commit each statement."""
    if not connection.in_transaction():
        connection.begin()
    driver: Any = connection.connection.dbapi_connection
    if isinstance(driver, sqlite3.Connection) or connection.dialect.name == "sqlite":
        within = getattr(driver, "driver_connection", driver)  # of aiosqlite
        return driver.isolation_level is None and not getattr(within, "in_transaction", True)
    return bool(getattr(driver, "autocommit", False))

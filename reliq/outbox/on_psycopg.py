"""Transactions of psycopg 3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.pq import TransactionStatus

from reliq.errors import ConfigurationError
from reliq.outbox.tables import percent
from reliq.outbox.transactions import autocommit, wrong_kind

if TYPE_CHECKING:
    from reliq.outbox.tables import Statement


def write(tx: psycopg.Connection[Any], statement: Statement) -> int:
    """Run `statement` on the connection `tx`; return how many rows it wrote."""
    if not isinstance(tx, psycopg.Connection):
        raise wrong_kind(tx, "a psycopg.Connection; in async code use the method whose name begins with `a`")
    _check(tx, "with connection.transaction():")
    # The connection's own cursor class may want other parameters.
    return _told(psycopg.Cursor(tx).execute(_sql(tx, statement), dict(statement.values)).rowcount)


async def awrite(tx: psycopg.AsyncConnection[Any], statement: Statement) -> int:
    """As `write`, in async code."""
    if not isinstance(tx, psycopg.AsyncConnection):
        raise wrong_kind(tx, "a psycopg.AsyncConnection; in blocking code leave out the `a` of the method")
    _check(tx, "async with connection.transaction():")
    return _told((await psycopg.AsyncCursor(tx).execute(_sql(tx, statement), dict(statement.values))).rowcount)


def _check(tx: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], how: str) -> None:
    if tx.autocommit and tx.info.transaction_status == TransactionStatus.IDLE:
        raise autocommit(f"write `{how}` around it")


def _sql(tx: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], statement: Statement) -> bytes:
    two_phase = bool(getattr(tx, "_tpc", None))  # set by tpc_begin; psycopg has no public name for it
    return percent(statement.sql("postgresql", two_phase=two_phase)).encode()


def _told(rows: int) -> int:
    """Return how many rows were written; raise ConfigurationError in a pipeline, where that is not known yet."""
    if rows < 0:
        raise ConfigurationError("in a pipeline of psycopg nobody knows yet whether a row was written: leave it before")
    return rows

"""Transactions of the standard library's sqlite3."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from reliq.outbox.transactions import autocommit, wrong_kind

if TYPE_CHECKING:
    from reliq.outbox.tables import Statement


def write(tx: sqlite3.Connection, statement: Statement) -> int:
    """Run `statement` on the connection `tx`; return how many rows it wrote."""
    check(tx)
    return tx.execute(statement.sql("sqlite"), statement.values).rowcount


async def awrite(tx: sqlite3.Connection, _statement: Statement) -> int:
    """Refuse: a sqlite3 connection blocks."""
    raise wrong_kind(tx, "one of async code, such as an AsyncSession; for sqlite3 leave out the `a` of the method")


def check(tx: sqlite3.Connection) -> None:
    """Raise ConfigurationError when the connection would commit a statement by itself."""
    if not isinstance(tx, sqlite3.Connection):
        raise wrong_kind(tx, "the sqlite3.Connection")
    mode = getattr(tx, "autocommit", -1)  # from Python 3.12 on; -1 means that isolation_level decides, as before
    begins_by_itself = mode is False or (mode is not True and tx.isolation_level is not None)
    if not (tx.in_transaction or begins_by_itself):
        raise autocommit("execute BEGIN IMMEDIATE first, and COMMIT at the end")

"""A statement goes into a transaction that somebody else has begun and will end."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from reliq.errors import ConfigurationError
from reliq.outbox.missing import missing

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from reliq.outbox.statements import Statement

#: The library of a transaction's class -> the module that knows it, which imports the library.
_KNOWN = {
    "sqlalchemy": "reliq.outbox.on_sqlalchemy",
    "django": "reliq.outbox.on_django",
    "psycopg": "reliq.outbox.on_psycopg",
    "sqlite3": "reliq.outbox.on_sqlite",
}
_ACCEPTED = (
    "a Session or Connection of SQLAlchemy 2, a connection of Django, a psycopg 3 or sqlite3 Connection, in async code "
    "an AsyncSession or AsyncConnection of SQLAlchemy, or an AsyncConnection of psycopg"
)


class Transaction(Protocol):
    """What all the transactions of blocking code have in common, for type checkers."""

    def commit(self) -> None:
        """Commit."""

    def rollback(self) -> None:
        """Roll back."""


class AsyncTransaction(Protocol):
    """As `Transaction`, of async code."""

    def commit(self) -> Awaitable[None]:
        """Commit."""

    def rollback(self) -> Awaitable[None]:
        """Roll back."""


def write(tx: Transaction, statement: Statement) -> int:
    """
    Run `statement` in the transaction that `tx` is in, and return how many rows it wrote. Nothing is committed.

    Raises:
        ConfigurationError: `tx` is no transaction of those that are known, or would commit the statement by itself, or
            its database has no such table.
    """
    try:
        written: int = _adapter(tx).write(tx, statement)
    except Exception as error:
        if why := missing(error, statement.table):
            raise why from error
        raise
    return written


async def awrite(tx: AsyncTransaction, statement: Statement) -> int:
    """As `write`, in async code."""
    try:
        written: int = await _adapter(tx).awrite(tx, statement)
    except Exception as error:
        if why := missing(error, statement.table):
            raise why from error
        raise
    return written


def wrong_kind(tx: Any, wanted: str) -> ConfigurationError:
    """Return the error for a `tx` that is not what was `wanted`."""
    return ConfigurationError(f"the transaction must be {wanted}, not {type(tx).__module__}.{type(tx).__qualname__}")


def autocommit(how: str) -> ConfigurationError:
    """Return the error for a connection that would commit the row alone; `how` says how to begin a transaction."""
    return ConfigurationError(
        f"no transaction is open and the connection is in autocommit: the row would be committed by itself; {how}"
    )


def _adapter(tx: Any) -> Any:
    """Return the module that knows the class of `tx`, or one that it inherits from."""
    for kind in type(tx).__mro__:
        if name := _KNOWN.get(kind.__module__.partition(".")[0]):
            return import_module(name)
    raise wrong_kind(tx, _ACCEPTED)

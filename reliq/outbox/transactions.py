"""A statement goes into a transaction that somebody else has begun and will end."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, Unpack

from reliq.errors import ConfigurationError
from reliq.outbox.tables import DEFAULT_PREFIX, OutboxRow, RowTerms, missing, publishing
from reliq.settings import Durability, milliseconds

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from reliq.message import PublishOptions
    from reliq.outbox.tables import Statement
    from reliq.publish.messages import Order, Writer
    from reliq.settings import QueueSettings


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


B = TypeVar("B")


class TransactionalPublishes(Generic[B]):
    """The publishes of a queue in transactions of a database."""

    settings: QueueSettings
    _writer: Writer

    def publish_in(
        self,
        tx: Transaction,
        body: B,
        *,
        prefix: str = DEFAULT_PREFIX,
        durability: Durability | None = None,
        **options: Unpack[PublishOptions],
    ) -> str:
        """
        Write one message to the outbox in the transaction `tx`, and return its id; a relay publishes it after the commit.

        Args:
            tx: a Session or Connection of SQLAlchemy 2, a connection of Django, a Connection of psycopg 3 or sqlite3.
            body: a value of the queue's type.
            prefix: what the names of the tables begin with; `schema.prefix` names a schema too.
            durability: who must have the message before the relay notes it as sent, None for the queue's.
            options: as `publish` has them; a `delay` counts from now on, by the database's clock.

        Raises:
            ConfigurationError: an option is not allowed, `tx` is no transaction or would commit the row by itself, or
                the table is not there.
            BodyError: the body cannot be encoded or is too large.

        Example:
            with Session(engine) as session, session.begin():
                session.add(order)
                orders.publish_in(session, Order(order.id))
        """
        row = self._row(self._writer.order(body, options, call="publish_in"), durability)
        write(tx, publishing(row, prefix))
        return row.id

    async def apublish_in(
        self,
        tx: AsyncTransaction,
        body: B,
        *,
        prefix: str = DEFAULT_PREFIX,
        durability: Durability | None = None,
        **options: Unpack[PublishOptions],
    ) -> str:
        """As `publish_in`, in async code: `tx` is an AsyncSession or AsyncConnection, of SQLAlchemy or of psycopg 3."""
        row = self._row(self._writer.order(body, options, call="apublish_in"), durability)
        await awrite(tx, publishing(row, prefix))
        return row.id

    def _row(self, order: Order, durability: Durability | None) -> OutboxRow:
        """Return the row of an order, which is checked and encoded."""
        wanted = self.settings.durability if durability is None else Durability.checked(durability)
        confirmation = (wanted.kind, wanted.count, wanted.local, milliseconds(wanted.timeout))
        terms = order.terms
        return OutboxRow(
            self._writer.keys.entry,
            order.id,
            order.value,
            RowTerms(
                ttl_ms=terms.ttl_ms,
                retries=terms.retries,
                delay_ms=terms.delay_ms,
                at_ms=terms.at_ms,
                window_ms=terms.window_ms,
                replace=terms.replace,
                durability=None if wanted.kind == "none" else confirmation,
                keyed=bool(order.line),
            ),
        )

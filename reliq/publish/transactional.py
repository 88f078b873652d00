"""Publishes in the transaction of an application: a row of the outbox, which a relay sends after the commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar, Unpack

from reliq.outbox.rows import OutboxRow, RowTerms
from reliq.outbox.statements import publishing
from reliq.outbox.tables import DEFAULT_PREFIX
from reliq.outbox.transactions import awrite, write
from reliq.settings import Durability, milliseconds

if TYPE_CHECKING:
    from reliq.outbox.transactions import AsyncTransaction, Transaction
    from reliq.outgoing import PublishOptions
    from reliq.publish.orders import Order, Writer
    from reliq.settings import QueueSettings

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

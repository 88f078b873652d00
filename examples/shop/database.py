"""The database of the shop, PostgreSQL or SQLite: orders, and the tables of reliq's outbox and inbox."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import DateTime, Engine, create_engine, event
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from reliq import outbox
from shop.settings import DATABASE

Session = sessionmaker()


class Base(DeclarativeBase):
    """The tables of the shop."""


class Order(Base):
    """An order of a customer; its state is `placed`, then `paid` or `closed`."""

    __tablename__ = "orders"

    number: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    cents: Mapped[int]
    state: Mapped[str] = mapped_column(default="placed")
    placed: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=lambda: datetime.now(UTC))


def open_database(url: str = DATABASE) -> Engine:
    """Create the missing tables, and connect `Session` with the database."""
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        # Transactions run one after another: https://docs.sqlalchemy.org/dialects/sqlite.html
        event.listen(engine, "connect", lambda connection, _record: _set_up(connection))
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    Base.metadata.create_all(engine)
    outbox.metadata().create_all(engine)
    Session.configure(bind=engine)
    return engine


def _set_up(connection: Any) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL")

"""The orders, in PostgreSQL or SQLite; beside them lie the outbox and the inbox."""

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
    """What somebody wants: `placed`, then `paid` or `closed`."""

    __tablename__ = "orders"

    number: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    cents: Mapped[int]
    state: Mapped[str] = mapped_column(default="placed")
    placed: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=lambda: datetime.now(UTC))


def open_database(url: str = DATABASE) -> Engine:
    """Make the tables that are missing, and have sessions use the database."""
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        # One writer at a time, who waits for the one before: https://docs.sqlalchemy.org/dialects/sqlite.html
        event.listen(engine, "connect", lambda connection, _record: _set_up(connection))
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    Base.metadata.create_all(engine)
    outbox.metadata().create_all(engine)
    Session.configure(bind=engine)
    return engine


def _set_up(connection: Any) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL")
